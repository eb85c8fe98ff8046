"""Train many networks at once: the same numbers as one at a time, in a fraction of the time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from saltflat.studies.data import Examples
from saltflat.studies.gradient_rules import find_gradient_rule
from saltflat.studies.recipe import Recipe
from saltflat.studies.row import TrainedNetwork
from saltflat.studies.schema import DTYPES, check_recipe
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
from saltflat.studies.training.batched_epoch import BatchTrainer
from saltflat.studies.training.build import use_matmul_precision
from saltflat.studies.training.network_batch import NetworkBatch
from saltflat.studies.training.train_one import train_alone
from saltflat.studies.training.vmap_check import NotVmappableError

# Settings that must be the same for all networks of a batch.
SHARED = (
    "network", "optimizer", "nesterov", "batch_size", "train_size", "train_subset", "confusion", "augment", "crop",
    "dtype",
)  # fmt: skip


def compute_group_key(recipe: Recipe, shape: tuple[int, ...], classes: int) -> Hashable:
    """Return a key that is equal for recipes whose networks can be trained together.

    These have the same architecture and take the same steps. Seeds, learning rates, momentum, weight decay, dropout,
    label noise and smoothing, radii of SAM, initializations, schedules, epochs and targets may differ.

    Example:
        >>> recipes = [Recipe(lr=lr, batch_size=size) for lr in (0.1, 0.2) for size in (32, 64)]
        >>> len({compute_group_key(recipe, (64,), 10) for recipe in recipes})
        2
    """
    architecture = json.dumps(dict(recipe.architecture), sort_keys=True, default=list)
    rule = find_gradient_rule(recipe)
    shared = SHARED if rule is None else (*SHARED, *rule.shared)
    name = None if rule is None else rule.name
    return (tuple(shape), classes, architecture, name, *(getattr(recipe, each) for each in shared))


def group_runs(
    recipes_by_key: Mapping[str, Recipe], shape: tuple[int, ...], classes: int, most: int
) -> list[tuple[str, ...]]:
    """Return groups of runs to train together, of nearly equal size and at most ``most`` runs, in the order given.

    Example:
        >>> recipes = {name: Recipe(batch_size=32 if name == "b" else 64) for name in "abcd"}
        >>> group_runs(recipes, (64,), 10, most=2)
        [('a', 'c'), ('d',), ('b',)]
    """
    found: dict[Hashable, list[str]] = {}
    for key, recipe in recipes_by_key.items():
        found.setdefault(compute_group_key(recipe, shape, classes), []).append(key)
    return [part for keys in found.values() for part in _split_evenly(keys, most)]


def _split_evenly(keys: list[str], most: int) -> list[tuple[str, ...]]:
    count = -(-len(keys) // max(1, most))
    ends = [round(len(keys) * part / count + 1e-9) for part in range(count + 1)]
    return [tuple(keys[begin:end]) for begin, end in pairwise(ends)]


REMEMBER_EVERY = 20.0  # seconds: copying a large batch takes about as long as an epoch of it


def train_together(
    recipes: Sequence[Recipe],
    examples: Examples,
    *,
    device: torch.device | str = "cpu",
    checkpoint: Path | None = None,
    every: float = 30.0,
    tell: Callable[[int, int], None] | None = None,
    way: str = "auto",
) -> list[TrainedNetwork]:
    """Train networks, those of the same architecture and batch size at once; return them in the order of the recipes.

    A network that meets its targets, or diverges, leaves its batch, and the others continue.

    Args:
        recipes: recipe of each network.
        examples: training and test examples; they are moved to the device.
        device: device to train on.
        checkpoint: file for the state of the training. If it holds a state of this training, the training resumes, and
            ends as if it had not been interrupted. At the end it holds the results.
        every: seconds between checkpoints.
        tell: called after every epoch with the number of epochs done and the maximum, of all batches.
        way: method of convolutions under ``vmap``: ``"auto"``, ``"grouped"``, ``"each"`` or ``"banded"``; or
            ``"separate"``: ordinary operations for each network, which ``"auto"`` uses for large networks on a GPU.
    """
    for recipe in recipes:  # before the first of them is trained
        check_recipe(recipe)
    place = torch.device(device)
    work = _BatchScheduler(recipes, examples, place, checkpoint, every, tell, way)
    while work.batches:
        with use_matmul_precision(recipes[work.batches[0].members[0]].dtype):
            work.train_first_batch()
    work.save_checkpoint()
    return [work.finished[number] for number in range(len(recipes))]


class _BatchScheduler:
    """Train the batches of networks of a call, one after the other."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        examples: Examples,
        device: torch.device,
        checkpoint: Path | None,
        every: float,
        tell: Callable[[int, int], None] | None,
        way: str,
    ) -> None:
        self.recipes, self.examples, self.device = list(recipes), examples, device
        self.checkpoint, self.every, self.tell, self.way = checkpoint, every, tell, way
        self.placed: dict[str, Examples] = {}
        self.finished: dict[int, TrainedNetwork] = {}
        self.batches: list[NetworkBatch] = []
        self.epochs_before = 0
        self.who = "" if checkpoint is None else describe_training(recipes, examples, together=True)
        self.written = time.perf_counter()
        standing = None if checkpoint is None else read_matching_checkpoint(checkpoint, self.who)
        if standing is not None and self._is_complete(standing):
            self._resume(standing)
        else:
            self._make_batches()

    def _make_batches(self) -> None:
        members: dict[Hashable, list[int]] = {}
        for number, recipe in enumerate(self.recipes):
            key = compute_group_key(recipe, self.examples.shape, self.examples.classes)
            members.setdefault(key, []).append(number)
        self.batches = [NetworkBatch(each) for each in members.values()]

    def _is_complete(self, standing: Checkpoint) -> bool:
        """Return whether every recipe is in the checkpoint once, which no digest covered in earlier versions."""
        going = [number for batch in standing.facts["stacks"] for number in batch["members"]]
        return sorted([*map(int, standing.facts["finished"]), *going]) == list(range(len(self.recipes)))

    def _resume(self, standing: Checkpoint) -> None:
        for number, plain in standing.facts["finished"].items():
            self.finished[int(number)] = trained_from_dict(plain, select_prefix(standing.tensors, f"finished/{number}"))
        self.batches = [
            NetworkBatch.from_checkpoint(facts, select_prefix(standing.tensors, f"stack/{place}"))
            for place, facts in enumerate(standing.facts["stacks"])
            if facts["members"]  # empty if written just after the last of them left
        ]

    def save_checkpoint(self) -> None:
        """Write a checkpoint of all batches."""
        if self.checkpoint is None:
            return
        facts = {
            "finished": {number: trained_to_dict(each) for number, each in self.finished.items()},
            "stacks": [batch.collect_facts() for batch in self.batches],
        }
        tensors: dict[str, Tensor] = {}
        for number, each in self.finished.items():
            tensors |= add_prefix(f"finished/{number}", each.weights)
        for place, batch in enumerate(self.batches):
            tensors |= add_prefix(f"stack/{place}", batch.collect_tensors())
        write_checkpoint(self.checkpoint, self.who, Checkpoint(facts, tensors))
        self.written = time.perf_counter()

    def train_first_batch(self) -> None:
        """Train the first batch to its end, or split it if it does not fit in memory."""
        self._back_up_batch()
        full = False
        try:
            self._train_batch()
        except torch.OutOfMemoryError:
            if len(self.before.members) == 1:
                raise
            full = True
        # Not in the clause above, where the error still holds the tensors that filled the memory.
        if full:
            note = f"trained in smaller groups: memory did not hold {len(self.before.members)} networks at once"
            self.batches[:1] = self.before.split_in_half(note)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _back_up_batch(self) -> None:
        """Copy the first batch to the CPU, to return to it when memory runs out."""
        self.before = self.batches[0].copy_to("cpu")
        self.remembered = time.perf_counter()

    def _train_batch(self) -> None:
        self.batches[0] = batch = self.batches[0].copy_to(self.device)
        try:
            training = BatchTrainer(self.recipes, self._get_examples(batch), batch, self.way)
        except NotVmappableError as error:
            self._train_each(batch, f"trained alone, since torch.func could not batch the network: {error}")
            return
        if len(batch.members) > training.max_networks:
            self.batches[:1] = batch.split_in_half()
            return
        while batch.members:
            found = training.train_epoch()
            self.finished |= found
            # Networks that left do not come back. Other epochs may be repeated, with the same result.
            if found or time.perf_counter() - self.remembered >= REMEMBER_EVERY:
                self._back_up_batch()
            self._finish_epoch()
        self.epochs_before += batch.epoch
        del self.batches[0]

    def _get_examples(self, batch: NetworkBatch) -> Examples:
        dtype = self.recipes[batch.members[0]].dtype
        if dtype not in self.placed:
            self.placed = {dtype: self.examples.to(self.device, DTYPES[dtype])}
        return self.placed[dtype]

    def _train_each(self, batch: NetworkBatch, note: str) -> None:
        while batch.members:
            recipe = self.recipes[batch.members[0]]
            found = train_alone(recipe, self.examples, device=self.device)
            outcome = replace(found.outcome, notes=(*found.outcome.notes, note))
            self.finished[batch.members.pop(0)] = replace(found, outcome=outcome)
            # A checkpoint of this batch starts it anew: only its members say what is left to do.
            batch.rows, batch.rest, batch.memory, batch.curves, batch.seconds = None, {}, {}, [], []
            batch.epoch = outcome.epochs
            self._finish_epoch()
            batch.epoch = 0
            self._back_up_batch()
        del self.batches[0]

    def _finish_epoch(self) -> None:
        if self.tell is not None:
            first, *others = self.batches
            ahead = [self.recipes[number].epochs for number in first.members]
            most = max([first.epoch, *ahead]) + sum(self._count_max_epochs(batch) for batch in others)
            self.tell(self.epochs_before + first.epoch, self.epochs_before + most)
        if time.perf_counter() - self.written >= self.every:
            self.save_checkpoint()

    def _count_max_epochs(self, batch: NetworkBatch) -> int:
        return max(self.recipes[number].epochs for number in batch.members)
