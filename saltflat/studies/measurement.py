"""What is measured of a trained network, and on what examples."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.engine.custom_losses import normalize_logits
from saltflat.engine.losses import parse_loss
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.errors import (
    DataError,
    ModelError,
    NonFiniteError,
    SaltflatError,
    StudyError,
    format_error_line,
    make_unknown_name_error,
)
from saltflat.measures.collect import DIAGONALS
from saltflat.measures.compute import measure
from saltflat.measures.registry import parse_measures
from saltflat.results.report import Reading, Report
from saltflat.studies.grid import raise_problems
from saltflat.validation import check_seed, is_choice, parse_bytes

DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Cheap ones of every kind: curvature, norms, Fisher, relative, and minimal over rescalings.
USUAL_MEASURES = (
    "hessian_trace",
    "squared_norm",
    "distance_from_init",
    "fisher_trace",
    "fisher_rao_norm",
    "normalized_sharpness",
    "minimum_sharpness",
    "kappa_trace",
    "rho",
    "relative_flatness",
)
# What of saltflat.measure a study decides itself.
DECIDED = ("model", "data", "loss", "measures", "progress", "mode", "initial", "limit", "sampling")
# A certificate would double the time of every run; a study that wants it says so.
USUAL_OPTIONS: dict[str, Any] = {"examples": 1000, "dtype": "float64", "certificate": False}


def parse_measure_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """How to measure: what is given, checked, and the usual for the rest."""
    usual = {
        **{each.name: each.default for each in inspect.signature(measure).parameters.values()},
        **USUAL_OPTIONS,
    }
    usual = {name: value for name, value in usual.items() if name not in DECIDED}
    for name in given:
        if name not in usual:
            raise make_unknown_name_error("option of measure", name, usual)
    options = {**usual, **given}
    examples = options["examples"]
    if examples is not None and (not isinstance(examples, int) or isinstance(examples, bool) or examples < 1):
        raise StudyError(
            f"Expected a whole number from 1, but got examples={examples!r} of measure. Try null takes all."
        )
    if not is_choice(options["dtype"], DTYPES):
        raise make_unknown_name_error("dtype", options["dtype"], DTYPES)
    parse_column_plan(options["columns"])
    parse_bytes(options["memory"])
    check_seed(options["seed"])
    normalize_logits(parse_loss("cross_entropy"), options["logits"])
    if not is_choice(options["diagonal"], DIAGONALS):
        raise make_unknown_name_error("diagonal", options["diagonal"], DIAGONALS)
    if not isinstance(options["certificate"], bool):
        raise StudyError(
            f"Expected true or false, but got certificate={options['certificate']!r} of measure. Try leaving it out."
        )
    return options


def parse_measure_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """The measures by the names that their readings will have; all that is wrong with them is told at once."""
    problems = []
    for text in [given] if isinstance(given, str) else given if isinstance(given, list | tuple) else ():
        try:
            for asked in parse_measures([text]):
                if "(" in asked.key:
                    _try_measure_options(asked.key)
        except SaltflatError as problem:
            problems.append(str(problem))
    raise_problems(problems, "the measures")
    return tuple(each.key for each in parse_measures(given))


@cache
def _try_measure_options(key: str) -> None:
    """Take a measure of a tiny network: only then does it look at the values of its options.

    Found out here, a mistake costs a moment; found out at the first measurement, all the training before it.
    """
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    data = torch.eye(2, dtype=torch.float64), torch.arange(2)
    # Whatever else goes wrong is said of the study's own networks, in their rows.
    with suppress(ModelError, DataError):
        measure(
            model, data, measures=[key], certificate=False, sampling=False, initial=model.state_dict(), progress=False
        )


@dataclass(frozen=True)
class Measurement:
    """What was read off one network.

    Attributes:
        readings: by measure.
        seconds: it took.
        made_with: versions and device.
    """

    readings: dict[str, Reading]
    seconds: float
    made_with: dict[str, str]


def measure_network(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    initial: Mapping[str, Tensor] | None,
    measures: Sequence[str],
    options: Mapping[str, Any],
) -> Measurement:
    """Measure a trained network on its own training examples. What the network does not allow is nan, with the reason.

    Args:
        model: on the device of the inputs; its precision is changed to that of the options.
        inputs: training examples.
        labels: that it was trained on.
        initial: its ``state_dict`` before training, where that is known.
        measures: by name.
        options: as ``parse_measure_options`` gives them.
    """
    dtype = DTYPES[options["dtype"]]
    model = model.to(dtype)
    data = (inputs.to(dtype) if inputs.is_floating_point() else inputs, labels)
    before = None if initial is None else {name: each.to(inputs.device) for name, each in initial.items()}
    rest = {name: value for name, value in options.items() if name not in ("examples", "dtype")}

    def run_measures(names: Sequence[str]) -> Report:
        options: dict[str, Any] = {"dtype": dtype, "initial": before, "progress": False, "sampling": False}
        return measure(model, data, measures=list(names), **options, **rest)

    readings: dict[str, Reading] = {}
    seconds, made_with = 0.0, {}
    reports, problems = _collect_reports(run_measures, measures)
    for report in reports:
        # Numbers per unit, and the scales that solvers found, would make megabytes of a row.
        readings |= {name: replace(reading, units={}, details={}) for name, reading in report.items()}
        seconds += report.seconds
        made_with = {**report.versions, "device": report.device}
    for name, error in problems.items():
        readings[name] = Reading(name, math.nan, exact=False, notes=(format_error_line(error),))
    return Measurement({name: readings[name] for name in measures}, seconds, made_with)


def _collect_reports(taken: Any, measures: Sequence[str]) -> tuple[list[Report], dict[str, SaltflatError]]:
    """All in one sweep; where one of them cannot be taken, each by itself."""
    try:
        return [taken(measures)], {}
    except NonFiniteError:
        raise
    except ModelError as error:
        if len(measures) == 1:
            return [], {measures[0]: error}
    reports: list[Report] = []
    problems: dict[str, SaltflatError] = {}
    for name in measures:
        try:
            reports.append(taken([name]))
        except ModelError as error:
            problems[name] = error
    return reports, problems
