"""Compute Kendall's tau-b between the order of networks before a change and after it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from saltflat.errors import OptionError, StudyError, make_unknown_name_error
from saltflat.results.json_codec import JsonValue
from saltflat.results.text import format_count, join_words
from saltflat.studies.canonical import dump_canonical_json
from saltflat.studies.effects.compute import (
    MISSED_HINT,
    Grid,
    build_grid,
    collect_quantities,
    find_axis,
    make_finite,
)
from saltflat.studies.effects.results import Estimate, Quantity, find_value
from saltflat.studies.fragility.results import ALIKE, LESS, MORE, TOO_FEW, Fragility, ShiftSurvival, Survival
from saltflat.studies.grid import split_axis_names
from saltflat.studies.scores.correlation import resample_kendall
from saltflat.studies.scores.layout import SEED, Counts, Floats, Ints, combine_codes, compute_interval, draw_resamples
from saltflat.studies.scores.scoring import GAPS, MISSED

if TYPE_CHECKING:
    from saltflat.studies.results import Results

# Values of measures by run: another study with the same axes, or further readings of the same networks.
Readings: TypeAlias = Mapping[str, Mapping[str, float | None]]
# Resamples of fewer configurations do not show how much others would differ.
MIN_CONFIGURATIONS = 5
SIZES = ("norm", "distance")


def compute_fragility(
    results: Results,
    *,
    axes: Sequence[str] | None = None,
    measures: Sequence[str] | None = None,
    pairs: Mapping[str, Sequence[tuple[JsonValue, JsonValue]]] | None = None,
    against: Mapping[str, Results | Readings] | None = None,
    gap: str = "error",
    missed: str = "leave out",
    resamples: int = 1000,
    seed: int = 0,
) -> Fragility:
    r"""Compare rankings: how much of a measure's order of networks survives a change that should not matter?

    For two values of a setting, the networks trained with the first are ranked by a measure, and so are those with the
    second; every network is matched with the one of the same other settings and seed. Their agreement is Kendall's
    tau-b. Of several pairs of values it is the mean, weighted by the number :math:`n_k` of networks in each:

    .. math::
        \tau = \sum_k n_k\, \tau_b(x^{A_k}, x^{B_k}) / \sum_k n_k

    Seeds are compared in the same way, and so are other measurements: on other examples, of rescaled copies, or of
    networks that trained on (``against``). The gap's own survival is beside them: the test error of other networks has
    another order, too, and a measure that follows the gap perfectly survives as the gap does.

    Intervals contain 95 % of resamples of configurations of what is not changed, each with all its seeds; the same
    resamples serve all quantities, so the interval of a difference from the gap is that of paired resamples. With
    fewer than 5 configurations there is none. The difference is that over the networks in which both are known, and
    over the pairs of values with an order of the measure.

    Args:
        results: the results of the study.
        axes: the settings to change, or ``"seed"``; all that vary if None.
        measures: the names of the measures; all of the study if None. The norm of the weights, their distance from the
            initial ones, the training loss and the gap are always included.
        pairs: by setting, the pairs of its values to compare; all by default.
        against: by name, the results of another study with the same axes and seeds, or further values of measures by
            the key of the run.
        gap: ``"error"`` or ``"loss"``.
        missed: ``"leave out"`` or ``"keep"`` the runs that missed their stopping rule.
        resamples: the number behind each interval; 0 for no intervals.
        seed: the seed of the resamples.
    """
    if gap not in GAPS:
        raise make_unknown_name_error("gap", gap, GAPS)
    if missed not in MISSED:
        raise OptionError(f"Expected 'leave out' or 'keep', but got missed={missed!r}.")
    if isinstance(resamples, bool) or not isinstance(resamples, int) or resamples < 0:
        raise OptionError(
            f"Expected a whole number from 0, but got resamples={resamples!r}. Try resamples=0 for no intervals."
        )
    statuses = ("done", "missed") if missed == "keep" else ("done",)
    grid = build_grid(results, statuses)
    quantities, numbers = _collect_numbers(results, grid, measures, gap)
    wanted = _list_axes(grid) if axes is None else [axes] if isinstance(axes, str) else axes
    chosen = _parse_pairs(grid, pairs or {})
    shifts = []
    for name in dict.fromkeys(wanted):
        axis = _find_change(grid, name)
        shifts.append(
            _match_seeds(grid, numbers) if axis == SEED else _match_values(grid, axis, numbers, chosen.get(axis))
        )
    taken = {shift.name for shift in shifts}
    for name, other in (against or {}).items():
        if name in taken:
            raise OptionError(
                f"Expected names of their own in against, but got {name!r}, an axis of the study. "
                f"Try {f'against {name}'!r}."
            )
        shifts.append(_match_measurement(name, results, grid, other, numbers, statuses, gap))
    found = {shift.name: _compare(shift, list(quantities), f"gap_{gap}", resamples, seed) for shift in shifts}
    return Fragility(
        found,
        quantities,
        f"gap_{gap}",
        int(grid.used.sum()),
        dict(Counter(why for why in grid.reasons if why)),
        tuple(_find_warnings(grid, found, missed == "keep")),
        tuple(_format_notes(found, resamples)),
    )


@dataclass(frozen=True)
class _Shift:
    """Pairs of runs, before and after a change.

    Attributes:
        name, kind: of the change.
        pairs: for each pair of values, the configuration of each network and its numbers before and after by quantity;
            nan where unknown.
    """

    name: str
    kind: str
    pairs: Sequence[tuple[Ints, Mapping[str, tuple[Floats, Floats]]]]


def _find_change(grid: Grid, name: str) -> str:
    """Return the axis of this name, or that of the seeds."""
    known = {SEED, *grid.values, *(each for axis in grid.values for each in split_axis_names(axis))}
    if name not in known:
        raise make_unknown_name_error("axis", name, known)
    return SEED if name == SEED else find_axis(grid, name)


def _list_axes(grid: Grid) -> list[str]:
    return [*grid.values, *([SEED] if len(np.unique(grid.seeds)) > 1 else [])]


def _collect_numbers(
    results: Results, grid: Grid, measures: Sequence[str] | None, gap: str
) -> tuple[dict[str, Quantity], dict[str, Floats]]:
    """Return measures, controls and the gap, in this order, with a number per run."""
    measures = [measures] if isinstance(measures, str) else measures
    quantities, numbers = collect_quantities(results, grid, measures)
    for name in SIZES:
        numbers[name] = make_finite(
            getattr(row.outcome, name) if row is not None and use and row.outcome is not None else None
            for row, use in zip(grid.rows, grid.used, strict=True)
        )
    controls = {name: Quantity(name, "control", False) for name in (*SIZES, "train_loss")}
    own = {name: each for name, each in quantities.items() if each.kind == "measure"}
    found = {**own, **controls, f"gap_{gap}": Quantity(f"gap_{gap}", "gap", False)}
    return found, {name: np.where(grid.used, numbers[name], np.nan) for name in found}


def _parse_pairs(
    grid: Grid, given: Mapping[str, Sequence[tuple[JsonValue, JsonValue]]]
) -> dict[str, list[tuple[int, int]]]:
    """Return the places of the values to compare, by axis."""
    found = {}
    for name, pairs in given.items():
        axis = find_axis(grid, name)
        listed = isinstance(pairs, list | tuple) and all(isinstance(pair, list | tuple) for pair in pairs)
        places = [[find_value(axis, grid.values[axis], value) for value in pair] for pair in pairs] if listed else []
        if not places or any(len(pair) != 2 or pair[0] == pair[1] for pair in places):
            raise OptionError(
                f"Expected pairs of two different values, but got pairs={{{name!r}: {pairs!r}}}. Try [(0.1, 0.2)]."
            )
        found[axis] = [(pair[0], pair[1]) for pair in places]
    return found


def _match_values(
    grid: Grid, axis: str, numbers: Mapping[str, Floats], pairs: Sequence[tuple[int, int]] | None
) -> _Shift:
    """Match runs that differ in one axis alone."""
    others = combine_codes([grid.levels[each] for each in grid.values if each != axis], len(grid.seeds))
    cells = combine_codes([others, grid.seeds], len(others))
    return _match_levels(axis, "setting", cells, others, grid.levels[axis], numbers, pairs)


def _match_seeds(grid: Grid, numbers: Mapping[str, Floats]) -> _Shift:
    """Match runs that differ in the seed alone."""
    others = combine_codes(list(grid.levels.values()), len(grid.seeds))
    return _match_levels(SEED, "seed", others, others, grid.seeds, numbers, None)


def _match_levels(
    name: str,
    kind: str,
    cells: Ints,
    configurations: Ints,
    levels: Ints,
    numbers: Mapping[str, Floats],
    chosen: Sequence[tuple[int, int]] | None,
) -> _Shift:
    """Match runs of the same cell at the chosen pairs of levels, or every two."""
    table = np.full((int(cells.max(initial=-1)) + 1, int(levels.max(initial=-1)) + 1), -1, dtype=np.int64)
    table[cells, levels] = np.arange(len(cells))
    pairs = []
    for first, second in combinations(range(table.shape[1]), 2) if chosen is None else chosen:
        both = table[(table[:, [first, second]] >= 0).all(1)][:, [first, second]]
        pairs.append(
            (configurations[both[:, 0]], {key: (each[both[:, 0]], each[both[:, 1]]) for key, each in numbers.items()})
        )
    return _Shift(name, kind, pairs)


def _match_measurement(
    name: str,
    results: Results,
    grid: Grid,
    other: Results | Readings,
    numbers: Mapping[str, Floats],
    statuses: Sequence[str],
    gap: str,
) -> _Shift:
    """Match runs with other readings of them, or with the runs of another study that have the same settings."""
    after = {key: np.full(len(grid.rows), np.nan) for key in numbers}
    if isinstance(other, Mapping):
        for place, run in enumerate(results.places):
            for key, value in other.get(run, {}).items():
                if key in after and grid.used[place]:
                    after[key][place] = math.nan if value is None or not math.isfinite(value) else value
        unmeasured = all(bool(np.isnan(each).all()) for each in after.values())
        if other and unmeasured:
            raise StudyError(
                f"Expected values of the study's measures by the keys of its runs, but got none in against[{name!r}]. "
                "Try {key: {'rho': 0.1}}."
            )
        # The same networks: what was not measured again is as it was.
        again = ~np.isnan(np.stack(list(after.values()))).all(0)
        for key in [key for key in after if key in (*SIZES, "train_loss", f"gap_{gap}") and np.isnan(after[key]).all()]:
            after[key] = np.where(again, numbers[key], np.nan)
    else:
        after = _read_other_study(name, results, other, numbers, statuses, gap)
    # Everything but the seed is a configuration.
    levels = combine_codes(list(grid.levels.values()), len(grid.seeds))
    return _Shift(name, "measurement", [(levels, {key: (numbers[key], after[key]) for key in numbers})])


def _read_other_study(
    name: str,
    results: Results,
    other: Results,
    numbers: Mapping[str, Floats],
    statuses: Sequence[str],
    gap: str,
) -> dict[str, Floats]:
    """Return the numbers of the runs of another study in the order of this one's."""
    axes = {each for axis in results.study.axes for each in split_axis_names(axis)}
    theirs = {each for axis in other.study.axes for each in split_axis_names(axis)}
    if axes != theirs:
        raise StudyError(
            f"Expected a study with the axes {join_words(sorted(axes))}, but got one with "
            f"{join_words(sorted(theirs))} in against[{name!r}]. Try a study of the same grid."
        )
    grid = build_grid(other, statuses)
    taken = {key for row in grid.rows if row is not None for key in row.readings}
    shared = [key for key in numbers if key in taken]
    _, found = _collect_numbers(other, grid, shared, gap)
    known = {dump_canonical_json(place): number for number, place in enumerate(other.places.values())}
    order = np.array([known.get(dump_canonical_json(place), -1) for place in results.places.values()], dtype=np.int64)
    unknown = np.full(len(order), np.nan)
    return {key: np.where(order >= 0, found[key][order], np.nan) if key in found else unknown for key in numbers}


