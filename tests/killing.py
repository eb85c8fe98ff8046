"""A program that kills a study again and again and looks at what it left.

    python killing.py FOLDER moments SEED KILLS   at random moments
    python killing.py FOLDER changes              just before, within and just after every change of a file
    python killing.py FOLDER pairs                between two weights of a group, then again in the next life

Torch is imported once; every life of the study is a fork of this process, ended by SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from saltflat.studies import Results, Study, tasks, verify
from saltflat.studies.store.folder import PARTIAL, ROWS, WEIGHTS
from saltflat.studies.tasks import MeasureTask, TrainTask

EVERY = 0.05  # seconds between checkpoints, so that many moments are within one


def study(
    seeds: int = 5,
    epochs: int = 12,
    methods: tuple[tuple[float, float, float], ...] = ((0.05, 0.05, 0.0), (0.2, 0.0, 5.0)),
    widths: tuple[int, ...] = (4, 8),
    batches: tuple[int, ...] = (20, 40),
) -> Study:
    """Of 40 runs in 8 groups, if not asked for fewer; half of them with SAM, half with a Fisher penalty."""
    return Study(
        "killed",
        {"name": "digits", "train_limit": 400, "test_limit": 200},
        {"lr, sam, fisher_penalty": methods, "width": widths, "batch_size": batches},
        seeds=seeds,
        settings={"depth": 1, "dropout": 0.1, "augment": "crop", "crop": 1, "fisher_parts": 2},
        stop={"epochs": epochs, "loss": 0.5},
        measures=["squared_norm", "distance_from_init", "fisher_trace", "hessian_trace"],
        measure={"examples": 50},
        together=seeds,
    )


def child(life: Callable[[], None]) -> int:
    """Begin a life in a process of its own."""
    sys.stdout.flush()
    number = os.fork()
    if number == 0:
        code = 1
        try:
            life()
            code = 0
        finally:
            os._exit(code)
    return number


def watched(log: Path) -> None:
    """Write a line before anything is trained or measured, and for each epoch."""

    def note(*words: object) -> None:
        with log.open("a") as file:  # one short write at the end of the file, whole even if killed
            file.write(" ".join(map(str, words)) + "\n")

    train, measure = tasks.train_group, tasks.measure_run

    def training(task: TrainTask, context: Any) -> Any:
        note("train", *task.configs)
        return train(task, context)

    def measuring(task: MeasureTask, context: Any) -> Any:
        note("measure", task.key)
        return measure(task, context)

    tasks.train_group, tasks.measure_run = training, measuring


def begin(folder: Path, log: Path, chosen: Study) -> int:
    def life() -> None:
        torch.set_num_threads(1)
        watched(log)
        chosen.run(folder, progress=False, every=EVERY)

    return child(life)


def ended(number: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def torn(folder: Path) -> Iterator[str]:
    """Files that are not what was written, but for those that are marked as begun."""
    if not (folder / "study.json").exists():  # written before anything else
        yield from (str(path) for kind in (ROWS, WEIGHTS, PARTIAL) for path in (folder / kind).glob("[!.]*"))
        return
    yield from (f"{each.file}: {each.why}" for each in verify(folder).problems)
    table = folder / "table.csv"
    if table.exists() and table.read_text().count("\n") != 1 + len(Results.load(folder).places):
        yield "table.csv has not a line for every run"


def rows(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every finished run: its bytes, and the file that they are in."""
    return {path.stem: (path.read_bytes(), path.stat().st_ino) for path in (folder / ROWS).glob("*.json")}


def repeated(log: Path, before: set[str], known: int) -> list[str]:
    """Return the runs that were trained or measured for nothing: their rows were there when this life began.

    A group with a checkpoint is trained whole, so that the runs it still lacks end as they would have without
    interruption. Only a group whose rows are all there is trained for nothing.
    """
    lines = log.read_text().splitlines()[known:] if log.exists() else []
    groups = [line.split()[1:] for line in lines]
    return [key for group in groups if before.issuperset(group) for key in group]


