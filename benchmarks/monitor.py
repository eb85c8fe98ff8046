"""Measure the cost of a Monitor: a LeNet trained on CIFAR-10 with several caps and without a Monitor, alternating.

Two numbers for every cap: the share that the Monitor reports of itself, and the wall-clock of the same number of steps
beside that of a training without. Trainings take turns, a slice of steps each, so a slow spell of the machine falls on
all of them; each has a watch of its own that runs in its own slices only. Two of them have no Monitor: how far their
times are apart says how much is left of the machine's unrest.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from networks import lenet
from parts.images import Images, images
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.integrations import Monitor

CAPS = (0.05, 0.2)
MARGIN = 1.2  # the cap is to be kept within 20 %
BATCH = 64
PROBE = 256
SLICE = 25  # steps of one training before the next has its turn
WARM_UP = 50  # steps that are not timed
MEASURES = ("hessian_trace", "kappa_trace")


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        cap: of the Monitor; None without one.
        steps: of training.
        seconds: of them, with all measurements.
        measured: how often.
        skipped: how often it was due and there was no time.
        share: as the Monitor reports it.
        overhead: wall-clock over that of the trainings without a Monitor, on average, less 1.
        latest: seconds of the latest measurement.
    """

    cap: float | None
    steps: int
    seconds: float
    measured: int
    skipped: int
    share: float | None
    overhead: float
    latest: float | None


class Watch:
    """A stopwatch."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._before, self._since = self(), None


class Training:
    """A training with the same steps for every cap."""

    def __init__(self, cap: float | None, found: Images, every: str, device: str) -> None:
        torch.manual_seed(0)
        self.cap, self.inputs, self.labels = cap, found.inputs.to(device), found.labels.to(device)
        self.model: nn.Module = lenet().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.watch = Watch()
        self.monitor = None
        if cap is not None:
            probe = self.inputs[:PROBE], self.labels[:PROBE]
            self.monitor = Monitor(
                self.model, probe, measures=MEASURES, every=every, cap=cap, optimizer=self.optimizer, clock=self.watch
            )
        self._batches = self._shuffled()

    def go_on(self, steps: int) -> None:
        self.watch.start()
        for _ in range(steps):
            batch = next(self._batches)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.inputs[batch]), self.labels[batch]).backward()
            self.optimizer.step()
            if self.monitor is not None:
                self.monitor.after_step()
        if self.inputs.is_cuda:
            torch.cuda.synchronize()
        self.watch.stop()

    def _shuffled(self) -> Iterator[Tensor]:
        order = torch.Generator().manual_seed(0)
        while True:
            yield from torch.randperm(len(self.labels), generator=order).to(self.labels.device).split(BATCH)


def row(training: Training, steps: int, plain: float) -> Row:
    monitor, seconds = training.monitor, training.watch()
    if monitor is None:
        return Row(None, steps, seconds, 0, 0, None, seconds / plain - 1, None)
    latest = monitor.history[-1].seconds if monitor.history else None
    counts = len(monitor.history), monitor.num_skipped
    return Row(training.cap, steps, seconds, *counts, monitor.share, seconds / plain - 1, latest)


def same_weights(trainings: list[Training]) -> bool:
    """Return whether the monitor left the training unchanged."""
    first, *others = [list(training.model.parameters()) for training in trainings]
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def shown(rows: list[Row], title: str) -> Table:
    table = Table("cap", "steps", "seconds", "measured", "postponed", title=title)
    for column in ("own share", "", "wall-clock", ""):
        table.add_column(column)
    for each in rows:
        table.add_row(
            "no Monitor" if each.cap is None else f"{each.cap:.0%}",
            str(each.steps),
            f"{each.seconds:.2f}",
            str(each.measured),
            str(each.skipped),
            "" if each.share is None else f"{each.share:.2%}",
            verdict(each.share, each.cap),
            f"{each.overhead:+.2%}",
            verdict(each.overhead, each.cap),
        )
    return table


def verdict(share: float | None, cap: float | None) -> str:
    if cap is None or share is None:
        return ""
    return "kept" if share <= MARGIN * cap else "NOT KEPT"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of training for each cap")
    parser.add_argument("--every", default="100 steps", help="when a measurement is due")
    parser.add_argument("--examples", type=int, default=20_000, help="training images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write everything as JSON, such as benchmarks/results/monitor.json")
    given = parser.parse_args(words)
    found = images("cifar10", given.examples, "standard")
    Training(None, found, given.every, given.device).go_on(WARM_UP)
    trainings = [Training(cap, found, given.every, given.device) for cap in (None, *CAPS, None)]
    console = Console(width=None if sys.stdout.isatty() else 120)
    turns = 0
    with console.status("Training"):
        while trainings[0].watch() < given.seconds:
            for number in range(len(trainings)):  # another begins every time
                trainings[(number + turns) % len(trainings)].go_on(SLICE)
            turns += 1
    plain = (trainings[0].watch() + trainings[-1].watch()) / 2
    rows = [row(training, turns * SLICE, plain) for training in trainings]
    same = same_weights(trainings)
    console.print(shown(rows, f"LeNet on {found.source}, {given.every}, probe of {PROBE}"))
    console.print(f"Weights with and without a Monitor: {'the same, bit for bit' if same else 'DIFFERENT'}.")
    if given.out:
        about: dict[str, Any] = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else platform.machine(),
            "source": found.source,
            "every": given.every,
            "probe": PROBE,
            "batch": BATCH,
            "measures": [*MEASURES, "lambda_max"],
            "same_weights": same,
        }
        given.out.write_text(json.dumps(about | {"rows": [asdict(each) for each in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
