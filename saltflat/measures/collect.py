"""Collect the statistics that measures need, each once, and apply the measures."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from saltflat.balance.matrix import share_balances
from saltflat.engine.certificate import estimate_certificate_seconds
from saltflat.engine.context import Context, StatisticResult
from saltflat.engine.data import Batch
from saltflat.engine.precision import make_error_note, make_no_effect_note, supports_tf32
from saltflat.engine.progress import Forecast, StepProgress
from saltflat.engine.statistic import COMPUTED, NEARLY_FREE, STATISTICS, ParameterSite, Statistic, count_sum_bytes
from saltflat.engine.sweep import Sweep
from saltflat.errors import ModelError, NotDefinedError, SaltflatError, format_error_line
from saltflat.gradients.base import use_scratch
from saltflat.measures.apply import Evaluation, add_sampling_errors, evaluate_measure
from saltflat.measures.registry import MeasureRequest, StatisticRequest
from saltflat.measures.report_sweep import ReportSweep
from saltflat.results.jackknife import TOO_SMALL
from saltflat.results.report import Reading

_Found = TypeVar("_Found")


# Where measures take the curvature diagonal from: the sweep, or an estimate.
DIAGONALS = {
    "exact": None,
    "finite_difference": StatisticRequest("finite_difference"),
    "finite_difference_printed": StatisticRequest("finite_difference", (("kind", "printed"), ("epsilon", 1e-3))),
    "gaussian": StatisticRequest("finite_difference", (("kind", "gaussian"),)),
    "hutchinson": StatisticRequest("finite_difference", (("kind", "hutchinson"),)),
}


SMALL = 1 << 22  # measured parameters of a network whose measures are applied on the CPU
TIMED = 32  # examples: few, since they are run before it is known how much memory one takes
EFFECTIVE = 50  # examples that a mean rests on, below which its standard error is too small


class StatisticCollector:
    """Collect the statistics that measures need, and the reasons why some cannot be computed.

    Args:
        context: what is measured.
        diagonal: where the curvature diagonal comes from, if not from the sweep.
        certificate: whether there will be one, which takes copies of the model.
        brief: collect only what the measures need, without an overview or groups of examples, and apply the measures
            on the CPU if the network is small.
        precision: of the products in the shared sweep. All else is computed in full precision.
        predicted: seconds that steps will take, for the progress bar, where they are known.
    """

    def __init__(
        self,
        context: Context,
        diagonal: StatisticRequest | None,
        certificate: bool = False,
        brief: bool = False,
        precision: str = "ieee",
        predicted: Mapping[str, float] | None = None,
    ) -> None:
        self.context, self.diagonal, self.certificate, self.brief = context, diagonal, certificate, brief
        self.precision, self.predicted = precision, dict(predicted or {})
        self.found: dict[str, StatisticResult] = {}
        self.reasons: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.overview: dict[str, Any] = {}
        self.notes: list[str] = []
        self.settings: dict[str, Any] = {}
        self.forecast: Forecast | None = None  # only if progress is shown
        self.totals: Sweep | None = None

    def _parse_needs(
        self, asked: Sequence[MeasureRequest]
    ) -> tuple[list[Statistic], list[Statistic], list[StatisticRequest], set[str]]:
        """Return the sweep's statistics, those to sum, those with passes of their own, and keys that must not fail."""
        needs = {need.key: need for request in asked for need in request.needs.values()}
        strict = {need.key for request in asked if request.named for need in request.needs.values()}
        if self.diagonal is not None and "curvature_diagonal" in needs:
            del needs["curvature_diagonal"]
            needs[self.diagonal.key] = self.diagonal
            if "curvature_diagonal" in strict:
                strict.add(self.diagonal.key)
        swept = [
            STATISTICS[need.name].bind(key, dict(need.options)) if need.options else STATISTICS[need.name]
            for key, need in needs.items()
            if need.name in STATISTICS
        ]
        # Every report says whether the network sits at a minimum of the data.
        extra = ("gradient_norms",) if self.brief else ("mean_gradient", "gradient_norms")
        swept += [STATISTICS[name] for name in extra if name not in needs]
        computed = [need for need in needs.values() if need.name in COMPUTED]
        # A trace need not be summed by itself if it is the sum of a diagonal that is summed.
        has_diagonal = {"curvature_diagonal", "curvature_trace"} <= {each.name for each in swept}
        if self.brief and not self.context.plan.is_random and has_diagonal:
            return swept, [each for each in swept if each.name != "curvature_trace"], computed, strict
        return swept, swept, computed, strict

    def compute_chunk_size(self, asked: Sequence[MeasureRequest], batch: Batch) -> int:
        """Return how many examples of a batch the sweep takes at once."""
        sweep = self._make_sweep(self._parse_needs(asked)[1], {})
        return sweep.compute_chunk_size(batch, self.context.get_probe(batch))

    def _make_sweep(self, summed: Sequence[Statistic], deviations: Mapping[str, Tensor]) -> Sweep:
        kind = Sweep if self.brief else ReportSweep
        groups, precision = self.context.groups, self.precision
        return kind(self.context, summed, deviations, replicate=True, groups=groups, precision=precision)

    def gather(self, asked: Sequence[MeasureRequest]) -> None:
        """Compute everything the measures need: one shared sweep, then statistics with passes of their own."""
        self._add_given_weights()
        swept, summed, computed, strict = self._parse_needs(asked)
        self.context.warn_of_results(self._estimate_result_bytes(swept, computed, asked))
        self._make_forecast(computed)
        # The shared sweep may use what is known of the features.
        for need in computed:
            if need.name == "feature_deviation":
                self._compute_statistic(need, need.key in strict)
        deviations = self.found["feature_deviation"].value if "feature_deviation" in self.found else {}
        with self.time_step("sweep"):
            if self.precision != "ieee":
                self._compare_precisions(summed, deviations)
            totals = self.totals = self._make_sweep(summed, deviations)
            total = self.context.problem.num_examples
            own = self.context.processes.count_own(total)
            totals.run(lambda done: self.context.tick("Sweeping examples", done, own))
            values = totals.compute_values(self._select_device())
            if summed is not swept:
                diagonal = values["curvature_diagonal"]
                values["curvature_trace"] = {name: value.sum() for name, value in diagonal.items()}
            self.context.store_counts(totals.examples, totals.share, totals.loss)
            if self.forecast is not None:
                self.forecast.examples = self.context.processes.count_own(totals.examples)
        exact = not self.context.plan.is_random
        for each in swept:
            notes = (*_find_silence_notes(each, values), *_find_concentration_notes(each, values))
            drawn, without = (
                (totals.compute_replicates(each), totals.make_leave_one_out(each)) if each in summed else (None, None)
            )
            is_exact = exact or each.of == "gradient"
            self.found[each.name] = StatisticResult(values[each.name], drawn, is_exact, notes, without=without)
        if isinstance(totals, ReportSweep):
            self.overview = totals.compute_report_fields(values)
            self.notes += totals.find_sample_notes()
        for need in computed:
            if need.key not in self.found and need.key not in self.reasons:
                self._compute_statistic(need, need.key in strict)
        self._move_results()
        if self.diagonal is not None and self.diagonal.key in self.found:
            self.found["curvature_diagonal"] = _clamp_diagonal(self.found[self.diagonal.key])
        elif self.diagonal is not None and self.diagonal.key in self.reasons:
            self.reasons["curvature_diagonal"] = self.reasons[self.diagonal.key]

    def _compare_precisions(self, wanted: Sequence[Statistic], deviations: Mapping[str, Tensor]) -> None:
        """Measure the error of this precision on the first chunk of examples, or note that it has no effect."""
        measured = next(iter(self.context.problem.network.measured.values()))
        if not supports_tf32(measured):
            self.notes.append(make_no_effect_note(self.precision, measured))
            self.precision = "ieee"
            return
        batch = next(iter(self.context.problem.read_batches()))
        sweeps = {
            each: Sweep(self.context, wanted, deviations, True, precision=each) for each in ("ieee", self.precision)
        }
        for sweep in sweeps.values():
            with use_scratch():
                next(sweep.add_batch(batch))
            self.context.independence.finish()
        full, other = (sweep.compute_values() for sweep in sweeps.values())
        errors = {name: _compute_relative_error(other[name], values) for name, values in full.items()}
        self.settings = {"precision": self.precision, "precision_errors": errors}
        self.notes.append(make_error_note(self.precision, errors, sweeps["ieee"].examples))

    def _select_device(self) -> torch.device | None:
        """Return the device to apply measures on, if not that of the network."""
        measured = self.context.problem.network.measured.values()
        # A CPU is done with a formula before a GPU has been told what to do.
        return torch.device("cpu") if self.brief and sum(each.numel() for each in measured) < SMALL else None

    def _move_results(self) -> None:
        """Move everything that was found to the device that measures are applied on."""
        device = self._select_device()
        if device is None:
            return

        def move_tensors(found: _Found) -> _Found:
            moved: _Found = tree_map_only(Tensor, lambda each: each.to(device), found)
            return moved

        for key, each in self.found.items():
            self.found[key] = replace(each, value=move_tensors(each.value), replicates=move_tensors(each.replicates))

    def _estimate_result_bytes(
        self, swept: Sequence[Statistic], computed: Sequence[StatisticRequest], asked: Sequence[MeasureRequest]
    ) -> int:
        """Estimate the bytes of results, which no smaller chunk of examples would save.

        Counted in vectors of all measured parameters in float64: copies of the model in both precisions, the sums,
        means and changes of each statistic, what searches and the balancing of matrices work with.
        """
        network = self.context.problem.network
        entries = 8 * sum(value.numel() for value in network.measured.values())
        constants = sum(value.numel() * value.element_size() for value in network.constants.values())
        shapes = self.context.geometries if any(each.kind == "matrix" for each in swept) else {}
        sites = [ParameterSite(name, value, shapes.get(name)) for name, value in network.measured.items()]
        searching = any(COMPUTED[need.name].estimate_passes({}) > NEARLY_FREE for need in computed)
        balancing = any(request.measure.by_matrix for request in asked)
        copied = self.certificate or any(COMPUTED[need.name].in_float64 for need in computed)
        return (
            (2 + 2 * copied) * constants
            + (4 + 8 * searching + 8 * balancing) * entries
            + 3 * sum(count_sum_bytes(each, sites) for each in swept)
        )

    def _make_forecast(self, computed: Sequence[StatisticRequest]) -> None:
        """Time a forward pass to forecast the duration, if progress is shown."""
        tick = self.context.tick
        if not isinstance(tick, StepProgress) or not tick.is_visible:
            return
        first = [need for need in computed if need.name == "feature_deviation"]
        steps: dict[str, float | None] = {need.key: _estimate_passes(need) for need in first}
        steps |= {"sweep": None}
        steps |= {need.key: _estimate_passes(need) for need in computed}
        if self.certificate and "certificate" not in self.predicted:
            with suppress(Exception):  # what is wrong is said where the certificate is made
                self.predicted["certificate"] = estimate_certificate_seconds(self.context)
        self.forecast = tick.forecast = Forecast(steps, seconds=self.predicted)
        self.forecast.examples = self.context.processes.count_own(self.context.problem.num_examples)
        self.forecast.per_example = _time_example(self.context)

    def _add_given_weights(self) -> None:
        measured = self.context.problem.network.measured
        self.found["weight"] = StatisticResult(measured, without=lambda group: measured)
        if self.context.initial is None:
            self.reasons["initial_weight"] = "needs the parameters before training: pass initial="
        else:
            initial = self.context.initial
            self.found["initial_weight"] = StatisticResult(initial, without=lambda group: initial)

    def _compute_statistic(self, need: StatisticRequest, strict: bool) -> None:
        with self.time_step(need.key):
            try:
                with self.context.processes.join(self._is_of_progress):
                    self.found[need.key] = COMPUTED[need.name].function(self.context, **dict(need.options))
            except NotDefinedError as reason:
                self.reasons[need.key] = str(reason)
            except SaltflatError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                if self._is_of_progress(error):
                    raise
                # Models may hold operations that cannot be differentiated twice, or run out of memory in one of many
                # searches: that is no reason to lose the others.
                if strict:
                    raise ModelError(
                        f"Expected a model that allows it, but got {format_error_line(error)} while looking for "
                        f"{need.key}. Try leaving out the measures that need it (saltflat.list_measures() says "
                        "which), or lowering memory=."
                    ) from error
                self.reasons[need.key] = f"failed: {format_error_line(error)}"

    def _is_of_progress(self, error: Exception) -> bool:
        return error is getattr(self.context.tick, "error", None)

    @contextmanager
    def time_step(self, step: str) -> Iterator[None]:
        """Record the time that a step takes."""
        started = time.perf_counter()
        if self.forecast is not None:
            self.forecast.begin(step)
        try:
            yield
        finally:
            if self.forecast is not None:
                self.forecast.end()
            if not self.brief:
                self.context.heap.trim()
            self.seconds[step] = time.perf_counter() - started

    def compute_readings(self, asked: Sequence[MeasureRequest]) -> tuple[dict[str, Reading], dict[str, str]]:
        """Apply the measures; those without a value are left out, or nan if requested by name."""
        evaluations: list[Evaluation] = []
        undefined: dict[str, Reading] = {}
        left_out: dict[str, str] = {}
        # A pass may have written to the weights; measures are of the user's.
        self.context.problem.network.undo_writes()
        with self.time_step("measures"), share_balances():
            for request in asked:
                missing = [self.reasons[need.key] for need in request.needs.values() if need.key in self.reasons]
                if not missing:
                    try:
                        evaluations.append(evaluate_measure(request, self.found, self.context))
                        continue
                    except NotDefinedError as reason:
                        missing = [str(reason)]
                if request.named:
                    undefined[request.key] = Reading(request.key, torch.nan, exact=False, notes=(missing[0],))
                else:
                    left_out[request.key] = missing[0]
        with self.time_step("errors over examples"):
            readings = add_sampling_errors(evaluations, self.context) | undefined
        return {request.key: readings[request.key] for request in asked if request.key in readings}, left_out


