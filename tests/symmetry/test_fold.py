"""Folding: the same function without BatchNorm, whatever is around it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import NETWORKS
from cases import CASES, Net, reals, shaken, with_history
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations, prune

import saltflat
from saltflat.errors import DataError, ModelError, OptionError, SaltflatError
from saltflat.layers.normalization import Affine
from saltflat.symmetry.equality import Example
from saltflat.symmetry.fold import FoldedBatchNorm, fold


class Model(Net):
    """Of one input, said by name: torch.fx can follow it."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.rule(self, x)


def ready(model: nn.Module, *shape: int) -> nn.Module:
    """With weights, means and variances that are nothing special, in float64 and in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return shaken(with_history(model, 8, *shape)).eval()


def norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def affines(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Affine)]


def assert_same(one: nn.Module, two: nn.Module, *inputs: Any) -> None:
    """The same outputs in eval mode, relative to the largest of them."""
    with torch.no_grad():
        first, second = (model.eval()(*[x.clone() for x in inputs]) for model in (one, two))
    torch.testing.assert_close(second, first, rtol=0, atol=1e-12 * max(float(first.abs().max()), 1e-3))


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {}


def architecture(*shape: int, left: str = "") -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Enter a builder with the shape of one input and the BatchNorms that no layer can take up."""

    def enter(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ARCHITECTURES[build.__name__] = build, shape, left.split()
        return build

    return enter


@architecture(2, 6, 6)
def vgg() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True))),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
    )


@architecture(2, 4, 4)
def residual_with_a_convolution_in_the_shortcut() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        x = F.relu(net.norm0(net.stem(x)), inplace=True)
        branch = net.norm2(net.conv2(F.relu(net.norm1(net.conv1(x)))))
        branch += net.shortcut(x)
        return net.head(F.relu(branch).mean((2, 3)))

    return Model(
        rule,
        stem=nn.Conv2d(2, 3, 3, padding=1, bias=False),
        norm0=nn.BatchNorm2d(3),
        conv1=nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        norm1=nn.BatchNorm2d(4),
        conv2=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        norm2=nn.BatchNorm2d(4),
        shortcut=nn.Sequential(nn.Conv2d(3, 4, 1, stride=2, bias=False), nn.BatchNorm2d(4)),
        head=nn.Linear(4, 3),
    )


@architecture(2, 4, 4)
def residual_with_a_padded_shortcut() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        x = net.relu(net.norm0(net.stem(x)))
        branch = net.norm1(net.conv1(x))
        return net.relu(branch + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))).flatten(1)

    return Model(
        rule,
        stem=nn.Conv2d(2, 3, 3, padding=1),
        norm0=nn.BatchNorm2d(3),
        conv1=nn.Conv2d(3, 5, 3, stride=2, padding=1),
        norm1=nn.BatchNorm2d(5),
        relu=nn.ReLU(inplace=True),
    )


@architecture(2, 4, 4, left="norm0 norm2 last")
def pre_activation() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        x = net.stem(x)
        x = x + net.conv1(F.relu(net.norm1(net.conv0(F.relu(net.norm0(x), inplace=True)))))
        x = x + net.conv2(F.relu(net.norm2(x), inplace=True))
        return F.relu(net.last(x)).flatten(1)

    convolutions = {f"conv{n}": nn.Conv2d(3, 3, 3, padding=1, bias=False) for n in range(3)}
    kinds = {name: nn.BatchNorm2d(3) for name in ("norm0", "norm1", "norm2", "last")}
    return Model(rule, stem=nn.Conv2d(2, 3, 3, padding=1), **convolutions, **kinds)


@architecture(2, 4, 4, left="norm1 norm2")
def densely_connected() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        features = [net.norm0(net.stem(x))]
        features.append(net.conv1(F.relu(net.norm1(torch.cat(features, 1)))))
        return F.relu(net.norm2(torch.cat(features, 1))).flatten(1)

    return Model(
        rule,
        stem=nn.Conv2d(2, 3, 1),
        norm0=nn.BatchNorm2d(3),
        norm1=nn.BatchNorm2d(3),
        conv1=nn.Conv2d(3, 2, 3, padding=1),
        norm2=nn.BatchNorm2d(5),
    )


