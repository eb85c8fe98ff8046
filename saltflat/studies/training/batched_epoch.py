"""Train a batch of networks for one epoch; networks that are done leave the batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saltflat.studies.data import Examples
from saltflat.studies.optimizers import StepFactors, compute_learning_rate, find_optimizer, step_together
from saltflat.studies.recipe import Recipe
from saltflat.studies.row import Outcome, TrainedNetwork
from saltflat.studies.store.checkpoint import add_prefix, select_prefix
from saltflat.studies.training.build import build_network
from saltflat.studies.training.dropout import DropoutMasks
from saltflat.studies.training.examples import Augmentation, augment_images, count_steps, draw_order, make_training_set
from saltflat.studies.training.outcome import NOTHING, has_met_targets, is_check_due, make_outcome
from saltflat.studies.training.vmap_check import EXAMPLES, check_vmappable
from saltflat.studies.training.vmapped_model import VmappedModel, compute_losses


@dataclass
class NetworkBatch:
    """The state of a batch of networks that are trained at once.

    Attributes:
        members: indices of their recipes.
        epoch: number of epochs done.
        rows: weights ``(networks, weights)``; None before the first epoch.
        rest: other tensors of the networks by name, networks first.
        memory: state of the optimizer by name, networks first.
        curves: mean loss of each epoch, for each network.
        seconds: time spent so far, for each network.
        notes: notes for the outcomes.
    """

    members: list[int]
    epoch: int = 0
    rows: Tensor | None = None
    rest: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)
    curves: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def select_networks(self, places: Sequence[int]) -> NetworkBatch:
        """Return a batch of the networks at these places, with tensors of its own."""
        where = torch.tensor(places, dtype=torch.int64, device=None if self.rows is None else self.rows.device)
        return NetworkBatch(
            [self.members[place] for place in places],
            self.epoch,
            None if self.rows is None else self.rows.detach().index_select(0, where),
            {name: each.index_select(0, where) for name, each in self.rest.items()},
            {name: each.index_select(0, where) for name, each in self.memory.items()},
            [list(self.curves[place]) for place in places] if self.curves else [],
            [self.seconds[place] for place in places] if self.seconds else [],
            self.notes,
        )

    def copy_to(self, device: torch.device | str) -> NetworkBatch:
        """Return a copy of the batch on a device."""

        def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: each.detach().to(device, copy=True) for name, each in tensors.items()}

        return NetworkBatch(
            list(self.members),
            self.epoch,
            None if self.rows is None else self.rows.detach().to(device, copy=True),
            copy_tensors(self.rest),
            copy_tensors(self.memory),
            [list(each) for each in self.curves],
            list(self.seconds),
            self.notes,
        )

    def split_in_half(self, note: str | None = None) -> list[NetworkBatch]:
        """Return the first and the second half of the networks, both with this note."""
        middle = len(self.members) // 2
        parts = [self.select_networks(range(middle)), self.select_networks(range(middle, len(self.members)))]
        for each in parts:
            each.notes = (*self.notes, *([] if note is None else [note]))
        return parts

    def collect_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint."""
        if self.rows is None:
            return {}
        return {
            "rows": self.rows.detach(),
            **add_prefix("rest", self.rest),
            **add_prefix("memory", self.memory),
        }

    def collect_facts(self) -> dict[str, Any]:
        """Return the plain values of a checkpoint."""
        return {
            "members": self.members,
            "epoch": self.epoch,
            "curves": self.curves,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    @classmethod
    def from_checkpoint(cls, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> NetworkBatch:
        """Return the batch whose facts and tensors were collected."""
        return cls(
            **{**facts, "notes": tuple(facts["notes"])},
            rows=tensors.get("rows"),
            rest=select_prefix(tensors, "rest"),
            memory=select_prefix(tensors, "memory"),
        )


# Small networks wait for Python longer than for the GPU, where a captured step is launched at once.
WORTH_IT = 50  # steps in an epoch: a capture takes about as long as a hundred
TRIALS = 3  # before a capture: libraries initialize themselves in the first steps, which cannot be captured


class CudaGraphSteps:
    """The full steps of an epoch as a CUDA graph.

    A step reads only tensors that keep their place in memory, including its own number, so that one capture serves
    every step of every epoch.

    Args:
        take: takes a step on the examples at these places ``(networks, batch_size)`` with these factors of the
            optimizer; changes the weights in place without synchronizing, and returns the losses of the networks.
        places: the order of the examples, ``(networks, examples)``.
        plan: the factors of all steps.
        batch_size: examples in a step.
        changed: the tensors that a step changes.
    """

    def __init__(
        self,
        take: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
        places: Tensor,
        plan: StepFactors,
        batch_size: int,
        changed: Sequence[Tensor],
    ) -> None:
        self.take = take
        self.places = places.clone()
        self.factors = {name: each.clone() for name, each in plan.factors.items()}
        self.within = torch.arange(batch_size, device=places.device)
        self.number = torch.zeros(1, dtype=torch.int64, device=places.device)
        self.total = torch.zeros(len(places), dtype=torch.float64, device=places.device)
        held = [(each, each.detach().clone()) for each in changed]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(TRIALS):
                self.number.zero_()
                self._run_step()
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):  # captures the step without running it
            self._run_step()
        with torch.no_grad():
            for each, before in held:
                each.copy_(before)

    def _run_step(self) -> None:
        some = self.places.index_select(1, self.number * len(self.within) + self.within)
        losses = self.take(some, {name: each.index_select(0, self.number)[0] for name, each in self.factors.items()})
        with torch.no_grad():
            self.total += losses
            self.number += 1

    def replay_steps(self, places: Tensor, plan: StepFactors, steps: int) -> Tensor:
        """Take the first steps of an epoch; return the sum of their losses for each network."""
        self.places.copy_(places)
        for name, each in plan.factors.items():
            self.factors[name].copy_(each)
        self.number.zero_()
        self.total.zero_()
        for _ in range(steps):
            self.graph.replay()
        return self.total


# Activations that a step on a CPU may hold: about 2 GB with those of the backward pass.
ROOM = 2**28


class BatchTrainer:
    """Train one batch of networks. The batch is changed in place, so that its holder knows the current state."""

    def __init__(self, recipes: Sequence[Recipe], examples: Examples, batch: NetworkBatch, way: str) -> None:
        self.all_recipes, self.examples, self.batch = recipes, examples, batch
        first = self.recipes[0]
        data = make_training_set(first, examples)
        self.inputs, self.measured = data.inputs, data.measured
        self.recorded: CudaGraphSteps | None = None
        self.labels = torch.stack([make_training_set(recipe, examples).labels for recipe in self.recipes])
        models = [self._build_network(recipe) for recipe in (self.recipes if batch.rows is None else [first])]
        if batch.rows is None:
            few = min(EXAMPLES, first.batch_size)
            check_vmappable(models[:2], self.inputs[:few], self.labels[:2, :few], way)
        self.model = VmappedModel(models[0], self.inputs[0], way)
        if batch.rows is None:
            batch.rows, batch.rest = self.model.pack_models(models)
            names = find_optimizer(first.optimizer).memory(self.recipes)
            batch.memory = {name: torch.zeros_like(batch.rows) for name in names}
            batch.curves = [[] for _ in batch.members]
            batch.seconds = [0.0 for _ in batch.members]

    @property
    def recipes(self) -> list[Recipe]:
        """The recipes of the networks in the batch."""
        return [self.all_recipes[number] for number in self.batch.members]

    def _build_network(self, recipe: Recipe) -> torch.nn.Module:
        return build_network(recipe, self.examples.shape, self.examples.classes)

    @property
    def max_networks(self) -> int:
        """The maximum number of networks in a step. A GPU reports a lack of memory; on a CPU the process is killed."""
        numbers = min(self.recipes[0].batch_size, len(self.inputs)) * self.model.numbers
        return max(1, ROOM // numbers) if self._rows.device.type == "cpu" else len(self.batch.members)

    def train_epoch(self) -> dict[int, TrainedNetwork]:
        """Train for one epoch; return the networks that are done and leave the batch, by the index of their recipe."""
        over = [place for place, recipe in enumerate(self.recipes) if recipe.epochs <= self.batch.epoch]
        if over:  # epochs=0
            return self._remove_networks(over, {})
        began = time.perf_counter()
        losses = self._run_steps()
        batch, rows = self.batch, self._rows
        batch.epoch += 1
        # The only synchronization with the device in an epoch.
        fine = (rows.isfinite().all(1) & losses.isfinite()).tolist()
        for curve, loss in zip(batch.curves, losses.tolist(), strict=True):
            curve.append(loss)
        scores, leaving = self._judge_networks(fine)
        seconds = (time.perf_counter() - began) / len(batch.members)
        batch.seconds = [each + seconds for each in batch.seconds]
        return self._remove_networks(leaving, scores)

    @property
    def _rows(self) -> Tensor:
        assert self.batch.rows is not None
        return self.batch.rows

    def _run_steps(self) -> Tensor:
        """Take all steps of an epoch; return the mean of the losses of its steps for each network."""
        batch, recipes, rows = self.batch, self.recipes, self._rows
        device, count, size = rows.device, len(self.inputs), recipes[0].batch_size
        steps = count_steps(count, size)
        before = batch.epoch * steps
        places = torch.stack([draw_order(recipe.seed, batch.epoch, count) for recipe in recipes]).to(device)
        drawn = [Augmentation.draw(recipe, batch.epoch, count) for recipe in recipes]
        changes = Augmentation.stack([each for each in drawn if each is not None], device) if drawn[0] else None
        masks = DropoutMasks.from_recipes(self.model.masks, recipes, batch.epoch, device)
        rates = torch.tensor(
            [
                [compute_learning_rate(recipe, batch.epoch, before + step) for recipe in recipes]
                for step in range(steps)
            ],
            dtype=torch.float64,
        )
        plan = StepFactors.from_recipes(recipes, rates, before, rows)
        total = torch.zeros(len(rows), dtype=torch.float64, device=device)
        rows.requires_grad_()
        played = 0
        if device.type == "cuda" and changes is None and masks is None and count // size >= WORTH_IT:
            played = count // size
            if self.recorded is None:
                tensors = [rows, *batch.rest.values(), *batch.memory.values()]
                self.recorded = CudaGraphSteps(self._run_step, places, plan, size, tensors)
            total += self.recorded.replay_steps(places, plan, played)
        for step in range(played, steps):
            begin, end = step * size, min((step + 1) * size, count)
            total += self._run_step(
                places[:, begin:end],
                plan.select_step(step),
                None if changes is None else changes.select_range(begin, end),
                None if masks is None else masks.draw(end - begin),
            )
        rows.requires_grad_(False)
        return total / steps

    def _run_step(
        self,
        places: Tensor,
        factors: Mapping[str, Tensor],
        changes: Augmentation | None = None,
        masks: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Take one step on the examples at these places, ``(networks, batch_size)``; return the losses before it."""
        rows, batch = self._rows, self.batch
        inputs = self.inputs.index_select(0, places.flatten()).unflatten(0, places.shape)
        if changes is not None:
            inputs = augment_images(inputs, changes)
        logits = self.model.compute_logits(rows, batch.rest, inputs, training=True, masks=masks)
        losses = compute_losses(logits, self.labels.gather(1, places)).mean(1)
        # No network's loss depends on another's weights: the gradient of the sum holds each one's own.
        (gradient,) = torch.autograd.grad(losses.sum(), rows)
        with torch.no_grad():
            step_together(find_optimizer(self.recipes[0].optimizer), rows, gradient, batch.memory, factors)
        return losses.detach()

    def _judge_networks(self, fine: list[bool]) -> tuple[dict[int, tuple[float, float]], list[int]]:
        """Return the losses and errors of the networks that are checked, and the places of those that are done."""
        recipes, epoch = self.recipes, self.batch.epoch
        asked = [
            place
            for place, recipe in enumerate(recipes)
            if fine[place] and (is_check_due(recipe, epoch) or epoch >= recipe.epochs)
        ]
        scores = self._evaluate_networks(asked, training=True)
        leaving = [
            place
            for place, recipe in enumerate(recipes)
            if not fine[place]
            or epoch >= recipe.epochs
            or (place in scores and (has_met_targets(recipe, *scores[place]) or not math.isfinite(scores[place][0])))
        ]
        return scores, leaving

    def _evaluate_networks(self, places: list[int], training: bool) -> dict[int, tuple[float, float]]:
        if not places:
            return {}
        rows, rest, labels = self._rows, self.batch.rest, self.labels[:, : self.measured]
        if len(places) < len(rows):
            part = self.batch.select_networks(places)
            assert part.rows is not None
            rows, rest, labels = part.rows, part.rest, labels[places]
        if training:
            found = self.model.evaluate(rows, rest, self.inputs[: self.measured], labels)
        else:
            found = self.model.evaluate(rows, rest, self.examples.test_inputs, self.examples.test_labels)
        return dict(zip(places, found, strict=True))

    def _remove_networks(self, places: list[int], train: dict[int, tuple[float, float]]) -> dict[int, TrainedNetwork]:
        """Remove the networks at these places from the batch, and return their results."""
        if not places:
            return {}
        began, batch = time.perf_counter(), self.batch
        missing = [place for place in places if place not in train and all(map(math.isfinite, batch.curves[place]))]
        fine = [place for place in places if place in train or place in missing]
        train = train | self._evaluate_networks(missing, training=True)
        test = self._evaluate_networks(fine, training=False)
        ready = {
            place: self._make_result(place, train.get(place, NOTHING), test.get(place, NOTHING)) for place in places
        }
        share = (time.perf_counter() - began) / len(places)
        found = {
            batch.members[place]: TrainedNetwork(weights, outcome, batch.seconds[place] + share)
            for place, (weights, outcome) in ready.items()
        }
        staying = [place for place in range(len(batch.members)) if place not in ready]
        self.labels = self.labels[staying]
        self.recorded = None  # it holds tensors of the batch before
        kept = batch.select_networks(staying)
        batch.members, batch.rows, batch.rest, batch.memory = kept.members, kept.rows, kept.rest, kept.memory
        batch.curves, batch.seconds = kept.curves, kept.seconds
        return found

    def _make_result(
        self, place: int, train: tuple[float, float], test: tuple[float, float]
    ) -> tuple[dict[str, Tensor], Outcome]:
        batch, recipe = self.batch, self.recipes[place]
        row, rest = self._rows[place], {name: each[place] for name, each in batch.rest.items()}
        # Built again rather than kept: the initial weights depend on the recipe alone.
        initial = {name: each.detach() for name, each in self._build_network(recipe).named_parameters()}
        parameters = {name: each.cpu() for name, each in self.model.unpack_parameters(row, rest).items()}
        counts = (self.measured, len(self.examples.test_labels))
        outcome = make_outcome(
            recipe, parameters, initial, train, test, counts, batch.epoch, batch.curves[place], batch.notes
        )
        return self.model.make_state_dict(row, rest), outcome
