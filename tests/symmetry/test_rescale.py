"""Other weights, the same function: what is promised of a rescaled model, and what is said when it cannot be had."""

import contextlib
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import LISTED, NETWORKS
from cases import Net, shaken, with_history
from rank_oracle import inputs_of
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing import assert_close

from saltflat import audit_invariance, find_symmetries, measure, rescale
from saltflat.errors import ModelError, OptionError, SaltflatError
from saltflat.symmetry import rescale as rescaling
from saltflat.symmetry.group import RescalingKind, Symmetries
from saltflat.symmetry.rescale import apply_rescaling


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(27, 4)
    )
    shaken(with_history(model, 6, 1, 5, 5))
    return model


def example(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same_state(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def log_factors(before: Tensor, after: Tensor) -> Tensor:
    return (after / before).detach().log()


# What comes out.


@pytest.mark.parametrize("kind", ["unit", "layer"])
@pytest.mark.parametrize("name", LISTED)
def test_every_promised_network_passes_the_check(name: str, kind: RescalingKind) -> None:
    case = NETWORKS[name]()
    inputs = inputs_of(case.batches[0])
    other = rescale(case.model, inputs, seed=3, kind=kind)
    before, after = case.model(inputs).detach(), other(inputs).detach()
    assert float((after - before).abs().max()) <= 1e-9 * float(before.abs().max())
    moved = not same_state(state_of(case.model), state_of(other))
    assert moved == (name != "gelu_only")


def test_a_seed_gives_the_same_model_again_and_another_seed_another() -> None:
    model, x = mlp(), example(7, 4)
    first, again, other = (state_of(rescale(model, x, seed=seed)) for seed in (3, 3, 4))
    assert same_state(first, again)
    assert not same_state(first, other)
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_the_seed_is_all_that_counts() -> None:
    model, x = mlp(), example(7, 4)
    torch.manual_seed(5)
    first = state_of(rescale(model, x))
    np.random.seed(6)
    torch.manual_seed(7)
    assert same_state(first, state_of(rescale(model, 2 * x[:1])))


def test_without_spread_nothing_moves() -> None:
    model, x = convolutional(), example(3, 1, 5, 5)
    other = rescale(model, x, spread=0)
    assert other is not model
    assert same_state(state_of(other), state_of(model))


def test_units_sizes_spread_as_far_as_told() -> None:
    model, x = nn.Sequential(nn.Linear(4, 500), nn.ReLU(), nn.Linear(500, 3)).double(), example(2, 4)
    for spread in (0.1, 2.0):
        other: Any = rescale(model, x, spread=spread)
        logs = log_factors(model[0].weight, other[0].weight)[:, 0]  # type: ignore[arg-type]
        assert float(logs.abs().max()) <= 2 * spread
        assert float(logs.std()) == pytest.approx(0.88 * spread, rel=0.1)


def test_a_unit_is_multiplied_on_one_side_and_divided_on_the_other() -> None:
    model, x = mlp(), example(7, 4)
    other: Any = rescale(model, x)
    into = log_factors(model[0].weight, other[0].weight)  # type: ignore[arg-type]
    assert_close(into, into[:, :1].expand(6, 4))
    assert_close(log_factors(model[0].bias, other[0].bias), into[:, 0])  # type: ignore[arg-type]
    out = log_factors(model[2].weight, other[2].weight)  # type: ignore[arg-type]
    assert_close(out + into[:, 0], (out + into[:, 0])[:, :1].expand(5, 6))
    assert torch.equal(model[4].bias, other[4].bias)  # type: ignore[arg-type]


def test_by_layer_every_parameter_is_multiplied_by_one_number() -> None:
    model, x = convolutional(), example(3, 1, 5, 5)
    other = rescale(model, x, kind="layer")
    values = dict(other.named_parameters())
    for name, value in model.named_parameters():
        logs = log_factors(value, values[name])
        assert_close(logs, logs.flatten()[:1].expand(logs.numel()).view(logs.shape), rtol=0, atol=1e-12)
    # Weight and bias of a layer before a BatchNorm are one factor, gamma and beta after it another.
    assert float(log_factors(model[0].weight, values["0.weight"]).abs().max()) > 0.1  # type: ignore[arg-type]
    assert float(log_factors(model[1].weight, values["1.weight"]).abs().max()) > 0.1  # type: ignore[arg-type]


# The model that was given.


def test_the_model_and_the_session_are_left_bit_for_bit() -> None:
    model, x = convolutional(), example(3, 1, 5, 5)
    model.train()
    model[2].eval()  # mixed modes
    calls: list[str] = []
    model[5].register_forward_hook(lambda module, given, out: calls.append("hook"))
    model[0].weight.grad = torch.ones_like(model[0].weight)  # type: ignore[arg-type]
    model[1].weight.requires_grad_(False)
    identities = {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    versions = {name: value._version for name, value in [*model.named_parameters(), *model.named_buffers()]}
    before, modes = state_of(model), [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    copy = x.clone()
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]

    for kind in ("unit", "layer"):
        rescale(model, x, kind=kind)

    assert same_state(before, state_of(model))
    assert modes == [module.training for module in model.modules()]
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    held = dict([*model.named_parameters(), *model.named_buffers()])
    assert identities == {name: id(value) for name, value in held.items()}
    assert versions == {name: value._version for name, value in held.items()}
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))  # type: ignore[arg-type]
    assert model[5].weight.grad is None
    assert torch.equal(x, copy)
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # type: ignore[index]
    assert states[2] == random.getstate()


def test_the_model_is_left_alone_when_something_goes_wrong() -> None:
    model = convolutional()
    model.train()
    before = state_of(model)
    with pytest.raises(ModelError):
        rescale(model, example(3, 2, 5, 5))
    assert same_state(before, state_of(model))
    assert all(module.training for module in model.modules())


def test_the_new_model_has_the_modes_hooks_and_frozen_parameters_of_the_old() -> None:
    model, x = convolutional(), example(3, 1, 5, 5)
    model.train()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    seen: list[Tensor] = []
    model[5].register_forward_hook(lambda module, given, out: seen.append(out))
    other: Any = rescale(model, x)
    assert [module.training for module in other.modules()] == [module.training for module in model.modules()]
    required = {name: value.requires_grad for name, value in model.named_parameters()}
    assert required == {name: value.requires_grad for name, value in other.named_parameters()}
    assert not torch.equal(other[0].weight, model[0].weight)  # type: ignore[arg-type]
    seen.clear()
    other(x)
    assert len(seen) == 1
    other(x).sum().backward()
    assert other[5].weight.grad is not None
    assert model[5].weight.grad is None


def test_tied_parameters_stay_one_parameter() -> None:
    case = NETWORKS["tied_embedding_decoder"]()
    other: Any = rescale(case.model, inputs_of(case.batches[0]))
    assert other.lm_head.weight is other.wte.weight
    twice: Any = NETWORKS["shared_layer"]().model
    again: Any = rescale(nn.Sequential(twice.layer, nn.ReLU(), twice.layer), example(3, 5))
    assert again[0] is again[2]


def test_a_model_in_train_mode_is_rescaled_for_its_eval_mode() -> None:
    model, x = convolutional().train(), example(6, 1, 5, 5)
    other = rescale(model, x)
    assert other.training
    assert_close(other.eval()(x), model.eval()(x), rtol=1e-9, atol=1e-12)


# Running statistics.


@pytest.mark.parametrize("variance", [3.0, 1e-3, 1e-5, 1e-9, 0.0])
def test_running_statistics_follow_with_the_small_number_that_is_added(variance: float) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, eps=1e-3), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    model[1].running_var.fill_(variance)
    model[1].running_mean.copy_(example(6))
    x = example(7, 4)
    group = find_symmetries(model, x)
    assert group.scales == 12
    assert group.members["1.running_var"].eps == 1e-3
    for logs in (np.full(12, -4.0), np.full(12, 4.0), group.sample(0)):
        other: Any = apply_rescaling(model, group, logs)
        factor = other[0].weight[:, 0] / model[0].weight[:, 0]
        assert_close(other[1].running_mean, factor * model[1].running_mean)
        assert_close(other[1].running_var + 1e-3, factor**2 * (variance + 1e-3))
        assert_close(other(x), model(x), rtol=1e-9, atol=1e-12)
        assert torch.equal(other[1].num_batches_tracked, model[1].num_batches_tracked)


