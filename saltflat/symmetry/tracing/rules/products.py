"""Matrix products and convolutions: all products in a sum have equal scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saltflat.layers import GROUP, IN, OUT, POSITION
from saltflat.symmetry.tracing.scales import ANY, GROUND, TensorScales
from saltflat.symmetry.tracing.trace import OperationCall, rule


@rule("mm matmul mv dot vdot bmm")
def propagate_matmul(call: OperationCall) -> Any:
    """Contract the scales of two operands."""
    return contract_tensors(call, *call.args[:2]).reshape(call.out.shape)


@rule("addmm addmv baddbmm")
def propagate_addmm(call: OperationCall) -> Any:
    """Contract the scales of two operands and add a bias."""
    return add_bias(call, contract_tensors(call, *call.args[1:3]).reshape(call.out.shape), call.args[0])


@rule("linear")
def propagate_linear(call: OperationCall) -> Any:
    """Contract the scales of inputs with a transposed weight and add a bias."""
    x, weight = call.args[:2]
    numbers = call.tracker.get_tensor_scales(weight)
    transposed = TensorScales(numbers.ids.mT, numbers.entries, numbers.fixed)
    found = _contract_tensor_scales(call, call.tracker.get_tensor_scales(x), transposed).reshape(call.out.shape)
    return add_bias(call, found, call.get_argument(2, "bias"))


def add_bias(call: OperationCall, ids: Tensor, bias: Tensor | None) -> Tensor:
    """Return the scales after adding a bias to values with the scales ``ids``."""
    if bias is None:
        return ids
    numbers = call.get_entry_numbers(bias)
    if numbers is None:
        return call.scales.equate(ids, call.get_scale_ids(bias))
    call.entries.record_addition(numbers, ids)
    call.entries.assign_scales(numbers, ids)
    return call.scales.equate(ids, call.get_scale_ids(bias))


def contract_tensors(call: OperationCall, one: Tensor, two: Tensor) -> Tensor:
    """Return the scales of a matrix product."""
    return _contract_tensor_scales(call, call.tracker.get_tensor_scales(one), call.tracker.get_tensor_scales(two))


def _contract_tensor_scales(call: OperationCall, one: TensorScales, two: TensorScales) -> Tensor:
    """Contract ``(..., rows, middle)`` with ``(..., middle, columns)``; either may hold parameter entries."""
    A, B = one.ids, two.ids
    A = A[None] if A.dim() == 1 else A
    B = B[:, None] if B.dim() == 1 else B
    # A weight that is repeated for every example is still one weight.
    while two.entries and B.dim() > 2 and bool((B[:1] == B).all()):
        B = B[0]
    while one.entries and A.dim() > 2 and bool((A[:1] == A).all()):
        A = A[0]
    if two.entries and B.dim() == 2:
        rows = call.entries.look_up_scales(A) if one.entries else A
        call.entries.record_use(B, (IN, OUT))
        return multiply_by_weight(call, rows.reshape(-1, A.shape[-1]), B).reshape(*A.shape[:-1], B.shape[1])
    if one.entries and A.dim() == 2:
        columns = (call.entries.look_up_scales(B) if two.entries else B).mT
        call.entries.record_use(A, (OUT, IN))
        turned = multiply_by_weight(call, columns.reshape(-1, A.shape[-1]), A.mT)
        return turned.reshape(*columns.shape[:-1], A.shape[0]).mT
    if two.entries and not one.entries:
        return _multiply_weight_stack(call, A, B)
    if one.entries and not two.entries:
        return _multiply_weight_stack(call, B.mT, A.mT).mT
    A, B = (
        call.entries.look_up_scales(m.ids).reshape(ids.shape) if m.entries else ids for m, ids in ((one, A), (two, B))
    )
    if A.dim() == 2 and B.dim() == 2:
        return _contract_scales(call, A, B)
    if B.dim() == 2:
        return _contract_scales(call, A.reshape(-1, A.shape[-1]), B).reshape(*A.shape[:-1], B.shape[1])
    shape = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    A, B = A.expand(*shape, *A.shape[-2:]).flatten(0, -3), B.expand(*shape, *B.shape[-2:]).flatten(0, -3)
    alike: dict[bytes, Tensor] = {}
    for a, b in zip(A, B, strict=True):
        key = a.numpy().tobytes() + b.numpy().tobytes()
        if key not in alike:
            alike[key] = _contract_scales(call, a, b)
    found = [alike[a.numpy().tobytes() + b.numpy().tobytes()] for a, b in zip(A, B, strict=True)]
    return torch.stack(found).reshape(*shape, A.shape[-2], B.shape[-1])


def _multiply_weight_stack(call: OperationCall, A: Tensor, weights: Tensor) -> Tensor:
    """Multiply scales ``(..., rows, middle)`` by a stack of weights ``(..., middle, columns)``."""
    call.entries.record_use(weights, (*[GROUP] * (weights.dim() - 2), IN, OUT))
    shape = torch.broadcast_shapes(A.shape[:-2], weights.shape[:-2])
    rows = A.expand(*shape, *A.shape[-2:]).reshape(-1, *A.shape[-2:])
    every = weights.expand(*shape, *weights.shape[-2:]).reshape(-1, *weights.shape[-2:])
    found = torch.zeros(*rows.shape[:2], weights.shape[-1], dtype=torch.float64)
    # All inputs of one weight are processed together, since it has one scale for each of its units.
    places: dict[bytes, list[int]] = {}
    for place, weight in enumerate(every):
        places.setdefault(weight.numpy().tobytes(), []).append(place)
    for several in places.values():
        part = multiply_by_weight(call, rows[several].flatten(0, 1), every[several[0]])
        found[several] = part.reshape(len(several), -1, part.shape[1])
    return found.reshape(*shape, *found.shape[1:])


def multiply_by_weight(call: OperationCall, rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows of scales by a matrix of parameter entries: every column gets a new scale."""
    different, places = rows.unique(dim=0, return_inverse=True)
    found = torch.zeros(len(different), weight.shape[1], dtype=torch.float64)
    for linked, middle in _split_connected_rows(different != ANY):
        offsets, tail = _align_rows(call, different[linked][:, middle])
        part = weight[middle]
        # A mask may set all weights of a unit to zero: then the unit is zero, too.
        head = torch.where((part != ANY).any(0), call.scales.add_variables(weight.shape[1]), float(ANY))
        call.entries.assign_scales(part, head, tail[:, None])
        found[linked] = call.scales.add(offsets[:, None], head)
    return found[places]


