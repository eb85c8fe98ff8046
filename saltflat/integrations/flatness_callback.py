"""The callback that Lightning and Hugging Face share: one process measures, and all of them get the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from saltflat.engine.data import Data
from saltflat.engine.losses import LossLike
from saltflat.errors import TrainingError, format_error_line
from saltflat.integrations.monitor import Monitor, check_monitor_options
from saltflat.integrations.record import OneTimeWarnings, Record
from saltflat.integrations.schedule import DEFAULT_EVERY, Interval
from saltflat.integrations.stability import OptimizerLike
from saltflat.training.distributed import check_not_sharded

T = TypeVar("T")

# (the object of the first process) -> the same object, on every process
Broadcast = Callable[[Any], Any]


class RankZeroMonitor:
    """Run a :class:`~saltflat.integrations.Monitor` on the first process; the others wait while it measures.

    Whether there is time to measure depends on the clock of the first process, so that process decides. All processes
    count steps and epochs alike, and communicate only from when a measurement is due until it has been made.

    Args:
        make: builds the monitor; called on the first process only.
        every: the interval of the monitor.
        broadcast: sends an object from the first process to all; None with a single process.
        is_first: whether this is the first process.
        step: the number of steps taken before, when training resumes.
        epoch: the number of epochs completed before, when training resumes.

    Attributes:
        monitor: the monitor; None on the other processes.
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
        self.monitor: Monitor | None = self._run_on_rank_zero(make if is_first else None, is_local=True)
        if self.monitor is not None:
            self.monitor.step, self.monitor.epoch = step, epoch

    def set_step(self, step: int) -> None:
        """Set the number of steps taken before, if it was not known at the start."""
        self.step = step
        if self.monitor is not None:
            self.monitor.step = step

    def after_step(self, optimizer: OptimizerLike | None = None) -> Record | None:
        """Count a step and measure if due. Call it on every process; all return the same record."""
        self.step += 1
        self._is_due = self._is_due or (self.every.unit == "step" and self.step % self.every.count == 0)
        return self._run_if_due(None if self.monitor is None else self.monitor.after_step, optimizer)

    def after_epoch(self, optimizer: OptimizerLike | None = None) -> Record | None:
        """Count an epoch and measure if due. Call it on every process; all return the same record."""
        self.epoch += 1
        self._is_due = self._is_due or (self.every.unit == "epoch" and self.epoch % self.every.count == 0)
        return self._run_if_due(None if self.monitor is None else self.monitor.after_epoch, optimizer)

    @property
    def history(self) -> list[Record]:
        """Return all records on the first process, and an empty list on the others."""
        return [] if self.monitor is None else self.monitor.history

    def finish(self, optimizer: OptimizerLike | None = None) -> Record | None:
        """End the training. Call it on every process after the last step; all return the same record."""
        monitor = self.monitor
        return self._run_on_rank_zero(None if monitor is None else lambda: monitor.finish(optimizer))

    def close(self, quiet: bool = False) -> None:
        """Close the monitor, if it runs on this process."""
        if self.monitor is not None:
            self.monitor.close(quiet)

    def _run_if_due(
        self, call: Callable[[OptimizerLike | None], Record | None] | None, optimizer: OptimizerLike | None
    ) -> Record | None:
        if not self._is_due:
            # The clock of the first process keeps running.
            return None if call is None else call(optimizer)
        record = self._run_on_rank_zero(None if call is None else lambda: call(optimizer))
        self._is_due = record is None
        return record

    def _run_on_rank_zero(self, work: Callable[[], T | None] | None, is_local: bool = False) -> T | None:
        """Return the result of the first process, or raise its error, on all; ``is_local`` keeps the result there."""
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
        shared, message = self.broadcast((None if is_local else result, problem and format_error_line(problem)))
        if problem is not None:
            raise problem
        if message is not None:
            raise TrainingError(
                f"Expected the first process, which measures for all, to succeed, but got this error there: {message}"
            )
        return result if is_local else shared


class OptimizerSnapshot:
    """An optimizer with the options of its latest step, which a schedule may have changed since."""

    def __init__(self, optimizer: OptimizerLike) -> None:
        self.optimizer = optimizer
        # Schedules write to learning rates that are tensors.
        self.param_groups: list[dict[str, Any]] = [
            {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            for group in optimizer.param_groups
        ]


class BaseFlatnessCallback:
    """Measure flatness while a host library trains; subclasses translate the hooks of their host.

    Args:
        probe: the examples to measure on, as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        measures: names, as for :func:`saltflat.measure`.
        every: ``100`` or ``"100 steps"``, or ``"1 epoch"``; a step is a step of the optimizer.
        options: options of :class:`saltflat.integrations.Monitor`.

    Attributes:
        history: a record for every measurement, on the first process; includes those of earlier trainings.
        changed_by: what changes the gradient before the optimizer steps, as for the monitor.
    """

    unavailable: ClassVar[Sequence[str]] = ()  # options of Monitor that this host cannot pass on

    def __init__(
        self,
        probe: Data,
        loss: LossLike = "cross_entropy",
        measures: str | Sequence[str] = ("hessian_trace",),
        *,
        every: int | str = DEFAULT_EVERY,
        **options: Any,
    ) -> None:
        super().__init__()
        Interval.parse(every)
        check_monitor_options(options, without=self.unavailable)
        self.probe, self.loss, self.measures, self.every, self.options = probe, loss, measures, every, options
        self.changed_by = ""
        self._monitor: RankZeroMonitor | None = None
        self._earlier: list[Record] = []
        self._snapshot: OptimizerSnapshot | None = None
        self._warn_once = OneTimeWarnings()

    @property
    def history(self) -> list[Record]:
        """Return the records of this training and of earlier ones, on the first process."""
        return [*self._earlier, *([] if self._monitor is None else self._monitor.history)]

    def _start(
        self, model: nn.Module, *, broadcast: Broadcast | None, is_first: bool, step: int, epoch: int
    ) -> RankZeroMonitor:
        check_not_sharded(model)
        self._earlier = self.history
        self._monitor = self._snapshot = None

        def make_monitor() -> Monitor:
            return Monitor(model, self.probe, self.loss, self.measures, every=self.every, **self.options)

        self._monitor = RankZeroMonitor(make_monitor, self.every, broadcast, is_first, step, epoch)
        if self._monitor.monitor is not None:
            self._monitor.monitor.changed_by = self.changed_by
        return self._monitor

    def _take_snapshot(self, optimizer: OptimizerLike) -> None:
        self._snapshot = OptimizerSnapshot(optimizer)

    def _after_step(self, optimizer: OptimizerLike | None) -> Record | None:
        return None if self._monitor is None else self._monitor.after_step(self._snapshot or optimizer)

    def _after_epoch(self, optimizer: OptimizerLike | None) -> Record | None:
        return None if self._monitor is None else self._monitor.after_epoch(self._snapshot or optimizer)

    def _finish(self, optimizer: OptimizerLike | None = None) -> Record | None:
        return None if self._monitor is None else self._monitor.finish(self._snapshot or optimizer)

    def _close(self, quiet: bool = False) -> None:
        if self._monitor is not None:
            self._monitor.close(quiet)

    def _pass_on(self, name: str, log: Callable[[], object]) -> None:
        """Log values to the host. A full disk or a lost connection is no reason to end a training."""
        try:
            log()
        except Exception as error:
            self._warn_once(name, f"{name} did not take the values ({format_error_line(error)}).")
