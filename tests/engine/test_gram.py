"""Inner products between single examples' gradients, in one piece and in windows."""

from __future__ import annotations

from typing import Any

import measure_oracle as dense
import pytest
import torch
from cases import CASES
from chains import CHAINS
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import saltflat
from saltflat.engine.context import Context
from saltflat.engine.gram import compute_gram_matrix, iterate_gradients
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session

ALL = {**CHAINS, **CASES}
NAMES = [
    "mlp_with_biases",
    "convolutions_with_biases",
    "grouped_and_depthwise_convolutions",
    "residual_with_batch_norm",
    "tied_embedding_and_output",
    "embedding_with_padding_index",
    "lstm_in_two_directions",
    "class_weights",
    "sequence_with_weights_smoothing_and_ignored_positions",
    "batches_of_one",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [1 << 30, 1])
def test_the_gram_matrix_is_that_of_the_dense_gradients(name: str, limit: int) -> None:
    """Whatever fits in memory: with one byte every chunk is a window of its own."""
    case = ALL[name]()
    expected = dense.gradients(case)
    chosen = torch.arange(0, len(expected), 2) if len(expected) > 4 else torch.arange(len(expected))
    with open_session(case.model, "eval", case.batches):
        context = Context(Problem.build(case.model, case.batches, case.loss), parse_column_plan("exact"), 0, limit)
        found = compute_gram_matrix(context, chosen)
    rows = torch.from_numpy(expected)[chosen]
    torch.testing.assert_close(found, rows @ rows.mT, rtol=1e-10, atol=1e-12 * float(rows.square().sum(1).max()))


class Tokens(nn.Module):
    """Linear layers on every position of a sequence, and a convolution with groups over them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(width, width), nn.Conv1d(width, width, 3, groups=2)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.conv(self.linear(x).tanh().mT).mean(2))
        return found


@pytest.mark.parametrize("limit", [1 << 30, 1 << 16])
@pytest.mark.parametrize(("positions", "width"), [(3, 24), (12, 8)])
def test_factors_of_few_or_many_positions_have_the_products_of_dense_gradients(
    positions: int, width: int, limit: int
) -> None:
    """Position by position where these are few, and written out where they are many, in one window or in several."""
    torch.manual_seed(0)
    net = Tokens(width).double()
    inputs, labels = torch.randn(13, positions, width, dtype=torch.float64), torch.arange(13) % 3
    losses = [nn.functional.cross_entropy(net(x[None]), y[None]) for x, y in zip(inputs, labels, strict=True)]
    rows = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]) for loss in losses]
    )
    with open_session(net, "eval", None):
        context = Context(Problem.build(net, (inputs, labels)), parse_column_plan("exact"), 0, limit)
        found = compute_gram_matrix(context, torch.arange(13))
    torch.testing.assert_close(found, rows @ rows.mT, rtol=1e-11, atol=1e-13 * float(rows.square().sum(1).max()))


def test_data_that_are_all_chosen_need_not_be_read_again_to_be_counted() -> None:
    case = ALL["sequence_with_weights_smoothing_and_ignored_positions"]()
    with open_session(case.model, "eval", case.batches):
        first, second = (
            Context(Problem.build(case.model, case.batches, case.loss), parse_column_plan("exact"), 0, 1 << 30)
            for _ in range(2)
        )
        count = second.examples
        compute_gram_matrix(first, torch.arange(count))
        assert first.counts == pytest.approx(second.counts, rel=1e-12)
        part = Context(first.problem, parse_column_plan("exact"), 0, 1 << 30)
        compute_gram_matrix(part, torch.arange(count - 1))
        assert part.counts == pytest.approx(second.counts, rel=1e-12)


def test_what_windows_kept_is_no_longer_counted_when_they_are_done() -> None:
    torch.manual_seed(0)
    net = Tokens(8).double()
    data = torch.randn(13, 12, 8, dtype=torch.float64), torch.arange(13) % 3
    with open_session(net, "eval", None):
        context = Context(Problem.build(net, data), parse_column_plan("exact"), 0, 1 << 16)
        context.heap.room, context.heap.low = 1 << 60, 1 << 30  # is never trimmed, which would set it anew
        compute_gram_matrix(context, torch.arange(13))
    assert context.heap.low == 1 << 30


class Routed(nn.Module):
    """An example goes to one of two layers by its values: the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Conv1d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        each = [self.one(row) if bool(row[0] > 0) else self.two(row[None])[:, 0] for row in x]
        return torch.stack(each)


def test_a_parameter_that_is_first_used_late_is_in_its_place() -> None:
    torch.manual_seed(0)
    net = Routed().double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(4, (6,))
    x[:, 0] = torch.tensor([1.0, 2.0, -1.0, 3.0, -2.0, 1.0])
    rows = []
    for n in range(6):
        loss = nn.functional.cross_entropy(net(x[n : n + 1]), y[n : n + 1])
        found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
        pairs = zip(found, net.parameters(), strict=True)
        rows.append(torch.cat([(p * 0 if g is None else g).detach().flatten() for g, p in pairs]))
    expected = torch.stack(rows)
    with open_session(net, "eval", None):
        context = Context(Problem.build(net, (x, y)), parse_column_plan("exact"), 0, 1 << 30)
        torch.testing.assert_close(compute_gram_matrix(context, torch.arange(6)), expected @ expected.mT)
        torch.testing.assert_close(torch.cat(list(iterate_gradients(context))), expected)


@pytest.mark.parametrize("options", [{"drop_last": True}, {"sampler": range(14)}])
def test_only_examples_that_a_loader_yields_are_drawn(options: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(20, 4, generator=generator, dtype=torch.float64), torch.arange(20) % 3
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    names = ["fisher_logdet", "fisher_spectral_radius"]
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=7, **options)
    wanted = saltflat.measure(model, (inputs[:14], labels[:14]), measures=names, certificate=False)
    found = saltflat.measure(model, loader, measures=names, certificate=False)
    for name in names:
        assert found[name].value == pytest.approx(wanted[name].value, rel=1e-9)
