"""The statistics that measures ask for, each found once, and the measures' readings of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from saltflat.errors import ModelError, SaltflatError, first_line
from saltflat.evaluating import reading_of
from saltflat.measures.request import Need, Request
from saltflat.report import Reading
from saltflat.setting import Found, NotDefinedError, Setting
from saltflat.statistic import COMPUTED, STATISTICS, Statistic
from saltflat.totals import Totals

# Where measures take the curvature diagonal from: the sweep, or an estimate.
DIAGONALS = {
    "exact": None,
    "finite_difference": Need("finite_difference"),
    "finite_difference_printed": Need("finite_difference", (("kind", "printed"), ("epsilon", 1e-3))),
    "hutchinson": Need("finite_difference", (("kind", "hutchinson"),)),
}


class Search:
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
        computed = [need for need in needs.values() if need.name in COMPUTED]
        # The shared sweep may use what is known of the features.
        for need in computed:
            if need.name == "feature_deviation":
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
