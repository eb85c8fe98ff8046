"""Factored per-example gradients of every parameter, for a chunk of examples and columns.

Four strategies compute the same numbers:

* ``single``: one example at a time. Everything a layer receives belongs to that example, so this is correct for any
  model and defines the other three.
* ``together``: the examples of a chunk in one forward and one backward pass. It requires that the first axis of every
  layer's input counts the examples, and that every measured parameter is used by a layer with a rule.
* ``together, expanded``: the same, with a copy for each example of what is used outside of such layers
  (:mod:`saltflat.engine.expanded`).
* ``mapped``: the pass for one example, vectorized by ``torch.func.vmap``. It requires operations that can be
  vectorized, and nothing of the layers.

Which of them a model allows is determined by running it: see :mod:`saltflat.engine.strategy`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd.function import FunctionCtx
from torch.func import vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from saltflat.engine.data import Batch
from saltflat.engine.network import Network
from saltflat.errors import ModelError, SaltflatError
from saltflat.gradients.base import DenseGradient, FactoredGradient, unwrap_columns

Emit = Callable[[str, FactoredGradient], None]
Receive = Callable[[Tensor], None]


class NotBatchableError(Exception):
    """Raised if a layer's input cannot be split into the examples of a chunk."""


@dataclass(frozen=True)
class LayerCalls:
    """The calls of layers for one example, the same for all unless the model routes examples by their values.

    Attributes:
        inputs: the shapes of the model's inputs.
        shapes: the ids of the modules called, and the shapes of their inputs.
        uses: of parameters outside of layers, by kind and shape; None if they are not followed.
        blocked: the parameters among them that do not allow a copy for each example, and why.
    """

    inputs: tuple[torch.Size, ...]
    shapes: tuple[tuple[int, torch.Size], ...]
    uses: tuple[tuple[str, torch.Size], ...] | None = None
    blocked: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_batch(cls, batch: Batch, calls: Sequence[tuple[nn.Module, torch.Size]]) -> LayerCalls:
        """Return the calls of modules with inputs of these shapes for one example of a batch."""
        inputs = tuple(t.shape[1:] if batch.has_example_axis(t) else t.shape for t in batch.list_tensors())
        return cls(inputs, tuple((id(module), shape) for module, shape in calls))

    def count_elements(self) -> int:
        """Return the elements of the copies of parameters for one example."""
        return sum(shape.numel() for _, shape in self.uses or ())

    def agrees_with(self, other: LayerCalls) -> bool:
        """Return whether inputs of the same shapes led to the same calls and uses."""
        if self.inputs != other.inputs:
            return True
        if self.uses is None or other.uses is None:
            return self.shapes == other.shapes
        return self == other


@dataclass
class PassRecord:
    """What a forward pass ran.

    Attributes:
        calls: the layers with a rule that were called, their inputs and their outputs.
        outside: the parameters used outside of layers with a rule.
    """

    calls: list[tuple[nn.Module, Tensor, Tensor]] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


class TapContext(FunctionCtx):
    receive: Receive


