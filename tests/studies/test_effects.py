"""Effects of settings: pairs, intervals and verdicts against loops written from the definition, and what they print."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import study_cases
from made_studies import AXES, Place, drawn, made_study
from scipy.stats import t as student
from typer.testing import CliRunner, Result

from saltflat.cli import app
from saltflat.errors import OptionError, StudyError, UnknownNameError
from saltflat.studies import Results
from saltflat.studies.effects import Effects, compute_effects
from saltflat.studies.effects.compute import estimate_mean
from saltflat.studies.row import Row

NAN = math.nan


def slow_pairs(results: Results, axis: str, base: Any, value: Any, of: Callable[[Row], float]) -> list[Any]:
    """Return (other settings, seed, reference, value) for every two runs that differ in the axis alone, by loops."""
    found = []
    for one, other in product(results.rows.values(), repeat=2):
        same = all(one.config[name] == other.config[name] for name in one.config if name != axis)
        if same and one.config[axis] == base and other.config[axis] == value and one.status == other.status == "done":
            others = tuple((name, each) for name, each in one.config.items() if name not in (axis, "seed"))
            first, second = of(one), of(other)
            if math.isfinite(first) and math.isfinite(second):
                found.append((others, one.config["seed"], first, second))
    return found


def slow_interval(numbers: list[tuple[Any, Any, float]]) -> tuple[float, float, float]:
    """Return mean and interval from (configuration, seed, number), by the formula of the documentation, in loops."""
    middle, n = mean(number for _, _, number in numbers), len(numbers)
    terms = []
    for place in (0, 1):
        groups = {each[place] for each in numbers}
        total = 0.0
        for group in groups:
            total += sum(each[2] - middle for each in numbers if each[place] == group) ** 2
        if len(groups) > 1:
            terms.append((len(groups), len(groups) / (len(groups) - 1) * total / n**2))
    squared = sum(term for _, term in terms)
    freedom = squared**2 / sum(term**2 / (count - 1) for count, term in terms)
    width = student.ppf(0.975, freedom) * math.sqrt(squared)
    return middle, middle - width, middle + width


def trace(row: Row) -> float:
    return row.readings["hessian_trace"].value


def test_effects_are_those_of_the_slow_oracle() -> None:
    holes = {("missed", 0.4, 8, 1), ("diverged", 0.2, 16, 2), ("nan", 0.2, 8, 0)}

    def status(place: Place) -> str:
        known = (place["lr"], place["width"], place["seed"])
        return next((end for end, *where in holes if tuple(where) == known and end != "nan"), "done")

    def value(place: Place) -> float:
        lost = ("nan", place["lr"], place["width"], place["seed"]) in holes
        return NAN if lost else drawn(place)

    results = made_study(value, status=status)
    effects = results.effects()
    for axis, values in AXES.items():
        for other in values[1:]:
            change = effects[axis][other].changes["hessian_trace"]
            pairs = slow_pairs(results, axis, values[0], other, trace)
            assert change.pairs == len(pairs)
            ratios = slow_interval([(c, s, math.log(b / a)) for c, s, a, b in pairs])
            assert change.ratio is not None
            found = (change.ratio.value, change.ratio.low, change.ratio.high)
            assert found == pytest.approx([math.exp(each) for each in ratios], rel=1e-10)
            plain = (change.difference.value, change.difference.low, change.difference.high)
            assert plain == pytest.approx(slow_interval([(c, s, b - a) for c, s, a, b in pairs]), rel=1e-10)


def test_means_are_over_all_runs_with_a_value() -> None:
    results = made_study(drawn, error=lambda place: place["lr"] / 2)
    effects = results.effects()
    for other in AXES["lr"]:
        own = [row for row in results.rows.values() if row.config["lr"] == other]
        found = effects["lr"][other].means
        assert found["hessian_trace"].runs == len(own) == 12
        geometric = math.exp(mean(math.log(trace(row)) for row in own))
        assert found["hessian_trace"].estimate.value == pytest.approx(geometric)
        assert found["test_error"].estimate.value == pytest.approx(other / 2)


def test_every_setting_is_compared_with_the_first_value_or_a_chosen_one() -> None:
    results = made_study(drawn)
    first, last = results.effects(), results.effects(reference={"lr": 0.4, "optimizer": "adam"})
    assert list(first) == list(AXES)
    assert first["lr"].base.value == 0.1
    assert not first["lr"].base.changes
    assert last["lr"].base.value == 0.4
    assert last["optimizer"].base.label == "adam"
    there, back = (effects["lr"][value].changes["hessian_trace"] for effects, value in ((first, 0.4), (last, 0.1)))
    assert there.ratio is not None
    assert back.ratio is not None
    assert there.ratio.value == pytest.approx(1 / back.ratio.value)
    assert there.p == pytest.approx(back.p)


def test_an_effect_is_found_and_called_in_its_direction() -> None:
    up = made_study(lambda place: math.exp(20 * place["lr"]) * drawn(place, 0.1))
    down = made_study(lambda place: math.exp(-20 * place["lr"]) * drawn(place, 0.1))
    assert up.effects()["lr"][0.4].changes["hessian_trace"].verdict == "higher"
    assert down.effects()["lr"][0.4].changes["hessian_trace"].verdict == "lower"
    assert down.effects()["lr"][0.4].changes["hessian_trace"].is_sure


def test_a_setting_that_does_nothing_is_hardly_ever_called() -> None:
    """Each study has one comparison of the optimizer, which the numbers do not depend on."""
    called = 0
    for seed in range(200):
        results = made_study(lambda place, seed=seed: drawn(place, 0.5, seed))  # type: ignore[misc]
        change = results.effects(axes=["optimizer"])["optimizer"]["adam"].changes["hessian_trace"]
        called += change.verdict != "no clear difference"
    assert called <= 16  # 10 are expected at 5 %, and more than 16 with probability 0.02


@pytest.mark.parametrize(("configurations", "seeds"), [(9, 3), (4, 4), (3, 10), (12, 1), (1, 6), (20, 4)])
@pytest.mark.parametrize(("by_configuration", "by_seed"), [(0.0, 0.0), (1.0, 0.0), (0.0, 0.5), (1.0, 0.5)])
def test_intervals_cover_the_mean_as_often_as_they_say(
    configurations: int, seeds: int, by_configuration: float, by_seed: float
) -> None:
    """The effect differs between configurations and between seeds; a factor with one level has none to differ by."""
    draw = np.random.default_rng(configurations * 100 + seeds)
    codes, kinds = np.divmod(np.arange(configurations * seeds), seeds)
    times, covered = 1500, 0
    for _ in range(times):
        numbers = 2.0 + draw.normal(size=len(codes))
        if configurations > 1:
            numbers += by_configuration * draw.normal(size=configurations)[codes]
        if seeds > 1:
            numbers += by_seed * draw.normal(size=seeds)[kinds]
        found, p = estimate_mean(numbers - 2.0, codes, kinds)
        covered += found.low <= 0 <= found.high
        assert (p >= 0.05) == (found.low <= 0 <= found.high)
    # Three standard errors of 1500 draws are 1.7 %.
    assert covered / times > 0.95 - 0.022


def test_intervals_of_pairs_taken_as_independent_would_be_too_narrow() -> None:
    """What clustering is for: with an effect of its own in every configuration, seeds add little information."""
    draw = np.random.default_rng(0)
    codes, kinds = np.divmod(np.arange(4 * 10), 10)
    naive = clustered = 0
    for _ in range(600):
        numbers = draw.normal(size=40) + draw.normal(size=4)[codes]
        width = student.ppf(0.975, 39) * numbers.std(ddof=1) / math.sqrt(40)
        naive += abs(numbers.mean()) <= width
        found, _ = estimate_mean(numbers, codes, kinds)
        clustered += found.low <= 0 <= found.high
    assert naive / 600 < 0.7
    assert clustered / 600 > 0.9


def test_no_interval_without_three_configurations_or_seeds() -> None:
    few = made_study(drawn, {"lr": [0.1, 0.2], "width": [8, 16]}, seeds=2).effects()
    change = few["lr"][0.2].changes["hessian_trace"]
    assert (change.verdict, change.pairs) == ("too few pairs", 4)
    assert math.isnan(change.p)
    assert not change.estimate.has_interval
    enough = made_study(drawn, {"lr": [0.1, 0.2], "width": [8, 16]}, seeds=3).effects()
    assert enough["lr"][0.2].changes["hessian_trace"].verdict != "too few pairs"


def test_equal_differences_are_judged_by_their_sign() -> None:
    """All pairs differ by the same: three may do so by chance, six hardly."""

    def change_of(seeds: int) -> Any:
        effects = made_study(lambda place: 1.0, {"lr": [0.1, 0.2]}, seeds, error=lambda place: place["lr"]).effects()
        return effects["lr"][0.2].changes

    assert change_of(5)["test_error"].verdict == "too few pairs"
    assert change_of(6)["test_error"].verdict == "higher"
    assert change_of(6)["test_error"].p == pytest.approx(2 * 0.5**6)
    assert change_of(6)["hessian_trace"].verdict == "no clear difference"  # the same in all runs


def test_sums_that_cancel_do_not_make_an_interval_narrow() -> None:
    numbers = 0.1 + np.array([[1.0, -1.0, 0.0], [-1.0, 0.0, 1.0], [0.0, 1.0, -1.0]]).reshape(-1)
    codes, kinds = np.divmod(np.arange(9), 3)
    found, _ = estimate_mean(numbers, codes, kinds)
    assert found.high - found.low == pytest.approx(2 * student.ppf(0.975, 2) * numbers.std(ddof=1) / 3)


def test_measures_and_losses_have_ratios_unless_one_is_not_positive() -> None:
    plain = made_study(drawn).effects()
    assert {name for name, each in plain.quantities.items() if each.has_ratio} == {
        "hessian_trace",
        "train_loss",
        "test_loss",
    }
    signed = made_study(lambda place: drawn(place) - 0.5).effects()
    assert not signed.quantities["hessian_trace"].has_ratio
    assert signed["lr"][0.2].changes["hessian_trace"].ratio is None


def test_tiny_differences_of_measures_are_not_rounded_away() -> None:
    effects = made_study(lambda place: 1e-20 * drawn(place) - 5e-21, {"lr": [0.1, 0.2], "width": [8, 12, 16]}).effects()
    assert effects["lr"][0.2].changes["hessian_trace"].difference.value > 0


def test_settings_that_vary_together_are_one_axis() -> None:
    axes: dict[str, list[Any]] = {"batch_size, lr": [[10, 0.1], [20, 0.2]], "width": [8, 16, 32]}
    results = made_study(drawn, axes)
    effects = results.effects()
    assert list(effects) == ["batch_size, lr", "width"]
    assert effects["lr"] is effects["batch_size"] is effects["batch_size, lr"]
    value = effects["lr"][[20, 0.2]]
    assert (value.label, value.pairs) == ("20, 0.2", 9)
    assert results.effects(axes=["lr"], reference={"batch_size": [20, 0.2]})["lr"].reference == 1


def test_runs_left_out_are_counted_and_told() -> None:
    def status(place: Place) -> str:
        return "missed" if place["lr"] == 0.4 and place["width"] == 8 else "done"

    results = made_study(
        lambda place: None if place["seed"] == 2 and place["lr"] == 0.2 else drawn(place), status=status
    )
    effects = results.effects()
    assert effects.left_out == {"missing": 4, "missed": 6}
    assert effects.runs == 26
    lost = effects["lr"][0.4]
    assert (lost.planned, lost.runs, lost.pairs, lost.left_out) == (12, 6, 6, {"missed": 6})
    assert "6 of 12 with 0.4 (6 missed)" in effects.warnings[0]
    assert "missed='keep'" in effects.warnings[0]
    kept = results.effects(missed="keep")
    assert kept["lr"][0.4].pairs == 12
    assert kept.left_out == {"missing": 4}
    assert not any("missed" in warning for warning in kept.warnings)
    # Each value of the optimizer has lost the same.
    assert not any(warning.startswith("optimizer") for warning in effects.warnings)


def test_runs_without_a_number_are_left_out_of_its_comparison_alone_and_counted() -> None:
    effects = made_study(lambda place: NAN if place["lr"] == 0.2 and place["seed"] == 0 else drawn(place)).effects()
    change = effects["lr"][0.2].changes
    assert (change["hessian_trace"].pairs, change["hessian_trace"].unknown) == (8, 4)
    assert (change["test_loss"].pairs, change["test_loss"].unknown) == (12, 0)
    assert effects["lr"][0.2].means["hessian_trace"].unknown == 4
    assert "unknown or not finite in 4 runs" in str(effects)


def test_p_values_are_corrected_for_all_comparisons() -> None:
    effects = made_study(drawn).effects()
    changes = [each for axis in effects.axes.values() for value in axis.others for each in value.changes.values()]
    known = sorted(each.p for each in changes if not math.isnan(each.p))
    assert f"{len(known)} comparisons" in effects.notes[1]
    running = 0.0
    for each in sorted((each for each in changes if not math.isnan(each.p)), key=lambda one: one.p):
        running = max(running, min(1.0, each.p * sum(other >= each.p for other in known)))
        assert each.p_holm == pytest.approx(running, abs=1e-12)


def test_nothing_varies_one_axis_one_seed_and_none_as_a_value() -> None:
    empty = made_study(drawn_without_width, {}, seeds=4).effects()
    assert len(empty) == 0
    assert "No setting varies" in str(empty)
    with pytest.raises(OptionError, match="without any"):
        empty.plot()
    single = made_study(drawn_without_width, {"lr": [0.1]}, seeds=4).effects()
    assert single.notes == ("A single value, so nothing to compare: lr.",)
    one = made_study(drawn_without_width, {"train_size": [None, 50, 100]}, seeds=1).effects()
    assert one["train_size"].base.label == "none"
    assert {change.verdict for change in one["train_size"][50].changes.values()} == {"too few pairs"}
    assert "too few pairs to say" in str(one)
    assert "one seed" in one.warnings[0]
    assert one["train_size"]["none"] is one["train_size"].base


@pytest.mark.parametrize(
    ("widths", "seeds", "told"), [(2, 4, ["two configurations besides lr"]), (3, 2, ["two seeds"]), (3, 3, [])]
)
def test_two_configurations_or_seeds_are_warned_of(widths: int, seeds: int, told: list[str]) -> None:
    found = made_study(drawn, {"lr": [0.1, 0.2, 0.4], "width": [8, 16, 32][:widths]}, seeds=seeds).effects()
    assert len(found.warnings) == len(told)
    assert all(text in warning for text, warning in zip(told, found.warnings, strict=True))


def drawn_without_width(place: Place) -> float:
    return drawn({"lr": 0.1, "width": 8, **place})


def test_unknown_names_suggest_the_closest() -> None:
    results = made_study(drawn)
    with pytest.raises(UnknownNameError, match="Try 'optimizer'"):
        results.effects(axes=["optimiser"])
    with pytest.raises(UnknownNameError, match="Try 'hessian_trace'"):
        results.effects(measures=["hesian_trace"])
    with pytest.raises(UnknownNameError, match=r"value of optimizer 'adamw'\. Try 'adam'"):
        results.effects(reference={"optimizer": "adamw"})
    with pytest.raises(UnknownNameError, match="Try 'width'"):
        results.effects(reference={"widht": 8})
    with pytest.raises(UnknownNameError, match="Try 'lr'"):
        results.effects()["lrr"]
    with pytest.raises(OptionError, match="'leave out' or 'keep'"):
        results.effects(missed="yes")


def test_json_and_frames_hold_everything() -> None:
    results = made_study(lambda place: NAN if place["seed"] == 0 and place["lr"] == 0.2 else drawn(place))
    effects = compute_effects(results)
    text = json.dumps(effects.to_dict(), allow_nan=False)
    assert Effects.from_dict(json.loads(text)) == effects
    frame = effects.to_frame()
    assert len(frame) == sum(map(len, AXES.values())) * len(effects.quantities)
    line = frame[(frame["axis"] == "lr") & (frame["value"] == "0.4") & (frame["quantity"] == "hessian_trace")].iloc[0]
    assert line["ratio_low"] == effects["lr"][0.4].changes["hessian_trace"].estimate.low
    damages: list[dict[str, Any]] = [
        {"schema": "saltflat.effects/2"},
        {"runs": "3"},
        {"axes": {"lr": {}}},
        {"notes": 3},
    ]
    for damage in damages:
        with pytest.raises(StudyError, match=r"Effects\.to_dict"):
            Effects.from_dict({**effects.to_dict(), **damage})


def test_the_text_answers_the_question_and_shows_every_quantity() -> None:
    effects = made_study(lambda place: drawn(place, 0.05) ** -3, error=lambda place: drawn(place) / 100).effects()
    text = " ".join(str(effects).split())
    assert "lr 0.4: flatter according to hessian_trace" in text
    assert "test error is higher" in text
    for name in effects.quantities:
        assert name in text
    counted = Counter(line.split()[0] for line in str(effects).splitlines() if line.startswith("gap_"))
    assert set(counted) == {"gap_loss", "gap_error"}


def test_a_real_study_is_compared_from_its_folder(tmp_path: Path) -> None:
    study_cases.study(seeds=3).run(tmp_path / "runs", progress=False)
    effects = Results.load(tmp_path / "runs").effects()
    assert list(effects) == ["lr", "width"]
    assert effects["lr"][0.2].pairs == 6
    assert effects["lr"][0.2].changes["squared_norm"].verdict in ("lower", "higher", "no clear difference")


def get_lines(panel: Any) -> list[tuple[list[float], list[float]]]:
    return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in panel.lines]


def test_the_plot_has_every_ratio_and_difference_with_its_interval() -> None:
    effects = made_study(drawn, error=lambda place: place["lr"] * (1 + place["seed"]) / 9).effects()
    measures, losses, errors = effects.plot("lr").axes
    assert measures.get_xscale() == "log"
    for value in effects["lr"].others:
        ratio = value.changes["hessian_trace"].ratio
        assert ratio is not None
        assert [ratio.low, ratio.high] in [across for across, _ in get_lines(measures)]
        assert [ratio.value] in [across for across, _ in get_lines(measures)]
        loss = value.changes["test_loss"].ratio
        assert loss is not None
        assert [loss.low, loss.high] in [across for across, _ in get_lines(measures)]
        assert [value.changes["gap_loss"].difference.value] in [across for across, _ in get_lines(losses)]
        assert [value.changes["gap_error"].difference.value] in [across for across, _ in get_lines(errors)]
    assert "hessian_trace" in measures.get_yticklabels()[0].get_text()
    with pytest.raises(OptionError, match=r"got 3 axes \(lr, width and optimizer\)\. Try axis='lr'"):
        effects.plot()
    with pytest.raises(UnknownNameError, match="Try 'width'"):
        effects.plot("widht")


def test_a_mark_is_filled_if_its_interval_does_not_contain_the_reference() -> None:
    effects = made_study(lambda place: math.exp(9 * place["lr"]) * drawn(place, 0.1)).effects()
    assert [value.changes["hessian_trace"].verdict for value in effects["lr"].others] == ["higher", "higher"]
    assert effects["optimizer"]["adam"].changes["hessian_trace"].verdict == "no clear difference"
    for axis in ("lr", "optimizer"):
        panel = effects.plot(axis).axes[0]
        marks = [line for line in panel.lines if line.get_marker() not in ("None", "", None)]
        verdicts = [
            value.changes[name].verdict
            for name in ("hessian_trace", "train_loss", "test_loss")
            for value in effects[axis].others
        ]
        assert len(marks) == len(verdicts)
        for mark, verdict in zip(marks, verdicts, strict=True):
            assert (mark.get_markerfacecolor() == mark.get_color()) == (verdict in ("lower", "higher"))


@pytest.mark.parametrize("seeds", [1, 4])
@pytest.mark.parametrize("count", [2, 12])
def test_plots_of_few_and_many_values_are_drawn(seeds: int, count: int, tmp_path: Path) -> None:
    axes = {"train_size": [None, *range(10, 10 * count, 10)]}
    effects = made_study(drawn_without_width, axes, seeds).effects()
    effects.plot().savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_the_page_of_a_study_has_a_section_per_setting(tmp_path: Path) -> None:
    def status(place: Place) -> str:
        return "missed" if place["lr"] == 0.4 and place["width"] == 8 else "done"

    results = made_study(lambda place: drawn(place, 0.05) ** -3, status=status)
    page = results.write_html(tmp_path / "page.html").read_text(encoding="utf-8")
    section = page.partition('<section id="effects">')[2].partition("</section>")[0]
    assert "Which setting is flatter?" in section
    assert section.count("<img ") == len(AXES)
    assert "lr 0.4: flatter according to hessian_trace" in section
    assert "6 of 12 with 0.4 (6 missed)" in section
    kept = results.write_html(tmp_path / "page.html", missed="keep").read_text(encoding="utf-8")
    assert "6 of 12 with 0.4 (6 missed)" not in kept
    nothing = made_study(drawn_without_width, {}, seeds=4).write_html(tmp_path / "empty.html")
    assert 'id="effects"' not in nothing.read_text(encoding="utf-8")


def test_the_command_prints_writes_and_refuses(tmp_path: Path) -> None:
    study_cases.study(seeds=3).run(tmp_path / "runs", progress=False)

    def run(*words: object) -> Result:
        words = ("study", "effects", tmp_path / "runs", *words)
        return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200", "NO_COLOR": "1"})

    assert "lr, compared with 0.1" in run().stdout
    one = run("--axis", "lr", "--reference", "lr=0.2", "--measure", "squared_norm", "--out", tmp_path / "lr.png")
    assert one.exit_code == 0, one.output
    assert "lr, compared with 0.2" in one.stdout
    assert "hessian_trace" not in one.stdout
    assert (tmp_path / "lr.png").stat().st_size > 0
    assert Effects.from_dict(json.loads(run("--json").stdout)) == Results.load(tmp_path / "runs").effects()
    refusals: dict[tuple[object, ...], str] = {
        ("--axis", "widht"): "Try 'width'",
        ("--measure", "squared"): "Try 'squared_norm'",
        ("--reference", "lr"): "Expected NAME=VALUE",
        ("--reference", "lr=7"): "value of lr '7'",
        ("--out", tmp_path / "all.png"): "Try --axis 'lr'",
        ("--out", tmp_path / "lr.txt"): "--out",
    }
    for words, told in refusals.items():
        refused = run(*words)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert told in refused.stderr


def test_a_run_that_is_missing_is_told(tmp_path: Path) -> None:
    results = study_cases.study(seeds=3).run(tmp_path / "runs", progress=False)
    path = tmp_path / "runs" / "rows" / f"{next(iter(results.rows))}.json"
    path.unlink()
    found = CliRunner().invoke(app, ["study", "effects", str(tmp_path / "runs")], env={"COLUMNS": "200"})
    assert "1 of 6 with 0.1 (1 missing)" in found.stdout
    assert "keep" not in found.stdout


def test_a_study_whose_runs_all_missed_says_what_to_do(tmp_path: Path) -> None:
    study_cases.study(stop={"epochs": 1, "loss": 1e-6}, seeds=3).run(tmp_path / "runs", progress=False)

    def run(*words: str) -> str:
        words = ("study", "effects", str(tmp_path / "runs"), *words)
        return CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout

    assert "No run has finished. Try --keep-missed" in run()
    assert "No run has finished" not in run("--keep-missed")
    assert "6 pairs" in run("--keep-missed")


JOINT: dict[str, list[Any]] = {"sam, asam": [[0, 0], [0.1, 0], [0, 0.5]], "width": [8, 16, 32]}


def drawn_by_method(place: Place) -> float:
    return drawn({"lr": 0.1 + place["sam"] + 2 * place["asam"], **place})


def test_settings_that_vary_together_are_named_where_they_differ() -> None:
    effects = made_study(drawn_by_method, JOINT, seeds=4).effects()
    axis = effects["sam"]
    assert [axis.describe(each) for each in axis.values] == ["sam 0, asam 0", "sam 0.1", "asam 0.5"]
    text = str(effects)
    assert "sam, asam, compared with sam 0, asam 0" in text
    assert "* asam 0.5: " in text
    assert effects["asam"]["0.1,0"] is axis.values[1]
    with pytest.raises(UnknownNameError, match=r"\(0, 0\)"):
        axis["0.1, 0.1"]


def test_scores_tell_the_values_of_a_joint_axis_apart() -> None:
    """Whichever setting comes first: three methods are three values, though two of them have the same radius of SAM."""
    results = made_study(drawn_by_method, JOINT, seeds=4, error=lambda place: 0.1 + drawn_by_method(place) / 100)
    swapped: dict[str, list[Any]] = {"asam, sam": [[0, 0], [0, 0.1], [0.5, 0]], "width": [8, 16, 32]}
    other = made_study(
        lambda place: drawn_by_method(_in_order(place)),
        swapped,
        seeds=4,
        error=lambda place: 0.1 + drawn_by_method(_in_order(place)) / 100,
    )
    assert results.study.axis_names == ["sam, asam", "width"]
    one, two = (each.scores(resamples=0)["hessian_trace"] for each in (results, other))
    assert one.granulated == two.granulated
    assert one.granulated_by_axis["sam, asam"] == two.granulated_by_axis["asam, sam"]


def _in_order(place: Place) -> Place:
    return {name: place[name] for name in ("sam", "asam", "width", "seed")}


def test_differences_that_cancel_are_zero() -> None:
    found, p = estimate_mean(np.array([0.3, -0.1, -0.2]), np.arange(3), np.zeros(3, dtype=np.int64))
    assert found.value == 0.0
    assert p == pytest.approx(1.0)


def test_tiny_readings_are_compared() -> None:
    tiny, plain = made_study(lambda place: 1e-200 * drawn(place)).effects(), made_study(drawn).effects()
    for axis, values in AXES.items():
        one, other = (each[axis][values[1]].changes["hessian_trace"] for each in (tiny, plain))
        assert one.ratio is not None
        assert other.ratio is not None
        assert one.ratio.low == pytest.approx(other.ratio.low)
        assert one.difference.high == pytest.approx(1e-200 * other.difference.high)


def test_values_are_found_by_any_of_their_texts_and_bad_references_refused() -> None:
    results = made_study(drawn, {"lr": [0.12345671, 0.12345674], "width": [20, 8, 16]})
    assert results.effects(reference={"width": "8.0"})["width"].reference == 1
    assert results.effects(reference={"lr": "0.12345674"})["lr"].reference == 1
    assert list(results.effects(axes="width", measures="hessian_trace")) == ["width"]
    with pytest.raises(UnknownNameError, match="value of width"):
        results.effects(axes=["lr"], reference={"width": 99})
    with pytest.raises(OptionError, match="value by setting"):
        results.effects(reference="lr")


def test_seeds_without_runs_are_warned_of() -> None:
    found = made_study(lambda place: drawn(place) if place["seed"] == 0 else None).effects()
    assert any("one seed" in warning for warning in found.warnings)
