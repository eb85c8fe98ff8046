"""What must be the same in all processes that share a measurement: arguments, modules, weights, data and outputs.

Processes with other weights, or each with the part of the data that a ``DistributedSampler`` gives it, would add up
numbers of different networks or count examples twice. So all of it is compared before any number is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from saltflat.engine.data import Batch, compute_batch_checksums
from saltflat.engine.processes import Processes
from saltflat.errors import DataError, ModelError, OptionError

COMPARED_OUTPUTS = 4096  # entries, about


def check_same_settings(processes: Processes, settings: Mapping[str, object]) -> None:
    """Check that all processes were called with the same arguments, given by name."""
    if processes.count == 1:
        return
    other = processes.check_same("the settings", {name: repr(value) for name, value in settings.items()})
    if other:
        name, rank = other[0]
        raise OptionError(
            f"Expected the same arguments in every process, but got another {name} in process {rank} than in process "
            "0. Try passing the same to all."
        )


def check_same_model(
    processes: Processes, model: nn.Module, tensors: Mapping[str, Tensor], settings: Mapping[str, object]
) -> None:
    """Check that all processes measure the same model, with the same tensors by name, in the same way."""
    check_same_settings(processes, settings)
    modules = {
        name: f"{type(module).__qualname__}({re.sub('0x[0-9a-f]+', '', module.extra_repr())})"
        for name, module in model.named_modules()
    }
    other = processes.check_same("the modules", modules)
    if other:
        raise ModelError(
            f"Expected the same model in every process, but got another module {_format_names(other)}. Try building "
            "the model with the same arguments in every process."
        )
    other = processes.check_same("the weights", {name: _compute_digest(value) for name, value in tensors.items()})
    if other:
        raise ModelError(
            f"Expected the same weights in every process, but got others for {_format_names(other)}. Try "
            "torch.distributed.broadcast(tensor, src=0) for each of model.state_dict().values(): under "
            "DistributedDataParallel, running statistics differ between processes."
        )


def check_same_function(processes: Processes, outputs: Tensor, losses: Tensor, tolerance: float) -> None:
    """Check that model and loss, which code and attributes determine too, give all processes the same numbers.

    Args:
        processes: that share the measurement.
        outputs: of the model for the first examples.
        losses: of these outputs.
        tolerance: largest relative difference that counts as rounding. Processes may run on different devices.
    """
    own = [_select_entries(each) for each in (outputs, losses)]
    found = processes.gather("the outputs", (tuple(outputs.shape), own, tolerance))
    (shape, first, _), tolerance = found[0], max(each for _, _, each in found)
    for rank, (other_shape, other, _) in enumerate(found):
        same = shape == other_shape and all(
            bool((a - b).abs().max() <= tolerance * a.abs().max()) for a, b in zip(first, other, strict=True)
        )
        if not same:
            raise ModelError(
                "Expected the same function in every process, but got other outputs, or another loss of them, in "
                f"process {rank} than in process 0, from the same weights and examples. Try building model and loss "
                "with the same arguments in every process, and comparing attributes, hooks and modes."
            )


def _select_entries(values: Tensor) -> Tensor:
    flat = values.detach().double().flatten().cpu()
    return flat[:: len(flat) // COMPARED_OUTPUTS + 1].clone()


class DataDigest:
    """Identifies the examples of a pass over the data, and how they are batched.

    Args:
        total: the number of examples that the data say they hold; None if they do not.
    """

    def __init__(self, total: int | None) -> None:
        self._hash = blake2b(str(total).encode(), digest_size=16)

    def add(self, batch: Batch) -> None:
        """Add a batch, as it was read."""
        self._hash.update(str(batch.examples).encode())
        for each in compute_batch_checksums(batch):
            self._hash.update(each.cpu().numpy().tobytes())

    def check(self, processes: Processes) -> None:
        """Check that all processes have read the same data."""
        other = processes.check_same("the data", {"data": self._hash.hexdigest()})
        if other:
            raise DataError(
                f"Expected the same data in every process, but got other examples in process {other[0][1]} than in "
                "process 0. With process_group= the processes share the examples of one data set by themselves, so "
                "that none counts twice. Try a DataLoader of all the data, without DistributedSampler and with the "
                "same batch_size, or leave process_group out to measure each process's data apart."
            )


def _format_names(other: Sequence[tuple[str, int]]) -> str:
    rank = other[0][1]
    names = [name for name, each in other if each == rank]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(map(repr, names[:4]))}{more} in process {rank} than in process 0"


def _compute_digest(value: Tensor) -> str:
    if is_traceable_wrapper_subclass(value):  # quantized weights
        return " ".join(_compute_digest(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    value = value.detach().cpu().contiguous()
    content = blake2b(digest_size=16)
    if value.numel():
        content.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{tuple(value.shape)} {value.dtype} {content.hexdigest()}"