def _compare(shift: _Shift, names: Sequence[str], gap: str, resamples: int, seed: int) -> ShiftSurvival:
    """Return how much of each order survives one change."""
    known = [codes[_find_known(numbers, gap)] for codes, numbers in shift.pairs]
    units = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *known]))
    enough = len(units) >= MIN_CONFIGURATIONS
    every = max((int(codes.max(initial=0)) for codes, _ in shift.pairs), default=0) + 1
    # How often each resample contains each configuration; never those that are not compared.
    times = np.zeros((every, 1 + resamples * enough), dtype=np.float32)
    if len(units):
        times[units] = draw_resamples(np.arange(len(units)), resamples * enough, seed)
    whole = _compute_tau(shift, gap, times)
    survivals = {}
    for name in names:
        found = whole if name == gap else _compute_tau(shift, name, times)
        # A measure is compared with the gap where it has a value: other networks could have another order of the gap.
        beside = whole if found.compared == whole.compared else _compute_tau(shift, gap, times, name)
        judged = len(found.units) >= MIN_CONFIGURATIONS
        own, ahead = (_estimate(each, judged) for each in (found.tau, found.tau - beside.tau))
        verdict = TOO_FEW
        if ahead.has_interval:
            verdict = LESS if ahead.high < 0 else MORE if ahead.low > 0 else ALIKE
        survivals[name] = Survival(own, ahead, found.runs, ALIKE if name == gap and judged else verdict)
    return ShiftSurvival(shift.name, shift.kind, len(shift.pairs), len(units), survivals)


