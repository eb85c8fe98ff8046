"""Inner products between the gradients of single examples, from their factors where possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from saltflat.engine.context import Context
from saltflat.engine.data import Batch
from saltflat.engine.per_example import Emit
from saltflat.engine.statistic import Statistic
from saltflat.engine.sweep import Sweep
from saltflat.gradients.base import ColumnLayout, DenseGradient, FactoredGradient, use_scratch

Forms = Mapping[str, FactoredGradient]
_GRADIENT = Statistic(
    "gradient", of="gradient", total=lambda form, site: form.to_dense(), spread=None, meaning="gradients"
)


def compute_gram_matrix(context: Context, chosen: Tensor) -> Tensor:
    """Return the inner products between the gradients of the chosen examples' losses, ``(P, P)``, in float64.

    The gradients of as many examples as fit in memory are kept at a time, and multiplied with those of the others. This
    takes one sweep over the chosen examples if all fit.

    Args:
        context: the problem and the conditions.
        chosen: sorted numbers of examples.
    """
    result, start = torch.zeros(len(chosen), len(chosen), dtype=torch.float64), 0
    with use_scratch():
        while start < len(chosen):
            start = _fill_window(context, chosen, start, result)
    # Only the upper triangle was filled.
    return result.triu() + result.triu(1).mT


def iterate_gradients(context: Context) -> Iterator[Tensor]:
    """Yield the gradients of single examples' losses over all parameters, ``(examples, parameters)``, in float64."""
    keeper = _GradientKeeper(context)
    keeper.written = dict.fromkeys(keeper.sites, True)
    with use_scratch():
        for batch in context.problem.read_batches():
            for _, forms in keeper.collect_gradients(batch):
                if forms:
                    yield forms[""].to_dense()[0].double().cpu() / context.mean_share


def _fill_window(context: Context, chosen: Tensor, start: int, result: Tensor) -> int:
    """Fill the rows of the examples kept from ``start`` on; return where they end."""
    kept: list[tuple[int, Forms]] = []
    room, end = context.limit // 4, len(chosen)
    with context.reserve(3 * room):
        keeper = _GradientKeeper(context)
    for batch in _select_batches(context, chosen, start):
        for first, forms in keeper.collect_gradients(batch):
            count = next(iter(forms.values())).examples if forms else 0
            if first < end:
                room -= sum(sum(form.count_bytes()) * form.examples for form in forms.values())
                kept.append((first, forms))
                if room < 0:
                    end = first + count
            for row, before in kept:
                for name in before.keys() & forms.keys():
                    block = before[name].compute_gram(forms[name]).double().cpu()
                    result[row : row + block.shape[0], first : first + block.shape[1]] += block
        context.tick("Gradients of single examples", min(batch.first + batch.examples, len(chosen)), len(chosen))
    result[start:end] /= context.mean_share**2
    return end


def _select_batches(context: Context, chosen: Tensor, start: int) -> Iterator[Batch]:
    """Yield the chosen examples from number ``start`` of them on, numbered among themselves."""
    for batch in context.problem.read_batches():
        here = (chosen >= batch.first) & (chosen < batch.first + batch.examples)
        which = torch.nonzero(here)[:, 0]
        which = which[which >= start]
        if len(which):
            yield batch.take(chosen[which] - batch.first, int(which[0]))


class _GradientKeeper(Sweep):
    """Keeps the gradients of single examples instead of summing statistics of them.

    Those that need less memory written out than in factors are concatenated to one array, for a single product.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context, [_GRADIENT])
        self.found: dict[int, dict[str, FactoredGradient]] = {}
        self.written: dict[str, bool] = {}

    def collect_gradients(self, batch: Batch) -> Iterator[tuple[int, Forms]]:
        """Yield the gradients of a batch's chunks, each with the number of its first example."""
        for _ in self.add_batch(batch):
            for first, forms in self.found.items():
                yield first, self._concatenate_dense(forms)
            self.found = {}

    def _make_collector(self, kind: str, layout: ColumnLayout, sign: int, batch: Batch) -> Emit:
        first = batch.first
        self.found[first] = {}

        def emit(name: str, form: FactoredGradient) -> None:
            self.emitted += 1
            smaller = form.shape.numel() * torch.finfo(torch.float64).bits // 8 < sum(form.count_bytes())
            written = self.written.setdefault(name, smaller or isinstance(form, DenseGradient))
            self.found[first][name] = DenseGradient(form.to_dense()) if written else form

        return emit

    def _concatenate_dense(self, forms: Forms) -> Forms:
        if not forms:
            return forms
        some = next(iter(forms.values()))
        # A parameter that no example has used yet gets its place from the beginning.
        for name in self.sites:
            self.written.setdefault(name, True)
        rows = [
            forms[name].to_dense().reshape(1, some.examples, -1)
            if name in forms
            else site.value.new_zeros(1, some.examples, site.value.numel())
            for name, site in self.sites.items()
            if self.written[name]
        ]
        kept = {name: form for name, form in forms.items() if not self.written[name]}
        return {**kept, "": DenseGradient(torch.cat(rows, 2))} if rows else kept
