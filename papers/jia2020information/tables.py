"""What the rows say about Tables 1 and 2, and about all methods at one training error."""

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from estimates import Estimate, compare_means
from pages import NOT_TESTED, TOO_FEW, join_verdicts, make_head, make_row
from studies import (
    AXIS,
    FOLDED,
    LOGDET,
    METHODS,
    NAMES,
    NETWORKS,
    NORM,
    TARGET_ERROR,
    TARGET_LOSS,
    TUNED,
    get_method,
)

from saltflat.studies import Results
from saltflat.studies.row import Row

HERE = Path(__file__).parent
CLAIMS: list[dict[str, Any]] = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))["claim"]
DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
FORMS = {"raw": None, "logits of norm 25": NORM}
# Numbers of a table: a measure, and the pass that measured it.
COLUMNS: dict[str, tuple[str, str | None]] = {
    "fisher_logdet": (LOGDET, None),
    "fisher_trace": ("fisher_trace", None),
    "normalized_sharpness, folded": ("normalized_sharpness", FOLDED),
    "minimum_sharpness, folded": ("minimum_sharpness", FOLDED),
}


class Found:
    """The finished networks of a study.

    Attributes:
        results: of the study.
        rows: those that reached the stopping rule.
        left_out: how many others there are, by their status.
    """

    def __init__(self, folder: Path) -> None:
        self.results = Results.load(folder)
        self.rows = [row for row in self.results.rows.values() if row.status == "done" and row.outcome is not None]
        self.left_out = {name: count for name, count in self.results.counts.items() if name != "done" and count}
        paths = {name: folder / f"{name}.json" for name in (FOLDED, NORM)}
        self._again: dict[str, dict[str, dict[str, float | None]]] = {
            name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()
        }

    def get_value(self, row: Row, measure: str, again: str | None = None) -> float:
        """Return a measure of a network, or of a further pass; nan where there is none."""
        if again is not None:
            value = self._again.get(again, {}).get(row.key, {}).get(measure)
            return float("nan") if value is None else value
        reading = row.readings.get(measure)
        return float("nan") if reading is None else reading.value

    @property
    def methods(self) -> dict[str, list[Row]]:
        """The networks of every method."""
        found: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows:
            found[get_method(row.config)].append(row)
        return {name: found[name] for name in METHODS if found[name]}


def load(folder: Path) -> Found | None:
    """Return the networks of a study; None if there are none yet."""
    return Found(folder) if (folder / "study.json").exists() else None


def get_error(row: Row, side: str) -> float:
    """Return an error of a network in percent."""
    return 100 * float(getattr(row.outcome, f"{side}_error"))


def get_errors(found: Found, method: str, side: str = "test") -> list[float]:
    """Return the errors of a method's networks in percent."""
    return [get_error(row, side) for row in found.methods.get(method, [])]


def format_spread(values: list[float], digits: int = 4) -> str:
    """Return a mean with its standard deviation.

    >>> format_spread([1.0, 2.0, 3.0]), format_spread([float("nan")])
    ('2 ± 1', '-')
    """
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return "-"
    return f"{mean(known):.{digits}g}" + (f" ± {stdev(known):.2g}" if len(known) > 1 else "")


# Verdicts


def judge_fall(change: Estimate, paper: float) -> str:
    """Return the verdict on a fall of the test error.

    Args:
        change: mean with the penalty minus mean without.
        paper: the paper's change, below zero.
    """
    if np.isnan(change.low):
        return TOO_FEW
    if change.high < 0:
        return "reproduced" if change.low <= paper else "same sign"
    return "not decided" if change.low <= paper and change.value < 0 else "not reproduced"


def judge_sign(change: Estimate) -> str:
    """Return the verdict on a fall of which only the sign counts."""
    if np.isnan(change.low):
        return TOO_FEW
    return "reproduced" if change.high < 0 else "not reproduced" if change.low > 0 else "not decided"


def write_verdicts(out: Path) -> Iterator[str]:
    """Yield a row for each claim of Tables 1 and 2."""
    for claim in CLAIMS:
        if claim["where"] == "Table 1":
            yield make_row(judge_table_1(out, claim))
        elif claim["where"] == "Table 2":
            yield make_row(judge_table_2(out, claim))


def judge_table_1(out: Path, claim: Mapping[str, Any]) -> list[str]:
    """Return the cells of a pair of Table 1."""
    network, dataset = claim["network"], claim["dataset"]
    what = f"Table 1: the penalty lowers the test error of {NETWORKS[network].title} on {DATASETS[dataset]}"
    length = f", {claim['epochs']} epochs" if "epochs" in claim else ""
    printed = f"{claim['base']:.2f} to {claim['penalized']:.2f}{length}"
    found = load(out / f"table1-{network}-{dataset}")
    base, penalized = (get_errors(found, name) if found else [] for name in ("sgd", "fisher"))
    if not base or not penalized:
        return [what, printed, "-", f"**{NOT_TESTED}**"]
    change, _ = compare_means(base, penalized)
    epochs = NETWORKS[network].epochs
    here = f"{mean(base):.2f} to {mean(penalized):.2f}, {epochs} epochs: {change}"
    return [what, printed, here, f"**{judge_fall(change, claim['penalized'] - claim['base'])}**"]


