"""Jia and Su's experiments: Scenarios I to III, and Tables 1 and 2, with SAM and ASAM beside their penalty.

    python papers/jia2020information/run.py train                       everything, in the order of its value
    python papers/jia2020information/run.py train --study scenario-i    one study; README.md lists those that are left
    python papers/jia2020information/run.py train --scale smoke         everything, tiny, on a CPU
    python papers/jia2020information/run.py table                       what was found, beside the paper
    python papers/jia2020information/run.py figures                     draw from the rows
    python papers/jia2020information/run.py page                        put the tables into README.md

CIFAR-10 and CIFAR-100 have to be in data/ (or the folder that SALTFLAT_DATA names) as torchvision lays them out. If
interrupted, a study resumes where it stopped.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parent.parent))  # what the papers share

import earlier
import scenarios
import tables
from costs import write_left, write_spent
from measuring import run_studies
from pages import make_head, write_page, write_warning
from studies import NAMES, list_parts

HERE = Path(__file__).parent
FIGURES = {
    "scenarios.png": "Scenarios I to III, the paper's numbers against the test error",
    "table1.png": "Test errors of all methods after equal epochs and at one training error; ticks are the paper's",
    f"{earlier.FOLDER}/curves.png": "Training loss and test error of the CNN over 40 epochs, and the errors at the end",
}


def draw_methods(out: Path) -> Iterator[Path]:
    """Draw the test errors of every method, a panel for each study of Table 1 and at one training error."""
    names = [name for name in NAMES if name.partition("-")[0] in ("table1", "error")]
    studies = {name: found for name in names if (found := tables.load(out / name)) is not None and found.rows}
    if not studies:
        return
    figure = Figure(figsize=(2.6 * len(studies), 3.2), layout="constrained")
    for axis, (name, found) in zip(figure.subplots(1, len(studies), squeeze=False)[0], studies.items(), strict=True):
        for place, method in enumerate(found.methods):
            errors = tables.get_errors(found, method)
            axis.scatter([place] * len(errors), errors, s=16, color=f"C{place}")
        kind, network, *dataset = name.split("-")
        for claim in tables.CLAIMS:
            if kind == "table1" and [claim.get("network"), claim.get("dataset")] == [network, *dataset]:
                axis.plot([0, 1], [claim["base"], claim["penalized"]], "k_", markersize=14)
        axis.set_xticks(range(len(found.methods)), list(found.methods), fontsize=8)
        axis.set_title(
            f"{tables.say_networks(name)}\n{'equal epochs' if dataset else 'equal training error'}", fontsize=8
        )
    figure.axes[0].set_ylabel("test error, %", fontsize=9)
    figure.savefig(out / "table1.png", dpi=150)
    yield out / "table1.png"


def write_tables(out: Path, scale: str) -> Iterator[str]:
    """Yield the generated lines of the page."""
    networks = scenarios.load_all(out)
    yield from ("## Verdicts", "")
    yield from write_warning(out)
    yield make_head("claim", "paper", "here", "verdict")
    yield from earlier.write_verdict(out)
    yield from tables.write_verdicts(out)
    yield from scenarios.write_verdicts(networks)
    yield ""
    yield from write_spent(out)
    yield from write_left(list_parts(out, scale))
    yield from scenarios.write_tables(networks)
    yield from tables.write_tables(out)
    yield from earlier.write_table(out)
    for name, meaning in FIGURES.items():
        if (out / name).exists():
            yield from (f"![{meaning}](results/{name})", "")


def main(words: list[str] | None = None) -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "table", "figures", "page"))
    parser.add_argument("--study", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--scale", choices=("full", "smoke"), default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SALTFLAT_DATA", "data")))
    parser.add_argument("--out", type=Path, help="where rows go; results/ beside this script, or demo/ for smoke")
    given = parser.parse_args(words)
    if given.what == "page" and (given.scale == "smoke" or given.out is not None):
        parser.error("Expected the rows in results/ for the page, but got --scale smoke or --out. Try table instead.")
    out = given.out or (HERE / "results" if given.scale == "full" else Path("demo") / HERE.name)
    if given.what == "train":
        run_studies(given.study, out, given.scale, given.device, given.data)
    if given.what == "figures":
        for drawn in (scenarios.draw_figure(out), draw_methods(out), earlier.draw_figure(out)):
            for path in drawn:
                print(f"drew {path.name}")
    if given.what == "table":
        print("\n".join(write_tables(out, given.scale)))
    if given.what == "page":
        write_page(HERE / "README.md", "\n".join(write_tables(out, given.scale)).strip())


if __name__ == "__main__":
    main()
