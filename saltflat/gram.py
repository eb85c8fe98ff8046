"""Inner products between the gradients of single examples, without a gradient of the network's size where it can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from saltflat.data import Batch
from saltflat.forms import Dense, Form, Layout
from saltflat.passes import Emit
from saltflat.scratch import scratch
from saltflat.setting import Setting
from saltflat.statistic import Statistic
from saltflat.totals import Totals

Forms = Mapping[str, Form]
_GRADIENT = Statistic(
    "gradient", of="gradient", total=lambda form, site: form.dense(), spread=None, meaning="gradients"
)


def gram(setting: Setting, chosen: Tensor) -> Tensor:
    """``(P, P)``: inner products between the gradients of the chosen examples' losses, in float64.

    Args:
        setting: what is measured.
        chosen: sorted numbers of examples.

    Gradients of as many examples as fit in memory are kept at a time, and those of the others pass by them: one sweep
    over the chosen examples if all fit.
    """
    result, start = torch.zeros(len(chosen), len(chosen), dtype=torch.float64), 0
    with scratch():
        while start < len(chosen):
            start = _window(setting, chosen, start, result)
    # The upper half was filled.
    return result.triu() + result.triu(1).mT


def gradient_rows(setting: Setting) -> Iterator[Tensor]:
    """The gradients of single examples' losses over all parameters, ``(examples, parameters)``, in float64."""
    keeper = _Keeper(setting)
    keeper.written = dict.fromkeys(keeper.sites, True)
    with scratch():
        for batch in setting.problem.batches():
            for _, forms in keeper.gradients(batch):
                if forms:
                    yield forms[""].dense()[0].double().cpu() / setting.mean_share


def _window(setting: Setting, chosen: Tensor, start: int, result: Tensor) -> int:
    """Fill the rows of the examples kept from ``start`` on; says where they end."""
    kept: list[tuple[int, Forms]] = []
    room, end = setting.limit // 4, len(chosen)
    with setting.reserve(3 * room):
        keeper = _Keeper(setting)
    for batch in _chosen_batches(setting, chosen, start):
        for first, forms in keeper.gradients(batch):
            count = next(iter(forms.values())).examples if forms else 0
            if first < end:
                room -= sum(sum(form.sizes()) * form.examples for form in forms.values())
                kept.append((first, forms))
                if room < 0:
                    end = first + count
            for row, before in kept:
                for name in before.keys() & forms.keys():
                    block = before[name].gram(forms[name]).double().cpu()
                    result[row : row + block.shape[0], first : first + block.shape[1]] += block
        setting.tick("Gradients of single examples", min(batch.first + batch.examples, len(chosen)), len(chosen))
    result[start:end] /= setting.mean_share**2
    return end


def _chosen_batches(setting: Setting, chosen: Tensor, start: int) -> Iterator[Batch]:
    """The chosen examples from number ``start`` of them on, numbered among themselves."""
    for batch in setting.problem.batches():
        here = (chosen >= batch.first) & (chosen < batch.first + batch.examples)
        which = torch.nonzero(here)[:, 0]
        which = which[which >= start]
        if len(which):
            yield batch.take(chosen[which] - batch.first, int(which[0]))


class _Keeper(Totals):
    """Keeps the gradients of single examples instead of summing something of them.

    Those that take less room written out than in factors are, side by side in one array: one product for all of them.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, [_GRADIENT])
        self.found: dict[int, dict[str, Form]] = {}
        self.written: dict[str, bool] = {}

    def gradients(self, batch: Batch) -> Iterator[tuple[int, Forms]]:
        """The gradients of a batch's chunks, each with the number of its first example."""
        for _ in self.add(batch):
            for first, forms in self.found.items():
                yield first, self._side_by_side(forms)
            self.found = {}

    def _collector(self, kind: str, layout: Layout, sign: int, batch: Batch) -> Emit:
        first = batch.first
        self.found[first] = {}

        def emit(name: str, form: Form) -> None:
            self.emitted += 1
            smaller = form.shape.numel() * torch.finfo(torch.float64).bits // 8 < sum(form.sizes())
            written = self.written.setdefault(name, smaller or isinstance(form, Dense))
            self.found[first][name] = Dense(form.dense()) if written else form

        return emit

    def _side_by_side(self, forms: Forms) -> Forms:
        if not forms:
            return forms
        some = next(iter(forms.values()))
        # A parameter that no example has used yet has a place from the beginning.
        for name in self.sites:
            self.written.setdefault(name, True)
        rows = [
            forms[name].dense().reshape(1, some.examples, -1)
            if name in forms
            else site.value.new_zeros(1, some.examples, site.value.numel())
            for name, site in self.sites.items()
            if self.written[name]
        ]
        kept = {name: form for name, form in forms.items() if not self.written[name]}
        return {**kept, "": Dense(torch.cat(rows, 2))} if rows else kept
