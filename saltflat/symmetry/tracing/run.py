"""Run a model on an example, for inputs and outputs of any structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from saltflat.engine.data import Data, prepare_data, read_batches
from saltflat.engine.network import check_dense_outputs, extract_logits
from saltflat.errors import ModelError, OptionError, SaltflatError, format_error_line

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
