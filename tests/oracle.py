"""Every statistic by its textbook definition: dense, slow, float64, and sharing no code with the package."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from cases import Batch, Case, examples_of, joined, targets_of
from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True)
class Linearized:
    """The data seen from its outputs: N examples with K output numbers each.

    Attributes:
        jacobians: per parameter ``(N, K, P)``, the derivative of each example's outputs.
        slopes: ``(N, K)``, the gradient of the loss of the data at the outputs.
        curvatures: ``(N, K, K)``, each example's block of the Hessian of that loss at the outputs.
        loss: the loss of the data.
    """

    jacobians: dict[str, Tensor]
    slopes: Tensor
    curvatures: Tensor
    loss: Tensor


def loss(case: Case) -> Tensor:
    """L, the mean loss as if all data were one batch."""
    return linearized(case).loss


def gauss_newton_block(case: Case, name: str) -> Tensor:
    """G = sum_n J_n^T B_n J_n for one parameter, ``(P, P)``."""
    parts = linearized(case)
    jacobian = parts.jacobians[name]
    return (jacobian.mT @ parts.curvatures @ jacobian).sum(0)


def curvature_diagonal(case: Case) -> dict[str, Tensor]:
    """The diagonal of the Gauss-Newton matrix, in the shape of each parameter."""
    return {
        name: gauss_newton_block(case, name).diagonal().reshape(parameter.shape)
        for name, parameter in trainable(case.model).items()
    }


def curvature_trace(case: Case) -> dict[str, Tensor]:
    """The trace of each parameter's block of the Gauss-Newton matrix."""
    return {name: gauss_newton_block(case, name).trace() for name in trainable(case.model)}


def gradient_second_moment(case: Case) -> dict[str, Tensor]:
    """(1/N) sum_n (gradient of l_n)^2, where the shares l_n make L = (1/N) sum_n l_n."""
    parts = linearized(case)
    shares = len(parts.slopes) * parts.slopes
    return {
        name: torch.einsum("nkp,nk->np", parts.jacobians[name], shares).square().mean(0).reshape(parameter.shape)
        for name, parameter in trainable(case.model).items()
    }


def hessian_block(case: Case, name: str) -> Tensor:
    """The true Hessian of L for one parameter, ``(P, P)``, by differentiating twice."""
    model, parameters = frozen_copy(case.model)

    def of_parameter(value: Tensor) -> Tensor:
        return loss_at(case, outputs_of(case, model, parameters | {name: value}))

    return hessian(of_parameter, parameters[name])


@cache
def linearized(case: Case) -> Linearized:
    # The parameters stay where they are: a model may reach them by ways that no name leads along.
    model = deepcopy(case.model).double().eval()
    names, parameters = trainable(case.model), dict(model.named_parameters())
    singles = single_outputs(case, model, {})
    count, width = len(singles), singles[0].numel()
    jacobians = {name: torch.zeros(count, width, parameters[name].numel(), dtype=torch.float64) for name in names}
    for n, output in enumerate(singles):
        for k, number in enumerate(output.flatten()):
            slopes = torch.autograd.grad(
                number, [parameters[name] for name in names], retain_graph=True, allow_unused=True
            )
            for name, slope in zip(names, slopes, strict=True):
                if slope is not None:
                    jacobians[name][n, k] = slope.to_dense().flatten()

    outputs = torch.cat(singles)
    flat = outputs.detach().requires_grad_()
    value = loss_at(case, flat)
    (slope,) = torch.autograd.grad(value, flat)
    blocks = hessian(lambda at: loss_at(case, at), outputs.detach()).reshape(count, width, count, width)
    own = torch.eye(count, dtype=torch.bool)
    assert not blocks.transpose(1, 2)[~own].any(), "the loss of one example depends on the outputs of another"
    return Linearized(jacobians, slope.reshape(count, width), blocks.transpose(1, 2)[own], value.detach())


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def frozen_copy(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    copied = deepcopy(model).double().eval().requires_grad_(False)
    return copied, {name: parameter.detach().clone() for name, parameter in copied.named_parameters()}


def outputs_of(case: Case, model: nn.Module, parameters: dict[str, Tensor]) -> Tensor:
    return torch.cat(single_outputs(case, model, parameters))


def single_outputs(case: Case, model: nn.Module, parameters: dict[str, Tensor]) -> list[Tensor]:
    # Each example goes through the model alone, so no operation can mix two of them.
    batches = [joined([example] * case.copies) for example in examples_of(case.batches)]
    return [output_of(model, parameters, batch)[:1] for batch in batches]


def output_of(model: nn.Module, parameters: dict[str, Tensor], example: Batch) -> Tensor:
    inputs: Any = (
        {key: value for key, value in example.items() if key != "labels"} if isinstance(example, dict) else example[0]
    )
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
    kwargs = inputs if isinstance(inputs, dict) else {}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        output: Any = functional_call(model, parameters, args, kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    output = output["logits"] if isinstance(output, dict) else output
    tensor: Tensor = output if isinstance(output, Tensor) else output.logits
    return tensor


def loss_at(case: Case, outputs: Tensor) -> Tensor:
    return case.loss_function(outputs, torch.cat([targets_of(batch) for batch in case.batches]))


def hessian(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    second: Tensor = torch.autograd.functional.hessian(function, at)
    return second.reshape(at.numel(), at.numel())
