"""Sums over the paths of a network, from one forward pass with squared parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from saltflat.engine.context import Context, StatisticResult
from saltflat.engine.data import Batch
from saltflat.engine.statistic import statistic
from saltflat.errors import NotDefinedError
from saltflat.statistics.example_gradients import get_only_input

# Operations that rearrange entries.
MOVES = (
    "view _unsafe_view reshape _reshape_alias flatten unflatten t transpose permute movedim expand squeeze unsqueeze "
    "slice select narrow split split_with_sizes unsafe_split chunk unbind unfold cat stack clone detach alias "
    "lift_fresh contiguous _to_copy copy repeat roll flip index_select"
)
# Operations that are sums or maxima with weights that are not negative, or the identity, of values that are not.
PASSES = (
    "relu leaky_relu _prelu_kernel abs positive sum mean amax max maximum max_pool1d max_pool2d max_pool3d "
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d "
    "avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d"
)
# Sums with weights, each with the positions of the two operands that are multiplied.
PRODUCTS = {"convolution": (0, 1), "mm": (0, 1), "mv": (0, 1), "dot": (0, 1), "bmm": (0, 1), "mul": (0, 1)}
PRODUCTS |= {"linear": (0, 1), "matmul": (0, 1), "addmm": (1, 2), "addmv": (1, 2), "baddbmm": (1, 2), "div": (0, 1)}


@statistic(
    per="network", meaning="Sum over all paths of the product of the squared parameters along the path.", passes=1
)
def path_sum(context: Context) -> StatisticResult:
    """Return the sum of the outputs with every parameter squared and every input 1.

    The shape of the input is that of the first example.

    Raises:
        NotDefinedError: if the outputs are not such a sum: for attention, normalization, smooth activations.
    """
    network = context.problem.network
    batch = next(iter(context.problem.read_batches())).cut(0, 1)
    start = torch.ones_like(get_only_input(batch))
    args, kwargs = batch.map_tensors(lambda tensor: start)
    with torch.no_grad():
        squares = {name: network.constants[name].square() for name, _ in network.model.named_parameters()}
        with PathChecker(start, squares):
            outputs = network(Batch(args, kwargs, batch.targets, 0, 1), leaves=squares, as_is=True)
    total = float(outputs.double().sum())
    if not total < float("inf"):
        raise NotDefinedError(f"overflows {outputs.dtype}".replace("torch.", ""))
    return StatisticResult(total, without=lambda group: total)  # it does not depend on the examples


class PathChecker(TorchDispatchMode):
    """Checks that a forward pass sums over paths.

    Every operation on values that depend on the input has to be a sum or a maximum of values times weights, where
    weights are parameters as they are, or constants that are not negative.

    Args:
        start: the input.
        parameters: by name.
    """

    def __init__(self, start: Tensor, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # References to the tensors keep their ids from being used again.
        self.paths: dict[int, Tensor] = {id(start): start}
        self.weights: dict[int, Tensor] = {id(each): each for each in parameters.values()}

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        name = name.removesuffix("_") if func._schema.is_mutable else name
        operands = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        if any(id(each) in self.paths for each in operands):
            self._check_operation(name, args, kwargs)
            kept = self.paths
        elif any(id(each) in self.weights for each in operands):
            if name not in MOVES.split():
                raise _make_error(f"computes the weights it multiplies by ({name})")
            kept = self.weights
        else:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        kept.update({id(each): each for each in tree_flatten(result)[0] if isinstance(each, Tensor)})
        return result

    def _check_operation(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise an error unless the operation is a sum or a maximum of values times weights."""
        if name in (*MOVES.split(), *PASSES.split()):
            return
        if name == "constant_pad_nd" and (args[2] if len(args) > 2 else kwargs.get("value", 0)) >= 0:
            return
        if name in ("add", *PRODUCTS):
            factors = [args[place] for place in PRODUCTS.get(name, ())]
            along = [isinstance(each, Tensor) and id(each) in self.paths for each in factors]
            if all(along) and along:
                raise _make_error(f"multiplies activations by each other ({name})")
            if name == "div" and along[1]:
                raise _make_error(f"divides by activations ({name})")
            if not all(map(self._is_nonnegative, [*args, *kwargs.values()] if name != "convolution" else args[:3])):
                raise _make_error(f"has negative constants ({name})")
            return
        if "batch_norm" in name:
            raise _make_error("has BatchNorm. Try folding it into other layers with saltflat.fold")
        raise _make_error(f"also computes {name}")

    def _is_nonnegative(self, value: Any) -> bool:
        """Return whether an operand is an activation, or has no negative entry."""
        if isinstance(value, Tensor):
            return id(value) in self.paths or not bool((value < 0).any())
        return not isinstance(value, int | float) or value >= 0


def _make_error(what: str) -> NotDefinedError:
    return NotDefinedError(f"needs a ReLU network of linear layers, convolutions and pooling, and this one {what}")
