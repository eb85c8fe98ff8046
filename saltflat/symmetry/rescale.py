"""Other weights for the same function."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from saltflat.errors import ModelError, OptionError, first_line
from saltflat.loan import loan
from saltflat.sweep import check_seed
from saltflat.symmetry.graph import inputs_of, symmetries
from saltflat.symmetry.group import Array, Symmetries

KINDS = ("unit", "layer")
SAME = 1e-9  # relative, in float64


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
    check_kind(kind)
    if isinstance(spread, bool) or not isinstance(spread, int | float) or not 0 <= spread < 100:
        raise OptionError(f"Got spread={spread!r}. Want a number from 0 to 100. Do: leave it out for 2.0.")
    group = symmetries(model, example)
    group = group.by_layer() if kind == "layer" else group
    logs = group.sample(check_seed(seed), spread)
    if strict:
        check_same(model, group, logs, example)
    return rescaled(model, group, logs)


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise OptionError(f"Got kind={kind!r}. Want 'unit' or 'layer'. Do: leave it out for 'unit'.")


def rescaled(model: nn.Module, group: Symmetries, logs: Array) -> nn.Module:
    """A copy of a model with the factors of these sizes."""
    new = copied(model)
    factors = group.logs(logs)
    values = dict([*new.named_parameters(), *new.named_buffers()])
    with torch.no_grad():
        for name, each in group.members.items():
            if not np.any(factors[name]):
                continue
            value, factor = values[name], torch.from_numpy(np.exp(factors[name])).to(values[name].device)
            exact = value.double()
            exact = (exact + each.eps) * factor**2 - each.eps if each.kind == "variance" else exact * factor
            value.copy_(exact)
    return new


def copied(model: nn.Module) -> nn.Module:
    try:
        return deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"Got a model that cannot be copied ({first_line(error)}). Want one that copy.deepcopy accepts. "
            "Do: take what cannot be copied (hooks, open files, computed tensors) out of it first."
        ) from error


def check_same(model: nn.Module, group: Symmetries, logs: Array, example: Any) -> None:
    """Compare the outputs of both, in float64."""
    args, kwargs = inputs_of(example)
    wide, (args, kwargs) = widened(model, (args, kwargs))
    with loan(wide, "eval"), torch.no_grad():
        before = outputs(wide, args, kwargs)
        with loan(other := rescaled(wide, group, logs), "eval"):
            after = outputs(other, args, kwargs)
    off = max((difference(a, b) for a, b in zip(before, after, strict=True)), default=0.0)
    if not off <= SAME:
        raise ModelError(
            f"Got outputs that differ by {off:.1e} after a rescaling that should have left them alone. Want a model "
            "whose forward pass does with every input what it does with the example. Do: look for values that leave "
            "torch (numpy, lists) or depend on the batch; strict=False returns the model unchecked."
        )


def outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    given = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
    found = model(*given[0], **given[1])
    return [each.detach() for each in tree_flatten(found)[0] if isinstance(each, Tensor) and each.is_floating_point()]


def difference(one: Tensor, two: Tensor) -> float:
    """Largest, relative to the largest entry."""
    largest = float(one.abs().max()) if one.numel() else 0.0
    return float((one - two).abs().max()) / max(largest, 1e-300) if one.numel() else 0.0


def widened(model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """A copy of the model and its inputs in float64."""

    def one(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return copied(model).double(), tree_map(one, inputs)
