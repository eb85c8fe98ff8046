"""Penalties: the measures' own values, with the gradient that finite differences of those values have."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case, Net, joined, mlp, problem, reals
from torch import Tensor, nn

import saltflat
from saltflat.errors import (
    CoupledExamplesError,
    DataError,
    EmptyDataError,
    ModelError,
    NonFiniteError,
    NotSmoothError,
    OptionError,
    UnknownNameError,
)
from saltflat.measures.registry import MEASURES
from saltflat.training.measure_penalty import Penalty, penalty

NAMES = [entry.name for entry in saltflat.list_measures()]
MUST_WORK = {
    "fisher_trace",
    "fisher_frobenius",
    "fisher_rao_norm",
    "fisher_rao_diagonal",
    "hessian_trace",
    "kappa_trace",
    "kappa_trace_max",
    "parameterwise_normalized_sharpness",
    "relative_flatness",
    "rho",
    "rho_max",
    "squared_norm",
}
# Searches, random draws, eigenvalues, determinants and minima.
MUST_NOT = {
    "adaptive_sharpness",
    "fisher_determinant",
    "fisher_logdet",
    "hessian_top_eigenvalue",
    "input_robustness",
    "kappa",
    "minimum_sharpness",
    "minimum_unit_sharpness",
    "normalized_sharpness",
    "pac_bayes_flatness",
    "sharpness",
}


def accepted(name: str) -> bool:
    try:
        penalty(name)
    except NotSmoothError:
        return False
    return True


WORKING = [*filter(accepted, NAMES), "rho(axis='row')", "relative_flatness(normalize=False)"]
TRIED_ON = (
    "biased_mlp",
    "grouped_dilated_strided_convolution",
    "residual_with_batch_norm",
    "attention_by_hand",
    "attention_of_two_heads_by_torchs_kernel",
    "layer_norm_of_one_and_of_two_dimensions",
    "instance_norm",
    "prelu_of_one_slope_and_of_one_per_unit",
    "weight_norm_parametrization",
    "tied_embedding_and_output",
    "layer_never_called",
    "dict_batches_and_an_output_object",
    "sequence_with_weights_smoothing_and_ignored_positions",
    "squared_error",
    "binary_cross_entropy",
    "custom_loss_with_an_indefinite_output_hessian",
)


def measured(model: nn.Module, batch: Any, loss: Any, name: str, **options: Any) -> float:
    return saltflat.measure(model, [batch], loss, [name], certificate=False, progress=False, **options)[name].value


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def slopes(value: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(value, trained(model), allow_unused=True, materialize_grads=True))


def along(gradient: list[Tensor], direction: list[Tensor]) -> float:
    return sum(float((one * two).sum()) for one, two in zip(gradient, direction, strict=True))


def a_direction(model: nn.Module) -> list[Tensor]:
    noise = torch.Generator().manual_seed(7)
    return [torch.randn(each.shape, generator=noise, dtype=each.dtype) for each in trained(model)]


def finite_difference(
    value: Callable[[nn.Module], float], model: nn.Module, direction: list[Tensor], step: float
) -> float:
    ends = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for each, part in zip(trained(moved), direction, strict=True):
                each.add_(part, alpha=sign * step)
        ends.append(value(moved))
    return (ends[0] - ends[1]) / (2 * step)


def built(name: str) -> tuple[Case, Any]:
    case = CASES[name]()
    return case, joined(case.batches)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", WORKING)
@pytest.mark.parametrize("of", TRIED_ON)
def test_a_penalty_is_the_measure_and_its_gradient_the_measures_slope(of: str, name: str) -> None:
    case, batch = built(of)
    made, want = penalty(name, case.loss), measured(case.model, batch, case.loss, name)
    if math.isnan(want):
        with pytest.raises(NonFiniteError, match=r"Expected a finite value of .*, but got none"):
            made(case.model, batch)
        return
    value = made(case.model, batch)
    assert value.shape == ()
    assert value.item() == pytest.approx(want, rel=1e-10)
    direction = a_direction(case.model)
    rise = finite_difference(lambda moved: measured(moved, batch, case.loss, name), case.model, direction, 1e-6)
    assert along(slopes(value, case.model), direction) == pytest.approx(rise, rel=1e-6, abs=1e-8 * abs(want))


def test_a_layer_that_is_called_on_a_parameter_has_features() -> None:
    case, batch = built("linear_called_on_a_parameter")
    want = measured(case.model, batch, case.loss, "relative_flatness")
    assert penalty("relative_flatness")(case.model, batch).item() == pytest.approx(want, rel=1e-10)


def test_the_cases_above_have_numbers_and_undefined_ones() -> None:
    found = []
    for of in TRIED_ON[:6]:
        case, batch = built(of)
        found.append(math.isnan(measured(case.model, batch, case.loss, "relative_flatness")))
    assert set(found) == {True, False}


@pytest.mark.parametrize("name", NAMES)
def test_every_measure_is_a_penalty_or_is_refused_in_words(name: str) -> None:
    if name in WORKING:
        assert name not in MUST_NOT
        assert penalty(name).name == name
        return
    assert name not in MUST_WORK
    with pytest.raises(NotSmoothError, match=rf"but got '{name}' as a penalty: .*Try one of .*fisher_trace") as caught:
        penalty(name)
    listed = str(caught.value).split("Try one of ")[1].split(", and monitor")[0].split(", ")
    assert set(listed) == {each for each in WORKING if each in NAMES}


@pytest.mark.parametrize(
    ("formula", "reason"),
    [
        (lambda weight: weight.detach().square().sum(), "leaves the graph"),
        (lambda weight: weight.square().sum().item(), "cannot be differentiated"),
        (lambda weight: (weight * weight.detach()).sum(), "differs from a finite difference"),
        (lambda weight: (weight - weight).norm() + (weight - weight).square().sum().sqrt(), "not finite"),
    ],
)
def test_a_new_measure_is_tried_before_it_is_trusted(
    formula: Callable[..., Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("saltflat.training.measure_penalty")
    forgetful = cache(module._find_measure_refusal.__wrapped__)  # verdicts by name, to be forgotten
    monkeypatch.setattr(module, "_find_measure_refusal", forgetful)
    monkeypatch.setitem(MEASURES, "tried", replace(MEASURES["squared_norm"], name="tried", function=formula))
    with pytest.raises(NotSmoothError, match=reason):
        penalty("tried")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("columns", ["exact", "top:1", "sampled:3"])
@pytest.mark.parametrize("of", ["residual_with_batch_norm", "attention_by_hand", "image_of_labels", "squared_error"])
def test_all_examples_together_and_one_at_a_time_are_the_same(of: str, columns: str) -> None:
    case, batch = built(of)
    one, two = (penalty("kappa_trace", case.loss, columns=columns, strategy=way) for way in ("vectorized", "loop"))
    first, second = one(case.model, batch), two(case.model, batch)
    torch.testing.assert_close(first, second, rtol=1e-10, atol=0)
    for here, there in zip(slopes(first, case.model), slopes(second, case.model), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-10 * first.item())


class _Unfortunate(nn.Module):
    """Torch vectorises the second derivative of this operation wrongly, and here nobody takes it apart."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.gain = nn.Linear(3, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_layer_norm(self.lift(x), [4], self.gain, None, 1e-5)[0]


