"""Gradients that `torch.func.vmap` carries for many columns at once, as the plain arrays they are.

Inside a vectorised backward pass a gradient looks like that of a single column. The public way to the array of all
columns is an ``autograd.Function`` with a ``vmap`` method; its machinery takes longer than many of our products. These
three functions of torch are what it calls in the end.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch._C import _functorch


def unwrap_columns(g: Tensor) -> Tensor:
    """``(columns, *g)``, one column if ``g`` is not vectorised."""
    if not _functorch.is_batchedtensor(g):
        return g.unsqueeze(0)
    return _functorch.get_unwrapped(g).movedim(_functorch.maybe_get_bdim(g), 0)


def apply_to_columns(change: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
    """Apply ``change`` to the array of all columns."""
    changed = change(unwrap_columns(g))
    if not _functorch.is_batchedtensor(g):
        return changed.squeeze(0)
    return _functorch._add_batch_dim(changed, 0, _functorch.maybe_get_level(g))
