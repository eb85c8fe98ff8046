"""Lightning: measure flatness while a LightningModule trains, and use SAM with float16.

:class:`~saltflat.training.SAM` and its variants work in automatic optimization as they are::

    def configure_optimizers(self):
        return SAM(self, torch.optim.SGD, lr=0.1)

``training_step`` and its backward pass then run twice per step:

* ``self.log`` in ``training_step`` is called at the weights and again at the shifted weights. Lightning keeps the later
  value (per step) or the mean of both (per epoch). To log the loss at the weights only::

      if not self.optimizers().is_shifted:
          self.log("loss", loss)

* ``gradient_clip_val`` clips both gradients, and ``on_before_optimizer_step`` is called for both. Shortening the first
  gradient keeps its direction, and so the step of SAM; clipping by value does not.
* ``accumulate_grad_batches`` above 1 raises an error, since earlier batches cannot be run again. Use larger batches, or
  accumulate in manual optimization.
* ``precision="16-mixed"`` calls ``training_step`` itself, once. Pass :class:`TwoPassPrecision` instead.
* Under ``strategy="ddp"`` the first pass uses the examples of all processes. To use each process's own examples,
  ``sync="local"``, pass the module Lightning has wrapped: ``SAM(self.trainer.strategy.model, ..., sync="local")``.

:class:`~saltflat.training.FisherPenalty` requires manual optimization: ``penalty.step(self.optimizers(), batch)``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.engine.data import Data
from saltflat.engine.losses import LossLike
from saltflat.errors import MissingPackageError, OptionError, TrainingError, make_unknown_name_error
from saltflat.integrations.flatness_callback import BaseFlatnessCallback
from saltflat.integrations.record import PREFIX, Record
from saltflat.integrations.schedule import DEFAULT_EVERY
from saltflat.training.distributed import check_not_sharded
from saltflat.training.two_pass import TwoPass

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["FlatnessCallback", "TwoPassPrecision"]

HOSTS = ("lightning.pytorch", "pytorch_lightning")  # one library under two names, with different classes
SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


def import_lightning() -> ModuleType:
    """Return Lightning, under the name the user has imported already, if any."""
    for name in sorted(HOSTS, key=lambda name: sys.modules.get(name) is None):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise MissingPackageError(
        "Expected the package lightning or pytorch_lightning, but got neither installed. Try pip install lightning."
    )


_host = import_lightning()
_Callback: Any = _host.Callback
_MixedPrecision: Any = _host.plugins.MixedPrecision


class FlatnessCallback(BaseFlatnessCallback, _Callback):  # type: ignore[misc]
    """Measure flatness on a fixed set of examples while Lightning trains.

    The values are sent to all loggers of the trainer and to ``trainer.callback_metrics``, where checkpoints and early
    stopping find them: ``monitor="flatness/hessian_trace"``. They stay there until the next measurement; a callback
    that reads them before the first one will not find them. A callback that monitors them requires ``cap=None``, which
    is checked, and should use the same ``every``, so that it sees current values.

    A step is a batch after which an optimizer stepped, also with several optimizers, and a record's ``step`` is the
    number of steps taken. Lightning counts from 0: loggers get the values at the step at which Lightning logs the loss
    of that batch, 99 for ``every=100``. ``flatness/lr_lambda_max`` uses the learning rate of the step just taken; it is
    omitted if several optimizers train the measured module.

    The flattest state of a training is not necessarily a good one: at the start, or after divergence, the loss may be
    flat and high. A checkpoint that monitors flatness should only accept states with a low loss::

        class FlattestFitted(ModelCheckpoint):
            def check_monitor_top_k(self, trainer, current=None):
                fits = trainer.callback_metrics["flatness/loss"] < 0.1
                return bool(fits) and super().check_monitor_top_k(trainer, current)

    With several processes the first one measures; the others wait for it and receive its values. A measurement must
    finish before the timeout of the process group (30 minutes by default).

    Args:
        probe: the examples to measure on, as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        measures: names, as for :func:`saltflat.measure`.
        model: what to measure: by default the LightningModule, through its ``forward``; else the name of one of its
            attributes, such as ``"net"``, or a function that maps the LightningModule to a module.
        every: ``100`` or ``"100 steps"``, or ``"1 epoch"``; a step is a step of the optimizer, regardless of how many
            batches were accumulated for it.
        options: options of :class:`saltflat.integrations.Monitor`: ``cap``, ``by_layer``, ``loggers`` and so on;
            ``prefix`` distinguishes the values of several callbacks.

    Attributes:
        history: a record for every measurement, on the first process; includes those of earlier fits.
    """

    def __init__(
        self,
        probe: Data,
        loss: LossLike = "cross_entropy",
        measures: str | Sequence[str] = ("hessian_trace",),
        *,
        model: str | Callable[[LightningModule], nn.Module] | None = None,
        every: int | str = DEFAULT_EVERY,
        **options: Any,
    ) -> None:
        super().__init__(probe, loss, measures, every=every, **options)
        if model is not None and not isinstance(model, str) and not callable(model):
            raise OptionError(
                "Expected the name of an attribute of the LightningModule, or a function of it, but got "
                f"model={model!r}. Try leaving it out to measure the LightningModule itself."
            )
        self.model = model
        self._step = 0
        self._optimizer: Optimizer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an error for unsupported settings before training starts."""
        kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
        strategy = next((name for name in SHARDED if name in kinds), None)
        if strategy is not None:
            check_not_sharded(pl_module, f"the strategy {strategy}, which spreads weights over the processes")
        if stage == "fit" and self.options.get("cap", 0.05) is not None:
            self._check_no_stale_metrics(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the monitor on the first process."""
        module = self._find_measured_module(pl_module)
        _check_two_pass(trainer)
        self._start(
            module,
            broadcast=trainer.strategy.broadcast if trainer.world_size > 1 else None,
            is_first=trainer.is_global_zero,
            step=trainer.fit_loop.epoch_loop._batches_that_stepped,  # global_step counts every optimizer's
            epoch=trainer.current_epoch,
        )
        self._step = trainer.global_step
        self._is_counting = False
        self._optimizer = _find_optimizer(module, trainer.optimizers)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Remember the options of this step."""
        if optimizer is self._optimizer:
            self._take_snapshot(optimizer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Sequence[Any] | Mapping[str, Any] | Tensor,
        batch_idx: int,
    ) -> None:
        """Measure if due."""
        if self._monitor is None:
            return
        steps = trainer.fit_loop.epoch_loop._batches_that_stepped  # without this batch
        if not self._is_counting:
            # When resuming within an epoch, Lightning only has the right count from the first batch on.
            self._monitor.set_step(steps)
            self._is_counting = True
        # Accumulated batches do not change the count of steps; several optimizers raise it by more than one.
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._log_record(trainer, self._after_step(self._optimizer), steps)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure if due."""
        self._log_record(trainer, self._after_epoch(self._optimizer), _get_last_step(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure if nothing was measured before."""
        self._log_record(trainer, self._finish(self._optimizer), _get_last_step(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the loggers."""
        self._close(quiet=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the loggers."""
        if stage == "fit":
            self._close()

    def _check_no_stale_metrics(self, trainer: Trainer) -> None:
        """Raise an error if a callback monitors values that a cap may delay."""
        for each in trainer.callbacks:
            watched = getattr(each, "monitor", None)
            if isinstance(watched, str) and watched.startswith(f"{self.options.get('prefix', PREFIX)}/"):
                raise OptionError(
                    f"Expected cap=None, since other callbacks need current values, but got "
                    f"cap={self.options.get('cap', 0.05)} with {type(each).__name__}(monitor={watched!r}). A cap may "
                    "delay a measurement. Try FlatnessCallback(..., cap=None), with an interval that matches."
                )

    def _find_measured_module(self, pl_module: LightningModule) -> nn.Module:
        model = self.model
        if model is None and type(pl_module).forward is _host.LightningModule.forward:
            raise OptionError(
                f"Expected a module that maps inputs to outputs, but got {type(pl_module).__name__} without a forward. "
                "Try writing one, or naming the part to measure, for instance FlatnessCallback(..., model='net')."
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

    def _log_record(self, trainer: Trainer, record: Record | None, step: int) -> None:
        """Log where Lightning logs the step just taken; Lightning counts from 0."""
        if record is None:
            return
        for logger in trainer.loggers if trainer.is_global_zero else ():
            self._pass_on(type(logger).__name__, partial(logger.log_metrics, record.values, step=step))
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in record.values.items()})


class TwoPassPrecision(_MixedPrecision):  # type: ignore[misc]
    """Use mixed precision with SAM and its variants: the GradScaler sees only the second gradient.

    Use ``Trainer(plugins=[TwoPassPrecision("16-mixed", "cuda")])`` instead of ``Trainer(precision="16-mixed")``.
    Gradients are clipped after the second pass only. Other optimizers, and bfloat16, behave as without it.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: ``"cuda"`` or ``"cpu"``.
        scaler: a GradScaler to use instead of a new one.
    """

    def optimizer_step(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Tensor | None], **kwargs: Any
    ) -> Any:
        """Run both passes and step with the second gradient, unscaled."""
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
        if is_second:  # a skipped batch has no second pass
            self.scaler.update()
        return loss


def _get_last_step(trainer: Trainer) -> int:
    """Return the step at which Lightning logs values at the end of an epoch."""
    return max(0, int(trainer.fit_loop.epoch_loop._batches_that_stepped) - 1)


def _find_optimizer(module: nn.Module, optimizers: Sequence[Optimizer]) -> Optimizer | None:
    """Return the optimizer that trains the module; None if there are several."""
    own = {id(p) for p in module.parameters()}
    found = [o for o in optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])]
    return found[0] if len(found) == 1 else None


def _check_two_pass(trainer: Trainer) -> None:
    names = [type(each).__name__ for each in trainer.optimizers if isinstance(each, TwoPass)]
    if not names or not trainer.lightning_module.automatic_optimization:
        return
    if trainer.accumulate_grad_batches > 1:
        raise TrainingError(
            "Expected accumulate_grad_batches=1 in automatic optimization, but got "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} with {names[0]}. Earlier batches cannot be run "
            "again at the shifted weights. Try larger batches, or accumulate in manual optimization."
        )
    plugin = trainer.precision_plugin
    if getattr(plugin, "scaler", None) is not None and not isinstance(plugin, TwoPassPrecision):
        raise TrainingError(
            f"Expected a precision plugin that allows a second pass, but got precision='16-mixed' with {names[0]}. Try "
            "Trainer(plugins=[saltflat.integrations.lightning.TwoPassPrecision('16-mixed', 'cuda')]), or "
            "precision='bf16-mixed'."
        )
