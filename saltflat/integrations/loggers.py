"""Loggers: TensorBoard, Weights & Biases, MLflow, a file of JSON lines, a table in the terminal.

A logger is anything with ``log(values, step)``; ``close()`` is called if it has one. If ``log`` has an argument
``epoch``, it is passed as well. Third-party packages are imported when one of their loggers is created.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from saltflat.errors import OptionError, format_error_line, import_optional
from saltflat.integrations.record import OneTimeWarnings, Record, Table
from saltflat.results.files import parse_path

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from wandb import Run


class SupportsLog(Protocol):
    """The least a logger needs."""

    def log(self, values: Mapping[str, float], step: int) -> object:
        """Log the values of one measurement."""


class Logger(SupportsLog, Protocol):
    """The interface of a logger."""

    def close(self) -> None:
        """Release what the logger has opened."""


class JsonLines:
    """Append one line of JSON per measurement to a file.

    A line has ``step``, ``epoch`` and ``time`` (seconds since 1970) in addition to the values; nan and infinity become
    ``null``, since JSON has neither. Each line is written immediately: if the process is killed, at most the last line
    is incomplete, and the next writer starts a new one. The file is not kept open.

    Args:
        path: the file; its folder is created if missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise OptionError(
                f"Expected the name of a file, but got a path of type {type(path).__name__}. Try "
                "JsonLines('flatness.jsonl')."
            )
        self.path = parse_path(path, OptionError).absolute()  # training may change the working directory
        try:  # now, not after an hour
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()
        except OSError as error:
            raise OptionError(
                f"Expected a file that can be written to, but got the path {str(self.path)!r} "
                f"({error.strerror}). Try another folder."
            ) from error

    def log(self, values: Mapping[str, float], step: int, epoch: int | None = None) -> None:
        """Append a line."""
        known = {name: value if isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, "epoch": epoch, "time": round(time.time(), 3), **known}, allow_nan=False)
        with FileIO(self.path, "a+") as file:
            data = b"\n" * _has_torn_line(file) + line.encode() + b"\n"
            while data:
                data = data[file.write(data) :]

    def close(self) -> None:
        """Do nothing; the file is not kept open."""


def _has_torn_line(file: FileIO) -> bool:
    """Return whether the last line is incomplete."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


class TensorBoard:
    """Log scalars to TensorBoard.

    Args:
        target: a folder, or a ``SummaryWriter``, which is left open.
    """

    def __init__(self, target: str | os.PathLike[str] | SummaryWriter) -> None:
        self._is_own = isinstance(target, str | os.PathLike)
        self.writer: SummaryWriter
        if isinstance(target, str | os.PathLike):
            import_optional("tensorboard", "a TensorBoard logger")
            writer = import_optional("torch.utils.tensorboard", "a TensorBoard logger").SummaryWriter
            folder = parse_path(target, OptionError)
            try:
                self.writer = writer(os.path.abspath(folder))
            except OSError as error:
                raise OptionError(
                    f"Expected a folder that can be written to, but got {os.fspath(folder)!r} ({error.strerror}). Try "
                    "another folder."
                ) from error
        elif hasattr(target, "add_scalar"):
            self.writer = target
        else:
            raise OptionError(
                f"Expected a folder or a SummaryWriter, but got a {type(target).__name__} for TensorBoard. Try "
                "TensorBoard('runs/first')."
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a scalar for every value."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Close the writer, unless it was passed in."""
        if self._is_own:
            self.writer.close()


