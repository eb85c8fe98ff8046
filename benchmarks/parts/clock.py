"""Alternating timings on the CPU."""

import time
from collections.abc import Callable, Mapping

Clock = Callable[[], float]


def seconds_of(call: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    started = clock()
    call()
    return clock() - started


def in_turns(
    calls: Mapping[str, Callable[[], object]], repeats: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of every call; all run once per round, so a slow phase of the machine affects all."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(seconds_of(call, clock))
    return seconds
