"""Hugging Face's Trainer: a mixin that trains toward flat minima."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from saltflat.engine.custom_losses import NormalizedLogitsLoss
from saltflat.engine.losses import LossLike
from saltflat.engine.model_loss import compute_model_loss
from saltflat.engine.problem import Problem, cast_targets
from saltflat.engine.session import open_session, remove_accelerate_autocast, snapshot_rng
from saltflat.errors import OptionError, SaltflatError, TrainingError
from saltflat.integrations.huggingface_callback import (
    FlatnessCallback,
    import_transformers,
    parse_fisher_option,
    parse_flatness_option,
    parse_penalties,
    parse_sam_option,
)
from saltflat.integrations.record import OneTimeWarnings
from saltflat.training.distributed import check_not_sharded
from saltflat.training.fisher_penalty import FisherPenalty
from saltflat.training.shift import freeze_buffers
from saltflat.training.two_pass import TwoPass

ItemCount: TypeAlias = "Tensor | int | None"  # labels in a step, where the Trainer counts them

TOLERANCE = 1e-3  # relative; the model may compute its own loss in lower precision


@dataclass(frozen=True)
class LossComparison:
    """The loss of the same examples in eval mode, computed twice.

    Attributes:
        ours: as saltflat computes it.
        own: as the model itself computes it.
    """

    ours: float
    own: float

    @property
    def is_close(self) -> bool:
        """Return whether the two agree."""
        return abs(self.ours - self.own) <= TOLERANCE * max(abs(self.ours), abs(self.own))


def compare_losses(
    model: nn.Module, inputs: Mapping[str, Any], labels: Tensor | None, loss: LossLike
) -> LossComparison | None:
    """Return both losses of some examples; None if they cannot be compared, or the model has none."""
    if not isinstance(inputs, Mapping) or not isinstance(labels, Tensor):
        return None
    try:
        with open_session(model, "eval"), torch.no_grad():
            own = compute_model_loss(model, (), inputs, labels)
            if own is None:
                return None
            problem = Problem.build(model, (inputs, labels), loss)
            (batch,) = problem.read_batches()
            outputs, targets = problem.network(batch), cast_targets(batch.targets)
            problem.loss.check(outputs, targets)
            ours = problem.loss.total(outputs, targets).sum() / problem.loss.share(outputs, targets).sum()
    # The measurement or the training itself will raise a better error.
    except (SaltflatError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    found = LossComparison(float(ours), own)
    return found if isfinite(found.ours) and isfinite(found.own) else None


_Trainer: Any = import_transformers().Trainer


class FlatTraining:
    """A mixin that makes a Trainer search for flat minima: ``class FlatTrainer(FlatTraining, Trainer): ...``

    The optimizer, its schedule, clipping, mixed precision, checkpoints and the logged loss stay the Trainer's own; only
    the gradient changes. ``evaluate`` and ``predict`` are unchanged.

    * ``sam={"rho": 0.05}``: the gradient at the (nearly) worst weights nearby. ``"kind"`` is ``"sam"``, ``"asam"``
      (which takes ``eta``) or ``"gradient_norm"`` (which takes ``balance``), and the others are the options of
      :class:`~saltflat.training.SAM`, :class:`~saltflat.training.ASAM` and
      :class:`~saltflat.training.GradientNormPenalty`; ``True`` selects SAM with default options. With
      ``gradient_accumulation_steps`` all micro-batches of a step run again at the shifted weights, with the same random
      numbers: the step equals that of one large batch. Under float16, a first gradient that overflows moves the weights
      to NaN; the second one is then NaN, the weights are restored, and the scaler skips the step as usual.
      The ``rho`` of a checkpoint overrides the one given here, as its learning rate does.
    * ``fisher={"beta": 10.0, "parts": 8}``: the options of :class:`~saltflat.training.FisherPenalty`. ``start_step``
      and ``start_epoch`` count the Trainer's steps and epochs. The Trainer clips, to ``max_grad_norm``, 1.0 by default.
    * ``penalties={"fisher_trace": 0.01}``: measures to add to the training loss, with their strengths; a dict instead
      of the strength also passes options to :func:`saltflat.training.penalty`, as in ``{"hessian_trace": {"strength":
      0.01, "columns": "sampled:2"}}``. The logged loss includes them. If the model's own loss differs from that of
      the penalty, the first batch raises an error. (Smoothed labels and ``compute_loss_func`` belong to the Trainer:
      a penalty uses the loss it names.)
    * ``flatness={"probe": batch, "every": "1 epoch"}``: the options of :class:`FlatnessCallback`, or an instance; the
      values are also sent to the Trainer's reporters.

    Attributes:
        sam: the :class:`~saltflat.training.two_pass.TwoPass` around the Trainer's optimizer, from the first step on.
        fisher: the :class:`~saltflat.training.FisherPenalty`, from the first step on.
        flatness: the :class:`FlatnessCallback`.
        perturbed_steps: how many steps used a gradient from shifted weights since this Trainer was created.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        order = cls.__mro__
        if _Trainer in order and order.index(_Trainer) < order.index(FlatTraining):
            raise OptionError(
                f"Expected FlatTraining before Trainer, but got the class {cls.__name__} with FlatTraining after it, "
                f"where it has no effect. Try class {cls.__name__}(FlatTraining, Trainer)."
            )

    def __init__(
        self,
        *args: Any,
        sam: Mapping[str, Any] | bool | None = None,
        fisher: Mapping[str, Any] | bool | None = None,
        penalties: Mapping[str, Any] | None = None,
        flatness: Mapping[str, Any] | FlatnessCallback | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(self, _Trainer):
            raise OptionError(
                f"Expected FlatTraining as a mixin, but got a {type(self).__name__} that is no Trainer. Try class "
                "FlatTrainer(FlatTraining, Trainer): ..."
            )
        if fisher and (sam or penalties):
            raise OptionError(
                f"Expected only one of fisher= and {('sam=' if sam else 'penalties=')}, but got both. Each determines "
                "where gradients are computed, and of what. Try leaving one out."
            )
        self._make_sam = parse_sam_option(sam)
        self._make_fisher = parse_fisher_option(fisher)
        self._penalties = parse_penalties(penalties)
        self._micro_batches: list[tuple[dict[str, Any], ItemCount, Callable[[], None]]] = []
        self.sam: TwoPass | None = None
        self.fisher: FisherPenalty | None = None
        self.perturbed_steps = 0
        self._counting: Any = None
        self._warn_once, self._is_compared = OneTimeWarnings(), False
        self.flatness: Any = parse_flatness_option(flatness)
        super().__init__(*args, **kwargs)
        if self.flatness is not None:
            self.flatness.log = self._log_flatness
            changes = {"SAM": self._make_sam, "the Fisher penalty": self._make_fisher, "a penalty": self._penalties}
            self.flatness.changed_by = next((name for name, used in changes.items() if used), "")
            if self.flatness not in self.callback_handler.callbacks:
                self.add_callback(self.flatness)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and close the loggers after an error."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            if self.flatness is not None:
                self.flatness.give_up()
            raise

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: ItemCount = None) -> Tensor:
        """Add the gradient of a micro-batch, and return its loss."""
        if self._make_fisher is not None:
            return self._run_fisher_step(model, inputs, num_items_in_batch)
        if self._make_sam is None:
            return self._run_plain_step(model, inputs, num_items_in_batch)
        try:
            return self._run_sam_step(model, inputs, num_items_in_batch)
        except BaseException:
            self._micro_batches.clear()
            if self.sam is not None:
                self.sam.restore()
            raise

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the Trainer's loss, plus the penalties while training."""
        trainers = super().compute_loss  # type: ignore[misc]
        if not self._penalties or not model.training:
            return trainers(model, inputs, return_outputs=return_outputs, **kwargs)
        batch, items = dict(inputs), kwargs.get("num_items_in_batch")  # the Trainer may remove labels from the inputs
        inner = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        if not self._is_compared:
            self._check_penalty_losses(inner, batch)
            self._is_compared = True
        share = self._compute_loss_ratio(trainers, inner, batch, items) if self._is_loss_scaled(items) else 1.0
        found = trainers(model, inputs, return_outputs=return_outputs, **kwargs)
        loss, outputs = found if return_outputs else (found, None)
        for penalty, strength in self._penalties:
            loss = loss + strength * share * penalty(inner, batch)
        return (loss, outputs) if return_outputs else loss

    def _check_penalty_losses(self, model: nn.Module, batch: dict[str, Any]) -> None:
        """Check that every penalty uses the loss that is trained on."""
        trainer: Any = self
        smoothing = trainer.args.label_smoothing_factor
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        for penalty, _ in self._penalties:
            if trainer.compute_loss_func is not None or isinstance(penalty.loss, NormalizedLogitsLoss):
                continue
            if smoothing:
                if getattr(penalty.loss, "label_smoothing", 0.0) != smoothing:
                    self._warn_once(
                        "smoothing",
                        f"The training smooths its labels by {smoothing}, but the penalty {penalty.name} does not. "
                        f"Try its option 'loss': torch.nn.CrossEntropyLoss(label_smoothing={smoothing}).",
                    )
                continue
            found = compare_losses(model, inputs, batch.get("labels"), penalty.loss)
            if found is not None and not found.is_close:
                raise TrainingError(
                    f"Expected the penalty {penalty.name} to use the model's own loss, but got {found.ours:.6g} for "
                    f"the first batch, and {found.own:.6g} by the model itself. Try giving the penalty the option "
                    "'loss': 'model'."
                )

    def _run_plain_step(self, model: nn.Module, inputs: dict[str, Any], items: ItemCount) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, items)  # type: ignore[misc]
        return loss

    def _run_sam_step(self, model: nn.Module, inputs: dict[str, Any], items: ItemCount) -> Tensor:
        sam = self._prepare_sam(model)
        self._micro_batches.append((inputs, items, snapshot_rng()))
        with sam.first_pass():
            loss = self._run_plain_step(model, inputs, items)
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        if not accelerator.sync_gradients:
            return loss
        again, self._micro_batches = self._micro_batches, []
        sam.first_step()
        for i, (one, count, back) in enumerate(again):
            back()
            is_last = i == len(again) - 1
            with nullcontext() if is_last else accelerator.no_sync(model):
                self._run_plain_step(model, one, count)
        sam.take_gradient()
        return loss

    def _prepare_sam(self, model: nn.Module) -> TwoPass:
        optimizer: Any = self.optimizer  # type: ignore[attr-defined]
        base = getattr(optimizer, "optimizer", optimizer)
        if self.sam is None or self.sam.base is not base or self.sam.model is not model:
            assert self._make_sam is not None
            self._check_not_sharded(model)
            self.sam = self._make_sam(model, base)
            # A hook, since a GradScaler may skip a step.
            if self._counting is not None:
                self._counting.remove()
            self._counting = base.register_step_post_hook(self._count_perturbed_step)
        return self.sam

    def _count_perturbed_step(self, *_: Any) -> None:
        if self.sam is not None and self.sam.perturbation > 0:
            self.perturbed_steps += 1

    def _run_fisher_step(self, model: nn.Module, inputs: dict[str, Any], items: ItemCount) -> Tensor:
        if self.fisher is None or self.fisher.model is not model:
            assert self._make_fisher is not None
            self._check_not_sharded(model)
            self.fisher = self._make_fisher(model, lambda model, batch: self.compute_loss(model, dict(batch)))
        trainer: Any = self
        self.fisher.steps = trainer.state.global_step
        self.fisher.set_epoch(int(trainer.state.epoch or 0))
        model.train()
        batch = dict(trainer._prepare_inputs(inputs))
        if items is not None and self.fisher.whole is None:
            self.fisher.whole = True  # a mean over labels, whose number differs between examples
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        # Autocast around the whole step instead of forward, so that the penalty can disable it, as it must.
        with remove_accelerate_autocast(inner), trainer.accelerator.autocast():
            scaled = items is not None and self._is_loss_scaled(items)
            weight = (
                self._compute_loss_ratio(self.compute_loss, inner, batch, items)
                if scaled
                else 1 / self._micro_batches_per_step
            )
            if weight == 0 and inner is model:
                return torch.zeros((), device=trainer.args.device)  # no labels that count, so no mean
            loss = self.fisher.backward(batch, weight=weight, scaler=trainer.accelerator.scaler)
        return weight * loss

    def _compute_loss_ratio(
        self, loss: Callable[..., Any], model: nn.Module, batch: dict[str, Any], items: ItemCount
    ) -> float:
        """Return the weight of a micro-batch in its step: its share of the step's loss over its own mean loss.

        Models count labels differently, or not at all, so both losses are computed.
        """
        if items is None:
            return 1 / self._micro_batches_per_step
        back = snapshot_rng()
        found = []
        with torch.no_grad(), freeze_buffers(model):
            for count in (items, None):
                found.append(float(loss(model, dict(batch), num_items_in_batch=count)))
                back()
        share, mean = found
        return share / mean if share else 0.0

    def _is_loss_scaled(self, items: ItemCount) -> bool:
        """Return whether the loss of a micro-batch is already its share of the step's loss."""
        trainer: Any = self
        flag = getattr(trainer, "loss_is_scaled_for_ga", None)
        counted = trainer.model_accepts_loss_kwargs and items is not None
        return bool(counted or trainer.compute_loss_func is not None) if flag is None else bool(flag)

    @property
    def _micro_batches_per_step(self) -> int:
        trainer: Any = self
        usual = trainer.args.gradient_accumulation_steps
        return int(getattr(trainer, "current_gradient_accumulation_steps", usual))

    def _check_not_sharded(self, model: nn.Module) -> None:
        trainer: Any = self
        spread = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        check_not_sharded(model, "DeepSpeed or FSDP, which spread weights over the processes" if spread else "")

    def _log_flatness(self, values: dict[str, float]) -> None:
        trainer: Any = self
        should_log = trainer.control.should_log
        try:
            trainer.log(values)
        finally:
            trainer.control.should_log = should_log  # logging marks everything as logged