def test_norms_with_different_small_numbers_each_have_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, eps=1e-2), nn.Linear(6, 5), nn.BatchNorm1d(5, eps=1e-7))
    x = example(7, 4)
    group = find_symmetries(with_history(model, 8, 4), x)
    assert [group.members[f"{name}.running_var"].eps for name in "13"] == [1e-2, 1e-7]


# Other precisions.


def test_single_precision_stays_and_is_as_exact_as_it_can_be() -> None:
    model, x = mlp().float(), example(7, 4).float()
    other = rescale(model, x, seed=2)
    assert {value.dtype for value in other.parameters()} == {torch.float32}
    assert_close(other(x), model(x), rtol=1e-4, atol=1e-5)
    # The factors are those of double precision, rounded once.
    exact = rescale(deepcopy(model).double(), x.double(), seed=2)
    for one, two in zip(other.parameters(), exact.parameters(), strict=True):
        assert torch.equal(one, two.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays(dtype: torch.dtype) -> None:
    model, x = mlp().to(dtype), example(7, 4).to(dtype)
    other = rescale(model, x, spread=0.5)
    assert {value.dtype for value in other.parameters()} == {dtype}
    assert_close(other(x), model(x), rtol=0.1, atol=0.1)
    assert not same_state(state_of(model), state_of(other))


# Inputs of every kind.


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, other: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        hidden = F.relu(self.left(x)) + F.relu(self.right(other)) * scale
        return {"logits": self.head(hidden), "gate": x.sum(1)}


def test_several_inputs_come_as_a_tuple_and_named_ones_as_a_dict() -> None:
    torch.manual_seed(0)
    model, x, y = Two().double(), example(5, 4), example(5, 3)
    for inputs in ((x, y), [x, y], {"x": x, "other": y}, {"x": x, "other": y, "scale": 3.0}):
        assert find_symmetries(model, inputs).scales == 6
        other = rescale(model, inputs)
        assert_close(other(x, y)["logits"], model(x, y)["logits"], rtol=1e-9, atol=1e-12)


def test_a_model_that_writes_to_its_input_leaves_the_example() -> None:
    model = Net(lambda net, x: net.last(net.first(x.mul_(2)).relu_()), first=nn.Linear(4, 6), last=nn.Linear(6, 3))
    x = example(5, 4)
    copy = x.clone()
    rescale(model.double(), x)
    assert torch.equal(x, copy)


def test_a_model_of_inference_mode_is_rescaled() -> None:
    with torch.inference_mode():
        model, x = mlp(), example(5, 4)
        other = rescale(model, x)
        assert_close(other(x), model(x), rtol=1e-9, atol=1e-12)
        assert not torch.equal(next(other.parameters()), next(model.parameters()))


def test_a_mask_among_the_inputs_is_no_obstacle() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True).double().eval()
    model = Net(lambda net, x, mask: net.layer(x, src_key_padding_mask=mask), layer=layer).eval()
    x, mask = example(3, 4, 4), torch.tensor([[False] * 4, [False, False, True, True], [False, True, True, True]])
    assert find_symmetries(model, (x, mask)).scales == 13
    other = rescale(model, (x, mask))
    assert_close(other(x, mask), model(x, mask), rtol=1e-9, atol=1e-12)


