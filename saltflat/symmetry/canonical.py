"""A canonical representative of all networks that differ only by a rescaling."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor, nn

from saltflat.engine.problem import is_finite
from saltflat.engine.session import check_module, check_tensors
from saltflat.errors import ModelError, NonFiniteError
from saltflat.symmetry.equality import Example, compare_outputs, copy_in_float64, parse_example
from saltflat.symmetry.find import find_symmetries
from saltflat.symmetry.group import Array, Mask, Numbers, ScaledTensor, Symmetries
from saltflat.symmetry.rescale import apply_rescaling
from saltflat.validation import take_turns

# Relative rounding error of an entry in each precision.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 0.05  # for half precision


@take_turns
def canonicalize(model: nn.Module, example: Example) -> nn.Module:
    """Return the rescaled network whose units have incoming weights of norm one.

    Networks that differ only by a rescaling become equal. Where several layers lead to one unit, as in the sums of a
    residual network, the norm is that of all their weights together. Where a BatchNorm or LayerNorm determines the
    scale of a unit, it is that of its weight and bias. A unit whose incoming weights are all zero has outgoing weights
    of norm one instead.

    Args:
        model: any module; it is not modified.
        example: a typical input: a tensor, a tuple of positional inputs or a dict of named ones.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> new = canonicalize(net, torch.randn(1, 2))
        >>> torch.allclose(new[0].weight.norm(dim=1), torch.ones(3))
        True
    """
    group = find_symmetries(model, example)
    return apply_rescaling(model, group, compute_canonical_logs(model, group))


@take_turns
def equal_up_to_rescaling(a: nn.Module, b: nn.Module, example: Example) -> bool:
    """Return whether two networks compute the same function with weights that differ only by a rescaling.

    Args:
        a: any module.
        b: a module of the same architecture, for instance another checkpoint.
        example: an input of both, on which the outputs are compared, too.

    Example:
        >>> from saltflat import rescale
        >>> net, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(5, 2)
        >>> equal_up_to_rescaling(net, rescale(net, x, seed=1), x)
        True
    """
    for model in (a, b):
        check_module(model)
        check_tensors(model)
    shapes = [{name: tuple(v.shape) for name, v in _collect_tensors(model).items()} for model in (a, b)]
    if shapes[0] != shapes[1]:
        different = sorted({*shapes[0].items()} ^ {*shapes[1].items()})
        raise ModelError(
            f"Expected two models of one architecture, but got models of which only one has {different[0][0]!r} with "
            f"the shape {different[0][1]}. Try comparing checkpoints of the same model."
        )
    tolerance = max(_get_weight_tolerance(a), _get_weight_tolerance(b))
    found = []
    for model in (a, b):
        wide, inputs, least = copy_in_float64(model, parse_example(example))
        group = find_symmetries(wide, inputs[0] or inputs[1])
        found.append((wide, apply_rescaling(wide, group, compute_canonical_logs(wide, group))))
    (wide_a, one), (wide_b, two) = found
    # Rounding errors of the weights accumulate in the outputs.
    if not compare_outputs(wide_a, wide_b, inputs) <= max(10 * tolerance, least):
        return False
    others = _collect_tensors(two)
    return all(
        _is_close_tensor(value, others[name], name, group, tolerance) for name, value in _collect_tensors(one).items()
    )


def compute_canonical_logs(model: nn.Module, group: Symmetries) -> Array:
    """Return the logarithms of the scales that give the incoming weights of every unit the norm one."""
    values = _collect_tensors(model)
    for name, value in values.items():
        if value.is_floating_point() and not is_finite(value):
            raise NonFiniteError(
                f"Expected finite weights, but got NaN or infinity in {name!r}. Try loading an earlier checkpoint."
            )
    ends = _find_last_scales(group)
    members = [each for each in group.members.values() if each.kind == "parameter"]
    found = [_collect_entries(each, values[each.name], *ends) for each in members]
    if not found:
        return np.zeros(0)
    scale, wide, tail, entries = (np.concatenate(part) for part in zip(*(into for into, _ in found), strict=True))
    order = np.argsort(scale, kind="stable")
    starts = np.searchsorted(scale[order], np.arange(group.scales + 1))
    logs = np.zeros(group.scales)
    for number, (start, stop) in enumerate(pairwise(starts)):
        # Scales are in the order of the forward pass: those of preceding units are already determined.
        mine = order[start:stop]
        # Weights from units without a scale (nan) contribute nothing.
        parts = _replace_nan(entries[mine] - group.forms[tail[mine]] @ logs)
        # Weights determine the scale of a unit; if there are none, affine parameters do.
        length = _compute_log_norm(parts[wide[mine]])
        logs[number] = -length if np.isfinite(length) else -_compute_log_norm(parts)
        logs[number] = logs[number] if np.isfinite(logs[number]) else np.nan
    return _scale_dead_units(group, logs, [out for _, out in found])


def _scale_dead_units(group: Symmetries, logs: Array, leaving: Sequence[tuple[Any, ...]]) -> Array:
    """Set the scales of units without nonzero incoming weights from their outgoing weights."""
    scale, head, entries = (np.concatenate(part) for part in zip(*leaving, strict=True))
    for number in np.flatnonzero(np.isnan(logs))[::-1]:
        mine = np.flatnonzero(scale == number)
        length = _compute_log_norm(_replace_nan(entries[mine] + group.forms[head[mine]] @ logs))
        logs[number] = length if np.isfinite(length) else 0.0
    return logs


def _replace_nan(logs: Array) -> Array:
    return np.where(np.isnan(logs), -np.inf, logs)


def _compute_log_norm(logs: Array) -> float:
    """Return the logarithm of a norm, given logarithms of absolute values, without overflow."""
    return float(logsumexp(2 * logs)) / 2 if len(logs) else -np.inf


def _collect_entries(
    member: ScaledTensor, values: Tensor, last: Numbers, single: Mask
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the entries that lead to a unit from earlier ones, and the entries that lead away from a unit.

    The former as scale of the unit, whether the entry belongs to a weight, tail, and logarithm of the absolute value;
    the latter as scale of the unit, head, and logarithm of the absolute value.
    """
    head, tail = member.head.reshape(-1), member.tail.reshape(-1)
    with np.errstate(divide="ignore"):
        logs = np.log(np.abs(values.detach().double().cpu().numpy().reshape(-1)))
    into = single[head] & (last[tail] < last[head])
    away = single[tail] & (last[head] != last[tail])
    leading = last[head[into]], np.full(int(into.sum()), len(member.shape) > 1), tail[into], logs[into]
    return leading, (last[tail[away]], head[away], logs[away])


