"""The rescalings that are found, against those that numbers alone show, and the algebra they are found with."""

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from architectures import LISTED, NETWORKS
from cases import Case
from numpy.typing import NDArray
from rank_oracle import Freedom, inputs_of, zeros
from test_rank_oracle import found as freedom_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from saltflat.symmetry.find import find_symmetries
from saltflat.symmetry.group import Symmetries
from saltflat.symmetry.rescale import apply_rescaling
from saltflat.symmetry.tracing.scales import (
    ANY,
    GROUND,
    Elimination,
    LinearForm,
    ScaleSystem,
    add_scaled_form,
    equate_factors,
)

DRAWS = 50
REACH = 4.0  # logarithms of units' sizes go from -4 to 4
KINDS = ("unit", "layer")


@cache
def case_of(name: str) -> Case:
    return NETWORKS[name]()


@cache
def group_of(name: str, kind: str = "unit") -> Symmetries:
    case = case_of(name)
    group = find_symmetries(case.model, inputs_of(case.batches[0]))
    return group.restrict_to_layers() if kind == "layer" else group


def columns_of(group: Symmetries, freed: Freedom) -> Tensor:
    """``(columns, scales)``: the direction of every single scale, in the terms of the numerical search."""
    each = [freed.column(group.compute_factor_logs(logs)) for logs in np.eye(group.scales)]
    return torch.stack(each, 1) if each else torch.zeros(len(freed.ineffective), 0, dtype=torch.float64)


def rank(matrix: Tensor) -> int:
    """By a gap nobody can mistake."""
    if not matrix.any():
        return 0
    return int((~zeros(torch.linalg.svdvals(matrix))).sum())


# The group is the whole group, and nothing else.


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_as_many_scales_as_numbers_show(name: str) -> None:
    assert group_of(name).scales == freedom_of(name).dimension


@pytest.mark.parametrize("name", NETWORKS)
def test_scales_are_independent_and_each_is_a_rescaling(name: str) -> None:
    group, freed = group_of(name), freedom_of(name)
    columns = columns_of(group, freed)
    assert rank(columns) == group.scales
    for column in columns.mT:
        assert freed.outside(column) < 1e-9 * float(column.norm())


@pytest.mark.parametrize("name", NETWORKS)
def test_every_entry_that_can_move_does_and_no_other(name: str) -> None:
    group, freed = group_of(name), freedom_of(name)
    can = freed.basis.abs().amax(1) > 1e-9 if freed.dimension else torch.zeros(len(freed.ineffective)).bool()
    moving = group.find_movable_entries()
    assert set(moving) == set(freed.blocks)
    for member, moves in moving.items():
        block = freed.blocks[member]
        effective = ~freed.ineffective[block]
        assert torch.equal(torch.from_numpy(moves).flatten()[effective], can[block][effective]), member


@pytest.mark.parametrize("name", NETWORKS)
def test_the_rescalings_by_layer_are_those_that_are_constant_on_every_parameter(name: str) -> None:
    group, freed = group_of(name, "layer"), freedom_of(name)
    differences = []
    for member, parameter in case_of(name).model.named_parameters():
        rows = freed.basis[freed.blocks[member]][~freed.ineffective[freed.blocks[member]]]
        assert len(rows) <= parameter.numel()
        differences.append(rows[1:] - rows[:1])
    constant = freed.dimension - rank(torch.cat(differences))
    assert group.scales == constant
    columns = columns_of(group, freed)
    assert rank(columns) == group.scales
    assert all(freed.outside(column) < 1e-9 * float(column.norm()) for column in columns.mT)


@pytest.mark.parametrize("name", NETWORKS)
def test_by_layer_every_parameter_has_one_factor(name: str) -> None:
    group = group_of(name, "layer")
    for logs in np.random.default_rng(0).uniform(-REACH, REACH, (3, group.scales)):
        factors = group.compute_factor_logs(logs)
        for member in group.members.values():
            if member.kind == "parameter":
                assert np.ptp(factors[member.name]) < 1e-12, member.name


