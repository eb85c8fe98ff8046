"""What people get wrong around two passes is refused, or comes out right all the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.errors import OptionError, TrainingError
from saltflat.training import ASAM, SAM, GradientNormPenalty, TwoPass, penalty, shift_weights

INPUTS, LABELS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
WRAPPERS = pytest.mark.parametrize("wrapper", [SAM, ASAM, GradientNormPenalty])


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def backward(model: nn.Module, scale: float = 1.0) -> Tensor:
    loss = F.cross_entropy(model(INPUTS), LABELS) * scale
    loss.backward()
    return loss


def closed(model: nn.Module, optimizer: TwoPass) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model)

    return closure


def values(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in [*model.parameters(), *model.buffers()]]


@WRAPPERS
def test_a_gradient_that_the_last_step_left_behind_is_not_added_to(wrapper: type[SAM]) -> None:
    model = network()
    optimizer = wrapper(model, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.first_step()
        backward(model)
        optimizer.second_step()
    before = [p.detach().clone() for p in model.parameters()]
    backward(model)
    with pytest.raises(
        TrainingError, match=r"but got gradients that include those of the last step.*Try calling .*zero_grad"
    ):
        optimizer.first_step()
    assert not optimizer.is_shifted
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_loops_by_hand_may_clear_gradients_either_way(set_to_none: bool) -> None:
    one, other = network(), network()
    by_hand, by_closure = (SAM(model, torch.optim.SGD, lr=0.1, rho=0.5) for model in (one, other))
    for _ in range(3):
        by_hand.zero_grad(set_to_none)
        backward(one)
        by_hand.first_step()
        backward(one)
        by_hand.second_step()
        by_closure.step(closed(other, by_closure))
    assert all(map(torch.equal, values(one), values(other)))


@WRAPPERS
def test_a_second_backward_pass_that_was_forgotten_is_missed(wrapper: type[SAM]) -> None:
    model = network()
    optimizer = wrapper(model, torch.optim.SGD, lr=0.1)
    backward(model)
    before = values(model)
    optimizer.first_step()
    with pytest.raises(TrainingError, match=r"but got no gradient since first_step.*The weights are restored"):
        optimizer.second_step()
    assert all(map(torch.equal, before, values(model)))
    assert optimizer.perturbed_steps == 0


def untouched(model: nn.Module, optimizer: TwoPass, before: list[Tensor]) -> None:
    assert not optimizer.is_shifted
    assert optimizer.perturbed_steps == 0
    assert all(map(torch.equal, before, values(model)))


@pytest.mark.parametrize("cleared", ["to none", "to zero", "by the model to zero", "not at all"])
@WRAPPERS
def test_a_closure_that_never_calls_backward_is_an_error(wrapper: type[SAM], cleared: str) -> None:
    model = network().eval()
    optimizer = wrapper(model, torch.optim.SGD, lr=0.1)

    def closure() -> Tensor:
        if cleared == "by the model to zero":
            model.zero_grad(set_to_none=False)
        elif cleared != "not at all":
            optimizer.zero_grad(set_to_none=cleared == "to none")
        return F.cross_entropy(model(INPUTS), LABELS)

    before = values(model)
    for stale in (False, True):
        if stale:
            backward(model)  # gradients that are there already are not the closure's
        with pytest.raises(
            TrainingError, match=r"but got a closure that made no gradient.*Try calling loss.backward\(\)"
        ):
            optimizer.step(closure)
        untouched(model, optimizer, before)


@pytest.mark.parametrize("cleared", ["never", "to none", "to zero"])
@WRAPPERS
def test_a_first_step_without_a_backward_pass_is_an_error(wrapper: type[SAM], cleared: str) -> None:
    model = network()
    optimizer = wrapper(model, torch.optim.SGD, lr=0.1)
    before = values(model)
    if cleared != "never":
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.zero_grad(set_to_none=cleared == "to none")
    with pytest.raises(
        TrainingError, match=r"but got first_step\(\) without a gradient.*Try calling loss.backward\(\)"
    ):
        optimizer.first_step()
    untouched(model, optimizer, before)


@WRAPPERS
def test_a_closure_that_skips_its_second_backward_pass_is_an_error(wrapper: type[SAM]) -> None:
    model, calls = network().eval(), []
    optimizer = wrapper(model, torch.optim.SGD, lr=0.1)

    def closure() -> None:
        optimizer.zero_grad()
        calls.append(1)
        if len(calls) == 1:
            backward(model)

    before = values(model)
    with pytest.raises(TrainingError, match="but got no gradient since first_step"):
        optimizer.step(closure)
    untouched(model, optimizer, before)


def test_frozen_parameters_and_gradients_of_zero_are_no_error() -> None:
    model = network()
    model[3].requires_grad_(False)
    optimizer = SAM(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step(closed(model, optimizer))
    assert optimizer.perturbed_steps == 1
    for set_to_none in (True, False):

        def closure(set_to_none: bool = set_to_none) -> None:
            optimizer.zero_grad(set_to_none)
            backward(model, scale=0.0)  # every margin is met, say

        optimizer.step(closure)
        optimizer.zero_grad(set_to_none)
        backward(model, scale=0.0)
        optimizer.first_step()
        backward(model, scale=0.0)
        optimizer.second_step()
    assert optimizer.perturbed_steps == 1


def test_gradients_that_were_put_there_by_hand_are_gradients() -> None:
    one, other = network(), network()
    by_hand, usual = (SAM(model, torch.optim.SGD, lr=0.1, rho=0.5) for model in (one, other))

    def closure() -> None:
        by_hand.zero_grad()
        loss = F.cross_entropy(one(INPUTS), LABELS)
        for p, gradient in zip(one.parameters(), torch.autograd.grad(loss, list(one.parameters())), strict=True):
            p.grad = gradient

    for _ in range(2):
        by_hand.step(closure)
        usual.step(closed(other, usual))
    assert all(map(torch.equal, values(one), values(other)))


def test_a_first_gradient_must_not_be_unscaled() -> None:
    model = network()
    optimizer, scaler = SAM(model, torch.optim.SGD, lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(F.cross_entropy(model(INPUTS), LABELS)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(TrainingError, match=r"still scaled, but got one that the GradScaler has unscaled.*Try "):
        optimizer.first_step(scaler)


def test_the_last_wrapper_around_a_base_says_how_far_to_go() -> None:
    model = network()
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    SAM(model, base, rho=0.5)
    optimizer = SAM(model, base, rho=0.01)
    optimizer.step(closed(model, optimizer))
    assert optimizer.perturbation == pytest.approx(0.01, rel=1e-5)


def test_a_group_that_is_refused_is_not_added() -> None:
    model = network()
    optimizer = SAM(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(OptionError, match=r"but got rho=-1"):
        optimizer.add_param_group({"params": list(model[3].parameters()), "rho": -1})
    assert len(optimizer.param_groups) == 1


def test_a_closure_that_clears_a_part_of_the_gradients_is_refused() -> None:
    model = network()
    optimizer = SAM(model, torch.optim.SGD, lr=0.1)

    def closure() -> Tensor:
        model[0].zero_grad()
        return backward(model)

    optimizer.step(closure)
    with pytest.raises(TrainingError, match="but got gradients from before the closure"):
        optimizer.step(closure)


def test_random_numbers_are_those_of_all_micro_batches_around_which_the_first_pass_was_said() -> None:
    model = network()
    optimizer = SAM(model, torch.optim.SGD, lr=0.0)
    optimizer.zero_grad()
    first = []
    for _ in range(3):
        with optimizer.first_pass():
            first.append(torch.rand(()))
            backward(model)
    optimizer.first_step()
    assert [torch.rand(()) for _ in range(3)] == first
    backward(model)
    optimizer.second_step()
    optimizer.zero_grad()  # the next step begins where the random numbers are now
    with optimizer.first_pass():
        assert torch.rand(()) not in first
        backward(model)


def test_layers_in_eval_mode_use_their_running_statistics_in_the_extra_pass() -> None:
    model = network()
    optimizer = SAM(model, torch.optim.SGD, lr=0.0, rho=0.0)
    backward(model)
    here = model.eval()(INPUTS)
    model.train()
    optimizer.first_step()
    there = model.eval()(INPUTS)
    model.train()
    optimizer.restore()
    assert torch.equal(here, there)
    assert model.state_dict().keys() == network().state_dict().keys()


def test_a_measure_may_be_a_penalty_in_both_passes() -> None:
    model = network()
    optimizer = SAM(model, torch.optim.SGD, lr=0.1)
    flat = penalty("fisher_trace")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(INPUTS), LABELS) + 0.1 * flat(model, (INPUTS, LABELS))
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.perturbed_steps == 1


def test_what_is_to_be_made_large_is_perturbed_toward_small() -> None:
    model = network()
    optimizer = SAM(model, torch.optim.SGD, lr=0.0, rho=0.5, maximize=True)
    seen = []

    def closure() -> Tensor:
        loss = closed(model, optimizer)()
        seen.append(loss.item())
        return loss

    optimizer.step(closure)
    assert seen[1] < seen[0]


def test_small_gradients_of_half_precision_weights_are_no_matter_for_groups_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).half()
    groups = [{"params": list(model[i].parameters()), "rho": rho} for i, rho in ((0, 0.05), (2, 0.1))]
    optimizer = SAM(model, torch.optim.SGD(groups, lr=0.1))
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-6)
    optimizer.first_step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_model_that_hides_nan_does_not_step_after_an_overflow() -> None:
    model = nn.Linear(4, 3)
    optimizer, scaler = SAM(model, torch.optim.SGD, lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)

    def scaled() -> None:
        outputs = model(INPUTS)
        hidden = torch.where(outputs > 0, outputs, torch.zeros_like(outputs))
        scaler.scale(F.cross_entropy(hidden, LABELS)).backward()

    scaled()
    before = values(model)
    assert model.bias.grad is not None
    model.bias.grad[0] = torch.inf
    optimizer.first_step(scaler)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.second_step(scaler)
    assert all(map(torch.equal, before, values(model)))
    assert optimizer.perturbed_steps == 0


@pytest.mark.parametrize("wrong", ["length", "shape", "twice", "stranger"])
def test_steps_that_do_not_fit_the_parameters_are_refused(wrong: str) -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    parameters: list[Tensor] = [layer.weight, layer.bias]
    steps = [torch.ones(2, 2), torch.ones(2)]
    if wrong == "length":
        steps.pop()
    elif wrong == "shape":
        steps[1] = torch.ones(1)
    elif wrong == "twice":
        parameters[1], steps[1] = layer.weight, torch.ones(2, 2)
    else:
        parameters[1] = other.bias
    before = values(layer)
    with (
        pytest.raises(OptionError, match=r"but got 2 parameters and \d steps that do not fit"),
        shift_weights(layer, parameters, steps),
    ):
        pass
    assert all(map(torch.equal, before, values(layer)))


def test_generators_of_parameters_and_steps_are_taken() -> None:
    layer = nn.Linear(2, 2)
    before = values(layer)
    with shift_weights(layer, layer.parameters(), (torch.ones_like(p) for p in layer.parameters())):
        assert not any(map(torch.equal, before, layer.parameters()))
    assert all(map(torch.equal, before, values(layer)))
