r"""PAC-Bayes inequalities: from the empirical risk of random networks and a KL divergence to their risk on new data.

A *posterior* Q is any distribution over networks. A *prior* P is one that was fixed before the examples were seen. For
a loss in [0, 1] and m independent examples, with probability at least :math:`1 - \delta` over the examples, each of
these holds for all posteriors at once. They bound the risk of networks drawn from Q, not of one network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import expm1, inf, log, log1p, sqrt
from typing import Literal, TypeAlias, get_args

from scipy.stats import beta

from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.validation import check_non_negative, check_positive, parse_integer

NEAR = 1e-2  # relative rise of a probability up to which logarithms are expanded
MOST_STRENGTHS = 100_000  # of a grid
MOST_EXAMPLES = 2**63
MOST_COUNTED = 10**9  # samples whose ones are counted
MonteCarloMethod: TypeAlias = Literal["kl", "hoeffding", "binomial"]


def compute_binary_kl(q: float, p: float) -> float:
    r"""Return the KL divergence between coins that show heads with probability q and p.

    .. math::
        \mathrm{kl}(q \| p) = q \ln\frac{q}{p} + (1 - q) \ln\frac{1 - q}{1 - p}

    Example:
        >>> round(compute_binary_kl(0.5, 0.25), 6)  # ln(2) / 2 + ln(2/3) / 2
        0.143841
    """
    _check_share(q=q, p=p)
    rise = p - q
    if 0 < q < 1 and abs(rise) < NEAR * min(q, 1 - q):
        # The terms linear in the rise cancel.
        return -q * _compute_log_rest(rise / q) - (1 - q) * _compute_log_rest(-rise / (1 - q))
    return max(0.0, _compute_term(q, p) + _compute_term(1 - q, 1 - p))


def _compute_term(q: float, p: float) -> float:
    if q == 0:
        return 0.0
    return inf if p == 0 else q * (log(q) - log(p))


def _compute_log_rest(x: float) -> float:
    """Return ln(1 + x) - x for a small x."""
    return -sum((-x) ** power / power for power in range(2, 12))


def invert_binary_kl(q: float, budget: float) -> float:
    r"""Return the largest p in [q, 1] with :math:`\mathrm{kl}(q \| p) \le` ``budget``, rounded up.

    Example:
        >>> round(invert_binary_kl(0.0, 0.1), 6)  # 1 - exp(-0.1)
        0.095163
        >>> round(invert_binary_kl(0.5, 0.143841), 4)
        0.75
    """
    _check_share(q=q)
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget >= 0:
        raise OptionError(f"Expected a budget of at least 0, but got budget={budget!r}. Check the KL divergence.")
    if budget == 0 or q == 1:
        return float(q)
    if q == 0:
        return _round_share_up(-expm1(-budget))
    # In terms of p - q, small divergences are resolved. By Pinsker's inequality, the root is not above this.
    low, high = 0.0, min(1 - q, sqrt(budget / 2))
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if _compute_rise(q, middle) >= budget else (middle, high)
    return _round_share_up(q + high)


def _compute_rise(q: float, rise: float) -> float:
    """Return the divergence between coins of q and q + rise."""
    if rise >= 1 - q:
        return inf
    ratio = log1p(rise / q) if rise < q else log(q + rise) - log(q)
    return -q * ratio - (1 - q) * log1p(-rise / (1 - q))


def _round_share_up(p: float) -> float:
    """Return a slightly larger probability, so that rounding does not make a bound smaller."""
    return min(1.0, p * (1 + 4e-15))


@dataclass(frozen=True)
class MonteCarlo:
    """An estimate of the empirical risk of random networks from independent samples.

    Attributes:
        mean: the mean loss of the samples.
        samples: the number of independent samples.
        delta: the probability with which ``upper`` may fail.
        upper: an upper bound on the empirical risk.
        method: ``"kl"`` or ``"hoeffding"``.
    """

    mean: float
    samples: int
    delta: float
    upper: float
    method: MonteCarloMethod

    @property
    def margin(self) -> float:
        """How far the upper bound is above the mean."""
        return self.upper - self.mean


def bound_monte_carlo(mean: float, samples: int, delta: float = 0.01, method: MonteCarloMethod = "kl") -> MonteCarlo:
    r"""Return an upper bound on the expectation of a mean of independent samples in [0, 1].

    The samples need not have one distribution: a draw of its own for every example is an independent sample of the
    empirical risk. With probability :math:`1 - \delta`, the expectation is at most

    .. math::
        \mathrm{kl}^{-1}(\bar x, \ln(1/\delta) / n) \quad\text{or}\quad \bar x + \sqrt{\ln(1/\delta) / (2 n)}.

    Args:
        mean: of the samples.
        samples: their number n.
        delta: the probability with which the bound may fail.
        method: ``"kl"``, or ``"hoeffding"``, which is never smaller. ``"binomial"`` is exact (Clopper and Pearson) and
            smaller than both, for at most a billion samples that are 0 or 1 and have one distribution.

    Example:
        >>> round(bound_monte_carlo(0.0, 100, 0.05).upper, 6)  # 1 - 0.05^(1/100)
        0.029513
        >>> round(bound_monte_carlo(0.1, 100, 0.05, "binomial").upper, 4)  # at most 10 of 100 with probability 0.05
        0.1637
        >>> round(bound_monte_carlo(0.0, 100, 0.05, "hoeffding").upper, 6)  # sqrt(ln(20) / 200)
        0.122387
    """
    _check_share(mean=mean)
    _check_number(samples=samples)
    check_delta(delta)
    if method not in get_args(MonteCarloMethod):
        raise make_unknown_name_error("method", method, get_args(MonteCarloMethod))
    budget = -log(delta) / samples
    if method == "binomial":
        ones = round(mean * samples)
        if abs(ones - mean * samples) > 1e-6 or samples > MOST_COUNTED:
            raise OptionError(
                f"Expected the mean of at most {MOST_COUNTED:,} samples that are 0 or 1 for method='binomial', but got "
                f"mean={mean!r} of {samples}. Try method='kl'."
            )
        upper = 1.0 if ones == samples else float(beta.isf(delta, ones + 1, samples - ones))
    elif method == "kl":
        upper = invert_binary_kl(mean, budget)
    else:
        upper = min(1.0, mean + sqrt(budget / 2))
    return MonteCarlo(mean, samples, delta, upper, method)


def bound_linear(
    risk: float, kl: float, examples: int, delta: float = 0.05, *, strength: float, constant: float = 2.0
) -> float:
    r"""Return the bound of equation (1) of Tsuzuku et al., linear in risk and KL divergence.

    .. math::
        L + \frac{\lambda}{c\, m} + \frac{\mathrm{KL} + \ln(1/\delta)}{\lambda}

    Args:
        risk: the empirical risk L of the posterior.
        kl: KL divergence of posterior and prior.
        examples: their number m.
        delta: the probability with which the bound may fail.
        strength: :math:`\lambda`, fixed before the examples were seen; see :func:`choose_strength`.
        constant: c, 2 in the paper; by Hoeffding's lemma, 8 is enough.

    Example:
        >>> round(bound_linear(0.1, 9.0, 1000, delta=1 / 2.718281828459045, strength=100.0), 6)  # .1 + .05 + .1
        0.25
    """
    _check_terms(risk, kl, examples, delta)
    check_positive(strength=strength)
    _check_constant(constant)
    return risk + strength / (constant * examples) + (kl - log(delta)) / strength


def bound_catoni(risk: float, kl: float, examples: int, delta: float = 0.05, *, strength: float) -> float:
    r"""Return Catoni's bound.

    .. math::
        \frac{1 - \exp\left(-\beta L - (\mathrm{KL} + \ln(1/\delta)) / m\right)}{1 - e^{-\beta}},
        \qquad \beta = \lambda / m

    Args:
        risk: the empirical risk L of the posterior.
        kl: KL divergence of posterior and prior.
        examples: their number m.
        delta: the probability with which the bound may fail.
        strength: :math:`\lambda`, fixed before the examples were seen; see :func:`choose_strength`.

    Example:
        >>> round(bound_catoni(0.0, 0.0, 10, delta=0.5, strength=10.0), 6)  # (1 - 2^(-1/10)) / (1 - 1/e)
        0.10594
    """
    _check_terms(risk, kl, examples, delta)
    check_positive(strength=strength)
    beta = strength / examples
    if beta == 0:  # too small for a float
        return inf
    return expm1(-beta * risk - (kl - log(delta)) / examples) / expm1(-beta)


def bound_mcallester(risk: float, kl: float, examples: int, delta: float = 0.05) -> float:
    r"""Return McAllester's bound with Maurer's constant.

    .. math::
        L + \sqrt{\frac{\mathrm{KL} + \ln(2 \sqrt m / \delta)}{2 m}}

    Args:
        risk: the empirical risk L of the posterior.
        kl: KL divergence of posterior and prior.
        examples: their number m.
        delta: the probability with which the bound may fail.

    Example:
        >>> from math import e
        >>> round(bound_mcallester(0.1, 3.0, 100, delta=20 / e**5), 6)  # .1 + sqrt(8 / 200)
        0.3
    """
    _check_terms(risk, kl, examples, delta)
    return risk + sqrt(_compute_budget(kl, examples, delta) / 2)


def bound_maurer(risk: float, kl: float, examples: int, delta: float = 0.05) -> float:
    r"""Return the bound of Maurer (and Langford and Seeger), which inverts the KL divergence of two coins.

    .. math::
        \mathrm{kl}^{-1}\left(L, \frac{\mathrm{KL} + \ln(2 \sqrt m / \delta)}{m}\right)

    It is never above McAllester's, and far below it where the risk is small.

    Args:
        risk: the empirical risk L of the posterior.
        kl: KL divergence of posterior and prior.
        examples: their number m.
        delta: the probability with which the bound may fail.

    Example:
        >>> from math import e
        >>> round(bound_maurer(0.0, 3.0, 100, delta=20 / e**5), 6)  # 1 - exp(-8 / 100)
        0.076884
    """
    _check_terms(risk, kl, examples, delta)
    return invert_binary_kl(risk, _compute_budget(kl, examples, delta))


def choose_strength(
    bound: Callable[..., float],
    risk: float,
    kl: float,
    examples: int,
    delta: float,
    strengths: Sequence[float],
    **options: float,
) -> tuple[float, float]:
    r"""Return the smallest bound over a grid of :math:`\lambda`, and that :math:`\lambda`.

    Each of the n values gets the probability ``delta / n`` to fail, so that the choice is covered.

    Args:
        bound: :func:`bound_linear` or :func:`bound_catoni`.
        risk: the empirical risk of the posterior.
        kl: KL divergence of posterior and prior.
        examples: their number.
        delta: the probability with which the result may fail.
        strengths: the grid, fixed before the examples were seen.
        options: of the bound, such as ``constant``.

    Example:
        >>> value, strength = choose_strength(bound_linear, 0.1, 9.0, 1000, 0.05, [10.0, 100.0, 1000.0])
        >>> strength, round(value, 4)  # .1 + 100 / 2000 + (9 + ln(60)) / 100
        (100.0, 0.2809)
    """
    strengths = [float(each) for each in strengths]
    if not strengths:
        raise OptionError("Expected at least one strength, but got an empty grid. Try saltflat.bounds.make_grid().")
    check_delta(delta)
    each = delta / len(strengths)
    return min((bound(risk, kl, examples, each, strength=s, **options), s) for s in strengths)


def make_grid(low: float, high: float, ratio: float) -> tuple[float, ...]:
    """Return the powers of ``ratio`` from ``low`` to ``high``, both included if they are powers.

    Example:
        >>> make_grid(1.0, 8.0, 2.0)
        (1.0, 2.0, 4.0, 8.0)
    """
    check_positive(low=low, high=high)
    if not isinstance(ratio, int | float) or not 1 < ratio < inf or high < low:
        raise OptionError(
            f"Expected low <= high and a ratio above 1, but got low={low!r}, high={high!r}, ratio={ratio!r}. Try "
            "make_grid(1, 1e6, 2)."
        )
    first = _round_up(log(low) / log(ratio))
    last = -_round_up(-log(high) / log(ratio))
    if not first <= last < first + MOST_STRENGTHS:
        raise OptionError(
            f"Expected a grid of 1 to {MOST_STRENGTHS:,} numbers, but got {max(0, last - first + 1):,} powers of "
            f"{ratio!r} from {low!r} to {high!r}. Try make_grid(1, 1e6, 2)."
        )
    return tuple(ratio**n for n in range(first, last + 1))


def _round_up(value: float) -> int:
    nearest = round(value)
    return nearest if abs(value - nearest) < 1e-9 * max(1.0, abs(value)) else int(-(-value // 1))


def _compute_budget(kl: float, examples: int, delta: float) -> float:
    return (kl + log(2) + log(examples) / 2 - log(delta)) / examples


def _check_terms(risk: float, kl: float, examples: int, delta: float) -> None:
    _check_share(risk=risk)
    check_non_negative(kl=kl)
    _check_number(examples=examples)
    check_delta(delta)


def _check_constant(constant: float) -> None:
    check_positive(constant=constant)
    if constant > 8:
        raise OptionError(
            f"Expected a constant of at most 8, for which Hoeffding's lemma holds, but got constant={constant!r}. Try "
            "8, or 2 as in the paper."
        )


def _check_share(**given: float) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise OptionError(
                f"Expected a number from 0 to 1, but got {name}={value!r}. The loss must lie in [0, 1]: try the 0-1 "
                "error, or a clipped cross-entropy."
            )


def check_delta(delta: float) -> None:
    """Check that a probability of failure lies strictly between 0 and 1."""
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise OptionError(f"Expected a probability between 0 and 1, but got delta={delta!r}. Try delta=0.05.")


def _check_number(**given: int) -> None:
    """Check that a number of examples or samples is at least 1; there may be billions of samples."""
    for name, value in given.items():
        if not 1 <= (parse_integer(value) or 0) <= MOST_EXAMPLES:
            shown = repr(value) if not isinstance(value, int) or abs(value) <= MOST_EXAMPLES else "more than 2^63"
            raise OptionError(f"Expected a whole number from 1 to 2^63, but got {name}={shown}. Check the data.")
