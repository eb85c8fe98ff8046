"""One network trained by itself, in a plain loop: what training together must agree with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.studies.augmentation import Changes, changed
from saltflat.studies.building import built
from saltflat.studies.checkpoint import (
    Standing,
    identity,
    placed_under,
    read_checkpoint,
    trained_from_plain,
    trained_to_plain,
    under,
    write_checkpoint,
)
from saltflat.studies.draws import seed_of
from saltflat.studies.dropout import Masks, mask_shapes
from saltflat.studies.evaluating import evaluated
from saltflat.studies.examples import Examples
from saltflat.studies.labels import TrainingSet, training_set
from saltflat.studies.optimizers import optimizer_named, step_alone
from saltflat.studies.order import order, steps_of
from saltflat.studies.outcome import NOTHING, ended
from saltflat.studies.precision import DTYPES, products_of
from saltflat.studies.recipe import Recipe
from saltflat.studies.schedules import rate
from saltflat.studies.stopping import due, met
from saltflat.studies.trained import Trained


def train_alone(
    recipe: Recipe,
    examples: Examples,
    *,
    device: torch.device | str = "cpu",
    checkpoint: Path | None = None,
    every: float = 30.0,
    tell: Callable[[int, int], None] | None = None,
) -> Trained:
    """Train one network.

    Args:
        recipe: how.
        examples: on what; they are moved to the device.
        device: where.
        checkpoint: a file that holds where the training stands. If it is of this training, it goes on from there. It
            is left when the training is over, with the result in it.
        every: seconds between checkpoints.
        tell: is called after every epoch with the epochs done and the epochs at most.
    """
    place = torch.device(device)
    model = built(recipe, examples.shape, examples.classes)
    initial = {name: each.detach().clone() for name, each in model.named_parameters()}
    here = examples.to(place, DTYPES[recipe.dtype])
    who = "" if checkpoint is None else identity([recipe], examples, alone=True)
    with products_of(recipe.dtype):
        return _train(recipe, model.to(place), initial, here, checkpoint, who, every, tell)


def _train(
    recipe: Recipe,
    model: nn.Module,
    initial: dict[str, Tensor],
    examples: Examples,
    checkpoint: Path | None,
    who: str,
    every: float,
    tell: Callable[[int, int], None] | None,
) -> Trained:
    data = training_set(recipe, examples)
    shapes = mask_shapes(model, data.inputs[0])
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = optimizer_named(recipe.optimizer).alone(trained, recipe)
    measured = data.inputs[: data.measured], data.labels[: data.measured]
    epoch, curve, seconds = 0, [], 0.0
    train: tuple[float, float] | None = None
    standing = None if checkpoint is None else read_checkpoint(checkpoint, who)
    if standing is not None:
        if "trained" in standing.facts:
            return trained_from_plain(standing.facts["trained"], dict(standing.tensors))
        epoch, curve, seconds = (standing.facts[each] for each in ("epoch", "curve", "seconds"))
        model.load_state_dict(under(standing.tensors, "model"))
        _restore(optimizer, under(standing.tensors, "optimizer"))
    began = written = time.perf_counter()
    stop = epoch >= recipe.epochs
    while not stop:
        curve.append(_epoch(recipe, model, optimizer, data, shapes, epoch))
        epoch += 1
        stop = epoch >= recipe.epochs
        train = None
        if not _finite(model, curve[-1]):
            stop, train = True, NOTHING
        elif due(recipe, epoch):
            train = evaluated(model, *measured)
            stop = stop or met(recipe, *train) or not math.isfinite(train[0])
        if tell is not None:
            tell(epoch, recipe.epochs)
        now = time.perf_counter()
        if checkpoint is not None and not stop and now - written >= every:
            facts = {"epoch": epoch, "curve": curve, "seconds": seconds + now - began}
            kept = placed_under("model", model.state_dict()) | placed_under("optimizer", _memory(optimizer))
            write_checkpoint(checkpoint, who, Standing(facts, kept))
            written = time.perf_counter()
    train = evaluated(model, *measured) if train is None else train
    test = evaluated(model, examples.test_inputs, examples.test_labels)
    counts = (data.measured, len(examples.test_labels))
    outcome = ended(recipe, dict(model.named_parameters()), initial, train, test, counts, epoch, curve)
    weights = {name: each.detach().cpu().clone() for name, each in model.state_dict().items()}
    found = Trained(weights, outcome, seconds + time.perf_counter() - began)
    if checkpoint is not None:
        write_checkpoint(checkpoint, who, Standing({"trained": trained_to_plain(found)}, weights))
    return found


def _epoch(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: TrainingSet,
    shapes: dict[str, tuple[int, ...]],
    epoch: int,
) -> float:
    """Every example once; the mean of the losses of the steps."""
    device, count = data.inputs.device, len(data.labels)
    steps, places = steps_of(count, recipe.batch), order(recipe.seed, epoch, count).to(device)
    changes = Changes.of(recipe, epoch, count)
    changes = None if changes is None else Changes.stacked([changes], device)
    masks = Masks.of(shapes, [recipe], epoch, device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.train()
    # A network of the user's may draw from torch's own generators: these draws are repeatable, too.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        _seed(device, seed_of(recipe.seed, "own draws", epoch))
        for step in range(steps):
            begin, end = step * recipe.batch, min((step + 1) * recipe.batch, count)
            some = places[begin:end]
            inputs = data.inputs[some]
            if changes is not None:
                inputs = changed(inputs, changes.part(begin, end))
            if masks is not None:
                for name, mask in masks.draw(end - begin).items():
                    model.get_submodule(name.removesuffix(".mask")).mask = mask[0]
            loss = F.cross_entropy(model(inputs), data.labels[some])
            optimizer.zero_grad()
            loss.backward()
            step_alone(optimizer, recipe, rate(recipe, epoch, epoch * steps + step))
            total += loss.detach()
    model.eval()
    return float(total) / steps


def _seed(device: torch.device, seed: int) -> None:
    """Of the CPU and of this device; torch.manual_seed would move the generators of other GPUs, too."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _finite(model: nn.Module, loss: float) -> bool:
    return math.isfinite(loss) and all(bool(each.isfinite().all()) for each in model.parameters())


def _memory(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{place}/{name}": torch.as_tensor(value)
        for place, held in state.items()
        for name, value in held.items()
        if value is not None
    }


def _restore(optimizer: torch.optim.Optimizer, memory: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in memory.items():
        place, _, name = key.partition("/")
        state.setdefault(int(place), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
