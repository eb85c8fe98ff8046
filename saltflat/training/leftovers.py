"""Gradients from before a closure, which it must not add to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from saltflat.errors import TrainingError


@contextmanager
def check_gradients_cleared(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Around a closure that is called again at shifted weights: gradients from before cannot be taken again there.

    There are many ways to clear them, so the parameters are watched: when the first backward pass comes to one, its
    gradient must be gone, or zero. Gradients that no backward pass came to and that nobody replaced, whether cleared or
    not, are not the closure's.

    Args:
        parameters: those that the closure is about to give gradients to.
    """
    every = list(parameters)
    with ExitStack() as stack:
        watched = [_PriorGradient(p) for p in every if p.requires_grad and p.grad is not None]
        for each in watched:
            stack.callback(each.parameter.register_hook(each.record_backward).remove)
        yield
    untouched = {id(each.before) for each in watched if each.is_untouched}
    if all(p.grad is None or id(p.grad) in untouched for p in every):
        raise NoGradientError("Got a closure that made no gradient")
    for each in watched:
        each.record_backward()  # if no backward pass did
    if any(each.is_left for each in watched):
        raise TrainingError(
            "Got gradients from before the closure, which it added to. Want all of the step's gradient from the "
            "closure: what was added before cannot be taken again at shifted weights. "
            "Do: call zero_grad() in the closure, and accumulate over micro-batches inside of it. "
            "(In Lightning: accumulate_grad_batches=1 and larger batches, or manual optimisation.)"
        )


class NoGradientError(TrainingError):
    """A step was asked for without a backward pass."""

    def __init__(self, got: str) -> None:
        super().__init__(
            f"{got}: no parameter of the optimizer has one from a backward pass. Want the gradient of the loss. "
            "Do: call loss.backward(), and check that the loss depends on the optimizer's parameters and that they "
            "require a gradient."
        )


class _PriorGradient:
    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.before = parameter, parameter.grad
        self.version = None if self.before is None else self.before._version
        self.is_left: bool | None = None

    @property
    def is_untouched(self) -> bool:
        """Whether no backward pass came here, and the gradient is that from before, or zero in its place."""
        before = self.before
        if self.is_left is not None or before is None or self.parameter.grad is not before:
            return False
        return before._version == self.version or not bool(before.any())

    def record_backward(self, _: Tensor | None = None) -> None:
        if self.is_left is None:
            before = self.before
            self.is_left = before is not None and self.parameter.grad is before and bool(before.any())
