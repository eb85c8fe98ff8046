"""How many examples and points are run at once: what fits in memory, and on a CPU in its caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from saltflat.data import Batch
from saltflat.landscape.points import Points
from saltflat.setting import Setting

# Passes whose widest activation is about this large run from the caches of a CPU; larger ones wait for memory.
CPU_PASS = 4 << 20
# A pass at one point that is larger than this keeps a CPU busy on its own: more points at once only cost memory.
CPU_ALONE = 1 << 20


def pieces(setting: Setting) -> Iterator[Batch]:
    """All data, cut so that a pass at one point fits."""
    for batch in setting.problem.batches():
        found = setting.probe(batch)
        size = setting.limit // max(1, found.fixed)
        if _on_cpu(batch):
            size = min(size, CPU_PASS // found.widest)
        size = max(1, size)
        for start in range(0, batch.examples, size):
            yield batch.cut(start, start + size)


def points_at_once(setting: Setting, points: Points, batch: Batch) -> Iterator[slice]:
    """All points, in slices at which the whole batch can be run together."""
    found = setting.probe(batch)
    size = setting.limit // max(1, points.bytes + batch.examples * found.fixed)
    if _on_cpu(batch):
        one = batch.examples * found.widest
        size = 1 if one > CPU_ALONE else min(size, CPU_PASS // one)
    size = max(1, size)
    for start in range(0, len(points), size):
        yield slice(start, min(start + size, len(points)))


def ticking(setting: Setting, what: str, points: int) -> Callable[[int], None]:
    """A function to call with how much more has been done."""
    total = None if setting.problem.expected is None else setting.problem.expected * points
    done = 0

    def tick(more: int) -> None:
        nonlocal done
        done += more
        setting.tick(what, done, total)

    return tick


def _on_cpu(batch: Batch) -> bool:
    return batch.targets.device.type == "cpu"
