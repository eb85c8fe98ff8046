"""Scores against their definitions, scipy, and examples whose answer is known."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import score_oracle as oracle
from scipy import stats

from saltflat.errors import OptionError, StudyError, UnknownNameError
from saltflat.results.report import Reading
from saltflat.results.text import render_text
from saltflat.studies.row import CONTROLS, Outcome, Row, compute_controls
from saltflat.studies.scores import (
    Score,
    Scores,
    conditional_information,
    granulated,
    granulated_kendall,
    hoeffding_weight,
    kendall_a,
    kendall_b,
    layout,
    pearson,
    pgdl,
    score,
    scoring,
    sign_error,
    sign_tables,
    spearman,
)
from saltflat.studies.scores.caveats import format_chance_note
from saltflat.studies.scores.correlation import resample_kendall, resample_pearson, resample_spearman
from saltflat.studies.scores.granulated import build_axis_means
from saltflat.studies.scores.information import resample_information
from saltflat.studies.scores.layout import (
    Counts,
    Floats,
    GridLayout,
    compute_information_interval,
    compute_interval,
    draw_resamples,
)
from saltflat.studies.scores.results import NUMBERS
from saltflat.studies.scores.sign_tables import PairSigns, build_partitions

SIGNED = ("pearson", "spearman", "kendall_a", "kendall_b", "granulated")
AXES: dict[str, list[float]] = {"lr": [0.01, 0.1, 1.0], "batch": [16, 64], "width": [8, 16]}


class Case:
    """Runs on a grid, some of them missing, with ties in the measure and in the gap."""

    def __init__(self, seed: int, ties: bool, missing: float, axes: int = 3, seeds: int = 2) -> None:
        draw = np.random.default_rng(seed)
        names = list(AXES)[:axes]
        values: list[Iterable[float]] = [*(AXES[name] for name in names), range(seeds)]
        grid = [each for each in product(*values) if draw.random() >= missing]
        self.axes = {name: [each[k] for each in grid] for k, name in enumerate(names)}
        self.seeds = [each[-1] for each in grid]
        self.y = draw.normal(size=len(grid)) * 0.1 + 0.05 * np.array([math.log(each[0]) for each in grid])
        self.y += 0.01 - self.y.min()
        self.x = self.y + 0.1 * draw.normal(size=len(grid))
        if ties:
            self.x, self.y = self.x.round(1), self.y.round(1)


@pytest.fixture(params=[(1, False, 0.0), (2, True, 0.0), (3, False, 0.3), (4, True, 0.3)], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def test_correlations_are_those_of_scipy(case: Case) -> None:
    assert pearson(case.x, case.y) == pytest.approx(stats.pearsonr(case.x, case.y).statistic, abs=1e-12)
    assert spearman(case.x, case.y) == pytest.approx(stats.spearmanr(case.x, case.y).statistic, abs=1e-12)
    assert kendall_b(case.x, case.y) == pytest.approx(stats.kendalltau(case.x, case.y).statistic, abs=1e-12)


def test_correlations_are_those_of_their_definitions(case: Case) -> None:
    x, y = case.x.tolist(), case.y.tolist()
    assert pearson(x, y) == pytest.approx(oracle.pearson(x, y), abs=1e-12)
    assert spearman(x, y) == pytest.approx(oracle.spearman(x, y), abs=1e-12)
    assert kendall_a(x, y) == pytest.approx(oracle.kendall_a(x, y), abs=1e-12)


def test_granulated_kendall_is_that_of_its_definition(case: Case) -> None:
    found = granulated_kendall(case.x, case.y, case.axes, case.seeds)
    known = oracle.granulated(case.x.tolist(), case.y.tolist(), case.axes, case.seeds)
    assert found.by_axis == pytest.approx(known, nan_ok=True)
    assert found.mean == pytest.approx(oracle.mean([each for each in known.values() if not math.isnan(each)]))


def test_conditional_information_is_that_of_its_definition(case: Case) -> None:
    found = conditional_information(case.x, case.y, case.axes)
    known = oracle.conditional_information(case.x.tolist(), case.y.tolist(), case.axes)
    assert found.by_set == pytest.approx(known, abs=1e-12, nan_ok=True)
    assert found.least == pytest.approx(min(each for each in known.values() if not math.isnan(each)), abs=1e-12)


def test_the_competition_s_score_is_that_of_its_definition(case: Case) -> None:
    known = oracle.pgdl(case.x.tolist(), case.y.tolist(), case.axes)
    assert pgdl(case.x, case.y, case.axes) == pytest.approx(known, abs=1e-9)


@pytest.mark.parametrize("examples", [100, 10_000])
def test_the_sign_error_is_that_of_its_definition(case: Case, examples: int) -> None:
    found = sign_error(case.x, case.y, case.axes, examples)
    known = oracle.environment_errors(case.x.tolist(), case.y.tolist(), case.axes, examples)
    assert found.environments == len(known) > 0
    assert (found.mean, found.max) == pytest.approx((oracle.mean(known), max(known)))
    assert found.p90 == pytest.approx(float(np.percentile(known, 90)))


def test_a_resample_is_scored_as_the_list_of_its_runs_would_be(case: Case) -> None:
    """Copies are equal values for Pearson and Spearman; the other scores do not compare a run with its copies."""
    x, y, count = case.x, case.y, len(case.x)
    times = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=4)
    draws = times.T.astype(np.float32)
    layout = GridLayout.from_settings(case.axes, case.seeds, count)
    found = {
        "pearson": resample_pearson(x[None], y, draws)[0],
        "spearman": resample_spearman(x, y, draws),
        "kendall_a": resample_kendall(x, y, draws)[0],
        "kendall_b": resample_kendall(x, y, draws)[1],
    }
    axes = {
        name: each.resample(x[None], draws)[0]
        for name, each in build_axis_means(y, layout, np.arange(count), 0).items()
    }
    told, _ = resample_information(PairSigns(x, y), build_partitions(layout)["lr"], draws)
    for r, each in enumerate(times.tolist()):
        u, v = oracle.drawn(x.tolist(), each), oracle.drawn(y.tolist(), each)
        runs = [int(run) for run in oracle.drawn(list(range(count)), each)]
        assert found["pearson"][r] == pytest.approx(oracle.pearson(u, v))
        assert found["spearman"][r] == pytest.approx(oracle.spearman(u, v))
        apart = [(a, b) for a in range(len(runs)) for b in range(len(runs)) if runs[a] != runs[b]]
        products = [oracle.sign(u[a] - u[b]) * oracle.sign(v[a] - v[b]) for a, b in apart]
        ordered = [sum(w[a] != w[b] for a, b in apart) for w in (u, v)]
        assert found["kendall_a"][r] == pytest.approx(oracle.mean(products))
        assert found["kendall_b"][r] == pytest.approx(sum(products) / math.sqrt(ordered[0] * ordered[1]))
        assert axes["lr"][r] == pytest.approx(_along_lr(case, each), nan_ok=True)
        assert told[1 + r] == pytest.approx(_beyond_lr(case, each), abs=1e-12)


def _along_lr(case: Case, times: Sequence[int]) -> float:
    taus = []
    for setting in set(zip(case.axes["batch"], case.axes["width"], case.seeds, strict=True)):
        runs = [
            run
            for run in range(len(case.x))
            if (case.axes["batch"][run], case.axes["width"][run], case.seeds[run]) == setting
        ]
        pairs = [(a, b, times[a] * times[b]) for a in runs for b in runs if a < b]
        total = sum(weight for _, _, weight in pairs)
        if total:
            agree = [w * oracle.sign(case.x[a] - case.x[b]) * oracle.sign(case.y[a] - case.y[b]) for a, b, w in pairs]
            taus.append(sum(agree) / total)
    return oracle.mean(taus)


def _beyond_lr(case: Case, times: Sequence[int]) -> float:
    """The definition with weighted pairs: every pair of different runs stands in the list as often as it was drawn."""
    cells: dict[Any, list[tuple[int, int]]] = {}
    for a, b in product(range(len(times)), repeat=2):
        if a != b:
            symbols = oracle.sign(case.x[a] - case.x[b]), oracle.sign(case.y[a] - case.y[b])
            cells.setdefault((case.axes["lr"][a], case.axes["lr"][b]), []).extend([symbols] * times[a] * times[b])

    def entropy(symbols: list[Any]) -> float:
        shares = [symbols.count(each) / len(symbols) for each in set(symbols)]
        return -len(symbols) * sum(share * math.log(share) for share in shares)

    known = [pairs for pairs in cells.values() if pairs]
    gap = sum(entropy([v for _, v in pairs]) for pairs in known)
    return sum(entropy([u for u, _ in pairs]) - entropy(list(pairs)) for pairs in known) / gap + 1


def test_a_perfect_measure_has_the_best_of_every_score() -> None:
    case = Case(5, ties=False, missing=0.0)
    found = scored_case(case, case.y)
    assert [getattr(found, name) for name in (*SIGNED, "cmi")] == pytest.approx([1.0] * 6)
    assert found.pgdl == pytest.approx(100)
    assert (found.sign_error_mean, found.sign_error_p90, found.sign_error_max) == (0, 0, 0)


def test_an_anti_correlated_measure_has_the_opposite_sign_and_tells_as_much() -> None:
    case = Case(5, ties=False, missing=0.0)
    found = scored_case(case, -case.y)
    assert [getattr(found, name) for name in SIGNED] == pytest.approx([-1.0] * 5)
    assert found.cmi == pytest.approx(1.0)
    assert (found.sign_error_mean, found.sign_error_max) == (1, 1)


def test_a_random_measure_has_scores_near_those_of_chance() -> None:
    case = Case(6, ties=False, missing=0.0, seeds=12)
    found = scored_case(case, np.random.default_rng(1).normal(size=len(case.y)))
    assert all(abs(getattr(found, name)) < 0.15 for name in SIGNED)
    assert found.cmi < 0.02
    assert abs(found.sign_error_mean - 0.5) < 0.1


def test_a_proxy_of_one_setting_has_a_high_kendall_but_tells_nothing_beyond_it() -> None:
    """The gap follows the learning rate with a little noise; the measure is the learning rate itself."""
    axes: dict[str, list[int]] = {"lr": np.repeat([1, 2, 3, 4], 18).tolist()}
    axes |= {"batch": [1, 2, 3] * 24, "width": [1, 1, 1, 2, 2, 2] * 12}
    lr = np.array(axes["lr"], dtype=np.float64)
    gap = lr + 0.1 * np.random.default_rng(0).normal(size=72)
    assert kendall_b(lr, gap) > 0.8
    told = conditional_information(lr, gap, axes)
    assert told.by_set[""] > 0.6
    assert told.by_set["lr"] == told.least == 0
    assert pgdl(lr, gap, axes) == 0
    along = granulated_kendall(lr, gap, axes, [each // 6 % 3 for each in range(72)])
    assert along.by_axis == pytest.approx({"lr": 1.0, "batch": 0.0, "width": 0.0})


def test_information_by_hand() -> None:
    """Three runs, gaps 1 2 3, measure 1 3 2: of six ordered pairs four agree, so I = 1 - H(1/3) bits and H = 1."""
    expected = 1 + (1 / 3) * math.log2(1 / 3) + (2 / 3) * math.log2(2 / 3)
    assert conditional_information([1, 3, 2], [1, 2, 3], {}).least == pytest.approx(expected)


def test_a_constant_has_no_correlation_but_a_tau_a_of_zero() -> None:
    flat, gap = [2.0, 2.0, 2.0], [1.0, 2.0, 3.0]
    assert all(math.isnan(each(flat, gap)) for each in (pearson, spearman, kendall_b))
    assert kendall_a(flat, gap) == 0
    assert math.isnan(conditional_information(gap, flat, {}).least)
    assert math.isnan(pgdl(gap, flat, {}))


def test_huge_tiny_and_nearly_equal_values_keep_their_correlation() -> None:
    x, y = np.array([1.0, 2.0, 4.0, 3.0]), np.array([1.0, 3.0, 3.5, 2.0])
    for scale in (1e300, 1e-300):
        assert pearson(x * scale, y * scale) == pytest.approx(pearson(x, y))
    # Of numbers near 1e9 a float64 keeps steps of 1e-7.
    assert pearson(1e9 + x, y) == pytest.approx(pearson(x, y), abs=1e-6)


@pytest.mark.parametrize("name", ["pearson", "spearman", "kendall_a", "kendall_b"])
def test_lists_that_do_not_pair_up_or_are_not_finite_are_refused(name: str) -> None:
    function = {"pearson": pearson, "spearman": spearman, "kendall_a": kendall_a, "kendall_b": kendall_b}[name]
    with pytest.raises(StudyError, match=r"shape \(2,\) and \(3,\)"):
        function([1, 2], [1, 2, 3])
    with pytest.raises(StudyError, match="not finite"):
        function([1, math.nan], [1, 2])
    with pytest.raises(StudyError, match="Expected one value of 'lr' per run, but got 1 for 2 runs"):
        granulated_kendall([1, 2], [1, 2], {"lr": [1]})


def test_hoeffding_s_weight_is_zero_below_what_the_test_set_resolves() -> None:
    limit = math.sqrt(2 * math.log(2) / 10_000)
    assert hoeffding_weight(0.999 * limit, 10_000) == 0
    assert hoeffding_weight(1.001 * limit, 10_000) > 0
    assert hoeffding_weight(-0.02, 10_000) == pytest.approx((1 - 2 * math.exp(-2)) ** 2)


def test_a_tied_measure_is_half_an_error_and_gaps_too_close_have_no_weight() -> None:
    axes = {"lr": [1, 2, 3]}
    found = sign_error([1, 1, 2], [0.1, 0.5, 0.501], axes, 1000)
    # 2 against 3 differ by 0.001 only and are left out; 1 against 2 is a tie, 1 against 3 is right.
    assert (found.environments, found.mean, found.max) == (2, 0.25, 0.5)
    assert sign_error([1, 1, 2], [0.1, 0.5, 0.501], axes, None).environments == 3


def test_of_two_test_sets_the_smaller_one_decides() -> None:
    assert sign_error([1, 2], [0.1, 0.2], {"lr": [1, 2]}, [10_000, 10]).environments == 0
    assert sign_error([1, 2], [0.1, 0.2], {"lr": [1, 2]}, [10_000, 1000]).environments == 1


def test_settings_are_told_apart_by_what_they_mean() -> None:
    """True equals 1 in Python, but a setting of True is not a setting of 1; 1.0 and 1 are the same."""
    assert granulated_kendall([1, 2], [1, 2], {"nesterov": [True, 1]}).mean == 1
    assert math.isnan(granulated_kendall([1, 2], [1, 2], {"lr": [1.0, 1]}).mean)
    assert granulated_kendall([1, 2], [1, 2], {"stop": [{"epochs": [1]}, {"epochs": [2]}]}).mean == 1


def test_a_resample_draws_configurations_with_all_their_seeds() -> None:
    groups = np.array([0, 0, 1, 1, 1, 2])
    times = draw_resamples(groups, 70, seed=3)
    assert times.shape == (6, 71)
    assert (times[:, 0] == 1).all()
    for group in range(3):
        assert (np.ptp(times[groups == group], axis=0) == 0).all()
    assert (times[[0, 2, 5], 1:].sum(0) == 3).all()


def test_an_interval_needs_half_of_its_resamples() -> None:
    assert compute_interval(np.array([math.nan, math.nan, 1.0])) == pytest.approx((math.nan, math.nan), nan_ok=True)
    assert compute_interval(np.arange(101.0)) == pytest.approx((2.5, 97.5))


def test_an_interval_of_information_is_moved_to_its_estimate_and_stays_within_its_range() -> None:
    assert compute_information_interval(np.linspace(0.3, 0.5, 101), 0.2, 1.0) == pytest.approx((0.105, 0.295))
    assert compute_information_interval(np.linspace(0.0, 1.0, 101), 0.1, 1.0) == pytest.approx((0.0, 0.575))


@pytest.mark.parametrize("name", ["pearson", "spearman", "kendall_b"])
def test_intervals_over_configurations_cover_the_truth_where_those_over_runs_do_not(name: str) -> None:
    """Configurations with six seeds each; what seeds share is correlated by 0.7, what they do not share by 0."""

    def scores(x: Floats, y: Floats, times: Counts) -> Floats:
        if name == "pearson":
            return resample_pearson(x[None], y, times).reshape(-1)
        return resample_spearman(x, y, times) if name == "spearman" else resample_kendall(x, y, times)[1]

    count, seeds, shared, trials = 30, 6, 0.8, 150
    rho = 0.7 * shared
    truth = {"pearson": rho, "spearman": 6 / math.pi * math.asin(rho / 2), "kendall_b": 2 / math.pi * math.asin(rho)}
    groups = np.repeat(np.arange(count), seeds)
    draw, covered = np.random.default_rng(0), np.zeros(2)
    for trial in range(trials):
        both = draw.multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], size=count)[groups]
        both = math.sqrt(shared) * both + math.sqrt(1 - shared) * draw.normal(size=both.shape)
        for k, drawn_from in enumerate((groups, np.arange(len(groups)))):
            low, high = compute_interval(scores(both[:, 0], both[:, 1], draw_resamples(drawn_from, 200, trial))[1:])
            covered[k] += low <= truth[name] <= high
    assert covered[0] / trials > 0.87
    assert covered[1] / trials < 0.75


def outcome(gap: float, **other: Any) -> Outcome:
    usual: dict[str, Any] = {"status": "done", "epochs": 5, "train_loss": 0.01, "train_error": 0.0}
    usual |= {"test_loss": 0.01 + 2 * gap, "test_error": gap, "train_examples": 1000, "test_examples": 10_000}
    usual |= {"parameters": 100, "norm": 3.0, "distance": 1.0}
    return Outcome(**{**usual, **other})


def study(
    gaps: Sequence[float] | Floats,
    readings: dict[str, Any],
    axes: dict[str, Any] | None = None,
    seeds: Sequence[float] | None = None,
    status: Callable[[int], str] = lambda run: "done",
    **other: Any,
) -> list[Row]:
    """A row per gap, with a reading of each measure and the settings of each axis."""
    rows = []
    for run, gap in enumerate(gaps):
        config = {name: values[run] for name, values in (axes or {}).items()}
        config["seed"] = run if seeds is None else seeds[run]
        taken = {name: Reading(name, float(values[run])) for name, values in readings.items()}
        extra = {name: each[run] if isinstance(each, list) else each for name, each in other.items()}
        rows.append(Row(f"run{run:04d}", config, status(run), outcome(float(gap), **extra), taken))
    return rows


def scored_case(case: Case, x: Floats, name: str = "trace", **options: Any) -> Score:
    y = case.y
    return score(study(y, {name: x}, case.axes, case.seeds), list(case.axes), **{"resamples": 0, **options})[name]


def test_a_study_s_scores_are_those_of_the_plain_functions() -> None:
    case = Case(7, ties=True, missing=0.2)
    gap = case.y
    found = score(study(gap, {"trace": case.x}, case.axes, case.seeds), list(case.axes), resamples=20)["trace"]
    gaps = np.array([row.gap["error"] for row in study(gap, {}, case.axes, case.seeds)])
    assert found.pearson == pytest.approx(pearson(case.x, gaps))
    assert found.spearman == pytest.approx(spearman(case.x, gaps))
    assert found.kendall_a == pytest.approx(kendall_a(case.x, gaps))
    assert found.kendall_b == pytest.approx(kendall_b(case.x, gaps))
    along = granulated_kendall(case.x, gaps, case.axes, case.seeds)
    assert found.granulated == pytest.approx(along.mean)
    assert found.granulated_by_axis == pytest.approx(along.by_axis)
    told = conditional_information(case.x, gaps, case.axes)
    assert found.cmi == pytest.approx(told.least)
    assert found.cmi_by_set == pytest.approx(told.by_set, nan_ok=True)
    assert found.pgdl == pytest.approx(pgdl(case.x, gaps, case.axes))
    wrong = sign_error(case.x, gaps, case.axes, 10_000)
    assert (found.sign_error_mean, found.sign_error_p90, found.sign_error_max) == pytest.approx(
        (wrong.mean, wrong.p90, wrong.max)
    )


def test_a_monotone_transform_of_the_measure_leaves_all_but_pearson_alone() -> None:
    case = Case(8, ties=True, missing=0.1)
    plain, bent = (scored_case(case, x, resamples=100) for x in (case.x, np.exp(3 * case.x)))
    for name in NUMBERS:
        if name != "pearson":
            assert getattr(plain, name) == pytest.approx(getattr(bent, name), abs=1e-12), name
            assert plain.intervals.get(name) == pytest.approx(bent.intervals.get(name), abs=1e-12), name
    assert plain.pearson != pytest.approx(bent.pearson, abs=1e-3)


def test_turning_the_measure_round_turns_the_signs() -> None:
    case = Case(8, ties=False, missing=0.1)
    plain, turned = (scored_case(case, x, resamples=100) for x in (case.x, -case.x))
    for name in SIGNED:
        low, high = plain.intervals[name]
        assert getattr(turned, name) == pytest.approx(-getattr(plain, name))
        assert turned.intervals[name] == pytest.approx((-high, -low))
    assert turned.cmi == pytest.approx(plain.cmi)
    assert turned.sign_error_mean == pytest.approx(1 - plain.sign_error_mean)


def test_the_order_of_the_rows_changes_nothing() -> None:
    case = Case(9, ties=True, missing=0.2)
    rows = study(case.y, {"trace": case.x, "noisy": case.y}, case.axes, case.seeds)
    shuffled = [rows[k] for k in np.random.default_rng(0).permutation(len(rows))]
    assert score(rows, list(case.axes), resamples=50) == score(shuffled, list(case.axes), resamples=50)


def test_the_seed_decides_the_intervals_and_nothing_else() -> None:
    case = Case(9, ties=False, missing=0.0)
    first, again, other = (scored_case(case, case.x, resamples=50, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.intervals != other.intervals
    assert [getattr(first, name) for name in NUMBERS] == [getattr(other, name) for name in NUMBERS]


@pytest.mark.parametrize("most_exact", [1000, 0])
def test_work_done_in_small_blocks_gives_the_same(monkeypatch: pytest.MonkeyPatch, most_exact: int) -> None:
    monkeypatch.setattr(scoring, "MAX_EXACT_RUNS", most_exact)
    case = Case(10, ties=True, missing=0.1)
    whole = scored_case(case, case.x, resamples=30)
    for module, size in {layout: 200, granulated: 30, sign_tables: 100}.items():
        monkeypatch.setattr(module, "BLOCK", size)
    monkeypatch.setattr(sign_tables, "COLUMNS", 2)
    parts = scored_case(case, case.x, resamples=30)
    assert parts.cmi_by_set == pytest.approx(whole.cmi_by_set, nan_ok=True, abs=1e-12)
    for name in whole.intervals:
        # A projection is of float32.
        close = 1e-12 if most_exact or name not in ("cmi", "pgdl") else 1e-4
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), abs=1e-12)
        assert parts.intervals[name] == pytest.approx(whole.intervals[name], abs=close), name


def test_the_gap_of_the_loss_can_be_scored_and_has_no_bound_for_the_sign_error() -> None:
    case = Case(11, ties=False, missing=0.0)
    gap = case.y
    found = score(study(gap, {"trace": case.x}, case.axes, case.seeds), list(case.axes), gap="loss", resamples=0)
    assert found["trace"].kendall_a == pytest.approx(kendall_a(case.x, gap))
    assert found["trace"].sign_error_mean == pytest.approx(sign_error(case.x, gap, case.axes, None).mean)
    assert any("all pairs of runs have the same weight" in note for note in found.notes)


def test_only_runs_that_are_done_are_scored_and_the_others_counted() -> None:
    gaps = np.linspace(0.1, 0.5, 12)
    ends = ["done"] * 6 + ["missed"] * 2 + ["diverged", "failed", "failed", "done"]
    rows = study(gaps, {"trace": gaps}, status=lambda run: ends[run], test_error=[*gaps[:11], math.nan])
    found = score(rows, [], resamples=0)
    assert (found.runs, found["trace"].runs) == (6, 6)
    assert found.left_out == {"missed": 2, "diverged": 1, "failed": 2, "without a finite gap": 1}
    assert any("6 of 12 runs are left out" in warning for warning in found.warnings)
    kept = score(rows, [], missed="keep", resamples=0)
    assert (kept.runs, kept.left_out) == (8, {"diverged": 1, "failed": 2, "without a finite gap": 1})


def test_runs_without_a_reading_are_left_out_of_that_measure_only() -> None:
    gaps = np.linspace(0.1, 0.5, 12)
    values = np.where(np.arange(12) < 2, math.nan, gaps)
    values[5] = math.inf
    rows = study(gaps, {"trace": values, "rho": gaps})
    del rows[3].readings["trace"]  # type: ignore[attr-defined]
    found = score(rows, [], resamples=0)
    assert (found.runs, found["trace"].runs, found["rho"].runs) == (12, 8, 12)
    assert found["trace"].notes == ("Without 4 runs in which it is unknown or not finite.", *found["rho"].notes)
    assert found["trace"].kendall_b == 1


def test_controls_are_always_scored_and_constant_ones_say_so() -> None:
    gaps = np.linspace(0.1, 0.5, 12)
    axes = {"lr": [0.1 * run for run in range(12)], "batch_size": [64] * 12}
    found = score(study(gaps, {"trace": gaps}, axes, norm=(10 * gaps).tolist()), ["lr"], measures=[], resamples=0)
    assert list(found) == list(CONTROLS)
    assert found["lr"].kendall_b == found["norm"].kendall_b == 1
    assert math.isnan(found["batch_size"].kendall_a)
    assert found["batch_size"].notes == ("The same in all runs.",)
    assert {each.kind for each in found.scores.values()} == {"control"}


def test_controls_of_a_run_are_what_is_known_of_it() -> None:
    row = study([0.2], {}, {"lr": [0.5], "batch_size": [32]}, distance=None)[0]
    found = compute_controls(row)
    noise = found.pop("noise")
    assert found == {"parameters": 100, "norm": 3.0, "train_loss": 0.01, "lr": 0.5, "batch_size": 32}
    assert 0 <= noise < 1
    assert list(compute_controls(Row("other", {"lr": "high"}, "failed"))) == ["noise"]


def test_the_noise_control_depends_on_the_key_alone_and_is_spread_evenly() -> None:
    found = np.array([compute_controls(Row(f"{run:016x}", {}, "failed"))["noise"] for run in range(2000)])
    assert found[7] == compute_controls(Row(f"{7:016x}", {"lr": 1.0}, "done"))["noise"]
    assert stats.kstest(found, "uniform").pvalue > 0.01


def test_a_control_that_is_called_like_a_measure_keeps_a_name_of_its_own() -> None:
    gaps = np.linspace(0.1, 0.5, 12)
    found = score(study(gaps, {"norm": gaps}), [], resamples=0)
    assert (found["norm"].kind, found["norm (control)"].kind) == ("measure", "control")


def test_measures_that_do_not_mean_flatness_say_what_they_mean() -> None:
    gaps = np.linspace(0.1, 0.5, 12)
    found = score(study(gaps, {"squared_norm": gaps, "rho(axis='row')": gaps}), [], resamples=0)
    assert found["squared_norm"].notes[0] == "Smaller is nearer to zero weights."
    assert not any("Smaller" in note for note in found["rho(axis='row')"].notes)


def test_runs_without_axes_have_the_plain_scores_and_say_why_not_the_others() -> None:
    gaps = np.linspace(0.1, 0.5, 12)
    # 12 runs have 66 pairs. The first value moved up by eight places turns eight of them round.
    values = np.concatenate([[gaps[8] + 0.001], gaps[1:]])
    found = score(study(gaps, {"trace": values}), [], resamples=50)
    assert found["trace"].kendall_b == pytest.approx(50 / 66)
    low, high = found["trace"].intervals["kendall_b"]
    assert low < 50 / 66 < high
    assert list(found["trace"].cmi_by_set) == [""]
    assert math.isnan(found["trace"].granulated)
    assert math.isnan(found["trace"].sign_error_mean)
    assert any("No granulated score" in note for note in found["trace"].notes)
    assert any("runs, which differ by seed" in note for note in found.notes)


def test_one_axis_is_enough_for_every_score() -> None:
    case = Case(12, ties=False, missing=0.0, axes=1, seeds=6)
    found = scored_case(case, case.x)
    assert list(found.cmi_by_set) == ["", "lr"]
    assert not any(math.isnan(getattr(found, name)) for name in NUMBERS)


def test_two_runs_can_be_scored_with_a_warning() -> None:
    rows = study([0.1, 0.4], {"trace": [1.0, 2.0]}, {"lr": [0.1, 0.2]}, [0, 0])
    found = score(rows, ["lr"], resamples=20)
    assert (found["trace"].kendall_a, found["trace"].granulated, found["trace"].sign_error_max) == (1, 1, 0)
    assert found["trace"].cmi_by_set == pytest.approx({"": 1.0, "lr": math.nan}, nan_ok=True)
    assert any("Only 2 runs" in warning for warning in found.warnings)
    assert str(found)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_runs_are_an_error_that_says_where_they_went(count: int) -> None:
    rows = study([0.1] * 5, {}, status=lambda run: "done" if run < count else "failed")
    with pytest.raises(StudyError, match=rf"but got {count} runs? to score \({5 - count} failed left out\)"):
        score(rows, [])
    with pytest.raises(StudyError, match=r"but got 0 runs to score\."):
        score([], [])


def test_gaps_that_differ_by_rounding_alone_are_equal() -> None:
    train, test = [0.1, 0.0, 0.0], [0.3, 0.2, 0.5]
    rows = study([0] * 3, {"trace": [1.0, 2.0, 3.0]}, train_error=train, test_error=test)
    assert rows[0].gap["error"] != rows[1].gap["error"]
    assert score(rows, [], resamples=0)["trace"].kendall_a == pytest.approx(2 / 3)


def test_equal_gaps_leave_everything_undefined_and_warn() -> None:
    found = score(study([0.25] * 12, {"trace": range(12)}), [], resamples=10)
    assert all(math.isnan(getattr(found["trace"], name)) for name in NUMBERS)
    assert found["trace"].notes == ("All gaps are equal.",)
    assert any("All gaps are 0.25" in warning for warning in found.warnings)
    assert "trace" in str(found)


def test_wrong_options_are_refused_with_the_nearest_name() -> None:
    rows = study([0.1, 0.2], {"trace": [1, 2]}, {"batch": [1, 2]})
    with pytest.raises(UnknownNameError, match="Try 'batch'"):
        score(rows, ["bacth"])
    with pytest.raises(UnknownNameError, match="Try 'trace'"):
        score(rows, ["batch"], measures=["tarce"])
    with pytest.raises(UnknownNameError, match="Try 'error'"):
        score(rows, ["batch"], gap="eror")
    with pytest.raises(OptionError, match="missed='drop'"):
        score(rows, ["batch"], missed="drop")
    with pytest.raises(OptionError, match="resamples=-1"):
        score(rows, ["batch"], resamples=-1)
    with pytest.raises(UnknownNameError, match="Try 'trace'"):
        score(rows, ["batch"], resamples=0)["trac"]


def test_the_seed_is_no_axis_and_settings_may_be_lists() -> None:
    axes = {"widths": [[8], [8, 8], [8], [8, 8]]}
    rows = study([0.1, 0.2, 0.15, 0.3], {"trace": [1, 2, 1, 3]}, axes, [0, 0, 1, 1])
    found = score(rows, ["widths", "seed"], resamples=0)
    assert found.axes == ("widths",)
    assert found.configurations == 2
    assert found["trace"].granulated == 1


def test_an_axis_with_one_value_left_is_no_axis_and_said_so() -> None:
    case = Case(13, ties=False, missing=0.0)
    axes = {**case.axes, "depth": [2] * len(case.y)}
    found = score(study(case.y, {"trace": case.x}, axes, case.seeds, test_examples=10**6), list(axes), resamples=0)
    assert not any("depth" in name for name in found["trace"].cmi_by_set)
    assert math.isnan(found["trace"].granulated_by_axis["depth"])
    assert found["trace"].granulated == pytest.approx(granulated_kendall(case.x, case.y, case.axes, case.seeds).mean)
    assert any("not an axis: depth" in note for note in found.notes)


def test_gaps_closer_than_the_test_set_resolves_are_warned_of_with_the_numbers() -> None:
    near = [0.1 + 0.001 * run for run in range(20)]
    found = score(study(near, {"trace": near}, test_examples=400), [], resamples=0)
    (warning,) = found.warnings
    # Median difference of 20 equal steps: 6 steps. Two standard errors: 2 sqrt(2) sqrt(0.11 * 0.89 / 400).
    assert "400 test examples" in warning
    assert "differ by 0.006 in the median" in warning
    assert "are 0.044" in warning
    assert not score(study(near, {"trace": near}, test_examples=400_000), [], resamples=0).warnings


def test_unequal_training_errors_are_warned_of() -> None:
    gaps = np.linspace(0.1, 0.5, 12)
    train = np.linspace(0.0, 0.2, 12)
    rows = study(gaps, {"trace": gaps}, train_error=train.tolist(), test_error=(train + gaps).tolist())
    assert any("Training errors run from 0 to 0.2" in warning for warning in score(rows, [], resamples=0).warnings)


def test_what_the_best_of_many_measures_scores_by_chance_is_about_right() -> None:
    draw, count, many = np.random.default_rng(0), 24, 12
    gap = draw.normal(size=count)
    best = [max(abs(kendall_a(draw.normal(size=count), gap)) for _ in range(many)) for _ in range(300)]
    told = float(format_chance_note(many, count).split("Kendall of ")[1].split()[0])
    assert told == pytest.approx(float(np.median(best)), abs=0.03)


def full() -> Scores:
    case = Case(14, ties=True, missing=0.1)
    values = {f"measure_{k}": case.x + k for k in range(3)} | {"$flat": case.x * 0, "squared_norm": case.y}
    values["holes"] = np.where(case.x > 0, case.x, math.nan)
    return score(study(case.y, values, case.axes, case.seeds), list(case.axes), resamples=20)


def test_scores_come_back_from_strict_json() -> None:
    found = full()
    text = json.dumps(found.to_dict(), allow_nan=False)
    again = Scores.from_dict(json.loads(text))
    assert again == found
    assert str(again) == str(found)
    assert Score.from_dict(found["$flat"].to_dict()) == found["$flat"]


@pytest.mark.parametrize(
    "change",
    [{"schema": "saltflat.scores/9"}, {"runs": "many"}, {"extra": 1}, {"scores": {"x": {"name": "x"}}}],
    ids=str,
)
def test_broken_scores_are_refused(change: dict[str, Any]) -> None:
    given = json.loads(json.dumps(full().to_dict())) | change
    with pytest.raises(StudyError, match="cannot be understood"):
        Scores.from_dict(given)


def test_a_frame_has_a_row_per_measure_and_control() -> None:
    pytest.importorskip("pandas")
    found = full()
    frame = found.to_frame()
    assert list(frame["name"]) == list(found)
    row = frame[frame["name"] == "measure_0"].iloc[0]
    assert (row["kendall_b_low"], row["kendall_b_high"]) == found["measure_0"].intervals["kendall_b"]
    assert row["granulated[lr]"] == found["measure_0"].granulated_by_axis["lr"]


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_printed_scores_fit_the_terminal_and_name_everything(width: int) -> None:
    found = full()
    text = render_text(found, width)
    assert max(map(len, text.splitlines())) <= width
    for name in found:
        assert name in text
    said = " ".join(text.split())
    for note in [*found.notes, *found.warnings, *(note for each in found.scores.values() for note in each.notes)]:
        assert note in said
    assert f"{found['measure_0'].kendall_b:.2f}" in text
    assert "By chance alone the best of 6 unrelated measures" in said
    assert repr(found) == f"<Scores of 13 measures and controls on {found.runs} runs; print() shows them>"


def test_a_hundred_runs_and_forty_measures_take_seconds() -> None:
    case = Case(15, ties=False, missing=0.0, seeds=9)
    draw = np.random.default_rng(0)
    values = {f"measure_{k}": case.x + 0.1 * draw.normal(size=len(case.x)) for k in range(40)}
    start = time.process_time()
    found = score(study(case.y, values, case.axes, case.seeds), list(case.axes), resamples=1000)
    assert time.process_time() - start < 20
    assert (found.runs, len(found)) == (108, 47)
