"""Data in any form: what the user's loader yields is what is measured."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import saltflat
from saltflat.engine import read_data as part
from saltflat.errors import DataError, NondeterministicError

generator = torch.Generator().manual_seed(3)
X, Y = torch.randn(12, 4, generator=generator, dtype=torch.float64), torch.arange(12) % 3
DATA = TensorDataset(X, Y)
# Sums of gradients, and something that goes by the number of an example.
NAMES = ["curvature_diagonal", "gradient_second_moment"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def assert_measured_as(data: Any, inputs: Tensor, targets: Tensor, model: nn.Module | None = None) -> None:
    """The numbers are those of these examples, with random columns, too: they belong to an example's place."""
    for memory in ("1GiB", 4000):
        found = saltflat.compute_statistics(model or net(), data, names=NAMES, memory=memory)
        wanted = saltflat.compute_statistics(net(), (inputs, targets), names=NAMES)
        assert found.examples == len(targets)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-12)
        for name in NAMES:
            for a, b in zip(found[name].values(), wanted[name].values(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-15)


class Scaling(DataLoader[Any]):
    """Does its work while it is read, as loaders that move batches to a device do."""

    def __iter__(self) -> Any:
        for inputs, targets in super().__iter__():
            yield inputs / 255, targets


def test_a_shuffled_loader_of_a_class_of_its_own_keeps_its_own_way_of_reading() -> None:
    assert_measured_as(Scaling(DATA, 5, shuffle=True), X / 255, Y)
    assert_measured_as(Scaling(DATA, 5, shuffle=True, num_workers=1), X / 255, Y)


class Backward(RandomSampler):
    """A random sampler by its class only, of some of the examples."""

    def __iter__(self) -> Iterator[int]:
        return iter([7, 5, 3, 3])


class ByClass(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        for label in range(2):
            yield [n for n in range(12) if Y[n] == label]


def test_samplers_of_ones_own_say_which_examples_there_are() -> None:
    assert_measured_as(DataLoader(DATA, 3, sampler=Backward(DATA)), X[[7, 5, 3, 3]], Y[[7, 5, 3, 3]])
    some = Y < 2
    assert_measured_as(
        DataLoader(DATA, batch_sampler=ByClass(RandomSampler(DATA), 4, drop_last=False)), X[some], Y[some]
    )


class InAnotherOrder(Sampler[int]):
    """Shuffled anew for every pass, by a generator that nobody else knows."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12, generator=self.generator).tolist()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (DATA[n] for n in torch.randperm(12).tolist())


class Batches:
    """An iterable that uses the memory of a batch again for the next."""

    def __iter__(self) -> Iterator[Any]:
        inputs, targets = torch.empty(4, 4, dtype=torch.float64), torch.empty(4, dtype=torch.long)
        for some in torch.randperm(12).split(4):
            yield inputs.copy_(X[some]), targets.copy_(Y[some])


SHUFFLED: dict[str, Callable[[], Any]] = {
    "batch sampler of torch": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 5, drop_last=False)
    ),
    "sampler": lambda: DataLoader(DATA, 5, sampler=InAnotherOrder()),
    "batch sampler of ones own": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(InAnotherOrder(), 5, drop_last=False)
    ),
    "stream": lambda: DataLoader(Stream(), 5),
    "plain iterable": Batches,
    "dicts": lambda: DataLoader(
        [{"input": x, "labels": y} for x, y in zip(X, Y, strict=True)],  # type: ignore[arg-type]
        5,
        sampler=InAnotherOrder(),
    ),
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_examples_that_come_in_another_order_every_time_are_the_same_data(kind: str) -> None:
    assert_measured_as(SHUFFLED[kind](), X, Y)
    asked = ["fisher_logdet(subset=12)", "kappa"]
    results = []
    for seed in range(2):
        torch.manual_seed(seed)
        found = saltflat.measure(
            net(), SHUFFLED[kind](), measures=asked, certificate=False, columns="sampled:2", memory=10_000
        )
        results.append([each.value for each in found.values()])
    assert results[0] == results[1]  # whatever the order: nothing of it is left


def test_what_differs_by_more_than_the_order_is_refused() -> None:
    class Dropping(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from torch.randperm(12)[:8].tolist()

    class Noisy(Scaling):
        def __iter__(self) -> Any:
            for inputs, targets in super().__iter__():
                yield inputs + torch.randn_like(inputs), targets

    for data in (
        DataLoader(DATA, 4, sampler=Dropping()),
        DataLoader(DATA, 4, sampler=WeightedRandomSampler(torch.ones(12).tolist(), 12)),
        Noisy(DATA, 4),
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 5, drop_last=True)),
    ):
        with pytest.raises(NondeterministicError, match=r"Try .*list\(loader\)"):
            saltflat.compute_statistics(net(), data, names="curvature_trace")
        once = list(data)
        inputs, targets = zip(*once, strict=True)
        assert_measured_as(once, torch.cat(inputs), torch.cat(targets))


def test_too_much_data_to_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "HELD", 100)
    with pytest.raises(NondeterministicError, match=r"too much data to hold.*shuffle=False"):
        saltflat.compute_statistics(net(), DataLoader(DATA, 5, sampler=InAnotherOrder()), names="curvature_trace")


class Later(Dataset[Any]):
    """Mirrored at random from the third example on."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, n: int) -> Any:
        return X[n].flip(0) if n > 2 and torch.rand(()) < 0.5 else X[n], Y[n]


class NoisyInPlace:
    """Random, in the same memory at every reading."""

    def __init__(self) -> None:
        self.inputs = X.clone()

    def __iter__(self) -> Iterator[Any]:
        yield self.inputs.normal_(), Y


def test_noise_is_noticed_where_batches_share_their_memory() -> None:
    with pytest.raises(NondeterministicError, match="first batch differs"):
        saltflat.compute_statistics(net(), NoisyInPlace(), names="curvature_trace")


class Shrinking:
    """One batch fewer at every reading, from the second on."""

    def __init__(self, step: int) -> None:
        self.left, self.step = 7, step

    def __iter__(self) -> Iterator[Any]:
        self.left += self.step
        yield from ((X[n : n + 1], Y[n : n + 1]) for n in range(self.left))


@pytest.mark.parametrize("data", [DataLoader(Later()), Shrinking(-1), Shrinking(1)], ids=["mirrored", "fewer", "more"])
def test_data_that_changes_after_the_first_batch_is_refused_when_it_is_read_again(data: Any) -> None:
    with pytest.raises(NondeterministicError, match=r"whose readings differ in (batch|the number of batches).*Try "):
        saltflat.measure(net(), data, measures=["hessian_trace", "fisher_logdet"], memory=2000, certificate=False)


def test_loaders_of_torch_keep_all_that_they_were_given() -> None:
    class Recorded(list[Any]):
        pass

    seen = Recorded()

    def collate(items: list[Any]) -> Any:
        seen.append(len(items))
        inputs, targets = zip(*items, strict=True)
        return torch.stack(inputs) / 255, torch.stack(targets)

    loader = DataLoader(DATA, 5, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(1))
    assert_measured_as(loader, X / 255, Y)
    assert set(seen) == {5, 2}
    ordered = part.fix_loader_order(DataLoader(DATA, 5, shuffle=True, num_workers=1, in_order=False, timeout=7))
    assert (ordered.num_workers, ordered.timeout, ordered.in_order) == (1, 7, True)
    unsorted = part.fix_loader_order(DataLoader(DATA, 5, num_workers=1, in_order=False, persistent_workers=True))
    assert unsorted.in_order
    assert unsorted.persistent_workers
    batches: Any = list(zip(X.split(5), Y.split(5), strict=True))
    whole: Any = DataLoader(batches, batch_size=None, shuffle=True)
    assert_measured_as(whole, X, Y)


# Batches.


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, fields: Any) -> Tensor:
        assert type(fields) is dict
        outputs: Tensor = self.inner(fields["left"] + fields["more"]["right"])
        return outputs


class Frozen(dict[str, Any]):
    """A class that torch does not look into."""


@pytest.mark.parametrize("kind", [UserDict, Frozen])
def test_mappings_inside_of_inputs_are_cut_with_the_examples(kind: Any) -> None:
    data = [((kind(left=x, more=kind(right=x)),), y) for x, y in zip(X.split(7), Y.split(7), strict=True)]
    assert_measured_as(data, 2 * X, Y, Named())


@dataclass
class Graph:
    nodes: Tensor


def test_objects_that_cannot_be_cut_are_refused_and_mappings_without_labels_named() -> None:
    with pytest.raises(DataError, match=r"Graph with tensors.*collate_fn"):
        saltflat.compute_statistics(net(), [((X, Graph(X)), Y)], names="curvature_trace")
    with pytest.raises(DataError, match=r"keys \['target', 'x'\].*'labels'"):
        saltflat.compute_statistics(net(), UserDict(x=X, target=Y), names="curvature_trace")
