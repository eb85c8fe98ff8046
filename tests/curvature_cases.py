"""Dense Hessians, matrices with known eigenvalues, and a layer that hides its second derivative."""

from __future__ import annotations

from functools import cache
from typing import Any

import oracle
import torch
from cases import CASES, Case, problem, reals
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def matrix_with(values: Tensor, seed: int = 0) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64, generator=noise)).Q
    matrix: Tensor = turn @ torch.diag(values) @ turn.mT
    return matrix


@cache
def dense(name: str) -> tuple[float, Tensor, Tensor]:
    """Loss, gradient and Hessian over all trainable parameters in a row."""
    case = CASES[name]()
    model, parameters = oracle.frozen_copy(case.model)
    names = list(oracle.trainable(case.model))
    sizes = [parameters[each].numel() for each in names]

    def of_all(row: Tensor) -> Tensor:
        parts = zip(names, row.split(sizes), strict=True)
        shaped = {each: part.reshape(parameters[each].shape) for each, part in parts}
        return oracle.loss_at(case, oracle.outputs_of(case, model, parameters | shaped))

    row = torch.cat([parameters[each].flatten() for each in names])
    at = row.clone().requires_grad_()
    value = of_all(at)
    (slope,) = torch.autograd.grad(value, at)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return float(value.detach()), slope, oracle.hessian(of_all, row)


class Cube(torch.autograd.Function):
    """x^3 with a backward pass that can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = 3 * x**2 * g
        return slope


class CubeOnce(Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Cube.backward(ctx, g)


class CubeDetached(Cube):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = 3 * x.detach() ** 2 * g
        return slope


class Applied(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function.apply(x)
        return out


def cubed(function: type[torch.autograd.Function]) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), Applied(function), nn.Linear(4, 2)).double()
    return problem(model, reals(8, 3), torch.randint(2, (8,)))
