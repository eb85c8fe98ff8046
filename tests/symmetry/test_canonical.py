"""One member for all that differ by rescaling, and whether two networks do."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from architectures import NETWORKS
from cases import Case
from rank_oracle import inputs_of
from test_find import case_of, fresh, group_of, members_of, run
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from saltflat import rescale
from saltflat.errors import ModelError, NonFiniteError, OptionError
from saltflat.symmetry import canonicalize, equal_up_to_rescaling
from saltflat.symmetry.rescale import apply_rescaling


@cache
def canonical_of(name: str) -> Any:
    case = case_of(name)
    return canonicalize(case.model, example_of(case))


def example_of(case: Case) -> Any:
    return inputs_of(case.batches[0])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def example() -> Tensor:
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def same_entries(one: nn.Module, two: nn.Module, tolerance: float = 1e-9) -> None:
    """Every entry, relative to itself."""
    others = members_of(two)
    for name, value in members_of(one).items():
        assert_close(others[name], value, rtol=tolerance, atol=1e-14, msg=lambda said, name=name: f"{name}: {said}")  # type: ignore[misc]


# The canonical member.


@pytest.mark.parametrize("name", NETWORKS)
def test_all_members_of_a_family_have_one_canonical_member(name: str) -> None:
    case, group = case_of(name), group_of(name)
    for seed in range(3):
        other = apply_rescaling(case.model, group, group.sample(seed))
        same_entries(canonicalize(other, example_of(case)), canonical_of(name))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_canonical_member_is_its_own(name: str) -> None:
    same_entries(canonicalize(canonical_of(name), example_of(case_of(name))), canonical_of(name))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_canonical_member_is_the_same_function(name: str) -> None:
    case = case_of(name)
    generator = torch.Generator().manual_seed(11)
    inputs = tree_map(lambda x: fresh(x, generator), example_of(case))
    before, after = run(case.model, inputs), run(canonical_of(name), inputs)
    assert float((after - before).abs().max()) <= 1e-9 * float(before.abs().max())


@pytest.mark.parametrize("name", NETWORKS)
def test_only_what_can_move_has_moved(name: str) -> None:
    moving, values = group_of(name).find_movable_entries(), members_of(canonical_of(name))
    for member, value in members_of(case_of(name).model).items():
        if member in moving:
            kept = torch.from_numpy(~moving[member])
            assert torch.equal(values[member][kept], value[kept])
        else:
            assert torch.equal(values[member], value)


def lengths(weight: Tensor) -> Tensor:
    found: Tensor = weight.detach().flatten(1).norm(dim=1)
    return found


def ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.float64)


def test_hidden_units_have_incoming_weights_of_length_one() -> None:
    new = canonical_of("biased_mlp")
    assert_close(lengths(new[0].weight), ones(8))
    assert_close(lengths(new[2].weight), ones(6))
    assert (lengths(new[4].weight) - 1).abs().min() > 1e-3  # the outputs are what they are
    new = canonical_of("lenet5")
    for layer, count in ((new.conv1, 3), (new.conv2, 4), (new.fc1, 8), (new.fc2, 6)):
        assert_close(lengths(layer.weight), ones(count))


def test_what_a_norm_gives_its_size_has_a_factor_and_shift_of_length_one() -> None:
    new = canonical_of("vgg_with_batch_norm")
    for convolution, norm, count in ((new.features[0], new.features[1], 4), (new.features[4], new.features[5], 6)):
        assert_close(lengths(convolution.weight), ones(count))
        assert_close(lengths(torch.stack([norm.weight, norm.bias], 1)), ones(count))
    new = canonical_of("gpt_like_decoder")
    for norm in (new.block.ln_1, new.block.ln_2, new.ln_f):
        assert_close(lengths(torch.stack([norm.weight, norm.bias], 1)), ones(6))
    # Hidden units, values and queries; what keys have instead undoes the queries.
    assert_close(lengths(new.block.c_fc.weight), ones(10))
    assert_close(lengths(new.block.attn.c_attn.weight[12:]), ones(6))
    assert_close(lengths(new.block.attn.c_attn.weight[:6]), ones(6))


def test_biases_do_not_count_where_there_are_weights() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].bias.mul_(100)  # type: ignore[operator]
    new: Any = canonicalize(model, example())
    assert_close(lengths(new[0].weight), ones(6))


def test_a_unit_with_a_bias_alone_gets_a_bias_of_length_one() -> None:
    model: Any = mlp()
    with torch.no_grad():
        model[0].weight[0] = 0
    new: Any = canonicalize(model, example())
    assert abs(float(new[0].bias[0].detach())) == pytest.approx(1)
    assert_close(lengths(new[0].weight)[1:], ones(5))
    assert_close(new(example()), model(example()))


def test_a_unit_that_nothing_leads_to_has_outgoing_weights_of_length_one() -> None:
    model: Any = mlp()
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0] = 0, 0
    new: Any = canonicalize(model, example())
    assert_close(lengths(new[2].weight.mT)[:1], ones(1))
    # What is always zero is no part of the size of what it leads to.
    assert_close(lengths(new[2].weight[:, 1:]), ones(5))
    assert_close(new(example()), model(example()))
    same_entries(canonicalize(new, example()), new)


@pytest.mark.parametrize("layer", [0, 2])
def test_units_without_outgoing_weights_have_a_canonical_member(layer: int) -> None:
    model: Any = mlp()
    with torch.no_grad():
        model[layer + 2].weight[:, 0] = 0
    assert equal_up_to_rescaling(model, rescale(model, example()), example())


def test_a_dead_unit_has_a_canonical_member() -> None:
    model: Any = mlp()
    with torch.no_grad():
        model[0].bias[0] = -1e3
    same_entries(canonicalize(rescale(model, example()), example()), canonicalize(model, example()))


def test_a_network_without_freedom_is_its_own_canonical_member() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)).double()
    new = canonicalize(model, example())
    assert new is not model
    for name, value in members_of(model).items():
        assert torch.equal(members_of(new)[name], value)


def test_the_model_is_left_alone() -> None:
    model = NETWORKS["vgg_with_batch_norm"]().model.train()
    inputs = example_of(case_of("vgg_with_batch_norm"))
    before = {name: value.clone() for name, value in members_of(model).items()}
    canonicalize(model, inputs)
    equal_up_to_rescaling(model, model, inputs)
    assert all(torch.equal(before[name], value) for name, value in members_of(model).items())
    assert all(module.training for module in model.modules())


def test_single_precision_stays() -> None:
    model, x = mlp().float(), example().float()
    new: Any = canonicalize(model, x)
    assert {value.dtype for value in new.parameters()} == {torch.float32}
    assert_close(lengths(new[0].weight), torch.ones(6))
    assert_close(new(x), model(x), rtol=1e-4, atol=1e-5)
    same_entries(canonicalize(rescale(model, x), x), new, tolerance=1e-5)


@pytest.mark.parametrize("given", [None, "text", torch.randn(3, 9)])
def test_an_example_that_does_not_fit_is_refused(given: Any) -> None:
    with pytest.raises((OptionError, ModelError), match=r"^Expected .*, but got .*\. Try "):
        canonicalize(mlp(), given)
    with pytest.raises((OptionError, ModelError), match=r"^Expected .*, but got .*\. Try "):
        equal_up_to_rescaling(mlp(), mlp(), given)


# Whether two networks are the same.


@pytest.mark.parametrize("name", NETWORKS)
def test_rescaled_networks_are_the_same(name: str) -> None:
    case, group = case_of(name), group_of(name)
    assert equal_up_to_rescaling(case.model, case.model, example_of(case))
    for seed in range(2):
        other = apply_rescaling(case.model, group, group.sample(seed))
        assert equal_up_to_rescaling(case.model, other, example_of(case))
        assert equal_up_to_rescaling(other, case.model, example_of(case))


@pytest.mark.parametrize("name", ["biased_mlp", "vgg_with_batch_norm", "tied_embedding_decoder", "norms_without_eps"])
def test_one_entry_that_differs_makes_another_network(name: str) -> None:
    case, group = case_of(name), group_of(name)
    for member, value in [*case.model.named_parameters(), *case.model.named_buffers()]:
        if value.is_floating_point():
            other = apply_rescaling(case.model, group, group.sample(1))
            changed = members_of(other)[member].view(-1)
            changed[len(changed) // 2] *= 1 + 1e-6
            assert not equal_up_to_rescaling(case.model, other, example_of(case)), member


@pytest.mark.parametrize("sign", ["weight", "bias"])
def test_an_entry_of_the_other_sign_makes_another_network(sign: str) -> None:
    model, other = mlp(), mlp()
    with torch.no_grad():
        getattr(other[0], sign)[0].mul_(-1)
    assert not equal_up_to_rescaling(model, other, example())


def test_factors_that_are_no_rescaling_make_another_network() -> None:
    model, other = mlp(), mlp()
    with torch.no_grad():
        other[0].weight.mul_(2)  # type: ignore[operator]
        other[0].bias.mul_(2)  # type: ignore[operator]
    assert not equal_up_to_rescaling(model, other, example())
    with torch.no_grad():
        other[2].weight.div_(2)  # type: ignore[operator]
    assert equal_up_to_rescaling(model, other, example())


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU, nn.LeakyReLU, nn.ReLU6, nn.Identity, nn.Softplus])
def test_another_activation_makes_another_network(activation: Callable[[], nn.Module]) -> None:
    model: Any = mlp()
    other = nn.Sequential(model[0], activation(), model[2], activation(), model[4])
    # Large enough to meet what is clipped at 6.
    assert not equal_up_to_rescaling(model, other, 20 * example())
    assert not equal_up_to_rescaling(other, model, 20 * example())


def test_permuted_units_make_another_network() -> None:
    model = mlp()
    other: Any = deepcopy(model)
    order = [1, 0, 2, 3, 4, 5]
    with torch.no_grad():
        other[0].weight.copy_(other[0].weight[order])
        other[0].bias.copy_(other[0].bias[order])
        other[2].weight.copy_(other[2].weight[:, order])
    assert_close(other(example()), model(example()))  # the same function, but by no rescaling
    assert not equal_up_to_rescaling(model, other, example())


def test_counters_of_batches_play_no_part_and_statistics_do() -> None:
    case = NETWORKS["vgg_with_batch_norm"]()
    other: Any = deepcopy(case.model)
    other.features[1].num_batches_tracked += 1
    assert equal_up_to_rescaling(case.model, other, example_of(case))
    other.features[1].running_mean[0] += 1
    assert not equal_up_to_rescaling(case.model, other, example_of(case))


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)),
        nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)),
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
    ],
    ids=["shorter", "bias", "wider", "norm"],
)
def test_another_architecture_is_refused(other: nn.Module) -> None:
    with pytest.raises(
        ModelError, match=r"Expected two models of one architecture, but got models of which only one has '.*' with the"
    ):
        equal_up_to_rescaling(mlp(), other.double(), example())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_lower_precision_makes_no_difference(dtype: torch.dtype) -> None:
    model, x = mlp().to(dtype), example().to(dtype)
    for seed in range(5):
        assert equal_up_to_rescaling(model, rescale(model, x, seed=seed), x)
    other: Any = rescale(model, x)
    with torch.no_grad():
        other[2].weight[0, 0] *= 1.5
    assert not equal_up_to_rescaling(model, other, x)


def test_a_unit_that_nothing_leads_to_makes_no_difference() -> None:
    model: Any = mlp()
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0] = 0, 0
    assert equal_up_to_rescaling(model, rescale(model, example()), example())


def test_the_smallest_weights_have_a_length() -> None:
    model: Any = mlp()
    with torch.no_grad():
        model[0].weight[0] *= 1e-200
        model[0].bias[0] *= 1e-200
    new: Any = canonicalize(model, example())
    assert_close(lengths(new[0].weight), ones(6))


def test_outputs_that_are_not_numbers_are_not_equal() -> None:
    model = mlp()
    with pytest.raises(NonFiniteError):
        equal_up_to_rescaling(model, model, example() * float("nan"))


def test_several_layers_that_lead_to_a_unit_have_length_one_together() -> None:
    new = canonical_of("resnet18_with_convolutional_shortcuts")
    for layer, count in ((new.conv1, 3), (new.layer1.conv1, 3), (new.layer1.conv2, 3), (new.layer2.conv1, 5)):
        assert_close(lengths(layer.weight), ones(count))
    stream = new.bn1, new.layer1.bn2  # both lead to the same units
    assert_close(lengths(torch.stack([part for norm in stream for part in (norm.weight, norm.bias)], 1)), ones(3))
