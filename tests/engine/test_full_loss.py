"""Derivatives of the whole network against dense ones, and the statistics made from them against closed forms."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import product
from math import isnan
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from cases import CASES, Batch, Case, batched, examples_of, joined, problem, reals
from curvature_cases import Cube, CubeDetached, CubeOnce, cubed, dense
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import saltflat
from saltflat.engine.context import Context
from saltflat.engine.custom_losses import normalize_logits
from saltflat.engine.full_loss import (
    compute_accuracy_at,
    compute_gradient_at,
    compute_hessian_product,
    compute_loss_at,
    compute_moved_weights,
)
from saltflat.engine.losses import parse_loss
from saltflat.engine.noise import draw_normals
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session
from saltflat.errors import EmptyDataError, NotDefinedError, OptionError, UnknownNameError
from saltflat.statistics.example_gradients import input_jacobian
from saltflat.statistics.hessian import estimate_diagonal_once, find_top_eigenvalue, finite_difference, hessian_top
from saltflat.statistics.perturbations import adaptive_rise, average_rise, noise_tolerance, worst_rise

# Torch says so of any even kernel, and the kernel is even on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

CLASSIFIERS = ["biased_mlp", "max_and_average_pooling", "residual_with_batch_norm"]
# What torch cannot differentiate twice, and what it gets wrong without saying so.
NOT_TWICE = {"embedding_bag": "does not have", "weight_norm_parametrization": "are wrong"}
# Torch cannot differentiate these by one long row of all parameters, as the oracle does.
NOT_IN_A_ROW = {
    "checkpointed_functions",
    "embedding_with_sparse_gradients",
    "embedding_with_sparse_gradients_before_a_weight_set_by_its_parent",
}
BEFORE_AND_AFTER = {"biased_mlp": ("0", "2"), "squared_error": ("2", "4")}


@contextmanager
def setting_of(
    case: Case, batches: Sequence[Batch] | None = None, seed: int = 0, limit: int = 1 << 30, dtype: Any = None
) -> Iterator[Context]:
    data = batches or case.batches
    with open_session(case.model, "eval", data):
        yield Context(Problem.build(case.model, data, case.loss, dtype=dtype), parse_column_plan("exact"), seed, limit)


def in_a_row(vector: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in vector.values()])


def weights_of(case: Case) -> Tensor:
    return in_a_row({name: each.detach() for name, each in oracle.trainable(case.model).items()})


def rescaled(case: Case, first: str, second: str) -> Case:
    """The same function: every unit of one layer scaled by a factor of its own, and undone by the next layer."""
    model = deepcopy(case.model)
    before, after = model.get_submodule(first), model.get_submodule(second)
    assert isinstance(before, nn.Linear)
    assert isinstance(after, nn.Linear)
    factors = torch.logspace(-2, 2, before.out_features, dtype=torch.float64)
    with torch.no_grad():
        before.weight.mul_(factors[:, None])
        before.bias.mul_(factors)
        after.weight.div_(factors)
    return Case(model, case.batches, case.loss, case.loss_function)


@pytest.mark.parametrize("name", [name for name in CASES if name not in {*NOT_TWICE, *NOT_IN_A_ROW}])
def test_the_loss_and_its_derivatives_are_the_dense_ones(name: str) -> None:
    case = CASES[name]()
    value, slope, hessian = dense(name)
    with setting_of(case) as context:
        loss, gradient = compute_gradient_at(context)
        vector = draw_normals(context, 0)
        bent = compute_hessian_product(context, vector)
        assert compute_loss_at(context) == pytest.approx(value, rel=1e-10, abs=0)
    assert loss == pytest.approx(value, rel=1e-10, abs=0)
    assert list(gradient) == list(oracle.trainable(case.model))
    assert_close(in_a_row(gradient), slope, rtol=0, atol=1e-10 * float(slope.abs().max()))
    assert_close(in_a_row(bent), hessian @ in_a_row(vector), rtol=0, atol=1e-10 * float(hessian.abs().max()))


@pytest.mark.parametrize("name", NOT_TWICE)
def test_second_derivatives_that_torch_does_not_have_are_not_made_up(name: str) -> None:
    with setting_of(CASES[name]()) as context:
        with pytest.raises(NotDefinedError, match=NOT_TWICE[name]):
            hessian_top(context)
        with pytest.raises(NotDefinedError, match=NOT_TWICE[name]):
            finite_difference(context, kind="hutchinson")
        assert worst_rise(context).value["value"] > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("function", "reason"), [(CubeOnce, "once_differentiable"), (CubeDetached, "are wrong")])
def test_an_autograd_function_that_hides_its_second_derivative_is_refused(
    function: type[torch.autograd.Function], reason: str, dtype: torch.dtype
) -> None:
    with setting_of(cubed(function), dtype=dtype) as context, pytest.raises(NotDefinedError, match=reason) as caught:
        compute_hessian_product(context, draw_normals(context, 0))
    assert function.__name__ in str(caught.value)


def test_an_autograd_function_with_a_second_derivative_is_not_refused() -> None:
    with setting_of(cubed(Cube)) as context:
        vector = draw_normals(context, 0)
        found = in_a_row(compute_hessian_product(context, vector))
        step = 1e-5
        ends = [
            compute_gradient_at(context, compute_moved_weights(context, {n: s * step * v for n, v in vector.items()}))[
                1
            ]
            for s in (1, -1)
        ]
    differences = (in_a_row(ends[0]) - in_a_row(ends[1])) / (2 * step)
    assert_close(found, differences, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["biased_mlp", "sequence_with_ignored_positions", "squared_error"])
def test_splitting_the_data_changes_nothing(name: str) -> None:
    case = CASES[name]()
    examples = examples_of(case.batches)
    rises, tops = [], []
    for batches, limit in ((batched(examples, [len(examples)]), 1 << 30), (examples, 1 << 30), (case.batches, 1)):
        with setting_of(case, batches, limit=limit) as context:
            rises.append([average_rise(context).value["value"], worst_rise(context).value["value"]])
            tops.append(hessian_top(context).value["value"])
    assert_close(rises[1:], [rises[0]] * 2, rtol=1e-9, atol=0)
    assert_close(tops[1:], [tops[0]] * 2, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["biased_mlp", "residual_with_batch_norm", "tied_embedding_and_output"])
def test_the_users_model_is_left_as_it_was(name: str) -> None:
    case = CASES[name]()
    before = {key: value.clone() for key, value in case.model.state_dict().items()}
    kept = {key: value.data_ptr() for key, value in case.model.state_dict().items()}
    with setting_of(case) as context:
        worst_rise(context, steps=3)
        hessian_top(context)
        finite_difference(context, draws=2)
        noise_tolerance(context, depth=2)
    after = case.model.state_dict()
    assert_close(after, before, rtol=0, atol=0)
    assert {key: value.data_ptr() for key, value in after.items()} == kept
    assert all(parameter.grad is None for parameter in case.model.parameters())


@pytest.mark.parametrize("name", ["biased_mlp", "gelu_mlp", "attention_by_hand", "squared_error", "one_example"])
@pytest.mark.parametrize("scaled", ["none", "quotient"])
def test_the_largest_eigenvalue_is_the_dense_one(name: str, scaled: str) -> None:
    case = CASES[name]()
    _, _, hessian = dense(name)
    roots = [each.detach().norm().expand(each.numel()) for each in oracle.trainable(case.model).values()]
    root = torch.cat(roots) if scaled == "quotient" else torch.ones(len(hessian), dtype=torch.float64)
    with setting_of(case) as context:
        found = hessian_top(context, scaled=scaled).value
    wanted = float(torch.linalg.eigvalsh(root[:, None] * hessian * root)[-1])
    assert found["value"] == pytest.approx(wanted, rel=1e-8, abs=0)
    assert found["converged"]
    assert found["residual"] < 1e-3
    assert found["bound"] < 1e-8
    assert found["products"] < 200


def test_the_largest_eigenvalue_is_not_the_largest_in_size() -> None:
    values = np.concatenate([[-100.0], np.linspace(-1, 2, 99)])
    top = find_top_eigenvalue(aslinearoperator(np.diag(values)), np.ones(100))
    assert top.value == pytest.approx(2, rel=1e-8)
    assert abs(float(top.vector[-1])) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 40])
def test_an_operator_of_zeros_has_the_eigenvalue_zero(size: int) -> None:
    top = find_top_eigenvalue(np.zeros((size, size)), np.ones(size))
    assert (top.value, top.residual) == (0, 0)


@pytest.mark.parametrize("name", ["biased_mlp", "gelu_mlp", "squared_error"])
def test_the_average_rise_for_small_radii_is_half_the_weighted_diagonal(name: str) -> None:
    case = CASES[name]()
    _, _, hessian = dense(name)
    wanted = float((hessian.diagonal() * weights_of(case).square()).sum()) / 2
    radius = 1e-3
    with setting_of(case) as context:
        found = average_rise(context, radius=radius, draws=800).value
    value, stderr = found["value"] / radius**2, found["stderr"] / radius**2
    assert stderr < 0.2 * abs(wanted)
    assert abs(value - wanted) < 4 * stderr
    assert_close(value, float(np.mean(found["pairs"])) / radius**2)


def test_error_bars_of_the_average_rise_cover_the_truth_as_often_as_they_say() -> None:
    case = CASES["biased_mlp"]()
    covered = 0
    with setting_of(case, [joined(case.batches)], seed=10**6) as context:
        truth = average_rise(context, draws=2000).value
        for seed in range(200):
            context.seed = seed
            found = average_rise(context, draws=8).value
            covered += abs(found["value"] - truth["value"]) < 1.96 * found["stderr"]
    assert 180 <= covered <= 198  # 190 expected, with a standard deviation of 3


@pytest.mark.parametrize("name", ["biased_mlp", "gelu_mlp", "squared_error"])
@pytest.mark.parametrize("adaptive", [True, False])
def test_the_worst_rise_for_small_radii_is_that_of_the_quadratic_model(name: str, adaptive: bool) -> None:
    case = CASES[name]()
    _, slope, hessian = dense(name)
    scale = weights_of(case).abs() if adaptive else torch.ones_like(slope)
    g, A = scale * slope, scale[:, None] * hessian * scale
    radius = 1e-3
    with setting_of(case) as context:
        found = worst_rise(context, radius=radius, adaptive=adaptive).value
    along = g / g.norm()
    # The maximum is at the gradient's direction, to first order in the radius: there the curvature is taken.
    wanted = radius * g.norm() + radius**2 / 2 * (along @ A @ along)
    assert found["value"] == pytest.approx(float(wanted), rel=1e-4)
    assert found["value"] - float(radius * g.norm()) == pytest.approx(
        float(radius**2 / 2 * (along @ A @ along)), rel=0.2
    )
    assert found["slope"] == pytest.approx(float(g.norm()), rel=1e-10)
    assert found["value"] >= found["first_step"] > 0
    assert found["gap"] < 1e-3


def at_a_minimum() -> Case:
    """Linear regression on targets that its weights reproduce: the gradient is zero, the loss quadratic."""
    model = nn.Linear(5, 2).double()
    inputs = reals(9, 5)
    exact = model(inputs).detach()
    return Case(model, batched(examples_of([(inputs, exact)]), (5, 4)), "mse", F.mse_loss)


@pytest.mark.parametrize("adaptive", [True, False])
def test_at_a_minimum_the_worst_rise_is_half_the_largest_eigenvalue(adaptive: bool) -> None:
    torch.manual_seed(0)
    case = at_a_minimum()
    names = oracle.trainable(case.model)
    inputs = torch.cat([joined(case.batches)[0], torch.ones(9, 1, dtype=torch.float64)], 1)
    # Two outputs, each with the curvature (2 / 2) mean x x'; the bias is the last input.
    hessian = torch.block_diag(*[inputs.T @ inputs / 9] * 2)
    rows = torch.cat([names["weight"].detach(), names["bias"].detach()[:, None]], 1).flatten()
    scale = rows.abs() if adaptive else torch.ones_like(rows)
    wanted = 0.05**2 / 2 * float(torch.linalg.eigvalsh(scale[:, None] * hessian * scale)[-1])
    with setting_of(case) as context:
        found = worst_rise(context, radius=0.05, steps=60, adaptive=adaptive).value
        few = worst_rise(context, radius=0.05, adaptive=adaptive).value
    assert found["value"] == pytest.approx(wanted, rel=1e-6)
    assert 0.9 * wanted < few["value"] <= wanted * (1 + 1e-9)
    assert found["gap"] < 1e-3


def test_where_the_loss_has_a_maximum_inside_the_ball_it_is_found() -> None:
    def hill(outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets).square().sum()

    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1.0)
    ones = torch.ones(1, 1, dtype=torch.float64)
    case = Case(model, [(ones, 1.3 * ones)], hill, hill)
    with setting_of(case) as context:
        found = worst_rise(context, radius=1.0, steps=40).value
    assert found["value"] == pytest.approx(0.09, rel=1e-9)
    assert found["gap"] < 1e-3


@pytest.mark.parametrize("name", BEFORE_AND_AFTER)
def test_adaptive_rises_do_not_change_with_the_scale_of_units_and_the_plain_one_does(name: str) -> None:
    one = CASES[name]()
    two = rescaled(one, *BEFORE_AND_AFTER[name])
    found = []
    for case in (one, two):
        with setting_of(case) as context:
            found.append(
                [
                    average_rise(context).value["value"],
                    worst_rise(context).value["value"],
                    worst_rise(context, adaptive=False).value["value"],
                    hessian_top(context).value["value"],
                ]
            )
    assert_close(found[1][:2], found[0][:2], rtol=1e-9, atol=0)
    for kept, changed in zip(found[0][2:], found[1][2:], strict=True):
        assert abs(changed / kept - 1) > 0.1


def test_the_quotient_eigenvalue_does_not_change_with_the_scale_of_layers() -> None:
    one = CASES["biased_mlp"]()
    two = Case(deepcopy(one.model), one.batches, one.loss, one.loss_function)
    with torch.no_grad():
        two.model.get_parameter("0.weight").mul_(30)
        two.model.get_parameter("0.bias").mul_(30)
        two.model.get_parameter("2.weight").div_(30)
    values = []
    for case in (one, two):
        with setting_of(case) as context:
            values.append(hessian_top(context, scaled="quotient").value["value"])
    assert values[1] == pytest.approx(values[0], rel=1e-8)


def test_the_noise_of_a_parameter_does_not_depend_on_the_others() -> None:
    case = CASES["biased_mlp"]()
    with setting_of(case) as context:
        every, other = draw_normals(context, 3), draw_normals(context, 4)
    with open_session(case.model, "eval"):
        chosen = Problem.build(case.model, case.batches, case.loss, layers=["2"])
        some = draw_normals(Context(chosen, parse_column_plan("exact"), 0, 1 << 30), 3)
    assert list(some) == ["2.weight", "2.bias"]
    for name, each in some.items():
        assert torch.equal(each, every[name])
        assert not torch.equal(each, other[name])


def accuracy(case: Case, model: nn.Module) -> float:
    inputs, targets = joined(case.batches)
    return float((model(inputs).argmax(1) == targets).double().mean())


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_accuracy_is_the_fraction_of_right_classes(name: str) -> None:
    case = CASES[name]()
    with setting_of(case) as context:
        assert compute_accuracy_at(context) == pytest.approx(accuracy(case, case.model), rel=1e-12)


def test_ignored_positions_count_neither_as_right_nor_as_wrong() -> None:
    case = CASES["sequence_with_ignored_positions"]()
    inputs, targets = joined(case.batches)
    kept = targets != -100
    wanted = (case.model(inputs).argmax(-1) == targets)[kept].double().mean()
    with setting_of(case) as context:
        assert compute_accuracy_at(context) == pytest.approx(float(wanted), rel=1e-12)


def test_probabilities_count_by_their_largest_and_binary_targets_one_by_one() -> None:
    case = CASES["probability_targets"]()
    inputs, targets = joined(case.batches)
    with setting_of(case) as context:
        wanted = (case.model(inputs).argmax(1) == targets.argmax(1)).double().mean()
        assert compute_accuracy_at(context) == pytest.approx(float(wanted), rel=1e-12)
    case = CASES["binary_cross_entropy"]()
    inputs, targets = joined(case.batches)
    with setting_of(case) as context:
        assert compute_accuracy_at(context) == pytest.approx(
            float(((case.model(inputs) > 0) == (targets > 0.5)).double().mean()), rel=1e-12
        )


def certain() -> Case:
    """A network that is right about all 40 examples: the class is the largest input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        inputs = reals(40, 3)
        model = nn.Linear(3, 3).double()
        with torch.no_grad():
            model.weight.copy_(torch.eye(3))
            model.bias.zero_()
        examples = examples_of([(inputs, inputs.argmax(1))])
        return Case(model, batched(examples, (25, 15)), "cross_entropy", F.cross_entropy)


