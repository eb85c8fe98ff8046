"""Simulate how often bounds fail: 1000 data sets from a known distribution, with a network trained on each.

    python benchmarks/validity.py                  # writes benchmarks/results/validity.json
    python benchmarks/validity.py --sets 20 --out validity.json

The classes are two normal distributions in the plane, so the error of a linear classifier on new data is known. A bound
fails on a data set if it is below this error for the posterior that it is about; with ``delta=0.05`` at most 5 % may.
For comparison: how often the risk of the same random networks on the *examples* is below it.

With random labels nothing can be learned, and no bound may be below 0.9 of the error of guessing.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import saltflat
from saltflat.bounds import (
    Bound,
    bound_catoni,
    bound_linear,
    bound_maurer,
    bound_mcallester,
    choose_strength,
    stochastic,
)
from saltflat.bounds.distributions import Gaussian, WeightDistribution
from saltflat.bounds.pac_bayes import make_grid

DELTA = 0.05
EXAMPLES = 1000
APART = 1.0  # from each class's mean to the line between them, in deviations
GUESSING = 0.5
PAPER = ("multiplicative", "parameterwise", "row_column", "row_column_estimated", "isotropic")
GRID = make_grid(2.0**4, 2.0**12, 2.0)
NETWORKS = 10_000  # drawn from a posterior to compute its risks
# Of the posterior of the certificate with a prior at the initial weights.
INEQUALITIES: dict[str, Callable[[float, float], float]] = {
    "linear, c = 2": lambda risk, kl: choose_strength(bound_linear, risk, kl, EXAMPLES, DELTA, GRID, constant=2.0)[0],
    "linear, c = 8": lambda risk, kl: choose_strength(bound_linear, risk, kl, EXAMPLES, DELTA, GRID, constant=8.0)[0],
    "Catoni": lambda risk, kl: choose_strength(bound_catoni, risk, kl, EXAMPLES, DELTA, GRID)[0],
    "McAllester": lambda risk, kl: bound_mcallester(risk, kl, EXAMPLES, DELTA),
    "Maurer": lambda risk, kl: bound_maurer(risk, kl, EXAMPLES, DELTA),
}
# The bound, the risk of its random networks on the examples, and their error on new data.
Trial = tuple[float, float, float]
Examples = tuple[Tensor, Tensor]


def draw_examples(seed: int, random_labels: bool) -> Examples:
    """Draw two normal classes, one on each side of a line."""
    dice = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (EXAMPLES,), generator=dice)
    x = torch.randn(EXAMPLES, 2, generator=dice, dtype=torch.float64)
    x[:, 0] += APART * (2.0 * y - 1)
    return x, torch.randint(2, (EXAMPLES,), generator=dice) if random_labels else y


def compute_risks(weights: WeightDistribution, seed: int, data: Examples) -> tuple[float, float]:
    """Compute the error of linear classifiers with random weights, on the examples and on new data."""
    dice = torch.Generator().manual_seed(seed)

    def draw_normal(name: str, label: str) -> Tensor:
        return torch.randn(NETWORKS, *weights.mean[name].shape, generator=dice, dtype=torch.float64)

    drawn = {name: weights.combine(name, partial(draw_normal, name)) for name in weights.mean}
    slopes, shifts = (drawn[name][:, 1] - drawn[name][:, 0] for name in ("weight", "bias"))
    x, y = data
    wrong = (slopes @ x.T + shifts[:, None] > 0) != y.bool()
    # A classifier's output on new data of a class is normal.
    outputs = torch.stack([-APART * slopes[:, 0] + shifts, APART * slopes[:, 0] + shifts]) / slopes.norm(dim=1)
    error = (torch.special.ndtr(outputs[0]) + torch.special.ndtr(-outputs[1])) / 2
    return float(wrong.double().mean()), float(error.mean())


def train(model: nn.Module, data: Examples) -> nn.Module:
    """Train a copy of a model."""
    model = deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2)
    for _ in range(15):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    return model


@contextmanager
def recorded(where: str) -> Iterator[list[WeightDistribution]]:
    """Yield a list that fills with the posteriors whose risk is estimated."""
    found: list[WeightDistribution] = []

    def estimate_risk(network: Any, weights: WeightDistribution, *args: Any, **options: Any) -> Any:
        if not isinstance(weights, Gaussian) or any(bool(each.any()) for each in weights.deviation.values()):
            found.append(weights)
        return stochastic.estimate_risk(network, weights, *args, **options)

    with patch(f"saltflat.bounds.{where}.estimate_risk", estimate_risk):
        yield found


def find_posterior(bound: Bound, found: list[WeightDistribution]) -> WeightDistribution:
    """Return the posterior of a bound: that of the deviation it chose, or the last one that was tried."""
    deviation = bound.details.get("deviation")
    if deviation is None:
        return found[-1]
    return next(each for each in found if float(next(iter(each.deviation.values())).max()) == deviation)


def run_set(seed: int, random_labels: bool) -> dict[str, Trial]:
    """Compute all bounds on one data set."""
    torch.set_num_threads(1)
    data = draw_examples(seed, random_labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        initial = nn.Linear(2, 2).double()
    model, half = train(initial, data), EXAMPLES // 2
    options: dict[str, dict[str, Any]] = {
        "zero": {},
        "initial": {"prior": initial, "prior_data": "none"},
        "descent": {"prior": initial, "prior_data": "none", "epochs": 5, "move": True, "lr": 1e-2},
        "trained": {"prior": train(initial, (data[0][:half], data[1][:half])), "prior_data": range(half)},
    }
    trials: dict[str, Trial] = {}

    def add_trial(name: str, bound: Bound, weights: WeightDistribution, examples: Examples) -> None:
        risk, error = compute_risks(weights, seed, examples)
        trials[name] = bound.value, risk, GUESSING if random_labels else error

    for kind, given in options.items():
        # A linear classifier can be right from the start, by luck.
        with recorded("certify_error") as found, patch("saltflat.bounds.certify_error.check_unseen"):
            bound = saltflat.certify_error(model, data, delta=DELTA, draws=1, seed=seed, progress=False, **given)
        unseen = (data[0][half:], data[1][half:]) if kind == "trained" else data
        add_trial(f"certificate, {kind}", bound, found[-1], unseen)
        if kind == "initial":
            _, risk, error = trials["certificate, initial"]
            kl = bound.terms["KL divergence (nats)"] + bound.terms["choice of the prior's scales (nats)"]
            trials |= {name: (inequality(risk, kl), risk, error) for name, inequality in INEQUALITIES.items()}
    for name in PAPER:
        with recorded("evidence") as found:
            bound = saltflat.compute_bounds(model, data, bounds=name, delta=DELTA, seed=seed, progress=False)[name]
        add_trial(name, bound, find_posterior(bound, found), data)
    return trials


def main() -> None:
    """Run all data sets, and print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=1000, help="data sets (default: %(default)s)")
    parser.add_argument("--random", type=int, default=100, help="data sets with random labels (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/validity.json"))
    given = parser.parse_args()
    if min(given.sets, given.random, given.workers) < 1:
        parser.error("Expected at least one data set, one with random labels, and one worker.")
    started = time.perf_counter()
    with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
        learned = list(pool.map(partial(run_set, random_labels=False), range(given.sets), chunksize=4))
        guessed = list(pool.map(partial(run_set, random_labels=True), range(10**6, 10**6 + given.random), chunksize=4))
    found = {name: summarize([each[name] for each in learned], [each[name] for each in guessed]) for name in learned[0]}
    settings = {"sets": given.sets, "random": given.random, "examples": EXAMPLES, "delta": DELTA}
    settings |= {"torch": torch.__version__, "seconds": round(time.perf_counter() - started)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"settings": settings, "bounds": found}, indent=1) + "\n")
    print_rates(found, settings)


