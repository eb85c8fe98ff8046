"""Every measure against its dense oracle, and the identities and inequalities between measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import measure_oracle as dense
import pytest
import torch
from cases import CASES, Case
from chains import CHAINS, weights_and_biases
from oracle import trainable
from torch import Tensor, nn

import saltflat
from saltflat.measures.registry import MEASURES

GRID, STRENGTH = (-1.0, 0.5), 0.7
SUBSET, DRAWS = 3, 4
OTHERS = (
    "grouped_dilated_strided_convolution",
    "convolution_1d",
    "transposed_convolution_2d",
    "convolution_called_on_two_sizes",
    "residual_with_batch_norm",
    "multihead_attention",
    "lstm_in_two_directions",
    "tied_embedding_and_output",
    "embedding_with_padding_index",
    "linear_called_twice",
    "leaf_module_of_a_user",
    "unequal_batches",
    "sequence_with_ignored_positions",
    "class_weights",
    "squared_error",
    "binary_cross_entropy",
    "custom_convex_loss",
    "gelu_mlp",
)
ALL = {**CHAINS, **{name: CASES[name] for name in OTHERS}}

# How a measure is asked for, what it has to be, and how closely: 1e-10 for closed forms, 1e-8 for what is searched.
Oracle = Callable[[Case], dense.Oracle]
EXPECTED: dict[str, tuple[Oracle, float]] = {
    "normalized_sharpness": (dense.normalized_sharpness, 1e-8),
    "normalized_sharpness_arxiv": (dense.normalized_sharpness_arxiv, 1e-8),
    "normalized_sharpness_printed": (dense.normalized_sharpness_printed, 1e-8),
    "normalized_sharpness_printed(side='columns')": (lambda c: dense.normalized_sharpness_printed(c, "columns"), 1e-8),
    "parameterwise_normalized_sharpness": (dense.parameterwise_normalized_sharpness, 1e-10),
    f"regularized_normalized_sharpness(grid={GRID}, strength={STRENGTH})": (
        lambda c: dense.regularized_normalized_sharpness(c, GRID, STRENGTH),
        1e-8,
    ),
    "fisher_rao_diagonal": (dense.fisher_rao_diagonal, 1e-10),
    "kappa": (dense.kappa, 1e-8),
    "kappa_max": (dense.kappa_max, 1e-8),
    "kappa_trace": (dense.kappa_trace, 1e-10),
    "kappa_trace_max": (dense.kappa_trace_max, 1e-10),
    "rho": (dense.rho, 1e-10),
    "rho(axis='row')": (lambda c: dense.rho(c, "row"), 1e-10),
    "rho_max": (dense.rho_max, 1e-10),
    "rho_max(axis='row')": (lambda c: dense.rho_max(c, "row"), 1e-10),
    "relative_flatness": (dense.relative_flatness, 1e-10),
    "relative_flatness(normalize=False)": (lambda c: dense.relative_flatness(c, normalize=False), 1e-10),
    f"fisher_logdet(draws={DRAWS}, subset={SUBSET})": (lambda c: dense.fisher_logdet(c, subsets(c)), 1e-8),
    f"fisher_spectral_radius(draws={DRAWS}, subset={SUBSET})": (
        lambda c: dense.fisher_spectral_radius(c, subsets(c)),
        1e-10,
    ),
    "fisher_determinant(jitter=0.01)": (lambda c: dense.fisher_determinant(c, 0.01), 1e-10),
    "fisher_trace": (dense.fisher_trace, 1e-10),
    "fisher_frobenius": (dense.fisher_frobenius, 1e-10),
    "fisher_rao_norm": (dense.fisher_rao_norm, 1e-10),
    "input_robustness": (dense.input_robustness, 1e-10),
    "path_norm": (dense.path_norm, 1e-10),
    "input_margin": (dense.input_margin, 1e-10),
    "input_margin(quantile=0.1)": (lambda c: dense.input_margin(c, 0.1), 1e-10),
    "hessian_trace": (dense.hessian_trace, 1e-10),
    "hessian_top_eigenvalue": (dense.hessian_top_eigenvalue, 1e-8),
    "quotient_sharpness": (dense.quotient_sharpness, 1e-8),
    "squared_norm": (dense.squared_norm, 1e-10),
    "minimum_sharpness": (lambda c: dense.minimum_sharpness(c, weights_and_biases(c.model)), 1e-8),
    "minimum_unit_sharpness": (lambda c: dense.minimum_unit_sharpness(c, weights_and_biases(c.model)), 1e-8),
}
# Against limits, bounds and statistics in test_whole.py.
ELSEWHERE = {"adaptive_sharpness", "sharpness", "pac_bayes_flatness", "distance_from_init"}


def subsets(case: Case) -> list[list[int]]:
    """Those that the measure draws with seed 0."""
    examples = sum(len(batch["labels"] if isinstance(batch, dict) else batch[1]) for batch in case.batches)
    noise = torch.Generator().manual_seed(0)
    return [torch.randperm(examples, generator=noise)[:SUBSET].tolist() for _ in range(DRAWS)]


@cache
def case_of(name: str) -> Case:
    return ALL[name]()


@cache
def report_of(name: str) -> saltflat.Report:
    case = case_of(name)
    return saltflat.measure(case.model, case.batches, case.loss, list(EXPECTED))


def applies(measure: str, name: str) -> bool:
    """Whether the oracle defines the measure for this case."""
    if measure in ("minimum_sharpness", "minimum_unit_sharpness"):  # for other networks in test_minimum.py
        return name in CHAINS
    if measure.startswith(("input_robustness", "input_margin")):
        return name in CHAINS and name != "regression_mlp"
    if measure in ("hessian_trace", "path_norm"):  # the Hessian's only where the layers enter piecewise linearly
        return name in CHAINS
    if measure == "relative_flatness":
        return all(isinstance(owner, nn.Linear | nn.Conv2d | nn.Conv1d) for owner in owners(case_of(name)))
    return True


def owners(case: Case) -> list[nn.Module]:
    return [dense.owner_of(case.model, name) for name in dense.weights(case)]


def test_every_measure_has_an_oracle() -> None:
    assert {text.partition("(")[0] for text in EXPECTED} | ELSEWHERE == set(MEASURES)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("measure", EXPECTED)
def test_a_measure_is_what_its_definition_says(measure: str, name: str) -> None:
    if not applies(measure, name):
        pytest.skip("not defined here")
    oracle, tolerance = EXPECTED[measure]
    reading, expected = report_of(name)[measure], oracle(case_of(name))
    if math.isinf(expected.value):
        # A zero determinant is not told from one of rounding: the floor is said.
        assert reading.notes
        return
    assert reading.value == pytest.approx(expected.value, rel=tolerance), reading.notes
    assert reading.converged
    if expected.layers and reading.layers:
        assert set(reading.layers) == set(expected.layers)
        scale = max(map(abs, expected.layers.values()))
        for layer, value in expected.layers.items():
            assert reading.layers[layer] == pytest.approx(value, rel=tolerance, abs=tolerance * scale), layer
    for layer, values in expected.units.items():
        assert reading.units[layer] == pytest.approx(values, rel=tolerance, abs=tolerance * max(values))
    for layer, factor in expected.scales.items():
        assert reading.details["scales"][layer] == pytest.approx(factor, rel=1e-6)


def test_linear_regression_has_the_kappa_of_ridge_regression() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(30, 5, dtype=torch.float64), torch.randn(30, 1, dtype=torch.float64)
    net = nn.Linear(5, 1, bias=False).double()
    found = saltflat.measure(net, (x, y), "mse", "kappa").readings["kappa"].value
    w = net.weight.detach()
    assert found == pytest.approx(float(2 * torch.linalg.eigvalsh(x.T @ x / 30)[-1] * w.square().sum()), rel=1e-9)


@pytest.mark.parametrize("name", CHAINS)
def test_measures_are_ordered_as_the_theory_says(name: str) -> None:
    report, case = report_of(name), case_of(name)
    slack = 1 + 1e-9

    def layers(measure: str) -> dict[str, float]:
        return {layer: report[measure].layers[layer] for layer in dense.weights(case)}

    column = layers("normalized_sharpness")
    traces, norms = layers("hessian_trace"), layers("squared_norm")
    for layer, value in column.items():
        assert layers("normalized_sharpness_arxiv")[layer] == pytest.approx(2 * value, rel=1e-9)
        assert layers("parameterwise_normalized_sharpness")[layer] <= value * slack
        assert value <= math.sqrt(traces[layer] * norms[layer]) * slack
        for side in ("normalized_sharpness_printed", "normalized_sharpness_printed(side='columns')"):
            assert layers(side)[layer] <= value * slack
    assert report["minimum_unit_sharpness"].value <= report["minimum_sharpness"].value * slack
    assert report["minimum_sharpness"].value <= report["hessian_trace"].value * slack
    count = sum(p.numel() for p in case.model.parameters())
    assert report["parameterwise_normalized_sharpness"].value <= slack * math.sqrt(
        count * report["fisher_rao_diagonal"].value
    )
    assert report["kappa_max"].value <= report["kappa"].value * slack
    assert report["kappa"].value <= report["kappa_trace"].value * slack
    # Over all parameters of a positive semi-definite curvature; biases have blocks of their own.
    quotient = dense.quotient_sharpness(case, "gauss_newton").value
    every = sum(dense.squared(p) * dense.top(dense.block(case, layer)) for layer, p in trainable(case.model).items())
    assert max(layers("kappa").values()) <= quotient * slack <= every * slack**2


def test_the_last_layer_of_a_softmax_network_has_its_closed_form() -> None:
    case = CHAINS["mlp_with_biases"]()
    name = "4.weight"
    found = saltflat.measure(case.model, case.batches, measures="relative_flatness(normalize=False)")
    inputs = torch.cat(
        [each for batch in case.batches for each in batch if isinstance(each, Tensor) and each.dim() > 1]
    )
    assert isinstance(case.model, nn.Sequential)
    features = case.model[:4](inputs).detach()
    p = case.model(inputs).detach().softmax(1)
    W = case.model.get_parameter(name).detach()
    G = W @ W.T
    each = features.square().sum(1) * (p @ G.diagonal() - torch.einsum("nc,cd,nd->n", p, G, p))
    (reading,) = found.values()
    assert reading.layers[name] == pytest.approx(float(each.mean()), rel=1e-10)


def test_what_runs_before_the_sweep_does_not_slow_it_down() -> None:
    """Forward passes need no gradients, but the look at the model that comes first does."""
    case = CHAINS["convolutions_with_biases"]()
    report = saltflat.measure(case.model, case.batches, measures=["relative_flatness", "input_robustness"])
    assert report.settings["strategy"] == "together"


def test_readings_that_are_not_the_hessians_say_so() -> None:
    case = CASES["gelu_mlp"]()
    report = saltflat.measure(
        case.model, case.batches, measures=["hessian_trace", "kappa", "squared_norm", "fisher_trace"]
    )
    assert report.certificate is not None
    assert not report.certificate["holds"]
    for name, hedged in {"hessian_trace": True, "kappa": True, "squared_norm": False, "fisher_trace": False}.items():
        assert any("Gauss-Newton" in note for note in report[name].notes) == hedged
        assert report[name].exact != hedged


def test_a_model_in_train_mode_is_measured_in_eval_mode_throughout() -> None:
    """Also by measures that need no sweep, where the mean loss is found by the way."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.9), nn.Linear(50, 2))
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    expected = nn.functional.cross_entropy(net.eval()(x), y).item()
    report = saltflat.measure(net.train(), (x, y), measures="squared_norm", certificate=False)
    assert report.loss == pytest.approx(expected, rel=1e-5)
    assert net.training


