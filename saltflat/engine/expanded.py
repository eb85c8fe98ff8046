"""The pass over a batch in which parameters used outside of layers have a copy for each example.

It extends the batched pass of :mod:`saltflat.engine.per_example`. Values that all examples share
are cut out of its graph: their gradients for each example are collected, and then taken back to the parameters in a
second, small backward pass through what the values were computed by.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from saltflat.engine import outside_rules  # noqa: F401  # registers its rules
from saltflat.engine.data import Batch
from saltflat.engine.example_tracker import ExampleTracker, Operation, UnsupportedUseError
from saltflat.engine.network import Network
from saltflat.engine.per_example import (
    Backward,
    Emit,
    GradientCollector,
    GradientTap,
    LayerCalls,
    NotBatchableError,
    Receive,
    TapContext,
    check_unchanged,
    find_reached_leaves,
    make_leaves,
    split_examples,
)
from saltflat.gradients.base import DenseGradient, FactoredGradient, unwrap_columns
from saltflat.gradients.outer import OuterProductGradient
from saltflat.gradients.rows import RowSparseGradient


class _ExpandTap(torch.autograd.Function):
    """A value expanded to a copy for each example, whose gradients are passed to a function."""

    @staticmethod
    def forward(ctx: TapContext, value: Tensor, anchor: Tensor, receive: Receive, shape: torch.Size) -> Tensor:
        ctx.receive = receive
        return value.expand(shape)

    @staticmethod
    def backward(ctx: TapContext, g: Tensor) -> tuple[None, Tensor, None, None]:
        ctx.receive(unwrap_columns(g))
        return None, g.new_zeros(()), None, None


@dataclass
class _BackwardState:
    """What a backward pass has collected.

    Attributes:
        gradients: of the parameters.
        columns: their number.
        shared: the gradients of values that all examples share, ``(columns, examples, *value)``, by their number.
        waiting: the gradients at the results of operations, and how to differentiate these.
    """

    gradients: GradientCollector
    columns: int
    shared: dict[int, Tensor] = field(default_factory=dict)
    waiting: list[tuple[Tensor, Callable[[Tensor], None]]] = field(default_factory=list)

    def add_shared(self, number: int, g: Tensor) -> None:
        """Add the gradients of one use of a value that all examples share."""
        self.shared[number] = self.shared[number] + g if number in self.shared else g


class _Receiver:
    """Receives the gradients of taps during a backward pass.

    The graph refers to it, so it must not refer to the graph: torch would never free the cycle.
    """

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.state: _BackwardState | None = None

    def _split(self, state: _BackwardState, g: Tensor) -> Tensor:
        return split_examples(g.expand(state.columns, *g.shape[1:]), self.examples, 1)

    def receive_layer(self, module: nn.Module, x: Tensor, g: Tensor) -> None:
        """Receive the gradients at the output of a layer with a rule."""
        if self.state is not None:  # the forward pass itself may differentiate
            self.state.gradients.receive_gradient(module, x, self._split(self.state, g))

    def receive_common_layer(self, module: nn.Module, x: Tensor, g: Tensor) -> None:
        """Receive the gradients at the output of a layer that all examples share."""
        if self.state is not None:
            sizes = self.state.columns, self.examples
            g = g.expand(sizes[0] * sizes[1], *g.shape[1:]).unflatten(0, sizes)
            self.state.gradients.receive_gradient(module, x.expand(self.examples, *x.shape), g)

    def receive_copies(self, number: int, shape: torch.Size, g: Tensor) -> None:
        """Receive the gradients of the copies of a value."""
        if self.state is not None:
            g = self._split(self.state, g)
            g = g.sum(2) if g.shape[2] > 1 else g
            self.state.add_shared(number, g.reshape(*g.shape[:2], *shape))

    def receive_factored(
        self, name: str | None, number: int, factor: Callable[[Tensor], FactoredGradient], g: Tensor
    ) -> None:
        """Receive the gradients at the result of a product or a lookup, of a parameter or of another value."""
        if self.state is not None:
            form = factor(self._split(self.state, g))
            if name is None:
                self.state.add_shared(number, form.to_dense())
            else:
                self.state.gradients.add(name, form)

    def receive_operation(self, finish: Callable[[Tensor], None], g: Tensor) -> None:
        """Receive the gradients at the result of an operation that is differentiated after the backward pass."""
        if self.state is not None:
            self.state.waiting.append((self._split(self.state, g), finish))


class _ExpandedPass:
    """Runs a forward pass, and backward passes from it."""

    def __init__(self, network: Network, batch: Batch) -> None:
        self.network, self.examples = network, batch.examples
        value = next(iter(network.measured.values()))
        # Leaves that the graphs of all taps lead to: what depends on the examples, and what does not.
        self.anchor, self.common_anchor = (value.new_zeros(()).requires_grad_() for _ in range(2))
        self.leaves = make_leaves(network)
        self.names = {id(leaf): name for name, leaf in self.leaves.items()}
        self.calls: list[tuple[nn.Module, torch.Size]] = []
        self.inputs: list[tuple[str, Tensor, int]] = []
        self.values: list[Tensor] = []  # that all examples share
        self.uses: list[tuple[str, torch.Size]] = []
        self.factored: list[str] = []  # the parameters of products and lookups
        self.blocked: dict[str, str] = {}
        self.receiver = _Receiver(batch.examples)
        self.tracker = ExampleTracker(batch, self)
        with self.tracker as tracker:
            self.outputs = network(batch, self.tap, self.leaves)
        del self.tracker  # which refers to this
        if not tracker.is_separate(self.outputs):
            raise NotBatchableError("what the outputs depend on cannot be followed")
        self.found = replace(
            LayerCalls.from_batch(batch, self.calls), uses=tuple(self.uses), blocked=tuple(self.blocked.items())
        )
        self.is_tapped = bool(find_reached_leaves(self.outputs, {"": self.anchor}))
        missed = find_reached_leaves(self.outputs, {**self.leaves, "a shared layer": self.common_anchor})
        if missed:
            raise NotBatchableError(f"uses that cannot be followed: {missed}")

    def tap(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Watch the call of a layer with a rule."""
        if not self.tracker.is_separate(x):
            if self.tracker.is_separate(y):
                raise NotBatchableError(f"a {type(module).__name__} with other inputs than its first")
            self.calls.append((module, x.shape))
            return _watch(y, self.common_anchor, partial(self.receiver.receive_common_layer, module, x.detach()))
        rows = split_examples(x.detach(), self.examples, 0)
        self.calls.append((module, rows.shape[1:]))
        self._note_input(type(module).__name__, x)
        split_examples(y, self.examples, 0)
        watched = _watch(y, self.anchor, partial(self.receiver.receive_layer, module, rows))
        self.tracker.mark(watched)
        return watched

    def expand(self, value: Tensor, shape: torch.Size) -> Tensor:
        """Return a value that all examples share as ``shape``, whose first axis counts the examples."""
        self._note_use("expand", value.shape, shape[0])
        receive = partial(self.receiver.receive_copies, self._number_value(value), value.shape)
        aligned = value.detach().reshape((1,) * (len(shape) - value.dim()) + tuple(value.shape))
        expanded: Tensor = _ExpandTap.apply(aligned, self.anchor, receive, shape)  # type: ignore[no-untyped-call]
        return expanded

    def watch_product(self, x: Tensor, weight: Tensor, y: Tensor, is_transposed: bool) -> Tensor:
        """Return ``y``, the product of an input with a matrix that all examples share."""
        rows = split_examples(x.detach(), self.examples, 0)
        rows, shape = rows.reshape(1, self.examples, 1, -1, x.shape[-1]), weight.shape
        self._note_input("matrix product", x)

        def factor(g: Tensor) -> FactoredGradient:
            g = g.reshape(*g.shape[:2], 1, -1, g.shape[-1])
            return OuterProductGradient(*((rows, g) if is_transposed else (g, rows)), shape)

        return self._watch_factored("product", weight, len(x), y, factor)

    def watch_rows(self, index: Tensor, table: Tensor, padding: int | None, y: Tensor) -> Tensor:
        """Return ``y``, rows of a table that all examples share."""
        shape = table.shape
        places = split_examples(index, self.examples, 0).reshape(self.examples, -1) % shape[0]

        def factor(g: Tensor) -> FactoredGradient:
            values = g.reshape(*g.shape[:2], places.shape[1], -1)
            if padding is not None:
                values = values * (places != padding % shape[0])[None, :, :, None]
            return RowSparseGradient(places, values, shape)

        return self._watch_factored("rows", table, len(index), y, factor)

    def watch_operation(self, function: Operation, args: Sequence[Any]) -> Tensor:
        """Return the result of an operation that is differentiated for each example on its own."""
        tracker, examples, receiver = self.tracker, self.examples, self.receiver
        common = {n: each for n, each in enumerate(args) if tracker.is_common(each)}
        separate = {n: each for n, each in enumerate(args) if isinstance(each, Tensor) and tracker.is_separate(each)}
        y = function(*(each.detach() if n in common else each for n, each in enumerate(args)))
        if not isinstance(y, Tensor) or any(x.dim() == 0 or x.shape[0] % examples for x in (y, *separate.values())):
            raise UnsupportedUseError("has no axis for the examples")
        numbers = {n: self._number_value(each) for n, each in common.items()}
        values = {n: each.detach() for n, each in common.items()}
        rows = {n: split_examples(each.detach(), examples, 0) for n, each in separate.items()}
        others = {n: each for n, each in enumerate(args) if n not in common and n not in separate}
        for each in separate.values():
            self._note_input("function", each)
        for each in common.values():
            self._note_use("operation", each.shape, len(y))

        def differentiate(given: dict[int, Tensor], g: Tensor) -> dict[int, Tensor]:
            def run(values: dict[int, Tensor]) -> Tensor:
                every: dict[int, Any] = {**others, **given, **values}
                found: Tensor = function(*(every[n] for n in range(len(every))))
                return found

            pulled: Any = vjp(run, values)
            found: dict[int, Tensor] = vmap(lambda column: pulled[1](column)[0])(g)
            return found

        def finish(g: Tensor) -> None:
            assert receiver.state is not None
            for n, each in vmap(differentiate, (0, 1), 1)(rows, g).items():
                receiver.state.add_shared(numbers[n], each)

        return _watch(y, self.anchor, partial(receiver.receive_operation, finish))

    def block(self, values: Collection[Tensor], reason: str) -> None:
        """Note that the gradients of what these values are computed from need another way."""
        if any(find_reached_leaves(value, {"": self.common_anchor}) for value in values):
            raise NotBatchableError(f"layers whose outputs all examples share are {reason}")
        reached = [name for value in values for name in find_reached_leaves(value, self.leaves)]
        self.blocked.update({name: reason for name in reached if name not in self.blocked})

    def backward(self, columns: Tensor, emit: Emit, last: bool) -> None:
        """Emit the gradients for these columns."""
        if not self.is_tapped:
            return
        check_unchanged(self.inputs)
        gradients = GradientCollector(self.network, emit)
        for module, _ in self.calls:
            gradients.expect_call(module)
        own = [self.names[id(value)] for value in self.values if id(value) in self.names]
        computed = self._find_reached([value for value in self.values if id(value) not in self.names])
        for name in (*own, *computed, *self.factored):
            if name:
                gradients.expect_use(name)
        state = self.receiver.state = _BackwardState(gradients, len(columns))
        try:
            vmap(lambda column: torch.autograd.grad(self.outputs, self.anchor, column, retain_graph=not last))(columns)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # of small operations, in a loop
                self._pull_shared(state)
        finally:
            self.receiver.state = None
        gradients.finish()

    def _pull_shared(self, state: _BackwardState) -> None:
        """Take the gradients of values that all examples share back to the parameters."""
        for g, finish in state.waiting:
            finish(g)
        computed: list[tuple[Tensor, Tensor]] = []
        for number, g in state.shared.items():
            name = self.names.get(id(self.values[number]))
            if name is None:
                computed.append((self.values[number], g.flatten(0, 1)))
            else:
                state.gradients.add(name, DenseGradient(g))
        state.shared.clear()
        if not computed:
            return
        values, given = zip(*computed, strict=True)
        targets = {name: self.leaves.get(name, self.common_anchor) for name in self._find_reached(values)}

        def pull(*each: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(values, list(targets.values()), each, retain_graph=True)

        for name, g in zip(targets, vmap(pull)(*given), strict=True):
            if name:
                state.gradients.add(name, DenseGradient(g.unflatten(0, (state.columns, self.examples))))

    def _find_reached(self, values: Collection[Tensor]) -> list[str]:
        """Return the names of the leaves of values, the empty name for layers."""
        leaves = {**self.leaves, "": self.common_anchor}
        return list({name: None for value in values for name in find_reached_leaves(value, leaves)})

    def _watch_factored(
        self, kind: str, value: Tensor, first: int, y: Tensor, factor: Callable[[Tensor], FactoredGradient]
    ) -> Tensor:
        name = self.names.get(id(value))
        if name is None:
            number = self._number_value(value)
            self._note_use(kind, value.shape, first)
        else:
            number = -1
            self.factored.append(name)
            self._note_use(f"{kind} of {name}", torch.Size((0,)), first)
        return _watch(y, self.anchor, partial(self.receiver.receive_factored, name, number, factor))

    def _number_value(self, value: Tensor) -> int:
        for number, each in enumerate(self.values):
            if each is value:
                return number
        self.values.append(value)
        return len(self.values) - 1

    def _note_use(self, kind: str, shape: torch.Size, first: int) -> None:
        self.uses.append((kind, torch.Size((first // self.examples, *shape))))

    def _note_input(self, what: str, x: Tensor) -> None:
        self.inputs.append((what, x, x._version))


def _watch(y: Tensor, anchor: Tensor, receive: Receive) -> Tensor:
    watched: Tensor = GradientTap.apply(y, anchor, receive)  # type: ignore[no-untyped-call]
    return watched


def run_expanded(network: Network, batch: Batch, expected: LayerCalls) -> tuple[Tensor, Backward]:
    """Run a forward pass over a batch in which parameters used outside of layers have a copy for each example.

    Args:
        network: the model.
        batch: the examples.
        expected: the calls of layers and the uses of parameters for other examples.
    """
    found = _ExpandedPass(network, batch)
    if found.found.blocked:
        raise NotBatchableError(f"parameters without a copy for each example: {dict(found.found.blocked)}")
    # One example alone cannot be confused with another.
    if batch.examples > 1 and not expected.agrees_with(found.found):
        raise NotBatchableError("the model uses its parameters in another way than for other examples")
    return found.outputs.detach(), found.backward


def find_uses(network: Network, batches: Collection[Batch], calls: LayerCalls) -> LayerCalls | None:
    """Return the calls and the uses of parameters, the same in all batches, or None if there are no such.

    ``calls`` are those of layers for one example.
    """
    try:
        found = [_ExpandedPass(network, batch).found for batch in batches]
    except Exception:  # whatever an operation raises for a copy of a parameter
        return None
    return found[0] if all(calls.agrees_with(each) and found[0].agrees_with(each) for each in found) else None
