"""What the axes of parameters count, determined from the operations that use them.

A convolution of torch has outputs, inputs and places of a kernel, in that order. Who multiplies by a parameter of his
own (``x @ W``, ``einsum``, a stack of experts, position embeddings) may have them in any order, so the forward pass is
watched. A geometry fits the rescalings of a network if each multiplies an entry by a factor of its row and one of its
column: then the measures that take the best factors of rows and columns do not notice it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from saltflat.engine.data import Batch
from saltflat.engine.geometry import (
    GROUP,
    IN,
    OUT,
    POSITION,
    Convolution,
    Geometry,
    PermutedGeometry,
    Transposed,
    find_geometries,
)
from saltflat.engine.network import Network
from saltflat.errors import ModelError
from saltflat.symmetry.find import compute_output_change, trace_batch
from saltflat.symmetry.group import Array, Symmetries
from saltflat.symmetry.tracing.entries import ParameterEntries

# The functions by which layers of torch use their own weights.
LAYERS: dict[Any, set[str]] = {
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
# What may give every position of an image a size of its own.
PRODUCTS = {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "einsum", "bilinear", "tensordot"}
UNEVEN = (
    "rescaling units multiplies its entries by factors that are not one of a row times one of a column, so this value "
    "does not stay under it"
)
UNSEEN = "the rescalings of its units could not be found, so this value may not stay under them"


def find_used_geometries(network: Network, batch: Batch) -> dict[str, Geometry]:
    """The measured parameters of two or more axes, as the model uses them on a batch."""
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
            name: replace(layout, doubt=UNSEEN, guessed=True) if name in others else layout
            for name, layout in layouts.items()
        }
    # No relation between numbers of scales is met by chance.
    sizes = group.forms @ np.sin(1.0 + np.e * np.arange(group.scales))
    for name in others:
        layouts[name] = _choose_geometry(name, layouts[name], group, entries, sizes)
    return layouts


def _find_custom_uses(network: Network, batch: Batch, names: set[str]) -> set[str]:
    """Those parameters that are used in another way than layers of torch use theirs."""
    owners = {name: network.model.get_submodule(name.rpartition(".")[0]) for name in names}
    known = {name: _get_known_functions(name, owner) for name, owner in owners.items()}
    calls = WeightUseRecorder({id(network.constants[name]): name for name in names})
    try:
        with torch.no_grad(), calls:
            network(batch)
    except Exception:
        # Some models refuse to be looked at: what their layers do with their weights is not known.
        return names
    return {name for name in names if not known[name] or not calls.found[name] <= known[name]}


def _get_known_functions(name: str, owner: nn.Module) -> set[str]:
    if "weight" not in name.rpartition(".")[2] or name.endswith("_orig"):
        return set()
    return next((functions for kind, functions in LAYERS.items() if isinstance(owner, kind)), set())


class WeightUseRecorder(TorchFunctionMode):
    """While it is entered, the names of the functions that are called with some tensors."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names
        self.found: dict[str, set[str]] = {name: set() for name in names.values()}
        self.by_position = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Asking for a shape is no use of the values.
        if any(isinstance(leaf, Tensor) for leaf in tree_flatten(out)[0]):
            name = self._get_call_name(func, args)
            leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            given = [self.names[id(leaf)] for leaf in leaves if id(leaf) in self.names]
            for each in given:
                self.found[each].add(name)
            self.by_position |= name in PRODUCTS or bool(given and not name.startswith("conv"))
        return out

    def _get_call_name(self, func: Any, args: Any) -> str:
        name: str = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward" and args[0] is not args[1]:
            return f"{name} of two inputs"  # of which each has a part of the weight to itself
        if name.startswith("conv") and self.by_position:
            return f"{name} behind a layer that may have given every position a size of its own"
        return name


