"""Summarize the rescalings of a network: blocks of units, and the layers between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array, hstack

from saltflat.symmetry.tracing.scales import collapse_repeats

if TYPE_CHECKING:
    from saltflat.symmetry.group import ScaledTensor, Symmetries
    from saltflat.symmetry.tracing.trace import Obstacle


# In place of the number of a block: what is fixed.
FIXED = -1

FREE, TIED, OPPOSITE, ABSORBED = "free", "tied", "opposite", "absorbed"


@dataclass(frozen=True)
class ScaleBlock:
    """Scales that occur in the same places: usually the units of one layer, or of a residual stream.

    Attributes:
        name: the first layer that leads to it, with a number if another block has that name.
        scales: the number of scales.
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
        """The layers that lead to it."""
        return get_layer_names((*self.incoming, *self.opposite))

    @property
    def kind(self) -> str:
        """Absorbed if only BatchNorms depend on it, opposite, tied if several layers lead to it, or free."""
        if self.absorbed_by and not self.outgoing:
            return ABSORBED
        return OPPOSITE if self.opposite else TIED if len(self.layers) > 1 else FREE


@dataclass(frozen=True)
class LayerSummary:
    """A layer between blocks: a module with parameters, or a parameter of the model itself.

    Attributes:
        name: the name of the module or parameter.
        parameters: the names of its parameters within it.
        tails: the numbers of the blocks it comes from; -1 is what is fixed. Biases count only if there are no weights.
        heads: the numbers of the blocks it leads to.
        statistics: the blocks that the running statistics of a BatchNorm follow.
    """

    name: str
    parameters: tuple[str, ...]
    tails: tuple[int, ...]
    heads: tuple[int, ...]
    statistics: tuple[int, ...]

    @property
    def is_fixed(self) -> bool:
        """Whether the layer cannot move."""
        return {*self.tails, *self.heads, *self.statistics} <= {FIXED}


@dataclass(frozen=True)
class SymmetrySummary:
    """All blocks and layers, and what does not move.

    Attributes:
        blocks: in the order in which the forward pass meets them.
        layers: in the order of the model.
        scales: the number of independent scales.
        layer_scales: their number if every parameter has one factor for all its entries.
        moving: the number of parameter entries that can move.
        entries: the number of parameter entries.
        fixed: parameters that cannot move, and the number of their entries.
        obstacles: operations that fix scales.
        kind: the kind of the group.
        assumed: lines of code where the values of a mask decide the control flow.
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
    """Return the module of a parameter; the model's own parameters are layers themselves.

    Example:
        >>> get_layer_name("layer1.0.conv1.weight"), get_layer_name("class_token")
        ('layer1.0.conv1', 'class_token')
    """
    return name.rpartition(".")[0] or name


def get_layer_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the modules of parameters, each once."""
    return tuple(dict.fromkeys(map(get_layer_name, names)))


Pairs = NDArray[np.int64]
# Numbers of members: those with heads and with tails that have a positive power of a scale, and a negative one.
Places = list[list[int]]


def summarize_symmetries(group: Symmetries) -> SymmetrySummary:
    """Return what the table and the picture of a group show."""
    pairs = {name: each.find_pairs() for name, each in group.members.items()}
    sizes = group.forms @ np.sin(1.0 + np.e * np.arange(group.scales))
    # An entry from a unit to itself does not depend on its scale.
    apart = {name: each[~_find_self_pairs(sizes[each])] for name, each in pairs.items()}
    block_of, places = _group_scales(group.forms, list(apart.values()))
    names = list(group.members)
    statistics = {name for name in names if group.members[name].kind != "parameter"}
    many = np.bincount(block_of, minlength=len(places)).tolist()
    blocks = [_make_block(names, statistics, *each) for each in zip(places, many, strict=True)]
    moving = {
        name: _count_movable_entries(each, sizes) for name, each in group.members.items() if name not in statistics
    }
    return SymmetrySummary(
        blocks=_name_blocks(blocks),
        layers=_make_layers(group.forms, pairs, apart, statistics, block_of),
        scales=group.scales,
        layer_scales=_count_layer_scales(group, pairs),
        moving=sum(moving.values()),
        entries=sum(group.members[name].head.size for name in moving),
        fixed={name: group.members[name].head.size for name, moves in moving.items() if not moves},
        obstacles=group.obstacles,
        kind=group.kind,
        assumed=group.assumed,
    )


def _count_movable_entries(member: ScaledTensor, sizes: NDArray[np.float64]) -> int:
    moved = np.abs(sizes[collapse_repeats(member.head)] - sizes[collapse_repeats(member.tail)]) > 1e-9
    return int(np.count_nonzero(np.broadcast_to(moved, member.shape)))