class Padded(nn.Module):
    """An encoder that leaves a mask aside where nothing is masked, as libraries of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(3, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        # As kernels want it: zeros, and a large negative number where nothing is to be seen.
        weak = (1 - mask.to(x.dtype)) * -1e9
        if (mask != 0).all():
            return self.pooled(self.layer(self.lift(x)))
        return self.pooled(self.layer(self.lift(x), src_key_padding_mask=weak))

    @staticmethod
    def pooled(h: Tensor) -> Tensor:
        return h.mean(1)


@pytest.mark.parametrize("padded", [False, True])
def test_a_choice_by_the_values_of_a_mask_is_that_of_the_example(padded: bool) -> None:
    torch.manual_seed(0)
    model = Padded().double().eval()
    x, mask = example(3, 4, 3), torch.ones(3, 4).long()
    mask[1, 2:] = int(not padded)
    group = find_symmetries(model, (x, mask))
    assert group.scales == 13
    (line,) = group.assumed
    assert line.endswith("if (mask != 0).all():")
    assert "masks decide as those of the example did: test_rescale.py" in " ".join(str(group).split())
    other = rescale(model, (x, mask))
    assert_close(other(x, mask), model(x, mask), rtol=1e-9, atol=1e-12)


def test_the_values_of_a_mask_that_parameters_have_a_part_in_do_not_decide() -> None:
    def forward(net: Any, x: Tensor, mask: Tensor) -> Any:
        seen = mask.clone()
        seen &= net.first(x)[:, 0] > 0
        return net.last(net.first(x).relu() if bool(seen.all()) else net.first(x))

    model = Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3))
    with pytest.raises(ModelError, match="reads a value out of a tensor"):
        find_symmetries(model, (torch.randn(3, 4), torch.ones(3).bool()))


def test_the_values_of_real_inputs_do_not_decide() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(net.first(x).relu() if bool((x > 0).any()) else net.first(x))

    model = Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3))
    with pytest.raises(ModelError, match="reads a value out of a tensor"):
        find_symmetries(model, torch.randn(3, 4))


# What the outputs do not depend on.


def test_what_is_computed_and_thrown_away_holds_nothing_and_is_not_counted() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = net.first(x).relu()
        net.head(net.neck(hidden).relu())
        hidden.tanh().mean()
        return net.last(hidden)

    parts = {"first": nn.Linear(4, 6), "neck": nn.Linear(6, 5), "head": nn.Linear(5, 2), "last": nn.Linear(6, 3)}
    group = find_symmetries(Net(forward, **parts), torch.randn(3, 4))
    assert group.scales == 6
    assert not group.obstacles
    moving = group.find_movable_entries()
    assert not any(moving[name].any() for name in moving if name.startswith(("neck", "head")))


def test_what_is_thrown_away_in_torch_may_come_back_from_outside() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = net.first(x)
        largest = np.asarray(hidden.tanh()).max()
        return net.last(hidden.relu() * float(largest))

    group = find_symmetries(Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)), torch.randn(3, 4))
    assert group.scales == 0
    assert [each.operation for each in group.obstacles] == ["aten.tanh"]


# The check.


def test_a_wrong_group_does_not_pass_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), example(7, 4)

    def wrong(model: nn.Module, example: Any, kind: str) -> Symmetries:
        group = find_symmetries(model, example)
        forms = group.forms.toarray()
        forms[-1] += 1.0  # the last unit depends on all scales
        return replace(group, forms=csr_array(forms))

    monkeypatch.setattr(rescaling, "find_symmetries", wrong)
    with pytest.raises(ModelError, match=r"Expected .*, but got outputs that differ by .*\. Try "):
        rescale(model, x)
    assert not torch.allclose(rescale(model, x, strict=False)(x), model(x))


def test_even_a_small_mistake_does_not_pass_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), example(7, 4)

    def almost(model: nn.Module, example: Any, kind: str) -> Symmetries:
        group = find_symmetries(model, example)
        forms = group.forms.toarray()
        forms[-1] *= 1 + 1e-7
        member = group.members["2.weight"]
        # One entry leads to a unit of nearly the right size.
        head = member.head.copy()
        rows = np.vstack([forms, forms[head[0, 0]] * (1 + 1e-7)])
        head[0, 0] = len(rows) - 1
        return replace(group, forms=csr_array(rows), members={**group.members, "2.weight": replace(member, head=head)})

    monkeypatch.setattr(rescaling, "find_symmetries", almost)
    with pytest.raises(ModelError, match="but got outputs that differ by"):
        rescale(model, x)


@pytest.mark.parametrize("kind", ["unit", "layer"])
@pytest.mark.parametrize(
    "outside",
    [
        lambda h: torch.from_numpy(2 * h.relu().detach().numpy()),
        lambda h: torch.tensor(h.relu().tolist(), dtype=torch.float64),
        lambda h: h.relu() * float(np.asarray(h.detach()).max()),
    ],
    ids=["numpy", "list", "number"],
)
def test_values_that_leave_torch_are_caught(outside: Callable[[Tensor], Tensor], kind: RescalingKind) -> None:
    torch.manual_seed(0)
    model = Net(lambda net, x: net.last(outside(net.first(x))), first=nn.Linear(4, 6), last=nn.Linear(6, 3)).double()
    with pytest.raises(ModelError, match="Try removing values that leave torch"):
        rescale(model, example(5, 4), kind=kind)


# Models that take another path for another input.


class Branching(nn.Module):
    def __init__(self, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.rule = nn.Linear(4, 6), nn.Linear(6, 3), rule

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.rule(self.first(x)))
        return out


def by_sign(h: Tensor) -> Tensor:
    if h.sum() > 0:
        return h * 2
    return h


def by_number(h: Tensor) -> Tensor:
    return h * h.max().item()


def by_count(h: Tensor) -> Tensor:
    for _ in range(int(h.abs().sum())):
        h = h * 2
    return h


def by_places(h: Tensor) -> Tensor:
    return h[(h[:, 0] > -9).nonzero()[:, 0]]


def by_selection(h: Tensor) -> Tensor:
    return h.masked_select(h > -9).view(-1, 6)


def by_uniqueness(h: Tensor) -> Tensor:
    return h + len(torch.unique(h))


def by_equality(h: Tensor) -> Tensor:
    return h if torch.equal(h, h.abs()) else h + 1


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (by_sign, "if h.sum() > 0:"),
        (by_number, "return h * h.max().item()"),
        (by_count, "for _ in range(int(h.abs().sum())):"),
        (by_places, "return h[(h[:, 0] > -9).nonzero()[:, 0]]"),
        (by_selection, "return h.masked_select(h > -9).view(-1, 6)"),
        (by_uniqueness, "return h + len(torch.unique(h))"),
        (by_equality, "return h if torch.equal(h, h.abs()) else h + 1"),
    ],
)
def test_a_path_that_depends_on_values_is_refused_by_its_line(rule: Callable[[Tensor], Tensor], line: str) -> None:
    number = next(
        start + offset
        for start, lines in [(rule.__code__.co_firstlineno, source_of(rule))]
        for offset, text in enumerate(lines)
        if text.strip() == line
    )
    with pytest.raises(ModelError) as refused:
        find_symmetries(Branching(rule), torch.randn(3, 4))
    said = str(refused.value)
    assert f"(test_rescale.py:{number}: {line})" in said
    assert said.startswith("Expected a forward pass that runs the same operations on every input, but got ")
    assert "Try using torch.where" in said


def source_of(function: Callable[..., Any]) -> list[str]:
    with open(function.__code__.co_filename, encoding="utf-8") as file:
        return file.read().splitlines()[function.__code__.co_firstlineno - 1 :]


def test_values_of_parameters_and_constants_may_decide() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        steps = int(torch.tensor([2, 3]).sum().item())
        hidden = net.first(x).relu() * steps
        return net.last(hidden if net.switch.item() > -1e9 else 2 * hidden)

    model = Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3), switch=nn.Parameter(torch.tensor(2.0)))
    group = find_symmetries(model, torch.randn(3, 4))
    assert group.scales == 6
    # What is looked at must stay.
    assert not group.find_movable_entries()["switch"].any()


# Anything else that is no model, no example or no option.


@pytest.mark.parametrize("model", [lambda x: x, nn.Linear, None, "net", {"weight": torch.ones(2)}])
def test_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(ModelError, match=r"Expected a torch\.nn\.Module, but got a model of type"):
        rescale(model, torch.randn(2, 4))


@pytest.mark.parametrize(
    "given",
    [
        torch.randn(3, 5).double(),
        torch.randn(3).double(),
        torch.randn(3, 4),  # float32
        torch.randint(3, (3, 4)),
        (torch.randn(3, 4).double(), torch.zeros(3)),
        {"inputs": torch.randn(3, 4).double()},
        {},
    ],
    ids=["shape", "axes", "precision", "integers", "two", "name", "none"],
)
def test_an_example_that_does_not_fit_is_refused(given: Any) -> None:
    with pytest.raises(
        ModelError, match="Expected an example that Sequential accepts, but got an error from the model on this example"
    ) as said:
        rescale(mlp(), given)
    assert "Try passing inputs of the right shape and dtype" in str(said.value)


@pytest.mark.parametrize("given", [None, 3.0, "text", np.zeros((3, 4)), (), [], object()])
def test_an_example_without_a_tensor_is_refused(given: Any) -> None:
    with pytest.raises(
        OptionError, match=r"Expected an input .*, but got an example of type .* without a tensor\. Try "
    ):
        find_symmetries(mlp(), given)


@pytest.mark.parametrize("kind", ["units", "", None, 1, True, ["unit"]])
def test_an_unknown_kind_is_refused(kind: Any) -> None:
    with pytest.raises(OptionError, match=r"Expected 'unit' or 'layer', but got kind="):
        rescale(mlp(), example(2, 4), kind=kind)


@pytest.mark.parametrize("spread", [float("nan"), float("inf"), -1, -1e-9, "2", None, True, [1.0], 1e6, 1j])
def test_a_spread_that_means_nothing_is_refused(spread: Any) -> None:
    with pytest.raises(OptionError, match=r"Expected spread to be a number from 0 to 100, but got "):
        rescale(mlp(), example(2, 4), spread=spread)


@pytest.mark.parametrize("seed", [float("nan"), 1.5, -1, "0", None, True, 2**70])
def test_a_seed_that_is_no_whole_number_is_refused(seed: Any) -> None:
    with pytest.raises(OptionError, match=r"but got seed="):
        rescale(mlp(), example(2, 4), seed=seed)


@pytest.mark.parametrize("logs", [np.zeros(3), np.zeros((11, 1)), 0.0])
def test_logarithms_of_another_number_of_scales_are_refused(logs: Any) -> None:
    model, x = mlp(), example(2, 4)
    with pytest.raises(OptionError, match=r"Expected one logarithm for each of 11 scales"):
        apply_rescaling(model, find_symmetries(model, x), logs)


def test_a_model_without_parameters_has_nothing_to_move() -> None:
    model, x = nn.Sequential(nn.Flatten(), nn.ReLU()), torch.randn(2, 4)
    group = find_symmetries(model, x)
    assert group.scales == 0
    assert not group.members
    assert torch.equal(rescale(model, x)(x), model(x))


def test_a_model_of_which_nothing_can_move_comes_back_equal() -> None:
    case = NETWORKS["no_symmetry"]()
    inputs = inputs_of(case.batches[0])
    assert find_symmetries(case.model, inputs).scales == 0
    other = rescale(case.model, inputs)
    assert other is not case.model
    assert same_state(state_of(other), state_of(case.model))


def test_frozen_models_have_their_rescalings_too() -> None:
    model = mlp().requires_grad_(False)
    assert find_symmetries(model, example(2, 4)).scales == 11
    assert not any(value.requires_grad for value in rescale(model, example(2, 4)).parameters())


class Uncopied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("an open file")


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = Uncopied()
    with pytest.raises(ModelError, match=r"but got one that cannot be copied \(TypeError: an open file\)"):
        rescale(model, torch.randn(2, 4))
    assert find_symmetries(model, torch.randn(2, 4)).scales == 0


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.jit.script])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_wrapped_models_are_refused(wrap: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ModelError, match=r"Try passing "):
        rescale(wrap(nn.Linear(4, 3)), torch.randn(2, 4))


def test_complex_parameters_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64), nn.Linear(3, 2, dtype=torch.complex64))
    group = find_symmetries(model, torch.randn(2, 4, dtype=torch.complex64))
    assert group.scales == 0
    assert not group.members


class Noisy(nn.Module):
    """Sums two layers behind random numbers, which are others in every pass."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.noise = noise
        self.one, self.two, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last((self.noise(self.one(x)) + self.two(x)).relu())
        return out


