"""Figures 1 and 3: the exact diagonal of the Hessian beside estimators and a loop of second derivatives."""

import json
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call

import saltflat
from saltflat.datasets import read_data
from saltflat.results.files import write_json

EXAMPLES = (10, 100, 1000)
TITLES = {"SmallMLP": "SmallMLP 784-20-20-10", "SmallCNN": "SmallCNN, 2 convolutions of 20 channels"}
# The paper's seconds of the loop and of its formula, on a GPU.
PAPER = {
    "SmallMLP": {10: (11.11, 0.018), 100: (11.05, 0.019), 1000: (12.23, 0.021)},
    "SmallCNN": {10: (10.19, 0.026), 100: (10.73, 0.036), 1000: (21.22, 0.334)},
}
MARKS = (1, 3, 10, 30, 100, 300, 1000)  # numbers of draws after which errors are taken
MOST_SECONDS = 10.0  # of a curve
LOOP_SECONDS = 20.0  # of a loop, which is extrapolated from there
EPS = 1e-8  # of the printed estimator and the authors' code
Gradient = Callable[[Tensor], Tensor]
Draw = Callable[[Gradient, Tensor, torch.Generator], Tensor]


def build(network: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if network == "SmallMLP":
        return nn.Sequential(
            *(nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 10))
        )
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(320, 10)),
    )


def draw_gaussian(gradient: Gradient, w: Tensor, dice: torch.Generator, r: float) -> Tensor:
    e = torch.randn(w.shape, generator=dice, dtype=w.dtype)
    return e * (gradient(w + r * e) - gradient(w - r * e)) / (2 * r)


def draw_relative(gradient: Gradient, w: Tensor, dice: torch.Generator, kind: str) -> Tensor:
    """Draw equations (29) to (31): as printed, as in the authors' code, or with the signs where they belong."""
    s = torch.randint(0, 2, w.shape, generator=dice).to(w.dtype) * 2 - 1
    r = 1e-5 if kind == "code" else 1e-2
    step = {"printed": r * (w.abs() * s + EPS), "code": r * s, "corrected": r * (w.abs() + EPS) * s}[kind]
    width = 2 * r * w.abs() + EPS if kind == "code" else 2 * r * (w.abs() + EPS)
    return s * (gradient(w + step) - gradient(w - step)) / width


def draw_hutchinson(gradient: Gradient, w: Tensor, dice: torch.Generator) -> Tensor:
    s = torch.randint(0, 2, w.shape, generator=dice).to(w.dtype) * 2 - 1
    product: Tensor = torch.func.jvp(gradient, (w,), (s,))[1]
    return s * product


ESTIMATORS: dict[str, Draw] = {
    "Gaussian (arXiv), r = 1e-5": lambda gradient, w, dice: draw_gaussian(gradient, w, dice, 1e-5),
    "Gaussian (arXiv), r = 1e-2": lambda gradient, w, dice: draw_gaussian(gradient, w, dice, 1e-2),
    "relative (ICML), as printed": lambda gradient, w, dice: draw_relative(gradient, w, dice, "printed"),
    "relative (ICML), as in the code": lambda gradient, w, dice: draw_relative(gradient, w, dice, "code"),
    "relative (ICML), corrected": lambda gradient, w, dice: draw_relative(gradient, w, dice, "corrected"),
    "Hutchinson": draw_hutchinson,
}
EXACT = "exact, float32"
OURS = ("Gaussian (arXiv), r = 1e-2", "relative (ICML), corrected", "Hutchinson")  # not the authors' settings
SAME = 1e-4  # relative difference that is rounding in float32


