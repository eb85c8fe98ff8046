"""The words in which the rescalings of a network are told: blocks of units, the layers between them, and all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from saltflat.symmetry.watch import Obstacle

# In place of a block: what keeps its size.
FIXED = -1

FREE, TIED, OPPOSITE, ABSORBED = "free", "tied", "opposite", "absorbed"


@dataclass(frozen=True)
class ScaleBlock:
    """Scales that occur in the same places: most often the units of one layer, or of a residual stream.

    Attributes:
        name: the first layer that leads to it, with a number where another block has that name.
        scales: how many.
        incoming: parameters that grow with it.
        outgoing: parameters that shrink as it grows.
        absorbed_by: BatchNorms whose running statistics follow it.
        opposite: parameters that lead to it and shrink as it grows, as keys do when queries grow.
    """

    name: str
    scales: int
    incoming: tuple[str, ...]
    outgoing: tuple[str, ...]
    absorbed_by: tuple[str, ...]
    opposite: tuple[str, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers that lead to it."""
        return get_layer_names((*self.incoming, *self.opposite))

    @property
    def kind(self) -> str:
        """Absorbed if only BatchNorms see it, opposite, tied if several layers lead to it, or just free."""
        if self.absorbed_by and not self.outgoing:
            return ABSORBED
        return OPPOSITE if self.opposite else TIED if len(self.layers) > 1 else FREE


@dataclass(frozen=True)
class LayerSummary:
    """What lies between blocks: a module with parameters, or a parameter of the model itself.

    Attributes:
        name: of the module or parameter.
        parameters: their names within it.
        tails: numbers of the blocks it comes from; -1 is what is fixed. Biases do not count where there are weights.
        heads: numbers of the blocks it leads to.
        statistics: of a BatchNorm, the blocks that its running statistics follow.
    """

    name: str
    parameters: tuple[str, ...]
    tails: tuple[int, ...]
    heads: tuple[int, ...]
    statistics: tuple[int, ...]

    @property
    def is_fixed(self) -> bool:
        return {*self.tails, *self.heads, *self.statistics} <= {FIXED}


@dataclass(frozen=True)
class SymmetrySummary:
    """All blocks and layers, and what does not move.

    Attributes:
        blocks: in the order in which the forward pass meets them.
        layers: in the order of the model.
        scales: how many are independent.
        layer_scales: how many if every parameter has one factor for all its entries.
        moving: how many entries of parameters can move.
        entries: how many there are.
        fixed: parameters that cannot move at all, and their entries.
        obstacles: operations that keep scales from being free.
        kind: of the group.
        assumed: lines of code that decide by the values of a mask how the forward pass goes on.
    """

    blocks: tuple[ScaleBlock, ...]
    layers: tuple[LayerSummary, ...]
    scales: int
    layer_scales: int
    moving: int
    entries: int
    fixed: Mapping[str, int]
    obstacles: tuple[Obstacle, ...]
    kind: str
    assumed: tuple[str, ...]


def get_layer_name(name: str) -> str:
    """The module of a parameter; the model's own parameters are layers of their own.

    Example:
        >>> get_layer_name("layer1.0.conv1.weight"), get_layer_name("class_token")
        ('layer1.0.conv1', 'class_token')
    """
    return name.rpartition(".")[0] or name


def get_layer_names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(get_layer_name, names)))
