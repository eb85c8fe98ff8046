"""The oracle of the measures against closed forms, and the facts about measures that need no package."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache

import measure_oracle as measures
import numpy as np
import oracle
import pytest
import torch
from cases import CASES, Case, examples_of, integers, joined, problem, reals
from chains import CHAINS, layers_of, weights_and_biases
from rescalings import layer_rescaled, unit_rescaled
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.testing import assert_close

import saltflat
from saltflat.measures.fisher import fisher_determinant
from saltflat.measures.registry import MeasureResult

WITHOUT_BIASES = ["mlp_without_biases", "convolutions_without_biases"]
# What the chains have not: kernels that run backwards, tables, parameters that no layer owns, missing curvature.
OTHERS = [
    "transposed_convolution_1d",
    "transposed_convolution_2d",
    "convolution_3d",
    "embedding_with_padding_index",
    "class_token_and_position_parameters",
    "one_example",
    "custom_loss_with_an_indefinite_output_hessian",
]
SUBSETS = [[0, 2, 5], [1, 3, 4], [5, 6, 7]]

Measure = Callable[[Case], measures.Oracle]
TO_ALL: dict[str, Measure] = {
    "normalized_sharpness": measures.normalized_sharpness,
    "normalized_sharpness_printed(rows)": measures.normalized_sharpness_printed,
    "normalized_sharpness_printed(columns)": lambda case: measures.normalized_sharpness_printed(case, "columns"),
    "normalized_sharpness_arxiv": measures.normalized_sharpness_arxiv,
    "parameterwise_normalized_sharpness": measures.parameterwise_normalized_sharpness,
    "fisher_rao_diagonal": measures.fisher_rao_diagonal,
    "rho(column)": measures.rho,
    "rho(row)": lambda case: measures.rho(case, "row"),
    "rho_max(column)": measures.rho_max,
    "rho_max(row)": lambda case: measures.rho_max(case, "row"),
    "relative_flatness": measures.relative_flatness,
    "minimum_unit_sharpness": lambda case: measures.minimum_unit_sharpness(case, weights_and_biases(case.model)),
    "fisher_rao_norm": measures.fisher_rao_norm,
    "input_robustness": measures.input_robustness,
    "adaptive_sharpness_limit(average)": lambda case: measures.adaptive_sharpness_limit(case, "average", 0.05),
    "adaptive_sharpness_limit(worst)": lambda case: measures.adaptive_sharpness_limit(case, "worst", 0.05),
}
TO_LAYERS: dict[str, Measure] = {
    "kappa": measures.kappa,
    "kappa_max": measures.kappa_max,
    "kappa_trace": measures.kappa_trace,
    "kappa_trace_max": measures.kappa_trace_max,
    "relative_flatness(as it is)": lambda case: measures.relative_flatness(case, normalize=False),
    "quotient_sharpness": measures.quotient_sharpness,
    "minimum_sharpness": lambda case: measures.minimum_sharpness(case, weights_and_biases(case.model)),
}
TO_NOTHING: dict[str, Measure] = {
    "regularized_normalized_sharpness": lambda case: measures.regularized_normalized_sharpness(case, (-1, 0, 1), 1.0),
    "fisher_logdet": lambda case: measures.fisher_logdet(case, SUBSETS),
    "fisher_trace": measures.fisher_trace,
    "fisher_frobenius": measures.fisher_frobenius,
    "fisher_spectral_radius": lambda case: measures.fisher_spectral_radius(case, SUBSETS),
    "hessian_trace": measures.hessian_trace,
    "hessian_top_eigenvalue": measures.hessian_top_eigenvalue,
    "squared_norm": measures.squared_norm,
}


@cache
def chain(name: str) -> Case:
    return CHAINS[name]()


@cache
def rescaled(name: str, way: Callable[[Case, int], Case]) -> Case:
    return way(chain(name), 1)


@cache
def problem_named(name: str) -> Case:
    return chain(name) if name in CHAINS else CASES[name]()


def assert_same(actual: measures.Oracle, wanted: measures.Oracle, relative: float = 1e-10) -> None:
    assert actual.value == pytest.approx(wanted.value, rel=relative, abs=0)
    assert actual.layers == pytest.approx(wanted.layers, rel=relative, abs=1e-14)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Chains and their rescalings.


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_small_and_its_layers_hold_all_its_parameters(name: str) -> None:
    case = chain(name)
    assert case.name == name
    assert 8 <= len(examples_of(case.batches)) <= 12
    assert len({len(targets) for _, targets in case.batches}) > 1
    named = {parameter for pair in weights_and_biases(case.model) for parameter in pair if parameter is not None}
    assert named == oracle.trainable(case.model).keys()
    assert sum(parameter.numel() for parameter in case.model.parameters()) <= 150


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("way", [layer_rescaled, unit_rescaled])
@pytest.mark.parametrize("name", CHAINS)
def test_a_rescaling_changes_the_weights_but_not_the_function(
    name: str, way: Callable[[Case, int], Case], seed: int
) -> None:
    case = chain(name)
    before = deepcopy(case.model.state_dict())
    other = way(case, seed)
    x = joined(case.batches)[0]
    outputs = case.model(x)
    assert (other.model(x) - outputs).norm() <= 1e-9 * outputs.norm()
    assert_close(case.model.state_dict(), before, rtol=0, atol=0)
    ratios = [
        (moved.get_parameter("weight") / layer.get_parameter("weight")).detach()
        for (_, layer), (_, moved) in zip(layers_of(case.model), layers_of(other.model), strict=True)
    ]
    assert all((ratio != 1).any() for ratio in ratios)
    assert max(float(ratio.max()) for ratio in ratios) > 2
    if way is layer_rescaled:
        for ratio in ratios:
            assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-12, atol=0)
        assert all(1e-3 <= ratio.mean() <= 1e3 for ratio in ratios)


def test_the_dead_unit_is_dead_and_the_others_are_not() -> None:
    case = chain("mlp_with_a_dead_unit")
    x = joined(case.batches)[0]
    hidden = case.model[:2](x)  # type: ignore[index]
    assert hidden.any(0).tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("measure", [*TO_ALL, *TO_LAYERS])
def test_the_invariant_measures_do_not_see_layers_rescaled(name: str, measure: str) -> None:
    definition = (TO_ALL | TO_LAYERS)[measure]
    actual, wanted = definition(rescaled(name, layer_rescaled)), definition(chain(name))
    if measure == "minimum_sharpness":
        # Its scales undo the rescaling.
        assert actual.scales != pytest.approx(wanted.scales)
    assert_same(actual, wanted)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("measure", TO_ALL)
def test_the_measures_invariant_to_units_do_not_see_units_rescaled(name: str, measure: str) -> None:
    assert_same(TO_ALL[measure](rescaled(name, unit_rescaled)), TO_ALL[measure](chain(name)))


@pytest.mark.parametrize("name", ["mlp_with_biases", "convolutions_with_biases"])
@pytest.mark.parametrize("measure", [*TO_LAYERS, *TO_NOTHING])
def test_the_other_measures_do_see_units_rescaled(name: str, measure: str) -> None:
    definition = (TO_LAYERS | TO_NOTHING)[measure]
    here, there = definition(chain(name)).value, definition(rescaled(name, unit_rescaled)).value
    assert abs(math.log(abs(there / here))) > 0.1


@pytest.mark.parametrize("name", ["mlp_with_biases", "convolutions_with_biases"])
@pytest.mark.parametrize("measure", TO_NOTHING)
def test_the_measures_that_are_not_invariant_see_layers_rescaled(name: str, measure: str) -> None:
    here = TO_NOTHING[measure](chain(name)).value
    there = TO_NOTHING[measure](rescaled(name, layer_rescaled)).value
    assert abs(there / here - 1) > 0.1


# Normalized sharpness.


@pytest.mark.parametrize("name", [*CHAINS, *OTHERS])
def test_the_definition_of_the_preprint_is_twice_the_column_form(name: str) -> None:
    case = problem_named(name)
    columns = measures.normalized_sharpness(case)
    twice = measures.Oracle(2 * columns.value, {key: 2 * value for key, value in columns.layers.items()})
    assert_same(measures.normalized_sharpness_arxiv(case), twice, 1e-12)


@pytest.mark.parametrize("name", [*CHAINS, *OTHERS])
def test_the_forms_of_normalized_sharpness_bound_one_another(name: str) -> None:
    case = problem_named(name)
    column = measures.normalized_sharpness(case).layers
    single = measures.parameterwise_normalized_sharpness(case).layers
    rows = measures.normalized_sharpness_printed(case, "rows").layers
    columns = measures.normalized_sharpness_printed(case, "columns").layers
    slack = 1 + 1e-12
    for key in measures.weights(case):
        groups = measures.matrices(case, key)
        outs, ins = groups[0][0].shape
        assert single[key] <= column[key] * slack
        assert column[key] <= sum(math.sqrt(F.sum() * U.sum()) for F, U in groups) * slack
        assert rows[key] <= column[key] * slack
        assert column[key] <= math.sqrt(ins) * rows[key] * slack
        assert columns[key] <= column[key] * slack
        assert column[key] <= math.sqrt(outs) * columns[key] * slack


def test_a_single_row_of_ones_tells_the_column_form_from_the_printed_one() -> None:
    # Squared error with inputs of size sqrt(1/2): F is one everywhere, as U is.
    x = math.sqrt(0.5) * torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1]], dtype=torch.float64)
    case = linear_regression(x, torch.ones(4, dtype=torch.float64))
    assert measures.normalized_sharpness(case).value == pytest.approx(4, rel=1e-12)
    assert measures.parameterwise_normalized_sharpness(case).value == pytest.approx(4, rel=1e-12)
    assert measures.normalized_sharpness_printed(case, "rows").value == pytest.approx(2, rel=1e-12)
    assert measures.normalized_sharpness_printed(case, "columns").value == pytest.approx(4, rel=1e-12)


def test_scalings_that_run_to_infinity_leave_what_they_cannot_remove() -> None:
    # Rows and columns tied by F and U in one direction only: the entry between the two blocks vanishes.
    F = np.array([[4.0, 7.0], [0.0, 9.0]])
    U = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert measures.column_form(F, U) == pytest.approx(2 + 3, rel=1e-12)
    value, at = measures.infimum(*measures.row_column_program(F, U))
    assert value == pytest.approx(2 * (2 + 3), rel=1e-12)
    assert at is None
    assert measures.column_form(np.zeros((2, 2)), U) == 0
    # A small tie in the other direction keeps it.
    U[0, 1] = 1e-6
    assert 5 < measures.column_form(F, U) < 5.01


def test_a_column_form_of_two_rows_is_the_minimum_over_one_number() -> None:
    generator = np.random.default_rng(0)
    F, U = generator.exponential(size=(2, 2, 3))

    def objective(g: float) -> float:
        s = np.array([math.exp(g), 1.0])
        return float(np.sqrt((F.T @ s) * (U.T @ (1 / s))).sum())

    least = float(minimize_scalar(objective, bounds=(-10, 10), options={"xatol": 1e-10}).fun)
    assert measures.column_form(F, U) == pytest.approx(least, rel=1e-12)


def test_regularized_normalized_sharpness_tends_to_twice_the_parameterwise_one() -> None:
    case = chain("mlp_with_a_dead_unit")
    limit = 2 * measures.parameterwise_normalized_sharpness(case).value
    values = [
        measures.regularized_normalized_sharpness(case, (0.0,), strength).value for strength in (1, 1e2, 1e4, 1e6)
    ]
    assert values == sorted(values, reverse=True)
    assert limit < values[-1] < limit * 1.01
    more = measures.regularized_normalized_sharpness(case, (-2.0, 0.0), 1.0).value
    assert limit < more < values[0]


def test_regularized_normalized_sharpness_of_one_weight_by_a_fine_grid() -> None:
    x = reals(5, 1)
    case = linear_regression(x, torch.tensor([0.7], dtype=torch.float64))
    h = 2 * float(x.square().mean())
    s = np.linspace(-5, 5, 2_000_001)
    wanted = min(float((h * np.exp(2 * s) + 0.49 * np.exp(-2 * s) + (s - b) ** 2 / 0.3).min()) for b in (-1.5, 0.4))
    value = measures.regularized_normalized_sharpness(case, (-1.5, 0.4), 0.3).value
    assert value == pytest.approx(wanted, rel=1e-9)


# Flatness by layer and by unit.


def linear_regression(x: Tensor, w: Tensor) -> Case:
    case = problem(nn.Linear(x.shape[1], 1, bias=False), x, reals(len(x), 1), "mse")
    with torch.no_grad():
        case.model.get_parameter("weight").copy_(w)
    return case


def test_linear_regression_by_hand() -> None:
    x, w = reals(7, 3), reals(3)
    case = linear_regression(x, w)
    second = x.T @ x / 7
    square = float(w @ w)
    assert measures.kappa(case).value == pytest.approx(2 * float(torch.linalg.eigvalsh(second)[-1]) * square, rel=1e-12)
    assert measures.kappa_trace(case).value == pytest.approx(2 * float(second.trace()) * square, rel=1e-12)
    assert measures.relative_flatness(case, normalize=False).value == measures.kappa_trace(case).value
    columns = (2 * second.diagonal() * w.square()).tolist()
    assert measures.rho(case).units["weight"] == pytest.approx(columns, rel=1e-12)
    assert measures.rho_max(case).value == pytest.approx(max(columns), rel=1e-12)
    assert measures.fisher_rao_diagonal(case).value == pytest.approx(sum(columns), rel=1e-12)
    assert measures.rho(case, "row").units["weight"] == pytest.approx([float(2 * w @ second @ w)], rel=1e-12)
    residual = (case.model(x) - joined(case.batches)[1]).detach()
    gradient = 2 * residual * x
    assert measures.fisher_trace(case).value == pytest.approx(float(gradient.square().sum(1).mean()), rel=1e-12)
    assert measures.fisher_frobenius(case).value == pytest.approx(
        float(gradient.square().sum(1).square().mean()), rel=1e-12
    )
    assert measures.fisher_rao_norm(case).value == pytest.approx(float((gradient @ w).square().mean()), rel=1e-12)
    gram = gradient[[0, 4]] @ gradient[[0, 4]].T
    assert measures.fisher_logdet(case, [[0, 4]]).value == pytest.approx(float(gram.det().log()), rel=1e-10)
    determinant = (gradient.T @ gradient / 7).det().log()
    assert measures.fisher_determinant(case).value == pytest.approx(float(determinant), rel=1e-10)
    assert measures.squared_norm(case).value == pytest.approx(square, rel=1e-12)
    assert measures.hessian_top_eigenvalue(case).value * square == pytest.approx(measures.kappa(case).value, rel=1e-12)


@pytest.mark.parametrize("name", CHAINS)
def test_the_curvature_along_a_unit_is_the_second_derivative_of_the_loss_as_the_unit_grows(name: str) -> None:
    case = chain(name)
    model, parameters = oracle.frozen_copy(case.model)
    key = weights_and_biases(case.model)[1][0]
    place = measures.positions(case, key)
    columns = place.transpose(0, 2, 1, 3).reshape(place.shape[0] * place.shape[2], -1)
    rows = place.reshape(place.shape[0] * place.shape[1], -1)
    for units, owned in ((measures.rho(case), columns), (measures.rho(case, "row"), rows)):
        assert len(units.units[key]) == len(owned)
        for value, mine in list(zip(units.units[key], owned, strict=True))[:3]:
            only = torch.zeros_like(parameters[key]).flatten()
            only[mine] = 1

            def grown(t: Tensor, only: Tensor = only) -> Tensor:
                moved = parameters[key] * (1 + t * only.view_as(parameters[key]))
                return oracle.loss_at(case, oracle.outputs_of(case, model, parameters | {key: moved}))

            second = oracle.hessian(grown, torch.zeros((), dtype=torch.float64))
            assert value == pytest.approx(float(second), rel=1e-9, abs=1e-13)


def test_a_convolutions_columns_are_its_input_channels_and_its_rows_its_output_channels() -> None:
    case = problem_named("transposed_convolution_2d")
    # (in, out / groups, ...): two groups of two inputs and two outputs; then four inputs and two outputs.
    assert {key: len(units) for key, units in measures.rho(case).units.items()} == {
        "0.weight": 4,
        "2.weight": 4,
        "5.weight": 12,
    }
    assert {key: len(units) for key, units in measures.rho(case, "row").units.items()} == {
        "0.weight": 4,
        "2.weight": 2,
        "5.weight": 3,
    }
    # Output channel 3 is the second one of the second group: what the columns of that group send to it.
    weight = case.model.get_parameter("0.weight")
    mine = torch.zeros_like(weight)
    mine[2:, 1] = weight[2:, 1].detach()
    direction = mine.flatten().detach()
    wanted = float(direction @ oracle.gauss_newton_block(case, "0.weight") @ direction)
    assert measures.rho(case, "row").units["0.weight"][3] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", WITHOUT_BIASES)
def test_the_quotient_sharpness_lies_between_the_largest_kappa_and_their_sum(name: str) -> None:
    case = chain(name)
    quotient = measures.quotient_sharpness(case, "gauss_newton").value
    assert measures.kappa_max(case).value <= quotient * (1 + 1e-12)
    assert quotient <= measures.kappa(case).value * (1 + 1e-12)
    assert measures.kappa_trace_max(case).value == max(measures.kappa_trace(case).layers.values())


@pytest.mark.parametrize("name", ["mlp_without_biases", "mlp_with_biases", "leaky_relu_mlp"])
def test_relative_flatness_of_the_last_layer_by_its_closed_form(name: str) -> None:
    case = chain(name)
    model = case.model
    assert isinstance(model, nn.Sequential)
    x = joined(case.batches)[0]
    features, p = model[:-1](x).detach(), model(x).softmax(1).detach()
    key = weights_and_biases(model)[-1][0]
    W = model.get_parameter(key).detach()

    def closed(features: Tensor, W: Tensor) -> float:
        gram = W @ W.T
        spread = p @ gram.diagonal() - torch.einsum("nc,cd,nd->n", p, gram, p)
        return float((features.square().sum(1) * spread).mean())

    plain = measures.relative_flatness(case, normalize=False)
    assert plain.layers[key] == pytest.approx(closed(features, W), rel=1e-11)
    alive = features.any(0)
    spread = features[:, alive].std(0, correction=0)
    normalized = measures.relative_flatness(case)
    wanted = closed(features[:, alive] / spread, W[:, alive] * spread)
    assert normalized.layers[key] == pytest.approx(wanted, rel=1e-11)
    assert set(plain.layers) == set(normalized.layers) == set(measures.weights(case))


def test_a_constant_feature_is_not_normalized() -> None:
    x = reals(6, 4)
    x[:, 1] = 3
    x[:, 2] = 0
    case = problem(nn.Linear(4, 3), x, integers(3, 6))
    wanted = [float(x[:, 0].std(correction=0)), 1.0, 0.0, float(x[:, 3].std(correction=0))]
    assert measures.spreads(case, "weight") == pytest.approx(wanted, rel=1e-12)


# Minimum sharpness.


@pytest.mark.parametrize("name", CHAINS)
def test_minimum_sharpness_is_the_trace_after_its_own_rescaling(name: str) -> None:
    case = chain(name)
    least = measures.minimum_sharpness(case, weights_and_biases(case.model))
    assert least.value <= measures.hessian_trace(case).value * (1 + 1e-12)
    assert sum(least.layers.values()) == pytest.approx(least.value, rel=1e-12)
    assert math.prod(least.scales.values()) == pytest.approx(1, rel=1e-10)
    model, so_far = deepcopy(case.model), 1.0
    with torch.no_grad():
        for weight, bias in weights_and_biases(model):
            so_far *= least.scales[weight]
            model.get_parameter(weight).mul_(least.scales[weight])
            if bias is not None:
                model.get_parameter(bias).mul_(so_far)
    moved = replace(case, model=model)
    x = joined(case.batches)[0]
    assert_close(model(x), case.model(x), rtol=1e-9, atol=1e-11)
    traces = {key: float(value) for key, value in oracle.curvature_trace(moved).items()}
    assert traces == pytest.approx(least.layers, rel=1e-9, abs=1e-14)
    again = measures.minimum_sharpness(moved, weights_and_biases(model))
    assert again.scales == pytest.approx(dict.fromkeys(least.scales, 1.0), rel=1e-8)


@pytest.mark.parametrize("name", WITHOUT_BIASES)
def test_minimum_sharpness_without_biases_is_the_geometric_mean_of_the_traces(name: str) -> None:
    case = chain(name)
    traces = [float(trace) for trace in oracle.curvature_trace(case).values()]
    least = measures.minimum_sharpness(case, weights_and_biases(case.model))
    assert least.value == pytest.approx(len(traces) * math.prod(traces) ** (1 / len(traces)), rel=1e-12)
    assert list(least.layers.values()) == pytest.approx([least.value / len(traces)] * len(traces), rel=1e-9)


def test_minimum_sharpness_of_a_layer_without_curvature_is_approached_only() -> None:
    case = chain("mlp_without_biases")
    model = deepcopy(case.model)
    with torch.no_grad():
        model.get_parameter("4.weight").zero_()
    least = measures.minimum_sharpness(replace(case, model=model), weights_and_biases(model))
    assert least.value == 0
    assert least.scales == {}


@pytest.mark.parametrize("name", CHAINS)
def test_units_by_themselves_do_no_worse_than_whole_layers(name: str) -> None:
    case = chain(name)
    units = measures.minimum_unit_sharpness(case, weights_and_biases(case.model))
    layers = measures.minimum_sharpness(case, weights_and_biases(case.model))
    assert units.value < layers.value
    assert sum(units.layers.values()) == pytest.approx(units.value, rel=1e-12)


def test_minimum_unit_sharpness_of_one_hidden_layer_by_its_closed_form() -> None:
    # Alone, a unit's h_in e^-2s + h_out e^2s is smallest where both are sqrt(h_in h_out).
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    case = problem(model, reals(9, 4), integers(3, 9))
    H = oracle.curvature_diagonal(case)
    into, out = H["0.weight"].sum(1) + H["0.bias"], H["2.weight"].sum(0)
    wanted = float(2 * (into * out).sqrt().sum() + H["2.bias"].sum())
    found = measures.minimum_unit_sharpness(case, weights_and_biases(model))
    assert found.value == pytest.approx(wanted, rel=1e-12)
    assert found.layers["2.weight"] == pytest.approx(float((into * out).sqrt().sum()), rel=1e-9)


# Fisher information.


def test_the_fisher_rao_norm_of_a_homogeneous_network_by_its_outputs() -> None:
    for name in WITHOUT_BIASES:
        case = chain(name)
        x, y = joined(case.batches)
        f = case.model(x).detach()
        margin = (f.softmax(1) * f).sum(1) - f.gather(1, y.unsqueeze(1)).squeeze(1)
        layers = len(layers_of(case.model))
        wanted = layers**2 * float(margin.square().mean())
        assert measures.fisher_rao_norm(case).value == pytest.approx(wanted, rel=1e-11)


@pytest.mark.parametrize("name", CHAINS)
def test_the_trace_of_the_fisher_information_is_the_sum_of_the_second_moments(name: str) -> None:
    case = chain(name)
    wanted = {key: float(value.sum()) for key, value in oracle.gradient_second_moment(case).items()}
    assert measures.fisher_trace(case).layers == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    size = sum(parameter.numel() for parameter in case.model.parameters())
    # The arithmetic mean of the eigenvalues is not below the geometric one.
    bound = math.log((measures.fisher_trace(case).value + 0.1 * size) / size)
    assert measures.fisher_determinant(case, jitter=0.1).value / size <= bound
    # More parameters than examples.
    assert measures.fisher_determinant(case).value == -math.inf
    J = measures.gradients(case)
    _, wanted = np.linalg.slogdet(J.T @ J / len(J) + 0.1 * np.eye(size))
    assert measures.fisher_determinant(case, jitter=0.1).value == pytest.approx(float(wanted), rel=1e-11)


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_of_examples_are_those_of_each_example_alone(name: str) -> None:
    case = chain(name)
    grams, largest = [], []
    for subset in SUBSETS:
        rows = []
        for n in subset:
            x, y = joined([examples_of(case.batches)[n]])
            slopes = torch.autograd.grad(case.loss_function(case.model(x), y), list(case.model.parameters()))
            rows.append(torch.cat([slope.flatten() for slope in slopes]))
        gram = torch.stack(rows) @ torch.stack(rows).T
        grams.append(float(gram.logdet()))
        largest.append(float(torch.linalg.eigvalsh(gram)[-1]))
    assert measures.fisher_logdet(case, SUBSETS).value == pytest.approx(sum(grams) / 3, rel=1e-9)
    assert measures.fisher_spectral_radius(case, SUBSETS).value == pytest.approx(sum(largest) / 3, rel=1e-11)


def test_input_robustness_of_softmax_regression_by_hand() -> None:
    x = reals(6, 4)
    case = problem(nn.Linear(4, 3), x, integers(3, 6))
    p = case.model(x).softmax(1).detach()
    jacobians = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) @ case.model.get_parameter("weight").detach()
    wanted = torch.linalg.matrix_norm(jacobians, 2).square().mean()
    assert measures.input_robustness(case).value == pytest.approx(float(wanted), rel=1e-12)


# The Hessian and adaptive sharpness.


@pytest.mark.parametrize("name", [*CHAINS, "gelu_mlp", "tied_embedding_and_output"])
def test_the_hessian_of_the_network_has_the_parameters_own_blocks_on_its_diagonal(name: str) -> None:
    case = problem_named(name)
    H = measures.network_hessian(case)
    for key, own in measures.slices(case).items():
        assert_close(
            torch.from_numpy(H[own, own]), oracle.hessian_block(case, key), rtol=0, atol=1e-12 * np.abs(H).max()
        )
    if name in CHAINS:
        wanted = {key: float(value) for key, value in oracle.curvature_trace(case).items()}
        assert measures.hessian_trace(case).layers == pytest.approx(wanted, rel=1e-10, abs=1e-12)
    assert measures.hessian_top_eigenvalue(case).value == pytest.approx(
        float(np.linalg.eigvals(H).real.max()), rel=1e-9
    )


def rise(case: Case, step: Tensor) -> float:
    model, parameters = oracle.frozen_copy(case.model)
    moved = {key: parameters[key] + step[own].view_as(parameters[key]) for key, own in measures.slices(case).items()}
    return float(oracle.loss_at(case, oracle.outputs_of(case, model, moved)) - oracle.loss(case))


@pytest.mark.parametrize("name", ["mlp_without_biases", "convolution_with_global_average_pooling", "gelu_mlp"])
def test_the_average_rise_under_small_relative_noise_is_half_the_squared_radius_times_its_limit(name: str) -> None:
    case = problem_named(name)
    w = torch.from_numpy(measures.point(case))
    radius = 1e-3
    # To second order the parameters' noise adds up one by one, and that of one parameter is the mean of both signs.
    both = sum(rise(case, sign * radius * w * unit) for unit in torch.eye(len(w)).double() for sign in (-1, 1)) / 2
    limit = measures.adaptive_sharpness_limit(case, "average", radius).value
    assert both == pytest.approx(limit, rel=1e-4)


@pytest.mark.parametrize("name", WITHOUT_BIASES)
def test_the_average_limit_is_the_fisher_rao_term(name: str) -> None:
    case = chain(name)
    limit = 2 / 0.05**2 * measures.adaptive_sharpness_limit(case, "average", 0.05).value
    assert limit == pytest.approx(measures.fisher_rao_diagonal(case).value, rel=1e-10)


@pytest.mark.parametrize("name", ["mlp_without_biases", "regression_mlp", "gelu_mlp"])
def test_no_small_relative_step_rises_more_than_the_worst_limit(name: str) -> None:
    case = problem_named(name)
    w = torch.from_numpy(measures.point(case))
    slope = w * torch.from_numpy(measures.gradients(case).mean(0))
    H = w.unsqueeze(1) * torch.from_numpy(measures.network_hessian(case)) * w
    radius = 1e-3
    limit = measures.adaptive_sharpness_limit(case, "worst", radius).value
    first, top = radius * float(slope.norm()), float(torch.linalg.eigvalsh(H)[-1])
    assert first < limit < first + radius**2 / 2 * top
    assert measures.adaptive_sharpness_limit(case, "worst", 1e-8).value == pytest.approx(
        1e-8 * float(slope.norm()), rel=1e-6
    )
    # Along the gradient the rise is the limit, but for the bend sideways.
    u = slope
    for _ in range(50):
        u = radius * u / u.norm()
        u = slope + H @ u
    u = radius * u / u.norm()
    assert rise(case, w * u) == pytest.approx(limit, rel=1e-5)
    for _ in range(20):
        other = u + 0.3 * radius * torch.nn.functional.normalize(torch.randn_like(u), dim=0)
        assert rise(case, w * radius * other / other.norm()) < limit


def test_the_highest_point_of_a_ball_by_hand() -> None:
    H = np.diag([1.0, 3.0, -2.0])
    flat = np.zeros(3)
    assert measures.ball_maximum(flat, H, 0.5) == pytest.approx(0.5**2 / 2 * 3, rel=1e-12)
    # Slope along the sharpest direction only: both add up.
    assert measures.ball_maximum(np.array([0, -2.0, 0]), H, 0.5) == pytest.approx(2 * 0.5 + 0.5**2 / 2 * 3, rel=1e-12)
    # Slope across it: u = slope / (3 - 1) along the first, the rest of the radius along the second.
    wanted = 0.2 * 0.1 + (0.1**2 + 3 * (0.5**2 - 0.1**2)) / 2
    assert measures.ball_maximum(np.array([0.2, 0, 0]), H, 0.5) == pytest.approx(wanted, rel=1e-12)
    angles = np.linspace(0, 2 * np.pi, 100_001)
    slope, H = np.array([0.3, 0.1]), np.array([[1.0, 0.5], [0.5, -1.0]])
    u = 0.7 * np.stack([np.cos(angles), np.sin(angles)])
    wanted = float((slope @ u + np.einsum("in,ij,jn->n", u, H, u) / 2).max())
    assert measures.ball_maximum(slope, H, 0.7) == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
def test_jitter_counts_where_the_largest_eigenvalue_hides_it(scale: float) -> None:
    found = fisher_determinant(torch.diag(torch.tensor([scale**2, 1.0, 0.0], dtype=torch.float64)), jitter=1e-6)
    assert isinstance(found, MeasureResult)
    wanted = math.log(scale**2 + 1e-6) + math.log(1 + 1e-6) + math.log(1e-6)
    assert float(found.value) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("size", [5, 33])
def test_inputs_that_are_constant_up_to_rounding_are_not_normalized(size: int) -> None:
    torch.manual_seed(0)
    first = nn.Linear(40, 16)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        first.weight[:2, 20:] = 0
    x, y = torch.randn(33, 40), torch.randint(4, (33,))
    x[:, :20] = x[0, :20]
    batches = list(zip(x.split(size), y.split(size), strict=True))
    found, wanted = (
        saltflat.measure(model, batches, measures="relative_flatness", dtype=dtype, progress=False).values()
        for dtype in (torch.float32, torch.float64)
    )
    assert next(iter(found)).value == pytest.approx(next(iter(wanted)).value, rel=1e-3)
