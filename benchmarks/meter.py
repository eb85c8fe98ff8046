"""Time the first and the second measurement of a Meter, and the sweep alone, on the CPU.

Models with random weights and random inputs. The first call prepares; the second, after a change of the weights,
checks that it need not. The sweep is what the report of the second call gives for it, less these checks. In every round
each network has a new Meter, after a measurement that warms up; the medians count.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from networks import CLASSES, lenet, mlp, resnet20
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import saltflat
from saltflat.engine.strategy import confirm_probe

NETWORKS = {"mlp": (mlp, (784,), 1024), "lenet": (lenet, (3, 32, 32), 256), "resnet20": (resnet20, (3, 32, 32), 64)}
FEW = 16  # examples
# What to measure: the default report, and a number for a training that is monitored.
SETTINGS: dict[str, dict[str, Any]] = {
    "quick": {"measures": "quick"},
    "hessian_trace": {"measures": "hessian_trace", "certificate": False, "sampling": False},
}


@dataclass(frozen=True)
class Row:
    """A network with one choice of measures.

    Attributes:
        network: its name.
        examples: how many were measured.
        measures: what was measured.
        first: seconds of the call that prepares.
        second: seconds of the next call, after the weights have changed.
        checks: seconds that the second call takes to check what it uses again.
        sweep: seconds of the sweep in the second call, without these.
        first_by_second: the median over the rounds of their ratio.
        second_by_sweep: the same of the second call and its sweep.
        preparations: how often the Meter prepared in the two calls.
    """

    network: str
    examples: int
    measures: str
    first: float
    second: float
    checks: float
    sweep: float
    first_by_second: float
    second_by_sweep: float
    preparations: int


@dataclass(frozen=True)
class Round:
    """The seconds of one round."""

    first: float
    second: float
    checks: float
    sweep: float


@contextmanager
def time_checks() -> Iterator[list[float]]:
    """Record the seconds of each time that a probe is confirmed."""
    found: list[float] = []

    def confirm_and_record(*args: Any) -> Any:
        started = time.perf_counter()
        try:
            return confirm_probe(*args)
        finally:
            found.append(time.perf_counter() - started)

    with patch("saltflat.engine.context.confirm_probe", confirm_and_record):
        yield found


def measure_twice(model: nn.Module, data: tuple[Tensor, Tensor], settings: dict[str, Any]) -> tuple[Round, int]:
    """Return the seconds of two calls of a new Meter, and how often it prepared."""
    meter = saltflat.Meter(model, progress=False, **settings)
    started = time.perf_counter()
    meter.measure(data)
    between = time.perf_counter()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    begun = time.perf_counter()
    with time_checks() as checks:
        report = meter.measure(data)
    second = time.perf_counter() - begun
    return Round(
        between - started, second, sum(checks), report.seconds_by_step["sweep"] - sum(checks)
    ), meter.num_preparations


def make_row(network: str, examples: int, measures: str, repeats: int) -> Row:
    """Measure a network in several rounds."""
    torch.manual_seed(0)
    make, shape, _ = NETWORKS[network]
    model = make().eval()
    data = torch.randn(examples, *shape), torch.randint(CLASSES, (examples,))
    saltflat.measure(model, data, progress=False, **SETTINGS[measures])
    rounds, preparations = zip(*(measure_twice(model, data, SETTINGS[measures]) for _ in range(repeats)), strict=True)
    return Row(
        network,
        examples,
        measures,
        median(each.first for each in rounds),
        median(each.second for each in rounds),
        median(each.checks for each in rounds),
        median(each.sweep for each in rounds),
        median(each.first / each.second for each in rounds),
        median(each.second / each.sweep for each in rounds),
        max(preparations),
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    parser.add_argument("--examples", type=int, help="of every network; its own number and a few if left out")
    parser.add_argument("--out", type=Path, help="write everything as JSON, such as benchmarks/results/meter_cpu.json")
    given = parser.parse_args(words)
    rows = [
        make_row(network, examples, measures, given.repeats)
        for network, (_, _, usual) in NETWORKS.items()
        for examples in ([given.examples] if given.examples else [usual, FEW])
        for measures in SETTINGS
    ]
    table = Table(
        "network",
        "examples",
        "measures",
        "first s",
        "second s",
        "checks s",
        "sweep s",
        "first / second",
        "second / sweep",
    )
    for each in rows:
        seconds = (f"{value:.3f}" for value in (each.first, each.second, each.checks, each.sweep))
        ratios = f"{each.first_by_second:.2f}", f"{each.second_by_sweep:.2f}"
        table.add_row(each.network, str(each.examples), each.measures, *seconds, *ratios)
    Console(width=120).print(table)
    if given.out:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": platform.machine()}
        given.out.write_text(
            json.dumps(about | {"repeats": given.repeats, "rows": [asdict(each) for each in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
