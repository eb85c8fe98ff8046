"""How much of an order of networks survives a change: against loops over pairs of networks, and what is printed."""

from __future__ import annotations

import json
import math
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import study_cases
from made_studies import AXES, Place, drawn, made_study
from scipy.stats import kendalltau
from typer.testing import CliRunner, Result

from saltflat.cli import app
from saltflat.errors import OptionError, StudyError, UnknownNameError
from saltflat.results.report import Reading
from saltflat.studies import Results
from saltflat.studies.fragility import Fragility
from saltflat.studies.fragility.results import ALIKE, LESS, TOO_FEW
from saltflat.studies.row import Row

NAN = math.nan


def noisy(place: Place) -> float:
    width: int = place["width"]
    return 0.2 + 0.02 * width + 0.05 * float(np.random.default_rng([7, *map(ord, repr(place))]).normal())


def holes(place: Place) -> str:
    return "diverged" if (place["lr"], place["width"], place["seed"]) == (0.2, 16, 2) else "done"


def slow_tau(results: Results, axis: str, values: list[Any], number: Any) -> tuple[float, int]:
    """The weighted mean of tau-b over pairs of values, from loops over all rows."""
    total = weights = 0.0
    for one, other in combinations(values, 2):
        before, after = [], []
        for a, b in product(results.rows.values(), repeat=2):
            same = all(a.config[name] == b.config[name] for name in a.config if name != axis)
            if same and (a.config[axis], b.config[axis]) == (one, other) and a.status == b.status == "done":
                x, y = number(a), number(b)
                if math.isfinite(x) and math.isfinite(y):
                    before.append(x)
                    after.append(y)
        total += len(before) * float(kendalltau(before, after).statistic)
        weights += len(before)
    return total / weights, int(weights)


def trace(row: Row) -> float:
    return row.readings["hessian_trace"].value


@pytest.mark.parametrize("axis", ["lr", "width", "optimizer", "seed"])
def test_survival_is_that_of_the_slow_oracle(axis: str) -> None:
    def value(place: Place) -> float:
        return NAN if (place["lr"], place["width"], place["seed"]) == (0.1, 8, 0) else drawn(place)

    results = made_study(value, status=holes, error=noisy)
    found = results.fragility(resamples=0)[axis]
    values = [0, 1, 2] if axis == "seed" else AXES[axis]
    for name, number in {"hessian_trace": trace, "gap_error": lambda row: row.gap["error"]}.items():
        expected, runs = slow_tau(results, axis, values, number)
        assert found[name].tau.value == pytest.approx(expected, abs=1e-12)
        assert found[name].runs == runs
        assert not found[name].tau.has_interval
    # The lead is over the same networks: the one without the measure is not in the gap's order either.
    beside, _ = slow_tau(results, axis, values, lambda row: row.gap["error"] + 0.0 * trace(row))
    assert found["hessian_trace"].lead.value == pytest.approx(found["hessian_trace"].tau.value - beside)
    assert found.pairs == math.comb(len(values), 2)


def test_a_measure_that_is_the_gap_where_it_is_known_has_no_lead() -> None:
    axes: dict[str, list[Any]] = {"lr": [0.1, 0.2, 0.4], "width": list(range(8, 20))}
    for setting, most in (("lr", 0.2), ("width", 9)):

        def value(place: Place, setting: str = setting, most: float = most) -> float:
            return noisy(place) if place[setting] <= most else NAN

        results = made_study(value, axes, 2, error=noisy)
        for shift in results.fragility(resamples=100).shifts.values():
            lead = shift["hessian_trace"].lead
            assert lead.value == pytest.approx(0) or math.isnan(lead.value)
            assert shift["hessian_trace"].verdict in (ALIKE, TOO_FEW)


def test_a_measure_of_few_configurations_has_no_interval() -> None:
    axes: dict[str, list[Any]] = {"width": list(range(8, 20))}
    results = made_study(lambda place: place["width"] if place["width"] < 12 else NAN, axes, 3, error=noisy)
    found = results.fragility(axes=["seed"], resamples=100)["seed"]
    assert found["gap_error"].tau.has_interval
    assert found["hessian_trace"].tau.value == 1
    assert not found["hessian_trace"].tau.has_interval
    assert found["hessian_trace"].verdict == TOO_FEW


