"""Data on the device of the model, and in its precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset


def move_to_device(data: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Tensors on the device, real numbers in ``dtype``; batches of other data are moved when they are read."""
    if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
        return tuple(part.to(device, dtype if part.is_floating_point() else part.dtype) for part in data)
    return data if device.type == "cpu" else DeviceBatches(data, device)


@dataclass(frozen=True)
class DeviceBatches:
    """Data whose batches come out on a device; as often as the data can be read."""

    data: Any
    device: torch.device

    def __iter__(self) -> Iterator[Any]:
        data = self.data
        if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            data = DataLoader(data, batch_size=128)
        for batch in data:
            yield tree_map(lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, batch)
