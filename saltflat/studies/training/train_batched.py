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
from saltflat.studies.training.batched_epoch import StackState, StackTrainer
from saltflat.studies.training.build import use_matmul_precision
from saltflat.studies.training.train_one import train_alone
from saltflat.studies.training.vmap_check import UnstackableError

# Settings that may differ between networks of one stack are not here.
SHARED = (
    "network", "optimizer", "nesterov", "batch_size", "train_size", "confusion", "augment", "crop", "dtype",
)  # fmt: skip


def compute_group_key(recipe: Recipe, shape: tuple[int, ...], classes: int) -> Hashable:
    """Equal for recipes whose networks are of one architecture and take the same steps.

    Seeds, learning rates, momentum, decay, dropout, label noise, initialisations, schedules, epochs and targets may
    differ.

    Example:
        >>> recipes = [Recipe(lr=lr, batch_size=size) for lr in (0.1, 0.2) for size in (32, 64)]
        >>> len({compute_group_key(recipe, (64,), 10) for recipe in recipes})
        2
    """
    architecture = json.dumps(dict(recipe.architecture), sort_keys=True, default=list)
    return (tuple(shape), classes, architecture, *(getattr(recipe, name) for name in SHARED))


def group_runs(
    recipes_by_key: Mapping[str, Recipe], shape: tuple[int, ...], classes: int, most: int
) -> list[tuple[str, ...]]:
    """The keys of runs to train together, at most so many at once, of nearly the same number, in the order given.

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


REMEMBER_EVERY = 20.0  # seconds: copying a large stack takes about as long as an epoch of it


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
    """Train networks, all of one architecture and batch size at once, others after them; in the order of the recipes.

    A network that meets its targets, or diverges, leaves the stack, and the others go on.

    Args:
        recipes: how each is trained.
        examples: on what; they are moved to the device.
        device: where.
        checkpoint: a file that holds where the training stands. If it is of this training, it goes on from there, and
            ends as if it had not been interrupted. It is left when the training is over, with the results in it.
        every: seconds between checkpoints.
        tell: is called after every epoch with the epochs done and the epochs at most, of all stacks.
        way: of doing convolutions: ``"auto"``, ``"grouped"``, ``"each"`` or ``"banded"``.
    """
    for recipe in recipes:  # before the first of them is trained
        check_recipe(recipe)
    place = torch.device(device)
    work = _StackScheduler(recipes, examples, place, checkpoint, every, tell, way)
    while work.stacks:
        with use_matmul_precision(recipes[work.stacks[0].members[0]].dtype):
            work.train_first_stack()
    work.save_checkpoint()
    return [work.finished[number] for number in range(len(recipes))]


class _StackScheduler:
    """All stacks of a call, and what has come of them."""

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
        self.stacks: list[StackState] = []
        self.epochs_before = 0
        self.who = "" if checkpoint is None else describe_training(recipes, examples, together=True)
        self.written = time.perf_counter()
        standing = None if checkpoint is None else read_matching_checkpoint(checkpoint, self.who)
        if standing is not None and self._is_complete(standing):
            self._resume(standing)
        else:
            self._make_stacks()

    def _make_stacks(self) -> None:
        members: dict[Hashable, list[int]] = {}
        for number, recipe in enumerate(self.recipes):
            key = compute_group_key(recipe, self.examples.shape, self.examples.classes)
            members.setdefault(key, []).append(number)
        self.stacks = [StackState(each) for each in members.values()]

    def _is_complete(self, standing: Checkpoint) -> bool:
        """Return whether every recipe is in the checkpoint once, which earlier versions did not secure by a digest."""
        going = [number for stack in standing.facts["stacks"] for number in stack["members"]]
        return sorted([*map(int, standing.facts["finished"]), *going]) == list(range(len(self.recipes)))

    def _resume(self, standing: Checkpoint) -> None:
        for number, plain in standing.facts["finished"].items():
            self.finished[int(number)] = trained_from_dict(plain, select_prefix(standing.tensors, f"finished/{number}"))
        self.stacks = [
            StackState.from_checkpoint(facts, select_prefix(standing.tensors, f"stack/{place}"))
            for place, facts in enumerate(standing.facts["stacks"])
            if facts["members"]  # empty where it was written just after the last of them left
        ]

    def save_checkpoint(self) -> None:
        """A checkpoint of everything."""
        if self.checkpoint is None:
            return
        facts = {
            "finished": {number: trained_to_dict(each) for number, each in self.finished.items()},
            "stacks": [stack.collect_facts() for stack in self.stacks],
        }
        tensors: dict[str, Tensor] = {}
        for number, each in self.finished.items():
            tensors |= add_prefix(f"finished/{number}", each.weights)
        for place, stack in enumerate(self.stacks):
            tensors |= add_prefix(f"stack/{place}", stack.collect_tensors())
        write_checkpoint(self.checkpoint, self.who, Checkpoint(facts, tensors))
        self.written = time.perf_counter()

    def train_first_stack(self) -> None:
        """Train the first stack to its end; where memory does not hold it, split it instead."""
        self._back_up_stack()
        full = False
        try:
            self._train_stack()
        except torch.OutOfMemoryError:
            if len(self.before.members) == 1:
                raise
            full = True
        # Not in the clause above, where the error still holds on to what filled the memory.
        if full:
            note = f"trained in smaller stacks: memory did not hold {len(self.before.members)} networks at once"
            self.stacks[:1] = self.before.split_in_half(note)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _back_up_stack(self) -> None:
        """What to go back to when memory runs out, kept where it takes none of a GPU's."""
        self.before = self.stacks[0].copy_to("cpu")
        self.remembered = time.perf_counter()

    def _train_stack(self) -> None:
        self.stacks[0] = stack = self.stacks[0].copy_to(self.device)
        try:
            training = StackTrainer(self.recipes, self._get_examples(stack), stack, self.way)
        except UnstackableError as error:
            self._train_each(stack, f"trained alone, since torch.func could not stack the network: {error}")
            return
        if len(stack.members) > training.max_networks:
            self.stacks[:1] = stack.split_in_half()
            return
        while stack.members:
            found = training.train_epoch()
            self.finished |= found
            # Who has left does not come back; otherwise some epochs may be repeated, which come out the same.
            if found or time.perf_counter() - self.remembered >= REMEMBER_EVERY:
                self._back_up_stack()
            self._finish_epoch()
        self.epochs_before += stack.epoch
        del self.stacks[0]

    def _get_examples(self, stack: StackState) -> Examples:
        dtype = self.recipes[stack.members[0]].dtype
        if dtype not in self.placed:
            self.placed = {dtype: self.examples.to(self.device, DTYPES[dtype])}
        return self.placed[dtype]

    def _train_each(self, stack: StackState, note: str) -> None:
        while stack.members:
            recipe = self.recipes[stack.members[0]]
            found = train_alone(recipe, self.examples, device=self.device)
            outcome = replace(found.outcome, notes=(*found.outcome.notes, note))
            self.finished[stack.members.pop(0)] = replace(found, outcome=outcome)
            # Fresh again when it is taken up from a checkpoint: only the members say what is left to do.
            stack.rows, stack.rest, stack.memory, stack.curves, stack.seconds = None, {}, {}, [], []
            stack.epoch = outcome.epochs
            self._finish_epoch()
            stack.epoch = 0
            self._back_up_stack()
        del self.stacks[0]

    def _finish_epoch(self) -> None:
        if self.tell is not None:
            first, *others = self.stacks
            ahead = [self.recipes[number].epochs for number in first.members]
            most = max([first.epoch, *ahead]) + sum(self._count_max_epochs(stack) for stack in others)
            self.tell(self.epochs_before + first.epoch, self.epochs_before + most)
        if time.perf_counter() - self.written >= self.every:
            self.save_checkpoint()

    def _count_max_epochs(self, stack: StackState) -> int:
        return max(self.recipes[number].epochs for number in stack.members)
