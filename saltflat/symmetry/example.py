"""The first examples of the data, to run a model on."""

from __future__ import annotations

from typing import Any

import torch

from saltflat.data import batches, checked

# More than one, so that an axis of examples cannot be taken for one that is there by chance.
FEW = 2


def example_of(data: Any, dtype: torch.dtype | None = None, count: int = FEW) -> tuple[Any, ...] | dict[str, Any]:
    """The inputs of the first examples: positional ones as a tuple, or keyword inputs as a dict.

    Example:
        >>> example_of((torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])))
        (tensor([[0., 1.], [2., 3.]]),)
    """
    first = next(batches(checked(data))).cut(0, count).to(dtype)
    return first.kwargs or first.args
