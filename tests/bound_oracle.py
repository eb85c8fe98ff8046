"""Definitions of what the bounds of the papers are made of: dense, slow and in float64."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from saltflat.bounds import Bound, compute_bounds
from saltflat.bounds.distributions import WeightDistribution
from saltflat.bounds.evidence import Evidence

Data = tuple[Tensor, Tensor]
CAP = 11.512925464970229  # ln(1e5)
DELTA = 0.05


def make_net(seed: int = 0, widths: tuple[int, ...] = (2, 3, 3)) -> nn.Sequential:
    """A ReLU network in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1]).double().eval()


def make_data(seed: int = 1, examples: int = 40, inputs: int = 2, classes: int = 3) -> Data:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, inputs, generator=dice, dtype=torch.float64)
    return x, torch.randint(classes, (examples,), generator=dice)


def compute_diagonal(net: nn.Module, data: Data) -> dict[str, Tensor]:
    """The diagonal of the mean of J' (diag p - p p') J, example by example."""
    found = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
    for x in data[0]:
        outputs = net(x[None])[0]
        p = outputs.softmax(0).detach()
        rows = [torch.autograd.grad(each, list(net.parameters()), retain_graph=True) for each in outputs]
        for number, name in enumerate(found):
            J = torch.stack([row[number] for row in rows])
            mean = torch.einsum("k,k...->...", p, J)
            found[name] += torch.einsum("k,k...->...", p, (J - mean).square()) / len(data[0])
    return found


def compute_losses(net: nn.Module, weights: Mapping[str, Tensor], data: Data, of: str) -> Tensor:
    outputs: Tensor = functional_call(net, dict(weights), (data[0],))
    if of == "error":
        return (outputs.argmax(1) != data[1]).double()
    return F.cross_entropy(outputs, data[1], reduction="none").clamp(0, CAP) / CAP


def compute_risk(net: nn.Module, data: Data, of: str) -> float:
    with torch.no_grad():
        return float(compute_losses(net, dict(net.named_parameters()), data, of).mean())


def sample_risks(net: nn.Module, posterior: WeightDistribution, data: Data, of: str, draws: int) -> Tensor:
    """The risks of networks drawn from the posterior, with one draw for all examples."""
    dice = torch.Generator().manual_seed(7)
    spread = getattr(posterior, "spread", 0.0)
    risks = []
    with torch.no_grad():
        for _ in range(draws):
            weights = {}
            for name, mean in posterior.mean.items():
                one, two = (torch.randn(mean.shape, generator=dice, dtype=torch.float64) for _ in range(2))
                weights[name] = (mean + posterior.deviation[name] * one) * torch.exp(spread * two)
            risks.append(compute_losses(net, weights, data, of).mean())
    return torch.stack(risks)


def flatten(values: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in values.values()])


@contextmanager
def record_posteriors() -> Iterator[list[WeightDistribution]]:
    """Yield a list that every posterior whose risk is estimated is added to."""
    seen: list[WeightDistribution] = []
    original: Callable[..., Any] = Evidence.estimate

    def record(self: Evidence, weights: WeightDistribution, delta: float) -> Any:
        seen.append(weights)
        return original(self, weights, delta)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evidence, "estimate", record)
        yield seen


def compute_one(net: nn.Module, data: Any, name: str, **options: Any) -> tuple[Bound, list[WeightDistribution]]:
    """A bound, and the posteriors it considered."""
    own: dict[str, float | str] = {key: options.pop(key) for key in ("constant", "curvature_draws") if key in options}
    with record_posteriors() as seen:
        found = compute_bounds(net, data, bounds={name: own}, delta=DELTA, **options)[name]
    return found, seen
