"""Theorem 1 of Jia and Su against its definition, and what speaks against it."""

from math import e, exp, gamma, inf, log, pi, sqrt

import pytest
import torch
import torch.nn.functional as F
from bound_oracle import make_data, make_net
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call

import saltflat
from saltflat.bounds import Bound, bound_information, compute_bounds, compute_information_term, compute_soft_fisher
from saltflat.errors import LabelError, OptionError, ParameterError, SaltflatError


def compute_one(net: nn.Module, data: tuple[Tensor, Tensor], **options: float | str) -> Bound:
    return compute_bounds(net, data, bounds={"information": options})["information"]


def compute_gradients(net: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    rows = []
    for x, y in zip(*data, strict=True):
        loss = F.cross_entropy(net(x[None]), y[None])
        rows.append(torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, list(net.parameters()))]))
    return torch.stack(rows)


@pytest.mark.parametrize("weights", [1, 2, 7, 50])
@pytest.mark.parametrize("log_volume", [0.0, 3.0, -2.0])
def test_the_information_term_is_that_of_the_theorem(weights: int, log_volume: float) -> None:
    V, g = exp(log_volume), -1.5
    exact = (V * gamma(weights / 2 + 1)) ** (2 / weights) * exp(g) / (2 * pi)
    printed = weights * V ** (2 / weights) * pi ** (1 / weights) * exp(g) / (4 * pi * e)
    found = compute_information_term(g, weights, log_volume=log_volume)
    assert found == pytest.approx(exact, rel=1e-12)
    by_stirling = compute_information_term(g, weights, log_volume=log_volume, volume="stirling")
    assert by_stirling == pytest.approx(printed, rel=1e-12)
    if weights == 50:
        assert by_stirling / found == pytest.approx(50 ** (-1 / 50), rel=2e-3)  # -7.5 %
    assert compute_information_term(-inf, weights) == 0.0
    assert compute_information_term(inf, weights) == inf
    assert compute_information_term(1e6, weights) == inf


def test_the_bound_is_that_of_the_theorem() -> None:
    net, data = make_net(widths=(2, 2, 2)), make_data(classes=2, examples=30)
    found = compute_one(net, data, subset=10, log_volume=1.0)
    pool = compute_gradients(net, data).detach()
    gram = pool @ pool.T
    # The subsets of the measure, on the dense Gram matrix.
    reading = saltflat.measure(net, data, measures=["fisher_logdet(subset=10)", "fisher_trace"])
    t, W, N = found.terms, 12, 30
    assert t["gamma hat"] == reading["fisher_logdet(subset=10)"].value
    assert t["gamma / W"] == pytest.approx(t["gamma hat"] / 10 - log(W), rel=1e-12)
    assert t["its bound by the trace"] == pytest.approx(log(float(gram.trace()) / N) - log(W), rel=1e-10)
    L0 = float(F.cross_entropy(net(data[0]), data[1]).detach())
    A = (e * gamma(W / 2 + 1)) ** (2 / W) * exp(t["gamma / W"]) / (2 * pi)
    assert t["loss of the network"] == pytest.approx(L0, rel=1e-12)
    assert t["information"] == t["information, Gamma function"] == pytest.approx(A, rel=1e-10)
    confidence = 2 * sqrt((2 * L0 + 2 * A + log(2 * N / 0.05)) / (N - 1))
    assert t["confidence"] == pytest.approx(confidence, rel=1e-10)
    assert found.value == pytest.approx(L0 + A + confidence, rel=1e-12)
    assert found.value == bound_information(t["loss of the network"], t["information"], N)
    printed = compute_one(net, data, subset=10, log_volume=1.0, volume="stirling")
    assert printed.value == found.details["bound_stirling"] < found.value
    assert printed.terms["information"] == found.terms["information, Stirling"]
    assert found.loss == "cross_entropy"
    assert found.chance == pytest.approx(log(2))


