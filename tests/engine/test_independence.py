"""Models that reorder the examples of a batch and put their outputs back in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from cases import Case
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.engine.independence import IndependenceCheck
from saltflat.errors import CoupledExamplesError

DIAGONAL = "curvature_diagonal"
LONGEST = 6  # the probe runs at most so many examples together
LARGE = 9.0


class Reordering(nn.Module):
    """Sorts longer batches by comparisons of values, uses a layer in that order and in the first one.

    Args:
        only_large: sort batches with a large value only.
    """

    def __init__(self, only_large: bool) -> None:
        super().__init__()
        self.start, self.twice, self.end = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.only_large = only_large

    def forward(self, x: Tensor) -> Tensor:
        values, order = self.start(x).tanh(), torch.eye(len(x)).to(x)
        if len(x) > LONGEST:
            first, place = x[:, 0], torch.arange(len(x))
            earlier = (first[:, None] > first) | ((first[:, None] == first) & (place[:, None] > place))
            is_sorted = (x[:, 1] == LARGE).any() if self.only_large else torch.tensor(True)
            order = torch.where(is_sorted, F.one_hot(earlier.sum(1), len(x)).to(x).T, order)
        values = order.T @ self.twice(order @ values).tanh()
        found: Tensor = self.end(self.twice(values).tanh())
        return found


class Flipping(Reordering):
    """Turns longer batches around, whatever their values are."""

    def forward(self, x: Tensor) -> Tensor:
        turn: Any = (lambda values: values.flip(0)) if len(x) > LONGEST else lambda values: values
        values = turn(self.twice(turn(self.start(x).tanh())).tanh())
        found: Tensor = self.end(self.twice(values).tanh())
        return found


def make_case(size: int, count: int = 40, large: int | None = None) -> Case:
    """Return a network and batches of so many examples; with ``large``, only that batch is sorted."""
    torch.manual_seed(0)
    x, y = torch.randn(count, 3).double(), torch.randint(3, (count,))
    if large is not None:
        x[large * size, 1] = LARGE
    batches: list[Any] = list(zip(x.split(size), y.split(size), strict=True))
    return Case(Reordering(large is not None).double().eval(), batches, "cross_entropy", F.cross_entropy)


def measure_difference(case: Case) -> float:
    """Return the largest difference from the definition, relative to the largest entry of the parameter."""
    found = saltflat.compute_statistics(case.model, case.batches, names=[DIAGONAL], progress=False)[DIAGONAL]
    wanted = oracle.curvature_diagonal(case)
    return max(float((found[name] - each).abs().max() / each.abs().max()) for name, each in wanted.items())


@pytest.mark.parametrize("size", [8, 20, 40])
def test_models_that_reorder_longer_batches_are_swept_one_example_at_a_time(size: int) -> None:
    case = make_case(size)
    assert measure_difference(case) < 1e-10
    found = saltflat.compute_statistics(case.model, case.batches, names=[DIAGONAL], progress=False)
    assert found.settings["strategy"].startswith("single")


def test_so_are_models_that_turn_longer_batches_around_whatever_their_values() -> None:
    case = make_case(20)
    case = replace(case, model=Flipping(False).double().eval())
    assert measure_difference(case) < 1e-10


@pytest.mark.parametrize("sampling", [False, True])  # with sampling, chunks are groups of a few examples
def test_a_meter_is_right_for_them_at_every_call(sampling: bool) -> None:
    case = make_case(40)
    wanted = sum(float(each.sum()) for each in oracle.curvature_diagonal(case).values())
    meter = saltflat.Meter(case.model, measures="hessian_trace", progress=False, sampling=sampling)
    for _ in range(3):
        assert meter.measure(case.batches)["hessian_trace"].value == pytest.approx(wanted, rel=1e-12)


def test_without_a_look_at_the_inputs_of_layers_they_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def look_away(self: IndependenceCheck, *args: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(IndependenceCheck, "watch", look_away)
    case = make_case(40)
    assert measure_difference(case) > 0.1
    assert measure_difference(replace(case, model=Flipping(False).double().eval())) > 0.1


@pytest.mark.parametrize("size", [13, 15, 20, 21])
def test_models_that_turn_longer_batches_around_are_right_at_odd_sizes_too(size: int) -> None:
    case = make_case(size, count=3 * size)
    assert measure_difference(replace(case, model=Flipping(False).double().eval())) < 1e-10


def test_a_sweep_starts_again_if_batches_are_reordered_late() -> None:
    case = make_case(8, count=120, large=11)
    assert measure_difference(case) < 1e-10
    found = saltflat.compute_statistics(case.model, case.batches, names=[DIAGONAL], progress=False)
    assert found.settings["strategy"].startswith("single")
    report = saltflat.measure(case.model, case.batches, progress=False, measures="hessian_trace", sampling=False)
    wanted = sum(float(each.sum()) for each in oracle.curvature_diagonal(case).values())
    assert report["hessian_trace"].value == pytest.approx(wanted, rel=1e-12)
    assert report.examples == 120


class Swapping(nn.Module):
    """Exchanges two examples of longer batches before a layer that is used twice.

    Args:
        places: of the examples.
        large: added to the first entry of the layer's input, the same for all.
    """

    def __init__(self, places: tuple[int, int], large: float) -> None:
        super().__init__()
        self.start, self.twice, self.end = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.places, self.large = places, large

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(len(x))
        if len(x) > LONGEST:
            order[list(self.places)] = order[list(self.places[::-1])]
        values = self.start(x).tanh() + F.one_hot(torch.tensor(0), 6).to(x) * self.large
        values = self.twice(values[order])[order].tanh()
        found: Tensor = self.end(self.twice(values).tanh())
        return found


@pytest.mark.parametrize("places", [(0, 1), (-2, -1), (2, 5)])
@pytest.mark.parametrize(("entries", "large"), [(64, 1.0), (4, 1.0), (64, 2000.0)])
def test_two_examples_that_are_exchanged_are_noticed(
    places: tuple[int, int], entries: int, large: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saltflat.engine.independence.ENTRIES", entries)
    case = make_case(20)
    assert measure_difference(replace(case, model=Swapping(places, large).double().eval())) < 1e-9


class PairCoupling(Reordering):
    """Adds the second example of longer batches to the first one."""

    def forward(self, x: Tensor) -> Tensor:
        values = self.start(x).tanh()
        if len(x) > LONGEST:
            values = torch.cat([values[:1] + values[1:2], values[1:]])
        found: Tensor = self.end(self.twice(values).tanh())
        return found


def test_examples_that_are_coupled_in_one_place_alone_are_refused() -> None:
    case = make_case(20)
    with pytest.raises(CoupledExamplesError, match="treats examples independently"):
        measure_difference(replace(case, model=PairCoupling(False).double().eval()))
