"""The certificate against the dense Hessian and Gauss-Newton blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import oracle
import pytest
import torch
from cases import CASES
from torch import Tensor, nn

import saltflat
from saltflat import errors
from saltflat.engine.certificate import draw_direction

PIECEWISE_LINEAR = [
    "biased_mlp",
    "in_place_relu",
    "max_and_average_pooling",
    "residual_with_batch_norm",
    "convolution_3d",
]
SMOOTH = ["gelu_mlp", "tanh_mlp", "attention_by_hand"]


@pytest.mark.parametrize("name", PIECEWISE_LINEAR)
def test_relu_networks_are_certified_to_rounding(name: str) -> None:
    case = CASES[name]()
    certificate = saltflat.certify(case.model, case.batches, loss=case.loss)
    assert certificate.holds
    assert certificate.gap < 1e-10


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_networks_are_not(name: str) -> None:
    case = CASES[name]()
    certificate = saltflat.certify(case.model, case.batches, loss=case.loss)
    assert not certificate.holds
    assert certificate.gap > 1e-3
    assert "NOT" in str(certificate)


@pytest.mark.parametrize("name", ["gelu_mlp", "residual_with_batch_norm", "class_token_and_position_parameters"])
def test_both_curvatures_are_those_of_the_dense_matrices(name: str) -> None:
    case = CASES[name]()
    # All examples as one batch, so that the certificate sees them all.
    pairs = [cast(tuple[Tensor, Tensor], batch) for batch in case.batches]
    inputs, targets = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    certificate = saltflat.certify(case.model, [(inputs, targets)], loss=case.loss, examples=100)
    for parameter, agreement in certificate.items():
        v = draw_direction(dict(case.model.named_parameters())[parameter].shape, 0).reshape(-1)
        for found, block in (
            (agreement.hessian, oracle.hessian_block(case, parameter)),
            (agreement.gauss_newton, oracle.gauss_newton_block(case, parameter)),
        ):
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), v @ block @ v, rtol=1e-9, atol=1e-13)


def test_the_examples_beyond_the_first_few_are_not_touched() -> None:
    net = nn.Linear(2, 3)
    certificate = saltflat.certify(net, (torch.randn(20, 2), torch.randint(3, (20,))), examples=5)
    assert certificate.examples == 5


@pytest.mark.parametrize("name", ["gelu_mlp", "residual_with_batch_norm"])
def test_a_report_has_the_certificate_of_its_first_two_examples_in_float64(name: str) -> None:
    case = CASES[name]()
    alone = saltflat.certify(case.model.float(), case.batches, loss=case.loss, seed=3, examples=2)
    report = saltflat.measure(case.model, case.batches, case.loss, ["hessian_trace"], seed=3, dtype=torch.float32)
    assert report.certificate is not None
    assert report.certificate["examples"] == 2
    assert report.certificate["gaps"].keys() == alone.keys()
    for parameter, gap in report.certificate["gaps"].items():
        assert gap == pytest.approx(alone[parameter].gap, rel=1e-9, abs=1e-12)


class Bent(nn.Module):
    """Squares what is positive; the last of five inputs decides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        scores: Tensor = self.outer(h + 1e-2 * (x[:, :1].clamp(min=0) * h) ** 2)
        return scores


def test_a_report_looks_at_more_examples_where_two_show_no_gap() -> None:
    torch.manual_seed(0)
    inputs = -torch.rand(8, 2)
    model, labels = Bent(), torch.arange(8) % 3
    for last, holds in ((-1.0, True), (1.0, False)):
        inputs[-1, 0] = last
        report = saltflat.measure(model, (inputs, labels), measures=["hessian_trace"])
        assert report.certificate is not None
        assert report.certificate["holds"] is holds
        assert saltflat.certify(model, (inputs, labels)).holds is holds


@pytest.mark.parametrize("measures", [["squared_norm"], ["sharpness", "fisher_trace"]])
def test_a_report_of_measures_without_curvature_has_no_certificate(measures: list[str]) -> None:
    report = saltflat.measure(nn.Linear(2, 3), (torch.randn(4, 2), torch.arange(4) % 3), measures=measures)
    assert report.certificate is None


