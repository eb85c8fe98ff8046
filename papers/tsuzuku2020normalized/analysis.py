"""What the rows hold: the networks of a study as arrays, correlations with the gap, and slopes."""

import json
import tomllib
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from estimates import FEWEST, RESAMPLES, Estimate
from scipy.stats import ttest_ind

from saltflat.studies import Results
from saltflat.studies.row import Outcome, Row
from saltflat.studies.scores.correlation import resample_kendall, resample_pearson, spearman
from saltflat.studies.scores.layout import Counts, Floats, Ints, divide_or_nan, draw_resamples
from saltflat.studies.scores.sample import number_configurations

HERE = Path(__file__).parent
CLAIMS: list[dict[str, Any]] = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))["claim"]
PRINTED = ("normalized_sharpness_printed", "normalized_sharpness_printed(side='columns')")
NORMALIZED = ("normalized_sharpness", *PRINTED, "parameterwise_normalized_sharpness")
BASELINES = ("hessian_trace", "squared_norm")
OTHERS = ("minimum_sharpness", "kappa_trace", "rho", "fisher_rao_norm", "fisher_rao_diagonal")
MEASURES = (*NORMALIZED, *BASELINES, *OTHERS)
REGULARIZED = "regularized_normalized_sharpness"  # a search for every weight: for the LeNets of the tables alone
NEGATIVE = "negative_curvature"  # share of the Hessian's diagonal that is negative, with normalized logits
COLLAPSED = 0.8  # training error above which a network has learned next to nothing
CHANCE = 0.05  # of a fall between two shares of random labels that is none


@dataclass(frozen=True)
class Pass:
    """How the networks of a study are measured once more.

    Attributes:
        meaning: in words.
        logits: the option of :func:`saltflat.measure`.
        folded: whether BatchNorm is folded first.
    """

    meaning: str
    logits: str = "none"
    folded: bool = False


PASSES = {
    "logits_std": Pass("logits of unit deviation", logits="std"),
    "folded": Pass("BatchNorm folded", folded=True),
    "folded_logits_std": Pass("BatchNorm folded, logits of unit deviation", logits="std", folded=True),
}


@dataclass(frozen=True)
class Network:
    """A network of the paper.

    Attributes:
        title: its name in the paper.
        network: its name in saltflat.
        passes: how it is measured again.
    """

    title: str
    network: str
    passes: tuple[str, ...]


NETWORKS = {
    "mlp": Network("MLP", "mlp", ("logits_std",)),
    "lenet": Network("LeNet", "lenet5", ("logits_std",)),
    "wrn": Network("WRN-16-4", "wrn_16_4", ("folded", "folded_logits_std")),
}
DATASETS = {"mnist": "MNIST", "cifar10": "CIFAR-10"}


def list_datasets(part: str, network: str) -> tuple[str, ...]:
    """Return the data sets on which a part trains a network.

    >>> list_datasets("equal-loss", "lenet"), list_datasets("depth-width", "lenet")
    (('cifar10',), ())
    """
    if part == "equal-loss":
        return ("cifar10",) if network != "wrn" else ()
    if part == "depth-width":
        return ("mnist",) if network == "mlp" else ()
    return tuple(DATASETS)


class Found:
    """The networks of a study that finished, as arrays; those that missed a target loss are left out.

    Attributes:
        results: of the study.
        left_out: networks that are not among the rows, by the reason.
        rows: one for each network.
        gap: test error minus training error.
        error: training errors.
        loss: training losses.
        units: a number for each configuration; its seeds share it.
    """

    def __init__(self, folder: Path, keep_collapsed: bool = True) -> None:
        self.results = Results.load(folder)
        done: list[tuple[Row, Outcome]] = [
            (row, row.outcome)
            for row in self.results.rows.values()
            if row.outcome is not None and row.readings and row.status == "done"
        ]
        kept = [each for each in done if keep_collapsed or each[1].train_error <= COLLAPSED]
        self.left_out = {name: count for name, count in self.results.counts.items() if name != "done" and count}
        if len(kept) < len(done):
            self.left_out["collapsed"] = len(done) - len(kept)
        self.rows = [row for row, _ in kept]
        self.gap: Floats = np.array([row.gap["error"] for row in self.rows])
        self.error: Floats = np.array([outcome.train_error for _, outcome in kept])
        self.loss: Floats = np.array([outcome.train_loss for _, outcome in kept])
        self.units: Ints = number_configurations(self.rows) if self.rows else np.zeros(0, dtype=np.int64)
        self._correlations: dict[bytes, Correlations | None] = {}

    @cached_property
    def again(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """The values of further passes, by pass, key and measure."""
        paths = {name: self.results.folder / f"{name}.json" for name in PASSES}
        return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}

    @property
    def log_loss(self) -> Floats:
        """The logarithms of the training losses."""
        return np.asarray(np.log(np.maximum(self.loss, 1e-300)))

    @property
    def is_enough(self) -> bool:
        """Whether there are networks enough for a correlation."""
        return len(self.rows) >= FEWEST and len(set(self.units)) >= FEWEST

    def get_values(self, measure: str, again: str | None = None) -> Floats:
        """Return a measure's value for each network, nan where there is none."""
        if again is None:
            readings = [row.readings.get(measure) for row in self.rows]
            return np.array([np.nan if reading is None else reading.value for reading in readings])
        values = [self.again.get(again, {}).get(row.key, {}).get(measure) for row in self.rows]
        return np.array([np.nan if value is None else value for value in values])

    def correlate(self, values: Floats) -> "Correlations | None":
        """Correlate a number with the gap; the result is kept, since several tables show it."""
        key = values.tobytes()
        if key not in self._correlations:
            self._correlations[key] = correlate(values, self)
        return self._correlations[key]

    def get_setting(self, name: str) -> Floats:
        """Return a setting's value for each network."""
        return np.array([float(row.config[name]) for row in self.rows])


