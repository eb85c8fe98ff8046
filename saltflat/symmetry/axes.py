"""What the axes of parameters count, and the statistic of all rescalings, both found by tracing.

The axes of torch's convolutions count outputs, inputs and kernel positions, in that order. Custom code that multiplies
by its own parameters (``x @ W``, ``einsum``, a stack of experts, position embeddings) may use any order, so the forward
pass is traced. A geometry fits the rescalings of a network if each multiplies an entry by a factor of its row and one
of its column: then measures that minimize over factors of rows and columns are invariant to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from types import UnionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from saltflat.engine.context import Context, StatisticResult, find_geometries
from saltflat.engine.data import Batch
from saltflat.engine.network import Network
from saltflat.engine.statistic import statistic
from saltflat.errors import ModelError, NotDefinedError
from saltflat.layers import GROUP, IN, OUT, POSITION, Convolution, Geometry, PermutedGeometry, Transposed
from saltflat.symmetry.find import compute_output_change, find_batch_symmetries, trace_batch
from saltflat.symmetry.group import Array, Symmetries
from saltflat.symmetry.tracing.entries import ParameterEntries

# The functions that layers of torch apply to their own weights.
LAYER_FUNCTIONS: dict[type[nn.Module] | UnionType, set[str]] = {
    nn.Linear: {"linear", "_transformer_encoder_layer_fwd", "_native_multi_head_attention"},
    Convolution: {"conv1d", "conv2d", "conv3d"},
    Transposed: {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"},
    nn.Embedding | nn.EmbeddingBag: {"embedding", "embedding_bag", "linear"},
    nn.MultiheadAttention: {
        "multi_head_attention_forward",
        "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
    },
    nn.RNNBase | nn.RNNCellBase: {
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
    },
}
# Functions that may give every position of an image a scale of its own.
MATRIX_PRODUCTS = {
    *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "einsum", "bilinear", "tensordot")
}
NOT_SEPARABLE = (
    "rescaling units multiplies its entries by factors that are not products of a row factor and a column factor, so "
    "this value is not invariant to it"
)
NOT_TRACED = "the rescalings of its units could not be found, so this value may not be invariant to them"


def find_used_geometries(network: Network, batch: Batch) -> dict[str, Geometry]:
    """Return the geometries of measured parameters with two or more axes, as the model uses them on a batch."""
    layouts, few = dict(find_geometries(network)), batch.cut(0, 2)
    others = _find_custom_uses(network, few, set(layouts)) if layouts else set()
    if not others:
        return layouts
    try:
        group, entries = trace_batch(network, few)
        off, tolerance = compute_output_change(network, few, group)
    except ModelError:
        off, tolerance = inf, 0.0
    if not off <= tolerance:
        return {
            name: replace(layout, doubt=NOT_TRACED, guessed=True) if name in others else layout
            for name, layout in layouts.items()
        }
    # Generic values of the scales, which satisfy no equation by chance.
    sizes = group.forms @ np.sin(1.0 + np.e * np.arange(group.scales))
    for name in others:
        layouts[name] = _choose_geometry(name, layouts[name], group, entries, sizes)
    return layouts


def _find_custom_uses(network: Network, batch: Batch, names: set[str]) -> set[str]:
    """Return the parameters that are not used as layers of torch use their weights."""
    owners = {name: network.model.get_submodule(name.rpartition(".")[0]) for name in names}
    known = {name: _get_known_functions(name, owner) for name, owner in owners.items()}
    calls = WeightUseRecorder({id(network.constants[name]): name for name in names})
    try:
        with torch.no_grad(), calls:
            network(batch)
    except Exception:
        # Some models cannot run in this mode: then the use of their weights is unknown.
        return names
    return {name for name in names if not known[name] or not calls.found[name] <= known[name]}


def _get_known_functions(name: str, owner: nn.Module) -> set[str]:
    if "weight" not in name.rpartition(".")[2] or name.endswith("_orig"):
        return set()
    return next((functions for kind, functions in LAYER_FUNCTIONS.items() if isinstance(owner, kind)), set())


class WeightUseRecorder(TorchFunctionMode):
    """Records the names of the functions that are called with given tensors."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names
        self.found: dict[str, set[str]] = {name: set() for name in names.values()}
        self.by_position = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # Reading a shape does not use the values.
        if any(isinstance(leaf, Tensor) for leaf in tree_flatten(out)[0]):
            name = self._get_call_name(func, args)
            leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            given = [self.names[id(leaf)] for leaf in leaves if id(leaf) in self.names]
            for each in given:
                self.found[each].add(name)
            self.by_position |= name in MATRIX_PRODUCTS or bool(given and not name.startswith("conv"))
        return out

    def _get_call_name(self, func: Callable[..., Any], args: Sequence[Any]) -> str:
        name: str = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward" and args[0] is not args[1]:
            return f"{name} of two inputs"  # each input uses its own part of the weight
        if name.startswith("conv") and self.by_position:
            return f"{name} after a layer that may give every position a scale of its own"
        return name