class WandB:
    """Log values to Weights & Biases, with the number of training steps as the step.

    Weights & Biases requires steps that do not decrease: a loop that calls ``run.log`` several times per step must pass
    the step there, too.

    Args:
        run: the result of ``wandb.init``; the active run if None. It is left open.
    """

    def __init__(self, run: Run | None = None) -> None:
        self.run = import_optional("wandb", "a WandB logger").run if run is None else run
        if not hasattr(self.run, "log"):
            raise OptionError(
                "Expected an active run of Weights & Biases, but got none. Try calling wandb.init() first."
                if run is None
                else f"Expected the result of wandb.init, but got a {type(run).__name__} as a run. Try leaving it out "
                "for the active run."
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log all values in one call."""
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Leave the run open."""


class MLflow:
    """Log metrics to MLflow; nan and infinity are omitted.

    Names are ``flatness/<measure>.<layer>``, with ``_`` for characters that MLflow does not allow.

    Args:
        run_id: the id of the run; the active run if None. It is left open.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self._mlflow, self.run_id = import_optional("mlflow", "an MLflow logger"), run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log all finite values in one call."""
        known = {self.format_metric_name(name): value for name, value in values.items() if isfinite(value)}
        if known:
            self._mlflow.log_metrics(known, step=step, run_id=self.run_id)

    def close(self) -> None:
        """Leave the run open."""

    @staticmethod
    def format_metric_name(name: str) -> str:
        """Return a name that MLflow accepts.

        >>> MLflow.format_metric_name("flatness/rho(axis='row')/layers.0.weight")
        'flatness/rho_axis_row_.layers.0.weight'
        """
        # MLflow treats names as paths, and a measure cannot be both a file and the folder of its layers.
        folder, measure, layer = (*name.split("/", 2), "", "")[:3]
        joined = ".".join(part for part in (measure, layer.replace("/", "_")) if part)
        return re.sub(r"[^\w./ -]+", "_", f"{folder}/{joined}" if joined else folder, flags=re.ASCII)


LogFunction: TypeAlias = Callable[[Mapping[str, float], int], object]
LoggersLike: TypeAlias = "SupportsLog | LogFunction | Sequence[SupportsLog | LogFunction] | None"


class _FunctionLogger:
    def __init__(self, function: LogFunction) -> None:
        self.function = function

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.function(values, step)


class Loggers:
    """Several loggers; if one fails, it is named in one warning and tried again the next time."""

    def __init__(self, given: LoggersLike, table: bool | Table | None, warn_once: OneTimeWarnings) -> None:
        several: list[Any] = list(given or ()) if given is None or isinstance(given, list | tuple) else [given]
        for each in several:
            if isinstance(each, type):
                raise OptionError(
                    f"Expected an instance, but got the class {each.__name__} as a logger. Try {each.__name__}(...)."
                )
        self._all: list[Any] = [each if hasattr(each, "log") else _FunctionLogger(each) for each in several]
        for each, logger in zip(several, self._all, strict=True):
            if not callable(logger.log) or (isinstance(logger, _FunctionLogger) and not callable(each)):
                raise OptionError(
                    "Expected an object with log(values, step), or a function of these, but got a logger of type "
                    f"{type(each).__name__}. Try saltflat.integrations.JsonLines('flatness.jsonl')."
                )
        if table is not None and not isinstance(table, bool | Table):
            raise OptionError(f"Expected True, False or a Table, but got table={table!r}. Try leaving it out for none.")
        if table:
            self._all.append(table if isinstance(table, Table) else Table())
        self._takes_epoch = [_has_epoch_argument(each.log) for each in self._all]
        self._warn_once = warn_once

    def log(self, record: Record) -> None:
        """Pass a record to every logger."""
        for number, (each, takes) in enumerate(zip(self._all, self._takes_epoch, strict=True)):
            epoch = {"epoch": record.epoch} if takes else {}
            try:
                each.log(dict(record.values), record.step, **epoch)
            # A full disk or a lost connection is no reason to end a training.
            except Exception as error:
                self._warn(number, "did not take the values", error)

    def close(self) -> None:
        """Close every logger that can be closed."""
        for number, each in enumerate(self._all):
            try:
                getattr(each, "close", lambda: None)()
            except Exception as error:
                self._warn(number, "could not be closed", error)

    def _warn(self, number: int, what: str, error: Exception) -> None:
        each = self._all[number]
        name = getattr(each.function, "__qualname__", "?") if isinstance(each, _FunctionLogger) else type(each).__name__
        self._warn_once((number, what), f"The logger {name} {what} ({format_error_line(error)}). Training continues.")


def _has_epoch_argument(log: Callable[..., Any]) -> bool:
    try:
        return "epoch" in inspect.signature(log).parameters
    except (TypeError, ValueError):  # builtins may have no signature
        return False
