"""The examples that a training is monitored on, and a request tried on a few of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from saltflat.engine.custom_losses import normalize_logits, parse_loss
from saltflat.engine.data import Batch
from saltflat.engine.problem import Problem, cast_targets
from saltflat.engine.read_data import prepare_data, read_batches
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
)
from saltflat.measures.compute import measure

Item = tuple[Any, Tensor]


class ProbeSet:
    """Batches in memory.

    A loader is read once, so its workers and its random numbers play no part in the training, and every measurement
    sees the same examples.
    """

    def __init__(self, data: Any) -> None:
        if isinstance(data, Mapping) and not isinstance(data.get("labels"), Tensor):
            raise DataError(
                "Expected a tensor under 'labels' beside the inputs, but got a probe with the keys "
                f"{sorted(map(str, data))}. Try adding the labels, or renaming them."
            )
        # Copies: the training may write to its own.
        self._batches = [_map_batch(batch, Tensor.clone).to(None) for batch in read_batches(prepare_data(data))]
        if not self._batches:
            raise EmptyDataError(
                "Expected at least one, but got a probe without examples. Check the path, the split and drop_last."
            )

    @property
    def examples(self) -> int:
        return sum(batch.examples for batch in self._batches)

    def get_batches(self, device: torch.device) -> list[Item]:
        """All batches on a device, where they stay."""

        if any(each.device != device for batch in self._batches for each in [*batch.list_tensors(), batch.targets]):
            self._batches = [_move_batch(batch, device) for batch in self._batches]
        return [_make_pair(batch) for batch in self._batches]

    def get_first_batch(self, device: torch.device, count: int) -> list[Item]:
        """The first examples, in one batch; no more than the first batch has."""
        self.get_batches(device)
        return [_make_pair(self._batches[0].cut(0, count))]

    def get_first_examples(self, device: torch.device, count: int) -> list[Item]:
        """The first examples, in batches as they are."""
        self.get_batches(device)
        found: list[Item] = []
        for batch in self._batches:
            if count > 0:
                found.append(_make_pair(batch.cut(0, min(count, batch.examples))))
            count -= batch.examples
        return found


def get_device(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _make_pair(batch: Batch) -> Item:
    return batch.kwargs or batch.args, batch.targets


def _move_batch(batch: Batch, device: torch.device) -> Batch:
    return _map_batch(batch, lambda tensor: tensor.to(device))


def _map_batch(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    parts = (batch.args, batch.kwargs, batch.targets)
    args, kwargs, targets = tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, parts)
    return Batch(args, kwargs, targets, batch.first, batch.examples)


FEW = 2  # examples to try it on
AT_ONCE = 64  # examples in a forward pass over the probe


def check_measurement(
    model: nn.Module, probe: ProbeSet, loss: Any, measures: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Raises what is wrong with the options, model or data; values are of no interest here."""
    try:
        measure(model, probe.get_first_batch(get_device(model), FEW), loss, measures, **options)
        _check_probe_targets(model, probe, loss, options)
    except (DeviceError, OptionError, UnknownNameError, ModelError):
        raise
    except DataError as error:
        # A few examples may have all their targets ignored; that says nothing of the others.
        if not isinstance(error, EmptyDataError):
            raise
    except SaltflatError:
        # NaN, say: that may pass.
        pass


def _check_probe_targets(model: nn.Module, probe: ProbeSet, loss: Any, options: Mapping[str, Any]) -> None:
    """Those of all examples: one that is out of range would else be found when the first measurement is due."""
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
