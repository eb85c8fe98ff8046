"""The building blocks of random models, one small function each.

A block is a function ``build(draw, shape)`` that returns a module and the shape of one example behind it. Add one by
writing that function under ``@block(...)`` with the kinds of input it takes. Rules must not capture modules or tensors:
models are deep-copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from cases import Net
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")
Shape = tuple[int, ...]
Build = Callable[["Draw", Shape], tuple[nn.Module, Shape]]
KINDS = {1: "vector", 2: "sequence", 3: "image"}


@dataclass(frozen=True)
class Block:
    """A way to make a module.

    Attributes:
        build: makes the module.
        nests: whether it draws other blocks.
        honest: whether autograd gives the derivative of the function (not so behind ``detach``).
        tolerance: how far two right answers may differ.
    """

    name: str
    build: Build
    nests: bool = False
    honest: bool = True
    tolerance: float = 1e-8


BLOCKS: dict[str, dict[str, Block]] = {kind: {} for kind in KINDS.values()}


def block(*kinds: str, nests: bool = False, honest: bool = True, tolerance: float = 1e-8) -> Callable[[Build], Build]:
    """Enter a builder in ``BLOCKS`` for these kinds of input."""

    def enter(build: Build) -> Build:
        for kind in kinds:
            BLOCKS[kind][build.__name__] = Block(build.__name__, build, nests, honest, tolerance)
        return build

    return enter


class Draw:
    """Choices that hypothesis makes and can simplify, and the names of everything that was chosen."""

    def __init__(self, draw: Callable[[Any], Any], around: str | None = None) -> None:
        self._draw, self.around, self.depth = draw, around, 0
        self.used: list[str] = []
        self.honest, self.tolerance = True, 1e-8

    def one_of(self, options: Sequence[T]) -> T:
        chosen: T = self._draw(st.sampled_from(options))
        return chosen

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))

    def flag(self) -> bool:
        return bool(self._draw(st.booleans()))

    def named(self, table: dict[str, T], often: bool = True) -> T:
        """An entry of a table, whose name is remembered; the first entry is the plainest, and is taken ``often``.

        The entry that the problem is ``around`` is taken as soon as there is a place for it.
        """
        first, *others = table
        due = self.around in table and self.around not in self.used
        name = self.around if due else self.one_of([first] * (len(table) if often else 1) + others)
        assert name is not None
        if name != first:
            self.used.append(name)
        return table[name]

    def block(self, shape: Shape) -> tuple[nn.Module, Shape]:
        table = {name: b for name, b in BLOCKS[KINDS[len(shape)]].items() if not (b.nests and self.depth >= 2)}
        chosen = self.named(table, often=False)
        self.honest &= chosen.honest
        self.tolerance = max(self.tolerance, chosen.tolerance)
        self.depth += 1
        try:
            return chosen.build(self, shape)
        finally:
            self.depth -= 1

    def keeping(self, shape: Shape) -> nn.Module:
        """A block that gives back the shape it is given."""
        module, found = self.block(shape)
        return module if found == shape else nn.Sequential(module, nn.Flatten(), Lift(found, shape))


class Lift(nn.Module):
    """From flattened features to any shape, through a frozen map: no parameters to measure."""

    matrix: Tensor

    def __init__(self, found: Shape, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("matrix", torch.randn(size_of(found), size_of(shape)) / size_of(found) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrix).reshape(-1, *self.shape)


def size_of(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def wide(shape: Shape, width: int) -> Shape:
    return (*shape[:-1], width)


FEATURES = ("vector", "sequence")
ANY = ("vector", "sequence", "image")


# Layers with a rule, and their neighbors.


@block(*FEATURES)
def linear(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    width = draw.integer(2, 4)
    return nn.Linear(shape[-1], width, bias=draw.flag()), wide(shape, width)


@block("image")
def convolution(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    width = draw.integer(1, 4)
    return nn.Conv2d(shape[0], width, 3, padding=1, bias=draw.flag()), (width, *shape[1:])


@block(*ANY)
def activation(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    kinds: list[nn.Module] = [nn.Tanh(), nn.ReLU(), nn.GELU(), nn.Sigmoid(), nn.SiLU(), nn.ELU(), nn.Softplus()]
    return draw.one_of(kinds), shape


@block(*ANY)
def in_place_activation(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    layer: nn.Module = nn.Linear(shape[-1], shape[-1]) if len(shape) < 3 else nn.Conv2d(shape[0], shape[0], 1)
    return nn.Sequential(layer, nn.ReLU(inplace=True)), shape


@block("image")
def strided_grouped_convolution(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    groups = draw.one_of([1, shape[0]])
    modes: list[Literal["zeros", "circular", "replicate"]] = ["zeros", "circular", "replicate"]
    layer = nn.Conv2d(
        shape[0],
        2 * groups,
        2,
        stride=draw.integer(1, 2),
        padding=1,
        dilation=draw.integer(1, 2),
        groups=groups,
        padding_mode=draw.one_of(modes),
    )
    return reshaped(layer, shape)


@block("image")
def transposed_convolution(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    layer = nn.ConvTranspose2d(shape[0], draw.integer(1, 3), 3, padding=1, stride=draw.integer(1, 2))
    return reshaped(layer, shape)


@block("image")
def volume_convolution(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    kind = draw.one_of([nn.Conv3d, nn.ConvTranspose3d])
    model = Net(
        lambda net, x: net.conv(x.unsqueeze(2)).flatten(1, 2), conv=kind(shape[0], 2, (1, 3, 3), padding=(0, 1, 1))
    )
    return reshaped(model, shape)


@block("sequence")
def convolution_along_time(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    conv: nn.Module = (
        nn.Conv1d(shape[1], 2, 3, padding=1) if draw.flag() else nn.ConvTranspose1d(shape[1], 2, 3, padding=1)
    )
    return Net(lambda net, x: net.conv(x.mT).mT, conv=conv), (shape[0], 2)


@block("image")
def functional_convolution(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: F.conv2d(x, net.kernel, padding=1), kernel=param(2, shape[0], 3, 3)), (2, *shape[1:])


@block("image")
def patches_times_matrix(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        return (net.kernel @ F.unfold(x, 3, padding=1)).unflatten(2, x.shape[2:])

    return Net(rule, kernel=param(2, 9 * shape[0])), (2, *shape[1:])


@block("image")
def pooling(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    kinds: list[nn.Module] = [
        nn.AvgPool2d(2, 1, 1),
        nn.MaxPool2d(2, 1, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Upsample(scale_factor=2),
    ]
    return reshaped(draw.one_of(kinds), shape)


@block("image")
def channels_last(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        return net.conv(x.contiguous(memory_format=torch.channels_last))

    conv = nn.Conv2d(shape[0], 3, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Net(rule, conv=conv), (3, *shape[1:])


@block("image")
def channels_as_features(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        return net.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    kinds: list[nn.Module] = [nn.Linear(shape[0], shape[0]), nn.LayerNorm(shape[0])]
    return Net(rule, inner=draw.one_of(kinds)), shape


@block("image")
def convolution_of_single_images(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(lambda net, x: torch.stack([net.conv(image) for image in x]), conv=nn.Conv2d(shape[0], 2, 3, padding=1))
    return model, (2, *shape[1:])


@block(*FEATURES)
def single_examples_in_a_loop(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(lambda net, x: torch.stack([net.layer(row) for row in x]), layer=nn.Linear(shape[-1], 2))
    return model, wide(shape, 2)


@block(*FEATURES)
def single_features_in_a_loop(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    """Each example shows the layer one row per feature."""
    model = Net(lambda net, x: net.layer(x.unsqueeze(-1)).sum(-2), layer=nn.Linear(1, 2))
    return model, wide(shape, 2)


# Normalization.


@block(*ANY)
def batch_norm(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    norm: nn.Module = nn.BatchNorm2d(shape[0]) if len(shape) == 3 else nn.BatchNorm1d(shape[0])
    with torch.no_grad():
        norm.get_buffer("running_mean").normal_()
        norm.get_buffer("running_var").uniform_(0.5, 2)
    return norm.requires_grad_(draw.flag()), shape


@block(*FEATURES)
def layer_norm(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return nn.LayerNorm(draw.one_of([shape[-1:], shape]), bias=draw.flag()), shape


@block(*FEATURES)
def rms_norm(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return nn.RMSNorm(shape[-1]), shape


@block(*ANY)
def group_norm(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    norm = nn.GroupNorm(draw.one_of([1, shape[0]]) if len(shape) > 1 else 1, shape[0])
    # Torch crashes in the backward pass of images with the channels last if nothing before has a gradient.
    return Net(lambda net, x: net.norm(x.clone(memory_format=torch.contiguous_format)), norm=norm), shape


@block("image", "sequence")
def instance_norm(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    kind = nn.InstanceNorm2d if len(shape) == 3 else nn.InstanceNorm1d
    return kind(shape[0], affine=True), shape


@block("sequence")
def batch_norm_of_features(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    """What the norm gives back is transposed, and so is the gradient it is given."""
    norm, _ = batch_norm(draw, (shape[1], shape[0]))
    return Net(lambda net, x: net.norm(x.mT).mT, norm=norm), shape


@block("image")
def frozen_batch_norm_behind_a_convolution(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    width = draw.one_of([6, 8])
    norm, _ = batch_norm(draw, (width, 1, 1))

    def rule(net: Any, x: Tensor) -> Any:
        return net.back(net.norm(net.conv(x)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    model = Net(rule, conv=nn.Conv2d(shape[0], width, 1), norm=norm.requires_grad_(False), back=nn.Linear(width, 2))
    model.get_submodule("back").requires_grad_(draw.flag())
    return model, (2, *shape[1:])


# Parameters outside of layers.


@block(*FEATURES)
def functional_linear(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: F.linear(x, net.w, net.b), w=param(3, shape[-1]), b=param(3)), wide(shape, 3)


@block(*FEATURES)
def inputs_by_outputs(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: x @ net.w + net.b, w=param(shape[-1], 3), b=param(3)), wide(shape, 3)


@block(*FEATURES)
def einsum_of_heads(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(lambda net, x: torch.einsum("...i,hij->...hj", x, net.heads).flatten(-2), heads=param(2, shape[-1], 2))
    return model, wide(shape, 4)


@block("sequence")
def stacked_experts(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        return torch.bmm(x.transpose(0, 1), net.experts).transpose(0, 1)

    return Net(rule, experts=param(shape[0], shape[1], 2)), (shape[0], 2)


@block("vector")
def bilinear(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: net.pair(x, x.tanh()), pair=nn.Bilinear(shape[0], shape[0], 2)), (2,)


@block(*ANY)
def scales_and_shifts(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: x * net.gain + net.shift, gain=param(*shape), shift=param(1)), shape


@block(*ANY)
def expanded_number(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: x * net.gain.expand_as(x), gain=param(1)), shape


@block("sequence")
def class_token(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        return net.layer(torch.cat([net.token.expand(len(x), -1, -1), x], 1))

    return Net(rule, token=param(1, 1, shape[1]), layer=nn.Linear(shape[1], 2)), (shape[0] + 1, 2)


@block("sequence")
def position_table(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(lambda net, x: x + net.table(torch.arange(x.shape[1])), table=nn.Embedding(shape[0], shape[1]))
    return model, shape


@block(*FEATURES)
def layer_on_a_parameter(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(
        lambda net, x: net.layer(x) * net.layer(net.token), layer=nn.Linear(shape[-1], 2), token=param(shape[-1])
    )
    return model, wide(shape, 2)


@block(*FEATURES)
def parameters_in_a_list(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        for gain, shift in zip(net.gains, net.shifts.values(), strict=True):
            x = (x * gain + shift).tanh()
        return x

    gains = nn.ParameterList([param(shape[-1]) for _ in range(2)])
    return Net(rule, gains=gains, shifts=nn.ParameterDict({"a": param(1), "b": param(1)})), shape


@block(*FEATURES)
def weight_is_a_view_of_a_parameter(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        return F.linear(F.linear(x, net.packed[:2]), net.packed[2:, :2])

    return Net(rule, packed=param(5, max(2, shape[-1]))) if shape[-1] > 1 else nn.Identity(), wide(
        shape, 3 if shape[-1] > 1 else 1
    )


@block(*FEATURES)
def parameter_of_odd_strides(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    layer = nn.Linear(shape[-1], 3)
    layer.weight = nn.Parameter(torch.randn(shape[-1], 3).t() if draw.flag() else torch.randn(6, shape[-1])[::2])
    return layer, wide(shape, 3)


@block(*FEATURES)
def in_fourier_space(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        return torch.fft.irfft(torch.fft.rfft(x) * net.filter, n=x.shape[-1])

    return Net(rule, filter=param(shape[-1] // 2 + 1)), shape


@block(*FEATURES)
def weights_made_from_the_input(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        weights = net.maker(x.reshape(len(x), -1)).unflatten(1, (x.shape[-1], 2))
        return (x.reshape(len(x), -1, x.shape[-1]) @ weights).reshape(*x.shape[:-1], 2)

    return Net(rule, maker=nn.Linear(size_of(shape), 2 * shape[-1])), wide(shape, 2)


# One parameter in several places.


@block(*FEATURES)
def layer_called_twice(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: net.layer(net.layer(x).tanh()), layer=nn.Linear(shape[-1], shape[-1])), shape


@block(*ANY, nests=True)
def block_called_twice(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: net.inner(net.inner(x).tanh()), inner=draw.keeping(shape)), shape


@block(*FEATURES)
def module_under_two_names(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    layer = nn.Linear(shape[-1], shape[-1])
    return nn.Sequential(layer, nn.Tanh(), layer), shape


@block(*FEATURES)
def tied_layers(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    one, two = nn.Linear(shape[-1], shape[-1]), nn.Linear(shape[-1], shape[-1], bias=False)
    two.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), two), shape


@block(*FEATURES)
def decoder_is_the_encoder_transposed(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(lambda net, x: F.linear(net.encoder(x).tanh(), net.encoder.weight.t()), encoder=nn.Linear(shape[-1], 3))
    return model, shape


@block(*FEATURES)
def parameter_that_is_a_buffer_too(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    layer = nn.Linear(shape[-1], shape[-1])
    model = Net(lambda net, x: F.linear(net.layer(x).tanh(), net.alias), layer=layer)
    model.register_buffer("alias", layer.weight)
    return model, shape


@block(*FEATURES)
def layer_whose_weight_is_a_buffer(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    layer, other = nn.Linear(shape[-1], 2), nn.Linear(shape[-1], 2)
    del other.weight
    other.register_buffer("weight", layer.weight)
    return Net(lambda net, x: net.layer(x) * net.other(x), layer=layer, other=other), wide(shape, 2)


@block(*FEATURES)
def parameter_in_a_plain_list(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(lambda net, x: F.linear(x, net.held[0]), layer=nn.Linear(shape[-1], 2))
    model.held = [model.get_parameter("layer.weight")]  # type: ignore[assignment]
    return model, wide(shape, 2)


@block(*FEATURES)
def module_in_a_plain_list(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    """A module that the model does not know of: its parameters are constants, those it shares are not."""
    outside = nn.Linear(shape[-1], 2)
    model = Net(lambda net, x: net.hidden[0](x), layer=nn.Linear(shape[-1], 2))
    outside.weight = model.get_parameter("layer.weight")
    model.hidden = [outside]  # type: ignore[assignment]
    return model, wide(shape, 2)


@block(*FEATURES)
def layer_and_its_weight(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(lambda net, x: net.layer(x) * F.linear(x, net.layer.weight), layer=nn.Linear(shape[-1], 2))
    return model, wide(shape, 2)


# Parameters made of others.


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w + 0.1 * w.square()


class Gained(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = param(1)

    def forward(self, w: Tensor) -> Tensor:
        scaled: Tensor = self.gain * w / w.norm()
        return scaled


@block(*FEATURES)
def parametrized(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    layer = nn.Linear(shape[-1], 3)
    ways: list[Callable[[], Any]] = [
        lambda: weight_norm(layer),
        lambda: parametrize.register_parametrization(layer, "weight", Doubled()),
        lambda: parametrize.register_parametrization(layer, "weight", Gained()),
        lambda: parametrize.register_parametrization(layer, "bias", Doubled()),
        lambda: orthogonal(layer, orthogonal_map="cayley", use_trivialization=False),
        lambda: prune.l1_unstructured(layer, "weight", amount=0.3),
    ]
    draw.one_of(ways)()
    with torch.no_grad():  # pruning leaves a weight with a graph, which could not be copied
        layer(torch.zeros(1, shape[-1]))
    return layer, wide(shape, 3)


@block(*FEATURES)
def called_with_other_weights(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def scaled(net: Any, x: Tensor) -> Any:
        return functional_call(net.layer, {"weight": 3 * net.layer.weight}, (x,))

    def standardized(net: Any, x: Tensor) -> Any:
        w = net.layer.weight
        return functional_call(net.layer, {"weight": w - w.mean(1, keepdim=True), "bias": net.layer.bias}, (x,))

    def low_rank(net: Any, x: Tensor) -> Any:
        return functional_call(net.layer, {"weight": net.layer.weight + net.up @ net.down}, (x,))

    def constants(net: Any, x: Tensor) -> Any:
        return functional_call(net.layer, {"weight": torch.ones_like(net.layer.weight)}, (x,))

    def another(net: Any, x: Tensor) -> Any:
        return functional_call(net.layer, {"weight": net.up @ net.down}, (x,)) + net.layer(x)

    model = Net(
        draw.one_of([scaled, standardized, low_rank, constants, another]),
        layer=nn.Linear(shape[-1], 3),
        up=param(3, 1),
        down=param(1, shape[-1]),
    )
    return model, wide(shape, 3)


@block(*FEATURES)
def weight_set_by_its_parent(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        net.layer.weight = 2 * net.free.tanh()
        return net.layer(x)

    layer = nn.Linear(shape[-1], 2)
    del layer.weight
    return Net(rule, layer=layer, free=param(2, shape[-1])), wide(shape, 2)


@block(*FEATURES)
def weight_swapped_in_the_forward_pass(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        kept = net.layer._parameters["weight"]
        net.layer._parameters["weight"] = kept * 2
        try:
            return net.layer(x)
        finally:
            net.layer._parameters["weight"] = kept

    return Net(rule, layer=nn.Linear(shape[-1], 2)), wide(shape, 2)


class Weighty(nn.Linear):
    """A subclass whose weight is a property."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__(into, out)
        weight = self._parameters.pop("weight")
        assert weight is not None
        self.free = nn.Parameter(weight.detach().clone())

    def __getattr__(self, name: str) -> Any:
        return 2 * self.free if name == "weight" and "free" in self._parameters else super().__getattr__(name)


