"""The steps of an epoch as a CUDA graph: small networks wait for Python longer than for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORTH_IT = 50  # steps ahead: a capture takes about as long as a hundred
TRIALS = 3  # before a capture: libraries initialize themselves in the first steps, which cannot be captured


@dataclass(frozen=True)
class StepInputs:
    """What one step reads, besides weights and examples.

    Attributes:
        places: numbers of the examples, ``(networks, examples)``.
        factors: factors of the optimizer by name, ``(networks, 1)`` each.
        constants: numbers that are the same in all steps of an epoch by name, ``(networks, 1)`` each.
    """

    places: Tensor
    factors: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]


@dataclass(frozen=True)
class EpochInputs:
    """What the steps of an epoch read, besides weights and examples.

    Attributes:
        places: order of the examples, ``(networks, examples)``.
        factors: factors of the optimizer by name, ``(steps, networks, 1)`` each.
        constants: numbers that are the same in all steps by name, ``(networks, 1)`` each.
    """

    places: Tensor
    factors: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]

    @property
    def names(self) -> frozenset[str]:
        """The names of all factors and constants, which decide what a step does."""
        return frozenset([*self.factors, *self.constants])

    def select_step(self, step: int, size: int) -> StepInputs:
        """Return the inputs of one step of ``size`` examples; the last one may have fewer."""
        factors = {name: each[step] for name, each in self.factors.items()}
        return StepInputs(self.places[:, step * size : (step + 1) * size], factors, self.constants)

    def clone(self) -> EpochInputs:
        """Return a copy with tensors of its own."""
        copies = [{name: each.clone() for name, each in held.items()} for held in (self.factors, self.constants)]
        return EpochInputs(self.places.clone(), *copies)

    def copy_from(self, other: EpochInputs) -> None:
        """Overwrite the tensors with those of another epoch."""
        self.places.copy_(other.places)
        for mine, theirs in ((self.factors, other.factors), (self.constants, other.constants)):
            for name, each in mine.items():
                each.copy_(theirs[name])


class CudaGraphSteps:
    """The full steps of an epoch as a CUDA graph.

    A step reads only tensors that keep their place in memory, including its own number, so that one capture serves
    every step of every epoch.

    Args:
        take: takes a step; changes the weights in place without synchronizing, and returns the losses of the networks.
        inputs: inputs of the first epoch.
        size: examples in a step.
        changed: the tensors that a step changes.
    """

    def __init__(
        self, take: Callable[[StepInputs], Tensor], inputs: EpochInputs, size: int, changed: Sequence[Tensor]
    ) -> None:
        self.take, self.inputs, self.names = take, inputs.clone(), inputs.names
        device = inputs.places.device
        self.within = torch.arange(size, device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.total = torch.zeros(len(inputs.places), dtype=torch.float64, device=device)
        held = [(each, each.detach().clone()) for each in changed]
        try:
            self._capture_step()
        finally:
            with torch.no_grad():
                for each, before in held:
                    each.copy_(before)

    def _capture_step(self) -> None:
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

    def _run_step(self) -> None:
        places = self.inputs.places.index_select(1, self.number * len(self.within) + self.within)
        factors = {name: each.index_select(0, self.number)[0] for name, each in self.inputs.factors.items()}
        losses = self.take(StepInputs(places, factors, self.inputs.constants))
        with torch.no_grad():
            self.total += losses
            self.number += 1

    def replay_steps(self, inputs: EpochInputs, steps: int) -> Tensor:
        """Launch the first steps of an epoch; return the sum of their losses for each network."""
        self.inputs.copy_from(inputs)
        self.number.zero_()
        self.total.zero_()
        for _ in range(steps):
            self.graph.replay()
        return self.total
