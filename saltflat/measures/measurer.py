"""The measurer: what to measure and how, checked once, and what every report says about its readings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.engine.certificate import TOLERANCE, compute_gaps
from saltflat.engine.context import Context, Tick, ignore_progress
from saltflat.engine.custom_losses import normalize_logits
from saltflat.engine.data import Data
from saltflat.engine.losses import Loss, LossLike, parse_loss
from saltflat.engine.output_curvature import ColumnPlan, parse_column_plan
from saltflat.engine.precision import parse_precision
from saltflat.engine.problem import Problem, is_finite
from saltflat.engine.processes import SINGLE_PROCESS, Processes
from saltflat.engine.statistic import STATISTICS
from saltflat.engine.structure import Structure
from saltflat.errors import (
    EmptyDataError,
    NonFiniteError,
    NotDefinedError,
    OptionError,
    format_error_line,
    make_unknown_name_error,
)
from saltflat.measures.apply import list_invariances
from saltflat.measures.collect import DIAGONALS, StatisticCollector
from saltflat.measures.registry import REFERENCES, MeasureRequest, parse_measures
from saltflat.results.report import Reading
from saltflat.validation import check_flag, check_seed, is_choice, parse_bytes


@dataclass(frozen=True)
class Measurer:
    """What to measure and how, checked once: the arguments of a measurement that do not depend on the model."""

    asked: list[MeasureRequest]
    loss: Loss
    plan: ColumnPlan
    layers: Sequence[str] | str | None
    room: int
    dtype: torch.dtype | None
    seed: int
    mode: str
    diagonal: str
    certificate: bool
    sampling: bool
    precision: str = "ieee"

    @classmethod
    def parse(
        cls,
        loss: LossLike,
        measures: str | Sequence[str] | None,
        columns: str,
        layers: Sequence[str] | str | None,
        memory: str | int,
        dtype: torch.dtype | None,
        seed: int,
        mode: str,
        logits: str,
        diagonal: str,
        certificate: bool,
        sampling: bool,
        precision: str = "ieee",
    ) -> Measurer:
        """Check the arguments of :func:`saltflat.measure`."""
        asked = parse_measures(measures)
        plan, room, seed = parse_column_plan(columns), parse_bytes(memory), check_seed(seed)
        check_flag(certificate=certificate, sampling=sampling)
        if not is_choice(diagonal, DIAGONALS):
            raise make_unknown_name_error("diagonal", diagonal, DIAGONALS)
        chosen, how = parse_normalized_loss(loss, logits), parse_precision(precision)
        return cls(asked, chosen, plan, layers, room, dtype, seed, mode, diagonal, certificate, sampling, how)

    @property
    def needs_certificate(self) -> bool:
        """Return whether a certificate was asked for and some measure depends on it."""
        return self.certificate and any(map(is_gauss_newton, self.asked))

    def collect(
        self,
        model: nn.Module,
        data: Data,
        initial: nn.Module | Mapping[str, Tensor] | None,
        tick: Tick = ignore_progress,
        structure: Structure | None = None,
        brief: bool = False,
        predicted: Mapping[str, float] | None = None,
        processes: Processes = SINGLE_PROCESS,
    ) -> StatisticCollector:
        """Compute the statistics of a model that a session lends.

        Args:
            model: the model.
            data: the examples.
            initial: its weights before training, if known.
            tick: reports progress.
            structure: what is known of the model whatever its weights.
            brief: collect only what the measures need; see :class:`StatisticCollector`.
            predicted: seconds that steps will take, for the progress bar, where they are known.
            processes: that share the measurement.
        """
        problem = Problem.build(model, data, self.loss, self.layers, self.dtype, self.mode)
        context = self.make_context(problem, initial, tick, structure, processes)
        settings = {
            "measures": [each.key for each in self.asked],
            "diagonal": self.diagonal,
            "certificate": self.certificate,
            "sampling": self.sampling,
            "precision": self.precision,
        }
        context.check_same_inputs(settings)
        search = StatisticCollector(
            context, DIAGONALS[self.diagonal], self.needs_certificate, brief, self.precision, predicted
        )
        search.gather(self.asked)
        return search

    def make_context(
        self,
        problem: Problem,
        initial: nn.Module | Mapping[str, Tensor] | None,
        tick: Tick = ignore_progress,
        structure: Structure | None = None,
        processes: Processes = SINGLE_PROCESS,
    ) -> Context:
        """Return the context of a measurement of a problem."""
        before = _parse_initial(initial, problem)
        return Context(problem, self.plan, self.seed, self.room, before, tick, self.sampling, structure, processes)


def parse_normalized_loss(loss: LossLike, logits: str) -> Loss:
    """Return the loss of outputs that are normalized in this way."""
    chosen = parse_loss(loss)
    return chosen if isinstance(logits, str) and logits == "none" else normalize_logits(chosen, logits)


def _parse_initial(given: nn.Module | Mapping[str, Tensor] | None, problem: Problem) -> dict[str, Tensor] | None:
    if given is None:
        return None
    values = given.state_dict() if isinstance(given, nn.Module) else given
    if not isinstance(values, Mapping):
        raise OptionError(
            f"Expected a model or its state_dict, but got initial of type {type(given).__name__}. Try keeping a "
            "copy.deepcopy(model) from before training."
        )
    found = {}
    for name, value in problem.network.measured.items():
        if name not in values or not isinstance(values[name], Tensor) or values[name].is_meta:
            raise OptionError(
                f"Expected one for every measured parameter, but got initial weights without a tensor for {name!r}. "
                "Try passing the state_dict of the same architecture."
            )
        if not is_finite(values[name]):
            raise NonFiniteError(
                f"Expected finite weights, but got NaN or infinity in the initial {name!r}. Try passing those before "
                "training."
            )
        if values[name].shape != value.shape:
            raise OptionError(
                f"Expected {tuple(value.shape)}, but got initial weights of shape {tuple(values[name].shape)} for "
                f"{name!r}. Try passing the weights of the same architecture."
            )
        found[name] = values[name].detach()
    return found


def compute_certificate(context: Context) -> dict[str, Any]:
    """Return the certificate as a report has it."""
    try:
        gaps, examples = compute_gaps(context)
    # No second derivatives, no float64, or no target among the first that counts.
    except (RuntimeError, NotDefinedError, EmptyDataError) as error:
        return {
            "holds": None,
            "gap": torch.nan,
            "examples": 0,
            "gaps": {},
            "failed": str(error) if isinstance(error, NotDefinedError) else format_error_line(error),
        }
    largest = max(gaps.values())
    return {"holds": largest <= TOLERANCE, "gap": largest, "examples": examples, "gaps": gaps}


def add_certificate_notes(
    asked: Sequence[MeasureRequest], readings: dict[str, Reading], agreement: Mapping[str, Any] | None
) -> dict[str, Reading]:
    """Mark the readings whose Gauss-Newton blocks are not known to equal the Hessian's."""
    if agreement is None or agreement["holds"]:
        return readings
    return {each.key: _add_certificate_note(each, readings[each.key]) for each in asked if each.key in readings}


def _add_certificate_note(request: MeasureRequest, reading: Reading) -> Reading:
    """Mark a reading whose Gauss-Newton blocks are not known to equal the Hessian's."""
    if not is_gauss_newton(request):
        return reading
    note = "by the Gauss-Newton matrix, which the certificate does not find to be the Hessian here"
    return replace(reading, exact=False, notes=(*reading.notes, note))


def is_gauss_newton(request: MeasureRequest) -> bool:
    """Return whether a measure takes curvature from the Gauss-Newton matrix."""
    made_of = [need.name for need in request.needs.values()]
    return any(
        name == "top_eigenvalue" or (name in STATISTICS and STATISTICS[name].of == "curvature") for name in made_of
    )


def make_legend(request: MeasureRequest, reading: Reading) -> dict[str, Any]:
    of = request.measure
    return {
        "meaning": of.meaning,
        "formula": of.formula,
        "invariant_to": list(list_invariances(of, reading)),
        "reference": REFERENCES[of.reference],
        "smaller": of.smaller,
        "logarithmic": of.logarithmic,
    }


def format_device(context: Context) -> str:
    """Return the device of the model, with the name of a GPU."""
    device = next(iter(context.problem.network.measured.values())).device
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
