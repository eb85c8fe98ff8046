"""Penalize the norm of the gradient (Zhao et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.errors import OptionError
from saltflat.training.shift import compute_norm
from saltflat.training.two_pass import TwoPass
from saltflat.training.wrapper import DefaultFloat, Sync
from saltflat.validation import check_non_negative


class GradientNormPenalty(TwoPass):
    r"""Minimize :math:`L + \lambda \lVert \nabla L \rVert`, to first order in ``rho``.

    .. math::
        w \leftarrow \mathrm{base}\bigl(w, (1 - a) g + a \nabla L(w + \rho\, g / \lVert g \rVert)\bigr), \qquad
        g = \nabla L(w), \quad a = \lambda / \rho

    ``balance=1`` is SAM, ``balance=0`` the base alone.

    Args:
        model: the module that is trained, or the DistributedDataParallel around it.
        base: an optimizer, or a class of optimizers, which receives all parameters that require a gradient.
        rho: the length of the ascent step; groups of the base may set their own. If the base has an option ``rho``
            itself, the key in the groups is ``sam_rho``; see :meth:`get_key`.
        balance: :math:`a`, the share of the second gradient in the step, from 0 to 1; :math:`\lambda` is
            ``balance * rho``.
        sync: whose gradient sets the direction; see :class:`~saltflat.training.two_pass.TwoPass`.
        options: options of the base, if it is a class.
    """

    keeps_first = True

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer | Callable[..., Optimizer],
        rho: float = DefaultFloat(0.05),
        balance: float = DefaultFloat(0.8),
        sync: Sync = "global",
        **options: Any,
    ) -> None:
        check_non_negative(rho=rho, balance=balance)
        _check_balance(balance)
        super().__init__(model, base, sync=sync, own={"rho": rho, "balance": balance}, options=options)

    def compute_ascent(
        self, groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Return the gradients and their norm."""
        return gradients, compute_norm(gradients)

    def mix_gradients(self, group: dict[str, Any], first: Tensor, second: Tensor) -> Tensor:
        """Interpolate between the gradients."""
        return first.lerp(second, group["balance"])

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        _check_balance(group.get(self.get_key("balance"), 0.0))


def _check_balance(balance: float) -> None:
    if balance > 1:
        raise OptionError(
            f"Expected balance to be a share from 0 to 1, but got {balance!r}. Try a larger rho for a stronger "
            "penalty, which is balance * rho."
        )
