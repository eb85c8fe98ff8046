"""Where a stack of networks stands in its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saltflat.studies.checkpoint import add_prefix, select_prefix


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
