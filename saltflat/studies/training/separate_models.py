"""Run a batch of networks one by one in the same step: large networks fill a GPU by themselves."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from saltflat.studies.training.vmapped_model import VmappedModel, count_activations

WAY = "separate"
LARGE = 2**17  # activations for one example above which convolutions of one network fill a GPU
ALIGNMENT = 16  # bytes
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

    def _run_networks(self, rows: Tensor, others: dict[str, Tensor], inputs: Tensor, shared: bool) -> Tensor:
        forked = rows.is_cuda and len(rows) > 1
        if forked:
            self.streams += [torch.cuda.Stream() for _ in range(len(rows) - len(self.streams))]
        found = []
        # Split outside of the streams: what they share, including the gradient of all rows, belongs to none of them.
        for place, row in enumerate(rows.unbind()):
            weights = self.split_rows(row)
            own = {name: each[place] for name, each in others.items()}
            images = inputs if shared else inputs[place]
            with self._use_stream(place) if forked else nullcontext():
                found.append(self._call_model(weights, own, images))
        if forked:
            for stream in self.streams[: len(rows)]:
                torch.cuda.current_stream().wait_stream(stream)
        return torch.stack(found)

    def _use_stream(self, place: int) -> torch.cuda.StreamContext:
        self.streams[place].wait_stream(torch.cuda.current_stream())
        context: torch.cuda.StreamContext = torch.cuda.stream(self.streams[place])
        return context

    def _call_model(self, weights: dict[str, Tensor], own: dict[str, Tensor], images: Tensor) -> Tensor:
        """Run one network with tensors that begin where kernels of a GPU may read them.

        Weights do, but a row of running statistics may begin at any address, and cuDNN reads 16 bytes at a time.
        """
        if self.channels_last:
            coarse = torch.is_autocast_enabled("cuda")
            images = images.contiguous(memory_format=torch.channels_last)
            weights = {
                name: each.to(torch.bfloat16 if coarse else each.dtype, memory_format=torch.channels_last)
                if each.dim() == 4
                else each
                for name, each in weights.items()
            }
        aligned = {name: _align(each) for name, each in {**weights, **own}.items()}
        found: Tensor = functional_call(self.passing, aligned, (images,))
        with torch.no_grad():  # running statistics of copies; dropout masks are read again by the backward pass
            for name, each in own.items():
                if aligned[name] is not each and name not in self.masks:
                    each.copy_(aligned[name])
        return found


def _align(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % ALIGNMENT else tensor


def should_separate(model: nn.Module, example: Tensor, bfloat16: bool) -> bool:
    """Return whether networks of this architecture run faster one by one: large ones with convolutions, on a GPU.

    So do those with BatchNorm in bfloat16, which vmap does not support: its weights stay in float32.
    """
    if bfloat16 and any(isinstance(module, _BatchNorm) for module in model.modules()):
        return True
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    return example.is_cuda and convolves and count_activations(model, example.cpu()) > LARGE


def make_batched_model(model: nn.Module, example: Tensor, way: str) -> VmappedModel:
    """Return the passes of a batch of networks, one by one or vectorized with this method of convolutions."""
    return SeparateModels(model, example) if way == WAY else VmappedModel(model, example, way)