@pytest.mark.parametrize("name", NETWORKS)
def test_running_statistics_of_one_norm_move_together(name: str) -> None:
    group = group_of(name)
    factors = group.compute_factor_logs(group.sample(seed=5))
    for member in group.members.values():
        if member.kind == "variance":
            mean = member.name.replace("running_var", "running_mean")
            np.testing.assert_array_equal(factors[member.name], factors[mean])
            assert member.eps == case_of(name).model.get_submodule(member.name.rpartition(".")[0]).eps


def test_the_promised_networks_are_among_those_looked_at() -> None:
    assert len(LISTED) == 12
    # What is fixed by GELU is all of one of them; everything else has a group.
    assert [name for name in LISTED if not group_of(name).scales] == ["gelu_only"]


# The function is the same.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_fifty_random_rescalings_keep_the_function_and_move_what_can_move(name: str, kind: str) -> None:
    group = group_of(name, kind)
    keeps_the_function(name, group, [group.sample(seed) for seed in range(DRAWS)])


@pytest.mark.parametrize("name", NETWORKS)
def test_fifty_rescalings_by_factors_as_small_and_large_as_promised_keep_the_function(name: str) -> None:
    group = group_of(name)
    logs = np.random.default_rng(1).uniform(-REACH, REACH, (DRAWS, group.scales))
    assert not group.scales or (logs.min() < 0.95 * -REACH and logs.max() > 0.95 * REACH)
    keeps_the_function(name, group, list(logs))


@pytest.mark.parametrize("name", NETWORKS)
def test_units_all_of_which_are_as_large_or_small_as_can_be_keep_the_function(name: str) -> None:
    group, generator = group_of(name), np.random.default_rng(2)
    signs = [np.full(group.scales, 1.0), np.full(group.scales, -1.0), *generator.choice([-1.0, 1.0], (8, group.scales))]
    # Entries between two units that become larger alike stay.
    keeps_the_function(name, group, [REACH * each for each in signs], moves=False)


def keeps_the_function(name: str, group: Symmetries, draws: list[NDArray[np.float64]], moves: bool = True) -> None:
    case, moving = case_of(name), group.find_movable_entries()
    generator = torch.Generator().manual_seed(7)
    inputs = tree_map(lambda x: fresh(x, generator), inputs_of(case.batches[1]))
    before, values = run(case.model, inputs), members_of(case.model)
    for logs in draws:
        other = apply_rescaling(case.model, group, logs)
        after = run(other, inputs)
        assert float((after - before).abs().max()) <= 1e-9 * float(before.abs().max())
        changed = members_of(other)
        for member in moving if moves else ():
            assert np.array_equal((changed[member] != values[member]).numpy(), moving[member]), member


def fresh(known: Tensor, generator: torch.Generator) -> Tensor:
    """Inputs that neither the search nor the check of a rescaling has seen."""
    if known.is_floating_point():
        return 2 * torch.randn(known.shape, dtype=known.dtype, generator=generator)
    return known.flatten()[torch.randint(known.numel(), known.shape, generator=generator)]


def run(model: nn.Module, inputs: Any) -> Tensor:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        found: Tensor = model(inputs)
    return found


def members_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}


# It depends on how a network is made, not on its numbers.


@pytest.mark.parametrize("name", LISTED)
def test_other_weights_another_example_and_another_mode_make_no_difference(name: str) -> None:
    case, group = NETWORKS[name](), group_of(name)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.zero_()
    one = tree_map(lambda x: torch.zeros_like(x[:1]), inputs_of(case.batches[0]))
    other = find_symmetries(case.model.train(), one)
    assert other.scales == group.scales
    moving = group.find_movable_entries()
    for member, moves in other.find_movable_entries().items():
        np.testing.assert_array_equal(moves, moving[member])


@pytest.mark.parametrize("name", ["resnet20_with_padded_shortcuts", "gpt_like_decoder"])
def test_single_precision_makes_no_difference(name: str) -> None:
    case = NETWORKS[name]()
    inputs = tree_map(lambda x: x.float() if x.is_floating_point() else x, inputs_of(case.batches[0]))
    assert find_symmetries(case.model.float(), inputs).scales == group_of(name).scales


