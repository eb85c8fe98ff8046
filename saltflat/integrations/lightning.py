"""Lightning: how flat the minimum is while a LightningModule is trained, and SAM under float16.

:class:`~saltflat.training.SAM` and its kin work in automatic optimisation as they are::

    def configure_optimizers(self):
        return SAM(self, torch.optim.SGD, lr=0.1)

What follows from ``training_step`` and its backward pass running twice:

* ``self.log`` in ``training_step`` is called at the weights, and again at the shifted ones, and Lightning keeps the
  later value (of a step) or the mean of both (of an epoch). To log the loss itself::

      if not self.optimizers().is_shifted:
          self.log("loss", loss)

* ``gradient_clip_val`` clips both gradients, and ``on_before_optimizer_step`` is called for both. Shortening the first
  leaves its direction, and so the step of SAM, alone; clipping by value does not.
* ``accumulate_grad_batches`` above 1 is refused, since the earlier batches cannot be taken again. Take larger batches,
  or accumulate in manual optimisation.
* ``precision="16-mixed"`` calls ``training_step`` itself, once. Pass :class:`TwoPassPrecision` instead.
* Under ``strategy="ddp"`` the step is that of all processes' examples. For each process's own examples in the first
  pass, ``sync="local"``, give it what Lightning has wrapped: ``SAM(self.trainer.strategy.model, ..., sync="local")``.

:class:`~saltflat.training.FisherPenalty` goes with manual optimisation: ``penalty.step(self.optimizers(), batch)``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.errors import MissingPackageError, OptionError, TrainingError, format_error_line, make_unknown_name_error
from saltflat.integrations.monitor import Monitor, check_monitor_options
from saltflat.integrations.rank_zero import OptimizerSnapshot, RankZeroMonitor
from saltflat.integrations.record import PREFIX, OneTimeWarnings, Record
from saltflat.integrations.schedule import DEFAULT_EVERY, Interval
from saltflat.training.distributed import check_not_sharded
from saltflat.training.two_pass import TwoPass

__all__ = ["FlatnessCallback", "TwoPassPrecision"]

HOSTS = ("lightning.pytorch", "pytorch_lightning")  # one library under two names, whose classes differ
SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


def import_lightning() -> Any:
    """Lightning, under the name that the user has imported already, if any."""
    for name in sorted(HOSTS, key=lambda name: sys.modules.get(name) is None):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise MissingPackageError(
        "Expected the package lightning or pytorch_lightning, but got a callback for Lightning without Lightning. "
        "Try pip install lightning."
    )


_host = import_lightning()
_Callback: Any = _host.Callback
_MixedPrecision: Any = _host.plugins.MixedPrecision


class FlatnessCallback(_Callback):  # type: ignore[misc]
    """Measures how flat the minimum is while Lightning trains, on a fixed set of examples.

    The values go to all loggers of the trainer, and to ``trainer.callback_metrics``, where checkpoints and early
    stopping find them: ``monitor="flatness/hessian_trace"``. There they stay until the next
    measurement; a callback that looks for them before the first one will not find them. So that they are those of the
    moment, such a callback needs ``cap=None`` here, which is checked, and an ``every`` that is its own.

    A step is a batch after which an optimizer stepped, also with several optimizers, and a record's ``step`` is how
    many were taken. Lightning counts from 0: loggers get the values at the step at which Lightning logs the loss of
    that batch, 99 for ``every=100``. ``flatness/lr_lambda_max`` has the learning rate of the step just taken; it is
    left out if several optimizers train the measured module.

    The flattest state of a training is no good one by itself: at the start, or after a divergence, the loss may be flat
    and high. A checkpoint that goes by flatness should take those with a low loss only::

        class FlattestFitted(ModelCheckpoint):
            def check_monitor_top_k(self, trainer, current=None):
                fits = trainer.callback_metrics["flatness/loss"] < 0.1
                return bool(fits) and super().check_monitor_top_k(trainer, current)

    With several processes the first one measures, and the others wait for it and know what it found. That must be over
    before the process group's timeout (half an hour, if nothing else is said).

    Args:
        probe: the examples to measure on, as for :func:`saltflat.measure`.
        measures: names as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        every: ``100`` or ``"100 steps"``, or ``"1 epoch"``; a step is a step of the optimizer, however many batches
            were accumulated for it.
        model: what to measure. If left out, the LightningModule, by its ``forward``; else the name of an attribute of
            it, such as ``"net"``, or a function of the LightningModule that gives a module.
        options: of :class:`saltflat.integrations.Monitor`: ``cap``, ``by_layer``, ``loggers`` and so on; and
            ``prefix``, where several callbacks are to tell their values apart.

    Attributes:
        history: a record for every measurement, on the first process; those of an earlier fit stay.
    """

    def __init__(
        self,
        probe: Any,
        measures: Any = ("hessian_trace",),
        loss: Any = "cross_entropy",
        *,
        every: int | str = DEFAULT_EVERY,
        model: str | Callable[[Any], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        Interval.parse(every)
        check_monitor_options(options)
        if model is not None and not isinstance(model, str) and not callable(model):
            raise OptionError(
                "Expected the name of an attribute of the LightningModule, or a function of it, but got "
                f"model={model!r}. Try leaving it out to measure the LightningModule itself."
            )
        self.probe, self.measures, self.loss, self.every, self.model = probe, measures, loss, every, model
        self.options = options
        self.watch: RankZeroMonitor | None = None
        self._step = 0
        self._earlier: list[Record] = []
        self._stepped: OptimizerSnapshot | None = None
        self._optimizer: Any = None
        self._complain = OneTimeWarnings()

    @property
    def history(self) -> list[Record]:
        return [*self._earlier, *([] if self.watch is None else self.watch.history)]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses what cannot work, before anything is trained."""
        kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
        strategy = next((name for name in SHARDED if name in kinds), None)
        if strategy is not None:
            check_not_sharded(pl_module, f"the strategy {strategy}, which spreads weights over the processes")
        if stage == "fit" and self.options.get("cap", 0.05) is not None:
            self._check_no_stale_metrics(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        module = self._find_measured_module(pl_module)
        check_not_sharded(module)
        _check_two_pass(trainer)
        self._earlier = self.history
        self.watch = None

        def make_monitor() -> Monitor:
            return Monitor(module, self.probe, self.measures, self.loss, every=self.every, **self.options)

        self.watch = RankZeroMonitor(
            *(make_monitor, self.every),
            broadcast=trainer.strategy.broadcast if trainer.world_size > 1 else None,
            is_first=trainer.is_global_zero,
            step=trainer.fit_loop.epoch_loop._batches_that_stepped,  # global_step counts every optimizer's
            epoch=trainer.current_epoch,
        )
        self._step = trainer.global_step
        self._is_counting = False
        self._stepped = None
        self._optimizer = _find_optimizer(module, trainer.optimizers)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if optimizer is self._optimizer:
            self._stepped = OptimizerSnapshot(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.watch is None:
            return
        steps = trainer.fit_loop.epoch_loop._batches_that_stepped  # without this batch
        if not self._is_counting:
            # After a checkpoint from within an epoch, Lightning has the right count from the first batch on only.
            self.watch.set_step(steps)
            self._is_counting = True
        # Batches that are accumulated leave the count of steps alone; several optimizers raise it by more than one.
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._log_record(trainer, self.watch.after_step(self._current_optimizer), steps)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.watch is not None:
            self._log_record(trainer, self.watch.after_epoch(self._current_optimizer), _get_last_step(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.watch is not None:
            self._log_record(trainer, self.watch.finish(self._current_optimizer), _get_last_step(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.watch is not None:
            self.watch.close(quiet=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.watch is not None and stage == "fit":
            self.watch.close()

    def _check_no_stale_metrics(self, trainer: Any) -> None:
        """Values that wait until they can be afforded are old when a checkpoint is chosen by them."""
        for each in trainer.callbacks:
            watched = getattr(each, "monitor", None)
            if isinstance(watched, str) and watched.startswith(f"{self.options.get('prefix', PREFIX)}/"):
                raise OptionError(
                    f"Expected those of the moment, but got {type(each).__name__}(monitor={watched!r}) and "
                    f"cap={self.options.get('cap', 0.05)}, under which a measurement may wait and its values be old. "
                    "Try FlatnessCallback(..., cap=None), and as often as the other callback looks."
                )

    @property
    def _current_optimizer(self) -> Any:
        return self._stepped or self._optimizer

    def _find_measured_module(self, pl_module: Any) -> nn.Module:
        model = self.model
        if model is None and type(pl_module).forward is _host.LightningModule.forward:
            raise OptionError(
                f"Expected a module that gives outputs for inputs, but got {type(pl_module).__name__} without a "
                "forward. Try writing one, or naming the part to measure, for instance FlatnessCallback(..., "
                "model='net')."
            )
        try:
            found = pl_module if model is None else (attrgetter(model) if isinstance(model, str) else model)(pl_module)
        except AttributeError:
            if not isinstance(model, str):
                raise
            names = [name for name, _ in pl_module.named_modules() if name]
            raise make_unknown_name_error(f"part of {type(pl_module).__name__}", model, names) from None
        if not isinstance(found, nn.Module):
            raise OptionError(
                f"Expected a module, but got a {type(found).__name__} as the model to measure. Try naming an "
                "attribute of the LightningModule that is one."
            )
        return found

    def _log_record(self, trainer: Any, record: Record | None, step: int) -> None:
        """Where Lightning logs what it knows of the step just taken, the first of which it calls 0."""
        if record is None:
            return
        for logger in trainer.loggers if trainer.is_global_zero else ():
            try:
                logger.log_metrics(record.values, step=step)
            # A full disk or a lost connection is no reason to end a training.
            except Exception as error:
                name = type(logger).__name__
                self._complain(name, f"{name} did not take the values ({format_error_line(error)}).")
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in record.values.items()})


class TwoPassPrecision(_MixedPrecision):  # type: ignore[misc]
    """Mixed precision for SAM and its kin, also in float16, whose GradScaler needs to see the second gradient only.

    ``Trainer(plugins=[TwoPassPrecision("16-mixed", "cuda")])`` in place of ``Trainer(precision="16-mixed")``. Gradients
    are clipped after the second pass alone. Other optimizers step as they would without it, and so does bfloat16.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: ``"cuda"`` or ``"cpu"``.
        scaler: a GradScaler of your own.
    """

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Tensor | None], **kwargs: Any) -> Any:
        if self.scaler is None or not isinstance(optimizer, TwoPass):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)

        is_second = False

        def run_and_unscale(closure: Callable[[], Tensor | None]) -> Tensor | None:
            nonlocal is_second
            loss = closure()
            if optimizer.is_shifted:
                is_second = True
                self.scaler.unscale_(optimizer)
                self._after_closure(model, optimizer)
            return loss

        loss = optimizer.step(partial(run_and_unscale, closure), scaler=self.scaler, **kwargs)
        if is_second:  # a batch that was skipped has no second pass
            self.scaler.update()
        return loss


def _get_last_step(trainer: Any) -> int:
    """The step at which Lightning logs what it finds at the end of an epoch."""
    return max(0, int(trainer.fit_loop.epoch_loop._batches_that_stepped) - 1)


def _find_optimizer(module: nn.Module, optimizers: list[Any]) -> Any:
    """The optimizer that trains the module; None if several do."""
    own = {id(p) for p in module.parameters()}
    found = [o for o in optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])]
    return found[0] if len(found) == 1 else None


def _check_two_pass(trainer: Any) -> None:
    names = [type(each).__name__ for each in trainer.optimizers if isinstance(each, TwoPass)]
    if not names or not trainer.lightning_module.automatic_optimization:
        return
    if trainer.accumulate_grad_batches > 1:
        raise TrainingError(
            "Expected 1 in automatic optimisation, but got "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} with {names[0]}. The earlier batches cannot "
            "be taken again at shifted weights. Try taking larger batches, or accumulate in manual optimisation."
        )
    plugin = trainer.precision_plugin
    if getattr(plugin, "scaler", None) is not None and not isinstance(plugin, TwoPassPrecision):
        raise TrainingError(
            "Expected a second pass, which Lightning's own GradScaler leaves no room for, but got "
            f"precision='16-mixed' with {names[0]}. Try "
            "Trainer(plugins=[saltflat.integrations.lightning.TwoPassPrecision('16-mixed', 'cuda')]), or "
            "precision='bf16-mixed'."
        )
