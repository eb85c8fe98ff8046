"""Matrix products and convolutions: each sum runs over products of one scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saltflat.symmetry.scales import ANY, GROUND
from saltflat.symmetry.watch import Call, Marks, rule


@rule("mm matmul mv dot bmm")
def multiplies(call: Call) -> Any:
    return product(call, *call.args[:2]).reshape(call.out.shape)


@rule("addmm addmv baddbmm")
def multiplies_and_adds(call: Call) -> Any:
    return plus_bias(call, product(call, *call.args[1:3]).reshape(call.out.shape), call.args[0])


@rule("linear")
def applies(call: Call) -> Any:
    x, weight = call.args[:2]
    numbers = call.watch.marks(weight)
    turned = Marks(numbers.ids.mT, numbers.entries, numbers.fixed)
    found = _product(call, call.watch.marks(x), turned).reshape(call.out.shape)
    return plus_bias(call, found, call.argument(2, "bias"))


def plus_bias(call: Call, ids: Tensor, bias: Any) -> Tensor:
    if bias is None:
        return ids
    numbers = call.raw(bias)
    if numbers is None:
        return call.scales.join(ids, call.ids(bias))
    call.entries.claim(numbers, ids)
    return call.scales.join(ids, call.ids(bias))


def product(call: Call, one: Tensor, two: Tensor) -> Tensor:
    return _product(call, call.watch.marks(one), call.watch.marks(two))


def _product(call: Call, one: Marks, two: Marks) -> Tensor:
    """``(..., rows, middle)`` times ``(..., middle, columns)``, either of which may hold the entries of a parameter."""
    A, B = one.ids, two.ids
    A = A[None] if A.dim() == 1 else A
    B = B[:, None] if B.dim() == 1 else B
    if two.entries and B.dim() == 2:
        rows = call.entries.read(A) if one.entries else A
        return _weighted(call, rows.reshape(-1, A.shape[-1]), B).reshape(*A.shape[:-1], B.shape[1])
    if one.entries and A.dim() == 2 and B.dim() == 2:
        columns = call.entries.read(B) if two.entries else B
        return _weighted(call, columns.mT, A.mT).mT.contiguous()
    A, B = (call.entries.read(m.ids).reshape(ids.shape) if m.entries else ids for m, ids in ((one, A), (two, B)))
    if A.dim() == 2 and B.dim() == 2:
        return _contracted(call, A, B)
    if B.dim() == 2:
        return _contracted(call, A.reshape(-1, A.shape[-1]), B).reshape(*A.shape[:-1], B.shape[1])
    shape = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    A, B = A.expand(*shape, *A.shape[-2:]).flatten(0, -3), B.expand(*shape, *B.shape[-2:]).flatten(0, -3)
    alike: dict[bytes, Tensor] = {}
    for a, b in zip(A, B, strict=True):
        key = a.numpy().tobytes() + b.numpy().tobytes()
        if key not in alike:
            alike[key] = _contracted(call, a, b)
    found = [alike[a.numpy().tobytes() + b.numpy().tobytes()] for a, b in zip(A, B, strict=True)]
    return torch.stack(found).reshape(*shape, A.shape[-2], B.shape[-1])


def _weighted(call: Call, rows: Tensor, weight: Tensor) -> Tensor:
    """Rows of scales times a matrix of parameter entries: a new scale for every column."""
    different, places = rows.unique(dim=0, return_inverse=True)
    offsets, tail = _aligned(call, different)
    head = call.scales.fresh(weight.shape[1])
    call.entries.claim(weight, head, tail[:, None])
    return call.scales.plus(offsets[:, None], head)[places]


def _aligned(call: Call, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Let the rows differ from one of them by one number each; give the numbers, and that row."""
    # Zeros say nothing: where the first row has some, others fill in.
    base = rows[0]
    for row in rows[1:]:
        base = torch.where(base == ANY, row, base)
    base = torch.where(base == ANY, float(GROUND), base)
    differences = torch.where(rows == ANY, float(ANY), call.scales.plus(rows, base.expand(rows.shape), -1))
    return call.scales.join_along(differences, [1]), base


def _contracted(call: Call, A: Tensor, B: Tensor) -> Tensor:
    """Both are values: what A's rows have along the middle, B's columns must undo."""
    rows, row_places = A.unique(dim=0, return_inverse=True)
    columns, column_places = B.mT.contiguous().unique(dim=0, return_inverse=True)
    scales = call.scales
    # All rows against the first column, and the first row against all columns, is enough.
    across = scales.join_along(scales.plus(rows, columns[:1]), [1])
    down = scales.join_along(scales.plus(columns, rows[:1]), [1])
    found = scales.plus(across[:, None], scales.plus(down, down[:1], -1)[None, :])
    return found[row_places][:, column_places]


@rule("convolution _convolution convolution_overrideable cudnn_convolution cudnn_convolution_transpose")
def convolves(call: Call) -> Any:
    x, weight = call.args[:2]
    bias = call.argument(2, "bias") if "convolution" in call.name and "cudnn" not in call.name else None
    transposed = bool(call.argument(6, "transposed")) if "cudnn" not in call.name else "transpose" in call.name
    groups = call.argument(8, "groups") if "cudnn" not in call.name else _cudnn_groups(x, weight, transposed)
    space = weight.dim() - 2
    images = call.ids(x)
    channels = call.scales.join_along(images, [d for d in range(images.dim()) if d != images.dim() - 1 - space])
    tail = torch.where(channels == ANY, float(GROUND), channels).reshape(groups, 1, -1)
    marks = call.watch.marks(weight)
    numbers = marks.ids.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    if transposed:  # its first axis counts inputs
        numbers = numbers.transpose(1, 2)
    if marks.entries:
        head = call.scales.fresh(groups * numbers.shape[1])
        call.entries.claim(numbers, head.reshape(groups, -1, 1, 1), tail[..., None])
    else:
        products = call.scales.plus(numbers, tail[..., None].expand(numbers.shape))
        head = call.scales.join_along(products, [2, 3]).reshape(-1)
    head = plus_bias(call, head, bias)
    return head.reshape(-1, *[1] * space).expand(call.out.shape).clone()


def _cudnn_groups(x: Tensor, weight: Tensor, transposed: bool) -> int:
    return 1 if transposed else x.shape[1] // weight.shape[1]


@rule("_trilinear")
def multiplies_thrice(call: Call) -> Any:
    call.pin(*call.args[:3])
    return call.ground()
