"""Linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from saltflat.errors import OptionError
from saltflat.studies.networks import register_network
from saltflat.studies.training.dropout import Dropout


@register_network("mlp", "linear layers with ReLU between them, of any width and depth")
def mlp(
    shape: tuple[int, ...], classes: int, *, widths: Sequence[int] | None = None, width: int = 64, depth: int = 2
) -> nn.Module:
    """Build an MLP with hidden layers of these ``widths``, or ``depth`` of ``width`` units, each with dropout."""
    hidden = [width] * depth if widths is None else list(widths)
    if (widths is None and depth < 0) or min(hidden, default=1) < 1:
        raise OptionError(
            "Expected layers of at least one unit, but got "
            f"{(f'width={width!r} and depth={depth!r}' if widths is None else f'widths={widths!r}')} of an MLP. Try "
            "width=64, depth=2."
        )
    sizes = [prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU(), Dropout()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


@register_network("ibayashi_mlp", "512-128-512 hidden units (Ibayashi et al., 2021)")
def ibayashi_mlp(shape: tuple[int, ...], classes: int, *, widths: Sequence[int] = (512, 128, 512)) -> nn.Module:
    """Build the MLP of the random-label experiment."""
    return mlp(shape, classes, widths=widths)


@register_network("petzka_mlp", "50-50-50-30 hidden units (Petzka et al., 2019)")
def petzka_mlp(shape: tuple[int, ...], classes: int, *, widths: Sequence[int] = (50, 50, 50, 30)) -> nn.Module:
    """Build the MLP of the MNIST experiment."""
    return mlp(shape, classes, widths=widths)
