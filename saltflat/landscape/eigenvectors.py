"""The directions of the sharpest curvature: eigenvectors of the Hessian of the mean loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from saltflat.lanczos import Vectors, find_top_eigenvalues, get_rounding_tolerance, reserve_basis
from saltflat.noise import draw_normals
from saltflat.setting import Setting
from saltflat.whole import check_symmetric, compute_hessian_product


@dataclass(frozen=True)
class Eigenvector:
    """An eigenvalue of the Hessian over all measured parameters, and its vector of length one, by their names."""

    value: float
    vector: Mapping[str, Tensor]


def compute_eigenvectors(setting: Setting, count: int, notes: list[str]) -> list[Eigenvector]:
    """Those of the ``count`` largest eigenvalues, the largest first, by products with the true Hessian.

    Each is looked for among the vectors that are orthogonal to those found before.
    """
    measured = setting.problem.network.measured
    sizes = [each.numel() for each in measured.values()]
    found: list[Tensor] = []
    values: list[float] = []
    done = 0

    def split_by_name(flat: Tensor) -> dict[str, Tensor]:
        parts = zip(measured.items(), flat.split(sizes), strict=True)
        return {name: part.reshape(each.shape) for (name, each), part in parts}

    def multiply_hessian(flat: Tensor) -> Tensor:
        nonlocal done
        done += 1
        setting.tick("Eigenvectors of the Hessian", done, None)
        return torch.cat([each.flatten() for each in compute_hessian_product(setting, split_by_name(flat)).values()])

    def multiply_deflated(vectors: Vectors) -> Vectors:
        return {"": _orthogonalize(multiply_hessian(_orthogonalize(vectors[""], found)), found)}

    for number in range(min(count, sum(sizes))):
        start = _orthogonalize(torch.cat([each.flatten() for each in draw_normals(setting, number).values()]), found)
        with reserve_basis(setting, measured) as basis:
            top = find_top_eigenvalues(multiply_deflated, {"": start}, get_rounding_tolerance(setting), basis=basis)[""]
        if number == 0:
            start, vector = start / start.norm(), top.vector
            check_symmetric(
                setting, _compute_asymmetry(start, multiply_hessian(start), vector, multiply_hessian(vector))
            )
        if not top.converged:
            notes.append(f"Eigenvalue {number + 1} of the Hessian may be larger by {top.bound:.1e} of itself.")
        if top.value == 0:
            notes.append(f"Eigenvalue {number + 1} of the Hessian is 0: nothing singles its vector out.")
        vector = _orthogonalize(top.vector, found)
        found.append(_fix_sign(vector / vector.norm()))
        values.append(top.value)
    return [Eigenvector(value, split_by_name(flat)) for value, flat in zip(values, found, strict=True)]


def _orthogonalize(vector: Tensor, others: list[Tensor]) -> Tensor:
    """What is left of a vector without its parts along others of length one, twice for rounding."""
    for other in others * 2:
        vector = vector - (other @ vector) * other
    return vector


def _fix_sign(vector: Tensor) -> Tensor:
    """One of the two signs that an eigenvector can have: the largest entry is positive."""
    return vector * vector[vector.abs().argmax()].sign()


def _compute_asymmetry(u: Tensor, Hu: Tensor, v: Tensor, Hv: Tensor) -> float:
    size = float((Hu.square().sum() + Hv.square().sum()).sqrt())
    return float((u @ Hv - v @ Hu).abs()) / size if size else 0.0
