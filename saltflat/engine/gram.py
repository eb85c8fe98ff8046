"""Inner products between the gradients of single examples, from their factors where these are smaller.

Eigenvalues of a Gram matrix range over many orders of magnitude, and those below the rounding of the gradients times
the largest are rounding alone. In float32 these may be half of them, so the gradients are taken in float64 whatever the
precision of the model: see :func:`use_float64`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from saltflat.engine.context import Context
from saltflat.engine.data import Batch
from saltflat.engine.network import Network
from saltflat.engine.per_example import Emit
from saltflat.engine.precision_watch import WIDE, PrecisionWatch, is_whole
from saltflat.engine.problem import Problem
from saltflat.engine.reference_gradients import ReferenceGradients, find_silent_parameters, verify_reference
from saltflat.engine.statistic import Statistic
from saltflat.engine.strategy import Probe
from saltflat.engine.strategy_trial import EXPANDED, GradientComparison, run_strategy
from saltflat.engine.sweep import Sweep
from saltflat.errors import ModelError, NonFiniteError, NotDefinedError, SaltflatError, format_error_line
from saltflat.gradients.base import ColumnLayout, DenseGradient, FactoredGradient, compute_piece_size, use_scratch
from saltflat.gradients.outer import OuterProductGradient

_GRADIENT = Statistic(
    "gradient", of="gradient", total=lambda form, site: form.to_dense(), spread=None, meaning="gradients"
)
BLOCK = 64  # rows of the Gram matrix that are computed at once, since only its upper triangle is needed


@contextmanager
def use_float64(context: Context) -> Iterator[Context]:
    """Yield the context with a copy of the model in float64, or the context itself if the model is in float64.

    Integer inputs and the user's model are left alone.

    Raises:
        NotDefinedError: if the model does not run in float64.
    """
    network = context.problem.network
    if _is_float64(network):
        yield context
        return
    examples, share, loss = context.examples, context.mean_share, context.mean_loss
    try:
        wide = _WideContext(context)
        wide.store_counts(examples, share * examples, loss * share * examples)
        yield wide
    except (ModelError, NonFiniteError) as error:
        raise _make_float64_error(error) from error
    except (SaltflatError, Warning, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # The model ran in its own precision, whatever it raises in this one. Errors of the user's progress are not its.
        if error is getattr(context.tick, "error", None):
            raise
        raise _make_float64_error(error) from error
    finally:
        # Passes of the copy may have written to lists and arrays of the modules.
        network.attributes.restore(thorough=True)


def _is_float64(network: Network) -> bool:
    return all(value.dtype in WIDE for value in network.constants.values() if not is_whole(value))


def _make_float64_error(error: Exception) -> NotDefinedError:
    # What torch said is shorter than what this package makes of it.
    return NotDefinedError(
        f"needs gradients in float64, and this model does not run in it: {format_error_line(error.__cause__ or error)}"
    )


class _WideContext(Context):
    """The context of a copy of the model in float64.

    Strategies that were found in the model's own precision are confirmed, not searched again.
    """

    def __init__(self, narrow: Context) -> None:
        super().__init__(
            narrow.problem.to_float64(),
            narrow.plan,
            narrow.seed,
            narrow.limit,
            tick=narrow.tick,
            processes=narrow.processes,
        )
        self.narrow, self.runs_singly = narrow, narrow.runs_singly
        before, network = narrow.problem.network, self.problem.network
        network.needs_graph, network.rewrites_batch_norm = before.needs_graph, before.rewrites_batch_norm

    def _find_probe(self, kind: Hashable, batch: Batch) -> Probe:
        for earlier_kind, earlier in self.narrow.probes.items():
            if _widen_kind(earlier_kind) == kind and earlier.is_lasting:
                with torch.enable_grad():  # the caller may have turned gradients off
                    found = _confirm_in_float64(self.problem, batch, earlier, self._count_growth())
                if found is not None:
                    return found
        return super()._find_probe(kind, batch)

    def _count_growth(self) -> int:
        """Return how many times as much memory numbers take as in the model's own precision."""
        values = self.narrow.problem.network.measured.values()
        return torch.finfo(torch.float64).bits // min(torch.finfo(each.dtype).bits for each in values)


def _widen_kind(kind: Hashable) -> Hashable:
    """Return the kind of inputs that inputs of this kind are in float64."""
    if isinstance(kind, torch.dtype):
        return torch.float64 if kind.is_floating_point else kind
    return tuple(map(_widen_kind, kind)) if type(kind) is tuple else kind


