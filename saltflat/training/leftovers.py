"""Gradients from before a closure, which it must not add to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from saltflat.errors import TrainingError


@contextmanager
def without_leftovers(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Around a closure that is called again at shifted weights: gradients from before cannot be taken again there.

    There are many ways to clear them, so one parameter is watched: when the first backward pass comes to it, its
    gradient must be gone, or zero.

    Args:
        parameters: those that the closure is about to give gradients to.
    """
    watched = next((p for p in parameters if p.requires_grad and p.grad is not None), None)
    if watched is None:
        yield
        return
    before, left = watched.grad, list[bool]()

    def come_to(_: Tensor | None) -> None:
        if not left:
            left.append(before is not None and watched.grad is before and bool(before.any()))

    hook = watched.register_hook(come_to)
    try:
        yield
    finally:
        hook.remove()
    come_to(None)  # if no backward pass did
    if left[0]:
        raise TrainingError(
            "Got gradients from before the closure, which it added to. Want all of the step's gradient from the "
            "closure: what was added before cannot be taken again at shifted weights. "
            "Do: call zero_grad() in the closure, and accumulate over micro-batches inside of it. "
            "(In Lightning: accumulate_grad_batches=1 and larger batches, or manual optimisation.)"
        )
