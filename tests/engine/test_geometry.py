"""What the axes of a parameter count: the same network in layers of torch must have the same numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Net, integers, reals
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing import assert_close

import saltflat
from saltflat.engine.context import Context
from saltflat.engine.noise import draw_normals
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.landscape.directions import normalize_by_filter
from saltflat.layers import PermutedGeometry
from saltflat.training import penalty

BY_UNIT = (
    "normalized_sharpness",
    "normalized_sharpness_arxiv",
    "normalized_sharpness_printed",
    "normalized_sharpness_printed(side='columns')",
    "rho",
    "rho(axis='row')",
    "rho_max",
    "rho_max(axis='row')",
)
# A network, and another of the same function that is made of layers of torch.
Twins = tuple[nn.Module, nn.Module, tuple[int, ...]]
TWINS: dict[str, Callable[[], Twins]] = {}


def twins(build: Callable[[], Twins]) -> Callable[[], Twins]:
    TWINS[build.__name__] = build
    return build


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(reals(*shape))


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer with this weight, ``(out, in)``."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).double()
    layer.weight.data = weight.detach().clone()
    if bias is not None:
        layer.bias.data = bias.detach().clone()
    return layer


def chain(*weights: Tensor) -> nn.Module:
    layers = [part for weight in weights for part in (nn.ReLU(), linear(weight))]
    return nn.Sequential(*layers[1:])


@twins
def inputs_before_outputs() -> Twins:
    net: Any = Net(lambda net, x: (x @ net.A).relu() @ net.B, A=parameter(4, 6), B=parameter(6, 3))
    return net, chain(net.A.mT, net.B.mT), (8, 4)


@twins
def layers_of_hugging_face() -> Twins:
    conv1d = pytest.importorskip("transformers").pytorch_utils.Conv1D
    net: Any = nn.Sequential(conv1d(6, 4), nn.ReLU(), conv1d(3, 6)).double()
    first, last = (linear(net[place].weight.mT, net[place].bias) for place in (0, 2))
    return net, nn.Sequential(first, nn.ReLU(), last), (8, 4)


@twins
def weight_of_a_layer_from_the_other_side() -> Twins:
    net: Any = Net(
        lambda net, x: net.last((x @ net.first.weight).relu()), first=linear(reals(4, 6)), last=linear(reals(3, 6))
    )
    return net, chain(net.first.weight.mT, net.last.weight), (8, 4)


@twins
def heads_by_einsum() -> Twins:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = torch.einsum("nd,hdk->nhk", net.first(x).relu(), net.A).relu()
        return torch.einsum("koh,nhk->no", net.B, hidden)

    net: Any = Net(forward, first=linear(reals(5, 4)), A=parameter(2, 5, 3), B=parameter(3, 3, 2))
    A, B = net.A.permute(0, 2, 1).flatten(0, 1), net.B.permute(1, 2, 0).flatten(1)
    return net, chain(net.first.weight, A, B), (8, 4)


@twins
def heads_in_one_axis() -> Twins:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = torch.einsum("nd,hdk->nhk", net.first(x).relu(), net.A.view(2, 5, 3)).relu()
        return net.last(hidden.flatten(1))

    net: Any = Net(forward, first=linear(reals(5, 4)), A=parameter(10, 3), last=linear(reals(3, 6)))
    A = net.A.view(2, 5, 3).permute(0, 2, 1).flatten(0, 1)
    return net, chain(net.first.weight, A, net.last.weight), (8, 4)


def experts(net: Any, x: Tensor) -> Any:
    hidden = net.first(x).relu()
    return sum(b(a(hidden).relu()) for a, b in zip(net.a, net.b, strict=True))


def apart(A: Tensor, B: Tensor, first: nn.Linear) -> nn.Module:
    lists = {"a": nn.ModuleList([linear(each.mT) for each in A]), "b": nn.ModuleList([linear(each.mT) for each in B])}
    return Net(experts, first=linear(first.weight), **lists)


@twins
def stacked_experts() -> Twins:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = net.first(x).relu().expand(3, -1, -1)
        return torch.bmm(torch.bmm(hidden, net.A).relu(), net.B).sum(0)

    net: Any = Net(forward, first=linear(reals(5, 4)), A=parameter(3, 5, 6), B=parameter(3, 6, 3))
    return net, apart(net.A, net.B, net.first), (8, 4)


@twins
def experts_one_by_one() -> Twins:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = net.first(x).relu()
        return sum((hidden @ net.A[number]).relu() @ net.B[number] for number in range(3))

    net: Any = Net(forward, first=linear(reals(5, 4)), A=parameter(3, 5, 6), B=parameter(3, 6, 3))
    return net, apart(net.A, net.B, net.first), (8, 4)


@twins
def positions_and_class_token() -> Twins:
    return with_tokens(torch.relu)


def with_tokens(active: Callable[[Tensor], Tensor]) -> Twins:
    def forward(net: Any, x: Tensor) -> Any:
        tokens = torch.cat([net.token.expand(len(x), -1, -1), net.first(x)], 1)
        return net.last(active(tokens + net.position).sum(1))

    def by_tables(net: Any, x: Tensor) -> Any:
        token = net.token(torch.zeros(len(x), 1).long())
        position = net.position(torch.arange(6).expand(len(x), -1))
        return net.last(active(torch.cat([token, net.first(x)], 1) + position).sum(1))

    layers = {"first": linear(reals(6, 4)), "last": linear(reals(3, 6))}
    net: Any = Net(forward, **layers, token=parameter(1, 1, 6), position=parameter(1, 6, 6))
    tables = {
        name: nn.Embedding(value.shape[1], 6, _weight=value.detach().clone()[0])
        for name, value in (("token", net.token), ("position", net.position))
    }
    return net, Net(by_tables, **layers, **tables), (8, 5, 4)


@twins
def bilinear() -> Twins:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(net.both(net.one(x).relu(), net.two(x).relu()).relu())

    def by_pairs(net: Any, x: Tensor) -> Any:
        pairs = torch.einsum("ni,nj->nij", net.one(x).relu(), net.two(x).relu())
        return net.last(net.both(pairs.flatten(1)).relu())

    layers = {"one": linear(reals(5, 4)), "two": linear(reals(2, 4)), "last": linear(reals(3, 6))}
    both = nn.Bilinear(5, 2, 6, bias=False).double()
    return Net(forward, **layers, both=both), Net(by_pairs, **layers, both=linear(both.weight.flatten(1))), (8, 4)


@twins
def grouped_kernel_of_its_own() -> Twins:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(F.conv1d(net.first(x).relu(), net.kernel, groups=2).relu().amax(-1))

    def by_layer(net: Any, x: Tensor) -> Any:
        return net.last(net.inner(net.first(x).relu()).relu().amax(-1))

    layers: dict[str, nn.Module] = {"first": nn.Conv1d(4, 4, 2).double(), "last": linear(reals(3, 6))}
    inner: Any = nn.Conv1d(4, 6, 2, groups=2, bias=False).double()
    return Net(forward, **layers, kernel=inner.weight), Net(by_layer, **layers, inner=inner), (8, 4, 6)


@twins
def packed_attention_of_two_inputs() -> Twins:
    def forward(net: Any, x: Tensor) -> Any:
        query, key = net.norm(net.first(x)), net.other(net.second(x))
        return net.last(net.attention(query, key, key, need_weights=False)[0].mean(1))

    layers: dict[str, nn.Module] = {"norm": nn.LayerNorm(4), "other": nn.LayerNorm(4), "first": nn.Linear(3, 4)}
    layers = {name: each.double() for name, each in layers.items()}
    layers |= {"second": linear(reals(4, 3)), "last": linear(reals(3, 4))}
    packed = nn.MultiheadAttention(4, 2, batch_first=True, bias=False).double()
    # Told that keys might be of another width, the layer keeps three weights.
    apart = nn.MultiheadAttention(4, 2, batch_first=True, bias=False, kdim=4, vdim=4).double()
    apart._qkv_same_embed_dim = False
    for name, part in zip(
        ("q_proj_weight", "k_proj_weight", "v_proj_weight"), packed.in_proj_weight.chunk(3), strict=True
    ):
        apart.register_parameter(name, nn.Parameter(part.detach().clone()))
    apart.register_parameter("in_proj_weight", None)
    apart.out_proj.weight.data = packed.out_proj.weight.detach().clone()
    return Net(forward, **layers, attention=packed), Net(forward, **layers, attention=apart), (8, 5, 3)


def built(name: str) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        odd, plain, shape = TWINS[name]()
        return odd, plain, (reals(*shape), integers(3, shape[0]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, for bilinear layers
@pytest.mark.parametrize("name", TWINS)
def test_a_network_has_the_numbers_of_the_same_in_layers_of_torch(name: str) -> None:
    odd, plain, data = built(name)
    assert_close(odd(data[0]), plain(data[0]), rtol=1e-12, atol=1e-12)
    found, wanted = (saltflat.measure(each, data, measures=list(BY_UNIT), certificate=False) for each in (odd, plain))
    for each in BY_UNIT:
        assert found[each].value == pytest.approx(wanted[each].value, rel=1e-9), each
        assert not any("axes" in note or "rescaling units" in note for note in found[each].notes)
        assert found.legend[each]["invariant_to"] == ["layer_scale", "unit_scale"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TWINS)
def test_rescaling_units_moves_nothing_that_claims_to_stay(name: str) -> None:
    odd, _, data = built(name)
    found = saltflat.audit_invariance(odd, data, measures=BY_UNIT, draws=2, kinds="unit", progress=False)
    assert found.scales["unit"] > 0
    assert {line.verdicts["unit"] for line in found.values()} == {"stays, as claimed"}


def test_positions_have_features_last_where_nothing_is_free() -> None:
    torch.manual_seed(0)
    odd, plain, shape = with_tokens(F.gelu)
    data = reals(*shape), integers(3, shape[0])
    assert saltflat.find_symmetries(odd, data[0]).scales == 0
    found, wanted = (saltflat.measure(each, data, measures=list(BY_UNIT), certificate=False) for each in (odd, plain))
    for each in BY_UNIT:
        assert found[each].value == pytest.approx(wanted[each].value, rel=1e-9), each


# Where factors are none of rows and columns.


def masked() -> nn.Module:
    model = nn.Sequential(linear(reals(6, 4)), nn.ReLU(), linear(reals(3, 6)))
    prune.random_unstructured(model[0], "weight", 0.4)
    return model


def positions_with_sizes_of_their_own() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        return net.last(net.inner(net.first(x).relu().view(-1, 2, 4)).relu().flatten(1))

    inner = nn.ConvTranspose1d(2, 2, 3, stride=2, bias=False).double()
    return Net(forward, first=linear(reals(8, 4)), inner=inner, last=linear(reals(3, 18)))


def values_that_decide() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = (x @ net.A).relu()
        return hidden @ net.B if bool(hidden.sum() > -1) else hidden

    return Net(forward, A=parameter(4, 6), B=parameter(6, 3))


def values_that_leave_torch() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = (x @ net.A).relu()
        return (hidden / torch.as_tensor(np.asarray(hidden.detach()).max(1, keepdims=True) + 1)) @ net.B

    return Net(forward, A=parameter(4, 6), B=parameter(6, 3))


@pytest.mark.parametrize(
    ("build", "where", "why"),
    [
        (masked, "0.weight_orig", "factors that are not products of a row factor"),
        (positions_with_sizes_of_their_own, "inner.weight", "factors that are not products of a row factor"),
        (values_that_decide, "A, B", "could not be found"),
        (values_that_leave_torch, "A, B", "could not be found"),
    ],
)
def test_a_claim_that_does_not_hold_is_withdrawn_in_the_reading(
    build: Callable[[], nn.Module], where: str, why: str
) -> None:
    torch.manual_seed(0)
    model, data = build(), (reals(8, 4), integers(3, 8))
    measures = ["normalized_sharpness", "normalized_sharpness_printed", "rho"]
    report = saltflat.measure(model, data, measures=measures, certificate=False)
    for name in measures[:2]:
        assert any(note.startswith(f"{where}: ") and why in note for note in report[name].notes)
        assert report.legend[name]["invariant_to"] == ["layer_scale"]
    assert report.legend["rho"]["invariant_to"] == ["layer_scale", "unit_scale"]


@pytest.mark.parametrize("build", [masked, positions_with_sizes_of_their_own])
def test_an_audit_expects_what_was_withdrawn_to_move(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    data = reals(8, 4), integers(3, 8)
    found = saltflat.audit_invariance(
        build(), data, measures="normalized_sharpness", draws=2, kinds="unit", progress=False
    )
    assert found.holds
    assert found["normalized_sharpness"].claims == ("layer_scale",)
    assert found["normalized_sharpness"].verdicts["unit"] == "moves, as expected"


# Others that ask.


def test_a_penalty_has_the_value_of_the_measure() -> None:
    odd, _, data = built("stacked_experts")
    wanted = saltflat.measure(odd, data, measures=["rho", "rho(axis='row')"], certificate=False)
    for name, reading in wanted.items():
        assert penalty(name)(odd, data).item() == pytest.approx(reading.value, rel=1e-9)


def test_filters_of_a_landscape_are_the_weights_into_a_unit() -> None:
    odd, _, data = built("inputs_before_outputs")
    context = Context(Problem.build(odd, data), parse_column_plan("exact"), seed=0, limit=1 << 30)
    direction = normalize_by_filter(context, draw_normals(context, 0))["A"]
    assert_close(direction.norm(dim=0), odd.get_parameter("A").detach().norm(dim=0))


def test_units_of_axes_in_any_order_are_counted_group_by_group() -> None:
    arranged = PermutedGeometry.from_roles(torch.Size([6, 4]), (2, 3, 4), ("group", "in", "out"))
    values = torch.arange(24.0).reshape(6, 4)
    columns, count = arranged.index_units("column")
    rows, others = arranged.index_units("row")
    assert (count, others) == (6, 8)
    matrices = arranged.view_as_matrices(values)
    assert matrices.shape == (2, 4, 3, 1)
    for group in range(2):
        for i in range(3):
            assert set(matrices[group, :, i, 0].tolist()) == set(values[columns == 3 * group + i].tolist())
        for o in range(4):
            assert set(matrices[group, o, :, 0].tolist()) == set(values[rows == 4 * group + o].tolist())
