"""Weights that are spread over processes, which cannot be moved or measured on one of them."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from saltflat.errors import ModelError

WRAPPERS = ("FullyShardedDataParallel", "FSDPModule")


def check_not_sharded(model: nn.Module, how: str = "") -> None:
    """Every process must have all of the weights.

    Args:
        model: the module to measure or to train.
        how: what is known to spread them, if anything.
    """
    wrapped = any(kind.__name__ in WRAPPERS for each in model.modules() for kind in type(each).__mro__)
    parts = (
        f"{name!r}, of which each process has a part"
        for name, p in model.named_parameters()
        if isinstance(p, DTensor) or type(p).__name__ == "FlatParameter" or hasattr(p, "ds_id")
    )
    spread = how or ("a model whose weights are spread over processes" if wrapped else next(parts, ""))
    if spread:
        raise ModelError(
            f"Got {spread}. Want a model whose weights are whole on every process. "
            "Do: train with DistributedDataParallel, or measure a checkpoint afterwards with saltflat.measure."
        )