def test_a_network_without_freedom_has_an_answer() -> None:
    group = group_of("gelu_only")
    assert group.scales == 0
    assert group.sample().shape == (0,)
    assert not any(moves.any() for moves in group.find_movable_entries().values())
    assert group.restrict_to_layers().scales == 0


def test_what_stands_in_the_way_is_named_with_its_place() -> None:
    obstacles = group_of("gelu_only").obstacles
    assert [(each.operation, each.where, each.known, each.pinned) for each in obstacles] == [
        ("aten.gelu", "1", True, 8),
        ("aten.gelu", "3", True, 6),
    ]
    clipped = [each for each in group_of("mobilenet_like").obstacles if each.operation == "aten.hardtanh"]
    assert [each.where for each in clipped][:1] == ["features.2"]
    scores = [each for each in group_of("gpt_like_decoder").obstacles if each.operation == "aten._softmax"]
    assert not scores  # query and key have opposite scales already: nothing is left to fix
    norms = [each for each in group_of("vit_block").obstacles if each.operation == "aten.native_layer_norm"]
    assert "block.ln_1" in [each.where for each in norms]


def test_random_sizes_are_normal_and_cut_at_twice_the_spread() -> None:
    group = group_of("densenet_block")
    sizes = np.concatenate([group.sample(seed, spread=0.5) for seed in range(200)])
    assert np.abs(sizes).max() <= 1.0
    assert np.abs(sizes).max() > 0.99
    # A normal variable cut at two deviations has the deviation 0.8796.
    assert np.std(sizes) == pytest.approx(0.5 * 0.8796, rel=0.02)
    assert np.mean(sizes) == pytest.approx(0, abs=0.02)


# Linear equations.


def system_of(rows: NDArray[np.int64]) -> Elimination:
    system = Elimination()
    for row in rows:
        system.set_to_zero({v: int(c) for v, c in enumerate(row) if c})
    return system


def values(form: LinearForm, size: int) -> NDArray[np.float64]:
    found = np.zeros(size)
    for variable, coefficient in form.items():
        found[variable] = float(coefficient)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_elimination_leaves_the_null_space_free(seed: int) -> None:
    generator = np.random.default_rng(seed)
    count, size = int(generator.integers(0, 12)), int(generator.integers(1, 9))
    rows = generator.integers(-2, 3, (count, size)) * (generator.random((count, size)) < 0.5)
    system = system_of(rows)
    free = system.find_free_variables(range(size))
    assert len(free) == size - (np.linalg.matrix_rank(rows) if rows.size else 0)
    # Column by column: the variables when one of the free ones is 1.
    basis = np.array([values(system.substitute({v: 1}), size)[free] for v in range(size)])
    assert np.linalg.matrix_rank(basis) == len(free) if free else basis.size == 0
    np.testing.assert_allclose(rows @ basis, 0, atol=1e-12)


def test_elimination_is_exact() -> None:
    system = Elimination()
    for number in range(40):  # x_0 = 3 x_1 = 9 x_2 = ...: floating point would lose the last of them
        system.set_to_zero({number: 1, number + 1: -3})
    assert system.substitute({40: 3**40}) == {0: 1}
    assert system.substitute({40: 1}) == {0: Fraction(1, 3**40)}
    assert system.substitute({7: 3**7, 0: -1}) == {}


def test_a_chain_of_equalities_longer_than_the_stack_is_walked() -> None:
    system = Elimination()
    for number in reversed(range(100_000)):
        system.set_to_zero({number: 1, number + 1: -1})
    assert system.substitute({100_000: 2}) == {0: 2}
    assert system.find_free_variables(range(100_001)) == [0]


def test_what_is_solved_is_told_by_earlier_variables() -> None:
    system = system_of(np.array([[0, 1, 0, -2], [1, 0, 1, 0]]))
    assert system.substitute({3: 2}) == {1: 1}
    assert system.substitute({2: 1}) == {0: -1}


