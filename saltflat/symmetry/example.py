"""The first examples of the data, to run a model on."""

from __future__ import annotations

from typing import Any

import torch

from saltflat.data import prepare_data, read_batches

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