@pytest.mark.parametrize("of", ["wrong", "lstm_in_two_directions"])
def test_what_cannot_be_vectorized_is_taken_one_at_a_time(of: str) -> None:
    torch.manual_seed(0)
    wrong = problem(_Unfortunate(), reals(5, 3), torch.arange(5) % 4)
    case, batch = (wrong, joined(wrong.batches)) if of == "wrong" else built(of)
    truth = slopes(penalty("fisher_trace", strategy="loop")(case.model, batch), case.model)
    found = slopes(penalty("fisher_trace")(case.model, batch), case.model)
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
    try:
        vectorized = slopes(penalty("fisher_trace", strategy="vectorized")(case.model, batch), case.model)
    except Exception:
        return
    # Otherwise there is nothing to be careful about, and the comparison could go.
    assert max(float((a - b).abs().max()) for a, b in zip(vectorized, truth, strict=True)) > 1e-3


@pytest.mark.parametrize("columns", ["sampled:2", "top:1"])
def test_random_columns_are_right_on_average_and_so_is_their_gradient(columns: str) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 5)).double(), (reals(4, 2), torch.arange(4))
    direction = a_direction(model)
    exact = penalty("hessian_trace")(model, batch)
    want = torch.tensor([exact.item(), along(slopes(exact, model), direction)])
    made = penalty("hessian_trace", columns=columns, seed=3)
    rows = []
    for _ in range(200):
        value = made(model, batch)
        rows.append([value.item(), along(slopes(value, model), direction)])
    mean, error = torch.tensor(rows).mean(0), torch.tensor(rows).std(0) / len(rows) ** 0.5
    assert (error > 0).all()
    assert (error < 0.1 * want.abs()).all()
    assert ((mean - want).abs() < 4 * error).all()


