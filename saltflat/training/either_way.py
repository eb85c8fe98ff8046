"""Which way the parts of a batch are gone through, and under which conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from saltflat.amounts import is_choice
from saltflat.errors import OptionError, SaltflatError, TrainingError, first_line
from saltflat.loan import full_precision
from saltflat.randomness import remembered
from saltflat.training.frozen import frozen_buffers
from saltflat.training.part_gradients import Gradients, Passes
from saltflat.training.parts import Parts

VECTORISED_ON = ("cuda",)  # kinds of devices; on CPUs the loop is mostly faster
MOST_STACKED = 2 << 30  # bytes of gradients of all parts, at two points


class EitherWay:
    """Vectorised where that is faster and the model allows it, else in a loop.

    Attributes:
        why_looped: why vectorised passes were given up, if they were.
    """

    def __init__(self, way: str) -> None:
        if not is_choice(way, ("auto", "vectorised", "loop")):
            raise OptionError(f"Got way={way!r}. Want 'auto', 'vectorised' or 'loop'. Do: leave it out for 'auto'.")
        self.way = way
        self.why_looped: str | None = None

    def __call__(self, passes: Passes, parts: Parts) -> tuple[Tensor, Gradients, bool]:
        """The mean loss, the gradients, and whether the model would have written to its buffers."""
        if self.way == "loop" or (self.way == "auto" and not self._may_vectorise(passes, parts)):
            return _apart(passes, passes.looped, parts)
        back = remembered()
        try:
            return _apart(passes, passes.vectorised, parts)
        except SaltflatError:
            raise
        except Exception as error:
            why = self._given_up(error)
        # Out here, because the error held on to the memory of the pass that failed.
        back()
        found = _apart(passes, passes.looped, parts)
        self.why_looped = why  # only now: what fails in the loop, too, says nothing about the way
        return found

    def _given_up(self, error: Exception) -> str:
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if is_memory and self.way == "vectorised":
            raise error
        if is_memory:
            return "The vectorised pass ran out of memory."
        why = f"torch.func does not take this model: {first_line(error)}"
        if self.way == "vectorised":
            raise TrainingError(
                f"Got way='vectorised', but {why}. Want a model that it takes. "
                "Do: leave out way, or pass way='loop'; the numbers are the same."
            ) from error
        return why

    def _may_vectorise(self, passes: Passes, parts: Parts) -> bool:
        if self.why_looped is not None or any(p.device.type not in VECTORISED_ON for p in passes.parameters.values()):
            return False
        if any(isinstance(each, nn.RNNBase) for each in passes.model.modules()):
            return False  # torch.func takes them apart, slowly
        size = sum(p.numel() * p.element_size() for p in passes.parameters.values())
        return 2 * min(parts.count, parts.examples) * size <= MOST_STACKED


def _apart(
    passes: Passes, run: Callable[[Parts], tuple[Tensor, Gradients]], parts: Parts
) -> tuple[Tensor, Gradients, bool]:
    """With all digits and without a trace in the buffers."""
    with _all_digits(passes), frozen_buffers(passes.model):
        before = _versions(passes.model)
        loss, gradients = run(parts)
        return loss, gradients, before != _versions(passes.model)


@contextmanager
def _all_digits(passes: Passes) -> Iterator[None]:
    with ExitStack() as stack:
        for device in {"cpu", *(p.device.type for p in passes.parameters.values())}:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(full_precision(passes.model))
        yield


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Changes whenever a pass writes to a buffer or puts another in its place."""
    buffers = [b for each in model.modules() for b in each._buffers.values() if b is not None]
    return [(id(each), each._version) for each in buffers]
