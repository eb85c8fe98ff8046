"""The definition itself: a single example's gradient by autograd, compared with other ways to the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Net, integers, reals, shaken
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat import errors

NAMES = ["curvature_diagonal", "gradient_second_moment"]


def assert_same(one: nn.Module, two: nn.Module, data: Any, **options: Any) -> None:
    """Two spellings of one function, with the same parameters, have the same statistics."""
    two.load_state_dict(one.state_dict())
    here, there = (saltflat.compute_statistics(each, data, names=NAMES, **options) for each in (one, two))
    for name in NAMES:
        torch.testing.assert_close(dict(here[name]), dict(there[name]), rtol=1e-10, atol=1e-14)


class Normalized(nn.Module):
    """A convolution, statistics that are fixed, and a gradient whose memory lies in another order."""

    def __init__(self, channels: int, spelling: str) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, channels, 2), nn.BatchNorm2d(channels)
        self.head = nn.Linear(4 * channels, 3)
        self.spelling = spelling
        self.norm.running_mean = torch.randn(channels)
        self.norm.running_var = torch.rand(channels) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        x, norm = self.conv(x.transpose(2, 3)), self.norm
        mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        if self.spelling == "module":
            x = norm(x)
        elif self.spelling == "function":
            x = F.batch_norm(x, mean, variance, norm.weight, norm.bias, eps=norm.eps)
        else:
            mean, variance, weight, bias = (each.reshape(-1, 1, 1) for each in (mean, variance, norm.weight, norm.bias))
            x = (x - mean) / (variance + norm.eps).sqrt() * weight + bias
        # To (space, examples, channels) and back, as attention does.
        out: Tensor = self.head(x.permute(2, 3, 0, 1).flatten(0, 1).permute(1, 0, 2).flatten(1))
        return out


@pytest.mark.parametrize("channels", [6, 8, 15])
@pytest.mark.parametrize("spelling", ["module", "function"])
@pytest.mark.parametrize("layers", [None, ["conv"]], ids=["all", "frozen"])
def test_fixed_statistics_are_right_in_every_memory_layout(
    channels: int, spelling: str, layers: list[str] | None
) -> None:
    torch.manual_seed(0)
    one, two = (shaken(Normalized(channels, each)) for each in (spelling, "by hand"))
    assert_same(one, two, (reals(5, 1, 3, 3), integers(3, 5)), layers=layers)


@pytest.mark.parametrize("shape", [(5, 1, 3, 3), (1, 1, 3, 3)], ids=["five", "one"])
def test_the_certificate_sees_no_wrong_gradients_either(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    one, two = (shaken(Normalized(6, each)) for each in ("module", "by hand"))
    two.load_state_dict(one.state_dict())
    data = reals(*shape), integers(3, shape[0])
    here, there = (saltflat.certify(each, data) for each in (one, two))
    for name in here:
        assert here[name].hessian == pytest.approx(there[name].hessian, rel=1e-9)
        assert here[name].gauss_newton == pytest.approx(there[name].gauss_newton, rel=1e-9)


@pytest.mark.parametrize("most", [1, 9], ids=["single examples", "all"])
def test_gradients_that_are_not_those_of_the_forward_pass_are_refused(most: int) -> None:
    """As from a kernel of torch's that is wrong for single examples, or from hooks that change gradients."""

    def rule(net: Any, x: Tensor) -> Any:
        hidden = net.layer(x)
        if hidden.requires_grad and len(hidden) <= most:
            hidden.register_hook(lambda g: 2 * g)
        return net.head(hidden.relu())

    torch.manual_seed(0)
    model = shaken(Net(rule, layer=nn.Linear(4, 5), head=nn.Linear(5, 3)))
    with pytest.raises(errors.ModelError, match=r"forward pass, but got other gradients of 'layer\.weight'"):
        saltflat.compute_statistics(model, (reals(5, 4), integers(3, 5)), names=NAMES)


def test_a_parameter_held_by_a_list_or_an_attribute_is_the_same_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
            self.how, self.held = how, [self.layer.weight]
            self.nested = {"weights": [self.layer.weight]}
            vars(self)["alias"] = self.layer.weight

        def forward(self, x: Tensor) -> Tensor:
            weights = {
                "list": self.held[0],
                "dict": self.nested["weights"][0],
                "attribute": vars(self)["alias"],
                "module": self.layer.weight,
            }
            out: Tensor = self.head(F.linear(self.layer(x).tanh(), weights[self.how]))
            return out

    torch.manual_seed(0)
    data = reals(5, 4), integers(3, 5)
    for how in ("list", "dict", "attribute"):
        one, two = Tied(how).double(), Tied("module").double()
        assert_same(one, two, data)
        assert one.held[0] is one.nested["weights"][0] is vars(one)["alias"] is one.layer.weight


