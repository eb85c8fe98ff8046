"""Run a model on an example, copy it, and compare the outputs of two models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from saltflat.engine.data import Data, prepare_data, read_batches
from saltflat.engine.model_output import check_dense_outputs, extract_logits
from saltflat.engine.session import open_session
from saltflat.errors import ModelError, NonFiniteError, OptionError, SaltflatError, format_error_line
from saltflat.validation import check_not_moved

# An input of a model: a tensor, a tuple of positional inputs or a dict of named ones.
Example: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]
# Positional and named inputs of a model.
ModelInputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
# A tensor, or tensors in tuples, dicts and objects with attributes.
ModelOutput: TypeAlias = Any
# Selects the outputs of a model that must not change.
OutputSelector: TypeAlias = Callable[[ModelOutput], list[Tensor]]
# Depth to which nested objects are searched for tensors.
MAX_DEPTH = 8


def parse_example(example: Example) -> ModelInputs:
    """Return the positional and named inputs of a model."""
    if isinstance(example, Mapping):
        return (), dict(example)
    args = tuple(example) if isinstance(example, tuple | list) else (example,)
    tensors = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)]
    if tensors and not any(leaf.numel() for leaf in tensors):
        raise OptionError(
            f"Expected at least one input, but got an empty example of shape {tuple(tensors[0].shape)}. Try passing "
            "the first examples of the data."
        )
    if not tensors:
        raise OptionError(
            "Expected an input of the model (a tensor, a tuple of inputs or a dict of named ones), but got an example "
            f"of type {type(example).__name__} without a tensor. Try next(iter(loader))[0]."
        )
    return args, {}


def compute_outputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], select_outputs: OutputSelector | None = None
) -> list[Tensor]:
    """Return the selected outputs of a model that are floating-point or complex tensors."""
    positional, named = clone_inputs((args, kwargs))
    with wrap_model_errors(model):
        outputs = model(*positional, **named)
    tensors = (select_outputs or find_tensors)(outputs)
    return [each.detach() for each in tensors if each.is_floating_point() or each.is_complex()]


def clone_inputs(inputs: ModelInputs) -> ModelInputs:
    """Return inputs with all tensors copied, because a model may write to its inputs."""
    copies: ModelInputs = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, inputs)
    return copies


def select_logits(outputs: ModelOutput) -> list[Tensor]:
    """Return only the tensor the loss is computed from, without caches and hidden states."""
    return [extract_logits(outputs)]


def find_tensors(outputs: ModelOutput) -> list[Tensor]:
    """Return every tensor in a model's outputs, including those in attributes of objects."""
    tensors = list(_iterate_tensors(outputs, MAX_DEPTH))
    for tensor in tensors:
        check_dense_outputs(tensor)
    if not tensors:
        raise ModelError(
            f"Expected outputs that contain a tensor, but got {type(outputs).__name__} without one from the model. "
            "Try returning a tensor, or tensors in a tuple, a dict or an object with attributes."
        )
    return tensors


def _iterate_tensors(outputs: ModelOutput, depth: int) -> Iterator[Tensor]:
    for leaf in tree_flatten(outputs)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and isinstance(leaf, Mapping):
            yield from _iterate_tensors(dict(leaf), depth - 1)
        elif depth and not isinstance(leaf, type | nn.Module):
            slots = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
            held = {name: getattr(leaf, name, None) for name in [*getattr(leaf, "__dict__", {}), *slots]}
            if held:
                yield from _iterate_tensors(held, depth - 1)


@contextmanager
def wrap_model_errors(model: nn.Module) -> Iterator[None]:
    """Convert errors raised by the model's own code to a ``ModelError``."""
    try:
        yield
    except SaltflatError:
        raise
    except Exception as error:
        raise ModelError(
            f"Expected an example that {type(model).__name__} accepts, but got an error from the model on this "
            f"example ({format_error_line(error)}). Try passing inputs of the right shape and dtype, with a batch "
            "axis; several inputs as a tuple."
        ) from error


# More than one, so that the batch axis cannot be confused with another axis of size one.
EXAMPLE_SIZE = 2


def take_example(
    data: Data, dtype: torch.dtype | None = None, count: int = EXAMPLE_SIZE
) -> tuple[Any, ...] | dict[str, Any]:
    """Return the inputs of the first examples: positional ones as a tuple, or named ones as a dict.

    Example:
        >>> take_example((torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])))
        (tensor([[0., 1.], [2., 3.]]),)
    """
    first = next(read_batches(prepare_data(data))).cut(0, count).to(dtype)
    return first.kwargs or first.args


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
