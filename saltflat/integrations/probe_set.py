"""The examples a training is monitored on, and the checks made on them before training starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from saltflat.engine.certificate import certify
from saltflat.engine.custom_losses import normalize_logits
from saltflat.engine.data import Batch, Data, prepare_data, read_batches
from saltflat.engine.losses import LossLike, parse_loss
from saltflat.engine.problem import Problem, cast_targets
from saltflat.engine.session import open_session
from saltflat.engine.strategy import compute_checked_outputs
from saltflat.errors import (
    DataError,
    DeviceError,
    EmptyDataError,
    ModelError,
    OptionError,
    SaltflatError,
    UnknownNameError,
    format_error_line,
)
from saltflat.measures.measurer import is_gauss_newton
from saltflat.measures.meter import Meter
from saltflat.measures.registry import parse_measures

Item = tuple[Any, Tensor]


class ProbeSet:
    """A fixed set of batches, held in memory.

    A loader is read once, so its workers and its random numbers do not affect the training, and every measurement uses
    the same examples.
    """

    def __init__(self, data: Data) -> None:
        if isinstance(data, Mapping) and not isinstance(data.get("labels"), Tensor):
            raise DataError(
                "Expected a tensor under 'labels' beside the inputs, but got a probe with the keys "
                f"{sorted(map(str, data))}. Try adding the labels, or renaming them."
            )
        # Copy: training may modify the originals.
        self._batches = [_map_batch(batch, Tensor.clone).to(None) for batch in read_batches(prepare_data(data))]
        if not self._batches:
            raise EmptyDataError(
                "Expected at least one example, but got an empty probe. Check the path, the split and drop_last."
            )

    @property
    def examples(self) -> int:
        """Return the number of examples."""
        return sum(batch.examples for batch in self._batches)

    def get_batches(self, device: torch.device) -> list[Item]:
        """Return all batches, moved to a device for good."""
        if any(each.device != device for batch in self._batches for each in [*batch.list_tensors(), batch.targets]):
            self._batches = [_move_batch(batch, device) for batch in self._batches]
        return [_make_pair(batch) for batch in self._batches]

    def get_first_batch(self, device: torch.device, count: int) -> list[Item]:
        """Return the first examples in one batch, at most as many as the first batch has."""
        self.get_batches(device)
        return [_make_pair(self._batches[0].cut(0, count))]

    def get_first_examples(self, device: torch.device, count: int) -> list[Item]:
        """Return the first examples, in their original batches."""
        self.get_batches(device)
        found: list[Item] = []
        for batch in self._batches:
            if count > 0:
                found.append(_make_pair(batch.cut(0, min(count, batch.examples))))
            count -= batch.examples
        return found


def get_device(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _make_pair(batch: Batch) -> Item:
    return batch.kwargs or batch.args, batch.targets


def _move_batch(batch: Batch, device: torch.device) -> Batch:
    return _map_batch(batch, lambda tensor: tensor.to(device))


def _map_batch(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    parts = (batch.args, batch.kwargs, batch.targets)
    args, kwargs, targets = tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, parts)
    return Batch(args, kwargs, targets, batch.first, batch.examples)


FEW = 8  # examples to try a measurement on: enough that later ones need not prepare again
AT_ONCE = 64  # examples in a forward pass over the probe


def check_measurement(meter: Meter, probe: ProbeSet, options: Mapping[str, Any]) -> None:
    """Check options, model and data by measuring a few examples; the values are discarded."""
    try:
        meter.measure(probe.get_first_batch(get_device(meter.model), FEW))
        _check_probe_targets(meter.model, probe, meter.loss, options)
    except (DeviceError, OptionError, UnknownNameError, ModelError):
        raise
    except DataError as error:
        # A few examples may have all their targets ignored; others may not.
        if not isinstance(error, EmptyDataError):
            raise
    except SaltflatError:
        # NaN, for example, which may be temporary.
        pass


def _check_probe_targets(model: nn.Module, probe: ProbeSet, loss: LossLike, options: Mapping[str, Any]) -> None:
    """Check the targets of all examples, so that an error is not first raised when a measurement is due."""
    mode, dtype = options.get("mode", "eval"), options.get("dtype")
    data = probe.get_batches(get_device(model))
    with open_session(model, mode, data), torch.no_grad():
        chosen = normalize_logits(parse_loss(loss), options.get("logits", "none"))
        problem = Problem.build(model, data, chosen, options.get("layers"), dtype, mode)
        for batch in problem.read_batches():
            compute_checked_outputs(problem, batch.cut(0, 2))
            for start in range(0, batch.examples, AT_ONCE):
                few = batch.cut(start, start + AT_ONCE)
                outputs = problem.network(few)
                problem.check_outputs(outputs, few)
                problem.loss.check(outputs, cast_targets(few.targets))


@dataclass(frozen=True)
class GaussNewtonCaveat:
    """Why a value may differ from what its name says.

    Attributes:
        text: completes "hessian_trace is ..."
        is_certain: False if the certificate could not be computed.
    """

    text: str
    is_certain: bool


def find_gauss_newton_caveats(
    model: nn.Module, few: Data, loss: LossLike, measures: Sequence[str], options: Mapping[str, Any]
) -> dict[str, GaussNewtonCaveat]:
    """Return caveats for measures that use the Gauss-Newton matrix where it may differ from the Hessian, by key."""
    affected = [request.key for request in parse_measures(measures) if is_gauss_newton(request)]
    if not affected:
        return {}
    shared = {name: options[name] for name in ("layers", "seed", "mode") if name in options}
    try:
        found = certify(model, few, normalize_logits(parse_loss(loss), options.get("logits", "none")), **shared)
    # Not every model has second derivatives, and float64 may not fit; neither prevents measuring.
    except Exception as error:
        unknown = f"by the Gauss-Newton matrix; whether it is the Hessian here is unknown ({format_error_line(error)})"
        return dict.fromkeys(affected, GaussNewtonCaveat(unknown, is_certain=False))
    if found.holds:
        return {}
    text = (
        "by the Gauss-Newton matrix, which is not the Hessian here (the certificate, on "
        f"{found.examples} examples at the start: they differ by up to {found.gap:.0%} in a parameter)"
    )
    return dict.fromkeys(affected, GaussNewtonCaveat(text, is_certain=True))
