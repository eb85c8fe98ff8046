"""Train a batch of networks for one epoch; networks that are done leave the batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from saltflat.studies.data import Examples
from saltflat.studies.gradient_rules import find_gradient_rule
from saltflat.studies.networks import is_user_function
from saltflat.studies.optimizers import StepFactors, find_optimizer, gather_setting, step_together
from saltflat.studies.recipe import Recipe
from saltflat.studies.row import Outcome, TrainedNetwork
from saltflat.studies.schedules import compute_epoch_rates
from saltflat.studies.store.checkpoint import select_prefix
from saltflat.studies.training.build import build_network
from saltflat.studies.training.cuda_graph import (
    WORTH_COMPILING,
    WORTH_IT,
    CompiledStep,
    CudaGraphSteps,
    EpochInputs,
    StepInputs,
)
from saltflat.studies.training.draws import make_keys
from saltflat.studies.training.dropout import DropoutMasks
from saltflat.studies.training.examples import Augmentation, count_steps, draw_order, make_training_set
from saltflat.studies.training.network_batch import NetworkBatch
from saltflat.studies.training.outcome import NOTHING, has_met_targets, is_check_due, make_outcome
from saltflat.studies.training.separate_models import AT_ONCE, WAY, SeparateModels, make_batched_model, should_separate
from saltflat.studies.training.vmap_check import EXAMPLES, NotVmappableError, check_vmappable
from saltflat.studies.training.vmapped_model import StepPasses

# Activations that a step on a CPU may hold: about 2 GB with those of the backward pass.
ROOM = 2**28
PART_COPIES = 4  # of the weights, for each part of a batch: at two points, and their gradients


class BatchTrainer:
    """Train one batch of networks. The batch is changed in place, so that its holder knows the current state."""

    def __init__(self, recipes: Sequence[Recipe], examples: Examples, batch: NetworkBatch, way: str) -> None:
        self.all_recipes, self.examples, self.batch = recipes, examples, batch
        first = self.recipes[0]
        sets = [make_training_set(recipe, examples) for recipe in self.recipes]
        self.measured, self.labels = sets[0].measured, torch.stack([each.labels for each in sets])
        chosen = [each.chosen for each in sets if each.chosen is not None]
        self.chosen = torch.stack(chosen) if chosen else None
        self.rule, self.bfloat16 = find_gradient_rule(first), first.dtype == "bf16"
        self.recorded: CudaGraphSteps | None = None
        self.unrecordable = False
        self.next_order: Tensor | None = None
        models = [self._build_network(recipe) for recipe in (self.recipes if batch.rows is None else [first])]
        inputs = examples.train_inputs
        if way == "auto" and should_separate(models[0], inputs[0], self.bfloat16):
            way = WAY
        # Also when a training is resumed, so that it goes on in the same way.
        self.model = make_batched_model(models[0], inputs[0], self._choose_way(models[:2], way))
        if batch.rows is None:
            batch.rows, batch.rest = self.model.pack_models(models)
            names = find_optimizer(first.optimizer).memory(self.recipes)
            batch.memory = {name: torch.zeros_like(batch.rows) for name in names}
            batch.curves = [[] for _ in batch.members]
            batch.seconds = [0.0 for _ in batch.members]
        batch.rows = self.model.align_rows(batch.rows)
        batch.memory = {name: self.model.align_rows(each) for name, each in batch.memory.items()}
        self.dropout = self._make_dropout()
        self.augmentation = Augmentation.from_recipe(first)
        # Autocast casts the inputs of the first layers of our networks as well. A user's network may do something else
        # with them, and parts of a batch run in float32.
        cast_alike = not is_user_function(first.network) and (self.rule is None or not self.rule.splits)
        coarse = self.bfloat16 and inputs.is_floating_point() and cast_alike
        inputs = inputs.to(torch.bfloat16) if coarse else inputs
        self.inputs, self.like = inputs if self.augmentation is None else self.augmentation.pad(inputs), inputs[0]

    @property
    def recipes(self) -> list[Recipe]:
        """The recipes of the networks in the batch."""
        return [self.all_recipes[number] for number in self.batch.members]

    def _build_network(self, recipe: Recipe) -> torch.nn.Module:
        return build_network(recipe, self.examples.shape, self.examples.classes)

    def _choose_way(self, models: Sequence[torch.nn.Module], way: str) -> str:
        """Return a way in which the networks give the results they give alone."""
        inputs, first = self.examples.train_inputs, self.recipes[0]
        few = min(EXAMPLES, first.batch_size, len(inputs))
        splits = self.rule is not None and self.rule.splits

        def check(chosen: str) -> None:
            labels = self.labels[: len(models), :few]
            check_vmappable(models, inputs[:few], labels, chosen, bfloat16=self.bfloat16, splits=splits)

        try:
            check(way)
        except NotVmappableError:
            if not self.bfloat16 or way == WAY:
                raise
            check(WAY)  # vmap has no autocast for some layers
            return WAY
        return way

    def _make_dropout(self) -> DropoutMasks | None:
        return DropoutMasks.from_recipes(self.model.masks, self.recipes, self._rows.dtype, self._rows.device)

    @property
    def max_networks(self) -> int:
        """The maximum number of networks in a step. A GPU reports a lack of memory; on a CPU the process is killed."""
        if self._rows.device.type == "cpu":
            first = self.recipes[0]
            numbers = min(first.batch_size, self.labels.shape[1]) * self.model.numbers
            if self.rule is not None and self.rule.splits:
                numbers += PART_COPIES * first.fisher_parts * self._rows.shape[1]
            return max(1, ROOM // numbers)
        return AT_ONCE if isinstance(self.model, SeparateModels) else len(self.batch.members)

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
        count, size = self.labels.shape[1], self.recipes[0].batch_size
        steps, inputs = count_steps(count, size), self._make_epoch_inputs()
        total = torch.zeros(len(self._rows), dtype=torch.float64, device=self._rows.device)
        played = 0
        if self._is_worth_recording(count // size):
            if self.recorded is None or self.recorded.names != inputs.names:
                self._record_steps(inputs)
            if self.recorded is not None:
                played = count // size
                total += self.recorded.replay_steps(inputs, played)
        for step in range(played, steps):
            total += self._run_step(inputs.select_step(step, size))
        if self._rows.is_cuda:  # while the GPU is at work
            self.next_order = self._draw_orders(self.batch.epoch + 1)
        return total / steps

    def _is_worth_recording(self, full_steps: int) -> bool:
        ahead = max(recipe.epochs for recipe in self.recipes) - self.batch.epoch
        return self._rows.is_cuda and not self.unrecordable and full_steps * ahead >= WORTH_IT

    def _is_worth_compiling(self) -> bool:
        """Return whether many steps of the same networks are ahead.

        Networks with a target leave the batch one by one, and those that stay would be compiled anew. Large networks
        already run by fused kernels, and parts of a batch in a precision that compiled operations do not keep.
        """
        recipes = self.recipes
        full_steps = self.labels.shape[1] // recipes[0].batch_size
        return (
            full_steps * (min(recipe.epochs for recipe in recipes) - self.batch.epoch) >= WORTH_COMPILING
            and all(recipe.target_loss is None and recipe.target_error is None for recipe in recipes)
            and not isinstance(self.model, SeparateModels)
            and not (self.rule is not None and self.rule.splits)
        )

    def _record_steps(self, inputs: EpochInputs) -> None:
        batch = self.batch
        self.recorded = None  # frees its memory first
        first, changed = self.recipes[0], batch.collect_tensors()
        take: Callable[[StepInputs], Tensor] = self._run_step
        if self._is_worth_compiling():
            fused = None if self.dropout is None else self.dropout.prepare_compiling()
            take = CompiledStep(self._take_step, partial(self._take_step, dropout=fused), changed, first.dtype)
        try:
            self.recorded = CudaGraphSteps(take, inputs, first.batch_size, list(changed.values()))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # the network synchronizes with the GPU, which no graph can hold
            self.unrecordable = True
            batch.notes = (*batch.notes, "trained step by step, since a CUDA graph could not capture the network")

    def _make_epoch_inputs(self) -> EpochInputs:
        batch, recipes, rows = self.batch, self.recipes, self._rows
        count, size = self.labels.shape[1], recipes[0].batch_size
        steps = count_steps(count, size)
        places = self._draw_orders(batch.epoch) if self.next_order is None else self.next_order
        self.next_order = None
        curves = zip(recipes, batch.curves, strict=True)
        rates = torch.stack([compute_epoch_rates(recipe, batch.epoch, steps, curve) for recipe, curve in curves], dim=1)
        plan = StepFactors.from_recipes(recipes, rates, batch.epoch * steps, rows)
        constants = {} if self.rule is None else dict(self.rule.plan(recipes, batch.epoch))
        if any(recipe.label_smoothing for recipe in recipes):
            constants["smoothing"] = gather_setting(recipes, "label_smoothing")
        constants = {name: each.to(rows.device, rows.dtype)[:, None] for name, each in constants.items()}
        for purpose in ("augment", "dropout"):
            constants[purpose] = make_keys(recipes, purpose, batch.epoch).to(rows.device)
        return EpochInputs(places.to(rows.device), plan.factors, constants)

    def _draw_orders(self, epoch: int) -> Tensor:
        count = self.labels.shape[1]
        return torch.stack([draw_order(recipe.seed, epoch, count) for recipe in self.recipes])

    def _run_step(self, step: StepInputs) -> Tensor:
        """Take one step; return the losses before it."""
        return self._take_step(self.batch.collect_tensors(), step)

    def _take_step(
        self, tensors: Mapping[str, Tensor], step: StepInputs, dropout: DropoutMasks | None = None
    ) -> Tensor:
        """Take one step of the networks with these tensors, by their names in a checkpoint."""
        rows, places, dropout = tensors["rows"], step.places, dropout or self.dropout
        masks = {} if dropout is None else dropout.draw(step.constants["dropout"], places)
        passes = StepPasses(
            self.model,
            select_prefix(tensors, "rest"),
            self._read_inputs(step),
            self.labels.gather(1, places),
            masks,
            step.constants.get("smoothing"),
            self.bfloat16,
        )
        if self.rule is None:
            losses, gradient = passes.compute_gradient(rows)
        else:
            losses, gradient = self.rule.together(passes, rows, step.constants, self.recipes[0])
        with torch.no_grad():
            memory = select_prefix(tensors, "memory")
            step_together(find_optimizer(self.recipes[0].optimizer), rows, gradient, memory, step.factors)
        return losses

    def _read_inputs(self, step: StepInputs) -> Tensor:
        which = step.places if self.chosen is None else self.chosen.gather(1, step.places)
        if self.augmentation is not None:
            drawn = self.augmentation.draw(step.constants["augment"], step.places)
            return self.augmentation.read(self.inputs, self.like, which, *drawn)
        return self.inputs.index_select(0, which.flatten()).view(*which.shape, *self.inputs.shape[1:])

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
        rows, rest = self._rows, self.batch.rest
        if len(places) < len(rows):
            part = self.batch.select_networks(places)
            assert part.rows is not None
            rows, rest = part.rows, part.rest
        if training:
            labels = self.labels[places, : self.measured]
            chosen = None if self.chosen is None else self.chosen[places, : self.measured]
            found = self.model.evaluate(rows, rest, self.examples.train_inputs, labels, chosen)
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
        self.chosen = None if self.chosen is None else self.chosen[staying]
        self.recorded, self.next_order = None, None  # they belong to the batch before
        kept = batch.select_networks(staying)
        batch.members, batch.rows, batch.rest, batch.memory = kept.members, kept.rows, kept.rest, kept.memory
        batch.curves, batch.seconds = kept.curves, kept.seconds
        self.dropout = self._make_dropout()
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
