"""Which way the parts of a batch are gone through, and under which conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from saltflat.amounts import is_choice
from saltflat.errors import OptionError, SaltflatError, TrainingError, format_error_line
from saltflat.loan import use_full_precision
from saltflat.randomness import snapshot_rng
from saltflat.training.frozen import freeze_buffers
from saltflat.training.part_gradients import Gradients, PartGradients
from saltflat.training.parts import BatchParts

VECTORISED_ON = ("cuda",)  # kinds of devices; on CPUs the loop is mostly faster
MOST_STACKED = 2 << 30  # bytes of gradients of all parts, at two points


class VmapOrLoop:
    """Vectorised where that is faster and the model allows it, else in a loop.

    Attributes:
        why_looped: why vectorised passes were given up, if they were.
    """

    def __init__(self, way: str) -> None:
        if not is_choice(way, ("auto", "vectorised", "loop")):
            raise OptionError(f"Got way={way!r}. Want 'auto', 'vectorised' or 'loop'. Do: leave it out for 'auto'.")
        self.way = way
        self.why_looped: str | None = None

    def __call__(self, passes: PartGradients, parts: BatchParts) -> tuple[Tensor, Gradients, bool]:
        """The mean loss, the gradients, and whether the model would have written to its buffers."""
        if self.way == "loop" or (self.way == "auto" and not self._can_vectorise(passes, parts)):
            return _run_isolated(passes, passes.run_loop, parts)
        back = snapshot_rng()
        try:
            return _run_isolated(passes, passes.run_vmap, parts)
        except SaltflatError:
            raise
        except Exception as error:
            why = self._explain_failure(error)
        # Out here, because the error held on to the memory of the pass that failed.
        back()
        found = _run_isolated(passes, passes.run_loop, parts)
        self.why_looped = why  # only now: what fails in the loop, too, says nothing about the way
        return found

    def _explain_failure(self, error: Exception) -> str:
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if is_memory and self.way == "vectorised":
            raise error
        if is_memory:
            return "The vectorised pass ran out of memory."
        why = f"torch.func does not take this model: {format_error_line(error)}"
        if self.way == "vectorised":
            raise TrainingError(
                f"Got way='vectorised', but {why}. Want a model that it takes. "
                "Do: leave out way, or pass way='loop'; the numbers are the same."
            ) from error
        return why

    def _can_vectorise(self, passes: PartGradients, parts: BatchParts) -> bool:
        if self.why_looped is not None or any(p.device.type not in VECTORISED_ON for p in passes.parameters.values()):
            return False
        if any(isinstance(each, nn.RNNBase) for each in passes.model.modules()):
            return False  # torch.func takes them apart, slowly
        size = sum(p.numel() * p.element_size() for p in passes.parameters.values())
        return 2 * min(parts.count, parts.examples) * size <= MOST_STACKED


def _run_isolated(
    passes: PartGradients, run: Callable[[BatchParts], tuple[Tensor, Gradients]], parts: BatchParts
) -> tuple[Tensor, Gradients, bool]:
    """With all digits and without a trace in the buffers."""
    with _use_full_precision(passes), freeze_buffers(passes.model):
        before = _get_buffer_versions(passes.model)
        loss, gradients = run(parts)
        return loss, gradients, before != _get_buffer_versions(passes.model)


@contextmanager
def _use_full_precision(passes: PartGradients) -> Iterator[None]:
    with ExitStack() as stack:
        for device in {"cpu", *(p.device.type for p in passes.parameters.values())}:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(use_full_precision(passes.model))
        yield


def _get_buffer_versions(model: nn.Module) -> list[tuple[int, int]]:
    """Changes whenever a pass writes to a buffer or puts another in its place."""
    buffers = [b for each in model.modules() for b in each._buffers.values() if b is not None]
    return [(id(each), each._version) for each in buffers]
