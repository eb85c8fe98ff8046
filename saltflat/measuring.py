"""From a model and data to a report: gather the statistics that the measures ask for, once each, and evaluate them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import numpy
import scipy
import torch
from torch import Tensor, nn

from saltflat.certificate import certify
from saltflat.columns import plan_from
from saltflat.errors import OptionError, SaltflatError, unknown
from saltflat.evaluating import reading_of
from saltflat.loan import loan
from saltflat.losses import loss_from, normalized
from saltflat.measures.references import REFERENCES
from saltflat.measures.request import Need, Request, requests
from saltflat.problem import Problem
from saltflat.progress import steps_shown
from saltflat.report import Reading, Report
from saltflat.setting import Found, NotDefinedError, Setting
from saltflat.statistic import COMPUTED, STATISTICS, Statistic
from saltflat.sweep import Totals, bytes_from, check_seed, described

__all__ = ["measure"]

DIAGONALS = {
    "exact": None,
    "finite_difference": Need("finite_difference"),
    "finite_difference_printed": Need("finite_difference", (("kind", "printed"), ("epsilon", 1e-3))),
    "hutchinson": Need("finite_difference", (("kind", "hutchinson"),)),
}


def measure(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    measures: str | Sequence[str] | None = None,
    *,
    columns: str = "exact",
    layers: Sequence[str] | str | None = None,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Callable[[str, int, int | None], None] | None = None,
    mode: str = "eval",
    logits: str = "none",
    diagonal: str = "exact",
    initial: nn.Module | Mapping[str, Tensor] | None = None,
    certificate: bool = True,
) -> Report:
    """How flat the minimum is that a trained network sits in, by every measure asked for.

    Args:
        model: any module. It is measured in eval mode and given back bit for bit as it was.
        data: a ``DataLoader``, a pair of tensors ``(inputs, targets)``, a dataset, or batches that can be read again.
        loss: ``"cross_entropy"``, ``"mse"``, ``"bce_with_logits"``, one of :mod:`saltflat.losses`, the matching loss
            module of torch, or a function ``loss(outputs, targets)``, which is called on one example at a time.
        measures: names, with options where wanted, such as ``["kappa", "rho(axis='row')"]``; if None, all that this
            model allows, and the report says which were left out and why. :func:`saltflat.catalogue` lists them.
        columns: ``"exact"``, ``"top"`` or ``"sampled"``: how the loss's curvature is taken; see
            :mod:`saltflat.columns`.
        layers: names of modules or parameters to measure; all parameters that require a gradient if None.
        memory: working memory beyond the model and the results, such as ``"512MiB"``.
        dtype: ``torch.float32`` or ``torch.float64`` to work in; the model's own if None.
        seed: of everything random.
        progress: True or False for a progress bar (shown on a terminal if None), or a function of
            ``(step, done, total)``.
        mode: ``"eval"``, or ``"keep"`` to leave the modules in the modes they are in.
        logits: ``"none"``, or ``"std"`` or ``"l2"`` to bring each example's outputs to unit deviation or length before
            the loss, so that their scale plays no part.
        diagonal: where measures take the curvature diagonal from: ``"exact"``, or the estimates
            ``"finite_difference"``, ``"finite_difference_printed"`` and ``"hutchinson"`` of the true Hessian's.
        initial: the model, or its ``state_dict``, before training, for ``distance_from_init``.
        certificate: whether to measure how far the Gauss-Newton blocks are from the Hessian's.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> data = torch.randn(20, 2), torch.randint(3, (20,))
        >>> report = measure(net, data, measures=["normalized_sharpness", "hessian_trace"])
        >>> sorted(report), report.certificate["holds"]
        (['hessian_trace', 'normalized_sharpness'], True)
    """
    started = time.perf_counter()
    asked = requests(measures)
    plan, limit, seed = plan_from(columns), bytes_from(memory), check_seed(seed)
    if diagonal not in DIAGONALS:
        raise unknown("diagonal", diagonal, DIAGONALS)
    chosen = normalized(loss_from(loss), logits)
    with loan(model, mode, data) as notes, steps_shown(progress) as tick:
        problem = Problem.of(model, data, chosen, layers, dtype, mode)
        setting = Setting(problem, plan, seed, limit, _initial(initial, problem), tick)
        search = _Search(setting, DIAGONALS[diagonal])
        search.gather(asked, strict=measures is not None)
        readings, left_out = search.readings(asked, explicit=measures is not None)
    agreement = None
    if certificate:
        with search.timed("certificate"):
            agreement = _certified(model, data, chosen, layers, seed, mode, readings)
    examples, mean_loss = search.counted()
    return Report(
        readings=readings,
        left_out=left_out,
        legend={key: _legend(request) for key, request in ((each.key, each) for each in asked) if key in readings},
        model=f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        examples=examples,
        loss=mean_loss,
        settings={**described(setting, loss), "logits": logits, "diagonal": diagonal},
        versions={
            "saltflat": version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "scipy": scipy.__version__,
            "python": platform.python_version(),
        },
        device=_device(setting),
        seconds=time.perf_counter() - started,
        seconds_by_step=search.seconds,
        certificate=agreement,
        notes=tuple(notes),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def version() -> str:
    import saltflat  # at call time: this module is part of it

    return saltflat.__version__


class _Search:
    """The statistics found so far, and why others could not be."""

    def __init__(self, setting: Setting, diagonal: Need | None) -> None:
        self.setting, self.diagonal = setting, diagonal
        self.found: dict[str, Found] = {}
        self.reasons: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def gather(self, asked: Sequence[Request], strict: bool) -> None:
        """Everything that the measures ask for: one shared sweep, then what has passes of its own."""
        needs = {need.key: need for request in asked for need in request.needs.values()}
        if self.diagonal is not None and "curvature_diagonal" in needs:
            del needs["curvature_diagonal"]
            needs[self.diagonal.key] = self.diagonal
        self._given()
        swept = [
            STATISTICS[need.name].bound(key, dict(need.options))
            for key, need in needs.items()
            if need.name in STATISTICS
        ]
        # The shared sweep may use what is known of the features.
        computed = sorted(
            (need for need in needs.values() if need.name in COMPUTED),
            key=lambda need: need.name != "feature_deviation",
        )
        for need in computed[:1] if computed and computed[0].name == "feature_deviation" else []:
            self._compute(need, strict)
        deviations = self.found["feature_deviation"].value if "feature_deviation" in self.found else {}
        if swept:
            with self.timed("sweep"):
                totals = Totals(self.setting, swept, deviations, replicate=True)
                total = self.setting.problem.expected
                totals.sweep(lambda done: self.setting.tick("Sweeping examples", done, total))
                values = totals.values()
                self.setting.count(totals.examples, totals.share, totals.loss)
            exact = not self.setting.plan.random
            for each in swept:
                drawn, notes = totals.replicates(each), _nothing(each, values)
                self.found[each.name] = Found(values[each.name], drawn, exact or each.of == "gradient", notes)
        for need in computed:
            if need.key not in self.found and need.key not in self.reasons:
                self._compute(need, strict)
        if self.diagonal is not None and self.diagonal.key in self.found:
            self.found["curvature_diagonal"] = _clamped(self.found[self.diagonal.key])
        elif self.diagonal is not None and self.diagonal.key in self.reasons:
            self.reasons["curvature_diagonal"] = self.reasons[self.diagonal.key]

    def _given(self) -> None:
        measured = self.setting.problem.network.measured
        self.found["weight"] = Found(measured)
        if self.setting.initial is None:
            self.reasons["initial_weight"] = "needs the parameters before training: pass initial="
        else:
            self.found["initial_weight"] = Found(self.setting.initial)

    def _compute(self, need: Need, strict: bool) -> None:
        with self.timed(need.key):
            try:
                self.found[need.key] = COMPUTED[need.name].function(self.setting, **dict(need.options))
            except NotDefinedError as reason:
                self.reasons[need.key] = str(reason)
            except SaltflatError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                # Models may hold operations that cannot be differentiated twice, or run out of memory in one of many
                # searches: that is no reason to lose the others.
                if strict:
                    raise
                self.reasons[need.key] = f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0]}"

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[step] = time.perf_counter() - started

    def readings(self, asked: Sequence[Request], explicit: bool) -> tuple[dict[str, Reading], dict[str, str]]:
        """What the measures say; what has no value is left out, or nan if it was asked for by name."""
        readings: dict[str, Reading] = {}
        left_out: dict[str, str] = {}
        with self.timed("measures"):
            for request in asked:
                missing = [self.reasons[need.key] for need in request.needs.values() if need.key in self.reasons]
                if not missing:
                    try:
                        readings[request.key] = reading_of(request, self.found, self.setting)
                        continue
                    except NotDefinedError as reason:
                        missing = [str(reason)]
                if explicit:
                    readings[request.key] = Reading(request.key, torch.nan, exact=False, notes=(missing[0],))
                else:
                    left_out[request.key] = missing[0]
        return readings, left_out

    def counted(self) -> tuple[int, float]:
        """Number of examples and mean loss."""
        return self.setting.examples, self.setting.mean_loss


def _nothing(statistic: Statistic, values: Mapping[str, Mapping[str, Tensor]]) -> tuple[str, ...]:
    """What to say of parameters that the loss does not see."""
    of = values[statistic.name]
    silent = [name for name, value in of.items() if not bool(value.any())]
    if not silent:
        return ()
    which = "all parameters" if len(silent) == len(of) else ", ".join(silent[:4])
    which += f" and {len(silent) - 4} more" if 4 < len(silent) < len(of) else ""
    what = "curvature" if statistic.of == "curvature" else "gradients"
    return (
        f"no {what} at all in {which}: nothing there reaches the loss, or every example is fitted to rounding "
        "(then dtype=torch.float64 may tell more)",
    )


def _clamped(found: Found) -> Found:
    """Estimates of a curvature diagonal with negative ones taken as zero, as the measures' authors do."""

    def clamp(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.clamp_min(0.0) for name, value in values.items()}

    negative = sum(int((value < 0).sum()) for value in found.value.values())
    count = sum(value.numel() for value in found.value.values())
    notes = (
        *found.notes,
        f"the curvature diagonal is an estimate; {negative} of {count} entries were negative and taken as 0",
    )
    replicates = None if found.replicates is None else tuple(map(clamp, found.replicates))
    return Found(clamp(found.value), replicates, exact=False, notes=notes)


