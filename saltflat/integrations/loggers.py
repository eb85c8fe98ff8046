"""Loggers: TensorBoard, Weights & Biases, MLflow, a file of JSON lines, a table in the terminal.

A logger is anything with ``log(values, step)``; ``close()`` is called if it has one. One whose ``log`` takes an
``epoch`` is given that too. The hosts are imported when a logger of theirs is made.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from io import FileIO
from math import isfinite
from typing import Any, Protocol

from saltflat.errors import OptionError, format_error_line, import_optional
from saltflat.integrations.record import OneTimeWarnings, Record, Table
from saltflat.results.files import parse_path


class Logger(Protocol):
    """Takes the values of one moment."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """One line of JSON for every measurement, added to a file.

    A line has ``step``, ``epoch`` and ``time`` (seconds since 1970) beside the values; nan and infinity are ``null``,
    since JSON has neither. A line is written at once: a process that is killed leaves at most the last one torn, and
    whoever goes on with the file begins a new line. Nothing is kept open in between.

    Args:
        path: of the file; its folder is made if it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise OptionError(
                f"Expected the name of a file, but got a path of type {type(path).__name__}. Try "
                "JsonLines('flatness.jsonl')."
            )
        self.path = parse_path(path, OptionError).absolute()  # whoever trains may change the working directory
        try:  # now, not after an hour
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()
        except OSError as error:
            raise OptionError(
                f"Expected a file that can, but got the path {str(self.path)!r}, which cannot be written to "
                f"({error.strerror}). Try choosing another folder."
            ) from error

    def log(self, values: Mapping[str, float], step: int, epoch: int | None = None) -> None:
        known = {name: value if isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, "epoch": epoch, "time": round(time.time(), 3), **known}, allow_nan=False)
        with FileIO(self.path, "a+") as file:
            data = b"\n" * _has_torn_line(file) + line.encode() + b"\n"
            while data:
                data = data[file.write(data) :]

    def close(self) -> None:
        pass


def _has_torn_line(file: FileIO) -> bool:
    """Whether the last line has no end."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


class TensorBoard:
    """Scalars for TensorBoard.

    Args:
        where: a folder, or a ``SummaryWriter``, which is left open.
    """

    def __init__(self, where: Any) -> None:
        self._is_own = isinstance(where, str | os.PathLike)
        if self._is_own:
            import_optional("tensorboard", "a TensorBoard logger")
            writer = import_optional("torch.utils.tensorboard", "a TensorBoard logger").SummaryWriter
            where = parse_path(where, OptionError)
            try:
                where = writer(os.path.abspath(where))
            except OSError as error:
                raise OptionError(
                    f"Expected one that can, but got the folder {os.fspath(where)!r}, which cannot be written to "
                    f"({error.strerror}). Try choosing another folder."
                ) from error
        elif not hasattr(where, "add_scalar"):
            raise OptionError(
                f"Expected a folder or a SummaryWriter, but got a {type(where).__name__} for TensorBoard. Try "
                "TensorBoard('runs/first')."
            )
        self.writer = where

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        if self._is_own:
            self.writer.close()


class WandB:
    """Values for Weights & Biases, with the number of training steps as their step.

    Weights & Biases wants steps that do not fall: in a loop that calls ``run.log`` several times a step, give it the
    step there, too.

    Args:
        run: what ``wandb.init`` returned; the one that is active if None. It is left open.
    """

    def __init__(self, run: Any = None) -> None:
        self.run = import_optional("wandb", "a WandB logger").run if run is None else run
        if not hasattr(self.run, "log"):
            raise OptionError(
                "Expected one to log to, but got no active run of Weights & Biases. Try calling wandb.init() "
                "before, or passing it."
                if run is None
                else f"Expected what wandb.init returns, but got a {type(run).__name__} as a run. Try passing that, "
                "or nothing."
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        pass


class MLflow:
    """Metrics for MLflow; nan and infinity are left out.

    Names are ``flatness/<measure>.<layer>``, with ``_`` where MLflow allows no such character.

    Args:
        run_id: of the run; the one that is active if None. It is left open.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self._mlflow, self.run_id = import_optional("mlflow", "an MLflow logger"), run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        known = {self.format_metric_name(name): value for name, value in values.items() if isfinite(value)}
        if known:
            self._mlflow.log_metrics(known, step=step, run_id=self.run_id)

    def close(self) -> None:
        pass

    @staticmethod
    def format_metric_name(name: str) -> str:
        """
        >>> MLflow.format_metric_name("flatness/rho(axis='row')/layers.0.weight")
        'flatness/rho_axis_row_.layers.0.weight'
        """
        # MLflow takes names for paths, and a measure cannot be both a file and the folder of its layers.
        folder, measure, layer = (*name.split("/", 2), "", "")[:3]
        joined = ".".join(part for part in (measure, layer.replace("/", "_")) if part)
        return re.sub(r"[^\w./ -]+", "_", f"{folder}/{joined}" if joined else folder, flags=re.ASCII)


class _FunctionLogger:
    def __init__(self, function: Callable[[Mapping[str, float], int], object]) -> None:
        self.function = function

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.function(values, step)


class Loggers:
    """All of them; one that fails is named in a warning, once, and tried again the next time."""

    def __init__(self, given: Any, table: bool | Table | None, complain: OneTimeWarnings) -> None:
        several = list(given or ()) if given is None or isinstance(given, list | tuple) else [given]
        for each in several:
            if isinstance(each, type):
                raise OptionError(
                    f"Expected one that was made, but got the class {each.__name__} as a logger. Try "
                    f"{each.__name__}(...)."
                )
        self._all: list[Any] = [each if hasattr(each, "log") else _FunctionLogger(each) for each in several]
        for each, logger in zip(several, self._all, strict=True):
            if not callable(logger.log) or (isinstance(logger, _FunctionLogger) and not callable(each)):
                raise OptionError(
                    "Expected one with log(values, step), or a function of these, but got a logger of type "
                    f"{type(each).__name__}. Try saltflat.integrations.JsonLines('flatness.jsonl')."
                )
        if table is not None and not isinstance(table, bool | Table):
            raise OptionError(f"Expected True, False or a Table, but got table={table!r}. Try leaving it out for none.")
        if table:
            self._all.append(table if isinstance(table, Table) else Table())
        self._takes_epoch = [_has_epoch_argument(each.log) for each in self._all]
        self._complain = complain

    def log(self, record: Record) -> None:
        for number, (each, takes) in enumerate(zip(self._all, self._takes_epoch, strict=True)):
            epoch = {"epoch": record.epoch} if takes else {}
            try:
                each.log(dict(record.values), record.step, **epoch)
            # A full disk or a lost connection is no reason to end a training.
            except Exception as error:
                self._warn(number, "did not take the values", error)

    def close(self) -> None:
        for number, each in enumerate(self._all):
            try:
                getattr(each, "close", lambda: None)()
            except Exception as error:
                self._warn(number, "could not be closed", error)

    def _warn(self, number: int, what: str, error: Exception) -> None:
        each = self._all[number]
        name = getattr(each.function, "__qualname__", "?") if isinstance(each, _FunctionLogger) else type(each).__name__
        self._complain((number, what), f"The logger {name} {what} ({format_error_line(error)}). The training goes on.")


def _has_epoch_argument(log: Callable[..., Any]) -> bool:
    try:
        return "epoch" in inspect.signature(log).parameters
    except (TypeError, ValueError):  # builtins may have no signature
        return False
