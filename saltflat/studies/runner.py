"""Run the plan of a study, and show its progress."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor

from saltflat.errors import OptionError, StudyError
from saltflat.results.report import Reading
from saltflat.results.text import make_printable
from saltflat.studies import tasks
from saltflat.studies.executors import make_executor
from saltflat.studies.executors.executor import Executor, ExecutorError, Failure, Session
from saltflat.studies.executors.serial import make_no_timeout_error
from saltflat.studies.grid import is_same_value
from saltflat.studies.measurement import Measurement
from saltflat.studies.plan import StudyPlan
from saltflat.studies.row import Outcome, Row, TrainedNetwork
from saltflat.studies.store import Store
from saltflat.studies.tasks import (
    CheckpointFailure,
    MeasureTask,
    TaskContext,
    TrainedRun,
    TrainTask,
)
from saltflat.validation import check_positive

if TYPE_CHECKING:
    from saltflat.studies.study import Study


class ProgressDisplay(Protocol):
    """The methods that are called while a study runs."""

    def begin(self, to_train: int, to_measure: int) -> None:
        """Start, with the numbers of runs to train and to measure."""

    def update_epochs(self, done: int, most: int) -> None:
        """Show the epochs of the networks that are being trained in this process."""

    def add_trained(self, runs: int) -> None:
        """Count runs that were trained."""

    def add_finished(self, status: str) -> None:
        """Count a finished run by its status: done, missed, diverged or failed."""

    def tell(self, text: str) -> None:
        """Show a message."""


class SilentDisplay:
    """Show nothing."""

    def begin(self, to_train: int, to_measure: int) -> None:
        """Do nothing."""

    def update_epochs(self, done: int, most: int) -> None:
        """Do nothing."""

    def add_trained(self, runs: int) -> None:
        """Do nothing."""

    def add_finished(self, status: str) -> None:
        """Do nothing."""

    def tell(self, text: str) -> None:
        """Do nothing."""


class BarDisplay:
    """Show three bars on a terminal: networks trained, epochs of the current group, runs finished."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.failed = bar, 0
        self.training = bar.add_task("Networks trained", visible=False)
        self.epochs = bar.add_task("  epochs", visible=False)
        self.rows = bar.add_task("Runs finished", visible=False)

    def begin(self, to_train: int, to_measure: int) -> None:
        """Set the totals of the bars."""
        self.bar.update(self.training, total=to_train, visible=to_train > 0)
        self.bar.update(self.rows, total=to_measure, visible=to_measure > 0)

    def update_epochs(self, done: int, most: int) -> None:
        """Move the bar of epochs."""
        self.bar.update(self.epochs, completed=done, total=most, visible=True)

    def add_trained(self, runs: int) -> None:
        """Move the bar of trained networks."""
        self.bar.advance(self.training, runs)
        self.bar.update(self.epochs, visible=False)

    def add_finished(self, status: str) -> None:
        """Move the bar of finished runs."""
        self.failed += status in ("failed", "diverged")
        told = f" ({self.failed} failed or diverged)" if self.failed else ""
        self.bar.update(self.rows, advance=1, description=f"Runs finished{told}")

    def tell(self, text: str) -> None:
        """Print a message above the bars."""
        self.bar.console.print(Text(make_printable(text), style="yellow"), soft_wrap=True)


class LineDisplay(SilentDisplay):
    """Print messages and, now and then, a line of progress to the standard error, without bars: for logs."""

    def __init__(self, every: float = 60.0) -> None:
        self.every, self.trained, self.finished, self.failed = every, 0, 0, 0
        self.to_train = self.to_measure = 0
        self.began = self.told = time.monotonic()

    def begin(self, to_train: int, to_measure: int) -> None:
        """Keep the totals."""
        self.to_train, self.to_measure = to_train, to_measure

    def update_epochs(self, done: int, most: int) -> None:
        """Tell the epochs of the networks that are being trained."""
        self._tell_progress(f"epoch {done} of at most {most}, ")

    def add_trained(self, runs: int) -> None:
        """Count runs that were trained."""
        self.trained += runs
        self._tell_progress()

    def add_finished(self, status: str) -> None:
        """Count a finished run by its status."""
        self.finished += 1
        self.failed += status in ("failed", "diverged")
        self._tell_progress()

    def tell(self, text: str) -> None:
        """Print a message."""
        Console(stderr=True).print(Text(make_printable(text), style="yellow"), soft_wrap=True)

    def _tell_progress(self, now: str = "") -> None:
        if time.monotonic() - self.told < self.every:
            return
        self.told = time.monotonic()
        minutes = (self.told - self.began) / 60
        failed = f", {self.failed} failed or diverged" if self.failed else ""
        ahead = ""
        if self.finished:
            ahead = f", about {minutes * (self.to_measure / self.finished - 1):.0f} min left"
        self.tell(
            f"{minutes:.0f} min: {now}{self.trained} of {self.to_train} networks trained, {self.finished} of "
            f"{self.to_measure} runs finished{failed}{ahead}"
        )