def test_an_order_that_does_not_change_survives_whole_and_noise_does_not() -> None:
    axes: dict[str, list[Any]] = {"lr": [0.1, 0.2], "width": list(range(8, 22))}
    steady = made_study(lambda place: place["width"] + place["lr"], axes, 2, error=lambda place: place["width"] / 100)
    found = steady.fragility(resamples=100)
    for name in ("lr", "seed"):
        own = found[name]["hessian_trace"]
        assert (own.tau.value, own.tau.low, own.tau.high, own.verdict) == (1, 1, 1, ALIKE)

    def noise(place: Place) -> float:
        return float(np.random.default_rng([3, *map(ord, repr(place))]).normal())

    fragile = made_study(noise, axes, 2, error=lambda place: place["width"] / 100)
    found = fragile.fragility(axes="seed", resamples=100)
    own = found["seed"]["hessian_trace"]
    assert own.tau.high < 0.6
    assert own.verdict == LESS
    assert own.lead.high < 0
    assert "Clearly less than the gap: hessian_trace" in str(found)


def test_intervals_cover_the_agreement_of_many_configurations() -> None:
    draw = np.random.default_rng(0)

    def study_of(count: int) -> Results:
        shared, own = draw.normal(size=count), draw.normal(size=(2, count))
        return made_study(
            lambda p: float(shared[p["width"]] + own[p["seed"], p["width"]]), {"width": [*range(count)]}, 2
        )

    truth = 2 / math.pi * math.asin(0.5)  # of normal numbers with correlation one half
    hits = []
    for _ in range(60):
        tau = study_of(40).fragility(axes="seed", resamples=200)["seed"]["hessian_trace"].tau
        hits.append(tau.low <= truth <= tau.high)
    assert 0.85 <= sum(hits) / len(hits) <= 1


def test_further_readings_of_the_same_networks_are_compared_by_run() -> None:
    results = made_study(drawn, error=noisy)
    values = {key: trace(row) for key, row in results.rows.items()}
    reversed_order = {key: {"hessian_trace": -value} for key, value in values.items()}
    found = results.fragility(axes=[], against={"rescaled": reversed_order})["rescaled"]
    assert found["hessian_trace"].tau.value == -1
    assert found["gap_error"].tau.value == found["norm"].tau.value or math.isnan(found["norm"].tau.value)
    assert found["gap_error"].tau.value == 1
    half = dict(list(reversed_order.items())[::2])
    again = results.fragility(axes=[], against={"rescaled": half})["rescaled"]
    assert again["hessian_trace"].runs == again["gap_error"].runs == len(half)
    none: dict[str, dict[str, float | None]] = {key: {"hessian_trace": None} for key in values}
    with pytest.raises(StudyError, match="got none in against\\['other'\\]"):
        results.fragility(against={"other": none})


def test_some_pairs_of_values_can_be_chosen() -> None:
    results = made_study(drawn, error=noisy)
    found = results.fragility(axes="lr", pairs={"lr": [(0.1, 0.4)]}, resamples=0)["lr"]
    expected, runs = slow_tau(results, "lr", [0.1, 0.4], trace)
    assert (found.pairs, found["hessian_trace"].runs) == (1, runs)
    assert found["hessian_trace"].tau.value == pytest.approx(expected)
    wrongs: list[Any] = [[], [(0.1, 0.1)], [(0.1, 0.2, 0.4)], (0.1, 0.2), 0.1]
    for wrong in wrongs:
        with pytest.raises(OptionError, match="two different values"):
            results.fragility(pairs={"lr": wrong})


def test_another_study_of_the_same_grid_is_matched_by_settings() -> None:
    results = made_study(drawn, error=noisy)
    longer = made_study(lambda place: 2 * drawn(place), error=lambda place: -noisy(place), status=holes)
    found = results.fragility(axes=[], against={"trained on": longer})["trained on"]
    assert found["hessian_trace"].tau.value == 1
    assert found["gap_error"].tau.value == -1
    assert found["hessian_trace"].runs == sum(row.status == "done" for row in longer.rows.values()) < len(results.rows)
    other = made_study(lambda place: place["lr"], {"lr": [0.1, 0.2], "depth": [1, 2]})
    with pytest.raises(StudyError, match="got one with depth and lr"):
        results.fragility(against={"other": other})


