"""Times on the CPU, taken in turns."""

import time
from collections.abc import Callable, Mapping


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def in_turns(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call; in each round everybody runs once, so a slow spell of the machine falls on all."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(seconds_of(call))
    return seconds