@pytest.mark.parametrize(
    ("noise", "scales"),
    [
        (lambda h: F.dropout(h, 0.9, training=True), 4),
        (lambda h: h * torch.bernoulli(torch.full_like(h, 0.1)), 4),
        (lambda h: h * (torch.rand(len(h), 1) < 0.1), 4),
        (lambda h: h[:, torch.randperm(4)], 1),
        (lambda h: h + torch.zeros_like(h).normal_(), 0),
    ],
)
def test_random_numbers_are_no_constants(noise: Callable[[Tensor], Tensor], scales: int) -> None:
    torch.manual_seed(1)
    model = Noisy(noise).double()
    assert find_symmetries(model, example(1, 3)).scales == scales
    other = rescale(model, example(3, 3))
    x = example(8, 3)
    torch.manual_seed(3)
    before = model(x)
    torch.manual_seed(3)
    assert_close(other(x), before)


def test_shorter_numbers_on_the_way_are_no_mistake() -> None:
    forward = lambda net, x: net.last(net.first(x).relu().float().double())  # noqa: E731
    model = Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)).double()
    x = example(5, 4)
    assert_close(rescale(model, x)(x), model(x), rtol=1e-5, atol=1e-6)


def test_forward_mode_derivatives_inside_of_a_model_are_followed_or_refused() -> None:
    forward = lambda net, x: torch.func.jvp(net.last, (net.first(x).relu(),), (torch.ones(5, 6).double(),))[1]  # noqa: E731
    model = Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)).double()
    with contextlib.suppress(ModelError):
        assert find_symmetries(model, example(5, 4)).scales in (0, 6)


