"""How the Fisher penalty takes its passes: vectorized or in a loop, and what they leave behind."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import CASES, Case, Net, integers, reals, shaken
from fisher_penalty_cases import (
    KINKED,
    WAYS,
    Batch,
    buffers,
    gradients,
    length,
    on_cpus,
    plain_step,
    same_bits,
    single,
    smooth_batch_norm,
    smooth_cnn,
    smooth_mlp,
    whole_batch,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from saltflat.errors import PrecisionError, TrainingError
from saltflat.training import FisherPenalty, part_gradients
from saltflat.training.part_gradients import PartGradients, PassStrategy

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", [*KINKED, "residual_with_batch_norm"])
def test_both_ways_agree(name: str) -> None:
    found = []
    for way in WAYS:
        built = CASES[name]()
        for each in built.model.modules():
            each.train(not isinstance(each, nn.Dropout | nn.MultiheadAttention))
        penalty = FisherPenalty(built.model, built.loss, parts=2, alpha=0.05, beta=7.0, strategy=way)
        found.append((penalty.backward(whole_batch(built)), gradients(built.model)))
        frozen = [p for p in built.model.parameters() if not p.requires_grad]
        assert all(p.grad is None for p in frozen)
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def ways_taken(patch: pytest.MonkeyPatch) -> list[str]:
    taken: list[str] = []
    for name in ("run_loop", "run_vmap"):
        real = getattr(PartGradients, name)

        def noted(self: Any, parts: Any, name: str = name, real: Any = real) -> Any:
            taken.append(name)
            return real(self, parts)

        patch.setattr(PartGradients, name, noted)
    return taken


def test_a_model_that_torch_func_does_not_take_is_looped_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus(monkeypatch)
    taken = ways_taken(monkeypatch)
    built, other = CASES["weight_norm_parametrization"](), CASES["weight_norm_parametrization"]()
    penalty = FisherPenalty(built.model, parts=2)
    for _ in range(2):
        penalty.backward(whole_batch(built))
    assert taken == ["run_vmap", "run_loop", "run_loop"]
    assert penalty.why_looped is not None
    assert "_weight_norm_interface" in penalty.why_looped
    reference = FisherPenalty(other.model, parts=2, strategy="loop")
    for _ in range(2):
        reference.backward(whole_batch(other))
    same_bits(gradients(built.model), gradients(other.model))
    with pytest.raises(TrainingError, match="_weight_norm_interface"):
        FisherPenalty(other.model, parts=2, strategy="vectorized").backward(whole_batch(other))


def test_what_fails_in_the_loop_too_says_nothing_about_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus(monkeypatch)
    built = smooth_mlp()
    inputs, targets = whole_batch(built)
    penalty = FisherPenalty(built.model, parts=2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        penalty.backward((inputs[:, :2], targets))
    assert penalty.why_looped is None
    taken = ways_taken(monkeypatch)
    penalty.backward((inputs, targets))
    assert taken == ["run_vmap"]


def test_running_out_of_memory_is_not_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus(monkeypatch)

    def fails(self: Any, parts: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(PartGradients, "run_vmap", fails)
    built = smooth_mlp()
    penalty = FisherPenalty(built.model, parts=2)
    penalty.backward(whole_batch(built))
    assert penalty.why_looped == "The vectorized pass ran out of memory."
    with pytest.raises(torch.OutOfMemoryError):
        FisherPenalty(built.model, parts=2, strategy="vectorized").backward(whole_batch(built))


def test_auto_loops_on_cpus_with_large_stacks_and_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ways_taken(monkeypatch)
    built, recurrent = smooth_mlp(), CASES["lstm_in_two_directions"]()
    FisherPenalty(built.model, parts=2).backward(whole_batch(built))
    on_cpus(monkeypatch)
    FisherPenalty(recurrent.model, parts=2).backward(whole_batch(recurrent))
    monkeypatch.setattr(part_gradients, "MOST_STACKED", 100)
    FisherPenalty(built.model, parts=2).backward(whole_batch(built))
    assert taken == ["run_loop"] * 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("whole", [None, False, True])
def test_running_statistics_are_those_of_a_plain_step(whole: bool | None, way: PassStrategy) -> None:
    built, other = smooth_batch_norm(), smooth_batch_norm()
    batch = whole_batch(built)
    before = buffers(built.model)
    FisherPenalty(built.model, parts=3, strategy=way, whole=whole).step(SGD(built.model.parameters(), lr=0.1), batch)
    plain_step(other.model, SGD(other.model.parameters(), lr=0.1), batch)
    same_bits(buffers(built.model), buffers(other.model))
    assert not torch.equal(buffers(built.model)["1.running_mean"], before["1.running_mean"])


@pytest.mark.parametrize("way", WAYS)
def test_with_batch_norm_a_part_has_two_examples(way: PassStrategy) -> None:
    built, other = smooth_batch_norm(), smooth_batch_norm()
    batch = whole_batch(built)
    FisherPenalty(built.model, parts=8, alpha=0.1, strategy=way).backward(batch)
    FisherPenalty(other.model, parts=3, alpha=0.1, strategy=way).backward(batch)
    same_bits(gradients(built.model), gradients(other.model))


def counting(net: Any, x: Tensor) -> Any:
    net.layer.count = net.layer.count + 1
    net.layer.total.add_(2)
    return net.norm(net.layer(x.unsqueeze(1))).mean(1)


@pytest.mark.parametrize("tries_vectorized", [True, False])
def test_other_buffers_are_those_of_a_plain_step_too(tries_vectorized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if tries_vectorized:
        on_cpus(monkeypatch)

    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        layer.register_buffer("count", torch.zeros(()))
        layer.register_buffer("total", torch.zeros(()))
        norm = nn.InstanceNorm1d(1, track_running_stats=True)
        return Net(counting, layer=nn.utils.parametrizations.spectral_norm(layer), norm=norm)

    batch = reals(6, 4).float(), integers(3, 6)
    one, two = build(), build()
    penalty = FisherPenalty(one, parts=3)
    penalty.step(SGD(one.parameters(), lr=0.1), batch)
    assert (penalty.why_looped is not None) == tries_vectorized
    plain_step(two, SGD(two.parameters(), lr=0.1), batch)
    same_bits(buffers(one), buffers(two))
    assert float(buffers(one)["layer.count"]) == 1


def test_the_written_buffers_alone_lead_to_a_pass_of_their_own() -> None:
    layer = nn.Linear(4, 3)
    layer.register_buffer("count", torch.zeros(()))
    layer.register_buffer("total", torch.zeros(()))
    model = Net(counting, layer=layer, norm=nn.Identity())
    penalty = FisherPenalty(model, parts=3)
    for _ in range(2):
        penalty.backward((torch.randn(6, 4), integers(3, 6)))
    assert [int(each) for each in buffers(model).values()] == [2, 4]


class Failing(nn.Module):
    """Breaks in its n-th forward pass."""

    def __init__(self, model: nn.Module, n: int) -> None:
        super().__init__()
        self.model, self.left = model, n

    def forward(self, x: Tensor) -> Any:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.model(x)


@pytest.mark.parametrize(("way", "passes"), [("loop", 7), ("vectorized", 5)])
def test_an_error_in_any_pass_leaves_everything_as_it_was(way: PassStrategy, passes: int) -> None:
    batch = whole_batch(smooth_batch_norm())
    for n in range(1, passes + 1):
        built = smooth_batch_norm()
        model = Failing(built.model, n)
        optimizer = SGD(model.parameters(), lr=0.1)
        # A long step: what a short one rounds away comes back by adding it again.
        penalty = FisherPenalty(model, parts=3, alpha=3.0, strategy=way)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(KeyboardInterrupt):
            penalty.step(optimizer, batch)
        same_bits(dict(model.named_parameters()), weights)
        same_bits(gradients(model), {name: torch.ones_like(p) for name, p in weights.items()})
        assert penalty.steps == 0
        norm = built.model.get_submodule("1")
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.track_running_stats
        # Only the pass over the whole batch, the first, has updated the statistics.
        assert int(norm.num_batches_tracked or 0) == (n > 1)
    model = Failing(smooth_batch_norm().model, passes + 1)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    FisherPenalty(model, parts=3, alpha=3.0, strategy=way).backward(batch)
    same_bits(dict(model.named_parameters()), weights)
    assert model.left == 1


class Noise(nn.Module):
    """Random numbers laid out in memory as its inputs are."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 + torch.rand_like(x))


