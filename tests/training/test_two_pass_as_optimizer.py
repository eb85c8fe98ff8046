"""Optimizers of two passes among optimizers: files, copies, schedulers, groups, hooks, and what is refused."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
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


class Named(SGD):
    """A base with options under the names that wrappers use, each of which changes its step."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.9, eta: float = 2.0, balance: float = 3.0) -> None:
        super().__init__(params, lr)
        own = {"rho": rho, "eta": eta, "balance": balance}
        self.defaults.update(own)
        for group in self.param_groups:
            group.update({key: value for key, value in own.items() if key not in group})

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(group["rho"] * group["eta"] * group["balance"])
        return super().step()


@pytest.mark.parametrize("base", [Named, torch.optim.Adadelta])
@pytest.mark.parametrize("kind", KINDS)
def test_a_base_keeps_its_options_of_the_same_name(kind: Kind, base: Callable[..., Optimizer]) -> None:
    model, plain = made(), made()
    alone = base(plain.parameters(), rho=0.8)
    wrapped = kind(model, base(model.parameters(), rho=0.8), rho=0.0)
    key = wrapped.get_key("rho")
    assert key == "sam_rho"
    for values in (wrapped.param_groups[0], wrapped.defaults):
        assert (values["rho"], values[key]) == (0.8, 0.0)
    if kind is not GradientNormPenalty:  # which mixes two gradients, and rounds
        train(model, wrapped, batches(5))
        train(plain, alone, batches(5))
        same(model, plain)
    # And moves by its own radius, of every group.
    wrapped.param_groups[0][key] = 0.4
    wrapped.param_groups[0]["lr"] = 0.0
    train(model, wrapped, batches(1))
    if kind is not ASAM:  # whose radius is that of an ellipsoid
        assert wrapped.perturbation == pytest.approx(0.4)
    wrapped.add_param_group({"params": [nn.Parameter(torch.ones(2))], "rho": 0.7, key: 0.2})
    wrapped.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert [(group["rho"], group[key]) for group in wrapped.param_groups] == [(0.8, 0.4), (0.7, 0.2), (0.8, 0.0)]
    with pytest.raises(OptionError, match="sam_rho=-1"):
        wrapped.add_param_group({"params": [nn.Parameter(torch.ones(2))], key: -1})


def test_options_of_subclasses_are_their_own_whatever_the_base_has() -> None:
    kinds: dict[Kind, str] = {ASAM: "eta", GradientNormPenalty: "balance"}
    for kind, name in kinds.items():
        one, two = made(), made()
        wrapped = kind(one, Named(one.parameters(), rho=1.0, eta=1.0, balance=1.0), rho=0.3, **{name: 0.5})
        train(one, wrapped, batches(3))
        assert wrapped.param_groups[0][name] == 1.0
        train(two, kind(two, SGD, lr=0.1, rho=0.3, **{name: 0.5}), batches(3))
        same(one, two)


