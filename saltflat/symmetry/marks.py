"""What is known of the entries of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saltflat.symmetry.scales import ANY, GROUND

# In place of an address: of empty tensors, and of those that are not stored as an array.
NOWHERE = 0


@dataclass(frozen=True)
class TensorScales:
    """What is known of a tensor's entries.

    Attributes:
        ids: an array of its shape with the number of each entry's scale, or of the parameter entry it is.
        entries: which of the two.
        fixed: one item, whether the tensor depends on nothing but constants; shared with its views.
    """

    ids: Tensor
    entries: bool
    fixed: list[bool]


def make_constant_scales(tensor: Tensor) -> TensorScales:
    """A constant; nothing makes zeros and infinities larger."""
    if not isinstance(tensor, Tensor):
        return TensorScales(torch.zeros(()), False, [True])
    if _has_no_storage(tensor):
        scale = ANY if tensor._is_zerotensor() else GROUND
        return TensorScales(torch.full(tensor.shape, scale, dtype=torch.float64), False, [True])
    free = ((tensor == 0) | tensor.isinf()).cpu() if tensor.is_floating_point() else (tensor == 0).cpu()
    ids = torch.where(free, float(ANY), float(GROUND)).double()
    return TensorScales(copy_in_memory_order(ids, tensor), False, [True])


def _has_no_storage(tensor: Tensor) -> bool:
    """Sparse ones, and the zeros that forward-mode derivatives are made of."""
    return tensor.layout is not torch.strided or tensor._is_zerotensor()


def copy_in_memory_order(ids: Tensor, tensor: Tensor) -> Tensor:
    """A copy in the tensor's own memory order, since views will be taken of both."""
    if _has_no_storage(tensor):
        return ids.clone()
    return torch.empty_like(tensor, dtype=torch.float64, device="cpu").copy_(ids)


def get_storage_address(tensor: Tensor) -> int:
    """Return where a tensor's values are, which it shares with its views; ``NOWHERE`` for one without any."""
    return NOWHERE if _has_no_storage(tensor) else tensor.untyped_storage().data_ptr()


def has_same_storage(one: Tensor, two: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
