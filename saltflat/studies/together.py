"""Many networks trained at once: the same numbers as one at a time, in a fraction of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from saltflat.studies.alone import train_alone
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
from saltflat.studies.examples import Examples
from saltflat.studies.grouping import group_key
from saltflat.studies.precision import DTYPES, products_of
from saltflat.studies.recipe import Recipe
from saltflat.studies.stack import Stack
from saltflat.studies.stack_training import StackTraining
from saltflat.studies.stackable import UnstackableError
from saltflat.studies.trained import Trained

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
) -> list[Trained]:
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
    place = torch.device(device)
    work = _Work(recipes, examples, place, checkpoint, every, tell, way)
    while work.stacks:
        with products_of(recipes[work.stacks[0].members[0]].dtype):
            work.train_first()
    work.write()
    return [work.finished[number] for number in range(len(recipes))]


class _Work:
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
        self.finished: dict[int, Trained] = {}
        self.stacks: list[Stack] = []
        self.epochs_before = 0
        self.who = "" if checkpoint is None else identity(recipes, examples, together=True)
        self.written = time.perf_counter()
        standing = None if checkpoint is None else read_checkpoint(checkpoint, self.who)
        if standing is not None and self._is_complete(standing):
            self._resume(standing)
        else:
            self._start()

    def _start(self) -> None:
        members: dict[Hashable, list[int]] = {}
        for number, recipe in enumerate(self.recipes):
            key = group_key(recipe, self.examples.shape, self.examples.classes)
            members.setdefault(key, []).append(number)
        self.stacks = [Stack(each) for each in members.values()]

    def _is_complete(self, standing: Standing) -> bool:
        """Return whether every recipe is in the checkpoint once, which earlier versions did not secure by a digest."""
        going = [number for stack in standing.facts["stacks"] for number in stack["members"]]
        return sorted([*map(int, standing.facts["finished"]), *going]) == list(range(len(self.recipes)))

    def _resume(self, standing: Standing) -> None:
        for number, plain in standing.facts["finished"].items():
            self.finished[int(number)] = trained_from_plain(plain, under(standing.tensors, f"finished/{number}"))
        self.stacks = [
            Stack.restored(facts, under(standing.tensors, f"stack/{place}"))
            for place, facts in enumerate(standing.facts["stacks"])
            if facts["members"]  # empty where it was written just after the last of them left
        ]

    def write(self) -> None:
        """A checkpoint of everything."""
        if self.checkpoint is None:
            return
        facts = {
            "finished": {number: trained_to_plain(each) for number, each in self.finished.items()},
            "stacks": [stack.facts() for stack in self.stacks],
        }
        tensors: dict[str, Tensor] = {}
        for number, each in self.finished.items():
            tensors |= placed_under(f"finished/{number}", each.weights)
        for place, stack in enumerate(self.stacks):
            tensors |= placed_under(f"stack/{place}", stack.tensors())
        write_checkpoint(self.checkpoint, self.who, Standing(facts, tensors))
        self.written = time.perf_counter()

    def train_first(self) -> None:
        """Train the first stack to its end; where memory does not hold it, split it instead."""
        self._remember()
        full = False
        try:
            self._train()
        except torch.OutOfMemoryError:
            if len(self.before.members) == 1:
                raise
            full = True
        # Not in the clause above, where the error still holds on to what filled the memory.
        if full:
            note = f"trained in smaller stacks: memory did not hold {len(self.before.members)} networks at once"
            self.stacks[:1] = self.before.halves(note)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _remember(self) -> None:
        """What to go back to when memory runs out, kept where it takes none of a GPU's."""
        self.before = self.stacks[0].on("cpu")
        self.remembered = time.perf_counter()

    def _train(self) -> None:
        self.stacks[0] = stack = self.stacks[0].on(self.device)
        try:
            training = StackTraining(self.recipes, self._examples(stack), stack, self.way)
        except UnstackableError as error:
            self._train_each(stack, f"trained alone, since torch.func could not stack the network: {error}")
            return
        if len(stack.members) > training.most:
            self.stacks[:1] = stack.halves()
            return
        while stack.members:
            found = training.epoch()
            self.finished |= found
            # Who has left does not come back; otherwise some epochs may be repeated, which come out the same.
            if found or time.perf_counter() - self.remembered >= REMEMBER_EVERY:
                self._remember()
            self._after_epoch()
        self.epochs_before += stack.epoch
        del self.stacks[0]

    def _examples(self, stack: Stack) -> Examples:
        dtype = self.recipes[stack.members[0]].dtype
        if dtype not in self.placed:
            self.placed = {dtype: self.examples.to(self.device, DTYPES[dtype])}
        return self.placed[dtype]

    def _train_each(self, stack: Stack, note: str) -> None:
        while stack.members:
            recipe = self.recipes[stack.members[0]]
            found = train_alone(recipe, self.examples, device=self.device)
            outcome = replace(found.outcome, notes=(*found.outcome.notes, note))
            self.finished[stack.members.pop(0)] = replace(found, outcome=outcome)
            # Fresh again when it is taken up from a checkpoint: only the members say what is left to do.
            stack.rows, stack.rest, stack.memory, stack.curves, stack.seconds = None, {}, {}, [], []
            stack.epoch = outcome.epochs
            self._after_epoch()
            stack.epoch = 0
            self._remember()
        del self.stacks[0]

    def _after_epoch(self) -> None:
        if self.tell is not None:
            first, *others = self.stacks
            ahead = [self.recipes[number].epochs for number in first.members]
            most = max([first.epoch, *ahead]) + sum(self._most(stack) for stack in others)
            self.tell(self.epochs_before + first.epoch, self.epochs_before + most)
        if time.perf_counter() - self.written >= self.every:
            self.write()

    def _most(self, stack: Stack) -> int:
        return max(self.recipes[number].epochs for number in stack.members)
