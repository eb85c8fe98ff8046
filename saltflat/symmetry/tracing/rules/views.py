"""Operations that rearrange, repeat or pad entries: their scales are rearranged alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saltflat.layers import IN, OUT
from saltflat.symmetry.tracing.scales import GROUND, TensorScales, make_constant_scales
from saltflat.symmetry.tracing.trace import OperationCall, replay_on_ids, rule

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


def propagate_rearrangement(call: OperationCall) -> Any:
    """Rearrange scales as the operation rearranges entries."""
    if call.name == "constant_pad_nd" and call.get_argument(2, "value", 0) not in (0, float("inf"), -float("inf")):
        return call.func(call.get_scale_ids(call.args[0]), call.args[1], float(GROUND))
    return replay_on_ids(call)


propagate_rearrangement.moves = True  # type: ignore[attr-defined]
rule(NAMES)(propagate_rearrangement)


@rule("_to_copy to type_as")
def propagate_conversion(call: OperationCall) -> Any:
    """Keep scales under a change of dtype; fix them if floats become integers."""
    source = call.args[0]
    if source.is_floating_point() and not call.out.is_floating_point():
        call.pin(source)
    marks = call.tracker.get_tensor_scales(source)
    return TensorScales(marks.ids.clone(), marks.entries, [marks.fixed[0]])


@rule("copy")
def propagate_copy(call: OperationCall) -> Any:
    """Give the destination the scales of the source."""
    return call.get_scale_ids(call.args[1]).expand(call.out.shape).clone()


@rule("fill zero")
def propagate_fill(call: OperationCall) -> Any:
    """Give all entries the scale of the filled value."""
    value = call.get_scale_ids(call.args[1]) if call.name == "fill" else torch.zeros((), dtype=torch.float64)
    return value.expand(call.out.shape).clone()


@rule(
    """
    zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
    new_empty_strided
    """
)
def propagate_new_tensor(call: OperationCall) -> Any:
    """Give constant scales to new tensors, which depend only on the shape and dtype of another."""
    return make_constant_scales(call.out)


@rule("index _unsafe_index")
def propagate_index(call: OperationCall) -> Any:
    """Require one scale along indexed axes if the indices depend on the input."""
    source, indices = call.args[0], call.args[1]
    return [
        _select_entries(
            call, source, [dim for dim, index in _find_indexed_dims(indices) if not call.is_constant(index)]
        )
    ]


def _find_indexed_dims(indices: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
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
def propagate_index_select(call: OperationCall) -> Any:
    """Require one scale along the indexed axis if the indices depend on the input."""
    source, dim, index = call.args[:3]
    return [_select_entries(call, source, [] if call.is_constant(index) else [dim])]


def _select_entries(call: OperationCall, source: Tensor, dims: list[int]) -> TensorScales:
    if not dims:
        found: TensorScales = replay_on_ids(call, call.args[1:])[0]
        return found
    numbers = call.get_entry_numbers(source)
    if numbers is not None and sum(size > 1 for axis, size in enumerate(source.shape) if axis not in dims) == 1:
        # Rows of a table, along any axis. The role of a selected matrix is not known yet.
        call.entries.record_use(numbers, [IN if axis in dims else OUT for axis in range(source.dim())])
    ids = call.scales.equate_along(call.get_scale_ids(source), dims, keepdim=True).expand(source.shape)
    chosen = [arg.cpu() if isinstance(arg, Tensor) else arg for arg in call.args[1:]]
    if call.name in ("index", "_unsafe_index"):
        chosen = [[None if index is None else index.cpu() for index in call.args[1]]]
    return TensorScales(call.func(ids, *chosen), False, [False])


@rule("repeat_interleave")
def propagate_repeat_interleave(call: OperationCall) -> Any:
    """Give fixed scales to indices that are repeated by given counts."""
    return call.make_fixed_scales()


@rule("embedding")
def propagate_embedding(call: OperationCall) -> Any:
    """Give all rows of a table the same scales, since any row may be selected."""
    return _assign_row_scales(call, call.args[0]).expand(call.out.shape)


def _assign_row_scales(call: OperationCall, table: Tensor) -> Tensor:
    numbers = call.get_entry_numbers(table)
    if numbers is None:
        return call.scales.equate_along(call.get_scale_ids(table), [0])
    row = call.scales.add_variables(table.shape[1])
    call.entries.record_use(numbers, (IN, OUT))
    call.entries.assign_scales(numbers, row)
    return row


@rule("_embedding_bag _embedding_bag_forward_only")
def propagate_embedding_bag(call: OperationCall) -> Any:
    """Give all rows of a table the same scales, times those of optional weights."""
    table, factors = call.args[0], call.get_argument(6, "per_sample_weights")
    row = _assign_row_scales(call, table)
    if factors is not None:
        row = call.scales.add(row, call.scales.equate_along(call.get_scale_ids(factors), [0]).expand(row.shape))
    first, *others = call.out
    return [row.expand(first.shape), *(call.make_fixed_scales(other) for other in others)]
