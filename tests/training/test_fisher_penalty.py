"""The Fisher penalty's gradient against its definition: finite differences, double backward, torch's own loss."""

from collections import UserDict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cases import CASES, Case, Net, reals
from fisher_penalty_cases import (
    KINKED,
    WAYS,
    Batch,
    along,
    cut,
    gradient_at,
    gradients,
    length,
    loss_at,
    smooth_batch_norm,
    smooth_cnn,
    smooth_mlp,
    trained,
    whole_batch,
)
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.training import FisherPenalty
from saltflat.training.part_gradients import PassStrategy


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


# A finite difference across a kink would measure something else.
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
SIZES = {1: [7], 2: [4, 3], 3: [3, 2, 2], 7: [1] * 7, 12: [1] * 7}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SMOOTH)
def test_the_gradient_is_the_finite_difference_of_the_loss_and_its_penalty(name: str, way: PassStrategy) -> None:
    built = SMOOTH[name]()
    batch, direction = whole_batch(built), direction_for(built.model)
    n = len(batch["labels"]) if isinstance(batch, dict) else len(batch[1])
    sizes = [n - n // 2, n // 2]
    FisherPenalty(built.model, parts=2, alpha=0.05, beta=7.0, strategy=way).backward(batch)
    want = slope(built, batch, sizes, 0.05, 7.0, direction, whole=name == "batch norm")
    assert projected(built.model, direction) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parts", SIZES)
def test_any_number_of_parts_loses_no_example(parts: int, way: PassStrategy) -> None:
    built = smooth_mlp()
    batch, direction = whole_batch(built), direction_for(built.model)
    FisherPenalty(built.model, parts=parts, alpha=0.05, beta=7.0, strategy=way).backward(batch)
    want = slope(built, batch, SIZES[parts], 0.05, 7.0, direction, whole=False)
    assert projected(built.model, direction) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_with_batch_norm_the_loss_is_that_of_the_batch_or_of_the_parts(way: PassStrategy, whole: bool) -> None:
    built = smooth_batch_norm()
    batch, direction = whole_batch(built), direction_for(built.model)
    loss = FisherPenalty(built.model, parts=3, alpha=0.05, beta=7.0, strategy=way, whole=whole).backward(batch)
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


@pytest.mark.parametrize("name", [name for name in KINKED if name != "sequence_with_ignored_positions"])
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
def test_a_part_without_any_label_has_a_loss_of_zero(way: PassStrategy) -> None:
    built = CASES["sequence_with_ignored_positions"]()
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)

    def by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.movedim(-1, 1), targets, label_smoothing=0.1)

    inputs, targets = whole_batch(built)
    # Of the five examples the last one has none: alone, torch would call its loss 0 / 0.
    model = nn.Sequential(built.model, Net(lambda net, x: x.movedim(-1, 1)))
    loss = FisherPenalty(model, smoothed, parts=5, whole=False, strategy=way).backward((inputs, targets))
    want = sum(by_hand(built.model(inputs[n : n + 1]), targets[n : n + 1]) for n in range(4)) / 5
    torch.testing.assert_close(loss, torch.as_tensor(want).detach())
    assert all(bool(each.isfinite().all()) for each in gradients(model).values())


@pytest.mark.parametrize("whole", [None, False])
def test_a_function_of_ones_own_is_given_whole_parts_and_means_over_them(whole: bool | None) -> None:
    built, named = smooth_mlp(), smooth_mlp()

    def function(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    FisherPenalty(built.model, function, parts=3, alpha=0.05, whole=whole).backward(whole_batch(built))
    FisherPenalty(named.model, "cross_entropy", parts=3, alpha=0.05).backward(whole_batch(named))
    torch.testing.assert_close(gradients(built.model), gradients(named.model))


def test_a_function_of_ones_own_need_not_be_a_mean_over_examples() -> None:
    built = smooth_mlp()
    weights = torch.tensor([1.0, 5.0, 25.0], dtype=torch.float64)
    built = replace(built, loss_function=lambda outputs, targets: F.cross_entropy(outputs, targets, weights))
    batch, direction = whole_batch(built), direction_for(built.model)
    loss = FisherPenalty(built.model, built.loss_function, parts=3, alpha=0.05, beta=7.0).backward(batch)
    torch.testing.assert_close(loss, loss_at(built, trained(built.model), batch))
    want = slope(built, batch, [3, 2, 2], 0.05, 7.0, direction, whole=True)
    assert projected(built.model, direction) == pytest.approx(want, rel=1e-6)
    other = slope(built, batch, [3, 2, 2], 0.05, 7.0, direction, whole=False)
    assert other != pytest.approx(want, rel=1e-2), "the mean over the parts is another number"


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
    # The loss of the batch, and two passes over each part.
    assert seen == [(UserDict, examples, 3, "a") for examples in (5, 3, 3, 2, 2)]
    found = gradients(model)
    model.zero_grad()
    FisherPenalty(model, "mse", parts=2, alpha=0.01).backward((x * scale, y[0]))
    torch.testing.assert_close(gradients(model), found)
