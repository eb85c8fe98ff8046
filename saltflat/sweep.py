"""THE pass over the data: every chosen statistic of every parameter, from one forward pass and shared columns."""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from saltflat import passes
from saltflat.columns import Columns, Dice, Plan, columns_of, plan_from, stored
from saltflat.data import Batch
from saltflat.errorbars import standard_error
from saltflat.errors import EmptyDataError, NonFiniteError, OptionError
from saltflat.forms import Form, Layout
from saltflat.loan import loan
from saltflat.probe import LOOPED, Probe, probe
from saltflat.problem import Problem, finite, real
from saltflat.progress import Progress, shown
from saltflat.scratch import scratch
from saltflat.statistics import Statistic, statistics_named


@dataclass(frozen=True)
class Statistics(Mapping[str, Mapping[str, Tensor]]):
    """Statistics by name, then by parameter.

    Attributes:
        table: what the mapping shows.
        stderr: standard errors in the same arrangement, such that value +- 1.96 stderr is a 95 % interval; empty where
            values are exact.
        examples: how many examples were seen.
        loss: the mean loss over them.
        seconds: how long it took.
        settings: how it was measured.
        notes: what a reader should know besides.
    """

    table: Mapping[str, Mapping[str, Tensor]]
    stderr: Mapping[str, Mapping[str, Tensor]]
    examples: int
    loss: float
    seconds: float
    settings: Mapping[str, Any]
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> Mapping[str, Tensor]:
        return self.table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


def statistics_of(
    model: nn.Module,
    data: Any,
    names: str | Sequence[str],
    loss: Any = "cross_entropy",
    columns: str = "exact",
    layers: Sequence[str] | str | None = None,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Progress | None = None,
    mode: str = "eval",
) -> Statistics:
    """Curvature and gradient statistics of every parameter, from one pass over the data.

    Args:
        model: any module. It is measured in eval mode and given back bit for bit as it was.
        data: a ``DataLoader``, a pair of tensors ``(inputs, targets)``, a dataset, or batches that can be read again.
        names: one or several of ``curvature_diagonal``, ``curvature_trace``, ``gradient_second_moment``.
        loss: ``"cross_entropy"``, ``"mse"``, ``"bce_with_logits"``, one of :mod:`saltflat.losses`, the matching loss
            module of torch, or a function ``loss(outputs, targets)``, which is called on one example at a time.
        columns: ``"exact"``, ``"top"`` (or ``"top:5"``) or ``"sampled"`` (or ``"sampled:16"``); see
            :mod:`saltflat.columns`.
        layers: names of modules or parameters; all parameters that require a gradient if None.
        memory: working memory beyond the model and the results, such as ``"512MiB"``; large batches are cut to fit.
        dtype: ``torch.float32`` or ``torch.float64`` to work in; the model's own if None. Sums are kept in float64
            always.
        seed: of the random columns.
        progress: True or False for a progress bar (shown on a terminal if None), or a function of ``(done, total)``
            examples.
        mode: ``"eval"``, or ``"keep"`` to leave the modules in the modes they are in.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> data = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.zeros(2, 1)
        >>> found = statistics_of(net, data, ["curvature_diagonal", "curvature_trace"], loss="mse")
        >>> found["curvature_diagonal"]["weight"].round(decimals=4).tolist()  # 2 mean(x^2)
        [[10.0, 4.0]]
        >>> round(float(found["curvature_trace"]["weight"]), 4)
        14.0
    """
    started = time.perf_counter()
    wanted, plan, limit = statistics_named(names), plan_from(columns), bytes_from(memory)
    seed = check_seed(seed)
    with loan(model, mode, data) as notes:
        problem = Problem.of(model, data, loss, layers, dtype, mode)
        totals = Totals(problem, wanted, plan, seed, limit)
        with scratch(), shown(progress, problem.data) as report:
            for batch in problem.batches():
                for _ in totals.add(batch):
                    report(totals.examples)
    settings = {
        "columns": str(plan),
        "dtype": str(next(iter(problem.network.measured.values())).dtype).removeprefix("torch."),
        "device": str(next(iter(problem.network.measured.values())).device),
        "layers": list(problem.network.measured),
        "loss": loss if isinstance(loss, str) else type(problem.loss).__name__,
        "memory": limit,
        "mode": mode,
        "seed": seed,
        "way": " + ".join(dict.fromkeys(found.way for found in totals.probes.values())),
    }
    return totals.result(time.perf_counter() - started, settings, notes)


