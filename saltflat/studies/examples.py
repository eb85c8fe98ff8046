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
        """The same elsewhere, inputs in this precision; whole numbers, such as those of words, stay whole."""

        def move_inputs(inputs: Tensor) -> Tensor:
            return inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)

        return Examples(
            move_inputs(self.train_inputs),
            self.train_labels.to(device),
            move_inputs(self.test_inputs),
            self.test_labels.to(device),
        )

    def copy(self) -> Examples:
        """The same in memory of its own."""
        return Examples(
            self.train_inputs.clone(), self.train_labels.clone(), self.test_inputs.clone(), self.test_labels.clone()
        )
