"""Decide when a measurement is due and whether there is time for it. Times are passed in; no clock is read here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

from saltflat.errors import OptionError

DEFAULT_EVERY = "100 steps"


@dataclass(frozen=True)
class Interval:
    """A number of steps or epochs.

    Attributes:
        count: at least 1.
        unit: ``"step"`` or ``"epoch"``.
    """

    count: int
    unit: str

    @classmethod
    def parse(cls, given: int | str) -> Interval:
        """Return the interval that ``every=`` describes.

        >>> Interval.parse(50), Interval.parse("2 epochs")
        (Interval(count=50, unit='step'), Interval(count=2, unit='epoch'))
        """
        text = f"{given} steps" if isinstance(given, int) and not isinstance(given, bool) else given
        found = re.fullmatch(r"\s*(\d+)\s*(step|epoch)s?\s*", text) if isinstance(text, str) else None
        if found is None or int(found[1]) < 1:
            raise OptionError(
                f"Expected a number of steps or epochs, at least 1, but got every={given!r}. Try every=100, "
                "every='100 steps' or every='1 epoch'."
            )
        return cls(int(found[1]), found[2])


class Schedule:
    """Decide when to measure, such that measuring takes at most a share of the training time.

    A measurement that is due is made if all measurements so far and this one, assumed to cost as much as the latest,
    fit into ``cap`` times the training time so far. If not, it stays due, and is made at the first later step where it
    fits. The first one is assumed to cost ``expected``.

    Training time is the time between the calls, minus the measurements.

    Args:
        every: as for :class:`saltflat.integrations.Monitor`.
        cap: measuring time over training time; no limit if None.

    Attributes:
        expected: seconds the next measurement is expected to take; if None, it is made when due.
        due: how often a measurement was due.
        made: how many of these were made, immediately or later.
        skipped: how often a measurement was due and there was no time for it.
        waiting: the steps or epochs at which that happened since the latest measurement.
        spent: seconds of measuring so far.
        trained: seconds of training so far.

    Example:
        >>> schedule = Schedule("1 step", cap=0.1)
        >>> schedule.after_step(1, now=0.0)
        True
        >>> schedule.record_measurement(0.0, 1.0)  # took a second: the next needs 20 seconds of training
        >>> schedule.after_step(2, now=10.0), schedule.after_step(3, now=21.0), schedule.skipped
        (False, True, 1)
    """

    def __init__(self, every: int | str, cap: float | None) -> None:
        self.every = Interval.parse(every)
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap <= 1):
            raise OptionError(
                f"Expected a share of the training time, above 0 and at most 1, but got cap={cap!r}. Try cap=0.05 "
                "for 5 %, or None for no limit."
            )
        self.cap = cap
        self.expected: float | None = None
        self.due = self.made = self.skipped = 0
        self.waiting: list[int] = []
        self.spent = self.trained = 0.0
        self._mark: float | None = None  # time is accounted for up to here
        self._is_due = False

    def after_step(self, step: int, now: float) -> bool:
        """Return whether to measure after training step ``step``, the first being 1."""
        return self._decide_measurement("step", step, now)

    def after_epoch(self, epoch: int, now: float) -> bool:
        """Return whether to measure after epoch ``epoch``, the first being 1."""
        return self._decide_measurement("epoch", epoch, now)

    def can_measure_at_end(self, now: float) -> bool:
        """Return whether there is time for a measurement after the last step."""
        self._advance_clock(now)
        return self._is_affordable()

    def record_measurement(self, started: float, ended: float) -> None:
        """Account for a measurement that was made."""
        self.expected = ended - started
        self.spent += self.expected
        if self._mark is not None:
            self.trained += started - self._mark
            self._mark = ended
        self.made += self._is_due
        self._is_due = False
        self.waiting = []

    @property
    def share(self) -> float:
        """Return measuring time over training time so far."""
        if self.trained > 0:
            return self.spent / self.trained
        return inf if self.spent > 0 else 0.0

    def _advance_clock(self, now: float) -> None:
        if self._mark is not None:
            self.trained += now - self._mark
        self._mark = now

    def _decide_measurement(self, unit: str, number: int, now: float) -> bool:
        self._advance_clock(now)
        due = self.every.unit == unit and number % self.every.count == 0
        self.due += due
        self._is_due = self._is_due or due
        go = self._is_due and self._is_affordable()
        if due and not go:
            self.skipped += 1
            self.waiting.append(number)
        return go

    def _is_affordable(self) -> bool:
        if self.cap is None or self.expected is None:
            return True
        return self.spent + self.expected <= self.cap * self.trained