@pytest.mark.parametrize("aware", [True, False])
def test_noise_is_borne_up_to_sigma_and_not_beyond(aware: bool) -> None:
    case = certain()
    with setting_of(case) as context:
        found = noise_tolerance(context, magnitude_aware=aware).value
        noise = [draw_normals(context, draw) for draw in range(10)]

    def mean_drop(sigma: float) -> float:
        drops = []
        for draw in noise:
            model = deepcopy(case.model)
            with torch.no_grad():
                for name, each in model.named_parameters():
                    size = (sigma**2 * each.square() + 1e-6).sqrt() if aware else sigma
                    each.add_(size * draw[name])
            drops.append(1 - accuracy(case, model))
        return float(np.mean(drops))

    low, high = found["bracket"]
    assert found["accuracy"] == 1
    assert found["sigma"] == low < high < low * (1 + 1e-5)
    assert mean_drop(low) <= 0.1 < mean_drop(high)
    assert_close([1 - mean_drop(low), 1 - mean_drop(high)], found["accuracies"], rtol=1e-12, atol=0)


def test_an_accuracy_that_cannot_drop_has_no_sigma() -> None:
    case = certain()
    inputs, targets = joined(case.batches)
    wrong: list[Batch] = [(inputs, (targets + 1) % 3)]
    with setting_of(case, wrong) as context:
        found = noise_tolerance(context)
    assert isnan(found.value["sigma"])
    assert "cannot drop" in found.notes[0]


