"""Sharpness-aware minimization (Foret et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.training.shift import compute_norm
from saltflat.training.two_pass import TwoPass
from saltflat.training.wrapper import DefaultFloat, Sync
from saltflat.validation import check_non_negative


class SAM(TwoPass):
    r"""Step with the gradient at the (nearly) worst point within ``rho`` of the weights.

    .. math::
        w \leftarrow \mathrm{base}\bigl(w, \nabla L(w + \rho\, g / \lVert g \rVert)\bigr), \qquad g = \nabla L(w)

    Args:
        model: the module that is trained, or the DistributedDataParallel around it.
        base: an optimizer, or a class of optimizers, which receives all parameters that require a gradient.
        rho: the length of the ascent step; groups of the base may set their own. If the base has an option ``rho``
            itself, the key in the groups is ``sam_rho``; see :meth:`get_key`.
        sync: whose gradient sets the direction; see :class:`~saltflat.training.two_pass.TwoPass`.
        options: options of the base, if it is a class.

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
        sync: Sync = "global",
        **options: Any,
    ) -> None:
        check_non_negative(rho=rho)
        super().__init__(model, base, sync=sync, own={"rho": rho}, options=options)

    def compute_ascent(
        self, groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Return the gradients and their norm."""
        return gradients, compute_norm(gradients)