class GradientTap(torch.autograd.Function):
    """The identity, which passes the gradients of the backward pass to a function."""

    @staticmethod
    def forward(ctx: TapContext, y: Tensor, anchor: Tensor, receive: Receive) -> Tensor:
        ctx.receive = receive
        # A copy, because the model may overwrite this in place, which an identity does not allow.
        return y.clone()

    @staticmethod
    def backward(ctx: TapContext, g: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.receive(unwrap_columns(g))
        return g, g.new_zeros(()), None


class GradientCollector:
    """Collects the gradients of one pass, and emits those of each parameter when all of its uses are known."""

    def __init__(self, network: Network, emit: Emit) -> None:
        self.network, self.emit = network, emit
        self.waiting: Counter[str] = Counter()
        self.forms: dict[str, FactoredGradient] = {}

    def expect_call(self, module: nn.Module) -> None:
        """Announce a use of the module's parameters."""
        self.waiting.update(self.network.layers[module].names.values())

    def expect_use(self, name: str) -> None:
        """Announce a use of a parameter outside of layers with a rule."""
        self.waiting[name] += 1

    def receive_gradient(self, module: nn.Module, x: Tensor, g: Tensor) -> None:
        """Add the gradients of a module's parameters, from its input and the gradients at its output."""
        layer = self.network.layers[module]
        forms = layer.rule.factor(layer.constants, x, g)
        for key, name in layer.names.items():
            self.add(name, forms[key])

    def add(self, name: str, form: FactoredGradient) -> None:
        """Add the gradients of one use of a parameter."""
        self.forms[name] = self.forms[name].add(form) if name in self.forms else form
        self.waiting[name] -= 1
        if self.waiting[name] == 0:
            self.emit(name, self.forms.pop(name))

    def finish(self) -> None:
        """Emit the gradients of parameters that have uses without effect on the outputs."""
        for name, form in self.forms.items():
            self.emit(name, form)


def run_batched(
    network: Network,
    batch: Batch,
    loop: bool = False,
    rules: bool = True,
    expected: LayerCalls | None = None,
    record: PassRecord | None = None,
) -> tuple[Tensor, Backward]:
    """Run a forward pass over a batch; return the outputs, and the backward pass as a function of the columns.

    Args:
        network: the model.
        batch: the examples.
        loop: propagate the columns one after the other, not vectorized.
        rules: compute the gradients of layers by their rules; otherwise autograd differentiates every parameter.
        expected: the calls of layers for one example alone. If a batch of inputs of the same shapes has other calls,
            its examples cannot be separated.
        record: filled with what the pass runs.
    """
    # In the precision of the model, so that the backward pass rounds nothing to another one.
    anchor = next(iter(network.measured.values())).new_zeros(()).requires_grad_()
    leaves = make_leaves(network)
    calls: list[tuple[nn.Module, Tensor]] = []
    versions: list[int] = []
    receivers: list[Receive | None] = []
    examples = batch.examples

    def tap(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if examples > 1 and x.shape[:1] == y.shape[:1] == (1,):
            # The same for all examples, such as positions in a table.
            x, y = x.expand(examples, *x.shape[1:]), y.expand(examples, *y.shape[1:])
        number = len(calls)
        calls.append((module, split_examples(x.detach(), examples, 0)))
        versions.append(x._version)
        split_examples(y, examples, 0)
        if record is not None:
            record.calls.append((module, x.detach(), y.detach()))
        receivers.append(None)

        def receive(g: Tensor) -> None:
            receiver = receivers[number]
            if receiver is not None:  # the forward pass itself may differentiate
                receiver(g)

        watched: Tensor = GradientTap.apply(y, anchor, receive)  # type: ignore[no-untyped-call]
        return watched

    outputs = network(batch, tap if rules else None, leaves)
    found = LayerCalls.from_batch(batch, [(module, x.shape[1:]) for module, x in calls])
    if expected is not None and not expected.agrees_with(found):
        raise NotBatchableError("the layers see other shapes than for one example alone")
    tapped = bool(find_reached_leaves(outputs, {"": anchor}))
    direct = find_reached_leaves(outputs, leaves)
    if record is not None:
        record.outside = direct
    if direct and examples > 1:
        raise NotBatchableError(f"parameters used outside of layers with a rule: {sorted(direct)}")

    def pull(columns: Tensor, last: bool) -> list[Tensor]:
        targets = [anchor] * tapped + [leaves[name] for name in direct]

        def pull_column(column: Tensor) -> tuple[Tensor, ...]:
            found = torch.autograd.grad(outputs, targets, column, retain_graph=loop or not last)
            return tuple(each.to_dense() if each.layout != torch.strided else each for each in found)

        results = (
            [torch.stack(each) for each in zip(*map(pull_column, columns), strict=True)]
            if loop
            else vmap(pull_column)(columns)
        )
        return list(results[tapped:])

    def backward(columns: Tensor, emit: Emit, last: bool) -> None:
        if not tapped and not direct:
            return
        check_unchanged((type(m).__name__, x, version) for (m, x), version in zip(calls, versions, strict=True))
        gradients = GradientCollector(network, emit)
        for module, _ in calls:
            gradients.expect_call(module)
        for name in direct:
            gradients.expect_use(name)
        held: list[list[Tensor]] = [[] for _ in calls]
        for number, (module, x) in enumerate(calls):
            if loop:
                receivers[number] = held[number].append
            else:
                receivers[number] = (
                    lambda g, module=module, x=x: gradients.receive_gradient(  # type: ignore[misc]
                        module, x, split_examples(g.expand(len(columns), *g.shape[1:]), examples, 1)
                    )
                )
        values = pull(columns, last)
        for (module, x), parts in zip(calls, held, strict=True):
            if parts:
                gradients.receive_gradient(module, x, split_examples(torch.cat(parts), examples, 1))
        for name, value in zip(direct, values, strict=True):
            gradients.add(name, DenseGradient(value.unsqueeze(1)))
        gradients.finish()

    return outputs.detach(), backward


def check_unchanged(inputs: Iterable[tuple[str, Tensor, int]]) -> None:
    """Check that the inputs of layers have the versions they had in the forward pass."""
    for layer, x, version in inputs:
        if x._version != version:
            raise ModelError(
                "Expected a layer's input to stay unchanged until the backward pass, as in training, but got a "
                f"model that overwrites the input of a {layer} in place. Try replacing the in-place operation."
            )


Backward = Callable[[Tensor, Emit, bool], None]


def run_vmapped(network: Network, batch: Batch) -> tuple[Tensor, Backward]:
    """Do the same as :func:`run_batched` with passes for one example that are vectorized over the batch."""
    with torch.no_grad():
        outputs = network(batch)
    modules: list[nn.Module] = []
    zeros: list[Tensor] = []

    def record_shape(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        modules.append(module)
        zeros.append(torch.zeros_like(y.detach(), memory_format=torch.contiguous_format))
        return y

    leaves = make_leaves(network)
    direct = {
        name: leaves[name].detach()
        for name in find_reached_leaves(network(batch.cut(0, 1), record_shape, leaves, plain=True), leaves)
    }

    def run_example(inputs: tuple[Any, Any], columns: Tensor) -> Any:
        args, kwargs = inputs
        alone = Batch(args, kwargs, batch.targets[:1], batch.first, 1)

        def forward(taps: list[Tensor], leaves: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
            seen: list[Tensor] = []

            def tap(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
                seen.append(x)
                return y + taps[len(seen) - 1]

            result = network(alone, tap, leaves, plain=True)
            return result, seen

        pulled: Any = vjp(forward, zeros, direct, has_aux=True)
        _, pull, seen = pulled
        return *vmap(pull)(columns), seen

    def backward(columns: Tensor, emit: Emit, last: bool) -> None:
        inputs = batch.map_tensors(lambda leaf: leaf.unsqueeze(1))
        axes = tree_map(lambda leaf: 0 if batch.has_example_axis(leaf) else None, (batch.args, batch.kwargs))
        try:
            with UnanimousBranching():
                g_taps, g_direct, seen = vmap(run_example, in_dims=(axes, 1))(inputs, columns.unsqueeze(2))
        except SaltflatError:
            raise
        except Exception as error:
            # Not every batch can be mapped if the probed one could.
            raise NotBatchableError(str(error)) from error
        gradients = GradientCollector(network, emit)
        for module in modules:
            gradients.expect_call(module)
        for name in direct:
            gradients.expect_use(name)
        for module, x, g in zip(modules, seen, g_taps, strict=True):
            gradients.receive_gradient(module, x.detach(), g.transpose(0, 1))
        for name, g in g_direct.items():
            gradients.add(name, DenseGradient(g.transpose(0, 1)))
        gradients.finish()

    return outputs, backward


def make_leaves(network: Network) -> dict[str, Tensor]:
    """Return the measured parameters as leaves of a graph."""
    return {name: value.detach().requires_grad_() for name, value in network.measured.items()}


def check_hidden_parameters(network: Network, outputs: Tensor) -> None:
    """Check that a model reads its parameters from its modules, where they can be replaced."""
    own = {name: value for name, value in network.model.named_parameters() if name in network.measured}
    found = find_reached_leaves(outputs, own)
    if found:
        raise ModelError(
            f"Expected parameters to be read from modules, but got a forward pass that uses {found[0]!r} through a "
            "reference that is not among the module's attributes, lists and dicts (a closure, say). Try registering "
            f"{found[0]!r} where it is used, and reading it from there."
        )


class UnanimousBranching(TorchFunctionMode):
    """Evaluates ``if mask.all():`` inside of ``vmap`` if all mapped examples agree."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__bool__ and is_functorch_wrapped_tensor(args[0]):
            value = args[0]
            while is_functorch_wrapped_tensor(value):
                value = get_unwrapped(value)
            truths = (value != 0).flatten()
            if bool((truths == truths[0]).all()):
                return bool(truths[0])
        return func(*args, **(kwargs or {}))


def split_examples(values: Tensor, examples: int, axis: int) -> Tensor:
    """Give the examples an axis of their own, in front of the axes that a batch of one has."""
    if examples == 1:
        return values.unsqueeze(axis)
    if values.dim() <= axis or values.shape[axis] % examples or values.shape[axis] == 0:
        raise NotBatchableError(f"{examples} examples in an array of shape {tuple(values.shape)}")
    result: Tensor = values.unflatten(axis, (examples, -1))
    return result


def find_reached_leaves(outputs: Tensor, leaves: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the leaves that the outputs depend on outside of layers with a rule."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    found, seen, stack = set(), set(), [outputs.grad_fn]
    if id(outputs) in names:
        return [names[id(outputs)]]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            found.add(names[id(variable)])
        stack.extend(following for following, _ in node.next_functions)
    return [name for name in leaves if name in found]
