"""Petzka et al.'s MNIST experiment, Figures 3 to 6: do kappa and rho correlate with the gap?

    python papers/petzka2019reparameterization/run.py                  train, measure, rescale, measure again, draw
    python papers/petzka2019reparameterization/run.py --scale smoke    half a minute on a CPU, to see that it runs
    python papers/petzka2019reparameterization/run.py robustness       feature robustness, Appendices C.1 and D
    python papers/petzka2019reparameterization/run.py table            what was found, beside the paper
    python papers/petzka2019reparameterization/run.py figures          draw again from the rows
    python papers/petzka2019reparameterization/run.py page             put the table into README.md

MNIST has to be in data/ (or the folder that SALTFLAT_DATA names) as torchvision lays it out. If interrupted, a run
resumes where it stopped.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import analysis
import numpy as np
import robustness
import torch
from analysis import CLAIMS, FACTORS, FILTERS, HESSIAN, MEASURES, NETWORK_WISE, PANELS, Found
from matplotlib.figure import Figure
from torch import nn

import saltflat
from saltflat.results.files import write_json
from saltflat.studies import Results, Study
from saltflat.studies.rebuild import load_trained_network
from saltflat.studies.scores.layout import Floats

HERE = Path(__file__).parent
COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00")


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


def draw(found: Found, more: Found, folder: Path) -> None:
    """Plot as in the paper: a panel per layer, or per network-wise number, a color per batch size.

    Args:
        found: networks that one reading keeps, drawn filled.
        more: networks that the other one keeps: those that are not among the first are hollow.
        folder: for the figures.
    """
    layers = list(zip(range(2, 6), found.layers[PANELS["2 to 5"]], strict=True))
    panels: dict[str, list[tuple[str, Callable[[Found], Floats]]]] = {
        f"figure{3 + place}": [
            (f"{claim['measure']}, layer {number}", partial(Found.get_layer, measure=claim["measure"], layer=layer))
            for number, layer in layers
        ]
        for place, claim in enumerate(CLAIMS[:3])
    }
    panels["figure6"] = [(name, partial(Found.get_values, measure=name)) for name in NETWORK_WISE]
    if found.is_rescaled and more.is_rescaled:
        names = ("kappa_trace", "rho", *HESSIAN)
        panels["invariance"] = [(name, partial(Found.get_values, measure=name)) for name in names]
        panels["invariance"] += [(f"{name}, rescaled", partial(Found.get_rescaled, measure=name)) for name in names]
    for name, each in panels.items():
        figure = Figure(figsize=(13, 3.5 * (len(each) // 4)), layout="constrained")
        for axes, (title, get) in zip(np.ravel(figure.subplots(len(each) // 4, 4)), each, strict=True):
            for color, batch in zip(COLORS, sorted(set(more.batch)), strict=False):
                only = np.array([key not in found.kept for key in more.kept])
                for some, chosen, face in (
                    (found, found.batch == batch, color),
                    (more, (more.batch == batch) & only, "none"),
                ):
                    label = f"batch {batch:.0f}" if some is found else None
                    axes.scatter(get(some)[chosen], some.gap[chosen], s=14, color=color, facecolor=face, label=label)
            kept, extra = found.correlate(get(found)).value, more.correlate(get(more)).value
            axes.set_title(f"{title}\nr = {kept:.2f} (all: {extra:.2f})", fontsize=10)
            axes.locator_params(axis="x", nbins=5)
            axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
        for axes in figure.axes[::4]:
            axes.set_ylabel("test loss - training loss")
        figure.supxlabel(f"hollow: {FILTERS[more.kept_by]}, but not {FILTERS[found.kept_by]}", fontsize=8)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
        figure.savefig(folder / f"{name}.png", dpi=80)


def write_tables(folder: Path) -> Iterator[str]:
    """Yield the page's tables, of what is in the folder."""
    if (folder / "study.json").exists():
        yield from analysis.write_table(folder)
    if robustness.load_all(folder):
        yield from ("", "## Feature robustness", "")
        yield from robustness.write_table(folder)


def write_page(table: str) -> None:
    """Replace what stands between the two marks of the page by the table."""
    path, begin, end = HERE / "README.md", "<!-- table -->\n", "<!-- end of table -->\n"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    path.write_text(f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "robustness", "table", "figures", "page"), default="all")
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
    if given.what in ("all", "figures"):
        found = [each for each in (Found(out, name) for name in FILTERS) if each.is_enough]
        if found:
            draw(found[0], found[-1], out)
    if given.what == "page":
        write_page("\n".join(write_tables(out)))
    else:
        print("\n".join(write_tables(out)))


if __name__ == "__main__":
    main()
