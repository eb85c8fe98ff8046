"""Weights move and come back bit for bit, and extra passes leave no trace in any buffer."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fisher_penalty_cases import on_cpus
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD

from saltflat.training import SAM, FisherPenalty, shift_weights
from saltflat.training.part_gradients import PassStrategy
from saltflat.training.shift import freeze_buffers


class Counting(nn.Module):
    """Puts a new tensor in its buffer's place, where others write into theirs."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return inputs


class ByHand(nn.BatchNorm1d):
    """Normalises by itself and keeps its statistics by itself."""

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = inputs.mean((0, 2)), inputs.var((0, 2), unbiased=False)
        if self.training:
            self.running_mean.lerp_(mean.detach(), 0.1)
            self.running_var.lerp_(var.detach(), 0.1)
        else:
            mean, var = self.running_mean, self.running_var
        normalised = (inputs - mean[:, None]) / (var[:, None] + self.eps).sqrt()
        return normalised * self.weight[:, None] + self.bias[:, None]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten()),
    "batch norm of cumulative averages": lambda: nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.Flatten()),
    "batch norm without statistics": lambda: nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Flatten()),
    "batch norm over processes": lambda: nn.Sequential(nn.SyncBatchNorm(2), nn.Flatten()),
    "a batch norm of one's own": lambda: nn.Sequential(nn.Conv1d(2, 3, 1), ByHand(3), nn.ReLU(), nn.Flatten()),
    "instance norm": lambda: nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
    "spectral norm": lambda: nn.Sequential(nn.Flatten(), spectral_norm(nn.Linear(8, 4))),
    "a layer of one's own": lambda: nn.Sequential(Counting(), nn.Flatten()),
}


def inputs() -> Tensor:
    return torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NETWORKS)
def test_buffers_after_an_extra_pass_are_the_very_tensors_with_the_values_they_had(name: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]()
    model(inputs())
    plain = deepcopy(model)(inputs())
    held = dict(model.named_buffers())
    before = {key: value.clone() for key, value in held.items()}
    with freeze_buffers(model):
        torch.testing.assert_close(model(inputs()), plain, rtol=0, atol=0)
    assert dict(model.named_buffers()).keys() == held.keys()
    for key, buffer in model.named_buffers():
        assert buffer is held[key]
        torch.testing.assert_close(buffer, before[key], rtol=0, atol=0)
    model(inputs())
    if before:
        assert any(not torch.equal(value, before[key]) for key, value in model.named_buffers()), "updates go on"


@pytest.mark.parametrize("name", NETWORKS)
def test_buffers_come_back_after_an_error(name: str) -> None:
    model = NETWORKS[name]()
    before = deepcopy(model.state_dict())
    tracks = [getattr(each, "track_running_stats", None) for each in model.modules()]

    def broken() -> None:
        with freeze_buffers(model):
            model(inputs())
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [getattr(each, "track_running_stats", None) for each in model.modules()] == tracks


def sam_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    optimizer = SAM(model, SGD, rho=0.5, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.perturbed_steps == 1


def fisher_step(way: PassStrategy, whole: bool | None, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    penalty = FisherPenalty(model, parts=2, strategy=way, whole=whole)
    penalty.step(SGD(model.parameters(), lr=0.1), batch)


STEPS: dict[str, Callable[[nn.Module, tuple[Tensor, Tensor]], None]] = {
    "SAM": sam_step,
    **{
        f"Fisher penalty, way={way}, whole={whole}": partial(fisher_step, way, whole)
        for way in ("loop", "auto")
        for whole in (None, False)
    },
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_leaves_the_statistics_of_a_plain_one_in_a_batch_norm_of_ones_own(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpus(monkeypatch)  # "auto" tries a vectorized pass, which fails: it cannot write to what is not vectorized
    torch.manual_seed(0)
    model = nn.Sequential(NETWORKS["a batch norm of one's own"](), nn.Linear(12, 3))
    plain = deepcopy(model)
    batch = inputs(), torch.tensor([0, 1, 2, 0, 1])
    STEPS[step](model, batch)
    plain(batch[0])
    found, want = dict(model.named_buffers()), dict(plain.named_buffers())
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    assert found["0.1.running_mean"].any(), "updated once"


def test_a_norm_in_evaluation_mode_goes_on_using_its_running_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 2))
    model(3 * inputs() + 1)
    model[0].eval()
    before = model(inputs())
    with freeze_buffers(model):
        torch.testing.assert_close(model(inputs()), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    model = nn.Linear(40, 30).to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    steps = [torch.randn_like(p) for p in model.parameters()]
    with shift_weights(model, list(model.parameters()), steps):
        for p, old, step in zip(model.parameters(), before, steps, strict=True):
            assert torch.equal(p, old + step)
    for p, old, step in zip(model.parameters(), before, steps, strict=True):
        assert torch.equal(p, old)
        assert not torch.equal(old + step - step, old), "taking the step back would leave rounding behind"


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_weights_come_back_after_an_error_and_after_nan(error: type[BaseException]) -> None:
    model = nn.Linear(4, 3)
    before = deepcopy(model.state_dict())
    steps = [torch.full_like(p, torch.nan) for p in model.parameters()]

    def broken() -> None:
        with shift_weights(model, list(model.parameters()), steps):
            assert model(torch.ones(4)).isnan().all()
            raise error

    with pytest.raises(error):
        broken()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_under_autocast_the_moved_weights_are_seen_inside_and_the_old_ones_afterwards() -> None:
    model = nn.Linear(8, 8)
    x = torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        with shift_weights(model, [model.weight], [torch.ones(8, 8)]):
            inside = model(x)
        after = model(x)
    torch.testing.assert_close(inside - before, torch.full_like(before, 8), rtol=0.02, atol=0)
    assert torch.equal(after, before)


def test_gradients_inside_are_those_of_the_moved_weights() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    x, step = torch.randn(4, 3, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)
    with shift_weights(model, [model.weight], [step]):
        model(x).square().sum().backward()
    expected = 2 * F.linear(x, model.weight + step).T @ x
    torch.testing.assert_close(model.weight.grad, expected.detach())