class Shifted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(2 * input) + self.bias


class Renamed(nn.Linear):
    """A subclass that computes what its parent does."""


class Looking(nn.Linear):
    """A subclass that changes what is looked up, not what is computed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().__call__(*args, **kwargs)


@block(*FEATURES)
def subclass_of_a_layer(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return draw.one_of([Renamed, Shifted, Weighty, Looking])(shape[-1], 3), wide(shape, 3)


@block(*FEATURES)
def patched_forward(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    class Patched(nn.Linear):
        def __init__(self, into: int, out: int) -> None:
            super().__init__(into, out)
            self.forward = self.twice  # type: ignore[method-assign]

        def twice(self, input: Tensor) -> Tensor:
            return F.linear(2 * input, self.weight, self.bias)

        def __deepcopy__(self, memo: Any) -> Any:
            copied = Patched(self.in_features, self.out_features).to(self.weight)
            copied.load_state_dict(self.state_dict())
            for one, two in zip(copied.parameters(), self.parameters(), strict=True):
                one.requires_grad_(two.requires_grad)
            return copied.train(self.training)

    return Patched(shape[-1], 2), wide(shape, 2)


def double_output(module: Any, args: Any, output: Any) -> Any:
    return 2 * output


def double_input(module: Any, args: Any) -> Any:
    return tuple(2 * arg for arg in args)


def remember(module: Any, args: Any, output: Any) -> None:
    module.seen = output.detach()


@block(*FEATURES)
def hooked(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    layer = nn.Linear(shape[-1], 2)
    ways: list[Callable[[], Any]] = [
        lambda: layer.register_forward_hook(double_output),
        lambda: layer.register_forward_pre_hook(double_input),
        lambda: layer.register_forward_hook(remember),
    ]
    draw.one_of(ways)()
    return layer, wide(shape, 2)


# Examples where one does not look for them.


@block("sequence", nests=True)
def examples_in_dimension_one(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(lambda net, x: net.layer(x.transpose(0, 1)).transpose(0, 1), layer=nn.Linear(shape[-1], 3))
    return model, wide(shape, 3)


@block("vector")
def examples_last(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: (net.w @ x.T).T, w=param(2, shape[0])), (2,)


@block("sequence", nests=True)
def positions_in_the_batch(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    inner, found = draw.block(shape[1:])
    return Net(lambda net, x: net.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2]), inner=inner), (shape[0], *found)


@block("sequence", nests=True)
def time_before_examples_in_the_batch(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    inner, found = draw.block(shape[1:])

    def rule(net: Any, x: Tensor) -> Any:
        return net.inner(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)

    return Net(rule, inner=inner), (shape[0], *found)


def flip(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return x.flip(0), lambda y: y.flip(0)


def roll_by_one(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return x.roll(1, 0), lambda y: y.roll(-1, 0)


def roll_by_two(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return x.roll(2, 0), lambda y: y.roll(-2, 0)


def interleave(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    order = torch.cat([torch.arange(0, len(x), 2), torch.arange(1, len(x), 2)])
    return x[order], lambda y: y[order.argsort()]


def by_value(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    order = x.flatten(1).sum(1).argsort()
    return x[order], lambda y: y[order.argsort()]


def flip_large_batches(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return flip(x) if len(x) > 2 else (x, lambda y: y)


def repeated(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return torch.cat([x, x.flip(0)]), lambda y: (y[: len(y) // 2] + y[len(y) // 2 :].flip(0)) / 2


def repeat_interleaved(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    scale = (
        torch.tensor([1.0, 2.0], dtype=x.dtype).reshape(2, *[1] * (x.dim() - 1)).repeat(len(x), *[1] * (x.dim() - 1))
    )
    return x.repeat_interleave(2, 0) * scale, lambda y: y[::2] - y[1::2]


@block(*ANY, nests=True)
def reordered(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    orders = {f.__name__: f for f in [flip, roll_by_one, roll_by_two, interleave, by_value, flip_large_batches]}
    order = draw.named(orders)

    def rule(net: Any, x: Tensor) -> Any:
        there, back = order(x)
        return back(net.inner(there))

    inner, found = draw.block(shape)
    return Net(rule, inner=inner), found


@block(*ANY, nests=True)
def several_rows_for_each_example(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    order = draw.one_of([repeated, repeat_interleaved])

    def rule(net: Any, x: Tensor) -> Any:
        there, back = order(x)
        return back(net.inner(there))

    inner, found = draw.block(shape)
    return Net(rule, inner=inner), found


@block(*ANY, nests=True)
def in_halves(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    """A batch in two parts, as micro-batching does."""
    inner, found = draw.block(shape)
    return Net(lambda net, x: torch.cat([net.inner(part) for part in x.chunk(2)]), inner=inner), found


@block(*ANY, nests=True)
def twin_streams(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        one, two = net.inner(torch.cat([x, x.tanh()])).chunk(2)
        return one * two

    inner, found = draw.block(shape)
    return Net(rule, inner=inner), found


@block(*FEATURES)
def mapped_in_the_forward_pass(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def own(net: Any, x: Tensor) -> Any:
        return torch.func.vmap(lambda row: F.linear(row, net.layer.weight))(x)

    def module(net: Any, x: Tensor) -> Any:
        return torch.func.vmap(net.layer)(x)

    return Net(draw.one_of([own, module]), layer=nn.Linear(shape[-1], 2)), wide(shape, 2)


# Control flow on values.


@block(*FEATURES)
def experts_by_mask(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        first = x[..., 0] > 0
        out = x.new_zeros(*x.shape[:-1], 2)
        out[first] = net.one(x[first])
        out[~first] = net.two(x[~first])
        return out

    return Net(rule, one=nn.Linear(shape[-1], 2), two=nn.Linear(shape[-1], 2)), wide(shape, 2)


@block(*FEATURES)
def branch_for_each_example(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        rows = [net.one(row) if row.sum() > 0 else net.two(row).tanh() for row in x.split(1)]
        return torch.cat(rows)

    return Net(rule, one=nn.Linear(shape[-1], 2), two=nn.Linear(shape[-1], 2)), wide(shape, 2)


@block(*FEATURES)
def both_branches(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(
        lambda net, x: torch.where(x.sum(-1, keepdim=True) > 0, net.one(x), net.two(x)),
        one=nn.Linear(shape[-1], 2),
        two=nn.Linear(shape[-1], 2),
    )
    return model, wide(shape, 2)


@block(*FEATURES)
def shortcut_if_all_agree(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    """The same numbers by two ways: which one is taken depends on the whole batch."""

    def rule(net: Any, x: Tensor) -> Any:
        keep = x[..., :1] > 0
        if keep.all():
            return net.layer(x)
        return torch.where(keep, net.layer(x), net.other(x)) if keep.any() else net.other(x)

    return Net(rule, layer=nn.Linear(shape[-1], 2), other=nn.Linear(shape[-1], 2)), wide(shape, 2)


@block(*FEATURES)
def sorted_features(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: net.layer(x.sort(-1).values), layer=nn.Linear(shape[-1], 2)), wide(shape, 2)


@block("sequence")
def largest_positions(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        chosen = net.score(x).squeeze(-1).topk(1, 1).indices
        return net.layer(x.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1])))

    return Net(rule, score=nn.Linear(shape[1], 1), layer=nn.Linear(shape[1], 2)), (1, 2)


# In place, detached, cached.


@block(*FEATURES)
def written_in_place(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def adds(net: Any, x: Tensor) -> Tensor:
        y: Tensor = net.layer(x)
        y += 1
        y.mul_(2)
        return y

    def slices(net: Any, x: Tensor) -> Tensor:
        y = torch.zeros(*x.shape[:-1], 2, dtype=x.dtype)
        y[..., :1] = net.layer(x)[..., :1]
        y[..., 1:] = net.layer(x)[..., 1:].tanh()
        return y

    def columns(net: Any, x: Tensor) -> Tensor:
        y: Tensor = net.layer(x)
        y[..., 0] = y[..., 0].clone() * 2
        return y

    def to_the_input(net: Any, x: Tensor) -> Any:
        x = x * 1
        x.add_(1)
        return net.layer(x)

    def a_view(net: Any, x: Tensor) -> Any:
        y = net.layer(x)
        y.view(-1).mul_(3)
        return y

    return Net(draw.one_of([adds, slices, columns, to_the_input, a_view]), layer=nn.Linear(shape[-1], 2)), wide(
        shape, 2
    )


@block(*FEATURES)
def input_overwritten_after_its_layer(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    """Allowed where the weight is not measured or the layer does not need its input; training refuses the rest."""

    def rule(net: Any, x: Tensor) -> Any:
        h = x * 1
        y = net.layer(h)
        h.add_(1)
        return y + h.sum(-1, keepdim=True)

    model = Net(rule, layer=nn.Linear(shape[-1], 2))
    model.get_parameter("layer.weight").requires_grad_(False)
    return model, wide(shape, 2)


@block(*ANY, nests=True, honest=False)
def cut_off(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        with torch.no_grad():
            still = net.inner(x).mean()
        y = net.inner(x)
        return y + y.detach() + 0 * still

    inner, found = draw.block(shape)
    return Net(rule, inner=inner), found


@block(*FEATURES)
def output_thrown_away(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        net.spare(x)
        return net.layer(x)

    return Net(rule, layer=nn.Linear(shape[-1], 2), spare=nn.Linear(shape[-1], 2)), wide(shape, 2)


@block(*FEATURES)
def caches(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def in_attributes(net: Any, x: Tensor) -> Any:
        if net.table is None:
            net.table = net.w.tanh()
        net.calls += 1
        net.last = x
        return F.linear(x, net.table)

    def in_a_dict(net: Any, x: Tensor) -> Any:
        net.cache["last"] = x
        net.seen.append(len(x))
        net.plain += 1
        return F.linear(x, net.w)

    def in_a_buffer(net: Any, x: Tensor) -> Any:
        net.count += 1
        net.mean.lerp_(x.detach().mean(), 0.1)
        return F.linear(x, net.w)

    def by_shape(net: Any, x: Tensor) -> Any:
        if len(x) not in net.cache:
            net.cache[len(x)] = torch.arange(x.shape[-1], dtype=x.dtype)
        return F.linear(x + net.cache[len(x)], net.w)

    model = Net(draw.one_of([in_attributes, in_a_dict, in_a_buffer, by_shape]), w=param(2, shape[-1]))
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    model.register_buffer("mean", torch.zeros(()), persistent=False)
    vars(model).update(table=None, calls=0, last=None, cache={}, seen=[], plain=torch.zeros(1))
    return model, wide(shape, 2)


@block(*ANY)
def buffers(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(lambda net, x: x * net.scale + net.table[net.which], w=param(1))
    model.register_buffer("scale", torch.rand(shape) + 0.5)
    model.register_buffer("table", torch.randn(3), persistent=False)
    model.register_buffer("which", torch.tensor(1))
    return model, shape


# Around other blocks.


@block(*ANY, nests=True)
def residual(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: x + net.inner(x), inner=draw.keeping(shape)), shape


@block(*ANY, nests=True)
def frozen(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    inner, found = draw.block(shape)
    for parameter in inner.parameters():
        parameter.requires_grad_(not draw.flag())
    return inner, found


@block(*ANY, nests=True)
def containers(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        for layer in net.list:
            x = layer(x)
        return net.dict["last"](x)

    one, found = draw.block(shape)
    two, found = draw.block(found)
    return Net(rule, list=nn.ModuleList([one, nn.Tanh()]), dict=nn.ModuleDict({"last": two})), found


@block(*ANY, nests=True)
def checkpointed(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    inner, found = draw.block(shape)
    return Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=False), inner=inner), found


@block(*ANY, nests=True)
def doubled_by_a_hook(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    inner, found = draw.block(shape)
    outer = nn.Sequential(inner)
    outer.register_forward_hook(double_output)
    outer.register_forward_pre_hook(double_input)
    return outer, found


@block(*ANY, nests=True)
def laid_out_oddly(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    """The inner block is given values whose memory is in another order, or is shared between examples."""

    def reversed_memory(x: Tensor) -> Tensor:
        axes = tuple(range(x.dim() - 1, -1, -1))
        return x.permute(axes).contiguous().permute(axes)

    def spaced(x: Tensor) -> Tensor:
        return torch.stack([x, x], -1)[..., 0]

    def moved(x: Tensor) -> Tensor:
        return torch.cat([x[:1] * 0, x])[1:]

    way = draw.one_of([reversed_memory, spaced, moved])
    inner, found = draw.block(shape)
    return Net(lambda net, x: way(net.inner(way(x))), inner=inner), found


@block(*ANY, nests=True, honest=False, tolerance=1e-3)
def in_single_precision(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    inner, found = draw.block(shape)
    return Net(lambda net, x: net.inner(x).float().tanh().to(x), inner=inner), found


def apply(function: Any, *args: Tensor) -> Any:
    return function.apply(*args)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum_to_size(w.shape)


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


@block(*FEATURES)
def autograd_function(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: apply(Scale, x, net.w), w=param(shape[-1])), shape


@block(*FEATURES, honest=False)
def straight_through(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    return Net(lambda net, x: apply(Straight, net.layer(x)), layer=nn.Linear(shape[-1], 2)), wide(shape, 2)


@block(*FEATURES)
def gradient_in_the_forward_pass(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    """An energy model: the output is a gradient."""

    def rule(net: Any, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(net.layer(x).tanh().square().sum(), x, create_graph=True)
        return slope

    return Net(rule, layer=nn.Linear(shape[-1], 3)), shape


@block(*FEATURES)
def only_when_training(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    model = Net(
        lambda net, x: net.drop(net.layer(x)) * (2 if net.training else 1),
        layer=nn.Linear(shape[-1], 2),
        drop=nn.Dropout(),
    )
    return model, wide(shape, 2)


# Attention and recurrence.


@block("sequence")
def attention(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def by_hand(net: Any, x: Tensor) -> Any:
        return (net.query(x) @ net.key(x).mT).softmax(-1) @ net.value(x)

    def by_kernel(net: Any, x: Tensor) -> Any:
        return F.scaled_dot_product_attention(net.query(x), net.key(x), net.value(x), is_causal=True)

    parts = {name: nn.Linear(shape[1], 2) for name in ("query", "key", "value")}
    return Net(draw.one_of([by_hand, by_kernel]), **parts), (shape[0], 2)


@block("sequence")
def multihead_attention(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    first = draw.flag()

    def rule(net: Any, x: Tensor) -> Any:
        x = net.lift(x)
        if first:
            return net.inner(x, x, x, need_weights=False)[0]
        x = x.transpose(0, 1)
        return net.inner(x, x, x)[0].transpose(0, 1)

    return Net(rule, lift=nn.Linear(shape[1], 2), inner=nn.MultiheadAttention(2, 1, batch_first=first)), (shape[0], 2)


@block("sequence")
def encoder_layer(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    inner = nn.TransformerEncoderLayer(2, 1, dim_feedforward=2, batch_first=True, norm_first=draw.flag())
    return nn.Sequential(nn.Linear(shape[1], 2), inner), (shape[0], 2)


@block("sequence")
def recurrent(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    kind, first = draw.one_of([nn.RNN, nn.GRU, nn.LSTM]), draw.flag()

    def rule(net: Any, x: Tensor) -> Any:
        return net.inner(x)[0] if first else net.inner(x.transpose(0, 1))[0].transpose(0, 1)

    return Net(rule, inner=kind(shape[1], 2, batch_first=first)), (shape[0], 2)


@block("sequence")
def cell_at_each_step(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        state, states = None, []
        for step in x.unbind(1):
            state = net.cell(step, state)
            states.append(state)
        return torch.stack(states, 1)

    return Net(rule, cell=nn.GRUCell(shape[1], 2)), (shape[0], 2)


@block("sequence")
def scan_with_one_layer(draw: Draw, shape: Shape) -> tuple[nn.Module, Shape]:
    def rule(net: Any, x: Tensor) -> Any:
        state = torch.zeros(len(x), 2, dtype=x.dtype)
        for step in x.unbind(1):
            state = net.layer(torch.cat([step, state], 1)).tanh()
        return state.unsqueeze(1)

    return Net(rule, layer=nn.Linear(shape[1] + 2, 2)), (1, 2)


def reshaped(model: nn.Module, shape: Shape) -> tuple[nn.Module, Shape]:
    """A module with the shape it gives; found by running it."""
    with torch.no_grad():
        return model, tuple(model(torch.zeros(1, *shape)).shape[1:])


# What tokens come in through: from ``(N, T)`` integers to a sequence.


def table(draw: Draw, length: int) -> nn.Module:
    padding = draw.one_of([None, 0])
    draw.honest &= padding is None  # the row of padding has no gradient
    return nn.Embedding(5, 2, padding_idx=padding)


def functional_table(draw: Draw, length: int) -> nn.Module:
    return Net(lambda net, tokens: F.embedding(tokens, net.w), w=param(5, 2))


def one_hot_table(draw: Draw, length: int) -> nn.Module:
    return Net(lambda net, tokens: F.one_hot(tokens, 5).to(net.w) @ net.w, w=param(5, 2))


def table_with_sparse_gradients(draw: Draw, length: int) -> nn.Module:
    return nn.Embedding(5, 2, sparse=True)


def table_scaled_by_frequency(draw: Draw, length: int) -> nn.Module:
    draw.honest = False
    return nn.Embedding(5, 2, scale_grad_by_freq=True)


def bag_of_tokens(draw: Draw, length: int) -> nn.Module:
    mode = draw.one_of(["sum", "mean", "max"])
    return Net(lambda net, tokens: net.bag(tokens).unsqueeze(1), bag=nn.EmbeddingBag(5, 2, mode=mode))


def bag_with_offsets(draw: Draw, length: int) -> nn.Module:
    def rule(net: Any, tokens: Tensor) -> Any:
        starts = torch.arange(0, tokens.numel(), tokens.shape[1])
        return net.bag(tokens.flatten(), starts).unsqueeze(1)

    return Net(rule, bag=nn.EmbeddingBag(5, 2))


TABLES: dict[str, Callable[[Draw, int], nn.Module]] = {
    f.__name__: f
    for f in (
        table,
        functional_table,
        one_hot_table,
        table_with_sparse_gradients,
        table_scaled_by_frequency,
        bag_of_tokens,
        bag_with_offsets,
    )
}
