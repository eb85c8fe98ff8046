"""What is left of the correlations with the gap at equal training loss, and among networks that share a setting."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from analysis import DATASETS, NETWORKS, Correlations, Found, list_datasets, load
from estimates import FEWEST, RESAMPLES, Estimate
from numpy.typing import NDArray
from page_rows import THREE, say_untested
from pages import TOO_FEW, make_head, make_row

from saltflat.studies.scores.correlation import resample_pearson
from saltflat.studies.scores.layout import draw_resamples

AXES = {"dropout": "dropout", "decoupled_weight_decay": "decoupled decay", "weight_decay": "L2"}
FITTED = 0.01  # training error
NUMBERS = ("normalized_sharpness", "hessian_trace", "squared_norm")
LEFT = (
    "networks", "normalized_sharpness", "training loss alone", "its logarithm alone",
    "normalized_sharpness at equal loss", "the loss alone held fixed", "its logarithm alone held fixed", "by Kendall",
    "at equal loss, logits of unit deviation", "trace at equal loss", "norm at equal loss", "what is left",
)  # fmt: skip
COLUMNS = ("networks", "among those with", "how many", *NUMBERS, "training loss (control)")


def write_equal_loss(out: Path, studies: dict[tuple[str, str], Found | None]) -> Iterator[str]:
    """Yield what is left of the correlation of normalized sharpness once the training loss is held fixed."""
    yield (
        "All columns are correlations with the gap. Where networks do not fit their data, the gap falls linearly with "
        'the training loss; where they do, it follows its logarithm. So "at equal loss" holds both fixed. The columns '
        "that hold one of the two alone show how much depends on that choice."
    )
    yield ""
    yield make_head(*LEFT)
    left_over: dict[str, list[str]] = {}
    for (dataset, network), found in studies.items():
        title = f"{NETWORKS[network].title} on {DATASETS[dataset]}"
        if found is None or not found.is_enough:
            yield make_row([title, say_untested(found), *[""] * (len(LEFT) - 2)])
            continue
        one, trace, norm = (found.correlate(found.get_values(name)) for name in THREE)
        unit = found.correlate(found.get_values("normalized_sharpness", NETWORKS[network].passes[-1]))
        loss, log = found.correlate(found.loss), found.correlate(found.log_loss)
        if one is None or loss is None or log is None:
            yield make_row([title, TOO_FEW, *[""] * (len(LEFT) - 2)])
            continue
        left = [each.pearson_left if each is not None else "" for each in (unit, trace, norm)]
        left_over.setdefault(say_left(one), []).append(title)
        held = (one.pearson_left, one.loss_held, one.log_held, one.kendall_left)
        yield make_row([title, one.pearson, loss.pearson, log.pearson, *held, *left, say_left(one)])
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
            one = found.correlate(values)
            if one is not None:
                yield make_row([title, reached, losses, name, one.pearson, one.kendall])


def say_left(one: Correlations) -> str:
    """Return in words what is left of a correlation at equal training loss, Pearson's and Kendall's."""
    left = (one.pearson_left, one.kendall_left)
    unless = (
        "" if one.loss_held.is_clear and one.log_held.is_clear else ", unless one of loss and logarithm is held alone"
    )
    if all(each.low > 0 for each in left):
        return f"a positive correlation{unless}"
    if all(each.high < 0 for each in left):
        return f"a negative correlation{unless}"
    if one.pearson_left.is_clear and one.kendall_left.is_clear:
        return "opposite signs by Pearson and Kendall"
    clear = [name for name, each in zip(("Pearson", "Kendall"), left, strict=True) if each.is_clear]
    return "nothing clear" if not clear else f"clear by {clear[0]} alone"


def write_all_subsets(studies: dict[tuple[str, str], Found | None]) -> Iterator[str]:
    """Yield Pearson's correlations with the gap among networks that share a setting."""
    yield (
        "Pearson's correlation with the gap among networks that share a setting, or that all fit the training data or "
        "all do not. The split by training error was chosen after the rows were seen: read it as a description, not "
        "as a test."
    )
    yield ""
    yield make_head(*COLUMNS)
    for (dataset, network), found in studies.items():
        title = f"{NETWORKS[network].title} on {DATASETS[dataset]}"
        if found is None or not found.is_enough:
            yield make_row([title, say_untested(found), *[""] * (len(COLUMNS) - 2)])
            continue
        yield from map(make_row, write_subsets(title, found))


def list_subsets(found: Found) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield the subsets of a study's networks by what they share."""
    fitted = found.error <= FITTED
    for name, kept in (
        (f"training error at most {FITTED:.0%}", fitted),
        (f"training error above {FITTED:.0%}", ~fitted),
    ):
        if not kept.all():
            yield name, kept
    for axis, title in AXES.items():
        setting = found.get_setting(axis)
        for value in np.unique(setting):
            yield f"{title} {value:g}", setting == value


def write_subsets(title: str, found: Found) -> Iterator[list[object]]:
    """Yield the cells of a row for each subset that is large enough."""
    for name, kept in list_subsets(found):
        if kept.sum() < FEWEST or len(set(found.units[kept])) < FEWEST:
            continue
        times = draw_resamples(np.unique(found.units[kept], return_inverse=True)[1], RESAMPLES, seed=0)
        values = np.stack([*(found.get_values(measure)[kept] for measure in NUMBERS), found.loss[kept]])
        pearson = resample_pearson(values, found.gap[kept].round(12), times)
        yield [title, name, int(kept.sum()), *map(Estimate.from_resamples, pearson)]
