"""Adaptive sharpness-aware minimization (Kwon et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.training.shift import compute_norm
from saltflat.training.two_pass import TwoPass
from saltflat.training.wrapper import DefaultFloat, Sync
from saltflat.validation import check_non_negative


class ASAM(TwoPass):
    r"""SAM with a neighborhood that scales with the weights, so that it is invariant to layer rescaling (``eta=0``).

    .. math::
        w \leftarrow \mathrm{base}\bigl(w, \nabla L(w + \rho\, T^2 g / \lVert T g \rVert)\bigr), \qquad
        T = |w| + \eta

    for weights and :math:`T = 1` for biases, which are recognized by their names.

    Args:
        model: the module that is trained, or the DistributedDataParallel around it.
        base: an optimizer, or a class of optimizers, which receives all parameters that require a gradient.
        rho: the length of the ascent step; groups of the base may set their own. If the base has an option ``rho``
            itself, the key in the groups is ``sam_rho``; see :meth:`get_key`.
        eta: lets small weights move as well; groups of the base may set their own.
        sync: whose gradient sets the direction; see :class:`~saltflat.training.two_pass.TwoPass`.
        options: options of the base, if it is a class.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer | Callable[..., Optimizer],
        rho: float = DefaultFloat(0.5),
        eta: float = DefaultFloat(0.01),
        sync: Sync = "global",
        **options: Any,
    ) -> None:
        check_non_negative(rho=rho, eta=eta)
        super().__init__(model, base, sync=sync, own={"rho": rho, "eta": eta}, options=options)

    def compute_ascent(
        self, groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Return :math:`T^2 g` and the norm of :math:`T g`."""
        biases = {id(p) for name, p in self.model.named_parameters() if "bias" in name.rpartition(".")[2]}
        scales = [
            None if id(p) in biases else p.abs() + group["eta"] for group, p in zip(groups, parameters, strict=True)
        ]
        once = [g if t is None else t * g for t, g in zip(scales, gradients, strict=True)]
        twice = [g if t is None else t * g for t, g in zip(scales, once, strict=True)]
        return twice, compute_norm(once)
