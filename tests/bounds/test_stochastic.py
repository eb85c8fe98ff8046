"""Networks with random weights: the law of their outputs, and estimates of their risk."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import ceil, log
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Net
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from saltflat.bounds.pac_bayes import bound_monte_carlo
from saltflat.bounds.stochastic import (
    GROUP,
    BoundedLoss,
    Gaussian,
    Noise,
    RandomNetwork,
    Sampling,
    check_bounded_loss,
    compute_bounded_losses,
    estimate_risk,
)
from saltflat.engine.context import Context
from saltflat.engine.losses import parse_loss
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session
from saltflat.errors import DataError, OptionError, UnknownNameError
from saltflat.symmetry import canonicalize
from saltflat.symmetry.rescale import rescale

F64 = torch.float64
DRAWS = 2500


@contextmanager
def opened(
    model: nn.Module, data: Any, sampling: Sampling | None = None, memory: int = 1 << 28, loss: str = "cross_entropy"
) -> Iterator[RandomNetwork]:
    """A random network of a private copy of the model, as bounds make it."""
    own = copy.deepcopy(model)
    with open_session(own, "eval", data):
        problem = Problem.build(own, data, loss)
        yield RandomNetwork(Context(problem, parse_column_plan("exact"), 0, memory), sampling)


def seeded(build: Callable[[], nn.Module], scale: float = 0.5) -> nn.Module:
    """A network in float64 whose parameters are all of one size, biases and factors of normalization too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().double().eval()
        with torch.no_grad():
            for value in model.parameters():
                value.copy_(scale * torch.randn_like(value))
    return model


def make_weights(model: nn.Module, size: float = 0.2) -> Gaussian:
    """Deviations that differ from entry to entry."""
    generator = torch.Generator().manual_seed(1)
    mean = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    return Gaussian(
        mean,
        {name: size * (0.3 + torch.rand(each.shape, generator=generator, dtype=F64)) for name, each in mean.items()},
    )


def make_vectors(examples: int, width: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(examples, width, generator=generator, dtype=F64), torch.arange(examples) % 3


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def make_conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2, dilation=2, padding=1, bias=False),
        nn.Flatten(),
    )


def make_other_conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding="same"),
        nn.Tanh(),
        nn.Conv2d(3, 3, 3, groups=3, padding=1, padding_mode="circular"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def make_batch_norm_net() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.copy_(torch.tensor([0.3, -0.2, 0.1]))
    norm.running_var.copy_(torch.tensor([0.5, 2.0, 1.0]))
    return nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))


def make_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


def make_embedding_net() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(16, 3))


def make_attention_net() -> nn.Module:
    def attend(self: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (part(x) for part in (self.q, self.k, self.v))  # type: ignore[operator]
        mixed = torch.softmax(q @ k.transpose(1, 2) / 2, -1) @ v
        return self.out(mixed.mean(1))  # type: ignore[no-any-return, operator]

    return Net(attend, q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4), out=nn.Linear(4, 3))


def make_torch_attention_net() -> nn.Module:
    return Net(
        lambda self, x: self.out(self.mix(x, x, x)[0].mean(1)),
        mix=nn.MultiheadAttention(4, 2, batch_first=True),
        out=nn.Linear(4, 3),
    )


def make_tied_net() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def make_net_with_a_second_use() -> nn.Module:
    return Net(lambda self, x: F.linear(torch.tanh(self.a(x)), self.a.weight), a=nn.Linear(4, 4))


def make_net_of_two_calls() -> nn.Module:
    return Net(lambda self, x: self.b(torch.tanh(self.a(torch.tanh(self.a(x))))), a=nn.Linear(4, 4), b=nn.Linear(4, 3))


def make_net_with_aliases() -> nn.Module:
    """Its forward pass reads the parameters from a list of its own."""
    model = Net(
        lambda self, x: torch.tanh(x @ self.both[0]) @ self.both[1],
        a=nn.Parameter(torch.zeros(4, 5)),
        b=nn.Parameter(torch.zeros(5, 3)),
    )
    model.both = [model.a, model.b]  # type: ignore[assignment]
    return model


