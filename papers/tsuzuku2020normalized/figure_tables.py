"""The tables of Figures 1 and 2: growth with the share of random labels, with depth and with width."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from analysis import (
    BASELINES,
    DATASETS,
    MEASURES,
    NETWORKS,
    NORMALIZED,
    PRINTED,
    Found,
    Growth,
    compute_growth,
    compute_slopes,
    load,
)
from estimates import Estimate
from page_rows import LABELS, SHAPE_STUDIES, SHAPES, say_untested
from pages import NOT_TESTED, TOO_FEW, make_head, make_row

from saltflat.studies import Results


def get_growth(out: Path, network: str, dataset: str, measure: str) -> Growth | None:
    """Return how a measure of one network grows with the share of random labels; None without rows."""
    found = load(out / f"labels-{network}-{dataset}")
    return None if found is None else compute_growth(found, measure)


def compute_lead(out: Path, network: str, dataset: str) -> Estimate | None:
    """Return how far the Kendall of normalized sharpness with the share is ahead of the larger of the other two."""
    one, *others = (get_growth(out, network, dataset, measure) for measure in LABELS["measures"])
    if one is None:
        return None
    leads = [Estimate.from_resamples(one.resamples - each.resamples) for each in others if each is not None]
    return min(leads, key=lambda lead: lead.value, default=None)


def judge_clearest(lead: Estimate | None) -> str:
    """Return whether normalized sharpness follows the share most closely of the three measures."""
    if lead is None:
        return NOT_TESTED
    if lead.low > 0:
        return "reproduced"
    return "not reproduced" if lead.high < 0 else "not decided"


def write_labels(out: Path) -> Iterator[str]:
    """Yield how the three measures of Figure 1, and the gap, grow with the share of random labels."""
    yield make_head(
        "networks", "number", "at the smallest share", "at the largest", "means grow in", "Spearman of means",
        "Kendall of means", "Kendall of all networks with the share", "verdict",
    )  # fmt: skip
    notes = []
    for dataset, title in DATASETS.items():
        for network, each in NETWORKS.items():
            name = f"{each.title} on {title}"
            found = load(out / f"labels-{network}-{dataset}")
            growths = {} if found is None else {one: compute_growth(found, one) for one in MEASURES}
            if found is None or growths["normalized_sharpness"] is None:
                yield make_row([name, say_untested(found), *[""] * 7])
                continue
            for measure in (*LABELS["measures"], PRINTED[0], "minimum_sharpness"):
                growth = growths[measure]
                if growth is None:
                    continue
                ends = (f"{growth.means[place]:.3g} ± {growth.deviations[place]:.2g}" for place in (0, -1))
                judged = growth.verdict if measure in LABELS["measures"] else ""
                steps = int((np.diff(growth.means) > 0).sum())
                monotone = f"{steps} of {len(growth.means) - 1} steps, {growth.falls} clearly down"
                yield make_row(
                    [name, measure, *ends, monotone, f"{growth.spearman_of_means:.2f}",
                     f"{growth.kendall_of_means:.2f}", growth.kendall, judged]
                )  # fmt: skip
            seeds = len(found.rows) // len(set(found.units))
            notes.append(
                f"* {name}: {len(found.rows)} networks, {len(set(found.units))} shares of {seeds} seeds; training "
                f"error up to {found.error.max():.2%}, in {int((found.error > 0.01).sum())} networks above 1 %."
            )
    yield ""
    yield from notes


def write_shapes(out: Path) -> Iterator[str]:
    """Yield the slopes of Figure 2."""
    yield make_head(
        "networks", "number", "slope in depth (hidden layers)", "slope in weight matrices", "slope in width", "verdict"
    )
    for folder, when in SHAPE_STUDIES.items():
        found = load(out / folder)
        slopes = {} if found is None else {measure: compute_slopes(found, measure) for measure in MEASURES}
        if found is None or slopes["normalized_sharpness"] is None:
            yield make_row([when, say_untested(found), *[""] * 4])
            continue
        for measure in (*NORMALIZED[:2], NORMALIZED[3], *BASELINES, "fisher_rao_norm", "fisher_rao_diagonal"):
            one = slopes[measure]
            if one is None:
                continue
            judged = ""
            if measure in NORMALIZED[:2]:
                judged = "; ".join(f"{axis}: {judge_slope(found, measure, axis)}" for axis in ("depth", "width"))
            yield make_row([f"{len(found.rows)}, {when}", measure, one.depth, one.matrices, one.width, judged])
    for folder, when in SHAPE_STUDIES.items():
        missed = count_missed(out / folder)
        if missed:
            listed = ", ".join(f"{count} of width {width}" for width, count in sorted(missed.items()))
            yield ""
            yield f"* {when}: left out because they did not reach it: {listed}."


def count_missed(folder: Path) -> dict[int, int]:
    """Return how many networks of each width missed their stopping rule."""
    if not folder.exists():
        return {}
    rows = Results.load(folder).rows.values()
    return dict(Counter(row.config["width"] for row in rows if row.status == "missed"))


def judge_slope(found: Found, measure: str, axis: str) -> str:
    """Return the verdict: linear if the interval contains 1 or the slope is within 0.2 of it; below 1, and growing."""
    slopes = compute_slopes(found, measure)
    if slopes is None:
        return TOO_FEW
    slope = getattr(slopes, axis)
    if axis == "depth":
        linear = slope.low <= SHAPES["depth"] <= slope.high or abs(slope.value - SHAPES["depth"]) <= 0.2
        if linear and slope.low > 0:
            return "reproduced"
        return "same sign" if slope.low > 0 else "not reproduced"
    return "reproduced" if slope.low > 0 and slope.high < SHAPES["width_below"] else "not reproduced"
