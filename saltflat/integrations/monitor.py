"""Monitor flatness during training: a few numbers at regular intervals, for a few percent of the training time."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saltflat._late import load_later
from saltflat.engine.data import Data
from saltflat.engine.losses import LossLike
from saltflat.engine.session import open_session
from saltflat.errors import ModelError, OptionError, TrainingError, make_unknown_name_error
from saltflat.integrations.loggers import Loggers, LoggersLike
from saltflat.integrations.probe_measurer import ProbeMeasurer
from saltflat.integrations.probe_set import ProbeSet, check_measurement, find_gauss_newton_caveats, get_device
from saltflat.integrations.record import PREFIX, OneTimeWarnings, Record, Table
from saltflat.integrations.schedule import DEFAULT_EVERY, Schedule
from saltflat.integrations.stability import OptimizerLike
from saltflat.measures.meter import Meter
from saltflat.measures.registry import parse_measures
from saltflat.validation import check_flag, take_turns

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["Monitor"]

CERTIFIED = 8  # examples on which Gauss-Newton and the Hessian are compared
# The duration of a measurement is extrapolated from this many examples, or this share of them.
TIMED, TIMED_SHARE = 16, 1 / 8
PROBED = 8  # examples


class Monitor:
    """Measure flatness during training on a fixed set of examples, on a schedule, within a share of the training time.

    The model is restored bit for bit, with its gradients, modes and all random states: training is the same with and
    without a monitor. The model is measured in eval mode. If a measurement fails, for instance because training
    diverged, it issues one :class:`MonitorWarning`, the record contains nan and a note, and training continues; the
    same applies to loggers. Wrong options raise an error immediately: everything is tried on two examples first.

    Traces and other curvature measures use the Gauss-Newton matrix. With smooth activations, as in transformers, it
    differs from the Hessian: a certificate at the start checks this, and a warning and a note in the first record
    report it. ``flatness/lambda_max`` always belongs to the Hessian.

    Under DistributedDataParallel, measure in one process or in all: the monitor does not communicate.

    Args:
        model: the module that is trained; a DistributedDataParallel or compiled module is unwrapped.
        probe: the examples to measure on, as for :func:`saltflat.measure`. They are read once, copied, and kept on
            the model's device. A few hundred are cheap, and enough to see a trend.
        loss: as for :func:`saltflat.measure`.
        measures: names, as for :func:`saltflat.measure`.
        every: ``100`` or ``"100 steps"``, or ``"1 epoch"``.
        cap: the maximum measuring time as a share of the training time since the first call. A measurement that is due
            too early is made as soon as there is time. The duration of the first measurement is estimated on a few
            examples in the first call, which counts as measuring time. No limit if None.
        loggers: where the values go: any of :mod:`saltflat.integrations.loggers`, or functions of
            ``(values, step)``; None for none.
        by_layer: whether to keep the contribution of each parameter, too.
        optimizer: the optimizer whose learning rate, preconditioner and momentum are combined with the largest
            eigenvalue. It can be passed to every call instead. Pass it with SAM and its variants: only then does a call
            between the passes, at shifted weights, raise an error. The learning rate is read at the time of the call;
            call before the scheduler steps to use the one of the step just taken.
        spectrum: whether to find the largest eigenvalue of the Hessian of the whole network (not of the Gauss-Newton
            matrix, and without weight decay), starting from the previous eigenvector.
        table: True for a table in the terminal, or a :class:`saltflat.integrations.record.Table`.
        seed: the seed of all random numbers.
        prefix: the first part of every name, without the slash that follows it.
        clock: returns the time in seconds. Time during which it stands still is not counted.
        options: options of :func:`saltflat.measure`. By default there is no progress bar, and no certificate except the
            one at the start. ``initial`` is copied; without it, ``distance_from_init`` is the distance from the weights
            at the start of the monitor.

    Attributes:
        history: a :class:`Record` for every measurement.
        step: training steps so far. Set it when training resumes.
        epoch: epochs so far.
        changed_by: what changes the gradient of the loss before the optimizer steps, such as ``"FisherPenalty"``; the
            threshold is then omitted. SAM and its variants are detected.

    A run that ends before the first measurement is due is measured at its end, if the cap allows. Measurements omitted
    because of the cap are listed in the records (``skipped``) and reported in a warning at the end.

    Values in a record:

    * ``flatness/<measure>``, and ``flatness/<measure>/<parameter>`` with ``by_layer=True``;
    * ``flatness/lambda_max``, the largest eigenvalue of the Hessian, to about 0.1 %;
    * ``flatness/lr_lambda_max``, times the learning rate. For Adam, RMSprop and similar optimizers it is the largest
      eigenvalue of the Hessian with the optimizer's current preconditioner; with several groups every parameter has its
      own rate. Weight decay that is added to the gradient is added to the Hessian;
    * ``flatness/lr_lambda_max_threshold``, above which the optimizer diverges on a parabola: 2 for plain gradient
      descent, ``2 * (1 + momentum)`` with momentum, 38 for Adam with default betas. Omitted with a note if unknown
      (:mod:`saltflat.integrations.stability`);
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
        ['hessian_trace', 'lambda_max', 'loss', 'lr_lambda_max', 'lr_lambda_max_threshold', 'seconds']
    """

    @take_turns
    def __init__(
        self,
        model: nn.Module,
        probe: Data,
        loss: LossLike = "cross_entropy",
        measures: str | Sequence[str] = ("hessian_trace",),
        *,
        every: int | str = DEFAULT_EVERY,
        cap: float | None = 0.05,
        loggers: LoggersLike = (),
        by_layer: bool = False,
        optimizer: OptimizerLike | None = None,
        spectrum: bool = True,
        table: bool | Table | None = None,
        seed: int = 0,
        prefix: str = PREFIX,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"Expected a torch.nn.Module, but got a model of type {type(model).__name__}. Try passing the module "
                "you train."
            )
        self.model = _unwrap_model(model)
        check_monitor_options(options)
        if not isinstance(prefix, str) or not prefix or "/" in prefix:
            raise OptionError(
                f"Expected a prefix without a slash, but got prefix={prefix!r}. Try leaving it out for {PREFIX!r}."
            )
        check_flag(by_layer=by_layer, spectrum=spectrum)
        if not callable(clock) or not isinstance(clock(), int | float):
            raise OptionError(
                "Expected a clock that returns seconds, but got something else. Try clock=time.perf_counter."
            )
        requests = parse_measures(measures)
        names = tuple(request.key for request in requests)
        self.optimizer, self.prefix = _check_optimizer(optimizer), prefix
        options = {"seed": seed, "progress": False, "certificate": False, "sampling": False, **options}
        if any("initial_weight" in each.measure.statistics for each in requests):
            options["initial"] = _copy_initial_weights(
                self.model if options.get("initial") is None else options["initial"]
            )
        self.history: list[Record] = []
        self.step = self.epoch = self._calls = 0
        self.changed_by = ""
        self._latest_optimizer: OptimizerLike | None = None
        self._is_finished = False
        self._schedule = Schedule(every, cap)
        with open_session(self.model, "keep", probe):
            self._probe = ProbeSet(probe)
        meter = Meter(self.model, loss, names, **options)
        check_measurement(meter, self._probe, options)
        caveats = find_gauss_newton_caveats(self.model, [self.get_examples(CERTIFIED)], loss, names, options)
        self._warn_once = OneTimeWarnings()
        self._measurer = ProbeMeasurer(meter, names, by_layer, spectrum, options, self._warn_once, prefix, caveats)
        self._loggers = Loggers(loggers, table, self._warn_once)
        self._clock = clock

    @take_turns
    def after_step(self, optimizer: OptimizerLike | None = None) -> Record | None:
        """Count a training step, and measure if due and affordable. Call it after every step."""
        used = self._prepare_call(optimizer)
        self.step += 1
        return self._run_measurement(used) if self._schedule.after_step(self.step, self._clock()) else None

    @take_turns
    def after_epoch(self, optimizer: OptimizerLike | None = None) -> Record | None:
        """Count an epoch, and measure if due and affordable. Call it after every epoch."""
        used = self._prepare_call(optimizer)
        self.epoch += 1
        return self._run_measurement(used) if self._schedule.after_epoch(self.epoch, self._clock()) else None

    @take_turns
    def finish(self, optimizer: OptimizerLike | None = None) -> Record | None:
        """End the training; :meth:`close` and the end of a ``with`` block call it, too.

        Measures if nothing was measured so far and the cap allows it, and warns about omitted measurements.
        """
        if self._is_finished or not self._calls:
            return None
        self._is_finished = True
        used = self._resolve_optimizer(self._latest_optimizer if optimizer is None else optimizer)
        record = (
            self._run_measurement(used)
            if not self.history and self._schedule.can_measure_at_end(self._clock())
            else None
        )
        self._warn_of_skipped()
        return record

    @take_turns
    def measure(self, optimizer: OptimizerLike | None = None) -> Record:
        """Measure now, regardless of the schedule. The time it takes still counts."""
        return self._run_measurement(self._resolve_optimizer(optimizer))

    @take_turns
    def get_examples(self, count: int) -> tuple[Any, Tensor]:
        """Return inputs and targets of the first examples of the probe."""
        return self._probe.get_first_batch(get_device(self.model), count)[0]

    @property
    def num_skipped(self) -> int:
        """Return how often a measurement was due and there was no time for it."""
        return self._schedule.skipped

    @property
    def share(self) -> float:
        """Return measuring time over training time, up to the latest call."""
        return self._schedule.share

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Return a matplotlib Figure of the history, one panel per value; save it if a path is given."""
        figure: Figure = load_later("render.plots").plot_history(self.history)
        if path is not None:
            figure.savefig(path)
        return figure

    def close(self, quiet: bool = False) -> None:
        """Finish, and close the loggers; each closes what it has opened itself.

        Args:
            quiet: skip the final measurement and its warnings, as after an error.
        """
        try:
            if not quiet:
                self.finish()
        finally:
            self._loggers.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(quiet=error is not None)

    def _prepare_call(self, optimizer: OptimizerLike | None) -> OptimizerLike | None:
        used = self._resolve_optimizer(optimizer)
        if not self._calls and self._schedule.cap is not None and self._schedule.expected is None:
            started = self._read_synchronized_clock()
            self._schedule.expected = self._estimate_seconds(used)
            self._schedule.spent += self._clock() - started
        self._calls += 1
        self._latest_optimizer = used
        return used

    def _estimate_seconds(self, optimizer: OptimizerLike | None) -> float | None:
        """Extrapolate the seconds a measurement takes from two smaller numbers of examples; None if it fails."""
        total = self._probe.examples
        many = min(total, max(TIMED, round(TIMED_SHARE * total)))
        # The initial checks of a measurement cost the same from PROBED examples on, and less below.
        few = many if many == total else min(max(PROBED, many // 4), max(1, many // 2))
        times = {}
        for count in sorted({few, many}):
            data = self._probe.get_first_examples(get_device(self.model), count)
            seconds = self._measurer.time_measurement(data, optimizer, self._read_synchronized_clock)
            if seconds is None:
                return None
            times[count] = seconds
        slope = max(0.0, times[many] - times[few]) / max(1, many - few)
        return times[many] + slope * (total - many)

    def _warn_of_skipped(self) -> None:
        schedule = self._schedule
        if schedule.cap is None or schedule.expected is None or (self.history and schedule.made >= schedule.due):
            return
        if self.history:
            what, took, do = (
                f"Measured {schedule.made} of the {schedule.due} times it was due",
                "took",
                "less often or ",
            )
        else:
            what = f"Nothing was measured in {self.step} steps and {self.epoch} epochs"
            took, do = "would take about", ""
        self._warn_once(
            "left out",
            f"{what}: a measurement {took} {schedule.expected:.2g} s, and cap={schedule.cap} allows "
            f"{schedule.cap * schedule.trained:.2g} s in {schedule.trained:.2g} s of training, including the time to "
            f"estimate this. Try measuring {do}on fewer examples, raising the cap, or calling measure() explicitly.",
        )

    def _run_measurement(self, optimizer: OptimizerLike | None) -> Record:
        started = self._read_synchronized_clock()  # queued kernels belong to the training
        values, notes = self._measurer(
            self._probe.get_batches(get_device(self.model)), optimizer, self.step, self.changed_by
        )
        seconds = self._read_synchronized_clock() - started
        values[f"{self.prefix}/seconds"] = seconds
        record = Record(self.step, self.epoch, values, seconds, notes, tuple(self._schedule.waiting))
        self.history.append(record)
        self._loggers.log(record)
        self._schedule.record_measurement(started, self._clock())
        return record

    def _resolve_optimizer(self, optimizer: OptimizerLike | None) -> OptimizerLike | None:
        used = self.optimizer if optimizer is None else _check_optimizer(optimizer)
        inner: Any = used
        while inner is not None and not hasattr(inner, "is_shifted"):
            inner = getattr(inner, "optimizer", None)  # Lightning's and Accelerate's wrappers
        if inner is not None and inner.is_shifted:
            raise TrainingError(
                "Expected the original weights, but got shifted ones, between first_step() and second_step(). Try "
                "calling the monitor after second_step(), or after restore()."
            )
        return used

    def _read_synchronized_clock(self) -> float:
        self._synchronize_devices()
        return self._clock()

    def _synchronize_devices(self) -> None:
        for device in {p.device for p in self.model.parameters()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type in ("mps", "xpu"):
                getattr(torch, device.type).synchronize()


def check_monitor_options(options: Mapping[str, Any], without: Sequence[str] = ()) -> None:
    """Check that every name is an option of a monitor or a measurement; ``without`` excludes some."""
    known = {*inspect.signature(Monitor).parameters, *inspect.signature(Meter).parameters}
    known -= {"options", "limit", *without}
    for name in options:
        if name not in known:
            raise make_unknown_name_error("option", name, known)


def _copy_initial_weights(initial: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a copy of the current weights, since training modifies the originals."""
    values = initial.state_dict() if isinstance(initial, nn.Module) else initial
    if not isinstance(values, Mapping):
        return values  # measure raises a better error
    return {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in values.items()}


def _unwrap_model(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled  # by torch.compile; its own names are longer
        else:
            return model


def _check_optimizer(optimizer: OptimizerLike | None) -> OptimizerLike | None:
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise OptionError(
            f"Expected an optimizer with param_groups, but got one of type {type(optimizer).__name__}. Try passing the "
            "torch.optim.Optimizer that steps, or leaving it out."
        )
    return optimizer
