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
from saltflat.integrations.probe_set import ProbeSet, get_device
from saltflat.loan import open_session
from saltflat.logits import normalize_logits
from saltflat.losses import parse_loss
from saltflat.measuring import measure
from saltflat.probe import compute_checked_outputs
from saltflat.problem import Problem, cast_targets

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
