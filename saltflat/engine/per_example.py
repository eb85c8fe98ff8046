"""From a chunk of examples and columns to the factored per-example gradients of every parameter.

There are three ways to get them, and they give the same numbers:

* ``single``: one example at a time. Everything a layer sees belongs to that example, so this is right for any model: it
  is the definition of the other two.
* ``together``: the examples of a chunk in one forward and one backward pass. Needs the examples along the first axis of
  what every layer is given, and every measured parameter to be used by a layer with a rule.
* ``mapped``: the pass for one example, vectorised by ``torch.func.vmap``. Needs nothing of the layers, but operations
  that can be vectorised.

Which of them a model allows is not guessed: see :mod:`saltflat.engine.reference_gradients`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.func import vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from saltflat.engine.data import Batch
from saltflat.engine.network import Network
from saltflat.errors import ModelError, SaltflatError
from saltflat.gradients.base import DenseGradient, FactoredGradient, unwrap_columns

Emit = Callable[[str, FactoredGradient], None]
Receive = Callable[[Tensor], None]


class NotBatchableError(Exception):
    """The examples of a chunk cannot be told apart in what a layer was given."""


@dataclass(frozen=True)
class LayerCalls:
    """What the layers are given for one example: the same for all, unless the model routes examples by their values."""

    inputs: tuple[torch.Size, ...]
    shapes: tuple[tuple[int, torch.Size], ...]

    @classmethod
    def from_batch(cls, batch: Batch, calls: Sequence[tuple[nn.Module, torch.Size]]) -> LayerCalls:
        inputs = tuple(t.shape[1:] if batch.has_example_axis(t) else t.shape for t in batch.list_tensors())
        return cls(inputs, tuple((id(module), shape) for module, shape in calls))


class _GradientTap(torch.autograd.Function):
    """The identity, watched in the backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor, receive: Receive) -> Tensor:
        ctx.receive = receive
        # A copy, because a model may go on to overwrite this in place, and an identity may not be overwritten.
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.receive(unwrap_columns(g))
        return g, g.new_zeros(()), None


class GradientCollector:
    """Collects the calls of one pass and emits each parameter's form when all of its uses are known."""

    def __init__(self, network: Network, emit: Emit) -> None:
        self.network, self.emit = network, emit
        self.waiting: Counter[str] = Counter()
        self.forms: dict[str, FactoredGradient] = {}

    def expect_call(self, module: nn.Module) -> None:
        self.waiting.update(self.network.layers[module].names.values())

    def expect_use(self, name: str) -> None:
        self.waiting[name] += 1

    def receive_gradient(self, module: nn.Module, x: Tensor, g: Tensor) -> None:
        layer = self.network.layers[module]
        forms = layer.rule.factor(layer.constants, x, g)
        for key, name in layer.names.items():
            self.add(name, forms[key])

    def add(self, name: str, form: FactoredGradient) -> None:
        self.forms[name] = self.forms[name].add(form) if name in self.forms else form
        self.waiting[name] -= 1
        if self.waiting[name] == 0:
            self.emit(name, self.forms.pop(name))

    def finish(self) -> None:
        """Emit what had uses that do not reach the outputs."""
        for name, form in self.forms.items():
            self.emit(name, form)