def _split_connected_rows(there: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split rows into groups with common nonzero columns, and return the rows and columns of each group."""
    if bool(there.all()):
        return [(torch.arange(len(there)), torch.arange(there.shape[1]))]
    waiting, found = set(torch.nonzero(there.any(1)).flatten().tolist()), []
    while waiting:
        rows = {min(waiting)}
        middle = there[list(rows)].any(0)
        while len(more := {number for number in waiting if bool((there[number] & middle).any())}) > len(rows):
            rows, middle = more, there[sorted(more)].any(0)
        waiting -= rows
        found.append((torch.tensor(sorted(rows)), torch.nonzero(middle).flatten()))
    # Entries that are only multiplied by zeros have no effect.
    return found


def _align_rows(call: OperationCall, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Require every row to be one base row plus a constant; return the constants and the base row."""
    base = rows[0].clone()
    offsets = torch.full((len(rows),), float(GROUND), dtype=torch.float64)
    if not bool((rows == ANY).any()):
        differences = call.scales.add(rows, base.expand(rows.shape), -1)
        return call.scales.equate_along(differences, [1]), base
    # Zeros carry no information: where the base row has zeros, other overlapping rows complete it.
    waiting = list(range(len(rows)))
    while waiting:
        number = next(each for each in waiting if bool(((rows[each] != ANY) & (base != ANY)).any()))
        both, new = (rows[number] != ANY) & (base != ANY), (rows[number] != ANY) & (base == ANY)
        offsets[number] = call.scales.equate_along(call.scales.add(rows[number][both], base[both], -1), [0])
        base[new] = call.scales.add(rows[number][new], offsets[number], -1)
        waiting.remove(number)
    return offsets, base


def _contract_scales(call: OperationCall, A: Tensor, B: Tensor) -> Tensor:
    """Contract two arrays of scales: products along the middle axis must have equal scales."""
    rows, row_places = A.unique(dim=0, return_inverse=True)
    columns, column_places = B.mT.contiguous().unique(dim=0, return_inverse=True)
    scales = call.scales
    if bool((rows == ANY).any() or (columns == ANY).any()):
        # Zeros carry no information, so every row is compared with every column.
        tried = [scales.equate_along(scales.add(rows, column), [1]) for column in columns]
        return torch.stack(tried, 1)[row_places][:, column_places]
    # It suffices to compare all rows with the first column, and all columns with the first row.
    across = scales.equate_along(scales.add(rows, columns[:1]), [1])
    down = scales.equate_along(scales.add(columns, rows[:1]), [1])
    found = scales.add(across[:, None], scales.add(down, down[:1], -1)[None, :])
    return found[row_places][:, column_places]


@rule("_trilinear")
def propagate_trilinear(call: OperationCall) -> Any:
    """Contract the scales of three factors, as in a bilinear layer."""
    numbers = call.get_entry_numbers(call.args[1])
    if numbers is not None and [list(each) for each in call.args[3:7]] == [[1, 3], [0], [1, 2], [2, 3]]:
        # (examples, in) and (examples, in) times (out, in, in): a weight whose inputs are pairs of units.
        one, two = map(call.get_scale_ids, call.args[:3:2])
        call.entries.record_use(numbers, (OUT, IN, IN))
        pairs = call.scales.add(one[:, :, None], two[:, None, :])
        return multiply_by_weight(call, pairs.flatten(1), numbers.flatten(1).mT)
    total = call.get_scale_ids(1.0)
    for value, axes in zip(call.args[:3], call.args[3:6], strict=True):
        ids = call.get_scale_ids(value)
        for axis in sorted(axes):
            ids = ids.unsqueeze(axis)
        total = call.scales.add(total, ids)
    return call.scales.equate_along(total, call.args[6])


@rule("convolution _convolution convolution_overrideable")
def propagate_convolution(call: OperationCall) -> Any:
    """Contract the scales of channels, or of single positions if they differ, with a kernel."""
    x, weight, bias, stride, padding, dilation, transposed, extra, groups = call.args[:9]
    space = weight.dim() - 2
    marks = call.tracker.get_tensor_scales(weight)
    kernel = marks.ids.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    kernel = kernel.transpose(1, 2) if transposed else kernel  # (groups, out, in, *kernel)
    if marks.entries:
        call.entries.record_use(kernel, (GROUP, OUT, IN, *[POSITION] * space))
    images = call.get_scale_ids(x)
    images = images if images.dim() == space + 2 else images[None]
    if marks.entries and not _is_uniform(images):
        if transposed:
            # Equivalent to a convolution of an image with zeros between its pixels with the flipped kernel.
            images = _insert_zeros(images, weight.shape[2:], stride, padding, dilation, extra)
            kernel, stride, padding = kernel.flip(list(range(3, kernel.dim()))), [1], [0]
        found = _convolve_positions(call, images, kernel, stride, padding, dilation)
        # The bias is added along the last axis.
        return add_bias(call, found, bias).movedim(-1, 1).reshape(call.out.shape)
    channels = call.scales.equate_along(images, [0, *range(2, space + 2)])
    head = add_bias(call, _convolve_channels(call, channels, marks, kernel.flatten(3)), bias)
    return head.reshape(-1, *[1] * space).expand(call.out.shape).clone()


def _is_uniform(images: Tensor) -> bool:
    """Return whether every channel has one scale at all positions."""
    flat = images.transpose(0, 1).flatten(1)
    return bool((flat == flat[:, :1]).all())


def _convolve_channels(call: OperationCall, channels: Tensor, marks: TensorScales, kernel: Tensor) -> Tensor:
    groups = kernel.shape[0]
    tail = torch.where(channels == ANY, float(GROUND), channels).reshape(groups, 1, -1, 1)
    if marks.entries:
        head = call.scales.add_variables(groups * kernel.shape[1])
        call.entries.assign_scales(kernel, head.reshape(groups, -1, 1, 1), tail)
        return head
    products = call.scales.add(kernel, tail.expand(kernel.shape))
    return call.scales.equate_along(products, [2, 3]).reshape(-1)


def _convolve_positions(
    call: OperationCall,
    images: Tensor,
    kernel: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Multiply each patch by the kernel, for images whose scales differ between positions."""
    sizes = kernel.shape[3:]
    patches = F.pad(images, [side for pad in reversed(_expand_option(padding, sizes)) for side in (pad, pad)])
    for axis, (size, step, gap) in enumerate(
        zip(sizes, _expand_option(stride, sizes), _expand_option(dilation, sizes), strict=True), start=2
    ):
        patches = patches.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
    # (images, channels, *positions, *kernel) -> (images, *positions, groups, channels and kernel)
    places = patches.shape[2 : 2 + len(sizes)]
    patches = patches.movedim(1, 1 + len(sizes)).reshape(images.shape[0], *places, kernel.shape[0], -1)
    found = [
        multiply_by_weight(call, patches[..., group, :].flatten(0, -2), kernel[group].flatten(1).mT)
        for group in range(kernel.shape[0])
    ]
    return torch.cat(found, 1).reshape(images.shape[0], *places, -1)


def _insert_zeros(
    images: Tensor, sizes: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    extra: Sequence[int],
) -> Tensor:  # fmt: skip
    sides: list[int] = []
    for axis, (size, step, pad, gap, more) in enumerate(
        zip(sizes, *(_expand_option(option, sizes) for option in (stride, padding, dilation, extra)), strict=True),
        start=2,
    ):
        wide = images.new_zeros(*images.shape[:axis], (images.shape[axis] - 1) * step + 1, *images.shape[axis + 1 :])
        wide[(slice(None),) * axis + (slice(None, None, step),)] = images
        images = wide
        around = gap * (size - 1) - pad
        sides = [around, around + more, *sides]
    return F.pad(images, sides)


def _expand_option(option: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return list(option) if len(option) == len(sizes) else list(option) * len(sizes)


@rule("cudnn_convolution cudnn_convolution_transpose")
def propagate_cudnn_convolution(call: OperationCall) -> Any:
    """Fix all scales: operations of a specific backend have another order of arguments."""
    x, weight = call.args[:2]
    call.pin(x, weight, known=False)
    return call.make_fixed_scales()
