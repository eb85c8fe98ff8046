"""Gradients at shifted weights: shift, restore, freeze buffers, and separate gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from saltflat.errors import OptionError, TrainingError
from saltflat.validation import mark_moved


def compute_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors together, on the device of the first, in single precision or higher."""
    squares = [each.float() if each.dtype in (torch.float16, torch.bfloat16) else each for each in tensors]
    norms = torch._foreach_norm(squares)
    length: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0]) for each in norms]))
    return length


def scale_directions(directions: Sequence[Tensor], rhos: Sequence[float], factor: Tensor) -> list[Tensor]:
    """Return every direction times its own ``rho`` and a common factor."""
    if len({each.device for each in directions}) > 1 or len(set(rhos)) > 1:
        return [each * (factor * rho).to(each.device) for each, rho in zip(directions, rhos, strict=True)]
    return list(torch._foreach_mul(list(directions), factor * rhos[0]))


def check_dense(gradients: Iterable[Tensor]) -> None:
    """Check that no gradient is sparse."""
    if any(each.layout is not torch.strided for each in gradients):
        raise TrainingError(
            "Expected dense gradients, but got sparse ones. Try creating the embedding with sparse=False, or training "
            "it separately."
        )


@torch.no_grad()
def multiply_in_place(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply all tensors by a factor, in place."""
    for device in {each.device for each in tensors}:
        here = factor.to(device) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_([each for each in tensors if each.device == device], here)


# With track_running_stats=False, these forward passes neither read nor write running statistics in training mode; in
# eval mode they still read them. Subclasses may behave differently.
RESPECTS_TRACKING = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


@contextmanager
def freeze_buffers(model: nn.Module) -> Iterator[None]:
    """Leave every buffer unchanged by passes inside; layers normalize according to their mode.

    Torch's BatchNorm layers stop tracking running statistics, so that nothing is written. The buffers of other layers
    (spectral norm, custom layers) are restored afterwards. DistributedDataParallel does not broadcast buffers.
    """
    with ExitStack() as stack:
        others: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.callback(setattr, module, "broadcast_buffers", module.broadcast_buffers)
                module.broadcast_buffers = False
            if type(module).forward in RESPECTS_TRACKING:
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
    """Return whether a BatchNorm layer in training mode makes the outputs of examples depend on each other."""
    return any(isinstance(each, _BatchNorm) and each.training for each in model.modules())


@contextmanager
def check_gradients_cleared(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Check that a closure clears earlier gradients, which cannot be recomputed at shifted weights.

    There are many ways to clear gradients, so the parameters are observed: when the first backward pass reaches one,
    its gradient must be None or zero. Gradients that no backward pass reached and nothing replaced do not belong to the
    closure.

    Args:
        parameters: the parameters that the closure computes gradients for.
    """
    every = list(parameters)
    with ExitStack() as stack:
        watched = [_PriorGradient(p) for p in every if p.requires_grad and p.grad is not None]
        for each in watched:
            stack.callback(each.parameter.register_hook(each.record_backward).remove)
        yield
    untouched = {id(each.before) for each in watched if each.is_untouched}
    if all(p.grad is None or id(p.grad) in untouched for p in every):
        raise NoGradientError("a closure that made no gradient")
    for each in watched:
        each.record_backward()  # if no backward pass did
    if any(each.is_left for each in watched):
        raise TrainingError(
            "Expected the closure to compute the whole gradient of the step, since earlier parts cannot be recomputed "
            "at shifted weights, but got gradients from before the closure, which it added to. Try calling "
            "zero_grad() in the closure, and accumulating over micro-batches inside it. (In Lightning: "
            "accumulate_grad_batches=1 and larger batches, or manual optimization.)"
        )


class NoGradientError(TrainingError):
    """A step was requested without a backward pass."""

    def __init__(self, got: str) -> None:
        super().__init__(
            f"Expected the gradient of the loss, but got {got}: no parameter of the optimizer has one from a backward "
            "pass. Try calling loss.backward(), and check that the loss depends on the optimizer's parameters and that "
            "they require a gradient."
        )


class _PriorGradient:
    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.before = parameter, parameter.grad
        self.version = None if self.before is None else self.before._version
        self.is_left: bool | None = None

    @property
    def is_untouched(self) -> bool:
        """Return whether no backward pass reached the parameter, and its gradient is unchanged or zeroed."""
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
    """Move parameters by ``steps`` inside; restore them bit for bit afterwards, also after an error."""
    with mark_moved(parameters):
        kept = [each.detach().clone() for each in parameters]
        try:
            if kept:
                with torch.no_grad():
                    torch._foreach_add_(parameters, steps)
            # Autocast caches low-precision copies of the weights, which are now outdated.
            torch.clear_autocast_cache()
            yield
        finally:
            if kept:
                with torch.no_grad():
                    # From a copy: adding and subtracting would leave rounding errors.
                    torch._foreach_copy_(parameters, kept)
            torch.clear_autocast_cache()


@contextmanager
def shift_weights(model: nn.Module, parameters: Iterable[Tensor], steps: Iterable[Tensor]) -> Iterator[None]:
    """Move parameters by ``steps`` inside, without changes to buffers; restore everything afterwards.

    Parameters are moved in place, so everything that refers to them (optimizers, compiled graphs,
    DistributedDataParallel) uses the shifted values. They are restored bit for bit, also after an error. For buffers
    see :func:`~saltflat.training.shift.freeze_buffers`.

    Args:
        model: the model whose passes run inside.
        parameters: some of its parameters, each once.
        steps: a step for each of them.

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
    # A tensor is iterable, too, but a scalar one raises an error.
    return list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, Tensor) else []
