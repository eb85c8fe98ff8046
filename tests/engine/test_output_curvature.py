"""Columns: exact ones make the loss's second derivative, random ones make it on average and know their error."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.engine.custom_losses import CustomLoss
from saltflat.engine.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquaredError
from saltflat.engine.output_curvature import Columns, ExampleRNG, compute_softmax_root, make_columns, parse_column_plan


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gram(loss: Loss, outputs: Tensor, targets: Tensor, columns: str, seed: int = 0) -> Tensor:
    """``(examples, size, size)``: sum of the columns' outer products."""
    total = torch.zeros(len(outputs), outputs[0].numel(), outputs[0].numel(), dtype=torch.float64)
    for each in make_columns(loss.curvature(outputs, targets), parse_column_plan(columns), ExampleRNG(seed, 0)):
        block = each.block(0, each.layout.total).reshape(each.layout.total, len(outputs), -1)
        total += each.sign * torch.einsum("kni,knj->nij", block, block)
    return total


def saddle(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] * outputs[:, 1] + outputs.sum() ** 4 / 10).sum()


LOSSES: dict[str, tuple[Loss, Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "cross entropy": (
        CrossEntropy(),
        lambda o: o.argmin(1),
        lambda o, t: F.cross_entropy(o, t, reduction="sum"),
        (4, 5),
    ),
    "two classes": (CrossEntropy(), lambda o: o.argmin(1), lambda o, t: F.cross_entropy(o, t, reduction="sum"), (4, 2)),
    "smoothed, weighted": (
        CrossEntropy(0.2, torch.tensor([1.0, 2.0, 0.5])),
        lambda o: o.argmin(1),
        lambda o, t: F.cross_entropy(
            o, t, torch.tensor([1.0, 2.0, 0.5]).double(), reduction="sum", label_smoothing=0.2
        ),
        (4, 3),
    ),
    "sequence": (
        CrossEntropy(),
        lambda o: o.argmin(2),
        lambda o, t: F.cross_entropy(o.mT, t, reduction="sum"),
        (3, 4, 3),
    ),
    "squared error": (SquaredError(), lambda o: o + 1, lambda o, t: F.mse_loss(o, t, reduction="sum"), (3, 2, 2)),
    "binary": (
        BinaryCrossEntropy(torch.tensor([1.0, 3.0])),
        lambda o: (o > 0).double(),
        lambda o, t: F.binary_cross_entropy_with_logits(
            o, t, pos_weight=torch.tensor([1.0, 3.0]).double(), reduction="sum"
        ),
        (3, 2),
    ),
    "any function": (
        CustomLoss(saddle),
        lambda o: o[:, 0],
        lambda o, t: sum((saddle(a[None], a) for a in o), o.new_zeros(())),
        (3, 3),
    ),
}


def problem(name: str) -> tuple[Loss, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    loss, label, reference, shape = LOSSES[name]
    outputs = torch.randn(shape, dtype=torch.float64, generator=generator())
    return loss, outputs, label(outputs), reference


def hessian(reference: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    whole = torch.autograd.functional.hessian(lambda o: reference(o, targets), outputs)
    assert isinstance(whole, Tensor)
    size = outputs[0].numel()
    blocks = whole.reshape(len(outputs), size, len(outputs), size)
    return torch.stack([blocks[n, :, n] for n in range(len(outputs))])


@pytest.mark.parametrize("name", LOSSES)
def test_value_gradient_and_exact_columns_are_torchs(name: str) -> None:
    loss, outputs, targets, reference = problem(name)
    torch.testing.assert_close(loss.total(outputs, targets).sum(), reference(outputs, targets))
    free = outputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reference(free, targets), free)
    torch.testing.assert_close(loss.gradient(outputs, targets), gradient)
    torch.testing.assert_close(
        gram(loss, outputs, targets, "exact"), hessian(reference, outputs, targets), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("columns", ["top:1", "top:2", "sampled:2"])
def test_random_columns_are_unbiased(name: str, columns: str) -> None:
    loss, outputs, targets, _ = problem(name)
    draws = torch.stack([gram(loss, outputs, targets, columns, seed) for seed in range(2000)])
    exact = gram(loss, outputs, targets, "exact")
    error = draws.std(0) / len(draws) ** 0.5
    off = (draws.mean(0) - exact).abs()
    assert bool((off <= 5 * error + 1e-12).all())


def test_a_one_hot_softmax_loses_no_digits() -> None:
    logits = torch.tensor([[0.0, 40.0, 1.0, -30.0]], dtype=torch.float64)
    p = F.softmax(logits, 1)
    root = compute_softmax_root(p)[0]
    found = root.square().sum(1)
    rest = p[0].sum() - p[0]
    rest[1] = p[0, [0, 2, 3]].sum()  # 1 - p without cancellation
    torch.testing.assert_close(found, p[0] * rest, rtol=1e-12, atol=0)


def trained() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A small classifier of 12 classes, trained until it is right on most examples but sure of few."""
    torch.manual_seed(0)
    centres = torch.randn(12, 6, generator=generator(1))
    y = torch.arange(240) % 12
    x = centres[y] + 0.6 * torch.randn(240, 6, generator=generator(2))
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.double(), (x.double(), y)


@pytest.mark.parametrize("columns", ["top:3", "sampled:8"])
def test_estimates_are_unbiased_and_their_intervals_cover(columns: str) -> None:
    net, data = trained()
    names = ["curvature_trace", "curvature_diagonal"]
    exact = saltflat.compute_statistics(net, data, names=names)
    runs = [saltflat.compute_statistics(net, data, names=names, columns=columns, seed=seed) for seed in range(200)]

    for parameter, truth in exact["curvature_trace"].items():
        values = torch.stack([run["curvature_trace"][parameter] for run in runs])
        errors = torch.stack([run.stderr["curvature_trace"][parameter] for run in runs])
        assert abs(float(values.mean() - truth)) <= 3 * float(values.std()) / 200**0.5
        covered = float(((values - truth).abs() <= 1.96 * errors).double().mean())
        assert 0.92 <= covered <= 0.98, (parameter, covered)

    # A single entry of the diagonal may rest on the tails of a handful of examples, which no error bar made of four
    # draws each covers fully: 0.90 on average here for `top`, 0.94 for `sampled`.
    shares = []
    for parameter, truth in exact["curvature_diagonal"].items():
        values = torch.stack([run["curvature_diagonal"][parameter] for run in runs])
        errors = torch.stack([run.stderr["curvature_diagonal"][parameter] for run in runs])
        torch.testing.assert_close(values.mean(0), truth, rtol=0, atol=5 * float((values.std(0) / 200**0.5).max()))
        shares.append(((values - truth).abs() <= 1.96 * errors).double().flatten())
    assert 0.88 <= float(torch.cat(shares).mean()) <= 0.98


@pytest.mark.parametrize("columns", ["top:3", "sampled:8"])
def test_random_columns_do_not_depend_on_the_batches(columns: str) -> None:
    net, (x, y) = trained()
    names = ["curvature_trace", "curvature_diagonal", "gradient_second_moment"]
    whole = saltflat.compute_statistics(net, (x, y), names=names, columns=columns)
    split = saltflat.compute_statistics(
        net, list(zip(x.split(7), y.split(7), strict=True)), names=names, columns=columns
    )
    for name in names:
        for parameter in whole[name]:
            torch.testing.assert_close(split[name][parameter], whole[name][parameter], rtol=1e-12, atol=1e-18)
    for name in whole.stderr:
        for parameter in whole.stderr[name]:
            torch.testing.assert_close(
                split.stderr[name][parameter], whole.stderr[name][parameter], rtol=1e-9, atol=1e-18
            )


def test_exact_statistics_have_no_errors_and_seeds_matter_only_for_random_ones() -> None:
    net, data = trained()
    assert not saltflat.compute_statistics(net, data, names="curvature_trace").stderr
    one, two, again = (
        saltflat.compute_statistics(net, data, names="curvature_trace", columns="top", seed=seed) for seed in (1, 2, 1)
    )
    for parameter in one["curvature_trace"]:
        assert one["curvature_trace"][parameter] != two["curvature_trace"][parameter]
        assert one["curvature_trace"][parameter] == again["curvature_trace"][parameter]


def test_as_many_top_classes_as_there_are_is_exact() -> None:
    net, data = trained()
    exact, top = (
        saltflat.compute_statistics(net, data, names="curvature_trace", columns=c)["curvature_trace"]
        for c in ("exact", "top:11")
    )
    torch.testing.assert_close(dict(top), dict(exact), rtol=1e-12, atol=0)


@pytest.mark.parametrize("columns", ["sampled:3", "top:2", "exact"])
@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 5)], ids=["one position", "several positions"])
def test_columns_made_one_after_the_other_are_those_made_at_once(columns: str, shape: tuple[int, ...]) -> None:
    outputs = torch.randn(shape, dtype=torch.float64, generator=generator())
    curvature = CrossEntropy().curvature(outputs, outputs.argmin(-1))
    plan, dice = parse_column_plan(columns), ExampleRNG(7, 2)
    (whole,) = make_columns(curvature, plan, dice)
    (parts,) = make_columns(curvature, plan, dice, torch.float32)
    at_once = whole.block(0, whole.layout.total)
    blocks = parts.split(1, apart=True)
    assert sum(layout.draws for *_, layout, _ in blocks) == whole.layout.draws
    each = [parts.block(start, stop).float() for start, stop, *_ in blocks]
    assert torch.equal(torch.cat(each), at_once.float())
    assert torch.equal(parts.block(0, 1).float(), at_once[:1].float())  # from the beginning again
    assert whole.split(1, apart=False) == [(0, whole.layout.total, whole.layout, 0)] or not whole.layout.draws


def test_the_signs_of_draws_are_those_of_all_draws_together() -> None:
    dice = ExampleRNG(3, 5, torch.tensor([4, 1]))
    signs = dice.draw_signs(2, 3, 4, 5)
    found = [next(each) for each in [dice.iterate_negative(2, 4, 5)] for _ in range(3)]
    assert torch.equal(torch.stack(found, 1), signs < 0)


@pytest.mark.parametrize("columns", ["sampled:3", "top:2"])
def test_draws_that_do_not_fit_together_give_the_same_numbers(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    split = Columns.split

    def count_blocks(*arguments: Any, **options: Any) -> Any:
        blocks = split(*arguments, **options)
        counts.append(len(blocks))
        return blocks

    monkeypatch.setattr(Columns, "split", count_blocks)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(400, 4), nn.Linear(4, 400)).double()
    tokens = torch.randint(400, (6, 8), generator=generator())
    names = ["hessian_trace", "normalized_sharpness"]
    fast: dict[str, Any] = {"certificate": False, "sampling": False}
    roomy, tight = (
        saltflat.measure(net, (tokens, tokens), measures=names, columns=columns, memory=memory, **fast)
        for memory in ("1GiB", "300kB")
    )
    assert min(counts) == 1  # with room, and for gradients
    assert max(counts) > 1
    for name in names:
        assert float(tight[name]) == pytest.approx(float(roomy[name]), rel=1e-10)
        assert tight[name].stderr == pytest.approx(roomy[name].stderr, rel=1e-7)


@pytest.mark.parametrize("columns", ["sampled:8", "top:4"])
def test_random_numbers_of_a_vocabulary_are_drawn_for_one_column_at_a_time(columns: str) -> None:
    outputs = torch.randn(1, 2, 20_000, dtype=torch.float64, generator=generator())
    curvature = CrossEntropy().curvature(outputs, outputs.argmin(-1))
    (found,) = make_columns(curvature, parse_column_plan(columns), ExampleRNG(0, 0), torch.float32)
    tracemalloc.start()
    try:
        found.block(0, found.layout.total)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * outputs.numel() * outputs.element_size()  # numpy's numbers and truth values of one draw


def test_very_many_exact_columns_are_warned_of_once_with_the_way_out() -> None:
    words = 2100
    model = nn.Sequential(nn.Embedding(words, 2), nn.Linear(2, words))
    tokens = torch.randint(words, (3,))
    with pytest.warns(UserWarning, match=r"2,\d\d\d backward columns for each example.*sampled:4") as caught:
        saltflat.compute_statistics(model, (tokens, tokens), names="curvature_trace", progress=False)
    assert len(caught) == 1
    saltflat.compute_statistics(model, (tokens, tokens), names="curvature_trace", columns="sampled:2", progress=False)