def _choose_geometry(
    name: str, layout: Geometry, group: Symmetries, entries: ParameterEntries, sizes: Array
) -> Geometry:
    """Return the first use of a parameter that fits the rescalings, or the usual layout if no use was recorded."""
    member = group.members[name]
    logs = torch.from_numpy(np.asarray(sizes[member.head] - sizes[member.tail])).reshape(layout.shape)
    idle = entries.idle[entries.first[name] :][: layout.shape.numel()].reshape(layout.shape)
    seen = [*_iterate_geometries(layout.shape, entries.first[name], entries)]
    usual = replace(layout, guessed=not seen)
    # Rows of an embedding table are its inputs, however else it is used.
    candidates = [usual, *seen] if layout.inputs_first else [*seen, usual]
    if not seen and len(layout.shape) > 2:
        # A stack of experts, one matrix each, of which some are selected.
        roles = (GROUP, OUT, IN, *[POSITION] * (len(layout.shape) - 3))
        candidates.append(replace(PermutedGeometry.from_roles(layout.shape, tuple(layout.shape), roles), guessed=True))
    fitting = next((each for each in candidates if _is_separable(each, logs, idle)), None)
    return fitting or replace(candidates[0], doubt=NOT_SEPARABLE)


def _is_separable(geometry: Geometry, logs: Tensor, idle: Tensor) -> bool:
    """Return whether every log factor is a term of its row plus a term of its column."""
    L, used = geometry.view_as_matrices(logs), ~geometry.view_as_matrices(idle)
    # Unused rows and columns have no curvature and contribute nothing, whatever their factors are.
    rows, columns = used.any(3).any(2), used.any(3).any(1)
    group = torch.arange(L.shape[0])
    row, column = rows.byte().argmax(1), columns.byte().argmax(1)
    corner = L[group, row, column, 0][:, None, None, None]
    sums = L[group, row, :, 0][:, None, :, None] + L[group, :, column, 0][:, :, None, None] - corner
    both = rows[:, :, None, None] & columns[:, None, :, None]
    return bool(((L - sums).abs() * both <= 1e-9 * (1 + L.abs())).all())


def _iterate_geometries(shape: torch.Size, first: int, entries: ParameterEntries) -> Iterator[Geometry]:
    """Yield the geometry of a parameter in each of its uses."""
    for use in entries.uses.values():
        if first <= int(use.numbers[(0,) * use.numbers.dim()]) < first + shape.numel():
            steps = _find_axis_steps(use.numbers.long() - first)
            if steps is None:
                continue
            roles = entries.find_roles(use)
            pieces = [(step, count, role) for each, role in zip(steps, roles, strict=True) for step, count in each]
            # A use of one part may represent the whole parameter; otherwise parts are separate groups.
            parts = {step * count for step, count, _ in pieces}
            for ends in (set(), parts):
                found = _arrange_axes(shape, pieces, ends)
                if found is not None:
                    yield found


