"""Copy models, and compare the functions of two models."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from saltflat.engine.session import open_session
from saltflat.errors import ModelError, NonFiniteError, format_error_line
from saltflat.symmetry.tracing.run import ModelInputs, OutputSelector, compute_outputs, find_tensors
from saltflat.validation import check_not_moved

TOLERANCE = 1e-9  # relative, in float64
COARSE_TOLERANCE = 1e-3  # relative, in lower precisions


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy that shares nothing with the model."""
    check_not_moved(model.parameters())
    # Weights that a hook computes before each pass (pruning, weight_norm) remain on the module, and deepcopy does not
    # support such non-leaf tensors.
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
            "Expected a model that copy.deepcopy accepts, but got one that cannot be copied "
            f"({format_error_line(error)}). Try removing attributes that cannot be copied (hooks, open files, computed "
            "tensors)."
        ) from error


def copy_in_float64(model: nn.Module, inputs: ModelInputs) -> tuple[nn.Module, ModelInputs, float]:
    """Return a copy of the model and its inputs in float64, and the tolerance for rounding errors of outputs.

    A model that does not run in float64 is copied in its own precision.
    """

    def convert_tensor(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    wide, wide_inputs = copy_model(model).double(), tree_map_only(Tensor, convert_tensor, inputs)
    try:
        with open_session(wide, "eval"), torch.no_grad(), PrecisionRecorder() as coarsest:  # type: ignore[no-untyped-call]
            compute_outputs(wide, *wide_inputs)
    except ModelError:
        return copy_model(model), inputs, COARSE_TOLERANCE
    return wide, wide_inputs, compute_tolerance(coarsest.step)


def compute_tolerance(step: float) -> float:
    """Return the tolerance for outputs, given the largest machine epsilon of all intermediate results."""
    # Some models compute in a lower precision in between, whatever their weights are.
    return TOLERANCE if step <= torch.finfo(torch.float64).eps else step**0.5


class PrecisionRecorder(TorchDispatchMode):
    """Records the largest machine epsilon among the results of all operations."""

    step = 0.0

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.step = max(self.step, torch.finfo(leaf.dtype).eps)
        return out


def compare_outputs(
    one: nn.Module, two: nn.Module, inputs: ModelInputs, select_outputs: OutputSelector = find_tensors
) -> float:
    """Return the largest relative difference between the outputs of two models; those of the first must be finite."""
    # A session restores random states: both models start with the same.
    with open_session(one, "eval"), torch.no_grad():
        before = compute_outputs(one, *inputs, select_outputs)
    with open_session(two, "eval"), torch.no_grad():
        after = compute_outputs(two, *inputs, select_outputs)
    if not all(bool(each.isfinite().all()) for each in before):
        raise NonFiniteError(
            "Expected finite outputs, but got NaN or infinity in the model's outputs on this example. Try passing "
            "another example, or checking the weights."
        )
    if len(before) != len(after):
        return inf
    return max((compute_relative_difference(a, b) for a, b in zip(before, after, strict=True)), default=0.0)


def compute_relative_difference(one: Tensor, two: Tensor) -> float:
    """Return the largest absolute difference, relative to the largest absolute entry of the first tensor."""
    if one.shape != two.shape:
        return inf
    largest = float(one.abs().max()) if one.numel() else 0.0
    return float((one - two).abs().max()) / max(largest, 1e-300) if one.numel() else 0.0
