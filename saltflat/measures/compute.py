"""From a model and data to a report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy
import scipy
import torch
from torch import Tensor, nn

from saltflat.engine.certificate import certify_context
from saltflat.engine.context import Context, Tick, describe_context, ignore_progress
from saltflat.engine.custom_losses import normalize_logits
from saltflat.engine.data import Data
from saltflat.engine.losses import Loss, LossLike, parse_loss
from saltflat.engine.output_curvature import ColumnPlan, parse_column_plan
from saltflat.engine.problem import Problem, find_input_notes, is_finite
from saltflat.engine.progress import show_steps
from saltflat.engine.read_data import move_to_device, select_examples
from saltflat.engine.session import check_module, open_session
from saltflat.engine.statistic import STATISTICS
from saltflat.engine.structure import Structure
from saltflat.errors import NonFiniteError, OptionError, format_error_line, make_unknown_name_error
from saltflat.measures.apply import list_invariances
from saltflat.measures.collect import DIAGONALS, StatisticCollector
from saltflat.measures.registry import REFERENCES, MeasureRequest, parse_measures
from saltflat.results.report import Reading, Report, describe_run
from saltflat.validation import check_flag, check_seed, is_choice, parse_bytes, parse_device, take_turns

__all__ = ["measure"]


@take_turns
def measure(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    measures: str | Sequence[str] | None = None,
    *,
    columns: str = "exact",
    layers: Sequence[str] | str | None = None,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Callable[..., None] | None = None,
    mode: str = "eval",
    logits: str = "none",
    diagonal: str = "exact",
    initial: nn.Module | Mapping[str, Tensor] | None = None,
    certificate: bool = True,
    sampling: bool = True,
    limit: int | None = None,
    device: str | torch.device | None = None,
) -> Report:
    """Measure how flat the minimum is that a trained network sits in.

    Args:
        model: any module. It is measured in eval mode and given back bit for bit as it was.
        data: a ``DataLoader``, a pair of tensors ``(inputs, targets)``, a dataset, or batches that can be read again.
        loss: ``"cross_entropy"``, ``"mse"``, ``"bce_with_logits"``, ``"model"`` for the one the model itself computes
            from labels, one of :mod:`saltflat.engine.losses`, the matching loss module of torch, or a function
            ``loss(outputs, targets)``, which is called on one example at a time.
        measures: names, with options where wanted, such as ``["kappa", "rho(axis='row')"]``; ``"quick"`` (as None),
            all that one sweep over the data gives; ``"invariant"``, all that rescaling layers leaves unchanged;
            ``"all"``; or some of these, such as ``["quick", "kappa"]``. What only a preset asks for and this model does
            not allow is left out, and the report says why. :func:`saltflat.list_measures` lists the measures and their
            cost.
        columns: ``"exact"``, ``"top"`` or ``"sampled"``: how the loss's curvature is taken; see
            :mod:`saltflat.engine.output_curvature`.
        layers: names of modules or parameters to measure; all parameters that require a gradient if None.
        memory: working memory beyond the model and the results, such as ``"512MiB"``.
        dtype: ``torch.float32`` or ``torch.float64`` to work in; the model's own if None.
        seed: of everything random.
        progress: True for a progress bar (lines of text off a terminal), False for none, None for a bar on a terminal
            only, or a function of
            ``(step, done, total)``. If that has a parameter ``seconds_left``, it is also given about how many seconds
            are left of all the steps together, or None as long as that is not known.
        mode: ``"eval"``, or ``"keep"`` to leave the modules in the modes they are in.
        logits: ``"none"``, or ``"std"`` or ``"l2"`` to bring each example's outputs to unit deviation or length before
            the loss, so that their scale plays no part.
        diagonal: where measures take the curvature diagonal from: ``"exact"``, or the estimates
            ``"finite_difference"``, ``"finite_difference_printed"``, ``"gaussian"`` and ``"hutchinson"`` of the true
            Hessian's.
        initial: the model, or its ``state_dict``, before training, for ``distance_from_init``.
        certificate: whether to measure how far the Gauss-Newton blocks are from the Hessian's.
        sampling: whether to estimate how far each number depends on the choice of the examples
            (``sampling_stderr``), by leaving out groups of them.
        limit: take at most so many examples, the first ones; all if None.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one; the model's own if None. A copy of the
            model is moved there, and batches as they are read.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> data = torch.randn(20, 2), torch.randint(3, (20,))
        >>> report = measure(net, data, measures=["normalized_sharpness", "hessian_trace"])
        >>> sorted(report), report.certificate["holds"]
        (['hessian_trace', 'normalized_sharpness'], True)
    """
    started = time.perf_counter()
    measurer = Measurer.parse(
        loss, measures, columns, layers, memory, dtype, seed, mode, logits, diagonal, certificate, sampling
    )
    asked = measurer.asked
    data = data if limit is None else select_examples(data, limit=limit)
    if device is not None:
        model, data = _move_to_device(model, data, parse_device(device))
    agreement = None
    with open_session(model, mode, data) as notes:
        hidden = progress is False or (progress is None and not sys.stderr.isatty())
        with nullcontext(ignore_progress) if hidden else show_steps(progress) as tick:
            search = measurer.collect(model, data, initial, tick)
            context = search.context
            readings, left_out = search.compute_readings(asked)
            examples, mean_loss = context.examples, context.mean_loss
            if context.first is not None:
                notes += find_input_notes(context.problem, context.first, mean_loss)
            notes += search.notes
        if certificate:
            with search.time_step("certificate"):
                agreement = compute_certificate(context)
    readings = add_certificate_notes(asked, readings, agreement)
    return Report(
        readings=readings,
        left_out=left_out,
        legend={each.key: _make_legend(each, readings[each.key]) for each in asked if each.key in readings},
        examples=examples,
        loss=mean_loss,
        settings={**describe_context(context), "logits": logits, "diagonal": diagonal},
        device=format_device(context),
        seconds_by_step=search.seconds,
        certificate=agreement,
        notes=tuple(notes),
        **describe_run(model, started, torch, numpy, scipy),
        **search.overview,
    )


@dataclass(frozen=True)
class Measurer:
    """What to measure and how, checked once: the arguments of :func:`measure` that do not depend on the model."""

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
    ) -> Measurer:
        """Check the arguments of :func:`measure`."""
        asked = parse_measures(measures)
        plan, room, seed = parse_column_plan(columns), parse_bytes(memory), check_seed(seed)
        check_flag(certificate=certificate, sampling=sampling)
        if not is_choice(diagonal, DIAGONALS):
            raise make_unknown_name_error("diagonal", diagonal, DIAGONALS)
        chosen = parse_loss(loss)
        if not isinstance(logits, str) or logits != "none":
            chosen = normalize_logits(chosen, logits)
        return cls(asked, chosen, plan, layers, room, dtype, seed, mode, diagonal, certificate, sampling)

    def collect(
        self,
        model: nn.Module,
        data: Data,
        initial: nn.Module | Mapping[str, Tensor] | None,
        tick: Tick = ignore_progress,
        structure: Structure | None = None,
        brief: bool = False,
    ) -> StatisticCollector:
        """Compute the statistics of a model that a session lends.

        Args:
            model: the model.
            data: the examples.
            initial: its weights before training, if known.
            tick: reports progress.
            structure: what is known of the model whatever its weights.
            brief: collect only what the measures need; see :class:`StatisticCollector`.
        """
        problem = Problem.build(model, data, self.loss, self.layers, self.dtype, self.mode)
        before = _parse_initial(initial, problem)
        context = Context(problem, self.plan, self.seed, self.room, before, tick, self.sampling, structure)
        search = StatisticCollector(context, DIAGONALS[self.diagonal], self.certificate, brief)
        search.gather(self.asked)
        return search


def _move_to_device(model: nn.Module, data: Data, device: torch.device) -> tuple[nn.Module, Data]:
    """Return a copy of the model on the device, or the model itself if it is there, and the data moved."""
    check_module(model)
    there = torch.empty(0, device=device).device
    if any(each.device != there for each in [*model.parameters(), *model.buffers()]):
        model = deepcopy(model).to(there)
    return model, move_to_device(data, there)


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
        found = certify_context(context)
    except RuntimeError as error:  # the same models that have no second derivatives
        return {
            "holds": None,
            "gap": torch.nan,
            "examples": 0,
            "gaps": {},
            "failed": format_error_line(error),
        }
    gaps = {name: each.gap for name, each in found.items()}
    return {"holds": found.holds, "gap": found.gap, "examples": found.examples, "gaps": gaps}


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


def _make_legend(request: MeasureRequest, reading: Reading) -> dict[str, Any]:
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
