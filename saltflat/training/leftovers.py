"""Gradients from before a closure, which it must not add to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from saltflat.errors import TrainingError


@contextmanager
def without_leftovers(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Around a closure that is called again at shifted weights: gradients from before cannot be taken again there.

    There are many ways to clear them, so the parameters are watched: when the first backward pass comes to one, its
    gradient must be gone, or zero.

    Args:
        parameters: those that the closure is about to give gradients to.
    """
    with ExitStack() as stack:
        watched = [_Watched(p) for p in parameters if p.requires_grad and p.grad is not None]
        for each in watched:
            stack.callback(each.parameter.register_hook(each.come_to).remove)
        yield
    for each in watched:
        each.come_to()  # if no backward pass did
    if any(each.is_left for each in watched):
        raise TrainingError(
            "Got gradients from before the closure, which it added to. Want all of the step's gradient from the "
            "closure: what was added before cannot be taken again at shifted weights. "
            "Do: call zero_grad() in the closure, and accumulate over micro-batches inside of it. "
            "(In Lightning: accumulate_grad_batches=1 and larger batches, or manual optimisation.)"
        )


class _Watched:
    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.before = parameter, parameter.grad
        self.is_left: bool | None = None

    def come_to(self, _: Tensor | None = None) -> None:
        if self.is_left is None:
            before = self.before
            self.is_left = before is not None and self.parameter.grad is before and bool(before.any())
