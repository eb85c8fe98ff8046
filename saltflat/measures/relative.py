"""Curvature times squared weights, by layer and by unit (Petzka et al., 2019 and 2021).

The eleven quantities of the 2019 paper's table: kappa^l is ``report["kappa"].layers``, its sum
``report["kappa"].value`` and its maximum ``report["kappa_max"].value``; with the trace instead of the largest
eigenvalue the same of ``kappa_trace`` and ``kappa_trace_max``; rho^l(j) is ``report["rho"].units``, its maximum over a
layer's units ``report["rho_max"].layers``, its sum ``report["rho"].layers``, and over the network
``report["rho_max"].value`` and ``report["rho"].value``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saltflat.measures.registry import MeasureResult, measure

LAYER = ("layer_scale",)
BOTH = ("layer_scale", "unit_scale")


def _compute_kappa(weight: Tensor, top_eigenvalue: Tensor) -> MeasureResult:
    value, residual, bound, steps, converged = top_eigenvalue.tolist()
    notes = () if converged else (f"the largest eigenvalue may be larger by {bound:.1e} of itself",)
    return MeasureResult(
        float(weight.double().square().sum()) * value,
        residual=residual,
        converged=bool(converged),
        notes=notes,
        details={"largest_eigenvalue": value, "error_bound": bound, "steps": int(steps)},
    )


@measure(
    on="weights",
    invariant_to=LAYER,
    reference="petzka2019reparameterization",
    formula="squared norm of the weight * largest eigenvalue of its curvature block, summed over layers",
)
def kappa(weight: Tensor, top_eigenvalue: Tensor) -> MeasureResult:
    r"""Largest curvature of the loss under changes relative to a layer's norm.

    .. math::
        \kappa^l = \|w_l\|_F^2 \, \lambda_{\max}(H_l), \quad \kappa = \sum_l \kappa^l

    Doubling a layer divides :math:`H_l` by four. Scales that differ from unit to unit do change it.

    Args:
        weight: the layer's weight.
        top_eigenvalue: ``(5,)``, the eigenvalue, its relative residual, the bound on its error, the steps it took, and
            whether it converged.

    Example:
        >>> kappa(torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 0.0, 0.0, 5.0, 1.0])).value
        50.0
    """
    return _compute_kappa(weight, top_eigenvalue)


@measure(
    on="weights",
    total="max",
    invariant_to=LAYER,
    reference="petzka2019reparameterization",
    formula="squared norm of the weight * largest eigenvalue of its curvature block, the largest over layers",
)
def kappa_max(weight: Tensor, top_eigenvalue: Tensor) -> MeasureResult:
    """``kappa`` of the layer where it is largest."""
    return _compute_kappa(weight, top_eigenvalue)


@measure(
    on="weights",
    invariant_to=LAYER,
    reference="petzka2019reparameterization",
    formula="squared norm of the weight * trace of its curvature block, summed over layers",
)
def kappa_trace(weight: Tensor, curvature_trace: Tensor) -> Tensor:
    r"""Trace of the curvature under changes relative to a layer's norm.

    .. math::
        \kappa_\tau^l = \|w_l\|_F^2 \, \mathrm{tr}\, H_l, \quad \kappa_\tau = \sum_l \kappa_\tau^l

    Example:
        >>> float(kappa_trace(torch.tensor([[3.0, 4.0]]), torch.tensor(2.0)))
        50.0
    """
    return weight.double().square().sum() * curvature_trace


@measure(
    on="weights",
    total="max",
    invariant_to=LAYER,
    reference="petzka2019reparameterization",
    formula="squared norm of the weight * trace of its curvature block, the largest over layers",
)
def kappa_trace_max(weight: Tensor, curvature_trace: Tensor) -> Tensor:
    """``kappa_trace`` of the layer where it is largest."""
    return weight.double().square().sum() * curvature_trace


@measure(
    on="weights",
    invariant_to=BOTH,
    reference="petzka2019reparameterization",
    formula="w(j)' H w(j) with the curvature block of unit j's own weights, summed over units and layers",
)
def rho(unit_forms: Tensor) -> MeasureResult:
    r"""Curvature of the loss when all weights of a unit grow by one factor, summed over units.

    .. math::
        \rho^l(j) = w_l(j)^T H_{l,j} w_l(j), \quad \rho = \sum_l \sum_j \rho^l(j)

    with w(j) the weights *out of* the j-th unit that feeds the layer, a column of W (an input channel of a
    convolution), or with ``axis="row"`` those into a unit, a row. Multiplying weights by factors divides the curvature
    by the same factors twice: unchanged under any positive rescaling.

    Args:
        unit_forms: ``(units,)``, the forms.

    Example:
        >>> rho(torch.tensor([1.0, 3.0])).value.item(), rho(torch.tensor([1.0, 3.0])).units
        (4.0, (1.0, 3.0))
    """
    return MeasureResult(unit_forms.sum(), units=tuple(unit_forms.tolist()))


@measure(
    on="weights",
    total="max",
    invariant_to=BOTH,
    reference="petzka2019reparameterization",
    formula="w(j)' H w(j) with the curvature block of unit j's own weights, the largest over units and layers",
)
def rho_max(unit_forms: Tensor) -> MeasureResult:
    """``rho`` of the unit where it is largest."""
    return MeasureResult(unit_forms.max(), units=tuple(unit_forms.tolist()))


@measure(
    on="weights",
    invariant_to=BOTH,
    reference="petzka2021relative",
    formula="sum over pairs of output units of <w_s, w_t> * trace of the curvature between them, features normalized",
)
def relative_flatness(
    feature_map_trace: Tensor, feature_deviation: Tensor | None, *, normalize: bool = True
) -> MeasureResult:
    r"""Curvature of the loss under changes that are linear maps of a layer's weights.

    .. math::
        \kappa = \sum_{s,t} \langle w_s, w_t \rangle \, \mathrm{tr}\, H_{st}
        = \sum_{i,j} \langle W E_{ij}, H \, W E_{ij} \rangle

    with :math:`w_s` the weights into output unit s, :math:`H_{st}` the curvature between those of s and t, and
    :math:`E_{ij}` the map that adds input j to input i. The inputs of the layer are first brought to unit standard
    deviation, which their weights take over; without that (``normalize=False``) only factors common to a whole layer
    leave it as it is.

    Args:
        feature_map_trace: the sum, of the normalized layer.
        feature_deviation: ``(groups * in,)``, infinite for inputs that are always zero; None where it is not known.
        normalize: whether the features are normalized.

    Example:
        >>> relative_flatness(torch.tensor(8.0), None, normalize=False).value
        tensor(8.)
    """
    if normalize and feature_deviation is None:
        return MeasureResult(
            torch.nan, notes=("the deviation of this layer's inputs is not known; normalize=False does without",)
        )
    # The deviations are those of all examples; leaving some out would change them, and the sum with them.
    return MeasureResult(feature_map_trace, depends_on_all=normalize)