def judge_table_2(out: Path, claim: Mapping[str, Any]) -> list[str]:
    """Return the cells of a network of Table 2."""
    network = claim["network"]
    title = NETWORKS[network].title
    what = f"Table 2: the penalty lowers the Fisher log-determinant of {title} at a similar training loss"
    printed = f"{claim['base']:.1f} to {claim['penalized']:.1f}"
    found = load(out / f"loss-{network}")
    if found is None:
        return [what, printed, "-", f"**{NOT_TESTED}**"]
    said, judged = [], {}
    for form, again in FORMS.items():
        values = {
            method: [found.get_value(row, LOGDET, again) for row in rows] for method, rows in found.methods.items()
        }
        pair = [[each for each in values.get(method, []) if np.isfinite(each)] for method in ("sgd", "fisher")]
        if not all(pair):
            said.append(f"{form}: -")
            judged[form] = NOT_TESTED
            continue
        change, _ = compare_means(*pair)
        said.append(f"{form}: {mean(pair[0]):.1f} to {mean(pair[1]):.1f}, {change}")
        judged[form] = judge_sign(change)
    return [what, printed, "; ".join(said), join_verdicts(judged)]


# Tables


def write_tables(out: Path) -> Iterator[str]:
    """Yield the tables of all methods, of the studies that have rows."""
    stopped = "Stopped after the first epoch with a training {} of at most {}, at a constant learning rate."
    sections = {
        "table1": ("Table 1: all methods after equal epochs", ""),
        "error": ("All methods at one training error", stopped.format("error", f"{TARGET_ERROR:.0%}")),
        "loss": ("Table 2: the log-determinant at one training loss", stopped.format("loss", f"{TARGET_LOSS:g}")),
    }
    for kind, (title, meaning) in sections.items():
        yield f"## {title}"
        yield ""
        if meaning:
            yield meaning
            yield ""
        names = [name for name in NAMES if name.partition("-")[0] == kind]
        studies = {name: found for name in names if (found := load(out / name)) is not None and found.rows}
        if not studies:
            yield from (NOT_TESTED, "")
            continue
        yield from write_methods(studies)
        yield ""
        yield from (line for name, found in studies.items() for line in write_notes(name, found))
        yield ""
    yield from write_tuning(out)


def write_methods(studies: Mapping[str, Found]) -> Iterator[str]:
    """Yield a row for every method of every study."""
    yield make_head(
        "networks", "method", "seeds", "epochs", "training loss", "training error %", "test error %",
        "test error, change from sgd", *COLUMNS, "fisher_logdet, logits of norm 25", "seconds of training",
    )  # fmt: skip
    for name, found in studies.items():
        base = get_errors(found, "sgd")
        for method, rows in found.methods.items():
            epochs = sorted({row.outcome.epochs for row in rows if row.outcome is not None})
            losses = [row.outcome.train_loss for row in rows if row.outcome is not None]
            errors = get_errors(found, method)
            change = f"{compare_means(base, errors)[0]}" if method != "sgd" and base else ""
            numbers = [*COLUMNS.values(), (LOGDET, NORM)]
            cells = [format_spread([found.get_value(row, *number) for row in rows]) for number in numbers]
            seconds = format_spread([row.seconds.get("training", float("nan")) for row in rows])
            yield make_row(
                [say_networks(name), say_method(rows[0]), len(rows), say_range(epochs), format_spread(losses, 3),
                 format_spread(get_errors(found, method, "train")), format_spread(errors), change, *cells, seconds]
            )  # fmt: skip


def say_networks(name: str) -> str:
    """Return the networks and the data set of a study."""
    _, network, *dataset = name.split("-")
    return f"{NETWORKS[network].title} on {DATASETS[dataset[0] if dataset else 'cifar10']}"


def say_method(row: Row) -> str:
    """Return a method with its strength or radius."""
    method = get_method(row.config)
    if method == "fisher":
        return f"fisher (beta {row.config['fisher_penalty']:g}, M {row.config['fisher_parts']})"
    return method if method == "sgd" else f"{method} (rho {row.config[method]:g})"


def say_range(numbers: list[int]) -> str:
    """Return one number, or the smallest and the largest."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def write_notes(name: str, found: Found) -> Iterator[str]:
    """Yield which networks are left out, and whose log-determinants are upper bounds."""
    if found.left_out:
        yield f"* {say_networks(name)}: left out: {', '.join(f'{n} {status}' for status, n in found.left_out.items())}."
    floored = [row for row in found.rows if any("at the floor" in note for note in row.readings[LOGDET].notes)]
    if floored:
        yield f"* {say_networks(name)}: the log-determinant of {len(floored)} networks has eigenvalues at the floor."


def write_tuning(out: Path) -> Iterator[str]:
    """Yield the errors on the images held out, by which penalty and radii are chosen."""
    yield "## Chosen on images held out of the training set"
    yield ""
    found = load(out / f"tune-{TUNED}")
    if found is None or not found.rows:
        yield from (NOT_TESTED, "")
        return
    yield make_head("networks", "method", "epochs", "error on held-out images %")
    for row in sorted(found.rows, key=lambda row: [row.config[name] for name in AXIS.split(", ")]):
        epochs = row.outcome.epochs if row.outcome is not None else 0
        yield make_row([NETWORKS[TUNED].title, say_method(row), epochs, f"{get_error(row, 'test'):.2f}"])
    yield ""
