"""Scores of many runs: counted without looking at every pair, with intervals that are as good as those of all pairs."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from score_studies import AXES, STUDIES, numbers_of, study_rows

from saltflat.render.html.page import HEIGHT, WIDTH, build_small_scatter
from saltflat.results.text import render_text
from saltflat.studies.row import Row
from saltflat.studies.scores import Score, Scores, granulated, kendall_a, score, scoring, sign_tables
from saltflat.studies.scores.caveats import compute_median_difference, compute_median_hypot
from saltflat.studies.scores.correlation import Concordance, compute_running_sum, resample_pearson
from saltflat.studies.scores.granulated import build_axis_means, count_pairs_within, find_pairs_within
from saltflat.studies.scores.information import find_least, resample_information
from saltflat.studies.scores.layout import Floats, GridLayout, compute_information_interval, draw_resamples
from saltflat.studies.scores.sign_tables import PairSigns, build_partitions, list_axis_sets

RECORD = Path(__file__).parent.parent / "scores_300.json"
MEGABYTE = 10**6


@pytest.mark.parametrize("name", STUDIES)
def test_scores_of_300_runs_are_those_on_record(name: str) -> None:
    """Written when every pair was looked at in every resample, with ties, missing values, lost runs and seeds."""
    known = json.loads(RECORD.read_text())[name]
    found = numbers_of(name, score)
    assert list(found) == list(known)
    for measure, numbers in known.items():
        assert found[measure] == pytest.approx(numbers, rel=1e-12, abs=1e-12), measure


@pytest.mark.parametrize("runs", [1, 2, 3, 10, 50, 101])
@pytest.mark.parametrize("digits", [0, 1, 9])
def test_smaller_in_both_is_counted_as_by_comparing_every_pair(runs: int, digits: int) -> None:
    draw = np.random.default_rng(runs)
    x, y = draw.normal(size=(2, runs)).round(digits)
    weights = draw.integers(0, 4, size=(runs, 5)).astype(np.float32)
    below = (x[:, None] > x) & (y[:, None] > y)
    found = Concordance(x, y)
    np.testing.assert_array_equal(found.sum_below(weights), below @ weights)
    np.testing.assert_array_equal(found.sum_above(weights, found.sum_below(weights)), below.T @ weights)
    np.testing.assert_array_equal(found.count_pairs(weights), (weights * (below @ weights)).sum(0))


@pytest.mark.parametrize("runs", [0, 1, 2, 24, 25, 26, 300])
def test_a_running_sum_is_that_of_numpy(runs: int) -> None:
    x = np.random.default_rng(0).integers(0, 9, size=(runs, 3)).astype(np.float64)
    np.testing.assert_array_equal(compute_running_sum(x), np.cumsum(x, axis=0))


def test_pairs_of_the_same_group_and_different_codes_are_all_found_once() -> None:
    groups, codes = np.random.default_rng(0).integers(0, 4, size=(2, 40))
    first, second = find_pairs_within(groups, codes, 1.0, 0)
    wanted = {(a, b) for a, b in combinations(range(40), 2) if groups[a] == groups[b] and codes[a] != codes[b]}
    found = [(min(a, b), max(a, b)) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    assert set(found) == wanted
    assert len(found) == len(wanted) == count_pairs_within(groups, codes)


@pytest.mark.parametrize("runs", [2, 3, 4, 5, 40, 41])
@pytest.mark.parametrize("digits", [1, 16])
def test_medians_over_pairs_are_those_of_all_pairs(runs: int, digits: int) -> None:
    values = np.random.default_rng(runs).random(runs).round(digits)
    first, second = np.triu_indices(runs, 1)
    assert compute_median_difference(values) == pytest.approx(
        np.median(np.abs(values[first] - values[second])), abs=1e-15
    )
    assert compute_median_hypot(values) == pytest.approx(np.median(np.hypot(values[first], values[second])), abs=1e-15)


def test_a_resample_without_the_run_that_makes_the_spread_keeps_its_correlation() -> None:
    """Without the outlier, differences of moments would have no correct digit."""
    draw = np.random.default_rng(0)
    x = np.concatenate([[1e12], 1 + draw.random(50)])
    y = np.concatenate([[0.0], x[1:] + draw.random(50)])
    times = np.ones((51, 2), dtype=np.float32)
    times[0, 1] = 0
    # Of numbers near 1, beside one of 1e12 to which all are scaled, four digits are left.
    assert resample_pearson(x[None], y, times)[0, 1] == pytest.approx(np.corrcoef(x[1:], y[1:])[0, 1], abs=1e-3)


def many_rows(shape: Iterable[int], seeds: int = 1, measures: int = 1) -> tuple[list[Row], list[str]]:
    """Runs on a complete grid, some measures related to the gap; and the names of its axes."""
    shape = tuple(shape)
    draw = np.random.default_rng(0)
    grid = np.array(list(product(*map(range, shape), range(seeds))), dtype=np.float64)
    gaps = np.clip(0.4 + 0.01 * grid @ draw.normal(size=len(shape) + 1) + 0.03 * draw.normal(size=len(grid)), 0, 1)
    template = study_rows("one axis", 1)[0]
    rows = []
    for run, place in enumerate(grid.tolist()):
        gap = round(float(gaps[run]), 4)
        assert template.outcome is not None
        outcome = type(template.outcome)(
            **{**vars(template.outcome), "test_error": gap, "norm": float(draw.random()), "test_examples": 10_000}
        )
        values = {f"measure_{k}": gap * k + 0.05 * float(draw.normal()) for k in range(measures)}
        readings = {name: type(template.readings["close"])(name, value) for name, value in values.items()}
        config = dict(zip([*AXES[: len(shape)], "seed"], place, strict=True))
        rows.append(Row(f"{run:06d}", config, "done", outcome, readings))
    return rows, list(AXES[: len(shape)])


def width(score: Score, name: str) -> float:
    low, high = score.intervals[name]
    return high - low


def test_ten_thousand_runs_take_seconds_and_little_memory() -> None:
    rows, axes = many_rows((5, 5, 5, 4), seeds=20)
    tracemalloc.start()
    start = time.process_time()
    found = score(rows, axes, resamples=300)
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 60
    assert peak < 1000 * MEGABYTE
    assert found.runs == 10_000
    assert not any(math.isnan(getattr(found["measure_0"], name)) for name in scoring.MAX_INFORMATION)
    assert set(found["measure_0"].intervals) >= {"pearson", "kendall_b", "granulated", "cmi", "pgdl", "sign_error_mean"}
    said = " ".join(render_text(found, 200).split())
    assert "with more than 1,000 runs, counts of pairs in a resample are approximated to first order" in said


@pytest.mark.parametrize("seeds", [1, 3])
def test_projected_intervals_of_information_are_those_of_all_pairs(monkeypatch: pytest.MonkeyPatch, seeds: int) -> None:
    rows, axes = many_rows((4, 4, 5, 6) if seeds == 1 else (4, 4, 3, 3), seeds, measures=2)
    exact = score(rows, axes, resamples=200)
    monkeypatch.setattr(scoring, "MAX_EXACT_RUNS", 0)
    projected = score(rows, axes, resamples=200)
    assert not any("to first order" in note for note in exact.notes)
    for name in ("measure_0", "measure_1", "norm", "noise"):
        one, other = exact[name], projected[name]
        assert (one.cmi, one.pgdl) == (other.cmi, other.pgdl)
        for kind in ("cmi", "pgdl"):
            # 16 runs of each two settings, or 9 configurations with 3: less is neglected where there are more.
            assert width(other, kind) == pytest.approx(width(one, kind), rel=0.25), (name, kind)
            assert other.intervals[kind] == pytest.approx(one.intervals[kind], abs=0.25 * width(one, kind))
        assert {k: v for k, v in one.intervals.items() if k not in ("cmi", "pgdl")} == {
            k: v for k, v in other.intervals.items() if k not in ("cmi", "pgdl")
        }


@pytest.mark.parametrize("digits", [1, 9])
def test_a_projection_of_every_run_once_is_the_score_itself(digits: int) -> None:
    draw = np.random.default_rng(0)
    layout = GridLayout.from_settings({"lr": [0, 1, 2] * 20, "batch": [0, 1, 2, 3] * 15}, None, 60)
    signs = PairSigns(*draw.normal(size=(2, 60)).round(digits))
    for each in build_partitions(layout).values():
        for found in resample_information(signs, each, np.ones((60, 1), dtype=np.float32), projected=True):
            # The projection is of float32.
            assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("related", [0.0, 0.8])
def test_projected_intervals_of_information_cover_what_other_configurations_give(related: float) -> None:
    """Configurations at random settings, two seeds each; the mean over all trials stands for the truth."""
    trials, shape, seeds = 80, (4, 4, 4), 2
    units = np.repeat(np.arange(150), seeds)
    estimates, intervals = np.zeros((trials, 2)), np.zeros((trials, 2, 2))
    for trial in range(trials):
        draw = np.random.default_rng(trial)
        settings = np.stack([draw.integers(0, count, size=150) for count in shape], axis=1)[units]
        both = draw.multivariate_normal([0, 0], [[1, related], [related, 1]], size=150)[units]
        both += 0.5 * draw.normal(size=both.shape) + 0.3 * settings[:, :1]
        layout = GridLayout.from_settings({f"axis {k}": settings[:, k].tolist() for k in range(3)}, None, len(units))
        times, signs = draw_resamples(units, 200, trial)[:, 1:], PairSigns(both[:, 0], both[:, 1])
        found = {
            name: resample_information(signs, each, times, projected=True)
            for name, each in build_partitions(layout).items()
        }
        paper = find_least({name: each for name, (each, _) in found.items()})
        competition = find_least({name: found[name][1] for name in list_axis_sets(layout, 2)})
        estimates[trial] = paper[0], competition[0]
        intervals[trial] = (
            compute_information_interval(paper[1:], float(paper[0]), 1.0),
            compute_information_interval(competition[1:], float(competition[0]), 100.0),
        )
    truth = estimates.mean(0)
    covered = ((intervals[:, :, 0] <= truth) & (truth <= intervals[:, :, 1])).mean(0)
    assert (covered > 0.85).all()
    # An interval as wide as the range would cover, too. Those of unrelated lists end at zero and may be narrower.
    spread = (intervals[:, :, 1] - intervals[:, :, 0]).mean(0) / (2 * 1.96 * estimates.std(0))
    assert (spread < 2).all()
    assert (spread > 0.8).all() or not related


def chosen_at_random(monkeypatch: pytest.MonkeyPatch, **most: int) -> Scores:
    rows, axes = many_rows((8, 6), seeds=4, measures=2)
    for name, value in most.items():
        monkeypatch.setattr(sign_tables if name == "MAX_CELLS" else granulated, name, value)
    monkeypatch.setattr(scoring, "MAX_CELLS", sign_tables.MAX_CELLS)
    return score(rows, axes, resamples=200)


def test_too_many_pairs_of_configurations_are_resampled_from_a_choice_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chosen_at_random(monkeypatch)
    some = chosen_at_random(monkeypatch, MAX_RESAMPLED=150)
    assert some == chosen_at_random(monkeypatch, MAX_RESAMPLED=150)
    assert not any("random pairs" in note for note in whole.notes)
    assert "Interval of the sign error: from 150 random pairs of configurations out of 288." in some.notes
    for name in ("measure_0", "measure_1", "norm"):
        for kind in ("granulated", "sign_error_mean"):
            # The score itself is of all pairs; its interval may only be wider for the choice.
            assert getattr(some[name], kind) == pytest.approx(getattr(whole[name], kind), abs=1e-12)
            assert 0.9 < width(some[name], kind) / width(whole[name], kind) < 2.5, (name, kind)
            low, high = some[name].intervals[kind]
            assert low < getattr(whole[name], kind) < high


def test_resamples_of_a_choice_are_moved_to_the_score_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granulated, "MAX_RESAMPLED", 12)
    draw = np.random.default_rng(0)
    x = np.sort(draw.normal(size=100))
    y = x + 0.5 * draw.normal(size=100)
    means = build_axis_means(y, GridLayout.from_settings({"lr": list(range(100))}, None, 100), np.arange(100), seed=0)[
        "lr"
    ]
    assert (means.resampled, means.whole) == (12, 4950)
    found = means.resample(x[None], draw_resamples(np.arange(100), 500, 0))[0]
    assert found[0] == pytest.approx(kendall_a(x, y))
    # Twelve pairs alone are off by 0.1 or more.
    assert np.nanmean(found[1:]) == pytest.approx(found[0], abs=0.05)


def test_too_many_pairs_of_runs_are_scored_from_a_choice_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chosen_at_random(monkeypatch)
    some = chosen_at_random(monkeypatch, MAX_PAIRS=600)
    assert some == chosen_at_random(monkeypatch, MAX_PAIRS=600)
    said = " ".join(some.notes)
    assert "Sign error: from a random " in said
    assert "Granulated score of lr: from a random " in said
    assert "random" not in " ".join(whole.notes)
    for name in ("measure_0", "measure_1", "norm"):
        for kind in ("granulated", "sign_error_mean"):
            assert getattr(some[name], kind) == pytest.approx(getattr(whole[name], kind), abs=0.1), (name, kind)
            low, high = some[name].intervals[kind]
            assert low < getattr(some[name], kind) < high


def test_too_many_pairs_of_settings_are_resampled_from_a_choice_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_EXACT_RUNS", 0)
    whole = chosen_at_random(monkeypatch)
    some = chosen_at_random(monkeypatch, MAX_CELLS=300)
    assert some == chosen_at_random(monkeypatch, MAX_CELLS=300)
    assert "They come from 300 random pairs of settings for CMI beyond: lr + batch_size." in some.notes
    for name in ("measure_0", "measure_1", "norm"):
        assert some[name].cmi_by_set == whole[name].cmi_by_set
        assert some[name].pgdl == whole[name].pgdl
        assert 0.9 < width(some[name], "pgdl") / width(whole[name], "pgdl") < 4


def test_settings_of_a_single_run_hold_no_information_and_are_not_paired() -> None:
    """A thousand different values on every axis: a million combinations, and nothing to know."""
    draw = np.random.default_rng(0)
    layout = GridLayout.from_settings({name: draw.random(3000).tolist() for name in AXES}, None, 3000)
    signs = PairSigns(*draw.normal(size=(2, 3000)))
    partitions = build_partitions(layout)
    assert len(set(partitions.values())) == 2
    start = time.process_time()
    for name, each in partitions.items():
        paper, competition = resample_information(signs, each)
        assert math.isnan(paper[0]) == math.isnan(competition[0]) == bool(name)
    assert time.process_time() - start < 5


def test_small_plots_draw_dots_in_the_same_place_once() -> None:
    values: Floats = np.linspace(0, 1, 10_000)
    found = build_small_scatter("trace", values.tolist(), values.tolist())
    assert found.drawn == 10_000
    # A line that rises from corner to corner meets no more places than there are columns and rows.
    assert found.path.count("M") <= WIDTH + HEIGHT
    few: Any = build_small_scatter("trace", [0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.5, 1.0])
    assert few.path.count("M") == 3
