"""What the LeNets' rows say about Figures 1 and 2, as tables and figures."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from analysis import CLAIMS
from estimates import Estimate, correlate, correlate_left, resample_correlation
from lenets import INITS, LAST, NAMES, RULES
from matplotlib.figure import Figure
from pages import NOT_TESTED, TOO_FEW, join_verdicts, make_head, make_row
from rescaling import FACTORS

from saltflat.studies import Results
from saltflat.studies.row import Row
from saltflat.studies.scores.layout import Floats, Ints
from saltflat.studies.scores.sample import number_configurations

TRACE, BETTER, UNCHANGED, WEAK = CLAIMS[5:9]
COLLAPSED = 0.8  # training error above which a network has learned next to nothing
NORMALS = ("normal, variance 0.1", "normal, deviation 0.1")
MARKERS = dict(zip(INITS, "os^DD", strict=True))
COLORS = {4: "#cc79a7", 32: "#0072b2", 64: "#e69f00", 512: "#009e73"}
# The values of one network: of the whole, and of its layers.
Values: TypeAlias = Mapping[str, Mapping[str, Any]]
NUMBERS = {
    "kappa_trace, last layer": ("kappa_trace", True),
    "kappa, last layer": ("kappa", True),
    "trace of the last layer": ("hessian_trace", True),
    "eigenvalue of the last layer": ("eigenvalue", True),
    "kappa_trace, all layers": ("kappa_trace", False),
    "kappa, all layers": ("kappa", False),
    "rho, all layers": ("rho", False),
    "trace, all layers": ("hessian_trace", False),
}
FIGURES = {
    "figure1.png": "Figure 1, kappa and kappa_trace of the last layer against the gap",
    "figure2.png": "Figure 2, kappa_trace, trace and eigenvalue of the last layer after rescaling",
}
FIXED, MOVED = tuple(NUMBERS)[:2], tuple(NUMBERS)[2:4]  # by rescaling


def get_number(values: Values, name: str) -> float:
    """Return one of ``NUMBERS`` of a network."""
    measure, last = NUMBERS[name]
    if not last:
        return float(values["values"][measure])
    layer = max(values["layers"]["kappa"], key=lambda each: int(each.partition(".")[0]))
    if measure == "eigenvalue":  # kappa is the layer's squared norm times it
        return float(values["layers"]["kappa"][layer] / values["layers"]["squared_norm"][layer])
    return float(values["layers"][measure][layer])


def get_init(row: Row) -> str:
    """Return the name of a network's initialization."""
    found = (row.config["init"], row.config["init_scale"])
    return next(name for name, each in INITS.items() if each == found)


def is_trained(row: Row) -> bool:
    """Return whether a network has learned something."""
    return row.outcome is not None and bool(row.readings) and row.outcome.train_error <= COLLAPSED


def choose_normal(rows: list[Row]) -> str:
    """Return the reading of the paper's normal distribution of which more networks trained; a variance if equal."""
    count = Counter(get_init(row) for row in rows if is_trained(row))
    return max(NORMALS, key=lambda name: count[name])