def test_sparse_gradients_are_gradients() -> None:
    torch.manual_seed(0)
    one, two = (
        shaken(nn.Sequential(nn.Embedding(6, 3, sparse=sparse), nn.Flatten(), nn.Linear(9, 3)))
        for sparse in (True, False)
    )
    assert_same(one, two, (integers(6, 5, 3), integers(3, 5)))


def test_a_parameter_reached_past_the_modules_is_refused_by_name() -> None:
    layer = nn.Linear(4, 4).double()
    weight = layer.weight
    model = Net(lambda net, x: F.linear(net.layer(x).tanh(), weight), layer=layer)
    with pytest.raises(errors.ModelError, match=r"'layer\.weight' through a reference"):
        saltflat.compute_statistics(model, (reals(5, 4), integers(4, 5)), names=NAMES)


def test_a_float64_head_on_float32_layers_is_measured_to_the_digits_of_float32() -> None:
    torch.manual_seed(0)
    parts = {"layer": nn.Linear(4, 5), "head": nn.Linear(5, 3).double()}
    model = Net(lambda net, x: net.head(net.layer(x.float()).relu().double()), **parts)
    x, y = torch.randn(6, 4), integers(3, 6)
    found = saltflat.compute_statistics(model, (x, y), names="curvature_trace")["curvature_trace"]
    wide = Net(lambda net, x: net.head(net.layer(x).relu()), layer=nn.Linear(4, 5), head=nn.Linear(5, 3)).double()
    wide.load_state_dict(model.state_dict())
    wanted = saltflat.compute_statistics(wide, (x.double(), y), names="curvature_trace")["curvature_trace"]
    torch.testing.assert_close(dict(found), dict(wanted), rtol=1e-4, atol=0)


def test_half_precision_inside_of_the_model_is_named() -> None:
    torch.manual_seed(0)
    model = Net(
        lambda net, x: net.head(net.layer(x).bfloat16().float()), layer=nn.Linear(64, 64), head=nn.Linear(64, 3)
    )
    noisy = Net(lambda net, x: net.inner(x) + 0.1 * x.mean().bfloat16().float(), inner=model)
    with pytest.raises(errors.PrecisionError, match="bfloat16"):
        saltflat.compute_statistics(noisy, (torch.randn(6, 64), integers(3, 6)), names="curvature_trace")


def test_masked_classes_are_named() -> None:
    mask = torch.tensor([False, True, False])
    model = Net(lambda net, x: net.head(x).masked_fill(mask, -torch.inf), head=nn.Linear(4, 3))
    data = torch.randn(6, 4), torch.tensor([0, 2, 0, 2, 0, 2])
    with pytest.raises(errors.NonFiniteError, match=r"-inf.*\(at 1 of .*-1e9"):
        saltflat.compute_statistics(model, data, names="curvature_trace")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_gradients_that_are_rounding_alone_contradict_nothing(norm: type[nn.Module], dtype: torch.dtype) -> None:
    """A norm over one feature gives the same number for every input: nothing before it has an effect."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 1), norm(1), nn.Linear(1, 2)).to(dtype)
    data = torch.randn(6, 3, dtype=dtype), torch.randint(2, (6,))
    found = saltflat.compute_statistics(net, data, names="curvature_trace", layers=["0"])
    assert all(float(value) < 1e-6 for value in found["curvature_trace"].values())


def test_gradients_that_cancel_beside_small_ones_contradict_nothing() -> None:
    """A norm of x and of 2 x is nearly the same: the gain has a small gradient, and the shift none."""

    def rule(net: Any, x: Tensor) -> Any:
        scale = torch.tensor([1.0, 2.0], dtype=x.dtype).repeat(len(x)).reshape(-1, 1, 1)
        both = net.norm(x.repeat_interleave(2, 0) * scale)
        return net.head((both[::2] - both[1::2]).flatten(1))

    torch.manual_seed(2)
    net = shaken(Net(rule, norm=nn.LayerNorm(2), head=nn.Linear(18, 2, bias=False).requires_grad_(False)))
    found = saltflat.compute_statistics(net, (reals(6, 9, 2), integers(2, 6)), names="curvature_trace")[
        "curvature_trace"
    ]
    assert float(found["norm.weight"]) > 1e-12
    assert float(found["norm.bias"]) < 1e-24


@pytest.mark.parametrize(
    "mix",
    [
        lambda o: o if len(o) < 3 else o + o.mean(0),
        lambda o: torch.cat([o[:2], o[2:].flip(0)]),
    ],
    ids=["mean of three or more", "all but the first two turned round"],
)
def test_examples_that_mix_only_in_larger_batches_are_noticed(mix: Any) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Any:
            return mix(self.layer(x))

    torch.manual_seed(0)
    with pytest.raises(errors.CoupledExamplesError):
        saltflat.compute_statistics(Mixing(), (torch.randn(8, 2), torch.arange(8) % 3), names="curvature_trace")
