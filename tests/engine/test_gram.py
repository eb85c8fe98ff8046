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
