"""Every statistic on every case against the oracle, and the laws that hold for all of them."""

from collections.abc import Mapping, Sequence
from functools import partial

import oracle
import pytest
import torch
from cases import CASES, Batch, Case, batched, examples_of, targets_of
from torch import Tensor, nn
from torch.testing import assert_close

import saltflat
from saltflat.engine.output_curvature import Columns, join_columns
from saltflat.statistics.compute import Statistics

DEFINITIONS = {
    "curvature_diagonal": oracle.curvature_diagonal,
    "curvature_trace": oracle.curvature_trace,
    "gradient_second_moment": oracle.gradient_second_moment,
}
STATISTICS = list(DEFINITIONS)

# Torch says so of any even kernel, and the kernel is even on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


def measured(case: Case, batches: Sequence[Batch] | None = None) -> Statistics:
    return saltflat.compute_statistics(case.model, batches or case.batches, names=STATISTICS, loss=case.loss)


def assert_agree(actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float) -> None:
    """Differences are small beside the largest entry of the same parameter."""
    assert actual.keys() == wanted.keys()
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name, value in wanted.items():
        # The true value can be zero (the bias of an attention key): then both sides hold rounding errors only, squared.
        scale = max(float(value.abs().max()), 1e-15 * largest)
        assert_close({name: actual[name]}, {name: value}, rtol=0, atol=tolerance * scale)