def test_an_accuracy_that_never_drops_has_no_sigma() -> None:
    case = certain()
    with setting_of(case) as context:
        found = noise_tolerance(context, drop=0.99)
    assert isnan(found.value["sigma"])
    assert "never drops" in found.notes[0]
    assert found.value["bracket"][0] > 10


def test_an_accuracy_that_drops_at_once_has_no_sigma() -> None:
    case = certain()
    with setting_of(case) as context:
        found = noise_tolerance(context, magnitude_aware=True, epsilon=100.0)
    assert isnan(found.value["sigma"])
    assert "as small as" in found.notes[0]


@pytest.mark.parametrize("name", ["biased_mlp", "max_and_average_pooling", "class_weights", "linear_on_sequences"])
def test_the_input_jacobian_is_that_of_the_probabilities(name: str) -> None:
    case = CASES[name]()
    squares = []
    for example in examples_of(case.batches):
        assert not isinstance(example, dict)
        jacobian: Tensor = torch.autograd.functional.jacobian(lambda x: case.model(x).softmax(1), example[0])
        squares.append(float(torch.linalg.matrix_norm(jacobian.reshape(3, -1), 2)) ** 2)
    for limit in (1 << 30, 1):
        with setting_of(case, limit=limit) as context:
            assert input_jacobian(context).value == pytest.approx(float(np.mean(squares)), rel=1e-10)


