"""How much random noise on the weights the accuracy bears."""

from __future__ import annotations

from math import nan, sqrt

from torch import Tensor

from saltflat.amounts import check_count, check_positive
from saltflat.errors import OptionError
from saltflat.noise import draw_normals
from saltflat.setting import Setting, StatisticResult
from saltflat.statistics import statistic
from saltflat.whole import compute_accuracy_at, compute_moved_weights, compute_norm

DOUBLINGS = 10
HALVINGS = 30


@statistic(
    per="network",
    meaning="Largest noise on all parameters under which the accuracy drops by at most a tenth.",
    passes=lambda draws, depth, **_: draws * (depth + 5),
)
def noise_tolerance(
    setting: Setting,
    *,
    drop: float = 0.1,
    draws: int = 10,
    magnitude_aware: bool = False,
    epsilon: float = 1e-3,
    depth: int = 20,
) -> StatisticResult:
    r"""The largest :math:`\sigma` with a mean drop of the accuracy of at most ``drop`` under random noise.

    The noise is :math:`N(0, \sigma^2)`, or :math:`N(0, \sigma^2 w_i^2 + \epsilon^2)` if ``magnitude_aware``. The same
    draws serve every :math:`\sigma`, which makes the search a bisection between two that were tried.

    Args:
        setting: what is measured.
        drop: of the accuracy, a fraction.
        draws: of the noise.
        magnitude_aware: whether the noise is relative to the weights.
        epsilon: smallest noise, where it is relative.
        depth: how often to bisect.

    Returns:
        ``sigma``, nan where there is none; ``bracket``, the last one borne and the first one not; ``accuracy``, that of
        the network; and ``accuracies``, the mean ones at the two ends of the bracket.
    """
    check_positive(drop=drop, epsilon=epsilon)
    if not isinstance(magnitude_aware, bool):
        raise OptionError(f"Got magnitude_aware={magnitude_aware!r}. Want True or False. Do: leave it out for False.")
    check_count(1, draws=draws, depth=depth)
    measured = setting.problem.network.measured
    here, done = compute_accuracy_at(setting), 0

    def compute_noisy_accuracy(sigma: float) -> float:
        nonlocal done
        found = 0.0
        for draw in range(draws):
            noise = draw_normals(setting, draw)
            step = {
                name: _compute_noise_size(each, sigma, magnitude_aware, epsilon) * noise[name]
                for name, each in measured.items()
            }
            found += compute_accuracy_at(setting, compute_moved_weights(setting, step)) / draws
        done += 1
        setting.tick("Noise that the accuracy bears", done, None)
        return found

    def is_tolerated(accuracy: float) -> bool:
        return accuracy >= here - drop - 1e-12

    def make_result(low: float, high: float, reason: str = "") -> StatisticResult:
        ends = [seen.get(low, nan), seen.get(high, nan)]
        value = {"sigma": nan if reason else low, "bracket": [low, high], "accuracy": here, "accuracies": ends}
        return StatisticResult(value, exact=False, notes=(reason,) if reason else ())

    seen: dict[float, float] = {}
    if here - drop <= 0:
        return make_result(0.0, nan, f"The accuracy is {here:.3g} and cannot drop by {drop:g}.")
    numbers = sum(each.numel() for each in measured.values())
    # Weights that are all zero have no size to begin with.
    sigma = 0.1 if magnitude_aware else 0.1 * compute_norm(measured) / sqrt(numbers) or 0.1
    low, high = 0.0, 0.0
    while not (low and high):
        seen[sigma] = compute_noisy_accuracy(sigma)
        if is_tolerated(seen[sigma]):
            low, sigma = sigma, 2 * sigma
        else:
            high, sigma = sigma, sigma / 2
        if len(seen) > DOUBLINGS and not high:
            return make_result(low, nan, f"The accuracy never drops by {drop:g}, up to noise of {low:.3g}.")
        if len(seen) > HALVINGS and not low:
            return make_result(
                0.0, high, f"The accuracy drops by more than {drop:g} under noise as small as {high:.3g}."
            )
    for _ in range(depth):
        middle = (low + high) / 2
        seen[middle] = compute_noisy_accuracy(middle)
        low, high = (middle, high) if is_tolerated(seen[middle]) else (low, middle)
    return make_result(low, high)


def _compute_noise_size(weight: Tensor, sigma: float, magnitude_aware: bool, epsilon: float) -> Tensor | float:
    return (sigma**2 * weight.double().square() + epsilon**2).sqrt() if magnitude_aware else sigma