class Problem:
    """An untrained network and its examples, with the loss as a function of one vector of weights."""

    def __init__(self, network: str, count: int, seed: int, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = build(network, seed).to(dtype)
        inputs, self.labels = read_data("mnist", folder, limit=count, normalize="half")
        self.inputs = inputs.to(dtype)
        self.shapes = {name: each.shape for name, each in self.model.named_parameters()}
        self.weights = torch.cat([each.detach().flatten() for each in self.model.parameters()])

    def compute_loss(self, w: Tensor) -> Tensor:
        parts = w.split([shape.numel() for shape in self.shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(self.model, named, (self.inputs,)), self.labels)

    def compute_diagonal(self) -> Tensor:
        """Compute saltflat's exact diagonal."""
        found = saltflat.compute_statistics(
            self.model, (self.inputs, self.labels), names="curvature_diagonal", progress=False
        )
        return torch.cat([found["curvature_diagonal"][name].flatten() for name in self.shapes])

    def compute_trace(self) -> float:
        """Compute saltflat's exact trace."""
        data = self.inputs, self.labels
        found = saltflat.compute_statistics(self.model, data, names="curvature_trace", progress=False)
        return sum(float(each) for each in found["curvature_trace"].values())


def measure_all(out: Path, data: Path, scale: str) -> None:
    """Measure every network, number of examples and seed that is not in the folder yet."""
    small = scale == "smoke"
    seeds, counts = (1, EXAMPLES[:1]) if small else (10, EXAMPLES)
    for seed, count, network in product(range(seeds), counts, TITLES):
        path = out / "estimators" / f"{network}-{count}-{seed}.json"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        row = time_trace(network, count, seed, data, 0.3 if small else LOOP_SECONDS)
        row["curves"] = measure_errors(network, count, seed, data, 0.2 if small else MOST_SECONDS)
        write_json(row, path)
        print(f"{network}, {count} examples, seed {seed}: trace {row['trace']:.4g}", flush=True)


def time_trace(network: str, count: int, seed: int, data: Path, limit: float) -> dict[str, Any]:
    """Time a loop over the entries of the gradient, and saltflat's trace."""
    problem = Problem(network, count, seed, data)
    problem.compute_trace()  # what is prepared once
    seconds = []
    for _ in range(5):
        started = time.process_time()
        found = problem.compute_trace()
        seconds.append(time.process_time() - started)
    parameters = list(problem.model.parameters())
    started = time.process_time()
    loss = F.cross_entropy(problem.model(problem.inputs), problem.labels)
    gradients = [each.flatten() for each in torch.autograd.grad(loss, parameters, create_graph=True)]
    places = [(k, n) for k, each in enumerate(gradients) for n in range(each.numel())]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()
    torch.autograd.grad(gradients[0][0], parameters[0], retain_graph=True)  # the first one prepares kernels
    looping = time.process_time()
    values = []
    for number in order:
        k, n = places[number]
        (second,) = torch.autograd.grad(gradients[k][n], parameters[k], retain_graph=True)
        values.append(float(second.flatten()[n]))
        if time.process_time() - looping > limit:
            break
    passed = time.process_time() - looping
    exact = problem.compute_diagonal().double()[order[: len(values)]].sum()
    return {
        "network": network,
        "examples": count,
        "seed": seed,
        "trace": found,
        "seconds": float(np.median(seconds)),
        "loop_seconds": looping - started + passed * len(places) / len(values),
        "loop_entries": len(values),
        "entries": len(places),
        "loop_differs_by": abs(sum(values) / float(exact) - 1),
    }


def measure_errors(network: str, count: int, seed: int, data: Path, limit: float) -> dict[str, dict[str, list[float]]]:
    """Return the errors of all estimators in the Euclidean norm, after growing numbers of draws."""
    precise = Problem(network, count, seed, data, torch.float64).compute_diagonal()
    problem = Problem(network, count, seed, data)
    started = time.process_time()
    exact = problem.compute_diagonal().double()
    took = time.process_time() - started
    norm = float(precise.norm())
    curves = {EXACT: {"draws": [1.0], "seconds": [took], "error": [float((exact - precise).norm()) / norm]}}
    gradient = torch.func.grad(problem.compute_loss)
    for name, draw in ESTIMATORS.items():
        dice, total = torch.Generator().manual_seed(seed), torch.zeros_like(precise)
        draw(gradient, problem.weights, torch.Generator().manual_seed(seed))  # prepares kernels
        curve: dict[str, list[float]] = {"draws": [], "seconds": [], "error": []}
        started = time.process_time()
        for number in range(1, MARKS[-1] + 1):
            total += draw(gradient, problem.weights, dice).double()
            passed = time.process_time() - started
            if number in MARKS or passed > limit:
                error = float((total / number - precise).norm()) / norm
                curve["draws"].append(number)
                curve["seconds"].append(passed)
                curve["error"].append(error)
            if passed > limit:
                break
        curves[name] = curve
    return curves


def load_all(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / "estimators").glob("*.json"))]
    return sorted(rows, key=lambda row: (list(TITLES).index(row["network"]), row["examples"], row["seed"]))


def group(rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["network"], row["examples"]), []).append(row)
    return found


