"""Processes that share a measurement, in 1, 2 and 4 processes of gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from process_cases import TIMEOUT
from process_support import make_mlp
from torch import nn

import saltflat
from saltflat.engine.data import Batch
from saltflat.engine.processes import SINGLE_PROCESS, Processes
from saltflat.errors import ModelError, OptionError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forks")
NETWORKS = ("mlp", "resnet", "gpt")
CALLS = ("searches", *(f"{what}{name}" for name in NETWORKS for what in ("", "all of ", "statistics of ")))
ODD = ("fewer examples", "one example", "unknown length", "shuffled", "limit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each process wrote what it saw."""
    folder = tmp_path_factory.mktemp("processes")
    tests = Path(__file__).parent.parent
    finished = subprocess.run(
        [sys.executable, str(tests / "process_cases.py"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    *_, codes = finished.stdout.splitlines() or [""]
    # The fourth was killed. All others have left by themselves.
    assert codes == "[0, 0, 0, -9, 0, 0]", finished.stdout + finished.stderr
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """What each of four processes saw."""
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("call", CALLS)
def test_several_processes_give_the_report_of_one(seen: list[dict[str, Any]], call: str, count: int) -> None:
    for rank in range(count):
        where, difference = seen[rank][f"{call}, {count}"]
        assert difference <= 1e-12, where


def test_the_reports_that_are_compared_have_many_measures(seen: list[dict[str, Any]]) -> None:
    for name in NETWORKS:
        assert seen[0][f"measures of {name}"] >= 15
        assert seen[0][f"measures of all of {name}"] >= 27  # tokens have no gradients


@pytest.mark.parametrize("data", ODD)
def test_data_that_does_not_divide_evenly_gives_the_report_of_one_process(
    seen: list[dict[str, Any]], data: str
) -> None:
    for each in seen:
        where, difference = each[data]
        assert difference <= 1e-12, where


def test_a_meter_and_an_audit_are_those_of_one_process(seen: list[dict[str, Any]]) -> None:
    for each in seen:
        assert each["meter"][1] <= 1e-12, each["meter"][0]
        assert each["audit"] <= 1e-12


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("sampler", "DataError: Expected the same data in every process, but got other examples in process 1"),
        ("last example", "DataError: Expected the same data in every process, but got other examples in process 2"),
        ("batches", "DataError: Expected the same data in every process, but got other examples in process 3"),
        ("weights", "ModelError: Expected the same weights in every process, but got others for '2.bias' in process 3"),
        ("modules", "ModelError: Expected the same model in every process, but got another module '1' in process 1"),
        ("function", "ModelError: Expected the same function in every process, but got other outputs, or another loss"),
        ("loss", "ModelError: Expected the same function in every process, but got other outputs, or another loss"),
        ("logits", "ModelError: Expected the same function in every process, but got other outputs, or another loss"),
        ("seed", "OptionError: Expected the same arguments in every process, but got another seed in process 1"),
        ("measures", "OptionError: Expected the same arguments in every process, but got another measures"),
        ("unknown", "UnknownNameError: Expected one of"),
        ("statistics", "OptionError: Expected a positive size, but got memory=0"),
        ("no draws", "OptionError: Expected a whole number from 1 to 10000000, but got draws=0"),
        ("spread", "OptionError: Expected the same arguments in every process, but got another spread in process 1"),
        ("group", "OptionError: Expected a group of torch.distributed that this process belongs to, but got"),
    ],
)
def test_what_differs_between_processes_is_refused_by_all(seen: list[dict[str, Any]], mistake: str, said: str) -> None:
    for each in seen:
        assert each[mistake].startswith(said)
        assert each[f"{mistake} in seconds"] < TIMEOUT / 2


def test_an_error_of_one_process_is_raised_by_all(seen: list[dict[str, Any]]) -> None:
    own, others = "ValueError: too large for this model", "but got ValueError: too large for this model in process 2."
    assert [each["raises"] == own if rank == 2 else others in each["raises"] for rank, each in enumerate(seen)] == [
        True
    ] * 4
    assert seen[0]["callback"] == "KeyError: 'no such row'"
    assert all("KeyError: 'no such row' in process 0" in each["callback"] for each in seen[1:])
    assert seen[0]["stopped"] == "RuntimeError: stopped by the user"
    assert all("RuntimeError: stopped by the user in process 0" in each["stopped"] for each in seen[1:])
    for rank, each in enumerate(seen):
        kind = "RecursionError" if rank == 2 else "RuntimeError"
        assert each["statistic"].startswith(f"ModelError: Expected a model that allows it, but got {kind}: out of")


def test_a_statistic_that_fails_in_one_process_is_left_out_by_all(seen: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(seen):
        kind = "RecursionError" if rank == 2 else "RuntimeError"
        assert each["left out"]["input_robustness"] == f"failed: {kind}: out of memory here"


def test_a_sharded_model_has_the_report_of_a_whole_one_and_is_restored(seen: list[dict[str, Any]]) -> None:
    for each in seen:
        assert each["sharded"][1] <= 1e-12, each["sharded"][0]
        assert each["statistics of sharded"][1] <= 1e-12, each["statistics of sharded"][0]
        assert each["sharded by itself"].startswith(
            "ModelError: Expected whole weights, but got '0.weight', of which 4 processes have a part each. Try"
        )
        assert each["restored"]


def test_processes_measure_together_again_after_errors(seen: list[dict[str, Any]]) -> None:
    assert all(each["afterwards"][1] <= 1e-12 for each in seen)


def test_a_killed_process_gives_all_others_one_error_in_time(seen: list[dict[str, Any]]) -> None:
    for each in seen[:3]:
        assert each["killed"].startswith("ProcessError: Expected 4 processes that measure together, but got a closed")
        assert each["killed in seconds"] < TIMEOUT / 2
    assert "killed" not in seen[3]


def test_the_first_process_prints_and_writes_the_report_of_the_command_line(folder: Path) -> None:
    said, nothing = ((folder / f"program{rank}.0").read_text(encoding="utf-8") for rank in (0, 1))
    report = saltflat.Report.load(folder / "report.json")
    alone = saltflat.measure(*make_mlp(), measures=["hessian_trace", "rho"], progress=False)
    for name, reading in alone.readings.items():
        assert report[name].value == pytest.approx(reading.value, rel=1e-12)
        assert report[name].sampling_stderr == pytest.approx(reading.sampling_stderr, rel=1e-12)
    assert "hessian_trace" in said
    assert said.endswith("report.json.\nexit 0\n")
    assert nothing == "exit 0\n"


def test_the_command_line_refuses_other_examples_in_a_process(folder: Path) -> None:
    for rank in (0, 1):
        said = (folder / f"program{rank}.1").read_text(encoding="utf-8")
        assert said.startswith("Expected the same data in every process, but got other examples in process 1")
        assert said.endswith("exit 2\n")


def test_every_example_belongs_to_one_process() -> None:
    inputs = torch.arange(11.0)[:, None]
    batches = [Batch((inputs[a:b],), {}, inputs[a:b], a, b - a) for a, b in ((0, 3), (3, 4), (4, 11))]
    for count in (2, 3, 4, 16):
        for total in (11, None, 9, 20):  # known, unknown, and wrong
            taken: list[float] = []
            for rank in range(count):
                processes = Processes()
                processes.rank, processes.count = rank, count
                parts = [processes.select_own(batch, total) for batch in batches]
                taken += [x for part in parts if part is not None for x in part.targets.flatten().tolist()]
                places = [n for part in parts if part is not None for n in part.example_indices.tolist()]
                assert places == [x for part in parts if part is not None for x in part.targets.flatten().tolist()]
            assert sorted(taken) == inputs.flatten().tolist()


def test_without_a_group_a_process_measures_alone() -> None:
    net, data = nn.Linear(2, 2), (torch.randn(4, 2), torch.tensor([0, 1, 1, 0]))
    group = torch.distributed.group.WORLD
    assert group is None  # outside of torchrun
    report = saltflat.measure(net, data, measures=["hessian_trace"], process_group=group)
    assert report.examples == 4
    assert SINGLE_PROCESS.gather("anything", 1) == [1]
    with pytest.raises(OptionError, match=r"but got process_group of type bool. Try torch.distributed.group.WORLD"):
        saltflat.measure(net, data, process_group=True)  # type: ignore[arg-type]


def test_other_ways_of_sharding_are_refused_by_name() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """Has the name of torch's own, which needs a group of processes to be made."""

    data = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    with pytest.raises(ModelError, match=r"fully_shard, but got a model, sharded by FullyShardedDataParallel. Try"):
        saltflat.measure(FullyShardedDataParallel(nn.Linear(2, 2)), data)
    cut = nn.Linear(2, 2)
    vars(cut.weight)["ds_id"] = 0  # as DeepSpeed marks what it has cut
    with pytest.raises(ModelError, match=r"but got 'weight', sharded by DeepSpeed. Try measuring a model that was not"):
        saltflat.compute_statistics(cut, data)
