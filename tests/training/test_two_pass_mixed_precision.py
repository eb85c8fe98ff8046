"""Autocast and GradScaler around two passes: overflow in either, clipping, scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from two_pass_cases import (
    KINDS,
    SCALED_WAYS,
    WAYS,
    Kind,
    batches,
    both,
    by_closure,
    loss_of,
    made,
    same,
    scaled,
    scaled_explicit,
)

from saltflat.errors import TrainingError
from saltflat.training import SAM, GradientNormPenalty


@pytest.mark.parametrize("way", WAYS)
def test_one_autocast_around_both_passes_sees_the_moved_weights(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    sam = SAM(model, SGD, lr=0.1, rho=20.0)
    sizes: list[float] = []
    model.register_forward_hook(lambda module, args, output: sizes.append(output.detach().abs().sum().item()))
    with torch.autocast("cpu", torch.bfloat16):
        WAYS[way](model, sam, batches(dtype=torch.float32)[0])
    assert len(sizes) == 2
    assert sizes[1] > 2 * sizes[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", SCALED_WAYS)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_changes_nothing(kind: Kind, way: str, enabled: bool) -> None:
    model, expected = made("batch norm"), made("batch norm")
    optimizer = kind(model, SGD, lr=0.1, momentum=0.9)
    other = kind(expected, SGD, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=enabled)
    for batch in batches():
        SCALED_WAYS[way](model, optimizer, batch, scaler)
        scaler.update()
        by_closure(expected, other, batch)
    same(model, expected, 1e-12)
    assert optimizer.perturbed_steps == 20
    assert (scaler.get_scale() > 1024) == enabled


@pytest.fixture
def overflow() -> Iterator[Callable[[nn.Module, int, bool], None]]:
    """Makes the gradient of one pass infinite, at one weight or everywhere."""
    handles = []

    def inject(model: nn.Module, at: int, everywhere: bool) -> None:
        passes = [0]

        def hook(gradient: Tensor) -> Tensor:
            passes[0] += 1
            if passes[0] == at:
                gradient = gradient.clone()
                gradient[... if everywhere else (0, 0)] = torch.inf
            return gradient

        handles.append(model.get_parameter("0.weight").register_hook(hook))

    yield inject
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", SCALED_WAYS)
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_step_that_overflowed_is_skipped(
    kind: Kind,
    way: str,
    at: int,
    everywhere: bool,
    overflow: Callable[[nn.Module, int, bool], None],
) -> None:
    model = made("batch norm")
    optimizer = kind(model, SGD, lr=0.1, momentum=0.9)
    called: list[str] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    SCALED_WAYS[way](model, optimizer, batches()[0], scaler)
    scaler.update()
    optimizer.register_step_pre_hook(lambda *_: called.append("stepped"))
    before, state = deepcopy(model), deepcopy(optimizer.state_dict())
    overflow(model, at, everywhere)
    SCALED_WAYS[way](model, optimizer, batches()[1], scaler)
    scaler.update()
    assert scaler.get_scale() == 512
    for p, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, old)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    assert optimizer.perturbed_steps == 1
    assert not called
    assert not optimizer.is_shifted
    # Running statistics are those of the pass that was there, as with any optimizer.
    loss_of(before, batches()[1])
    torch.testing.assert_close(dict(model.named_buffers()), dict(before.named_buffers()), rtol=0, atol=0)
    SCALED_WAYS[way](model, optimizer, batches()[2], scaler)
    assert optimizer.perturbed_steps == 2
    assert called == ["stepped"]


def test_clipping_takes_the_unscaled_gradient_once() -> None:
    model, expected = made(), made()
    sam, other = SAM(model, SGD, lr=0.1), SAM(expected, SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    for batch in batches(5):
        sam.zero_grad()
        scaled(model, batch, scaler)
        sam.first_step(scaler)
        scaled(model, batch, scaler)
        scaler.unscale_(sam)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        sam.second_step(scaler)
        scaler.update()
        loss_of(expected, batch).backward()
        other.first_step()
        loss_of(expected, batch).backward()
        torch.testing.assert_close(norms[-1], nn.utils.clip_grad_norm_(expected.parameters(), 0.05))
        other.second_step()
        other.zero_grad()
    assert min(norms) > 0.05
    same(model, expected, 1e-12)


def test_a_first_gradient_of_unknown_scale_is_told() -> None:
    model = made()
    optimizer = GradientNormPenalty(model, SGD, lr=0.1)
    before = deepcopy(model)
    scaler = torch.amp.GradScaler("cpu")
    scaled(model, batches()[0], scaler)
    optimizer.first_step()
    scaled(model, batches()[0], scaler)
    scaler.unscale_(optimizer)
    with pytest.raises(TrainingError, match=r"Try calling first_step\(scaler\)"):
        scaler.step(optimizer)
    same(model, before)


def test_a_scaler_that_refuses_leaves_weights_where_they_belong() -> None:
    model, sam = both()
    scaler = torch.amp.GradScaler("cpu")
    scaled_explicit(model, sam, batches()[0], scaler)
    before = deepcopy(model)
    with pytest.raises(RuntimeError, match="already been called"):
        scaled_explicit(model, sam, batches()[0], scaler)
    same(model, before)
    assert not sam.is_shifted
