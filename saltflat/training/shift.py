"""Gradients at shifted weights: the one mechanism behind everything here that looks for flat minima."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from saltflat.errors import OptionError
from saltflat.training.frozen import freeze_buffers
from saltflat.turns import mark_moved


@contextmanager
def move_parameters(parameters: list[Tensor], steps: list[Tensor]) -> Iterator[None]:
    """Inside, parameters have moved by ``steps``; afterwards, and after an error, they are back, bit for bit."""
    with mark_moved(parameters):
        kept = [each.detach().clone() for each in parameters]
        try:
            if kept:
                with torch.no_grad():
                    torch._foreach_add_(parameters, steps)
            # Autocast keeps its low-precision copies of the weights: without this the old ones would be used.
            torch.clear_autocast_cache()
            yield
        finally:
            if kept:
                with torch.no_grad():
                    # From a copy: adding and subtracting again would leave rounding behind.
                    torch._foreach_copy_(parameters, kept)
            torch.clear_autocast_cache()


@contextmanager
def shift_weights(model: nn.Module, parameters: Iterable[Tensor], steps: Iterable[Tensor]) -> Iterator[None]:
    """Inside, parameters have moved by ``steps`` and passes leave buffers alone; afterwards all is what it was.

    Parameters are moved in place, so everything that holds on to them (optimizers, compiled graphs,
    DistributedDataParallel) sees them move, and put back bit for bit, also after an error. For buffers see
    :func:`~saltflat.training.frozen.freeze_buffers`.

    Args:
        model: whose extra passes run inside.
        parameters: some of its parameters, each once.
        steps: how far to move each of them.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> with shift_weights(layer, [layer.weight], [torch.ones(1, 1)]):
        ...     layer.weight.item()
        3.0
        >>> layer.weight.item()
        2.0
    """
    which, how_far = _list_tensors(parameters), _list_tensors(steps)
    known = {id(p) for p in model.parameters()}
    fits = len(which) == len(how_far) and len({id(p) for p in which}) == len(which)
    if not fits or not all(
        id(p) in known and isinstance(step, Tensor) and p.shape == step.shape
        for p, step in zip(which, how_far, strict=True)
    ):
        raise OptionError(
            f"Got {len(which)} parameters and {len(how_far)} steps that do not fit. Want parameters of the model, each "
            "once, and for each a step of its shape. Do: for instance "
            "shift_weights(model, [weight], [0.1 * weight.grad])."
        )
    with freeze_buffers(model), move_parameters(which, how_far):
        yield


def _list_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    # A tensor is iterable, too, but that of no dimensions raises.
    return list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, Tensor) else []
