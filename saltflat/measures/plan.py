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
from saltflat.engine.problem import Problem, find_input_notes
from saltflat.measures.measurer import Measurer, format_device
from saltflat.measures.trial import Trial
from saltflat.results.plan import MeasurementPlan, ParameterPlan
from saltflat.results.report import describe_run
from saltflat.symmetry.batch_norm_uses import is_batch_norm

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
    notes = [*_find_advice(parameters), *_find_norm_advice(model, parameters)]
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
    network = context.problem.network
    owners = {name: module for module, layer in network.layers.items() for name in layer.names.values()}
    routes = {each.name: each for each in context.get_probe(batch).routes}
    for name, value in model.named_parameters():
        shape = tuple(value.shape)
        if name not in routes:
            why = "not among layers=" if value.requires_grad else "frozen (no requires_grad)"
            yield ParameterPlan(name, shape, "not measured", why)
            continue
        route = routes[name]
        why = f"rule of {type(owners[name]).__name__}" if name in owners else ""
        if route.route == "expanded":
            why = "used outside of layers: a copy for each example, in the same pass"
        yield ParameterPlan(name, shape, route.route, route.reason or why)


def _find_advice(parameters: tuple[ParameterPlan, ...]) -> list[str]:
    """Return what can be done about parameters that are not swept with all examples together."""
    slow = [each.name for each in parameters if each.way in ("mapped", "single")]
    if not slow:
        return []
    more = f" and {len(slow) - SHOWN} more" if len(slow) > SHOWN else ""
    return [
        f"{', '.join(slow[:SHOWN])}{more}: not swept with all examples together. That gives the same numbers, "
        "with more time and memory. Where it matters, leave out those that are the reason with layers=, or add a rule "
        "for their layers."
    ]


def _find_norm_advice(model: nn.Module, parameters: tuple[ParameterPlan, ...]) -> list[str]:
    """Return what BatchNorm does to measures, if measured parameters come with it."""
    norms = [name for name, module in model.named_modules() if is_batch_norm(module)]
    if not norms or all(each.way == "not measured" for each in parameters):
        return []
    more = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
    return [
        f"Running statistics ({norms[0]}{more}) absorb the scales of the layers before them: minima over rescalings "
        "leave these layers out, and other measures depend on how they happen to be scaled. Try measuring "
        "saltflat.fold(model, inputs) instead."
    ]