class Lenets:
    """The networks of one stopping rule as arrays: those that trained and, where it is the rule, reached the loss.

    Attributes:
        every: the rows of all initializations.
        normal: the reading of the normal distribution.
        left_out: how many are not among the rows, by the reason.
        rows: one for each network.
        gap: summed test loss, five times, minus summed training loss, as in the paper.
        loss: training losses.
        units: a number for each configuration; its seeds share it.
    """

    def __init__(self, out: Path, rule: str) -> None:
        folders = [out / name for name in NAMES if name.split("-")[1] == rule]
        loaded = [Results.load(folder) for folder in folders if (folder / "study.json").exists()]
        self.every = [row for results in loaded for row in results.rows.values()]
        self.normal = choose_normal(self.every)
        chosen = [row for row in self.every if get_init(row) not in NORMALS or get_init(row) == self.normal]
        self.rows = [row for row in chosen if is_trained(row) and row.status == "done"]
        why = (row.status if row.status != "done" else "learned nothing" for row in chosen if row not in self.rows)
        self.left_out = dict(Counter(why))
        outcomes = [row.outcome for row in self.rows if row.outcome is not None]
        self.gap: Floats = np.array(
            [each.train_examples * (each.test_loss - each.train_loss) for each in outcomes], dtype=np.float64
        )
        self.loss: Floats = np.array([each.train_loss for each in outcomes], dtype=np.float64)
        self.units: Ints = number_configurations(self.rows) if self.rows else np.zeros(0, dtype=np.int64)
        paths = [results.folder / "rescaled.json" for results in loaded]
        again = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
        self.rescaled: dict[str, Any] = {key: each for found in again for key, each in found.items()}

    @property
    def is_rescaled(self) -> bool:
        """Whether all networks were measured again after rescaling."""
        return all(row.key in self.rescaled for row in self.rows)

    @cached_property
    def log_loss(self) -> Floats:
        """The logarithms of the training losses."""
        return np.asarray(np.log(np.maximum(self.loss, 1e-300)))

    def get_values(self, name: str) -> Floats:
        """Return one of ``NUMBERS`` of every network."""
        each: Iterator[Values] = (
            {
                "values": {key: reading.value for key, reading in row.readings.items()},
                "layers": {key: reading.layers for key, reading in row.readings.items()},
            }
            for row in self.rows
        )
        return np.array([get_number(values, name) for values in each])

    def get_rescaled(self, name: str) -> Floats:
        """Return one of ``NUMBERS`` of every network after its last two layers were rescaled."""
        return np.array([get_number(self.rescaled[row.key], name) for row in self.rows])

    @property
    def factors(self) -> Floats:
        """The factor by which every network's last layer was multiplied."""
        return np.array([float(self.rescaled[row.key]["factors"][-1]) for row in self.rows])

    def correlate(self, values: Floats, kind: str = "pearson") -> Estimate | None:
        """Correlate numbers with the gap; intervals are from resamples of configurations with all their seeds."""
        return correlate(values, self.gap, self.units, kind)

    def draw_correlations(self, name: str) -> Floats:
        """Return the correlations of a number of the last layer's Hessian after draws of factors.

        A layer's Hessian is divided by the square of the factor that its weights are multiplied by.
        """
        values, dice = self.get_values(name), np.random.default_rng(0)
        draws = dice.integers(FACTORS[0], FACTORS[1] + 1, (WEAK["draws"], len(values)))
        return np.array([np.corrcoef(values / factors**2.0, self.gap)[0, 1] for factors in draws])


def load_all(out: Path) -> dict[str, Lenets]:
    """Return the networks by stopping rule; a rule without rows is left out."""
    found = {rule: Lenets(out, rule) for rule in RULES}
    return {rule: each for rule, each in found.items() if each.every}


def write_verdicts(found: Mapping[str, Lenets]) -> Iterator[str]:
    """Yield a row for each claim of Figures 1 and 2."""
    for claim, printed, judge in (
        (TRACE, f"{TRACE['value']:g}", judge_trace),
        (BETTER, "yes", judge_lead),
        (UNCHANGED, "unchanged", judge_moves),
        (WEAK, "very weak", judge_weak),
    ):
        here, verdicts = {}, {}
        for rule, meaning in RULES.items():
            here[rule], verdicts[meaning] = judge(found[rule]) if rule in found else ("-", NOT_TESTED)
        said = "; ".join(f"{RULES[rule]}: {each}" for rule, each in here.items())
        yield make_row([f"{claim['where']}: {claim['name']}", printed, said, join_verdicts(verdicts)])


def judge_trace(found: Lenets) -> tuple[str, str]:
    """Return the correlation of kappa_trace, and its verdict beside the paper's number."""
    here = found.correlate(found.get_values(FIXED[0]))
    if here is None:
        return "-", TOO_FEW
    if here.low <= 0:
        return str(here), "not reproduced"
    near = here.low <= TRACE["value"] <= here.high or abs(here.value - TRACE["value"]) <= 0.1
    return str(here), "reproduced" if near else "same sign"


