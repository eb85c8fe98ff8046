"""Whether a measure can be trained on: tried on a tiny network."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.errors import OptionError, UnknownNameError, format_error_line
from saltflat.measures.request import MeasureRequest
from saltflat.randomness import snapshot_rng
from saltflat.statistic import STATISTICS
from saltflat.training.differentiable import COMPUTED_WITH_GRAPH

STEP, AGREE = 1e-6, 1e-5  # of the finite difference, and how well it must agree with the gradient


def find_refusal_reason(request: MeasureRequest, value: Callable[[nn.Module, Any], Tensor]) -> str | None:
    """Why a measure cannot be trained on; None if it can.

    What it is made of must have a graph to the weights, and its gradient must be that of finite differences.

    Args:
        request: the measure, with its options.
        value: what it says of a model and a batch, as a penalty.
    """
    for need in request.needs.values():
        if need.name not in STATISTICS and need.name not in COMPUTED_WITH_GRAPH and need.name != "weight":
            return f"it is made of {need.name}, which comes without a graph to the weights"
    restore = snapshot_rng()
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")  # formulas that read numbers off the graph
            return _find_gradient_fault(value)
    except (OptionError, UnknownNameError):  # its options, not the measure
        raise
    except Exception as error:
        return f"its formula cannot be differentiated ({format_error_line(error)})"
    finally:
        restore()


def _find_gradient_fault(value: Callable[[nn.Module, Any], Tensor]) -> str | None:
    model, batch = _make_small_network()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    here = value(model, batch)
    if not here.requires_grad:
        return "its formula leaves the graph"
    slopes = torch.autograd.grad(here, list(model.parameters()), allow_unused=True, materialize_grads=True)
    slope = torch.cat([each.reshape(-1) for each in slopes])
    if not bool(slope.isfinite().all()):
        return "its gradient is not finite for weights or curvatures of zero, which training meets"
    direction = torch.randn_like(weights)

    def evaluate_at(step: float) -> float:
        nn.utils.vector_to_parameters(weights + step * direction, model.parameters())
        return value(model, batch).item()

    promised, risen = float(slope @ direction), (evaluate_at(STEP) - evaluate_at(-STEP)) / (2 * STEP)
    if not abs(risen - promised) <= AGREE * max(abs(risen), abs(promised)):
        return f"its gradient is not the slope of its value ({promised:.6g} where that rises by {risen:.6g})"
    return None


def _make_small_network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """With what real ones have: a dead unit, and biases of zero."""
    torch.manual_seed(0)
    where: Any = {"dtype": torch.float64, "device": "cpu"}
    model = nn.Sequential(
        nn.Linear(3, 5, **where), nn.ReLU(), nn.Linear(5, 4, **where), nn.ReLU(), nn.Linear(4, 3, **where)
    )
    with torch.no_grad():
        model.get_parameter("0.bias")[0] = -100.0
        model.get_parameter("2.bias").zero_()
    return model, (torch.randn(6, 3, **where), torch.arange(6, device="cpu") % 3)