def test_groups_of_a_base_give_the_wrappers_option_under_its_key() -> None:
    model = made()
    body, head = model.get_submodule("0"), model.get_submodule("2")
    groups: list[dict[str, Any]] = [{"params": body.parameters(), "sam_rho": 0.3}, {"params": head.parameters()}]
    sam = SAM(model, torch.optim.Adadelta(groups, rho=0.8), rho=0.1)
    assert [(group["rho"], group["sam_rho"]) for group in sam.param_groups] == [(0.8, 0.3), (0.8, 0.1)]

    class Strange(SGD):
        """Has an option of that name itself."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            for values in (self.defaults, *self.param_groups):
                values["sam_rho"] = 5.0

    strange = SAM(model, Strange, rho=0.2).param_groups[0]
    assert (strange["rho"], strange["sam_rho"]) == (0.2, 5.0)
    with pytest.raises(OptionError, match=r"Expected 'rho', but got a group with 'sam_rho'"):
        SAM(model, SGD([{"params": model.parameters(), "sam_rho": 0.3}], lr=0.1))


@pytest.mark.parametrize(
    "base", [torch.optim.Adadelta, lambda params, **options: torch.optim.Adadelta(params, **options)]
)
def test_an_option_that_may_be_anyones_is_refused(base: Any) -> None:
    with pytest.raises(OptionError, match=r"SAM or Adadelta, but got rho=.*SAM\(model, Adadelta\(model.par.*, rho="):
        SAM(made(), base, rho=0.9)


def test_an_option_that_can_only_be_the_wrappers_is_taken() -> None:
    bases: list[Any] = [
        partial(torch.optim.Adadelta, rho=0.7),
        lambda params: torch.optim.Adadelta(params, rho=0.7),
    ]
    for base in bases:
        assert [SAM(made(), base, rho=0.2).param_groups[0][key] for key in ("rho", "sam_rho")] == [0.7, 0.2]
    usual = SAM(made(), torch.optim.Adadelta).param_groups[0]
    assert (usual["rho"], usual["sam_rho"]) == (0.9, 0.05)


def test_a_state_keeps_both_options_and_one_from_before_they_were_apart_is_put_right() -> None:
    def start() -> tuple[nn.Module, TwoPass]:
        model = made()
        return model, SAM(model, torch.optim.Adadelta(model.parameters(), rho=0.7), rho=0.2)

    model, sam = start()
    train(model, sam, batches(3))
    sam.param_groups[0].update({"rho": 0.6, "sam_rho": 0.3})
    kept = stored(sam.state_dict())
    again = start()[1]
    again.load_state_dict(kept)
    assert (again.param_groups[0]["rho"], again.param_groups[0]["sam_rho"]) == (0.6, 0.3)
    twin = pickle.loads(pickle.dumps(again))
    assert (twin.get_key("rho"), twin.param_groups[0]["rho"], twin.param_groups[0]["sam_rho"]) == ("sam_rho", 0.6, 0.3)

    old = deepcopy(kept)
    for group in old["param_groups"]:
        group["rho"] = group.pop("sam_rho")  # one value for both
    with pytest.warns(UserWarning, match="rho of Adadelta had been overwritten with that of SAM"):
        again.load_state_dict(old)
    assert (again.param_groups[0]["rho"], again.param_groups[0]["sam_rho"]) == (0.6, 0.3)
    alone = torch.optim.Adadelta(made().parameters(), rho=0.55)
    again.load_state_dict(alone.state_dict())  # of a base alone it is the base's
    assert (again.param_groups[0]["rho"], again.param_groups[0]["sam_rho"]) == (0.55, 0.3)


def test_a_state_that_was_loaded_into_the_base_alone_leaves_the_wrappers_options() -> None:
    model = made()
    sam = SAM(model, SGD(model.parameters(), lr=0.0), rho=0.25)
    sam.base.load_state_dict(SGD(model.parameters(), lr=0.0).state_dict())
    train(model, sam, batches(1))
    assert sam.perturbation == pytest.approx(0.25)


def test_a_later_wrapper_of_another_kind_uses_the_same_keys() -> None:
    model = made()
    base = torch.optim.Adadelta(model.parameters(), rho=0.7)
    SAM(model, base, rho=0.2)
    later = ASAM(model, base, rho=0.4)
    assert (later.get_key("rho"), later.get_key("eta")) == ("sam_rho", "eta")
    assert [later.param_groups[0][key] for key in ("rho", "sam_rho", "eta")] == [0.7, 0.4, 0.01]
    assert not {key for key in later.param_groups[0] if key.startswith("sam_sam")}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: SAM(made().parameters(), SGD, lr=0.1), ModelError, "instead of the model"),  # type: ignore[arg-type]
        (lambda: SAM(made(), "SGD", lr=0.1), OptionError, "base of type str"),  # type: ignore[arg-type]
        (lambda: SAM(made(), made()), OptionError, "base of type Sequential"),
        (lambda: SAM(made(), lambda params: 3), OptionError, "makes a int"),  # type: ignore[arg-type, return-value]
        (
            lambda: SAM(model := made(), SGD(model.parameters(), 0.1), lr=0.1),
            OptionError,
            "existing optimizer, but got lr",
        ),
        (lambda: SAM(made(), SGD(made().parameters(), 0.1)), OptionError, "4 parameters that are not the model's"),
        (lambda: SAM(model := made(), SAM(model, SGD, lr=0.1)), OptionError, "with one pass"),
        (lambda: SAM(made(), SGD, sync="both", lr=0.1), OptionError, "sync='both'"),  # type: ignore[arg-type]
        (lambda: SAM(made().requires_grad_(False), SGD, lr=0.1), ModelError, "none requires a gradient"),
        (lambda: SAM(made(), torch.optim.LBFGS), OptionError, "LBFGS"),
        (lambda: ASAM(made(), SGD, eta=-1, lr=0.1), OptionError, "eta=-1"),
        (lambda: GradientNormPenalty(made(), SGD, balance="x", lr=0.1), OptionError, "balance="),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_wrapped_is_told(wrong: Callable[[], Any], error: type[SaltflatError], message: str) -> None:
    with pytest.raises(error, match=message) as told:
        wrong()
    assert re.search(r"Expected .*, but got .*\. (Try|Check) ", str(told.value))


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
