"""Petzka et al.'s MNIST experiment, Figures 3 to 6: do kappa and rho correlate with the gap?

    python papers/petzka2019reparameterization/run.py                  train, measure, rescale, measure again, draw
    python papers/petzka2019reparameterization/run.py --scale smoke    half a minute on a CPU, to see that it runs
    python papers/petzka2019reparameterization/run.py robustness       feature robustness, Appendices C.1 and D
    python papers/petzka2019reparameterization/run.py table            what was found, beside the paper
    python papers/petzka2019reparameterization/run.py figures          draw again from the rows

MNIST has to be in data/ (or the folder that SALTFLAT_DATA names) as torchvision lays it out. If interrupted, a run
resumes where it stopped.
"""

import argparse
import json
import os
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import robustness
import torch
from matplotlib.figure import Figure
from scipy.stats import pearsonr
from torch import nn

import saltflat
from saltflat.results.files import write_json
from saltflat.studies import Results, Study
from saltflat.studies.rebuild import load_trained_network

HERE = Path(__file__).parent
CLAIMS = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))["claim"]
HESSIAN = ("hessian_trace", "hessian_top_eigenvalue")
MEASURES = ("kappa_trace", "kappa_trace_max", "rho", "rho_max", *HESSIAN)
LARGEST_ERROR = 0.07  # of networks that are kept, on the training set
FACTORS = (5, 25)  # of the rescalings, both included


def study(scale: str) -> Study:
    """Return the study: batches of 1000 to 8000, proportional learning rates ("0.02 to 1.6", a misprint of 0.16)."""
    small = scale == "smoke"
    batches = (20, 40) if small else (1000, 2000, 4000, 8000)
    lr = 0.1 if small else 0.02  # of the smallest batch
    return Study(
        name=f"petzka2019-mnist-{scale}",
        data={"name": "mnist", **({"train_limit": 1000, "test_limit": 500} if small else {})},
        network="petzka_mlp",
        axes={"batch_size, lr": [(batch, lr * batch / batches[0]) for batch in batches]},
        seeds=3 if small else 18,
        settings={"optimizer": "sgd", "init": "xavier_normal"},
        stop={"epochs": 20 if small else 400},
        measures=MEASURES,
        measure={"examples": 50 if small else 60_000, "dtype": "float64"},
    )


def rescaled(model: nn.Sequential, seed: int) -> nn.Sequential:
    """Divide each hidden layer by a random whole number and multiply the next by it; the function stays the same."""
    generator = torch.Generator().manual_seed(seed)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer, after in pairwise(layers):
            factor = int(torch.randint(FACTORS[0], FACTORS[1] + 1, (), generator=generator))
            layer.weight.div_(factor)
            layer.bias.div_(factor)
            after.weight.mul_(factor)
    return model


def measure_rescaled(results: Results, path: Path, device: str, data: Path) -> None:
    """Measure every network again after rescaling its layers, and record how much its outputs changed."""
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    most = results.study.measure["examples"]
    examples = results.study.data.examples(data)
    for number, key in enumerate(key for key, row in results.rows.items() if row.outcome is not None):
        if key in done:
            continue
        network = load_trained_network(results, key, examples)
        inputs, labels = network.inputs[:most].double().to(device), network.labels[:most].to(device)
        model = network.model.to(device)
        assert isinstance(model, nn.Sequential)
        with torch.no_grad():
            before = model(inputs)
            after = rescaled(model, number)(inputs)
        off = float((after - before).abs().max() / before.abs().max())
        report = saltflat.measure(model, (inputs, labels), measures=MEASURES, progress=False)
        done[key] = {"outputs_differ_by": off, "values": {name: reading.value for name, reading in report.items()}}
        write_json(done, path)
        print(f"rescaled {len(done)} networks; the outputs of the last differ by {off:.0e}", flush=True)


