"""Models that may reorder their examples, or couple those of larger chunks: every chunk is checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from single_examples import check_with_single_examples, labels, random
from torch import Tensor, nn

import saltflat
from saltflat import errors


class Sorted(nn.Module):
    """Sorts the examples of a batch, as packing does, and uses one layer before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(descending=True)
        hidden = torch.tanh(self.inner(x[order]))[order.argsort()]
        out: Tensor = self.head(torch.tanh(self.inner(hidden)))
        return out


class SortedPositionsFirst(Sorted):
    """Sorts its examples where they are at the second axis."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.T[:1].argsort(1, descending=True)[0]
        hidden = torch.tanh(self.inner(x[order]))[order.argsort()]
        out: Tensor = self.head(torch.tanh(self.inner(hidden)))
        return out


class SortedEntries(Sorted):
    """Sorts the entries of each example."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x.sort(-1).values))
        out: Tensor = self.head(hidden.topk(6).values)
        return out


class SortedAmongOthers(Sorted):
    """Sorts its examples along an axis that is as long for one as for many."""

    def forward(self, x: Tensor) -> Tensor:
        scores = nn.functional.pad(-x[:, 0], (0, 64 - len(x)), value=torch.inf)
        order = scores.argsort()[: len(x)]
        hidden = torch.tanh(self.inner(x[order]))
        restored = torch.empty_like(hidden).index_copy(0, order, hidden)
        out: Tensor = self.head(torch.tanh(self.inner(restored)))
        return out


class Compared(Sorted):
    """Ranks its examples by comparing them, and reads them in this order."""

    def forward(self, x: Tensor) -> Tensor:
        ranks = self.rank(x)
        hidden = torch.tanh(self.inner(torch.zeros_like(x).index_copy(0, ranks, x)))[ranks]
        out: Tensor = self.head(torch.tanh(self.inner(hidden)))
        return out

    @staticmethod
    def rank(x: Tensor) -> Tensor:
        places = torch.arange(len(x))
        same = (x[:, :1] == x[:, 0]) & (places[:, None] > places)
        return ((x[:, :1] < x[:, 0]) | same).sum(1)


class ComparedAsMatrix(Compared):
    """Reorders its examples by a product with a matrix of zeros and ones."""

    def forward(self, x: Tensor) -> Tensor:
        sent = (self.rank(x) == torch.arange(len(x))[:, None]).to(x)
        hidden = sent.T @ torch.tanh(self.inner(sent @ x))
        out: Tensor = self.head(torch.tanh(self.inner(hidden)))
        return out


class SortedInPython(Sorted):
    """Sorts its examples outside of torch."""

    def __init__(self, sort: Callable[[Tensor], list[int]]) -> None:
        super().__init__()
        self.sort = sort

    def forward(self, x: Tensor) -> Tensor:
        order = torch.tensor(self.sort(-x[:, 0]))
        hidden = torch.tanh(self.inner(x[order]))
        restored = torch.empty_like(hidden).index_copy(0, order, hidden)
        out: Tensor = self.head(torch.tanh(self.inner(restored)))
        return out


def sort_list(scores: Tensor) -> list[int]:
    values = scores.tolist()
    return sorted(range(len(values)), key=values.__getitem__)


def sort_array(scores: Tensor) -> list[int]:
    found: list[int] = np.argsort(scores.detach().numpy()).tolist()
    return found


class Capacities(nn.Module):
    """Sends each token to the best of three experts, in the order in which tokens arrive there."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).softmax(-1)
        chosen = (gates.topk(1, -1).indices == torch.arange(3)).long()
        places = torch.arange(len(tokens)) == (chosen.cumsum(0) - 1)[..., None]
        sent = (places & (chosen[..., None] > 0)).to(tokens)
        packed = torch.einsum("nec,nd->ecd", sent, tokens)
        found = torch.stack([expert(part) for expert, part in zip(self.experts, packed, strict=True)])
        return torch.einsum("nec,ecd,ne->nd", sent, found, gates * chosen).view(*x.shape[:2], 3).mean(1)


class Experts(nn.Module):
    """Sends tokens to one of two layers, by sorting and counting."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        expert = (tokens[:, 0] > 0).long()
        order = expert.argsort(stable=True)
        first = int((expert == 0).sum())
        parts = [self.one(tokens[order][:first]), self.two(tokens[order][first:])]
        return torch.cat(parts)[order.argsort()].view(*x.shape[:2], 3).mean(1)


def draw_sorted_at_first() -> Tensor:
    """Return examples of which all that strategies are compared on are in order, and others are not."""
    x = random(24, 6)
    x[:16, 0] = torch.arange(32.0, 16.0, -1.0)
    return x


def test_models_that_sort_their_examples_are_not_confused() -> None:
    torch.manual_seed(0)
    alike = [Sorted(), SortedPositionsFirst(), SortedEntries(), SortedAmongOthers()]
    for model in (*alike, SortedInPython(sort_list), SortedInPython(sort_array)):
        check_with_single_examples(model.double(), [(draw_sorted_at_first(), labels(24))])
    tokens = random(8, 2, 6)
    tokens[:2, :, 0] = torch.tensor([1.0, -1.0])  # one token for each expert
    tokens[2::2, :, 0], tokens[3::2, :, 0] = 1.0, -1.0  # both for one
    check_with_single_examples(Experts().double(), [(tokens, labels(8))])
    mixture = Capacities().double()
    with torch.no_grad():
        mixture.router.weight[:, :3].mul_(20)
    tokens = random(32, 2, 6)
    tokens[:24, :, :3] = 3 * mixture.router.weight[:, :3].repeat_interleave(8, 0)[:, None] / 20  # all for one expert
    check_with_single_examples(mixture, [(tokens, labels(32))])


@pytest.mark.parametrize("kind", [Compared, ComparedAsMatrix, SortedAmongOthers])
def test_chunks_of_models_that_may_reorder_examples_are_checked(
    kind: type[Sorted], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, data = kind().double(), [(draw_sorted_at_first(), labels(24))]
    check_with_single_examples(model, data)
    report = saltflat.measure(model, data, measures="hessian_trace")
    assert report.settings["strategy"] == "together"  # except where a chunk shows that examples were taken for others
    monkeypatch.setattr("saltflat.engine.strategy.run_checked", lambda problem, batch, run, tolerance: run())
    with pytest.raises(AssertionError):
        check_with_single_examples(model, data)


def test_a_chunk_whose_examples_have_other_outputs_in_company_is_refused() -> None:
    class Limited(Capacities):
        """Drops what an expert receives beyond four tokens."""

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(0, 1)
            chosen = (self.router(tokens).argmax(-1)[:, None] == torch.arange(3)).long()
            kept = (chosen * (chosen.cumsum(0) <= 4)).to(tokens)
            found = torch.stack([expert(tokens) for expert in self.experts], 1)
            out: Tensor = (kept[..., None] * found).sum(1).view(*x.shape[:2], 3).mean(1)
            return out

    torch.manual_seed(0)
    model, tokens = Limited().double(), random(40, 1, 6)
    with torch.no_grad():
        own = model.router(tokens[:, 0]).argmax(-1)
    first = torch.cat([(own == expert).nonzero()[:2, 0] for expert in range(3)])
    rest = torch.tensor([n for n in range(40) if n not in first.tolist()])
    data = tokens[torch.cat([first, rest])], labels(40)
    few = data[0][:6], data[1][:6]
    assert saltflat.measure(model, few, measures="hessian_trace").settings["strategy"] == "together"
    with pytest.raises(errors.CoupledExamplesError):
        saltflat.measure(model, data, measures="hessian_trace")
