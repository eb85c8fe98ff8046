"""Whether a network computes the same when batched: tried before it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy

import torch
from torch import Tensor, nn

from saltflat.errors import UnknownNameError, format_error_line
from saltflat.studies.training.vmapped_model import StackedModel, compute_losses

EXAMPLES = 4
# How far results may be apart, as a share of their length, in float64 and in shorter numbers. Rounding stays below:
# gradients of deep networks with BatchNorm on few examples differ by up to 4e-3 in float32, and by more in tf32.
TIGHT, LOOSE = 1e-6, 0.3
SMALL = 1e-3


class UnstackableError(Exception):
    """torch.func cannot run many of these networks at once, or not so that each does what it does alone."""


def check_stackable(models: Sequence[nn.Module], inputs: Tensor, labels: Tensor, way: str) -> None:
    """Take a few networks through two passes on a few examples, together and alone, and compare what comes of it.

    Args:
        models: as they are before training; copies are used.
        inputs: a few, where the networks are to be trained.
        labels: of each network, a row each.
        way: of doing convolutions.
    """
    try:
        finer = [deepcopy(model).double() for model in models]
        exact = inputs.double() if inputs.is_floating_point() else inputs
        _run_alone(finer[0], exact, labels[0])
    except UnstackableError:
        raise
    except Exception:  # they work in their own precision only
        finer = []
    if finer:
        with suppress(torch.OutOfMemoryError):  # twice the memory of the training: it may have no room for that
            return _compare_results(finer, exact, labels, way, TIGHT)
    return _compare_results(models, inputs, labels, way, LOOSE)


def _compare_results(models: Sequence[nn.Module], inputs: Tensor, labels: Tensor, way: str, tolerance: float) -> None:
    try:
        # A stack of its own: what passes leave behind in it is not for the training.
        found = _run_stacked(StackedModel(models[0], inputs[0], way), models, inputs, labels)
    except (torch.OutOfMemoryError, UnknownNameError):
        raise
    except Exception as error:
        raise UnstackableError(format_error_line(error)) from error
    for place, model in enumerate(models):
        try:
            alone = _run_alone(model, inputs, labels[place])
        except UnstackableError:
            raise
        except Exception:  # it fails alone, too, and is told of there
            return
        for name, value in found.items():
            if not _is_close(value[place], alone[name], tolerance):
                raise UnstackableError(f"its {name} in a stack is not what it is alone")


def _run_stacked(
    stacked: StackedModel, models: Sequence[nn.Module], inputs: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    rows, rest = stacked.pack_models(models)
    rows.requires_grad_()
    each = inputs.expand(len(models), *inputs.shape)
    first = stacked.compute_logits(rows, rest, each, training=True)
    (gradient,) = torch.autograd.grad(compute_losses(first, labels).mean(1).sum(), rows)
    with torch.no_grad():
        second = stacked.compute_logits(rows, rest, each, training=True)
        last = stacked.compute_logits(rows, rest, inputs, training=False, shared=True)
    return {
        "output": first.detach(),
        "gradient": gradient,
        "output in a second pass": second,
        "output in eval mode": last,
        **{f"state {name!r}": value for name, value in rest.items()},
    }


def _run_alone(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model = deepcopy(model).to(inputs.device).train()
    before = dict(_iter_plain_attributes(model))
    first = model(inputs)
    trained = [each for each in model.parameters() if each.requires_grad]
    gradients = torch.autograd.grad(compute_losses(first[None], labels[None]).mean(), trained, allow_unused=True)
    flat = [
        (torch.zeros_like(each) if slope is None else slope).flatten()
        for each, slope in zip(trained, gradients, strict=True)
    ]
    with torch.no_grad():
        second = model(inputs)
        if dict(_iter_plain_attributes(model)) != before:
            raise UnstackableError("it counts or remembers in attributes that are no buffers")
        last = model.eval()(inputs)
    state = {name: each.detach() for name, each in model.named_buffers()}
    state |= {name: each.detach() for name, each in model.named_parameters() if not each.requires_grad}
    return {
        "output": first.detach(),
        "gradient": torch.cat(flat),
        "output in a second pass": second,
        "output in eval mode": last,
        **{f"state {name!r}": value for name, value in state.items()},
    }


def _iter_plain_attributes(model: nn.Module) -> Iterator[tuple[tuple[str, str], object]]:
    """Numbers and texts that the modules hold, beside their tensors."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key != "training" and isinstance(value, int | float | str):
                yield (name, key), value


def _is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    # A network that is not finite here diverges either way.
    if not bool(one.isfinite().all()) or not bool(other.isfinite().all()):
        return bool(one.isfinite().all()) == bool(other.isfinite().all())
    # What should be zero is rounding, which may differ: numbers below a thousandth count as that much.
    return bool((one - other).norm() <= tolerance * (other.norm() + SMALL * other.numel() ** 0.5))
