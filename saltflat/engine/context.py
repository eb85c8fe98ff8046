"""The context of a measurement: the problem, the conditions, and passes over the data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from saltflat.engine.data import Batch, Leaf, read_batches
from saltflat.engine.example_groups import ExampleGroups
from saltflat.engine.independence import IndependenceCheck
from saltflat.engine.losses import format_loss
from saltflat.engine.network import Network
from saltflat.engine.output_curvature import ColumnPlan
from saltflat.engine.parameter_routes import MOVED, find_routes
from saltflat.engine.per_example import LayerCalls
from saltflat.engine.problem import Problem, cast_targets
from saltflat.engine.processes import SINGLE_PROCESS, Processes
from saltflat.engine.same_inputs import DataDigest, check_same_function, check_same_model
from saltflat.engine.silent_parameters import verify_silent_parameters
from saltflat.engine.strategy import Probe, compute_working_memory, confirm_probe, run_probe
from saltflat.engine.strategy_trial import TOGETHER
from saltflat.engine.structure import Structure
from saltflat.errors import MemoryLimitWarning, warn_caller
from saltflat.gradients.base import HeapTrimmer
from saltflat.layers import Geometry, infer_geometry


def _describe_inputs(batch: Batch) -> tuple[Hashable, ...]:
    """Return what tells kinds of inputs apart beside the shapes of tensors: their types, names and other values."""
    leaves, tree = tree_flatten((batch.args, batch.kwargs))

    def describe(leaf: Leaf) -> Hashable:
        if isinstance(leaf, Tensor):
            return leaf.dtype, batch.has_example_axis(leaf)
        return leaf if isinstance(leaf, bool | int | str) else type(leaf).__qualname__

    return str(tree), *map(describe, leaves)


def find_geometries(network: Network, batch: Batch | None = None) -> Mapping[str, Geometry]:
    """Return the geometry of every measured parameter of two or more axes.

    With a batch, it is determined by the operations that use the parameter; without, by the module that owns it.
    """
    if batch is not None:
        found: Mapping[str, Geometry] = import_module("saltflat.symmetry.axes").find_used_geometries(network, batch)
        return found
    return {
        name: infer_geometry(network.model.get_submodule(name.rpartition(".")[0]), value.shape)
        for name, value in network.measured.items()
        if value.dim() > 1
    }


Tick = Callable[[str, int, int | None], None]

SMALL = 32 << 20  # bytes that are not worth a warning
MANY_COLUMNS = 2000  # of an example
FEW = 32  # largest number of examples to keep for notes about the inputs


@dataclass(frozen=True)
class StatisticResult:
    """The value of a statistic, and what its standard errors are computed from.

    Attributes:
        value: one tensor per parameter name, or a value for the network as a whole.
        replicates: the same with one random draw left out at a time; None if nothing was drawn at random.
        without: the same with one group of examples left out, a function of the group's number; None if unknown. See
            :mod:`saltflat.engine.context`.
        exact: whether the value is exact up to rounding.
        notes: further notes for the reader.
    """

    value: Any
    replicates: tuple[Any, ...] | None = None
    without: Callable[[int], Any] | None = field(default=None, kw_only=True)
    exact: bool = True
    notes: tuple[str, ...] = ()


def ignore_progress(what: str, done: int, total: int | None) -> None:
    """Show no progress."""


def _make_single(found: Probe) -> Probe:
    """Return a probe that takes examples one at a time, instead of one that takes them together."""
    if found.strategy not in TOGETHER:
        return found
    routes = find_routes([each.name for each in found.routes], found.fallback, (), {}, MOVED)
    return replace(found, strategy=found.fallback, routes=routes, is_lasting=False)


class Context:
    """A problem and the conditions under which it is measured.

    Attributes:
        problem: model, loss and data.
        plan: which columns represent the loss's curvature.
        seed: of all random numbers.
        limit: bytes of working memory.
        initial: the parameters before training, if they were given.
        tick: called as ``tick(step, done, total)`` to report progress.
        sampling: whether to estimate how far the numbers depend on the choice of the examples.
        structure: what does not depend on the weights; contexts of one architecture may share it.
        processes: that share the measurement.
        first: the first few examples that were probed.
        independence: the check of examples against others.
        runs_singly: whether examples are run one at a time, since the model was found to reorder them.
        counts: examples, divisor of the loss and mean loss, once a pass over all the data has counted them.
    """

    def __init__(
        self,
        problem: Problem,
        plan: ColumnPlan,
        seed: int,
        limit: int,
        initial: Mapping[str, Tensor] | None = None,
        tick: Tick = ignore_progress,
        sampling: bool = False,
        structure: Structure | None = None,
        processes: Processes = SINGLE_PROCESS,
    ) -> None:
        self.processes = processes
        self.structure = Structure() if structure is None else structure
        self.problem, self.plan, self.seed, self.limit = problem, plan, seed, limit
        self.initial, self.tick, self.sampling = initial, tick, sampling
        self.heap = HeapTrimmer(limit // 3)
        self.first: Batch | None = None
        self.results_bytes = self._warned_bytes = 0
        self.runs_singly = self._has_warned = False
        self.independence = IndependenceCheck(
            problem, self.get_probe, lambda: self.limit, lambda: self.structure.uncoupled
        )
        self.counts: tuple[int, float, float] | None = None
        self._first: Batch | None = None
        self._is_same_data = processes.count == 1

    def check_same_inputs(self, settings: Mapping[str, object]) -> None:
        """Check before any work that all processes measure the same model on the same data in the same way.

        Args:
            settings: what else has to be the same, by name.
        """
        if self.processes.count == 1:
            return
        problem = self.problem
        own = {"columns": str(self.plan), "seed": self.seed, "memory": self.limit, "mode": problem.mode}
        own |= {"loss": format_loss(problem.loss), "layers": list(problem.network.measured)}
        initial = {f"the initial {name}": value for name, value in (self.initial or {}).items()}
        check_same_model(self.processes, problem.model, problem.network.constants | initial, {**own, **settings})
        digest = DataDigest(problem.num_examples)
        digest.add(next(iter(read_batches(problem.data))))
        digest.check(self.processes)
        found = self.get_probe(next(iter(problem.read_batches())))
        assert self.first is not None
        with torch.no_grad():
            outputs = problem.network(self.first).double()
        losses = problem.loss.total(outputs, cast_targets(self.first.targets))
        check_same_function(self.processes, outputs, losses, found.tolerance)

    @property
    def probes(self) -> dict[Hashable, Probe]:
        """Return how to sweep each kind of input that was seen."""
        # Inputs of other shapes may take another path through the model: each kind is probed when it first appears.
        return self.structure.probes

    def get_probe(self, batch: Batch) -> Probe:
        """Return how to sweep inputs like these; run the model to find out if they are of a new kind."""
        inputs = LayerCalls.from_batch(batch, []).inputs, *_describe_inputs(batch)
        kind = (inputs, batch.examples > 1 or (inputs, True) in self.probes)
        if kind not in self.probes:
            found = self._find_probe(kind, batch)
            self.probes[kind] = _make_single(found) if self.runs_singly else found
            self._warn_if_too_large()
        found = self.probes[kind]
        if self._first is None:
            self._first = batch.cut(0, 2)
            self.structure.set_source((kind, found.operations, found.indices) if found.is_lasting else None)
        if self.first is None:
            self.first = batch.cut(0, max(1, min(FEW, self.limit // (found.fixed + found.moving))))
        return found

    def verify_probe(self, batch: Batch) -> Probe:
        """Return how to sweep these inputs, after comparing parameters that had no gradient before."""
        found = self.get_probe(batch)
        right = verify_silent_parameters(self.problem, batch, found, self.limit)
        self.probes.update({kind: right for kind, each in self.probes.items() if each is found})
        return right

    def run_singly(self) -> bool:
        """Run examples one at a time from now on; return whether some were run together before."""
        before, self.runs_singly = self.runs_singly, True
        self.probes.update({kind: _make_single(each) for kind, each in self.probes.items()})
        return not before

    def _find_probe(self, kind: Hashable, batch: Batch) -> Probe:
        """Confirm what an earlier measurement has found about inputs of this kind, or else probe them."""
        earlier = self.structure.kept.get(kind)
        with torch.enable_grad():  # the caller may have turned gradients off
            found = None if earlier is None else confirm_probe(self.problem, batch, earlier)
            if found is None:
                self.structure.num_probes += 1
                found = run_probe(self.problem, batch, self.limit)
        return found

    @property
    def example_bytes(self) -> int:
        """Return about how many bytes the largest example seen needs alone, which is the least a chunk can need."""
        return max((found.fixed + found.moving for found in self.probes.values()), default=0)

    def warn_of_results(self, size: int) -> None:
        """Warn before the work starts if results of ``size`` bytes exceed the working memory."""
        self.results_bytes = size
        if size > max(self.limit, SMALL):
            warn_caller(
                f"This call will use about {size >> 20} MiB beyond memory={self.limit >> 20} MiB: results and copies "
                "of the model's size cannot be split. Try fewer measures, or fewer layers (layers=).",
                MemoryLimitWarning,
            )

    def check_columns(self, count: int) -> int:
        """Return how many columns an example takes, at least one; warn if exact ones are very many."""
        if count > MANY_COLUMNS and not self.plan.is_random and not self._has_warned:
            self._has_warned = True
            warn_caller(
                f"Exact curvature takes {count:,} backward columns for each example: one for every class at every "
                'position. Try columns="sampled:4", random columns with a standard error.',
                UserWarning,
            )
        return max(1, count)

    def _warn_if_too_large(self) -> None:
        size = self.example_bytes
        if size > max(self.limit, SMALL, self._warned_bytes):
            self._warned_bytes = size
            warn_caller(
                f"memory={self.limit >> 20} MiB will be exceeded: one example needs about {size >> 20} MiB. Examples "
                "are processed one by one.",
                MemoryLimitWarning,
            )

    @property
    def geometries(self) -> Mapping[str, Geometry]:
        """Return how the model uses the measured parameters as matrices, determined on its first examples."""
        self._confirm_source()
        if self.structure.geometries is None:
            first = self._first or next(iter(self.problem.read_batches())).cut(0, 2)
            self.structure.geometries = find_geometries(self.problem.network, first)
        return self.structure.geometries

    @property
    def computed(self) -> dict[str, object]:
        """Return computed statistics that do not depend on the weights, by name."""
        self._confirm_source()
        return self.structure.computed

    def _confirm_source(self) -> None:
        """Probe the first inputs if something was determined on earlier ones, which may have been others."""
        if self._first is None and self.structure.source is not None:
            self.get_probe(next(iter(self.problem.read_batches())))

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Reserve bytes of the working memory for something else; at least a quarter remains for passes."""
        limit = self.limit
        try:
            self.limit = max(limit // 4, limit - size)
            yield
        finally:
            self.limit = limit

    def read_own_batches(self) -> Iterator[Batch]:
        """Read the data once, and yield the examples that this process takes, probed as they were batched.

        What is summed over them has to be added up over :attr:`processes`.
        """
        if self._first is None and self.processes.count > 1:
            # What is determined on the first examples is the same in all processes, whichever they take.
            self.get_probe(next(iter(self.problem.read_batches())))
        total, digest = self.problem.num_examples, None if self._is_same_data else DataDigest(self.problem.num_examples)

        def select_own(batch: Batch) -> Batch | None:
            if digest is not None:
                digest.add(batch)
            return self.processes.select_own(batch, total)

        # Probed before groups take single examples out of batches.
        for batch in self.problem.read_batches(select_own):
            self.get_probe(batch)
            yield batch
        if digest is not None:
            digest.check(self.processes)
            self._is_same_data = True

    def read_chunks(self, passes: int = 1) -> Iterator[Batch]:
        """Yield all data in chunks whose forward pass and graphs of ``passes`` backward passes fit in memory."""
        for batch in self.problem.read_batches():
            yield from self.split_batch(batch, passes)
        self.independence.finish()

    def read_own_chunks(self, passes: int = 1) -> Iterator[Batch]:
        """Yield the examples that this process takes in the chunks of :meth:`read_chunks`."""
        for batch in self.read_own_batches():
            yield from self.split_batch(batch, passes)
        self.independence.finish()

    def split_batch(self, batch: Batch, passes: int) -> Iterator[Batch]:
        """Yield a batch in the chunks of :meth:`read_chunks`."""
        found = self.get_probe(batch)
        # Each differentiation keeps about as much memory as the pass it differentiates.
        size = max(1, compute_working_memory(self.limit) // ((found.fixed + found.moving) << passes))
        for start in range(0, batch.examples, size):
            yield batch.cut(start, start + size)
            self.heap.release()

    @cached_property
    def groups(self) -> ExampleGroups | None:
        """Return the split of the examples for standard errors, or None if they are not estimated."""
        return ExampleGroups(self.problem.num_examples) if self.sampling else None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of examples in each group; empty if there are fewer than two groups."""
        if self.groups is None:
            return ()
        counts = torch.bincount(self.groups.find_groups(torch.arange(self.examples)), minlength=self.groups.count)
        sizes = tuple(size for size in counts.tolist() if size)
        return sizes if len(sizes) > 1 else ()

    @property
    def examples(self) -> int:
        """Return the number of examples."""
        return self._compute_counts()[0]

    @property
    def mean_loss(self) -> float:
        """Return the mean loss of the data."""
        return self._compute_counts()[2]

    @property
    def mean_share(self) -> float:
        """Return the mean over examples of each one's part of the loss's divisor.

        The loss of the data is the mean over examples of each one's part of the sum, divided by this.
        """
        examples, share, _ = self._compute_counts()
        return share / examples

    def store_counts(self, examples: int, share: float, total: float) -> None:
        """Store what a pass over all the data has counted."""
        self.counts = examples, share, total / share if share else nan

    def _compute_counts(self) -> tuple[int, float, float]:
        if self.counts is None:
            examples, share, total = 0, 0.0, 0.0
            with torch.no_grad():
                for batch in self.read_own_chunks(0):
                    outputs, targets = self.problem.network(batch).double(), cast_targets(batch.targets)
                    share += float(self.problem.loss.share(outputs, targets).sum())
                    total += float(self.problem.loss.total(outputs, targets).sum())
                    examples += batch.examples
            (counted, share, total), _ = self.processes.sum_parts("the counts", (examples, share, total))
            self.store_counts(int(counted), share, total)
        assert self.counts is not None
        return self.counts


def describe_context(context: Context) -> dict[str, Any]:
    """Return the settings of a measurement, for the report."""
    problem, probes = context.problem, context.probes.values()
    first = next(iter(problem.network.measured.values()))
    # Each process has seen kinds of input that others may not have.
    ways = context.processes.gather("the strategies", ([each.strategy for each in probes], context.example_bytes))
    return {
        "columns": str(context.plan),
        "dtype": str(first.dtype).removeprefix("torch."),
        "device": str(first.device),
        "layers": list(problem.network.measured),
        "loss": format_loss(getattr(problem.loss, "inner", problem.loss)),
        "memory": context.limit,
        "results_bytes": context.results_bytes,
        "example_bytes": max(size for _, size in ways),
        "mode": problem.mode,
        "seed": context.seed,
        "strategy": " + ".join(dict.fromkeys(strategy for strategies, _ in ways for strategy in strategies)),
    }
