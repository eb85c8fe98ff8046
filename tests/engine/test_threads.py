"""One model in several threads: calls take turns, every number is that of a single thread, and the model comes back."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from promise_cases import snapshot
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat import errors
from saltflat.integrations import Monitor
from saltflat.symmetry import canonicalize, equal_up_to_rescaling
from saltflat.training import ASAM, SAM, FisherPenalty, GradientNormPenalty, penalty, shift_weights

torch.manual_seed(1)
DATA = torch.randn(12, 4), torch.arange(12) % 3
EXAMPLE = torch.randn(2, 4)
PATIENCE = 60.0  # seconds after which a thread is taken to be stuck


def net() -> nn.Sequential:
    """With modes, buffers and random numbers to lose."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3)).train()
    model[2].register_forward_hook(lambda module, inputs, output: None)
    return model


def numbers(found: Any) -> Any:
    """What a call found, as plain numbers that can be compared bit for bit."""
    if isinstance(found, nn.Module):
        return {name: value.tolist() for name, value in found.state_dict().items()}
    if isinstance(found, saltflat.Report):
        return {name: (each.value, each.layers) for name, each in found.items()}
    return found


def calls_on(model: nn.Sequential) -> dict[str, Callable[[], Any]]:
    """Everything public that takes a model and leaves it as it is."""
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), model[4])  # shares a module
    last = nn.Linear(6, 3)
    last.weight = model[4].weight  # type: ignore[assignment]
    tied = nn.Sequential(model[0], nn.Tanh(), last)  # shares a parameter
    twin = copy.deepcopy(model)

    def measure(which: nn.Module, *names: str) -> Callable[[], Any]:
        return lambda: saltflat.measure(which, DATA, measures=names, progress=False)

    def monitored() -> dict[str, float]:
        record = Monitor(model, DATA, every=1, cap=None).after_step()
        assert record is not None
        return {name: value for name, value in record.values.items() if not name.endswith("seconds")}

    return {
        "measure": measure(model, "hessian_trace", "kappa"),
        "measure others": measure(model, "fisher_trace", "rho", "sharpness"),
        "measure a model that shares a module": measure(plain, "hessian_trace"),
        "measure a model that shares a parameter": measure(tied, "fisher_trace"),
        "measure a copy": measure(twin, "hessian_trace"),
        "audit": lambda: {
            name: line.values
            for name, line in saltflat.audit_invariance(
                model, DATA, measures="hessian_trace", draws=1, progress=False
            ).items()
        },
        "spectrum": lambda: [
            block.largest[0].value
            for block in saltflat.compute_spectrum(model, DATA, k=1, density=False, progress=False).values()
        ],
        "landscape": lambda: saltflat.compute_landscape(model, DATA, points=3, progress=False).losses.tolist(),
        "symmetries": lambda: saltflat.find_symmetries(model, EXAMPLE).scales,
        "rescale": lambda: saltflat.rescale(model, EXAMPLE),
        "canonicalize": lambda: canonicalize(model, EXAMPLE),
        "equal_up_to_rescaling": lambda: equal_up_to_rescaling(model, twin, EXAMPLE),
        "fold": lambda: saltflat.fold(model, EXAMPLE),
        "fold without an example": lambda: saltflat.fold(model),
        "rebalance": lambda: saltflat.rebalance(plain, DATA, progress=False),
        "certify": lambda: {name: (a.hessian, a.gauss_newton) for name, a in saltflat.certify(model, DATA).items()},
        "compute_eigenvalues": lambda: {
            name: top.value for name, top in saltflat.compute_eigenvalues(model, DATA, progress=False).items()
        },
        "compute_statistics": lambda: {
            name: value.tolist()
            for name, value in saltflat.compute_statistics(model, DATA, names="curvature_trace")[
                "curvature_trace"
            ].items()
        },
        "penalty": lambda: penalty("fisher_trace")(model, DATA).item(),
        "monitor": monitored,
    }


def trainings_of(model: nn.Sequential) -> dict[str, Callable[[], Any]]:
    """Everything public that trains a model, one step each."""

    def two_pass(kind: Callable[..., Any]) -> Callable[[], Any]:
        def step() -> Any:
            optimizer = kind(model, torch.optim.SGD, lr=0.1)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(DATA[0]), DATA[1]) + 0.01 * penalty("fisher_trace")(model, DATA)
                loss.backward()
                return loss

            return optimizer.step(closure).item()

        return step

    def backward() -> float:
        model.zero_grad()
        return FisherPenalty(model, parts=3).backward(DATA).item()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "SAM": two_pass(SAM),
        "ASAM": two_pass(ASAM),
        "GradientNormPenalty": two_pass(GradientNormPenalty),
        "FisherPenalty.step": lambda: FisherPenalty(model, parts=3).step(optimizer, DATA).item(),
        "FisherPenalty.backward": backward,
    }