def make_frozen_net() -> nn.Module:
    model = make_mlp()
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    model[2].weight.requires_grad_(False)  # type: ignore[index]
    return model


def make_lstm_net() -> nn.Module:
    return Net(
        lambda self, x: self.out(self.rnn(x)[0][:, -1]), rnn=nn.LSTM(4, 3, batch_first=True), out=nn.Linear(3, 3)
    )


def make_input(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shapes = {"vector": (1, 4), "image": (1, 2, 6, 6), "sequence": (1, 5, 4)}
    if kind == "tokens":
        return torch.tensor([[1, 3, 0, 3]])
    return torch.randn(shapes[kind], generator=generator, dtype=F64)


# By name: the network, its input, and the best way to draw its weights.
NETS: dict[str, tuple[Callable[[], nn.Module], str, Sampling]] = {
    "MLP": (make_mlp, "vector", "layers"),
    "convolutions": (make_conv_net, "image", "layers"),
    "uncommon convolutions": (make_other_conv_net, "image", "layers"),
    "BatchNorm": (make_batch_norm_net, "image", "layers"),
    "LayerNorm": (make_norm_net, "vector", "layers"),
    "embedding": (make_embedding_net, "tokens", "layers"),
    "attention": (make_attention_net, "sequence", "layers"),
    "frozen": (make_frozen_net, "vector", "layers"),
    "attention of torch": (make_torch_attention_net, "sequence", "mapped"),
    "tied": (make_tied_net, "vector", "mapped"),
    "second use": (make_net_with_a_second_use, "vector", "mapped"),
    "two calls": (make_net_of_two_calls, "vector", "mapped"),
    "aliases": (make_net_with_aliases, "vector", "mapped"),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(4, 3))), "vector", "mapped"),
    "LSTM": (make_lstm_net, "sequence", "groups"),
}


def draw_whole_networks(model: nn.Module, weights: Gaussian, inputs: Tensor, draws: int) -> Tensor:
    """Return the outputs (draws, outputs) for one input, each of a copy whose parameters were overwritten."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(4)
    parameters = dict(other.named_parameters())
    outputs = []
    with torch.no_grad():
        for _ in range(draws):
            for name, mean in weights.mean.items():
                numbers = torch.randn(mean.shape, generator=generator, dtype=F64)
                parameters[name].copy_(mean + weights.deviation[name] * numbers)
            outputs.append(other(inputs)[0])
    return torch.stack(outputs)


def draw_outputs(net: RandomNetwork, weights: Gaussian, noise: Noise) -> Tensor:
    """Return the outputs of all examples, part by part."""
    with torch.no_grad():
        parts = [p for batch in net.context.problem.read_batches() for p in net.iterate_parts(batch)]
        return torch.cat([net.run(part, weights, noise) for part in parts])


def draw_independent_outputs(net: RandomNetwork, weights: Gaussian) -> Tensor:
    """Return outputs of examples that share no draw."""
    if net.group_size == 1:
        return draw_outputs(net, weights, Noise(5, 0))
    return torch.cat([draw_outputs(net, weights, Noise(5, draw))[:: net.group_size] for draw in range(60)])


def find_largest_deviation(one: Tensor, two: Tensor) -> float:
    """Return by how many standard errors means or covariances of two samples (draws, outputs) differ at most."""

    def score(a: Tensor, b: Tensor) -> float:
        return float(((a.mean(0) - b.mean(0)).abs() / (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()).max())

    def multiply(values: Tensor) -> Tensor:
        centered = values - values.mean(0)
        return (centered[:, :, None] * centered[:, None]).flatten(1)

    return max(score(one, two), score(multiply(one), multiply(two)))


MOST = 5.0  # standard errors; seeds are fixed, and the largest of some hundred normal numbers is about 3


@pytest.mark.parametrize("name", NETS)
def test_outputs_have_the_law_of_whole_networks(name: str) -> None:
    build, kind, best = NETS[name]
    model, x = seeded(build), make_input(kind)
    weights = make_weights(model)
    expected = draw_whole_networks(model, weights, x, DRAWS)
    data = x.expand(DRAWS, *x.shape[1:]).contiguous(), torch.arange(DRAWS) % expected.shape[1]
    ways: tuple[Sampling, ...] = ("layers", "mapped", "groups")
    for sampling in ways[: ways.index(best)]:
        with pytest.raises(UnknownNameError, match="way to sample"), opened(model, data, sampling):
            pass
    with opened(model, data) as net:
        assert net.sampling == best
        found = draw_independent_outputs(net, weights)
        assert find_largest_deviation(found, expected) < MOST
        # Were a deviation that matters twice as large, this would show.
        scores = []
        # Draws of groups take long.
        for label in list(weights.deviation)[-2 if best == "groups" else 0 :]:
            wrong = replace(weights, deviation={**weights.deviation, label: 2 * weights.deviation[label]})
            scores.append(find_largest_deviation(draw_independent_outputs(net, wrong), expected))
        assert 2 * sum(score > MOST for score in scores) >= len(scores)
    for sampling in ways[ways.index(best) + 1 :]:
        if name in ("MLP", "convolutions", "tied", "aliases", "frozen") or sampling == "mapped":
            with opened(model, data, sampling) as net:
                assert find_largest_deviation(draw_independent_outputs(net, weights), expected) < MOST


def test_positions_of_a_convolution_share_their_draw() -> None:
    """A 1 x 1 convolution of equal pixels gives equal outputs, which differ from example to example."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 1, 1), nn.Flatten()))
    data = torch.ones(50, 2, 2, 2, dtype=F64), torch.arange(50) % 4
    for sampling in ("layers", "mapped"):
        with opened(model, data, sampling) as net:
            outputs = draw_outputs(net, make_weights(model), Noise(0, 0))
        assert torch.equal(outputs, outputs[:, :1].expand_as(outputs))
        assert len(outputs[:, 0].unique()) == 50