def _find_last_scales(group: Symmetries) -> tuple[Numbers, Mask]:
    """Return the latest scale in every unit's linear form (-1 if none), and whether the form is just this scale."""
    forms = group.forms
    counts = np.diff(forms.indptr)
    last = np.full(forms.shape[0], -1, dtype=np.int64)
    np.maximum.at(last, np.repeat(np.arange(len(counts)), counts), forms.indices)
    single = counts == 1
    single[single] = forms.data[forms.indptr[:-1][single]] == 1
    return last, single


def _collect_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def _get_weight_tolerance(model: nn.Module) -> float:
    kinds = {value.dtype for value in _collect_tensors(model).values() if value.is_floating_point()}
    return max((TOLERANCE.get(kind, HALF_TOLERANCE) for kind in kinds), default=TOLERANCE[torch.float64])


def _is_close_tensor(one: Tensor, two: Tensor, name: str, group: Symmetries, tolerance: float) -> bool:
    if not one.is_floating_point():
        # Batch counters do not affect the function.
        return name.endswith("num_batches_tracked") or torch.equal(one.cpu(), two.cpu())
    eps = group.members[name].eps if name in group.members else 0.0
    one, two = one.detach().double().cpu() + eps, two.detach().double().cpu() + eps
    return bool(((one - two).abs() <= tolerance * torch.maximum(one.abs(), two.abs())).all())