def _compute_relative_error(values: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the length of the difference of all parameters' values relative to that of the values."""
    off, length = (
        math.hypot(*(float(each.double().norm()) for each in parts))
        for parts in ([values[name] - exact[name] for name in exact], exact.values())
    )
    return off / length if length else off


def _estimate_passes(need: StatisticRequest) -> float | None:
    try:
        return COMPUTED[need.name].estimate_passes(dict(need.options))
    except TypeError:  # an option that means nothing, as the statistic itself will say
        return None


def _time_example(context: Context) -> float | None:
    """Time a forward pass per example: the fastest of three on the first examples."""
    seconds = []
    try:
        batch = next(iter(context.problem.read_batches())).cut(0, TIMED)
        with torch.no_grad():
            for _ in range(3):
                started = time.perf_counter()
                float(context.problem.network(batch).sum())  # waits for the device
                seconds.append(time.perf_counter() - started)
    except Exception:  # whatever is wrong is said, in better words, where the numbers are made
        return None
    return min(seconds) / batch.examples


def _find_silence_notes(statistic: Statistic, values: Mapping[str, Mapping[str, Tensor]]) -> tuple[str, ...]:
    """Return notes on parameters that do not affect the loss."""
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


def _find_concentration_notes(statistic: Statistic, values: Mapping[str, Mapping[str, Tensor]]) -> tuple[str, ...]:
    """Return notes on means that a few examples dominate, whose standard errors are unreliable."""
    if statistic.kind != "example":
        return ()
    each = torch.stack(list(values[statistic.name].values())).sum(0)
    each = each.square() if statistic.degree == 1 else each
    each = each / (each.abs().max() or 1)  # squares of tiny values would be zero
    total = float(each.sum())
    if not total or total**2 / float(each.square().sum()) >= min(EFFECTIVE, 0.5 * len(each)):
        return ()
    count = -(-len(each) // 100)
    share = float(each.topk(count).values.sum()) / total
    return (f"{count} of {len(each)} examples account for {share:.0%} of this value: {TOO_SMALL}",)


def _clamp_diagonal(found: StatisticResult) -> StatisticResult:
    """Clamp negative estimates of a curvature diagonal to zero, as the authors of the measures do."""

    def clamp(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.clamp_min(0.0) for name, value in values.items()}

    negative = sum(int((value < 0).sum()) for value in found.value.values())
    count = sum(value.numel() for value in found.value.values())
    notes = (
        *found.notes,
        f"the curvature diagonal is an estimate; {negative} of {count} entries were negative and taken as 0",
    )
    replicates = None if found.replicates is None else tuple(map(clamp, found.replicates))
    return StatisticResult(clamp(found.value), replicates, exact=False, notes=notes)