def _confirm_in_float64(problem: Problem, batch: Batch, earlier: Probe, growth: int) -> Probe | None:
    """Return a lasting probe for the copy in float64 if it is right for the first examples of this batch, else None.

    The gradients of single examples pass the same checks as in the model's own precision, and the strategy reproduces
    them up to the rounding of this one. What does not depend on the precision is not determined again: whether examples
    are coupled or reordered, and how many numbers an example keeps in memory.
    """
    if batch.examples < 2 or earlier.strategy.startswith("single"):
        return None
    truth = verify_reference(problem, ReferenceGradients.compute(problem, batch.cut(0, 2), torch.float64))
    if find_silent_parameters([truth]):
        return None
    checks = [truth, truth.select_example(0)] if earlier.strategy == EXPANDED else [truth]
    if not all(_is_reproduced(problem, each, earlier) for each in checks):
        return None
    fixed, moving, widest = (growth * size for size in (earlier.fixed, earlier.moving, earlier.widest))
    return replace(
        earlier, fixed=fixed, moving=moving, widest=widest, tolerance=truth.tolerance, is_lasting=False, silent=()
    )


def _is_reproduced(problem: Problem, truth: ReferenceGradients, probe: Probe) -> bool:
    """Return whether a strategy computes the reference gradients, of one column as those of the loss are."""
    comparison = GradientComparison(problem, truth)
    try:
        _, backward = run_strategy(problem, probe.strategy, truth.batch, probe.calls)
        backward(comparison.columns, comparison.emit, True)
    except SaltflatError:
        raise
    except Exception:  # a probe of this precision will say what is wrong, or find another strategy
        return False
    return comparison.is_consistent()


def compute_gram_matrix(context: Context, chosen: Tensor) -> Tensor:
    """Return the inner products between the gradients of the chosen examples' losses, ``(P, P)``, in float64.

    The gradients of as many examples as fit in memory are kept at a time, and multiplied with those of the others. This
    takes one sweep over the chosen examples if all fit.

    Args:
        context: the problem and the conditions.
        chosen: sorted numbers of examples.
    """
    result, start = torch.zeros(len(chosen), len(chosen), dtype=torch.float64), 0
    with use_scratch():
        while start < len(chosen):
            start = _fill_window(context, chosen, start, result)
    # Only the upper triangle was filled.
    return (result.triu() + result.triu(1).mT) / context.mean_share**2


def iterate_gradients(context: Context) -> Iterator[Tensor]:
    """Yield the gradients of this process's examples over all parameters, ``(examples, parameters)``, in float64."""
    keeper = _GradientKeeper(context)
    keeper.written = dict.fromkeys(keeper.sites, True)
    with use_scratch():
        for batch in context.read_own_batches():
            for _, chunk in keeper.collect_gradients(batch):
                if chunk.forms:
                    rows = keeper.make_rows(chunk.examples)
                    keeper.write_rows(chunk, rows)
                    yield rows.double().cpu() / context.mean_share


def _fill_window(context: Context, chosen: Tensor, start: int, result: Tensor) -> int:
    """Fill the rows of the examples kept from ``start`` on; return where they end."""
    room, read = context.limit // 4, 0
    with context.reserve(3 * room):
        keeper = _GradientKeeper(context, 8 * (len(chosen) - start), room)
    window = _Window(keeper, start, len(chosen), room, result)
    for batch in context.problem.read_batches():
        read += batch.examples
        here = (chosen >= batch.first) & (chosen < batch.first + batch.examples)
        which = torch.nonzero(here)[:, 0]
        which = which[which >= start]
        if len(which) == 0:
            continue
        part = batch.take(chosen[which] - batch.first, int(which[0]))  # numbered among the chosen ones
        for first, chunk in keeper.collect_gradients(part):
            window.add(first, chunk)
        context.tick("Gradients of single examples", part.first + part.examples, len(chosen))
    if context.counts is None and keeper.examples == read:
        context.store_counts(read, keeper.share, keeper.loss)
    return window.multiply_rows()


