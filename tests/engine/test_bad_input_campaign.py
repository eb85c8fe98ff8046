"""Thousands of bad inputs for everything public: each gives a result or an error of saltflat's own, none a raw one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from bad_inputs import GOOD, X, Y, every_call, models, nested, net, tried

import saltflat
from saltflat import errors
from saltflat.training import SAM, FisherPenalty, GradientNormPenalty

# Of more than twelve thousand, so that they take a few seconds. All of them: SALTFLAT_FUZZ_SECONDS=1.
SOME = 3000

# Raised errors of torch or Python once.
ALWAYS = (
    "measure with data: a pair of no dimensions",
    "audit with data: inputs of no dimensions",
    "landscape with data: targets of no dimensions",
    "measure with data: sparse inputs",
    "spectrum with data: sparse targets",
    "measure with data: nested inputs",
    "certify with data: jagged inputs",
    "measure of a model: a sparse parameter",
    "measure of a model: a sparse weight",
    "measure of a model: a sparse buffer",
    "symmetries of a model: a nested parameter",
    "measure(columns='sampled:100000000000')",
    "FisherPenalty with a batch: targets out of range",
    "FisherPenalty with a batch: negative targets",
    "FisherPenalty with a batch: targets far out of range",
    "GradientNormPenalty(balance=2)",
)


@pytest.mark.filterwarnings("ignore")
def test_no_bad_input_gives_a_raw_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = every_call(tmp_path)
    names = sorted(calls)
    random.Random(os.environ.get("SALTFLAT_FUZZ_SEED", "0")).shuffle(names)
    chosen = names if "SALTFLAT_FUZZ_SECONDS" in os.environ else [*ALWAYS, *names[:SOME]]
    raw = {}
    for name in chosen:
        error = tried(calls[name])
        if error is not None:
            raw[name] = f"{type(error).__name__}: {error}"
    assert raw == {}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((torch.tensor(1.0), torch.tensor(0)), "without an axis for the examples"),
        ((torch.tensor(1.0), Y), r"inputs of shape \[\(\)\]"),
        ((X.to_sparse(), Y), "sparse tensor"),
        ((X, Y.to_sparse()), "sparse tensor"),
        ([((X, X.to_sparse()), Y)], "sparse tensor"),
        ((nested(4, 4, 4, 4, 4, 4), Y), "nested tensor"),
        ((X.to("meta"), Y), "meta tensor"),
    ],
)
def test_data_that_cannot_be_cut_into_examples_are_refused(data: object, says: str) -> None:
    for limit in (None, 2):
        with pytest.raises(errors.DataError, match=says):
            saltflat.measure(net(), data, limit=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["weight", "parameter", "buffer"])
def test_sparse_tensors_of_a_model_are_named(kind: str) -> None:
    with pytest.raises(errors.ModelError, match=r"dense tensors, but got '(0\.weight|extra)', a sparse tensor"):
        saltflat.measure(models()[f"a sparse {kind}"](), GOOD)
    if kind != "buffer":
        with pytest.raises(errors.ModelError, match="sparse"):
            SAM(models()[f"a sparse {kind}"](), torch.optim.SGD, lr=0.1)


def test_more_random_columns_than_anyone_needs_are_refused() -> None:
    for columns in ("sampled:100000000000", "sampled:1" + "0" * 5000):
        with pytest.raises(errors.OptionError, match="1,000,000"):
            saltflat.measure(net(), GOOD, columns=columns)


@pytest.mark.parametrize("parts", [1, 3])
def test_labels_that_do_not_fit_are_named_in_training(parts: int) -> None:
    model = net()
    before = [value.clone() for value in model.parameters()]
    for labels, says in ((Y + 5, "from 5 to . for 3 classes"), (Y - 4, "from -4 to -. for 3")):
        with pytest.raises(errors.LabelError, match=says):
            FisherPenalty(model, parts=parts).step(torch.optim.SGD(model.parameters(), lr=0.1), (X, labels))
    assert all(map(torch.equal, model.parameters(), before))


def test_a_balance_is_a_share() -> None:
    with pytest.raises(errors.OptionError, match="from 0 to 1, but got 2"):
        GradientNormPenalty(net(), torch.optim.SGD, balance=2, lr=0.1)
    model = net()
    groups = [{"params": list(model.parameters()), "balance": 1.5}]
    with pytest.raises(errors.OptionError, match="from 0 to 1"):
        GradientNormPenalty(model, torch.optim.SGD(groups, lr=0.1))


def test_a_sparse_input_that_all_parts_share_is_no_bad_input() -> None:
    class Mixes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer((mixing @ x.T).T)
            return found

    model, dense = Mixes(), torch.eye(4)
    losses = [FisherPenalty(model, parts=2).backward(((X, mixing), Y)) for mixing in (dense, dense.to_sparse())]
    torch.testing.assert_close(losses[1], losses[0])