@contextmanager
def show_progress(progress: bool | ProgressDisplay | None) -> Iterator[ProgressDisplay]:
    """Show bars if True, or on a terminal if None; a line a minute if None elsewhere, and nothing if False."""
    if progress is False:
        yield SilentDisplay()
    elif progress is True or (progress is None and sys.stderr.isatty()):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            yield BarDisplay(bar)
    elif progress is None:
        yield LineDisplay()
    elif hasattr(progress, "begin"):
        yield progress
    else:
        raise OptionError(f"Expected True, False or None, but got progress={progress!r}. Try leaving it out.")


def select_executor(executor: str | Executor, timeout: float | None) -> Executor:
    """Return the executor, after checking that it can enforce the timeout."""
    chosen = make_executor(executor) if isinstance(executor, str) else executor
    if not hasattr(chosen, "open_session"):
        raise OptionError(f"Expected a name or an executor, but got {executor!r}. Try 'serial' or 'processes'.")
    if timeout is not None:
        check_positive(timeout=timeout)
        if chosen.name == "serial":
            raise make_no_timeout_error(timeout)
    return chosen


Runs = Mapping[str, dict[str, Any]]
Result: TypeAlias = dict[str, TrainedRun] | CheckpointFailure | Measurement | Failure
Work = TypeVar("Work")
Done = TypeVar("Done")
KEPT = "All finished runs are kept: run the same command again to resume."


