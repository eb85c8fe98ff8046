"""The tasks of a study, which any process can run: train a group of networks, measure one network."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from saltflat.errors import DeviceError, NonFiniteError, ReportError
from saltflat.measures.measurer import Measurer
from saltflat.measures.stack import NetworkStack, StackMember
from saltflat.studies.callables import inspect_network
from saltflat.studies.canonical import dump_canonical_json
from saltflat.studies.data import Examples
from saltflat.studies.grid import make_recipe
from saltflat.studies.measurement import (
    DTYPES,
    Measurement,
    make_measurer,
    measure_network,
    move_state,
    trim_readings,
)
from saltflat.studies.networks import find_network, is_user_function
from saltflat.studies.row import TrainedNetwork
from saltflat.studies.training.build import build_network
from saltflat.studies.training.examples import make_training_set
from saltflat.studies.training.train_batched import train_together


def resolve_resources(executor: str, device: str, given: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of one task: on a cluster one GPU by default, if the study runs on a GPU.

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
    # A task sees only the GPUs that Ray assigned to it, numbered from 0.
    if (place.index or 0) >= max(1, found["gpus"]):
        raise DeviceError(
            f"Expected a device without a number, but got the device {device!r} with the executor 'ray', which assigns "
            "a GPU to each task. Try 'cuda'."
        )
    return found


Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class TaskContext:
    """What all tasks of a study share; it is sent once to every worker.

    Attributes:
        examples: examples of the study, on the CPU.
        train: path of the user's train function.
        network: name of its network, if known.
        measures: measures to compute.
        options: options of the measurement.
        device: device to use.
        every: seconds between checkpoints.
        path: folders with the user's modules.
        tell: called with the number of epochs done and the maximum, if the tasks run in this process.
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
        """Whether a network can be rebuilt from its weights."""
        return self.train is None or self.network is not None


@dataclass(frozen=True)
class TrainTask:
    """Train a group of runs together.

    Attributes:
        key: key of the group.
        configs: settings by the key of the run.
        checkpoint: file for the state of the training.
        resources: resources that it needs.
    """

    key: str
    configs: dict[str, dict[str, Any]]
    checkpoint: Path | None
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasureTask:
    """Measure a trained network.

    Attributes:
        key: key of the run.
        config: settings of the run.
        weights: ``state_dict`` of the network.
        initial: ``state_dict`` before training, if it was kept; built-in networks are built again.
        measures: measures to compute.
        resources: resources that it needs.
    """

    key: str
    config: dict[str, Any]
    weights: dict[str, Tensor]
    initial: dict[str, Tensor] | None
    measures: tuple[str, ...]
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainedRun:
    """The result of training a network.

    Attributes:
        trained: weights and outcome.
        initial: weights before training, if they cannot be computed again.
        measured: the measurement, if the network cannot be rebuilt.
        failure: the error and its traceback, if measuring failed.
    """

    trained: TrainedNetwork
    initial: dict[str, Tensor] | None = None
    measured: Measurement | None = None
    failure: Mapping[str, str] | None = None


@dataclass(frozen=True)
class CheckpointFailure:
    """A task could not write its checkpoint: the study stops, or it would lose work."""

    problem: str


def train_group(task: TrainTask, context: TaskContext) -> dict[str, TrainedRun] | CheckpointFailure:
    """Train a group of runs, and return the results by key."""
    release_stack()
    if context.train is not None:
        from saltflat.studies.training.user_function import run_user_training

        ((key, config),) = task.configs.items()
        return {key: run_user_training(config, context)}
    # On a machine without the study's folder there is no checkpoint.
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
    except ReportError as problem:  # a checkpoint that cannot be written; a user's network raises other errors
        return CheckpointFailure(str(problem))
    return {key: TrainedRun(each) for key, each in zip(task.configs, found, strict=True)}


@dataclass(frozen=True)
class RebuiltNetwork:
    """A trained network, rebuilt from its weights.

    Attributes:
        model: network with these weights, in the precision of the measurement, on the CPU.
        inputs: its training inputs, without the confusion set.
        labels: labels it was trained on.
        initial: its weights before training, if known.
    """

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    initial: Mapping[str, Tensor] | None


def rebuild_network(task: MeasureTask, context: TaskContext) -> RebuiltNetwork:
    """Rebuild the network of a run, and its training examples."""
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
    # Before the weights are loaded: a float32 network would round those of a float64 training.
    model = model.to(DTYPES[context.options["dtype"]]).eval()
    model.load_state_dict(task.weights)
    return RebuiltNetwork(model, inputs, labels, initial)


