"""The spectral density of a Hessian: saltflat, and curvlinops' Lanczos without reorthogonalization."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import networks
import numpy as np
import torch
from rich.table import Table
from torch import nn

import saltflat
from parts import Options, Outcome, Target
from parts.clock import in_turns
from parts.images import images
from saltflat.spectrum import Spectrum


def by_curvlinops(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], draws: int, steps: int) -> Any:
    """Return grid and density; ARPACK computes the ends of the spectrum."""
    package = import_module("curvlinops")
    parameters = [each for each in model.parameters() if each.requires_grad]
    operator = package.HessianLinearOperator(
        model, nn.CrossEntropyLoss(), parameters, [data], check_deterministic=False
    )
    return package.lanczos_approximate_spectrum(operator, steps, num_repeats=draws)


COMPETITORS = {"curvlinops": by_curvlinops}


def run(options: Options) -> Outcome:
    torch.manual_seed(0)
    count, draws, steps = (4, 2, 5) if options.quick else (256, 8, 50)
    source = images("cifar10", count, "standard")
    model = networks.lenet().eval()
    data = source.inputs, source.labels

    def ours(k: int) -> Spectrum:
        return saltflat.compute_spectrum(model, data, k=k, smallest=1, draws=draws, steps=steps)

    calls: dict[str, Callable[[], object]] = {"saltflat, k=1": lambda: ours(1), "saltflat, k=10": lambda: ours(10)}
    notes: tuple[str, ...] = ()
    for name, peer in COMPETITORS.items():
        try:
            import_module(name)
        except ImportError as problem:
            notes += (f"{name} is not there: {problem}",)
        else:
            calls[name] = partial(peer, model, data, draws, steps)
    options.tell("density: everybody in turns")
    seconds = {name: min(each) for name, each in in_turns(calls, options.repeats).items()}
    rows = [{"competitor": name, "seconds": best} for name, best in seconds.items()]
    found = ours(1)
    difference = None
    if "curvlinops" in calls:
        grid, theirs = (each.double().numpy() for each in by_curvlinops(model, data, draws, steps))
        # Their Gaussians have this width, on a spectrum brought to [-1, 1].
        width = (grid[-1] - grid[0]) / 2 * 2 / (steps - 1) / (8 * np.log(3)) ** 0.5
        density = found.density(grid, float(width)).value
        difference = float(np.abs(np.cumsum(density - theirs)).max() * (grid[1] - grid[0]))
    table = Table("", "seconds", "ratio", title=f"LeNet, float32, {source.source}: {draws} probes of {steps} steps")
    best = seconds["saltflat, k=1"]
    for name, each in seconds.items():
        table.add_row(name, f"{each:.2f}", f"{each / best:.2f}")
    targets: tuple[Target, ...] = ()
    if difference is not None:
        ratio = seconds["curvlinops"] / best
        targets = (
            Target("no slower than curvlinops", f"{ratio:.2f} times as fast", ratio >= 1),
            Target("cumulative distributions within 0.02", f"{difference:.4f}", difference < 0.02),
        )
    return Outcome(table, targets, {"rows": rows, "difference": difference}, notes)
