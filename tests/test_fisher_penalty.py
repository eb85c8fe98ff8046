"""The Fisher penalty against its definition: finite differences, double backward, and plain steps."""

import copy
import os
import socket
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import CASES, Case, Net, integers, joined, reals, shaken
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from saltflat.errors import (
    DataError,
    EmptyDataError,
    LabelError,
    ModelError,
    OptionError,
    PrecisionError,
    SaltflatError,
    TrainingError,
    UnknownNameError,
)
from saltflat.training import SAM, either_way
from saltflat.training.fisher_penalty import FisherPenalty
from saltflat.training.part_gradients import Passes

Batch = Any


# The definition, slow: sums over parts that are written down by hand.


def cut(batch: Batch, sizes: list[int]) -> list[Batch]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [rows(batch, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def rows(tree: Any, which: slice) -> Any:
    if isinstance(tree, dict):
        return {key: rows(value, which) for key, value in tree.items()}
    return tuple(rows(value, which) for value in tree) if isinstance(tree, tuple) else tree[which]


def loss_at(built: Case, values: dict[str, Tensor], batch: Batch) -> Tensor:
    """The mean loss of a batch with these parameters, BatchNorm's running statistics left alone."""
    model = built.model
    values = {**{name: b.clone() for name, b in model.named_buffers()}, **values}
    if isinstance(batch, dict):
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        outputs = torch.func.functional_call(model, values, (), inputs)
        return built.loss_function(outputs.logits, batch["labels"])
    inputs, targets = batch
    if isinstance(inputs, dict):
        return built.loss_function(torch.func.functional_call(model, values, (), inputs), targets)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    return built.loss_function(torch.func.functional_call(model, values, args), targets)


def gradient_at(built: Case, values: dict[str, Tensor], batch: Batch, graph: bool = False) -> dict[str, Tensor]:
    free = {name: v if graph else v.detach().requires_grad_() for name, v in values.items()}
    loss = loss_at(built, free, batch)
    found = torch.autograd.grad(loss, list(free.values()), create_graph=graph, materialize_grads=True)
    return dict(zip(free, found, strict=True))


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def along(values: dict[str, Tensor], direction: dict[str, Tensor], step: float) -> dict[str, Tensor]:
    return {name: value + step * direction[name] for name, value in values.items()}


def slope(
    built: Case, batch: Batch, sizes: list[int], alpha: float, beta: float, direction: dict[str, Tensor], whole: bool
) -> float:
    """The derivative of L + beta R along a direction, by central differences with the g_i held constant."""
    here, pieces = trained(built.model), cut(batch, sizes)
    constants = [gradient_at(built, here, piece) for piece in pieces]
    n = sum(sizes)

    def objective(values: dict[str, Tensor]) -> Tensor:
        total = loss_at(built, values, batch) if whole else torch.zeros((), dtype=torch.float64)
        for piece, size, constant in zip(pieces, sizes, constants, strict=True):
            at, below = (loss_at(built, v, piece) for v in (values, along(values, constant, -alpha)))
            total = total + size / n * (beta * (at - below) + (0 if whole else at))
        return total

    # The five-point rule, because kinks are nowhere near and rounding is.
    h = 1e-3
    f = {k: float(objective(along(here, direction, k * h)).detach()) for k in (-2, -1, 1, 2)}
    return (f[-2] - 8 * f[-1] + 8 * f[1] - f[2]) / (12 * h)


def direction_for(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in trained(model).items()}
    return {name: each / length(drawn) for name, each in drawn.items()}


def projected(model: nn.Module, direction: dict[str, Tensor]) -> float:
    grads = {name: p.grad for name, p in model.named_parameters()}
    return float(sum((g * direction[name]).sum() for name, g in grads.items() if g is not None))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def length(values: Mapping[str, Tensor]) -> float:
    return float(torch.cat([each.flatten() for each in values.values()]).norm())


def whole_batch(built: Case) -> Batch:
    return joined(built.batches)


# Smooth networks: a finite difference across a kink measures something else.


def smooth_mlp() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return Case(shaken(model), [(reals(7, 4), integers(3, 7))], "cross_entropy", F.cross_entropy)


def smooth_cnn() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.GELU(), nn.AvgPool2d(2, 1), nn.Conv2d(3, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)
    )
    return Case(shaken(model), [(reals(7, 1, 4, 4), integers(3, 7))], "cross_entropy", F.cross_entropy)


def smooth_batch_norm() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3), nn.BatchNorm1d(3)
    )
    return Case(shaken(model), [(reals(7, 1, 4, 4), integers(3, 7))], "cross_entropy", F.cross_entropy)


