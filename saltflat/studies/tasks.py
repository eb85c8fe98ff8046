"""The tasks of a study, which any process can do: train networks together, measure one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.errors import DeviceError, ReportError
from saltflat.studies.callables import inspect_network
from saltflat.studies.data import Examples
from saltflat.studies.grid import make_recipe
from saltflat.studies.measurement import DTYPES, Measurement, measure_network
from saltflat.studies.networks import find_network
from saltflat.studies.row import TrainedNetwork
from saltflat.studies.training.build import build_network
from saltflat.studies.training.examples import make_training_set
from saltflat.studies.training.train_batched import train_together


def resolve_resources(executor: str, device: str, given: Mapping[str, float]) -> dict[str, float]:
    """What one task asks of the executor: on a cluster a GPU, where the study works on one, unless it is said.

    Example:
        >>> resolve_resources("ray", "cuda", {"cpus": 2}), resolve_resources("ray", "cuda", {"gpus": 0.5})
        ({'gpus': 1, 'cpus': 2}, {'gpus': 0.5})
        >>> resolve_resources("ray", "cpu", {}), resolve_resources("processes", "cuda", {})
        ({}, {})
    """
    place = torch.device(device)
    if executor != "ray" or place.type != "cuda":
        return dict(given)
    found = {"gpus": 1, **given}
    # A task sees the GPUs that Ray gave it and no others, counted from 0.
    if (place.index or 0) >= max(1, found["gpus"]):
        raise DeviceError(
            f"Expected no number, but got the device {device!r} with the executor 'ray', which gives each task a GPU "
            "of its own. Try using 'cuda'."
        )
    return found


Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class TaskContext:
    """What all tasks of a study share; it travels once to every worker.

    Attributes:
        examples: of the study, on the CPU.
        train: the user's own train function, by name.
        network: what makes its network, where that is known.
        measures: to take.
        options: how to measure.
        device: to work on.
        every: seconds between checkpoints.
        path: folders that modules of the user are found in.
        tell: called with the epochs done and those there are at most; only where the tasks are done in this process.
    """

    examples: Examples
    train: str | None
    network: str | None
    measures: tuple[str, ...]
    options: Mapping[str, Any]
    device: str
    every: float
    path: tuple[str, ...] = ()
    tell: Tell | None = None

    @property
    def can_rebuild(self) -> bool:
        """Whether a network can be made again for its weights."""
        return self.train is None or self.network is not None


@dataclass(frozen=True)
class TrainTask:
    """Train these runs together.

    Attributes:
        key: of the group.
        configs: by the key of the run.
        checkpoint: where to keep what is half done.
        resources: that a worker needs for it.
    """

    key: str
    configs: dict[str, dict[str, Any]]
    checkpoint: Path | None
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasureTask:
    """Measure this trained network.

    Attributes:
        key: of the run.
        config: of the run.
        weights: by the network's own names.
        initial: those before training, where they were kept; a network of ours makes them again.
        measures: those that are wanted.
        resources: that a worker needs for it.
    """

    key: str
    config: dict[str, Any]
    weights: dict[str, Tensor]
    initial: dict[str, Tensor] | None
    measures: tuple[str, ...]
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainedRun:
    """A trained network, as it comes back from a task.

    Attributes:
        trained: weights and outcome.
        initial: the weights before training, where they cannot be made again.
        measured: what was measured at once, since the network cannot be made again.
        failure: the error and its traceback, if measuring failed.
    """

    trained: TrainedNetwork
    initial: dict[str, Tensor] | None = None
    measured: Measurement | None = None
    failure: Mapping[str, str] | None = None


@dataclass(frozen=True)
class CheckpointFailure:
    """A task that could not keep its checkpoint: the study has to stop, or it would lose work."""

    problem: str


def train_group(task: TrainTask, context: TaskContext) -> dict[str, TrainedRun] | CheckpointFailure:
    """Train a group, and give back each run by its key."""
    if context.train is not None:
        from saltflat.studies.training.user_function import run_user_training

        ((key, config),) = task.configs.items()
        return {key: run_user_training(config, context)}
    # On a machine without the study's folder there is nothing to go on from.
    checkpoint = task.checkpoint if task.checkpoint is not None and task.checkpoint.parent.is_dir() else None
    recipes = [make_recipe(config) for config in task.configs.values()]
    try:
        found = train_together(
            recipes,
            context.examples,
            device=context.device,
            checkpoint=checkpoint,
            every=context.every,
            tell=context.tell,
        )
    except ReportError as problem:  # a checkpoint that cannot be written; errors of a network of the user's are its own
        return CheckpointFailure(str(problem))
    return {key: TrainedRun(each) for key, each in zip(task.configs, found, strict=True)}


@dataclass(frozen=True)
class RebuiltNetwork:
    """A trained network, made again from its weights.

    Attributes:
        model: with these weights, in the precision to measure in, on the CPU.
        inputs: that it was trained on, those that measures look at.
        labels: that it was trained on.
        initial: its weights before training, where they are known.
    """

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    initial: Mapping[str, Tensor] | None


def rebuild_network(task: MeasureTask, context: TaskContext) -> RebuiltNetwork:
    """Make the network of a run again, and what it was trained on."""
    examples = context.examples
    initial: Mapping[str, Tensor] | None
    if context.train is None:
        recipe = make_recipe(task.config)
        model = build_network(recipe, examples.shape, examples.classes)
        initial = {name: each.clone() for name, each in model.state_dict().items()}
        chosen = make_training_set(recipe, examples)
        inputs, labels = chosen.inputs[: chosen.measured], chosen.labels[: chosen.measured]
    else:
        model, initial = _build_user_network(task.config, context), task.initial
        inputs, labels = examples.train_inputs, examples.train_labels
    # Before the weights come in: those of a float64 training would be rounded by a float32 network.
    model = model.to(DTYPES[context.options["dtype"]]).eval()
    model.load_state_dict(task.weights)
    return RebuiltNetwork(model, inputs, labels, initial)


def measure_run(task: MeasureTask, context: TaskContext) -> Measurement:
    """Make the network again, give it its weights, and measure it on what it was trained on."""
    started = time.perf_counter()
    made = rebuild_network(task, context)
    found = measure_model(made.model, made.inputs, made.labels, made.initial, task.measures, context)
    return replace(found, seconds=time.perf_counter() - started)


def measure_model(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    initial: Mapping[str, Tensor] | None,
    measures: tuple[str, ...],
    context: TaskContext,
) -> Measurement:
    """Measure a model on the first of these examples, on the study's device."""
    count = context.options["examples"]
    device = torch.device(context.device)
    chosen = (inputs[:count].to(device), labels[:count].to(device))
    return measure_network(model.to(device).eval(), *chosen, initial, measures, context.options)


def _build_user_network(config: Mapping[str, Any], context: TaskContext) -> nn.Module:
    """The network that the user's function trained, made by the study's ``network`` with what it takes of the run."""
    assert context.network is not None
    taker = inspect_network(context.network)
    taken = {name: value for name, value in config.items() if name in taker.names}
    return find_network(context.network).build_model(context.examples.shape, context.examples.classes, taken)