def test_a_model_can_be_measured_on_another_device_and_stays_where_it_is() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    inputs, labels = torch.randn(12, 3, dtype=torch.float64), torch.randint(2, (12,))
    plain = saltflat.measure(net, (inputs, labels), measures="kappa_trace")
    batches = [(inputs[:5], labels[:5]), (inputs[5:], labels[5:])]
    for device in ("cpu", "auto", torch.device("cpu")):
        for data in ((inputs, labels), batches):
            found = saltflat.measure(net, data, measures="kappa_trace", device=device)
            assert found["kappa_trace"].value == pytest.approx(plain["kappa_trace"].value, rel=1e-5)
    assert all(each.device.type == "cpu" for each in net.parameters())
    with pytest.raises(saltflat.SaltflatError, match=r"Expected a device .*, but got 'cudda'"):
        saltflat.measure(net, (inputs, labels), device="cudda")


def test_measures_in_the_place_of_the_loss_are_refused_with_the_right_word() -> None:
    data = torch.randn(4, 2), torch.randint(2, (4,))
    with pytest.raises(saltflat.SaltflatError, match=r"Expected a loss, but got \['rho'\].*measures="):
        saltflat.measure(torch.nn.Linear(2, 2), data, ["rho"])  # type: ignore[arg-type]
