"""BatchNorm's statistics at every point of a slice: far from the weights, those that the model keeps no longer fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from saltflat.errors import ModelError, SaltflatError, format_error_line
from saltflat.landscape.chunks import make_progress_counter, split_points
from saltflat.landscape.points import SlicePoints
from saltflat.network import Network
from saltflat.setting import Setting

BatchNorm = nn.modules.batchnorm._BatchNorm


def find_batch_norms(model: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers that keep statistics."""
    return [module for module in model.modules() if isinstance(module, BatchNorm) and module.running_mean is not None]


class BatchNormStatistics:
    """Running means and variances of every BatchNorm layer at every point, as averages over the batches of the data.

    What ``torch.optim.swa_utils.update_bn`` makes: every layer normalises a batch by the batch itself, and the means
    and (unbiased) variances of all batches are averaged, each batch counting the same. All else stays in eval mode.
    """

    def __init__(self, network: Network, points: int) -> None:
        self.modules = find_batch_norms(network.model)
        self.buffers: dict[str, Tensor] = {}
        self.batches: dict[str, Tensor] = {}
        for module in self.modules:
            for key, first in (("running_mean", 0.0), ("running_var", 1.0)):
                name = network.names[id(getattr(module, key))]
                like = network.constants[name]
                self.buffers[name] = torch.full((points, *like.shape), first, dtype=like.dtype, device=like.device)
            tracked = network.names[id(module.num_batches_tracked)]
            self.batches[tracked] = torch.zeros_like(network.constants[tracked])

    def get_slice(self, which: slice) -> dict[str, Tensor]:
        """The statistics of some points, to write to."""
        return {name: each[which] for name, each in self.buffers.items()}

    @contextmanager
    def use_batch_statistics(self) -> Iterator[None]:
        """Inside of it the layers take their statistics from the batch, and average them without a momentum."""
        kept = [(module, module.training, module.momentum) for module in self.modules]
        try:
            for module in self.modules:
                module.training, module.momentum = True, None  # type: ignore[assignment]
            yield
        finally:
            for module, training, momentum in kept:
                module.training, module.momentum = training, momentum


def compute_batch_norm_statistics(setting: Setting, points: SlicePoints) -> BatchNormStatistics:
    """One pass over the data, whose batches are taken whole: a part of a batch has other statistics."""
    found = BatchNormStatistics(setting.problem.network, len(points))
    tick = make_progress_counter(setting, "BatchNorm's statistics at points", len(points))
    with torch.no_grad():
        for batch in setting.problem.read_batches():
            slices = list(split_points(setting, points, batch))
            for number, which in enumerate(slices):
                # All points have seen as many batches: the last ones may count this one.
                last = number == len(slices) - 1
                batches = found.batches if last else {name: each.clone() for name, each in found.batches.items()}
                with found.use_batch_statistics():
                    try:
                        points.compute_outputs(batch, which, found.get_slice(which), batches)
                    except (RuntimeError, ValueError) as error:
                        if isinstance(error, SaltflatError):
                            raise
                        raise ModelError(
                            f"Got {format_error_line(error)} from the model with BatchNorm in train mode, on "
                            f"{batch.examples} examples. Want batches that statistics can be taken of, of more than "
                            "one example. "
                            "Do: choose another batch size, or batch_norm='running'."
                        ) from error
                tick(batch.examples * len(points.places[which]))
    return found