@dataclass
class _Chunk:
    """The gradients of consecutive examples, by parameter. Those of parameters without any are left out."""

    examples: int
    forms: dict[str, FactoredGradient] = field(default_factory=dict)

    def select_examples(self, examples: slice) -> _Chunk:
        """Return the gradients of some of the examples."""
        forms = {name: form.select_examples(examples) for name, form in self.forms.items()}
        return _Chunk(len(range(self.examples)[examples]), forms)


class _GradientKeeper(Sweep):
    """Yields the gradients of single examples instead of summing statistics of them.

    Some are written out, and become rows of one matrix: those that need less memory so, and if all fit into memory,
    those that are multiplied faster so.

    Args:
        context: the problem and the conditions.
        size: bytes of an entry of the gradients of all examples to keep.
        room: bytes for them.

    Attributes:
        written: whether the gradients of a parameter are written out, by name, for parameters that had any.
    """

    def __init__(self, context: Context, size: int = 0, room: int = 0) -> None:
        super().__init__(context, [_GRADIENT])
        self.all_fit = sum(site.value.numel() for site in self.sites.values()) * size <= room
        self.found: dict[int, _Chunk] = {}
        self.written: dict[str, bool] = {}
        # Gradients in float32 claim no more than that.
        self.watch = PrecisionWatch() if _is_float64(context.problem.network) else None

    @cached_property
    def places(self) -> dict[str, slice]:
        """The columns of each parameter whose gradients are written out, which the first chunk determines."""
        places, end = {}, 0
        for name, site in self.sites.items():
            # A parameter that no example has used yet gets its place from the beginning.
            if self.written.setdefault(name, True):
                places[name] = slice(end, end := end + site.value.numel())
        return places

    def make_rows(self, examples: int) -> Tensor:
        """Return an uninitialized matrix of the gradients that are written out, ``(examples, entries)``."""
        some, *others = (site.value for site in self.sites.values())
        dtype = reduce(torch.promote_types, (each.dtype for each in others), some.dtype)
        return some.new_empty(examples, max((place.stop for place in self.places.values()), default=0), dtype=dtype)

    def write_rows(self, chunk: _Chunk, rows: Tensor) -> None:
        """Write the gradients of a chunk to as many rows."""
        for name, place in self.places.items():
            if name in chunk.forms:
                rows[:, place] = chunk.forms[name].to_dense().reshape(chunk.examples, -1)
            else:
                rows[:, place] = 0

    def collect_gradients(self, batch: Batch) -> Iterator[tuple[int, _Chunk]]:
        """Yield the gradients of a batch's chunks, each with the number of its first example."""
        for _ in self.add_batch(batch):
            yield from self.found.items()
            self.found = {}

    def _add_chunk(self, batch: Batch, found: Probe, strategy: str | None = None) -> None:
        if self.watch is None:
            super()._add_chunk(batch, found, strategy)
            return
        with self.watch.look():
            super()._add_chunk(batch, found, strategy)
        if self.watch.loss:
            raise NotDefinedError(
                "needs gradients in float64, and this model computes in lower precision even if its weights and inputs "
                f"are in float64: {self.watch.loss}"
            )

    def _make_collector(self, kind: str, layout: ColumnLayout, sign: int, batch: Batch, first_draw: int = 0) -> Emit:
        chunk = self.found[batch.first] = _Chunk(batch.examples)

        def emit(name: str, form: FactoredGradient) -> None:
            self.emitted += 1
            if name not in self.written:
                smaller = form.shape.numel() * torch.finfo(torch.float64).bits // 8 < sum(form.count_bytes())
                faster = self.all_fit and isinstance(form, OuterProductGradient) and _has_many_positions(form)
                self.written[name] = smaller or faster or isinstance(form, DenseGradient)
            chunk.forms[name] = DenseGradient(form.to_dense()) if self.written[name] else form

        return emit