def load(folder: Path, keep_collapsed: bool = True) -> Found | None:
    """Return the networks of a study; None if there are none yet."""
    if not (folder / "study.json").exists():
        return None
    found = Found(folder, keep_collapsed)
    return found if found.results.rows else None


@dataclass(frozen=True)
class Correlations:
    """How a number correlates with the gap.

    Attributes:
        networks: how many of them have the number.
        pearson, kendall: correlations (Kendall's is tau-b).
        pearson_left: what is left of Pearson's correlation when the training loss and its logarithm are held fixed.
        loss_held, log_held: the same with one of the two alone.
        kendall_left: what is left of Kendall's when the training loss is held fixed.
        fisher: Pearson's correlation with Fisher's interval, which takes all networks for independent.
        resamples: Pearson's correlation in every resample, the first of which has every network once.
    """

    networks: int
    pearson: Estimate
    kendall: Estimate
    pearson_left: Estimate
    loss_held: Estimate
    log_held: Estimate
    kendall_left: Estimate
    fisher: Estimate
    resamples: Floats


def correlate(values: Floats, found: Found) -> Correlations | None:
    """Correlate a number with the gap, as it is and with the training loss held fixed.

    Intervals are from resamples of configurations with all their seeds. None if there are too few networks.
    """
    known = np.isfinite(values)
    if known.sum() < FEWEST or len(set(found.units[known])) < FEWEST or np.ptp(values[known]) == 0:
        return None
    x, gap, loss, log = (each[known] for each in (values, found.gap.round(12), found.loss, found.log_loss))
    times = draw_resamples(np.unique(found.units[known], return_inverse=True)[1], RESAMPLES, seed=0)

    # The gap may be linear in the loss (where networks do not fit their data) or in its logarithm (where they do).
    x_gap = resample_pearson(x[None], gap, times)[0]
    x_loss, gap_loss, log_loss = resample_pearson(np.stack([x, gap, log]), loss, times)
    x_log, gap_log = resample_pearson(np.stack([x, gap]), log, times)
    log_held = hold_fixed(x_gap, x_log, gap_log)
    left = hold_fixed(log_held, hold_fixed(x_loss, x_log, log_loss), hold_fixed(gap_loss, gap_log, log_loss))
    kendall = [resample_kendall(one, other, times)[1] for one, other in ((x, gap), (x, loss), (gap, loss))]
    return Correlations(
        networks=int(known.sum()),
        pearson=Estimate.from_resamples(x_gap),
        kendall=Estimate.from_resamples(kendall[0]),
        pearson_left=Estimate.from_resamples(left),
        loss_held=Estimate.from_resamples(hold_fixed(x_gap, x_loss, gap_loss)),
        log_held=Estimate.from_resamples(log_held),
        kendall_left=Estimate.from_resamples(hold_fixed(*kendall)),
        fisher=compute_fisher_interval(float(x_gap[0]), int(known.sum())),
        resamples=x_gap,
    )


def hold_fixed(xy: Floats, xz: Floats, yz: Floats) -> Floats:
    """Return the partial correlation of x and y given z, Pearson's or Kendall's, from the three correlations.

    >>> hold_fixed(np.array([0.5]), np.array([0.5]), np.array([0.5])).round(4)
    array([0.3333])
    """
    spread = (1 - xz**2) * (1 - yz**2)
    # Where z is x or y up to rounding, nothing is left to correlate.
    return divide_or_nan(xy - xz * yz, np.sqrt(np.where(spread > 1e-12, spread, 0.0)))


def compute_fisher_interval(r: float, networks: int) -> Estimate:
    """Return Pearson's correlation with the interval of Fisher's transform."""
    if networks <= 3 or abs(r) >= 1:
        return Estimate(r, np.nan, np.nan)
    middle, half = np.arctanh(r), 1.959964 / np.sqrt(networks - 3)
    return Estimate(r, float(np.tanh(middle - half)), float(np.tanh(middle + half)))


