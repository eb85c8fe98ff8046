"""Inner products between single examples' gradients, in one piece and in windows."""

from __future__ import annotations

import measure_oracle as dense
import pytest
import torch
from cases import CASES
from chains import CHAINS

from saltflat.columns import plan_from
from saltflat.gram import gram
from saltflat.loan import loan
from saltflat.problem import Problem
from saltflat.setting import Setting

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
    with loan(case.model, "eval", case.batches):
        setting = Setting(Problem.of(case.model, case.batches, case.loss), plan_from("exact"), 0, limit)
        found = gram(setting, chosen)
    rows = torch.from_numpy(expected)[chosen]
    torch.testing.assert_close(found, rows @ rows.mT, rtol=1e-10, atol=1e-12 * float(rows.square().sum(1).max()))