@architecture(4, 5, 5)
def grouped_and_depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU6(inplace=True),
        nn.Conv2d(6, 12, 3, groups=6, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(12, eps=0.1),
    )


@architecture(3, 5)
def transposed_in_one_dimension() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose1d(3, 4, 2, stride=2), nn.BatchNorm1d(4), nn.ReLU(), nn.ConvTranspose1d(4, 2, 2)
    )


@architecture(4, 3, 3)
def transposed_in_groups() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 6, 2, groups=6),
        nn.BatchNorm2d(6),
        nn.ConvTranspose2d(6, 9, 2, groups=3),
        nn.BatchNorm2d(9),
    )


@architecture(2, 3, 3, 3)
def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 3, 2, bias=False), nn.BatchNorm3d(3), nn.ReLU(), nn.ConvTranspose3d(3, 2, 2), nn.BatchNorm3d(2)
    )


@architecture(4)
def linear() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh()
    )


@architecture(3, left="0")
def norm_first() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.ReLU())


@architecture(3, 4, left="2")
def two_norms_in_a_row() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))


@architecture(3, left="5")
def norms_without_parameters() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4, bias=False),
        nn.BatchNorm1d(4, affine=False),
        nn.ReLU(),
        nn.Linear(4, 3),
        nn.ReLU(),
        nn.BatchNorm1d(3, affine=False),
    )


@architecture(2, 4, left="norm")
def result_used_twice() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        y = net.layer(x)
        return F.relu(net.norm(y)) + y

    return Model(rule, layer=nn.Conv1d(2, 3, 2), norm=nn.BatchNorm1d(3))


@architecture(2, 4, left="norm other")
def result_normalized_twice() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        y = net.layer(x)
        return net.norm(y).relu() + net.other(y).tanh()

    return Model(rule, layer=nn.Conv1d(2, 3, 2), norm=nn.BatchNorm1d(3), other=nn.BatchNorm1d(3))


@architecture(2, 4, left="norm")
def view_of_the_result_used_later() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        y = net.layer(x)
        part = y[:, 1:]
        return net.norm(y).relu()[:, 1:] + part

    return Model(rule, layer=nn.Conv1d(2, 3, 2), norm=nn.BatchNorm1d(3))


@architecture(2, 4, left="norm")
def result_changed_in_place() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        y = net.layer(x)
        y.add_(1.0)
        return net.norm(y).relu()

    return Model(rule, layer=nn.Conv1d(2, 3, 2), norm=nn.BatchNorm1d(3))


@architecture(2, 4, left="norm")
def norm_called_twice() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        return net.norm(net.second(F.relu(net.norm(net.first(x)))))

    return Model(rule, first=nn.Conv1d(2, 3, 1), second=nn.Conv1d(3, 3, 1), norm=nn.BatchNorm1d(3))


@architecture(2, 4, left="norm other")
def layer_called_twice() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        return net.other(net.layer(F.relu(net.norm(net.layer(x)))))

    return Model(rule, layer=nn.Conv1d(2, 2, 1), norm=nn.BatchNorm1d(2), other=nn.BatchNorm1d(2))


@architecture(2, 4, left="norm")
def layer_called_twice_and_normalized_once() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        return net.layer(F.relu(net.norm(net.layer(x))))

    return Model(rule, layer=nn.Conv1d(2, 2, 1), norm=nn.BatchNorm1d(2))


@architecture(3)
def one_norm_under_two_names() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    model = Model(lambda net, x: net.again(net.layer(x)).relu(), norm=norm, layer=nn.Linear(3, 4), again=norm)
    model.also = nn.ModuleList([model.get_submodule("layer"), norm])
    return model


@architecture(3)
def norm_held_in_a_plain_list() -> nn.Module:
    model = Model(lambda net, x: net.steps[1](net.steps[0](x)), layer=nn.Linear(3, 4), norm=nn.BatchNorm1d(4))
    vars(model)["steps"] = [model.get_submodule("layer"), model.get_submodule("norm")]
    return model


