"""Copies of a model, and whether two models compute the same function."""

from __future__ import annotations

from copy import deepcopy
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from saltflat.engine.session import check_not_moved, open_session
from saltflat.errors import ModelError, NonFiniteError, format_error_line
from saltflat.symmetry.tracing.run import Seen, compute_outputs, find_tensors

SAME = 1e-9  # relative, in float64
COARSE = 1e-3  # the same where a model runs in less

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def copy_model(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model."""
    check_not_moved(model.parameters())
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
            "Expected one that copy.deepcopy accepts, but got a model that cannot be copied "
            f"({format_error_line(error)}). Try taking what cannot be copied (hooks, open files, computed tensors) "
            "out of it first."
        ) from error


def copy_in_float64(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs, float]:
    """A copy of the model and its inputs in float64, and how far outputs may be apart by rounding.

    A model that insists on another precision is taken in its own.
    """

    def convert_leaf(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    wide, wide_inputs = copy_model(model).double(), tree_map(convert_leaf, inputs)
    try:
        with open_session(wide, "eval"), torch.no_grad(), PrecisionRecorder() as coarsest:  # type: ignore[no-untyped-call]
            compute_outputs(wide, *wide_inputs)
    except ModelError:
        return copy_model(model), inputs, COARSE
    return wide, wide_inputs, compute_tolerance(coarsest.step)


def compute_tolerance(step: float) -> float:
    """How far outputs may be apart, where numbers are rounded to steps of this size on the way."""
    # Some models go through shorter numbers, whatever their weights are.
    return SAME if step <= torch.finfo(torch.float64).eps else step**0.5


class PrecisionRecorder(TorchDispatchMode):
    """The largest rounding step of any number that operations give."""

    step = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.step = max(self.step, torch.finfo(leaf.dtype).eps)
        return out


def compare_outputs(one: nn.Module, two: nn.Module, inputs: Inputs, seen: Seen = find_tensors) -> float:
    """How far the outputs of two models differ; those of the first must be finite."""
    # A loan gives random states back: both begin with the same.
    with open_session(one, "eval"), torch.no_grad():
        before = compute_outputs(one, *inputs, seen)
    with open_session(two, "eval"), torch.no_grad():
        after = compute_outputs(two, *inputs, seen)
    if not all(bool(each.isfinite().all()) for each in before):
        raise NonFiniteError(
            "Expected finite ones, which can be compared, but got NaN or infinity in the model's outputs on this "
            "example. Try passing another example, or look at the weights."
        )
    if len(before) != len(after):
        return inf
    return max((compute_relative_difference(a, b) for a, b in zip(before, after, strict=True)), default=0.0)


def compute_relative_difference(one: Tensor, two: Tensor) -> float:
    """Largest, relative to the largest entry."""
    if one.shape != two.shape:
        return inf
    largest = float(one.abs().max()) if one.numel() else 0.0
    return float((one - two).abs().max()) / max(largest, 1e-300) if one.numel() else 0.0
