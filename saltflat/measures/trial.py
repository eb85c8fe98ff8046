"""A trial: a measurement of a few examples, from whose time and memory those of all examples are predicted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from saltflat.engine.certificate import estimate_certificate_seconds
from saltflat.engine.context import Context, Tick
from saltflat.engine.data import Batch, read_batches
from saltflat.engine.example_groups import ExampleGroups, count_batch_bytes
from saltflat.engine.full_loss import compute_gradient_at
from saltflat.engine.memory_watch import MemoryWatch
from saltflat.engine.problem import Problem
from saltflat.engine.statistic import COMPUTED
from saltflat.errors import EmptyDataError, NotDefinedError
from saltflat.measures.apply import is_axis_dependent
from saltflat.measures.collect import DIAGONALS, StatisticCollector
from saltflat.measures.measurer import Measurer
from saltflat.statistics.averages import compute_input_deviations
from saltflat.symmetry.axes import rescalings

TIMED_PARAMETERS = 6  # whose second derivatives are timed
APPLYING = ("measures", "errors over examples")
QUICK = 1.0  # seconds: what took less is repeated, since code may be loaded, or garbage collected, during one of them
LEAST_TRIED = 16  # examples of a group, if it has as many
PER_EXAMPLE = 32  # bytes that a number per example and parameter takes: its index, the number, and two copies


@dataclass(frozen=True)
class SweepSize:
    """How the sweep cuts the data, by counting.

    Attributes:
        chunk: number of examples in a chunk.
        groups: number of groups of examples; 1 if they are not split.
        repeats: number of chunks of each group.
        window_bytes: bytes of the examples that are held together.
    """

    chunk: int
    groups: int
    repeats: int
    window_bytes: int

    @classmethod
    def count(cls, examples: int, batch: Batch, fitting: int, groups: ExampleGroups | None, window: int) -> SweepSize:
        """Count the chunks.

        Args:
            examples: the number of examples.
            batch: the first batch.
            fitting: the number of examples that fit into a chunk.
            groups: the split of the examples.
            window: the bytes of examples to split at once.
        """
        if groups is None:
            parts = -(-batch.examples // fitting)
            return cls(-(-batch.examples // parts), 1, -(-examples // batch.examples) * parts, 0)
        of_example = max(1.0, count_batch_bytes(batch) / batch.examples)
        # A window holds batches, or parts of a large one, until they exceed its size together.
        part = min(batch.examples, max(1, int(window / of_example)))
        held = min(examples, part * (int(window / (part * of_example)) + 1))
        count = min(groups.count, held)
        parts = -(-held // (count * fitting))
        repeats = max(1, round(examples / held * parts))
        return cls(-(-held // (count * parts)), min(groups.count, examples), repeats, int(held * of_example))


class Trial:
    """A measurement of a few examples, in chunks and groups as that of all examples has them.

    Args:
        measurer: what to measure and how.
        problem: model, loss and all data.
        initial: the weights before training, if known.

    Attributes:
        examples: the number of all examples.
        context: of all examples, of which the first have been probed.
        tried: the number of examples that were tried.
        search: what was collected from the few.
        left_out: what was asked for and has no value, and why.
        measures: the keys of what has one.
        symmetries: the rescalings of the model, in a sentence.
        seconds: the predicted seconds of each step.
        num_bytes: the predicted bytes; None where the system does not tell.
    """

    def __init__(self, measurer: Measurer, problem: Problem, initial: nn.Module | Mapping[str, Tensor] | None) -> None:
        self._measurer, self._problem, self._initial = measurer, problem, initial
        started = time.perf_counter()
        self.examples = problem.num_examples or sum(each.examples for each in read_batches(problem.data))
        self.context = measurer.make_context(problem, initial)
        self.batch = next(iter(problem.read_batches()))
        self.context.get_probe(self.batch)
        if any(is_axis_dependent(each) for each in measurer.asked):
            _ = self.context.geometries
        self.seconds = {"preparation": time.perf_counter() - started}
        self._ticks: list[float] = []
        watch = MemoryWatch(next(iter(problem.network.measured.values())).device)
        with watch.watch():
            self._run()
        self.num_bytes = None if watch.peak is None else watch.peak + self._count_further_bytes()

    def _run(self) -> None:
        measurer = self._measurer
        search = StatisticCollector(self.context, DIAGONALS[measurer.diagonal])
        groups = self.context.groups
        fitting = search.compute_chunk_size(measurer.asked, self.batch)
        self._size = size = SweepSize.count(self.examples, self.batch, fitting, groups, self.context.limit // 16)
        self._repeats = min(size.repeats, max(2, -(-LEAST_TRIED // size.chunk)))
        tried_groups = min(size.groups, 3 if self._repeats == 1 else 2)
        wanted = size.chunk * self._repeats * tried_groups
        if groups is None:
            wanted = size.chunk * min(size.repeats, max(4, self._repeats))
        skip = 0
        while True:
            try:
                context = self._try_examples(min(wanted, self.examples - skip), skip)
                break
            except EmptyDataError:  # none of these targets counts
                skip += wanted
                if skip >= self.examples:
                    raise
        search = self.search
        readings, reasons = search.compute_readings(measurer.asked)
        taken = {step: search.seconds[step] for step in APPLYING}
        if sum(taken.values()) < QUICK:
            search.compute_readings(measurer.asked)
            search.seconds |= {step: min(each, search.seconds[step]) for step, each in taken.items()}
        undefined = {key: each.notes[0] for key, each in readings.items() if math.isnan(each.value) and each.notes}
        self.left_out = {**reasons, **undefined}
        self.measures = [key for key in readings if key not in undefined]
        if measurer.needs_certificate:
            try:
                search.seconds["certificate"] = estimate_certificate_seconds(context, TIMED_PARAMETERS)
            except (RuntimeError, NotDefinedError, EmptyDataError):  # none, as the report will say
                search.seconds["certificate"] = 0.0
        self.symmetries = self._describe_symmetries()
        self._scale_seconds()

    def _try_examples(self, wanted: int, skip: int) -> Context:
        """Collect the statistics of some examples, and return their context."""
        self._batches, self._reading = self._take_examples(wanted, skip)
        self.tried = sum(each.examples for each in self._batches)
        context, groups = self._make_context(self._batches), self.context.groups
        if groups is not None:
            numbers = torch.arange(self.tried) // (self._size.chunk * self._repeats)
            context.groups = ExampleGroups.from_numbers(numbers, groups.count)
        self._ticks.clear()
        context.tick = _make_recorder(self._ticks)
        diagonal = DIAGONALS[self._measurer.diagonal]
        self.search = StatisticCollector(
            context, diagonal, self._measurer.needs_certificate, precision=self._measurer.precision
        )
        self.search.gather(self._measurer.asked)
        return context

    def _make_context(self, batches: Sequence[Batch]) -> Context:
        problem = replace(self._problem, data=list(batches))
        return self._measurer.make_context(problem, self._initial, structure=copy(self.context.structure))

    def _take_examples(self, wanted: int, skip: int) -> tuple[list[Batch], float]:
        """Return the first examples after those to skip, and the seconds that reading one takes."""
        found: list[Batch] = []
        times, left = [], wanted
        for batch in read_batches(self._problem.data):
            times.append((time.perf_counter(), batch.examples))
            part = batch.cut(min(skip, batch.examples), batch.examples)
            skip -= batch.examples - part.examples
            if left and part.examples:
                found.append(part.cut(0, left))
                left -= found[-1].examples
            if not left and len(times) >= 3:
                break
        if self.context.groups is None:  # a chunk ends where its batch does
            step = self._size.chunk
            found = [each.cut(n, n + step) for each in found for n in range(0, each.examples, step)]
        # Workers start before the first batch.
        later = sum(count for _, count in times[1:])
        return found, (times[-1][0] - times[0][0]) / later if later else 0.0

    def _describe_symmetries(self) -> str:
        found = self.search.found.get("rescalings")
        try:
            group = (rescalings(self.search.context) if found is None else found).value
        except NotDefinedError as reason:
            return f"not found: {reason}"
        return f"{group.scales} independent scales of {len(group.members)} tensors leave the function unchanged"

    def _scale_seconds(self) -> None:
        """Set the seconds of every step for all examples, from those of the few."""
        search, growth = self.search, self._measure_growth()
        passes = self._find_passes()
        for step, taken in search.seconds.items():
            self.seconds[step] = taken * growth if step.partition("(")[0] in passes else taken
        self.seconds["sweep"] = self._predict_sweep()
        if search.context.sizes:
            self.seconds["errors over examples"] *= self._size.groups / len(search.context.sizes)

    def _predict_sweep(self) -> float:
        """Return the seconds of the sweep over all examples, chunk by chunk."""
        size, search = self._size, self.search
        # The first chunk also loads code. That of a group makes its sums, to which later ones add.
        times = [after - before for before, after in pairwise(self._ticks)] or [search.seconds["sweep"]]
        firsts = [each for n, each in enumerate(times, 1) if n % self._repeats == 0 and size.groups > 1]
        others = [each for n, each in enumerate(times, 1) if n % self._repeats or size.groups == 1]
        first, other = (sum(each) / len(each) for each in (firsts or others, others or firsts))
        assert search.totals is not None
        started = time.perf_counter()
        search.totals.compute_values()
        for statistic in search.totals.wanted:
            search.totals.make_leave_one_out(statistic)
        finish = time.perf_counter() - started
        # The sums of all groups are added up; what else there is to do takes about as long as three of them.
        finish *= (size.groups + 3) / (max(len(search.context.sizes), 1) + 3)
        return size.groups * (first + (size.repeats - 1) * other) + finish + self.examples * self._reading

    def _measure_growth(self) -> float:
        """Return how much longer a pass over all examples takes than one over those that were tried.

        A pass over as many examples as a pass takes at once also shows how much memory that needs.
        """
        passes = [COMPUTED[need].passes for need in self._find_passes()]
        if not passes:
            return 1.0
        run = compute_input_deviations if all(each == 1 for each in passes) else compute_gradient_at
        few = self._batches
        whole = next(iter(read_batches(self._problem.data)))
        # Of the type that the model takes, as was probed.
        largest = next(self.context.split_batch(self.batch, 0)).examples
        many = [whole.cut(0, largest)] if largest > self.tried else few
        seconds, counts = [], [sum(each.examples for each in data) for data in (few, many)]
        for data in (few, many):
            contexts = [self._make_context(data) for _ in range(2)]
            seconds.append(min(_time_call(lambda context=each: run(context)) for each in contexts))  # type: ignore[misc]
        if counts[0] == counts[1]:
            return self.examples / self.tried + self._reading * self.examples / seconds[0]
        slope = max(0.0, (seconds[1] - seconds[0]) / (counts[1] - counts[0]))
        chunks = -(-self.examples // counts[1])
        fixed = max(0.0, seconds[1] - slope * counts[1])
        return (chunks * fixed + (slope + self._reading) * self.examples) / max(seconds[0], fixed + slope * counts[0])

    def _find_passes(self) -> list[str]:
        """Return the names of what was computed in passes of its own over the data."""
        names = (step.partition("(")[0] for step in self.search.seconds)
        return [name for name in names if name in COMPUTED and COMPUTED[name].passes != 0]

    def _count_further_bytes(self) -> int:
        """Return the bytes that all examples take beyond those of the few: sums of other groups, numbers, windows."""
        size, totals = self._size, self.search.totals
        assert totals is not None
        tried = max(len(self.search.context.sizes), 1)
        sums = sum(
            each.numel() * each.element_size()
            for of in totals.sums.values()
            if len(of) > 1
            for group in of
            for each in group.values()
        )
        numbers = sum(each.kind == "example" for each in totals.wanted) * len(totals.sites)
        held = size.window_bytes if self.batch.examples < self.examples else size.window_bytes // size.groups
        return sums * (size.groups - tried) // tried + PER_EXAMPLE * numbers * (self.examples - self.tried) + held


def _time_call(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _make_recorder(times: list[float]) -> Tick:
    """Return a function that records when chunks of the sweep are done."""

    def record_time(step: str, done: int, total: int | None) -> None:
        if step == "Sweeping examples":
            times.append(time.perf_counter())

    return record_time