@architecture(3)
def norm_behind_an_identity_and_a_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Dropout(), nn.BatchNorm1d(4), nn.ReLU())


@architecture(2, 5)
def synchronised_norm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.SyncBatchNorm(3), nn.ReLU())


@architecture(3, left="norm")
def tied_layers() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return Model(lambda net, x: net.b(F.relu(net.norm(net.a(x)))), a=first, b=second, norm=nn.BatchNorm1d(3))


@architecture(3, left="norm")
def weight_read_by_other_code() -> nn.Module:
    def rule(net: Any, x: Tensor) -> Any:
        return F.linear(F.relu(net.norm(net.layer(x))), net.layer.weight)

    return Model(rule, layer=nn.Linear(3, 3), norm=nn.BatchNorm1d(3))


@architecture(3, left="1 4 7")
def layers_with_computed_weights() -> nn.Module:
    last = nn.Linear(4, 3)
    prune.l1_unstructured(last, "weight", amount=0.5)
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        last,
        nn.BatchNorm1d(3),
    )


class Doubled(nn.Conv1d):
    def _conv_forward(self, *args: Any) -> Tensor:
        result: Tensor = 2 * super()._conv_forward(*args)
        return result


@architecture(2, 4, left="1")
def layer_with_a_forward_of_its_own() -> nn.Module:
    return nn.Sequential(Doubled(2, 3, 2), nn.BatchNorm1d(3), nn.ReLU())


class Named(nn.BatchNorm1d):
    """A subclass that changes nothing."""


@architecture(2, 4)
def norm_of_a_class_of_its_own() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 2), Named(3), nn.ReLU())


def built(name: str) -> tuple[nn.Module, Tensor, list[str]]:
    build, shape, left = ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return ready(build(), *shape), 2 * reals(5, *shape), left


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("shown", [False, True], ids=["traced", "observed"])
def test_a_folded_network_is_the_same_function(name: str, shown: bool) -> None:
    model, x, left = built(name)
    folded = fold(model, x) if shown else fold(model)
    assert type(folded) is type(model)
    assert not norms(folded)
    assert affines(folded) == left
    assert_same(model, folded, 3 * torch.randn_like(x))


@pytest.mark.parametrize("name", [name for name in NETWORKS if norms(NETWORKS[name]().model)])
@pytest.mark.parametrize("shown", [False, True], ids=["traced", "observed"])
def test_networks_as_people_write_them_are_folded(name: str, shown: bool) -> None:
    case = NETWORKS[name]()
    x: Any = case.batches[0][0]  # type: ignore[index]
    if not shown and not _is_traceable(case.model):
        with pytest.raises(ModelError, match=r"that torch\.fx can trace, but got .*Try passing an example input"):
            fold(case.model)
        return
    folded = fold(case.model, x) if shown else fold(case.model)
    assert not norms(folded)
    assert_same(case.model, folded, 3 * torch.randn_like(x))


def _is_traceable(model: nn.Module) -> bool:
    """Whether this version of torch can trace the model: 2.6 cannot where a window depends on the size of its input."""
    try:
        torch.fx.symbolic_trace(model)
    except TypeError:
        return False
    return True


@pytest.mark.skipif(torch.__version__ < "2.11", reason="older versions may not trace every network")
@pytest.mark.parametrize("name", [name for name in NETWORKS if norms(NETWORKS[name]().model)])
def test_every_network_is_traceable(name: str) -> None:
    assert _is_traceable(NETWORKS[name]().model)


@pytest.mark.parametrize("name", [name for name in CASES if not norms(CASES[name]().model)])
def test_a_network_without_batch_norm_comes_back_as_an_equal_copy(name: str) -> None:
    model = CASES[name]().model
    folded = fold(model)
    assert folded is not model
    assert_equal_states(folded, model)
    assert not {id(p) for p in folded.parameters()} & {id(p) for p in model.parameters()}


def assert_equal_states(one: nn.Module, two: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)
    assert [m.training for m in one.modules()] == [m.training for m in two.modules()]


