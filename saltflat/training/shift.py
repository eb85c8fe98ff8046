"""Gradients at shifted weights: shift, restore, freeze buffers, and keep gradients apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from saltflat.engine.session import mark_moved
from saltflat.errors import OptionError, TrainingError


def compute_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean length of all of them together, on the first one's device; at least in single precision."""
    squares = [each.float() if each.dtype in (torch.float16, torch.bfloat16) else each for each in tensors]
    norms = torch._foreach_norm(squares)
    length: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0]) for each in norms]))
    return length


def scale_directions(directions: Sequence[Tensor], rhos: Sequence[float], factor: Tensor) -> list[Tensor]:
    """Every direction times its own number and one common factor."""
    if len({each.device for each in directions}) > 1 or len(set(rhos)) > 1:
        return [each * (factor * rho).to(each.device) for each, rho in zip(directions, rhos, strict=True)]
    return list(torch._foreach_mul(list(directions), factor * rhos[0]))


@torch.no_grad()
def multiply_in_place(tensors: list[Tensor], factor: Tensor | float) -> None:
    """All of them times a factor, in place."""
    for device in {each.device for each in tensors}:
        here = factor.to(device) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_([each for each in tensors if each.device == device], here)


# Forward passes that neither read nor write running statistics in training mode, once told not to keep any; in eval
# mode they read them all the same. Those of a subclass may do otherwise.
TAKE_A_WORD = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


@contextmanager
def freeze_buffers(model: nn.Module) -> Iterator[None]:
    """Passes inside leave every buffer as it was; layers normalise as they do in their mode.

    Torch's BatchNorm layers are told not to keep running statistics, so that nothing is written. Whatever else writes
    to its buffers (spectral norm, layers of the user's own) gets them back afterwards. DistributedDataParallel does not
    hand out the first process's.
    """
    with ExitStack() as stack:
        others: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.callback(setattr, module, "broadcast_buffers", module.broadcast_buffers)
                module.broadcast_buffers = False
            if type(module).forward in TAKE_A_WORD:
                stack.callback(setattr, module, "track_running_stats", module.track_running_stats)
                vars(module)["track_running_stats"] = False
            elif module._buffers:
                stack.callback(_restore_buffer_objects, module, dict(module._buffers))
                others += [each for each in module._buffers.values() if each is not None]
        stack.callback(_restore_buffer_values, others, [each.detach().clone() for each in others])
        yield


def _restore_buffer_objects(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    for key, buffer in buffers.items():
        if module._buffers.get(key) is not buffer:
            module._buffers[key] = buffer


def _restore_buffer_values(buffers: list[Tensor], kept: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)


def has_training_batch_norm(model: nn.Module) -> bool:
    """Whether an example's outputs depend on the others of its batch, through layers that torch knows."""
    return any(isinstance(each, _BatchNorm) and each.training for each in model.modules())


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
            "Expected all of the step's gradient from the closure: what was added before cannot be taken again at "
            "shifted weights, but got gradients from before the closure, which it added to. Try calling zero_grad() "
            "in the closure, and accumulate over micro-batches inside of it. (In Lightning: "
            "accumulate_grad_batches=1 and larger batches, or manual optimisation.)"
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
    :func:`~saltflat.training.shift.freeze_buffers`.

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
            f"Expected parameters of the model, each once, and for each a step of its shape, but got {len(which)} "
            f"parameters and {len(how_far)} steps that do not fit. Try shift_weights(model, [weight], [0.1 * "
            "weight.grad])."
        )
    with freeze_buffers(model), move_parameters(which, how_far):
        yield


def _list_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    # A tensor is iterable, too, but that of no dimensions raises.
    return list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, Tensor) else []