def judge_lead(found: Lenets) -> tuple[str, str]:
    """Return by how much kappa_trace correlates better than kappa, and the verdict."""
    one, other = (resample_correlation(found.get_values(name), found.gap, found.units) for name in FIXED)
    if one is None or other is None:
        return "-", TOO_FEW
    lead = Estimate.from_resamples(one - other)
    return f"ahead by {lead}", ("reproduced" if lead.low > 0 else "not reproduced" if lead.high < 0 else "not decided")


def judge_moves(found: Lenets) -> tuple[str, str]:
    """Return how far rescaling moves the correlations of kappa and kappa_trace, and the verdict."""
    if not found.is_rescaled:
        return "-", NOT_TESTED
    pairs = [(found.correlate(found.get_values(name)), found.correlate(found.get_rescaled(name))) for name in FIXED]
    moves = [abs(one.value - other.value) for one, other in pairs if one is not None and other is not None]
    if len(moves) < len(FIXED):
        return "-", TOO_FEW
    return f"moves by at most {max(moves):.0e}", (
        "reproduced" if max(moves) <= UNCHANGED["moves"] else "not reproduced"
    )


def judge_weak(found: Lenets) -> tuple[str, str]:
    """Return what is left of the correlations of trace and eigenvalue, and whether that is very weak."""
    before = [found.correlate(found.get_values(name)) for name in MOVED]
    if None in before:
        return "-", TOO_FEW
    left = [float(np.median(found.draw_correlations(name))) for name in MOVED]
    said = ", ".join(
        f"{name.partition(' ')[0]} from {one.value:.2f} to {each:.2f}"
        for name, one, each in zip(MOVED, before, left, strict=True)
        if one is not None
    )
    if all(abs(each) <= WEAK["weak"] for each in left):
        return said, "reproduced"
    weaker = all(one is not None and abs(each) < abs(one.value) for one, each in zip(before, left, strict=True))
    return said, "same sign" if weaker else "not reproduced"


def write_tables(found: Mapping[str, Lenets], out: Path) -> Iterator[str]:
    """Yield the page's tables of Figures 1 and 2, and the figures that are drawn."""
    yield "## Figures 1 and 2: LeNets on CIFAR-10"
    yield ""
    if not found:
        yield NOT_TESTED
        return
    for rule, lenets in found.items():
        left_out = ", ".join(f"{count} {reason}" for reason, count in lenets.left_out.items())
        yield (
            f"* {RULES[rule]}: {len(lenets.rows)} networks of {len(set(lenets.units))} configurations"
            f"{f' (left out: {left_out})' if left_out else ''}; of the readings of the normal distribution, "
            f"{lenets.normal}."
        )
    yield ""
    yield from write_networks(found)
    yield ""
    yield from write_correlations(found)
    yield ""
    yield from write_rescaled(found)
    for name, meaning in FIGURES.items():
        if (out / name).exists():
            yield from ("", f"![{meaning}](results/{name})")


def write_networks(found: Mapping[str, Lenets]) -> Iterator[str]:
    """Yield how the networks of every initialization and batch size trained."""
    batches = sorted({row.config["batch_size"] for lenets in found.values() for row in lenets.every})
    yield make_head("networks", "initialization", *(f"batch {batch}: trained, training loss, gap" for batch in batches))
    for rule, lenets in found.items():
        for name in INITS:
            cells = []
            for batch in batches:
                there = [row for row in lenets.every if get_init(row) == name and row.config["batch_size"] == batch]
                some = [row for row in there if is_trained(row)]
                losses = [row.outcome.train_loss for row in some if row.outcome is not None]
                means = f", {np.mean(losses):.2g}, {np.mean([row.gap['loss'] for row in some]):.2g}" if some else ""
                cells.append(f"{len(some)} of {len(there)}{means}")
            yield make_row([RULES[rule], name, *cells])


