"""The statistics that measures ask for, each found once, and the measures' readings of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from saltflat.data import Batch
from saltflat.errors import ModelError, SaltflatError, first_line
from saltflat.evaluating import Evaluation, evaluate, with_sampling_errors
from saltflat.losses import CrossEntropy
from saltflat.measures.request import Need, Request
from saltflat.progress import Forecast, Steps
from saltflat.report import Reading
from saltflat.sampling import TOO_SMALL, Fingerprint
from saltflat.setting import Found, NotDefinedError, Setting
from saltflat.statistic import COMPUTED, NEARLY_FREE, STATISTICS, Site, Statistic
from saltflat.totals import Totals, size_of
from saltflat.whole import hits

# Where measures take the curvature diagonal from: the sweep, or an estimate.
DIAGONALS = {
    "exact": None,
    "finite_difference": Need("finite_difference"),
    "finite_difference_printed": Need("finite_difference", (("kind", "printed"), ("epsilon", 1e-3))),
    "hutchinson": Need("finite_difference", (("kind", "hutchinson"),)),
}


TIMED = 32  # examples: few, since they are run before it is known how much memory one takes
EFFECTIVE = 50  # examples that a mean rests on, below which its standard error is too small


class Overview(Totals):
    """A sweep that also notes what every report says of the network and its data."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fingerprint = Fingerprint()
        self.right: int | None = 0
        self.counted = 0
        self.labels: set[int] = set()
        self.classes = 0

    def _saw(self, batch: Batch, outputs: Tensor, targets: Tensor) -> None:
        self.fingerprint.add(batch)
        try:
            met, kept = hits(self.setting, outputs, targets)
        except NotDefinedError:
            self.right = None
        else:
            self.right = (self.right or 0) + int((met & kept).sum())
            self.counted += int(kept.sum())
            loss = self.problem.loss
            if isinstance(loss, CrossEntropy) and not targets.is_floating_point():
                self.classes = outputs.shape[loss.class_axis(outputs, targets)]
                self.labels.update(targets[kept].unique().tolist())

    def facts(self, values: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
        """Accuracy, gradient and sample, as a report has them."""
        squared = sum(float(each.square().sum()) for each in values["mean_gradient"].values())
        single = sum(float(each.mean()) for each in values["gradient_norms"].values())
        return {
            "accuracy": self.right / self.counted if self.right is not None and self.counted else None,
            "gradient_norm": squared**0.5,
            "gradient_agreement": squared / single if single else None,
            "sample": self._sample(),
        }

    def notes(self) -> list[str]:
        """What makes the examples no sample of what the network was trained on."""
        if self.examples < 2 * self.classes or 2 * len(self.labels) >= self.classes:
            return []
        return [
            f"Only {len(self.labels)} of the {self.classes} classes are among these {self.examples} examples: they are "
            "no random sample, and standard errors over examples do not cover that. Shuffle the data once before "
            "taking its first examples."
        ]

    def _sample(self) -> dict[str, Any]:
        found = {"fingerprint": str(self.fingerprint), "groups": list(self.setting.sizes)}
        # Groups are drawn for so many examples; data that does not say how many it has is split in another way.
        return {**found, "split": self.groups.examples} if self.groups else found


class Search:
    """The statistics found so far, and why others could not be.

    Args:
        setting: what is measured.
        diagonal: where the curvature diagonal comes from, if not from the sweep.
        certificate: whether there will be one, which takes copies of the model.
    """

    def __init__(self, setting: Setting, diagonal: Need | None, certificate: bool = False) -> None:
        self.setting, self.diagonal, self.certificate = setting, diagonal, certificate
        self.found: dict[str, Found] = {}
        self.reasons: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.overview: dict[str, Any] = {}
        self.notes: list[str] = []
        self.forecast = Forecast({})

    def gather(self, asked: Sequence[Request]) -> None:
        """Everything that the measures ask for: one shared sweep, then what has passes of its own."""
        needs = {need.key: need for request in asked for need in request.needs.values()}
        strict = {need.key for request in asked if request.named for need in request.needs.values()}
        if self.diagonal is not None and "curvature_diagonal" in needs:
            del needs["curvature_diagonal"]
            needs[self.diagonal.key] = self.diagonal
            if "curvature_diagonal" in strict:
                strict.add(self.diagonal.key)
        self._given()
        swept = [
            STATISTICS[need.name].bound(key, dict(need.options))
            for key, need in needs.items()
            if need.name in STATISTICS
        ]
        # Every report says whether the network sits at a minimum of the data.
        swept += [STATISTICS[name] for name in ("mean_gradient", "gradient_norms") if name not in needs]
        computed = [need for need in needs.values() if need.name in COMPUTED]
        self.setting.expect_results(self._results(swept, computed, asked))
        self._foresee(computed)
        # The shared sweep may use what is known of the features.
        for need in computed:
            if need.name == "feature_deviation":
                self._compute(need, need.key in strict)
        deviations = self.found["feature_deviation"].value if "feature_deviation" in self.found else {}
        with self.timed("sweep"):
            totals = Overview(self.setting, swept, deviations, replicate=True, groups=self.setting.groups)
            total = self.setting.problem.expected
            totals.sweep(lambda done: self.setting.tick("Sweeping examples", done, total))
            values = totals.values()
            self.setting.count(totals.examples, totals.share, totals.loss)
            self.forecast.examples = totals.examples
        exact = not self.setting.plan.random
        for each in swept:
            drawn, notes = totals.replicates(each), (*_nothing(each, values), *_uneven(each, values))
            is_exact, without = exact or each.of == "gradient", totals.without(each)
            self.found[each.name] = Found(values[each.name], drawn, is_exact, notes, without=without)
        self.overview = totals.facts(values)
        self.notes = totals.notes()
        for need in computed:
            if need.key not in self.found and need.key not in self.reasons:
                self._compute(need, need.key in strict)
        if self.diagonal is not None and self.diagonal.key in self.found:
            self.found["curvature_diagonal"] = _clamped(self.found[self.diagonal.key])
        elif self.diagonal is not None and self.diagonal.key in self.reasons:
            self.reasons["curvature_diagonal"] = self.reasons[self.diagonal.key]

    def _results(self, swept: Sequence[Statistic], computed: Sequence[Need], asked: Sequence[Request]) -> int:
        """About how many bytes are held that no smaller chunk of examples would save.

        Counted in vectors of all measured parameters in float64: copies of the model in both precisions, the sums,
        means and changes of each statistic, what searches and the balancing of matrices work with.
        """
        network = self.setting.problem.network
        entries = 8 * sum(value.numel() for value in network.measured.values())
        constants = sum(value.numel() * value.element_size() for value in network.constants.values())
        sites = [Site(name, value) for name, value in network.measured.items()]
        searching = any(COMPUTED[need.name].passes_with({}) > NEARLY_FREE for need in computed)
        balancing = any(request.measure.by_matrix for request in asked)
        return (
            (2 + 2 * self.certificate) * constants
            + (4 + 8 * searching + 8 * balancing) * entries
            + 3 * sum(size_of(each, sites) for each in swept)
        )

    def _foresee(self, computed: Sequence[Need]) -> None:
        """Time a forward pass, where somebody waits for the result, to say how long everything will take."""
        tick = self.setting.tick
        if not isinstance(tick, Steps) or not tick.shown:
            return
        first = [need for need in computed if need.name == "feature_deviation"]
        steps: dict[str, float | None] = {need.key: _passes(need) for need in first}
        steps |= {"sweep": None}
        steps |= {need.key: _passes(need) for need in computed}
        self.forecast = tick.forecast = Forecast(steps)
        self.forecast.examples = self.setting.problem.expected
        self.forecast.per_example = _seconds_per_example(self.setting)

    def _given(self) -> None:
        measured = self.setting.problem.network.measured
        self.found["weight"] = Found(measured, without=lambda group: measured)
        if self.setting.initial is None:
            self.reasons["initial_weight"] = "needs the parameters before training: pass initial="
        else:
            initial = self.setting.initial
            self.found["initial_weight"] = Found(initial, without=lambda group: initial)

    def _compute(self, need: Need, strict: bool) -> None:
        with self.timed(need.key):
            try:
                self.found[need.key] = COMPUTED[need.name].function(self.setting, **dict(need.options))
            except NotDefinedError as reason:
                self.reasons[need.key] = str(reason)
            except SaltflatError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                if error is getattr(self.setting.tick, "error", None):
                    raise
                # Models may hold operations that cannot be differentiated twice, or run out of memory in one of many
                # searches: that is no reason to lose the others.
                if strict:
                    raise ModelError(
                        f"Got {first_line(error)} while looking for {need.key}. Want a model that allows it. "
                        "Do: leave out the measures that need it (saltflat.catalogue() says which), or lower memory=."
                    ) from error
                self.reasons[need.key] = f"failed: {first_line(error)}"

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        self.forecast.begin(step)
        try:
            yield
        finally:
            self.forecast.end()
            self.setting.heap.trim()
            self.seconds[step] = time.perf_counter() - started

    def readings(self, asked: Sequence[Request]) -> tuple[dict[str, Reading], dict[str, str]]:
        """What the measures say; what has no value is left out, or nan if it was asked for by name."""
        evaluations: list[Evaluation] = []
        undefined: dict[str, Reading] = {}
        left_out: dict[str, str] = {}
        # A pass may have written to the weights; measures are of the user's.
        self.setting.problem.network.undo_writes()
        with self.timed("measures"):
            for request in asked:
                missing = [self.reasons[need.key] for need in request.needs.values() if need.key in self.reasons]
                if not missing:
                    try:
                        evaluations.append(evaluate(request, self.found, self.setting))
                        continue
                    except NotDefinedError as reason:
                        missing = [str(reason)]
                if request.named:
                    undefined[request.key] = Reading(request.key, torch.nan, exact=False, notes=(missing[0],))
                else:
                    left_out[request.key] = missing[0]
        with self.timed("errors over examples"):
            readings = with_sampling_errors(evaluations, self.setting) | undefined
        return {request.key: readings[request.key] for request in asked if request.key in readings}, left_out


def _passes(need: Need) -> float | None:
    try:
        return COMPUTED[need.name].passes_with(dict(need.options))
    except TypeError:  # an option that means nothing, as the statistic itself will say
        return None


def _seconds_per_example(setting: Setting) -> float | None:
    """How long a forward pass takes, by the quickest of three on the first examples."""
    seconds = []
    try:
        batch = next(iter(setting.problem.batches())).cut(0, TIMED)
        with torch.no_grad():
            for _ in range(3):
                started = time.perf_counter()
                float(setting.problem.network(batch).sum())  # waits for the device
                seconds.append(time.perf_counter() - started)
    except Exception:  # whatever is wrong is said, in better words, where the numbers are made
        return None
    return min(seconds) / batch.examples


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


def _uneven(statistic: Statistic, values: Mapping[str, Mapping[str, Tensor]]) -> tuple[str, ...]:
    """What to say where a few examples have nearly all of a mean: its standard error cannot be told from so few."""
    if statistic.kind != "example":
        return ()
    each = torch.stack(list(values[statistic.name].values())).sum(0)
    each = each.square() if statistic.degree == 1 else each
    total = float(each.sum())
    if not total or total**2 / float(each.square().sum()) >= min(EFFECTIVE, 0.5 * len(each)):
        return ()
    count = -(-len(each) // 100)
    share = float(each.topk(count).values.sum()) / total
    return (f"{count} of {len(each)} examples account for {share:.0%} of this value: {TOO_SMALL}",)


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