def _find_self_pairs(sizes: NDArray[np.float64]) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = np.abs(sizes[:, 0] - sizes[:, 1]) < 1e-9
    return same & (np.abs(sizes[:, 0]) > 1e-9)


def _group_scales(forms: csr_array, pairs: list[Pairs]) -> tuple[NDArray[np.int64], list[Places]]:
    """Return the number of each scale's block, and the places in which the scales of each block occur."""
    where = [each[:, side] for side in (0, 1) for each in pairs]
    rows = np.concatenate([*where, np.empty(0, dtype=np.int64)])
    columns = np.repeat(np.arange(len(where)), [len(each) for each in where])
    places = csr_array(coo_array((np.ones(len(rows)), (rows, columns)), shape=(forms.shape[0], max(len(where), 1))))
    seen = csr_array(hstack([(forms > 0).astype(float).T @ places, (forms < 0).astype(float).T @ places]))
    seen.sort_indices()
    known: dict[bytes, int] = {}
    found = np.zeros(forms.shape[1], dtype=np.int64)
    first: list[Places] = []
    for scale in range(forms.shape[1]):
        here = seen.indices[seen.indptr[scale] : seen.indptr[scale + 1]]
        key = here.tobytes()
        if key not in known:
            known[key] = len(known)
            ends = np.searchsorted(here, len(pairs) * np.arange(1, 4))
            first.append([(part % max(len(pairs), 1)).tolist() for part in np.split(here, ends)])
        found[scale] = known[key]
    return found, first


def _make_block(names: list[str], statistics: set[str], places: Places, scales: int) -> ScaleBlock:
    up, up_tails, down, down_tails = places
    grows, shrinks = [names[number] for number in up], [names[number] for number in down]
    leaves = [names[number] for number in sorted({*up_tails, *down_tails})]
    if not any(name not in statistics for name in grows):
        grows, shrinks = shrinks, grows
    return ScaleBlock(
        name="",
        scales=scales,
        incoming=tuple(name for name in grows if name not in statistics),
        outgoing=tuple(name for name in leaves if name not in statistics),
        absorbed_by=get_layer_names(name for name in (*grows, *shrinks) if name in statistics),
        opposite=tuple(name for name in shrinks if name not in statistics),
    )


def _name_blocks(blocks: list[ScaleBlock]) -> tuple[ScaleBlock, ...]:
    taken: set[str] = set()
    numbers: defaultdict[str, count[int]] = defaultdict(lambda: count(1))
    found = []
    for block in blocks:
        name = (block.layers or block.absorbed_by or get_layer_names(block.outgoing) or ("?",))[0]
        again = (name if number == 1 else f"{name} ({number})" for number in numbers[name])
        unique = next(each for each in again if each not in taken)
        taken.add(unique)
        found.append(replace(block, name=unique))
    return tuple(found)


def _make_layers(
    forms: csr_array,
    pairs: Mapping[str, Pairs],
    apart: Mapping[str, Pairs],
    statistics: set[str],
    block_of: NDArray[np.int64],
) -> tuple[LayerSummary, ...]:
    empty = np.diff(forms.indptr) == 0

    def find_blocks(rows: NDArray[np.int64]) -> set[int]:
        rows = np.unique(rows[rows > 0])  # 0 fits any scale
        scales = forms[rows].indices if len(rows) else np.empty(0, dtype=np.int64)
        grounded = bool(empty[rows].any())
        return {int(each) for each in np.unique(block_of[scales])} | ({FIXED} if grounded else set())

    members: dict[str, list[str]] = {}
    for name in pairs:
        members.setdefault(get_layer_name(name), []).append(name)
    found = []
    for layer, names in members.items():
        own = [name for name in names if name not in statistics]
        tails = [find_blocks(apart[name][:, 1]) for name in own]
        # Biases come from what is fixed, which matters only if there are no weights.
        weights = [each for each in tails if each != {FIXED}] or tails
        found.append(
            LayerSummary(
                name=layer,
                parameters=tuple(name.removeprefix(f"{layer}.") for name in own),
                tails=tuple(sorted(set().union(*weights))),
                heads=tuple(sorted(set().union(*(find_blocks(apart[name][:, 0]) for name in own)))),
                statistics=tuple(sorted(set().union(*(find_blocks(pairs[n][:, 0]) for n in names if n in statistics)))),
            )
        )
    return tuple(found)


def _count_layer_scales(group: Symmetries, pairs: Mapping[str, Pairs]) -> int:
    if group.kind == "layer":
        return group.scales
    # The same equations from far fewer entries.
    small = {n: replace(each, head=pairs[n][:, 0], tail=pairs[n][:, 1]) for n, each in group.members.items()}
    return replace(group, members=small).restrict_to_layers().scales