def write_verdicts(out: Path) -> Iterator[str]:
    """Yield a row for every claim of both figures."""
    rows = load_all(out)
    largest = max(row["loop_differs_by"] for row in rows)
    same = "reproduced" if largest < SAME else "not reproduced"
    yield (
        "| Figure 1: the formula gives the trace of a loop of second derivatives | equal | differs by at most "
        f"{largest:.0e} | **{same}** |"
    )
    ratios = [row["loop_seconds"] / row["seconds"] for row in rows]
    theirs = [loop / mine for each in PAPER.values() for loop, mine in each.values()]
    faster = "reproduced" if min(ratios) >= min(theirs) else "same sign" if min(ratios) > 1 else "not reproduced"
    yield (
        f"| Figure 1: it is tens to hundreds of times faster | {min(theirs):.0f} to {max(theirs):.0f} times, GPU | "
        f"{min(ratios):.0f} to {max(ratios):.0f} times, CPU | **{faster}** |"
    )
    published = [name for name in ESTIMATORS if name not in OURS]
    least, most = (pick(row["curves"][name]["error"][-1] for row in rows for name in published) for pick in (min, max))
    exact = max(row["curves"][EXACT]["error"][-1] for row in rows)
    off = "reproduced" if least > 1 and exact < SAME else "not reproduced"
    yield (
        "| Figure 3: published estimators are off by more than the diagonal itself, the formula is exact | 0.2 to "
        f"3e4, absolute | {least:.2g} to {most:.1g}, relative; the formula {exact:.0e} | **{off}** |"
    )


def write_table(out: Path) -> Iterator[str]:
    """Yield the tables of both figures."""
    rows = load_all(out)
    yield "### Figure 1: the trace, exactly"
    yield ""
    yield (
        "| network | examples | seeds | loop, s | saltflat, s | faster | in the paper | trace | largest difference |"
    )
    yield "| --- " * 9 + "|"
    for (network, count), some in group(rows).items():
        loop, mine = (np.array([row[key] for row in some]) for key in ("loop_seconds", "seconds"))
        cut = any(row["loop_entries"] < row["entries"] for row in some)
        theirs = PAPER[network][count][0] / PAPER[network][count][1]
        cells = [
            network,
            str(count),
            str(len(some)),
            f"{loop.mean():.3g}{' (extrapolated)' * cut}",
            f"{mine.mean():.2g}",
        ]
        cells += [f"{(loop / mine).mean():.0f}x", f"{theirs:.0f}x", f"{np.mean([row['trace'] for row in some]):.4g}"]
        cells.append(f"{max(row['loop_differs_by'] for row in some):.1e}")
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "### Figure 3: errors of estimated diagonals"
    yield ""
    names = [EXACT, *ESTIMATORS]
    yield f"| network | examples | {' | '.join(names)} |"
    yield "| --- " * (2 + len(names)) + "|"
    for (network, count), some in group(rows).items():
        cells = []
        for name in names:
            curves = [row["curves"][name] for row in some]
            final = np.array([curve["error"][-1] for curve in curves])
            after = np.median([curve["seconds"][-1] for curve in curves])
            draws = np.median([curve["draws"][-1] for curve in curves])
            told = f"{after:.2g} s" if name == EXACT else f"{draws:.0f} draws, {after:.2g} s"
            cells.append(f"{np.median(final):.2g} ({told})")
        yield f"| {network} | {count} | {' | '.join(cells)} |"


def draw_figure(out: Path) -> None:
    """Draw the errors over time, a panel for each network and number of examples."""
    groups = group(load_all(out))
    rows = [name for name in TITLES if any(network == name for network, _ in groups)]
    counts = sorted({count for _, count in groups})
    figure = Figure(figsize=(1.5 + 3.6 * len(counts), 0.6 + 3.0 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(counts), squeeze=False, sharey=True)
    for axes, network in zip(grid, rows, strict=True):
        for axis, count in zip(axes, counts, strict=True):
            some = groups.get((network, count), [])
            for place, name in enumerate([EXACT, *ESTIMATORS] if some else []):
                curves = [row["curves"][name] for row in some]
                length = min(len(curve["error"]) for curve in curves)
                x, y = (np.median([curve[key][:length] for curve in curves], axis=0) for key in ("seconds", "error"))
                style = "k*" if name == EXACT else "o-"
                color = {} if name == EXACT else {"color": f"C{place}"}
                axis.plot(x, y, style, ms=8 if name == EXACT else 3, lw=1, label=name, **color)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_title(f"{network}, {count} examples", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("relative error of the diagonal", fontsize=9)
    figure.supxlabel("seconds of one CPU thread", fontsize=9)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    figure.savefig(out / "figure3.png", dpi=110)