@pytest.mark.parametrize("sampling", ["layers", "mapped", "groups"])
def test_examples_and_draws_are_independent(sampling: Sampling) -> None:
    model, weights = seeded(make_mlp), make_weights(seeded(make_mlp))
    inputs, targets = make_vectors(4 * GROUP)
    data = inputs[:1].expand(4 * GROUP, 4).contiguous(), targets
    with opened(model, data, sampling) as net:
        draws = torch.stack([draw_outputs(net, weights, Noise(0, draw)) for draw in range(500)])
        other = draw_outputs(net, weights, Noise(1, 0))
    assert not torch.isclose(draws[0], draws[1]).any()
    assert not torch.isclose(draws[0], other).any()
    one = draws[:, 0, 0]
    for place in (1, GROUP - 1, GROUP, 2 * GROUP + 5):
        two = draws[:, place, 0]
        correlation = float(torch.corrcoef(torch.stack([one, two]))[0, 1])
        if sampling == "groups" and place < GROUP:
            assert correlation == pytest.approx(1.0)
        else:
            assert abs(correlation) < 4 / 500**0.5
    following = torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1]
    assert abs(float(following)) < 4 / 500**0.5


@pytest.mark.parametrize("sampling", ["layers", "mapped", "groups"])
def test_numbers_do_not_depend_on_batches_memory_or_chunks(sampling: Sampling) -> None:
    model, weights, (inputs, targets) = (
        seeded(make_conv_net),
        make_weights(seeded(make_conv_net)),
        make_vectors(150, 72),
    )
    images, noise = inputs.reshape(150, 2, 6, 6), Noise(7, 3)
    with opened(model, (images, targets), sampling) as net:
        expected = draw_outputs(net, weights, noise)
        (batch,) = net.context.problem.read_batches()
        backwards = [batch.cut(start, start + 50) for start in (100, 50, 0)]
        with torch.no_grad():
            parts = [torch.cat([net.run(p, weights, noise) for p in net.iterate_parts(each)]) for each in backwards]
        torch.testing.assert_close(torch.cat(parts[::-1]), expected, rtol=1e-12, atol=1e-12)
        risk = estimate_risk(net, weights, "error", draws=2, seed=0, delta=0.1)
    for size in (1, 7, 64, 100):
        loader = DataLoader(TensorDataset(images, targets), batch_size=size)
        for memory in (1 << 28, 1 << 20):
            with opened(model, loader, sampling, memory) as net:
                torch.testing.assert_close(draw_outputs(net, weights, noise), expected, rtol=1e-12, atol=1e-12)
                assert estimate_risk(net, weights, "error", draws=2, seed=0, delta=0.1) == risk


