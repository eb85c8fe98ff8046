"""The numerical count of rescalings against counts by hand, and the networks it is taken of."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import rank_oracle
import torch
from architectures import LISTED, NETWORKS
from cases import Case, Net, integers, problem, reals, targets_of
from rank_oracle import Freedom, UnclearGapError, batch_norms, freedom, inputs_of, outputs_of, zeros
from torch import Tensor, nn
from torch.testing import assert_close

# By hand. A unit between weights has one free size if its activation is positively homogeneous. A channel before a
# BatchNorm has one (the statistics follow), and after it another (gamma and beta lead there). Sums tie their terms.
COUNTS = {
    "biased_mlp": 8 + 6,
    "lenet5": 3 + 4 + 8 + 6,
    "vgg_with_batch_norm": 2 * (4 + 6) + 8,
    # Before every BatchNorm; inside of every block; and one stream for all stages, the last and widest counts.
    "resnet20_with_padded_shortcuts": (2 + 2 * (2 + 4 + 6)) + (2 + 4 + 6) + 6,
    # The same, but the shortcut convolution has a BatchNorm too and ends the first stream.
    "resnet18_with_convolutional_shortcuts": (3 + 2 * 3 + 3 * 5) + (3 + 5) + (3 + 5),
    # The streams feed BatchNorms only: 3 and 4. Then the three or two places inside of each block, and the last norm.
    "preactivation_wide_resnet": (3 + 4) + (3 + 4 + 4) + (4 + 4 + 4) + 4,
    # Stem; each layer's norm, bottleneck, norm and growth; the transition's norm and convolution; the last norm.
    "densenet_block": 4 + (4 + 4 + 4 + 2) + (6 + 4 + 4 + 2) + (8 + 4) + 4,
    # Only before the BatchNorms, as what is clipped at 6 is fixed; and the stream of three, which is not clipped.
    "mobilenet_like": (4 + (6 + 6 + 3) + (6 + 6 + 3) + 5) + 3,
    "unet_like": 3 + 4 + 5 + 4 + 3,
    # After each of three LayerNorms, query against key, value against output; nothing before a LayerNorm or GELU.
    "vit_block": 3 * 6 + 6 + 6,
    "gpt_like_decoder": 3 * 6 + 6 + 6 + 10,
    "gelu_only": 0,
    # The table is fixed by the stream it fills, so the last LayerNorm, which it reads, is too.
    "tied_embedding_decoder": 2 * 6 + 6 + 6 + 10,
    # Sizes d, e, f before, between and after the two uses: W_ij takes e_i - d_j = f_i - e_j, and the bias e_i = f_i.
    "shared_layer": 5,
    # Without the bias d, e, f may differ by one common step.
    "shared_layer_without_biases": 5 + 1,
    "gated": 6 + 6,
    # Channels first, positions, channels last: sizes u_c, then u_c + v_t, then w_k + v_t.
    "mixer_without_biases": 4 + 5 + 3,
    "squeeze_and_excitation": 4 + 3,
    "prelu_and_leaky": 6 + 5 + 5,
    "transposed_and_grouped": 6 + 4 + 3,
    "generator": 2 + 2,
    # Tap k leads from position i to 2 i + k. Sizes may grow by one factor per position, and odd positions, which tap 1
    # alone leads to, have a size of their own in each of the two channels.
    "generator_without_biases": 2 + 2 + 1 + 2,
    "group_and_rms_norm": 4 + 6 + 5,
    # Also before the norms: one size for each of two groups, one for each of the other two norms.
    "norms_without_eps": (4 + 6 + 5) + (2 + 1 + 1),
    "no_symmetry": 0,
    # The lift, two heads of three, and two experts of four.
    "heads_and_experts": 5 + 6 + 8,
    # The token with its position, the others with theirs, and of the pairs the half that is gated.
    "tokens_and_pairs": 5 + 5 + 3,
}


@cache
def found(name: str) -> Freedom:
    return freedom(NETWORKS[name]())


def of_vectors(model: nn.Module, width: int = 4) -> Case:
    return problem(model, reals(6, width), integers(3, 6))


def test_every_network_has_a_count_by_hand() -> None:
    assert set(NETWORKS) == set(COUNTS)
    assert len(LISTED) == 12
    assert set(LISTED) <= set(NETWORKS)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_as_many_rescalings_as_counted_by_hand(name: str) -> None:
    assert found(name).dimension == COUNTS[name]
    assert found(name).gap > 1e10


@pytest.mark.parametrize("name", NETWORKS)
def test_a_long_step_along_the_rescalings_keeps_the_function(name: str) -> None:
    case, freed = NETWORKS[name](), found(name)
    generator = torch.Generator().manual_seed(1)
    column = freed.basis @ torch.randn(freed.dimension, dtype=torch.float64, generator=generator)
    column = 3 * column / column.abs().max() if freed.dimension else column
    for batch in case.batches:
        before = outputs_of(case.model, {}, inputs_of(batch)).detach()
        after = outputs_of(case.model, moved(case.model, freed.logs(column)), inputs_of(batch)).detach()
        assert_close(after, before, rtol=1e-9, atol=1e-9 * float(before.abs().max()))


def moved(model: nn.Module, logs: dict[str, Tensor]) -> dict[str, Tensor]:
    values = {name: p * logs[name].exp().view(p.shape) for name, p in model.named_parameters()}
    for prefix, norm in batch_norms(model).items():
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None
        assert variance is not None
        factor = logs[f"{prefix}running_mean"].exp()
        values[f"{prefix}running_mean"] = mean * factor
        values[f"{prefix}running_var"] = (variance + norm.eps) * factor**2 - norm.eps
    return values


@pytest.mark.parametrize("name", NETWORKS)
def test_no_value_of_a_network_is_special_and_no_unit_dead(name: str) -> None:
    case = NETWORKS[name]()
    assert sum(p.numel() for p in case.model.parameters()) < 1500
    for key, value in case.model.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            assert value.dtype == torch.float64
            assert not ((value == 0) | (value == 1)).any(), key
    losses = [case.loss_function(case.model(inputs_of(batch)), targets_of(batch)) for batch in case.batches]
    torch.stack(losses).sum().backward()
    for key, parameter in case.model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.flatten(1 if parameter.ndim > 1 else 0).any(-1).all(), key


def test_a_hidden_unit_multiplies_its_incoming_weights_and_bias_and_divides_its_outgoing_weights() -> None:
    freed = freedom(of_vectors(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))))
    assert freed.dimension == 5
    for unit in range(5):
        row, column = torch.zeros(5, 4), torch.zeros(3, 5)
        row[unit], column[:, unit] = 1, -1
        logs = {"0.weight": row, "0.bias": torch.eye(5)[unit], "2.weight": column}
        assert freed.outside(freed.column(logs)) == pytest.approx(0, abs=1e-12)
        assert freed.outside(freed.column({**logs, "0.bias": torch.zeros(5)})) > 0.1


def test_a_linear_network_has_one_rescaling_per_hidden_unit() -> None:
    # W2 A^-1 A W1 is the same function for every matrix A, but only a diagonal A multiplies entries whatever they are.
    assert freedom(of_vectors(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(2, 3)))).dimension == 5 + 2


def test_at_one_weight_there_are_directions_that_are_no_rescalings(monkeypatch: pytest.MonkeyPatch) -> None:
    case = of_vectors(nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False)))
    assert freedom(case).dimension == 3
    draw = rank_oracle.drawn

    def first_only(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
        return {name: value[:1].expand_as(value) for name, value in draw(model, torch.Generator()).items()}

    monkeypatch.setattr(rank_oracle, "drawn", first_only)
    # Every 3 x 3 matrix A.
    assert freedom(case).dimension == 9


def test_a_channel_with_batch_norm_is_free_before_it_and_after_it() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    freed = freedom(of_vectors(model))
    assert freed.dimension == 2 * 5
    ones = torch.ones(5)
    before = {"0.weight": torch.ones(5, 4), "0.bias": ones, "1.running_mean": ones}
    assert freed.outside(freed.column(before)) == pytest.approx(0, abs=1e-12)
    assert freed.outside(freed.column({"0.weight": torch.ones(5, 4), "0.bias": ones})) > 0.1
    after = {"1.weight": ones, "1.bias": ones, "3.weight": -torch.ones(3, 5)}
    assert freed.outside(freed.column(after)) == pytest.approx(0, abs=1e-12)


def test_a_batch_norm_of_the_inputs_is_free_only_after_it() -> None:
    # The inputs have the size they have. Without an activation, gamma and beta against the next weights.
    assert freedom(of_vectors(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))).dimension == 4
    assert freedom(of_vectors(nn.BatchNorm1d(4))).dimension == 0


def attention(heads_width: int, values_width: int, bias: bool) -> Case:
    def rule(net: Any, x: Tensor) -> Tensor:
        weights = (net.query(x) @ net.key(x).mT).softmax(-1)
        out: Tensor = net.out(weights @ net.value(x))
        return out

    widths = {"query": heads_width, "key": heads_width, "value": values_width}
    parts = {name: nn.Linear(4, width, bias=bias) for name, width in widths.items()}
    return problem(Net(rule, **parts, out=nn.Linear(values_width, 3)), reals(5, 4, 4), integers(3, 5, 4))


@pytest.mark.parametrize("bias", [False, True])
def test_attention_has_one_rescaling_per_channel_of_query_and_key_and_one_per_channel_of_value(bias: bool) -> None:
    # x Wq (x Wk)^T stays when a column of Wq is multiplied and that of Wk divided; softmax fixes their product.
    freed = freedom(attention(3, 2, bias))
    assert freed.dimension == 3 + 2
    # A key bias adds the same to the scores of all keys.
    expected = torch.zeros_like(freed.ineffective)
    if bias:
        expected[freed.blocks["key.bias"]] = True
    assert_close(freed.ineffective, expected)


@pytest.mark.parametrize("activation", [nn.GELU, nn.Tanh, nn.SiLU, nn.Softplus, nn.ReLU6, nn.Hardtanh, nn.ELU])
def test_an_activation_that_knows_its_scale_leaves_nothing_free(activation: Callable[[], nn.Module]) -> None:
    assert freedom(of_vectors(nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3)))).dimension == 0


def residual(start: nn.Module) -> Case:
    def rule(net: Any, x: Tensor) -> Tensor:
        x = net.start(x)
        for down, up in ((net.down1, net.up1), (net.down2, net.up2)):
            x = x + up(down(x).relu())
        out: Tensor = net.head(x.relu())
        return out

    parts = {"down1": nn.Linear(4, 3), "up1": nn.Linear(3, 4), "down2": nn.Linear(4, 2), "up2": nn.Linear(2, 4)}
    return of_vectors(Net(rule, start=start, **parts, head=nn.Linear(4, 3)))


def test_a_residual_stream_has_one_size_per_channel_from_end_to_end() -> None:
    assert freedom(residual(nn.Linear(4, 4))).dimension == 4 + 3 + 2
    # A stream that begins as the inputs has none.
    assert freedom(residual(nn.Identity())).dimension == 3 + 2


@pytest.mark.parametrize(("eps", "before"), [(1e-5, 0), (0.0, 1)])
def test_a_layer_norm_frees_what_comes_in_only_without_eps(eps: float, before: int) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5, eps=eps), nn.Linear(5, 3))
    assert freedom(of_vectors(model)).dimension == 5 + before


def test_entries_without_any_effect_are_no_rescalings() -> None:
    def rule(net: Any, tokens: Tensor) -> Tensor:
        out: Tensor = net.head(net.embed(tokens).sum(1).tanh())
        return out

    model = Net(rule, embed=nn.Embedding(6, 3), head=nn.Linear(3, 3), spare=nn.Linear(2, 2))
    freed = freedom(problem(model, integers(5, 8, 4), integers(3, 8)))
    assert freed.dimension == 0
    expected = torch.zeros_like(freed.ineffective)
    # The last token never occurs.
    expected[freed.blocks["embed.weight"]] = torch.arange(18) >= 15
    expected[freed.blocks["spare.weight"]] = expected[freed.blocks["spare.bias"]] = True
    assert_close(freed.ineffective, expected)


def test_what_is_almost_a_rescaling_is_none_and_what_cannot_be_told_apart_is_refused() -> None:
    def bent(amount: float) -> Case:
        def rule(net: Any, x: Tensor) -> Tensor:
            hidden = net.inner(x)
            out: Tensor = net.head(hidden.relu() + amount * hidden.tanh())
            return out

        return of_vectors(Net(rule, inner=nn.Linear(4, 5), head=nn.Linear(5, 3)))

    assert freedom(bent(0)).dimension == 5
    assert freedom(bent(1e-5)).dimension == 0
    with pytest.raises(UnclearGapError, match=r"Expected less than 1e-12.* or more than 1e-08"):
        freedom(bent(1e-10))
    with pytest.raises(UnclearGapError):
        zeros(torch.tensor([1.0, 1e-11, 1e-16]))


def test_the_model_and_the_random_state_are_left_alone() -> None:
    case = NETWORKS["vgg_with_batch_norm"]()
    values, state = deepcopy(case.model.state_dict()), torch.get_rng_state()
    first, second = freedom(case, seed=3), freedom(case, seed=3)
    assert_close(first.basis, second.basis, rtol=0, atol=0)
    assert_close(dict(case.model.state_dict()), dict(values), rtol=0, atol=0)
    assert_close(torch.get_rng_state(), state)