class Totals:
    """Sums over the examples seen so far, in float64."""

    def __init__(self, problem: Problem, wanted: list[Statistic], plan: Plan, seed: int, limit: int) -> None:
        self.problem, self.wanted = problem, wanted
        self.plan, self.seed, self.limit = plan, seed, limit
        # Inputs of other shapes may go through the model in another way: each kind is looked at when it first appears.
        self.probes: dict[tuple[tuple[torch.Size, ...], bool], Probe] = {}
        self.column_counts: dict[tuple[torch.Size, ...], int] = {}
        self.examples = self.draws = self.emitted = 0
        self.loss = self.share = 0.0
        self.sums: dict[str, dict[str, Tensor]] = {each.name: {} for each in wanted}
        self.variances: dict[str, dict[str, Tensor]] = {
            each.name: {} for each in wanted if plan.random and each.of == "curvature"
        }

    def add(self, batch: Batch) -> Iterator[None]:
        """Cut a batch into chunks that fit and add them one by one."""
        inputs = passes.Calls.of(batch, []).inputs
        kind = (inputs, batch.examples > 1 or (inputs, True) in self.probes)
        if kind not in self.probes:
            self.probes[kind] = probe(self.problem, batch)
        found = self.probes[kind]
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
            self.column_counts[inputs] = max((each.layout.total for _, each in columns), default=1)
        return found.examples(batch, self.column_counts[inputs], self.limit)

    def _column_sets(self, outputs: Tensor, batch: Batch) -> list[tuple[str, Columns]]:
        """The sets of columns the wanted statistics are about."""
        targets, sets = real(batch.targets), []
        kinds = {each.of for each in self.wanted}
        if "curvature" in kinds:
            curvature = self.problem.loss.curvature(outputs, targets)
            found = columns_of(curvature, self.plan, Dice(self.seed, batch.first))
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
            step = layout.total if layout.draws else found.columns(batch.examples, self.limit)
            for start in range(0, layout.total, step):
                stop = min(start + step, layout.total)
                last = number == len(sets) - 1 and stop == layout.total
                block = Layout(stop - start) if not layout.draws else layout
                backward(columns.block(start, stop).to(raw), self._collector(kind, block, columns.sign), last)
        self.loss += float(loss)
        self.share += float(self.problem.loss.share(outputs, targets).sum())

    def _collector(self, kind: str, layout: Layout, sign: int) -> passes.Emit:
        def emit(name: str, form: Form) -> None:
            self.emitted += 1
            for each in self.wanted:
                if each.of != kind:
                    continue
                _accumulate(self.sums[each.name], name, each.total(form, layout), sign)
                if layout.draws and each.spread is not None:
                    _accumulate(self.variances[each.name], name, each.spread(form, layout), 1)

        return emit

    def result(self, seconds: float, settings: Mapping[str, Any], notes: Sequence[str] = ()) -> Statistics:
        share = self.share
        if share <= 0:
            raise EmptyDataError(
                "Got targets that are all ignored or have no weight. Want at least one that counts. "
                "Do: check ignore_index and the class weights."
            )
        # Curvature is of the mean loss, L = loss / share.
        # The gradients are of l_n with L = mean of l_n, so l_n = (N / share) total_n.
        scale = {"curvature": 1 / share, "gradient": self.examples / share**2}
        values, errors = {}, {}
        for each in self.wanted:
            values[each.name] = self._scaled(each, self.sums[each.name], scale[each.of])
            for name, value in values[each.name].items():
                if not finite(value):
                    raise NonFiniteError(
                        f"Got NaN or infinity in {each.name} of {name!r}. Want finite numbers: the squares overflowed. "
                        "Do: measure with dtype=torch.float64."
                    )
            if each.name in self.variances:
                errors[each.name] = self._errors(each, values[each.name], 1 / share)
        return Statistics(values, errors, self.examples, self.loss / share, seconds, settings, tuple(notes))

    def _errors(self, statistic: Statistic, values: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
        found = self.variances[statistic.name]
        return {
            name: standard_error(found[name][0], found[name][1], self.draws) * scale
            if name in found
            else torch.zeros_like(value)
            for name, value in values.items()
        }

    def _scaled(self, statistic: Statistic, sums: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
        """In the order of the model's parameters; one that no output depends on has zeros."""

        def zero(parameter: Tensor) -> Tensor:
            shape = () if statistic.scalar else parameter.shape
            return torch.zeros(shape, dtype=torch.float64, device=parameter.device)

        measured = self.problem.network.measured
        return {name: sums[name] * scale if name in sums else zero(value) for name, value in measured.items()}


def _accumulate(sums: dict[str, Tensor], name: str, value: Tensor, sign: int) -> None:
    if name in sums:
        sums[name].add_(value, alpha=sign)
    else:
        sums[name] = value.double() * sign


def bytes_from(memory: str | int) -> int:
    """
    >>> bytes_from("1GiB"), bytes_from("500 MB"), bytes_from(4096)
    (1073741824, 500000000, 4096)
    """
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(memory), re.IGNORECASE)
    size = float(match[1]) * units[match[2].lower()] if match and match[2].lower() in units else 0.0
    if not 1 <= size < 2**63:
        raise OptionError(f"Got memory={memory!r}. Want a positive size. Do: for instance memory='2GiB' or '500MB'.")
    return int(size)


def check_seed(seed: SupportsIndex) -> int:
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex) or not 0 <= operator.index(seed) < 2**63:
        raise OptionError(f"Got seed={seed!r}. Want a whole number from 0 to 2^63 - 1. Do: for instance seed=0.")
    return operator.index(seed)