@dataclass(frozen=True)
class _Tau:
    """Tau-b between the orders before and after a change.

    Attributes:
        tau: the weighted mean over the pairs of values, of all networks and in each resample.
        compared: for each pair of values, which networks it is of; none if tau-b is not defined.
        units: the configurations of these networks.
        runs: the number of pairs of runs.
    """

    tau: Floats
    compared: list[bytes]
    units: set[int]
    runs: int


def _find_known(numbers: Mapping[str, tuple[Floats, Floats]], *names: str) -> Any:
    """Return which networks have all these numbers, before and after."""
    return ~np.isnan(np.concatenate([np.stack(numbers[name]) for name in names])).any(0)


def _compute_tau(shift: _Shift, name: str, times: Counts, like: str | None = None) -> _Tau:
    """Return tau-b over the networks that have the number, and another one (``like``) with an order, if given."""
    total, weights, runs = np.zeros(times.shape[1]), np.zeros(times.shape[1]), 0
    compared, units = [], set[int]()
    for codes, numbers in shift.pairs:
        use = _find_known(numbers, name) if like is None else _find_known(numbers, name, like)
        before, after = np.stack(numbers[name])[:, use]
        ordered = like is None or all(np.ptp(each[use]) > 0 for each in numbers[like] if use.any())
        if len(before) < 2 or not ordered:
            compared.append(b"")
            continue
        _, tau = resample_kendall(before, after, times[codes[use]])
        defined = ~np.isnan(tau)
        total += np.where(defined, len(before) * tau, 0.0)
        weights += len(before) * defined
        runs += len(before)
        compared.append(use.tobytes() if defined[0] else b"")
        units |= set(codes[use].tolist())
    return _Tau(np.where(weights > 0, total / np.where(weights > 0, weights, 1.0), np.nan), compared, units, runs)


