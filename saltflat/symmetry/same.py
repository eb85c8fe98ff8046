"""Copies of a model, and whether two models are the same function."""

from __future__ import annotations

from copy import deepcopy
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from saltflat.errors import ModelError, NonFiniteError, first_line
from saltflat.loan import loan
from saltflat.symmetry.running import Seen, outputs_of, tensors_in
from saltflat.turns import check_in_place

SAME = 1e-9  # relative, in float64
COARSE = 1e-3  # the same where a model runs in less

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def copied(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model."""
    check_in_place(model.parameters())
    # Weights that a hook computes before each pass (pruning, weight_norm) are left on the module by the last one, and
    # are no tensors that deepcopy takes.
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in [*vars(module).values(), *dict(module.named_buffers(recurse=False)).values()]
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        return deepcopy(model, computed)
    except Exception as error:
        raise ModelError(
            f"Got a model that cannot be copied ({first_line(error)}). Want one that copy.deepcopy accepts. "
            "Do: take what cannot be copied (hooks, open files, computed tensors) out of it first."
        ) from error


def widened(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs, float]:
    """A copy of the model and its inputs in float64, and how far outputs may be apart by rounding.

    A model that insists on another precision is taken in its own.
    """

    def one(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    wide, wide_inputs = copied(model).double(), tree_map(one, inputs)
    try:
        with loan(wide, "eval"), torch.no_grad(), Coarsest() as coarsest:  # type: ignore[no-untyped-call]
            outputs_of(wide, *wide_inputs)
    except ModelError:
        return copied(model), inputs, COARSE
    return wide, wide_inputs, tolerance_at(coarsest.step)


def tolerance_at(step: float) -> float:
    """How far outputs may be apart, where numbers are rounded to steps of this size on the way."""
    # Some models go through shorter numbers, whatever their weights are.
    return SAME if step <= torch.finfo(torch.float64).eps else step**0.5


class Coarsest(TorchDispatchMode):
    """The largest rounding step of any number that operations give."""

    step = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.step = max(self.step, torch.finfo(leaf.dtype).eps)
        return out


def apart(one: nn.Module, two: nn.Module, inputs: Inputs, seen: Seen = tensors_in) -> float:
    """How far the outputs of two models differ; those of the first must be finite."""
    # A loan gives random states back: both begin with the same.
    with loan(one, "eval"), torch.no_grad():
        before = outputs_of(one, *inputs, seen)
    with loan(two, "eval"), torch.no_grad():
        after = outputs_of(two, *inputs, seen)
    if not all(bool(each.isfinite().all()) for each in before):
        raise NonFiniteError(
            "Got NaN or infinity in the model's outputs on this example. Want finite ones, which can be compared. "
            "Do: pass another example, or look at the weights."
        )
    if len(before) != len(after):
        return inf
    return max((difference(a, b) for a, b in zip(before, after, strict=True)), default=0.0)


def difference(one: Tensor, two: Tensor) -> float:
    """Largest, relative to the largest entry."""
    if one.shape != two.shape:
        return inf
    largest = float(one.abs().max()) if one.numel() else 0.0
    return float((one - two).abs().max()) / max(largest, 1e-300) if one.numel() else 0.0
