"""Networks and data at the edge of what is defined: a flagged number or nan with a reason, never a silent one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat

CURVATURE = (
    "normalized_sharpness",
    "normalized_sharpness_printed",
    "parameterwise_normalized_sharpness",
    "fisher_rao_diagonal",
    "kappa",
    "kappa_trace",
    "rho",
    "relative_flatness",
    "minimum_sharpness",
    "minimum_unit_sharpness",
    "hessian_trace",
)


def mlp(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs)).double()


def examples(count: int = 12) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=noise, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=noise)


def zero_last() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    net = mlp()
    net.get_parameter("2.weight").data.zero_()
    return net, examples()


def zero_first() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    net = mlp()
    net.get_parameter("0.weight").data.zero_()
    net.get_parameter("0.bias").data.zero_()
    return net, examples()


def all_dead() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    net = mlp()
    net.get_parameter("0.bias").data.fill_(-100.0)
    return net, examples()


def perfectly_fitted() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    net = mlp()
    net.get_parameter("2.bias").data.copy_(torch.tensor([2000.0, 0.0, 0.0]))
    x, y = examples()
    return net, (x, torch.zeros_like(y))


def one_output() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    x, y = examples()
    return mlp(1), (x, torch.zeros_like(y))


def one_label() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    x, y = examples()
    return mlp(), (x, torch.ones_like(y))


def one_example() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return mlp(), examples(1)


def no_hidden_layer() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double(), examples()


def no_matrices() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    torch.manual_seed(0)
    return Shift(), examples()


PROBLEMS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]] = {
    each.__name__: each
    for each in (
        zero_last,
        zero_first,
        all_dead,
        perfectly_fitted,
        one_output,
        one_label,
        one_example,
        no_hidden_layer,
        no_matrices,
    )
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_measure_gives_a_number_or_a_reason(name: str) -> None:
    report = saltflat.measure(*PROBLEMS[name](), measures="all")
    for reading in report.values():
        if not math.isfinite(reading.value):
            assert reading.notes, reading.name
            assert any(len(note) > 20 for note in reading.notes)
    assert all(len(reason) > 10 for reason in report.left_out.values())
    assert saltflat.Report.from_dict(report.to_dict()) == report
    str(report)


@pytest.mark.parametrize("name", ["perfectly_fitted", "one_output"])
def test_no_curvature_at_all_is_said_by_every_measure_made_of_it(name: str) -> None:
    report = saltflat.measure(*PROBLEMS[name](), measures=CURVATURE)
    for reading in report.values():
        assert reading.value == 0
        assert any("no curvature" in note for note in reading.notes), reading.name


def test_a_layer_without_curvature_is_named() -> None:
    report = saltflat.measure(*zero_last(), measures=["kappa_trace", "kappa", "minimum_sharpness"])
    assert report["kappa_trace"].layers["0.weight"] == 0
    for name in ("kappa_trace", "kappa"):
        assert any("0.weight" in note for note in report[name].notes)
    assert not report["minimum_sharpness"].details["attained"]
    assert any("no finite factors" in note for note in report["minimum_sharpness"].notes)


def test_a_dead_unit_adds_nothing_and_is_said() -> None:
    net, data = mlp(), examples()
    net.get_parameter("0.bias").data[2] = -100.0
    smaller = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    alive = [0, 1, 3, 4, 5]
    with torch.no_grad():
        for name, value in net.named_parameters():
            rows = value[alive] if name.startswith("0.") else value[:, alive] if name == "2.weight" else value
            smaller.get_parameter(name).copy_(rows)
    whole, part = (saltflat.measure(each, data, measures="normalized_sharpness") for each in (net, smaller))
    assert whole["normalized_sharpness"].value == pytest.approx(part["normalized_sharpness"].value, rel=1e-9)
    assert any("1 of 6 rows" in note for note in whole["normalized_sharpness"].notes)
    assert whole["normalized_sharpness"].details["0.weight"]["attained"] is False


def test_examples_that_occur_twice_are_counted() -> None:
    x, y = examples(8)
    found = saltflat.measure(mlp(), (x.repeat(2, 1), y.repeat(2)), measures="fisher_logdet(subset=16)")
    (reading,) = found.values()
    assert reading.details["floored_eigenvalues"] == 8
    assert any(re.search("8 of 16 eigenvalues", note) for note in reading.notes)


def test_examples_without_gradients_make_the_determinant_zero() -> None:
    (reading,) = saltflat.measure(*perfectly_fitted(), measures="fisher_logdet").values()
    assert reading.value == -math.inf
    assert any("zero" in note for note in reading.notes)


def test_a_network_without_hidden_layers_has_nothing_to_rescale() -> None:
    names = ["minimum_sharpness", "minimum_unit_sharpness"]
    report = saltflat.measure(*no_hidden_layer(), measures=[*names, "hessian_trace"])
    for name in names:
        assert report[name].value == pytest.approx(report["hessian_trace"].value)
        assert any("no rescaling" in note for note in report[name].notes)


def test_negative_curvature_is_no_number_where_a_minimum_needs_none() -> None:
    report = saltflat.measure(
        mlp(), examples(), lambda outputs, targets: -F.cross_entropy(outputs, targets), measures="all"
    )
    sharpnesses = ("normalized_sharpness", "parameterwise_normalized_sharpness")
    for name in (*sharpnesses, "minimum_sharpness", "minimum_unit_sharpness"):
        assert math.isnan(report[name].value)
        assert any("negative" in note for note in report[name].notes)
    assert report["hessian_trace"].value < 0
    assert "pac_bayes_flatness" in report.left_out


def test_a_measure_that_is_asked_for_but_not_defined_is_nan_with_the_reason() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            return out if out.sum() < 1e9 else out / 2

    net = Chosen()
    (reading,) = saltflat.measure(net, examples(), measures="minimum_sharpness").values()
    assert math.isnan(reading.value)
    assert any("out.sum() < 1e9" in note for note in reading.notes)
    assert "minimum_sharpness" in saltflat.measure(net, examples()).left_out


def test_norms_leave_as_much_to_rescale_as_comes_after_them() -> None:
    norm = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)).double()
    report = saltflat.measure(norm, examples(), measures=["minimum_sharpness", "hessian_trace"])
    traces, least = report["hessian_trace"].layers, report["minimum_sharpness"]
    # The norm's factor and shift against the last weight; all else is fixed.
    wanted = 2 * math.sqrt((traces["1.weight"] + traces["1.bias"]) * traces["3.weight"])
    wanted += traces["0.weight"] + traces["0.bias"] + traces["3.bias"]
    assert least.value == pytest.approx(wanted, rel=1e-9)
    assert least.details["attained"]


def test_what_cannot_be_rescaled_counts_as_it_is() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True)
            self.out = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.lstm(x.unsqueeze(1))[0][:, -1])
            return found

    names = ["minimum_sharpness", "minimum_unit_sharpness"]
    report = saltflat.measure(Recurrent().double(), examples(), measures=[*names, "hessian_trace"])
    for name in names:
        assert report[name].value == pytest.approx(report["hessian_trace"].value, rel=1e-9)
        assert any("no rescaling" in note for note in report[name].notes)


def test_weights_that_are_all_zero_bear_noise_of_some_size() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    data = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 0, 1])
    reading = saltflat.measure(model, data, measures="pac_bayes_flatness", certificate=False)["pac_bayes_flatness"]
    assert reading.value > 0 or reading.notes
