"""Score every measure of a study against the generalization gap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from saltflat.errors import OptionError, unknown
from saltflat.measures import MEASURES
from saltflat.report.text import listed
from saltflat.studies.row import Row
from saltflat.studies.scores.arrays import Floats
from saltflat.studies.scores.bootstrap import COSTLY, drawn, information_interval, interval
from saltflat.studies.scores.competition import competition_of
from saltflat.studies.scores.correlation import drawn_pearson
from saltflat.studies.scores.doubts import by_chance, doubts
from saltflat.studies.scores.granulated import drawn_granulated, over_axes
from saltflat.studies.scores.information import information_of, least
from saltflat.studies.scores.kendall import drawn_kendall_a, drawn_kendall_b
from saltflat.studies.scores.layout import Layout
from saltflat.studies.scores.ranks import drawn_spearman
from saltflat.studies.scores.result import Score
from saltflat.studies.scores.results import Scores
from saltflat.studies.scores.robust import drawn_sign_error, environment_errors, environments_of, error_of
from saltflat.studies.scores.runs import configurations_of, gaps_of, layout_of, scored, values_of
from saltflat.studies.scores.sample import Sample
from saltflat.studies.scores.sign_tables import tables

GAPS = ("error", "loss")
MISSED = ("leave out", "keep")
MOST_INFORMATION = {"cmi": 1.0, "pgdl": 100.0}
WHY_NOT = {
    "granulated": "No granulated score: no two runs differ in one axis alone.",
    "cmi": "No CMI: the order of the gaps is certain once the settings are known.",
    "pgdl": "No PGDL score: the order of the gaps is certain once the settings are known.",
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
    """How every measure, and every control, goes with the generalization gap.

    Args:
        rows: of the study, in any order, or by key, or its results. Runs that diverged or failed are never scored.
        axes: names of the settings that the grid varies; the seed is none of them.
        gap: of the ``"error"`` or of the ``"loss"``, test minus training.
        measures: names of the readings to score; all if None. Controls are always scored.
        missed: ``"leave out"`` or ``"keep"`` the runs that missed their stopping rule.
        resamples: behind each interval; 0 for no intervals. The costly scores take at most 200 of them.
        seed: of the resamples.
    """
    if gap not in GAPS:
        raise unknown("gap", gap, GAPS)
    if missed not in MISSED:
        raise OptionError(f"Got missed={missed!r}. Want 'leave out' or 'keep'. Do: give one of them.")
    if not isinstance(resamples, int) or resamples < 0:
        raise OptionError(f"Got resamples={resamples!r}. Want a whole number, 0 for no intervals. Do: give one.")
    held: Any = getattr(rows, "rows", rows)  # the results of a study hold them
    rows = list(held.values() if isinstance(held, Mapping) else held)
    if not all(isinstance(row, Row) for row in rows):
        raise OptionError(
            "Got something that is no row among the rows. Want the rows of a study. Do: score(results.rows, axes), or "
            "results.scores()."
        )
    chosen, left_out = scored(rows, gap, missed == "keep")
    outcomes = [row.outcome for row in chosen if row.outcome is not None]
    groups = configurations_of(chosen)
    configurations = int(groups.max()) + 1
    # Of a single configuration the seeds are all there is to draw from.
    draws = drawn(groups if configurations > 1 else np.arange(len(chosen)), resamples, seed)
    sizes = np.array([each.test_examples for each in outcomes], dtype=np.float64) if gap == "error" else None
    sample = Sample(gaps_of(chosen, gap), layout_of(chosen, axes), sizes, draws)
    found = _all_scores(values_of(chosen, measures), sample)
    counted = sum(each.kind == "measure" for each in found.values())
    notes = [by_chance(counted, configurations), *_notes(sample, gap, resamples, configurations)]
    return Scores(
        found,
        gap,
        tuple(sample.layout.axes),
        len(chosen),
        configurations,
        left_out,
        tuple(doubts(outcomes, gap, sample.gap, configurations, left_out)),
        tuple(filter(None, notes)),
        resamples,
    )


def _all_scores(values: dict[tuple[str, str], Floats], sample: Sample) -> dict[str, Score]:
    """By name; a control that is called as a measure is gets a name of its own. Measures that have readings of the
    same runs share all that depends on the runs alone."""
    samples: dict[bytes, Sample] = {}
    found: dict[str, Score] = {}
    for (kind, name), each in values.items():
        known = ~np.isnan(each)
        which = np.flatnonzero(known).astype(np.int64)
        if known.tobytes() not in samples:
            samples[known.tobytes()] = sample.at(which)
        shown = f"{name} (control)" if name in found else name
        found[shown] = _one_score(shown, kind, each[which], samples[known.tobytes()], len(each) - len(which))
    return found


def _one_score(name: str, kind: str, x: Floats, sample: Sample, unknown_runs: int) -> Score:
    notes = list(_measure_notes(name, kind, unknown_runs))
    if len(x) < 2 or np.ptp(x) == 0 or sample.constant:
        notes.append(_why_undefined(x))
        return Score(name, kind, len(x), notes=tuple(notes))
    y, draws = sample.gap, sample.draws
    by_axis = drawn_granulated(x, y, sample.axis_pairs, draws)
    errors = environment_errors(x, y, sample.environments, draws)
    by_set, competition = _of_information(x, sample)
    found = {
        "pearson": drawn_pearson(x, y, draws),
        "spearman": drawn_spearman(x, y, draws),
        "kendall_a": drawn_kendall_a(x, y, draws),
        "kendall_b": drawn_kendall_b(x, y, draws),
        "granulated": over_axes(by_axis, len(draws)),
        "cmi": least(by_set),
        "pgdl": competition,
        "sign_error_mean": drawn_sign_error(errors),
    }
    worst = error_of(errors[:, 0])
    rest: dict[str, Any] = {each: float(of[0]) for each, of in found.items()}
    rest |= {"sign_error_p90": worst.p90, "sign_error_max": worst.max}
    rest["granulated_by_axis"] = {axis: float(each[0]) for axis, each in by_axis.items()}
    rest["cmi_by_set"] = {each: float(of_set[0]) for each, of_set in by_set.items()}
    if len(draws) > 1:
        rest["intervals"] = {each: _interval(each, of) for each, of in found.items() if not np.isnan(of[0])}
    notes += [WHY_NOT[each] for each, of in found.items() if each in WHY_NOT and np.isnan(of[0])]
    return Score(name, kind, len(x), **rest, notes=tuple(notes))


def _interval(name: str, found: Floats) -> tuple[float, float]:
    if name in MOST_INFORMATION:
        return information_interval(found[1:], float(found[0]), MOST_INFORMATION[name])
    return interval(found[1:])


def _of_information(x: Floats, sample: Sample) -> tuple[dict[str, Floats], Floats]:
    """Conditional information by set, and in the competition's form."""
    by_set: dict[str, list[Floats]] = {name: [] for name in sample.cells}
    competition: dict[str, list[Floats]] = {name: [] for name in sample.competition_sets}
    for pairs in sample.pairs:
        for name, cells in sample.cells.items():
            table = tables(x, sample.gap, pairs, cells)
            by_set[name].append(information_of(table, cells))
            if name in competition:
                competition[name].append(competition_of(table, cells, pairs))
    whole = {name: np.concatenate(each) for name, each in by_set.items()}
    return whole, least({name: np.concatenate(each) for name, each in competition.items()})


