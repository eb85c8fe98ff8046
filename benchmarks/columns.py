"""Measure the cost and the error of random columns, on a trained network with 100 classes.

Trains a small convolutional network on 100 classes of noisy patterns, then measures curvature traces of 1000 training
examples with all 99 columns, with the few likeliest classes plus random columns (`top`), and with random columns alone
(`sampled`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.statistics.compute import Statistics

CLASSES, EXAMPLES = 100, 1000
CHOICES = ("exact", "top:1", "top:3", "top:5", "sampled:4", "sampled:8", "sampled:16")


def patterns(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw 16x16 images that are one of 100 fixed random patterns plus noise."""
    means = torch.randn(CLASSES, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    return means[labels] + 2.5 * torch.randn(count, 1, 16, 16, generator=noise), labels


def trained(epochs: int) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, CLASSES)),
    )
    inputs, labels = patterns(10_000, seed=1)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in track(range(epochs), "Training"):
        for chunk in torch.randperm(len(inputs)).split(200):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs[chunk]), labels[chunk]).backward()
            optimizer.step()
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repetitions")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()

    net = trained(options.epochs)
    inputs, labels = patterns(10_000, seed=1)
    data = inputs[:EXAMPLES], labels[:EXAMPLES]
    with torch.no_grad():
        accuracy = float((net(data[0]).argmax(1) == data[1]).float().mean())

    seconds: dict[str, list[float]] = {choice: [] for choice in CHOICES}
    found: dict[str, Statistics] = {}
    for repeat in track(range(options.repeats + 1), "Measuring"):
        for choice in CHOICES:
            started = time.perf_counter()
            found[choice] = saltflat.compute_statistics(
                net, data, names="curvature_trace", columns=choice, progress=False
            )
            if repeat:  # the first round warms up
                seconds[choice].append(time.perf_counter() - started)

    exact = found["exact"]["curvature_trace"]
    rows = []
    for choice in CHOICES:
        values = found[choice]["curvature_trace"]
        errors = found[choice].stderr.get("curvature_trace", {name: torch.zeros(()) for name in exact})
        rows.append(
            {
                "columns": choice,
                "seconds": statistics.median(seconds[choice]),
                "cost": statistics.median(seconds[choice]) / statistics.median(seconds["exact"]),
                "stderr": max(float(errors[name] / exact[name]) for name in exact),
                "off": max(abs(float(values[name] / exact[name]) - 1) for name in exact),
            }
        )
    table = Table(
        title=f"{EXAMPLES} examples, {CLASSES} classes, loss {found['exact'].loss:.3f}, accuracy {accuracy:.3f}"
    )
    for heading in ("columns", "seconds", "cost to exact", "largest relative stderr", "largest relative error"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["columns"]),
            f"{row['seconds']:.3f}",
            f"{row['cost']:.3f}",
            f"{row['stderr']:.2%}",
            f"{row['off']:.2%}",
        )
    Console().print(table)
    if options.out:
        record = {"loss": found["exact"].loss, "accuracy": accuracy, "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
