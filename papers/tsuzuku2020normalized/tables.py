"""The lines of the page: verdicts first, then every table with intervals, from whatever rows there are."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from analysis import (
    BASELINES,
    CLAIMS,
    DATASETS,
    MEASURES,
    NEGATIVE,
    NETWORKS,
    NORMALIZED,
    OTHERS,
    PASSES,
    PRINTED,
    REGULARIZED,
    Correlations,
    Estimate,
    Found,
    Growth,
    compare_strength,
    compute_growth,
    compute_slopes,
    correlate,
    judge_correlation,
    list_datasets,
    load,
)

from saltflat.studies import Results
from saltflat.studies.scores import kendall_b

NOT_TESTED = "not tested (no rows yet)"
TOO_FEW = "not tested (too few networks)"
TABLES, LABELS, SHAPES = CLAIMS[:2], CLAIMS[2], CLAIMS[3]
SHAPE_STUDIES = {"depth-width": "after equal epochs", "depth-width-equal-loss": "stopped at one training loss"}
THREE = ("normalized_sharpness", *BASELINES)
FIGURES = {
    "tables.png": "Tables 1 and 2, Pearson correlations with the gap and 95 % intervals",
    "gaps.png": "Tables 1 and 2, every network",
    "figure1.png": "Figure 1, mean and standard deviation over seeds, left MNIST, right CIFAR-10",
    "figure2.png": "Figure 2, mean and standard deviation over seeds, after equal epochs",
    "figure2_equal_loss.png": "Figure 2 with every network stopped at one training loss",
}
HOW = (
    "Correlations are with the gap, test error minus training error. Intervals cover 95 % of 2000 resamples of "
    "configurations, each drawn with all its seeds; Fisher's interval assumes that all networks are independent. "
    '"At equal loss" is the partial correlation, which holds the logarithm of the training loss fixed: linearly '
    "(Pearson) or in order (Kendall's tau-b). A correlation is *reproduced* if its interval excludes zero and the "
    "paper's number is in it or within 0.1 of ours, has the *same sign* if only the first holds, and is *not "
    "reproduced* otherwise. For WRN-16-4, logits of unit deviation were measured with BatchNorm folded.\n\n"
    "Figure 1: growth with random labels is *reproduced* if the interval of Kendall's correlation with the share is "
    "above zero and no mean is clearly lower than the one before (Welch's test at 5 %), and has the *same sign* if "
    "only the first holds. Which measure grows most clearly is *not decided* where the interval of the lead contains "
    "zero. Figure 2: slopes are those of logarithms. Growth in depth is *reproduced* as linear if the interval is "
    "above zero and contains 1, or the slope is within 0.2 of 1; growth in width is *reproduced* as sub-linear if the "
    "interval lies between 0 and 1."
)


def write_tables(out: Path) -> Iterator[str]:
    """Yield the generated lines of the page.

    Args:
        out: folder with a folder for each study.
    """
    studies = {
        (claim["dataset"], network): load(out / f"tables-{network}-{claim['dataset']}", keep_collapsed=False)
        for claim in TABLES
        for network in NETWORKS
    }
    yield "## Verdicts"
    yield ""
    if any("-smoke" in path.read_text(encoding="utf-8") for path in out.glob("*/study.json")):
        yield "**Smoke scale: tiny networks on few images, to see that everything runs. These verdicts mean nothing.**"
        yield ""
    yield from write_verdicts(out, studies)
    yield ""
    yield HOW
    yield ""
    yield "## What is left at equal training loss"
    yield ""
    yield from write_equal_loss(out, studies)
    yield ""
    yield "## Does the misprinted root change a conclusion?"
    yield ""
    yield from write_roots(studies)
    yield ""
    for claim in TABLES:
        for network, each in NETWORKS.items():
            yield f"## {claim['where']}, {DATASETS[claim['dataset']]}: {each.title}"
            yield ""
            yield from write_correlations(studies[claim["dataset"], network], claim, network)
            yield ""
    yield "## Figure 1: random labels"
    yield ""
    yield from write_labels(out)
    yield ""
    yield "## Figure 2: depth and width"
    yield ""
    yield from write_shapes(out)
    drawn = {name: meaning for name, meaning in FIGURES.items() if (out / name).exists()}
    if drawn:
        yield ""
        yield "## Figures"
    for name, meaning in drawn.items():
        yield ""
        yield f"{meaning}:"
        yield ""
        yield f"![{meaning}](results/{name})"


def say_untested(found: Found | None) -> str:
    """Return why there is no verdict."""
    return NOT_TESTED if found is None else TOO_FEW


def make_row(cells: Iterable[object]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def make_head(*names: str) -> str:
    """Return the head of a table, two lines."""
    return make_row(names) + "\n" + "| --- " * len(names) + "|"


def get_paper_value(claim: dict[str, Any], measure: str, network: str) -> float | None:
    """Return the paper's number; that of normalized sharpness is for both its forms."""
    key = "normalized_sharpness" if measure in PRINTED else measure
    value: float | None = claim.get(key, {}).get(network)
    return value


