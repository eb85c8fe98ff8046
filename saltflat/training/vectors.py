"""Lists of tensors as one vector: its length, and its multiples, in few kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def compute_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean length of all of them together, on the first one's device; at least in single precision."""
    squares = [each.float() if each.dtype in (torch.float16, torch.bfloat16) else each for each in tensors]
    norms = torch._foreach_norm(squares)
    length: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0]) for each in norms]))
    return length


def scale_directions(directions: Sequence[Tensor], rhos: Sequence[float], factor: Tensor) -> list[Tensor]:
    """Every direction times its own number and one common factor."""
    if len({each.device for each in directions}) > 1 or len(set(rhos)) > 1:
        return [each * (factor * rho).to(each.device) for each, rho in zip(directions, rhos, strict=True)]
    return list(torch._foreach_mul(list(directions), factor * rhos[0]))


@torch.no_grad()
def multiply_in_place(tensors: list[Tensor], factor: Tensor | float) -> None:
    """All of them times a factor, in place."""
    for device in {each.device for each in tensors}:
        here = factor.to(device) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_([each for each in tensors if each.device == device], here)
