"""Normalized sharpness: balancing against gradient descent on the scales, on a trained network.

Both minimise, for every weight, the sum over its entries of curvature * s * t + squared weight / (s * t) over the
scales s of rows and t of columns: the objective of the paper's first version.
"""

from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from parts import Options, Outcome, Target
from parts.clock import in_turns, seconds_of
from parts.images import images
from saltflat.balance import balance_bipartite

TOLERANCE = 1e-10
Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class Sides(NamedTuple):
    """The curvature diagonal and the squares of a weight."""

    F: Tensor
    U: Tensor


class Minimum(NamedTuple):
    value: float
    residual: float


def trained(widths: tuple[int, ...], inputs: Tensor, labels: Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip((784, *widths), (*widths, 10), strict=True):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(steps):
        chosen = torch.randint(len(inputs), (256,))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
    return model


def sides(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Sides]:
    found = saltflat.compute_statistics(
        model, (inputs, labels), names="curvature_diagonal", dtype=torch.float64, progress=False
    )
    weights = {name: value.detach().double() for name, value in model.named_parameters() if value.dim() == 2}
    return {name: Sides(found["curvature_diagonal"][name], value.square()) for name, value in weights.items()}


def balanced(layers: Mapping[str, Sides]) -> Minimum:
    found = [balance_bipartite(*each, tolerance=TOLERANCE) for each in layers.values()]
    return Minimum(sum(each.value for each in found), max(each.residual for each in found))


def descent(side: Sides, make: Optimizer, decay: float, steps: int) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the scales after gradient steps from 0 on the objective divided by its value at 0."""
    whole = side.F.sum() + side.U.sum()
    H, U = side.F / whole, side.U / whole
    rows, columns = (torch.zeros(size, dtype=torch.float64, requires_grad=True) for size in H.shape)
    optimizer = make([rows, columns])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + decay * step))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = rows.exp() @ (H @ columns.exp()) + (-rows).exp() @ (U @ (-columns).exp())
        loss.backward()
        optimizer.step()
        schedule.step()
    return rows.detach(), columns.detach()


def descended(layers: Mapping[str, Sides], make: Optimizer, decay: float, steps: int) -> Minimum:
    parts = []
    for side in layers.values():
        rows, columns = descent(side, make, decay, steps)
        scales = torch.outer(rows.exp(), columns.exp())
        up, down = side.F * scales, side.U / scales
        ratios = torch.cat([(up.sum(axis) / down.sum(axis)).log() for axis in (0, 1)])
        # A unit that nothing flows through has no balance: its ratio is 0, infinite or 0/0.
        residual = ratios[ratios.isfinite()].abs().max()
        parts.append((float(up.sum() + down.sum()), float(residual)))
    return Minimum(sum(value for value, _ in parts), max(residual for _, residual in parts))


DESCENTS: dict[str, tuple[Optimizer, float]] = {
    "SGD 1e-3, as published": (lambda scales: torch.optim.SGD(scales, 1e-3), 1e-3),
    "Adam 0.05": (lambda scales: torch.optim.Adam(scales, 0.05), 0.0),
}


def run(options: Options) -> Outcome:
    widths, steps, training = ((16, 8), 50, 20) if options.quick else ((512, 128, 512), 10_000, 400)
    source = images("mnist", 200 if options.quick else 10_000, "half")
    options.tell("balance: training")
    model = trained(widths, source.inputs, source.labels, training)
    n = min(1000, len(source.inputs))
    layers = sides(model, source.inputs[:n], source.labels[:n])

    mine = balanced(layers)
    seconds = {"saltflat": in_turns({"saltflat": lambda: balanced(layers)}, options.repeats)["saltflat"]}
    found = {"saltflat": mine}
    for name, (make, decay) in DESCENTS.items():
        options.tell(f"balance: {steps:,} steps of {name}")

        def call(name: str = name, make: Optimizer = make, decay: float = decay) -> None:
            found[name] = descended(layers, make, decay, steps)

        seconds[name] = [seconds_of(call)]
    seconds["saltflat"] += in_turns({"saltflat": lambda: balanced(layers)}, options.repeats)["saltflat"]

    own = median(seconds["saltflat"])
    shape = "-".join(str(width) for width in (784, *widths, 10))
    table = Table(title=f"Normalized sharpness of an MLP {shape}; {n} of {source.source}")
    for heading in ("minimiser", "value", "above saltflat's", "largest imbalance", "seconds", "/ saltflat"):
        table.add_column(heading, justify="left" if heading == "minimiser" else "right")
    targets = []
    for name, (value, residual) in found.items():
        ratio = median(seconds[name]) / own
        above = value / mine.value - 1
        table.add_row(
            *(name, f"{value:.9g}", f"{above:.1e}", f"{residual:.1e}", f"{median(seconds[name]):.4f}", f"{ratio:.0f}x"),
        )
        if name != "saltflat":
            targets.append(
                Target(
                    f"100 times faster than {steps:,} steps of {name}, value no larger",
                    f"{ratio:.0f} times, theirs is {above:.1e} above",
                    # Two sums of half a million terms agree to rounding only.
                    ratio >= 100 and mine.residual <= TOLERANCE and above > -1e-12,
                )
            )
    with torch.no_grad():
        loss = float(F.cross_entropy(model(source.inputs), source.labels))
    rows = [
        {"minimiser": name, "value": value, "residual": residual, "seconds": seconds[name]}
        for name, (value, residual) in found.items()
    ]
    record = {"images": source.source, "steps": steps, "training_steps": training, "training_loss": loss, "rows": rows}
    notes = (f"Trained with {training} Adam steps to a training loss of {loss:.3f}. The descents run once.",)
    return Outcome(table, tuple(targets), record, notes)
