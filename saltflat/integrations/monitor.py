"""How flat the minimum is while a network is trained: a few numbers every so often, for a few percent of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from saltflat.errors import ModelError, OptionError, TrainingError
from saltflat.integrations.live import Table
from saltflat.integrations.plot import figure_of
from saltflat.integrations.probe_set import ProbeSet, device_of
from saltflat.integrations.readout import Readout
from saltflat.integrations.record import PREFIX, Complaints, Record
from saltflat.integrations.request import tried
from saltflat.integrations.schedule import Schedule
from saltflat.integrations.told import Loggers
from saltflat.loan import loan
from saltflat.measures.request import requests

__all__ = ["Monitor", "Record"]


class Monitor:
    """Watches a training on a fixed set of examples, on a schedule, and within a share of the training time.

    The model comes back bit for bit as it was, with its gradients, modes and all random states: the training goes the
    same way with and without a monitor. It is measured in eval mode. A measurement that fails, because the training
    diverged say, warns once (:class:`MonitorWarning`), gives nan and a note in the record, and the training goes on;
    so does a logger that fails. Wrong options are errors at once: everything is tried on two examples first.

    Under DistributedDataParallel measure in one process, or in all: nothing here talks to the others.

    Args:
        model: the module that is trained; of a DistributedDataParallel, or one that was
            compiled, the module inside is taken.
        probe: the examples to measure on, as for :func:`saltflat.measure`. They are read once, and kept on the model's
            device. A few hundred are enough to see a trend, and cheap.
        measures: names as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        every: ``100`` or ``"100 steps"``, or ``"1 epoch"``.
        cap: measuring time as a share of training time, which is counted from the first call on. What is due too early
            is made as soon as there is time for it. The first measurement is made when it is due: after a run that is
            too short for it, the share is above the cap. No limit if None.
        loggers: where the values go: any of :mod:`saltflat.integrations.loggers`, or functions of
            ``(values, step)``.
        by_layer: whether to keep what each parameter contributes, too.
        optimizer: whose learning rate is multiplied with the largest eigenvalue. It can be given to every call instead.
        spectrum: whether to find the largest eigenvalue of the Hessian of the whole network (not of the Gauss-Newton
            matrix, and without weight decay), from the eigenvector of the time before.
        table: True for a table in the terminal, or a :class:`saltflat.integrations.loggers.Table` of your own.
        seed: of everything random.
        clock: says the time in seconds. One that stands still while something else runs keeps that out of the shares.
        options: of :func:`saltflat.measure`. There is no certificate and no progress bar unless asked for.

    Attributes:
        history: a :class:`Record` for every measurement.
        step: training steps seen. Set it when a training is taken up again.
        epoch: epochs seen.

    Values in a record:

    * ``flatness/<measure>``, and ``flatness/<measure>/<parameter>`` with ``by_layer=True``;
    * ``flatness/lambda_max``, the largest eigenvalue of the Hessian, to about 0.1 %;
    * ``flatness/lr_lambda_max``, times the largest learning rate of the optimizer's groups: plain gradient descent is
      stable on a parabola below 2;
    * ``flatness/loss``, the mean loss of the probe, and ``flatness/seconds``.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> inputs, labels = torch.randn(20, 2), torch.randint(3, (20,))
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with Monitor(net, (inputs, labels), every="5 steps", cap=None, optimizer=optimizer) as monitor:
        ...     for _ in range(10):
        ...         optimizer.zero_grad()
        ...         nn.functional.cross_entropy(net(inputs), labels).backward()
        ...         optimizer.step()
        ...         record = monitor.after_step()
        >>> [each.step for each in monitor.history]
        [5, 10]
        >>> sorted(name.removeprefix("flatness/") for name in record.values)
        ['hessian_trace', 'lambda_max', 'loss', 'lr_lambda_max', 'seconds']
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Any,
        measures: str | Sequence[str] = ("hessian_trace",),
        loss: Any = "cross_entropy",
        *,
        every: int | str = "100 steps",
        cap: float | None = 0.05,
        loggers: Any = (),
        by_layer: bool = False,
        optimizer: Optimizer | None = None,
        spectrum: bool = True,
        table: bool | Table | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"Got a model of type {type(model).__name__}. Want a torch.nn.Module. Do: pass the module you train."
            )
        self.model = _inside(model)
        names = tuple(request.key for request in requests(measures))
        self.optimizer = _checked(optimizer)
        options = {"seed": seed, "progress": False, "certificate": False, **options}
        self.history: list[Record] = []
        self.step = self.epoch = 0
        self._schedule = Schedule(every, cap)
        with loan(self.model, "keep", probe):
            self._probe = ProbeSet(probe)
        tried(self.model, self._probe.few(device_of(self.model), 2), loss, names, options)
        complain = Complaints()
        self._readout = Readout(self.model, names, loss, by_layer, spectrum, options, complain)
        self._loggers = Loggers(loggers, table, complain)
        self._clock = clock

    def after_step(self, optimizer: Optimizer | None = None) -> Record | None:
        """To be called after every training step: measures if that is due and there is time."""
        used = self._used(optimizer)
        self.step += 1
        return self._measured(used) if self._schedule.after_step(self.step, self._clock()) else None

    def after_epoch(self, optimizer: Optimizer | None = None) -> Record | None:
        """To be called after every epoch: measures if that is due and there is time."""
        used = self._used(optimizer)
        self.epoch += 1
        return self._measured(used) if self._schedule.after_epoch(self.epoch, self._clock()) else None

    def measure(self, optimizer: Optimizer | None = None) -> Record:
        """Measures now, whatever the schedule says. The time it takes is counted all the same."""
        return self._measured(self._used(optimizer))

    @property
    def skipped(self) -> int:
        """How often a measurement was due and there was no time for it then."""
        return self._schedule.skipped

    @property
    def share(self) -> float:
        """Measuring time over training time, up to the latest call."""
        return self._schedule.share

    def plot(self, path: Any = None) -> Any:
        """A matplotlib Figure of the history, a panel for every value; saved if there is a path."""
        figure = figure_of(self.history)
        if path is not None:
            figure.savefig(path)
        return figure

    def close(self) -> None:
        """Close the loggers; each closes what it has opened itself."""
        self._loggers.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _measured(self, optimizer: Any) -> Record:
        # Kernels that are still queued belong to the training.
        self._synchronize()
        started = self._clock()
        values, notes = self._readout(self._probe.on(device_of(self.model)), optimizer, self.step)
        self._synchronize()
        seconds = self._clock() - started
        values[f"{PREFIX}seconds"] = seconds
        record = Record(self.step, self.epoch, values, seconds, notes)
        self.history.append(record)
        self._loggers.log(record)
        self._schedule.measured(started, self._clock())
        return record

    def _used(self, optimizer: Optimizer | None) -> Any:
        used = self.optimizer if optimizer is None else _checked(optimizer)
        inner = used
        while inner is not None and not hasattr(inner, "is_shifted"):
            inner = getattr(inner, "optimizer", None)  # Lightning's and Accelerate's wrappers
        if inner is not None and inner.is_shifted:
            raise TrainingError(
                "Got weights that are shifted, between first_step() and second_step(). Want to measure where they "
                "belong. Do: call the monitor after second_step(), or after restore()."
            )
        return used

    def _synchronize(self) -> None:
        for device in {p.device for p in self.model.parameters()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type in ("mps", "xpu"):
                getattr(torch, device.type).synchronize()


def _inside(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled  # by torch.compile: the same parameters under shorter names
        else:
            return model


def _checked(optimizer: Any) -> Any:
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise OptionError(
            f"Got an optimizer of type {type(optimizer).__name__}. Want one with param_groups. "
            "Do: pass the torch.optim.Optimizer that steps, or leave it out."
        )
    return optimizer