class CountedBatches:
    """Batches that count how often they are read."""

    def __init__(self) -> None:
        self.batch = torch.randn(10, 2), torch.randint(3, (10,))
        self.readings = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.readings += 1
        yield self.batch


def test_the_certificate_of_a_report_reads_data_that_is_already_checked_once() -> None:
    readings = []
    for certificate in (False, True):
        data = CountedBatches()
        saltflat.measure(nn.Linear(2, 3), data, measures=["hessian_trace"], certificate=certificate)
        readings.append(data.readings)
    assert readings[1] == readings[0] + 1


class Appending(nn.Module):
    """Its outputs depend on how many passes a list has seen since it was last restored."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)
        self.passes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.passes.append(1)
        scaled: Tensor = self.inner(x) * len(self.passes)
        return scaled


def test_the_certificate_of_a_report_starts_from_the_attributes_as_they_were() -> None:
    torch.manual_seed(0)
    model, data = Appending().double(), (torch.randn(6, 2).double(), torch.arange(6) % 3)
    alone = saltflat.certify(model, data)
    report = saltflat.measure(model, data, measures=["hessian_trace"])
    assert report.certificate is not None
    assert report.certificate["gaps"] == {parameter: each.gap for parameter, each in alone.items()}
    assert model.passes == []


def test_differentiation_forward_is_checked_where_there_are_gradients() -> None:
    # The two results of LSTMCell depend on each other, which is wrong forward and noticed: not by gradients of zero.
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.end = nn.LSTMCell(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            cell = x.new_zeros(len(x), 4)
            hidden, cell = self.cell(x, (cell, cell))
            found: Tensor = self.end((hidden * (x[:, :1] > 0)).tanh())
            return found

    torch.manual_seed(0)
    net = Late().double()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 3
    x[:, 0] = torch.linspace(-1, 1, 8)
    found = saltflat.certify(net, (x, y))
    alone = saltflat.certify(net, (x.flip(0), y.flip(0)))
    for name, each in alone.items():
        assert found[name].hessian == pytest.approx(each.hessian, rel=1e-9)


def test_a_model_without_second_derivatives_is_refused_in_words() -> None:
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prototypes, self.end = nn.Parameter(torch.randn(4, 3)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.end(torch.cdist(x, self.prototypes))
            return found

    data = torch.randn(4, 3), torch.arange(4) % 3
    with pytest.raises(errors.ModelError, match="Expected second derivatives of the model"):
        saltflat.certify(Distances(), data)
    assert saltflat.certify(Distances(), data, layers=["end"]).holds


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, KeyError])
def test_a_model_that_runs_in_float32_alone_has_a_report_that_says_why_it_has_no_certificate(
    kind: type[Exception],
) -> None:
    class Narrow(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if input.dtype != torch.float32:
                raise kind(f"expected a Float32 matrix, got {input.dtype}")
            return super().forward(input)

    torch.manual_seed(0)
    model, data = Narrow(3, 2), (torch.randn(6, 3), torch.arange(6) % 2)
    report = saltflat.measure(model, data, measures="hessian_trace")
    plain = saltflat.measure(nn.Linear(3, 2).requires_grad_(), data, measures="hessian_trace")
    assert report.certificate is not None
    assert report.certificate["holds"] is None
    assert f"does not run in it: {kind.__name__}: " in report.certificate["failed"]
    assert "expected a Float32 matrix" in report.certificate["failed"]
    assert "Certificate: could not be computed: needs float64" in " ".join(str(report).split())
    assert "certificates" in str(saltflat.compare({"narrow": report, "plain": plain}))
    assert list(saltflat.plan(model, data, measures="hessian_trace").measures) == ["hessian_trace"]
    if kind is RuntimeError:
        with pytest.raises(errors.ModelError, match="It was run in float64: check that it can be"):
            saltflat.certify(model, data)
