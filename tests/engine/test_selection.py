"""The first examples of data of any kind: the same numbers as from those examples alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import saltflat
from saltflat.engine.progress import count_examples
from saltflat.engine.read_data import select_examples
from saltflat.errors import DataError, EmptyDataError, OneShotDataError, OptionError

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3
NAMES = ["hessian_trace", "fisher_frobenius", "fisher_logdet(subset=4)"]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


class Endless:
    """Batches without an end, the same on every reading."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield X[:7], Y[:7]
            yield X[7:], Y[7:]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


KINDS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (X, Y),
    "a list of two tensors": lambda: [X, Y],
    "a dataset": lambda: TensorDataset(X, Y),
    "a loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=3),
    "a shuffled loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True),
    "a loader with a generator": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=3),
    "batches": lambda: [(X[:7], Y[:7]), (X[7:], Y[7:])],
    "batches without an end": Endless,
    "inputs in a tuple": lambda: ((X,), Y),
}


@pytest.mark.parametrize("limit", [1, 7, 11, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_takes_the_first_examples(kind: str, limit: int) -> None:
    names = NAMES[:2] if limit == 1 else NAMES
    wanted = saltflat.measure(net(), (X[:limit], Y[:limit]), measures=names)
    found = saltflat.measure(net(), KINDS[kind](), measures=names, limit=limit)
    assert found.examples == limit
    for name in wanted:
        assert found[name].value == pytest.approx(wanted[name].value, rel=1e-5)
    assert found.certificate is not None
    assert found.certificate["examples"] == min(limit, 2)


def test_named_inputs_are_cut_with_their_labels() -> None:
    wanted = saltflat.measure(Named(), (X[:7], Y[:7]), measures="hessian_trace", certificate=False)
    for data in ({"x": X, "labels": Y}, [{"x": X[:4], "labels": Y[:4]}, {"x": X[4:], "labels": Y[4:]}]):
        found = saltflat.measure(Named(), data, measures="hessian_trace", certificate=False, limit=7)
        assert found.examples == 7
        assert found["hessian_trace"].value == pytest.approx(wanted["hessian_trace"].value, rel=1e-6)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"batches without an end"}))
def test_a_limit_beyond_the_data_takes_all_of_it(kind: str) -> None:
    assert saltflat.measure(net(), KINDS[kind](), measures="squared_norm", certificate=False, limit=99).examples == 20


@pytest.mark.parametrize("limit", [0, -1, True, False, 1.5, 2.0, "5", float("nan"), [3]])
def test_a_limit_that_means_nothing_is_refused(limit: Any) -> None:
    for call in (
        lambda: saltflat.measure(net(), (X, Y), limit=limit),
        lambda: saltflat.audit_invariance(net(), (X, Y), limit=limit),
        lambda: saltflat.compute_statistics(net(), (X, Y), names="curvature_trace", limit=limit),
    ):
        with pytest.raises(OptionError, match=r"Expected .*, but got limit=.*Try "):
            call()


def test_a_limit_may_be_numpys() -> None:
    assert saltflat.measure(net(), (X, Y), measures="squared_norm", limit=np.int64(5)).examples == 5  # type: ignore[arg-type]


def test_audits_and_statistics_take_a_limit() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True)
    found = saltflat.compute_statistics(net(), loader, names="curvature_trace", limit=5)
    wanted = saltflat.compute_statistics(net(), (X[:5], Y[:5]), names="curvature_trace")
    assert found.examples == 5
    for name, value in wanted["curvature_trace"].items():
        torch.testing.assert_close(found["curvature_trace"][name], value, rtol=1e-5, atol=0)
    audit = saltflat.audit_invariance(net(), loader, measures="hessian_trace", draws=1, limit=5)
    assert audit.report.examples == 5


def test_mistakes_in_the_data_are_found_behind_a_limit_too() -> None:
    with pytest.raises(DataError, match="20 inputs and 19 targets"):
        saltflat.measure(net(), (X, Y[:19]), limit=5)
    with pytest.raises(OneShotDataError):
        saltflat.measure(net(), iter([(X, Y)]), limit=5)
    with pytest.raises(DataError, match="of type int"):
        saltflat.measure(net(), 7, limit=5)  # type: ignore[arg-type]
    with pytest.raises(EmptyDataError):
        saltflat.measure(net(), [], limit=5)


def test_a_loader_is_read_no_further_than_the_limit() -> None:
    asked: list[int] = []

    class Watched(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            return X[index], Y[index]

        def __len__(self) -> int:
            return 20

    saltflat.measure(net(), DataLoader(Watched(), batch_size=3), measures="hessian_trace", limit=4)
    assert max(asked) <= 5


def test_the_generator_of_a_limited_loader_is_left_as_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    loader = DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True, generator=generator)
    saltflat.measure(net(), loader, measures="hessian_trace", limit=4)
    assert torch.equal(generator.get_state(), before)


def test_examples_are_left_out_at_the_beginning_across_batches() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=3)
    for skip, limit in ((0, 5), (4, 5), (6, None), (19, 3)):
        inputs, targets = zip(*select_examples(loader, skip, limit), strict=True)
        stop = None if limit is None else skip + limit
        assert torch.equal(torch.cat([each for (each,) in inputs]), X[skip:stop])
        assert torch.equal(torch.cat(targets), Y[skip:stop])
    with pytest.raises(EmptyDataError, match="20 examples"):
        list(select_examples(loader, 20))


def test_a_selection_knows_about_how_many_examples_it_has() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=3)
    assert count_examples(select_examples(loader, 4, 5)) == 5
    assert count_examples(select_examples(loader, 18, 5)) == 2
    assert count_examples(select_examples([(X, Y)], 18, 5)) is None
