"""Warnings about scores, and what scores unrelated measures reach by chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.stats import norm

from saltflat.results.text import format_number
from saltflat.studies.row import Outcome
from saltflat.studies.scores.layout import Floats

FEW_RUNS = 10
FEW_CONFIGURATIONS = 5
MANY_LEFT_OUT = 0.2
FITTED_UNEQUALLY = 0.25


def find_warnings(
    outcomes: Sequence[Outcome], gap: str, values: Floats, configurations: int, left_out: Mapping[str, int]
) -> list[str]:
    """Return the reasons to doubt the scores, one sentence each."""
    runs, lost = len(outcomes), sum(left_out.values())
    found = []
    if runs < FEW_RUNS:
        found.append(f"Only {runs} runs: scores of so few runs say little.")
    elif 1 < configurations < FEW_CONFIGURATIONS:
        found.append(f"Only {configurations} configurations: the intervals are too narrow.")
    if lost > MANY_LEFT_OUT * (runs + lost):
        found.append(f"{lost} of {runs + lost} runs are left out; the remaining ones may not be representative.")
    if values.min() == values.max():
        return [*found, f"All gaps are {format_number(float(values[0]))}: they do not order the runs."]
    return [*found, *_find_unresolved_gaps(outcomes), *_find_unequal_fits(outcomes, gap, values)]


def compute_standard_errors(outcomes: Sequence[Outcome]) -> Floats:
    """Return the standard error of each run's test error.

    That is sqrt(e (1 - e) / n), with one wrong and one right answer added. Without these two answers, a run without
    errors would have a standard error of zero. The training error is not a sample and adds nothing.
    """
    size = np.array([each.test_examples for each in outcomes], dtype=np.float64)
    wrong = np.clip([each.test_error for each in outcomes], 0, 1)
    share = (wrong * size + 1) / (size + 2)
    return np.asarray(np.sqrt(share * (1 - share) / np.maximum(size, 1)))


def _find_unresolved_gaps(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a warning if the test set cannot tell most pairs of runs apart."""
    values, errors = (
        np.array([each.test_error - each.train_error for each in outcomes]),
        compute_standard_errors(outcomes),
    )
    differ, least = compute_median_difference(values), 2 * compute_median_hypot(errors)
    if not differ < least:
        return []
    size = int(np.median([each.test_examples for each in outcomes]))
    return [
        f"The gaps of errors are closer together than {size} test examples can resolve: two runs differ by "
        f"{format_number(differ, 2)} in the median, and two standard errors of such a difference are "
        f"{format_number(least, 2)}. Much of the order of the runs is chance. Try more test examples, or settings "
        "that differ more."
    ]


def compute_median_difference(values: Floats) -> float:
    """Return the median of ``abs(a - b)`` over all pairs, in O(n log n)."""
    ordered = np.sort(values)

    def count(limit: float) -> int:
        return int((np.searchsorted(ordered, ordered + limit, "right") - np.arange(1, len(ordered) + 1)).sum())

    return float(np.mean(_find_middle_values(count, len(ordered), ordered[-1] - ordered[0])))


def compute_median_hypot(values: Floats) -> float:
    """Return the median of ``hypot(a, b)`` over all pairs, in O(n log n)."""
    squares = np.sort(values**2)

    def count(limit: float) -> int:
        return int(np.searchsorted(squares, limit - squares, "right").sum() - (2 * squares <= limit).sum()) // 2

    return float(np.mean(np.sqrt(_find_middle_values(count, len(squares), 2 * squares[-1]))))


def _find_middle_values(count: Callable[[float], int], runs: int, largest: float) -> list[float]:
    """Return the two middle values over all pairs; ``count(limit)`` says how many values are at most the limit."""
    pairs = runs * (runs - 1) // 2
    middle = []
    for place in ((pairs + 1) // 2, pairs // 2 + 1):
        low, high = 0.0, float(largest)
        while low < (half := (low + high) / 2) < high:
            low, high = (low, half) if count(half) >= place else (half, high)
        middle.append(low if count(low) >= place else high)
    return middle


def _find_unequal_fits(outcomes: Sequence[Outcome], gap: str, values: Floats) -> list[str]:
    """Return a warning if training errors differ much: the gap then also depends on how well a run fits."""
    train = np.array([getattr(each, f"train_{gap}") for each in outcomes])
    if not np.ptp(train) > FITTED_UNEQUALLY * np.ptp(values):
        return []
    return [
        f"Training {'errors' if gap == 'error' else 'losses'} run from {format_number(float(train.min()), 2)} to "
        f"{format_number(float(train.max()), 2)}: the gap mixes how well a run fits with how well it generalizes."
    ]


def compute_best_by_chance(measures: int, configurations: int) -> float:
    """Return the Kendall's tau that the best of so many measures unrelated to the gap reaches half of the time.

    Kendall's tau of n independent pairs of numbers has variance 2 (2 n + 5) / (9 n (n - 1)).
    """
    if configurations < 2 or not measures:
        return float("nan")
    spread = np.sqrt(2 * (2 * configurations + 5) / (9 * configurations * (configurations - 1)))
    return min(1.0, float(spread * norm.ppf((1 + 0.5 ** (1 / measures)) / 2)))


def format_chance_note(measures: int, configurations: int) -> str:
    """Return a sentence on the score that the best of so many measures unrelated to the gap reaches by chance."""
    best = compute_best_by_chance(measures, configurations)
    if np.isnan(best):
        return ""
    best_of = f"the best of {measures} unrelated measures" if measures > 1 else "an unrelated measure"
    return (
        f"By chance alone {best_of} would have a Kendall of {best:.2f} or more in absolute value half of the time "
        f"({configurations} independent configurations); the control 'noise' is one such measure."
    )