class Found:
    """The networks with a small training error, as arrays."""

    def __init__(self, folder: Path) -> None:
        self.results = Results.load(folder)
        rows = self.results.rows
        self.trained = {k: row.outcome for k, row in rows.items() if row.outcome is not None and row.readings}
        self.outcomes = {k: outcome for k, outcome in self.trained.items() if outcome.train_error <= LARGEST_ERROR}
        self.kept = {key: rows[key] for key in self.outcomes}
        self.gap = np.array([row.gap["loss"] for row in self.kept.values()])
        self.batch = np.array([row.config["batch_size"] for row in self.kept.values()])
        self.loss = np.array([outcome.train_loss for outcome in self.outcomes.values()])
        path = folder / "rescaled.json"
        self.rescaled: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        first = next(iter(self.kept.values()), None)
        self.layers = list(first.readings["kappa_trace"].layers) if first else []

    def whole(self, measure: str) -> np.ndarray[Any, Any]:
        return np.array([row.readings[measure].value for row in self.kept.values()])

    def layer(self, measure: str, layer: str) -> np.ndarray[Any, Any]:
        return np.array([row.readings[measure].layers[layer] for row in self.kept.values()])

    def after(self, measure: str) -> np.ndarray[Any, Any]:
        return np.array([self.rescaled[key]["values"][measure] for key in self.kept])


def interval(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, float, float, float]:
    """Return Pearson's correlation, its 95 % interval (Fisher's) and its p-value."""
    found = pearsonr(x, y)
    low, high = found.confidence_interval(0.95)
    return float(found.statistic), float(low), float(high), float(found.pvalue)


