"""Columns of the loss's curvature that follow the outputs, so that their slope is part of a penalty's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from saltflat.columns import ColumnPlan, ExampleRNG, make_columns
from saltflat.curvature import Curvature, DiagonalCurvature, FactoredCurvature, SoftmaxCurvature
from saltflat.losses import CustomLoss, Loss

# The root of a probability that has underflowed has no slope. Nobody can tell it from this.
TINY = 1e-290


def compute_columns_with_graph(
    loss: Loss, outputs: Tensor, targets: Tensor, plan: ColumnPlan, dice: ExampleRNG
) -> list[tuple[Tensor, int]]:
    """``(columns, examples, *outputs)`` and their sign, for each set of :func:`saltflat.columns.make_columns`."""
    curvature = _compute_smooth_curvature(loss, outputs, targets)
    return [(each.block(0, each.layout.total), each.sign) for each in make_columns(curvature, plan, dice)]


def compute_gradient_with_graph(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss's gradient at the outputs, with its own slope."""
    if not isinstance(loss, CustomLoss):
        return loss.gradient(outputs, targets)
    free = outputs if outputs.requires_grad else outputs.detach().requires_grad_()
    return torch.autograd.grad(loss.total(free, targets).sum(), free, create_graph=True)[0]


def _compute_smooth_curvature(loss: Loss, outputs: Tensor, targets: Tensor) -> Curvature:
    if isinstance(loss, CustomLoss):
        return _compute_smooth_roots(loss, outputs, targets)
    found = loss.curvature(outputs, targets)
    if isinstance(found, SoftmaxCurvature):
        return replace(found, p=found.p.clamp_min(TINY))
    return DiagonalCurvature(found.values.clamp_min(TINY)) if isinstance(found, DiagonalCurvature) else found


def _compute_smooth_roots(loss: CustomLoss, outputs: Tensor, targets: Tensor) -> FactoredCurvature:
    r"""Roots of any second derivative, without the slope of an eigenvector, which equal eigenvalues do not have.

    Let :math:`B_0 = \sum_k \pm s_k s_k^T` be the matrix here, and B the same with its graph. The columns

    .. math::
        s_k \pm \tfrac12 (B - B_0) \, s_k / |s_k|^2

    are the roots :math:`s_k`, and their squares change as B does: to first order
    :math:`\sum_k \pm s_k s_k^T + \tfrac12 ((B - B_0) P + P (B - B_0))` with P the projection on the range of
    :math:`B_0`, which is that of B unless an eigenvalue is just about to leave zero.
    """
    with torch.no_grad():
        here = loss.curvature(outputs.detach(), targets)
    size = outputs[0].numel()
    B = _compute_hessians(loss, outputs, targets).reshape(-1, size, size)
    change = B - B.detach()

    def follow_outputs(roots: Tensor, sign: int) -> Tensor:
        flat = roots.reshape(*roots.shape[:2], size)
        square = flat.square().sum(2, keepdim=True)
        unit = flat / square.where(square > 0, torch.ones_like(square))
        return (flat + sign / 2 * torch.einsum("nij,knj->kni", change, unit)).reshape(roots.shape)

    return FactoredCurvature(
        follow_outputs(here.columns, 1), None if here.negative is None else follow_outputs(here.negative, -1)
    )


def _compute_hessians(loss: CustomLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    try:
        mapped: Tensor = torch.func.vmap(torch.func.hessian(loss.compute_example_loss))(outputs, targets)
        return mapped
    except Exception:  # not every function can be mapped; one that is wrong fails again below, in plain view
        one: Callable[..., Tensor] = torch.autograd.functional.hessian
        pairs = zip(outputs, targets, strict=True)
        return torch.stack(
            [one(lambda o, t=t: loss.compute_example_loss(o, t), o, create_graph=True) for o, t in pairs]
        )
