"""Parameters used outside of layers are swept together with the others, and the numbers are those of the definition."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from cases import Case, Net
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session
from saltflat.engine.strategy import Probe, run_probe

WIDTH, LENGTH, COUNT, CLASSES = 4, 5, 7, 3
F64 = torch.float64
Function = Callable[[Any, Tensor], Any]
Parts = Callable[[], dict[str, nn.Module | nn.Parameter]]


def draw(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def add_token(net: Any, x: Tensor) -> Any:
    return torch.cat([net.token.expand(len(x), -1, -1), x], 1) + net.positions


def repeat_token(net: Any, x: Tensor) -> Any:
    return torch.cat([net.token.repeat(len(x), 2, 1), x], 1)


def bias_windows(net: Any, x: Tensor) -> Any:
    windows = x[:, :4].reshape(-1, 2, WIDTH)  # two of each example
    scores = windows @ windows.mT + net.table[torch.tensor([1, 2, 0, 1])].reshape(2, 2)
    return (scores.softmax(-1) @ windows).reshape(len(x), 4, WIDTH)


def bias_positions(net: Any, x: Tensor) -> Any:
    places = torch.arange(x.shape[1])
    bias = net.far((places[:, None] - places).clamp(-2, 2) + 2).permute(2, 0, 1)
    return (x @ x.mT + bias).softmax(-1) @ x


def bias_attention(net: Any, x: Tensor) -> Any:
    heads = x.unsqueeze(1)
    return F.scaled_dot_product_attention(heads, heads, heads, net.bias).squeeze(1)


def bias_by_new_tensors(net: Any, x: Tensor) -> Any:
    bias = net.bias + x.new_zeros(LENGTH, LENGTH).fill_(0.5)
    positions = net.positions * x.new_ones(len(x), 1, WIDTH)
    return (x @ x.mT + bias).softmax(-1) @ (x + positions)


def add_network_of_positions(net: Any, x: Tensor) -> Any:
    places = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    return x + net.second(net.first(places).tanh())


def scale_branch(net: Any, x: Tensor) -> Any:
    return x + net.gamma * net.part(x)


def project_fused(net: Any, x: Tensor) -> Any:
    bias = torch.cat([net.q_bias, torch.zeros_like(net.q_bias), net.v_bias])
    q, k, v = F.linear(x, net.qkv, bias).chunk(3, -1)
    return (q @ k.mT).softmax(-1) @ v


def adapt(net: Any, x: Tensor) -> Any:
    return net.part(x) + x @ net.down.T @ net.up.T


def tie(net: Any, x: Tensor) -> Any:
    tokens = x.argmax(-1)
    return F.linear(net.words(tokens) + x, net.words.weight)


def read_rows(net: Any, x: Tensor) -> Any:
    return net.rows[x.argmax(-1)] + F.embedding(x.argmin(-1), net.rows, padding_idx=1)


def mix_experts(net: Any, x: Tensor) -> Any:
    gates = net.part(x).softmax(-1)[..., :3]
    return torch.einsum("bne,bnd,edf->bnf", gates, x, net.experts)


def route_tokens(net: Any, x: Tensor) -> Any:
    tokens = x.flatten(0, 1)
    gates, chosen = F.linear(tokens, net.router).softmax(-1).topk(2)
    found = net.experts[chosen.flatten()] @ tokens.repeat_interleave(2, 0).unsqueeze(2)
    return (found.view(-1, 2, WIDTH) * gates.unsqueeze(2)).sum(1).view_as(x)


def convolve_with_standardized_weights(net: Any, x: Tensor) -> Any:
    weight = (net.kernel - net.kernel.mean((1, 2), keepdim=True)) / net.kernel.std((1, 2), keepdim=True)
    return F.conv1d(x.mT, weight, padding=1).mT


def normalize_by_function(net: Any, x: Tensor) -> Any:
    return F.layer_norm(x, (WIDTH,), net.gamma, net.beta) + F.rms_norm(x, (WIDTH,), net.gamma)


def attend(net: Any, x: Tensor) -> Any:
    found, weights = net.attention(x, x, x, attn_mask=torch.ones(LENGTH, LENGTH).triu(1).bool())
    return found + weights.sum(1, keepdim=True).mT


def attend_across(net: Any, x: Tensor) -> Any:
    ignored = torch.arange(LENGTH) > 2 + (x[:, :1, 0] > 0)
    return net.attention(x, x.tanh(), x.sin(), key_padding_mask=ignored, need_weights=False)[0]


def use_twice(net: Any, x: Tensor) -> Any:
    return net.part(x) * net.part.bias + x @ net.part.weight


NETS: dict[str, tuple[Function, Parts]] = {
    "class token and positions": (
        add_token,
        lambda: {"token": draw(1, 1, WIDTH), "positions": draw(1, LENGTH + 1, WIDTH)},
    ),
    "repeated token": (repeat_token, lambda: {"token": draw(1, 1, WIDTH)}),
    "relative positions of windows": (bias_windows, lambda: {"table": draw(3)}),
    "relative positions looked up by a layer": (bias_positions, lambda: {"far": nn.Embedding(5, 1)}),
    "bias of attention": (bias_attention, lambda: {"bias": draw(LENGTH, LENGTH)}),
    "new tensors of a type": (
        bias_by_new_tensors,
        lambda: {"bias": draw(LENGTH, LENGTH), "positions": draw(1, LENGTH, WIDTH)},
    ),
    "network of positions": (
        add_network_of_positions,
        lambda: {"first": nn.Linear(1, 3), "second": nn.Linear(3, WIDTH)},
    ),
    "layer scale": (scale_branch, lambda: {"gamma": draw(WIDTH), "part": nn.Linear(WIDTH, WIDTH)}),
    "fused projection": (project_fused, lambda: {"qkv": draw(12, WIDTH), "q_bias": draw(4), "v_bias": draw(4)}),
    "low-rank adapter": (
        adapt,
        lambda: {
            "part": nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            "down": draw(2, WIDTH),
            "up": draw(WIDTH, 2),
        },
    ),
    "tied embedding": (tie, lambda: {"words": nn.Embedding(WIDTH, WIDTH)}),
    "rows by tokens": (read_rows, lambda: {"rows": draw(WIDTH, WIDTH)}),
    "stack of experts": (mix_experts, lambda: {"part": nn.Linear(WIDTH, WIDTH), "experts": draw(3, WIDTH, WIDTH)}),
    "tokens sent to experts": (route_tokens, lambda: {"router": draw(3, WIDTH), "experts": draw(3, WIDTH, WIDTH)}),
    "standardized kernel": (convolve_with_standardized_weights, lambda: {"kernel": draw(WIDTH, WIDTH, 3)}),
    "normalization by function": (normalize_by_function, lambda: {"gamma": draw(WIDTH), "beta": draw(WIDTH)}),
    "attention of torch": (attend, lambda: {"attention": nn.MultiheadAttention(WIDTH, 1, batch_first=True)}),
    "attention across": (attend_across, lambda: {"attention": nn.MultiheadAttention(WIDTH, 2, batch_first=True)}),
    "in a layer and outside": (use_twice, lambda: {"part": nn.Linear(WIDTH, WIDTH)}),
}


def run(net: Any, x: Tensor) -> Any:
    return net.end(net.function(net, net.start(x).tanh()).tanh().mean(1))


def make_case(function: Function, parts: Parts, count: int = COUNT) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net: Any = Net(run, **parts(), start=nn.Linear(2, WIDTH), end=nn.Linear(WIDTH, CLASSES))
        net.function = function
        x, y = torch.randn(count, LENGTH, 2, dtype=F64), torch.randint(CLASSES, (count,))
    return Case(net.double().eval(), [(x, y)], "cross_entropy", F.cross_entropy)


def probe(case: Case) -> Probe:
    with open_session(case.model, "eval", case.batches):
        problem = Problem.build(case.model, case.batches, case.loss)
        return run_probe(problem, next(iter(problem.read_batches())), 1 << 28)


def check_statistics(case: Case) -> None:
    names = {"curvature_diagonal": oracle.curvature_diagonal, "gradient_second_moment": oracle.gradient_second_moment}
    found = saltflat.compute_statistics(case.model, case.batches, names=list(names), progress=False)
    for statistic, define in names.items():
        for name, expected in define(case).items():
            torch.testing.assert_close(found[statistic][name], expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", NETS)
def test_parameters_outside_of_layers_are_swept_together(name: str) -> None:
    case = make_case(*NETS[name])
    found = probe(case)
    assert found.strategy == "together, expanded"
    assert all(each.is_quick and not each.reason for each in found.routes)
    check_statistics(case)


def expand_along_positions(net: Any, x: Tensor) -> Any:
    return x * net.gate.expand(LENGTH, -1) + net.gate.repeat(LENGTH, 1)


def test_a_chunk_of_as_many_examples_as_positions_is_not_confused() -> None:
    case = make_case(expand_along_positions, lambda: {"gate": draw(1, WIDTH)}, 2 * LENGTH + 3)
    assert probe(case).strategy == "together, expanded"
    batch: Any = case.batches[0]
    x, y = batch
    for sizes in ([LENGTH, LENGTH, 3], [7, 1, LENGTH], [LENGTH, 1, 1, 6]):
        cut = Case(case.model, list(zip(x.split(sizes), y.split(sizes), strict=True)), case.loss, case.loss_function)
        check_statistics(cut)


def write_into_part(net: Any, x: Tensor) -> Any:
    x = x.clone()
    x[:, 1] = net.gate
    return x


def mix_examples_at_second_axis(net: Any, x: Tensor) -> Any:
    return (x.transpose(0, 1) * net.gate).transpose(0, 1)


@pytest.mark.parametrize("function", [write_into_part, mix_examples_at_second_axis])
def test_uses_that_do_not_allow_copies_have_a_reason(function: Function) -> None:
    case = make_case(function, lambda: {"gate": draw(WIDTH)})
    found = probe(case)
    assert found.strategy == "mapped"
    assert all(each.route == "mapped" and each.reason for each in found.routes)
    check_statistics(case)


def test_a_table_that_is_read_takes_no_memory_of_its_size() -> None:
    case = make_case(
        lambda net, x: x + F.embedding(x.argmax(-1), net.words) + net.words[x.argmin(-1)],
        lambda: {"words": draw(5000, WIDTH)},
    )
    found = probe(case)
    assert found.strategy == "together, expanded"
    assert found.calls.count_elements() == 0
    assert found.moving < 5000 * WIDTH * 8


def test_frozen_parameters_outside_of_layers_cost_nothing() -> None:
    case = make_case(*NETS["class token and positions"])
    for name in ("token", "positions"):
        case.model.get_parameter(name).requires_grad_(False)
    assert probe(case).strategy == "together"


def test_a_meter_keeps_what_it_found_about_copies() -> None:
    case = make_case(*NETS["layer scale"])
    meter = saltflat.Meter(case.model, measures="hessian_trace", progress=False)
    first = meter.measure(case.batches)
    with torch.no_grad():
        case.model.get_parameter("gamma").add_(0.1)
    second = meter.measure(case.batches)
    assert meter.num_preparations == 1
    fresh = saltflat.measure(case.model, case.batches, measures="hessian_trace", progress=False)
    assert second["hessian_trace"].value == pytest.approx(fresh["hessian_trace"].value, rel=1e-12)
    assert first["hessian_trace"].value != second["hessian_trace"].value
    assert second.settings["strategy"] == "together, expanded"


def test_a_pass_is_freed_when_it_is_done() -> None:
    # A cycle through torch's graph would never be.
    case = make_case(*NETS["network of positions"])
    with open_session(case.model, "eval", case.batches):
        problem = Problem.build(case.model, case.batches, case.loss)
        found = run_probe(problem, next(iter(problem.read_batches())), 1 << 28)
        gc.collect()
        gc.disable()
        try:
            batch = next(iter(problem.read_batches()))
            outputs, backward = found.forward(problem, batch)
            backward(torch.randn(2, *outputs.shape, dtype=F64), lambda name, form: None, True)
            kept = weakref.ref(backward.__self__)  # type: ignore[attr-defined]
            del outputs, backward
            assert kept() is None
        finally:
            gc.enable()


def compare_with_prototypes(net: Any, x: Tensor) -> Any:
    return torch.cdist(x, net.prototypes)


def test_several_columns_at_once_are_not_taken_from_a_wrong_backward_pass() -> None:
    # Under vmap that of torch.cdist is right for one column alone.
    check_statistics(make_case(compare_with_prototypes, lambda: {"prototypes": draw(WIDTH, WIDTH)}))


class Late(nn.Module):
    """A network with a part that none of the first eight examples uses."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(2, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.shift = draw(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        each = self.start(x).tanh()
        shifted = (each.transpose(0, 1) + self.shift).sin().transpose(0, 1)  # positions first
        found: Tensor = self.end((each + shifted * (x[:, :1, :1] > 0)).mean(1))
        return found


def test_a_parameter_without_gradients_at_first_is_not_split_along_positions() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 4, 2, dtype=F64)
    x[:, 0, 0] = torch.where(torch.arange(12) < 8, -1.0, 1.0)
    # Each of two examples could have two of the four positions.
    batches: list[Any] = list(zip(x.split(2), (torch.arange(12) % CLASSES).split(2), strict=True))
    check_statistics(Case(Late().double().eval(), batches, "cross_entropy", F.cross_entropy))