def test_little_memory_makes_small_parts_and_many_numbers_small_blocks() -> None:
    model, data = (
        seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten())),
        (
            torch.zeros(100, 2, 6, 6, dtype=F64),
            torch.arange(100) % 3,
        ),
    )
    entries = sum(value.numel() for value in model.parameters())
    with opened(model, data, "layers", 8 * 8 * entries * 5) as net:
        (batch,) = net.context.problem.read_batches()
        assert [part.examples for part in net.iterate_parts(batch)] == [5] * 20
    with opened(model, data, "layers") as net:
        assert sum(part.examples for part in net.iterate_parts(batch)) == 100
    like = torch.zeros((), dtype=torch.float32)
    for width in (3, 1 << 16, 1 << 20, (1 << 20) + 1):
        rows = Noise(0, 0).draw_rows("w", 0, 5, width, like)
        torch.testing.assert_close(rows[2:4], Noise(0, 0).draw_rows("w", 2, 2, width, like), rtol=0, atol=0)
        assert len(rows[:, 0].unique()) == 5


def test_sequences_need_a_whole_weight_for_each_example() -> None:
    """A linear layer whose input has positions cannot draw its outputs, and its memory is counted so."""
    data = torch.zeros(8, 5, 4, dtype=F64), torch.arange(8) % 3
    with opened(seeded(make_attention_net), data, "layers") as net:
        assert net._count_numbers() == 3 * (16 + 4) + 3
    rows = torch.zeros(8, 4, dtype=F64), torch.arange(8) % 3
    with opened(seeded(make_mlp), rows, "layers") as net:
        assert net._count_numbers() == 6 + 3


@pytest.mark.parametrize("name", NETS)
def test_without_deviations_the_outputs_are_those_of_the_network(name: str) -> None:
    build, kind, best = NETS[name]
    model, x = seeded(build), make_input(kind)
    weights = make_weights(model, 0.0)
    torch.manual_seed(6)
    inputs = torch.randint(5, (70, 4)) if kind == "tokens" else torch.randn(70, *x.shape[1:], dtype=F64)
    with torch.no_grad():
        expected = model(inputs)
    data = inputs, torch.arange(70) % expected.shape[1]
    ways: tuple[Sampling, ...] = ("layers", "mapped", "groups")
    for sampling in ways[ways.index(best) :]:
        with opened(model, data, sampling) as net:
            torch.testing.assert_close(draw_outputs(net, weights, Noise(0, 0)), expected, rtol=1e-9, atol=1e-11)