def _initial(given: nn.Module | Mapping[str, Tensor] | None, problem: Problem) -> dict[str, Tensor] | None:
    if given is None:
        return None
    values = given.state_dict() if isinstance(given, nn.Module) else given
    if not isinstance(values, Mapping):
        raise OptionError(
            f"Got initial of type {type(given).__name__}. Want a model or its state_dict. "
            "Do: keep a copy.deepcopy(model) from before training."
        )
    found = {}
    for name, value in problem.network.measured.items():
        if name not in values:
            raise unknown("parameter of the initial weights", name, values)
        if values[name].shape != value.shape:
            raise OptionError(
                f"Got initial weights of shape {tuple(values[name].shape)} for {name!r}. "
                f"Want {tuple(value.shape)}. Do: pass the weights of the same architecture."
            )
        found[name] = values[name].detach()
    return found


def _certified(
    model: nn.Module, data: Any, loss: Any, layers: Any, seed: int, mode: str, readings: dict[str, Reading]
) -> dict[str, Any] | None:
    try:
        found = certify(model, data, loss, layers, seed=seed, mode=mode)
    except RuntimeError as error:  # the same models that have no second derivatives
        return {
            "holds": None,
            "gap": torch.nan,
            "examples": 0,
            "gaps": {},
            "failed": str(error).strip().splitlines()[0],
        }
    gaps = {name: each.gap for name, each in found.items()}
    return {"holds": found.holds, "gap": found.gap, "examples": found.examples, "gaps": gaps}


def _legend(request: Request) -> dict[str, Any]:
    of = request.measure
    return {
        "meaning": of.meaning,
        "formula": of.formula,
        "invariant_to": list(of.invariant_to),
        "reference": REFERENCES[of.reference],
        "smaller": of.smaller,
    }


def _device(setting: Setting) -> str:
    device = next(iter(setting.problem.network.measured.values())).device
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
