"""A stack of networks trained for an epoch; who is done leaves it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from saltflat.studies.augmentation import Changes, changed
from saltflat.studies.building import built
from saltflat.studies.dropout import Masks
from saltflat.studies.examples import Examples
from saltflat.studies.labels import training_set
from saltflat.studies.optimizers import Plan, optimizer_named, step_together
from saltflat.studies.order import order, steps_of
from saltflat.studies.outcome import NOTHING, ended
from saltflat.studies.recipe import Recipe
from saltflat.studies.recorded import WORTH_IT, Recorded
from saltflat.studies.schedules import rate
from saltflat.studies.stack import Stack
from saltflat.studies.stackable import EXAMPLES, check_stackable
from saltflat.studies.stacked import Stacked, losses_of
from saltflat.studies.stopping import due, met
from saltflat.studies.trained import Outcome, Trained

# Numbers of layers that a step on a CPU may hold: about 2 GB with those of the pass back.
ROOM = 2**28


class StackTraining:
    """The training of one stack. The stack is changed in place, so that whoever holds it knows where it stands."""

    def __init__(self, recipes: Sequence[Recipe], examples: Examples, stack: Stack, way: str) -> None:
        self.all_recipes, self.examples, self.stack = recipes, examples, stack
        first = self.recipes[0]
        data = training_set(first, examples)
        self.inputs, self.measured = data.inputs, data.measured
        self.recorded: Recorded | None = None
        self.labels = torch.stack([training_set(recipe, examples).labels for recipe in self.recipes])
        models = [self._built(recipe) for recipe in (self.recipes if stack.rows is None else [first])]
        if stack.rows is None:
            few = min(EXAMPLES, first.batch)
            check_stackable(models[:2], self.inputs[:few], self.labels[:2, :few], way)
        self.stacked = Stacked(models[0], self.inputs[0], way)
        if stack.rows is None:
            stack.rows, stack.rest = self.stacked.packed(models)
            names = optimizer_named(first.optimizer).memory(self.recipes)
            stack.memory = {name: torch.zeros_like(stack.rows) for name in names}
            stack.curves = [[] for _ in stack.members]
            stack.seconds = [0.0 for _ in stack.members]

    @property
    def recipes(self) -> list[Recipe]:
        return [self.all_recipes[number] for number in self.stack.members]

    def _built(self, recipe: Recipe) -> torch.nn.Module:
        return built(recipe, self.examples.shape, self.examples.classes)

    @property
    def most(self) -> int:
        """Networks that a step may have at once. A GPU says itself when that is too many; a CPU ends the process."""
        numbers = min(self.recipes[0].batch, len(self.inputs)) * self.stacked.numbers
        return max(1, ROOM // numbers) if self._rows.device.type == "cpu" else len(self.stack.members)

    def epoch(self) -> dict[int, Trained]:
        """Train for one epoch; those who are done then, by the number of their recipe. They leave the stack."""
        over = [place for place, recipe in enumerate(self.recipes) if recipe.epochs <= self.stack.epoch]
        if over:  # asked for no epochs at all
            return self._leaving(over, {})
        began = time.perf_counter()
        losses = self._steps()
        stack, rows = self.stack, self._rows
        stack.epoch += 1
        # The only time in an epoch that the device is waited for.
        fine = (rows.isfinite().all(1) & losses.isfinite()).tolist()
        for curve, loss in zip(stack.curves, losses.tolist(), strict=True):
            curve.append(loss)
        scores, leaving = self._judged(fine)
        seconds = (time.perf_counter() - began) / len(stack.members)
        stack.seconds = [each + seconds for each in stack.seconds]
        return self._leaving(leaving, scores)

    @property
    def _rows(self) -> Tensor:
        assert self.stack.rows is not None
        return self.stack.rows

    def _steps(self) -> Tensor:
        """Every example once; the mean of the losses of the steps, of each network."""
        stack, recipes, rows = self.stack, self.recipes, self._rows
        device, count, batch = rows.device, len(self.inputs), recipes[0].batch
        steps = steps_of(count, batch)
        before = stack.epoch * steps
        places = torch.stack([order(recipe.seed, stack.epoch, count) for recipe in recipes]).to(device)
        drawn = [Changes.of(recipe, stack.epoch, count) for recipe in recipes]
        changes = Changes.stacked([each for each in drawn if each is not None], device) if drawn[0] else None
        masks = Masks.of(self.stacked.masks, recipes, stack.epoch, device)
        rates = torch.tensor(
            [[rate(recipe, stack.epoch, before + step) for recipe in recipes] for step in range(steps)],
            dtype=torch.float64,
        )
        plan = Plan.of(recipes, rates, before, rows)
        total = torch.zeros(len(rows), dtype=torch.float64, device=device)
        rows.requires_grad_()
        played = 0
        if device.type == "cuda" and changes is None and masks is None and count // batch >= WORTH_IT:
            played = count // batch
            if self.recorded is None:
                tensors = [rows, *stack.rest.values(), *stack.memory.values()]
                self.recorded = Recorded(self._step, places, plan, batch, tensors)
            total += self.recorded.play(places, plan, played)
        for step in range(played, steps):
            begin, end = step * batch, min((step + 1) * batch, count)
            total += self._step(
                places[:, begin:end],
                plan.of_step(step),
                None if changes is None else changes.part(begin, end),
                None if masks is None else masks.draw(end - begin),
            )
        rows.requires_grad_(False)
        return total / steps

    def _step(
        self,
        places: Tensor,
        factors: Mapping[str, Tensor],
        changes: Changes | None = None,
        masks: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """One step with the examples at these places, ``(networks, batch)``; the mean losses before it."""
        rows, stack = self._rows, self.stack
        inputs = self.inputs.index_select(0, places.flatten()).unflatten(0, places.shape)
        if changes is not None:
            inputs = changed(inputs, changes)
        logits = self.stacked.logits(rows, stack.rest, inputs, training=True, masks=masks)
        losses = losses_of(logits, self.labels.gather(1, places)).mean(1)
        # No network's loss depends on another's weights: the gradient of the sum holds each one's own.
        (gradient,) = torch.autograd.grad(losses.sum(), rows)
        with torch.no_grad():
            step_together(optimizer_named(self.recipes[0].optimizer), rows, gradient, stack.memory, factors)
        return losses.detach()

    def _judged(self, fine: list[bool]) -> tuple[dict[int, tuple[float, float]], list[int]]:
        """Training losses and errors of those who are looked at, and who is done."""
        recipes, epoch = self.recipes, self.stack.epoch
        asked = [
            place
            for place, recipe in enumerate(recipes)
            if fine[place] and (due(recipe, epoch) or epoch >= recipe.epochs)
        ]
        scores = self._scores(asked, training=True)
        leaving = [
            place
            for place, recipe in enumerate(recipes)
            if not fine[place]
            or epoch >= recipe.epochs
            or (place in scores and (met(recipe, *scores[place]) or not math.isfinite(scores[place][0])))
        ]
        return scores, leaving

    def _scores(self, places: list[int], training: bool) -> dict[int, tuple[float, float]]:
        if not places:
            return {}
        rows, rest, labels = self._rows, self.stack.rest, self.labels[:, : self.measured]
        if len(places) < len(rows):
            part = self.stack.part(places)
            assert part.rows is not None
            rows, rest, labels = part.rows, part.rest, labels[places]
        if training:
            found = self.stacked.evaluated(rows, rest, self.inputs[: self.measured], labels)
        else:
            found = self.stacked.evaluated(rows, rest, self.examples.test_inputs, self.examples.test_labels)
        return dict(zip(places, found, strict=True))

    def _leaving(self, places: list[int], train: dict[int, tuple[float, float]]) -> dict[int, Trained]:
        """What has become of those at these places, who are taken out of the stack."""
        if not places:
            return {}
        began, stack = time.perf_counter(), self.stack
        missing = [place for place in places if place not in train and all(map(math.isfinite, stack.curves[place]))]
        fine = [place for place in places if place in train or place in missing]
        train = train | self._scores(missing, training=True)
        test = self._scores(fine, training=False)
        ready = {place: self._result(place, train.get(place, NOTHING), test.get(place, NOTHING)) for place in places}
        share = (time.perf_counter() - began) / len(places)
        found = {
            stack.members[place]: Trained(weights, outcome, stack.seconds[place] + share)
            for place, (weights, outcome) in ready.items()
        }
        staying = [place for place in range(len(stack.members)) if place not in ready]
        self.labels = self.labels[staying]
        self.recorded = None  # it holds the tensors of a stack that is no more
        kept = stack.part(staying)
        stack.members, stack.rows, stack.rest, stack.memory = kept.members, kept.rows, kept.rest, kept.memory
        stack.curves, stack.seconds = kept.curves, kept.seconds
        return found

    def _result(
        self, place: int, train: tuple[float, float], test: tuple[float, float]
    ) -> tuple[dict[str, Tensor], Outcome]:
        stack, recipe = self.stack, self.recipes[place]
        row, rest = self._rows[place], {name: each[place] for name, each in stack.rest.items()}
        # Built once more rather than kept: what it was before training depends on the recipe alone.
        initial = {name: each.detach() for name, each in self._built(recipe).named_parameters()}
        parameters = {name: each.cpu() for name, each in self.stacked.parameters(row, rest).items()}
        counts = (self.measured, len(self.examples.test_labels))
        outcome = ended(recipe, parameters, initial, train, test, counts, stack.epoch, stack.curves[place], stack.notes)
        return self.stacked.state(row, rest), outcome