def _choose_geometry(
    name: str, layout: Geometry, group: Symmetries, entries: ParameterEntries, sizes: Array
) -> Geometry:
    """The first use of a parameter that fits the rescalings; the usual layout if it was never seen used."""
    member = group.members[name]
    logs = torch.from_numpy(np.asarray(sizes[member.head] - sizes[member.tail])).reshape(layout.shape)
    idle = entries.idle[entries.first[name] :][: layout.shape.numel()].reshape(layout.shape)
    seen = [*_iterate_geometries(layout.shape, entries.first[name], entries)]
    usual = replace(layout, guessed=not seen)
    # Rows of a table are its inputs, whatever else is done with it.
    candidates = [usual, *seen] if layout.inputs_first else [*seen, usual]
    if not seen and len(layout.shape) > 2:
        # Experts of which some are chosen, one matrix each.
        roles = (GROUP, OUT, IN, *[POSITION] * (len(layout.shape) - 3))
        candidates.append(replace(PermutedGeometry.from_roles(layout.shape, tuple(layout.shape), roles), guessed=True))
    fitting = next((each for each in candidates if _is_separable(each, logs, idle)), None)
    return fitting or replace(candidates[0], doubt=UNEVEN)


def _is_separable(geometry: Geometry, logs: Tensor, idle: Tensor) -> bool:
    """Whether every logarithm of a factor is one of its row plus one of its column."""
    L, used = geometry.view_as_matrices(logs), ~geometry.view_as_matrices(idle)
    # Rows and columns that nothing uses have no curvature and add nothing, whatever their factors are.
    rows, columns = used.any(3).any(2), used.any(3).any(1)
    group = torch.arange(L.shape[0])
    row, column = rows.byte().argmax(1), columns.byte().argmax(1)
    corner = L[group, row, column, 0][:, None, None, None]
    sums = L[group, row, :, 0][:, None, :, None] + L[group, :, column, 0][:, :, None, None] - corner
    both = rows[:, :, None, None] & columns[:, None, :, None]
    return bool(((L - sums).abs() * both <= 1e-9 * (1 + L.abs())).all())


def _iterate_geometries(shape: torch.Size, first: int, entries: ParameterEntries) -> Iterator[Geometry]:
    """A parameter as each of its uses sees it."""
    for use in entries.uses.values():
        if first <= int(use.numbers[(0,) * use.numbers.dim()]) < first + shape.numel():
            steps = _find_axis_steps(use.numbers.long() - first)
            if steps is None:
                continue
            roles = entries.find_roles(use)
            pieces = [(step, count, role) for each, role in zip(steps, roles, strict=True) for step, count in each]
            # A part of a parameter may stand for all of it; if that does not fit, the parts are by themselves.
            parts = {step * count for step, count, _ in pieces}
            for ends in (set(), parts):
                found = _arrange_axes(shape, pieces, ends)
                if found is not None:
                    yield found


def _arrange_axes(shape: torch.Size, pieces: list[tuple[int, int, str]], ends: set[int]) -> Geometry | None:
    """A parameter by the roles of its axes in an operation, which may have seen it reshaped or a part of it."""
    total = shape.numel()
    # Axes end where one of the parameter's does, or one of the operation's.
    ends = ends | {total, *(shape[axis:].numel() for axis in range(1, len(shape) + 1)), *(each[0] for each in pieces)}
    cuts = sorted(ends, reverse=True)
    if cuts[0] > total or any(large % small for large, small in pairwise(cuts)):
        return None
    sizes, roles = [], []
    for large, small in pairwise(cuts):
        sizes.append(large // small)
        # What the operation saw one number of, such as one of several experts, is a part by itself.
        roles.append(next((role for step, count, role in pieces if step <= small < step * count), GROUP))
    return _simplify_geometry(shape, tuple(sizes), tuple(roles))


def _simplify_geometry(shape: torch.Size, sizes: tuple[int, ...], roles: tuple[str, ...]) -> Geometry:
    """As a plain matrix or convolution where it is one."""
    if sizes == tuple(shape) and set(roles[2:]) <= {POSITION}:
        if roles[:2] == (OUT, IN):
            return Geometry(shape)
        if roles[:2] == (IN, OUT):
            return Geometry(shape, inputs_first=True)
    return PermutedGeometry.from_roles(shape, sizes, roles)


def _find_axis_steps(numbers: Tensor) -> list[list[tuple[int, int]]] | None:
    """Each axis as steps and how often they are taken, largest first; None if numbers do not go in such steps."""
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
    """
    >>> _find_regular_steps([0, 1, 2, 12, 13, 14])
    [(12, 2), (1, 3)]
    """
    steps: list[tuple[int, int]] = []
    if not any(line):  # the same entries again and again
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
