"""Two processes under DistributedDataParallel: one perturbation for all, or one for each."""

from __future__ import annotations

import os
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from two_pass_cases import KINDS, OPTIONS, Kind, batches, by_closure, explicit, loss_of, made, same, train

from saltflat.errors import OptionError, TrainingError
from saltflat.training import SAM, GradientNormPenalty
from saltflat.training.two_pass import TwoPass

STEPS, SHARDS = 6, 2
SYNCS = ("global", "local")
WAYS = ("closure", "bucket views", "micro-batches", "explicit")
Found = dict[tuple[str, ...], Any]


def shards_of(batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(each.chunk(SHARDS) for each in batch), strict=True))


def optimizer_of(kind: Kind, model: nn.Module, sync: str = "global") -> TwoPass:
    return kind(model, SGD, lr=0.1, momentum=0.9, sync=sync, **OPTIONS[kind])


def one_step(model: DistributedDataParallel, optimizer: TwoPass, batch: tuple[Tensor, Tensor], way: str) -> None:
    if way == "explicit":
        explicit(model, optimizer, batch)
        return

    def closure() -> None:
        optimizer.zero_grad()
        parts = shards_of(batch) if way == "micro-batches" else [batch]
        for part in parts:
            with nullcontext() if part is parts[-1] else model.no_sync():
                (loss_of(model, part) / len(parts)).backward()

    optimizer.step(closure)


def in_each_process(rank: int, folder: str) -> None:
    """All that is done by two processes, in one go: starting them takes longer than the rest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=SHARDS)
    found: Found = {}
    for kind in KINDS:
        for sync in SYNCS:
            for way in WAYS:
                model = DistributedDataParallel(made(), gradient_as_bucket_view=way == "bucket views")
                optimizer = optimizer_of(kind, model, sync)
                weights = []
                for batch in batches(STEPS, size=8):
                    one_step(model, optimizer, shards_of(batch)[rank], way)
                    weights.append(deepcopy(model.module.state_dict()))
                found["weights", kind.__name__, sync, way] = weights
    for sync in ("plain", *SYNCS):
        model = DistributedDataParallel(made("batch norm"))
        base = SGD(model.parameters(), lr=0.0)
        optimizer = base if sync == "plain" else SAM(model, base, sync=sync)  # type: ignore[arg-type, assignment]
        train(model, optimizer, [shards_of(batch)[rank] for batch in batches(2, size=8)])
        found["buffers", sync] = {name: each.clone() for name, each in model.module.named_buffers()}
    found["errors", ""] = errors_in(rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # at the end of an interpreter threads of gloo may abort the process, whatever it has done before


def errors_in(rank: int) -> dict[str, str]:
    told: dict[str, str] = {}
    try:
        SAM(made(), SGD, sync="local", lr=0.1)
    except OptionError as error:
        told["bare model"] = str(error)
    model = DistributedDataParallel(made())
    sam = SAM(model, SGD, sync="local", lr=0.1)
    mine = shards_of(batches(1)[0])[rank]
    loss_of(model, mine).backward()
    try:
        sam.first_step()
    except TrainingError as error:
        told["averaged"] = str(error)
    sam.zero_grad()
    try:
        with sam.first_pass():
            loss_of(model, mine).backward()
            raise KeyError
    except KeyError:
        sam.zero_grad()
    loss_of(model, mine).backward()
    try:
        sam.first_step()
    except TrainingError as error:
        told["averaged after an error in a first pass"] = str(error)
    assert not sam.is_shifted
    sam.zero_grad()
    one_step(model, sam, mine, "explicit")
    return told


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder: Path = tmp_path_factory.mktemp("processes")
    spawn(in_each_process, (str(folder),), SHARDS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(SHARDS)]


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_processes_have_the_same_weights_after_every_step(
    kind: Kind, way: str, sync: str, found: list[Found]
) -> None:
    one, two = (each["weights", kind.__name__, sync, way] for each in found)
    assert len(one) == STEPS
    torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_globally_two_processes_do_what_one_does(kind: Kind, way: str, found: list[Found]) -> None:
    model = made()
    optimizer = optimizer_of(kind, model)
    for batch, state in zip(
        batches(STEPS, size=8),
        found[0]["weights", kind.__name__, "global", way],
        strict=True,
    ):
        by_closure(model, optimizer, batch)
        torch.testing.assert_close(state, model.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_locally_every_process_goes_where_its_own_examples_are_worst(kind: Kind, way: str, found: list[Found]) -> None:
    model = made()
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch, state in zip(
        batches(STEPS, size=8),
        found[0]["weights", kind.__name__, "local", way],
        strict=True,
    ):
        gradients = [local_gradient(kind, model, shard) for shard in shards_of(batch)]
        for p, *each in zip(model.parameters(), *gradients, strict=True):
            p.grad = torch.stack(each).mean(0)
        base.step()
        torch.testing.assert_close(state, model.state_dict(), rtol=1e-12, atol=1e-12)
    elsewhere = made()
    elsewhere.load_state_dict(found[0]["weights", kind.__name__, "global", way][-1])
    with pytest.raises(AssertionError):
        same(model, elsewhere, 1e-6)


def local_gradient(kind: Kind, model: nn.Module, shard: tuple[Tensor, Tensor]) -> list[Tensor]:
    """rho=0.3, eta=0.02, balance=0.7: what one shard would step with, from the formulas alone."""
    weights = list(model.parameters())
    g = torch.autograd.grad(loss_of(model, shard), weights)
    adaptive = kind.__name__ == "ASAM"
    T = [w.detach().abs() + 0.02 if adaptive and w.ndim > 1 else torch.ones_like(w) for w in weights]
    length = torch.cat([(t * each).flatten() for t, each in zip(T, g, strict=True)]).norm()
    moved = deepcopy(model)
    with torch.no_grad():
        for w, t, each in zip(moved.parameters(), T, g, strict=True):
            w.add_(0.3 * t**2 * each / length)
    second = torch.autograd.grad(loss_of(moved, shard), list(moved.parameters()))
    if kind is not GradientNormPenalty:
        return list(second)
    return [0.3 * one + 0.7 * two for one, two in zip(g, second, strict=True)]


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("rank", range(SHARDS))
def test_every_process_keeps_the_running_statistics_of_a_plain_step(sync: str, rank: int, found: list[Found]) -> None:
    torch.testing.assert_close(found[rank]["buffers", sync], found[rank]["buffers", "plain"], rtol=0, atol=0)
    assert not torch.equal(*(each["buffers", "plain"]["1.running_mean"] for each in found)), "each has its own"


def test_a_gradient_that_was_averaged_is_no_local_one(found: list[Found]) -> None:
    for each in found:
        told = each["errors", ""]
        assert "Expected a DistributedDataParallel" in told["bare model"]
        assert "first_pass()" in told["averaged"]
        assert "first_pass()" in told["averaged after an error in a first pass"]
