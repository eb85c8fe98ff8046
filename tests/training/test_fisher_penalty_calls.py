"""Calls of the Fisher penalty: steps, clipping, the start, states, scalers, processes and what is refused."""

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from cases import Case, Net, integers
from fisher_penalty_cases import (
    WAYS,
    Batch,
    along,
    buffers,
    cut,
    gradient_at,
    gradients,
    length,
    loss_at,
    plain_step,
    same_bits,
    single,
    smooth_batch_norm,
    smooth_mlp,
    trained,
    whole_batch,
)
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from saltflat.errors import (
    DataError,
    EmptyDataError,
    LabelError,
    ModelError,
    OptionError,
    SaltflatError,
    TrainingError,
    UnknownNameError,
)
from saltflat.training import SAM, FisherPenalty
from saltflat.training.part_gradients import PassStrategy

# Gradients after one call and after two, buffers then, and buffers after two plain passes.
Found = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
Ranks = dict[Callable[[], Case], tuple[Found, Found]]


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


def test_an_optimizer_of_some_parameters_clips_by_the_gradient_of_this_batch_alone() -> None:
    built, other = smooth_mlp(), smooth_mlp()
    batch = whole_batch(built)
    for p in built.model.parameters():
        p.grad = torch.full_like(p, 100.0)
    last = built.model.get_submodule("4")
    before = {name: p.detach().clone() for name, p in last.named_parameters()}
    FisherPenalty(built.model, parts=3, clip=0.3).step(SGD(last.parameters(), lr=1.0), batch)
    FisherPenalty(other.model, parts=3).backward(batch)
    found = gradients(other.model)
    norm = length(found)
    assert norm > 0.3
    want = {name: each - found[f"4.{name}"] * 0.3 / norm for name, each in before.items()}
    torch.testing.assert_close({name: p.detach() for name, p in last.named_parameters()}, want)


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


def in_two(build: Callable[[], Case], rank: int) -> tuple[Net, Batch]:
    """A network of which one parameter is used on the first process only and one nowhere; and a process's examples."""
    built = build()
    model = Net(
        lambda net, x: net.body(x) + (net.odd if rank == 0 else 0),
        body=built.model,
        odd=nn.Parameter(torch.ones(3, dtype=torch.float64)),
        spare=nn.Parameter(torch.ones(2, dtype=torch.float64)),
    )
    return model, cut(whole_batch(built), [4, 3])[rank]


def found_by(build: Callable[[], Case], rank: int) -> Found:
    (model, shard), (plain, _) = in_two(build, rank), in_two(build, rank)
    penalty = FisherPenalty(DistributedDataParallel(model), parts=2, alpha=0.05)
    penalty.backward(shard)
    first = gradients(model)
    penalty.backward(shard)
    wrapped = DistributedDataParallel(plain)
    for _ in range(2):
        wrapped(shard[0])
    return first, gradients(model), buffers(model), buffers(plain)