def _arrange_axes(shape: torch.Size, pieces: list[tuple[int, int, str]], ends: set[int]) -> Geometry | None:
    """Return the geometry that follows from the roles of axes in an operation on a reshaped or partial parameter."""
    total = shape.numel()
    # Axes end where an axis of the parameter or of the operation ends.
    ends = ends | {total, *(shape[axis:].numel() for axis in range(1, len(shape) + 1)), *(each[0] for each in pieces)}
    cuts = sorted(ends, reverse=True)
    if cuts[0] > total or any(large % small for large, small in pairwise(cuts)):
        return None
    sizes, roles = [], []
    for large, small in pairwise(cuts):
        sizes.append(large // small)
        # An axis of which the operation used one index, such as one of several experts, counts groups.
        roles.append(next((role for step, count, role in pieces if step <= small < step * count), GROUP))
    return _simplify_geometry(shape, tuple(sizes), tuple(roles))


def _simplify_geometry(shape: torch.Size, sizes: tuple[int, ...], roles: tuple[str, ...]) -> Geometry:
    """Return a plain matrix or convolution geometry where possible."""
    if sizes == tuple(shape) and set(roles[2:]) <= {POSITION}:
        if roles[:2] == (OUT, IN):
            return Geometry(shape)
        if roles[:2] == (IN, OUT):
            return Geometry(shape, inputs_first=True)
    return PermutedGeometry.from_roles(shape, sizes, roles)


def _find_axis_steps(numbers: Tensor) -> list[list[tuple[int, int]]] | None:
    """Return each axis as pairs of step and count, largest first, or None if numbers are not regular."""
    start = numbers[(0,) * numbers.dim()]
    lines = []
    total = start
    for axis in range(numbers.dim()):
        line = numbers[tuple(slice(None) if each == axis else 0 for each in range(numbers.dim()))] - start
        lines.append(line)
        total = total + line.reshape([-1 if each == axis else 1 for each in range(numbers.dim())])
    if not torch.equal(total.expand(numbers.shape), numbers):
        return None
    found = [_find_regular_steps(line.tolist()) for line in lines]
    return None if any(each is None for each in found) else [each for each in found if each is not None]


def _find_regular_steps(line: list[int]) -> list[tuple[int, int]] | None:
    """Return pairs of step and count that generate a list of numbers, or None if there are none.

    >>> _find_regular_steps([0, 1, 2, 12, 13, 14])
    [(12, 2), (1, 3)]
    """
    steps: list[tuple[int, int]] = []
    if not any(line):  # repeated entries
        return steps
    while len(line) > 1:
        step = line[1]
        count = next((n for n, value in enumerate(line) if value != n * step), len(line))
        if step <= 0 or len(line) % count:
            return None
        if any(line[n + i] != line[n] + i * step for n in range(0, len(line), count) for i in range(count)):
            return None
        steps, line = [(step, count), *steps], line[::count]
    return steps


@statistic(
    per="network", meaning="Every rescaling of the measured parameters that leaves the function unchanged.", passes=0
)
def rescalings(context: Context) -> StatisticResult:
    """Return the group of rescalings that change only measured parameters."""
    network = context.problem.network
    batch = next(iter(context.problem.read_batches())).cut(0, 8)
    group = context.computed.get("rescalings")
    if not isinstance(group, Symmetries):
        try:
            group = find_batch_symmetries(network, batch)
        except ModelError as error:
            raise NotDefinedError(f"needs the rescalings of the model: {error}") from error
        group = context.computed["rescalings"] = group.restrict_to_parameters(network.measured)
    _check_rescaling(network, batch, group)
    notes = [f"rescalings hold for inputs whose masks decide as those of the first: {line}" for line in group.assumed]
    return StatisticResult(group, notes=tuple(notes), without=lambda left_out: group)


def _check_rescaling(network: Network, batch: Batch, group: Symmetries) -> None:
    """Check that a random rescaling leaves the outputs unchanged: values that leave torch cannot be traced."""
    off, tolerance = compute_output_change(network, batch, group)
    if not off <= tolerance:
        raise NotDefinedError(
            f"needs the rescalings of the model, and those found change its outputs (by {off:.1e}): its forward pass "
            "contains operations that cannot be traced, such as a computation outside of torch"
        )
