"""Operations that only move numbers about, repeat them or put zeros between them: done to their scales alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saltflat.geometry import IN, OUT
from saltflat.symmetry.marks import Marks, by_value
from saltflat.symmetry.scales import GROUND
from saltflat.symmetry.watch import Call, mirrored, rule

NAMES = """
    view _unsafe_view reshape _reshape_alias expand permute t transpose mT swapaxes movedim squeeze unsqueeze flatten
    unflatten slice select narrow split split_with_sizes chunk tensor_split unbind unsafe_split unsafe_chunk
    detach alias clone contiguous lift_fresh lift
    flip roll rot90 repeat tile diagonal diag_embed as_strided unfold
    constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d _pad_circular
    pixel_shuffle pixel_unshuffle channel_shuffle im2col tril triu
    cat stack hstack vstack
    slice_scatter select_scatter diagonal_scatter resolve_conj resolve_neg
"""


def moves(call: Call) -> Any:
    if call.name == "constant_pad_nd" and call.argument(2, "value", 0) not in (0, float("inf"), -float("inf")):
        return call.func(call.ids(call.args[0]), call.args[1], float(GROUND))
    return mirrored(call)


moves.moves = True  # type: ignore[attr-defined]
rule(NAMES)(moves)


@rule("_to_copy to type_as")
def converts(call: Call) -> Any:
    source = call.args[0]
    if source.is_floating_point() and not call.out.is_floating_point():
        call.pin(source)
    marks = call.watch.marks(source)
    return Marks(marks.ids.clone(), marks.entries, [marks.fixed[0]])


@rule("copy")
def copies(call: Call) -> Any:
    return call.ids(call.args[1]).expand(call.out.shape).clone()


@rule("fill zero")
def fills(call: Call) -> Any:
    value = call.ids(call.args[1]) if call.name == "fill" else torch.zeros((), dtype=torch.float64)
    return value.expand(call.out.shape).clone()


@rule(
    """
    zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
    new_empty_strided
    """
)
def makes(call: Call) -> Any:
    """New arrays that take nothing but the shape and kind of another."""
    return by_value(call.out)


@rule("index _unsafe_index")
def indexes(call: Call) -> Any:
    """Chosen by numbers that may be others for another input: then all that may be chosen has one scale."""
    source, indices = call.args[0], call.args[1]
    return [_chosen(call, source, [dim for dim, index in _places(indices) if not call.fixed(index)])]


def _places(indices: Any) -> list[tuple[int, Tensor]]:
    dim = 0
    found: list[tuple[int, Tensor]] = []
    for index in indices:
        if index is not None:
            wide = index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
            found.extend((dim + each, index) for each in range(wide))
            dim += wide
        else:
            dim += 1
    return found


@rule("index_select gather take_along_dim")
def selects(call: Call) -> Any:
    source, dim, index = call.args[:3]
    return [_chosen(call, source, [] if call.fixed(index) else [dim])]


def _chosen(call: Call, source: Tensor, dims: list[int]) -> Marks:
    if not dims:
        found: Marks = mirrored(call, call.args[1:])[0]
        return found
    numbers = call.raw(source)
    if numbers is not None and sum(size > 1 for axis, size in enumerate(source.shape) if axis not in dims) == 1:
        # Rows of a table, by whatever axis; of what lies there as a matrix it is not yet known what it does.
        call.entries.note(numbers, [IN if axis in dims else OUT for axis in range(source.dim())])
    ids = call.scales.join_along(call.ids(source), dims, keepdim=True).expand(source.shape)
    chosen = [arg.cpu() if isinstance(arg, Tensor) else arg for arg in call.args[1:]]
    if call.name in ("index", "_unsafe_index"):
        chosen = [[None if index is None else index.cpu() for index in call.args[1]]]
    return Marks(call.func(ids, *chosen), False, [False])


@rule("repeat_interleave")
def counts(call: Call) -> Any:
    """Places, each as often as a tensor of counts says."""
    return call.ground()


@rule("embedding")
def looks_up(call: Call) -> Any:
    """Any row may be asked for: all rows of a table have the scales of what it gives."""
    return _row(call, call.args[0]).expand(call.out.shape)


def _row(call: Call, table: Tensor) -> Tensor:
    numbers = call.raw(table)
    if numbers is None:
        return call.scales.join_along(call.ids(table), [0])
    row = call.scales.fresh(table.shape[1])
    call.entries.note(numbers, (IN, OUT))
    call.entries.claim(numbers, row)
    return row


@rule("_embedding_bag _embedding_bag_forward_only")
def looks_up_several(call: Call) -> Any:
    """Sums, means or largest values of rows, which may have factors."""
    table, factors = call.args[0], call.argument(6, "per_sample_weights")
    row = _row(call, table)
    if factors is not None:
        row = call.scales.plus(row, call.scales.join_along(call.ids(factors), [0]).expand(row.shape))
    first, *others = call.out
    return [row.expand(first.shape), *(call.ground(other) for other in others)]