def _measure_notes(name: str, kind: str, unknown_runs: int) -> Iterator[str]:
    if unknown_runs:
        yield f"Without {unknown_runs} run{'s' * (unknown_runs != 1)} in which it is not known or not finite."
    known = MEASURES.get(name.partition("(")[0]) if kind == "measure" else None
    if known is not None and known.smaller != "flatter":
        yield f"Smaller is {known.smaller}."


def _why_undefined(x: Floats) -> str:
    if len(x) < 2:
        return "Fewer than two runs have it."
    return "The same in all runs." if np.ptp(x) == 0 else "All gaps are equal."


def _notes(sample: Sample, gap: str, resamples: int, configurations: int) -> Iterator[str]:
    """How the scores were taken, as far as this study is special."""
    layout = sample.layout
    if resamples:
        drawn_from = "configurations, each with all its seeds" if configurations > 1 else "runs, which differ by seed"
        few = f"; {COSTLY} for CMI and PGDL" if resamples > COSTLY else ""
        yield f"Intervals: 95 % of {resamples} resamples of {drawn_from}{few}."
    fixed = [name for name in layout.axes if name not in layout.varying()]
    if fixed:
        yield f"The same in all scored runs, so no axis: {listed(fixed)}."
    alone = [name for name in layout.varying() if not len(sample.axis_pairs[name].first)]
    if alone:
        yield f"No two runs differ in this axis alone, so it has no granulated score: {listed(alone)}."
    yield from _environments_told(sample, layout, gap)


def _environments_told(sample: Sample, layout: Layout, gap: str) -> Iterator[str]:
    if not layout.varying() or sample.constant:
        return
    if gap == "loss":
        yield "Sign error: all pairs of runs weigh the same, since a loss has no bound to tell chance by."
        return
    every = environments_of(np.arange(len(sample.gap), dtype=np.float64), layout, None)
    yield (
        f"Sign error: {sample.environments.number} of {every.number} pairs of settings that differ in one axis have "
        "gaps that the test set can tell apart; the others are left out."
    )