def test_random_columns_are_drawn_anew_and_can_be_drawn_again() -> None:
    case, batch = built("biased_mlp")
    made = penalty("hessian_trace", columns="sampled:2", seed=5)
    first, second = made(case.model, batch).item(), made(case.model, batch).item()
    assert first != second
    assert made.seed == 7
    made.seed = 6
    assert made(case.model, batch).item() == second
    again = measured(case.model, batch, case.loss, "hessian_trace", columns="sampled:2", seed=5)
    assert first == pytest.approx(again, rel=1e-10)


@pytest.mark.parametrize("name", ["fisher_trace", "hessian_trace", "relative_flatness"])
def test_training_with_a_penalty_ends_where_it_is_lower(name: str) -> None:
    def end(strength: float) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        x, y = torch.randn(30, 4), torch.arange(30) % 3
        optimizer, flat = torch.optim.SGD(model.parameters(), lr=0.1), penalty(name)
        for _ in range(15):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + strength * flat(model, (x, y))).backward()
            optimizer.step()
        return measured(model, (x, y), "cross_entropy", name)

    assert end(0.1) < 0.8 * end(0.0)


def test_relative_flatness_of_the_last_layer_is_fam() -> None:
    """Adilova et al. (2023): the sum over neurons s, t of <w_s, w_t> tr H_st, by the Hessian written out."""
    torch.manual_seed(0)
    model = Net(lambda net, x: net.fc(net.body(x).tanh()), body=nn.Linear(3, 4), fc=nn.Linear(4, 3)).double()
    x, y = reals(6, 3), torch.arange(6) % 3
    value = penalty("relative_flatness(normalize=False)", layers="fc")(model, (x, y))
    weight, bias = model.get_parameter("fc.weight"), model.get_parameter("fc.bias")
    features = model.get_submodule("body")(x).tanh()
    hessian = torch.autograd.functional.hessian(
        lambda w: F.cross_entropy(features @ w.T + bias, y), weight, create_graph=True
    )
    want = torch.einsum("si,ti,sktk->", weight, weight, hessian)
    torch.testing.assert_close(value, want, rtol=1e-10, atol=0)
    found = slopes(value, model)
    torch.testing.assert_close(found, slopes(want, model), rtol=1e-8, atol=1e-10)
    assert float(found[0].abs().max()) > 1e-3  # it moves the layers before, too


def test_an_ordinary_training_step_with_batch_norm_and_dropout_goes_on_as_before() -> None:
    case, batch = built("residual_with_batch_norm")
    model = nn.Sequential(case.model, nn.Dropout(0.5)).train()
    case.model.get_submodule("norm1").eval()  # modes may differ
    flat = penalty("hessian_trace")
    hooked: list[int] = []
    case.model.get_submodule("conv1").register_forward_hook(lambda *_: hooked.append(1))
    attributes = [dict(vars(module)) for module in model.modules()]
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    value = flat(model, batch)
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), random)
    for key, kept in before.items():
        assert torch.equal(model.state_dict()[key], kept), key
    assert all(each.grad is None for each in model.parameters())
    assert value.item() == pytest.approx(measured(model.eval(), batch, "cross_entropy", "hessian_trace"), rel=1e-10)
    (F.cross_entropy(model.train()(batch[0]), batch[1]) + 0.1 * flat(model, batch)).backward()
    assert all(each.grad is not None and bool(each.grad.any()) for each in model.parameters())
    assert any(not torch.equal(model.state_dict()[key], kept) for key, kept in before.items() if "running" in key)


