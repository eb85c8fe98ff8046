"""The meter: measures one model again and again, and prepares once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import scipy
import torch
from torch import Tensor, nn

from saltflat.engine.context import describe_context, ignore_progress
from saltflat.engine.data import Data
from saltflat.engine.losses import LossLike, format_loss
from saltflat.engine.model_identity import SameObject, list_modes
from saltflat.engine.problem import find_input_notes
from saltflat.engine.processes import SINGLE_PROCESS, Processes, parse_process_group
from saltflat.engine.progress import show_steps
from saltflat.engine.read_data import move_to_device, select_examples
from saltflat.engine.session import check_module, open_session
from saltflat.engine.sharding import gather_weights
from saltflat.engine.structure import Preparation
from saltflat.gradients.base import HeapTrimmer
from saltflat.measures.measurer import (
    Measurer,
    add_certificate_notes,
    compute_certificate,
    format_device,
    make_legend,
    parse_normalized_loss,
)
from saltflat.measures.plan import make_plan
from saltflat.results.plan import MeasurementPlan
from saltflat.results.report import Report, describe_run
from saltflat.validation import parse_device, take_turns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Meter"]


class Meter:
    """Measure one model again and again, and prepare for it once.

    A report needs more than the sweep over the data: how the model can be swept, how much memory an example takes, what
    the axes of its weights count, and how it can be rescaled. A meter keeps what it finds, and every report is that of
    :func:`saltflat.measure`, to the last digit. Hold one where the same model is measured repeatedly, as in training.

    *What is kept, and why that is safe.* Nothing that depends on the numbers in weights or data: losses, gradients, the
    certificate and all checks of the data are computed anew. Before each use of what was kept, the meter compares
    modules, modes, hooks, forward methods, and the names, shapes, types and devices of parameters and buffers; it runs
    the first examples and compares every operation; and it compares the gradients it would sweep with those of single
    examples by plain autograd, by forward differentiation, and in a batch. Anything else than before, and it prepares
    again. What operations take from whole numbers (tokens) or masks is compared too before rescalings are used again.
    Models that read values of tensors, sort, or select by masks are prepared every time.

    Args:
        model: any module. It is not copied, and may be trained between measurements.
        loss: as for :func:`saltflat.measure`, like all other arguments.
        measures: names of measures.
        columns: how the loss's curvature is taken.
        layers: names of modules or parameters to measure.
        memory: working memory beyond the model and the results.
        dtype: precision to work in.
        seed: of everything random.
        progress: whether to show progress, or a function that is called with it.
        mode: ``"eval"`` or ``"keep"``.
        logits: how outputs are normalized.
        diagonal: where measures take the curvature diagonal from.
        initial: the model, or its ``state_dict``, before training.
        certificate: whether to measure how far the Gauss-Newton blocks are from the Hessian's, if a measure is made of
            them.
        sampling: whether to estimate how far each number depends on the choice of the examples.
        limit: take at most so many examples.
        process_group: processes that share the measurement.
        device: where to measure. If that is another device than the model's, it is copied and prepared every time.
        precision: of float32 products in the sweep over the data, ``"ieee"`` or ``"tf32"``.

    Attributes:
        model: the model.
        loss: the loss as it was passed.
        num_preparations: how many measurements had to prepare.

    A pickled or copied meter prepares again, and measures in its own process alone.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> inputs, labels = torch.randn(20, 2), torch.randint(3, (20,))
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        >>> meter = Meter(net, measures=["hessian_trace"])
        >>> losses = []
        >>> for _ in range(3):
        ...     losses.append(meter.measure((inputs, labels)).loss)
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(net(inputs), labels).backward()
        ...     optimizer.step()
        >>> losses[0] > losses[1] > losses[2], meter.num_preparations
        (True, 1)
    """

    @take_turns
    def __init__(
        self,
        model: nn.Module,
        loss: LossLike = "cross_entropy",
        measures: str | Sequence[str] | None = None,
        *,
        columns: str = "exact",
        layers: Sequence[str] | str | None = None,
        memory: str | int = "1GiB",
        dtype: torch.dtype | None = None,
        seed: int = 0,
        progress: bool | Callable[..., None] | None = None,
        mode: str = "eval",
        logits: str = "none",
        diagonal: str = "exact",
        initial: nn.Module | Mapping[str, Tensor] | None = None,
        certificate: bool = True,
        sampling: bool = True,
        limit: int | None = None,
        device: str | torch.device | None = None,
        precision: str = "ieee",
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._measurer = Measurer.parse(
            loss,
            measures,
            columns,
            layers,
            memory,
            dtype,
            seed,
            mode,
            logits,
            diagonal,
            certificate,
            sampling,
            precision,
        )
        check_module(model)
        self.model, self.loss = model, loss
        self._logits, self._initial, self._progress, self._limit = logits, initial, progress, limit
        self._device = None if device is None else parse_device(device)
        self._processes = parse_process_group(process_group)
        self._preparation = Preparation()
        self._predicted: Mapping[str, float] = {}

    @property
    def num_preparations(self) -> int:
        """Return how many measurements had to prepare."""
        return self._preparation.count

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what holds for this model in this process only."""
        return {**vars(self), "_preparation": Preparation(), "_processes": SINGLE_PROCESS}

    @take_turns
    def plan(self, data: Data) -> MeasurementPlan:
        """Find out what a measurement of these data will do and take, as :func:`saltflat.plan` does.

        The next measurement shows the remaining time by it.

        Args:
            data: as for :meth:`measure`.
        """
        measurer = replace(self._measurer, loss=parse_normalized_loss(self.loss, self._logits))
        model, data = self._prepare_inputs(data)
        with open_session(model, measurer.mode, data) as notes:
            found = make_plan(measurer, model, data, self._initial, self._logits)
        HeapTrimmer(0).trim()  # of what was tried, so that the measurement starts as the trial did
        self._predicted = found.predicted_seconds_by_step
        return replace(found, notes=(*notes, *found.notes))

    def _prepare_inputs(self, data: Data) -> tuple[nn.Module, Data]:
        """Return the model and the examples to take, on the device to measure on."""
        data = data if self._limit is None else select_examples(data, limit=self._limit)
        check_module(self.model)
        return (self.model, data) if self._device is None else _move_to_device(self.model, data, self._device)

    @take_turns
    def measure(self, data: Data) -> Report:
        """Measure the model on these data, as :func:`saltflat.measure` does.

        Args:
            data: a ``DataLoader``, a pair of tensors ``(inputs, targets)``, a dataset, or batches that can be read
                again. Other data than before may have other shapes and types.
        """
        with self._processes.join() as processes, gather_weights(self.model, processes):
            return self._measure(data, processes)

    def _measure(self, data: Data, processes: Processes) -> Report:
        started = time.perf_counter()
        measurer = replace(self._measurer, loss=parse_normalized_loss(self.loss, self._logits))
        asked = measurer.asked
        model, data = self._prepare_inputs(data)
        # A copy is never measured twice.
        preparation = self._preparation if model is self.model else Preparation()
        modes = list_modes(model)
        agreement = None
        predicted, self._predicted = self._predicted, {}
        with open_session(model, measurer.mode, data) as notes:
            loss = getattr(measurer.loss, "inner", measurer.loss)
            conditions = modes, SameObject(self.loss), format_loss(loss)
            with preparation.lend_structure(model, *conditions) as structure:
                hidden = self._progress is False or (self._progress is None and not sys.stderr.isatty())
                hidden = hidden or processes.rank > 0
                with nullcontext(ignore_progress) if hidden else show_steps(self._progress) as tick:
                    search = measurer.collect(
                        model, data, self._initial, tick, structure, predicted=predicted, processes=processes
                    )
                    context = search.context
                    readings, left_out = search.compute_readings(asked)
                    examples, mean_loss = context.examples, context.mean_loss
                    if context.first is not None:
                        notes += find_input_notes(context.problem, context.first, mean_loss)
                    notes += search.notes
                if measurer.needs_certificate:
                    with search.time_step("certificate"):
                        agreement = compute_certificate(context)
        readings = add_certificate_notes(asked, readings, agreement)
        return Report(
            readings=readings,
            left_out=left_out,
            legend={each.key: make_legend(each, readings[each.key]) for each in asked if each.key in readings},
            examples=examples,
            loss=mean_loss,
            settings=describe_context(context)
            | {"logits": self._logits, "diagonal": measurer.diagonal}
            | search.settings,
            device=format_device(context),
            seconds_by_step=search.seconds,
            certificate=agreement,
            notes=tuple(notes),
            **describe_run(model, started, torch, numpy, scipy),
            **search.overview,
        )


def _move_to_device(model: nn.Module, data: Data, device: torch.device) -> tuple[nn.Module, Data]:
    """Return a copy of the model on the device, or the model itself if it is there, and the data moved."""
    check_module(model)
    there = torch.empty(0, device=device).device
    if any(each.device != there for each in [*model.parameters(), *model.buffers()]):
        model = deepcopy(model).to(there)
    return model, move_to_device(data, there)