@pytest.mark.parametrize("name", ["squared_error", "tied_embedding_and_output", "bilinear_layer_of_two_inputs"])
def test_without_probabilities_or_a_real_input_there_is_no_input_jacobian(name: str) -> None:
    with setting_of(CASES[name]()) as context, pytest.raises(NotDefinedError, match="needs"):
        input_jacobian(context)


def test_without_classes_there_is_no_noise_tolerance() -> None:
    with setting_of(CASES["squared_error"]()) as context, pytest.raises(NotDefinedError, match="SquaredError"):
        noise_tolerance(context)


def small_regression() -> Case:
    torch.manual_seed(0)
    return problem(nn.Linear(4, 1, bias=False), reals(6, 4), reals(6, 1), "mse")


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["corrected", "printed", "hutchinson"])
def test_over_all_signs_the_finite_differences_average_to_what_they_should(kind: str, epsilon: float) -> None:
    case = small_regression()
    inputs, _ = joined(case.batches)
    diagonal = 2 * inputs.square().mean(0)
    sizes = weights_of(case).abs()
    wanted = diagonal * sizes / (sizes + epsilon) if kind == "printed" else diagonal
    with setting_of(case) as context:
        each = [
            estimate_diagonal_once(context, {"weight": torch.tensor([s], dtype=torch.float64)}, kind, 1e-2, epsilon)[
                "weight"
            ]
            for s in product([-1.0, 1.0], repeat=4)
        ]
    assert_close(torch.stack(each).mean(0)[0], wanted, rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", ["corrected", "gaussian", "hutchinson"])
@pytest.mark.parametrize("name", ["tanh_mlp", "squared_error"])
def test_finite_differences_estimate_the_true_hessians_diagonal(name: str, kind: str) -> None:
    case = CASES[name]()
    draws = 200
    with setting_of(case) as context:
        found = finite_difference(context, kind=kind, step=1e-4, draws=draws)
    mean = in_a_row(found.value)
    assert found.replicates is not None
    left_out = torch.stack([in_a_row(each) for each in found.replicates])
    assert len(left_out) == draws
    assert_close(left_out.mean(0), mean)
    # Jackknife: for a mean it is the usual standard error.
    stderr = ((left_out - mean).square().sum(0) * (draws - 1) / draws).sqrt()
    off = (mean - dense(name)[2].diagonal()) / stderr.clamp(min=1e-9)
    assert off.abs().max() < 5
    assert off.square().mean() < 2
    assert stderr.median() > 1e-6


def test_a_gaussian_estimate_is_what_its_definition_says() -> None:
    case, step, draws = CASES["tanh_mlp"](), 1e-3, 5
    inputs, targets = joined(case.batches)
    model = deepcopy(case.model)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}

    def differentiate(direction: dict[str, Tensor], step: float) -> dict[str, Tensor]:
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(start[name] + step * direction[name])
        loss = case.loss_function(model(inputs), targets)
        return dict(zip(start, torch.autograd.grad(loss, list(model.parameters())), strict=True))

    with setting_of(case) as context:
        found = finite_difference(context, kind="gaussian", draws=draws)
        again = finite_difference(context, kind="gaussian", draws=draws, step=step)
        directions = [draw_normals(context, draw) for draw in range(draws)]
    each = []
    for e in directions:
        there, back = differentiate(e, step), differentiate(e, -step)
        each.append({name: e[name] * (there[name] - back[name]) / (2 * step) for name in start})
    assert found.replicates is not None
    assert not found.exact
    for name in start:
        assert torch.equal(found.value[name], again.value[name]), "the default is the step of the definition above"
        values = torch.stack([one[name] for one in each])
        size = float(values.abs().max())
        assert_close(found.value[name], values.mean(0), rtol=1e-10, atol=1e-10 * size)
        for left_out, replicate in enumerate(found.replicates):
            rest = torch.cat([values[:left_out], values[left_out + 1 :]]).mean(0)
            assert_close(replicate[name], rest, rtol=1e-10, atol=1e-10 * size)