def test_an_example_without_numbers_is_refused() -> None:
    with pytest.raises(OptionError, match="got an empty example"):
        find_symmetries(mlp(), torch.randn(0, 4))


def test_rescalings_of_another_model_are_refused() -> None:
    group = find_symmetries(mlp(), example(2, 4))
    with pytest.raises(OptionError, match="which the model does not have"):
        apply_rescaling(nn.Linear(3, 2), group, np.zeros(group.scales))
    with pytest.raises(OptionError, match="Expected finite logarithms"):
        group.compute_factor_logs(np.full(group.scales, np.nan))


def test_factors_beyond_all_numbers_are_told() -> None:
    model, x = mlp(), example(3, 4)
    group = find_symmetries(model, x)
    with pytest.raises(ModelError, match="Try lowering spread"), np.errstate(over="ignore"):
        rescaling.check_same_function(model, group, np.full(group.scales, 1000.0), x)


class Remembering(nn.Module):
    """Gives what attention has seen besides the logits, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).relu()
        return {"logits": self.last(hidden), "cache": hidden}


def test_outputs_beside_the_first_are_named_as_obstacles_and_the_loss_does_not_see_them() -> None:
    model, x = Remembering().double(), example(8, 4)
    group = find_symmetries(model, x)
    assert group.scales == 0
    assert [(each.operation, each.pinned) for each in group.obstacles] == [("output 2", 6)]
    data = [({"x": x}, torch.arange(8) % 3)]
    reading = measure(model, data, measures="minimum_unit_sharpness", certificate=False)
    assert reading["minimum_unit_sharpness"].details["independent_scales"] == 6
    found = audit_invariance(model, data, measures=["minimum_unit_sharpness", "hessian_trace"], draws=2)
    assert found.scales == {"layer": 1, "unit": 6}
    assert found.holds
    assert not any(found.failed.values())


def test_a_model_without_values_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to("meta")
    with pytest.raises(SaltflatError):
        rescale(model, torch.randn(2, 4))


def test_a_model_and_an_example_without_values_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to("meta")
    with pytest.raises(SaltflatError):
        rescale(model, torch.randn(2, 4, device="meta"))


def test_outputs_in_an_object_are_looked_for() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        return SimpleNamespace(scores=net.last(net.first(x).relu()), others=SimpleNamespace(number=3))

    model = Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)).double()
    group = find_symmetries(model, example(2, 4))
    assert group.scales == 6
    assert not group.find_movable_entries()["last.bias"].any()
    x = example(5, 4)
    assert_close(rescale(model, x)(x).scores, model(x).scores)


@pytest.mark.parametrize("wrap", [lambda y: None, lambda y: float(3)])
def test_outputs_that_cannot_be_seen_are_refused(wrap: Callable[[Tensor], Any]) -> None:
    model = Net(lambda net, x: wrap(net.last(net.first(x).relu())), first=nn.Linear(4, 6), last=nn.Linear(6, 3))
    with pytest.raises(ModelError):
        rescale(model, torch.randn(2, 4))


def test_outputs_that_carry_logits_are_compared() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        return SimpleNamespace(logits=net.last(torch.from_numpy(net.first(x).detach().numpy())))

    model = Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)).double()
    with pytest.raises(ModelError, match="but got outputs that differ by"):
        rescale(model, example(2, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_inside_are_refused_or_looked_into() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)).double()
    with contextlib.suppress(ModelError):
        assert find_symmetries(model, example(2, 4)).scales in (0, 6)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("computed", [lambda m: prune.l1_unstructured(m, "weight", 5), torch.nn.utils.weight_norm])
def test_weights_that_hooks_compute_are_no_obstacle(computed: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    computed(model[0])
    x = example(5, 4)
    assert_close(rescale(model, x)(x), model(x), rtol=1e-9, atol=1e-12)


def test_a_model_that_insists_on_single_precision_is_rescaled_or_refused() -> None:
    forward = lambda net, x: net.last(net.first(x).relu().float())  # noqa: E731
    model = Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3))
    x = torch.randn(5, 4)
    with contextlib.suppress(ModelError):
        assert_close(rescale(model, x)(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("measured", [None, ["0"], ["0.weight", "4.weight"]])
def test_an_audit_leaves_alone_what_is_frozen_or_not_measured(measured: list[str] | None) -> None:
    model: Any = mlp()
    if measured is None:
        model[0].requires_grad_(False)
    names = ["minimum_sharpness", "minimum_unit_sharpness", "rho", "hessian_trace"]
    data = example(8, 4), torch.arange(8) % 3
    found = audit_invariance(model, data, measures=names, draws=3, layers=measured)
    assert found.holds
    assert not any(found.failed.values())
