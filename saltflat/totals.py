"""Sums over the examples: what a sweep accumulates, chunk by chunk, for every statistic asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from saltflat import passes
from saltflat.columns import Columns, Dice, columns_of, stored
from saltflat.data import Batch
from saltflat.errorbars import standard_error
from saltflat.errors import EmptyDataError, NonFiniteError
from saltflat.forms import Dense, Form, Layout
from saltflat.geometry import geometries
from saltflat.probe import LOOPED, Probe
from saltflat.problem import finite, real
from saltflat.scratch import scratch
from saltflat.setting import Setting
from saltflat.statistic import Site, Statistic


class Totals:
    """Sums over the examples seen so far, in float64.

    Args:
        setting: what is measured.
        wanted: the statistics.
        deviations: standard deviations of the layers' inputs, for statistics that ask for them.
        replicate: keep every random draw's part of a sum, instead of the scatter within single examples.
        only: the parameters to look at; all that are measured if None.
    """

    def __init__(
        self,
        setting: Setting,
        wanted: Sequence[Statistic],
        deviations: Mapping[str, Tensor] | None = None,
        replicate: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        self.setting, self.problem, self.wanted, self.replicate = setting, setting.problem, wanted, replicate
        shapes, deviations = geometries(self.problem.network), deviations or {}
        self.sites = {
            name: Site(name, value, shapes.get(name), deviations.get(name))
            for name, value in self.problem.network.measured.items()
            if only is None or name in only
        }
        self.column_counts: dict[tuple[torch.Size, ...], int] = {}
        self.examples = self.draws = self.emitted = 0
        self.loss = self.share = 0.0
        self.sums: dict[str, dict[str, Tensor]] = {each.name: {} for each in wanted}
        self.parts: dict[str, list[dict[str, Tensor]]] = {each.name: [] for each in wanted}
        self.rows: dict[str, list[tuple[str, int, Tensor]]] = {each.name: [] for each in wanted}
        self.variances: dict[str, dict[str, Tensor]] = {
            each.name: {} for each in wanted if setting.plan.random and each.of == "curvature" and each.spread
        }

    def add(self, batch: Batch) -> Iterator[None]:
        """Cut a batch into chunks that fit and add them one by one."""
        found = self.setting.probe(batch)
        start, size = 0, self._chunk_size(batch, found)
        while start < batch.examples:
            chunk = batch.cut(start, start + size)
            counted = self.emitted
            try:
                self._add(chunk, found)
            except passes.NotTogetherError:
                if self.emitted != counted:  # running out of memory half-way, say: taking it again would count twice
                    raise
                for n in range(chunk.examples):
                    self._add(chunk.cut(n, n + 1), found, LOOPED)
            start += size
            self.examples += chunk.examples
            yield

    def sweep(self, report: Callable[[int], None] = lambda done: None) -> Totals:
        """Add all the data."""
        with scratch():
            for batch in self.problem.batches():
                for _ in self.add(batch):
                    report(self.examples)
        return self

    def _chunk_size(self, batch: Batch, found: Probe) -> int:
        if found.way.startswith("single"):
            return 1
        # How many columns there are is known once one example of these shapes has been seen.
        inputs = passes.Calls.of(batch, []).inputs
        if inputs not in self.column_counts:
            single = batch.cut(0, 1)
            with torch.no_grad():
                outputs = self.problem.network(single).double()
            self.problem.loss.check(outputs, real(single.targets))
            columns = self._column_sets(outputs, single)
            self.column_counts[inputs] = max(1, *(each.layout.total for _, each in columns))
        return found.examples(batch, self.column_counts[inputs], self.setting.limit)

    def _column_sets(self, outputs: Tensor, batch: Batch) -> list[tuple[str, Columns]]:
        """The sets of columns the wanted statistics are about."""
        targets, sets = real(batch.targets), []
        kinds = {each.of for each in self.wanted}
        if "curvature" in kinds:
            curvature = self.problem.loss.curvature(outputs, targets)
            found = columns_of(curvature, self.setting.plan, Dice(self.setting.seed, batch.first))
            sets += [("curvature", columns) for columns in found]
        if "gradient" in kinds:
            gradient = self.problem.loss.gradient(outputs, targets)
            sets.append(("gradient", stored(gradient.unsqueeze(0), Layout(fixed=1))))
        return sets

    def _add(self, batch: Batch, found: Probe, way: str | None = None) -> None:
        raw, backward = found.forward(self.problem, batch, way)
        outputs, targets = raw.double(), real(batch.targets)
        self.problem.loss.check(outputs, targets)
        loss = self.problem.loss.total(outputs, targets).sum()
        if not bool(loss.isfinite()):
            raise NonFiniteError(
                f"Got a NaN or infinite loss on examples {batch.first} to {batch.first + batch.examples - 1}. "
                "Want a finite one. Do: check these targets."
            )
        sets = self._column_sets(outputs, batch)
        for number, (kind, columns) in enumerate(sets):
            layout = columns.layout
            self.draws = max(self.draws, layout.draws)
            # Random draws are compared with each other and stay in one block.
            step = layout.total if layout.draws else found.columns(batch.examples, self.setting.limit)
            for start in range(0, layout.total, step):
                stop = min(start + step, layout.total)
                last = number == len(sets) - 1 and stop == layout.total
                block = Layout(stop - start) if not layout.draws else layout
                collect = self._collector(kind, block, columns.sign, batch.first)
                backward(columns.block(start, stop).to(raw), collect, last)
        self.loss += float(loss)
        self.share += float(self.problem.loss.share(outputs, targets).sum())

    def _collector(self, kind: str, layout: Layout, sign: int, first: int) -> passes.Emit:
        def emit(name: str, form: Form) -> None:
            self.emitted += 1
            if name not in self.sites:
                return
            site = self.sites[name]
            for each in self.wanted:
                if each.of != kind or (each.kind == "matrix" and site.geometry is None):
                    continue
                if each.kind == "example":
                    self.rows[each.name].append((name, first, each.total(form, site).double()))
                elif layout.draws and self.replicate:
                    self._add_draws(each, name, form, layout, sign)
                else:
                    _accumulate(self.sums[each.name], name, each.total(form, site), sign)
                    if layout.draws and each.spread is not None:
                        _accumulate(self.variances[each.name], name, each.spread(form, layout), 1)

        return emit

    def _add_draws(self, statistic: Statistic, name: str, form: Form, layout: Layout, sign: int) -> None:
        site, parts = self.sites[name], self.parts[statistic.name]
        if layout.fixed:
            _accumulate(self.sums[statistic.name], name, statistic.total(form.part(slice(layout.fixed)), site), sign)
        parts += [{} for _ in range(layout.draws - len(parts))]
        for part, group in zip(parts, layout.groups(), strict=True):
            value = statistic.total(form.part(group), site)
            _accumulate(part, name, value, sign)
            _accumulate(self.sums[statistic.name], name, value, sign)

    def mean_loss(self) -> float:
        return self.loss / self._share()

    def _share(self) -> float:
        if self.share <= 0:
            raise EmptyDataError(
                "Got targets that are all ignored or have no weight. Want at least one that counts. "
                "Do: check ignore_index and the class weights."
            )
        return self.share

    def _scale(self, statistic: Statistic) -> float:
        # Curvature is of the mean loss, L = loss / share.
        # The gradients are of l_n with L = mean of l_n, so l_n = (N / share) total_n.
        if statistic.of == "curvature":
            return 1 / self._share()
        per_gradient = (self.examples / self._share()) ** statistic.degree
        return per_gradient if statistic.kind == "example" else per_gradient / self.examples

    def values(self) -> dict[str, dict[str, Tensor]]:
        """Every wanted statistic of every parameter."""
        found = {each.name: self._scaled(each, self.sums[each.name]) for each in self.wanted}
        for statistic, values in found.items():
            for name, value in values.items():
                if not finite(value):
                    raise NonFiniteError(
                        f"Got NaN or infinity in {statistic} of {name!r}. Want finite numbers: the squares overflowed. "
                        "Do: measure with dtype=torch.float64."
                    )
        return found

    def errors(self) -> dict[str, dict[str, Tensor]]:
        """Standard errors of what random columns had a part in."""
        values = self.values()
        return {
            name: {
                key: standard_error(found[key][0], found[key][1], self.draws) / self._share()
                if key in found
                else torch.zeros_like(value)
                for key, value in values[name].items()
            }
            for name, found in self.variances.items()
        }

    def replicates(self, statistic: Statistic) -> tuple[dict[str, Tensor], ...] | None:
        """The values with one draw left out at a time; None if nothing was drawn."""
        parts = self.parts[statistic.name]
        if not parts:
            return None
        values, scale, draws = self._scaled(statistic, self.sums[statistic.name]), self._scale(statistic), len(parts)

        def without(left_out: Mapping[str, Tensor], name: str, value: Tensor) -> Tensor:
            # v = fixed + sum_e c_e and the others alone estimate fixed + D / (D - 1) sum_{e != d} c_e.
            if name not in left_out:
                return value
            every = sum(part[name] for part in parts if name in part)
            return value + (every - draws * left_out[name]) * (scale / (draws - 1))

        return tuple({name: without(part, name, value) for name, value in values.items()} for part in parts)

    def _scaled(self, statistic: Statistic, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the order of the model's parameters; one that no output depends on has zeros."""
        scale = self._scale(statistic)
        kept = [name for name, site in self.sites.items() if statistic.kind != "matrix" or site.geometry is not None]
        if statistic.kind == "example":
            device = next(iter(self.sites.values())).value.device
            table = {name: torch.zeros(self.examples, dtype=torch.float64, device=device) for name in kept}
            for name, first, values in self.rows[statistic.name]:
                table[name][first : first + len(values)] = values * scale
            return table

        def zero(site: Site) -> Tensor:
            if statistic.kind == "matrix":
                # Its shape is what the contraction makes of it.
                nothing = site.value.new_zeros((1, 1, *site.value.shape), dtype=torch.float64)
                return statistic.total(Dense(nothing), site).double()
            shape = () if statistic.kind == "scalar" else site.value.shape
            return torch.zeros(shape, dtype=torch.float64, device=site.value.device)

        return {name: sums[name] * scale if name in sums else zero(self.sites[name]) for name in kept}


def _accumulate(sums: dict[str, Tensor], name: str, value: Tensor, sign: int) -> None:
    if name in sums:
        sums[name].add_(value, alpha=sign)
    else:
        sums[name] = value.double() * sign