def test_too_few_configurations_have_no_interval() -> None:
    results = made_study(lambda place: place["lr"] + 0.1 * place["seed"], {"lr": [0.1, 0.2, 0.4]})
    found = results.fragility()
    assert not found["seed"]["hessian_trace"].tau.has_interval
    assert found["seed"]["hessian_trace"].verdict == TOO_FEW
    assert "Fewer than 5 configurations" in found.warnings[0]
    alone = made_study(lambda place: 1.0, {"lr": [0.1]}, seeds=1).fragility()
    assert len(alone) == 0
    assert "Nothing varies" in str(alone)
    empty = made_study(lambda place: None).fragility()
    assert "No run has finished" in empty.warnings[0]
    assert "no two runs to compare" in str(empty)


def test_bad_options_are_refused() -> None:
    results = made_study(drawn)
    with pytest.raises(UnknownNameError, match="lr"):
        results.fragility(axes=["lrr"])
    with pytest.raises(UnknownNameError, match="Try 'seed'"):
        results.fragility(axes=["sede"])
    for name in ("lr", "seed"):
        with pytest.raises(OptionError, match=f"Try 'against {name}'"):
            results.fragility(against={name: results})
    with pytest.raises(UnknownNameError, match="error"):
        results.fragility(gap="eror")
    with pytest.raises(OptionError, match="leave out"):
        results.fragility(missed="drop")
    with pytest.raises(OptionError, match="resamples=-1"):
        results.fragility(resamples=-1)
    with pytest.raises(UnknownNameError, match="hessian_trace"):
        results.fragility(measures="hessian_trac")
    found = results.fragility(axes="lr", resamples=10)
    with pytest.raises(UnknownNameError, match="lr"):
        found["seed"]
    with pytest.raises(UnknownNameError, match="norm"):
        found["lr"]["nor"]


def test_json_and_frames_hold_every_number() -> None:
    found: Fragility = made_study(drawn, error=noisy).fragility(resamples=50)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    own = found["seed"]["hessian_trace"]
    assert told["shifts"]["seed"]["survivals"]["hessian_trace"]["tau"]["value"] == own.tau.value
    frame = found.to_frame()
    assert len(frame) == len(found) * len(found.quantities)
    line = frame[(frame.change == "seed") & (frame.quantity == "hessian_trace")].iloc[0]
    assert (line.tau, line.lead_low, line.verdict) == (own.tau.value, own.lead.low, own.verdict)


def test_the_plot_has_a_panel_per_change_and_a_row_per_quantity(tmp_path: Path) -> None:
    found = made_study(drawn, error=noisy).fragility(resamples=50)
    figure = found.plot()
    assert [panel.get_title() for panel in figure.axes] == [*AXES, "seed"]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["hessian_trace", "norm", "distance", "train_loss", "gap of the error"]
    figure.savefig(tmp_path / "fragility.png")
    made_study(lambda place: 1.0, {"lr": [0.1]}, seeds=1).fragility().plot().savefig(tmp_path / "nothing.png")


def test_the_command_prints_writes_and_compares_folders(tmp_path: Path) -> None:
    study_cases.study(seeds=3).run(tmp_path / "one", progress=False)

    def run(*words: object) -> Result:
        return CliRunner().invoke(app, ["study", "fragility", *map(str, words)])

    told = run(tmp_path / "one", "--against", tmp_path / "one", "--out", tmp_path / "plot.png", "--keep-missed")
    assert told.exit_code == 0, told.output
    assert (tmp_path / "plot.png").stat().st_size > 1000
    found = json.loads(run(tmp_path / "one", "--against", tmp_path / "one", "--keep-missed", "--json").stdout)
    same = found["shifts"]["one"]["survivals"]
    assert {each["tau"]["value"] for each in same.values() if not isinstance(each["tau"]["value"], dict)} == {1.0}
    assert run(tmp_path / "one", "--axis", "nothing").exit_code == 2
    assert run(tmp_path / "one", "--out", "plot.doc").exit_code == 2


def test_runs_without_a_reading_are_left_out_of_it_alone() -> None:
    results = made_study(drawn, error=noisy)
    first = next(iter(results.rows))
    row = results.rows[first]
    lost = Row(row.key, row.config, row.status, row.outcome, {"hessian_trace": Reading("hessian_trace", NAN)})
    found = Results(results.study, {**results.rows, first: lost}, results.folder, results.places).fragility(resamples=0)
    assert found["seed"]["hessian_trace"].runs == found["seed"]["gap_error"].runs - 2
