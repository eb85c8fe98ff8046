"""The lines of the page: verdicts first, then every table with intervals, from whatever rows there are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from analysis import (
    BASELINES,
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
    Found,
    compare_strength,
    compute_slopes,
    judge_correlation,
    load,
)
from equal_loss import write_all_subsets, write_equal_loss
from figure_tables import compute_lead, get_growth, judge_clearest, judge_slope, write_labels, write_shapes
from page_rows import LABELS, SHAPE_STUDIES, TABLES, THREE, say_untested
from pages import NOT_TESTED, TOO_FEW, join_verdicts, make_head, make_row, write_warning

from saltflat.studies.scores import kendall_b

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
    '"At equal loss" is the partial correlation, which holds the training loss fixed: the loss and its logarithm '
    "linearly (Pearson), or its order (Kendall's tau-b). A correlation is *reproduced* if its interval is on the "
    "paper's side of zero and the paper's number is in it or within 0.1 of ours, has the *same sign* if only the "
    "first holds, and is *not reproduced* otherwise. That normalized sharpness correlates most strongly is "
    "*reproduced* if its interval is above zero and it is clearly ahead of both others, their signs aside, has the "
    "*same sign* if it is ahead, but not clearly, and is *not reproduced* otherwise. For WRN-16-4, logits of unit "
    "deviation were measured with BatchNorm folded.\n\n"
    "Figure 1: growth with random labels is *reproduced* if the interval of Kendall's correlation with the share is "
    "above zero and no mean is clearly lower than the one before (Welch's test at 5 %), and has the *same sign* if "
    "only the first holds. Which measure grows most clearly is *not decided* where the interval of the lead "
    "contains zero. Figure 2: slopes are those of logarithms. Growth in depth is *reproduced* as linear if the "
    "interval is above zero and contains 1, or the slope is within 0.2 of 1, and has the *same sign* if only the "
    "first holds; growth in width is *reproduced* as sub-linear if the interval lies between 0 and 1."
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
    yield from write_warning(out)
    yield from write_verdicts(out, studies)
    yield ""
    yield HOW
    yield ""
    yield "## What is left at equal training loss"
    yield ""
    yield from write_equal_loss(out, studies)
    yield ""
    yield "## Which networks turn the correlation?"
    yield ""
    yield from write_all_subsets(studies)
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
                one = None if each is None else each.correlate(each.get_values(measure, again))
                here[network] = "-" if each is None or one is None else say_correlation(one, each)
                judged[network] = (
                    say_untested(each) if one is None else judge_correlation(one.pearson, claim[measure][network])
                )
            said = ", ".join(f"{claim[measure][network]:.2f}" for network in NETWORKS)
            name = f"{measure}, logits of unit deviation," if unit else measure
            what = f"{claim['where']}: correlation of {name} with the gap"
            yield make_row([what, said, ", ".join(here.values()), join_judged(judged)])
        judged = {network: judge_strongest(each) for network, each in found.items()}
        leads = ", ".join(say_lead(each) for each in found.values())
        what = f"{claim['where']}: normalized_sharpness correlates most strongly of the three"
        yield make_row([what, say_strongest(claim), f"ahead by {leads}", join_judged(judged)])
    for measure in LABELS["measures"]:
        judged, here = {}, {}
        for dataset, title in DATASETS.items():
            growths = {network: get_growth(out, network, dataset, measure) for network in NETWORKS}
            values = ("-" if each is None else f"{each.kendall.value:.2f}" for each in growths.values())
            here[dataset] = f"{title}: {', '.join(values)}"
            for network, growth in growths.items():
                judged[f"{NETWORKS[network].title} on {title}"] = growth.verdict if growth else NOT_TESTED
        what = f"Figure 1: {measure} grows with the share of random labels"
        yield make_row([what, "yes", f"Kendall on {'; on '.join(here.values())}", join_judged(judged)])
    judged = {
        f"{NETWORKS[network].title} on {title}": judge_clearest(compute_lead(out, network, dataset))
        for dataset, title in DATASETS.items()
        for network in NETWORKS
    }
    what = "Figure 1: normalized_sharpness grows most clearly"
    by_dataset = [
        f"on {title}: {', '.join(str(compute_lead(out, network, dataset) or '-') for network in NETWORKS)}"
        for dataset, title in DATASETS.items()
    ]
    yield make_row([what, "yes", f"Kendall ahead of the next, {'; '.join(by_dataset)}", join_judged(judged)])
    for axis, words in {"depth": "linearly", "width": "sub-linearly"}.items():
        here, judged = {}, {}
        for folder, when in SHAPE_STUDIES.items():
            each = load(out / folder)
            slopes = None if each is None else compute_slopes(each, "normalized_sharpness")
            here[when] = "-" if slopes is None else str(getattr(slopes, axis))
            judged[when] = NOT_TESTED if each is None else judge_slope(each, "normalized_sharpness", axis)
        paper = "slope about 1" if axis == "depth" else "slope below 1"
        what = f"Figure 2: normalized_sharpness grows {words} with the {axis}"
        yield make_row([what, paper, "; ".join(here.values()), join_judged(judged)])


def join_judged(judged: dict[str, str]) -> str:
    """Return one verdict if all agree, else one for each network.

    >>> join_judged({"mlp": "reproduced", "lenet": "reproduced"}), join_judged({"mlp": "a", "lenet": "b"})
    ('**reproduced**', '**a**: MLP; **b**: LeNet')
    """
    return join_verdicts({NETWORKS[name].title if name in NETWORKS else name: each for name, each in judged.items()})


def say_correlation(one: Correlations, found: Found) -> str:
    """Return Pearson's correlation, and how many networks it is of if that is not all of them."""
    some = f" ({one.networks} of {len(found.rows)})" if one.networks < len(found.rows) else ""
    return f"{one.pearson.value:.2f}{some}"


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
    values = [] if found is None else [found.correlate(found.get_values(name)) for name in THREE]
    strengths = [abs(one.pearson.value) for one in values if one is not None]
    return f"{strengths[0] - max(strengths[1:]):.2f}" if len(strengths) == len(THREE) else "-"


