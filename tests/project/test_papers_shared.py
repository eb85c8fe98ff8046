"""What the papers' scripts share: correlations with intervals, costs of what is left to run, and pages."""

import doctest
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy.stats import pearsonr, ttest_ind

from saltflat.studies import Study

PAPERS = Path(__file__).parent.parent.parent / "papers"
SHARED = ("costs", "estimates", "index", "pages")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(PAPERS)
    yield {name: importlib.import_module(name) for name in SHARED}
    for name in SHARED:
        sys.modules.pop(name, None)


def make_study(**changes: Any) -> Study:
    usual: dict[str, Any] = {
        "name": "one",
        "data": {"name": "cifar10"},
        "network": "resnet20",
        "axes": {"fisher_penalty": [0.0, 10.0]},
        "seeds": 2,
        "stop": {"epochs": 100},
        "measures": ["hessian_trace"],
        "measure": {"examples": 1000},
    }
    return Study(**{**usual, **changes})


def test_the_examples_are_right(shared: dict[str, ModuleType]) -> None:
    assert sum(doctest.testmod(module).attempted for module in shared.values()) > 0
    assert sum(doctest.testmod(module).failed for module in shared.values()) == 0


def test_costs_are_epochs_at_the_measured_rates(shared: dict[str, ModuleType]) -> None:
    costs = shared["costs"]
    rate = costs.RATES["resnet20"]
    study = make_study()
    plain = 2 * 100 * rate.epoch * (1 + rate.penalty) + 4 * rate.measuring
    # The last batch of an epoch is not full: a fraction of a step.
    assert costs.estimate_seconds(study, study.runs().values()) == pytest.approx(plain, rel=1e-3)
    fewer = make_study(data={"name": "cifar10", "held_out": 5000}, axes={"fisher_penalty": [0.0]})
    found = costs.estimate_seconds(fewer, fewer.runs().values(), again=1000)
    assert found == pytest.approx(2 * (90 * rate.epoch + 2 * rate.measuring), rel=1e-3)


def test_networks_trained_together_share_a_step_down_to_the_shortest(shared: dict[str, ModuleType]) -> None:
    costs = shared["costs"]
    one, many = (
        make_study(network="lenet5", axes={"batch_size": [batch]}, seeds=48, stop={"epochs": 1}) for batch in (4, 128)
    )
    measuring = 48 * costs.RATES["lenet5"].measuring
    assert costs.estimate_seconds(many, many.runs().values()) == pytest.approx(0.98 + measuring, rel=1e-3)
    assert costs.estimate_seconds(one, one.runs().values()) == pytest.approx(12_500 * costs.FLOOR + measuring)


def test_what_has_a_row_is_not_left(shared: dict[str, ModuleType], tmp_path: Path) -> None:
    costs = shared["costs"]
    part = costs.Part("the study", "one", tmp_path, make_study())
    assert "| the study | 4 of 4 | `run.py one` |" in "\n".join(costs.write_left([part]))
    (tmp_path / "rows").mkdir()
    first, *others = part.study.runs()
    (tmp_path / "rows" / f"{first}.json").touch()
    assert "| the study | 3 of 4 |" in "\n".join(costs.write_left([part]))
    for key in others:
        (tmp_path / "rows" / f"{key}.json").touch()
    assert list(costs.write_left([part])) == []


def test_what_was_spent_is_the_sum_of_the_rows(shared: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "one" / "rows").mkdir(parents=True)
    devices = ("cuda:0 (NVIDIA H200)", "cuda:0 (NVIDIA H200)", "cpu")
    for number, device in enumerate(devices):
        row = {"made_with": {"device": device}, "seconds": {"training": 100.0, "measuring": 20.0}}
        (tmp_path / "one" / "rows" / f"{number}.json").write_text(json.dumps(row))
    (line,) = filter(None, shared["costs"].write_spent(tmp_path))
    told = "Rows so far: 2 networks, trained and measured in 4.0 minutes of an NVIDIA H200."
    assert line == f"{told} Not in this time: 1 network last measured on a CPU."


def test_a_further_measurement_needs_weights(
    shared: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make_study(network="mlp", data={"name": "digits", "train_limit": 40}, axes={"width": [2, 3]}, seeds=1,
                       stop={"epochs": 1}, measures=["squared_norm"], settings={"batch_size": 20})  # fmt: skip
    results = study.run(tmp_path, progress=False)
    first, second = results.rows
    assert shared["costs"].list_left(results, {}) == [first, second]
    (tmp_path / "weights" / f"{first}.safetensors").unlink()
    assert shared["costs"].list_left(results, {}) == [second]
    assert "1 networks cannot be measured again" in capsys.readouterr().out
    assert shared["costs"].list_left(results, {first}) == [second]


def test_differences_of_means_are_those_of_welch(shared: dict[str, ModuleType]) -> None:
    draw = np.random.default_rng(0)
    one, other = draw.normal(size=4), 1.5 + 2 * draw.normal(size=7)
    found, chance = shared["estimates"].compare_means(one, other)
    known = ttest_ind(other, one, equal_var=False)
    assert chance == pytest.approx(known.pvalue)
    interval = known.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_correlations_are_those_of_all_networks_and_need_several_units(shared: dict[str, ModuleType]) -> None:
    estimates = shared["estimates"]
    draw = np.random.default_rng(0)
    z = draw.normal(size=60)
    x, y = z + draw.normal(size=60), 2 * z - draw.normal(size=60)
    units = np.arange(60) // 3
    assert estimates.correlate(x, y, units).value == pytest.approx(pearsonr(x, y).statistic)
    residuals = [each - np.polyval(np.polyfit(z, each, 1), z) for each in (x, y)]
    assert estimates.correlate_left(x, y, z, units).value == pytest.approx(pearsonr(*residuals).statistic)
    assert estimates.correlate(x, y, np.arange(60) // 20) is None, "three units are too few"


def test_the_index_sums_what_the_pages_have_left(shared: dict[str, ModuleType]) -> None:
    index = shared["index"]
    rows = [row for paper in index.TITLES for row in index.read_table(paper, shared["costs"].TITLE)[1:]]
    listed = "\n".join(index.write_left())
    assert rows
    assert all(f"{what} | {count} |" in listed for what, count, *_ in rows)
    assert f"about {sum(int(row[-1]) for row in rows)} minutes" in listed