class Coupled(nn.Module):
    """Its outputs show which examples share a draw: each is the single weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([0 * x[:, 0], self.weight + 0 * x[:, 0]], 1)


@pytest.mark.parametrize(("examples", "used"), [(64, None), (150, None), (150, 70), (10, None), (128, 64)])
def test_a_partial_group_counts_as_a_whole_one(examples: int, used: int | None) -> None:
    """Every loss of a group is 0 or 1, as its weight is negative or not: what sharing does at worst."""
    data = torch.randn(examples, 2, generator=torch.Generator().manual_seed(0), dtype=F64), torch.ones(examples).long()
    weights = Gaussian({"weight": torch.tensor(0.3, dtype=F64)}, {"weight": torch.tensor(1.0, dtype=F64)})
    size, draws, seed = used or examples, 3, 11
    with opened(Coupled(), data, "groups") as net:
        found = estimate_risk(net, weights, "error", draws=draws, seed=seed, delta=0.1, examples=used)
        groups = ceil(size / GROUP)
        sizes = [min(GROUP, size - start) for start in range(0, size, GROUP)]
        like = torch.zeros((), dtype=F64)
        wrong = torch.stack(
            [
                (0.3 + Noise(seed, draw).draw_rows("weight", 0, groups, 1, like)[:, 0] <= 0).double()
                for draw in range(draws)
            ]
        )
        errors = float((wrong * torch.tensor(sizes, dtype=F64)).sum())
    assert found.mean == pytest.approx(errors / (size * draws))
    assert found.samples == groups * draws
    # The mean of the groups, each divided by the full size, bounded and scaled back to the examples there are.
    inner = bound_monte_carlo(errors / (GROUP * groups * draws), groups * draws, 0.1).upper
    assert found.upper == pytest.approx(min(1.0, inner * groups * GROUP / size))
    assert found.upper > found.mean


def test_the_bound_on_the_risk_covers_with_groups() -> None:
    """Where examples share draws, the number of groups is what counts: with that of examples, the bound would fail."""
    data = torch.zeros(100, 2, dtype=F64).normal_(generator=torch.Generator().manual_seed(0)), torch.ones(100).long()
    mean, true = 0.5, 0.3085375387259869  # the probability that a normal number is below -0.5
    weights = Gaussian({"weight": torch.tensor(mean, dtype=F64)}, {"weight": torch.tensor(1.0, dtype=F64)})
    missed = naive = 0
    with opened(Coupled(), data, "groups") as net:
        for seed in range(150):
            found = estimate_risk(net, weights, "error", draws=4, seed=seed, delta=0.2)
            missed += found.upper < true
            naive += bound_monte_carlo(found.mean, 400, 0.2).upper < true
    assert missed / 150 <= 0.2
    assert naive / 150 > 0.2


@pytest.mark.parametrize("kind", ["error", "clipped_cross_entropy"])
def test_the_risk_is_that_of_the_outputs(kind: BoundedLoss) -> None:
    model, data = seeded(make_mlp, 2.0), make_vectors(90)
    weights = make_weights(model)
    with opened(model, data, "layers") as net:
        found = estimate_risk(net, weights, kind, draws=3, seed=2, delta=0.05)
        outputs = torch.cat([draw_outputs(net, weights, Noise(2, draw)) for draw in range(3)])
    targets = data[1].repeat(3)
    if kind == "error":
        losses = (outputs.argmax(1) != targets).double()
    else:
        losses = F.cross_entropy(outputs, targets, reduction="none").clamp(0, log(1e5)) / log(1e5)
    assert found.mean == pytest.approx(float(losses.mean()), rel=1e-12)
    assert found == bound_monte_carlo(found.mean, 270, 0.05)


def permute_units(model: nn.Sequential, layer: int, following: int, order: Tensor, columns: int = 1) -> nn.Sequential:
    """Return the network with its hidden units, or channels of ``columns`` features each, in another order."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for key in ("weight", "bias"):
            value = getattr(other[layer], key)
            value.copy_(value[order].clone())
        weight = other[following].weight
        assert isinstance(weight, Tensor)
        units = weight.unflatten(1, (len(order), columns)) if weight.dim() == 2 else weight
        weight.copy_(units[:, order].reshape(weight.shape).clone())
    return other


def run_by_rank(model: nn.Module, data: tuple[Tensor, Tensor], sampling: Sampling) -> tuple[Tensor, float]:
    """Return outputs and risk with deviations that are a function of the weights, as those of a posterior are."""
    mean = {name: value.detach().clone() for name, value in model.named_parameters()}
    weights = Gaussian(mean, {name: 0.05 + 0.3 * value.abs() for name, value in mean.items()})
    with opened(model, data, sampling) as net:
        risk = estimate_risk(net, weights, "clipped_cross_entropy", draws=2, seed=0, delta=0.1).mean
        return draw_outputs(net, weights, Noise(0, 0)), risk


