"""Compare runs of a study that differ in one setting alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import t as student

from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.measures.registry import MEASURES
from saltflat.results.json_codec import JsonValue
from saltflat.results.text import format_count, format_number, join_words
from saltflat.studies.canonical import dump_canonical_json
from saltflat.studies.effects.results import (
    HIGHER,
    LEVEL,
    LOWER,
    TOO_FEW,
    UNCLEAR,
    AxisEffects,
    Change,
    Effects,
    Estimate,
    Mean,
    Quantity,
    ValueEffects,
    find_value,
)
from saltflat.studies.grid import split_axis_names
from saltflat.studies.scores.layout import SEED, Floats, Ints, combine_codes
from saltflat.studies.scores.scoring import MISSED

if TYPE_CHECKING:
    from saltflat.studies.results import Results
    from saltflat.studies.row import Row


OUTCOMES = {
    "train_loss": "loss",
    "test_loss": "loss",
    "gap_loss": "loss",
    "train_error": "error",
    "test_error": "error",
    "gap_error": "error",
}
# Two configurations, or two seeds, do not show how much others would differ.
MIN_GROUPS = 3
# Equal differences have no spread to judge them by: so many of one sign are rare by chance, 2 * 0.5**6 < 0.05.
MIN_EQUAL = 6
# A relative spread below this is rounding.
ROUNDING = 1e-12
NARROW = "Where that matters most, intervals are too narrow."
MISSED_HINT = " Try missed='keep' for those that missed the stopping rule."


def compute_effects(
    results: Results,
    *,
    axes: Sequence[str] | None = None,
    measures: Sequence[str] | None = None,
    reference: Mapping[str, JsonValue] | None = None,
    missed: str = "leave out",
) -> Effects:
    r"""Compare the values of each setting of a study: which one is flatter, fits better, generalizes better?

    Every run is paired with the run that has the reference value of the setting, and the same other settings and
    seed. The effect is the mean over the pairs of the difference; for measures and losses that are positive in all
    runs also the geometric mean of the ratio, which the verdict is then about.

    Pairs are not independent: those of one configuration of the other settings share what the setting does there, and
    those of one seed share the initial weights and the order of the examples. With pairs :math:`d_{cs}` of
    configuration c and seed s, n of them in C configurations and S seeds, the squared standard error of the mean is

    .. math::
        \mathrm{se}^2 = \frac{1}{n^2} \Big[ \frac{C}{C-1} \sum_c \big(\sum_s (d_{cs} - \bar d)\big)^2
            + \frac{S}{S-1} \sum_s \big(\sum_c (d_{cs} - \bar d)\big)^2 \Big]

    without the term of a factor that has one level only, and not less than for independent pairs. The interval is
    :math:`\bar d \pm t\, \mathrm{se}` with Student's t, whose degrees of freedom follow from the two terms by
    Satterthwaite's formula. Nothing is drawn at random. The noise of single pairs is in both terms, so the interval is
    rather too wide. It can be too narrow with two seeds that matter more than anything else: two numbers do not show
    how much a third would differ.

    The interval is about further configurations and seeds like these, on the same test examples. With neither 3
    configurations nor 3 seeds there is no interval, and the verdict is ``"too few pairs"``. Verdicts are about one
    comparison each; ``p_holm`` is corrected for all of them.

    Args:
        results: the results of the study.
        axes: the settings to compare; all that vary if None. Settings that vary together count as one.
        measures: the names of the measures; all of the study if None. Losses, errors and gaps are always included.
        reference: by setting, the value that others are compared with; the first one by default.
        missed: ``"leave out"`` or ``"keep"`` the runs that missed their stopping rule. Runs that diverged or failed
            are never compared.
    """
    if missed not in MISSED:
        raise OptionError(f"Expected 'leave out' or 'keep', but got missed={missed!r}.")
    grid = build_grid(results, ("done", "missed") if missed == "keep" else ("done",))
    axes, measures = ([each] if isinstance(each, str) else each for each in (axes, measures))
    wanted = list(grid.values) if axes is None else list(dict.fromkeys(find_axis(grid, name) for name in axes))
    if reference is not None and not isinstance(reference, Mapping):
        raise OptionError(f"Expected a value by setting, but got reference={reference!r}. Try reference={{'lr': 0.1}}.")
    given = {find_axis(grid, name): value for name, value in (reference or {}).items()}
    bases = {axis: find_value(axis, grid.values[axis], value) for axis, value in given.items()}
    quantities, numbers = collect_quantities(results, grid, measures)
    found = {}
    for axis in wanted:
        found[axis] = _compare_values(grid, axis, bases.get(axis, 0), quantities, numbers)
    found, comparisons = _correct_all(found)
    unused = [axis for axis, values in results.study.axes.items() if len(values) == 1]
    return Effects(
        found,
        quantities,
        int(grid.used.sum()),
        dict(Counter(why for why in grid.reasons if why)),
        tuple(_find_warnings(list(found.values()), len(np.unique(grid.seeds[grid.used])), missed == "keep")),
        tuple(_format_notes(found, comparisons, unused)),
    )


@dataclass(frozen=True)
class Grid:
    """The runs of the grid, whether run or not.

    Attributes:
        rows: of each run; None if it is missing.
        used: whether each run is compared.
        reasons: why each of the others is not; empty for those that are.
        values: the values of every axis that has several.
        levels: by axis, the place of each run's value.
        seeds: an integer per run.
    """

    rows: list[Row | None]
    used: np.ndarray[Any, np.dtype[np.bool_]]
    reasons: list[str]
    values: dict[str, list[Any]]
    levels: dict[str, Ints]
    seeds: Ints


def build_grid(results: Results, wanted: Sequence[str]) -> Grid:
    places = list(results.places.values())
    rows = [results.rows.get(key) for key in results.places]
    reasons = ["missing" if row is None else "" if row.status in wanted else row.status for row in rows]
    axes = {axis: list(values) for axis, values in results.study.axes.items() if len(values) > 1}
    levels = {}
    for axis, values in axes.items():
        names = split_axis_names(axis)
        own = [place[axis] if len(names) == 1 else [place[name] for name in names] for place in places]
        number = {dump_canonical_json(value): level for level, value in enumerate(values)}
        levels[axis] = np.array([number[dump_canonical_json(value)] for value in own], dtype=np.int64)
    seeds = np.unique([place[SEED] for place in places], return_inverse=True)[1]
    used = np.array([not why for why in reasons], dtype=bool)
    return Grid(rows, used, reasons, axes, levels, seeds.reshape(-1).astype(np.int64))


def find_axis(grid: Grid, name: str) -> str:
    known = {each: axis for axis in grid.values for each in (*split_axis_names(axis), axis)}
    if name not in known:
        raise make_unknown_name_error("axis", name, known)
    return known[name]


def collect_quantities(
    results: Results, grid: Grid, measures: Sequence[str] | None
) -> tuple[dict[str, Quantity], dict[str, Floats]]:
    """Return the quantities, and a number per run for each; nan if it is unknown, not finite, or not used."""
    rows = [row if row is not None and use else None for row, use in zip(grid.rows, grid.used, strict=True)]
    taken = {name for row in grid.rows if row is not None for name in row.readings}
    listed = [name for name in results.study.measures if name in taken]
    for name in measures or ():
        if name not in listed:
            raise make_unknown_name_error("measure", name, listed)
    found: dict[str, Quantity] = {}
    numbers: dict[str, Floats] = {}
    for name in listed if measures is None else dict.fromkeys(measures):
        known = MEASURES.get(name.partition("(")[0])
        numbers[name] = make_finite(
            row.readings[name].value if row is not None and name in row.readings else None for row in rows
        )
        has_ratio = _is_positive(numbers[name]) and not (known is not None and known.logarithmic)
        smaller, claims = ("", ()) if known is None else (known.smaller, known.invariant_to)
        found[name] = Quantity(name, "measure", has_ratio, smaller, "unit_scale" in claims)
    for name, kind in OUTCOMES.items():
        numbers[name] = make_finite(None if row is None else _get_outcome(row, name) for row in rows)
        has_ratio = kind == "loss" and not name.startswith("gap_") and _is_positive(numbers[name])
        found[name] = Quantity(name, kind, has_ratio)
    return found, numbers


def _get_outcome(row: Row, name: str) -> float | None:
    if name.startswith("gap_"):
        return row.gap.get(name.removeprefix("gap_"))
    return None if row.outcome is None else float(getattr(row.outcome, name))


def make_finite(values: Iterable[float | None]) -> Floats:
    found = np.array([math.nan if each is None else each for each in values], dtype=np.float64)
    return np.where(np.isfinite(found), found, np.nan)


def _is_positive(values: Floats) -> bool:
    known = values[~np.isnan(values)]
    return bool(len(known)) and bool((known > 0).all())


def _compare_values(
    grid: Grid, axis: str, base: int, quantities: Mapping[str, Quantity], numbers: Mapping[str, Floats]
) -> AxisEffects:
    """Return the effects of one axis, before the correction for many comparisons."""
    others = combine_codes([grid.levels[each] for each in grid.values if each != axis], len(grid.seeds))
    cells = combine_codes([others, grid.seeds], len(grid.seeds))
    count = int(cells.max(initial=-1)) + 1
    # The run of each cell, a configuration of the other settings with a seed, for each value of this one.
    table = np.full((count, len(grid.values[axis])), -1, dtype=np.int64)
    table[cells, grid.levels[axis]] = np.arange(len(cells))
    exists = table >= 0
    used = np.where(exists, grid.used[table], False)
    configurations, seeds = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    configurations[cells], seeds[cells] = others, grid.seeds
    values = []
    for place, value in enumerate(grid.values[axis]):
        paired = used[:, place] & used[:, base]
        means, changes = {}, {}
        for name, quantity in quantities.items():
            each = np.where(used, numbers[name][table], np.nan)
            means[name] = _compute_mean(each[:, place], quantity.has_ratio, configurations, seeds, used[:, place])
            if place != base:
                changes[name] = _compute_change(
                    each[paired][:, [base, place]], quantity, configurations[paired], seeds[paired]
                )
        runs = table[exists[:, place], place]
        left_out = Counter(grid.reasons[run] for run in runs if grid.reasons[run])
        values.append(
            ValueEffects(value, len(runs), int(used[:, place].sum()), dict(left_out), int(paired.sum()), means, changes)
        )
    return AxisEffects(axis, base, len(np.unique(others)), len(np.unique(grid.seeds)), tuple(values))


def _compute_mean(values: Floats, has_ratio: bool, configurations: Ints, seeds: Ints, used: Any) -> Mean:
    known = ~np.isnan(values)
    numbers = np.log(values[known]) if has_ratio else values[known]
    found, _ = estimate_mean(numbers, configurations[known], seeds[known])
    return Mean(_exponentiate(found) if has_ratio else found, int(known.sum()), int(used.sum() - known.sum()))


def _compute_change(pairs: Floats, quantity: Quantity, configurations: Ints, seeds: Ints) -> Change:
    """Return the change over pairs of the reference and the value, ``(pairs, 2)``."""
    known = ~np.isnan(pairs).any(1)
    first, second = pairs[known].T
    configurations, seeds = configurations[known], seeds[known]
    # Errors are multiples of 1 / examples: 0.3 - 0.1 and 0.2 - 0 are the same difference, though not the same float.
    differences = (second - first).round(12) if quantity.kind == "error" else second - first
    difference, p = estimate_mean(differences, configurations, seeds)
    judged, ratio = difference, None
    if quantity.has_ratio:
        judged, p = estimate_mean(np.log(second) - np.log(first), configurations, seeds)
        ratio = _exponentiate(judged)
    verdict = UNCLEAR
    if not judged.has_interval:
        verdict = TOO_FEW
    elif judged.low > 0 or judged.high < 0:
        verdict = HIGHER if judged.low > 0 else LOWER
    groups = len(np.unique(configurations)), len(np.unique(seeds))
    return Change(verdict, int(known.sum()), *groups, int((~known).sum()), difference, ratio, p, p)


def _exponentiate(estimate: Estimate) -> Estimate:
    with np.errstate(over="ignore"):
        return Estimate(*(float(np.exp(each)) for each in (estimate.value, estimate.low, estimate.high)))


def estimate_mean(values: Floats, configurations: Ints, seeds: Ints) -> tuple[Estimate, float]:
    """Return the mean with its 95 % interval over configurations and seeds, and the p-value of a mean of zero.

    See :func:`compute_effects` for the formula. Equal numbers that are not zero have no spread: they are judged by
    their sign, and need at least 6 configurations or seeds.

    Example:
        >>> found, p = estimate_mean(np.array([1.0, 2.0, 3.0]), np.arange(3), np.zeros(3, dtype=np.int64))
        >>> [round(each, 2) for each in (found.value, found.low, found.high, p)]
        [2.0, -0.48, 4.48, 0.07]
    """
    count = len(values)
    if not count:
        return Estimate(math.nan), math.nan
    scale = float(np.abs(values).max())
    if 0 < scale < math.inf:  # squares of tiny numbers would be zero
        values = values / scale
        found, p = _estimate_scaled(values, configurations, seeds)
        return Estimate(*(each * scale for each in (found.value, found.low, found.high))), p
    return _estimate_scaled(values, configurations, seeds)


def _estimate_scaled(values: Floats, configurations: Ints, seeds: Ints) -> tuple[Estimate, float]:
    count, mean = len(values), float(values.mean())
    if abs(mean) <= ROUNDING * np.abs(values).max():  # differences that cancel
        mean = 0.0
    is_equal = bool(np.ptp(values) <= ROUNDING * np.abs(values).max())
    rest = values - mean
    terms = []
    for codes in (configurations, seeds):
        sums = np.bincount(np.unique(codes, return_inverse=True)[1].reshape(-1), weights=rest)
        terms.append((len(sums), float((sums**2).sum()) / count**2 * len(sums) / max(len(sums) - 1, 1)))
    groups = max(number for number, _ in terms)
    if groups < MIN_GROUPS or (is_equal and mean and groups < MIN_EQUAL):
        return Estimate(mean), math.nan
    if is_equal:
        return Estimate(mean, mean, mean), 2 * 0.5**groups if mean else 1.0
    squared = sum(each for _, each in terms)
    alone = float((rest**2).sum()) / (count * (count - 1))
    if alone < squared:
        freedom = squared**2 / sum(each**2 / (number - 1) for number, each in terms if number > 1)
    else:  # the sums cancel, as they would not in other configurations
        squared, freedom = alone, groups - 1
    error = math.sqrt(squared)
    width = float(student.ppf(1 - LEVEL / 2, freedom)) * error
    return Estimate(mean, mean - width, mean + width), float(2 * student.sf(abs(mean) / error, freedom))


def _correct_all(axes: Mapping[str, AxisEffects]) -> tuple[dict[str, AxisEffects], int]:
    """Return the axes with p-values after Holm's correction, and the number of comparisons."""
    changes = [
        (axis, place, name, change.p)
        for axis, each in axes.items()
        for place, value in enumerate(each.values)
        for name, change in value.changes.items()
        if not math.isnan(change.p)
    ]
    corrected: dict[tuple[str, int, str], float] = {}
    largest = 0.0
    for rank, (axis, place, name, p) in enumerate(sorted(changes, key=lambda each: each[-1])):
        largest = max(largest, min(1.0, (len(changes) - rank) * p))
        corrected[axis, place, name] = largest
    found = {}
    for axis, each in axes.items():
        values = [
            replace(
                value,
                changes={
                    name: replace(change, p_holm=corrected.get((axis, place, name), math.nan))
                    for name, change in value.changes.items()
                },
            )
            for place, value in enumerate(each.values)
        ]
        found[axis] = replace(each, values=tuple(values))
    return found, len(changes)


