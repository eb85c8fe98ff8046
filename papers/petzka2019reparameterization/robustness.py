"""Feature robustness, Appendices C.1 and D: how far the loss rises when features change, beside delta^2 kappa / 2."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import saltflat
from saltflat.bounds.robustness_result import FeatureRobustness, RobustnessPoint
from saltflat.datasets import read_data
from saltflat.studies.networks.lenets import lenet5

SMOOTHING = 0.2  # of the labels: with probabilities to learn, the loss has a minimum at finite weights
ITERATIONS = 2000  # of L-BFGS, at most
STEPS = 60  # of Adam, from which the other state of each network comes
DELTAS = tuple(10 ** (power / 2) for power in range(-8, 1))
SMALL = 0.1  # the largest delta of the fitted power
LAYERS = {"mlp": ("1", "3", "5"), "lenet": ("3", "7", "13")}
TITLES = {"mlp": "MLP 784-50-30-10", "lenet": "LeNet-5"}
STATES = {"minimum": "at a minimum", "early": "after 60 steps"}


def build(network: str) -> nn.Sequential:
    torch.manual_seed(0)
    if network == "lenet":
        made = lenet5((1, 28, 28), 10)
        assert isinstance(made, nn.Sequential)
        return made.double()
    layers = (nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 30), nn.ReLU(), nn.Linear(30, 10))
    return nn.Sequential(nn.Flatten(), *layers).double()


def read_examples(data: Path, count: int) -> tuple[Tensor, Tensor]:
    """Return images, and probabilities to learn: smoothed labels."""
    inputs, labels = read_data("mnist", data, limit=count)
    return inputs.double(), (1 - SMOOTHING) * F.one_hot(labels, 10).double() + SMOOTHING / 10


def train(model: nn.Module, examples: tuple[Tensor, Tensor], state: str, iterations: int) -> None:
    """Train with Adam, and to a minimum with L-BFGS after that."""
    inputs, targets = examples
    adam = torch.optim.Adam(model.parameters(), lr=2e-3)
    options = {"max_iter": iterations, "max_eval": 2 * iterations, "history_size": 50}
    newton = torch.optim.LBFGS(
        model.parameters(), **options, line_search_fn="strong_wolfe", tolerance_grad=1e-12, tolerance_change=0
    )

    def compute_loss() -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(STEPS):
        adam.step(compute_loss)
    if state == "minimum":
        newton.step(compute_loss)


def measure_all(out: Path, data: Path, scale: str) -> None:
    """Measure every layer in both states; what is in the folder is not measured again."""
    small = scale == "smoke"
    for network, layers in LAYERS.items():
        for state in STATES:
            left = [
                each for each in layers[: 1 if small else None] if not find_path(out, network, state, each).exists()
            ]
            if not left:
                continue
            model, examples = build(network), read_examples(data, 20 if small else 200)
            train(model, examples, state, 30 if small else ITERATIONS)
            for layer in left:
                found = saltflat.feature_robustness(
                    model, examples, layer, deltas=DELTAS[::4] if small else DELTAS, steps=2 if small else 20
                )
                path = find_path(out, network, state, layer)
                path.parent.mkdir(parents=True, exist_ok=True)
                found.save(path)
                print(f"{TITLES[network]}, {STATES[state]}, layer {layer}: {found.seconds:.0f} s", flush=True)


def find_path(out: Path, network: str, state: str, layer: str) -> Path:
    return out / "robustness" / f"{network}-{state}-{layer}.json"


def load_all(out: Path) -> dict[tuple[str, str, str], FeatureRobustness]:
    """Return what was measured, by network, state and layer."""
    keys = [(network, state, layer) for network in LAYERS for state in STATES for layer in LAYERS[network]]
    return {key: FeatureRobustness.load(find_path(out, *key)) for key in keys if find_path(out, *key).exists()}


def fit_power(found: FeatureRobustness, applies: bool) -> float:
    """Return the power of delta by which the largest rise grows, for small delta where the bound applies or not."""
    points = [each for each in list_usable(found) if each.delta <= SMALL and each.applies == applies]
    if len(points) < 2:
        return float("nan")
    logs = np.log([[each.delta, each.largest] for each in points])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def list_usable(found: FeatureRobustness) -> list[RobustnessPoint]:
    """Return the points whose rise is above rounding."""
    return [each for each in found.points if each.largest > 100 * found.rounding]


def write_table(out: Path) -> Iterator[str]:
    """Yield a row for every layer, and what became of the paper's claims."""
    yield (
        "| network | weights | layer | bound applies from | largest rise / bound there, up to delta = "
        f"{SMALL:g} | beyond | power there | power below |"
    )
    yield "| --- " * 8 + "|"
    inside: list[float] = []
    powers: list[tuple[float, float]] = []
    for (network, state, layer), found in load_all(out).items():
        ratios = {each.delta: each.largest / each.bound for each in list_usable(found) if each.applies}
        small = [ratio for delta, ratio in ratios.items() if delta <= SMALL]
        large = [ratio for delta, ratio in ratios.items() if delta > SMALL]
        inside += small
        powers.append((fit_power(found, True), fit_power(found, False)))
        cells = [TITLES[network], STATES[state], layer, f"{found.applies_from:.1e}", *map(format_range, (small, large))]
        yield f"| {' | '.join([*cells, *(format_range([each]) for each in powers[-1])])} |"
    held = sum(ratio <= 1 for ratio in inside)
    yield ""
    yield (
        f"Up to delta = {SMALL:g}, the bound held at {held} of the {len(inside)} points where it applies, with a "
        f"largest rise of {format_range(inside)} of it. There the rise grew with delta to the power of "
        f"{format_range([one for one, _ in powers])}; below, where the gradient dominates, of "
        f"{format_range([other for _, other in powers])}."
    )


def format_range(values: list[float]) -> str:
    """Return the smallest and the largest of some numbers."""
    found = [each for each in values if np.isfinite(each)]
    if not found:
        return "none"
    low, high = f"{min(found):.2f}", f"{max(found):.2f}"
    return low if low == high else f"{low} to {high}"


def draw_figure(out: Path) -> None:
    """Draw the rises of every layer: a row for each network and state."""
    measured = load_all(out)
    rows = list(dict.fromkeys((network, state) for network, state, _ in measured))
    figure = Figure(figsize=(11, 2.9 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 3, squeeze=False, sharex=True)
    styles: dict[str, dict[str, Any]] = {
        "bound": {"color": "black", "linestyle": "--", "label": "bound, delta² kappa / 2"},
        "first_order": {"color": "0.5", "linestyle": ":", "label": "largest, first order"},
        "largest": {"color": "#0072b2", "marker": "o", "label": "largest found"},
        "orthogonal": {"color": "#009e73", "marker": "s", "label": "mean over orthogonal A"},
        "worst": {"color": "#d55e00", "marker": "^", "label": "worst example"},
    }
    for axes, (network, state) in zip(grid, rows, strict=True):
        for axis, layer in zip(axes, LAYERS[network], strict=True):
            found = measured.get((network, state, layer))
            if found is None:
                continue
            for name, style in styles.items():
                values = [getattr(each, name) for each in found.points]
                axis.plot(found.deltas, [each if each and each > 0 else np.nan for each in values], ms=3, lw=1, **style)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_title(f"{TITLES[network]}, layer {layer}, {STATES[state]}", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("rise of the loss")
    figure.supxlabel("delta, the relative change of the features", fontsize=9)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=8)
    figure.savefig(out / "robustness.png", dpi=150)
