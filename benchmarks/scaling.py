"""How time and memory of the exact Gauss-Newton diagonal grow with examples, width, depth, classes and parameters.

    python benchmarks/scaling.py --out benchmarks/results/scaling_cpu.jsonl --plot docs/scaling.png
    python benchmarks/scaling.py --device cuda --scale full --out benchmarks/results/scaling_cuda.jsonl
    python benchmarks/scaling.py --scale smoke      # only to check that it runs

Networks with random weights on random inputs; one thread on a CPU, so that its time is that of one core. Every row is
written as soon as it is known, and a run that was interrupted goes on with the rows that are missing.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import fill
from typing import Any

import curvature
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from networks import CLASSES, Call, Problem, Setting, Values, lenet
from rich.console import Console
from rich.table import Table
from scipy.stats import t
from torch import nn

STATISTIC = "curvature_diagonal"
MEMORY = "1GiB"
PANELS = 3  # of a figure, beside each other
FITTED = 4  # largest sizes of a series, which its exponent is fitted to
PATIENCE = 3.0  # seconds after which a call is not repeated
LONGEST, LARGEST = 20.0, 6144.0  # seconds and MiB of a call, from which on a series ends
PEERS = ("backpack", "nngeometry", "vmap")
SALTFLAT = ("saltflat", "saltflat top:3", "saltflat sampled:4")


def mlp(inputs: int, width: int, depth: int, classes: int) -> nn.Module:
    """Return a network of ``depth`` hidden layers whose outputs neither vanish nor explode with the depth."""
    layers: list[nn.Module] = []
    for before in [inputs, *[width] * (depth - 1)]:
        layers += [nn.Linear(before, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, classes))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


def find_width(parameters: int) -> int:
    """Return the width of three hidden layers with 784 inputs that has about this many parameters."""
    linear = 784 + CLASSES + 3
    return max(1, round((math.sqrt(linear**2 + 8 * parameters) - linear) / 4))


@dataclass(frozen=True)
class Axis:
    """What grows, and what is kept.

    Attributes:
        build: makes the network, the shape of an input, the number of examples and that of classes from the size.
        fixed: what is kept, in words.
        sizes: by scale.
        competitors: who is run.
    """

    build: Callable[[int], tuple[nn.Module, tuple[int, ...], int, int]]
    fixed: str
    sizes: Mapping[str, Sequence[int]]
    competitors: Sequence[str] = (SALTFLAT[0], *PEERS)


AXES = {
    "examples": Axis(
        lambda n: (mlp(784, 512, 2, CLASSES), (784,), n, CLASSES),
        "MLP 784-512-512-10",
        {"smoke": (4, 8, 16), "usual": (100, 300, 1000, 3000, 10_000, 50_000)},
    ),
    "images": Axis(
        lambda n: (lenet(), (3, 32, 32), n, CLASSES),
        "LeNet-5 on 3x32x32",
        {"smoke": (2, 4, 8), "usual": (100, 300, 1000, 3000, 10_000), "full": (100, 300, 1000, 3000, 10_000, 50_000)},
    ),
    "width": Axis(
        lambda width: (mlp(256, width, 3, CLASSES), (256,), 256, CLASSES),
        "3 hidden layers, 256 inputs, 256 examples",
        {"smoke": (4, 8, 16), "usual": (32, 64, 128, 256, 512, 1024, 2048)},
    ),
    "depth": Axis(
        lambda depth: (mlp(256, 128, depth, CLASSES), (256,), 256, CLASSES),
        "hidden layers of 128 units, 256 inputs, 256 examples",
        {"smoke": (1, 2, 4), "usual": (2, 4, 8, 16, 32, 64)},
    ),
    "parameters": Axis(
        lambda count: (mlp(784, find_width(count), 3, CLASSES), (784,), 64, CLASSES),
        "3 hidden layers, 784 inputs, 64 examples",
        {"smoke": (10_000, 20_000, 40_000), "usual": (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)},
    ),
    "classes": Axis(
        lambda classes: (mlp(256, 256, 2, classes), (256,), 128, classes),
        "2 hidden layers of 256 units, 256 inputs, 128 examples",
        {"smoke": (5, 10, 20), "usual": (10, 32, 100, 316, 1000)},
        (*SALTFLAT, "backpack", "nngeometry"),  # the plain vmap is written for ten classes
    ),
}


def saltflat_columns(task: Problem, statistic: str, setting: Setting, columns: str) -> Call:
    """Return the call of saltflat with random columns."""
    package: Any = import_module("saltflat")

    def call() -> Values:
        found = package.compute_statistics(
            task.model, (task.inputs, task.targets), names=statistic, columns=columns, memory=MEMORY, progress=False
        )
        values: Values = found[statistic]
        return values

    return call


for _name in SALTFLAT[1:]:
    curvature.COMPETITORS[_name] = partial(saltflat_columns, columns=_name.removeprefix("saltflat "))


@dataclass(frozen=True)
class Point:
    """One call: a competitor at a size."""

    axis: str
    size: int
    competitor: str
    device: str


def make_task(point: Point) -> Problem:
    torch.manual_seed(0)
    model, shape, examples, classes = AXES[point.axis].build(point.size)
    inputs, targets = torch.randn(examples, *shape), torch.randint(classes, (examples,))
    return Problem(model.eval().to(point.device), inputs.to(point.device), targets.to(point.device))


def time_point(point: Point, repeats: int) -> dict[str, Any]:
    """Return the seconds of a competitor with the best of its settings: the least of several calls."""
    task, row = make_task(point), curvature.Row(point.competitor, STATISTIC)
    call = curvature.quickest(task, row, MEMORY)
    if call is None:
        return {"reason": row.reason}
    wall: list[float] = []
    cpu: list[float] = []
    while len(wall) < repeats and (len(wall) < 1 or sum(wall) < PATIENCE):
        started = time.process_time()
        wall.append(curvature.seconds_of(call, task.inputs.device))
        cpu.append(time.process_time() - started)
    parameters = sum(value.numel() for value in task.model.parameters())
    setting = {"setting": list(row.setting), "parameters": parameters, "repeats": len(wall)}
    return {"seconds": min(wall), "cpu_seconds": min(cpu), **setting}


def weigh_point(point: Point, setting: Sequence[Any]) -> dict[str, Any]:
    """Return the memory that one call takes beside model and data."""
    row = curvature.Row(point.competitor, STATISTIC, Setting(*setting))
    return {"extra_mib": curvature.extra_memory(make_task(point), row)}


def send_result(sender: Connection, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    sender.send(function(*arguments))


def run_apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call a function in a process of its own: memory freed by one call would hide what the next takes."""
    forks = sys.platform == "linux" and arguments[0].device == "cpu"
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    receiver, sender = context.Pipe(False)
    process = context.Process(target=send_result, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
        return found
    except EOFError:
        return {"reason": "the process ended, perhaps for lack of memory"}
    finally:
        process.join()


def run_point(point: Point, repeats: int, apart: bool) -> dict[str, Any]:
    """Return the row of a point."""
    run = run_apart if apart else lambda function, *arguments: function(*arguments)
    found = run(time_point, point, repeats)
    if "setting" in found:
        found |= run(weigh_point, point, found["setting"])
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # above 1: other work ran
    return {**asdict(point), **found, "load": load, "torch": torch.__version__}


def predict_end(rows: Sequence[Mapping[str, Any]], size: int) -> str:
    """Return why a series should not go on to this size, judging by the rows so far; empty if it should."""
    last = rows[-1] if rows else {}
    if "reason" in last:
        return str(last["reason"])
    for key, most, unit in ((get_time_key(rows), LONGEST, "s"), ("extra_mib", LARGEST, "MiB")):
        # Growth as between the last two sizes, which for the first two is proportional at most.
        grown = size / last["size"] if last else 1.0
        power = measure_growth(rows, key)
        guess = (last.get(key) or 0.0) * grown**power
        if guess > most:
            return f"not run: about {guess:,.0f} {unit}"
    return ""


def measure_growth(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the exponent of growth between the last two rows, at least 1 and at most 3."""
    if len(rows) < 2 or not rows[-1].get(key) or not rows[-2].get(key):
        return 1.0
    rise = math.log(rows[-1][key] / rows[-2][key]) / math.log(rows[-1]["size"] / rows[-2]["size"])
    return min(3.0, max(1.0, rise))


@dataclass(frozen=True)
class Fit:
    """The exponent of a power law, with its 95 % interval."""

    exponent: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.exponent:.2f} [{self.low:.2f}, {self.high:.2f}]"


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> Fit | None:
    """Fit a line to the logarithms of the largest sizes; None for fewer than three.

    Fixed costs outweigh the rest at small sizes. The interval says how well a power law describes these points, and how
    far times scatter.
    """
    pairs = sorted((size, value) for size, value in zip(sizes, values, strict=True) if value and value > 0)[-FITTED:]
    if len(pairs) < 3:
        return None
    x, y = np.log(pairs).T
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    off = y - y.mean() - slope * x
    error = math.sqrt(float(off @ off) / (len(x) - 2) / float(x @ x))
    margin = float(t.ppf(0.975, len(x) - 2)) * error
    return Fit(slope, slope - margin, slope + margin)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, but for those of peers that were absent, and one that was not written to its end."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [row for row in map(json.loads, lines) if "ModuleNotFoundError" not in row.get("reason", "")]


def list_series(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, list[Mapping[str, Any]]]]:
    """Yield axis, competitor and its rows with numbers, in ascending order."""
    for axis, each in AXES.items():
        for competitor in each.competitors:
            own = [row for row in rows if (row["axis"], row["competitor"]) == (axis, competitor) and "seconds" in row]
            if own:
                yield axis, competitor, sorted(own, key=lambda row: row["size"])


def get_time_key(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the time that is compared: that of the core, which other work disturbs less, or that of the clock."""
    return "cpu_seconds" if all(row["device"] == "cpu" for row in rows) else "seconds"


def make_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    key = get_time_key(rows)
    table = Table("axis", "competitor", "sizes", "seconds", "exponent", "MiB", "exponent")
    for axis, competitor, own in list_series(rows):
        sizes = [row["size"] for row in own]
        cells = [f"{sizes[0]:,} to {sizes[-1]:,}"]
        for name, style in ((key, ".3g"), ("extra_mib", ".0f")):
            values = [row.get(name) or 0.0 for row in own]
            cells += [f"{values[0]:{style}} to {values[-1]:{style}}", str(fit_exponent(sizes, values) or "n/a")]
        table.add_row(axis, competitor, *cells)
    return table


def draw_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time and memory over every axis, both logarithmic, with the fitted exponents."""
    key = get_time_key(rows)
    shown = [axis for axis in AXES if any(row["axis"] == axis for row in rows)]
    # Three axes beside each other, the time of each above its memory.
    groups = -(-len(shown) // PANELS)
    figure, grid = plt.subplots(
        2 * groups, PANELS, figsize=(3.4 * PANELS, 8.4 * groups), squeeze=False, layout="constrained"
    )
    axes = np.hstack([grid[2 * group : 2 * group + 2] for group in range(groups)])
    for panel in axes[:, len(shown) :].flat:
        panel.set_axis_off()
    names = [*SALTFLAT, *PEERS]
    for axis, competitor, own in list_series(rows):
        color = f"C{names.index(competitor)}"
        for panel, name in zip(axes[:, shown.index(axis)], (key, "extra_mib"), strict=True):
            draw_series(panel, own, name, competitor, color)
    for column, axis in enumerate(shown):
        axes[0][column].set_title(fill(f"{axis}: {AXES[axis].fixed}", 36), fontsize=8)
        for panel in axes[:, column]:
            panel.set(xscale="log", yscale="log", xlabel=axis)
            panel.xaxis.set_minor_formatter(NullFormatter())
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
            panel.legend(fontsize=7, title="exponents, with 95 % intervals", title_fontsize=7, **place)
    for upper, lower in zip(grid[::2], grid[1::2], strict=True):
        upper[0].set_ylabel("CPU seconds, one thread" if key == "cpu_seconds" else "seconds")
        lower[0].set_ylabel("MiB beside model and data")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_series(panel: Axes, rows: Sequence[Mapping[str, Any]], key: str, competitor: str, color: str) -> None:
    pairs = [(row["size"], row[key]) for row in rows if row.get(key)]
    if not pairs:
        return
    sizes, values = zip(*pairs, strict=True)
    fit = fit_exponent(sizes, values)
    said = f": {fit.exponent:.2f} ± {fit.exponent - fit.low:.2f}" if fit else ""
    panel.plot(sizes, values, "o-", ms=3, lw=1, color=color, label=f"{competitor}{said}")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--competitors", nargs="+", choices=(*SALTFLAT, *PEERS), default=[*SALTFLAT, *PEERS])
    parser.add_argument("--scale", choices=("smoke", "usual", "full"), default="usual", help="the sizes")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--repeats", type=int, default=3, help="calls of which the fastest counts")
    parser.add_argument("--out", type=Path, default=Path("scaling.jsonl"), help="rows, which a later run goes on with")
    parser.add_argument("--plot", type=Path, help="draw the rows, such as docs/scaling.png")
    given = parser.parse_args(words)
    console = Console(width=None if sys.stdout.isatty() else 140)
    rows = read_rows(given.out)
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for axis in given.axes:
        each = AXES[axis]
        for competitor in [name for name in each.competitors if name in given.competitors]:
            series: list[dict[str, Any]] = []
            for size in each.sizes.get(given.scale, each.sizes["usual"]):
                point = Point(axis, size, competitor, given.device)
                row = next((row for row in rows if all(row[k] == v for k, v in asdict(point).items())), None)
                if row is None:
                    reason = predict_end(series, size)
                    row = (
                        {**asdict(point), "reason": reason}
                        if reason
                        else run_point(point, given.repeats, given.scale != "smoke")
                    )
                    rows.append(row)
                    with given.out.open("a") as out:
                        out.write(json.dumps(row) + "\n")
                    console.print(
                        f"{axis} {size:,} {competitor}: {row.get('reason') or row['cpu_seconds']}", markup=False
                    )
                series.append(row)
    console.print(make_table(rows))
    if given.plot:
        draw_rows(rows, given.plot)


if __name__ == "__main__":
    main()
