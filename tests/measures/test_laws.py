"""What every measure claims, and what it does not claim, under changes that leave the network's function as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from cases import CASES, Case, batched, examples_of
from chains import CHAINS, layers_of
from laws import CLAIMED, LARGEST_MOVE, LEAST_MOVE, UNCLAIMED, furthest, readings, start_of
from rescalings import layer_rescaled, unit_rescaled
from torch import nn
from torch.nn import functional as F

import saltflat
from saltflat.measures.registry import MEASURES, SYMMETRIES

CHANGES: dict[str, Callable[[Case, int], Case]] = {"layer_scale": layer_rescaled, "unit_scale": unit_rescaled}
SEEDS = (0, 1)


def test_every_symmetry_is_tried() -> None:
    assert set(CHANGES) == set(SYMMETRIES)


@cache
def before(name: str) -> dict[str, float]:
    case = CHAINS[name]()
    return readings(case, start_of(case))


@cache
def after(name: str, symmetry: str, seed: int) -> dict[str, float]:
    case = CHAINS[name]()
    return readings(CHANGES[symmetry](case, seed), start_of(case))


@pytest.mark.parametrize("case", CHAINS)
@pytest.mark.parametrize(("name", "symmetry"), CLAIMED)
def test_a_measure_does_not_notice_what_it_claims_not_to(name: str, symmetry: str, case: str) -> None:
    for seed in SEEDS:
        old, new = before(case)[name], after(case, symmetry, seed)[name]
        assert new == pytest.approx(old, rel=LARGEST_MOVE, nan_ok=True)


@pytest.mark.parametrize(("name", "symmetry"), UNCLAIMED)
def test_a_measure_notices_what_it_does_not_claim_not_to(name: str, symmetry: str) -> None:
    pairs = [(before(case)[name], after(case, symmetry, seed)[name]) for case in CHAINS for seed in SEEDS]
    assert furthest(name, pairs) > LEAST_MOVE[MEASURES[name].logarithmic]


# With the loss multiplied by c: the power of c that the measure is multiplied by; for logarithms what is added to it.
DEGREES: dict[str, float] = {
    "normalized_sharpness": 0.5,
    "normalized_sharpness_arxiv": 0.5,
    "normalized_sharpness_printed": 0.5,
    "parameterwise_normalized_sharpness": 0.5,
    "fisher_rao_diagonal": 1,
    "kappa": 1,
    "kappa_max": 1,
    "kappa_trace": 1,
    "kappa_trace_max": 1,
    "rho": 1,
    "rho_max": 1,
    "relative_flatness": 1,
    "minimum_sharpness": 1,
    "minimum_unit_sharpness": 1,
    "hessian_trace": 1,
    "hessian_top_eigenvalue": 1,
    "quotient_sharpness": 1,
    "adaptive_sharpness": 1,
    "sharpness": 1,
    "squared_norm": 0,
    "distance_from_init": 0,
    "path_norm": 0,
    "fisher_trace": 2,
    "fisher_frobenius": 4,
    "fisher_spectral_radius": 2,
    "fisher_rao_norm": 2,
    "fisher_logdet": 2 * 3,  # ln c^2 for each example of a subset
}
# Three are about classes, which a loss function of the user's does not show; the others have a scale of their own.
ABOUT_CLASSES = {"pac_bayes_flatness", "input_robustness", "input_margin"}
NO_DEGREE = {*ABOUT_CLASSES, "regularized_normalized_sharpness", "fisher_determinant"}


def test_every_measure_has_a_degree() -> None:
    assert set(DEGREES) | NO_DEGREE == set(MEASURES)


@cache
def with_loss_times(c: float) -> dict[str, float]:
    case = CHAINS["mlp_with_biases"]()
    return readings(replace(case, loss=lambda outputs, targets: c * F.cross_entropy(outputs, targets)), start_of(case))


@pytest.mark.parametrize("name", DEGREES)
def test_a_measure_scales_with_the_loss_as_its_formula_says(name: str) -> None:
    one, many = with_loss_times(1.0)[name], with_loss_times(7.0)[name]
    if MEASURES[name].logarithmic:
        assert many - one == pytest.approx(DEGREES[name] * math.log(7), rel=1e-8)
    else:
        assert many == pytest.approx(one * 7 ** DEGREES[name], rel=1e-6)


def permuted(case: Case) -> Case:
    """Hidden units in another order."""
    model = deepcopy(case.model)
    layers = [layer for _, layer in layers_of(model)]
    with torch.no_grad():
        for one, two in pairwise(layers):
            assert isinstance(one, nn.Linear)
            order = torch.randperm(one.out_features, generator=torch.Generator().manual_seed(3))
            for value in (one.weight, one.bias):
                value.copy_(value[order])
            weight = two.get_parameter("weight")
            weight.copy_(weight[:, order])
    return replace(case, model=model)


# Their noise belongs to the places of the weights: the same only on average.
NOISY = {"adaptive_sharpness", "pac_bayes_flatness"}


@cache
def in_another_order(name: str) -> dict[str, float]:
    case = CHAINS[name]()
    return readings(permuted(case), permuted(replace(case, model=start_of(case))).model)


@pytest.mark.parametrize("name", sorted(set(MEASURES) - NOISY))
def test_the_order_of_units_does_not_matter(name: str) -> None:
    case = "mlp_with_biases"
    assert in_another_order(case)[name] == pytest.approx(before(case)[name], rel=1e-6)


def split(case: Case, sizes: Callable[[int], Sequence[int]]) -> Case:
    examples = examples_of(case.batches)
    return replace(case, batches=batched(examples, sizes(len(examples))))


SPLITS: dict[str, Callable[[int], Sequence[int]]] = {
    "one by one": lambda count: [1] * count,
    "all at once": lambda count: [count],
    "unequal": lambda count: [count - 3, 1, 2],
}


@cache
def split_readings(case: str, how: str) -> dict[str, float]:
    built = CHAINS.get(case, CASES.get(case))
    assert built is not None
    return readings(split(built(), SPLITS[how]), start_of(built()))


@pytest.mark.parametrize("case", ["convolutions_with_biases", "residual_with_batch_norm", "class_weights"])
@pytest.mark.parametrize("how", ["one by one", "unequal"])
def test_batches_do_not_matter(how: str, case: str) -> None:
    expected, found = split_readings(case, "all at once"), split_readings(case, how)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-8, nan_ok=True), name


@pytest.mark.parametrize("columns", ["top:1", "sampled:8"])
def test_random_columns_say_how_far_off_they_are(columns: str) -> None:
    """About 95 of 100 intervals hold the exact value; each interval is of one seed and one measure."""
    case = CHAINS["mlp_with_biases"]()
    names = ["normalized_sharpness", "kappa", "kappa_trace", "rho", "hessian_trace"]
    names += ["minimum_sharpness", "minimum_unit_sharpness"]
    exact = saltflat.measure(case.model, case.batches, measures=names, certificate=False)
    hits, errors = [], []
    for seed in range(40):
        found = saltflat.measure(
            case.model, case.batches, measures=names, columns=columns, seed=seed, certificate=False
        )
        for name in names:
            reading = found[name]
            assert reading.stderr is not None
            assert not reading.exact
            hits.append(abs(reading.value - exact[name].value) <= 1.96 * reading.stderr)
            errors.append(reading.stderr / exact[name].value)
    assert 0.85 <= sum(hits) / len(hits) <= 1.0
    assert 0 < sorted(errors)[len(errors) // 2] < 1
