"""One epoch of a batch of networks; those that are done leave it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
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
from saltflat.studies.training.cuda_graph import WORTH_IT, CudaGraphSteps
from saltflat.studies.training.dropout import DropoutMasks
from saltflat.studies.training.examples import Augmentation, augment_images, count_steps, draw_order, make_training_set
from saltflat.studies.training.outcome import NOTHING, has_met_targets, is_check_due, make_outcome
from saltflat.studies.training.vmap_check import EXAMPLES, check_stackable
from saltflat.studies.training.vmapped_model import StackedModel, compute_losses


@dataclass
class StackState:
    """Networks that are trained at once; it changes as they are.

    Attributes:
        members: which of the recipes they are.
        epoch: how many are done.
        rows: ``(networks, weights)``; None before the first epoch.
        rest: other tensors of the networks, stacked.
        memory: of the optimizer, stacked.
        curves: mean loss of each epoch, of each network.
        seconds: spent so far, of each network.
        notes: for the reader of the outcome.
    """

    members: list[int]
    epoch: int = 0
    rows: Tensor | None = None
    rest: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)
    curves: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def select_networks(self, places: Sequence[int]) -> StackState:
        """Only the networks at these places; tensors of its own."""
        where = torch.tensor(places, dtype=torch.int64, device=None if self.rows is None else self.rows.device)
        return StackState(
            [self.members[place] for place in places],
            self.epoch,
            None if self.rows is None else self.rows.detach().index_select(0, where),
            {name: each.index_select(0, where) for name, each in self.rest.items()},
            {name: each.index_select(0, where) for name, each in self.memory.items()},
            [list(self.curves[place]) for place in places] if self.curves else [],
            [self.seconds[place] for place in places] if self.seconds else [],
            self.notes,
        )

    def copy_to(self, device: torch.device | str) -> StackState:
        """The same on a device; tensors of its own."""

        def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: each.detach().to(device, copy=True) for name, each in tensors.items()}

        return StackState(
            list(self.members),
            self.epoch,
            None if self.rows is None else self.rows.detach().to(device, copy=True),
            copy_tensors(self.rest),
            copy_tensors(self.memory),
            [list(each) for each in self.curves],
            list(self.seconds),
            self.notes,
        )

    def split_in_half(self, note: str | None = None) -> list[StackState]:
        """The first and the second half of the networks, with this note for both."""
        middle = len(self.members) // 2
        parts = [self.select_networks(range(middle)), self.select_networks(range(middle, len(self.members)))]
        for each in parts:
            each.notes = (*self.notes, *([] if note is None else [note]))
        return parts

    def collect_tensors(self) -> dict[str, Tensor]:
        if self.rows is None:
            return {}
        return {
            "rows": self.rows.detach(),
            **add_prefix("rest", self.rest),
            **add_prefix("memory", self.memory),
        }

    def collect_facts(self) -> dict[str, Any]:
        return {
            "members": self.members,
            "epoch": self.epoch,
            "curves": self.curves,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    @classmethod
    def from_checkpoint(cls, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StackState:
        return cls(
            **{**facts, "notes": tuple(facts["notes"])},
            rows=tensors.get("rows"),
            rest=select_prefix(tensors, "rest"),
            memory=select_prefix(tensors, "memory"),
        )


# Numbers of layers that a step on a CPU may hold: about 2 GB with those of the pass back.
ROOM = 2**28


class StackTrainer:
    """The training of one stack. The stack is changed in place, so that whoever holds it knows where it stands."""

    def __init__(self, recipes: Sequence[Recipe], examples: Examples, stack: StackState, way: str) -> None:
        self.all_recipes, self.examples, self.stack = recipes, examples, stack
        first = self.recipes[0]
        data = make_training_set(first, examples)
        self.inputs, self.measured = data.inputs, data.measured
        self.recorded: CudaGraphSteps | None = None
        self.labels = torch.stack([make_training_set(recipe, examples).labels for recipe in self.recipes])
        models = [self._build_network(recipe) for recipe in (self.recipes if stack.rows is None else [first])]
        if stack.rows is None:
            few = min(EXAMPLES, first.batch_size)
            check_stackable(models[:2], self.inputs[:few], self.labels[:2, :few], way)
        self.stacked = StackedModel(models[0], self.inputs[0], way)
        if stack.rows is None:
            stack.rows, stack.rest = self.stacked.pack_models(models)
            names = find_optimizer(first.optimizer).memory(self.recipes)
            stack.memory = {name: torch.zeros_like(stack.rows) for name in names}
            stack.curves = [[] for _ in stack.members]
            stack.seconds = [0.0 for _ in stack.members]

    @property
    def recipes(self) -> list[Recipe]:
        return [self.all_recipes[number] for number in self.stack.members]

    def _build_network(self, recipe: Recipe) -> torch.nn.Module:
        return build_network(recipe, self.examples.shape, self.examples.classes)

    @property
    def max_networks(self) -> int:
        """Networks that a step may have at once. A GPU says itself when that is too many; a CPU ends the process."""
        numbers = min(self.recipes[0].batch_size, len(self.inputs)) * self.stacked.numbers
        return max(1, ROOM // numbers) if self._rows.device.type == "cpu" else len(self.stack.members)

    def train_epoch(self) -> dict[int, TrainedNetwork]:
        """Train for one epoch; those who are done then, by the number of their recipe. They leave the stack."""
        over = [place for place, recipe in enumerate(self.recipes) if recipe.epochs <= self.stack.epoch]
        if over:  # asked for no epochs at all
            return self._remove_networks(over, {})
        began = time.perf_counter()
        losses = self._run_steps()
        stack, rows = self.stack, self._rows
        stack.epoch += 1
        # The only time in an epoch that the device is waited for.
        fine = (rows.isfinite().all(1) & losses.isfinite()).tolist()
        for curve, loss in zip(stack.curves, losses.tolist(), strict=True):
            curve.append(loss)
        scores, leaving = self._judge_networks(fine)
        seconds = (time.perf_counter() - began) / len(stack.members)
        stack.seconds = [each + seconds for each in stack.seconds]
        return self._remove_networks(leaving, scores)

    @property
    def _rows(self) -> Tensor:
        assert self.stack.rows is not None
        return self.stack.rows

    def _run_steps(self) -> Tensor:
        """Every example once; the mean of the losses of the steps, of each network."""
        stack, recipes, rows = self.stack, self.recipes, self._rows
        device, count, batch = rows.device, len(self.inputs), recipes[0].batch_size
        steps = count_steps(count, batch)
        before = stack.epoch * steps
        places = torch.stack([draw_order(recipe.seed, stack.epoch, count) for recipe in recipes]).to(device)
        drawn = [Augmentation.draw(recipe, stack.epoch, count) for recipe in recipes]
        changes = Augmentation.stack([each for each in drawn if each is not None], device) if drawn[0] else None
        masks = DropoutMasks.from_recipes(self.stacked.masks, recipes, stack.epoch, device)
        rates = torch.tensor(
            [
                [compute_learning_rate(recipe, stack.epoch, before + step) for recipe in recipes]
                for step in range(steps)
            ],
            dtype=torch.float64,
        )
        plan = StepFactors.from_recipes(recipes, rates, before, rows)
        total = torch.zeros(len(rows), dtype=torch.float64, device=device)
        rows.requires_grad_()
        played = 0
        if device.type == "cuda" and changes is None and masks is None and count // batch >= WORTH_IT:
            played = count // batch
            if self.recorded is None:
                tensors = [rows, *stack.rest.values(), *stack.memory.values()]
                self.recorded = CudaGraphSteps(self._run_step, places, plan, batch, tensors)
            total += self.recorded.replay_steps(places, plan, played)
        for step in range(played, steps):
            begin, end = step * batch, min((step + 1) * batch, count)
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
        """One step with the examples at these places, ``(networks, batch)``; the mean losses before it."""
        rows, stack = self._rows, self.stack
        inputs = self.inputs.index_select(0, places.flatten()).unflatten(0, places.shape)
        if changes is not None:
            inputs = augment_images(inputs, changes)
        logits = self.stacked.compute_logits(rows, stack.rest, inputs, training=True, masks=masks)
        losses = compute_losses(logits, self.labels.gather(1, places)).mean(1)
        # No network's loss depends on another's weights: the gradient of the sum holds each one's own.
        (gradient,) = torch.autograd.grad(losses.sum(), rows)
        with torch.no_grad():
            step_together(find_optimizer(self.recipes[0].optimizer), rows, gradient, stack.memory, factors)
        return losses.detach()

    def _judge_networks(self, fine: list[bool]) -> tuple[dict[int, tuple[float, float]], list[int]]:
        """Training losses and errors of those who are looked at, and who is done."""
        recipes, epoch = self.recipes, self.stack.epoch
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
        rows, rest, labels = self._rows, self.stack.rest, self.labels[:, : self.measured]
        if len(places) < len(rows):
            part = self.stack.select_networks(places)
            assert part.rows is not None
            rows, rest, labels = part.rows, part.rest, labels[places]
        if training:
            found = self.stacked.evaluate(rows, rest, self.inputs[: self.measured], labels)
        else:
            found = self.stacked.evaluate(rows, rest, self.examples.test_inputs, self.examples.test_labels)
        return dict(zip(places, found, strict=True))

    def _remove_networks(self, places: list[int], train: dict[int, tuple[float, float]]) -> dict[int, TrainedNetwork]:
        """What has become of those at these places, who are taken out of the stack."""
        if not places:
            return {}
        began, stack = time.perf_counter(), self.stack
        missing = [place for place in places if place not in train and all(map(math.isfinite, stack.curves[place]))]
        fine = [place for place in places if place in train or place in missing]
        train = train | self._evaluate_networks(missing, training=True)
        test = self._evaluate_networks(fine, training=False)
        ready = {
            place: self._make_result(place, train.get(place, NOTHING), test.get(place, NOTHING)) for place in places
        }
        share = (time.perf_counter() - began) / len(places)
        found = {
            stack.members[place]: TrainedNetwork(weights, outcome, stack.seconds[place] + share)
            for place, (weights, outcome) in ready.items()
        }
        staying = [place for place in range(len(stack.members)) if place not in ready]
        self.labels = self.labels[staying]
        self.recorded = None  # it holds the tensors of a stack that is no more
        kept = stack.select_networks(staying)
        stack.members, stack.rows, stack.rest, stack.memory = kept.members, kept.rows, kept.rest, kept.memory
        stack.curves, stack.seconds = kept.curves, kept.seconds
        return found

    def _make_result(
        self, place: int, train: tuple[float, float], test: tuple[float, float]
    ) -> tuple[dict[str, Tensor], Outcome]:
        stack, recipe = self.stack, self.recipes[place]
        row, rest = self._rows[place], {name: each[place] for name, each in stack.rest.items()}
        # Built once more rather than kept: what it was before training depends on the recipe alone.
        initial = {name: each.detach() for name, each in self._build_network(recipe).named_parameters()}
        parameters = {name: each.cpu() for name, each in self.stacked.unpack_parameters(row, rest).items()}
        counts = (self.measured, len(self.examples.test_labels))
        outcome = make_outcome(
            recipe, parameters, initial, train, test, counts, stack.epoch, stack.curves[place], stack.notes
        )
        return self.stacked.make_state_dict(row, rest), outcome
