"""The claims of all measures on networks as people write them, under the rescalings that are found in each."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from architectures import LISTED, NETWORKS
from cases import Case
from laws import CLAIMED, LARGEST_MOVE, LEAST_MOVE, UNCLAIMED, furthest, readings, start_of
from rank_oracle import inputs_of

import saltflat
from saltflat.measures.registry import MEASURES, SYMMETRIES
from saltflat.symmetry.group import RescalingKind

KINDS: dict[str, RescalingKind] = {"layer_scale": "layer", "unit_scale": "unit"}
SEEDS = (0, 1)
HARD = [name for name in NETWORKS if name not in LISTED]
CLAIMING = list(dict.fromkeys(name for name, _ in CLAIMED))

# Where mathematics ends a claim: layers that are given one feature at several scales, or have several in one kernel.
LIMITS = {
    # Features are brought to unit deviation over all that the layer is given. Where a feature's scale differs from call
    # to call, or from position to position, the deviation of them all follows none of these scales.
    ("relative_flatness", "layer_scale"): ["shared_layer_without_biases"],
    ("relative_flatness", "unit_scale"): [
        "shared_layer_without_biases",
        "mixer_without_biases",
        "generator_without_biases",
    ],
    # Sizes that grow from position to position give the entries of one kernel different factors. These three take rows
    # and columns as they are best, but not the positions of a kernel.
    ("normalized_sharpness", "unit_scale"): ["generator_without_biases"],
    ("normalized_sharpness_arxiv", "unit_scale"): ["generator_without_biases"],
    ("normalized_sharpness_printed", "unit_scale"): ["generator_without_biases"],
}


def rescaled(case: Case, symmetry: str, seed: int) -> Case:
    example = inputs_of(case.batches[0])
    return replace(case, model=saltflat.rescale(case.model, example, seed, kind=KINDS[symmetry]))


@cache
def before(network: str) -> dict[str, float]:
    case = NETWORKS[network]()
    return readings(case, start_of(case), MEASURES if network in LISTED else CLAIMING)


@cache
def after(network: str, symmetry: str, seed: int) -> dict[str, float]:
    case = NETWORKS[network]()
    return readings(rescaled(case, symmetry, seed), start_of(case), MEASURES if network in LISTED else CLAIMING)


def test_every_symmetry_has_a_kind_of_rescaling() -> None:
    assert set(KINDS) == set(SYMMETRIES)


@pytest.mark.parametrize("network", LISTED)
@pytest.mark.parametrize(("name", "symmetry"), CLAIMED)
def test_a_measure_does_not_notice_what_it_claims_not_to(name: str, symmetry: str, network: str) -> None:
    for seed in SEEDS:
        old, new = before(network)[name], after(network, symmetry, seed)[name]
        assert new == pytest.approx(old, rel=LARGEST_MOVE, nan_ok=True)


@pytest.mark.parametrize(("name", "symmetry"), UNCLAIMED)
def test_a_measure_notices_what_it_does_not_claim_not_to(name: str, symmetry: str) -> None:
    pairs = [(before(each)[name], after(each, symmetry, seed)[name]) for each in LISTED for seed in SEEDS]
    assert furthest(name, pairs) > LEAST_MOVE[MEASURES[name].logarithmic]


@pytest.mark.parametrize("network", HARD)
@pytest.mark.parametrize(("name", "symmetry"), CLAIMED)
def test_a_measure_keeps_its_claim_on_hard_networks(name: str, symmetry: str, network: str) -> None:
    old, new = before(network)[name], after(network, symmetry, 0)[name]
    if network in LIMITS.get((name, symmetry), ()):
        assert abs(new / old - 1) > 1e-3, "there is no such limit"
    else:
        assert new == pytest.approx(old, rel=LARGEST_MOVE, nan_ok=True)


# No value: parameters of two axes that no layer multiplies its inputs by, and inputs that are whole numbers.
UNDEFINED = {
    ("relative_flatness", "vit_block"),
    ("relative_flatness", "gpt_like_decoder"),
    ("relative_flatness", "tied_embedding_decoder"),
    ("input_robustness", "gpt_like_decoder"),
    ("input_robustness", "tied_embedding_decoder"),
    ("relative_flatness", "heads_and_experts"),
    ("relative_flatness", "tokens_and_pairs"),
    ("input_margin", "gpt_like_decoder"),
    ("input_margin", "tied_embedding_decoder"),
    ("input_margin", "unet_like"),
}
# Outputs that are no sums over paths: normalization, attention, gates, smooth activations.
WITHOUT_PATHS = {
    *("vgg_with_batch_norm", "resnet20_with_padded_shortcuts", "resnet18_with_convolutional_shortcuts"),
    *("preactivation_wide_resnet", "densenet_block", "mobilenet_like", "group_and_rms_norm", "norms_without_eps"),
    *("vit_block", "gpt_like_decoder", "tied_embedding_decoder", "heads_and_experts", "tokens_and_pairs"),
    *("unet_like", "gelu_only", "gated", "squeeze_and_excitation"),
}
UNDEFINED |= {("path_norm", network) for network in WITHOUT_PATHS}


def test_nearly_every_claim_is_about_a_number() -> None:
    found = {(name, network) for network in NETWORKS for name in CLAIMING if not math.isfinite(before(network)[name])}
    assert found == UNDEFINED
