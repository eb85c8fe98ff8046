"""Distributions over weights with independent entries, and the random numbers they are drawn with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from saltflat.errors import OptionError

BLOCK = 32  # examples whose random numbers are drawn at once, whatever the batches are
BLOCK_NUMBERS = 1 << 20  # of a block of more than one example


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution over weights with independent entries.

    Attributes:
        mean: of every parameter, by name.
        deviation: the standard deviations.
    """

    mean: Mapping[str, Tensor]
    deviation: Mapping[str, Tensor]
    numbers: ClassVar[int] = 1  # random ones for each weight

    def combine(self, name: str, draw: Callable[[str], Tensor]) -> Tensor:
        """Return weights made of standard normal numbers, which ``draw`` returns for a label."""
        return self.mean[name] + self.deviation[name] * draw(name)


@dataclass(frozen=True)
class ScaledGaussian:
    r"""Normal weights times log-normal factors, all independent.

    .. math::
        \theta_i = (m_i + d_i z_i) \, e^{s z'_i}, \qquad z_i, z'_i \sim N(0, 1)

    Attributes:
        mean: m of every parameter, by name: the value where nothing is random.
        deviation: d, the standard deviations of the normal part.
        spread: s, the standard deviation of the factors' logarithms.
    """

    mean: Mapping[str, Tensor]
    deviation: Mapping[str, Tensor]
    spread: float
    numbers: ClassVar[int] = 2

    def combine(self, name: str, draw: Callable[[str], Tensor]) -> Tensor:
        """Return weights made of standard normal numbers, which ``draw`` returns for a label."""
        normal = self.mean[name] + self.deviation[name] * draw(name)
        return normal * (self.spread * draw(f"{name}/factors")).exp()


WeightDistribution: TypeAlias = Gaussian | ScaledGaussian


class Noise:
    """Standard normal numbers of every example, the same however the examples are batched.

    Args:
        seed: of the numbers.
        draw: number of the draw.
    """

    def __init__(self, seed: int, draw: int) -> None:
        self.seed, self.draw = seed, draw

    def draw_rows(self, label: str, first: int, count: int, width: int, like: Tensor) -> Tensor:
        """Return ``(count, width)`` numbers for the examples from number ``first`` on."""
        size = BLOCK
        while size > 1 and size * width > BLOCK_NUMBERS:
            size //= 2
        start, stop = first // size, -(-(first + count) // size)
        blocks = []
        for block in range(start, stop):
            key = sha256(f"{self.seed}/{self.draw}/{label}/{block}".encode()).digest()
            generator = torch.Generator(like.device).manual_seed(int.from_bytes(key[:7], "little"))
            blocks.append(torch.randn(size, width, generator=generator, dtype=like.dtype, device=like.device))
        offset = first - start * size
        return torch.cat(blocks)[offset : offset + count]


def compute_gaussian_kl(
    mean: Mapping[str, Tensor],
    variance: Mapping[str, Tensor],
    prior_mean: Mapping[str, Tensor],
    prior_variance: Mapping[str, Tensor],
) -> float:
    r"""Return the KL divergence between two normal distributions with independent entries, in float64.

    .. math::
        \mathrm{KL} = \frac12 \sum_i \left(\frac{\sigma_i^2 + (\mu_i - m_i)^2}{s_i^2} - 1
        - \ln\frac{\sigma_i^2}{s_i^2}\right)

    Args:
        mean: :math:`\mu` of the posterior, by parameter.
        variance: :math:`\sigma^2` of the posterior.
        prior_mean: :math:`m`.
        prior_variance: :math:`s^2`.

    Example:
        >>> one = {"w": torch.ones(2)}
        >>> compute_gaussian_kl(one, one, {"w": torch.zeros(2)}, one)  # 2 entries of (1 - 0)^2 / 2
        1.0
    """
    given = {"mean": mean, "variance": variance, "prior_mean": prior_mean, "prior_variance": prior_variance}
    _check_same_tensors(given)
    total = 0.0
    for name, mu in mean.items():
        own, center, wide = (each[name].detach().double() for each in (variance, prior_mean, prior_variance))
        for label, each in (("posterior", own), ("prior", wide)):
            if not bool((each > 0).all()) or not bool(each.isfinite().all()):
                raise OptionError(
                    f"Expected positive, finite variances, but got a {label} with variance {float(each.min()):g} in "
                    f"{name!r}: its KL divergence is infinite. Try a larger variance there."
                )
        ratio = own / wide
        # r - 1 - ln r, without cancellation near r = 1, nor the loss of a small r.
        spread = (ratio - 1) - torch.where(ratio > 0.5, torch.log1p(ratio - 1), own.log() - wide.log())
        total += 0.5 * float((spread + (mu.detach().double() - center).square() / wide).sum())
    return max(total, 0.0)


def _check_same_tensors(given: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Check that all mappings have the same names, and real, finite tensors of the same shapes."""
    shapes = {label: {name: tuple(each.shape) for name, each in found.items()} for label, found in given.items()}
    for label, found in shapes.items():
        if found != shapes["mean"]:
            name, shape = sorted({*found.items()} ^ {*shapes["mean"].items()}, key=str)[0]
            raise OptionError(
                f"Expected the same names and shapes in all arguments, but got {name!r} of shape {shape} in only one "
                f"of mean and {label}. Try the parameters of one model."
            )
        for name, value in given[label].items():
            if value.is_complex() or (label.endswith("mean") and not bool(value.isfinite().all())):
                kind = "complex numbers" if value.is_complex() else "NaN or infinity"
                raise OptionError(f"Expected real, finite numbers, but got {kind} in {label}[{name!r}]. Check them.")
