"""The parts of ``measures.py``, one file each: a part is given :class:`Options` and hands back an :class:`Outcome`."""

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
    """What was hoped for, what was found, and whether that is enough."""

    wanted: str
    found: str
    reached: bool


@dataclass(frozen=True)
class Outcome:
    table: Table
    targets: tuple[Target, ...]
    record: Any  # goes into the JSON file
    notes: tuple[str, ...] = ()