def test_the_factor_and_shift_are_those_of_the_definition() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, eps=1.0), nn.ReLU(), nn.BatchNorm1d(1, eps=2.0)).double()
    values = {
        "0.weight": [[5.0]], "0.bias": [2.0],
        "1.weight": [6.0], "1.bias": [7.0], "1.running_mean": [4.0], "1.running_var": [8.0],
        "3.weight": [2.0], "3.bias": [1.0], "3.running_mean": [5.0], "3.running_var": [14.0],
    }  # fmt: skip
    model.load_state_dict({name: torch.tensor(value) for name, value in values.items()}, strict=False)
    found = {name: value.tolist() for name, value in fold(model).state_dict().items()}
    # 6 (5 x + 2 - 4) / sqrt(8 + 1) + 7 = 10 x + 3 and 2 (x - 5) / sqrt(14 + 2) + 1 = x / 2 - 3 / 2
    assert found == {
        "0.weight": [[pytest.approx(10.0)]],
        "0.bias": [pytest.approx(3.0)],
        "3.weight": [pytest.approx(0.5)],
        "3.bias": [pytest.approx(-1.5)],
    }


def test_a_batch_norm_by_itself_is_a_factor_and_a_shift() -> None:
    model = ready(nn.BatchNorm1d(3), 3)
    folded = fold(model)
    assert isinstance(folded, Affine)
    for shape in [(4, 3), (4, 3, 5)]:
        assert_same(model, folded, reals(*shape))


@pytest.mark.parametrize("shown", [False, True], ids=["traced", "observed"])
def test_the_users_model_is_left_bit_for_bit_as_it_was(shown: bool) -> None:
    model, x, _ = built("pre_activation")
    model.train()
    model.get_submodule("norm1").eval()
    model.get_submodule("conv1").register_forward_hook(lambda *_: None)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.get_parameter("norm0.bias").requires_grad_(False)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [
        (m, dict(vars(m)), [dict(v) for v in vars(m).values() if isinstance(v, dict)]) for m in model.modules()
    ]
    identities = [id(value) for value in [*model.parameters(), *model.buffers()]]
    flags = [p.requires_grad for p in model.parameters()]
    random, given = torch.get_rng_state(), x.clone()
    fold(model, x) if shown else fold(model)
    torch.testing.assert_close(model.state_dict(), kept, rtol=0, atol=0)
    assert identities == [id(value) for value in [*model.parameters(), *model.buffers()]]
    assert flags == [p.requires_grad for p in model.parameters()]
    assert all(p.grad is not None and p.grad.eq(1).all() for p in model.parameters())
    for module, before, inner in attributes:
        assert vars(module).keys() == before.keys()
        assert all(vars(module)[key] is value for key, value in before.items())
        assert [dict(v) for v in vars(module).values() if isinstance(v, dict)] == inner
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(given, x)


def test_the_folded_network_shares_no_memory_with_the_users() -> None:
    model, _, _ = built("vgg")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folded = fold(model)
    with torch.no_grad():
        for value in [*folded.parameters(), *folded.buffers()]:
            value.fill_(9)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("shown", [False, True], ids=["traced", "observed"])
