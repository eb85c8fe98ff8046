"""Parameters without a gradient in the first examples: their strategy is compared as soon as an example has one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from cases import Case
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.engine import context, silent_parameters
from saltflat.engine.strategy import Probe

WIDTH, CLASSES, COUNT = 4, 3, 24
DIAGONAL = "curvature_diagonal"


class Gated(nn.Module):
    """A network with a branch that only some examples take, positions first or examples first."""

    def __init__(self, positions_first: bool) -> None:
        super().__init__()
        self.start, self.branch, self.end = nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.positions_first = positions_first

    def forward(self, x: Tensor) -> Tensor:
        each = self.start(x).tanh()
        if self.positions_first:  # rows of different examples alternate
            turned = self.branch(each.transpose(0, 1).reshape(-1, WIDTH))
            taken = turned.view(x.shape[1], -1, WIDTH).transpose(0, 1)
        else:
            taken = self.branch(each)
        found: Tensor = self.end((each + taken.sin() * x[:, :1, :1].relu()).mean(1))
        return found


def make_case(positions_first: bool, size: int, first: int = 12) -> Case:
    """Return a network whose branch is taken from the example ``first`` on."""
    torch.manual_seed(0)
    x = torch.randn(COUNT, 4, 2, dtype=torch.float64)
    x[:, 0, 0] = torch.where(torch.arange(COUNT) < first, -1.0, 1.0)
    batches: list[Any] = list(zip(x.split(size), (torch.arange(COUNT) % CLASSES).split(size), strict=True))
    return Case(Gated(positions_first).double().eval(), batches, "cross_entropy", F.cross_entropy)


def measure_difference(case: Case) -> float:
    """Return the largest difference from the definition, relative to the largest entry of the parameter."""
    found = saltflat.compute_statistics(case.model, case.batches, names=[DIAGONAL], progress=False)[DIAGONAL]
    wanted = oracle.curvature_diagonal(case)
    return max(float((found[name] - each).abs().max() / each.abs().max()) for name, each in wanted.items())


@pytest.mark.parametrize("size", [2, 4, 7, COUNT])
@pytest.mark.parametrize("first", [9, 12, COUNT - 1])
def test_a_branch_that_later_examples_take_is_swept_by_its_definition(size: int, first: int) -> None:
    assert measure_difference(make_case(True, size, first)) < 1e-10


def test_without_a_later_comparison_it_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "verify_silent_parameters", lambda problem, batch, earlier, limit: earlier)
    assert measure_difference(make_case(True, 4)) > 0.1


def record_probes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Probe, Probe]]:
    """Return a list of the probes before and after each comparison that is going to be made."""
    kept: list[tuple[Probe, Probe]] = []
    verify = silent_parameters.verify_silent_parameters

    def record(problem: Any, batch: Any, earlier: Probe, limit: int) -> Probe:
        kept.append((earlier, verify(problem, batch, earlier, limit)))
        return kept[-1][1]

    monkeypatch.setattr(context, "verify_silent_parameters", record)
    return kept


def test_a_strategy_that_is_right_stays_and_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = record_probes(monkeypatch)
    assert measure_difference(make_case(False, 4)) < 1e-10
    assert [before.silent for before, _ in kept] == [("branch.weight", "branch.bias")] * 4 + [()] * 2
    assert all(after.strategy == "together" and after.is_lasting for _, after in kept)


def test_a_strategy_that_is_wrong_is_replaced_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = record_probes(monkeypatch)
    case = make_case(True, 4)
    meter = saltflat.Meter(case.model, measures=["hessian_trace"], certificate=False, sampling=False, progress=False)
    reports = [meter.measure(case.batches) for _ in range(2)]
    assert [after.strategy == "together" for _, after in kept] == 2 * [True, True, True, False, False, False]
    assert reports[0]["hessian_trace"].value == reports[1]["hessian_trace"].value
    assert meter.num_preparations == 2  # what held for the first examples alone is not kept


def test_a_parameter_that_no_example_moves_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = record_probes(monkeypatch)
    case = make_case(True, 4, COUNT)
    found = saltflat.compute_statistics(case.model, case.batches, names=[DIAGONAL], progress=False)[DIAGONAL]
    assert not found["branch.weight"].any()
    assert all(after.strategy == "together" and after.silent for _, after in kept)


class Prototypes(nn.Module):
    """A network with distances, whose backward pass is right for one column at a time, in all examples but some."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(2, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.centers = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        each = self.start(x).tanh()
        found: Tensor = self.end((each + torch.cdist(each, self.centers) * (x[:, :1, :1] > 0)).mean(1))
        return found


@pytest.mark.parametrize("size", [1, 2, 7])
def test_single_examples_are_compared_where_they_have_gradients(size: int) -> None:
    case = make_case(True, size, first=1)
    assert measure_difference(replace(case, model=Prototypes().double())) < 1e-10
