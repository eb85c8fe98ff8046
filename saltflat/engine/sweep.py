"""The sweep: one pass over the data that averages all requested statistics, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from saltflat.engine import per_example
from saltflat.engine.context import Context, find_geometries
from saltflat.engine.data import Batch
from saltflat.engine.example_groups import ExampleGroups, GroupCounts, iterate_groups
from saltflat.engine.full_loss import check_share
from saltflat.engine.independence import MovedExamplesError
from saltflat.engine.output_curvature import Columns, ExampleRNG, can_join_columns, join_columns, make_columns
from saltflat.engine.precision import TF32_ROUNDING, use_precision
from saltflat.engine.problem import cast_targets, is_finite
from saltflat.engine.processes import Processes, combine_nested
from saltflat.engine.statistic import ParameterSite, Statistic, count_sum_bytes
from saltflat.engine.strategy import Probe
from saltflat.errors import NonFiniteError
from saltflat.gradients.base import ColumnLayout, DenseGradient, FactoredGradient, use_scratch

PIECES = 64  # tensors of single examples' values per parameter, before they are concatenated


class Sweep:
    """A pass over the data that sums statistics over the examples, in float64.

    Args:
        context: the problem and the conditions.
        wanted: the statistics.
        deviations: standard deviations of the layers' inputs, for statistics that need them.
        replicate: keep every random draw's part of a sum, instead of the scatter within single examples.
        only: the parameters to sum for; all that are measured if None.
        groups: keep the sums of each group of examples apart, for :meth:`make_leave_one_out`.
        precision: of the products; see :mod:`saltflat.engine.precision`.
    """

    def __init__(
        self,
        context: Context,
        wanted: Sequence[Statistic],
        deviations: Mapping[str, Tensor] | None = None,
        replicate: bool = False,
        only: Collection[str] | None = None,
        groups: ExampleGroups | None = None,
        precision: str = "ieee",
    ) -> None:
        self.context, self.problem, self.wanted, self.replicate = context, context.problem, wanted, replicate
        self.groups, self.precision = groups, precision
        # Only statistics of rows or columns need to know what the axes count.
        by_unit = any(each.kind == "matrix" for each in wanted)
        shapes, deviations = context.geometries if by_unit else find_geometries(self.problem.network), deviations or {}
        self.sites = {
            name: ParameterSite(name, value, shapes.get(name), deviations.get(name))
            for name, value in self.problem.network.measured.items()
            if only is None or name in only
        }
        self._clear()

    def _clear(self) -> None:
        context, wanted, groups = self.context, self.wanted, self.groups
        self.column_counts: dict[tuple[torch.Size, ...], int] = {}
        self.group = self.draws = self.emitted = 0
        self.seen = [GroupCounts() for _ in range(groups.count if groups else 1)]
        # One sum per group of examples, or one for all if they do not fit in half of the memory. An eighth is for the
        # examples of a window and their group, the rest for passes.
        self.window = context.limit // 16 if groups else 0
        self.room = context.limit - 2 * self.window
        self.sums: dict[str, list[dict[str, Tensor]]] = {each.name: self._make_sums(each) for each in wanted}
        self.parts: dict[str, list[dict[str, Tensor]]] = {each.name: [] for each in wanted}
        self.rows: dict[str, list[tuple[str, Tensor, Tensor]]] = {each.name: [] for each in wanted}
        self.variances: dict[str, dict[str, Tensor]] = {
            each.name: {} for each in wanted if context.plan.is_random and each.of == "curvature" and each.spread
        }

    def _make_sums(self, statistic: Statistic) -> list[dict[str, Tensor]]:
        if not statistic.by_group or len(self.seen) == 1:
            return [{}]
        left = self.room - count_sum_bytes(statistic, self.sites.values()) * len(self.seen)
        if left < self.context.limit // 2 - 2 * self.window:
            return [{}]
        self.room = left
        return [{} for _ in self.seen]

    @property
    def examples(self) -> int:
        """The number of examples swept so far."""
        return sum(each.examples for each in self.seen)

    @property
    def loss(self) -> float:
        """The sum of their losses."""
        return math.fsum(each.loss for each in self.seen)

    @property
    def share(self) -> float:
        """The divisor of the loss."""
        return math.fsum(each.share for each in self.seen)

    def add_batch(self, batch: Batch) -> Iterator[None]:
        """Split a batch into chunks that fit in memory, and add them one by one."""
        found = self.context.verify_probe(batch)
        start, size = 0, self.compute_chunk_size(batch, found)
        size = -(-batch.examples // -(-batch.examples // size))  # equal parts: a small last one would cost as much
        while start < batch.examples:
            chunk, counted = batch.cut(start, start + size), self.emitted
            with use_precision(self.precision):
                try:
                    self._add_chunk(chunk, found)
                except per_example.NotBatchableError:
                    if self.emitted != counted:
                        raise  # failed half-way: adding it again would count twice
                    for n in range(chunk.examples):
                        self._add_chunk(chunk.cut(n, n + 1), found, found.fallback)
            start += chunk.examples
            self.seen[self.group].examples += chunk.examples
            self._join_rows()
            yield
            self.context.heap.release()

    def _join_rows(self) -> None:
        """Keep single examples' values in few tensors: each takes half a kilobyte beside its numbers."""
        for statistic, rows in self.rows.items():
            if len(rows) < PIECES * len(self.sites):
                continue
            parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
            for name, numbers, values in rows:
                parts.setdefault(name, []).append((numbers, values))
            self.rows[statistic] = [
                (name, torch.cat([numbers for numbers, _ in each]), torch.cat([values for _, values in each]))
                for name, each in parts.items()
            ]

    def run(self, report: Callable[[int], None] = lambda done: None) -> Sweep:
        """Sweep all the data; ``report`` is called with the number of examples done."""
        try:
            self._run_batches(report)
        except MovedExamplesError:
            if not self.context.run_singly():
                raise
            self._clear()  # chunks that were added before may be wrong, too
            self._run_batches(report)
        self._combine(self.context.processes)
        return self

    def _run_batches(self, report: Callable[[int], None]) -> None:
        batches = self.context.read_own_batches()
        grouped = iterate_groups(batches, self.groups, self.window) if self.groups else ((0, b) for b in batches)
        with use_scratch():
            for self.group, batch in grouped:
                for _ in self.add_batch(batch):
                    report(self.examples)
        self.context.independence.finish()

    def _combine(self, processes: Processes) -> None:
        """Add what the other processes have summed over their examples."""
        if processes.count == 1:
            return
        draws, seen = zip(*processes.gather("the counts of a sweep", (self.draws, self.seen)), strict=True)
        self.draws, self.seen = max(draws), [GroupCounts.add_up(each) for each in zip(*seen, strict=True)]
        device = next(iter(self.problem.network.measured.values())).device
        # The values of examples of other processes are zero in each one's table.
        tables = {each.name: [self._scale_sums(each, {}, 1.0)] for each in self.wanted if each.kind == "example"}
        for nested in (self.sums, self.parts, {name: [each] for name, each in self.variances.items()}, tables):
            combine_nested(processes, "sums of a sweep", nested, device)
        for statistic, (table,) in tables.items():
            self.rows[statistic] = [(name, torch.arange(self.examples), value) for name, value in table.items()]

    def compute_chunk_size(self, batch: Batch, found: Probe) -> int:
        """Return the largest number of examples of a batch to process at once."""
        if found.strategy.startswith("single"):
            return 1
        # The number of columns is known once one example of these shapes has been run.
        inputs = per_example.LayerCalls.from_batch(batch, []).inputs
        if inputs not in self.column_counts:
            single = batch.cut(0, 1)
            with torch.no_grad():
                outputs = self.problem.network(single)
            self.problem.loss.check(outputs.double(), cast_targets(single.targets))
            columns = [each for _, each in self._make_column_sets(outputs, single)]
            count = sum if can_join_columns(columns, outputs.device) else max
            self.column_counts[inputs] = self.context.check_columns(count(each.layout.total for each in columns))
        return found.choose_num_examples(batch, self.column_counts[inputs], self.room)

    def _make_column_sets(self, raw: Tensor, batch: Batch) -> list[tuple[str, Columns]]:
        """Return the sets of columns that the statistics need, which are computed when they are asked for."""
        loss, targets, kinds = self.problem.loss, cast_targets(batch.targets), {each.of for each in self.wanted}
        sets = []
        if "curvature" in kinds:
            dice = ExampleRNG(self.context.seed, batch.first, batch.places)
            found = make_columns(loss.curvature(raw.double(), targets), self.context.plan, dice, raw.dtype)
            sets += [("curvature", columns) for columns in found]
        if "gradient" in kinds:
            block = lambda start, stop: loss.gradient(raw.double(), targets).unsqueeze(0)  # noqa: E731
            sets.append(("gradient", Columns(ColumnLayout(fixed=1), block)))
        return sets

    def _add_chunk(self, batch: Batch, found: Probe, strategy: str | None = None) -> None:
        with self.context.independence.watch(batch, found, strategy or found.strategy):
            raw, backward = found.forward(self.problem, batch, strategy)
        self.context.independence.add(batch, raw, 0.0 if self.precision == "ieee" else TF32_ROUNDING)
        targets, of = cast_targets(batch.targets), self.problem.loss
        # Arrays of all outputs in float64, which a large vocabulary makes large, are let go as soon as possible.
        of.check(raw.double(), targets)
        sums = [part(raw.double(), targets).double().sum() for part in (of.total, of.share)]
        loss, share = torch.stack(sums).tolist()  # in one answer, since a GPU has to be waited for
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"Expected a finite loss, but got NaN or infinity on examples {batch.first} to "
                f"{batch.first + batch.examples - 1}. Check these targets."
            )
        sets, fitting = self._make_column_sets(raw, batch), found.choose_num_columns(batch.examples, self.room)
        if can_join_columns([each for _, each in sets], raw.device, fitting):
            joined, parts = join_columns([each for _, each in sets])
            takers = [self._make_collector(kind, each.layout, each.sign, batch) for kind, each in sets]

            def emit(name: str, form: FactoredGradient) -> None:
                for part, take in zip(parts, takers, strict=True):
                    take(name, form.select_columns(part))

            backward(joined.to(raw), emit, True)
            sets = []
        while sets:
            kind, columns = sets.pop(0)
            total, sign, self.draws = columns.layout.total, columns.sign, max(self.draws, columns.layout.draws)
            for start, stop, block, first in columns.split(fitting, self.replicate):
                values, ends = columns.block(start, stop).to(raw), stop == total
                if ends:
                    del columns
                backward(values, self._make_collector(kind, block, sign, batch, first), ends and not sets)
        self.seen[self.group].loss += loss
        self.seen[self.group].share += share
        self._record_chunk(batch, raw.double(), targets)

    def _record_chunk(self, batch: Batch, outputs: Tensor, targets: Tensor) -> None:
        """Handle a chunk that was added; for subclasses."""

    def _make_collector(
        self, kind: str, layout: ColumnLayout, sign: int, batch: Batch, first_draw: int = 0
    ) -> per_example.Emit:
        def emit(name: str, form: FactoredGradient) -> None:
            self.emitted += 1
            if name not in self.sites:
                return
            site = self.sites[name]
            for each in self.wanted:
                if each.of != kind or (each.kind == "matrix" and site.geometry is None):
                    continue
                if each.kind == "example":
                    self.rows[each.name].append((name, batch.example_indices, each.total(form, site).double()))
                elif layout.draws and self.replicate:
                    self._add_draws(each, name, form, layout, sign, first_draw)
                else:
                    _accumulate(self._get_current_sums(each), name, each.total(form, site), sign)
                    if layout.draws and each.spread is not None:
                        _accumulate(self.variances[each.name], name, each.spread(form, layout), 1)

        return emit

    def _get_current_sums(self, statistic: Statistic) -> dict[str, Tensor]:
        sums = self.sums[statistic.name]  # of all groups, or one for all
        return sums[self.group if len(sums) > 1 else 0]

    def _add_draws(
        self, statistic: Statistic, name: str, form: FactoredGradient, layout: ColumnLayout, sign: int, first: int
    ) -> None:
        site, parts, sums = self.sites[name], self.parts[statistic.name], self._get_current_sums(statistic)
        if layout.fixed:
            _accumulate(sums, name, statistic.total(form.select_columns(slice(layout.fixed)), site), sign)
        parts += [{} for _ in range(first + layout.draws - len(parts))]
        for part, group in zip(parts[first : first + layout.draws], layout.make_group_slices(), strict=True):
            value = statistic.total(form.select_columns(group), site)
            _accumulate(part, name, value, sign)
            _accumulate(sums, name, value, sign)

    def compute_mean_loss(self) -> float:
        """Return the mean loss of the data."""
        return self.loss / self.check_share()

    def check_share(self) -> float:
        """Return the divisor of the loss, or raise an error if there is none."""
        return check_share(self.share)

    def _compute_scale(self, statistic: Statistic, without: GroupCounts | None = None) -> float:
        # Curvature is of L = loss / share. The gradients are of l_n with L = mean of l_n, so l_n = (N / share) total_n.
        examples, share = self.examples, self.check_share()
        if without is not None:
            examples, share = examples - without.examples, share - without.share
        if statistic.of == "curvature":
            return 1 / share
        per_gradient = (examples / share) ** statistic.degree
        return per_gradient if statistic.kind == "example" else per_gradient / examples

    def _sum_groups(self, statistic: Statistic) -> dict[str, Tensor]:
        """Return the sums over all examples."""
        first, *others = self.sums[statistic.name]
        if not others:
            return first
        total: dict[str, Tensor] = {}
        for sums in [first, *others]:
            for name, value in sums.items():
                _accumulate(total, name, value, 1)
        return total

    def compute_values(self, device: torch.device | None = None) -> dict[str, dict[str, Tensor]]:
        """Return every statistic of every parameter, on another device if one is given."""
        found = {
            each.name: self._scale_sums(each, self._sum_groups(each), self._compute_scale(each)) for each in self.wanted
        }
        if device is not None:  # before they are checked one by one: every answer of a GPU has to be waited for
            found = {name: {key: value.to(device) for key, value in of.items()} for name, of in found.items()}
        for statistic, values in found.items():
            for name, value in values.items():
                if not is_finite(value):
                    raise NonFiniteError(
                        f"Expected finite numbers, but got NaN or infinity in {statistic} of {name!r}: squares "
                        "overflowed. Try measuring with dtype=torch.float64."
                    )
        return found

    def make_leave_one_out(self, statistic: Statistic) -> Callable[[int], dict[str, Tensor]] | None:
        """Return a function of a group's number that computes the statistic without this group of examples.

        Groups without examples are not counted. None if the groups' sums did not fit in memory.
        """
        kept = [(seen, number) for number, seen in enumerate(self.seen) if seen.examples]
        # Without a group that holds the whole share (all other examples are ignored) there is nothing to divide by.
        if len(kept) < 2 or any(self.check_share() - seen.share <= 0 for seen, _ in kept):
            return None
        if statistic.kind == "example":
            assert self.groups is not None
            values = self._scale_sums(statistic, {}, 1.0)
            group = self.groups.find_groups(torch.arange(self.examples))

            def select_rows(left_out: int) -> dict[str, Tensor]:
                seen, number = kept[left_out]
                scale = self._compute_scale(statistic, seen)
                return {name: each[(group != number).to(each.device)] * scale for name, each in values.items()}

            return select_rows
        sums = self.sums[statistic.name]
        if len(sums) == 1:
            return None
        total = self._sum_groups(statistic)

        def subtract_group(left_out: int) -> dict[str, Tensor]:
            seen, number = kept[left_out]
            rest = {name: value - sums[number].get(name, 0) for name, value in total.items()}
            return self._scale_sums(statistic, rest, self._compute_scale(statistic, seen))

        return subtract_group

    def compute_replicates(self, statistic: Statistic) -> tuple[dict[str, Tensor], ...] | None:
        """Return the values with one draw left out at a time, or None if nothing was drawn."""
        parts = self.parts[statistic.name]
        if not parts:
            return None
        scale, draws = self._compute_scale(statistic), len(parts)
        values = self._scale_sums(statistic, self._sum_groups(statistic), scale)

        def leave_out_draw(left_out: Mapping[str, Tensor], name: str, value: Tensor) -> Tensor:
            # v = fixed + sum_e c_e and the others alone estimate fixed + D / (D - 1) sum_{e != d} c_e.
            if name not in left_out:
                return value
            every = sum(part[name] for part in parts if name in part)
            return value + (every - draws * left_out[name]) * (scale / (draws - 1))

        return tuple({name: leave_out_draw(part, name, value) for name, value in values.items()} for part in parts)

    def _scale_sums(self, statistic: Statistic, sums: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
        """Return the scaled sums in the order of the model's parameters; those without effect have zeros."""
        kept = [name for name, site in self.sites.items() if statistic.kind != "matrix" or site.geometry is not None]
        if statistic.kind == "example":
            device = next(iter(self.sites.values())).value.device
            table = {name: torch.zeros(self.examples, dtype=torch.float64, device=device) for name in kept}
            for name, numbers, values in self.rows[statistic.name]:
                table[name][numbers.to(device)] = values * scale
            return table

        def make_zeros(site: ParameterSite) -> Tensor:
            if statistic.kind == "matrix":  # the contraction determines its shape
                nothing = site.value.new_zeros((1, 1, *site.value.shape), dtype=torch.float64)
                return statistic.total(DenseGradient(nothing), site).double()
            shape = () if statistic.kind == "scalar" else site.value.shape
            return torch.zeros(shape, dtype=torch.float64, device=site.value.device)

        return {name: sums[name].double() * scale if name in sums else make_zeros(self.sites[name]) for name in kept}


def _accumulate(sums: dict[str, Tensor], name: str, value: Tensor, sign: int) -> None:
    if name not in sums:
        sums[name] = value * sign  # in its own precision: most groups of examples are one chunk
        return
    if sums[name].dtype != torch.float64:
        sums[name] = sums[name].double()
    sums[name].add_(value, alpha=sign)
