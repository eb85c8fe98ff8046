"""How flat the minimum is while a network is trained: a few numbers every so often, for a few percent of the time."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat._late import load_later
from saltflat.engine.session import open_session, take_turns
from saltflat.errors import ModelError, OptionError, TrainingError, make_unknown_name_error
from saltflat.integrations.loggers import Loggers
from saltflat.integrations.probe_set import ProbeSet, check_measurement, get_device
from saltflat.integrations.record import PREFIX, OneTimeWarnings, Record, Table
from saltflat.integrations.sample import ProbeMeasurer, find_gauss_newton_caveats
from saltflat.integrations.schedule import DEFAULT_EVERY, Schedule
from saltflat.measures.compute import measure
from saltflat.measures.registry import parse_measures
from saltflat.validation import check_flag

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["Monitor"]

CERTIFIED = 8  # examples for which Gauss-Newton and the Hessian are compared
# What a measurement takes is extrapolated from these many examples, or this share of them.
TIMED, TIMED_SHARE = 16, 1 / 8
PROBED = 8  # examples


class Monitor:
    """Watches a training on a fixed set of examples, on a schedule, and within a share of the training time.

    The model comes back bit for bit as it was, with its gradients, modes and all random states: the training goes the
    same way with and without a monitor. It is measured in eval mode. A measurement that fails, because the training
    diverged say, warns once (:class:`MonitorWarning`), gives nan and a note in the record, and the training goes on;
    so does a logger that fails. Wrong options are errors at once: everything is tried on two examples first.

    Traces and other measures of the curvature are made of the Gauss-Newton matrix. Behind smooth activations, as in
    transformers, that is not the Hessian: a certificate at the start finds out, and if so a warning and a note in the
    first record say it. ``flatness/lambda_max`` is the Hessian's own in any case.

    Under DistributedDataParallel measure in one process, or in all: nothing here talks to the others.

    Args:
        model: the module that is trained; of a DistributedDataParallel, or one that was
            compiled, the module inside is taken.
        probe: the examples to measure on, as for :func:`saltflat.measure`. They are read once, copied, and kept on
            the model's device. A few hundred are enough to see a trend, and cheap.
        measures: names as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        every: ``100`` or ``"100 steps"``, or ``"1 epoch"``.
        cap: measuring time as a share of training time, which is counted from the first call on. What is due too early
            is made as soon as there is time for it. How long the first measurement will take is estimated on a few of
            the examples in the first call, which counts as measuring time. No limit if None.
        loggers: where the values go: any of :mod:`saltflat.integrations.loggers`, or functions of
            ``(values, step)``; None for none.
        by_layer: whether to keep what each parameter contributes, too.
        optimizer: whose learning rate is multiplied with the largest eigenvalue, and whose preconditioner and momentum
            count. It can be given to every call instead. With SAM and its kin pass it: only so is a call in between the
            passes, at shifted weights, refused. The rate is that of the moment of the call: call before the schedule
            steps to have the one of the step just taken.
        spectrum: whether to find the largest eigenvalue of the Hessian of the whole network (not of the Gauss-Newton
            matrix, and without weight decay), from the eigenvector of the time before.
        table: True for a table in the terminal, or a :class:`saltflat.integrations.record.Table` of your own.
        seed: of everything random.
        prefix: stands in front of every name, with a slash; without one itself.
        clock: says the time in seconds. One that stands still while something else runs keeps that out of the shares.
        options: of :func:`saltflat.measure`. There is no progress bar, and no certificate but the one at the start,
            unless asked for. ``initial`` is copied; if it is left out, ``distance_from_init`` is that from the weights
            at the start of the monitor.

    Attributes:
        history: a :class:`Record` for every measurement.
        step: training steps seen. Set it when a training is taken up again.
        epoch: epochs seen.
        changed_by: what changes the gradient of the loss before the optimizer steps, such as ``"FisherPenalty"``; no
            threshold is given then. SAM and its kin are known by themselves.

    A run that is over before the first measurement is due is measured at its end, if the cap allows; what was due and
    was left out for the cap is in the records (``skipped``) and in a warning at the end.

    Values in a record:

    * ``flatness/<measure>``, and ``flatness/<measure>/<parameter>`` with ``by_layer=True``;
    * ``flatness/lambda_max``, the largest eigenvalue of the Hessian, to about 0.1 %;
    * ``flatness/lr_lambda_max``, times the learning rate. For Adam, RMSprop and the like it is the largest eigenvalue
      of the Hessian as the optimizer preconditions it at present, and with several groups every parameter has its own
      rate. Weight decay that is added to the gradient is added to the Hessian;
    * ``flatness/lr_lambda_max_threshold``, above which the optimizer diverges on a parabola: 2 for plain gradient
      descent, ``2 * (1 + momentum)`` with momentum, 38 for Adam with its usual betas. Without one if it is not known
      (:mod:`saltflat.integrations.stability`), which a note says;
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
        probe: Any,
        measures: str | Sequence[str] = ("hessian_trace",),
        loss: Any = "cross_entropy",
        *,
        every: int | str = DEFAULT_EVERY,
        cap: float | None = 0.05,
        loggers: Any = (),
        by_layer: bool = False,
        optimizer: Optimizer | None = None,
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
                f"Expected a word without a slash, but got prefix={prefix!r}. Try leaving it out for {PREFIX!r}."
            )
        check_flag(by_layer=by_layer, spectrum=spectrum)
        if not callable(clock) or not isinstance(clock(), int | float):
            raise OptionError(
                "Expected clock to be a function that gives seconds, but got something else. Try time.perf_counter."
            )
        asked = parse_measures(measures)
        names = tuple(request.key for request in asked)
        self.optimizer, self.prefix = _check_optimizer(optimizer), prefix
        options = {"seed": seed, "progress": False, "certificate": False, "sampling": False, **options}
        if any("initial_weight" in each.measure.statistics for each in asked):
            options["initial"] = _copy_initial_weights(
                self.model if options.get("initial") is None else options["initial"]
            )
        self.history: list[Record] = []
        self.step = self.epoch = self._calls = 0
        self.changed_by = ""
        self._latest_optimizer: Any = None
        self._is_finished = False
        self._schedule = Schedule(every, cap)
        with open_session(self.model, "keep", probe):
            self._probe = ProbeSet(probe)
        check_measurement(self.model, self._probe, loss, names, options)
        uncertain = find_gauss_newton_caveats(self.model, [self.get_examples(CERTIFIED)], loss, names, options)
        self._complain = OneTimeWarnings()
        self._readout = ProbeMeasurer(
            self.model, names, loss, by_layer, spectrum, options, self._complain, prefix, uncertain
        )
        self._loggers = Loggers(loggers, table, self._complain)
        self._clock = clock

    @take_turns
    def after_step(self, optimizer: Optimizer | None = None) -> Record | None:
        """To be called after every training step: measures if that is due and there is time."""
        used = self._prepare_call(optimizer)
        self.step += 1
        return self._run_measurement(used) if self._schedule.after_step(self.step, self._clock()) else None

    @take_turns
    def after_epoch(self, optimizer: Optimizer | None = None) -> Record | None:
        """To be called after every epoch: measures if that is due and there is time."""
        used = self._prepare_call(optimizer)
        self.epoch += 1
        return self._run_measurement(used) if self._schedule.after_epoch(self.epoch, self._clock()) else None

    @take_turns
    def finish(self, optimizer: Optimizer | None = None) -> Record | None:
        """To be called after the last step; :meth:`close` and the end of a ``with`` block do it, too.

        Measures if nothing was measured so far and the cap allows it, and warns of what was left out.
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
    def measure(self, optimizer: Optimizer | None = None) -> Record:
        """Measures now, whatever the schedule says. The time it takes is counted all the same."""
        return self._run_measurement(self._resolve_optimizer(optimizer))

    @take_turns
    def get_examples(self, count: int) -> tuple[Any, Tensor]:
        """Inputs and targets of the probe's first examples."""
        return self._probe.get_first_batch(get_device(self.model), count)[0]

    @property
    def num_skipped(self) -> int:
        """How often a measurement was due and there was no time for it then."""
        return self._schedule.skipped

    @property
    def share(self) -> float:
        """Measuring time over training time, up to the latest call."""
        return self._schedule.share

    def plot(self, path: Any = None) -> Any:
        """A matplotlib Figure of the history, a panel for every value; saved if there is a path."""
        figure: Figure = load_later("render.plots").plot_history(self.history)
        if path is not None:
            figure.savefig(path)
        return figure

    def close(self, quiet: bool = False) -> None:
        """Finish, and close the loggers; each closes what it has opened itself.

        Args:
            quiet: after an error: nothing is measured, and there are no warnings.
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

    def _prepare_call(self, optimizer: Optimizer | None) -> Any:
        used = self._resolve_optimizer(optimizer)
        if not self._calls and self._schedule.cap is not None and self._schedule.expected is None:
            started = self._read_synchronized_clock()
            self._schedule.expected = self._estimate_seconds(used)
            self._schedule.spent += self._clock() - started
        self._calls += 1
        self._latest_optimizer = used
        return used

    def _estimate_seconds(self, optimizer: Any) -> float | None:
        """Seconds that a measurement will take, as a line through those of two numbers of examples; None if unknown."""
        total = self._probe.examples
        many = min(total, max(TIMED, round(TIMED_SHARE * total)))
        # What a measurement looks at first is the same from PROBED examples on, and less below.
        few = many if many == total else min(max(PROBED, many // 4), max(1, many // 2))
        times = {}
        for count in sorted({few, many}):
            data = self._probe.get_first_examples(get_device(self.model), count)
            seconds = self._readout.time_measurement(data, optimizer, self._read_synchronized_clock)
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
        self._complain(
            "left out",
            f"{what}: a measurement {took} {schedule.expected:.2g} s, and cap={schedule.cap} allows "
            f"{schedule.cap * schedule.trained:.2g} s in {schedule.trained:.2g} s of training, what it took to "
            f"estimate this included. Measure {do}on fewer examples, raise the cap, or call measure() where you want "
            "to know.",
        )

    def _run_measurement(self, optimizer: Any) -> Record:
        started = self._read_synchronized_clock()  # kernels that are still queued belong to the training
        values, notes = self._readout(
            self._probe.get_batches(get_device(self.model)), optimizer, self.step, self.changed_by
        )
        seconds = self._read_synchronized_clock() - started
        values[f"{self.prefix}/seconds"] = seconds
        record = Record(self.step, self.epoch, values, seconds, notes, tuple(self._schedule.waiting))
        self.history.append(record)
        self._loggers.log(record)
        self._schedule.record_measurement(started, self._clock())
        return record

    def _resolve_optimizer(self, optimizer: Optimizer | None) -> Any:
        used = self.optimizer if optimizer is None else _check_optimizer(optimizer)
        inner = used
        while inner is not None and not hasattr(inner, "is_shifted"):
            inner = getattr(inner, "optimizer", None)  # Lightning's and Accelerate's wrappers
        if inner is not None and inner.is_shifted:
            raise TrainingError(
                "Expected to measure where they belong, but got weights that are shifted, between first_step() and "
                "second_step(). Try calling the monitor after second_step(), or after restore()."
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
    """Refuse names that neither a monitor nor a measurement knows; ``without`` names others that are no use here."""
    known = {*inspect.signature(Monitor).parameters, *inspect.signature(measure).parameters}
    known -= {"options", "data", "limit", *without}
    for name in options:
        if name not in known:
            raise make_unknown_name_error("option", name, known)


def _copy_initial_weights(initial: Any) -> Any:
    """Weights as they are now; training goes on writing to its own."""
    values = initial.state_dict() if isinstance(initial, nn.Module) else initial
    if not isinstance(values, Mapping):
        return values  # an error of measure's, with a better word
    return {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in values.items()}


def _unwrap_model(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled  # by torch.compile: the same parameters under shorter names
        else:
            return model


def _check_optimizer(optimizer: Any) -> Any:
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise OptionError(
            f"Expected one with param_groups, but got an optimizer of type {type(optimizer).__name__}. Try passing "
            "the torch.optim.Optimizer that steps, or leaving it out."
        )
    return optimizer