class StudyRunner:
    """Run the tasks of a plan. Only this process writes rows and weights."""

    def __init__(
        self,
        study: Study,
        runs: Runs,
        store: Store,
        plan: StudyPlan,
        display: ProgressDisplay,
        context: TaskContext,
        resources: Mapping[str, float],
        timeout: float | None,
    ) -> None:
        self.study, self.runs, self.store, self.plan, self.display = study, runs, store, plan, display
        self.context, self.resources, self.timeout = context, resources, timeout
        # One object each: it is sent once to every worker.
        self.train = partial(_run_task, tasks.train_group, context=context)
        self.measure = partial(_run_task, tasks.measure_run, context=context)

    def run(self, executor: Executor) -> None:
        """Run all tasks, and write their results."""
        self.display.begin(len(self.plan.wanted), len(self.plan.measure) + len(self.plan.wanted))
        coming, waiting = self._make_tasks(), 0
        if not self.plan.train and not self.plan.measure:
            return
        with executor.open_session() as session:
            try:
                waiting = self._submit_tasks(session, coming, waiting)
                for task, result in session.iter_results():
                    waiting += self._handle_result(session, task, result) - 1
                    waiting = self._submit_tasks(session, coming, waiting)
            except ExecutorError as problem:
                raise StudyError(f"{problem} {KEPT}") from problem
            finally:
                tasks.release_stack()

    def _make_tasks(self) -> Iterator[TrainTask | MeasureTask]:
        """Yield the tasks, those of trained networks first, one at a time, since they hold weights."""
        for key, measures in self.plan.measure.items():
            yield self._make_measure_task(key, measures)
        for name, group in self.plan.train.items():
            configs = {key: self.runs[key] for key in group}
            yield TrainTask(name, configs, self.store.checkpoint_path(name), self.resources)

    def _submit_tasks(self, session: Session, coming: Iterator[TrainTask | MeasureTask], waiting: int) -> int:
        while waiting < session.at_once and (task := next(coming, None)) is not None:
            self._submit_task(session, task)
            waiting += 1
        return waiting

    def _submit_task(self, session: Session, task: TrainTask | MeasureTask, soon: bool = False) -> None:
        if isinstance(task, MeasureTask):
            session.submit(task, self.measure, soon=soon, timeout=self.timeout)
            return
        # A run's share of a training is the time of its group, divided by the number of networks.
        timeout = None if self.timeout is None else self.timeout * len(task.configs)
        session.submit(task, self.train, soon=soon, timeout=timeout)

    def _handle_result(self, session: Session, task: TrainTask | MeasureTask, result: Result) -> int:
        """Write a result; return the number of new tasks."""
        if isinstance(task, MeasureTask):
            assert isinstance(result, Measurement | Failure)
            self._keep_measured(task, result)
            return 0
        if isinstance(result, CheckpointFailure):
            raise StudyError(f"{result.problem} {KEPT}")
        wanted = [key for key in task.configs if key in self.plan.wanted]
        if isinstance(result, Failure):
            for key in wanted:
                self._write_row(Row(key, self.runs[key], "failed", failure=_failure_to_dict(result)))
            return 0
        assert isinstance(result, dict)
        to_measure = [key for key in wanted if self._keep_trained(key, result[key])]
        self.store.remove(self.store.checkpoint_path(task.key))
        self.display.add_trained(len(wanted))
        for key in reversed(to_measure):  # the last one submitted is the first one done
            self._submit_task(session, self._make_measure_task(key, self.study.measures), soon=True)
        return len(to_measure)

    def _keep_trained(self, key: str, run: TrainedRun) -> bool:
        """Write the weights; return whether the run is left to measure."""
        outcome = run.trained.outcome
        self.store.write_trained(key, self.runs[key], run.trained, run.initial)
        if outcome.status == "diverged":
            self._write_row(_make_diverged_row(key, self.runs[key], outcome, run.trained.seconds))
            return False
        if run.failure is not None or run.measured is not None:
            found: Measurement | Failure = run.measured or Failure(**(run.failure or {}))
            self._write_row(self._make_row(key, outcome, run.trained.seconds, found, None))
            return False
        return True

    def _make_measure_task(self, key: str, measures: tuple[str, ...]) -> MeasureTask:
        trained, initial = self._read_trained(key)
        return MeasureTask(key, self.runs[key], trained.weights, initial, measures, self.resources)

    def _read_trained(self, key: str) -> tuple[TrainedNetwork, dict[str, Tensor] | None]:
        found = self.store.read_trained(key)
        if found is None:
            raise StudyError(
                f"Expected no changes in the folder while a study runs, but got no weights of the run {key!r}, which "
                "were there a moment ago. Try the same command again."
            )
        return found

    def _keep_measured(self, task: MeasureTask, result: Measurement | Failure) -> None:
        trained, _ = self._read_trained(task.key)
        if trained.outcome.status == "diverged":
            self._write_row(_make_diverged_row(task.key, self.runs[task.key], trained.outcome, trained.seconds))
            return
        before = self.plan.rows.get(task.key)
        known = before if before is not None and is_same_value(before.measured, self.study.measure_options) else None
        self._write_row(self._make_row(task.key, trained.outcome, trained.seconds, result, known))

    def _make_row(
        self, key: str, outcome: Outcome, seconds: float, result: Measurement | Failure, known: Row | None
    ) -> Row:
        """Return a finished row; earlier readings with the same options are kept."""
        spent = {"training": seconds}
        row = Row(key, self.runs[key], outcome.status, outcome, measured=self.study.measure_options, seconds=spent)
        if isinstance(result, Failure) and known is not None and known.readings:
            # The new measures cannot be computed; earlier readings stay.
            lacking = [name for name in self.study.measures if name not in known.readings]
            undefined = {name: Reading(name, math.nan, exact=False, notes=(result.error,)) for name in lacking}
            return replace(known, readings={**known.readings, **undefined})
        if isinstance(result, Failure):
            return replace(row, status="failed", failure=_failure_to_dict(result), measured={})
        readings = {**({} if known is None else known.readings), **result.readings}
        return replace(
            row, readings=readings, seconds={**spent, "measuring": result.seconds}, made_with=result.made_with
        )

    def _write_row(self, row: Row) -> None:
        self.store.write_row(row)
        self.display.add_finished(row.status)


def _run_task(do: Callable[[Work, TaskContext], Done], task: Work, *, context: TaskContext) -> Done:
    """Run a task in this process, with the user's modules in the same places."""
    for place in context.path:
        if place not in sys.path:
            sys.path.append(place)
    return do(task, context)


def _make_diverged_row(key: str, config: Mapping[str, Any], outcome: Outcome, seconds: float) -> Row:
    note = "the loss or a weight was no longer finite: nothing was measured"
    noted = outcome if note in outcome.notes else replace(outcome, notes=(*outcome.notes, note))
    return Row(key, config, "diverged", noted, seconds={"training": seconds})


def _failure_to_dict(failure: Failure) -> dict[str, str]:
    return {"error": failure.error, "traceback": failure.traceback}
