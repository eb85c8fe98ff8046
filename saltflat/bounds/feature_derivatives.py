r"""The second-order rise of the loss under changes of a layer's features: its maximum and its mean.

For a matrix A with :math:`\|A\| \le 1` that acts on the features,

.. math::
    F(\delta, S, A) = L(w + \delta w A) - L(w)
        = \delta \langle \nabla L, w A \rangle + \frac{\delta^2}{2} \langle w A, H w A \rangle + O(\delta^3).

**The maximum.** The paper takes the operator norm. Then :math:`\|w A\|_F \le \|w\|_F`, and at a local minimum
:math:`F \le \frac{\delta^2}{2} \kappa + O(\delta^3)` with :math:`\kappa = \|w\|_F^2 \lambda_{\max}(H)`. A Frobenius
norm of at most 1 implies an operator norm of at most 1, so the bound holds there too. Elsewhere the largest first-order
term is added: :math:`\delta` times the dual norm of :math:`w^T \nabla L`, which is the sum of the singular values for
the operator norm, and the Frobenius norm for itself.

**The mean over orthogonal A.** By Haar's measure :math:`E A_{ij} = 0` and
:math:`E A_{ij} A_{kl} = \delta_{ik} \delta_{jl} / m`, so :math:`E (w A)_{sj} (w A)_{tk} = \delta_{jk} \langle w_s, w_t
\rangle / m` and

.. math::
    E F = \frac{\delta^2}{2 m} \sum_{s,t} \langle w_s, w_t \rangle \, \mathrm{tr}\, H_{st} + O(\delta^4),

whatever the gradient: A and -A are equally likely, so odd orders cancel. The sum is ``relative_flatness``. The paper's
constant is :math:`\kappa_\tau = \|w\|_F^2 \, \mathrm{tr}\, H`. The two are equal for a single row. For several rows the
sum is at most :math:`\kappa_\tau` if H has no negative eigenvalues, as at a minimum; otherwise it can be larger.

**Kinks.** All of this is Taylor's theorem, which requires two derivatives. A network with ReLU or max-pooling has them
at almost every w, but between w and :math:`w + \delta w A` units switch, in proportion to delta. Each switch changes
the slope of the loss. Together they add a term of order :math:`\delta^2`, of either sign, which H does not contain. It
vanishes only where delta is so small that no unit switches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor

from saltflat.bounds.feature_layer import FeatureLayer
from saltflat.engine.certificate import TOLERANCE, compute_gaps
from saltflat.engine.context import Context
from saltflat.engine.eigenvalues import get_rounding_tolerance, reserve_basis
from saltflat.engine.full_loss import (
    check_finite_loss,
    check_symmetric,
    compute_gradient_at,
    compute_hessian_block_products,
)
from saltflat.engine.lanczos import TopEigenvalue, Vectors, find_top_eigenvalues
from saltflat.engine.noise import compute_mean_and_error, draw_normals, draw_signs
from saltflat.engine.sweep import Sweep
from saltflat.errors import ModelError, NonFiniteError, NotDefinedError
from saltflat.statistics.averages import unit_trace

EXACT = 512  # largest number of weights whose Hessian is computed entry by entry if the sweep does not give its traces
OTHERS = 1 << 32  # number of the first random matrix for traces

# A value and its standard error, which is 0 if the value is exact.
Estimate: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class LayerDerivatives:
    """The derivatives of the mean loss with respect to a weight.

    Attributes:
        loss: the mean loss.
        gradient: of the weight's shape.
        top: the largest eigenvalue of the Hessian.
        trace: the trace of the Hessian.
        pairs: the sum over pairs of rows of <w_s, w_t> tr H_st.
        forms: the mean of <w A, H w A> over the random orthogonal A.
    """

    loss: float
    gradient: Tensor
    top: TopEigenvalue
    trace: Estimate
    pairs: Estimate
    forms: float

    @classmethod
    def compute(cls, context: Context, layer: FeatureLayer, draws: int) -> LayerDerivatives:
        """Compute the derivatives, or raise a ModelError if there are no second ones."""
        loss, gradients = compute_gradient_at(context)
        gradient = gradients[layer.name]
        if not bool(gradient.isfinite().all()):
            raise NonFiniteError(
                f"Expected finite numbers, but got NaN or infinity in the gradient of {layer.name!r}. Try "
                "dtype=torch.float64."
            )
        try:
            top = _find_top_eigenvalue(context, layer)
            trace, pairs = _compute_traces(context, layer, draws)
            forms = [_compute_form(context, layer, draw) for draw in range(draws)]
        except NotDefinedError as error:
            raise ModelError(
                "Expected a loss with second derivatives, but got a model without: the bound "
                f"{str(error).rstrip('.')}. Try another model, or worst_rise among the measures, which needs none."
            ) from error
        return cls(check_finite_loss(loss), gradient, top, trace, pairs, sum(forms) / draws)


def _multiply_hessian(context: Context, layer: FeatureLayer, vectors: Tensor) -> Tensor:
    """Return the Hessian times several vectors, ``(vectors, *shape)``."""
    found = compute_hessian_block_products(context, {layer.name: vectors})[layer.name]
    if not bool(found.isfinite().all()):
        raise NonFiniteError(
            f"Expected finite numbers, but got NaN or infinity in a product with the Hessian of {layer.name!r}. Try "
            "dtype=torch.float64."
        )
    return found


def _compute_form(context: Context, layer: FeatureLayer, draw: int) -> float:
    V = layer.compute_change(layer.draw_orthogonal(context.seed, draw))
    return float((V * _multiply_hessian(context, layer, V[None])[0]).sum())


def _find_top_eigenvalue(context: Context, layer: FeatureLayer) -> TopEigenvalue:
    numbers = count(1)

    def multiply(vectors: Vectors) -> Vectors:
        product = _multiply_hessian(context, layer, vectors[layer.name][None])[0]
        context.tick("Largest eigenvalue of the layer", next(numbers), None)
        return {layer.name: product}

    start = draw_normals(context, 0)[layer.name]
    with reserve_basis(context, [layer.name]) as basis:
        found = find_top_eigenvalues(multiply, {layer.name: start}, get_rounding_tolerance(context), basis=basis)
    top = found[layer.name]
    u, v = start / start.norm(), top.vector.reshape(layer.shape)
    Hu, Hv = _multiply_hessian(context, layer, torch.stack([u, v]))
    size = float((Hu.square().sum() + Hv.square().sum()).sqrt())
    if size:
        check_symmetric(context, float(((u * Hv).sum() - (v * Hu).sum()).abs()) / size)
    return replace(top, vector=v)


def _compute_traces(context: Context, layer: FeatureLayer, draws: int) -> tuple[Estimate, Estimate]:
    """Return the trace of the Hessian, and the sum over pairs of rows.

    They are exact if the layer's Gauss-Newton matrix is its Hessian, or if the layer is small. Otherwise they are
    estimated from random products with the Hessian.
    """
    if max(compute_gaps(context)[0].values()) <= TOLERANCE:
        return _sum_traces(layer, _sweep_traces(context, layer))
    size = layer.weight.numel()
    if size <= EXACT:
        unit = torch.eye(size, dtype=torch.float64, device=layer.weight.device).reshape(size, *layer.shape)
        H = _multiply_hessian(context, layer, unit).reshape(*layer.weight.shape, *layer.weight.shape)
        return _sum_traces(layer, torch.einsum("gsjgtj->gst", H))
    traces, pairs = [], []
    for draw in range(draws):
        signs = draw_signs(context, draw)[layer.name]
        # Other matrices than those whose rise is measured, so that the prediction does not depend on them.
        turned = layer.compute_change(layer.draw_orthogonal(context.seed, OTHERS + draw))
        products = _multiply_hessian(context, layer, torch.stack([signs, turned]))
        traces.append(float((signs * products[0]).sum()))
        pairs.append(layer.features * float((turned * products[1]).sum()))
        context.tick("Trace of the layer", draw + 1, draws)
    return compute_mean_and_error(traces), compute_mean_and_error(pairs)


def _sum_traces(layer: FeatureLayer, traces: Tensor) -> tuple[Estimate, Estimate]:
    """Return both sums, given tr H_st for all pairs of rows, ``(groups, rows, rows)``."""
    products = layer.weight @ layer.weight.mT
    return (float(traces.diagonal(dim1=1, dim2=2).sum()), 0.0), (float((products * traces.to(products)).sum()), 0.0)


def _sweep_traces(context: Context, layer: FeatureLayer) -> Tensor:
    """Return tr G_st of the Gauss-Newton matrix for all pairs of rows, ``(groups, rows, rows)``."""
    wanted = replace(unit_trace.bind(unit_trace.name, {"normalize": False}), features=False)
    traces = Sweep(context, [wanted]).run().compute_values()[unit_trace.name][layer.name]
    # A layer that the outputs do not depend on has a single zero.
    return traces.expand(layer.groups, layer.rows, layer.rows)
