"""Train one network in a plain loop: the reference for batched training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.studies.data import Examples
from saltflat.studies.gradient_rules import Objective, OwnGradient, StepTensors, find_gradient_rule
from saltflat.studies.optimizers import find_optimizer, step_alone
from saltflat.studies.recipe import Recipe
from saltflat.studies.row import TrainedNetwork
from saltflat.studies.schedules import compute_learning_rate
from saltflat.studies.schema import DTYPES
from saltflat.studies.store.checkpoint import (
    Checkpoint,
    add_prefix,
    describe_training,
    read_matching_checkpoint,
    select_prefix,
    trained_from_dict,
    trained_to_dict,
    write_checkpoint,
)
from saltflat.studies.training.build import build_network, use_matmul_precision
from saltflat.studies.training.draws import derive_seed, make_keys
from saltflat.studies.training.dropout import DropoutMasks, find_mask_shapes
from saltflat.studies.training.examples import Augmentation, TrainingSet, count_steps, draw_order, make_training_set
from saltflat.studies.training.outcome import NOTHING, evaluate_model, has_met_targets, is_check_due, make_outcome


def train_alone(
    recipe: Recipe,
    examples: Examples,
    *,
    device: torch.device | str = "cpu",
    checkpoint: Path | None = None,
    every: float = 30.0,
    tell: Callable[[int, int], None] | None = None,
) -> TrainedNetwork:
    """Train one network.

    Args:
        recipe: settings of the training.
        examples: training and test examples; they are moved to the device.
        device: device to train on.
        checkpoint: file for the state of the training. If it holds a state of this training, the training resumes. At
            the end it holds the result.
        every: seconds between checkpoints.
        tell: called after every epoch with the number of epochs done and the maximum.
    """
    place = torch.device(device)
    model = build_network(recipe, examples.shape, examples.classes)
    initial = {name: each.detach().clone() for name, each in model.named_parameters()}
    here = examples.to(place, DTYPES[recipe.dtype])
    who = "" if checkpoint is None else describe_training([recipe], examples, alone=True)
    with use_matmul_precision(recipe.dtype):
        return _train_model(recipe, model.to(place), initial, here, checkpoint, who, every, tell)


def _train_model(
    recipe: Recipe,
    model: nn.Module,
    initial: dict[str, Tensor],
    examples: Examples,
    checkpoint: Path | None,
    who: str,
    every: float,
    tell: Callable[[int, int], None] | None,
) -> TrainedNetwork:
    data = make_training_set(recipe, examples)
    inputs = data.inputs
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = find_optimizer(recipe.optimizer).alone(trained, recipe)
    steps = _TrainingSteps(recipe, model, optimizer, data)
    measured = inputs[: data.measured], data.labels[: data.measured]
    epoch, curve, seconds = 0, [], 0.0
    train: tuple[float, float] | None = None
    standing = None if checkpoint is None else read_matching_checkpoint(checkpoint, who)
    if standing is not None:
        if "trained" in standing.facts:
            return trained_from_dict(standing.facts["trained"], dict(standing.tensors))
        epoch, curve, seconds = (standing.facts[each] for each in ("epoch", "curve", "seconds"))
        model.load_state_dict(select_prefix(standing.tensors, "model"))
        _restore_optimizer_state(optimizer, select_prefix(standing.tensors, "optimizer"))
    began = written = time.perf_counter()
    stop = epoch >= recipe.epochs
    while not stop:
        curve.append(steps.train_epoch(epoch, curve))
        epoch += 1
        stop = epoch >= recipe.epochs
        train = None
        if not _is_finite(model, curve[-1]):
            stop, train = True, NOTHING
        elif is_check_due(recipe, epoch):
            train = evaluate_model(model, *measured)
            stop = stop or has_met_targets(recipe, *train) or not math.isfinite(train[0])
        if tell is not None:
            tell(epoch, recipe.epochs)
        now = time.perf_counter()
        if checkpoint is not None and not stop and now - written >= every:
            facts = {"epoch": epoch, "curve": curve, "seconds": seconds + now - began}
            kept = add_prefix("model", model.state_dict()) | add_prefix(
                "optimizer", _flatten_optimizer_state(optimizer)
            )
            write_checkpoint(checkpoint, who, Checkpoint(facts, kept))
            written = time.perf_counter()
    train = evaluate_model(model, *measured) if train is None else train
    test = evaluate_model(model, examples.test_inputs, examples.test_labels)
    counts = (data.measured, len(examples.test_labels))
    outcome = make_outcome(recipe, dict(model.named_parameters()), initial, train, test, counts, epoch, curve)
    weights = {name: each.detach().cpu().clone() for name, each in model.state_dict().items()}
    found = TrainedNetwork(weights, outcome, seconds + time.perf_counter() - began)
    if checkpoint is not None:
        write_checkpoint(checkpoint, who, Checkpoint({"trained": trained_to_dict(found)}, weights))
    return found


class _TrainingSteps:
    """The steps of one network, epoch by epoch."""

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, data: TrainingSet) -> None:
        self.recipe, self.model, self.optimizer, self.data = recipe, model, optimizer, data
        self.device, self.inputs = data.labels.device, data.inputs
        self.shapes = find_mask_shapes(model, self.inputs[0])
        self.masks = DropoutMasks.from_recipes(self.shapes, [recipe], DTYPES[recipe.dtype], self.device)
        self.augmentation = Augmentation.from_recipe(recipe)
        self.like = self.inputs[0]
        if self.augmentation is not None:
            self.inputs = self.augmentation.pad(self.inputs)
        rule = find_gradient_rule(recipe)
        self.compute_gradient: OwnGradient = (
            self._compute_plain_gradient if rule is None else rule.alone(model, optimizer, recipe)
        )

    def train_epoch(self, epoch: int, curve: Sequence[float]) -> float:
        """Take all steps of an epoch after those of this curve; return the mean of their losses."""
        recipe, count, device = self.recipe, len(self.data.labels), self.device
        steps, places = count_steps(count, recipe.batch_size), draw_order(recipe.seed, epoch, count).to(device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        self.model.train()
        # A user's network may draw from torch's global generators: make these draws repeatable.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            _seed_generators(device, derive_seed(recipe.seed, "own draws", epoch))
            for step in range(steps):
                some = places[step * recipe.batch_size : (step + 1) * recipe.batch_size]
                batch = self._read_batch(epoch, some)
                with torch.autocast(device.type, torch.bfloat16, enabled=recipe.dtype == "bf16"):
                    total += self.compute_gradient(self._compute_loss, batch, epoch)
                rate = compute_learning_rate(recipe, epoch, epoch * steps + step, steps=steps, curve=curve)
                step_alone(self.optimizer, recipe, rate)
        self.model.eval()
        return float(total) / steps

    def _read_batch(self, epoch: int, some: Tensor) -> StepTensors:
        """Return the inputs, labels and dropout masks of a step."""
        if self.augmentation is None:
            inputs = self.inputs[some]
        else:
            key = make_keys([self.recipe], "augment", epoch).to(self.device)
            mirrored, starts = self.augmentation.draw(key, some[None])
            inputs = self.augmentation.read(self.inputs, self.like, some, mirrored[0], starts[0])
        masks: list[Tensor] = []
        if self.masks is not None:
            key = make_keys([self.recipe], "dropout", epoch).to(self.device)
            masks = [each[0] for each in self.masks.draw(key, some[None]).values()]
        return (inputs, self.data.labels[some], *masks)

    def _compute_loss(self, model: nn.Module, batch: StepTensors) -> Tensor:
        inputs, labels, *masks = batch
        for name, mask in zip(self.shapes, masks, strict=bool(masks)):
            model.get_submodule(name.removesuffix(".mask")).mask = mask
        logits = model(inputs).to(DTYPES[self.recipe.dtype])
        return F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)

    def _compute_plain_gradient(self, objective: Objective, batch: StepTensors, epoch: int) -> Tensor:
        loss = objective(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        return loss.detach()


def _seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators of the CPU and of this device; torch.manual_seed would also seed other GPUs."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _is_finite(model: nn.Module, loss: float) -> bool:
    return math.isfinite(loss) and all(bool(each.isfinite().all()) for each in model.parameters())


def _flatten_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{place}/{name}": torch.as_tensor(value)
        for place, held in state.items()
        for name, value in held.items()
        if value is not None
    }


def _restore_optimizer_state(optimizer: torch.optim.Optimizer, memory: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in memory.items():
        place, _, name = key.partition("/")
        state.setdefault(int(place), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