SMOOTH = {
    "mlp": smooth_mlp,
    "cnn": smooth_cnn,
    "batch norm": smooth_batch_norm,
    **{
        name: CASES[name]
        for name in (
            "attention_by_hand",
            "attention_of_two_heads_by_torchs_kernel",
            "multihead_attention",
            "layer_never_called",
            "tied_embedding_and_output",
            "embedding_tied_by_a_functional_call",
            "dict_batches_and_an_output_object",
            "inputs_by_name",
            "class_token_and_position_parameters",
        )
    },
}
WAYS = ("loop", "vectorised")
SIZES = {1: [7], 2: [4, 3], 3: [3, 2, 2], 7: [1] * 7, 12: [1] * 7}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SMOOTH)
def test_the_gradient_is_the_finite_difference_of_the_loss_and_its_penalty(name: str, way: str) -> None:
    built = SMOOTH[name]()
    batch, direction = whole_batch(built), direction_for(built.model)
    n = len(batch["labels"]) if isinstance(batch, dict) else len(batch[1])
    sizes = [n - n // 2, n // 2]
    FisherPenalty(built.model, parts=2, alpha=0.05, beta=7.0, way=way).backward(batch)
    want = slope(built, batch, sizes, 0.05, 7.0, direction, whole=name == "batch norm")
    assert projected(built.model, direction) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parts", SIZES)
def test_any_number_of_parts_loses_no_example(parts: int, way: str) -> None:
    built = smooth_mlp()
    batch, direction = whole_batch(built), direction_for(built.model)
    FisherPenalty(built.model, parts=parts, alpha=0.05, beta=7.0, way=way).backward(batch)
    want = slope(built, batch, SIZES[parts], 0.05, 7.0, direction, whole=False)
    assert projected(built.model, direction) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_with_batch_norm_the_loss_is_that_of_the_batch_or_of_the_parts(way: str, whole: bool) -> None:
    built = smooth_batch_norm()
    batch, direction = whole_batch(built), direction_for(built.model)
    loss = FisherPenalty(built.model, parts=3, alpha=0.05, beta=7.0, way=way, whole=whole).backward(batch)
    want = slope(built, batch, [3, 2, 2], 0.05, 7.0, direction, whole=whole)
    assert projected(built.model, direction) == pytest.approx(want, rel=1e-6)
    pieces = [(7, batch)] if whole else list(zip([3, 2, 2], cut(batch, [3, 2, 2]), strict=True))
    values = trained(built.model)
    mean = sum(size / 7 * loss_at(built, values, piece) for size, piece in pieces)
    torch.testing.assert_close(loss, torch.as_tensor(mean))


def test_to_first_order_it_is_half_of_what_the_paper_says() -> None:
    built = smooth_mlp()
    batch, beta = whole_batch(built), 1.0
    values = {name: v.requires_grad_() for name, v in trained(built.model).items()}
    squares = [
        size / 7 * torch.stack([g.square().sum() for g in gradient_at(built, values, piece, graph=True).values()]).sum()
        for size, piece in zip([3, 2, 2], cut(batch, [3, 2, 2]), strict=True)
    ]
    exact = torch.autograd.grad(torch.stack(squares).sum(), list(values.values()))
    of_squares = dict(zip(values, exact, strict=True))
    plain = gradient_at(built, values, batch)

    def off(alpha: float, factor: float) -> float:
        built.model.zero_grad()
        FisherPenalty(built.model, parts=3, alpha=alpha, beta=beta).backward(batch)
        found = {name: (g - plain[name]) / alpha for name, g in gradients(built.model).items()}
        error = {name: found[name] - factor * each for name, each in of_squares.items()}
        return length(error) / (factor * length(of_squares))

    errors = [off(alpha, 0.5) for alpha in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)]
    assert errors[-1] < 1e-4
    for larger, smaller in pairwise(errors[1:]):
        assert smaller == pytest.approx(larger / 10, rel=0.05)
    assert off(1e-5, 1.0) == pytest.approx(0.5, rel=1e-3)


# A dozen of the cases, kinks and all: the two ways round them in the same way.

BOTH_WAYS = (
    "biased_mlp",
    "in_place_relu",
    "in_place_addition_to_a_layers_output",
    "frozen_parameters",
    "layer_never_called",
    "grouped_dilated_strided_convolution",
    "max_and_average_pooling",
    "group_norm",
    "instance_norm",
    "layer_norm_of_one_and_of_two_dimensions",
    "attention_of_two_heads_by_torchs_kernel",
    "multihead_attention",
    "transformer_layer_with_examples_in_dimension_one",
    "tied_embedding_and_output",
    "linear_called_on_a_parameter",
    "dict_batches_and_an_output_object",
    "unequal_batches",
    "one_example",
    "sequence_with_ignored_positions",
    "class_weights_and_label_smoothing",
    "probability_targets_with_weights_and_smoothing",
    "image_of_labels",
    "squared_error_of_one_number",
    "squared_error_of_images",
    "binary_cross_entropy",
)


