"""How many examples and points are run at once: what fits in memory, and on a CPU in its caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from saltflat.data import Batch
from saltflat.landscape.points import SlicePoints
from saltflat.setting import Setting

# Passes whose widest activation is about this large run from the caches of a CPU; larger ones wait for memory.
CPU_PASS = 4 << 20
# A pass at one point that is larger than this keeps a CPU busy on its own: more points at once only cost memory.
CPU_ALONE = 1 << 20


def split_batches(setting: Setting) -> Iterator[Batch]:
    """All data, cut so that a pass at one point fits."""
    for batch in setting.problem.read_batches():
        found = setting.get_probe(batch)
        size = setting.limit // max(1, found.fixed)
        if _is_on_cpu(batch):
            size = min(size, CPU_PASS // found.widest)
        size = max(1, size)
        for start in range(0, batch.examples, size):
            yield batch.cut(start, start + size)


def split_points(setting: Setting, points: SlicePoints, batch: Batch) -> Iterator[slice]:
    """All points, in slices at which the whole batch can be run together."""
    found = setting.get_probe(batch)
    size = setting.limit // max(1, points.bytes_per_point + batch.examples * found.fixed)
    if _is_on_cpu(batch):
        one = batch.examples * found.widest
        size = 1 if one > CPU_ALONE else min(size, CPU_PASS // one)
    size = max(1, size)
    for start in range(0, len(points), size):
        yield slice(start, min(start + size, len(points)))


def make_progress_counter(setting: Setting, what: str, points: int) -> Callable[[int], None]:
    """A function to call with how much more has been done."""
    total = None if setting.problem.num_examples is None else setting.problem.num_examples * points
    done = 0

    def tick(more: int) -> None:
        nonlocal done
        done += more
        setting.tick(what, done, total)

    return tick


def _is_on_cpu(batch: Batch) -> bool:
    return batch.targets.device.type == "cpu"