def summarize(learned: list[Trial], guessed: list[Trial]) -> dict[str, float]:
    """Return rates and means of one bound over all data sets."""
    bounds, risks, errors = np.array(learned).T
    return {
        "violated": float((bounds < errors).mean()),
        "risk_below_error": float((risks < errors).mean()),
        "mean_bound": float(bounds.mean()),
        "mean_error": float(errors.mean()),
        "least_with_random_labels": float(min(bound for bound, _, _ in guessed) / GUESSING),
    }


def print_rates(found: dict[str, dict[str, float]], settings: dict[str, Any]) -> None:
    """Print the table, and whether the targets are reached."""
    table = Table(
        "bound", "violated", "risk on the examples below the error", "mean bound", "mean error", "least / chance"
    )
    for name, each in found.items():
        violated, below, bound, error, least = each.values()
        table.add_row(name, f"{violated:.1%}", f"{below:.1%}", f"{bound:.3f}", f"{error:.3f}", f"{least:.2f}")
    Console(width=120).print(table)
    print(f"{settings['sets']} data sets of {EXAMPLES} examples, and {settings['random']} with random labels.")
    worst = max(each["violated"] for each in found.values())
    least = min(each["least_with_random_labels"] for each in found.values())
    print(f"Violated at most {DELTA:.0%}: {worst:.1%}, {'reached' if worst <= DELTA else 'NOT REACHED'}")
    print(f"With random labels at least 0.9 of guessing: {least:.2f}, {'reached' if least >= 0.9 else 'NOT REACHED'}")


if __name__ == "__main__":
    main()
