"""Second derivatives by differentiating forward, against finite differences and against reverse mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast
from unittest.mock import patch

import pytest
import torch
from cases import CASES
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.engine import certificate as engine
from saltflat.engine.certificate import CurvatureComparison, draw_direction
from saltflat.engine.operation_derivatives import WRITTEN_OUT
from saltflat.engine.tangents import DerivativeTrace, TangentPass, Tangents

WITHOUT_SECOND_DERIVATIVE = {"embedding_bag"}


@pytest.mark.filterwarnings("ignore:Using padding")
@pytest.mark.parametrize("name", sorted(CASES.keys() - WITHOUT_SECOND_DERIVATIVE))
def test_both_modes_of_differentiation_give_the_same_certificate(name: str) -> None:
    case = CASES[name]()
    forward = saltflat.certify(case.model, case.batches, loss=case.loss, examples=4)
    with patch.object(engine, "_add_forward_curvatures", return_value=False):
        reverse = saltflat.certify(case.model, case.batches, loss=case.loss, examples=4)
    assert forward.holds is reverse.holds
    size = max(abs(each.hessian) for each in reverse.values())
    for parameter, expected in reverse.items():
        found = forward[parameter]
        for one, other in (
            (found.hessian, expected.hessian),
            (found.gauss_newton, expected.gauss_newton),
        ):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-12 * size)


# Operations of a vector of 12 numbers and one of 4.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": lambda x, w: F.gelu(x),
    "gelu_tanh": lambda x, w: F.gelu(x, approximate="tanh"),
    "silu": lambda x, w: F.silu(x),
    "elu": lambda x, w: F.elu(x),
    "softplus": lambda x, w: F.softplus(x, beta=2.0),
    "power": lambda x, w: (x.square() + 1) ** -0.5,
    "in_place_tanh": lambda x, w: (2 * x).tanh_(),
    "in_place_product": lambda x, w: (2 * x).mul_(x.sin()),
    "division": lambda x, w: x.reshape(3, 4) / (1 + w**2),
    "reverse_division": lambda x, w: 1 / (2 + x.cos()),
    "softmax": lambda x, w: F.softmax(x.reshape(3, 4), 0),
    "log_softmax": lambda x, w: F.log_softmax(x.reshape(3, 4), dim=-1),
    "layer_norm": lambda x, w: F.layer_norm(x.reshape(3, 4), [4], w, w.flip(0)),
    "layer_norm_of_two_axes": lambda x, w: F.layer_norm(x.reshape(2, 3, 2), [3, 2]),
    "group_norm": lambda x, w: F.group_norm(x.reshape(1, 4, 3), 2, w, w),
    "rms_norm": lambda x, w: F.rms_norm(x.reshape(3, 4), [4], w),
    "weight_norm": lambda x, w: torch._weight_norm(x.reshape(4, 3), w.reshape(4, 1), 0),
    "convolution_of_itself": lambda x, w: F.conv1d(x.reshape(1, 2, 6), w.reshape(2, 1, 2), w[:2], groups=2),
    "bilinear": lambda x, w: F.bilinear(x.reshape(3, 4), x.sin().reshape(3, 4), x.repeat(4).reshape(3, 4, 4)),
    "product_of_itself": lambda x, w: x.reshape(3, 4) @ x.reshape(4, 3),
    "einsum": lambda x, w: torch.einsum("ij,kj,j->ik", x.reshape(3, 4), x.reshape(3, 4).sin(), w),
    "attention": lambda x, w: F.scaled_dot_product_attention(
        x.reshape(1, 1, 3, 4), x.sin().reshape(1, 1, 3, 4), x.reshape(1, 1, 3, 4) * w, is_causal=True
    ),
    "attention_with_a_mask": lambda x, w: F.scaled_dot_product_attention(
        x.reshape(1, 1, 3, 4), x.sin().reshape(1, 1, 3, 4), x.reshape(1, 1, 3, 4), w[0].expand(3, 3).tril(), scale=0.3
    ),
    "maximum_of_squares": lambda x, w: F.max_pool1d(x.square().reshape(1, 3, 4), 2),
    "norm": lambda x, w: x.norm() * w,
    "prelu": lambda x, w: F.prelu(x.reshape(3, 4), w),
    "split": lambda x, w: torch.cat([a * b for a, b in zip(x.chunk(3), x.flip(0).split(4), strict=True)]),
    "multihead_attention": lambda x, w: F.multi_head_attention_forward(
        x.reshape(3, 1, 4), x.reshape(3, 1, 4), x.reshape(3, 1, 4), 4, 2, torch.ones(12, 4).double() * w, None, None,
        None, False, 0.0, torch.eye(4).double(), None,
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_second_derivative_of_an_operation_is_that_of_a_finite_difference(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in (12, 4)]
    directions = [draw_direction(each.shape, 2) for each in leaves]
    # Rows: each vector alone, and both together.
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).double()

    def evaluate(x: Tensor, w: Tensor) -> Tensor:
        return OPERATIONS[name](1.0 * x, 1.0 * w).reshape(-1)

    with DerivativeTrace(leaves) as trace:
        outputs = evaluate(*leaves)
    weights = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    gradients = trace.compute_gradients((outputs * weights).sum())
    constants = [each.detach() for each in leaves]
    tangents = {0: Tangents((0, 2), directions[0].expand(2, -1)), 1: Tangents((1, 2), directions[1].expand(2, -1))}
    with TangentPass(constants, tangents, gradients, 3) as moved:
        outputs = evaluate(*constants)
    first = moved.get_tangents(outputs)
    for row, factors in enumerate(rows):

        def slope(step: float, factors: Tensor = factors) -> Tensor:
            points = [
                (leaf.detach() + step * factor * v).requires_grad_()
                for leaf, factor, v in zip(leaves, factors, directions, strict=True)
            ]
            values = evaluate(*points)
            found = torch.autograd.grad((values * weights).sum(), points, allow_unused=True, materialize_grads=True)
            return sum(
                ((g * v * factor).sum() for g, v, factor in zip(found, directions, factors, strict=True)),
                values.new_zeros(()),
            )

        expected = (slope(1e-5) - slope(-1e-5)) / 2e-5
        torch.testing.assert_close(moved.second[row], expected.detach(), rtol=1e-6, atol=1e-8)
        along = (first[row] * weights).sum() if row in first else torch.zeros(()).double()
        torch.testing.assert_close(along, slope(0.0).detach(), rtol=1e-9, atol=1e-12)
        if row < 2 and not trace.curved >> row & 1:
            assert float(moved.second[row]) == 0


def test_every_layer_that_is_written_out_is_compared_with_a_finite_difference() -> None:
    assert {each.strip("_") for each in WRITTEN_OUT} <= {*OPERATIONS, "scaled_dot_product_attention", "embedding"}


def test_weight_normalization_has_the_curvature_of_a_finite_difference() -> None:
    case = CASES["weight_norm_parametrization"]()
    inputs, labels = cast(tuple[Tensor, Tensor], next(iter(case.batches)))
    found = saltflat.certify(case.model, [(inputs, labels)], loss=case.loss, examples=100)
    for name, weight in case.model.named_parameters():
        v, kept = draw_direction(weight.shape, 0), weight.detach().clone()

        def slope(step: float, weight: Tensor = weight, v: Tensor = v, kept: Tensor = kept) -> float:
            with torch.no_grad():
                weight.copy_(kept + step * v)
            loss = F.cross_entropy(case.model(inputs), labels)
            (gradient,) = torch.autograd.grad(loss, weight)
            return float((gradient * v).sum())

        expected = (slope(1e-5) - slope(-1e-5)) / 2e-5
        slope(0.0)
        assert found[name].hessian == pytest.approx(expected, rel=1e-5, abs=1e-8)


class WithoutForwardMode(torch.autograd.Function):
    """A square that torch cannot differentiate forward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        product: Tensor = 2 * x * gradient
        return product


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        squares: Tensor = WithoutForwardMode.apply(x)  # type: ignore[no-untyped-call]
        return squares


class Branch(nn.Module):
    """Writes into a view of another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = 1.0 * x
        y[:, :2].tanh_()
        return y


@pytest.mark.parametrize("hidden", [Square, Branch], ids=["a_function_of_a_user", "a_write_to_a_view"])
def test_what_cannot_be_followed_forward_is_differentiated_backward(hidden: type[nn.Module]) -> None:
    torch.manual_seed(0)
    data = torch.randn(4, 3), torch.arange(4) % 3
    found = saltflat.certify(nn.Sequential(nn.Linear(3, 4), hidden(), nn.Linear(4, 3)), data)
    assert isinstance(found["0.weight"], CurvatureComparison)
    assert found["0.weight"].gap > 1e-3
    assert found["2.weight"].gap < 1e-10


def test_a_wrong_rule_is_noticed() -> None:
    torch.manual_seed(0)
    data = torch.randn(4, 3), torch.arange(4) % 3
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    expected = saltflat.certify(net, data)
    with patch("saltflat.engine.operation_derivatives.LINEAR", frozenset({"tanh"})):
        found = saltflat.certify(net, data)
    assert found["0.weight"].gap == pytest.approx(expected["0.weight"].gap, rel=1e-9)
