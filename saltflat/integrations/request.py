"""A request to measure, tried on a few examples before an hour of training has passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from saltflat.errors import (
    DataError,
    DeviceError,
    EmptyDataError,
    ModelError,
    OptionError,
    SaltflatError,
    UnknownNameError,
)
from saltflat.integrations.probe_set import ProbeSet, device_of
from saltflat.loan import loan
from saltflat.logits import normalized
from saltflat.losses import loss_from
from saltflat.measuring import measure
from saltflat.probe import checked_outputs
from saltflat.problem import Problem, real

FEW = 2  # examples to try it on
AT_ONCE = 64  # examples in a forward pass over the probe


def tried(model: nn.Module, probe: ProbeSet, loss: Any, measures: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raises what is wrong with the options, model or data; values are of no interest here."""
    try:
        measure(model, probe.few(device_of(model), FEW), loss, measures, **options)
        _check_targets(model, probe, loss, options)
    except (DeviceError, OptionError, UnknownNameError, ModelError):
        raise
    except DataError as error:
        # A few examples may have all their targets ignored; that says nothing of the others.
        if not isinstance(error, EmptyDataError):
            raise
    except SaltflatError:
        # NaN, say: that may pass.
        pass


def _check_targets(model: nn.Module, probe: ProbeSet, loss: Any, options: Mapping[str, Any]) -> None:
    """Those of all examples: one that is out of range would else be found when the first measurement is due."""
    mode, dtype = options.get("mode", "eval"), options.get("dtype")
    data = probe.on(device_of(model))
    with loan(model, mode, data), torch.no_grad():
        chosen = normalized(loss_from(loss), options.get("logits", "none"))
        problem = Problem.of(model, data, chosen, options.get("layers"), dtype, mode)
        for batch in problem.batches():
            checked_outputs(problem, batch.cut(0, 2))
            for start in range(0, batch.examples, AT_ONCE):
                few = batch.cut(start, start + AT_ONCE)
                outputs = problem.network(few)
                problem.check_outputs(outputs, few)
                problem.loss.check(outputs, real(few.targets))
