"""Curvature and gradient statistics of every parameter, from one pass over the data."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saltflat.engine.context import Context, describe_context
from saltflat.engine.data import Data
from saltflat.engine.losses import LossLike
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem, find_input_notes
from saltflat.engine.processes import parse_process_group
from saltflat.engine.progress import Progress, show_steps
from saltflat.engine.read_data import select_examples
from saltflat.engine.session import check_module, open_session
from saltflat.engine.sharding import gather_weights
from saltflat.engine.statistic import find_statistics
from saltflat.engine.sweep import Sweep
from saltflat.results.jackknife import compute_standard_error
from saltflat.statistics.averages import compute_input_deviations
from saltflat.validation import check_seed, parse_bytes, take_turns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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


@take_turns
def compute_statistics(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    names: str | Sequence[str] = ("curvature_diagonal", "curvature_trace"),
    *,
    columns: str = "exact",
    layers: Sequence[str] | str | None = None,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Progress | None = None,
    mode: str = "eval",
    limit: int | None = None,
    process_group: ProcessGroup | None = None,
) -> Statistics:
    """Compute curvature and gradient statistics of every parameter in one pass over the data.

    Args:
        model: any module. It is measured in eval mode and given back bit for bit as it was.
        data: a ``DataLoader``, a pair of tensors ``(inputs, targets)``, a dataset, or batches that can be read again.
        loss: ``"cross_entropy"``, ``"mse"``, ``"bce_with_logits"``, ``"model"`` for the one the model itself computes
            from labels, the matching loss module of torch with its options, such as
            ``nn.CrossEntropyLoss(label_smoothing=0.1)``, or a function ``loss(outputs, targets)``, which is called on
            one example at a time.
        names: one or several of ``curvature_diagonal``, ``curvature_trace``, ``unit_forms``, ``unit_trace``,
            ``feature_map_trace``, ``gradient_second_moment``, ``gradient_norms`` and ``gradient_along_weights``.
        columns: how the loss's curvature is taken, which costs a backward pass for each column: ``"exact"``; ``"top"``
            (or ``"top:5"``), the likeliest classes exactly and random columns for the rest; or ``"sampled"`` (or
            ``"sampled:16"``), random columns alone.
        layers: names of modules or parameters; all parameters that require a gradient if None.
        memory: working memory beyond the model and the results, such as ``"512MiB"``; large batches are cut to fit.
        dtype: ``torch.float32`` or ``torch.float64`` to work in; the model's own if None. Sums are kept in float64
            always.
        seed: of the random columns.
        progress: True for a progress bar (lines of text off a terminal), False for none, None for a bar on a terminal
            only, or a function of ``(step, done, total)``.
        mode: ``"eval"``, or ``"keep"`` to leave the modules in the modes they are in.
        limit: take at most so many examples, the first ones; all if None.
        process_group: processes that share the measurement, as for :func:`saltflat.measure`; this one alone if None.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> data = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.zeros(2, 1)
        >>> found = compute_statistics(net, data, names=["curvature_diagonal", "curvature_trace"], loss="mse")
        >>> found["curvature_diagonal"]["weight"].round(decimals=4).tolist()  # 2 mean(x^2)
        [[10.0, 4.0]]
        >>> round(float(found["curvature_trace"]["weight"]), 4)
        14.0
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        processes = stack.enter_context(parse_process_group(process_group).join())
        wanted, plan, room = find_statistics(names), parse_column_plan(columns), parse_bytes(memory)
        seed, data = check_seed(seed), select_examples(data, limit=limit)
        check_module(model)
        stack.enter_context(gather_weights(model, processes))
        notes = stack.enter_context(open_session(model, mode, data))
        problem = Problem.build(model, data, loss, layers, dtype, mode)
        context = Context(problem, plan, seed, room, processes=processes)
        context.check_same_inputs({"names": [each.name for each in wanted]})
        deviations = compute_input_deviations(context)[0] if any(each.features for each in wanted) else {}
        totals = Sweep(context, wanted, deviations)
        with show_steps(progress if processes.rank == 0 else False) as tick:
            own = processes.count_own(problem.num_examples)
            totals.run(lambda done: tick("Sweeping examples", done, own))
        if context.first is not None:
            notes += find_input_notes(problem, context.first, totals.compute_mean_loss())
        settings = describe_context(context)
    values = totals.compute_values()
    errors = _compute_errors(totals, values)
    seconds = time.perf_counter() - started
    return Statistics(values, errors, totals.examples, totals.compute_mean_loss(), seconds, settings, tuple(notes))


def _compute_errors(totals: Sweep, values: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return the standard errors of the statistics that random columns contribute to."""
    return {
        name: {
            key: compute_standard_error(found[key][0], found[key][1], totals.draws) / totals.check_share()
            if key in found
            else torch.zeros_like(value)
            for key, value in values[name].items()
        }
        for name, found in totals.variances.items()
    }
