"""Two passes on a GPU: float16 with a GradScaler, random numbers, buffers; skipped where there is none."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from two_pass_cases import BASES, KINDS, OPTIONS, SCALED_WAYS, Kind, batches, by_closure, closure_of, made, same, train

from saltflat.training import SAM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def there(count: int = 20, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    return [(x.cuda(), y.cuda()) for x, y in batches(count, dtype=dtype)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ["mlp", "batch norm", "tied"])
def test_a_gpu_does_what_a_cpu_does(kind: Kind, base: str, name: str) -> None:
    model, expected = made(name).cuda(), made(name)
    optimizer = kind(model, BASES[base](model.parameters()), **OPTIONS[kind])
    train(model, optimizer, there())
    train(expected, kind(expected, BASES[base](expected.parameters()), **OPTIONS[kind]), batches())
    same(model.cpu(), expected, 1e-10)
    assert optimizer.perturbed_steps == 20


@pytest.mark.parametrize("name", ["batch norm", "dropout"])
@pytest.mark.parametrize("fused", [False, True])
def test_without_a_radius_every_step_on_a_gpu_is_the_bases_bit_for_bit(name: str, fused: bool) -> None:
    plain, model = made(name, torch.float32).cuda(), made(name, torch.float32).cuda()
    torch.manual_seed(3)
    train(plain, AdamW(plain.parameters(), lr=0.01, fused=fused), there(dtype=torch.float32))
    random = torch.cuda.get_rng_state()
    torch.manual_seed(3)
    train(model, SAM(model, AdamW, rho=0.0, lr=0.01, fused=fused), there(dtype=torch.float32))
    same(model, plain)
    assert torch.equal(torch.cuda.get_rng_state(), random)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["closure", "clipped"])
@pytest.mark.parametrize("fused", [False, True])
def test_in_float16_the_scale_falls_until_it_fits_and_training_is_what_it_is_without(
    kind: Kind, way: str, fused: bool
) -> None:
    model, expected = (made("batch norm", torch.float32).cuda() for _ in range(2))
    optimizer = kind(model, SGD, lr=0.1, momentum=0.9, fused=fused)
    other = kind(expected, SGD, lr=0.1, momentum=0.9)
    # Gradients of about 0.1 times this overflow in float16.
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**22, growth_interval=1000)
    skipped = 0
    for batch in there(dtype=torch.float32):
        before, scale = deepcopy(model.state_dict()), scaler.get_scale()
        SCALED_WAYS[way](model, optimizer, batch, scaler)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            for name, p in model.named_parameters():
                assert torch.equal(p, before[name])
        else:
            by_closure(expected, other, batch)
    assert 0 < skipped < 12
    assert optimizer.perturbed_steps == 20 - skipped
    for one, two in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)  # half precision shows


@pytest.mark.parametrize("way", ["closure", "clipped"])
@pytest.mark.parametrize("at", [1, 2])
def test_an_infinite_gradient_of_either_pass_skips_the_step(way: str, at: int) -> None:
    model = made("batch norm", torch.float32).cuda()
    optimizer = SAM(model, SGD, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    data = there(3, torch.float32)
    SCALED_WAYS[way](model, optimizer, data[0], scaler)
    scaler.update()
    before, state = deepcopy(model), deepcopy(optimizer.state_dict())
    passes = [0]

    def overflow(gradient: Tensor) -> Tensor:
        passes[0] += 1
        return torch.full_like(gradient, torch.inf) if passes[0] == at else gradient

    model.get_parameter("0.weight").register_hook(overflow)
    SCALED_WAYS[way](model, optimizer, data[1], scaler)
    scaler.update()
    assert scaler.get_scale() == 128
    for p, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, old)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    SCALED_WAYS[way](model, optimizer, data[2], scaler)
    assert optimizer.perturbed_steps == 2


def test_one_autocast_around_both_passes_sees_the_moved_weights_on_a_gpu() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 3).cuda()
    sam = SAM(model, SGD, lr=0.1, rho=20.0)
    sizes: list[float] = []
    model.register_forward_hook(lambda module, args, output: sizes.append(output.detach().abs().sum().item()))
    with torch.autocast("cuda", torch.bfloat16):
        sam.step(closure_of(model, sam, there(1, torch.float32)[0]))
    assert sizes[1] > 2 * sizes[0]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_waits_for_the_gpu_nowhere() -> None:
    model = made("batch norm", torch.float32).cuda()
    optimizers = [SAM(model, SGD, lr=0.1), *(kind(model, SGD, lr=0.1) for kind in KINDS[1:])]
    (batch,) = there(1, torch.float32)
    for optimizer in optimizers:
        by_closure(model, optimizer, batch)
        try:
            torch.cuda.set_sync_debug_mode("error")
            by_closure(model, optimizer, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert optimizer.perturbed_steps == 2


def test_weights_on_two_devices_move_together() -> None:
    model = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 3).cuda()])
    sam = SAM(model, SGD, lr=0.1, rho=0.5)
    x, y = batches(1, dtype=torch.float32)[0]

    def closure() -> None:
        sam.zero_grad()
        nn.functional.cross_entropy(model[1](model[0](x).tanh().cuda()), y.cuda()).backward()

    sam.step(closure)
    assert sam.perturbation == pytest.approx(0.5, rel=1e-5)