def compare_strength(one: Correlations, other: Correlations) -> Estimate:
    """Return how much stronger one correlation with the gap is than another, without their signs."""
    return Estimate.from_resamples(np.abs(one.resamples) - np.abs(other.resamples))


def judge_correlation(here: Estimate, paper: float) -> str:
    """Return the verdict: reproduced within 0.1 of the paper's number or with it in the interval, if clear."""
    if not here.is_clear or np.sign(here.value) != np.sign(paper):
        return "not reproduced"
    near = abs(here.value - paper) <= 0.1 or here.low <= paper <= here.high
    return "reproduced" if near else "same sign"


@dataclass(frozen=True)
class Growth:
    """How a number grows with the share of random labels.

    Attributes:
        shares: of random labels.
        means, deviations: over the seeds of each share.
        kendall: tau-b of all networks with their share.
        spearman_of_means: Spearman's correlation of the means with the shares.
        kendall_of_means: the same of Kendall's.
        resamples: of Kendall's correlation, the first that of the networks themselves; the same ones for all measures.
        falls: steps from share to share in which the mean is clearly lower than before, by Welch's test at 5 %.
    """

    shares: Floats
    means: Floats
    deviations: Floats
    kendall: Estimate
    spearman_of_means: float
    kendall_of_means: float
    resamples: Floats
    falls: int

    @property
    def verdict(self) -> str:
        """Reproduced if the networks clearly tend to grow and no step clearly falls; the same sign if one does."""
        if self.kendall.low <= 0:
            return "not reproduced"
        return "same sign" if self.falls else "reproduced"


def compute_growth(found: Found, measure: str) -> Growth | None:
    """Return how a measure grows with the share of random labels; None with fewer than three shares."""
    values, share = found.get_values(measure), found.get_setting("label_noise")
    known = np.isfinite(values)
    values, share = values[known], share[known]
    shares = np.unique(share)
    if len(shares) < 3:
        return None
    groups = [values[share == each] for each in shares]
    means = np.array([group.mean() for group in groups])
    deviations = np.array([values[share == each].std(ddof=1) if (share == each).sum() > 1 else 0.0 for each in shares])
    once: Counts = np.ones((len(shares), 1), dtype=np.float32)
    resamples = resample_kendall(values, share, draw_resamples(np.arange(len(values)), RESAMPLES, seed=0))[1]
    return Growth(
        shares,
        means,
        deviations,
        Estimate.from_resamples(resamples),
        spearman(means, shares),
        float(resample_kendall(means, shares, once)[1][0]),
        resamples,
        sum(
            bool(ttest_ind(after, before, equal_var=False).pvalue < CHANCE and after.mean() < before.mean())
            for before, after in pairwise(groups)
            if min(len(before), len(after)) > 1
        ),
    )


@dataclass(frozen=True)
class Slopes:
    """Slopes of a number's logarithm in the logarithms of depth and width, fitted together.

    Attributes:
        depth: of the number of hidden layers.
        matrices: of the number of weight matrices, one more, in a fit of its own.
        width: of the units of a layer.
    """

    depth: Estimate
    matrices: Estimate
    width: Estimate


def compute_slopes(found: Found, measure: str) -> Slopes | None:
    """Fit the logarithm of a measure; None with too few networks."""
    values = found.get_values(measure)
    known = np.isfinite(values) & (values > 0)
    depth, width = found.get_setting("depth")[known], found.get_setting("width")[known]
    if min(len(set(depth)), len(set(width))) < 2 or len(set(found.units[known])) < 4:
        return None
    times = draw_resamples(np.unique(found.units[known], return_inverse=True)[1], RESAMPLES, seed=0)
    one, width_slopes = _fit_slopes(np.log(depth), np.log(width), np.log(values[known]), times)
    other, _ = _fit_slopes(np.log(depth + 1), np.log(width), np.log(values[known]), times)
    return Slopes(*(Estimate.from_resamples(each) for each in (one, other, width_slopes)))


def _fit_slopes(first: Floats, second: Floats, y: Floats, times: Counts) -> tuple[Floats, Floats]:
    """Return both slopes of the least-squares plane in every resample; nan where it is not determined."""
    columns = np.stack([np.ones_like(first), first - first.mean(), second - second.mean()], axis=1)
    counts = times.astype(np.float64)
    squares = np.einsum("nr,na,nb->rab", counts, columns, columns)
    products = np.einsum("nr,na,n->ra", counts, columns, y)
    determined = np.linalg.cond(squares) < 1e10
    safe = np.where(determined[:, None, None], squares, np.eye(3))
    slopes = np.linalg.solve(safe, products[..., None])[..., 0]
    slopes = np.where(determined[:, None], slopes, np.nan)
    return slopes[:, 1], slopes[:, 2]
