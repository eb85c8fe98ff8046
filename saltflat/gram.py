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
from saltflat.sweep import Totals

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
    keeper, measured = _Keeper(setting), setting.problem.network.measured
    share = setting.mean_share
    with scratch():
        for batch in setting.problem.batches():
            for _, forms in keeper.gradients(batch):
                count = next(iter(forms.values())).examples if forms else 1
                rows = [
                    forms[name].dense().reshape(count, -1).double()
                    if name in forms
                    else torch.zeros(count, value.numel(), dtype=torch.float64, device=value.device)
                    for name, value in measured.items()
                ]
                yield torch.cat(rows, 1).cpu() / share


def _window(setting: Setting, chosen: Tensor, start: int, result: Tensor) -> int:
    """Fill the rows of the examples kept from ``start`` on; says where they end."""
    kept: list[tuple[int, Forms]] = []
    room, end = setting.limit, len(chosen)
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
    """Keeps the gradients of single examples instead of summing something of them."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, [_GRADIENT])
        self.found: dict[int, dict[str, Form]] = {}

    def gradients(self, batch: Batch) -> Iterator[tuple[int, Forms]]:
        for _ in self.add(batch):
            yield from self.found.items()
            self.found = {}

    def _collector(self, kind: str, layout: Layout, sign: int, first: int) -> Emit:
        self.found[first] = {}

        def emit(name: str, form: Form) -> None:
            self.emitted += 1
            self.found[first][name] = _compact(form)

        return emit


def _compact(form: Form) -> Form:
    """Written out where that takes less room than the factors."""
    dense = form.shape.numel() * torch.finfo(torch.float64).bits // 8
    return Dense(form.dense()) if dense < sum(form.sizes()) else form
