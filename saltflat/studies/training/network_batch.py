"""The state of a batch of networks that are trained at once, between two epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saltflat.studies.store.checkpoint import add_prefix, select_prefix


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
