"""Optimizers of two passes among optimizers: files, copies, schedulers, groups, hooks, and what is refused."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR
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
    train,
)

from saltflat.errors import ModelError, OptionError, SaltflatError, TrainingError
from saltflat.training import ASAM, SAM, GradientNormPenalty
from saltflat.training.two_pass import TwoPass


def is_shared(optimizer: TwoPass) -> bool:
    base = optimizer.base
    return (
        optimizer.param_groups is base.param_groups
        and optimizer.state is base.state
        and optimizer.defaults is base.defaults
    )


def stored(thing: Any) -> Any:
    """Through a file that can hold no code."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", [SGD, AdamW])
def test_training_goes_on_from_a_file_as_if_it_had_not_stopped(kind: Kind, base: type[Optimizer]) -> None:
    def start() -> tuple[Any, TwoPass, LRScheduler]:
        model = made("dropout")
        optimizer = kind(model, base, lr=0.05, **OPTIONS[kind])
        return model, optimizer, StepLR(optimizer, 4, 0.5)

    def go_on(model: nn.Module, optimizer: TwoPass, scheduler: LRScheduler, data: Any) -> None:
        for batch in data:
            train(model, optimizer, [batch])
            scheduler.step()

    model, optimizer, scheduler = start()
    go_on(model, optimizer, scheduler, batches()[:9])
    kept = stored([each.state_dict() for each in (model, optimizer, scheduler)])
    random = torch.get_rng_state()
    go_on(model, optimizer, scheduler, batches()[9:])

    again = start()
    for group in again[1].param_groups:
        group.update(dict.fromkeys(OPTIONS[kind], 0.123))  # to be overwritten
    for each, state in zip(again, kept, strict=True):
        each.load_state_dict(state)
    assert again[1].perturbed_steps == 9
    assert again[1].perturbation == kept[1]["two_pass"]["perturbation"] > 0
    torch.set_rng_state(random)
    go_on(*again, batches()[9:])
    same(again[0], model)
    assert again[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert again[1].perturbed_steps == 20
    assert is_shared(again[1])


def test_training_that_a_plain_base_began_goes_on() -> None:
    model = made()
    plain = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, plain, batches(3))
    sam = SAM(model, SGD, lr=0.7, rho=0.2)
    sam.load_state_dict(plain.state_dict())
    group = sam.base.param_groups[0]
    assert (group["lr"], group["momentum"], group["rho"]) == (0.1, 0.9, 0.2)
    assert len(sam.state) == 4
    assert is_shared(sam)


