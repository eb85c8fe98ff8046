"""What the rows say about Scenarios I to III: which numbers track the test error?"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from estimates import Estimate, correlate
from matplotlib.figure import Figure
from pages import NOT_TESTED, TOO_FEW, join_verdicts, make_head, make_row
from studies import AUGMENTATIONS, BASELINES, FOLDED, INVARIANT, LOGDET, MEASURES
from tables import CLAIMS, Found, format_spread, get_error, load

from saltflat.studies.row import Row
from saltflat.studies.scores import kendall_b
from saltflat.studies.scores.layout import Floats

CLAIMED = {claim["where"]: claim for claim in CLAIMS if claim["where"].startswith("Scenario")}
BY_NAME = {measure.partition("(")[0]: measure for measure in MEASURES}
TITLES = {LOGDET: "log-determinant", **BASELINES}


@dataclass(frozen=True)
class Scenario:
    """One of the paper's scenarios.

    Attributes:
        name: of the study with its networks.
        levels: what its networks differ in.
        get_level: a network's level.
        contains: whether a network of the study belongs to it, given the grid's first batch size.
    """

    name: str
    levels: str
    get_level: Callable[[Mapping[str, Any]], object]
    contains: Callable[[Mapping[str, Any], int], bool]


def get_augmentation(config: Mapping[str, Any]) -> str:
    """Return the paper's name of an augmentation."""
    return AUGMENTATIONS[config["augment"], config["crop"]]


SCENARIOS = {
    "Scenario I": Scenario("scenario-i", "confusing images", lambda config: config["confusion"], lambda *_: True),
    "Scenario II": Scenario(
        "scenarios-ii-iii", "augmentation", get_augmentation, lambda config, first: config["batch_size"] == first
    ),
    "Scenario III": Scenario(
        "scenarios-ii-iii",
        "batch size",
        lambda config: config["batch_size"],
        lambda config, _: get_augmentation(config) == "4-crop-f",
    ),
}


class Networks:
    """The networks of a scenario.

    Attributes:
        found: the study.
        rows: its networks.
        levels: the level of each.
        errors: test errors in percent.
    """

    def __init__(self, scenario: Scenario, found: Found) -> None:
        axes = found.results.study.axes
        first = axes["augment, crop, batch_size"][0][2] if "augment, crop, batch_size" in axes else 0
        self.found = found
        self.rows: list[Row] = [row for row in found.rows if scenario.contains(row.config, first)]
        self.levels = [scenario.get_level(row.config) for row in self.rows]
        self.errors: Floats = np.array([get_error(row, "test") for row in self.rows], dtype=np.float64)

    def get_values(self, measure: str, again: str | None = None) -> Floats:
        """Return a measure of every network."""
        return np.array([self.found.get_value(row, measure, again) for row in self.rows], dtype=np.float64)

    def correlate(self, values: Floats, kind: str = "kendall") -> Estimate | None:
        """Correlate numbers with the test error; intervals are from resamples of networks."""
        known = np.isfinite(values)
        return correlate(values[known], self.errors[known], np.arange(known.sum()), kind)

    def correlate_means(self, values: Floats) -> float:
        """Return Kendall's correlation of the levels' means."""
        means = [
            [numbers[[level == each for each in self.levels]].mean() for level in dict.fromkeys(self.levels)]
            for numbers in (values, self.errors)
        ]
        return kendall_b(*means) if np.isfinite(means).all() and len(means[0]) > 1 else float("nan")


def load_all(out: Path) -> dict[str, Networks]:
    """Return the networks of every scenario that has some."""
    found = {title: load(out / scenario.name) for title, scenario in SCENARIOS.items()}
    loaded = {title: Networks(SCENARIOS[title], each) for title, each in found.items() if each is not None}
    return {title: each for title, each in loaded.items() if each.rows}


def judge_tracking(tau: Estimate | None, tracks: bool) -> str:
    """Return the verdict on a number that the paper says tracks the test error, or does not.

    Args:
        tau: its correlation with the test error; None with too few networks.
        tracks: what the paper says.
    """
    if tau is None:
        return TOO_FEW
    if tau.low > 0:
        return "reproduced" if tracks else "not reproduced"
    if tau.high < 0 or tau.value <= 0:
        return "not reproduced" if tracks else "reproduced"
    return "not decided"


