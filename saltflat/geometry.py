"""A weight as matrices: which of its entries belong to which input and output channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from saltflat.errors import OptionError
from saltflat.network import Network

Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class Geometry:
    """How a parameter of two or more axes is a stack of matrices.

    Attributes:
        shape: of the parameter.
        groups: of channels that do not see each other.
        inputs_first: whether the first axis counts inputs, as in transposed convolutions and embeddings.
    """

    shape: torch.Size
    groups: int = 1
    inputs_first: bool = False

    def matrices(self, values: Tensor) -> Tensor:
        """An array of the parameter's shape as ``(groups, out, in, positions)``."""
        stacked: Tensor = values.reshape(self.groups, self.shape[0] // self.groups, self.shape[1], -1)
        return stacked.transpose(1, 2) if self.inputs_first else stacked

    def units(self, axis: str) -> tuple[Tensor, int]:
        """For every entry of the parameter the number of its unit, and how many units there are.

        ``"column"`` counts the units that feed the layer, ``"row"`` those that the layer feeds.
        """
        if axis not in ("column", "row"):
            raise OptionError(f"Got axis={axis!r}. Want 'column' or 'row'. Do: leave it out for columns.")
        first, second = self.shape[:2]
        by_first = (axis == "column") == self.inputs_first
        leading = torch.arange(first)[:, None]
        # Within a group the second axis counts on: group g's channels come after those of the groups before.
        following = leading // (first // self.groups) * second + torch.arange(second)
        number = leading.expand(first, second) if by_first else following
        spread = number.reshape(first, second, *([1] * (len(self.shape) - 2))).expand(self.shape)
        return spread.contiguous(), first if by_first else second * self.groups


def geometries(network: Network) -> Mapping[str, Geometry]:
    """The measured parameters of two or more axes, as the module sees them that owns their name."""
    return {
        name: _of(network.model.get_submodule(name.rpartition(".")[0]), value.shape)
        for name, value in network.measured.items()
        if value.dim() > 1
    }


def _of(owner: nn.Module, shape: torch.Size) -> Geometry:
    if isinstance(owner, Transposed):
        return Geometry(shape, owner.groups, inputs_first=True)
    if isinstance(owner, Convolution):
        return Geometry(shape, owner.groups)
    # Reading row i of a table is multiplying it with the i-th unit vector from the left.
    return Geometry(shape, inputs_first=isinstance(owner, nn.Embedding | nn.EmbeddingBag))