def test_modes_are_kept_and_a_model_in_train_mode_is_folded_as_in_eval_mode(shown: bool) -> None:
    model, x, _ = built("vgg")
    expected = fold(model)
    model.train()
    model[0].eval()  # type: ignore[index]
    modes = [module.training for module in model.modules()]
    folded = fold(model, x) if shown else fold(model)
    assert modes == [module.training for module in model.modules()]
    assert modes == [module.training for module in folded.modules()]
    torch.testing.assert_close(folded.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_what_requires_a_gradient_still_does_and_nothing_new_does() -> None:
    model = nn.Sequential(
        nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3),
        nn.Linear(3, 3).requires_grad_(False), nn.BatchNorm1d(3),
        nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3).requires_grad_(False),
        nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3, affine=False),
        nn.ReLU(), nn.BatchNorm1d(3),
        nn.ReLU(), nn.BatchNorm1d(3, affine=False),
    )  # fmt: skip
    model[9].weight.requires_grad_(False)
    found = {name: p.requires_grad for name, p in fold(model).named_parameters()}
    assert found == {
        "0.weight": True, "0.bias": True,
        "2.weight": False, "2.bias": False,
        "4.weight": True, "4.bias": False,
        "6.weight": True, "6.bias": False,
        "9.weight": False, "9.bias": True,
        "11.weight": False, "11.bias": False,
    }  # fmt: skip
    assert all(p.is_leaf for p in fold(model).parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shown", [False, True], ids=["traced", "observed"])
def test_the_precision_of_the_model_stays(dtype: torch.dtype, shown: bool) -> None:
    model, x, _ = built("pre_activation")
    exact = fold(model)
    model = model.to(dtype)
    folded = fold(model, x.to(dtype)) if shown else fold(model)
    assert {p.dtype for p in folded.parameters()} == {dtype}
    assert folded(x.to(dtype)).dtype is dtype
    tolerance = 4 * torch.finfo(dtype).eps  # of weights, factors, means and variances, all rounded to this precision
    for one, two in zip(folded.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(
            one.double(), two, rtol=0, atol=tolerance * max(10.0, float(two.detach().abs().max()))
        )


def test_a_network_of_mixed_precision_gives_what_it_gave() -> None:
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 2).bfloat16())
    x = torch.randn(4, 3).bfloat16()
    model.train()(x)
    assert model[1].running_mean.dtype is torch.float32
    folded = fold(model.eval(), x)
    torch.testing.assert_close(folded(x), model(x), rtol=0.02, atol=0.02)
    assert folded(x).dtype is torch.bfloat16


# Dimensions.


def sequences() -> nn.Module:
    """Channels of the BatchNorm are positions, of which there are as many as units."""
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU())


def test_a_linear_layer_on_sequences_does_not_take_up_a_norm_of_positions() -> None:
    model, x = ready(sequences(), 3, 4), reals(5, 3, 4)
    folded = fold(model, x)
    assert affines(folded) == ["1"]
    assert_same(model, folded, reals(6, 3, 4))
    assert_same(model, folded, reals(6, 4))


def test_a_norm_folded_for_vectors_refuses_sequences() -> None:
    model = ready(sequences(), 3, 4)
    for folded in (fold(model), fold(model, reals(5, 4))):
        assert isinstance(folded.get_submodule("1"), FoldedBatchNorm)
        assert_same(model, folded, reals(6, 4))
        with pytest.raises(DataError, match=r"Expected an input of 2 dimensions.* but got 3 .*fold\(model, example\)"):
            folded(reals(6, 3, 4))


def test_a_convolution_without_an_axis_of_examples_does_not_take_up_a_norm_of_positions() -> None:
    model, x = ready(nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3)), 2, 4), reals(2, 4)
    folded = fold(model, x)
    assert affines(folded) == ["1"]
    assert_same(model, folded, reals(2, 4))
    with pytest.raises(DataError, match="but got 2 dimensions"):
        fold(model)(x)


# Models whose code does more than call its layers.


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1000:
            return x
        out: Tensor = self.norm(self.layer(x))
        return out


def test_a_model_that_cannot_be_traced_is_folded_with_an_example_and_refused_without() -> None:
    model, x = ready(Branching(), 3), reals(5, 3)
    with pytest.raises(ModelError) as caught:
        fold(model)
    message = str(caught.value)
    assert "test_fold.py:" in message
    assert "if x.sum() > 1000:" in message
    assert "Try passing an example input: fold(model, example)" in message
    folded = fold(model, x)
    assert not affines(folded)
    assert_same(model, folded, reals(5, 3))


def test_inputs_may_be_positional_or_named() -> None:
    model = Net(lambda net, a, b: net.norm(net.layer(a)) * b, layer=nn.Linear(3, 4), norm=nn.BatchNorm1d(4))
    model.double().eval()
    a, b = reals(5, 3), reals(5, 1)
    examples: list[Example] = [(a, b), [a, b], {"a": a, "b": b}]
    for example in examples:
        folded = fold(model, example)
        assert not affines(folded)
        assert_same(model, folded, a, b)


