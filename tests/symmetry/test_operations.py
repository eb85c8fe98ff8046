"""What people write in a forward pass, one operation at a time: found as free as it is, and never freer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Case, Net, integers, reals, shaken, with_history
from rank_oracle import Freedom, freedom
from test_find import columns_of, fresh, rank
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

from saltflat.symmetry.find import find_symmetries
from saltflat.symmetry.group import Symmetries
from saltflat.symmetry.rescale import apply_rescaling, rescale


@dataclass(frozen=True, eq=False)
class Tried:
    """A network around one operation.

    Attributes:
        model: ends in something that fixes its outputs.
        inputs: a tensor or several.
        count: independent scales, told by hand where derivatives do not show them; otherwise by numbers alone.
        less: why fewer are found than numbers show.
        unknown: operations without a rule.
    """

    model: nn.Module
    inputs: Any
    count: int | None = None
    less: str = ""
    unknown: tuple[str, ...] = ()


OPERATIONS: dict[str, Callable[[], Tried]] = {}


def operation(build: Callable[[], Tried]) -> Callable[[], Tried]:
    @cache
    def seeded() -> Tried:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tried = build()
            return replace(tried, model=shaken(tried.model).eval())

    OPERATIONS[build.__name__] = seeded
    return seeded


def between(middle: Callable[[Any, Tensor], Tensor], hidden: int = 6, after: int = 6, **parts: Any) -> nn.Module:
    """A layer, something done to its six units, and another layer."""

    def forward(net: Any, x: Tensor) -> Any:
        return net.last(middle(net, net.first(x)))

    return Net(forward, first=nn.Linear(4, hidden), last=nn.Linear(after, 3), **parts)


def on_images(middle: Callable[[Any, Tensor], Tensor], channels: int, after: int, kernel: int = 3) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(middle(net, net.first(x)))

    return Net(forward, first=nn.Conv2d(2, channels, kernel, padding=kernel // 2), last=nn.Conv2d(after, 2, 1))


def vectors(model: nn.Module, **options: Any) -> Tried:
    return Tried(model, reals(4, 4), **options)


def images(model: nn.Module, **options: Any) -> Tried:
    return Tried(model, reals(4, 2, 4, 4), **options)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


# Weights that are computed.


@operation
def weight_norm_per_unit() -> Tried:
    return vectors(nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)))


@operation
def weight_norm_of_the_whole() -> Tried:
    return vectors(nn.Sequential(weight_norm(nn.Linear(4, 6), dim=cast(int, None)), nn.ReLU(), nn.Linear(6, 3)))


@operation
def spectral_norm_of_a_weight() -> Tried:
    return vectors(nn.Sequential(spectral_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)))


@operation
def standardized_weight() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        w = net.first.weight
        w = (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True)
        return net.last(F.linear(x, w, net.first.bias).relu())

    return vectors(Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)))


@operation
def pruned() -> Tried:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    prune.random_unstructured(model[0], "weight", 0.4)
    prune.ln_structured(model[2], "weight", 2, n=2, dim=1)
    with torch.no_grad():
        model(torch.zeros(1, 4))  # leaves masked weights without a history, which could not be copied
    return vectors(model)


@operation
def low_rank_sum_of_activations() -> Tried:
    return vectors(between(lambda net, h: F.relu(h + net.B(net.A(h))), A=nn.Linear(6, 2), B=nn.Linear(2, 6)))


@operation
def low_rank_sum_of_weights() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(F.linear(x, net.first.weight + 0.5 * net.B @ net.A, net.first.bias).relu())

    parts = {"A": parameter(2, 4), "B": parameter(6, 2)}
    return vectors(Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3), **parts))


@operation
def weight_that_is_a_product() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(F.linear(x, net.B @ net.A).relu())

    return vectors(Net(forward, A=parameter(2, 4), B=parameter(6, 2), last=nn.Linear(6, 3)))


@operation
def weight_with_a_constant_written_into_a_copy() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        weight = net.first.weight.clone()
        weight[0] = 1.0
        return net.last(F.linear(x, weight, net.first.bias).relu())

    return vectors(Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)))


@operation
def weight_with_zeros_written_into_a_copy() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        weight = net.first.weight * 2
        weight.diagonal().zero_()
        return net.last(F.linear(x, weight, net.first.bias).relu())

    return vectors(Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)))


@operation
def weight_plus_the_identity() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(F.linear(net.first(x).relu(), net.W + torch.eye(6).double()).relu())

    return vectors(Net(forward, first=nn.Linear(4, 6), W=parameter(6, 6), last=nn.Linear(6, 3)))


@operation
def transposed_in_memory() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(F.linear(x, net.W.t().view(-1).view(4, 6).t()).relu())

    # A parameter may lie in memory as it likes, and the forward pass may rely on it.
    W = nn.Parameter(torch.empty_strided((6, 4), (1, 6), dtype=torch.float64).copy_(torch.randn(6, 4)))
    return vectors(Net(forward, W=W, last=nn.Linear(6, 3)), count=6)


@operation
def weight_of_a_bilinear_layer() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(net.bilinear(net.first(x).relu(), net.second(x)))

    parts = {"first": nn.Linear(4, 3), "second": nn.Linear(4, 2), "bilinear": nn.Bilinear(3, 2, 4)}
    return vectors(Net(forward, **parts, last=nn.Linear(4, 3)))


# Gates: linear in one half, which is free, and not in the other.


@operation
def gated_linear_unit() -> Tried:
    return vectors(between(lambda net, h: F.glu(h), after=3))


@operation
def gated_linear_unit_of_channels() -> Tried:
    return images(on_images(lambda net, h: F.glu(h, 1), channels=6, after=3))


# What the outputs do not depend on.


@operation
def second_head_thrown_away() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        net.head(net.neck(h).relu())
        h.tanh().mean()
        return h.relu()

    return vectors(between(middle, neck=nn.Linear(6, 5), head=nn.Linear(5, 2)))


@operation
def half_of_the_units_thrown_away() -> Tried:
    return vectors(between(lambda net, h: h.relu().chunk(2, 1)[0], after=3))


@operation
def half_of_the_units_of_two_layers_thrown_away() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        mean, deviation = h.relu().chunk(2, 1)
        return torch.cat([net.mean(mean), net.deviation(deviation)], 1)[:, :4]

    return vectors(between(middle, after=4, mean=nn.Linear(3, 4), deviation=nn.Linear(3, 4)))


# Products.


@operation
def matrices_from_either_side() -> Tried:
    return vectors(Net(lambda net, x: (net.B @ (net.A @ x.T).relu()).T, A=parameter(5, 4), B=parameter(3, 5)))


@operation
def vector_by_vector() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return torch.stack([net.B @ (net.A @ each).relu() for each in x])

    return vectors(Net(forward, A=parameter(5, 4), B=parameter(3, 5)))


@operation
def einsum_of_weights() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return torch.einsum("nh,oh->no", torch.einsum("ni,hi->nh", x, net.A).relu(), net.B)

    return vectors(Net(forward, A=parameter(5, 4), B=parameter(3, 5)))


@operation
def einsum_of_attention() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        scores = torch.einsum("ntd,nsd->nts", net.q(x), net.k(x)).softmax(-1)
        return net.last(torch.einsum("nts,nsd->ntd", scores, net.v(x)))

    parts = {key: nn.Linear(4, 5) for key in "qkv"}
    return Tried(Net(forward, **parts, last=nn.Linear(5, 3)), reals(4, 3, 4))


@operation
def experts_in_one_parameter() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        chosen = net.gate(x).softmax(-1).mT[:, :, None]
        return (chosen * torch.bmm(torch.bmm(x.expand(2, *x.shape), net.A).relu(), net.B)).sum(0)

    return vectors(Net(forward, gate=nn.Linear(4, 2), A=parameter(2, 4, 5), B=parameter(2, 5, 3)))


@operation
def constant_matrix_with_zeros() -> Tried:
    # Which sums are taken is another one for every column: a zero must not hide what the others ask for.
    mix = torch.tensor([[1.0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1]], dtype=torch.float64)

    def forward(net: Any, x: Tensor) -> Any:
        return net.last((torch.stack([net.first(x), net.second(x)], 1).relu() @ mix).flatten(1))

    return vectors(Net(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4), last=nn.Linear(8, 3)))


@operation
def attention_to_an_added_zero() -> Tried:
    model = nn.MultiheadAttention(4, 2, batch_first=True, add_zero_attn=True)
    return Tried(Net(lambda net, x: net.m(x, x, x, need_weights=False)[0], m=model), reals(4, 3, 4))


@operation
def outer_product() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last((net.first(x).relu()[:, :, None] * net.second(x).relu()[:, None, :]).flatten(1))

    return vectors(Net(forward, first=nn.Linear(4, 3), second=nn.Linear(4, 2), last=nn.Linear(6, 3)))


@operation
def linear_attention() -> Tried:
    parts = {"q": nn.Linear(4, 3), "k": nn.Linear(4, 3), "v": nn.Linear(4, 5), "last": nn.Linear(5, 2)}
    model = Net(lambda net, x: net.last(net.q(x).relu() @ (net.k(x).relu().mT @ net.v(x))), **parts)
    return Tried(model, reals(4, 3, 4))


@operation
def factor_per_channel() -> Tried:
    return vectors(between(lambda net, h: h.relu() * net.g, g=parameter(6)))


@operation
def factor_for_all() -> Tried:
    return vectors(between(lambda net, h: h.relu() * net.g, g=parameter()))


@operation
def factor_before_a_sum() -> Tried:
    return vectors(between(lambda net, h: h + net.g * net.inner(h).relu(), g=parameter(1), inner=nn.Linear(6, 6)))


@operation
def gates_of_parameters() -> Tried:
    return vectors(between(lambda net, h: net.g * h.relu() + (1 - net.g) * h, g=parameter(6)))


@operation
def squares_and_roots() -> Tried:
    return vectors(between(lambda net, h: torch.cat([h.relu() ** 2, h.abs() ** (1 / 3), h.abs().sqrt()], 1), after=18))


@operation
def power_that_is_no_fraction() -> Tried:
    reason = "a power that is no fraction of small numbers is taken to allow nothing"
    return vectors(between(lambda net, h: h.abs() ** 1.4142135623), less=reason)


@operation
def division_rounded_down() -> Tried:
    return vectors(between(lambda net, h: torch.div(h.relu(), net.c, rounding_mode="floor"), c=parameter(6)), count=0)


@operation
def embedding_and_tied_head() -> Tried:
    def forward(net: Any, tokens: Tensor) -> Any:
        return F.linear(net.inner(net.table(tokens)).relu(), net.table.weight)

    return Tried(Net(forward, table=nn.Embedding(5, 4), inner=nn.Linear(4, 4)), integers(5, 4, 3))


@operation
def bags_of_embeddings() -> Tried:
    return Tried(nn.Sequential(nn.EmbeddingBag(5, 4), nn.ReLU(), nn.Linear(4, 3)), integers(5, 4, 3))


# Attention as torch has it.


@operation
def attention_of_three_widths() -> Tried:
    model = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True)
    inputs = (reals(4, 3, 4), reals(4, 5, 3), reals(4, 5, 2))
    return Tried(Net(lambda net, *given: net.m(*given, need_weights=False)[0], m=model), inputs)


@operation
def attention_with_biases_as_keys_and_values() -> Tried:
    model = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, add_bias_kv=True, batch_first=True)
    inputs = (reals(4, 3, 4), reals(4, 5, 3), reals(4, 5, 2))
    return Tried(Net(lambda net, *given: net.m(*given, need_weights=False)[0], m=model), inputs)


@operation
def encoder_layer() -> Tried:
    return Tried(nn.TransformerEncoderLayer(4, 2, 5, batch_first=True), reals(4, 3, 4))


@operation
def encoder_layer_with_norms_first() -> Tried:
    return Tried(nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, norm_first=True), reals(4, 3, 4))


@operation
def decoder_layer() -> Tried:
    return Tried(nn.TransformerDecoderLayer(4, 2, 5, batch_first=True), (reals(4, 3, 4), reals(4, 2, 4)))


@operation
def rotated_queries_and_keys() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        angles = torch.arange(1.0, 4.0, dtype=torch.float64)[:, None]

        def rotated(z: Tensor) -> Tensor:
            return z * angles.cos() + torch.cat([-z[..., 2:], z[..., :2]], -1) * angles.sin()

        return net.last((rotated(net.q(x)) @ rotated(net.k(x)).mT).softmax(-1) @ net.v(x))

    parts = {"q": nn.Linear(4, 4), "k": nn.Linear(4, 4), "v": nn.Linear(4, 5)}
    return Tried(Net(forward, **parts, last=nn.Linear(5, 2)), reals(4, 3, 4))


@operation
def fewer_keys_than_queries() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        q, k, v = (each(x).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (net.q, net.k, net.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return net.last(y.transpose(1, 2).flatten(2))

    parts = {"q": nn.Linear(4, 8), "k": nn.Linear(4, 4), "v": nn.Linear(4, 4)}
    return Tried(Net(forward, **parts, last=nn.Linear(8, 2)), reals(4, 3, 4))


@operation
def mask_of_large_negative_numbers() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        scores = (net.q(x) @ net.k(x).mT).masked_fill(torch.ones(3, 3).triu(1) > 0, -1e9)
        return net.last(scores.softmax(-1) @ net.v(x))

    parts = {key: nn.Linear(4, 3) for key in "qkv"}
    return Tried(Net(forward, **parts, last=nn.Linear(3, 2)), reals(4, 3, 4))


# Recurrent layers.


@operation
def long_short_term_memory() -> Tried:
    model = Net(lambda net, x: net.last(net.m(x)[0][:, -1]), m=nn.LSTM(3, 4, batch_first=True), last=nn.Linear(4, 2))
    return Tried(model, reals(4, 3, 3))


@operation
def long_short_term_memory_cell() -> Tried:
    # It starts from zeros: the weights of the state have no effect and are not moved.
    return vectors(Net(lambda net, x: net.last(net.m(x)[0]), m=nn.LSTMCell(4, 4), last=nn.Linear(4, 2)))


@operation
def recurrent_relu() -> Tried:
    m = nn.RNN(3, 4, nonlinearity="relu", batch_first=True)
    return Tried(Net(lambda net, x: net.last(net.m(x)[0][:, -1]), m=m, last=nn.Linear(4, 2)), reals(4, 3, 3))


# Written in place.


@operation
def views_written_in_place() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        h[:, :2].relu_()
        h[:, 2:4].mul_(0.5).abs_()
        h[:, 4:] += 1.0
        return h

    return vectors(between(middle), count=4)


@operation
def zeros_then_filled() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        out = h.new_zeros(h.shape[0], 13)
        out[:, 1::2] = h
        out[:, :-1:2] = h.relu()
        return out

    return vectors(between(middle, after=13))


@operation
def memory_then_filled() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        out = torch.empty(len(h), 12, dtype=h.dtype)
        out[:, ::2], out[:, 1::2] = h, h.relu()
        return out

    return vectors(between(middle, after=12), count=6)


@operation
def results_put_where_told() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        out = torch.zeros(len(h), 12, dtype=h.dtype)
        torch.mul(h, 2.0, out=out[:, :6])
        torch.clamp(h, min=0, out=out[:, 6:])
        return out

    return vectors(between(middle, after=12), count=6)


@operation
def places_written_by_constant_numbers() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        out = h.new_zeros(len(h), 8)
        out[:, [1, 3, 5, 0, 2, 7]] = h.relu()
        return out

    return vectors(between(middle, after=8), count=6)


@operation
def negative_numbers_set_to_zero() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        h[h < 0] = 0
        return h

    return vectors(between(middle), count=6)


@operation
def large_numbers_set_to_zero() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        h[h > 1] = 0
        return h

    return vectors(between(middle), count=0)


@operation
def constant_that_is_written_to_and_read_again() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        steps = torch.ones(2, 6, dtype=h.dtype)
        copy = steps.clone()
        copy[0] = h[0]  # what was copied stays a constant
        return torch.cat([h.relu() * steps[0], copy[1:].expand(len(h), -1)], 1)

    return vectors(between(middle, after=12), count=6)


@operation
def written_behind_autograd() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        out.data.copy_(h.data.relu())
        return out

    return vectors(between(middle), count=6)


# Choices.


@operation
def chosen_by_a_constant_mask() -> Tried:
    even = torch.arange(6) % 2 == 0
    return vectors(between(lambda net, h: torch.where(even, h, h.new_zeros(()))))


@operation
def chosen_by_sign() -> Tried:
    return vectors(between(lambda net, h: torch.where(h > 0, h, 0.1 * h)))


@operation
def chosen_by_the_input() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        h = net.first(x).relu()
        return net.last(torch.where(x[:, :1] > 0, h, h.flip(1)))

    return vectors(Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)))


@operation
def masks_side_by_side() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(net.first(x).relu() * torch.cat([x > 0, x < 0], 1))

    return vectors(Net(forward, first=nn.Linear(4, 8), last=nn.Linear(8, 3)))


@operation
def largest_of_pairs() -> Tried:
    return vectors(between(lambda net, h: h.unflatten(1, (3, 2)).amax(-1), after=3))


@operation
def largest_kept() -> Tried:
    # A choice has no derivative, so numbers alone would not see that it compares units with each other.
    return vectors(between(lambda net, h: h * (h >= h.topk(3, dim=1)[0][:, -1:])), count=1)


@operation
def sorted_units() -> Tried:
    return vectors(between(lambda net, h: h.sort(dim=1)[0]))


@operation
def cut_at_one() -> Tried:
    return vectors(between(lambda net, h: h.clamp(0, 1)))


@operation
def cut_at_a_tensor_of_zeros() -> Tried:
    return vectors(between(lambda net, h: h.clamp(min=torch.zeros(6).double())))


@operation
def gathered_by_constant_numbers() -> Tried:
    return vectors(between(lambda net, h: h.relu()[:, [2, 0, 0, 5]], after=4))


@operation
def gathered_by_the_input() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(net.first(x).relu().gather(1, x.argsort(-1)))

    return vectors(Net(forward, first=nn.Linear(4, 6), last=nn.Linear(4, 3)))


@operation
def gathered_by_tokens_side_by_side() -> Tried:
    def forward(net: Any, tokens: Tensor) -> Any:
        return net.last(net.first(tokens.double()).relu().gather(1, torch.cat([tokens, tokens - 1], 1)))

    return Tried(Net(forward, first=nn.Linear(3, 5), last=nn.Linear(6, 3)), 1 + integers(4, 4, 3))


@operation
def position_chosen_by_the_input() -> Tried:
    def forward(net: Any, tokens: Tensor) -> Any:
        last = (tokens != 0).sum(-1) - 1
        return net.last(net.table(tokens)[torch.arange(len(tokens)), last].relu())

    return Tried(Net(forward, table=nn.Embedding(5, 4), last=nn.Linear(4, 3)), integers(5, 4, 3))


@operation
def examples_chosen_by_a_mask() -> Tried:
    model = Net(
        lambda net, x: net.last(net.first(x)[x[:, 0] > -1e9].relu()), first=nn.Linear(4, 6), last=nn.Linear(6, 3)
    )
    return vectors(model, count=6)


@operation
def messages_summed_over_edges() -> Tried:
    start, end = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])

    def middle(net: Any, h: Tensor) -> Tensor:
        return torch.zeros_like(h).index_add(0, end, h.relu()[start])

    return vectors(between(middle))


@operation
def messages_maximised_over_edges() -> Tried:
    end = torch.tensor([1, 2, 3, 1])[:, None].expand(4, 6)
    return vectors(between(lambda net, h: torch.zeros_like(h).scatter_reduce(0, end, h.relu(), "amax")))


@operation
def repeated_as_often_as_a_tensor_says() -> Tried:
    often = torch.tensor([1, 2, 1, 2, 1, 2])
    return vectors(between(lambda net, h: h.relu().repeat_interleave(often, 1), after=9))


# Moved about.


@operation
def rolled() -> Tried:
    return vectors(between(lambda net, h: torch.cat([h, torch.roll(h.relu(), 1, -1)], 1), after=12))


@operation
def rolled_and_added() -> Tried:
    return vectors(between(lambda net, h: h + torch.roll(h, 2, -1)))


@operation
def pixels_shuffled() -> Tried:
    return images(on_images(lambda net, h: F.pixel_shuffle(h.relu(), 2), 8, 2))


@operation
def pixels_unshuffled() -> Tried:
    return images(on_images(lambda net, h: F.pixel_unshuffle(h.relu(), 2), 2, 8))


@operation
def channels_shuffled() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        n, c, height, width = h.shape
        return h.relu().view(n, 2, c // 2, height, width).transpose(1, 2).reshape(n, c, height, width)

    return images(on_images(middle, 4, 4))


@operation
def padded_with_ones() -> Tried:
    return vectors(between(lambda net, h: F.pad(h.relu(), (1, 1), value=1.0), after=8))


@operation
def padded_with_the_edge() -> Tried:
    return images(on_images(lambda net, h: F.pad(h.relu(), (1, 1, 1, 1), mode="replicate"), 3, 3))


@operation
def patches_unfolded() -> Tried:
    return images(on_images(lambda net, h: F.unfold(h.relu(), 2).unflatten(-1, (3, 3)), 3, 12))


@operation
def channels_last_in_memory() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        h = net.first(x.contiguous(memory_format=torch.channels_last)).relu()
        return net.last(h.permute(0, 2, 3, 1).view(len(x), -1, 3))

    return images(Net(forward, first=nn.Conv2d(2, 3, 3), last=nn.Linear(3, 2)), count=3)


@operation
def parameters_as_tokens() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(torch.cat([net.token.expand(len(x), -1, -1), net.first(x)], 1).relu())

    model = Net(forward, token=parameter(1, 2, 5), first=nn.Linear(4, 5), last=nn.Linear(5, 3))
    return Tried(model, reals(4, 3, 4))


@operation
def an_empty_part() -> Tried:
    return vectors(between(lambda net, h: torch.cat([h[:, :0], h.relu()], 1)))


# Norms.


@operation
def divided_by_its_length() -> Tried:
    return vectors(between(lambda net, h: h / h.norm(dim=1, keepdim=True)))


@operation
def normalized() -> Tried:
    # max(length, 1e-12): no draw of the numerical search is so small.
    return vectors(between(lambda net, h: F.normalize(h, dim=1)), less="lengths are cut at 1e-12")


@operation
def standardized() -> Tried:
    return vectors(between(lambda net, h: (h - h.mean(1, keepdim=True)) / h.std(1, keepdim=True)))


@operation
def divided_by_the_root_of_the_variance() -> Tried:
    return vectors(between(lambda net, h: h / h.var(1, keepdim=True).sqrt()))


@operation
def number_of_active_units() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        count: Tensor = torch.linalg.vector_norm(h.relu(), 0, dim=1, keepdim=True)
        return h.relu() * count

    return vectors(between(middle))


@operation
def instance_norm() -> Tried:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.ReLU(), nn.Flatten())
    return Tried(nn.Sequential(model, nn.Linear(15, 2)), reals(4, 2, 6))


@operation
def batch_norm_without_statistics() -> Tried:
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    return vectors(nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 3)))


@operation
def batch_norm_without_factors() -> Tried:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 3))
    return vectors(with_history(model, 8, 4))


@operation
def batch_norm_used_twice() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(net.norm(net.first(x)).relu() + net.norm(net.second(x)))

    parts = {"first": nn.Linear(4, 6), "second": nn.Linear(4, 6), "norm": nn.BatchNorm1d(6)}
    return vectors(with_history(Net(forward, **parts, last=nn.Linear(6, 3)), 8, 4))


@operation
def mean_of_powers() -> Tried:
    return images(on_images(lambda net, h: F.lp_pool2d(h.relu(), 3, 2), 3, 3))


@operation
def squeeze_and_excite() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        return h * torch.sigmoid(h.mean((2, 3), keepdim=True))

    return images(on_images(middle, 3, 3))


# Complex numbers.


@operation
def turned_in_the_complex_plane() -> Tried:
    turns = torch.polar(torch.ones(3, dtype=torch.float64), torch.arange(1.0, 4.0, dtype=torch.float64))

    def middle(net: Any, h: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(h.unflatten(1, (3, 2))) * turns).flatten(1).relu()

    return vectors(between(middle))


@operation
def lengths_of_complex_numbers() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        z = torch.complex(h[:, :3], h[:, 3:])
        return torch.cat([z, z.conj()], 1).abs()

    return vectors(between(middle))


@operation
def fourier_transform() -> Tried:
    def middle(net: Any, h: Tensor) -> Tensor:
        back: Tensor = torch.fft.irfft2(2 * torch.fft.rfft2(h), s=h.shape[-2:])
        return back.relu()

    return images(on_images(middle, 3, 3))


# Ways to run it.


@operation
def detached() -> Tried:
    return vectors(between(lambda net, h: h.relu().data + h.detach()), count=6)


@operation
def checkpointed() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(checkpoint(lambda y: net.first(y).relu(), x, use_reentrant=False))

    return vectors(Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)), count=6)


class Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found: Tensor = gradient * (ctx.saved_tensors[0] > 0)
        return found


@operation
def function_with_a_backward_of_its_own() -> Tried:
    return vectors(between(lambda net, h: Rectified.apply(h)), count=6)  # type: ignore[no-untyped-call]


@operation
def mapped_over_examples() -> Tried:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(torch.func.vmap(lambda each: net.first(each).relu())(x))

    return vectors(Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)))


@operation
def hooks() -> Tried:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    model[0].register_forward_hook(lambda module, given, out: out.abs() * 3)
    model[2].register_forward_pre_hook(lambda module, given: (given[0].flip(1),))
    return vectors(model)


# Nothing is known of these.


@operation
def distances() -> Tried:
    model = between(lambda net, h: torch.cdist(h, net.P), after=5, P=parameter(5, 6))
    return vectors(model, less="no rule", unknown=("aten._cdist_forward",))


@operation
def bessel_function() -> Tried:
    return vectors(between(lambda net, h: torch.special.bessel_j0(h)), count=0, unknown=("aten.special_bessel_j0",))


@cache
def group_of(name: str) -> Symmetries:
    tried = OPERATIONS[name]()
    return find_symmetries(tried.model, tried.inputs)


@cache
def freedom_of(name: str) -> Freedom:
    tried = OPERATIONS[name]()
    return freedom(Case(tried.model, [(tried.inputs, torch.zeros(4))], "mse", F.mse_loss))


def run(model: nn.Module, inputs: Any) -> list[Tensor]:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        found = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return [leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_rescalings_keep_the_function_on_inputs_never_seen(name: str) -> None:
    tried, group = OPERATIONS[name](), group_of(name)
    same_on_fresh_inputs(tried, [apply_rescaling(tried.model, group, group.sample(seed)) for seed in range(4)])


@pytest.mark.parametrize("name", OPERATIONS)
def test_rescalings_pass_the_check(name: str) -> None:
    tried = OPERATIONS[name]()
    same_on_fresh_inputs(tried, [rescale(tried.model, tried.inputs, seed=5, strict=True)])


def same_on_fresh_inputs(tried: Tried, models: list[nn.Module]) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = tree_map(lambda x: fresh(x, generator), tried.inputs)
    for other in models:
        for before, after in zip(run(tried.model, inputs), run(other, inputs), strict=True):
            assert float((after - before).abs().max()) <= 1e-9 * float(before.abs().max())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, in the numerical search
@pytest.mark.parametrize("name", [name for name in OPERATIONS if OPERATIONS[name]().count is None])
def test_an_operation_is_as_free_as_numbers_show(name: str) -> None:
    tried, group, freed = OPERATIONS[name](), group_of(name), freedom_of(name)
    columns = columns_of(group, freed)
    for column in columns.mT:
        assert freed.outside(column) <= 1e-9 * float(column.norm())
    # Every scale that is counted has an effect.
    assert rank(columns) == group.scales
    if tried.less:
        assert rank(columns) < freed.dimension
    else:
        assert rank(columns) == freed.dimension


@pytest.mark.parametrize("name", [name for name in OPERATIONS if OPERATIONS[name]().count is not None])
def test_an_operation_is_as_free_as_counted_by_hand(name: str) -> None:
    assert group_of(name).scales == OPERATIONS[name]().count


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_without_a_rule_are_listed(name: str) -> None:
    unknown = [each for each in group_of(name).obstacles if not each.known]
    assert tuple(each.operation for each in unknown) == OPERATIONS[name]().unknown
    assert all(each.line.startswith("test_operations.py:") for each in unknown)


def test_the_operation_that_stands_in_the_way_is_named_by_module_and_line() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.special.bessel_j0(x)
            return y + x

    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), Inner()), nn.Linear(6, 3))
    (found,) = find_symmetries(model, torch.randn(2, 4)).obstacles
    assert (found.operation, found.where, found.known, found.pinned) == ("aten.special_bessel_j0", "1.1", False, 6)
    assert found.line.endswith(": y: Tensor = torch.special.bessel_j0(x)")
    assert found.line.startswith("test_operations.py:")


def test_operations_of_other_libraries_are_listed_by_their_own_name() -> None:
    @torch.library.custom_op("saltflat_tests::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    model = between(lambda net, h: doubled(h))
    (found,) = find_symmetries(model, torch.randn(2, 4)).obstacles
    assert (found.operation, found.known) == ("saltflat_tests.doubled", False)


def test_lower_precision_inside_of_the_forward_pass_changes_nothing() -> None:
    def middle(net: Any, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low: Tensor = net.inner(h.relu())
        return low.to(h.dtype)

    torch.manual_seed(0)
    model, x = between(middle, inner=nn.Linear(6, 6)), torch.randn(8, 4)
    assert find_symmetries(model, x).scales == 12
    # In float64, where functions are compared, nothing is cast; with powers of two bfloat16 is exact as well.
    other = rescale(model, x)
    torch.testing.assert_close(other(x), model(x), rtol=0.1, atol=0.1)
    group = find_symmetries(model, x)
    doubled = apply_rescaling(model, group, np.log(2.0) * np.arange(-6, 6))
    torch.testing.assert_close(doubled(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is first imported
def test_a_compiled_model_is_looked_at_uncompiled() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    compiled: Any = torch.compile(model)
    other: Any = rescale(compiled, x)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(other(x), model(x), rtol=1e-9, atol=1e-9)
    assert not torch.equal(
        dict(other.named_parameters())["_orig_mod.0.weight"], dict(model.named_parameters())["0.weight"]
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_functions_are_looked_into() -> None:
    @torch.jit.script
    def active(x: Tensor) -> Tensor:
        return torch.relu(x) * 2.0 + torch.abs(x)

    model, x = between(lambda net, h: active(h)).double(), reals(4, 4)
    group = find_symmetries(model, x)
    assert group.scales == 6
    assert not group.obstacles
    rescale(model, x)