def test_a_contradiction_leaves_nothing_free() -> None:
    system = system_of(np.array([[1, -1], [1, 1]]))
    assert system.find_free_variables(range(2)) == []
    assert system.substitute({0: 5, 1: 7}) == {}


@pytest.mark.parametrize("seed", range(10))
def test_equations_of_a_whole_weight_are_the_same_as_one_by_one(seed: int) -> None:
    generator = np.random.default_rng(seed)
    size = 8
    forms: dict[int, LinearForm] = {
        number: {int(v): int(c) for v, c in enumerate(generator.integers(-1, 2, size)) if c} for number in range(10)
    }
    quads = generator.integers(0, 10, (generator.integers(1, 7), 4))
    together, apart = Elimination(), Elimination()
    equate_factors(together, forms, quads)
    for h, t, H, T in quads.tolist():
        apart.set_to_zero(
            add_scaled_form(add_scaled_form(forms[h], forms[t], -1), add_scaled_form(forms[H], forms[T], -1), -1)
        )
    assert len(together.find_free_variables(range(size))) == len(apart.find_free_variables(range(size)))
    for variable in range(size):
        assert together.substitute({variable: 1}) == apart.substitute({variable: 1})


# Arrays of scales.


def form_of(scales: ScaleSystem, number: float) -> LinearForm:
    return scales.system.substitute(scales.forms[int(number)])


def test_products_quotients_and_powers_of_numbers_have_sums_of_their_scales() -> None:
    scales = ScaleSystem()
    a, b = scales.add_variables(2)
    assert form_of(scales, float(scales.add(a, b))) == {0: 1, 1: 1}
    assert form_of(scales, float(scales.add(a, a, -1))) == {}
    assert form_of(scales, float(scales.multiply(a, Fraction(1, 2)))) == {0: Fraction(1, 2)}
    # Equal combinations have equal numbers, however they came about.
    assert scales.add(a, b) == scales.add(b, a)
    assert scales.multiply(scales.add(a, a), Fraction(1, 2)) == a


def test_zeros_fit_any_scale() -> None:
    scales = ScaleSystem()
    ids = scales.add_variables(3)
    holes = torch.tensor([ANY, ids[1], ANY], dtype=torch.float64)
    assert torch.equal(scales.equate(ids, holes), ids)
    assert len(scales.system.find_free_variables(range(3))) == 3
    assert torch.equal(scales.add(ids, holes), torch.tensor([ANY, float(scales.add(ids[1], ids[1])), ANY]).double())
    assert scales.equate_along(holes, [0]) == ids[1]


def test_sums_have_one_scale_along_what_is_summed() -> None:
    scales = ScaleSystem()
    ids = scales.add_variables(6).reshape(2, 3)
    rows = scales.equate_along(ids, [1])
    assert rows.shape == (2,)
    assert len(scales.system.find_free_variables(range(6))) == 2
    assert scales.equate_along(ids, [0, 1], keepdim=True).shape == (1, 1)
    assert len(scales.system.find_free_variables(range(6))) == 1
    assert scales.pin(ids) == 1
    assert scales.pin(ids) == 0
    assert scales.system.find_free_variables(range(6)) == []


@pytest.mark.parametrize("operation", [ScaleSystem.equate, ScaleSystem.add])
def test_arrays_are_broadcast_as_tensors_are(operation: Callable[..., Tensor]) -> None:
    scales = ScaleSystem()
    column, row = scales.add_variables(3)[:, None], scales.add_variables(4)
    found = operation(scales, column, row)
    assert found.shape == (3, 4)
    assert found.is_contiguous()
    assert len(scales.system.find_free_variables(range(7))) == (1 if operation is ScaleSystem.equate else 7)


def test_what_is_added_to_a_constant_is_fixed() -> None:
    scales = ScaleSystem()
    ids = scales.add_variables(2)
    scales.equate(ids, torch.tensor([GROUND, ANY]).double())
    assert [form_of(scales, number) for number in ids.tolist()] == [{}, {1: 1}]
