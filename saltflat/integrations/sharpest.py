"""The largest eigenvalue of the whole network's Hessian, again and again while the network is trained."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.columns import parse_column_plan
from saltflat.errors import NonFiniteError
from saltflat.integrations.stability import StabilityMatrix
from saltflat.lanczos import TopEigenvalue, Vectors, find_top_eigenvalues, reserve_basis
from saltflat.loan import open_session
from saltflat.noise import draw_normals
from saltflat.problem import Problem
from saltflat.setting import Setting
from saltflat.sweep import parse_bytes
from saltflat.whole import check_symmetric, compute_hessian_product

TOLERANCE = 1e-3  # relative: a curve over steps needs no more
STEPS = 100  # products at most
# How much of a new direction is mixed with the earlier eigenvector. Without any, a second eigenvalue that overtakes the
# first might never be seen: its vector is orthogonal to the start, and stays so. With this much, one that is larger by
# half is seen at once, and one that is larger by a tenth within a few times.
FRESH = 0.3


class TopEigenvalueTracker:
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

    def reset(self) -> None:
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
        stability: StabilityMatrix | None = None,
    ) -> float:
        """The eigenvalue, of all parameters that require a gradient.

        With ``stability`` that of its matrix in place of the Hessian itself.
        """
        with open_session(model, mode, data):
            problem = Problem.build(model, data, loss, None, dtype, mode)
            setting = Setting(problem, parse_column_plan("exact"), seed, parse_bytes(memory))
            top = self._find_top_eigenvalue(setting, stability)
        if not isfinite(top.value):
            raise NonFiniteError(
                f"Got {top.value} as the largest eigenvalue: second derivatives overflow. Want finite ones. "
                "Do: measure with dtype=torch.float64."
            )
        self.converged = top.converged
        self._vector = top.vector
        return top.value

    def _find_top_eigenvalue(self, setting: Setting, stability: StabilityMatrix | None) -> TopEigenvalue:
        measured = setting.problem.network.measured
        sizes = {name: each.numel() for name, each in measured.items()}
        seen: list[tuple[Tensor, Tensor]] = []
        self.products = 0

        def multiply_by_hessian(vector: Tensor) -> Tensor:
            parts = zip(measured.items(), vector.split(list(sizes.values())), strict=True)
            found = compute_hessian_product(setting, {name: part.reshape(each.shape) for (name, each), part in parts})
            flat = torch.cat([each.flatten() for each in found.values()])
            if len(seen) < 2:
                seen.append((vector, flat))
            return flat

        if stability is not None:
            scale, decay = (
                _flatten_values(stability.rates, measured).sqrt(),
                _flatten_values(stability.decays, measured),
            )

        def multiply_by_matrix(vectors: Vectors) -> Vectors:
            self.products += 1
            if stability is None:
                return {"": multiply_by_hessian(vectors[""])}
            scaled = scale * vectors[""].double()
            return {"": scale * (stability.sign * multiply_by_hessian(scaled) + decay * scaled)}

        random = torch.cat([each.flatten() for each in draw_normals(setting, self._times).values()])
        start = random / random.norm()
        if self._vector is not None and self._sizes == sizes:
            # One product turns a random direction toward all that curve strongly.
            fresh = multiply_by_matrix({"": start})[""]
            start = self._vector.to(start) + FRESH * fresh / fresh.norm().clamp_min(1e-300)
        self._sizes, self._times = sizes, self._times + 1
        with reserve_basis(setting, measured) as basis:
            top = find_top_eigenvalues(multiply_by_matrix, {"": start}, self.tolerance, self.steps, basis=basis)[""]
        if len(seen) == 2 and stability is None:  # whose vectors have no common length
            (u, Hu), (v, Hv) = seen
            size = float((Hu.square().sum() + Hv.square().sum()).sqrt())
            check_symmetric(setting, float((u @ Hv - v @ Hu).abs()) / size if size else 0.0)
        return top


def _flatten_values(values: Mapping[str, Tensor | float], measured: Mapping[str, Tensor]) -> Tensor:
    """One number for every entry of the parameters."""
    parts = [
        torch.as_tensor(values[name], dtype=torch.float64).to(each.device).expand(each.shape).flatten()
        for name, each in measured.items()
    ]
    return torch.cat(parts)
