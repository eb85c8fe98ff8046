"""Score every measure of a study against the generalization gap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.measures.registry import MEASURES
from saltflat.results.text import join_words
from saltflat.studies.row import Row
from saltflat.studies.scores.caveats import find_warnings, format_chance_note
from saltflat.studies.scores.correlation import resample_kendall, resample_pearson, resample_spearman
from saltflat.studies.scores.granulated import average_axes
from saltflat.studies.scores.information import find_least, resample_information
from saltflat.studies.scores.layout import (
    MAX_COSTLY_RESAMPLES,
    Floats,
    GridLayout,
    Ints,
    compute_information_interval,
    compute_interval,
    draw_resamples,
)
from saltflat.studies.scores.results import Score, Scores
from saltflat.studies.scores.robust import count_environments, resample_sign_error, summarize_sign_error
from saltflat.studies.scores.sample import (
    RunSample,
    build_layout,
    collect_gaps,
    collect_values,
    number_configurations,
    select_scored_runs,
)
from saltflat.studies.scores.sign_tables import MAX_CELLS, PairSigns

# The largest number of runs whose information is resampled pair by pair.
MAX_EXACT_RUNS = 1000
GAPS = ("error", "loss")
MISSED = ("leave out", "keep")
MAX_INFORMATION = {"cmi": 1.0, "pgdl": 100.0}
UNDEFINED_REASONS = {
    "granulated": "No granulated score: no two runs differ in one axis alone.",
    "cmi": "No CMI: the settings determine the order of the gaps.",
    "pgdl": "No PGDL score: the settings determine the order of the gaps.",
    "sign_error_mean": "No sign error: no two settings that differ in one axis have gaps that can be told apart.",
}


def score(
    rows: Iterable[Row] | Mapping[str, Row],
    axes: Sequence[str],
    *,
    gap: str = "error",
    measures: Sequence[str] | None = None,
    missed: str = "leave out",
    resamples: int = 1000,
    seed: int = 0,
) -> Scores:
    """Score how well every measure and control predicts the generalization gap.

    Args:
        rows: the rows of a study in any order, a mapping to them, or the study's results. Runs that diverged or failed
            are never scored.
        axes: the names of the settings that the grid varies, without the seed.
        gap: ``"error"`` or ``"loss"``, test minus training.
        measures: the names of the readings to score; all if None. Controls are always scored.
        missed: ``"leave out"`` or ``"keep"`` the runs that missed their stopping rule.
        resamples: the number behind each interval; 0 for no intervals. Costly scores use at most 200 of them, and
            approximate each to first order with more than 1,000 runs; the notes of the scores say so.
        seed: the seed of the resamples, and of random subsets if a study has too many pairs to use all.
    """
    if gap not in GAPS:
        raise make_unknown_name_error("gap", gap, GAPS)
    if missed not in MISSED:
        raise OptionError(f"Expected 'leave out' or 'keep', but got missed={missed!r}.")
    if not isinstance(resamples, int) or resamples < 0:
        raise OptionError(
            f"Expected a whole number from 0, but got resamples={resamples!r}. Try resamples=0 for no intervals."
        )
    held: Any = getattr(rows, "rows", rows)  # a study's results have them as an attribute
    rows = list(held.values() if isinstance(held, Mapping) else held)
    if not all(isinstance(row, Row) for row in rows):
        raise OptionError(
            "Expected the rows of a study, but got something else among them. Try score(results.rows, axes), or "
            "results.scores()."
        )
    chosen, left_out = select_scored_runs(rows, gap, missed == "keep")
    outcomes = [row.outcome for row in chosen if row.outcome is not None]
    groups = number_configurations(chosen)
    configurations = int(groups.max()) + 1
    # With a single configuration, draw its seeds.
    units = groups if configurations > 1 else np.arange(len(chosen))
    times = draw_resamples(units, resamples, seed)
    sizes = np.array([each.test_examples for each in outcomes], dtype=np.float64) if gap == "error" else None
    projected = len(chosen) > MAX_EXACT_RUNS
    sample = RunSample(collect_gaps(chosen, gap), build_layout(chosen, axes), sizes, units, times, seed, projected)
    found = _score_all(collect_values(chosen, measures), sample)
    counted = sum(each.kind == "measure" for each in found.values())
    notes = [
        format_chance_note(counted, configurations),
        *_format_scoring_notes(sample, gap, resamples, configurations),
    ]
    return Scores(
        found,
        gap,
        tuple(sample.layout.axes),
        len(chosen),
        configurations,
        left_out,
        tuple(find_warnings(outcomes, gap, sample.gap, configurations, left_out)),
        tuple(filter(None, notes)),
        resamples,
    )


def _score_all(values: dict[tuple[str, str], Floats], sample: RunSample) -> dict[str, Score]:
    """Return the scores by name; a control with the name of a measure is renamed.

    Measures with readings of the same runs share everything that depends on the runs alone.
    """
    named: dict[str, tuple[str, Floats]] = {}
    by_runs: dict[bytes, list[str]] = {}
    for (kind, name), each in values.items():
        shown = f"{name} (control)" if name in named else name
        named[shown] = kind, each
        by_runs.setdefault(np.isnan(each).tobytes(), []).append(shown)
    found: dict[str, Score] = {}
    for names in by_runs.values():
        which = np.flatnonzero(~np.isnan(named[names[0]][1])).astype(np.int64)
        found |= _score_on_runs({name: (named[name][0], named[name][1][which]) for name in names}, sample, which)
    return {name: found[name] for name in named}


def _score_on_runs(values: dict[str, tuple[str, Floats]], sample: RunSample, which: Ints) -> dict[str, Score]:
    """Return the scores of measures that have readings of exactly these runs."""
    missing = len(sample.gap) - len(which)
    part = sample.select_runs(which)
    found: dict[str, Score] = {}
    usable: dict[str, Floats] = {}
    for name, (kind, x) in values.items():
        if len(x) < 2 or np.ptp(x) == 0 or part.is_constant:
            notes = (*_format_measure_notes(name, kind, missing), _format_undefined_reason(x))
            found[name] = Score(name, kind, len(x), notes=notes)
        else:
            usable[name] = x
    if usable:
        columns = np.stack(list(usable.values()))
        pearson = resample_pearson(columns, part.gap, part.times)
        along = {axis: each.resample(columns, part.times) for axis, each in part.axis_means.items()}
        wrong = resample_sign_error(part.environments, columns, part.times)
        for place, (name, each) in enumerate(usable.items()):
            by_axis = {axis: of[place] for axis, of in along.items()}
            kind = values[name][0]
            found[name] = _make_score(name, kind, each, part, pearson[place], by_axis, wrong[place], missing)
    return found


def _make_score(
    name: str,
    kind: str,
    x: Floats,
    sample: RunSample,
    pearson: Floats,
    by_axis: dict[str, Floats],
    wrong: Floats,
    missing: int,
) -> Score:
    kendall_a, kendall_b = resample_kendall(x, sample.gap, sample.times)
    by_set, competition = _compute_information(x, sample)
    found = {
        "pearson": pearson,
        "spearman": resample_spearman(x, sample.gap, sample.times),
        "kendall_a": kendall_a,
        "kendall_b": kendall_b,
        "granulated": average_axes(by_axis, len(pearson)),
        "cmi": find_least(by_set),
        "pgdl": competition,
        "sign_error_mean": wrong,
    }
    worst = summarize_sign_error(sample.environments.compute_group_means(x))
    rest: dict[str, Any] = {each: float(of[0]) for each, of in found.items()}
    rest |= {"sign_error_p90": worst.p90, "sign_error_max": worst.max}
    rest["granulated_by_axis"] = {axis: float(each[0]) for axis, each in by_axis.items()}
    rest["cmi_by_set"] = {each: float(of_set[0]) for each, of_set in by_set.items()}
    if len(pearson) > 1:
        rest["intervals"] = {
            each: _compute_score_interval(each, of) for each, of in found.items() if not np.isnan(of[0])
        }
    notes = list(_format_measure_notes(name, kind, missing))
    notes += [UNDEFINED_REASONS[each] for each, of in found.items() if each in UNDEFINED_REASONS and np.isnan(of[0])]
    return Score(name, kind, len(x), **rest, notes=tuple(notes))


def _compute_score_interval(name: str, found: Floats) -> tuple[float, float]:
    if name in MAX_INFORMATION:
        return compute_information_interval(found[1:], float(found[0]), MAX_INFORMATION[name])
    return compute_interval(found[1:])


def _compute_information(x: Floats, sample: RunSample) -> tuple[dict[str, Floats], Floats]:
    """Return conditional information by set of axes, and its competition form."""
    signs, times = PairSigns(x, sample.gap), sample.few_times if sample.times.shape[1] > 1 else None
    known = {
        partition: resample_information(signs, partition, times, projected=sample.projected)
        for partition in dict.fromkeys(sample.partitions.values())
    }
    found = {name: known[partition] for name, partition in sample.partitions.items()}
    competition = find_least({name: found[name][1] for name in sample.competition_sets})
    return {name: paper for name, (paper, _) in found.items()}, competition


def _format_measure_notes(name: str, kind: str, unknown_runs: int) -> Iterator[str]:
    if unknown_runs:
        yield f"Without {unknown_runs} run{'s' * (unknown_runs != 1)} in which it is unknown or not finite."
    known = MEASURES.get(name.partition("(")[0]) if kind == "measure" else None
    if known is not None and known.smaller != "flatter":
        yield f"Smaller is {known.smaller}."


def _format_undefined_reason(x: Floats) -> str:
    if len(x) < 2:
        return "Fewer than two runs have a value."
    return "The same in all runs." if np.ptp(x) == 0 else "All gaps are equal."


def _format_scoring_notes(sample: RunSample, gap: str, resamples: int, configurations: int) -> Iterator[str]:
    """Yield remarks on how the scores of this study were computed."""
    layout = sample.layout
    if resamples:
        drawn_from = "configurations, each with all its seeds" if configurations > 1 else "runs, which differ by seed"
        few = f"; {MAX_COSTLY_RESAMPLES} for CMI and PGDL" if resamples > MAX_COSTLY_RESAMPLES else ""
        yield f"Intervals: 95 % of {resamples} resamples of {drawn_from}{few}."
        yield from _format_approximation_notes(sample)
    fixed = [name for name in layout.axes if name not in layout.find_varying_axes()]
    if fixed:
        yield f"The same in all scored runs, so not an axis: {join_words(fixed)}."
    for name, each in sample.axis_means.items():
        if each.share < 1:
            yield f"Granulated score of {name}: from a random {each.share:.2%} of the pairs of runs."
    alone = [name for name in layout.find_varying_axes() if not sample.axis_means[name].whole]
    if alone:
        yield f"No two runs differ in this axis alone, so it has no granulated score: {join_words(alone)}."
    yield from _format_environment_notes(sample, layout, gap)


def _format_approximation_notes(sample: RunSample) -> Iterator[str]:
    """Yield remarks on intervals that are not computed from all pairs."""
    if sample.projected:
        yield (
            f"Intervals of CMI and PGDL: with more than {MAX_EXACT_RUNS:,} runs, counts of pairs in a resample are "
            "approximated to first order."
        )
        large = [name for name, each in sample.partitions.items() if each.num_cells > MAX_CELLS]
        if large:
            yield f"They come from {MAX_CELLS:,} random pairs of settings for CMI beyond: {join_words(large)}."
    pairs = {f"the granulated score of {name}": each for name, each in sample.axis_means.items()}
    for what, each in {**pairs, "the sign error": sample.environments}.items():
        if each.resampled < each.whole:
            yield f"Interval of {what}: from {each.resampled:,} random pairs of configurations out of {each.whole:,}."


def _format_environment_notes(sample: RunSample, layout: GridLayout, gap: str) -> Iterator[str]:
    if not layout.find_varying_axes() or sample.is_constant:
        return
    if gap == "loss":
        yield "Sign error: all pairs of runs have the same weight, since losses are unbounded."
        if sample.environments.share < 1:
            yield f"Sign error: from a random {sample.environments.share:.2%} of the pairs that differ in one axis."
        return
    found = sample.environments
    if found.share < 1:
        yield (
            f"Sign error: from a random {found.share:.2%} of the pairs of runs that differ in one axis; {found.groups} "
            "pairs of settings among them have gaps that the test set can tell apart."
        )
        return
    yield (
        f"Sign error: {found.groups} of {count_environments(layout)} pairs of settings that differ in one axis have "
        "gaps that the test set can tell apart; the others are left out."
    )