@pytest.mark.parametrize("sampling", ["layers", "mapped", "groups"])
def test_rescaling_and_permuting_hidden_units_leave_the_risk(sampling: Sampling) -> None:
    data = make_vectors(80)
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
    assert isinstance(model, nn.Sequential)
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    changed = rescale(permute_units(permute_units(model, 0, 2, order), 2, 4, order[order < 5]), data[0][:4], seed=1)
    with torch.no_grad():
        torch.testing.assert_close(changed(data[0]), model(data[0]), rtol=1e-10, atol=1e-12)
    one, risk = run_by_rank(canonicalize(model, data[0][:4]), data, sampling)
    two, other = run_by_rank(canonicalize(changed, data[0][:4]), data, sampling)
    assert other == pytest.approx(risk, rel=1e-9)
    torch.testing.assert_close(two, one, rtol=1e-8, atol=1e-9)
    # Numbers that went by position would differ.
    raw, _ = run_by_rank(changed, data, sampling)
    assert not torch.isclose(raw, one, rtol=1e-3).all()


def test_permuting_channels_leaves_the_risk() -> None:
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
        )
    )
    assert isinstance(model, nn.Sequential)
    inputs, targets = make_vectors(40, 72)
    data = inputs.reshape(40, 2, 6, 6), targets
    other = permute_units(
        permute_units(model, 0, 2, torch.tensor([2, 0, 3, 1])), 2, 5, torch.tensor([1, 2, 0]), columns=4
    )
    assert isinstance(other[2], nn.Conv2d)
    for sampling in ("layers", "mapped", "groups"):
        one, risk = run_by_rank(model, data, sampling)
        two, changed = run_by_rank(other, data, sampling)
        torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-12)
        assert changed == pytest.approx(risk, rel=1e-9)


@pytest.mark.parametrize("sampling", ["layers", "mapped", "groups"])
@pytest.mark.parametrize("build", [make_mlp, make_norm_net, make_conv_net])
def test_gradients_of_means_and_deviations_are_those_of_finite_differences(
    build: Callable[[], nn.Module], sampling: Sampling
) -> None:
    model = seeded(build)
    inputs, targets = make_vectors(6, 4 if build is not make_conv_net else 72)
    inputs = inputs if build is not make_conv_net else inputs.reshape(6, 2, 6, 6)
    weights = make_weights(model)
    free = [each.requires_grad_() for part in (weights.mean, weights.deviation) for each in part.values()]
    with opened(model, (inputs, targets), sampling) as net:
        (batch,) = net.context.problem.read_batches()
        net.rank_entries(weights.mean)

        def compute_loss() -> Tensor:
            return F.cross_entropy(net.run(batch, weights, Noise(1, 0)), batch.targets)

        slopes = torch.autograd.grad(compute_loss(), free)
        generator = torch.Generator().manual_seed(0)
        for value, slope in zip(free, slopes, strict=True):
            assert bool(slope.any())
            direction, step = torch.randn(value.shape, generator=generator, dtype=F64), 1e-5
            with torch.no_grad():
                ends = []
                for sign in (1, -1):
                    value += sign * step * direction
                    ends.append(float(compute_loss()))
                    value -= sign * step * direction
            expected = (ends[0] - ends[1]) / (2 * step)
            assert float((slope * direction).sum()) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_gradients_are_finite_where_nothing_is_random() -> None:
    model, data = seeded(make_mlp), make_vectors(6)
    weights = make_weights(model, 0.0)
    free = [each.requires_grad_() for part in (weights.mean, weights.deviation) for each in part.values()]
    with opened(model, data, "layers") as net:
        (batch,) = net.context.problem.read_batches()
        slopes = torch.autograd.grad(net.run(batch, weights, Noise(0, 0)).square().sum(), free)
    assert all(bool(each.isfinite().all()) for each in slopes)


