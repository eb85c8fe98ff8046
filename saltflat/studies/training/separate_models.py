"""Run a batch of networks one by one in the same step: large networks fill a GPU by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.func import functional_call

from saltflat.studies.training.vmapped_model import VmappedModel, count_activations

WAY = "separate"
LARGE = 2**17  # activations for one example above which convolutions of one network fill a GPU
AT_ONCE = 2  # networks in a step on a GPU, each on a stream of its own


class SeparateModels(VmappedModel):
    """The passes of a batch of networks, each by torch's ordinary operations.

    On a GPU images and kernels are in the channels-last format, except in float64, which has no such kernels, and each
    network runs on a stream of its own.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        super().__init__(model, example)
        self.passing = self.model  # without methods of convolutions that work under vmap only
        self.channels_last = example.is_cuda and example.dim() == 3 and example.dtype is not torch.float64
        self.streams: list[torch.cuda.Stream] = []

    def compute_logits(
        self,
        rows: Tensor,
        rest: Mapping[str, Tensor],
        inputs: Tensor,
        *,
        training: bool,
        shared: bool = False,
        masks: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the outputs of all networks; see :meth:`VmappedModel.compute_logits`."""
        self.passing.train(training)
        count = len(rows)
        if rows.is_cuda and count > 1:
            self.streams += [torch.cuda.Stream() for _ in range(count - len(self.streams))]
        found = []
        for place in range(count):
            own = {name: each[place] for name, each in {**rest, **(masks or {})}.items()}
            images = inputs if shared else inputs[place]
            with self._use_stream(place, count, rows):
                weights = self._unpack_weights(rows[place])
                if self.channels_last:
                    images = images.contiguous(memory_format=torch.channels_last)
                found.append(functional_call(self.passing, {**weights, **own}, (images,)))
        if rows.is_cuda and count > 1:
            for stream in self.streams[:count]:
                torch.cuda.current_stream().wait_stream(stream)
        self.passing.eval()
        return torch.stack(found)

    def _use_stream(self, place: int, count: int, rows: Tensor) -> torch.cuda.StreamContext | nullcontext[None]:
        if not rows.is_cuda or count == 1:
            return nullcontext()
        self.streams[place].wait_stream(torch.cuda.current_stream())
        context: torch.cuda.StreamContext = torch.cuda.stream(self.streams[place])
        return context

    def _unpack_weights(self, row: Tensor) -> dict[str, Tensor]:
        parts = zip(self.trained.items(), row.split(self.sizes), strict=True)
        weights = {name: part.view(shape) for (name, shape), part in parts}
        if self.channels_last:
            # Autocast would cast them, too, but in the format they have.
            dtype = torch.bfloat16 if torch.is_autocast_enabled("cuda") else row.dtype
            weights |= {
                name: each.to(dtype, memory_format=torch.channels_last)
                for name, each in weights.items()
                if each.dim() == 4
            }
        return weights


def should_separate(model: nn.Module, example: Tensor) -> bool:
    """Return whether networks of this architecture run faster one by one: large ones with convolutions, on a GPU."""
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    return example.is_cuda and convolves and count_activations(model, example.cpu()) > LARGE


def make_batched_model(model: nn.Module, example: Tensor, way: str) -> VmappedModel:
    """Return the passes of a batch of networks, one by one or vectorized with this method of convolutions."""
    return SeparateModels(model, example) if way == WAY else VmappedModel(model, example, way)