def test_a_custom_activation_that_cannot_be_traced_is_one_step() -> None:
    def branching(net: Any, x: Tensor) -> Any:
        return x if bool(x.sum() > 0) else x.relu()

    model = ready(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Net(branching), nn.Linear(4, 2)), 3)
    folded = fold(model)
    assert not affines(folded)
    assert_same(model, folded, reals(5, 3))


def test_a_layer_inside_of_vmap_and_sparse_inputs_are_no_obstacle() -> None:
    def rule(net: Any, x: Tensor) -> Any:
        y = net.first(torch.func.vmap(net.layer)(x)).relu()
        return net.second(net.head(torch.sparse.mm(torch.eye(len(y), dtype=y.dtype).to_sparse(), y)))

    parts = {"layer": nn.Linear(3, 4), "first": nn.BatchNorm1d(4), "head": nn.Linear(4, 2), "second": nn.BatchNorm1d(2)}
    model, x = ready(Model(rule, **parts), 3), reals(5, 3)
    folded = fold(model, x)
    assert affines(folded) == ["first"]
    assert_same(model, folded, reals(5, 3))


@pytest.mark.parametrize("keep", ["attribute", "object", "tuple"])
def test_a_result_that_is_kept_for_later_stays_what_it_was(keep: str) -> None:
    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    def rule(net: Any, x: Tensor) -> Any:
        y = net.layer(x)
        if keep == "attribute":
            net.kept = y
        out = net.norm(y)
        return {"attribute": out, "object": (out, Box(y)), "tuple": (out, y)}[keep]

    model, x = Model(rule, layer=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)).eval(), torch.randn(5, 3)
    assert affines(fold(model, x)) == ["norm"]


def test_a_norm_whose_numbers_other_code_reads_stays() -> None:
    def rule(net: Any, x: Tensor) -> Any:
        y = net.first(net.layer(x)).relu() * net.first.weight
        return net.second(y) + net.second.running_mean

    parts = {"layer": nn.Linear(3, 4), "first": nn.BatchNorm1d(4), "second": nn.BatchNorm1d(4)}
    model, x = ready(Model(rule, **parts), 3), reals(5, 3)
    for folded in (fold(model), fold(model, x)):
        assert norms(folded) == ["first", "second"]
        assert_same(model, folded, x)


@pytest.mark.parametrize("shown", [False, True], ids=["traced", "observed"])
def test_code_that_asks_for_the_type_of_a_norm_is_refused(shown: bool) -> None:
    def rule(net: Any, x: Tensor) -> Any:
        y = net.norm(net.layer(x))
        return y.relu() if isinstance(net.norm, nn.BatchNorm1d) else y

    model, x = ready(Model(rule, layer=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)), 3), reals(9, 3)
    with pytest.raises(ModelError, match=r"Expected code that only calls .*, but got a Model .*\. Try "):
        fold(model, x) if shown else fold(model)


def test_a_norm_without_running_statistics_stays() -> None:
    steps = nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3), nn.BatchNorm1d(3)
    model, x = ready(nn.Sequential(*steps), 3), reals(5, 3)
    for folded in (fold(model), fold(model, x)):
        assert norms(folded) == ["1"]
        assert_same(model, folded, reals(5, 3))


def test_a_norm_with_a_forward_of_its_own_stays() -> None:
    class Shifted(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    model, x = ready(nn.Sequential(nn.Linear(3, 4), Shifted(4)), 3), reals(5, 3)
    folded = fold(model, x)
    assert norms(folded) == ["1"]
    assert_same(model, folded, x)


def test_a_norm_that_the_example_does_not_reach_is_replaced_all_the_same() -> None:
    model = ready(Model(lambda net, x: net.norm(net.layer(x)), layer=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)), 3)
    model.spare = nn.BatchNorm1d(2)
    for folded in (fold(model), fold(model, reals(5, 3))):
        assert affines(folded) == ["spare"]


@pytest.mark.parametrize("where", ["layer", "norm"])
@pytest.mark.parametrize("shown", [False, True], ids=["traced", "observed"])
def test_hooks_see_what_they_saw_and_go_with_the_copy(where: str, shown: bool) -> None:
    model, x = (
        ready(Model(lambda net, x: net.norm(net.layer(x)), layer=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)), 3),
        reals(5, 3),
    )
    model.get_submodule(where).register_forward_hook(lambda module, args, y: 2 * y + args[0].sum())
    folded = fold(model, x) if shown else fold(model)
    assert affines(folded) == ["norm"]
    assert_same(model, folded, reals(5, 3))