def judge_strongest(found: Found | None) -> str:
    """Return the verdict: reproduced if normalized sharpness is clearly ahead of both trace and norm."""
    if found is None:
        return NOT_TESTED
    one, *others = (found.correlate(found.get_values(name)) for name in THREE)
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
        one = found.correlate(found.get_values(measure))
        if one is None:
            continue
        paper = get_paper_value(claim, measure, network)
        judged = "" if paper is None else judge_correlation(one.pearson, paper)
        name = measure if one.networks == len(found.rows) else f"{measure} ({one.networks} networks)"
        yield make_row(
            [name, "" if paper is None else f"{paper:.2f}", one.pearson, show_fisher(one), one.kendall,
             one.pearson_left, one.kendall_left, judged]
        )  # fmt: skip
    for name, values in {"training loss": found.loss, "logarithm of the training loss": found.log_loss}.items():
        control = found.correlate(values)
        if control is not None:
            cells = [f"{name} (control)", "", control.pearson, show_fisher(control), control.kendall]
            yield make_row([*cells, "", "", ""])
    for again in NETWORKS[network].passes:
        if found.correlate(found.get_values("hessian_trace", again)) is not None:
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
            f"{np.nanmin(negative):.2%} to {np.nanmax(negative):.2%} of the Hessian's diagonal are negative, since "
            "this loss is not convex in the outputs; normalized sharpness takes them as zero."
        )
        yield ""
    yield make_head("number", "networks", "Pearson", "Kendall", "Pearson at equal loss", "Kendall at equal loss")
    for measure in MEASURES:
        one = found.correlate(found.get_values(measure, again))
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
            all_three = [None if found is None else found.correlate(found.get_values(name)) for name in forms]
            if found is None or None in all_three:
                yield make_row([title, say_untested(found), *[""] * 5])
                continue
            paper = claim["normalized_sharpness"][network]
            verdicts = [judge_correlation(one.pearson, paper) for one in all_three if one is not None]
            same = "no" if len(set(verdicts)) == 1 else f"yes: {', '.join(verdicts)}"
            order = kendall_b(found.get_values(forms[0]), found.get_values(forms[1]))
            numbers = [one.pearson for one in all_three if one is not None]
            yield make_row([title, f"{paper:.2f}", *numbers, f"{order:.3f}", same])
