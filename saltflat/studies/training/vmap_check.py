"""Check that a network computes the same in a batch of networks as alone, before it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from saltflat.errors import UnknownNameError, format_error_line
from saltflat.studies.training.separate_models import make_batched_model
from saltflat.studies.training.vmapped_model import VmappedModel, compute_losses

EXAMPLES = 4
# Relative difference of results that is allowed in float64 and in lower precision. Rounding stays below: gradients of
# deep networks with BatchNorm on few examples differ by up to 4e-3 in float32, and by more in tf32.
TIGHT, LOOSE = 1e-6, 0.3
SMALL = 1e-3


class NotVmappableError(Exception):
    """vmap cannot run a batch of these networks, or gives other results than each network alone."""


def check_vmappable(
    models: Sequence[nn.Module],
    inputs: Tensor,
    labels: Tensor,
    way: str,
    *,
    bfloat16: bool = False,
    splits: bool = False,
) -> None:
    """Check that a few networks give the same results batched and alone, in two passes on a few examples.

    Args:
        models: networks before training; copies are used.
        inputs: a few inputs, on the device of the training.
        labels: labels, one row for each network.
        way: method of convolutions, or ``"separate"``.
        bfloat16: whether the training runs under autocast with bfloat16.
        splits: whether it runs on parts of a batch.
    """
    with torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []):
        _check_random_draws(models[0], inputs)
        if splits:
            _check_buffers(models[0], inputs)
        if bfloat16:
            _check_autocast(models, inputs, labels, way)
        _check_results(models, inputs, labels, way)


def _check_random_draws(model: nn.Module, inputs: Tensor) -> None:
    states = _get_random_states(inputs)
    with suppress(Exception), torch.no_grad():  # training it reports the error
        _copy_in_train_mode(model, inputs)(inputs)
    if not all(map(torch.equal, states, _get_random_states(inputs))):
        raise NotVmappableError("it draws random numbers in its forward pass")


def _copy_in_train_mode(model: nn.Module, inputs: Tensor) -> nn.Module:
    return deepcopy(model).to(inputs.device).train()


def _get_random_states(inputs: Tensor) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(inputs.device)] if inputs.is_cuda else [])]


def _check_buffers(model: nn.Module, inputs: Tensor) -> None:
    """Check that only layers that normalize write to buffers: parts of a batch would each write to others."""
    model = _copy_in_train_mode(model, inputs)
    own = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
        for key, _ in module.named_buffers(recurse=False)
    }
    before = {name: each.clone() for name, each in model.named_buffers() if name not in own}
    with suppress(Exception), torch.no_grad():
        model(inputs)
    if any(not torch.equal(each, before[name]) for name, each in model.named_buffers() if name in before):
        raise NotVmappableError("it writes to buffers, which parts of a batch would not share")


def _check_autocast(models: Sequence[nn.Module], inputs: Tensor, labels: Tensor, way: str) -> None:
    try:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            _run_vmapped(make_batched_model(models[0], inputs[0], way), models, inputs, labels)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise NotVmappableError(f"under autocast, {format_error_line(error)}") from error


def _check_results(models: Sequence[nn.Module], inputs: Tensor, labels: Tensor, way: str) -> None:
    try:
        finer = [deepcopy(model).double() for model in models]
        exact = inputs.double() if inputs.is_floating_point() else inputs
        _run_alone(finer[0], exact, labels[0])
    except NotVmappableError:
        raise
    except Exception:  # they work only in their own precision
        finer = []
    if finer:
        with suppress(torch.OutOfMemoryError):  # it takes twice the memory of the training
            return _compare_results(finer, exact, labels, way, TIGHT)
    return _compare_results(models, inputs, labels, way, LOOSE)


def _compare_results(models: Sequence[nn.Module], inputs: Tensor, labels: Tensor, way: str, tolerance: float) -> None:
    try:
        # A copy: the buffers that these passes change are not those of the training.
        found = _run_vmapped(make_batched_model(models[0], inputs[0], way), models, inputs, labels)
    except (torch.OutOfMemoryError, UnknownNameError):
        raise
    except Exception as error:
        raise NotVmappableError(format_error_line(error)) from error
    for place, model in enumerate(models):
        try:
            alone = _run_alone(model, inputs, labels[place])
        except NotVmappableError:
            raise
        except Exception:  # it also fails alone, and training it reports the error
            return
        for name, value in found.items():
            if not _is_close(value[place], alone[name], tolerance):
                raise NotVmappableError(f"its {name} in a batch of networks is not what it is alone")


def _run_vmapped(
    vmapped: VmappedModel, models: Sequence[nn.Module], inputs: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    rows, rest = vmapped.pack_models(models)
    rows.requires_grad_()
    each = inputs.expand(len(models), *inputs.shape)
    first = vmapped.compute_logits(rows, rest, each, training=True)
    (gradient,) = torch.autograd.grad(compute_losses(first, labels).mean(1).sum(), rows)
    with torch.no_grad():
        second = vmapped.compute_logits(rows, rest, each, training=True)
        last = vmapped.compute_logits(rows, rest, inputs, training=False, shared=True)
    return {
        "output": first.detach(),
        "gradient": torch.cat([each.flatten(1) for each in vmapped.split_rows(gradient).values()], dim=1),
        "output in a second pass": second,
        "output in eval mode": last,
        **{f"state {name!r}": value for name, value in rest.items()},
    }


def _run_alone(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model = _copy_in_train_mode(model, inputs)
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
            raise NotVmappableError("it counts or remembers in attributes that are no buffers")
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
    """Yield the numbers and strings that the modules hold, besides their tensors."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key != "training" and isinstance(value, int | float | str):
                yield (name, key), value


def _is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    # A network that is not finite here diverges in both cases.
    if not bool(one.isfinite().all()) or not bool(other.isfinite().all()):
        return bool(one.isfinite().all()) == bool(other.isfinite().all())
    # Values that should be zero are rounding errors, which may differ: numbers below a thousandth count as that.
    return bool((one - other).norm() <= tolerance * (other.norm() + SMALL * other.numel() ** 0.5))
