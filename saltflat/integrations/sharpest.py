"""The largest eigenvalue of the whole network's Hessian, again and again while the network is trained."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.columns import plan_from
from saltflat.errors import NonFiniteError
from saltflat.integrations.stability import Stability
from saltflat.lanczos import Top, Vectors, room_for_basis, top_eigenvalues
from saltflat.loan import loan
from saltflat.noise import normals
from saltflat.problem import Problem
from saltflat.setting import Setting
from saltflat.sweep import bytes_from
from saltflat.whole import check_symmetric, hessian_product

TOLERANCE = 1e-3  # relative: a curve over steps needs no more
STEPS = 100  # products at most
# How much of a new direction is mixed with the earlier eigenvector. Without any, a second eigenvalue that overtakes the
# first might never be seen: its vector is orthogonal to the start, and stays so. With this much, one that is larger by
# half is seen at once, and one that is larger by a tenth within a few times.
FRESH = 0.3


class Sharpest:
    """How steeply the loss curves along the steepest direction, which is remembered from one time to the next.

    Args:
        tolerance: of the bound on the eigenvalue's error, relative.
        steps: products at most.

    Attributes:
        products: how many products with the Hessian the latest one took.
        converged: whether the latest bound was within the tolerance.
    """

    def __init__(self, tolerance: float = TOLERANCE, steps: int = STEPS) -> None:
        self.tolerance, self.steps = tolerance, steps
        self.products = 0
        self.converged = True
        self._vector: Tensor | None = None
        self._sizes: dict[str, int] = {}
        self._times = 0

    def forget(self) -> None:
        """Start from a random direction the next time."""
        self._vector, self.converged = None, True

    def __call__(
        self,
        model: nn.Module,
        data: Any,
        loss: Any,
        *,
        seed: int = 0,
        memory: str | int = "1GiB",
        dtype: torch.dtype | None = None,
        mode: str = "eval",
        stability: Stability | None = None,
    ) -> float:
        """The eigenvalue, of all parameters that require a gradient.

        With ``stability`` that of its matrix in place of the Hessian itself.
        """
        with loan(model, mode, data):
            problem = Problem.of(model, data, loss, None, dtype, mode)
            setting = Setting(problem, plan_from("exact"), seed, bytes_from(memory))
            top = self._search(setting, stability)
        if not isfinite(top.value):
            raise NonFiniteError(
                f"Got {top.value} as the largest eigenvalue: second derivatives overflow. Want finite ones. "
                "Do: measure with dtype=torch.float64."
            )
        self.converged = top.converged
        self._vector = top.vector
        return top.value

    def _search(self, setting: Setting, stability: Stability | None) -> Top:
        measured = setting.problem.network.measured
        sizes = {name: each.numel() for name, each in measured.items()}
        seen: list[tuple[Tensor, Tensor]] = []
        self.products = 0

        def hessian(vector: Tensor) -> Tensor:
            parts = zip(measured.items(), vector.split(list(sizes.values())), strict=True)
            found = hessian_product(setting, {name: part.reshape(each.shape) for (name, each), part in parts})
            flat = torch.cat([each.flatten() for each in found.values()])
            if len(seen) < 2:
                seen.append((vector, flat))
            return flat

        if stability is not None:
            scale, decay = _flat(stability.rates, measured).sqrt(), _flat(stability.decays, measured)

        def product(vectors: Vectors) -> Vectors:
            self.products += 1
            if stability is None:
                return {"": hessian(vectors[""])}
            scaled = scale * vectors[""].double()
            return {"": scale * (stability.sign * hessian(scaled) + decay * scaled)}

        random = torch.cat([each.flatten() for each in normals(setting, self._times).values()])
        start = random / random.norm()
        if self._vector is not None and self._sizes == sizes:
            # One product turns a random direction toward all that curve strongly.
            fresh = product({"": start})[""]
            start = self._vector.to(start) + FRESH * fresh / fresh.norm().clamp_min(1e-300)
        self._sizes, self._times = sizes, self._times + 1
        with room_for_basis(setting, measured) as basis:
            top = top_eigenvalues(product, {"": start}, self.tolerance, self.steps, basis=basis)[""]
        if len(seen) == 2 and stability is None:  # whose vectors have no common length
            (u, Hu), (v, Hv) = seen
            size = float((Hu.square().sum() + Hv.square().sum()).sqrt())
            check_symmetric(setting, float((u @ Hv - v @ Hu).abs()) / size if size else 0.0)
        return top


def _flat(values: Mapping[str, Tensor | float], measured: Mapping[str, Tensor]) -> Tensor:
    """One number for every entry of the parameters."""
    parts = [
        torch.as_tensor(values[name], dtype=torch.float64).to(each.device).expand(each.shape).flatten()
        for name, each in measured.items()
    ]
    return torch.cat(parts)
