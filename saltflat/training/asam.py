"""Adaptive sharpness-aware minimization (Kwon et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.training.shift import compute_norm
from saltflat.training.two_pass import TwoPass
from saltflat.training.wrapper import DefaultFloat
from saltflat.validation import check_non_negative


class ASAM(TwoPass):
    r"""SAM whose neighbourhood grows with the weights, so that rescaling a layer does not change it (``eta=0``).

    .. math::
        w \leftarrow \mathrm{base}\bigl(w, \nabla L(w + \rho\, T^2 g / \lVert T g \rVert)\bigr), \qquad
        T = |w| + \eta

    for weights and :math:`T = 1` for biases, which are told by their names.

    Args:
        model: the module that is trained; with DistributedDataParallel, that.
        base: an optimizer, or a class of optimizers, which is given all parameters that require a gradient.
        rho: how far to go; groups of the base may have their own. Around a base that has a ``rho`` itself, its key in
            the groups is ``sam_rho``; see :meth:`get_key`.
        eta: keeps small weights from standing still; groups of the base may have their own.
        sync: whose gradient says where to go; see :class:`~saltflat.training.two_pass.TwoPass`.
        options: of the base, if it is a class.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer | Callable[..., Optimizer],
        rho: float = DefaultFloat(0.5),
        eta: float = DefaultFloat(0.01),
        sync: str = "global",
        **options: Any,
    ) -> None:
        check_non_negative(rho=rho, eta=eta)
        super().__init__(model, base, sync=sync, own={"rho": rho, "eta": eta}, options=options)

    def compute_ascent(
        self, groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Tensor]:
        biases = {id(p) for name, p in self.model.named_parameters() if "bias" in name.rpartition(".")[2]}
        scales = [
            None if id(p) in biases else p.abs() + group["eta"] for group, p in zip(groups, parameters, strict=True)
        ]
        once = [g if t is None else t * g for t, g in zip(scales, gradients, strict=True)]
        twice = [g if t is None else t * g for t, g in zip(scales, once, strict=True)]
        return twice, compute_norm(once)