@pytest.mark.parametrize("name", [*BOTH_WAYS, "residual_with_batch_norm"])
def test_both_ways_agree(name: str) -> None:
    found = []
    for way in WAYS:
        built = CASES[name]()
        for each in built.model.modules():
            each.train(not isinstance(each, nn.Dropout | nn.MultiheadAttention))
        penalty = FisherPenalty(built.model, built.loss, parts=2, alpha=0.05, beta=7.0, way=way)
        found.append((penalty.backward(whole_batch(built)), gradients(built.model)))
        frozen = [p for p in built.model.parameters() if not p.requires_grad]
        assert all(p.grad is None for p in frozen)
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in BOTH_WAYS if name != "sequence_with_ignored_positions"])
def test_without_a_penalty_the_gradient_is_that_of_torchs_own_loss(name: str) -> None:
    built, other = CASES[name](), CASES[name]()
    batch = whole_batch(built)
    # Steps too small to be seen: what is left is the loss, put together from the parts.
    loss = FisherPenalty(built.model, built.loss, parts=3, alpha=1e-300, beta=1.0).backward(batch)
    values = trained(other.model)
    torch.testing.assert_close(loss, loss_at(other, values, batch))
    want = gradient_at(other, values, batch)
    found = gradients(built.model)
    torch.testing.assert_close(found, {name: want[name] for name in found}, rtol=1e-9, atol=1e-12)


def test_ignored_labels_count_in_the_loss_of_the_batch_as_torch_counts_them() -> None:
    built = CASES["sequence_with_ignored_positions"]()
    batch = whole_batch(built)
    loss = FisherPenalty(built.model, parts=5, beta=7.0).backward(batch)
    torch.testing.assert_close(loss, loss_at(built, trained(built.model), batch))


@pytest.mark.parametrize("way", WAYS)
def test_a_part_without_any_label_has_a_loss_of_zero(way: str) -> None:
    built = CASES["sequence_with_ignored_positions"]()
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)

    def by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.movedim(-1, 1), targets, label_smoothing=0.1)

    inputs, targets = whole_batch(built)
    # Of the five examples the last one has none: alone, torch would call its loss 0 / 0.
    model = nn.Sequential(built.model, Net(lambda net, x: x.movedim(-1, 1)))
    loss = FisherPenalty(model, smoothed, parts=5, whole=False, way=way).backward((inputs, targets))
    want = sum(by_hand(built.model(inputs[n : n + 1]), targets[n : n + 1]) for n in range(4)) / 5
    torch.testing.assert_close(loss, torch.as_tensor(want).detach())
    assert all(bool(each.isfinite().all()) for each in gradients(model).values())


def test_a_function_is_given_whole_parts_and_means_over_them() -> None:
    built, named = smooth_mlp(), smooth_mlp()
    FisherPenalty(built.model, lambda outputs, targets: F.cross_entropy(outputs, targets), parts=3).backward(
        whole_batch(built)
    )
    FisherPenalty(named.model, "cross_entropy", parts=3).backward(whole_batch(named))
    torch.testing.assert_close(gradients(built.model), gradients(named.model))


# What a step leaves behind.