# Verdicts


def write_verdicts(out: Path, studies: dict[tuple[str, str], Found | None]) -> Iterator[str]:
    """Yield one row for each claim of the paper."""
    yield make_head("claim", "paper (MLP, LeNet, WRN)", "here", "verdict")
    for claim in TABLES:
        found = {network: studies[claim["dataset"], network] for network in NETWORKS}
        for measure, unit in (*((name, False) for name in THREE), *((name, True) for name in THREE[:2])):
            here: dict[str, str] = {}
            judged: dict[str, str] = {}
            for network, each in found.items():
                again = NETWORKS[network].passes[-1] if unit else None
                one = None if each is None else correlate(each.get_values(measure, again), each)
                here[network] = "-" if one is None else f"{one.pearson.value:.2f}"
                judged[network] = (
                    say_untested(each) if one is None else judge_correlation(one.pearson, claim[measure][network])
                )
            said = ", ".join(f"{claim[measure][network]:.2f}" for network in NETWORKS)
            name = f"{measure}, logits of unit deviation," if unit else measure
            what = f"{claim['where']}: correlation of {name} with the gap"
            yield make_row([what, said, ", ".join(here.values()), join_verdicts(judged)])
        judged = {network: judge_strongest(each) for network, each in found.items()}
        leads = ", ".join(say_lead(each) for each in found.values())
        what = f"{claim['where']}: normalized_sharpness correlates most strongly of the three"
        yield make_row([what, say_strongest(claim), f"ahead by {leads}", join_verdicts(judged)])
    for measure in LABELS["measures"]:
        judged, here = {}, {}
        for dataset, title in DATASETS.items():
            growths = {network: get_growth(out, network, dataset, measure) for network in NETWORKS}
            values = ("-" if each is None else f"{each.kendall.value:.2f}" for each in growths.values())
            here[dataset] = f"{title}: {', '.join(values)}"
            for network, growth in growths.items():
                judged[f"{NETWORKS[network].title} on {title}"] = growth.verdict if growth else NOT_TESTED
        what = f"Figure 1: {measure} grows with the share of random labels"
        yield make_row([what, "yes", f"Kendall on {'; on '.join(here.values())}", join_verdicts(judged)])
    judged = {
        f"{NETWORKS[network].title} on {title}": judge_clearest(compute_lead(out, network, dataset))
        for dataset, title in DATASETS.items()
        for network in NETWORKS
    }
    what = "Figure 1: normalized_sharpness grows most clearly"
    leads = [
        f"on {title}: {', '.join(str(compute_lead(out, network, dataset) or '-') for network in NETWORKS)}"
        for dataset, title in DATASETS.items()
    ]
    yield make_row([what, "yes", f"Kendall ahead of the next, {'; '.join(leads)}", join_verdicts(judged)])
    for axis, words in {"depth": "linearly", "width": "sub-linearly"}.items():
        here, judged = {}, {}
        for folder, when in SHAPE_STUDIES.items():
            each = load(out / folder)
            slopes = None if each is None else compute_slopes(each, "normalized_sharpness")
            here[when] = "-" if slopes is None else str(getattr(slopes, axis))
            judged[when] = NOT_TESTED if each is None else judge_slope(each, "normalized_sharpness", axis)
        paper = "slope about 1" if axis == "depth" else "slope below 1"
        what = f"Figure 2: normalized_sharpness grows {words} with the {axis}"
        yield make_row([what, paper, "; ".join(here.values()), join_verdicts(judged)])


def join_verdicts(judged: dict[str, str]) -> str:
    """Return one verdict if all agree, else one for each network.

    >>> join_verdicts({"mlp": "reproduced", "lenet": "reproduced"}), join_verdicts({"mlp": "a", "lenet": "b"})
    ('**reproduced**', '**a**: MLP; **b**: LeNet')
    """
    titles = {name: NETWORKS[name].title if name in NETWORKS else name for name in judged}
    if len(set(judged.values())) == 1:
        return f"**{next(iter(judged.values()))}**"
    return "; ".join(
        f"**{verdict}**: {', '.join(titles[name] for name, each in judged.items() if each == verdict)}"
        for verdict in dict.fromkeys(judged.values())
    )


