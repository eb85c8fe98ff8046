"""Plan a measurement: which way each parameter goes, what will be left out, and what time and memory it will take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy
import scipy
import torch
from torch import Tensor, nn

from saltflat.engine.context import Context, describe_context
from saltflat.engine.data import Batch, Data
from saltflat.engine.per_example import find_reached_leaves, make_leaves
from saltflat.engine.problem import Problem, find_input_notes
from saltflat.engine.strategy_trial import PLAIN
from saltflat.measures.measurer import Measurer, format_device
from saltflat.measures.trial import Trial
from saltflat.results.plan import MeasurementPlan, ParameterPlan, Way
from saltflat.results.report import describe_run

SHOWN = 4  # names in a sentence


def make_plan(
    measurer: Measurer, model: nn.Module, data: Data, initial: nn.Module | Mapping[str, Tensor] | None, logits: str
) -> MeasurementPlan:
    """Return the plan of a measurement of a model that a session lends.

    Args:
        measurer: what to measure and how.
        model: the model.
        data: the examples.
        initial: its weights before training, if known.
        logits: how outputs are normalized.
    """
    started = time.perf_counter()
    problem = Problem.build(model, data, measurer.loss, measurer.layers, measurer.dtype, measurer.mode)
    trial = Trial(measurer, problem, initial)
    context, tried = trial.context, trial.search.context
    parameters = tuple(_describe_parameters(model, context, trial.batch))
    notes = _find_advice(parameters)
    if tried.first is not None:
        notes += find_input_notes(problem, tried.first, tried.mean_loss)
    return MeasurementPlan(
        parameters=parameters,
        measures=tuple(trial.measures),
        left_out=trial.left_out,
        symmetries=trial.symmetries,
        examples=trial.examples,
        predicted_seconds=sum(trial.seconds.values()),
        predicted_seconds_by_step=trial.seconds,
        predicted_bytes=trial.num_bytes,
        settings={
            **describe_context(context),
            "logits": logits,
            "diagonal": measurer.diagonal,
            "certificate": measurer.needs_certificate,
            "results_bytes": tried.results_bytes,
            "tried_examples": tried.examples,
        },
        device=format_device(context),
        notes=tuple(notes),
        **describe_run(model, started, torch, numpy, scipy),
    )


def _describe_parameters(model: nn.Module, context: Context, batch: Batch) -> Iterator[ParameterPlan]:
    """Yield how the gradients of each parameter are computed, and why."""
    network, strategy = context.problem.network, context.get_probe(batch).strategy
    owners = {name: module for module, layer in network.layers.items() for name in layer.names.values()}
    leaves = make_leaves(network)
    with torch.enable_grad():
        outputs = network(batch.cut(0, 1), lambda module, x, y: y, leaves, plain=True)
    direct = find_reached_leaves(outputs, leaves)
    way: Way = "together" if strategy == "together" else "mapped" if strategy == "mapped" else "single"
    outside = [name for name in network.measured if name in direct]
    for name, value in model.named_parameters():
        if name not in network.measured:
            why = "frozen (no requires_grad)" if not value.requires_grad else "not among layers="
            yield ParameterPlan(name, tuple(value.shape), "not measured", why)
            continue
        if name in direct or name not in owners or strategy == PLAIN:
            where = type(model.get_submodule(name.rpartition(".")[0])).__name__
            why = f"used outside of layers with a rule, in {where}" if name in direct else f"no rule for {where}"
        else:
            why = f"rule of {type(owners[name]).__name__}"
            if way != "together":
                why += f", {_explain_strategy(strategy, outside)}"
        yield ParameterPlan(name, tuple(value.shape), way, why)


def _explain_strategy(strategy: str, outside: list[str]) -> str:
    """Return why parameters of layers with a rule are not swept with all examples together."""
    if outside:
        return f"but {outside[0]} has none" if len(outside) == 1 else f"but {len(outside)} parameters have none"
    how = "vectorized" if strategy == "mapped" else "single"
    return f"but only {how} passes gave the gradients of single examples"


def _find_advice(parameters: tuple[ParameterPlan, ...]) -> list[str]:
    """Return what can be done about parameters that are not swept with all examples together."""
    slow = [each.name for each in parameters if each.way in ("mapped", "single") and not each.why.startswith("rule")]
    if not slow:
        return []
    more = f" and {len(slow) - SHOWN} more" if len(slow) > SHOWN else ""
    return [
        f"{', '.join(slow[:SHOWN])}{more}: only parameters of layers with a rule are swept with all examples together. "
        "The numbers are the same, with more time and memory. Where that matters, leave them out with layers=, or add "
        "a rule."
    ]
