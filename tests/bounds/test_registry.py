"""The registry of bounds, what computing them asks of a model, and what it leaves behind."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from bound_oracle import make_data, make_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import saltflat
from saltflat.bounds import BOUNDS, Bound, BoundResult, Bounds, compute_bounds
from saltflat.bounds.distributions import Gaussian, ScaledGaussian
from saltflat.bounds.evidence import Evidence
from saltflat.bounds.pac_bayes import bound_linear
from saltflat.bounds.registry import bound
from saltflat.errors import (
    EmptyDataError,
    LabelError,
    ModelError,
    NotDefinedError,
    OptionError,
    SaltflatError,
    UnknownNameError,
)

ALL = ["information", "multiplicative", "parameterwise", "row_column", "row_column_estimated", "isotropic"]
QUICK = ["parameterwise"]


@pytest.fixture
def added() -> Iterator[None]:
    """A bound that is registered for one test."""

    @bound("union", reference="tsuzuku2020normalized", formula="a union over all classifiers")
    def compute_union(evidence: Evidence, *, bits: float = 1.0) -> BoundResult:
        kl = bits * evidence.size
        if kl > 1e9:
            raise NotDefinedError("needs fewer parameters")
        value = bound_linear(evidence.risk, kl, evidence.examples, evidence.delta, strength=1.0)
        return BoundResult(value, {"risk": evidence.risk, "kl": kl}, evidence.list_assumptions())

    yield
    del BOUNDS["union"]


def test_a_bound_costs_one_function(added: None) -> None:
    net, data = make_net(), make_data()
    found = compute_bounds(net, data, bounds={"union": {"bits": 2}, "isotropic": {}})
    assert list(found) == ["union", "isotropic"]
    union = found["union"]
    assert isinstance(union, Bound)
    assert union.terms["kl"] == 2 * 21
    assert union.settings["bits"] == 2
    assert (union.reference, union.formula) == ("tsuzuku2020normalized", "a union over all classifiers")
    with pytest.raises(UnknownNameError, match="option of union 'bit'"):
        compute_bounds(net, data, bounds={"union": {"bit": 2}})
    with pytest.raises(ModelError, match="bound 'union', which needs fewer parameters"):
        compute_bounds(net, data, bounds={"union": {"bits": 1e12}})


def test_all_bounds_print_as_one_table_and_are_saved_one_by_one(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # where no name is folded
    found = compute_bounds(make_net(), make_data())
    assert isinstance(found, Bounds)
    assert sorted(found) == sorted(ALL)
    text = str(found)
    assert all(name in text for name in ALL)
    assert "heuristic" in text
    assert "valid" in text
    assert "<pre>" in found._repr_html_()
    for name, each in found.items():
        assert each.name == name
        assert Bound.load(each.save(tmp_path / "one.json")).to_dict() == found.to_dict()[name]
        assert "largest term" in str(each)


def test_what_cannot_be_computed_is_left_out_of_all_but_not_of_some(added: None) -> None:
    data = make_data(examples=1)
    found = compute_bounds(make_net(), data)
    assert found.left_out == {"information": "needs at least 2 examples"}
    assert "information: left out, needs at least 2 examples" in str(found)
    with pytest.raises(ModelError, match="needs at least 2 examples"):
        compute_bounds(make_net(), data, bounds="information")


def test_the_same_call_gives_the_same_numbers_whatever_the_batches() -> None:
    net, data = make_net(), make_data(examples=50)
    loader = DataLoader(TensorDataset(*data), batch_size=7)
    for name in ALL:
        one, two = (compute_bounds(net, each, bounds=name)[name] for each in (data, loader))
        assert one.value == pytest.approx(two.value, rel=1e-9), name
    seeds = [compute_bounds(net, data, bounds=QUICK, seed=seed)["parameterwise"].value for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.parametrize("of", ["error", "clipped_cross_entropy"])
def test_a_single_output_has_two_classes(of: Any) -> None:
    x, y = make_data(classes=2)
    net = make_net(widths=(2, 3, 1))
    found = compute_bounds(net, (x, y[:, None].double()), "bce_with_logits", bounds=QUICK, of=of)["parameterwise"]
    assert found.chance == pytest.approx(0.5 if of == "error" else 0.0602060)
    assert found.is_valid


def snapshot(model: nn.Module) -> tuple[dict[str, Tensor], list[bool], list[Any], list[set[str]]]:
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [module.training for module in model.modules()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [set(vars(module)) for module in model.modules()],
    )


def check_same(before: Any, after: Any) -> None:
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1] == after[1]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(before[2], after[2], strict=True))
    assert before[3] == after[3]


def make_norm_net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 3)).double()


def test_the_model_is_left_as_it_was() -> None:
    net, data = make_norm_net(), make_data()
    net(data[0]).sum().backward()
    before, numbers = snapshot(net), torch.get_rng_state()
    compute_bounds(net, data)
    check_same(before, snapshot(net))
    assert torch.equal(numbers, torch.get_rng_state())


def get_assumption(found: Bound, start: str) -> Any:
    return next(each for each in found.assumptions if each.text.startswith(start))


def test_running_statistics_violate_an_assumption_until_they_are_folded() -> None:
    net, data = make_norm_net(), make_data()
    found = compute_bounds(net, data, bounds=QUICK)["parameterwise"]
    violated = get_assumption(found, "The network has no numbers from the data")
    assert violated.met is False
    assert violated.evidence.startswith("There are running statistics in 1. Try saltflat.fold")
    assert found.kind == "valid"
    assert not found.is_valid
    folded = compute_bounds(saltflat.fold(net, data[0][:2]), data, bounds=QUICK)["parameterwise"]
    assert get_assumption(folded, "The network has no numbers from the data").met is True
    assert folded.is_valid
    assert folded.terms["risk of the network"] == found.terms["risk of the network"]


def test_frozen_weights_and_buffers_are_named_but_cannot_be_checked() -> None:
    net, data = make_net(), make_data()
    net[0].bias.requires_grad_(False)
    net.register_buffer("mask", torch.ones(3, dtype=torch.float64))
    found = compute_bounds(net, data, bounds=QUICK)["parameterwise"]
    doubt = get_assumption(found, "The network has no numbers from the data")
    assert doubt.met is None
    assert "0.bias, mask" in doubt.evidence
    assert found.is_valid


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_plain_attributes_with_numbers_are_named_but_cannot_be_checked(kind: str) -> None:
    net, data = make_net(), make_data()
    held = torch.ones(3, dtype=torch.float64)
    vars(net[0])["center"] = held if kind == "tensor" else held.numpy()
    net[2].own = net[2].weight.data  # another tensor than the parameter, although it has its numbers
    doubt = get_assumption(compute_bounds(net, data, bounds=QUICK)["parameterwise"], "The network has no numbers")
    assert doubt.met is None
    assert doubt.evidence == "0.center, 2.own are not drawn; they must not come from these examples."


def test_another_precision_and_fewer_examples_can_be_asked_for() -> None:
    net, data = make_net(), make_data(examples=30)
    single = deepcopy(net).float()
    found = compute_bounds(single, (data[0].float(), data[1]), bounds=QUICK, dtype=torch.float64, limit=20)
    assert found["parameterwise"].examples == 20
    assert found["parameterwise"].settings["dtype"] == "float64"
    assert single[0].weight.dtype == torch.float32
    exact = compute_bounds(single.double(), (data[0].float().double(), data[1]), bounds=QUICK, limit=20)
    assert found["parameterwise"].value == exact["parameterwise"].value


@pytest.mark.parametrize("columns", ["exact", "top:1", "sampled:4"])
def test_bounds_hold_with_any_curvature(columns: str) -> None:
    found = compute_bounds(make_net(), make_data(), bounds=QUICK, columns=columns)["parameterwise"]
    assert found.is_valid
    t = found.terms
    assert t["risk of the network"] + t["curvature"] + t["remainder"] == pytest.approx(t["risk of random networks"])


def test_normal_and_scaled_weights_agree_without_spread() -> None:
    net, data = make_net(), make_data(examples=400)
    seen = {}

    @bound("both", reference="tsuzuku2020normalized", formula="none")
    def compute_both(evidence: Evidence) -> BoundResult:
        mean = dict(evidence.weights)
        wide = {name: 0.3 * torch.ones_like(value) for name, value in mean.items()}
        for kind in (Gaussian(mean, wide), ScaledGaussian(mean, wide, 0.0), ScaledGaussian(mean, wide, 3.0)):
            key = type(kind).__name__, getattr(kind, "spread", 0.0)
            seen[key] = evidence.estimate(kind, 0.01).mean
        return BoundResult(1.0, {}, ())

    try:
        compute_bounds(net, data, bounds="both", draws=50)
    finally:
        del BOUNDS["both"]
    # 20,000 draws each, with a standard deviation of at most 1/2
    assert abs(seen["Gaussian", 0.0] - seen["ScaledGaussian", 0.0]) < 4 * 0.5 * (2 / 20_000) ** 0.5
    assert seen["ScaledGaussian", 3.0] != seen["ScaledGaussian", 0.0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"delta": 0.0}, OptionError, "delta=0.0"),
        ({"delta": 1.0}, OptionError, "delta=1.0"),
        ({"delta": float("nan")}, OptionError, "delta=nan"),
        ({"bounds": "isotropical"}, UnknownNameError, "Try 'isotropic'"),
        ({"bounds": []}, OptionError, "at least one name"),
        ({"bounds": 3}, OptionError, "bounds=3"),
        ({"bounds": {"isotropic": 8}}, OptionError, "Expected options by name"),
        ({"bounds": {"isotropic": {"constant": 9.0}}}, OptionError, "constant=9.0"),
        ({"bounds": {"isotropic": {"constant": 0}}}, OptionError, "constant=0"),
        ({"bounds": {"row_column_estimated": {"curvature_draws": 1}}}, OptionError, "draws=1"),
        ({"of": "mse"}, OptionError, "'mse'"),
        ({"loss": "mse"}, OptionError, "Try loss='cross_entropy'"),
        ({"draws": 0}, OptionError, "draws=0"),
        ({"mode": "keep"}, ModelError, "mode='keep'"),
        ({"mode": "train"}, OptionError, "mode='train'"),
        ({"seed": -1}, OptionError, "seed=-1"),
        ({"limit": 0}, SaltflatError, "limit=0"),
        ({"columns": "some"}, SaltflatError, "'some'"),
        ({"data": (torch.zeros(0, 2).double(), torch.zeros(0, dtype=torch.long))}, EmptyDataError, "empty"),
        ({"data": (torch.zeros(4, 2).double(), torch.full((4,), 3))}, LabelError, "labels from 0 to 2"),
    ],
)
def test_bad_input_gives_one_error_and_leaves_the_model_alone(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    net = make_norm_net()
    before = snapshot(net)
    data, loss = options.pop("data", make_data()), options.pop("loss", "cross_entropy")
    with pytest.raises(error, match=message) as caught:
        compute_bounds(net, data, loss, **options)
    assert str(caught.value).startswith("Expected ")
    check_same(before, snapshot(net))


def test_an_unknown_reference_fails_at_import() -> None:
    with pytest.raises(UnknownNameError, match="reference 'nobody2020'"):
        bound(reference="nobody2020", formula="")
