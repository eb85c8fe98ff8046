"""Rescale the weights of a network without changing its function."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from saltflat.errors import ModelError, OptionError
from saltflat.symmetry.equality import (
    Example,
    OutputSelector,
    compare_outputs,
    copy_in_float64,
    copy_model,
    find_tensors,
    parse_example,
)
from saltflat.symmetry.find import find_symmetries
from saltflat.symmetry.group import Array, RescalingKind, Symmetries, check_rescaling_kind
from saltflat.validation import check_flag, check_seed, take_turns


@take_turns
def rescale(
    model: nn.Module,
    example: Example,
    seed: int = 0,
    spread: float = 2.0,
    kind: RescalingKind = "unit",
    strict: bool = True,
) -> nn.Module:
    """Return a copy of a network with randomly rescaled weights and the same function.

    Args:
        model: any module; it is not modified.
        example: a typical input: a tensor, a tuple of positional inputs or a dict of named ones.
        seed: seed of the random scales.
        spread: standard deviation of the log scales, which are truncated at twice that.
        kind: ``"unit"`` for one scale per unit, ``"layer"`` for one factor per parameter.
        strict: whether to check in float64 on the example that the function is unchanged.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
        >>> x = torch.randn(4, 3, dtype=torch.float64)
        >>> other = rescale(net, x)
        >>> torch.allclose(net(x), other(x)), torch.allclose(net[0].weight, other[0].weight)
        (True, False)
    """
    check_rescaling_kind(kind)
    if isinstance(spread, bool) or not isinstance(spread, int | float) or not 0 <= spread < 100:
        raise OptionError(f"Expected spread to be a number from 0 to 100, but got {spread!r}. Try omitting it for 2.0.")
    check_flag(strict=strict)
    group = find_symmetries(model, example, kind)
    logs = group.sample(check_seed(seed), spread)
    if strict:
        check_same_function(model, group, logs, example)
    return apply_rescaling(model, group, logs)


def apply_rescaling(model: nn.Module, group: Symmetries, logs: Array) -> nn.Module:
    """Return a copy of a model, rescaled by scales with these logarithms."""
    factors = group.compute_factor_logs(logs)
    new = copy_model(model)
    values = dict([*new.named_parameters(), *new.named_buffers()])
    for name, each in group.members.items():
        if name not in values or values[name].shape != each.shape:
            raise OptionError(
                f"Expected rescalings of this model, but got rescalings of {name!r} with the shape "
                f"{tuple(each.shape)}, which the model does not have. Try find_symmetries(model, example)."
            )
    with torch.no_grad():
        for name, each in group.members.items():
            if not np.any(factors[name]):
                continue
            values[name].copy_(each.rescale(values[name], factors[name]))
    return new


def check_same_function(
    model: nn.Module,
    group: Symmetries,
    logs: Array,
    example: Example,
    select_outputs: OutputSelector = find_tensors,
) -> None:
    """Check in float64 that a rescaling leaves the outputs unchanged."""
    wide, inputs, tolerance = copy_in_float64(model, parse_example(example))
    off = compare_outputs(wide, apply_rescaling(wide, group, logs), inputs, select_outputs)
    if off != off:
        raise ModelError(
            "Expected factors that the model's precision can represent, but got NaN or infinity in the outputs after "
            "a rescaling. Try lowering spread."
        )
    if not off <= tolerance:
        raise ModelError(
            "Expected a forward pass that runs the same operations on every input, but got outputs that differ by "
            f"{off:.1e} after a rescaling that should leave them unchanged. Try removing values that leave torch "
            "(numpy, lists), depend on the batch or are stored between calls."
        )
