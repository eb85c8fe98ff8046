"""What a study trains and tests on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Examples:
    """Training and test examples of one classification problem, as tensors with examples first, on the CPU or a GPU."""

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor

    @property
    def classes(self) -> int:
        return int(max(self.train_labels.max(), self.test_labels.max())) + 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.train_inputs.shape[1:])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Examples:
        """The same elsewhere, inputs in this precision."""
        return Examples(
            self.train_inputs.to(device, dtype),
            self.train_labels.to(device),
            self.test_inputs.to(device, dtype),
            self.test_labels.to(device),
        )