class Cut:
    """A file whose writer dies in the middle of a write."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> Cut:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, content: Any) -> None:
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def dying(at: int, when: str) -> None:
    """This process will kill itself at one of its changes of a file, counted from 1."""
    made = 0

    def deadly(change: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == at and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = change(*arguments, **options)
            if made == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return changing

    usual = Path.open

    def opening(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        nonlocal made
        file = usual(path, mode, *arguments, **options)
        made += "x" in mode or "w" in mode
        return Cut(file) if made == at and ("x" in mode or "w" in mode) else file

    if when == "within":
        Path.open = opening  # type: ignore[method-assign,assignment]
        return
    Path.replace, Path.unlink = deadly(Path.replace), deadly(Path.unlink)  # type: ignore[method-assign]


def at_changes(root: Path) -> dict[str, Any]:
    chosen = study(seeds=2, epochs=2, methods=((0.1, 0.05, 0.0),), widths=(4,))
    calm = root / "calm"
    assert ended(begin(calm, root / "calm.log", chosen)) == 0
    found: dict[str, Any] = {"kills": 0, "lost": [], "twice": [], "torn": [], "differ": []}
    for when in ("before", "within", "after"):
        for at in range(1, 1000):
            folder, log = root / f"{when}{at}", root / f"{when}{at}.log"

            def life(at: int = at, when: str = when, folder: Path = folder, log: Path = log) -> None:
                dying(at, when)
                chosen.run(folder, progress=False, every=EVERY)

            if ended(child(life)) == 0:  # it has fewer changes than that
                break
            found["kills"] += 1
            before = rows(folder) if folder.exists() else {}
            found["torn"] += list(torn(folder))
            assert ended(begin(folder, log, chosen)) == 0
            found["lost"] += [key for key, kept in before.items() if rows(folder).get(key) != kept]
            found["twice"] += repeated(log, set(before), 0)
            found["torn"] += list(torn(folder))
            if (folder / "table.csv").read_bytes() != (calm / "table.csv").read_bytes():
                found["differ"].append([when, at])
    return found


def at_pairs(root: Path) -> dict[str, Any]:
    """Kill one group of two runs between its two files of weights, then after every change of the next life."""
    chosen = study(seeds=2, epochs=1, methods=((0.1, 0.05, 0.0),), widths=(4,), batches=(20,))
    calm = root / "calm"
    assert ended(begin(calm, root / "calm.log", chosen)) == 0
    found: dict[str, Any] = {"kills": 0, "partly done": 0, "lost": [], "twice": [], "torn": [], "differ": []}
    for first in range(1, 1000):
        for second in range(1, 1000):
            folder, log = root / f"{first}-{second}", root / f"{first}-{second}.log"

            def life(at: int, folder: Path = folder) -> None:
                dying(at, "after")
                chosen.run(folder, progress=False, every=0.0)

            if ended(child(partial(life, first))) == 0:  # it has fewer changes than that
                return found
            if len(list((folder / WEIGHTS).glob("*.safetensors"))) != 1 or ended(child(partial(life, second))) == 0:
                break
            found["kills"] += 2
            before = rows(folder)
            found["partly done"] += len(before) == 1 and any((folder / PARTIAL).iterdir())
            assert ended(begin(folder, log, chosen)) == 0
            found["lost"] += [key for key, kept in before.items() if rows(folder).get(key) != kept]
            found["twice"] += repeated(log, set(before), 0)
            found["torn"] += list(torn(folder))
            if (folder / "table.csv").read_bytes() != (calm / "table.csv").read_bytes():
                found["differ"].append([first, second])
    return found


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    study(seeds=1, epochs=1, methods=((0.1, 0.05, 0.0),)).run(
        root / "warm", progress=False
    )  # what torch loads when first used, once for all lives
    kinds: dict[str, Callable[..., dict[str, Any]]] = {"changes": at_changes, "pairs": at_pairs, "moments": at_moments}
    found = kinds[sys.argv[2]](root, *map(int, sys.argv[3:]))
    print(json.dumps(found))


def at_moments(root: Path, seed: int, kills: int) -> dict[str, Any]:
    draws, chosen = random.Random(seed), study()
    calm = root / "calm"
    started = time.perf_counter()
    assert ended(begin(calm, root / "calm.log", chosen)) == 0
    whole = time.perf_counter() - started
    found: dict[str, Any] = {"seconds": whole, "kills": 0, "finished": 0, "lost": [], "twice": [], "torn": []}
    found |= {"differ": [], "rows at kills": [], "weights at kills": [], "checkpoints at kills": []}
    place = 0
    while found["kills"] < kills:
        folder, log = root / f"killed{place}", root / f"killed{place}.log"
        before: dict[str, tuple[bytes, int]] = {}
        while found["kills"] < kills:
            known = len(log.read_text().splitlines()) if log.exists() else 0
            number = begin(folder, log, chosen)
            # Long enough to get on, short enough for a study to die many times.
            time.sleep(draws.uniform(0.0, whole / 6))
            os.kill(number, signal.SIGKILL)
            code = ended(number)
            after = rows(folder) if folder.exists() else {}
            found["lost"] += [key for key, kept in before.items() if after.get(key) != kept]
            found["twice"] += repeated(log, set(before), known)
            found["torn"] += list(torn(folder)) if folder.exists() else []
            before = after
            if code == 0:  # it was done before the kill came
                break
            found["kills"] += 1
            found["rows at kills"].append(len(after))
            found["weights at kills"].append(len(list((folder / WEIGHTS).glob("*"))) if folder.exists() else 0)
            found["checkpoints at kills"].append(len(list((folder / PARTIAL).glob("*"))) if folder.exists() else 0)
        known = len(log.read_text().splitlines()) if log.exists() else 0
        assert ended(begin(folder, log, chosen)) == 0
        found["lost"] += [key for key, kept in before.items() if rows(folder).get(key) != kept]
        found["twice"] += repeated(log, set(before), known)
        found["torn"] += list(torn(folder))
        if (folder / "table.csv").read_bytes() != (calm / "table.csv").read_bytes():
            found["differ"].append(place)
        found["finished"] += 1
        left = [path for path in folder.rglob("*") if path.name.endswith(".part") or path.parent.name == PARTIAL]
        found["torn"] += [f"left behind: {path.name}" for path in left]
        place += 1
    return found


if __name__ == "__main__":
    main()