def test_gradients_add_up_and_frozen_parameters_have_none() -> None:
    case, batch = built("frozen_parameters")
    flat = penalty("fisher_trace")
    for each in trained(case.model):
        each.grad = torch.ones_like(each)
    value = flat(case.model, batch)
    assert all(bool((each.grad == 1).all()) for each in trained(case.model) if each.grad is not None)
    want = [1 + slope for slope in slopes(flat(case.model, batch), case.model)]
    value.backward()
    torch.testing.assert_close([each.grad for each in trained(case.model)], want)
    assert all(each.grad is None for each in case.model.parameters() if not each.requires_grad)


def test_a_frozen_layer_is_measured_by_name_and_moves_the_others() -> None:
    case, batch = built("frozen_parameters")
    value = penalty("kappa_trace", layers="0.weight")(case.model, batch)
    want = measured(case.model, batch, case.loss, "kappa_trace", layers="0.weight")
    assert value.item() == pytest.approx(want, rel=1e-10)
    value.backward()
    assert case.model.get_parameter("0.weight").grad is None
    assert bool(torch.as_tensor(case.model.get_parameter("4.weight").grad).any())


def test_an_exception_leaves_all_as_it_was() -> None:
    class StopsError(Exception):
        pass

    def stop(net: Any, x: Tensor) -> Any:
        net.calls += 1
        if net.calls > 3:
            raise StopsError
        return net.layer(x)

    model: Any = Net(stop, layer=nn.Linear(3, 2), norm=nn.BatchNorm1d(3)).train()
    model.calls = 3
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    made = penalty("hessian_trace", columns="sampled:2")
    with pytest.raises(StopsError):
        made(model, (torch.randn(4, 3), torch.arange(4) % 2))
    assert all(module.training for module in model.modules())
    assert (model.calls, made.seed) == (3, 0)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in kept.items())
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.mha.get_fastpath_enabled()


def test_autocast_and_half_precision_weights_do_not_coarsen_it() -> None:
    torch.manual_seed(0)
    model, batch = mlp(nn.ReLU), (torch.randn(6, 4), torch.arange(6) % 3)
    plain = penalty("hessian_trace")(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        inside = penalty("hessian_trace")(model, batch)
        assert model(batch[0]).dtype == torch.bfloat16
    assert plain.dtype == inside.dtype == torch.float32
    assert torch.equal(plain, inside)
    half = copy.deepcopy(model).to(torch.bfloat16)
    found = penalty("hessian_trace", dtype=torch.float32)(half, batch)
    assert found.item() == pytest.approx(penalty("hessian_trace")(half.float(), batch).item(), rel=1e-5)
    half = half.to(torch.bfloat16)
    penalty("hessian_trace", dtype=torch.float32)(half, batch).backward()
    assert all(each.grad is not None and each.grad.dtype == torch.bfloat16 for each in half.parameters())


def test_without_gradients_it_is_a_number() -> None:
    case, batch = built("biased_mlp")
    with torch.no_grad():
        assert not penalty("hessian_trace")(case.model, batch).requires_grad
    with torch.inference_mode():
        assert not penalty("hessian_trace")(case.model, batch).requires_grad
    assert penalty("hessian_trace")(case.model, batch).requires_grad


def test_a_certain_network_and_dead_units_have_a_finite_gradient() -> None:
    torch.manual_seed(0)
    model, batch = mlp(nn.ReLU).double(), (reals(6, 4), torch.arange(6) % 3)
    with torch.no_grad():
        model.get_parameter("4.bias").copy_(torch.tensor([2000.0, 0.0, -2000.0]))
        model.get_parameter("0.bias")[0] = -1000.0
    for columns in ("exact", "top:1", "sampled:2"):
        for name in ("hessian_trace", "parameterwise_normalized_sharpness", "relative_flatness"):
            value = penalty(name, columns=columns)(model, batch)
            assert all(bool(slope.isfinite().all()) for slope in slopes(value, model)), (name, columns)
    bce = penalty("hessian_trace", "bce_with_logits")(model, (batch[0], torch.ones(6, 3)))
    assert all(bool(slope.isfinite().all()) for slope in slopes(bce, model))


def test_equal_curvatures_of_a_loss_of_ones_own_have_a_gradient() -> None:
    """The Hessian of |z|^4 is 4 |z|^2 + 8 z z': eigenvectors of equal eigenvalues, which have no slope themselves."""

    def quartic(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().flatten(1).sum(1).square().mean()

    case, batch = built("squared_error")
    value, direction = penalty("kappa_trace", quartic)(case.model, batch), a_direction(case.model)
    rise = finite_difference(lambda moved: measured(moved, batch, quartic, "kappa_trace"), case.model, direction, 1e-6)
    assert along(slopes(value, case.model), direction) == pytest.approx(rise, rel=1e-6)


def test_normalised_logits_are_penalised_as_they_are_measured() -> None:
    case, batch = built("tanh_mlp")
    value = penalty("hessian_trace", logits="std")(case.model, batch)
    direction = a_direction(case.model)

    def at(model: nn.Module) -> float:
        return measured(model, batch, "cross_entropy", "hessian_trace", logits="std")

    assert value.item() == pytest.approx(at(case.model), rel=1e-10)
    rise = finite_difference(at, case.model, direction, 1e-6)
    assert along(slopes(value, case.model), direction) == pytest.approx(rise, rel=1e-6)


def test_an_embedding_that_writes_to_its_table_does_not_write_to_the_models() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Flatten(), nn.Linear(6, 3)).double()
    kept = model.get_parameter("0.weight").detach().clone()
    penalty("fisher_trace", strategy="loop")(model, (torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1]))).backward()
    assert torch.equal(model.get_parameter("0.weight"), kept)