class _Window:
    """The gradients of consecutive examples, as many as fit in memory, and their products with those that follow.

    Args:
        keeper: where the gradients come from.
        start: the number of the first example.
        stop: the number of examples.
        room: bytes to keep. The first chunk is kept even if it needs more.
        result: the Gram matrix, to whose upper triangle the products are added.
    """

    def __init__(self, keeper: _GradientKeeper, start: int, stop: int, room: int, result: Tensor) -> None:
        self.keeper, self.start, self.stop, self.result = keeper, start, stop, result
        self.whole = self.room = room
        self.end = start  # of the examples kept
        self.rows: Tensor | None = None
        self.factored: list[tuple[int, _Chunk]] = []

    def add(self, first: int, chunk: _Chunk) -> None:
        """Keep the gradients of a chunk if they fit, and multiply those that have to be multiplied while it is here."""
        places = self.keeper.places
        factored = _Chunk(chunk.examples, {name: form for name, form in chunk.forms.items() if name not in places})
        in_factors = sum(sum(form.count_bytes()) for form in factored.forms.values())  # of one example
        if self.rows is None:
            size = in_factors + self.keeper.make_rows(1).nbytes
            fitting = min(max(chunk.examples, self.room // max(1, size)), self.stop - self.start)
            self.rows = self.keeper.make_rows(fitting)
        taken = min(chunk.examples, len(self.rows) - (first - self.start)) if self.end == first else 0
        if taken > 0 and (self.room >= 0 or first == self.start):
            self.end = first + taken
            self.keeper.write_rows(chunk.select_examples(slice(taken)), self.rows[first - self.start :][:taken])
            self.factored.append((first, factored.select_examples(slice(taken))))
            self._account_for(taken * (in_factors + self.rows[:1].nbytes))
        if self.end < first + chunk.examples:
            others = slice(max(self.end, first) - first, chunk.examples)
            streamed = self.keeper.make_rows(len(range(chunk.examples)[others]))
            self.keeper.write_rows(chunk.select_examples(others), streamed)
            self._add_block(0, first - self.start + others.start, self.rows[: self.end - self.start] @ streamed.mT)
        for row, before in self.factored:
            for name in before.forms.keys() & factored.forms.keys():
                block = _multiply(before.forms[name], factored.forms[name])
                self._add_block(row - self.start, first - self.start, block)

    def _account_for(self, size: int) -> None:
        """Take so many bytes from the room. They do not count as gaps of the heap, which trimming would return."""
        self.room -= size
        heap = self.keeper.context.heap
        heap.low = max(1, heap.low + size) if heap.low else 0

    def multiply_rows(self) -> int:
        """Multiply the gradients kept in rows with each other, and keep nothing more; return where the window ends."""
        rows = None if self.rows is None else self.rows[: self.end - self.start]
        if rows is not None:
            for first in range(0, len(rows), BLOCK):
                self._add_block(0, first, rows[: first + BLOCK] @ rows[first : first + BLOCK].mT)
        self._account_for(self.room - self.whole)
        return self.end

    def _add_block(self, row: int, column: int, block: Tensor) -> None:
        row, column = self.start + row, self.start + column
        self.result[row : row + len(block), column : column + block.shape[1]] += block.double().cpu()


def _has_many_positions(form: OuterProductGradient) -> bool:
    """Return whether two gradients that are written out are multiplied faster than their factors."""
    return form.positions**2 * (form.rows + form.entries) > form.rows * form.entries


def _multiply(one: FactoredGradient, other: FactoredGradient) -> Tensor:
    """Return the inner products of gradients, ``(examples, other examples)``, with the fewest multiplications."""
    if not (isinstance(one, OuterProductGradient) and isinstance(other, OuterProductGradient)):
        return one.compute_gram(other)
    pairs, entries = one.examples * other.examples, one.rows * one.entries
    by_position = pairs * one.positions * other.positions * (one.rows + one.entries)
    written = entries * (one.examples * one.positions + other.examples * other.positions + pairs)
    alike = (one.shape, one.inner, one.order) == (other.shape, other.inner, other.order)
    if not alike or by_position > written or one.positions * other.positions == 1:
        return one.compute_gram(other)

    def multiply_factors(these: Tensor, those: Tensor) -> Tensor:
        """Return the inner products of each position with each, ``(groups, examples and positions, the same)``."""
        return these.transpose(0, 1).flatten(1, 2) @ those.transpose(0, 1).flatten(1, 2).mT

    # <sum_t g_t a_t', sum_s h_s b_s'> = sum_ts (g_t . h_s) (a_t . b_s)
    step = compute_piece_size(one.groups * one.positions * other.examples * other.positions, one.device)
    blocks = []
    for start in range(0, one.examples, step):
        left, right = (factor[0, start : start + step] for factor in (one.left, one.right))
        each = multiply_factors(left, other.left[0]).mul_(multiply_factors(right, other.right[0]))
        sizes = one.groups, len(left), one.positions, other.examples, other.positions
        blocks.append(each.view(sizes).sum((0, 2, 4)))
    return torch.cat(blocks)
