"""The mean loss of all the data, and its derivatives, at any weights: plain autograd through the whole network.

Nothing here uses the layers' rules, and the user's parameters are never touched: the network runs on stand-ins. Data is
taken in chunks that fit the memory; sums over them are kept in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import torch
from torch import Tensor

from saltflat.data import Batch
from saltflat.errors import EmptyDataError, NonFiniteError
from saltflat.logits import Normalized
from saltflat.losses import BinaryCrossEntropy, CrossEntropy
from saltflat.problem import real
from saltflat.setting import NotDefinedError, Setting

Weights = Mapping[str, Tensor]

# Largest difference between u'Hv and v'Hu that is still rounding.
SYMMETRY = {torch.float32: 1e-3, torch.float64: 1e-8}


def loss_at(setting: Setting, weights: Weights | None = None) -> float:
    """The mean loss with ``weights`` in place of the parameters of these names; infinite or NaN if it overflows."""
    total = share = 0.0
    with torch.no_grad():
        for batch in setting.chunks(0):
            outputs, targets = _outputs(setting, batch, _leaves(setting, weights))
            total += float(setting.problem.loss.total(outputs, targets).sum())
            share += float(setting.problem.loss.share(outputs, targets).sum())
    return total / _counted(share)


def gradient_at(setting: Setting, weights: Weights | None = None) -> tuple[float, dict[str, Tensor]]:
    """The mean loss and its gradient, in float64."""
    total = share = 0.0
    sums = _zeros(setting)
    for batch in setting.chunks(0):
        leaves = _leaves(setting, weights)
        outputs, targets = _outputs(setting, batch, leaves)
        loss = setting.problem.loss.total(outputs, targets).sum()
        _add(sums, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
        total += float(loss.detach())
        share += float(setting.problem.loss.share(outputs.detach(), targets).sum())
    share = _counted(share)
    return total / share, {name: each / share for name, each in sums.items()}


def hessian_product(setting: Setting, vector: Weights) -> dict[str, Tensor]:
    """The true Hessian of the mean loss times a vector, in float64, by differentiating twice."""
    share = 0.0
    sums = _zeros(setting)
    for batch in setting.chunks(1):
        leaves = _leaves(setting, None)
        outputs, targets = _outputs(setting, batch, leaves)
        loss = setting.problem.loss.total(outputs, targets).sum()
        slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
        pairs = zip(slopes, (vector[name] for name in leaves), strict=True)
        # A parameter without effect has no gradient, and one that enters linearly a constant one.
        bent = [(g * v.to(g)).sum() for g, v in pairs if g is not None and g.requires_grad]
        if bent:
            inner = torch.stack([each.double() for each in bent]).sum()
            _add(sums, _differentiated_again(inner, leaves))
        share += float(setting.problem.loss.share(outputs.detach(), targets).sum())
    share = _counted(share)
    return {name: each / share for name, each in sums.items()}


def _differentiated_again(inner: Tensor, leaves: Weights) -> tuple[Tensor | None, ...]:
    try:
        return torch.autograd.grad(inner, list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        raise NotDefinedError(f"needs second derivatives, which torch does not have for this model: {error}") from error


def check_symmetric(setting: Setting, difference: float) -> None:
    """For any two vectors u'Hv is v'Hu; where torch's second derivatives are wrong they differ in the first digits.

    ``difference`` is relative to the lengths of u, v and their products.
    """
    coarsest = max(SYMMETRY[each.dtype] for each in setting.problem.network.measured.values())
    if difference > coarsest:
        raise NotDefinedError(
            f"needs second derivatives, and those that torch gives for this model are wrong: u'Hv and v'Hu differ by "
            f"{difference:.0e} of their size (weight_norm is known for it)"
        )


def accuracy_at(setting: Setting, weights: Weights | None = None) -> float:
    """The fraction of targets that the network gets right; at every position, without those that are ignored."""
    right = counted = 0
    with torch.no_grad():
        for batch in setting.chunks(0):
            outputs, targets = _outputs(setting, batch, _leaves(setting, weights))
            met, kept = hits(setting, outputs, targets)
            right, counted = right + int((met & kept).sum()), counted + int(kept.sum())
    return right / _counted(counted)


def scales_of(setting: Setting) -> dict[str, Tensor]:
    """The absolute values of the parameters, in float64."""
    return {name: value.double().abs() for name, value in setting.problem.network.measured.items()}


def moved(setting: Setting, step: Weights) -> dict[str, Tensor]:
    """The parameters plus ``step``, in float64."""
    return {name: value.double() + step[name] for name, value in setting.problem.network.measured.items()}


def norm_of(vector: Weights) -> float:
    """The length of a vector that is kept by parameters."""
    return float(torch.stack([each.double().square().sum().cpu() for each in vector.values()]).sum().sqrt())


def check_loss(loss: float) -> float:
    """The mean loss where the network stands must be a number."""
    if not isfinite(loss):
        raise NonFiniteError(f"Got a mean loss of {loss}. Want a finite one. Do: check the targets and the weights.")
    return loss


def _leaves(setting: Setting, weights: Weights | None) -> dict[str, Tensor]:
    given = weights or {}
    measured = setting.problem.network.measured
    return {name: given.get(name, value).to(value).detach().requires_grad_() for name, value in measured.items()}


def _outputs(setting: Setting, batch: Batch, leaves: Weights) -> tuple[Tensor, Tensor]:
    outputs, targets = setting.problem.network(batch, leaves=leaves).double(), real(batch.targets)
    setting.problem.loss.check(outputs, targets)
    return outputs, targets


def hits(setting: Setting, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets are met, and which count."""
    loss = setting.problem.loss
    if isinstance(loss, Normalized):  # the largest logit stays the largest
        loss = loss.inner
    if isinstance(loss, BinaryCrossEntropy):
        return (outputs > 0) == (targets > 0.5), torch.ones_like(targets, dtype=torch.bool)
    if not isinstance(loss, CrossEntropy):
        raise NotDefinedError(f"needs classes to be right or wrong about, which {type(loss).__name__} does not have")
    axis = loss.class_axis(outputs, targets)
    # Outputs that overflowed predict nothing.
    found = outputs.argmax(axis).where(outputs.isfinite().all(axis), targets.new_full((), -1, dtype=torch.long))
    if targets.is_floating_point():
        return found == targets.argmax(axis), torch.ones_like(found, dtype=torch.bool)
    return found == targets, targets != loss.ignore_index


def _zeros(setting: Setting) -> dict[str, Tensor]:
    measured = setting.problem.network.measured
    return {name: torch.zeros_like(value, dtype=torch.float64) for name, value in measured.items()}


def _add(sums: dict[str, Tensor], found: tuple[Tensor | None, ...]) -> None:
    for total, each in zip(sums.values(), found, strict=True):
        if each is not None:
            total += each


def _counted(share: float) -> float:
    if share <= 0:
        raise EmptyDataError(
            "Got targets that are all ignored or have no weight. Want at least one that counts. "
            "Do: check ignore_index and the class weights."
        )
    return share