def test_a_gaussian_estimate_of_a_quadratic_is_unbiased() -> None:
    case = small_regression()
    inputs, _ = joined(case.batches)
    hessian = 2 * inputs.mT @ inputs / len(inputs)
    # The variance of e_i (H e)_i over standard normal e is known: sum_j H_ij^2 + H_ii^2.
    variance = hessian.square().sum(1) + hessian.diagonal().square()
    seeds, draws = 5, 400
    values, variances = [], []
    for seed in range(seeds):
        with setting_of(case, seed=seed) as context:
            found = finite_difference(context, kind="gaussian", draws=draws)
        assert found.replicates is not None
        left_out = torch.stack([each["weight"][0] for each in found.replicates])
        values.append(found.value["weight"][0])
        variances.append((left_out - left_out.mean(0)).square().sum(0) * (draws - 1) / draws)
    stderr = (variance / (seeds * draws)).sqrt()
    assert bool(((torch.stack(values).mean(0) - hessian.diagonal()).abs() < 3 * stderr).all())
    assert_close(torch.stack(variances).mean(0), variance / draws, rtol=0.25, atol=0)


def test_the_default_step_of_a_gaussian_estimate_is_well_above_the_rounding_of_float32() -> None:
    off = {}
    for step in (None, 1e-5):
        found = []
        for dtype in (torch.float32, torch.float64):
            with setting_of(CASES["tanh_mlp"](), dtype=dtype) as context:
                found.append(in_a_row(finite_difference(context, kind="gaussian", draws=3, step=step).value))
        off[step] = float((found[0] - found[1]).norm() / found[1].norm())
    assert off[None] < 1e-3
    assert off[1e-5] > 20 * off[None]


