"""How much the loss, or the accuracy, suffers when the weights are changed by a finite amount."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saltflat.measures.registry import MeasureResult, measure

GAP = 0.05  # of the value: what a search may leave to gain and still be called converged


@measure(
    on="network",
    invariant_to=("layer_scale", "unit_scale"),
    reference="andriushchenko2023modern",
    formula="mean, or largest, loss at w + d minus the loss at w, for changes d of relative size radius",
)
def adaptive_sharpness(adaptive_rise: Mapping[str, Any]) -> MeasureResult:
    r"""Rise of the loss when every weight is perturbed in proportion to itself.

    .. math::
        E_{d \sim N(0, \rho^2 \mathrm{diag}\, w^2)} L(w + d) - L(w)
        \quad\text{or}\quad \max_{|d / w|_2 \le \rho} L(w + d) - L(w)

    with ``case="average"`` or ``case="worst"``. Multiplying a weight by a multiplies its changes by a: what leaves the
    network's function as it is leaves this as it is, too. For small :math:`\rho` the average is
    :math:`\frac{\rho^2}{2} \sum_i H_{ii} w_i^2`.

    Args:
        adaptive_rise: what was found by drawing, or by searching; see :mod:`saltflat.statistics.perturbations`.

    Example:
        >>> adaptive_sharpness({"value": 0.25, "stderr": 0.01, "pairs": [0.24, 0.26]}).value
        0.25
    """
    return _make_rise_result(adaptive_rise)


@measure(
    on="network",
    reference="foret2021sharpness",
    formula="largest loss within the ball of the given radius around w, minus the loss at w",
    fixed={"adaptive": False},
)
def sharpness(worst_rise: Mapping[str, Any]) -> MeasureResult:
    r"""Largest rise of the loss found within a ball around the weights, as in SAM.

    .. math::
        \max_{|d|_2 \le \rho} L(w + d) - L(w)

    The ball is the same whatever the size of the weights, so this changes when layers are rescaled.

    Args:
        worst_rise: what a search found; see :mod:`saltflat.statistics.perturbations`.
    """
    return _make_rise_result(worst_rise)


@measure(
    on="network",
    reference="jiang2020fantastic",
    formula="1 / sigma^2, with sigma the largest noise on w under which the mean accuracy falls by at most drop",
)
def pac_bayes_flatness(noise_tolerance: Mapping[str, Any]) -> MeasureResult:
    r"""Inverse squared scale of the noise on the weights that the accuracy tolerates.

    .. math::
        1 / \sigma^2, \quad
        \sigma = \max \{ s : \mathrm{acc}(w) - E_{u \sim N(0, s^2)} \mathrm{acc}(w + u) \le 0.1 \}

    The noise is the same for all weights, so this changes when layers are rescaled. ``magnitude_aware=True`` makes it
    relative to the weights, and nearly independent of their scale.

    Args:
        noise_tolerance: what a bisection found; see :mod:`saltflat.statistics.perturbations`.

    Example:
        >>> pac_bayes_flatness({"sigma": 0.5, "bracket": [0.5, 0.6]}).value
        4.0
    """
    return MeasureResult(noise_tolerance["sigma"] ** -2, exact=False, details=dict(noise_tolerance))


def _make_rise_result(rise: Mapping[str, Any]) -> MeasureResult:
    gap = rise.get("gap")
    return MeasureResult(
        rise["value"],
        residual=gap,
        converged=gap is None or gap <= GAP,
        exact=False,
        stderr=rise.get("stderr"),
        details={key: value for key, value in rise.items() if key not in ("value", "stderr", "gap")},
    )
