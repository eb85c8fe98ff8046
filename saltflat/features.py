"""How far the inputs of every layer vary over the data, channel by channel, from one forward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saltflat.geometry import Convolution, Transposed
from saltflat.setting import Setting


def compute_input_deviations(setting: Setting) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Standard deviation over examples and positions of each input channel, by weight; and notes about odd ones.

    A channel that is zero throughout has none and gets infinity: divided by it, it drops out. One that is constant but
    not zero cannot be normalised and gets 1.
    """
    network = setting.problem.network
    # A tied weight has the channels that the module sees which owns its name.
    owned = {
        module: layer.names["weight"]
        for module, layer in network.layers.items()
        if "weight" in layer.names and network.model.get_submodule(layer.names["weight"].rpartition(".")[0]) is module
    }
    found: dict[str, _RunningMoments] = {}

    def record_input(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = _unwrap_vmap(x)
        axis = find_channel_axis(module, x)
        if axis is not None and module in owned:
            rows = x.detach().movedim(axis, -1).reshape(-1, x.shape[axis])
            found.setdefault(owned[module], _RunningMoments()).add(rows.double())
        return y

    with torch.no_grad():
        for batch in setting.read_chunks(0):
            network(batch, record_input)
    deviations, notes = {}, []
    for name, moments in found.items():
        deviation = moments.compute_deviation()
        empty, flat = moments.largest == 0, (deviation <= 1e-12 * moments.largest) & (moments.largest > 0)
        deviations[name] = deviation.masked_fill(empty, torch.inf).masked_fill(flat, 1.0)
        if bool(flat.any()):
            notes.append(f"{int(flat.sum())} inputs of {name} are constant over the data and were left as they are")
    return deviations, tuple(notes)


def find_channel_axis(module: nn.Module, x: Tensor) -> int | None:
    if isinstance(module, nn.Linear):
        return x.dim() - 1
    if isinstance(module, Convolution | Transposed):
        return x.dim() - 1 - len(module.kernel_size)
    return None


def _unwrap_vmap(x: Tensor) -> Tensor:
    """The values of all examples where the model maps itself over them: inside of ``vmap`` a tensor shows one."""
    functorch = torch._C._functorch
    while functorch.is_batchedtensor(x):
        x = functorch.get_unwrapped(x).movedim(functorch.maybe_get_bdim(x), 0)
    return x


class _RunningMoments:
    """Count, mean and sum of squared deviations, put together from parts without cancellation."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = self.largest = torch.zeros(())

    def add(self, rows: Tensor) -> None:
        if not len(rows):  # an expert that no example of this chunk was sent to
            if not self.count:
                self.mean = self.squares = self.largest = rows.new_zeros(rows.shape[1])
            return
        count, mean = len(rows), rows.mean(0)
        squares, largest = (rows - mean).square().sum(0), rows.abs().amax(0)
        if not self.count:
            self.count, self.mean, self.squares, self.largest = count, mean, squares, largest
            return
        total, step = self.count + count, mean - self.mean
        self.squares = self.squares + squares + step.square() * (self.count * count / total)
        self.mean, self.count = self.mean + step * (count / total), total
        self.largest = torch.maximum(self.largest, largest)

    def compute_deviation(self) -> Tensor:
        return (self.squares / max(self.count, 1)).sqrt()