def _find_warnings(axes: Sequence[AxisEffects], seeds: int, keeps_missed: bool) -> Iterator[str]:
    """Yield the reasons to doubt the comparison, one sentence each, given the number of seeds with runs."""
    if not seeds:
        yield f"No run has finished.{'' if keeps_missed else MISSED_HINT}"
        return
    for axis in axes:
        lost = [value for value in axis.values if value.left_out]
        if lost and len({value.runs / max(value.planned, 1) for value in axis.values}) > 1:
            told = [
                f"{sum(value.left_out.values())} of {value.planned} with {axis.describe(value)} "
                f"({join_words([f'{count} {why}' for why, count in value.left_out.items()])})"
                for value in lost
            ]
            can_keep = not keeps_missed and any("missed" in value.left_out for value in lost)
            hint = MISSED_HINT if can_keep else ""
            yield (
                f"{axis.name}: runs are left out unevenly: {join_words(told)}. The pairs that remain are those in "
                f"which both runs succeeded, and may not be representative.{hint}"
            )
    few = ["seeds"] if axes and seeds == 2 else []
    few += [f"configurations besides {axis.name}" for axis in axes if axis.configurations == 2]
    for what in few:
        yield f"There are two {what}, too few to show how much a third would differ. {NARROW}"
    if axes and seeds == 1:
        yield "There is one seed, so nothing shows how effects differ between seeds. Try more of them."


def _format_notes(axes: Mapping[str, AxisEffects], comparisons: int, unused: Sequence[str]) -> Iterator[str]:
    """Yield remarks on how the comparison was made."""
    if axes:
        yield (
            "Each pair of runs differs only in this setting and shares a seed. Intervals: 95 %, over configurations of "
            "the other settings and over seeds, on the same test examples. They need 3 "
            "configurations or 3 seeds."
        )
    if comparisons:
        yield (
            f"{format_count(comparisons, 'comparison')}: without any effect, about "
            f"{format_number(LEVEL * comparisons, 2)} would be called lower or higher by chance. A star marks what "
            "remains after Holm's correction for all of them."
        )
    if unused:
        yield f"A single value, so nothing to compare: {join_words(list(unused))}."