def mean_over_examples(case: Case) -> bool:
    """Whether every example weighs the same in the loss, whatever its labels."""
    if any((targets_of(batch) < 0).any() and not targets_of(batch).is_floating_point() for batch in case.batches):
        return False
    if isinstance(case.loss, partial):
        return case.loss.keywords.get("weight") is None
    if not isinstance(case.loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return True
    return case.loss.weight is None and case.loss.ignore_index < 0


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("name", CASES)
def test_a_statistic_agrees_with_its_definition(name: str, statistic: str) -> None:
    case = CASES[name]()
    result = saltflat.compute_statistics(case.model, case.batches, names=statistic, loss=case.loss, columns="exact")
    assert_agree(result[statistic], DEFINITIONS[statistic](case), 1e-10)
    loss = float(oracle.loss(case))
    assert result.loss == pytest.approx(loss, rel=1e-10, abs=0)
    assert result.examples == len(examples_of(case.batches))


@pytest.mark.parametrize("name", CASES)
def test_every_example_has_its_own_gradient(name: str) -> None:
    """Sums over the examples do not notice examples that were taken for each other."""
    case = CASES[name]()
    found = saltflat.compute_statistics(case.model, case.batches, names="gradient_norms", loss=case.loss)[
        "gradient_norms"
    ]
    parts = oracle.linearized(case)
    shares = len(parts.slopes) * parts.slopes
    wanted = {
        parameter: torch.einsum("nkp,nk->np", jacobian, shares).square().sum(1)
        for parameter, jacobian in parts.jacobians.items()
    }
    assert_agree(found, wanted, 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_splitting_the_data_into_other_batches_changes_nothing(name: str) -> None:
    case = CASES[name]()
    examples = examples_of(case.batches)
    count = len(examples)
    whole = measured(case, batched(examples, [count]))
    one_by_one = [1] * count
    unequal = [1, *([count - 1] if count > 1 else [])]
    for sizes in (one_by_one, unequal):
        split = measured(case, batched(examples, sizes))
        assert split.loss == pytest.approx(whole.loss, rel=1e-12, abs=0)
        for statistic in STATISTICS:
            assert_agree(split[statistic], whole[statistic], 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_the_examples_changes_nothing(name: str) -> None:
    case = CASES[name]()
    examples = examples_of(case.batches)
    there = measured(case)
    back = measured(case, batched(examples[::-1], [len(targets_of(batch)) for batch in case.batches]))
    assert back.loss == pytest.approx(there.loss, rel=1e-12, abs=0)
    for statistic in STATISTICS:
        assert_agree(back[statistic], there[statistic], 1e-12)


@pytest.mark.parametrize("name", [name for name, build in CASES.items() if mean_over_examples(build())])
def test_a_loss_times_three_has_three_times_the_curvature_and_nine_times_the_second_moment(name: str) -> None:
    case = CASES[name]()

    def tripled(outputs: Tensor, targets: Tensor) -> Tensor:
        return 3 * case.loss_function(outputs, targets)

    plain = measured(case)
    scaled = saltflat.compute_statistics(case.model, case.batches, names=STATISTICS, loss=tripled)
    assert scaled.loss == pytest.approx(3 * plain.loss, rel=1e-10, abs=0)
    for statistic, factor in zip(STATISTICS, (3, 3, 9), strict=True):
        wanted = {name: factor * value for name, value in plain[statistic].items()}
        assert_agree(scaled[statistic], wanted, 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_statistics_taken_together_are_those_taken_alone(name: str) -> None:
    case = CASES[name]()
    together = measured(case)
    for statistic in STATISTICS:
        alone = saltflat.compute_statistics(case.model, case.batches, names=[statistic], loss=case.loss)
        assert list(alone) == [statistic]
        assert_agree(together[statistic], alone[statistic], 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_columns_of_curvature_and_gradients_may_share_a_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    names = [*STATISTICS, "gradient_norms", "unit_forms"]
    apart = saltflat.compute_statistics(case.model, case.batches, names=names, loss=case.loss)
    joined: list[int] = []

    def noting(sets: Sequence[Columns]) -> tuple[Tensor, list[slice]]:
        joined.append(len(sets))
        return join_columns(sets)

    monkeypatch.setattr("saltflat.engine.output_curvature.JOINING", {"cpu"})  # as on a GPU
    monkeypatch.setattr("saltflat.engine.sweep.join_columns", noting)
    together = saltflat.compute_statistics(case.model, case.batches, names=names, loss=case.loss)
    assert joined
    assert set(joined) <= {2, 3}
    for statistic in names:
        assert_agree(together[statistic], apart[statistic], 1e-10)
    assert together.loss == pytest.approx(apart.loss, rel=1e-12)


def test_traces_between_units_are_of_normalised_features() -> None:
    """By themselves as well as behind the measure that is made of them."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2, bias=False).double()
    x, y = torch.randn(20, 3).double() * torch.tensor([1.0, 5.0, 0.2]), torch.randint(2, (20,))
    found = saltflat.compute_statistics(net, (x, y), names="unit_trace")["unit_trace"]["weight"][0]
    p = net(x).softmax(1).detach()
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    sizes = (x / x.std(0, correction=0)).square().sum(1)
    torch.testing.assert_close(found, (curvature * sizes[:, None, None]).mean(0))


def test_a_layer_that_a_chunk_sends_no_rows_to_has_its_traces() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.spare = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            first, out = x[:, 0] > 0, x.new_zeros(len(x), 3)
            out[first], out[~first] = self.one(x[first]), self.two(x[~first])
            result: Tensor = out + self.spare(x[:0]).sum()
            return result

    torch.manual_seed(0)
    net, y = Experts().double(), torch.randint(3, (8,))
    x = torch.randn(8, 2).double().abs() * torch.tensor([1.0, -1.0]).repeat_interleave(4)[:, None]
    found = saltflat.compute_statistics(net, [(x[:4], y[:4]), (x[4:], y[4:])], names="unit_trace")["unit_trace"]
    alone = [net.one, net.two], [slice(0, 4), slice(4, 8)]
    for name, layer, part in zip(("one.weight", "two.weight"), *alone, strict=True):
        wanted = saltflat.compute_statistics(layer, (x[part], y[part]), names="unit_trace")["unit_trace"]["weight"]
        assert_close(2 * found[name], wanted)
    assert not found["spare.weight"].any()


def test_inputs_that_require_gradients_are_measured_in_any_precision() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(6, 3), torch.randint(3, (6,))
    for dtype in (None, torch.float64):
        wanted = saltflat.compute_statistics(net, (x, y), names=STATISTICS, dtype=dtype)
        found = saltflat.compute_statistics(net, (x.clone().requires_grad_(), y), names=STATISTICS, dtype=dtype)
        for name in STATISTICS:
            assert_agree(found[name], wanted[name], 1e-12)


def test_traces_between_units_are_the_same_where_a_model_maps_itself_over_its_examples() -> None:
    class Mapped(nn.Module):
        def __init__(self, layer: nn.Module, head: nn.Module) -> None:
            super().__init__()
            self.layer, self.head = layer, head

        def forward(self, x: Tensor) -> Tensor:
            mapped: Tensor = torch.func.vmap(lambda row: self.head(self.layer(row).tanh()))(x)
            return mapped

    torch.manual_seed(0)
    layer, head = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()
    data = torch.randn(6, 3).double(), torch.randint(3, (6,))
    found = saltflat.compute_statistics(Mapped(layer, head), data, names="unit_trace")["unit_trace"]
    plain = saltflat.compute_statistics(nn.Sequential(layer, nn.Tanh(), head), data, names="unit_trace")["unit_trace"]
    assert_close(found["layer.weight"], plain["0.weight"])
    assert_close(found["head.weight"], plain["2.weight"])


class WithTemperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs / self.temperature, targets)


@pytest.mark.filterwarnings("ignore")  # with errors for warnings torch takes another way to second derivatives
def test_parameters_of_the_loss_are_constants() -> None:
    case = CASES["class_token_and_position_parameters"]()
    found = saltflat.compute_statistics(case.model, case.batches, names=STATISTICS, loss=WithTemperature())
    wanted = saltflat.compute_statistics(
        case.model, case.batches, names=STATISTICS, loss=lambda o, t: nn.functional.cross_entropy(o / 2, t)
    )
    for name in STATISTICS:
        assert_agree(found[name], wanted[name], 1e-12)
