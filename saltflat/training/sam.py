"""Sharpness-aware minimization (Foret et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.training.shift import compute_norm
from saltflat.training.two_pass import TwoPass
from saltflat.training.wrapper import DefaultFloat
from saltflat.validation import check_non_negative


class SAM(TwoPass):
    r"""Steps with the gradient at the (nearly) worst point within ``rho`` of the weights.

    .. math::
        w \leftarrow \mathrm{base}\bigl(w, \nabla L(w + \rho\, g / \lVert g \rVert)\bigr), \qquad g = \nabla L(w)

    Args:
        model: the module that is trained; with DistributedDataParallel, that.
        base: an optimizer, or a class of optimizers, which is given all parameters that require a gradient.
        rho: how far to go; groups of the base may have their own. Around a base that has a ``rho`` itself, its key in
            the groups is ``sam_rho``; see :meth:`get_key`.
        sync: whose gradient says where to go; see :class:`~saltflat.training.two_pass.TwoPass`.
        options: of the base, if it is a class.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = SAM(model, torch.optim.SGD, rho=0.05, lr=0.1)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = model(torch.ones(3, 2)).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)
        >>> optimizer.perturbed_steps, round(optimizer.perturbation, 3)
        (1, 0.05)
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer | Callable[..., Optimizer],
        rho: float = DefaultFloat(0.05),
        sync: str = "global",
        **options: Any,
    ) -> None:
        check_non_negative(rho=rho)
        super().__init__(model, base, sync=sync, own={"rho": rho}, options=options)

    def compute_ascent(
        self, groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Tensor]:
        return gradients, compute_norm(gradients)
