"""Rows of the CNN after 40 epochs, which an earlier script trained and measured without a study."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

from estimates import compare_means
from matplotlib.figure import Figure
from pages import make_head, make_row
from tables import CLAIMS, format_spread, judge_fall

Entry: TypeAlias = dict[str, Any]
FOLDER = "cnn-40-epochs"
METHODS = ("sgd", "fisher", "sam")
# The gradients of fisher_logdet were in float32, where most eigenvalues may be rounding. The values stay in the rows.
WITHDRAWN = "fisher_logdet"
MEASURES = ("fisher_trace", "normalized_sharpness", "minimum_sharpness")
GAP = "gap"  # test error minus training error
CHANCE = 0.05


def load(folder: Path) -> dict[str, list[Entry]]:
    """Return the rows of every method."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    by_method = {method: [row for row in found if row["run"]["method"] == method] for method in METHODS}
    return {method: rows for method, rows in by_method.items() if rows}


def get_values(found: list[Entry], key: str) -> list[float]:
    """Return a number of every row."""
    if key == GAP:
        return [row["test_error"] - row["train_error"] for row in found]
    return [row[key] if key in row else row["measures"][key] for row in found]


def write_verdict(out: Path) -> Iterator[str]:
    """Yield the row of the claim of Table 1 after 40 epochs."""
    rows = load(out / FOLDER)
    if not rows:
        return
    claim = CLAIMS[0]
    base, penalized = (get_values(rows[method], "test_error") for method in METHODS[:2])
    change, chance = compare_means(base, penalized)
    yield make_row(
        [
            "Table 1, after 40 of its 200 epochs: the penalty lowers the test error of CNN on CIFAR-10",
            f"{claim['base']:.2f} to {claim['penalized']:.2f}, {claim['epochs']} epochs",
            f"{mean(base):.2f} to {mean(penalized):.2f}: {change} (p = {chance:.2g})",
            f"**{judge_fall(change, claim['penalized'] - claim['base'])}**",
        ]
    )


def write_table(out: Path) -> Iterator[str]:
    """Yield the tables of the CNN after 40 epochs."""
    rows, tuned = load(out / FOLDER), load(out / FOLDER / "tuning")
    if not rows:
        return
    yield from ("## The CNN on CIFAR-10 after 40 epochs", "")
    yield make_head("method", "seeds", "epochs", "test error %", "training error %", "seconds", WITHDRAWN, *MEASURES)
    for each in rows.values():
        cells = [format_spread(get_values(each, key)) for key in ("test_error", "train_error", "seconds")]
        numbers = [format_spread(get_values(each, name)) for name in MEASURES]
        yield make_row([say_method(each[0]), len(each), each[0]["epochs_done"], *cells, "withdrawn", *numbers])
    yield ""
    for method in METHODS[1:]:
        for key in ("test_error", "train_error", GAP, *MEASURES):
            if "sgd" in rows and method in rows:
                yield f"* {method}, {key}: {say_change(get_values(rows['sgd'], key), get_values(rows[method], key))}"
    yield from ("", "Chosen on 5,000 images held out of the training set:", "")
    yield make_head("run", "epochs", "error on held-out images %")
    for row in sorted((row for each in tuned.values() for row in each), key=say_method):
        yield make_row([say_method(row), row["epochs_done"], f"{row['test_error']:.2f}"])
    yield ""


def say_method(row: Entry) -> str:
    """Return the name of a method with its parameters."""
    run = row["run"]
    chosen = {"fisher": " (beta {beta:g}, M {parts}, tau {clip:g})", "sam": " (rho {rho:g})"}.get(run["method"], "")
    return f"{run['method']}{chosen.format(**run)}"


def say_change(base: list[float], other: list[float]) -> str:
    """Return whether a difference of means is clear: Welch's test, at 5 %."""
    change, chance = compare_means(base, other)
    word = "no clear difference from" if chance > CHANCE else "lower than" if change.value < 0 else "HIGHER than"
    return f"{word} sgd: {change.value:+.3g} (p = {chance:.2g})"


def draw_figure(out: Path) -> Iterator[Path]:
    """Draw the curves of all networks, and the errors at their ends."""
    rows = load(out / FOLDER)
    if not rows:
        return
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for place, (method, each) in enumerate(rows.items()):
        for number, row in enumerate(each):
            label = say_method(row) if number == 0 else None
            for axis, column in ((left, 0), (middle, 1)):
                axis.plot([point[column] for point in row["curve"]], color=f"C{place}", lw=0.9, label=label)
        for offset, key in enumerate(("train_error", "test_error", GAP)):
            shown = get_values(rows[method], key)
            right.scatter([offset + 0.2 * (place - 1)] * len(shown), shown, s=14, color=f"C{place}")
    left.set_yscale("log")
    left.set_title("training loss, augmented", fontsize=9)
    middle.set_title("test error, %", fontsize=9)
    for axis in (left, middle):
        axis.set_xlabel("epoch", fontsize=9)
    right.set_xticks(range(3), ["training error, %", "test error, %", "gap, points"], fontsize=9)
    right.set_title("at the end", fontsize=9)
    left.legend(fontsize=7, frameon=False)
    figure.savefig(out / FOLDER / "curves.png", dpi=150)
    yield out / FOLDER / "curves.png"