def shown(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> str:
    r, low, high, _ = interval(x, y)
    return f"{r:.2f} [{low:.2f}, {high:.2f}]"


def table(found: Found) -> Iterator[str]:
    """Yield the README's lines."""
    if len(found.kept) < 4:
        yield f"{len(found.kept)} networks have at most {LARGEST_ERROR:.0%} training error: too few for correlations."
        return
    epochs = {outcome.epochs for outcome in found.outcomes.values()}
    yield (
        f"{len(found.trained)} networks trained, {len(found.kept)} of them with at most {LARGEST_ERROR:.0%} training "
        f"error. Epochs {', '.join(map(str, sorted(epochs)))}; training loss {found.loss.min():.3g} to "
        f"{found.loss.max():.3g}; gap {found.gap.min():.3f} to {found.gap.max():.3f}."
    )
    yield ""
    hidden = found.layers[:4]
    yield "| figure | number | layer | paper | here, with 95 % interval | verdict |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for claim in CLAIMS[:3]:
        for place, layer in enumerate(found.layers):
            values = found.layer(claim["measure"], layer)
            printed = claim.get("layers")
            paper, judged = "not measured", "not comparable"
            if layer in hidden:
                paper = f"{printed[place]:.2f}" if printed else "significant"
                judged = verdict(claim, values, found.gap)
            here = shown(values, found.gap)
            yield f"| {claim['where']} | {claim['measure']} | {place + 1} | {paper} | {here} | {judged} |"
    for network, family in CLAIMS[3]["network_wise"].items():
        by_layer = [interval(found.layer(family, layer), found.gap)[0] for layer in hidden]
        whole = found.whole(network)
        judged = "reproduced" if interval(whole, found.gap)[0] > max(by_layer) else "not reproduced"
        here = f"{shown(whole, found.gap)}; layers up to {max(by_layer):.2f}"
        yield f"| Figure 6 | {network} | all | above the layers' | {here} | {judged} |"
    yield f"| control | training loss | | not shown | {shown(found.loss, found.gap)} | |"
    yield ""
    yield from within_batches(found)
    if not all(key in found.rescaled for key in found.kept):
        return
    worst = max(found.rescaled[key]["outputs_differ_by"] for key in found.kept)
    yield (
        f"After each hidden layer was divided by a random whole number from {FACTORS[0]} to {FACTORS[1]} and the next "
        f"multiplied by it (outputs differ by at most {worst:.0e}):"
    )
    yield ""
    yield "| number | correlation before | after | largest relative change of a network's number | verdict |"
    yield "| --- | --- | --- | --- | --- |"
    for name in MEASURES:
        before, after = found.whole(name), found.after(name)
        change = float(np.abs(after / before - 1).max())
        moved = abs(interval(before, found.gap)[0] - interval(after, found.gap)[0])
        if name in HESSIAN:
            left = interval(after, found.gap)[3] < 0.05
            judged = "not reproduced as worded: a clear correlation is left" if left else "reproduced: none is left"
        else:
            judged = "reproduced: unchanged" if moved < 1e-3 else "not reproduced"
        yield f"| {name} | {shown(before, found.gap)} | {shown(after, found.gap)} | {change:.1e} | {judged} |"


def within_batches(found: Found) -> Iterator[str]:
    """Yield the correlations among networks that differ in their seed alone."""
    many = [batch for batch in sorted(set(found.batch)) if (found.batch == batch).sum() >= 4]
    if not many:
        return
    yield "Correlation with the gap among the networks of one batch size:"
    yield ""
    yield "| batch | networks | kappa_trace | rho | hessian_trace | training loss (control) |"
    yield "| --- " * 6 + "|"
    for batch in many:
        chosen = found.batch == batch
        numbers = (*(found.whole(name) for name in ("kappa_trace", "rho", "hessian_trace")), found.loss)
        cells = [shown(values[chosen], found.gap[chosen]) for values in numbers]
        yield "| " + " | ".join([str(batch), str(int(chosen.sum())), *cells]) + " |"
    yield ""


def verdict(claim: dict[str, Any], values: np.ndarray[Any, Any], gap: np.ndarray[Any, Any]) -> str:
    r, low, _, chance = interval(values, gap)
    if "significant" in claim:
        return "reproduced" if r > 0 and chance < claim["significant"] else "not reproduced"
    if r >= claim["at_least"]:
        return "reproduced"
    return "same sign" if low > 0 else "not reproduced"


def draw(found: Found, folder: Path) -> None:
    """Plot as in the paper: a panel per layer, or per network-wise number, a color per batch size."""
    hidden = found.layers[:4]
    panels = {
        f"figure{3 + place}": [
            (f"{claim['measure']}, layer {number + 1}", found.layer(claim["measure"], layer))
            for number, layer in enumerate(hidden)
        ]
        for place, claim in enumerate(CLAIMS[:3])
    }
    panels["figure6"] = [(name, found.whole(name)) for name in CLAIMS[3]["network_wise"]]
    if all(key in found.rescaled for key in found.kept):
        names = ("kappa_trace", "rho", *HESSIAN)
        panels["invariance"] = [(name, found.whole(name)) for name in names]
        panels["invariance"] += [(f"{name}, rescaled", found.after(name)) for name in names]
    for name, each in panels.items():
        figure = Figure(figsize=(13, 3.4 * (len(each) // 4)), layout="constrained")
        for axes, (title, values) in zip(np.ravel(figure.subplots(len(each) // 4, 4)), each, strict=True):
            for batch in sorted(set(found.batch)):
                axes.scatter(
                    values[found.batch == batch], found.gap[found.batch == batch], s=14, label=f"batch {batch}"
                )
            axes.set_title(f"{title}\nr = {interval(values, found.gap)[0]:.2f}", fontsize=10)
            axes.locator_params(axis="x", nbins=5)
            axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
        for axes in figure.axes[::4]:
            axes.set_ylabel("test loss - training loss")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
        figure.savefig(folder / f"{name}.png", dpi=80)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "robustness", "table", "figures"), default="all")
    parser.add_argument("--scale", choices=("full", "smoke"), default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SALTFLAT_DATA", "data")))
    parser.add_argument("--out", type=Path, help="where rows go; results/ beside this script, or demo/ for smoke")
    given = parser.parse_args(words)
    out = given.out or (HERE / "results" if given.scale == "full" else Path("demo") / HERE.name)
    if given.what == "all":
        results = study(given.scale).run(out, device=given.device, data_folder=given.data)
        measure_rescaled(results, out / "rescaled.json", given.device, given.data)
    if given.what == "robustness":
        robustness.measure_all(out, given.data, given.scale)
    if given.what in ("robustness", "figures") and robustness.load_all(out):
        robustness.draw_figure(out)
    if given.what != "robustness":
        found = Found(out)
        if given.what != "table" and len(found.kept) >= 4:
            draw(found, out)
        print("\n".join(table(found)))
    if robustness.load_all(out):
        print("\n## Feature robustness\n")
        print("\n".join(robustness.write_table(out)))


if __name__ == "__main__":
    main()
