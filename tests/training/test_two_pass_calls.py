"""Errors between the passes, calls in the wrong order, and gradients of micro-batches."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from two_pass_cases import (
    KINDS,
    OPTIONS,
    WAYS,
    Kind,
    batches,
    both,
    by_closure,
    closure_of,
    explicit,
    loss_of,
    made,
    same,
)

from saltflat.errors import TrainingError
from saltflat.training import SAM
from saltflat.training.two_pass import TwoPass


class Fragile(nn.Module):
    """Counts its passes in a buffer, and fails in one of them."""

    passes: Tensor

    def __init__(self, fails_in: int) -> None:
        super().__init__()
        self.inner, self.fails_in, self.called = made("batch norm"), fails_in, 0
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.called += 1
        self.passes += 1
        outputs: Tensor = self.inner(inputs)
        if self.called == self.fails_in:
            raise KeyError("broken")
        return outputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails_in", [1, 2, 3, 4])
def test_after_an_error_in_any_pass_weights_are_where_they_were(kind: Kind, fails_in: int) -> None:
    model, untroubled = Fragile(fails_in), Fragile(0)
    optimizer = kind(model, SGD, lr=0.1, momentum=0.9, rho=0.5)
    halves = list(zip(*(each.chunk(2) for each in batches()[0]), strict=True))
    weights = [p.detach().clone() for p in model.parameters()]

    def closure() -> None:
        optimizer.zero_grad()
        for half in halves:
            loss_of(model, half).backward()

    with pytest.raises(KeyError, match="broken"):
        optimizer.step(closure)
    for p, old in zip(model.parameters(), weights, strict=True):
        assert torch.equal(p, old)
    for half in halves[:fails_in]:
        loss_of(untroubled, half)
    torch.testing.assert_close(dict(model.named_buffers()), dict(untroubled.named_buffers()), rtol=0, atol=0)
    assert not optimizer.is_shifted
    assert not optimizer.state
    assert optimizer.perturbed_steps == 0
    optimizer.step(closure)
    assert optimizer.perturbed_steps == 1


def test_restore_puts_weights_back_between_explicit_calls() -> None:
    model, sam = both("batch norm", rho=0.5)
    loss_of(model, batches()[0]).backward()
    before = deepcopy(model.state_dict())
    sam.first_step()
    assert sam.is_shifted
    assert not torch.equal(model.get_parameter("0.weight"), before["0.weight"])
    loss_of(model, batches()[0])
    sam.restore()
    sam.restore()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    explicit(model, sam, batches()[0])
    assert sam.perturbed_steps == 1


def test_calls_in_the_wrong_order_are_told_and_leave_weights_where_they_belong() -> None:
    model, sam = both(rho=0.5)
    before = deepcopy(model)
    with pytest.raises(TrainingError, match=r"Expected a closure.* but got step\(\) without one"):
        sam.step()
    with pytest.raises(TrainingError, match=r"second_step\(\) before first_step"):
        sam.second_step()
    loss_of(model, batches()[0]).backward()
    sam.first_step()
    for forbidden in (
        sam.state_dict,
        lambda: deepcopy(sam),
        lambda: pickle.dumps(sam),
        lambda: sam.load_state_dict({}),
    ):
        with pytest.raises(TrainingError, match="still shifted"):
            forbidden()
    with pytest.raises(TrainingError, match="still shifted"), sam.first_pass():
        pass
    with pytest.raises(TrainingError, match="still shifted"):
        sam.step(closure_of(model, sam, batches()[0]))
    assert sam.is_shifted
    with pytest.raises(TrainingError, match="They are restored now"):
        sam.first_step()
    assert not sam.is_shifted
    same(model, before)


def test_an_error_in_the_first_pass_does_not_turn_random_numbers_back_later() -> None:
    model, sam = both()
    with pytest.raises(KeyError), sam.first_pass():
        raise KeyError
    state = torch.get_rng_state()
    torch.rand(3)
    loss_of(model, batches()[0]).backward()
    sam.first_step()
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_may_take_the_gradient_and_step_the_base_itself(kind: Kind) -> None:
    model, expected = made("batch norm"), made("batch norm")
    optimizer = kind(model, SGD, lr=0.1, momentum=0.9, **OPTIONS[kind])
    other = kind(expected, SGD, lr=0.1, momentum=0.9, **OPTIONS[kind])
    for batch in batches(5):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.first_step()
        loss_of(model, batch).backward()
        optimizer.take_gradient()
        assert not optimizer.is_shifted
        optimizer.base.step()
        by_closure(expected, other, batch)
        assert optimizer.perturbation == other.perturbation
    same(model, expected)
    with pytest.raises(TrainingError, match=r"take_gradient\(\) before first_step"):
        optimizer.take_gradient()


# Micro-batches.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_are_one_larger_batch(kind: Kind, way: str) -> None:
    model, whole = made(), made()
    small = kind(model, SGD, lr=0.1, momentum=0.9)
    large = kind(whole, SGD, lr=0.1, momentum=0.9)
    for batch in batches(10, size=8):
        parts = list(zip(*(each.chunk(4) for each in batch), strict=True))

        def accumulate(parts: list[tuple[Tensor, Tensor]] = parts) -> None:
            for part in parts:
                (loss_of(model, part) / 4).backward()

        if way == "closure":
            small.zero_grad()
            small.step(accumulate)
        else:
            small.zero_grad()
            with small.first_pass():
                accumulate()
            small.first_step()
            accumulate()
            small.second_step()
        by_closure(whole, large, batch)
    same(model, whole, 1e-10)


CLEARS: dict[str, Callable[[nn.Module, TwoPass], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "base in place": lambda model, optimizer: optimizer.base.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("stale", [False, True])
def test_a_closure_may_clear_gradients_in_any_way(clear: str, stale: bool) -> None:
    model, expected = made(), made()
    optimizer, other = SAM(model, SGD, lr=0.1), SAM(expected, SGD, lr=0.1)

    for batch in batches(5):

        def closure(batch: tuple[Tensor, Tensor] = batch) -> None:
            CLEARS[clear](model, optimizer)
            loss_of(model, batch).backward()

        if stale:
            loss_of(model, batch).backward()
        optimizer.step(closure)
        by_closure(expected, other, batch)
    same(model, expected)


def test_a_closure_need_not_clear_what_is_cleared_already() -> None:
    model, expected = made(), made()
    optimizer, other = SAM(model, SGD, lr=0.1), SAM(expected, SGD, lr=0.1)
    for set_to_none, batch in zip((True, False, True, False), batches(4), strict=True):
        optimizer.zero_grad(set_to_none)
        optimizer.step(lambda: loss_of(model, batch).backward())  # noqa: B023
        by_closure(expected, other, batch)
    same(model, expected)


@pytest.mark.parametrize("again", [False, True])
def test_gradients_from_before_a_closure_are_refused(again: bool) -> None:
    model, sam = both()
    if again:
        by_closure(model, sam, batches()[0])
    else:
        loss_of(model, batches()[0]).backward()
    before = deepcopy(model)
    with pytest.raises(TrainingError, match="from before the closure"):
        sam.step(lambda: loss_of(model, batches()[0]).backward())
    same(model, before)
    assert not any(p._backward_hooks for p in model.parameters())