def say_strongest(claim: dict[str, Any]) -> str:
    """Return for which networks the paper's own numbers have normalized sharpness ahead of both others."""
    ahead = [
        each.title
        for network, each in NETWORKS.items()
        if claim["normalized_sharpness"][network] > max(abs(claim[name][network]) for name in BASELINES)
    ]
    return "yes" if len(ahead) == len(NETWORKS) else f"by its numbers only: {', '.join(ahead)}"


def say_lead(found: Found | None) -> str:
    """Return by how much normalized sharpness correlates more strongly than the better of trace and norm."""
    values = [] if found is None else [correlate(found.get_values(name), found) for name in THREE]
    strengths = [abs(one.pearson.value) for one in values if one is not None]
    return f"{strengths[0] - max(strengths[1:]):.2f}" if len(strengths) == len(THREE) else "-"


def judge_strongest(found: Found | None) -> str:
    """Return the verdict: reproduced if normalized sharpness is clearly ahead of both trace and norm."""
    if found is None:
        return NOT_TESTED
    one, *others = (correlate(found.get_values(name), found) for name in THREE)
    if one is None or None in others:
        return TOO_FEW
    ahead = [compare_strength(one, other) for other in others if other is not None]
    if one.pearson.low <= 0 or any(each.value <= 0 for each in ahead):
        return "not reproduced"
    return "reproduced" if all(each.low > 0 for each in ahead) else "same sign"


# Tables 1 and 2


def write_correlations(found: Found | None, claim: dict[str, Any], network: str) -> Iterator[str]:
    """Yield the table of one network on one data set, and those of its further passes."""
    if found is None or not found.is_enough:
        yield say_untested(found)
        return
    yield describe_networks(found)
    yield ""
    yield make_head(
        "number", "paper", "Pearson", "Fisher's interval", "Kendall", "Pearson at equal loss", "Kendall at equal loss",
        "verdict",
    )  # fmt: skip
    for measure in (*NORMALIZED, REGULARIZED, *BASELINES, *OTHERS):
        one = correlate(found.get_values(measure), found)
        if one is None:
            continue
        paper = get_paper_value(claim, measure, network)
        judged = "" if paper is None else judge_correlation(one.pearson, paper)
        yield make_row(
            [measure, "" if paper is None else f"{paper:.2f}", one.pearson, show_fisher(one), one.kendall,
             one.pearson_left, one.kendall_left, judged]
        )  # fmt: skip
    for name, values in {"training loss": found.loss, "logarithm of the training loss": found.log_loss}.items():
        control = correlate(values, found)
        if control is not None:
            cells = [f"{name} (control)", "", control.pearson, show_fisher(control), control.kendall]
            yield make_row([*cells, "", "", ""])
    for again in NETWORKS[network].passes:
        if again in found.again:
            yield ""
            yield from write_pass(found, again)


def show_fisher(one: Correlations) -> str:
    """Return Fisher's interval."""
    return f"[{one.fisher.low:.2f}, {one.fisher.high:.2f}]"


def write_pass(found: Found, again: str) -> Iterator[str]:
    """Yield the correlations of the numbers that a further pass measured, folded away."""
    yield f"<details><summary>Measured with {PASSES[again].meaning}</summary>"
    yield ""
    negative = found.get_values(NEGATIVE, again)
    if np.isfinite(negative).any():
        yield (
            f"{np.nanmin(negative):.0%} to {np.nanmax(negative):.0%} of the Hessian's diagonal are negative, since "
            "this loss is not convex in the outputs; normalized sharpness takes them as zero."
        )
        yield ""
    yield make_head("number", "networks", "Pearson", "Kendall", "Pearson at equal loss", "Kendall at equal loss")
    for measure in MEASURES:
        one = correlate(found.get_values(measure, again), found)
        if one is not None:
            yield make_row([measure, one.networks, one.pearson, one.kendall, one.pearson_left, one.kendall_left])
    yield ""
    yield "</details>"


def describe_networks(found: Found) -> str:
    """Return how many networks there are, and the range of what they differ in."""
    out = ", ".join(f"{count} {status}" for status, count in found.left_out.items())
    epochs = sorted({row.outcome.epochs for row in found.rows if row.outcome is not None})
    return (
        f"{len(found.rows)} networks of {len(set(found.units))} configurations"
        f"{f' (left out: {out})' if out else ''}, {format_range(epochs)} epochs; gap {found.gap.min():.4f} to "
        f"{found.gap.max():.4f}, training error {found.error.min():.2%} to {found.error.max():.2%}, training loss "
        f"{found.loss.min():.2g} to {found.loss.max():.2g}."
    )