def test_a_gaussian_estimate_moves_weights_of_zero_and_depends_on_no_scale_of_them() -> None:
    case = small_regression()
    with setting_of(case) as context:
        before = finite_difference(context, kind="gaussian", draws=3)
    with torch.no_grad():
        case.model.get_parameter("weight")[0, 1] = 0
    with setting_of(case) as context:
        found = finite_difference(context, kind="gaussian", draws=3)
    assert found.notes == ()
    # The loss is quadratic: its Hessian is the same everywhere.
    assert_close(found.value["weight"], before.value["weight"], rtol=1e-9, atol=1e-9)


def test_finite_differences_with_epsilon_zero_follow_the_scale_of_the_weights() -> None:
    one = CASES["squared_error"]()
    two = rescaled(one, "2", "4")
    scaled = {}
    for epsilon in (0.0, 0.1):
        values = []
        for case in (one, two):
            with setting_of(case) as context:
                found = in_a_row(finite_difference(context, epsilon=epsilon, draws=2).value)
            values.append(found * weights_of(case).square())
        scaled[epsilon] = values
    assert_close(scaled[0.0][1], scaled[0.0][0], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(scaled[0.1][1], scaled[0.1][0], rtol=0.1)


def test_weights_of_zero_are_named_and_do_not_spoil_the_others() -> None:
    case = small_regression()
    with torch.no_grad():
        case.model.get_parameter("weight")[0, 1] = 0
    with setting_of(case) as context:
        found = finite_difference(context)
    assert found.value["weight"].isfinite().all()
    assert found.value["weight"][0, 1] == 0
    assert "1 parameters are zero" in found.notes[0]


def test_a_case_is_one_of_the_two_rises() -> None:
    case = CASES["biased_mlp"]()
    with setting_of(case) as context:
        assert adaptive_rise(context, radius=0.1).value == average_rise(context, radius=0.1).value
        assert adaptive_rise(context, case="worst", steps=3).value == worst_rise(context, steps=3).value
        with pytest.raises(UnknownNameError, match="average"):
            adaptive_rise(context, case="mean")


def test_a_loss_that_overflows_is_no_number_on_average_and_no_maximum() -> None:
    with setting_of(CASES["biased_mlp"]()) as context:
        found = average_rise(context, radius=1e200)
        worst = worst_rise(context, radius=1e200).value["value"]
    assert isnan(found.value["value"])
    assert "overflows" in found.notes[0]
    assert 0 <= worst < float("inf")


def test_options_that_mean_nothing_are_refused() -> None:
    with setting_of(CASES["biased_mlp"]()) as context:
        for wrong in ({"radius": 0.0}, {"radius": float("nan")}, {"draws": 7}, {"draws": 2}, {"draws": 4.0}):
            with pytest.raises(OptionError, match=next(iter(wrong))):
                average_rise(context, **wrong)
        for other in ({"draws": 1}, {"step": -1.0}, {"epsilon": -1.0}):
            with pytest.raises(OptionError, match=next(iter(other))):
                finite_difference(context, **other)
        with pytest.raises(OptionError, match=r"Expected no epsilon with kind='gaussian'.*epsilon=0\.1\. Try "):
            finite_difference(context, kind="gaussian", epsilon=0.1)
        with pytest.raises(UnknownNameError, match="corrected"):
            finite_difference(context, kind="correct")
        with pytest.raises(UnknownNameError, match="quotient"):
            hessian_top(context, scaled="quotients")


def test_data_that_is_all_ignored_has_no_loss() -> None:
    case = CASES["sequence_with_ignored_positions"]()
    inputs, targets = joined(case.batches)
    with setting_of(case, [(inputs, torch.full_like(targets, -100))]) as context, pytest.raises(EmptyDataError):
        compute_loss_at(context)


def test_single_precision_gives_the_same_to_its_rounding() -> None:
    case = CASES["biased_mlp"]()
    found = []
    for dtype in (torch.float64, torch.float32):
        with setting_of(case, dtype=dtype) as context:
            top = hessian_top(context).value
            assert top["converged"]
            found.append([top["value"], worst_rise(context).value["value"], average_rise(context).value["value"]])
    assert_close(found[1], found[0], rtol=1e-4, atol=0)


def test_moved_weights_are_the_parameters_plus_the_step() -> None:
    case = CASES["biased_mlp"]()
    names = oracle.trainable(case.model)
    with setting_of(case) as context:
        there = compute_moved_weights(context, {name: torch.ones_like(each) for name, each in names.items()})
        with torch.no_grad():
            for each in names.values():
                each.add_(1)
        assert compute_loss_at(context, there) == pytest.approx(float(oracle.loss_at(case, _outputs(case))), rel=1e-10)


def _outputs(case: Case) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = case.model(joined(case.batches)[0])
    return outputs


def test_measures_ask_for_the_search_that_they_are_about() -> None:
    case = certain()
    names = ["adaptive_sharpness(radius=0.1)", "adaptive_sharpness(case='worst')", "sharpness", "pac_bayes_flatness"]
    report = saltflat.measure(case.model, case.batches, case.loss, names, seed=3, certificate=False)
    with setting_of(case, seed=3) as context:
        average = average_rise(context, radius=0.1).value
        relative, absolute = (worst_rise(context, adaptive=adaptive).value for adaptive in (True, False))
        tolerance = noise_tolerance(context).value
    assert report[names[0]].value == pytest.approx(average["value"], rel=1e-12)
    assert report[names[0]].stderr == pytest.approx(average["stderr"], rel=1e-12)
    assert report[names[1]].value == pytest.approx(relative["value"], rel=1e-12)
    assert report["sharpness"].value == pytest.approx(absolute["value"], rel=1e-12)
    assert report["pac_bayes_flatness"].value == pytest.approx(tolerance["sigma"] ** -2, rel=1e-12)
    assert not any(report[name].exact for name in names)
    assert "lower bound" in report["sharpness"].notes[0]
    assert relative["value"] != pytest.approx(absolute["value"], rel=0.01)


def test_the_distance_from_the_start_is_the_length_of_the_difference() -> None:
    case = CASES["biased_mlp"]()
    start = {name: value + 0.5 for name, value in case.model.state_dict().items()}
    report = saltflat.measure(case.model, case.batches, measures="distance_from_init", initial=start, certificate=False)
    found = report["distance_from_init"]
    assert found.value == pytest.approx(0.5 * len(weights_of(case)) ** 0.5, rel=1e-12)
    assert found.layers["0.weight"] == pytest.approx(0.5 * 24**0.5, rel=1e-12)


def test_normalised_logits_leave_the_accuracy_alone() -> None:
    case = CASES["biased_mlp"]()
    with open_session(case.model, "eval", case.batches):
        scaled = Problem.build(case.model, case.batches, normalize_logits(parse_loss("cross_entropy"), "std"))
        found = compute_accuracy_at(Context(scaled, parse_column_plan("exact"), 0, 1 << 30))
    assert found == pytest.approx(accuracy(case, case.model), rel=1e-12)