def random_network() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 4, 2), Noise(), nn.Tanh(), nn.Dropout(), nn.Conv2d(4, 3, 2), nn.Dropout2d(), nn.Flatten()]
    return shaken(nn.Sequential(*body, nn.Linear(12, 3)))


@pytest.mark.parametrize("way", WAYS)
def test_both_evaluations_of_a_part_draw_the_same_numbers(way: PassStrategy) -> None:
    model = random_network()
    batch = reals(7, 2, 4, 4), integers(3, 7)

    def penalty_part(alpha: float) -> float:
        found = []
        for beta in (1.0, 2.0):
            torch.manual_seed(5)
            model.zero_grad()
            FisherPenalty(model, parts=3, alpha=alpha, beta=beta, strategy=way).backward(batch)
            found.append(gradients(model))
        return length({name: found[1][name] - each for name, each in found[0].items()}) / alpha

    # With masks of their own the difference would not vanish with alpha, and its ratio to alpha would explode.
    assert penalty_part(1e-4) == pytest.approx(penalty_part(1e-3), rel=1e-2)
    assert penalty_part(1e-6) == pytest.approx(penalty_part(1e-4), rel=1e-2)


def test_the_same_seed_gives_the_same_step() -> None:
    built = CASES["dropout_left_in_train_mode"]()
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        built.model.zero_grad()
        FisherPenalty(built.model, parts=2).backward(whole_batch(built))
        found.append((gradients(built.model), torch.rand(3)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_model_that_writes_to_its_inputs_gets_them_anew_for_every_pass() -> None:
    one, two = smooth_mlp(), smooth_mlp()
    batch = whole_batch(one)
    inputs = batch[0].clone()
    writer = Net(lambda net, x: net.body(x.mul_(2)), body=one.model)
    reader = Net(lambda net, x: net.body(x * 2), body=two.model)
    for model in (writer, reader):
        for way in WAYS:
            FisherPenalty(model, parts=3, alpha=0.1, strategy=way, whole=True).backward(batch)
    same_bits(gradients(writer), gradients(reader))
    torch.testing.assert_close(batch[0], inputs, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_autocast_does_not_reach_the_penalty(way: PassStrategy) -> None:
    found = []
    for enabled in (False, True):
        model, batch = single(smooth_cnn)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            FisherPenalty(model, parts=3, strategy=way).backward(batch)
        found.append(gradients(model))
    same_bits(found[0], found[1])


def test_a_pass_of_the_losses_own_keeps_autocast() -> None:
    model, batch = single(smooth_batch_norm)
    seen: list[tuple[int, torch.dtype]] = []

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(batch[0])
        seen.append((len(batch[0]), model.get_submodule("4")(torch.zeros(1, 27)).dtype))
        return F.cross_entropy(outputs, batch[1])

    with torch.autocast("cpu", torch.bfloat16):
        FisherPenalty(model, parts=2, objective=objective).backward(batch)
    short, full = torch.bfloat16, torch.float32
    assert seen == [(7, short), (4, full), (4, full), (3, full), (3, full)]


def test_weights_that_moved_are_seen_by_the_next_pass_of_a_long_autocast() -> None:
    found = []
    for is_long in (True, False):
        model, batch = single(smooth_batch_norm)
        penalty, optimizer = FisherPenalty(model, parts=2), SGD(model.parameters(), lr=1.0)
        with torch.autocast("cpu", torch.bfloat16) if is_long else nullcontext():
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    penalty.step(optimizer, batch)
        found.append(dict(model.named_parameters()))
    same_bits(found[0], found[1])


def test_half_precision_inputs_are_taken_in_full() -> None:
    model, (inputs, targets) = single(smooth_cnn)
    coarse = inputs.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        FisherPenalty(model, parts=3).backward((coarse, targets))
    found = gradients(model)
    model.zero_grad()
    FisherPenalty(model, parts=3).backward((coarse.float(), targets))
    same_bits(found, gradients(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_refused(dtype: torch.dtype) -> None:
    model, batch = single(smooth_mlp)
    penalty = FisherPenalty(model)
    model.to(dtype)
    with pytest.raises(PrecisionError, match=r"0\.weight"):
        penalty.backward(batch)
    with pytest.raises(PrecisionError, match="autocast"):
        FisherPenalty(model)


@gpu
@pytest.mark.parametrize("build", [smooth_mlp, smooth_cnn, smooth_batch_norm, CASES["multihead_attention"]])
def test_on_a_gpu_auto_is_vectorized_and_agrees_with_the_loop(build: Callable[[], Case]) -> None:
    found = []
    for way in ("loop", "auto"):
        built = build()
        inputs, targets = whole_batch(built)
        penalty = FisherPenalty(built.model.cuda(), parts=3, alpha=0.05, strategy=way)
        penalty.backward((inputs.cuda(), targets.cuda()))
        assert penalty.why_looped is None
        found.append(gradients(built.model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@gpu
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu_both_evaluations_draw_the_same_numbers(way: PassStrategy) -> None:
    model = random_network().cuda()
    batch = reals(7, 2, 4, 4).cuda(), integers(3, 7).cuda()
    sizes = []
    for alpha in (1e-3, 1e-5):
        found = []
        for beta in (1.0, 2.0):
            torch.manual_seed(5)
            model.zero_grad()
            FisherPenalty(model, parts=3, alpha=alpha, beta=beta, strategy=way).backward(batch)
            found.append(gradients(model))
        sizes.append(length({name: found[1][name] - each for name, each in found[0].items()}) / alpha)
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-2)


@gpu
@pytest.mark.parametrize("build", [smooth_cnn, smooth_batch_norm])
def test_on_a_gpu_half_precision_with_a_scaler_keeps_the_penalty(build: Callable[[], Case]) -> None:
    (model, batch), (other, _) = single(build), single(build)
    model.cuda(), other.cuda()
    batch = batch[0].cuda(), batch[1].cuda()
    scaler = torch.amp.GradScaler("cuda")
    optimizer = SGD(model.parameters(), lr=0.1)
    with torch.autocast("cuda", torch.float16):
        FisherPenalty(model, parts=3, alpha=1e-3, beta=50.0).step(optimizer, batch, scaler)
    scaler.update()
    FisherPenalty(other, parts=3, alpha=1e-3, beta=50.0).step(SGD(other.parameters(), lr=0.1), batch)
    tolerance = 1e-6 if build is smooth_cnn else 1e-3
    torch.testing.assert_close(
        dict(model.named_parameters()), dict(other.named_parameters()), rtol=tolerance, atol=tolerance
    )
