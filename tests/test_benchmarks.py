"""The benchmark's numbers mean something only if everybody computes the same thing; times are not tested."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def curvature(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)  # as when the script is run, which puts its folder first
    return import_module("curvature")


@pytest.mark.parametrize("network", ["lenet", "resnet20"])
def test_the_benchmark_finds_saltflat_and_a_plain_vmap_in_agreement(curvature: Any, network: str) -> None:
    task = curvature.problem(network, examples=3)
    # In float64: in float32 an activation within rounding of zero may fall on either side of a ReLU.
    task = curvature.Problem(task.model.double(), task.inputs.double(), task.targets)
    entries = curvature.agreement(task, ["saltflat", "vmap"], "1GiB")
    assert [row.reason for row, _ in entries] == [""] * 5
    differences = {(row.competitor, row.statistic): row.difference for row, _ in entries}
    assert differences.pop(("forward-backward", "")) is None
    assert set(differences) == {(c, s) for c in ("saltflat", "vmap") for s in curvature.STATISTICS}
    assert max(differences.values()) < 1e-10


def test_a_competitor_that_fails_is_listed_with_its_reason(curvature: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> Any:
        raise ModuleNotFoundError("No module named 'peer'")

    monkeypatch.setitem(curvature.COMPETITORS, "backpack", absent)
    entries = curvature.agreement(curvature.problem("lenet", examples=3), ["backpack"], "1GiB")
    failed = [(row.reason, call) for row, call in entries if row.competitor == "backpack"]
    assert failed == [("ModuleNotFoundError: No module named 'peer'", None)] * 2


def test_a_wrong_value_shows_as_a_difference(curvature: Any) -> None:
    task = curvature.problem("lenet", examples=3)
    right = curvature.COMPETITORS["vmap"](task, "curvature_diagonal", curvature.Setting())()
    wrong = dict(right) | {"0.bias": 1.5 * right["0.bias"]}
    assert curvature.networks.difference(right, right) == 0
    assert curvature.networks.difference(wrong, right) == pytest.approx(0.5)
    total = {"": sum(v.sum() for v in right.values())}
    assert curvature.networks.difference(total, right) < 1e-5
