"""Whether the network's layers can be multiplied by factors that cancel, and in which order they follow: tried."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from saltflat.geometry import Convolution, Transposed, geometries
from saltflat.setting import Found, NotDefinedError, Setting
from saltflat.statistics import statistic

TRIED = 8  # examples
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
Chain = list[tuple[str, str | None]]


@statistic(per="network", meaning="Names of the weights and biases of layers that can be rescaled, in order.")
def layer_chain(setting: Setting) -> Found:
    """Pairs of the names of weight and bias (None if it has none), for every layer in the order of the forward pass."""
    network = setting.problem.network
    batch = next(iter(setting.problem.batches())).cut(0, TRIED)
    called: list[nn.Module] = []

    def tap(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if isinstance(module, nn.Linear | Convolution | Transposed) and "weight" in network.layers[module].names:
            called.append(module)
        return y

    with torch.no_grad():
        plain = network(batch)
        network(batch, tap, plain=True)
        chain: Chain = [(network.names[id(m.weight)], network.names.get(id(m.bias))) for m in called]
        if not chain:
            raise NotDefinedError(
                "needs layers that can be rescaled: the model has no Linear or convolution to measure"
            )
        outside = geometries(network).keys() - {weight for weight, _ in chain}
        if outside:
            raise NotDefinedError(f"needs all weights in Linear layers or convolutions: {min(outside)} is elsewhere")
        if len({weight for weight, _ in chain}) < len(chain):
            raise NotDefinedError("needs layers in a chain: one of this model's is used more than once")
        scaled = network(batch, leaves=_rescaled(network.constants, chain))
    off = float((scaled - plain).abs().max() / plain.abs().max().clamp_min(torch.finfo(plain.dtype).tiny))
    if not off <= TOLERANCE[plain.dtype]:
        raise NotDefinedError(
            "needs layers in a chain with activations such as ReLU between them: multiplying this model's layers by "
            f"factors that cancel changes its outputs (by {off:.1e}); skip connections, BatchNorm that is not folded "
            "into its layer, LayerNorm and smooth activations do that"
        )
    return Found(chain)


def _rescaled(values: dict[str, Tensor], chain: Chain) -> dict[str, Tensor]:
    # Factors between 1/2 and 2 with product 1, all different.
    logs = [math.sin(2.0 * number + 1.0) * math.log(2) for number in range(len(chain))]
    mean = sum(logs) / len(logs)
    found, product = {}, 1.0
    for (weight, bias), log in zip(chain, logs, strict=True):
        factor = math.exp(log - mean)
        product *= factor
        found[weight] = values[weight] * factor
        if bias is not None:
            found[bias] = values[bias] * product
    return found