def run_batched(
    network: Network,
    batch: Batch,
    loop: bool = False,
    rules: bool = True,
    expected: LayerCalls | None = None,
    record: list[tuple[nn.Module, Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Backward]:
    """One forward pass over a batch; the backward pass is returned as a function of the columns.

    Args:
        network: the model.
        batch: the examples.
        loop: propagate the columns one after the other instead of vectorised.
        rules: take the gradients of layers by their rules; without them autograd differentiates every parameter.
        expected: what one example alone shows the layers. A batch of the same kind of inputs that shows them something
            else is one whose examples cannot be told apart.
        record: filled with the calls of layers that have a rule.
    """
    anchor = torch.zeros((), device=get_device(network), requires_grad=True)
    leaves = make_leaves(network)
    calls: list[tuple[nn.Module, Tensor]] = []
    versions: list[int] = []
    receivers: list[Receive | None] = []
    examples = batch.examples

    def tap(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        number = len(calls)
        calls.append((module, _split_examples(x.detach(), examples, 0)))
        versions.append(x._version)
        _split_examples(y, examples, 0)
        if record is not None:
            record.append((module, x.detach(), y.detach()))
        receivers.append(None)

        def receive(g: Tensor) -> None:
            receiver = receivers[number]
            if receiver is not None:  # a forward pass may differentiate on its own
                receiver(g)

        watched: Tensor = _GradientTap.apply(y, anchor, receive)  # type: ignore[no-untyped-call]
        return watched

    outputs = network(batch, tap if rules else None, leaves)
    found = LayerCalls.from_batch(batch, [(module, x.shape[1:]) for module, x in calls])
    if expected is not None and found.inputs == expected.inputs and found.shapes != expected.shapes:
        raise NotBatchableError("the layers see other shapes than for one example alone")
    tapped = bool(find_reached_leaves(outputs, {"": anchor}))
    direct = find_reached_leaves(outputs, leaves)
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
        for (module, x), version in zip(calls, versions, strict=True):
            if x._version != version:
                raise ModelError(
                    "Expected the layer's input to stay: its gradient is made of it (training refuses this too), "
                    f"but got a model that overwrites what it gave to a {type(module).__name__} in place. Try "
                    "replacing the in-place operation."
                )
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
                        module, x, _split_examples(g.expand(len(columns), *g.shape[1:]), examples, 1)
                    )
                )
        values = pull(columns, last)
        for (module, x), parts in zip(calls, held, strict=True):
            if parts:
                gradients.receive_gradient(module, x, _split_examples(torch.cat(parts), examples, 1))
        for name, value in zip(direct, values, strict=True):
            gradients.add(name, DenseGradient(value.unsqueeze(1)))
        gradients.finish()

    return outputs.detach(), backward


Backward = Callable[[Tensor, Emit, bool], None]


def run_vmapped(network: Network, batch: Batch) -> tuple[Tensor, Backward]:
    """The same for all examples of a batch by one vectorised pass each."""
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
            # What could be mapped in the probe need not be in every batch.
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
    """The measured parameters as leaves of a graph."""
    return {name: value.detach().requires_grad_() for name, value in network.measured.items()}


def check_hidden_parameters(network: Network, outputs: Tensor) -> None:
    """Refuse a model that reaches its parameters past its modules: what it does with them cannot be measured."""
    own = {name: value for name, value in network.model.named_parameters() if name in network.measured}
    found = find_reached_leaves(outputs, own)
    if found:
        raise ModelError(
            f"Expected parameters to be read from modules, but got a forward pass that uses {found[0]!r} by a "
            "reference that is not among the module's attributes, lists and dicts (a closure, say). Try registering "
            f"{found[0]!r} where it is used, and reading it from there."
        )


class UnanimousBranching(TorchFunctionMode):
    """While it is entered, ``if mask.all():`` is decided for all mapped examples at once where they agree."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and is_functorch_wrapped_tensor(args[0]):
            value = args[0]
            while is_functorch_wrapped_tensor(value):
                value = get_unwrapped(value)
            truths = (value != 0).flatten()
            if bool((truths == truths[0]).all()):
                return bool(truths[0])
        return func(*args, **(kwargs or {}))


def get_device(network: Network) -> torch.device:
    return next(iter(network.measured.values())).device


def _split_examples(values: Tensor, examples: int, axis: int) -> Tensor:
    """Give the examples an axis of their own, in front of what a batch of one would have shown."""
    if examples == 1:
        return values.unsqueeze(axis)
    if values.dim() <= axis or values.shape[axis] % examples or values.shape[axis] == 0:
        raise NotBatchableError(f"{examples} examples in an array of shape {tuple(values.shape)}")
    result: Tensor = values.unflatten(axis, (examples, -1))
    return result


def find_reached_leaves(outputs: Tensor, leaves: Mapping[str, Tensor]) -> list[str]:
    """Names of the leaves that the outputs depend on outside of layers with a rule."""
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


class OperationRecorder(TorchDispatchMode):
    """Notices operations that may treat the examples of a batch by their values.

    ``sizes``: results whose size depends on values (masks, experts). ``order``: sorting, and numbers read from tensors.
    ``coarsest``: the shortest floating-point type among all results. ``bytes``: of all results.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = self.order = False
        self.coarsest, self.bytes = torch.float64, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if torch.Tag.dynamic_output_shape in func.tags:
            # Indexing by numbers has the size of the numbers.
            masks = func is not aten.index.Tensor or any(i is not None and i.dtype == torch.bool for i in args[1])
            self.sizes |= masks
        elif func.overloadpacket in (aten.sort, aten.argsort, aten.topk) or (
            func is aten._local_scalar_dense.default and args[0].dtype != torch.bool
        ):
            self.order = True
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.bytes += each.numel() * each.element_size()
                if each.is_floating_point() and torch.finfo(each.dtype).bits < torch.finfo(self.coarsest).bits:
                    self.coarsest = each.dtype
        return result