def write_correlations(found: Mapping[str, Lenets]) -> Iterator[str]:
    """Yield the correlations of Figure 1, and what is left of them at equal training loss."""
    yield make_head("networks", "number", "Pearson with the gap", "Kendall", "Pearson at equal log training loss")
    for rule, lenets in found.items():
        numbers = {name: lenets.get_values(name) for name in NUMBERS}
        for name, values in {**numbers, "training loss (control)": lenets.loss}.items():
            pearson = lenets.correlate(values)
            if pearson is None:
                continue
            left = correlate_left(values, lenets.gap, lenets.log_loss, lenets.units) if name in numbers else ""
            yield make_row([RULES[rule], name, pearson, lenets.correlate(values, "kendall"), left])


def write_rescaled(found: Mapping[str, Lenets]) -> Iterator[str]:
    """Yield the correlations of Figure 2."""
    yield (
        f"The layer of 84 units divided by a whole number from {FACTORS[0]} to {FACTORS[1]}, the last one multiplied "
        f"by it: {WEAK['draws']} draws of these numbers by the law of the Hessian, and one draw measured again."
    )
    yield ""
    yield make_head("networks", "number", "before", "median of the draws", "smallest to largest", "measured again")
    notes = []
    for rule, lenets in found.items():
        for name in (*FIXED, *MOVED):
            before = lenets.correlate(lenets.get_values(name))
            if before is None:
                continue
            draws = lenets.draw_correlations(name) if name in MOVED else np.full(2, before.value)
            again = lenets.correlate(lenets.get_rescaled(name)) if lenets.is_rescaled else NOT_TESTED
            reach = f"{draws.min():.2f} to {draws.max():.2f}"
            yield make_row([RULES[rule], name, before, f"{np.median(draws):.2f}", reach, again])
        if lenets.is_rescaled and lenets.rows:
            worst = max(lenets.rescaled[row.key]["outputs_differ_by"] for row in lenets.rows)
            law = max(
                float(np.abs(lenets.get_rescaled(name) * lenets.factors**2 / lenets.get_values(name) - 1).max())
                for name in MOVED
            )
            notes.append(
                f"* {RULES[rule]}: outputs differ by at most {worst:.0e} after rescaling the last {LAST} layers; trace "
                f"and eigenvalue of the last one are within {law:.0e} of the law."
            )
    yield ""
    yield from notes


def draw_figures(out: Path) -> Iterator[Path]:
    """Draw Figures 1 and 2 of the rules with rows: a color for each batch size, a marker for each initialization."""
    found = {rule: each for rule, each in load_all(out).items() if len(each.rows) > 1}
    for figure, names in zip(FIGURES, (FIXED, (*FIXED[:1], *MOVED)), strict=True):
        drawn = {rule: each for rule, each in found.items() if figure == "figure1.png" or each.is_rescaled}
        if not drawn:
            continue
        canvas = Figure(figsize=(3.6 * len(names) + 1, 3.4 * len(drawn)), layout="constrained")
        for axes, (rule, lenets) in zip(
            canvas.subplots(len(drawn), len(names), squeeze=False), drawn.items(), strict=True
        ):
            for axis, name in zip(axes, names, strict=True):
                values = lenets.get_values(name) if figure == "figure1.png" else lenets.get_rescaled(name)
                for place, row in enumerate(lenets.rows):
                    batch, init = int(row.config["batch_size"]), get_init(row)
                    color, marker = COLORS.get(batch, "0.4"), MARKERS[init]
                    axis.scatter(
                        values[place], lenets.gap[place], s=14, color=color, marker=marker, label=f"{batch}, {init}"
                    )
                axis.set_title(f"{name}{'' if figure == 'figure1' else ', rescaled'}\n{RULES[rule]}", fontsize=9)
                axis.ticklabel_format(style="sci", scilimits=(-3, 4))
            axes[0].set_ylabel("5 x summed test loss - summed training loss", fontsize=8)
        labels = {
            label: handle
            for axis in canvas.axes
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        canvas.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, fontsize=7)
        canvas.savefig(out / figure, dpi=150)
        yield out / figure
