"""The oracle against what can be written by hand."""

import oracle
import pytest
import torch
from cases import CASES, Case, Net, examples_of, integers, joined, problem, reals
from torch import Tensor, nn
from torch.testing import assert_close

# The network is piecewise linear in each parameter, so that the Hessian of each block is its Gauss-Newton matrix.
PIECEWISE_LINEAR = [
    "biased_mlp",
    "in_place_relu",
    "grouped_dilated_strided_convolution",
    "max_and_average_pooling",
    "residual_with_batch_norm",
    "positions_folded_into_the_examples",
    "class_weights_and_label_smoothing",
    "squared_error",
    "binary_cross_entropy",
    "custom_loss_with_an_indefinite_output_hessian",
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_small_in_float64_and_has_finite_statistics(name: str) -> None:
    case = CASES[name]()
    assert case.name == name
    assert sum(parameter.numel() for parameter in case.model.parameters()) <= 300
    assert len(examples_of(case.batches)) <= 8
    assert all(parameter.dtype == torch.float64 for parameter in case.model.parameters())
    assert oracle.loss(case).isfinite()
    for statistic in (oracle.curvature_diagonal, oracle.curvature_trace, oracle.gradient_second_moment):
        values = statistic(case)
        assert values.keys() == oracle.trainable(case.model).keys()
        assert all(value.isfinite().all() for value in values.values())
        assert any(value.any() for value in values.values())


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CASES)
def test_examples_do_not_mix_and_jacobians_give_the_gradient_of_the_loss(name: str) -> None:
    case = CASES[name]()
    parameters = oracle.trainable(case.model)
    alone = oracle.outputs_of(case, *oracle.frozen_copy(case.model))
    # Nothing is swapped here: the parameters are the model's own, and the batches go in whole.
    outputs = torch.cat([oracle.output_of(case.model.eval(), {}, batch) for batch in case.batches])
    assert_close(outputs, alone, rtol=1e-12, atol=1e-13)
    gradients = torch.autograd.grad(oracle.loss_at(case, outputs), list(parameters.values()), allow_unused=True)
    parts = oracle.linearized(case)
    for (key, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        mine = torch.einsum("nkp,nk->p", parts.jacobians[key], parts.slopes).reshape(parameter.shape)
        wanted = torch.zeros_like(mine) if gradient is None else gradient.to_dense()
        assert_close(mine, wanted, rtol=1e-11, atol=1e-13)


def test_a_case_is_built_the_same_each_time_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, second = CASES["biased_mlp"](), CASES["biased_mlp"]()
    assert_close(dict(first.model.named_parameters()), dict(second.model.named_parameters()), rtol=0, atol=0)
    assert_close(joined(first.batches), joined(second.batches), rtol=0, atol=0)
    assert_close(torch.get_rng_state(), before, rtol=0, atol=0)


def test_linear_regression_has_the_mean_squared_inputs_on_its_diagonal() -> None:
    x, y = reals(5, 3), reals(5, 2)
    case = problem(nn.Linear(3, 2), x, y, "mse")
    # L = 1/(2N) sum_nk (w_k x_n - y_nk)^2, as two outputs share the mean: the second derivative is 2/2 mean x^2.
    squares = x.square().mean(0)
    assert_close(oracle.curvature_diagonal(case), {"weight": squares.expand(2, 3), "bias": torch.ones(2).double()})
    assert_close(oracle.curvature_trace(case), {"weight": 2 * squares.sum(), "bias": torch.tensor(2.0).double()})
    # l_n = 1/2 sum_k r_nk^2.
    residual = case.model(x).detach() - y
    moment = torch.einsum("nk,ni->ki", residual.square(), x.square()) / 5
    assert_close(
        oracle.gradient_second_moment(case), {"weight": moment, "bias": residual.square().mean(0)}, rtol=1e-12, atol=0
    )
    assert_close(oracle.loss(case), residual.square().mean())


def test_softmax_regression_has_p_times_one_minus_p_on_its_diagonal() -> None:
    x, y = reals(6, 4), integers(3, 6)
    case = problem(nn.Linear(4, 3), x, y)
    p = probabilities(case, x)
    assert_close(
        oracle.curvature_diagonal(case),
        {"weight": torch.einsum("nk,ni->ki", p * (1 - p), x.square()) / 6, "bias": (p * (1 - p)).mean(0)},
        rtol=1e-12,
        atol=0,
    )
    error = (p - nn.functional.one_hot(y, 3)).square()
    assert_close(
        oracle.gradient_second_moment(case),
        {"weight": torch.einsum("nk,ni->ki", error, x.square()) / 6, "bias": error.mean(0)},
        rtol=1e-12,
        atol=0,
    )


def test_class_weights_and_ignored_labels_weigh_each_example_by_its_share() -> None:
    x, y = reals(4, 2), torch.tensor([0, 2, 1, 0])
    weight = torch.tensor([1.0, 5.0, 3.0], dtype=torch.float64)
    case = problem(nn.Linear(2, 3), x, y, nn.CrossEntropyLoss(weight=weight, ignore_index=1))
    p = probabilities(case, x)
    share = torch.tensor([1.0, 3.0, 0.0, 1.0], dtype=torch.float64) / 5
    error = 4 * share.unsqueeze(1) * (p - nn.functional.one_hot(y, 3))
    assert_close(oracle.curvature_diagonal(case)["bias"], share @ (p * (1 - p)), rtol=1e-12, atol=0)
    assert_close(oracle.gradient_second_moment(case)["bias"], error.square().mean(0), rtol=1e-12, atol=0)
    assert_close(oracle.loss(case), -share @ p.gather(1, y.unsqueeze(1)).squeeze(1).log())


def test_a_linear_called_twice_is_differentiated_through_both_calls() -> None:
    x = reals(5, 1)
    case = problem(
        Net(lambda net, x: net.layer(net.layer(x)), layer=nn.Linear(1, 1, bias=False)), x, reals(5, 1), "mse"
    )
    w = case.model.get_parameter("layer.weight").detach()
    # f = w^2 x, df/dw = 2 w x, and the squared error has output curvature 2.
    assert_close(oracle.curvature_diagonal(case), {"layer.weight": 2 * (2 * w * x).square().mean().reshape(1, 1)})


def test_an_embedding_row_counts_each_of_its_uses_before_squaring() -> None:
    model = Net(lambda net, tokens: net.embed(tokens).sum(1), embed=nn.Embedding(3, 1))
    case = problem(model, torch.tensor([[0, 0], [0, 1]]), reals(2, 1), "mse", sizes=(2,))
    # df/d row 0 is 2 and 1, df/d row 1 is 0 and 1, row 2 is not used.
    expected = 2 * torch.tensor([[(4 + 1) / 2], [1 / 2], [0.0]], dtype=torch.float64)
    assert_close(oracle.curvature_diagonal(case), {"embed.weight": expected})


@pytest.mark.parametrize("name", PIECEWISE_LINEAR)
def test_gauss_newton_is_the_hessian_where_the_network_is_piecewise_linear(name: str) -> None:
    case = CASES[name]()
    for parameter in oracle.trainable(case.model):
        hessian = oracle.hessian_block(case, parameter)
        scale = float(hessian.abs().max())
        assert_close(oracle.gauss_newton_block(case, parameter), hessian, rtol=0, atol=1e-12 * scale)
        assert_close(
            oracle.curvature_diagonal(case)[parameter].flatten(), hessian.diagonal(), rtol=0, atol=1e-12 * scale
        )


@pytest.mark.parametrize("name", ["gelu_mlp", "tanh_mlp"])
def test_gauss_newton_is_not_the_hessian_where_the_network_bends(name: str) -> None:
    case = CASES[name]()
    hessian = oracle.hessian_block(case, "0.weight").diagonal()
    gap = oracle.gauss_newton_block(case, "0.weight").diagonal() - hessian
    assert gap.norm() > 0.01 * hessian.norm()


def probabilities(case: Case, inputs: Tensor) -> Tensor:
    outputs: Tensor = case.model(inputs)
    return outputs.detach().softmax(1)
