"""Traces of the Hessian: the exact formula against a loop of second derivatives (Ibayashi et al., 2021, figure 1).

The loop differentiates every entry of the gradient once more. The networks are the paper's, untrained, in float32; the
values are compared in float64 as well.
"""

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from networks import Problem
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from parts import Options, Outcome, Target
from parts.clock import seconds_of
from parts.images import images

# Speed-ups for 10, 100 and 1000 examples, on a GPU.
PAPER = {"SmallMLP": {10: 590, 100: 590, 1000: 587}, "SmallCNN": {10: 392, 100: 301, 1000: 63}}
HEADINGS = (
    *("network", "examples", "loop, s", "entries", "saltflat, s", "faster", "in the paper"),
    *("trace", "difference in float32", "in float64"),
)


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 10))


def small_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(320, 10)),
    )


@dataclass(frozen=True)
class Loop:
    """Second derivatives of single entries, numbered across all parameters."""

    entries: Tensor
    values: Tensor
    count: int
    seconds: float  # for all entries: extrapolated where some are missing

    @property
    def whole(self) -> bool:
        return len(self.entries) == self.count


def loop(task: Problem, limit: float | None) -> Loop:
    """Run one backward pass for every entry, in random order, so that the first ones are representative."""
    started = time.perf_counter()
    parameters = list(task.model.parameters())
    loss = F.cross_entropy(task.model(task.inputs), task.targets)
    gradients = [each.flatten() for each in torch.autograd.grad(loss, parameters, create_graph=True)]
    places = [(k, j) for k, each in enumerate(gradients) for j in range(each.numel())]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    values = []
    looping = time.perf_counter()
    for number in order.tolist():
        k, j = places[number]
        (second,) = torch.autograd.grad(gradients[k][j], parameters[k], retain_graph=True)
        values.append(second.flatten()[j])
        if limit is not None and time.perf_counter() - looping > limit:
            break
    passed = time.perf_counter() - looping
    seconds = looping - started + passed * len(places) / len(values)
    return Loop(order[: len(values)], torch.stack(values).double(), len(places), seconds)


def trace(task: Problem) -> float:
    data = task.inputs, task.targets
    found = saltflat.compute_statistics(task.model, data, names="curvature_trace", progress=False)
    return sum(float(value) for value in found["curvature_trace"].values())


def difference(task: Problem, found: Loop) -> float:
    """Return the relative difference of the sums; if the loop was stopped, of the sums of its entries."""
    mine = trace(task)
    if not found.whole:
        data = task.inputs, task.targets
        diagonal = saltflat.compute_statistics(task.model, data, names="curvature_diagonal", progress=False)[
            "curvature_diagonal"
        ]
        mine = float(torch.cat([each.flatten() for each in diagonal.values()])[found.entries].sum())
    return abs(float(found.values.sum()) / mine - 1)


def compared(network: str, examples: int, task: Problem, options: Options) -> dict[str, Any]:
    trace(task)
    loop(task, 0.1 if options.quick else 1.0)  # the first second derivatives of a convolution take seconds to prepare
    options.tell(f"{network}, {examples} examples: loop of second derivatives")
    seconds = [seconds_of(lambda: trace(task)) for _ in range(options.repeats)]
    found = loop(task, options.loop_limit)
    seconds += [seconds_of(lambda: trace(task)) for _ in range(options.repeats)]
    single = difference(task, found)
    options.tell(f"{network}, {examples} examples: the same in float64")
    double = Problem(task.model.double(), task.inputs.double(), task.targets)
    precise = loop(double, options.loop_limit)
    return {
        "network": network,
        "examples": examples,
        "loop_seconds": found.seconds,
        "loop_entries": len(found.entries),
        "entries": found.count,
        "extrapolated": not found.whole,
        "seconds": seconds,
        "faster": found.seconds / median(seconds),
        "paper": PAPER[network].get(examples),
        "trace": trace(double),
        "difference_float32": single,
        "difference_float64": difference(double, precise),
        "float64_entries": len(precise.entries),
    }


def run(options: Options) -> Outcome:
    counts = (3,) if options.quick else (10, 100, 1000)
    source = images("mnist", max(counts), "half")
    rows = []
    for network, build in (("SmallMLP", small_mlp), ("SmallCNN", small_cnn)):
        for n in counts:
            torch.manual_seed(0)
            rows.append(compared(network, n, Problem(build().eval(), source.inputs[:n], source.labels[:n]), options))
    table = Table(*HEADINGS, title=f"Trace of the Hessian, untrained networks, first of {source.source}")
    for row in rows:
        entries = f"{row['loop_entries']:,} of {row['entries']:,}, EXTRAPOLATED" if row["extrapolated"] else "all"
        table.add_row(
            *(row["network"], str(row["examples"]), f"{row['loop_seconds']:.2f}", entries),
            *(f"{median(row['seconds']):.4f}", f"{row['faster']:.0f}x", f"{row['paper']}x" if row["paper"] else "-"),
            *(f"{row['trace']:.3f}", f"{row['difference_float32']:.1e}", f"{row['difference_float64']:.1e}"),
        )
    worst = max(row["difference_float64"] for row in rows)
    short = sum(row["float64_entries"] < row["entries"] for row in rows)
    found = f"at most {worst:.1e}" + (f" ({short} of {len(rows)} loops were cut short)" if short else "")
    target = Target("trace within 1e-6 of a loop of second derivatives, float64", found, worst <= 1e-6)
    notes = (
        "The loop runs once; saltflat's time is the median of runs before and after it. The paper's are on a GPU.",
    )
    return Outcome(table, (target,), {"images": source.source, "rows": rows}, notes)
