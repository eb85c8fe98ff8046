"""Other weights for the same function."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from saltflat.engine.session import take_turns
from saltflat.errors import ModelError, OptionError
from saltflat.symmetry.equality import compare_outputs, copy_in_float64, copy_model
from saltflat.symmetry.find import find_symmetries
from saltflat.symmetry.group import Array, Symmetries, check_rescaling_kind
from saltflat.symmetry.tracing.run import Seen, find_tensors, parse_example
from saltflat.validation import check_flag, check_seed


@take_turns
def rescale(
    model: nn.Module, example: Any, seed: int = 0, spread: float = 2.0, kind: str = "unit", strict: bool = True
) -> nn.Module:
    """A random network with other weights and the same function.

    Args:
        model: any module; it is left as it is.
        example: an input like those it will get: a tensor, a tuple of positional inputs or a dict of named ones.
        seed: of the factors.
        spread: deviation of the logarithms of units' sizes, none of which goes beyond twice that.
        kind: ``"unit"`` for a size of every unit, ``"layer"`` for one number per parameter.
        strict: whether to check, in float64 and on the example, that the function is the same.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
        >>> x = torch.randn(4, 3, dtype=torch.float64)
        >>> other = rescale(net, x)
        >>> torch.allclose(net(x), other(x)), torch.allclose(net[0].weight, other[0].weight)
        (True, False)
    """
    check_rescaling_kind(kind)
    if isinstance(spread, bool) or not isinstance(spread, int | float) or not 0 <= spread < 100:
        raise OptionError(f"Expected a number from 0 to 100, but got spread={spread!r}. Try leaving it out for 2.0.")
    check_flag(strict=strict)
    group = find_symmetries(model, example, kind)
    logs = group.sample(check_seed(seed), spread)
    if strict:
        check_same_function(model, group, logs, example)
    return apply_rescaling(model, group, logs)


def apply_rescaling(model: nn.Module, group: Symmetries, logs: Array) -> nn.Module:
    """A copy of a model with the factors of these sizes."""
    factors = group.compute_factor_logs(logs)
    new = copy_model(model)
    values = dict([*new.named_parameters(), *new.named_buffers()])
    for name, each in group.members.items():
        if name not in values or values[name].shape != each.shape:
            raise OptionError(
                f"Expected those of this model, but got rescalings of {name!r} with the shape {tuple(each.shape)}, "
                "which the model does not have. Try finding them with find_symmetries(model, example)."
            )
    with torch.no_grad():
        for name, each in group.members.items():
            if not np.any(factors[name]):
                continue
            values[name].copy_(each.rescale(values[name], factors[name]))
    return new


def check_same_function(
    model: nn.Module, group: Symmetries, logs: Array, example: Any, seen: Seen = find_tensors
) -> None:
    """See that a rescaling leaves the outputs alone, in float64."""
    wide, inputs, tolerance = copy_in_float64(model, parse_example(example))
    off = compare_outputs(wide, apply_rescaling(wide, group, logs), inputs, seen)
    if off != off:
        raise ModelError(
            "Expected smaller ones, but got NaN or infinity in the outputs after a rescaling: its factors are too "
            "large for the model's numbers. Try lowering spread."
        )
    if not off <= tolerance:
        raise ModelError(
            "Expected a model whose forward pass does with every input what it does with the example, but got "
            f"outputs that differ by {off:.1e} after a rescaling that should have left them alone. Look for values "
            "that leave torch (numpy, lists), depend on the batch or are remembered from one call to the next."
        )
