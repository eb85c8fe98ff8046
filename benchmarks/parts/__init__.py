"""The parts of ``measures.py``, one file each: a part takes :class:`Options` and returns an :class:`Outcome`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Options:
    """How to run a part.

    Attributes:
        quick: tiny sizes, to see that everything runs; the times then mean nothing.
        repeats: interleaved repetitions.
        loop_limit: seconds after which a loop over single parameters is cut short and its time extrapolated.
        tell: shows what is going on.
    """

    quick: bool
    repeats: int
    loop_limit: float | None
    tell: Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """A target, the result, and whether the target is reached."""

    wanted: str
    found: str
    reached: bool


@dataclass(frozen=True)
class Outcome:
    table: Table
    targets: tuple[Target, ...]
    record: Any  # goes into the JSON file
    notes: tuple[str, ...] = ()