def test_a_model_that_works_in_short_numbers_for_a_while_is_folded() -> None:
    def rule(net: Any, x: Tensor) -> Any:
        return net.head(net.norm(net.layer(x)).float().relu().to(x.dtype))

    model = Model(rule, layer=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), head=nn.Linear(4, 2))
    assert not affines(fold(ready(model, 3), reals(5, 3)))


def test_a_model_that_insists_on_its_precision_is_folded_in_it() -> None:
    def rule(net: Any, x: Tensor) -> Any:
        return net.norm(net.layer(x.float()))

    model = Model(rule, layer=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)).eval()
    folded = fold(model, torch.randn(5, 3))
    assert not affines(folded)


def test_a_model_that_draws_random_numbers_is_folded() -> None:
    def rule(net: Any, x: Tensor) -> Any:
        return F.dropout(net.norm(net.layer(x)), 0.5, training=True)

    assert not affines(fold(ready(Model(rule, layer=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)), 3), reals(5, 3)))


def test_a_folded_network_can_be_traced_folded_saved_and_loaded() -> None:
    model, x, _ = built("vgg")
    mixed = nn.Sequential(model, nn.ReLU(), ready(nn.BatchNorm1d(3), 3))
    folded = fold(mixed)
    assert {type(module) for module in folded.modules()} >= {Affine, FoldedBatchNorm, nn.Identity}
    assert_same(folded, torch.fx.symbolic_trace(folded), x)
    assert_equal_states(fold(folded), folded)
    other = fold(mixed)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(folded.state_dict())
    assert_same(folded, other, x)


def test_a_folded_network_is_measured_like_the_definition_says() -> None:
    model, x, _ = built("pre_activation")
    folded = nn.Sequential(fold(model), nn.Linear(48, 2).double())
    y = torch.tensor([0, 1, 1, 0, 1])
    found = saltflat.compute_statistics(folded, (x, y), names="curvature_trace")["curvature_trace"]
    p = F.softmax(folded(x), 1)[:, 1].detach()
    for name in ("0.norm2.weight", "0.norm2.bias", "0.conv1.weight"):
        parameter = folded.get_parameter(name)
        trace = torch.zeros((), dtype=torch.float64)
        # Two classes: the output curvature is p (1 - p) along the difference of the logits.
        for n in range(5):
            logits = folded(x[n : n + 1])[0]
            (slope,) = torch.autograd.grad(logits[1] - logits[0], parameter)
            trace += p[n] * (1 - p[n]) * slope.square().sum() / 5
        torch.testing.assert_close(found[name].reshape(()), trace)


# Bad input.


def assert_refused(kind: type[SaltflatError], *words: str, model: Any, example: Any = None) -> None:
    with pytest.raises(kind) as caught:
        fold(model, example)
    assert all(word in str(caught.value) for word in ("Expected ", ", but got ", " Try ", *words)), str(caught.value)


def test_something_that_is_no_module_is_refused() -> None:
    assert_refused(ModelError, "function", model=lambda x: x)


def test_an_example_of_the_wrong_shape_is_refused() -> None:
    model, x, _ = built("vgg")
    assert_refused(DataError, "Sequential", "right shape", model=model, example=x[:, :1])
    assert_refused(DataError, "right shape", model=model, example=(x, x))
    assert_refused(OptionError, "without a tensor", model=model, example="x")


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model, x, _ = built("vgg")
    model.lock = threading.Lock()  # type: ignore[assignment]
    assert_refused(ModelError, "cannot be copied", "lock", model=model)
    assert_refused(ModelError, "cannot be copied", "lock", model=model, example=x)


def test_a_lazy_or_wrapped_model_is_refused() -> None:
    assert_refused(ModelError, "without a shape", model=nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()))
    assert_refused(ModelError, "model.module", model=nn.DataParallel(built("linear")[0]))