class Runner(threading.Thread):
    """Runs calls one after the other, and keeps what they gave or raised."""

    def __init__(self, *calls: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.calls, self.found = calls, list[Any]()

    def run(self) -> None:
        for call in self.calls:
            try:
                self.found.append(numbers(call()))
            except BaseException as error:
                self.found.append(error)

    def wait(self) -> list[Any]:
        self.join(PATIENCE)
        assert not self.is_alive(), "stuck"
        return self.found


@pytest.fixture
def often() -> Iterator[None]:
    """Threads change places often."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("often")
def test_a_hundred_calls_from_four_threads_give_the_numbers_of_one() -> None:
    model = net()
    calls = calls_on(model)
    wanted = {name: numbers(call()) for name, call in calls.items()}
    names = 5 * list(calls)
    random.Random(0).shuffle(names)
    assert len(names) == 100
    before = snapshot(model)
    runners = [Runner(*(calls[name] for name in names[start::4])) for start in range(4)]
    for runner in runners:
        runner.start()
    for start, runner in enumerate(runners):
        for name, found in zip(names[start::4], runner.wait(), strict=True):
            assert found == wanted[name], name
    assert snapshot(model) == before


@contextmanager
def held(model: nn.Sequential) -> Iterator[None]:
    """Inside, another thread is in the middle of a forward pass of a measurement of the model."""
    inside, go_on = threading.Event(), threading.Event()

    def hold(module: nn.Module, inputs: Any, output: Any) -> None:
        if threading.current_thread() is other:
            inside.set()
            assert go_on.wait(PATIENCE)

    handle = model[2].register_forward_hook(hold)
    other = Runner(lambda: saltflat.measure(model, DATA, measures="hessian_trace", progress=False))
    other.start()
    try:
        assert inside.wait(PATIENCE)
        yield
    finally:
        go_on.set()
        (found,) = other.wait()
        handle.remove()
    assert not isinstance(found, BaseException), found


@pytest.mark.parametrize("name", [*calls_on(net()), *trainings_of(net())])
def test_a_call_waits_until_the_model_is_whole_again(name: str) -> None:
    alone, shared = net(), net()
    torch.manual_seed(2)
    wanted = numbers({**calls_on(alone), **trainings_of(alone)}[name]())
    torch.manual_seed(2)
    runner = Runner({**calls_on(shared), **trainings_of(shared)}[name])
    with held(shared):
        runner.start()
        runner.join(0.02)
        assert runner.is_alive(), runner.found
    if name not in ("rebalance", "measure a model that shares a module"):  # they have a random layer of their own
        assert runner.wait() == [wanted]
    assert not isinstance(runner.wait()[0], BaseException), runner.found
    assert shared.training
    for one, other in zip(shared.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("name", trainings_of(net()))
def test_training_in_one_thread_and_measuring_in_two_do_not_disturb_each_other(name: str) -> None:
    def measured(model: nn.Module) -> float:
        return saltflat.measure(model, DATA, measures="hessian_trace", progress=False)["hessian_trace"].value

    alone, shared, steps = net(), net(), 5
    torch.manual_seed(3)
    step, along_the_way, losses = trainings_of(alone)[name], [measured(alone)], []
    for _ in range(steps):
        losses.append(step())
        along_the_way.append(measured(alone))
    torch.manual_seed(3)
    trainer = Runner(*[trainings_of(shared)[name]] * steps)
    watchers = [Runner(*[lambda: measured(shared)] * 5) for _ in range(2)]
    for each in (*watchers, trainer):
        each.start()
    assert trainer.wait() == losses
    for watcher in watchers:
        # Never of weights in the middle of a step.
        assert set(watcher.wait()) <= set(along_the_way)
    for one, other in zip(shared.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert all(p.requires_grad for p in shared.parameters())


def test_weights_that_another_thread_has_shifted_are_refused() -> None:
    model = net().eval()
    optimizer = SAM(model, torch.optim.SGD, lr=0.1)
    calls = calls_on(model)
    shifts = [name for name in calls if name != "measure a copy"]

    def refused() -> None:
        runner = Runner(*(calls[name] for name in shifts))
        runner.start()
        for name, found in zip(shifts, runner.wait(), strict=True):
            assert isinstance(found, errors.ModelError), (name, found)
            assert "another thread has shifted" in str(found)

    F.cross_entropy(model(DATA[0]), DATA[1]).backward()
    optimizer.first_step()
    refused()
    calls["measure"]()  # the thread that shifted them knows what it does
    F.cross_entropy(model(DATA[0]), DATA[1]).backward()
    optimizer.second_step()
    calls["measure"]()
    weights = list(model.parameters())
    with shift_weights(model, weights, [0.1 * each.detach() for each in weights]):
        refused()
        runner = Runner(trainings_of(model)["SAM"])
        runner.start()
        assert isinstance(runner.wait()[0], errors.ModelError)
    runner = Runner(*(calls[name] for name in shifts))
    runner.start()
    assert not any(isinstance(found, BaseException) for found in runner.wait())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_one_thread_is_that_threads_alone(error: type[BaseException]) -> None:
    model = net()
    calls = calls_on(model)
    wanted = {name: numbers(calls[name]()) for name in ("measure", "certify", "rescale")}
    before = snapshot(model)
    done = 0

    def failing(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal done
        done += 1
        if done % 7 == 0:
            raise error("mine")
        return F.cross_entropy(outputs, targets)

    failures = Runner(*[lambda: saltflat.measure(model, DATA, failing, progress=False)] * 10)
    others = [Runner(*[calls[name]] * 4) for name in wanted]
    for each in (failures, *others):
        each.start()
    assert all("mine" in str(found) or isinstance(found, error) for found in failures.wait())
    for name, each in zip(wanted, others, strict=True):
        assert each.wait() == 4 * [wanted[name]]
    assert snapshot(model) == before


def test_waiting_can_be_interrupted() -> None:
    model = net()
    with held(model):
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            saltflat.certify(model, DATA)
        timer.join()
    assert saltflat.certify(model, DATA).holds
    assert model.training


def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    model, twin = net(), net()
    with held(model):
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE))
            os._exit(0 if saltflat.certify(twin, DATA).holds else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", ["measure", "certify", "compute_eigenvalues", "compute_statistics", "spectrum"])
def test_a_call_from_a_pass_that_another_call_runs_is_refused(name: str, where: str) -> None:
    model = net()
    calls = calls_on(model)
    wanted = numbers(calls[name]())

    def again(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if where == "forward":
            calls["certify"]()
        elif output.requires_grad:
            output.register_hook(lambda gradient: calls["certify"]() and None)

    handle = model[4].register_forward_hook(again)
    before = snapshot(model)
    with pytest.raises(errors.OptionError, match="from inside of a pass"):
        calls[name]()
    assert snapshot(model) == before
    handle.remove()
    assert numbers(calls[name]()) == wanted


def test_a_loss_function_and_a_closure_may_measure() -> None:
    model = net()
    wanted = saltflat.certify(model, DATA, lambda outputs, targets: F.cross_entropy(outputs, targets))

    def measuring(outputs: Tensor, targets: Tensor) -> Tensor:
        saltflat.certify(model, DATA)
        return F.cross_entropy(outputs, targets)

    before = snapshot(model)
    found = saltflat.certify(model, DATA, measuring)
    assert snapshot(model) == before
    # A loss that measures cannot be vectorized: it is called on one example at a time, which rounds differently.
    for name, each in wanted.items():
        torch.testing.assert_close(found[name].hessian, each.hessian, rtol=1e-12, atol=0)
        torch.testing.assert_close(found[name].gauss_newton, each.gauss_newton, rtol=1e-12, atol=0)
    optimizer = SAM(model, torch.optim.SGD, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        saltflat.certify(model, DATA)
        loss = measuring(model(DATA[0]), DATA[1])
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.perturbed_steps == 1


def test_a_backward_pass_in_another_thread_does_not_wait_for_the_call_that_waits_for_it() -> None:
    """As on a GPU, where torch runs backward passes in a thread of its own."""
    model, found = net(), list[Any]()

    def waiting(outputs: Tensor, targets: Tensor) -> Tensor:
        def backward() -> None:
            with torch.enable_grad():
                weight = torch.ones((), requires_grad=True)
                doubled = 2 * weight
                doubled.register_hook(lambda gradient: saltflat.certify(model, DATA) and None)
                doubled.backward()

        runner = Runner(backward)
        runner.start()
        found.extend(runner.wait())
        return F.cross_entropy(outputs, targets)

    saltflat.certify(model, DATA, waiting)
    assert found
    assert all(isinstance(each, errors.OptionError) and "backward pass" in str(each) for each in found)
