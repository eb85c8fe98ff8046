"""The steps of an epoch on a GPU, captured as a CUDA graph and replayed.

Small networks wait for Python longer than for the GPU: a recorded step is started as one piece of work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from saltflat.studies.optimizers import StepFactors

WORTH_IT = 50  # steps in an epoch: a recording takes about as long as a hundred
TRIALS = 3  # before a recording: libraries set themselves up in the first steps, which cannot be recorded


class CudaGraphSteps:
    """The full steps of an epoch.

    Everything that a step reads is in tensors that stay where they are, also which step it is, so that what was
    recorded once serves every step of every epoch.

    Args:
        take: takes a step with the examples at these places ``(networks, batch)`` and these factors of the optimizer;
            changes weights in place, waits for nothing, and gives the losses of the networks.
        places: the order of the examples, ``(networks, examples)``.
        plan: the factors of all steps.
        batch: examples in a step.
        changed: the tensors that a step changes.
    """

    def __init__(
        self,
        take: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
        places: Tensor,
        plan: StepFactors,
        batch: int,
        changed: Sequence[Tensor],
    ) -> None:
        self.take = take
        self.places = places.clone()
        self.factors = {name: each.clone() for name, each in plan.factors.items()}
        self.within = torch.arange(batch, device=places.device)
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
        with torch.cuda.graph(self.graph):  # nothing is run here, it is only written down
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
        """Take the first so many steps of an epoch; the sum of their losses, of each network."""
        self.places.copy_(places)
        for name, each in plan.factors.items():
            self.factors[name].copy_(each)
        self.number.zero_()
        self.total.zero_()
        for _ in range(steps):
            self.graph.replay()
        return self.total