@pytest.mark.parametrize("copied", [deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_its_own_base_and_goes_on_alike(kind: Kind, copied: Callable[[Any], Any]) -> None:
    model = made()
    optimizer = kind(model, SGD, lr=0.1, momentum=0.9, **OPTIONS[kind])
    StepLR(optimizer, 5)  # leaves its marks on an optimizer
    train(model, optimizer, batches(3))
    twin, other = copied((model, optimizer))
    assert is_shared(other)
    assert other.base is not optimizer.base
    assert other.model is twin
    assert other.perturbed_steps == 3
    train(model, optimizer, batches(6)[3:])
    train(twin, other, batches(6)[3:])
    same(twin, model)


@pytest.mark.parametrize("kind", KINDS)
def test_explicit_calls_do_what_a_closure_does(kind: Kind) -> None:
    one, two = made("dropout"), made("dropout")
    for model, way in ((one, explicit), (two, by_closure)):
        torch.manual_seed(5)
        optimizer = kind(model, SGD, lr=0.1, momentum=0.9)
        for batch in batches():
            way(model, optimizer, batch)
    same(one, two)


def test_the_loss_returned_is_that_at_the_weights_themselves() -> None:
    model, sam = both(rho=0.5)
    here = loss_of(model, batches()[0])
    assert torch.equal(sam.step(closure_of(model, sam, batches()[0])), here)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "schedule", [lambda each: StepLR(each, 2, 0.1), lambda each: OneCycleLR(each, max_lr=1.0, total_steps=8)]
)
def test_a_scheduler_changes_what_the_base_uses(way: str, schedule: Callable[[Optimizer], LRScheduler]) -> None:
    model, plain = made(), made()
    sam = SAM(model, base := SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.0)
    alone = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    one, two = schedule(sam), schedule(alone)
    for batch in batches(7):
        WAYS[way](model, sam, batch)
        train(plain, alone, [batch])
        one.step()
        two.step()
        for key in ("lr", "momentum"):
            assert base.param_groups[0][key] == alone.param_groups[0][key]
    assert base.param_groups[0]["lr"] != 0.1
    same(model, plain)


def test_groups_are_added_and_gradients_cleared_as_with_any_optimizer() -> None:
    model = made()
    body, head = model.get_submodule("0"), model.get_submodule("2")
    sam = SAM(model, SGD(body.parameters(), lr=0.1), rho=0.2)
    sam.add_param_group({"params": list(head.parameters()), "lr": 0.3})
    sam_of_its_own = {"params": [nn.Parameter(torch.ones(2))], "rho": 0.7}
    sam.add_param_group(sam_of_its_own)
    assert [(group["lr"], group["rho"]) for group in sam.base.param_groups] == [(0.1, 0.2), (0.3, 0.2), (0.1, 0.7)]
    before = deepcopy(model)
    train(model, sam, batches(1))
    assert not torch.equal(head.get_parameter("weight"), before.get_parameter("2.weight"))
    sam.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    sam.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(OptionError, match="rho=-1"):
        sam.add_param_group({"params": [nn.Parameter(torch.ones(1))], "rho": -1})


@pytest.mark.parametrize("way", WAYS)
def test_hooks_run_once_for_every_step_and_see_the_gradient_that_is_used(way: str) -> None:
    model, sam = both(rho=0.3)
    seen: list[str] = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        assert optimizer is sam
        assert not sam.is_shifted
        seen.append("before")
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()

    sam.register_step_pre_hook(before)
    sam.register_step_post_hook(lambda *_: seen.append("after"))
    sam.base.register_step_post_hook(lambda *_: seen.append("base"))
    kept = deepcopy(model)
    for batch in batches(2):
        WAYS[way](model, sam, batch)
    assert seen == ["before", "base", "after"] * 2
    same(model, kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rho", [-0.1, float("nan"), float("inf"), "0.05", None, True])
def test_a_radius_that_is_none_is_refused(kind: Kind, rho: Any) -> None:
    with pytest.raises(OptionError, match="rho="):
        kind(made(), SGD, rho=rho, lr=0.1)
    model = made()
    with pytest.raises(OptionError, match="rho="):
        kind(model, SGD([{"params": list(model.parameters()), "rho": rho}], lr=0.1))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: SAM(made().parameters(), SGD, lr=0.1), ModelError, "in place of the model"),  # type: ignore[arg-type]
        (lambda: SAM(made(), "SGD", lr=0.1), OptionError, "base of type str"),  # type: ignore[arg-type]
        (lambda: SAM(made(), made()), OptionError, "base of type Sequential"),
        (lambda: SAM(made(), lambda params: 3), OptionError, "makes a int"),  # type: ignore[arg-type, return-value]
        (lambda: SAM(model := made(), SGD(model.parameters(), 0.1), lr=0.1), OptionError, "there already"),
        (lambda: SAM(made(), SGD(made().parameters(), 0.1)), OptionError, "4 parameters that are not the model's"),
        (lambda: SAM(model := made(), SAM(model, SGD, lr=0.1)), OptionError, "one pass"),
        (lambda: SAM(made(), SGD, sync="both", lr=0.1), OptionError, "sync='both'"),
        (lambda: SAM(made().requires_grad_(False), SGD, lr=0.1), ModelError, "without parameters"),
        (lambda: SAM(made(), torch.optim.LBFGS), OptionError, "LBFGS"),
        (lambda: ASAM(made(), SGD, eta=-1, lr=0.1), OptionError, "eta=-1"),
        (lambda: GradientNormPenalty(made(), SGD, balance="x", lr=0.1), OptionError, "balance="),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_wrapped_is_told(wrong: Callable[[], Any], error: type[SaltflatError], message: str) -> None:
    with pytest.raises(error, match=message) as told:
        wrong()
    assert "Want" in str(told.value)
    assert "Do:" in str(told.value)


def test_sparse_gradients_are_told() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    sam = SAM(model, SGD, lr=0.1)
    with pytest.raises(TrainingError, match="sparse=False"):
        sam.step(lambda: model(torch.tensor([1, 2])).sum().backward())
    assert not sam.is_shifted


def test_bases_of_all_kinds_are_wrapped() -> None:
    for base in (Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.RAdam, torch.optim.NAdam):
        model, plain = made(), made()
        train(model, SAM(model, base, rho=0.0), batches(3))
        train(plain, base(plain.parameters()), batches(3))
        same(model, plain)


def test_a_compiled_model_is_trained_like_any_other() -> None:
    model, plain = made(), made()
    compiled: Any = torch.compile(model, backend="eager")
    train(compiled, SAM(model, SGD, lr=0.1, rho=0.5), batches(3))
    train(plain, SAM(plain, SGD, lr=0.1, rho=0.5), batches(3))
    same(model, plain, 1e-12)
