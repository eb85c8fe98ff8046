"""Run a model on an example, whatever form its inputs and outputs have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from saltflat.engine.network import check_dense_outputs, extract_logits
from saltflat.engine.read_data import prepare_data, read_batches
from saltflat.errors import ModelError, OptionError, SaltflatError, format_error_line

# Which of a model's outputs are looked at.
Seen = Callable[[Any], list[Tensor]]
# How deep objects in objects are looked into for tensors.
DEPTH = 8


def parse_example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named inputs of a model."""
    if isinstance(example, Mapping):
        return (), dict(example)
    args = tuple(example) if isinstance(example, tuple | list) else (example,)
    tensors = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)]
    if tensors and not any(leaf.numel() for leaf in tensors):
        raise OptionError(
            f"Expected at least one input, but got an example without numbers, of shape {tuple(tensors[0].shape)}. "
            "Try taking the first examples of the data."
        )
    if not tensors:
        raise OptionError(
            f"Expected an input of the model, but got an example of type {type(example).__name__} without a tensor. "
            "A tensor, a tuple of inputs or a dict of named ones. Try next(iter(loader))[0]."
        )
    return args, {}


def compute_outputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen | None = None
) -> list[Tensor]:
    """All tensors of real or complex numbers that a model gives and that are looked at."""
    # Copies, because a model may write to its inputs.
    given = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))
    with wrap_model_errors(model):
        found = model(*given[0], **given[1])
    return [each.detach() for each in (seen or find_tensors)(found) if each.is_floating_point() or each.is_complex()]


def select_logits(found: Any) -> list[Tensor]:
    """What a loss is taken of: not the caches and hidden states that some models give besides."""
    return [extract_logits(found)]


def find_tensors(found: Any) -> list[Tensor]:
    """Every tensor in what a model gave, also in objects that are only known to have attributes."""
    tensors = list(_iterate_tensors(found, DEPTH))
    for tensor in tensors:
        check_dense_outputs(tensor)
    if not tensors:
        raise ModelError(
            f"Expected outputs that can be looked at, but got {type(found).__name__} from the model, in which no "
            "tensor is to be found. Try returning a tensor, or tensors in a tuple, a dict or an object with "
            "attributes."
        )
    return tensors


def _iterate_tensors(found: Any, depth: int) -> Iterator[Tensor]:
    for leaf in tree_flatten(found)[0]:
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
    """What goes wrong in the model's own code is told as such."""
    try:
        yield
    except SaltflatError:
        raise
    except Exception as error:
        raise ModelError(
            f"Expected an example that {type(model).__name__} accepts, but got an error from the model on this "
            f"example ({format_error_line(error)}). Try passing inputs of the right shape and kind, with the axis of "
            "examples; several inputs as a tuple."
        ) from error


# More than one, so that an axis of examples cannot be taken for one that is there by chance.
FEW = 2


def take_example(data: Any, dtype: torch.dtype | None = None, count: int = FEW) -> tuple[Any, ...] | dict[str, Any]:
    """The inputs of the first examples: positional ones as a tuple, or keyword inputs as a dict.

    Example:
        >>> take_example((torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])))
        (tensor([[0., 1.], [2., 3.]]),)
    """
    first = next(read_batches(prepare_data(data))).cut(0, count).to(dtype)
    return first.kwargs or first.args