def plain_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def same_bits(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("whole", [None, False, True])
def test_running_statistics_are_those_of_a_plain_step(whole: bool | None, way: str) -> None:
    built, other = smooth_batch_norm(), smooth_batch_norm()
    batch = whole_batch(built)
    before = buffers(built.model)
    FisherPenalty(built.model, parts=3, way=way, whole=whole).step(SGD(built.model.parameters(), lr=0.1), batch)
    plain_step(other.model, SGD(other.model.parameters(), lr=0.1), batch)
    same_bits(buffers(built.model), buffers(other.model))
    assert not torch.equal(buffers(built.model)["1.running_mean"], before["1.running_mean"])


@pytest.mark.parametrize("way", WAYS)
def test_with_batch_norm_a_part_has_two_examples(way: str) -> None:
    built, other = smooth_batch_norm(), smooth_batch_norm()
    batch = whole_batch(built)
    FisherPenalty(built.model, parts=8, alpha=0.1, way=way).backward(batch)
    FisherPenalty(other.model, parts=3, alpha=0.1, way=way).backward(batch)
    same_bits(gradients(built.model), gradients(other.model))


def counting(net: Any, x: Tensor) -> Any:
    net.layer.count = net.layer.count + 1
    net.layer.total.add_(2)
    return net.norm(net.layer(x.unsqueeze(1))).mean(1)


@pytest.mark.parametrize("tries_vectorised", [True, False])
def test_other_buffers_are_those_of_a_plain_step_too(tries_vectorised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if tries_vectorised:
        on_cpus(monkeypatch)

    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        layer.register_buffer("count", torch.zeros(()))
        layer.register_buffer("total", torch.zeros(()))
        norm = nn.InstanceNorm1d(1, track_running_stats=True)
        return Net(counting, layer=nn.utils.parametrizations.spectral_norm(layer), norm=norm)

    batch = reals(6, 4).float(), integers(3, 6)
    one, two = build(), build()
    penalty = FisherPenalty(one, parts=3)
    penalty.step(SGD(one.parameters(), lr=0.1), batch)
    assert (penalty.why_looped is not None) == tries_vectorised
    plain_step(two, SGD(two.parameters(), lr=0.1), batch)
    same_bits(buffers(one), buffers(two))
    assert float(buffers(one)["layer.count"]) == 1


def test_the_written_buffers_alone_lead_to_a_pass_of_their_own() -> None:
    layer = nn.Linear(4, 3)
    layer.register_buffer("count", torch.zeros(()))
    layer.register_buffer("total", torch.zeros(()))
    model = Net(counting, layer=layer, norm=nn.Identity())
    penalty = FisherPenalty(model, parts=3)
    for _ in range(2):
        penalty.backward((torch.randn(6, 4), integers(3, 6)))
    assert [int(each) for each in buffers(model).values()] == [2, 4]


class Failing(nn.Module):
    """Breaks in its n-th forward pass."""

    def __init__(self, model: nn.Module, n: int) -> None:
        super().__init__()
        self.model, self.left = model, n

    def forward(self, x: Tensor) -> Any:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.model(x)


@pytest.mark.parametrize(("way", "passes"), [("loop", 7), ("vectorised", 5)])
def test_an_error_in_any_pass_leaves_everything_as_it_was(way: str, passes: int) -> None:
    for n in range(1, passes + 1):
        built = smooth_batch_norm()
        model = Failing(built.model, n)
        optimizer = SGD(model.parameters(), lr=0.1)
        # A long step: what a short one rounds away comes back by adding it again.
        penalty = FisherPenalty(model, parts=3, alpha=3.0, way=way)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(KeyboardInterrupt):
            penalty.step(optimizer, whole_batch(built))
        same_bits(dict(model.named_parameters()), weights)
        same_bits(gradients(model), {name: torch.ones_like(p) for name, p in weights.items()})
        assert penalty.steps == 0
        norm = built.model.get_submodule("1")
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.track_running_stats
        # Only the pass over the whole batch, the first, has updated the statistics.
        assert int(norm.num_batches_tracked or 0) == (n > 1)
    model = Failing(smooth_batch_norm().model, passes + 1)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    FisherPenalty(model, parts=3, alpha=3.0, way=way).backward(whole_batch(built))
    same_bits(dict(model.named_parameters()), weights)
    assert model.left == 1


class Noise(nn.Module):
    """Random numbers laid out in memory as its inputs are."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 + torch.rand_like(x))


def random_network() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 4, 2), Noise(), nn.Tanh(), nn.Dropout(), nn.Conv2d(4, 3, 2), nn.Dropout2d(), nn.Flatten()]
    return shaken(nn.Sequential(*body, nn.Linear(12, 3)))


@pytest.mark.parametrize("way", WAYS)
def test_both_evaluations_of_a_part_draw_the_same_numbers(way: str) -> None:
    model = random_network()
    batch = reals(7, 2, 4, 4), integers(3, 7)

    def penalty_part(alpha: float) -> float:
        found = []
        for beta in (1.0, 2.0):
            torch.manual_seed(5)
            model.zero_grad()
            FisherPenalty(model, parts=3, alpha=alpha, beta=beta, way=way).backward(batch)
            found.append(gradients(model))
        return length({name: found[1][name] - each for name, each in found[0].items()}) / alpha

    # With masks of their own the difference would not vanish with alpha, and its ratio to alpha would explode.
    assert penalty_part(1e-4) == pytest.approx(penalty_part(1e-3), rel=1e-2)
    assert penalty_part(1e-6) == pytest.approx(penalty_part(1e-4), rel=1e-2)


def test_the_same_seed_gives_the_same_step() -> None:
    built = CASES["dropout_left_in_train_mode"]()
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        built.model.zero_grad()
        FisherPenalty(built.model, parts=2).backward(whole_batch(built))
        found.append((gradients(built.model), torch.rand(3)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_model_that_writes_to_its_inputs_gets_them_anew_for_every_pass() -> None:
    one, two = smooth_mlp(), smooth_mlp()
    batch = whole_batch(one)
    inputs = batch[0].clone()
    writer = Net(lambda net, x: net.body(x.mul_(2)), body=one.model)
    reader = Net(lambda net, x: net.body(x * 2), body=two.model)
    for model in (writer, reader):
        for way in WAYS:
            FisherPenalty(model, parts=3, alpha=0.1, way=way, whole=True).backward(batch)
    same_bits(gradients(writer), gradients(reader))
    torch.testing.assert_close(batch[0], inputs, rtol=0, atol=0)


# Steps.


@pytest.mark.parametrize("tau", [1e-3, 0.5, 1e3])
def test_clipping_leaves_the_smaller_of_norm_and_threshold(tau: float) -> None:
    built = smooth_mlp()
    penalty = FisherPenalty(built.model, parts=3, clip=tau)
    penalty.backward(whole_batch(built))
    before = gradients(built.model)
    norm = length(before)
    assert float(penalty.clip()) == pytest.approx(norm, rel=1e-12)
    after = gradients(built.model)
    assert length(after) == pytest.approx(min(norm, tau), rel=1e-12)
    torch.testing.assert_close(after, {name: g * min(1, tau / norm) for name, g in before.items()})


def test_without_a_threshold_clip_only_says_the_norm() -> None:
    built = smooth_mlp()
    penalty = FisherPenalty(built.model, parts=3)
    assert float(penalty.clip()) == 0
    penalty.backward(whole_batch(built))
    before = gradients(built.model)
    assert float(penalty.clip()) > 0
    same_bits(gradients(built.model), before)


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_any_optimizer_steps_with_the_clipped_gradient(kind: Callable[..., Optimizer]) -> None:
    built, other = smooth_mlp(), smooth_mlp()
    batch = whole_batch(built)
    optimizer, reference = (kind(m.parameters(), lr=0.1, weight_decay=0.1) for m in (built.model, other.model))
    penalty = FisherPenalty(built.model, parts=3, alpha=0.01, beta=20.0, clip=0.3)
    for _ in range(3):
        loss = penalty.step(optimizer, batch)
        values = trained(other.model)
        torch.testing.assert_close(loss, loss_at(other, values, batch))
        total = gradient_at(other, values, batch)
        for piece, size in zip(cut(batch, [3, 2, 2]), (3, 2, 2), strict=True):
            first = gradient_at(other, values, piece)
            second = gradient_at(other, along(values, first, -0.01), piece)
            total = {k: g + 20 * size / 7 * (first[k] - second[k]) for k, g in total.items()}
        norm = length(total)
        for name, p in other.model.named_parameters():
            p.grad = total[name] * min(1.0, 0.3 / norm)
        reference.step()
        torch.testing.assert_close(dict(built.model.named_parameters()), dict(other.model.named_parameters()))


def test_backward_adds_to_what_is_there() -> None:
    built, other = smooth_mlp(), smooth_mlp()
    batch = whole_batch(built)
    pieces = cut(batch, [4, 3])
    penalty = FisherPenalty(built.model, parts=2)
    for piece, weight in zip(pieces, (0.25, 0.75), strict=True):
        penalty.backward(piece, weight=weight)
    want: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in other.model.named_parameters()}
    for piece, weight in zip(pieces, (0.25, 0.75), strict=True):
        other.model.zero_grad()
        FisherPenalty(other.model, parts=2).backward(piece)
        want = {name: each + weight * gradients(other.model)[name] for name, each in want.items()}
    torch.testing.assert_close(gradients(built.model), want)
    assert penalty.steps == 2


def test_parameters_of_equal_gradients_are_clipped_once_each() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    model = Net(lambda net, x: x * (net.first + net.second), first=first, second=second)
    penalty = FisherPenalty(model, "mse", parts=2, clip=1e-2, start_step=9)
    penalty.step(SGD(model.parameters(), lr=0.0), (torch.ones(4, 3), torch.zeros(4, 3)))
    assert float(torch.stack([p.grad for p in model.parameters() if p.grad is not None]).norm()) == pytest.approx(1e-2)


def trajectory(penalty: FisherPenalty, optimizer: Optimizer, batch: Batch, steps: int) -> dict[str, Tensor]:
    for _ in range(steps):
        penalty.step(optimizer, batch)
    return {name: p.detach().clone() for name, p in penalty.model.named_parameters()}


@pytest.mark.parametrize("build", [smooth_mlp, smooth_batch_norm])
def test_before_the_start_steps_are_plain(build: Callable[[], Case]) -> None:
    built, other = build(), build()
    batch = whole_batch(built)
    penalty = FisherPenalty(built.model, parts=3, start_step=3, start_epoch=1)
    optimizer, reference = (SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (built.model, other.model))
    for _ in range(5):
        assert not penalty.is_active
        penalty.step(optimizer, batch)
        plain_step(other.model, reference, batch)
    same_bits(
        dict(built.model.state_dict()),
        dict(other.model.state_dict()),
    )
    penalty.set_epoch(1)
    assert penalty.is_active
    penalty.step(optimizer, batch)
    plain_step(other.model, reference, batch)
    assert not torch.equal(next(built.model.parameters()), next(other.model.parameters()))


def test_the_penalty_starts_at_its_step() -> None:
    built = smooth_mlp()
    penalty = FisherPenalty(built.model, start_step=2)
    active = []
    for _ in range(4):
        active.append(penalty.is_active)
        penalty.backward(whole_batch(built))
    assert active == [False, False, True, True]
    assert penalty.steps == 4


def test_a_strength_of_zero_is_a_plain_step() -> None:
    built, other = smooth_mlp(), smooth_mlp()
    FisherPenalty(built.model, beta=0.0).step(SGD(built.model.parameters(), lr=0.1), whole_batch(built))
    plain_step(other.model, SGD(other.model.parameters(), lr=0.1), whole_batch(other))
    same_bits(dict(built.model.state_dict()), dict(other.model.state_dict()))


def test_training_goes_on_from_a_saved_state() -> None:
    def parts_of(built: Case) -> tuple[FisherPenalty, Optimizer]:
        penalty = FisherPenalty(built.model, parts=3, alpha=0.1, start_step=3)
        return penalty, AdamW(built.model.parameters(), lr=0.1)

    built, other = smooth_mlp(), smooth_mlp()
    batch = whole_batch(built)
    penalty, optimizer = parts_of(built)
    trajectory(penalty, optimizer, batch, 2)
    again, its_optimizer = parts_of(other)
    other.model.load_state_dict(built.model.state_dict())
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(penalty.state_dict())
    same_bits(trajectory(again, its_optimizer, batch, 3), trajectory(penalty, optimizer, batch, 3))
    assert again.state_dict() == penalty.state_dict() == {"steps": 5, "epoch": 0}
    with pytest.raises(TrainingError, match="'steps'"):
        again.load_state_dict({"state": 1})


# Precision.


def single(build: Callable[[], Case]) -> tuple[nn.Module, Batch]:
    built = build()
    inputs, targets = whole_batch(built)
    return built.model.float(), (inputs.float(), targets)


@pytest.mark.parametrize("way", WAYS)
def test_autocast_does_not_reach_the_penalty(way: str) -> None:
    found = []
    for enabled in (False, True):
        model, batch = single(smooth_cnn)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            FisherPenalty(model, parts=3, way=way).backward(batch)
        found.append(gradients(model))
    same_bits(found[0], found[1])


def test_a_pass_of_the_losses_own_keeps_autocast() -> None:
    model, batch = single(smooth_batch_norm)
    seen: list[tuple[int, torch.dtype]] = []

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(batch[0])
        seen.append((len(batch[0]), model.get_submodule("4")(torch.zeros(1, 27)).dtype))
        return F.cross_entropy(outputs, batch[1])

    with torch.autocast("cpu", torch.bfloat16):
        FisherPenalty(model, parts=2, objective=objective).backward(batch)
    short, full = torch.bfloat16, torch.float32
    assert seen == [(7, short), (4, full), (4, full), (3, full), (3, full)]


def test_weights_that_moved_are_seen_by_the_next_pass_of_a_long_autocast() -> None:
    found = []
    for is_long in (True, False):
        model, batch = single(smooth_batch_norm)
        penalty, optimizer = FisherPenalty(model, parts=2), SGD(model.parameters(), lr=1.0)
        with torch.autocast("cpu", torch.bfloat16) if is_long else nullcontext():
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    penalty.step(optimizer, batch)
        found.append(dict(model.named_parameters()))
    same_bits(found[0], found[1])


def test_half_precision_inputs_are_taken_in_full() -> None:
    model, (inputs, targets) = single(smooth_cnn)
    coarse = inputs.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        FisherPenalty(model, parts=3).backward((coarse, targets))
    found = gradients(model)
    model.zero_grad()
    FisherPenalty(model, parts=3).backward((coarse.float(), targets))
    same_bits(found, gradients(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_refused(dtype: torch.dtype) -> None:
    model, batch = single(smooth_mlp)
    penalty = FisherPenalty(model)
    model.to(dtype)
    with pytest.raises(PrecisionError, match=r"0\.weight"):
        penalty.backward(batch)
    with pytest.raises(PrecisionError, match="autocast"):
        FisherPenalty(model)


@pytest.mark.parametrize("build", [smooth_mlp, smooth_batch_norm])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_changes_nothing_but_skips_overflows(build: Callable[[], Case], enabled: bool) -> None:
    (model, batch), (other, _) = single(build), single(build)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
    penalty, reference = (FisherPenalty(m, parts=3, clip=0.1) for m in (model, other))
    optimizer, its_optimizer = (SGD(m.parameters(), lr=0.1) for m in (model, other))
    for _ in range(2):
        penalty.step(optimizer, batch, scaler)
        scaler.update()
        reference.step(its_optimizer, batch)
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()))
    if enabled:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        inputs = batch[0].clone()
        inputs[0] = float("inf")
        penalty.step(optimizer, (inputs, batch[1]), scaler)
        scaler.update()
        same_bits(dict(model.named_parameters()), before)
        assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("build", [smooth_mlp, smooth_batch_norm])
def test_scaled_gradients_are_added_scaled(build: Callable[[], Case]) -> None:
    (model, batch), (other, _) = single(build), single(build)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    FisherPenalty(model, parts=3).backward(batch, scaler=scaler)
    FisherPenalty(other, parts=3).backward(batch)
    torch.testing.assert_close(gradients(model), {name: g * 2**10 for name, g in gradients(other).items()})


# Which way.


def on_cpus(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(either_way, "VECTORISED_ON", ("cpu",))


def ways_taken(patch: pytest.MonkeyPatch) -> list[str]:
    taken: list[str] = []
    for name in ("looped", "vectorised"):
        real = getattr(Passes, name)

        def noted(self: Any, parts: Any, name: str = name, real: Any = real) -> Any:
            taken.append(name)
            return real(self, parts)

        patch.setattr(Passes, name, noted)
    return taken


def test_a_model_that_torch_func_does_not_take_is_looped_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus(monkeypatch)
    taken = ways_taken(monkeypatch)
    built, other = CASES["weight_norm_parametrization"](), CASES["weight_norm_parametrization"]()
    penalty = FisherPenalty(built.model, parts=2)
    for _ in range(2):
        penalty.backward(whole_batch(built))
    assert taken == ["vectorised", "looped", "looped"]
    assert penalty.why_looped is not None
    assert "_weight_norm_interface" in penalty.why_looped
    reference = FisherPenalty(other.model, parts=2, way="loop")
    for _ in range(2):
        reference.backward(whole_batch(other))
    same_bits(gradients(built.model), gradients(other.model))
    with pytest.raises(TrainingError, match="_weight_norm_interface"):
        FisherPenalty(other.model, parts=2, way="vectorised").backward(whole_batch(other))


def test_what_fails_in_the_loop_too_says_nothing_about_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus(monkeypatch)
    built = smooth_mlp()
    inputs, targets = whole_batch(built)
    penalty = FisherPenalty(built.model, parts=2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        penalty.backward((inputs[:, :2], targets))
    assert penalty.why_looped is None
    taken = ways_taken(monkeypatch)
    penalty.backward((inputs, targets))
    assert taken == ["vectorised"]


def test_running_out_of_memory_is_not_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus(monkeypatch)

    def fails(self: Any, parts: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Passes, "vectorised", fails)
    built = smooth_mlp()
    penalty = FisherPenalty(built.model, parts=2)
    penalty.backward(whole_batch(built))
    assert penalty.why_looped == "The vectorised pass ran out of memory."
    with pytest.raises(torch.OutOfMemoryError):
        FisherPenalty(built.model, parts=2, way="vectorised").backward(whole_batch(built))


def test_auto_loops_on_cpus_with_large_stacks_and_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ways_taken(monkeypatch)
    built, recurrent = smooth_mlp(), CASES["lstm_in_two_directions"]()
    FisherPenalty(built.model, parts=2).backward(whole_batch(built))
    on_cpus(monkeypatch)
    FisherPenalty(recurrent.model, parts=2).backward(whole_batch(recurrent))
    monkeypatch.setattr(either_way, "MOST_STACKED", 100)
    FisherPenalty(built.model, parts=2).backward(whole_batch(built))
    assert taken == ["looped"] * 3


# Batches and objectives of other kinds.


def test_an_objective_of_the_users_own_takes_any_batch_and_shares_what_does_not_count() -> None:
    model = nn.Linear(3, 2).double()
    scale = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    seen = []

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        seen.append((type(batch), len(batch["x"]), len(batch["scale"]), batch["name"]))
        return F.mse_loss(model(batch["x"] * batch["scale"]), batch["y"][0])

    x, y = reals(5, 3), (reals(5, 2), 1)
    batch = UserDict({"x": x, "scale": scale, "y": y, "name": "a"})
    FisherPenalty(model, objective=objective, parts=2, alpha=0.01).backward(batch)
    assert seen == [(UserDict, 3, 3, "a"), (UserDict, 3, 3, "a"), (UserDict, 2, 3, "a"), (UserDict, 2, 3, "a")]
    found = gradients(model)
    model.zero_grad()
    FisherPenalty(model, "mse", parts=2, alpha=0.01).backward((x * scale, y[0]))
    torch.testing.assert_close(gradients(model), found)


# Several processes.


def one_of_two(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = []
    for build in (smooth_mlp, smooth_batch_norm):
        built = build()
        # Used on the first process only, and nowhere.
        model = Net(
            lambda net, x, rank=rank: net.body(x) + (net.odd if rank == 0 else 0),
            body=built.model,
            odd=nn.Parameter(torch.ones(3, dtype=torch.float64)),
            spare=nn.Parameter(torch.ones(2, dtype=torch.float64)),
        )
        wrapped = DistributedDataParallel(model)
        shard = cut(whole_batch(built), [4, 3])[rank]
        penalty = FisherPenalty(wrapped, parts=2, alpha=0.05)
        penalty.backward(shard)
        first = gradients(model)
        penalty.backward(shard)
        found.append((first, gradients(model), buffers(model)))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_end_with_the_mean_of_their_gradients(tmp_path: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(one_of_two, args=(port, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call, attr-defined]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for build, one, two in zip((smooth_mlp, smooth_batch_norm), *ranks, strict=True):
        same_bits(one[0], two[0])
        same_bits(one[1], two[1])
        want: list[dict[str, Tensor]] = []
        for rank in range(2):
            built = build()
            odd = nn.Parameter(torch.ones(3, dtype=torch.float64))
            model = Net(
                lambda net, x, rank=rank: net.body(x) + (net.odd if rank == 0 else 0), body=built.model, odd=odd
            )
            FisherPenalty(model, parts=2, alpha=0.05).backward(cut(whole_batch(built), [4, 3])[rank])
            want.append(gradients(model))
        zero = torch.zeros(3, dtype=torch.float64)
        mean = {name: (each + want[1].get(name, zero)) / 2 for name, each in want[0].items()}
        torch.testing.assert_close(one[0], mean, rtol=1e-12, atol=1e-14)
        assert "spare" not in one[0]
        torch.testing.assert_close(one[1], {name: 2 * each for name, each in mean.items()}, rtol=1e-12, atol=1e-14)


# Requests that mean nothing.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"parts": 0}, OptionError),
        ({"parts": 2.0}, OptionError),
        ({"alpha": 0.0}, OptionError),
        ({"alpha": float("nan")}, OptionError),
        ({"beta": -1.0}, OptionError),
        ({"clip": 0.0}, OptionError),
        ({"start_step": -1}, OptionError),
        ({"start_epoch": 0.5}, OptionError),
        ({"way": "vectorized"}, OptionError),
        ({"whole": "yes"}, OptionError),
        ({"objective": "mse"}, OptionError),
        ({"loss": "cross entropy"}, UnknownNameError),
        ({"loss": nn.MSELoss(reduction="sum")}, OptionError),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], error: type[SaltflatError]) -> None:
    with pytest.raises(error, match=r"Got .* Want .* Do: "):
        FisherPenalty(nn.Linear(2, 2), **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ((torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)), EmptyDataError),
        ((torch.zeros(3, 4), torch.tensor(1)), DataError),
        ((torch.zeros(3, 4), torch.zeros(2, dtype=torch.long)), DataError),
        ((torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.long)), LabelError),
        ({"x": torch.zeros(3, 4)}, DataError),
        (torch.zeros(3, 4), DataError),
        ([], DataError),
        (None, DataError),
    ],
)
def test_batches_that_cannot_be_taken_are_refused(batch: Batch, error: type[SaltflatError], way: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=r"(?s)Got .* Want .* Do: "):
        FisherPenalty(model, way=way, whole=False).step(optimizer, batch)
    same_bits(gradients(model), {name: torch.ones_like(p) for name, p in model.named_parameters()})


@pytest.mark.parametrize("way", WAYS)
def test_an_objective_must_give_a_number_that_depends_on_the_model(way: str) -> None:
    model, batch = nn.Linear(4, 3), (torch.randn(4, 4), torch.randn(4, 3))

    def each(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)

    def detached(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]).detach(), batch[1])

    with pytest.raises(OptionError, match=r"shape \(2,\).* mean"):
        FisherPenalty(model, objective=each, way=way, parts=2).backward(batch)
    with pytest.raises(ModelError, match="does not depend"):
        FisherPenalty(model, objective=detached, way=way, parts=2).backward(batch)


def test_optimizers_that_take_two_gradients_are_refused() -> None:
    model = nn.Linear(4, 3)
    batch = torch.randn(4, 4), integers(3, 4)
    with pytest.raises(TrainingError, match="pass its base"):
        FisherPenalty(model).step(SAM(model, SGD, lr=0.1), batch)
    with pytest.raises(OptionError, match="in place of the optimizer"):
        FisherPenalty(model).step(batch, batch)  # type: ignore[arg-type]


def test_models_that_cannot_be_moved_are_refused() -> None:
    with pytest.raises(ModelError, match=r"torch\.nn\.Module"):
        FisherPenalty(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="requires_grad_"):
        FisherPenalty(nn.Linear(2, 2).requires_grad_(False))
    sparse = nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True))
    with pytest.raises(TrainingError, match="sparse"):
        FisherPenalty(sparse, parts=2).backward((integers(5, 4, 2), integers(3, 4)))


# On a GPU, if there is one.

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("build", [smooth_mlp, smooth_cnn, smooth_batch_norm, CASES["multihead_attention"]])
def test_on_a_gpu_auto_is_vectorised_and_agrees_with_the_loop(build: Callable[[], Case]) -> None:
    found = []
    for way in ("loop", "auto"):
        built = build()
        inputs, targets = whole_batch(built)
        penalty = FisherPenalty(built.model.cuda(), parts=3, alpha=0.05, way=way)
        penalty.backward((inputs.cuda(), targets.cuda()))
        assert penalty.why_looped is None
        found.append(gradients(built.model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


@gpu
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu_both_evaluations_draw_the_same_numbers(way: str) -> None:
    model = random_network().cuda()
    batch = reals(7, 2, 4, 4).cuda(), integers(3, 7).cuda()
    sizes = []
    for alpha in (1e-3, 1e-5):
        found = []
        for beta in (1.0, 2.0):
            torch.manual_seed(5)
            model.zero_grad()
            FisherPenalty(model, parts=3, alpha=alpha, beta=beta, way=way).backward(batch)
            found.append(gradients(model))
        sizes.append(length({name: found[1][name] - each for name, each in found[0].items()}) / alpha)
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-2)


@gpu
@pytest.mark.parametrize("build", [smooth_cnn, smooth_batch_norm])
def test_on_a_gpu_half_precision_with_a_scaler_keeps_the_penalty(build: Callable[[], Case]) -> None:
    (model, batch), (other, _) = single(build), single(build)
    model.cuda(), other.cuda()
    batch = batch[0].cuda(), batch[1].cuda()
    scaler = torch.amp.GradScaler("cuda")
    optimizer = SGD(model.parameters(), lr=0.1)
    with torch.autocast("cuda", torch.float16):
        FisherPenalty(model, parts=3, alpha=1e-3, beta=50.0).step(optimizer, batch, scaler)
    scaler.update()
    FisherPenalty(other, parts=3, alpha=1e-3, beta=50.0).step(SGD(other.parameters(), lr=0.1), batch)
    tolerance = 1e-6 if build is smooth_cnn else 1e-3
    torch.testing.assert_close(
        dict(model.named_parameters()), dict(other.named_parameters()), rtol=tolerance, atol=tolerance
    )