def one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(minutes=5))
    torch.save([found_by(build, rank) for build in (smooth_mlp, smooth_batch_norm)], f"{folder}/{rank}.pt")
    # Nobody hangs up while the other one is still talking.
    dist.barrier()
    os._exit(0)  # at the end of an interpreter threads of gloo may abort the process, whatever it has done before


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each of two processes found, by network."""
    folder = tmp_path_factory.mktemp("processes")
    spawn(one_of_two, (str(folder),), 2)
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    return dict(zip((smooth_mlp, smooth_batch_norm), zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("build", [smooth_mlp, smooth_batch_norm])
def test_two_processes_end_with_the_mean_of_their_gradients(build: Callable[[], Case], of_two: Ranks) -> None:
    one, two = of_two[build]
    same_bits(one[0], two[0])
    same_bits(one[1], two[1])
    want: list[dict[str, Tensor]] = []
    for rank in range(2):
        model, shard = in_two(build, rank)
        FisherPenalty(model, parts=2, alpha=0.05).backward(shard)
        want.append(gradients(model))
    zero = torch.zeros(3, dtype=torch.float64)
    mean = {name: (each + want[1].get(name, zero)) / 2 for name, each in want[0].items()}
    torch.testing.assert_close(one[0], mean, rtol=1e-12, atol=1e-14)
    assert "spare" not in one[0]
    torch.testing.assert_close(one[1], {name: 2 * each for name, each in mean.items()}, rtol=1e-12, atol=1e-14)


def test_two_processes_keep_the_statistics_of_plain_passes(of_two: Ranks) -> None:
    first, second = of_two[smooth_batch_norm]
    same_bits(first[2], first[3])
    same_bits(second[2], second[3])
    # Without the first's statistics at the start of its second pass, the second would have only its own.
    model, shard = in_two(smooth_batch_norm, 1)
    for _ in range(2):
        model(shard[0])
    assert not torch.allclose(second[2]["body.1.running_mean"], buffers(model)["body.1.running_mean"])


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
        ({"strategy": "vectorised"}, OptionError),
        ({"whole": "yes"}, OptionError),
        ({"objective": "mse"}, OptionError),
        ({"loss": "cross entropy"}, UnknownNameError),
        ({"loss": nn.MSELoss(reduction="sum")}, OptionError),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], error: type[SaltflatError]) -> None:
    with pytest.raises(error, match=r"Expected .*, but got .*\. (Try|Check) "):
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
def test_batches_that_cannot_be_taken_are_refused(batch: Batch, error: type[SaltflatError], way: PassStrategy) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=r"(?s)Expected .*, but got .*\. (Try|Check) "):
        FisherPenalty(model, strategy=way, whole=False).step(optimizer, batch)
    same_bits(gradients(model), {name: torch.ones_like(p) for name, p in model.named_parameters()})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("whole", "seen"), [(None, 4), (False, 2)])
def test_an_objective_must_give_a_number_that_depends_on_the_model(
    way: PassStrategy, whole: bool | None, seen: int
) -> None:
    model, batch = nn.Linear(4, 3), (torch.randn(4, 4), torch.randn(4, 3))

    def each(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)

    def detached(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]).detach(), batch[1])

    with pytest.raises(OptionError, match=rf"mean loss of the batch, .*shape \({seen},\)"):
        FisherPenalty(model, objective=each, strategy=way, parts=2, whole=whole).backward(batch)
    with pytest.raises(ModelError, match="does not depend"):
        FisherPenalty(model, objective=detached, strategy=way, parts=2, whole=whole).backward(batch)


def test_optimizers_that_take_two_gradients_are_refused() -> None:
    model = nn.Linear(4, 3)
    batch = torch.randn(4, 4), integers(3, 4)
    with pytest.raises(TrainingError, match=r"but got a SAM.*Try passing its base"):
        FisherPenalty(model).step(SAM(model, SGD, lr=0.1), batch)
    with pytest.raises(OptionError, match=r"Expected an optimizer of torch\.optim, but got"):
        FisherPenalty(model).step(batch, batch)  # type: ignore[arg-type]


def test_lbfgs_is_refused_before_anything_changes() -> None:
    built = smooth_batch_norm()
    for p in built.model.parameters():
        p.grad = torch.ones_like(p)
    before = copy.deepcopy(built.model.state_dict())
    penalty = FisherPenalty(built.model, parts=3)
    with pytest.raises(OptionError, match=r"Expected .*, but got LBFGS.* Try "):
        penalty.step(torch.optim.LBFGS(built.model.parameters()), whole_batch(built))
    same_bits(built.model.state_dict(), before)
    same_bits(gradients(built.model), {name: torch.ones_like(p) for name, p in built.model.named_parameters()})
    assert penalty.steps == 0


def test_models_that_cannot_be_moved_are_refused() -> None:
    with pytest.raises(ModelError, match=r"torch\.nn\.Module"):
        FisherPenalty(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="requires_grad_"):
        FisherPenalty(nn.Linear(2, 2).requires_grad_(False))
    sparse = nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True))
    with pytest.raises(TrainingError, match="sparse"):
        FisherPenalty(sparse, parts=2).backward((integers(5, 4, 2), integers(3, 4)))