@pytest.mark.parametrize(
    ("name", "options", "error", "says"),
    [
        ("hesian_trace", {}, UnknownNameError, "Try 'hessian_trace'"),
        ("rho(axes='row')", {}, UnknownNameError, "Try 'axis'"),
        ("rho(axis='diagonal')", {}, OptionError, "Expected .*'column' or 'row'"),
        ("fisher_trace", {"colums": "exact"}, UnknownNameError, "Try 'columns'"),
        ("fisher_trace", {"columns": "all"}, UnknownNameError, "Try "),
        ("fisher_trace", {"loss": "crossentropy"}, UnknownNameError, "Try 'cross_entropy'"),
        ("fisher_trace", {"strategy": "fast"}, OptionError, "'vectorized'"),
        ("fisher_trace", {"mode": "train"}, OptionError, "'keep'"),
        ("fisher_trace", {"seed": -1}, OptionError, "seed"),
        (["fisher_trace"], {}, OptionError, "Expected the name of a measure"),
    ],
)
def test_a_request_that_means_nothing_is_refused_when_it_is_made(
    name: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        penalty(name, **options)


def test_what_cannot_be_penalised_is_refused_when_it_is_called() -> None:
    made, x, y = penalty("fisher_trace"), torch.randn(4, 3), torch.arange(4) % 2
    with pytest.raises(ModelError, match=r"torch\.nn\.Module"):
        made(lambda x: x, (x, y))  # type: ignore[arg-type]
    model = nn.Linear(3, 2)
    for batch in (x, (x, y, y), (x, y[:3]), {"x": x}):
        with pytest.raises(DataError, match=r"Expected .*, but got .*\. (Try|Check) "):
            made(model, batch)
    with pytest.raises(EmptyDataError, match="all ignored"):
        made(model, (x, torch.full((4,), -100)))
    with pytest.raises(OptionError, match="two or more axes"):
        penalty("kappa_trace", layers="bias")(model, (x, y))
    with pytest.raises(UnknownNameError, match="weight"):
        penalty("kappa_trace", layers="weigth")(model, (x, y))
    with pytest.raises(CoupledExamplesError, match="in a batch"):
        made(Net(lambda net, x: net.layer(x - x.mean(0)), layer=model), (x, y))
    normed = nn.Sequential(model, nn.BatchNorm1d(2)).train()
    with pytest.raises(ModelError, match="couples the examples"):
        penalty("fisher_trace", mode="keep")(normed, (x, y))
    assert penalty("fisher_trace", mode="keep")(normed.eval(), (x, y)).requires_grad
    bag = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 2))
    with pytest.raises(ModelError, match="differentiated twice"):
        made(bag, (torch.randint(5, (4, 2)), y))


def test_it_says_what_it_is() -> None:
    made = penalty(" rho( axis = 'row' )", columns="sampled:2")
    assert isinstance(made, Penalty)
    assert repr(made) == "<Penalty rho(axis='row'), columns sampled:2>"