def test_the_estimate_of_a_full_subset_is_the_determinant_of_all_gradients() -> None:
    net, data = make_net(widths=(6, 4)), make_data(inputs=6, classes=4, examples=8)
    found = compute_one(net, data, subset=8)
    J = compute_gradients(net, data)
    assert found.terms["gamma hat"] == pytest.approx(float(torch.linalg.slogdet(J @ J.T).logabsdet), rel=1e-9)


def test_the_trace_is_never_below_the_determinant() -> None:
    net, data = make_net(), make_data(examples=25)
    found = compute_one(net, data, subset=10)
    assert found.terms["gamma / W"] <= found.terms["its bound by the trace"]
    assert found.value <= found.details["bound_trace"]


def test_it_is_a_heuristic_and_says_why() -> None:
    found = compute_one(make_net(), make_data())
    assert found.kind == "heuristic"
    assert not found.is_valid
    violated = [each.text for each in found.assumptions if each.met is False]
    assert len(violated) == 5
    assert violated[:4] == [
        "The prior does not depend on the examples.",
        "The loss lies in [0, 1].",
        "The inequality of PAC-Bayes is one that was proved.",
        "The volume of the set of weights is known.",
    ]


def test_networks_that_can_be_rescaled_have_no_determinant() -> None:
    found = compute_one(make_net(), make_data())
    assert (found.details["gamma"], found.details["rescalings"]) == (-inf, 3)
    assert "3 independent rescalings of the weights leave the function unchanged" in " ".join(found.notes)
    # A linear classifier has none, and enough examples.
    linear = compute_one(nn.Linear(2, 3).double(), make_data())
    assert (linear.details["gamma"], linear.details["rescalings"]) == (None, 0)
    assert "rescalings" not in " ".join(linear.notes)
    assert [each.met for each in linear.assumptions][-1] is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_the_soft_fisher_matrix_sums_over_all_labels(smoothing: float) -> None:
    net, data = make_net(), make_data(examples=7)
    expected = torch.zeros(21, 21, dtype=torch.float64)
    for x, y in zip(*data, strict=True):
        for label in range(3):
            share = (1 - smoothing) * float(label == int(y)) + smoothing / 3
            g = compute_gradients(net, (x[None], torch.tensor([label])))[0]
            expected += share * torch.outer(g, g) / 7
    found = compute_soft_fisher(net, data, smoothing=smoothing)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_the_soft_fisher_matrix_is_the_hessian_where_the_labels_are_the_predictions() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    x, _ = make_data(examples=6)
    labels = net(x).softmax(1).detach()
    shapes = {name: value.shape for name, value in net.named_parameters()}

    def compute_loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        weights = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(net, weights, (x,)), labels)

    H = hessian(compute_loss, torch.cat([value.detach().reshape(-1) for value in net.parameters()]))
    torch.testing.assert_close(compute_soft_fisher(net, (x, labels)), H, rtol=1e-9, atol=1e-13)
    # With other labels it is not.
    assert not torch.allclose(compute_soft_fisher(net, (x, labels.flip(1))), H, rtol=0.01)


def test_bad_arguments_give_one_error() -> None:
    net, data = make_net(), make_data()
    with pytest.raises(OptionError, match="smoothing=2"):
        compute_soft_fisher(net, data, smoothing=2)
    with pytest.raises(ParameterError, match="at most 2,000 parameters"):
        compute_soft_fisher(nn.Linear(1000, 3), (torch.zeros(2, 1000), torch.zeros(2, dtype=torch.long)))
    with pytest.raises(LabelError, match="class numbers from 0 to 2"):
        compute_soft_fisher(net, (data[0], data[1] + 5))
    with pytest.raises(OptionError, match="log_volume="):
        compute_one(net, data, log_volume=inf)
    with pytest.raises(OptionError, match="volume='other'"):
        compute_one(net, data, volume="other")
    with pytest.raises(SaltflatError, match="at least 2 examples"):
        compute_one(net, (data[0][:1], data[1][:1]))
    with pytest.raises(OptionError, match="examples=1"):
        bound_information(0.1, 0.1, 1)
