"""Measure trained networks: the options of a study, and the measurement itself."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
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
from saltflat.measures.measurer import Measurer
from saltflat.measures.registry import parse_measures
from saltflat.results.report import Reading, Report
from saltflat.studies.grid import raise_problems
from saltflat.validation import check_seed, is_choice, parse_bytes

DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Cheap measures of every kind: curvature, norms, Fisher, relative, and minimal over rescalings.
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
# Arguments of saltflat.measure that a study sets itself.
DECIDED = (
    "model",
    "data",
    "loss",
    "measures",
    "progress",
    "mode",
    "initial",
    "limit",
    "sampling",
    "precision",
    "process_group",
)
# A certificate would double the time of every run, so it is off by default.
USUAL_OPTIONS: dict[str, Any] = {"examples": 1000, "dtype": "float64", "certificate": False}


def parse_measure_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of the measurement and fill in the defaults."""
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
            f"Expected a whole number from 1, but got examples={examples!r} of measure. Try null for all examples."
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
    """Return the measures by the names of their readings; raise one error for all problems."""
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
    """Compute a measure of a tiny network, since only then it checks the values of its options.

    A mistake that is found here costs a moment, and all training if found at the first measurement.
    """
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    data = torch.eye(2, dtype=torch.float64), torch.arange(2)
    # Other problems are reported for the study's own networks, in their rows.
    with suppress(ModelError, DataError):
        measure(
            model, data, measures=[key], certificate=False, sampling=False, initial=model.state_dict(), progress=False
        )


@dataclass(frozen=True)
class Measurement:
    """The measurement of one network.

    Attributes:
        readings: readings by measure.
        seconds: duration.
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
    """Measure a trained network on its training examples. Measures that it does not support are nan, with the reason.

    Args:
        model: network on the device of the inputs; its precision is changed to that of the options.
        inputs: training examples.
        labels: labels it was trained on.
        initial: its ``state_dict`` before training, if known.
        measures: names of the measures.
        options: result of ``parse_measure_options``.
    """
    dtype = DTYPES[options["dtype"]]
    model = model.to(dtype)
    data = (inputs.to(dtype) if inputs.is_floating_point() else inputs, labels)
    before = move_state(initial, inputs.device)
    rest = {name: value for name, value in options.items() if name not in ("examples", "dtype")}

    def run_measures(names: Sequence[str]) -> Report:
        options: dict[str, Any] = {"dtype": dtype, "initial": before, "progress": False, "sampling": False}
        return measure(model, data, measures=list(names), **options, **rest)

    readings: dict[str, Reading] = {}
    seconds, made_with = 0.0, {}
    reports, problems = _collect_reports(run_measures, measures)
    for report in reports:
        readings |= trim_readings(report)
        seconds += report.seconds
        made_with = {**report.versions, "device": report.device}
    for name, error in problems.items():
        readings[name] = Reading(name, math.nan, exact=False, notes=(format_error_line(error),))
    return Measurement({name: readings[name] for name in measures}, seconds, made_with)


def trim_readings(readings: Mapping[str, Reading]) -> dict[str, Reading]:
    """Drop values per unit and the scales of solvers, which would take megabytes in a row."""
    return {name: replace(reading, units={}, details={}) for name, reading in readings.items()}


def move_state(state: Mapping[str, Tensor] | None, device: torch.device) -> dict[str, Tensor] | None:
    """Return a ``state_dict`` on a device."""
    return None if state is None else {name: each.to(device) for name, each in state.items()}


def make_measurer(measures: Sequence[str], options: Mapping[str, Any]) -> Measurer:
    """Return what :func:`measure_network` computes of one network, for several networks of one architecture.

    Args:
        measures: names of the measures.
        options: result of ``parse_measure_options``.
    """
    rest = {name: value for name, value in options.items() if name not in ("examples", "dtype", "device")}
    dtype = DTYPES[options["dtype"]]
    return Measurer.parse("cross_entropy", list(measures), dtype=dtype, mode="eval", sampling=False, **rest)


def _collect_reports(
    run_measures: Callable[[Sequence[str]], Report], measures: Sequence[str]
) -> tuple[list[Report], dict[str, SaltflatError]]:
    """Compute all measures in one sweep or, if one of them fails, each by itself."""
    try:
        return [run_measures(measures)], {}
    except NonFiniteError:
        raise
    except ModelError as error:
        if len(measures) == 1:
            return [], {measures[0]: error}
    reports: list[Report] = []
    problems: dict[str, SaltflatError] = {}
    for name in measures:
        try:
            reports.append(run_measures([name]))
        except ModelError as error:
            problems[name] = error
    return reports, problems