def measure_run(task: MeasureTask, context: TaskContext) -> Measurement:
    """Rebuild a network from its weights, and measure it on its training examples.

    What does not depend on the weights is determined once for all networks of an architecture that this process
    measures in a row.
    """
    started = time.perf_counter()
    made = rebuild_network(task, context)
    found = _measure_in_stack(task, made, context)
    if found is None:
        found = measure_model(made.model, made.inputs, made.labels, made.initial, task.measures, context)
    return replace(found, seconds=time.perf_counter() - started)


# Networks in a row that cannot be measured as members of a stack, after which no other of the stack is tried.
GIVE_UP = 2


class _StackSession:
    """The networks of one architecture that this process measures in a row."""

    current: ClassVar[_StackSession | None] = None

    def __init__(self, key: str, model: nn.Module, measurer: Measurer, device: torch.device) -> None:
        self.key, self.device, self.failures = key, device, 0
        self.stack = NetworkStack(deepcopy(model).to(device), measurer)
        self.moved: tuple[Tensor, Tensor] | None = None

    def move_inputs(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the inputs on the device, in this precision if they are real; most networks have the same ones."""
        if self.moved is None or not _is_same_memory(self.moved[0], inputs):
            self.moved = None  # free before the others are moved
            self.moved = inputs, inputs.to(self.device, dtype if inputs.is_floating_point() else inputs.dtype)
        return self.moved[1]


def release_stack() -> None:
    """Free the memory that the networks of the last stack share."""
    _StackSession.current = None


def _measure_in_stack(task: MeasureTask, made: RebuiltNetwork, context: TaskContext) -> Measurement | None:
    """Measure a network as one of a stack, or return None if it has to be measured alone."""
    key = _find_stack_key(task, context)
    if key is None:
        return None
    session, device, dtype = _StackSession.current, torch.device(context.device), DTYPES[context.options["dtype"]]
    if session is None or session.key != key:
        measurer = make_measurer(task.measures, context.options)
        session = _StackSession.current = _StackSession(key, made.model, measurer, device)
    if session.failures >= GIVE_UP:
        return None
    count = context.options["examples"]
    data = session.move_inputs(made.inputs[:count], dtype), made.labels[:count].to(device)
    member = StackMember(made.model.state_dict(), data, move_state(made.initial, device))
    try:
        found = session.stack.measure(member)
    except Exception as error:  # alone, it fails with the error that belongs to it, or some of its measures do
        session.moved = None
        session.failures += not isinstance(error, NonFiniteError)  # which says nothing about the others
        return None
    session.failures = 0
    readings = trim_readings(found.readings)
    return Measurement({name: readings[name] for name in task.measures}, 0.0, found.made_with)


def _find_stack_key(task: MeasureTask, context: TaskContext) -> str | None:
    """Return a key that networks share if they can be measured as a stack; None if this one cannot.

    The forward pass of a user's network may depend on more than its settings and its weights.
    """
    if context.train is not None or context.options["device"] is not None:
        return None
    recipe = make_recipe(task.config)
    if is_user_function(recipe.network):
        return None
    examples = context.examples
    return dump_canonical_json(
        {
            "network": recipe.network,
            "architecture": recipe.architecture,
            "shape": examples.shape,
            "classes": examples.classes,
            "measures": task.measures,
            "options": context.options,
            "device": context.device,
        }
    )


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are views of the same numbers."""

    def describe_memory(tensor: Tensor) -> tuple[object, ...]:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor._version

    return describe_memory(one) == describe_memory(other)


def measure_model(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    initial: Mapping[str, Tensor] | None,
    measures: tuple[str, ...],
    context: TaskContext,
) -> Measurement:
    """Measure a model on the first examples, on the study's device."""
    count = context.options["examples"]
    device = torch.device(context.device)
    chosen = (inputs[:count].to(device), labels[:count].to(device))
    return measure_network(model.to(device).eval(), *chosen, initial, measures, context.options)


def _build_user_network(config: Mapping[str, Any], context: TaskContext) -> nn.Module:
    """Build the network of a user's train function with the settings that the study's ``network`` takes."""
    assert context.network is not None
    taker = inspect_network(context.network)
    taken = {name: value for name, value in config.items() if name in taker.names}
    return find_network(context.network).build_model(context.examples.shape, context.examples.classes, taken)