def _estimate(values: Floats, enough: bool) -> Estimate:
    value = float(values[0])
    if len(values) < 2 or not enough or math.isnan(value):
        return Estimate(value)
    return Estimate(value, *compute_interval(values[1:]))


def _find_warnings(grid: Grid, shifts: Mapping[str, ShiftSurvival], keeps_missed: bool) -> Iterator[str]:
    """Yield reasons to doubt the comparison."""
    if not grid.used.any():
        yield f"No run has finished.{'' if keeps_missed else MISSED_HINT}"
        return
    few = [shift.name for shift in shifts.values() if 0 < shift.configurations < MIN_CONFIGURATIONS]
    if few:
        yield f"Fewer than {MIN_CONFIGURATIONS} configurations, so no interval: {join_words(few)}."
    empty = [shift.name for shift in shifts.values() if not shift.configurations]
    if empty:
        yield f"No two runs to compare: {join_words(empty)}."


def _format_notes(shifts: Mapping[str, ShiftSurvival], resamples: int) -> Iterator[str]:
    """Yield remarks on how the comparison was made."""
    if not shifts:
        yield "Nothing varies: there is no change to survive."
        return
    yield (
        "Kendall's tau-b between the orders of the networks before and after the change: 1 for the same order, 0 for "
        "unrelated ones. The gap's own order changes with the networks; a measure that follows it perfectly survives "
        "as it does."
    )
    if resamples:
        yield f"Intervals: 95 % of {format_count(resamples, 'resample')} of configurations, each with all its seeds."
