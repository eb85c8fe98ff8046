"""All loggers of a monitor, none of which can end a training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from saltflat.errors import OptionError, format_error_line
from saltflat.integrations.live import Table
from saltflat.integrations.record import OneTimeWarnings, Record


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
                    f"Got the class {each.__name__} as a logger. Want one that was made. Do: {each.__name__}(...)."
                )
        self._all: list[Any] = [each if hasattr(each, "log") else _FunctionLogger(each) for each in several]
        for each, logger in zip(several, self._all, strict=True):
            if not callable(logger.log) or (isinstance(logger, _FunctionLogger) and not callable(each)):
                raise OptionError(
                    f"Got a logger of type {type(each).__name__}. Want one with log(values, step), or a function of "
                    "these. Do: for instance saltflat.integrations.JsonLines('flatness.jsonl')."
                )
        if table is not None and not isinstance(table, bool | Table):
            raise OptionError(f"Got table={table!r}. Want True, False or a Table. Do: leave it out for none.")
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