def write_verdicts(found: Mapping[str, Networks]) -> Iterator[str]:
    """Yield a row for every scenario."""
    for title, claim in CLAIMED.items():
        here, judged = [], {}
        for name, tracks in list_claimed(claim):
            networks, number = found.get(title), BY_NAME[name]
            tau = networks.correlate(networks.get_values(number)) if networks else None
            judged[TITLES[number]] = judge_tracking(tau, tracks) if networks else NOT_TESTED
            here.append(f"{TITLES[number]} {tau or '-'}")
        said = ", ".join(here) if title in found else "-"
        yield make_row([f"{title}: {claim['name']}", "yes", said, join_verdicts(judged)])


def list_claimed(claim: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the numbers of a claim, and whether they track the test error according to the paper."""
    yield from ((name, True) for name in claim["tracks"])
    yield from ((name, False) for name in claim["fails"])


def write_tables(found: Mapping[str, Networks]) -> Iterator[str]:
    """Yield the tables of the scenarios."""
    for title, scenario in SCENARIOS.items():
        yield f"## {title}: {scenario.levels}"
        yield ""
        networks = found.get(title)
        if networks is None:
            yield from (NOT_TESTED, "")
            continue
        yield from write_levels(scenario, networks)
        yield ""
        yield from write_correlations(CLAIMED[title], networks)
        yield ""
        floored = sum(any("at the floor" in note for note in row.readings[LOGDET].notes) for row in networks.rows)
        out = ", ".join(f"{count} {status}" for status, count in networks.found.left_out.items())
        yield (
            f"* {len(networks.rows)} networks{f' (left out of the study: {out})' if out else ''}; {floored} of them "
            "have a log-determinant with eigenvalues at the floor, an upper bound."
        )
        yield ""


def write_levels(scenario: Scenario, networks: Networks) -> Iterator[str]:
    """Yield errors and the paper's numbers at every level."""
    yield make_head(scenario.levels, "networks", "training error %", "test error %", *TITLES.values())
    for level in dict.fromkeys(networks.levels):
        here = [row for row, each in zip(networks.rows, networks.levels, strict=True) if each == level]
        cells = [format_spread([networks.found.get_value(row, name) for row in here]) for name in MEASURES]
        errors = (format_spread([get_error(row, side) for row in here]) for side in ("train", "test"))
        yield make_row([level, len(here), *errors, *cells])


def write_correlations(claim: Mapping[str, Any], networks: Networks) -> Iterator[str]:
    """Yield how every number correlates with the test error."""
    says = dict(list_claimed(claim))
    yield make_head("number", "paper", "Kendall with the test error", "of the means", "Pearson", "verdict")
    numbers: dict[str, Floats] = {TITLES[name]: networks.get_values(name) for name in MEASURES}
    numbers |= {f"{name}, folded": networks.get_values(name, FOLDED) for name in INVARIANT}
    numbers["training loss (control)"] = np.array([row.outcome.train_loss for row in networks.rows if row.outcome])
    claimed = {TITLES[BY_NAME[name]]: tracks for name, tracks in says.items()}
    for name, values in numbers.items():
        tau = networks.correlate(values)
        if tau is None:
            continue
        paper = {True: "tracks", False: "does not"}.get(claimed[name], "") if name in claimed else ""
        judged = judge_tracking(tau, claimed[name]) if name in claimed else ""
        yield make_row(
            [name, paper, tau, f"{networks.correlate_means(values):.2f}", networks.correlate(values, "pearson"), judged]
        )


def draw_figure(out: Path) -> Iterator[Path]:
    """Draw the paper's numbers against the test error, a color for each level: a row for each scenario."""
    found = load_all(out)
    if not found:
        return
    names = (LOGDET, *list(BASELINES)[:3])
    figure = Figure(figsize=(13, 3.2 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), len(names), squeeze=False)
    for axes, (title, networks) in zip(panels, found.items(), strict=True):
        levels = list(dict.fromkeys(networks.levels))
        for axis, name in zip(axes, names, strict=True):
            values = networks.get_values(name)
            for place, level in enumerate(levels):
                here = np.array([each == level for each in networks.levels])
                axis.scatter(values[here], networks.errors[here], s=16, color=f"C{place}", label=str(level))
            axis.set_title(f"{title}: {TITLES[name]}, tau = {networks.correlate(values) or '-'}", fontsize=9)
            axis.locator_params(nbins=5)
        axes[0].set_ylabel("test error, %", fontsize=9)
        axes[-1].legend(title=SCENARIOS[title].levels, fontsize=7, title_fontsize=7)
    figure.savefig(out / "scenarios.png", dpi=150)
    yield out / "scenarios.png"
