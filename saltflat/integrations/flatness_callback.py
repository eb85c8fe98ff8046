"""Measure on one process, and tell all of them the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from saltflat.errors import TrainingError, format_error_line
from saltflat.integrations.monitor import Monitor
from saltflat.integrations.record import Record
from saltflat.integrations.schedule import DEFAULT_EVERY, Interval

# (what the first process has) -> the same, on every process
Broadcast = Callable[[Any], Any]


class RankZeroMonitor:
    """A :class:`~saltflat.integrations.Monitor` on the first process; the others wait for it while it measures.

    Whether there is time to measure depends on the first process's clock, so the decision is its own, too. All
    processes count steps and epochs alike, and talk to each other only from when a measurement is due until it is made.

    Args:
        make: builds the monitor; called on the first process only.
        every: the monitor's.
        broadcast: None with one process.
        is_first: whether this is the first process.
        step: steps that were taken before, in a training that is taken up again.
        epoch: the same for epochs.

    Attributes:
        monitor: None on the other processes.
    """

    def __init__(
        self,
        make: Callable[[], Monitor],
        every: int | str = DEFAULT_EVERY,
        broadcast: Broadcast | None = None,
        is_first: bool = True,
        step: int = 0,
        epoch: int = 0,
    ) -> None:
        self.every, self.broadcast, self.is_first = Interval.parse(every), broadcast, is_first
        self.step, self.epoch, self._is_due = step, epoch, False
        self.monitor: Monitor | None = self._run_on_rank_zero(make if is_first else None, keeps=True)
        if self.monitor is not None:
            self.monitor.step, self.monitor.epoch = step, epoch

    def set_step(self, step: int) -> None:
        """Steps that were taken before, if they were not known at the start."""
        self.step = step
        if self.monitor is not None:
            self.monitor.step = step

    def after_step(self, optimizer: Any = None) -> Record | None:
        """To be called by every process after each step; the same record everywhere."""
        self.step += 1
        self._is_due = self._is_due or (self.every.unit == "step" and self.step % self.every.count == 0)
        return self._run_if_due(None if self.monitor is None else self.monitor.after_step, optimizer)

    def after_epoch(self, optimizer: Any = None) -> Record | None:
        """To be called by every process after each epoch; the same record everywhere."""
        self.epoch += 1
        self._is_due = self._is_due or (self.every.unit == "epoch" and self.epoch % self.every.count == 0)
        return self._run_if_due(None if self.monitor is None else self.monitor.after_epoch, optimizer)

    @property
    def history(self) -> list[Record]:
        """What was measured, on the first process; empty on the others."""
        return [] if self.monitor is None else self.monitor.history

    def finish(self, optimizer: Any = None) -> Record | None:
        """To be called by every process after the last step; the same record everywhere."""
        monitor = self.monitor
        record: Record | None = self._run_on_rank_zero(None if monitor is None else lambda: monitor.finish(optimizer))
        return record

    def close(self, quiet: bool = False) -> None:
        if self.monitor is not None:
            self.monitor.close(quiet)

    def _run_if_due(self, ask: Callable[[Any], Record | None] | None, optimizer: Any) -> Record | None:
        if not self._is_due:
            # The first process's clock goes on.
            return None if ask is None else ask(optimizer)
        record: Record | None = self._run_on_rank_zero(None if ask is None else lambda: ask(optimizer))
        self._is_due = record is None
        return record

    def _run_on_rank_zero(self, work: Callable[[], Any] | None, keeps: bool = False) -> Any:
        """What the first process's work gave, or its error, on all of them; ``keeps`` leaves the result where it is."""
        result, problem = None, None
        if work is not None:
            try:
                result = work()
            except Exception as error:
                if self.broadcast is None:
                    raise
                problem = error
        if self.broadcast is None:
            return result
        found, said = self.broadcast((None if keeps else result, problem and format_error_line(problem)))
        if problem is not None:
            raise problem
        if said is not None:
            raise TrainingError(
                f"Got an error of the first process, which measures for all: {said} Want none. Do: see what it says."
            )
        return result if keeps else found


class OptimizerSnapshot:
    """An optimizer with the options of its latest step, which a schedule may have changed since."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        # Schedules write to learning rates that are tensors.
        self.param_groups = [
            {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            for group in optimizer.param_groups
        ]