@pytest.mark.parametrize("name", ["MLP", "BatchNorm", "attention", "aliases", "LSTM"])
def test_the_random_state_and_the_model_are_left_alone(name: str) -> None:
    build, kind, _ = NETS[name]
    model, x = seeded(build), make_input(kind)
    own = copy.deepcopy(model)
    weights = make_weights(model)
    data = x.expand(40, *x.shape[1:]).contiguous(), torch.arange(40) % 3
    before = {key: value.clone() for key, value in own.state_dict().items()}
    states = [set(vars(module)) for module in own.modules()]
    torch.manual_seed(9)
    state = torch.get_rng_state()
    with open_session(own, "eval", data):
        context = Context(Problem.build(own, data), parse_column_plan("exact"), 0, 1 << 28)
        ways: tuple[Sampling, ...] = ("layers", "mapped", "groups")
        for sampling in ways[ways.index(NETS[name][2]) :]:
            net = RandomNetwork(context, sampling)
            estimate_risk(net, weights, "error", draws=1, seed=0, delta=0.1)
            with pytest.raises(KeyError):
                net.run(next(iter(context.problem.read_batches())), Gaussian({}, {}), Noise(0, 0))
            assert not any("forward" in vars(module) for module in own.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert [set(vars(module)) for module in own.modules()] == states
    assert_same_tensors(own.state_dict(), before)
    assert_same_tensors(own.state_dict(), model.state_dict())


def assert_same_tensors(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_losses_in_the_unit_interval() -> None:
    loss, outputs = parse_loss("cross_entropy"), torch.tensor([[0.0, 40.0], [1.0, 1.0], [30.0, 0.0]])
    targets = torch.tensor([0, 1, 0])
    assert compute_bounded_losses("error", loss, outputs, targets).tolist() == [1.0, 1.0, 0.0]
    found = compute_bounded_losses("clipped_cross_entropy", loss, outputs, targets)
    torch.testing.assert_close(found, torch.tensor([1.0, log(2) / log(1e5), 0.0], dtype=F64), rtol=1e-6, atol=1e-12)
    binary = parse_loss("bce_with_logits")
    signs = compute_bounded_losses("error", binary, torch.tensor([[2.0], [-1.0]]), torch.tensor([[1.0], [1.0]]))
    assert signs.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_outputs_that_overflowed_have_the_largest_error(bad: float) -> None:
    outputs, targets = torch.tensor([[bad], [bad], [-2.0]]), torch.tensor([[0.0], [1.0], [0.0]])
    binary = compute_bounded_losses("error", parse_loss("bce_with_logits"), outputs, targets)
    assert binary.tolist() == [1.0, 1.0, 0.0]
    rows = torch.tensor([[bad, 0.0], [0.0, bad], [3.0, -2.0]])
    several = compute_bounded_losses("error", parse_loss("cross_entropy"), rows, torch.tensor([0, 1, 0]))
    assert several.tolist() == [1.0, 1.0, 0.0]


def test_losses_for_which_no_bound_holds_give_one_clear_error() -> None:
    entropy = parse_loss("cross_entropy")
    with pytest.raises(OptionError, match=r"^Expected a loss in \[0, 1\], 'error' or .* got 'mse'.* Try 'error'\.$"):
        check_bounded_loss("mse", entropy)
    with pytest.raises(OptionError, match=r"^Expected a classifier .*Try loss='cross_entropy'\.$"):
        check_bounded_loss("error", parse_loss("mse"))
    with pytest.raises(OptionError, match=r"without weights"):
        check_bounded_loss("error", parse_loss(nn.CrossEntropyLoss(weight=torch.ones(3))))
    with pytest.raises(OptionError, match=r"without weights, but got BinaryCrossEntropy with weights"):
        check_bounded_loss("error", parse_loss(nn.BCEWithLogitsLoss(pos_weight=torch.ones(1))))
    for kind in (np.array(["error", "error"]), np.zeros(0), ["error"], {"error"}, None):
        with pytest.raises(OptionError, match=r"^Expected a loss in \[0, 1\]"):
            check_bounded_loss(kind, entropy)  # type: ignore[arg-type]
    check_bounded_loss("error", entropy)
    check_bounded_loss("clipped_cross_entropy", parse_loss("bce_with_logits"))
    with pytest.raises((OptionError, DataError), match=r"^Expected one label per example.*not independent"):
        compute_bounded_losses("error", entropy, torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises((OptionError, DataError), match=r"some that are ignored"):
        compute_bounded_losses("error", entropy, torch.zeros(2, 3), torch.tensor([0, -100]))
