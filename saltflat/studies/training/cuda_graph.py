"""The steps of an epoch, compiled and as a CUDA graph: small networks wait for Python longer than for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

WORTH_IT = 50  # steps ahead: a capture takes about as long as a hundred
WORTH_COMPILING = 15_000  # steps ahead: compiling takes 10 to 20 seconds
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


StepFunction: TypeAlias = Callable[[Mapping[str, Tensor], StepInputs], Tensor]
# Largest difference between the updates of a compiled step and of the step itself, relative to the update.
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "tf32": 0.05, "bf16": 0.2}


class CompiledStep:
    """A step whose elementwise operations ``torch.compile`` fuses into few kernels.

    The first call traces the step, with autograd and ``vmap``, into plain operations of tensors, compiles them, and
    compares one step with that of the function itself. If compiling fails, or the two differ, every call runs the
    function itself.

    Args:
        take: takes a step; changes tensors by name in place, and returns the losses of the networks.
        traced: does the same by operations that a compiler can fuse.
        changed: the tensors that a step changes, by name.
        dtype: of the recipe.
        backend: of ``torch.compile``.
    """

    def __init__(
        self,
        take: StepFunction,
        traced: StepFunction,
        changed: Mapping[str, Tensor],
        dtype: str,
        backend: str = "inductor",
    ) -> None:
        self.take, self.traced, self.changed = take, traced, dict(changed)
        self.tolerance, self.backend = TOLERANCES[dtype], backend
        self.problem: str | None = None
        self.compiled: Callable[..., Tensor] | None = None

    def __call__(self, step: StepInputs) -> Tensor:
        """Take one step; return the losses before it."""
        if self.compiled is None and self.problem is None:
            before = self._copy_changed()
            try:
                self.compiled = self._compile(step)
                self.problem = self._find_difference(before, step)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler raises, the step runs without it
                self.problem = f"{type(error).__name__}: {error}"
            self._restore(before)
        return self.take(self.changed, step) if self.problem is not None else self._run_compiled(step)

    def _compile(self, step: StepInputs) -> Callable[..., Tensor]:
        def run(
            changed: dict[str, Tensor], places: Tensor, factors: dict[str, Tensor], constants: dict[str, Tensor]
        ) -> Tensor:
            return self.traced(changed, StepInputs(places, factors, constants))

        traced = make_fx(run)(self.changed, step.places, dict(step.factors), dict(step.constants))
        compiled: Callable[..., Tensor] = torch.compile(traced, fullgraph=True, dynamic=False, backend=self.backend)
        return compiled

    @torch.no_grad()
    def _run_compiled(self, step: StepInputs) -> Tensor:
        assert self.compiled is not None
        return self.compiled(self.changed, step.places, dict(step.factors), dict(step.constants))

    def _copy_changed(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self.changed.items()}

    @torch.no_grad()
    def _restore(self, before: Mapping[str, Tensor]) -> None:
        for name, each in self.changed.items():
            each.copy_(before[name])

    def _find_difference(self, before: Mapping[str, Tensor], step: StepInputs) -> str | None:
        """Return how the compiled step differs from the step itself; None if it does not, up to rounding."""
        self._restore(before)
        own = {"losses": self.take(self.changed, step), **self._copy_changed()}
        self._restore(before)
        found = {"losses": self._run_compiled(step).clone(), **self._copy_changed()}
        for name, each in own.items():
            moved = each.double() - before[name].double() if name in before else each.double()
            apart = found[name].double() - each.double()
            moved, apart = (numbers.view(len(each), -1).norm(dim=1) for numbers in (moved, apart))
            if not bool((apart <= self.tolerance * moved).all()):
                return f"{name} differ by {float((apart / moved).max()):.1e} of a step"
        return None


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
