"""A number that changes when a stored tensor does: files can be whole and still have a wrong byte in them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Eight hexadecimal digits for tensors on the CPU, whatever their order.

    Example:
        >>> checksum({"a": torch.zeros(2)}) == checksum({"a": torch.zeros(2)}) != checksum({"a": torch.ones(2)})
        True
    """
    found = 0
    for name in sorted(tensors):
        each = tensors[name].detach().contiguous()
        found = zlib.crc32(f"{name} {tuple(each.shape)} {each.dtype}".encode(), found)
        # As bytes: numpy does not know every type of torch's.
        found = zlib.crc32(each.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"