def format_range(numbers: list[int]) -> str:
    """Return one number, or the smallest and the largest."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def write_equal_loss(out: Path, studies: dict[tuple[str, str], Found | None]) -> Iterator[str]:
    """Yield what is left of the correlation of normalized sharpness once the training loss is held fixed."""
    yield make_head(
        "networks", "normalized_sharpness", "log training loss alone", "normalized_sharpness at equal loss",
        "by Kendall", "the same, logits of unit deviation", "trace at equal loss", "norm at equal loss", "what is left",
    )  # fmt: skip
    left_over: dict[str, list[str]] = {}
    for (dataset, network), found in studies.items():
        title = f"{NETWORKS[network].title} on {DATASETS[dataset]}"
        if found is None or not found.is_enough:
            yield make_row([title, say_untested(found), *[""] * 7])
            continue
        one, trace, norm = (correlate(found.get_values(name), found) for name in THREE)
        unit = correlate(found.get_values("normalized_sharpness", NETWORKS[network].passes[-1]), found)
        loss = correlate(found.log_loss, found)
        if one is None or loss is None:
            yield make_row([title, TOO_FEW, *[""] * 7])
            continue
        left = [each.pearson_left if each is not None else "" for each in (unit, trace, norm)]
        left_over.setdefault(say_left(one), []).append(title)
        yield make_row([title, one.pearson, loss.pearson, one.pearson_left, one.kendall_left, *left, say_left(one)])
    yield ""
    if left_over:
        said = "; ".join(f"{what}: {', '.join(titles)}" for what, titles in left_over.items())
        yield f"What is left of the correlation of normalized sharpness when the training loss is held fixed: {said}."
        yield ""
    yield (
        "Networks of Table 2 trained again with a constant learning rate, each stopped after the first epoch at or "
        "below one training loss:"
    )
    yield ""
    yield make_head("networks", "reached it", "training loss", "number", "Pearson with the gap", "Kendall")
    for network, each in NETWORKS.items():
        if not list_datasets("equal-loss", network):
            continue
        found = load(out / f"equal-loss-{network}", keep_collapsed=False)
        title = f"{each.title} on CIFAR-10"
        if found is None or not found.is_enough:
            yield make_row([title, say_untested(found), *[""] * 4])
            continue
        reached = f"{len(found.rows)} of {len(found.results.places)}"
        losses = f"{found.loss.min():.3f} to {found.loss.max():.3f}"
        numbers = {measure: found.get_values(measure) for measure in THREE}
        numbers["normalized_sharpness, logits of unit deviation"] = found.get_values(
            "normalized_sharpness", "logits_std"
        )
        numbers["training loss (control)"] = found.loss
        for name, values in numbers.items():
            one = correlate(values, found)
            if one is not None:
                yield make_row([title, reached, losses, name, one.pearson, one.kendall])


def say_left(one: Correlations) -> str:
    """Return in words what is left of a correlation at equal training loss, Pearson's and Kendall's."""
    left = (one.pearson_left, one.kendall_left)
    if all(each.low > 0 for each in left):
        return "a positive correlation"
    if all(each.high < 0 for each in left):
        return "a negative correlation: the sign turns"
    clear = [name for name, each in zip(("Pearson", "Kendall"), left, strict=True) if each.is_clear]
    return "nothing clear" if not clear else f"clear by {clear[0]} alone"


def write_roots(studies: dict[tuple[str, str], Found | None]) -> Iterator[str]:
    """Yield the correlations of both forms of normalized sharpness, and whether a verdict depends on the form."""
    yield make_head(
        "networks", "paper", "root per column (theory)", "one root, rows (printed)", "one root, columns",
        "Kendall between the first two", "does a verdict change?",
    )  # fmt: skip
    for claim in TABLES:
        for network, each in NETWORKS.items():
            title = f"{each.title} on {DATASETS[claim['dataset']]}"
            found = studies[claim["dataset"], network]
            forms = NORMALIZED[:3]
            all_three = [None if found is None else correlate(found.get_values(name), found) for name in forms]
            if found is None or None in all_three:
                yield make_row([title, say_untested(found), *[""] * 5])
                continue
            paper = claim["normalized_sharpness"][network]
            verdicts = [judge_correlation(one.pearson, paper) for one in all_three if one is not None]
            same = "no" if len(set(verdicts)) == 1 else f"yes: {', '.join(verdicts)}"
            order = kendall_b(found.get_values(forms[0]), found.get_values(forms[1]))
            numbers = [one.pearson for one in all_three if one is not None]
            yield make_row([title, f"{paper:.2f}", *numbers, f"{order:.3f}", same])


# Figures 1 and 2


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
