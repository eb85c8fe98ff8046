"""Work, tasks and results as bytes, on their way between processes.

Plain pickles: torch's own way between processes keeps an open file for every tensor, and a few hundred are too many.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from saltflat.errors import first_line
from saltflat.studies.executors.failure import Failure, attempted, failure_of

KEPT = 4  # works that either side remembers: training and measuring, and as many again
Dumps = Callable[[Any], bytes]


@dataclass(frozen=True, eq=False)
class Parcel:
    """Work that is sent to a worker once and then called by its number."""

    work: Callable[[Any], Any]
    number: str
    content: bytes


class Outbox:
    """Packs each work once, as long as it is among the last few."""

    def __init__(self, dumps: Dumps = pickle.dumps) -> None:
        self._dumps = dumps
        self._recent: deque[Parcel] = deque(maxlen=KEPT)

    def parcel(self, work: Callable[[Any], Any]) -> Parcel:
        for parcel in self._recent:
            if parcel.work is work:
                return parcel
        self._recent.append(Parcel(work, uuid4().hex, self._dumps(work)))
        return self._recent[-1]


class Inbox:
    """On the worker's side: unpacks each work once, as long as it is among the last few, and does it."""

    def __init__(self, dumps: Dumps = pickle.dumps) -> None:
        self._dumps = dumps
        self._works: dict[str, Callable[[Any], Any]] = {}

    def answer(self, number: str, content: bytes | None, task: bytes) -> bytes:
        """The packed result or Failure. ``content`` may be None where the work was sent before."""
        try:
            work, unpacked = self._work(number, content), pickle.loads(task)
        except Exception as error:
            return self._dumps(not_found(first_line(error), failure_of(error).traceback))
        # A worker is not the study: sys.exit in a train function ends its run, not the worker.
        result = attempted(work, unpacked, catch=(Exception, SystemExit))
        try:
            return self._dumps(result)
        except Exception as error:
            return self._dumps(_not_sent_back(error))

    def _work(self, number: str, content: bytes | None) -> Callable[[Any], Any]:
        if number not in self._works:
            assert content is not None
            while len(self._works) >= KEPT:
                del self._works[next(iter(self._works))]
            self._works[number] = pickle.loads(content)
        return self._works[number]


def unpacked_result(content: bytes) -> Any:
    """What the worker answered."""
    try:
        return pickle.loads(content)
    except Exception as error:
        return _not_sent_back(error)


def not_sent(error: Exception) -> Failure:
    """Of a task or work that cannot be packed."""
    return Failure(
        f"Got work or a task that cannot be sent to another process: {first_line(error)}. Want an importable function. "
        "Do: put it at the top of a module and name it \"package.module:function\", or use executor='here'.",
        failure_of(error).traceback,
    )


def not_found(error: str, traceback: str) -> Failure:
    """Of a task or work that cannot be unpacked where it arrives."""
    return Failure(
        f"Got work or a task that a worker process cannot import: {error}. Want an importable function. "
        "Do: put it into a module that can be imported there, \"package.module:function\", or use executor='here'.",
        traceback,
    )


def _not_sent_back(error: Exception) -> Failure:
    return Failure(
        f"Got a result that cannot be sent to another process: {first_line(error)}. Want one that can be pickled. "
        "Do: return tensors, numbers, text, or dataclasses of these at the top of a module; or use executor='here'.",
        failure_of(error).traceback,
    )
