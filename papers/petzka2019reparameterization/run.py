"""Petzka et al.'s experiments, Figures 1 to 6: do kappa and rho correlate with the gap?

    python papers/petzka2019reparameterization/run.py                  Figures 3 to 6: train, measure, rescale, draw
    python papers/petzka2019reparameterization/run.py lenets           Figures 1 and 2, all studies or --study NAME
    python papers/petzka2019reparameterization/run.py --scale smoke    half a minute on a CPU, to see that it runs
    python papers/petzka2019reparameterization/run.py robustness       feature robustness, Appendices C.1 and D
    python papers/petzka2019reparameterization/run.py table            what was found, beside the paper
    python papers/petzka2019reparameterization/run.py figures          draw again from the rows
    python papers/petzka2019reparameterization/run.py page             put the table into README.md

MNIST and CIFAR-10 have to be in data/ (or the folder that SALTFLAT_DATA names) as torchvision lays them out. If
interrupted, a run resumes where it stopped.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from saltflat.studies import Study
from saltflat.studies.scores.layout import Floats

sys.path.append(str(Path(__file__).parent.parent))  # what the papers share

import analysis
import lenet_tables
import lenets
import robustness
from analysis import CLAIMS, FILTERS, HESSIAN, MEASURES, NETWORK_WISE, PANELS, Found
from costs import write_left, write_spent
from pages import make_head, write_page, write_warning
from rescaling import measure_rescaled

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


def write_tables(folder: Path, scale: str) -> Iterator[str]:
    """Yield the page's tables, of what is in the folder."""
    readings, networks = analysis.load_readings(folder), lenet_tables.load_all(folder)
    yield from ("## Verdicts", "")
    yield from write_warning(folder)
    yield make_head("claim", "paper", "here", "verdict")
    yield from analysis.write_verdicts(readings)
    yield from lenet_tables.write_verdicts(networks)
    yield ""
    yield from write_spent(folder)
    yield from write_left(lenets.list_parts(folder, scale))
    if readings:
        yield from analysis.write_table(readings)
        yield ""
    yield from lenet_tables.write_tables(networks, folder)
    if robustness.load_all(folder):
        yield from ("", "## Feature robustness", "")
        yield from robustness.write_table(folder)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("all", "lenets", "robustness", "table", "figures", "page")
    parser.add_argument("what", nargs="?", choices=parts, default="all", help="all: Figures 3 to 6")
    parser.add_argument("--study", nargs="+", choices=lenets.NAMES, default=lenets.NAMES, help="which of lenets")
    parser.add_argument("--scale", choices=("full", "smoke"), default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SALTFLAT_DATA", "data")))
    parser.add_argument("--out", type=Path, help="where rows go; results/ beside this script, or demo/ for smoke")
    given = parser.parse_args(words)
    if given.what == "page" and (given.scale == "smoke" or given.out is not None):
        parser.error("Expected the rows in results/ for the page, but got --scale smoke or --out. Try table instead.")
    out = given.out or (HERE / "results" if given.scale == "full" else Path("demo") / HERE.name)
    if given.what == "all":
        results = study(given.scale).run(out, device=given.device, data_folder=given.data)
        measure_rescaled(results, out / "rescaled.json", given.device, given.data, MEASURES)
    if given.what == "lenets":
        lenets.run_studies(given.study, out, given.scale, given.device, given.data)
    if given.what == "robustness":
        robustness.measure_all(out, given.data, given.scale)
    if given.what in ("robustness", "figures") and robustness.load_all(out):
        robustness.draw_figure(out)
    if given.what in ("all", "figures"):
        found = list(analysis.load_readings(out).values())
        if found:
            draw(found[0], found[-1], out)
    if given.what in ("lenets", "figures"):
        for path in lenet_tables.draw_figures(out):
            print(f"drew {path.name}")
    table = "\n".join(write_tables(out, given.scale))
    if given.what == "page":
        write_page(HERE / "README.md", table)
    else:
        print(table)


if __name__ == "__main__":
    main()
