"""Hugging Face's Trainer: training toward flat minima, and watching how flat they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from saltflat.errors import OptionError
from saltflat.integrations.huggingface_callback import FlatnessCallback, host, own_forward
from saltflat.integrations.huggingface_options import fisher_from, penalties_from, two_pass_from
from saltflat.integrations.one_for_all import check_not_sharded
from saltflat.randomness import remembered
from saltflat.training.fisher_penalty import FisherPenalty
from saltflat.training.two_pass import TwoPass

__all__ = ["FlatTraining", "FlatnessCallback"]

_Trainer: Any = host().Trainer


class FlatTraining:
    """A mixin that makes a Trainer look for flat minima: ``class FlatTrainer(FlatTraining, Trainer): ...``

    The optimizer, its schedule, clipping, mixed precision, checkpoints and the logged loss stay the Trainer's own; what
    changes is the gradient. ``evaluate`` and ``predict`` are as they were.

    * ``sam={"rho": 0.05}``: the gradient at the (nearly) worst weights nearby. ``"kind"`` is ``"sam"``, ``"asam"``
      (which takes ``eta``) or ``"gradient_norm"`` (which takes ``balance``), and the others are the options of
      :class:`~saltflat.training.SAM`, :class:`~saltflat.training.ASAM` and
      :class:`~saltflat.training.GradientNormPenalty`; ``True`` stands for SAM as it comes. With
      ``gradient_accumulation_steps`` all micro-batches of a step are taken again at the shifted weights, with the same
      random numbers: the step is that of one large batch. Under float16, a first gradient that overflows moves the
      weights to NaN; so the second one is NaN, the weights come back, and the scaler skips the step as it always does.
      A checkpoint's ``rho`` wins over the one given here, as its learning rate does.
    * ``fisher={"beta": 10.0, "parts": 8}``: the options of :class:`~saltflat.training.FisherPenalty`. ``start_step``
      and ``start_epoch`` count the Trainer's steps and epochs. The Trainer clips, by ``max_grad_norm``, which is 1.0 if
      nothing else is said.
    * ``penalties={"fisher_trace": 0.01}``: measures to add to the loss while the model trains, with their strengths; a
      dict in place of the strength gives options of :func:`saltflat.training.penalty`, too, as in
      ``{"hessian_trace": {"strength": 0.01, "columns": "sampled:2"}}``. The logged loss contains them. (For causal
      language models see what :class:`FlatnessCallback` says about labels.)
    * ``flatness={"probe": batch, "every": "1 epoch"}``: the options of :class:`FlatnessCallback`, or one of those; here
      the values also go to the Trainer's reporters.

    Attributes:
        sam: the :class:`~saltflat.training.two_pass.TwoPass` around the Trainer's optimizer, from the first step on.
        fisher: the :class:`~saltflat.training.FisherPenalty`, from the first step on.
        flatness: the :class:`FlatnessCallback`.
        perturbed_steps: how many steps were taken with a gradient from shifted weights.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        order = cls.__mro__
        if _Trainer in order and order.index(_Trainer) < order.index(FlatTraining):
            raise OptionError(
                f"Got the class {cls.__name__} with FlatTraining after Trainer, where nothing would ask it. "
                f"Want it before. Do: class {cls.__name__}(FlatTraining, Trainer)."
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
                f"Got a {type(self).__name__} that is no Trainer. Want FlatTraining as a mixin. "
                "Do: class FlatTrainer(FlatTraining, Trainer): ..."
            )
        if fisher and (sam or penalties):
            raise OptionError(
                f"Got fisher= and {'sam=' if sam else 'penalties='} together. Want one of them: each says where "
                "gradients are taken, and of what. Do: leave one out."
            )
        self._make_sam = two_pass_from(sam)
        self._make_fisher = fisher_from(fisher)
        self._penalties = penalties_from(penalties)
        self._micro_batches: list[tuple[Any, Any, Callable[[], None]]] = []
        self.sam: TwoPass | None = None
        self.fisher: FisherPenalty | None = None
        self.perturbed_steps = 0
        super().__init__(*args, **kwargs)
        self.flatness: Any = FlatnessCallback(**flatness) if isinstance(flatness, Mapping) else flatness
        if self.flatness is not None:
            self.flatness.log = self._log_flatness
            self.add_callback(self.flatness)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self._make_fisher is not None:
            return self._fisher_step(model, inputs, num_items_in_batch)
        if self._make_sam is None:
            return self._plain_step(model, inputs, num_items_in_batch)
        try:
            return self._sam_step(model, inputs, num_items_in_batch)
        except BaseException:
            self._micro_batches.clear()
            if self.sam is not None:
                self.sam.restore()
            raise

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        batch = dict(inputs) if self._penalties and model.training else None  # the Trainer may take labels out of it
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)  # type: ignore[misc]
        if batch is None:
            return found
        loss, outputs = found if return_outputs else (found, None)
        inner = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        share = 1 / self._micro_batches_per_step if self._is_scaled(kwargs.get("num_items_in_batch")) else 1.0
        with own_forward(inner):
            for penalty, strength in self._penalties:
                loss = loss + strength * share * penalty(inner, batch)
        return (loss, outputs) if return_outputs else loss

    def _plain_step(self, model: nn.Module, inputs: Any, items: Any) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, items)  # type: ignore[misc]
        return loss

    def _sam_step(self, model: nn.Module, inputs: Any, items: Any) -> Tensor:
        sam = self._two_pass(model)
        self._micro_batches.append((inputs, items, remembered()))
        with sam.first_pass():
            loss = self._plain_step(model, inputs, items)
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        if not accelerator.sync_gradients:
            return loss
        again, self._micro_batches = self._micro_batches, []
        sam.first_step()
        for i, (one, count, back) in enumerate(again):
            back()
            is_last = i == len(again) - 1
            with nullcontext() if is_last else accelerator.no_sync(model):
                self._plain_step(model, one, count)
        sam.take_gradient()
        return loss

    def _two_pass(self, model: nn.Module) -> TwoPass:
        optimizer: Any = self.optimizer  # type: ignore[attr-defined]
        base = getattr(optimizer, "optimizer", optimizer)
        if self.sam is None or self.sam.base is not base or self.sam.model is not model:
            assert self._make_sam is not None
            self._check_not_sharded(model)
            self.sam = self._make_sam(model, base)
            # Called for steps that are really taken: a GradScaler may skip one.
            base.register_step_post_hook(self._count)
        return self.sam

    def _count(self, *_: Any) -> None:
        if self.sam is not None and self.sam.perturbation > 0:
            self.perturbed_steps += 1

    def _fisher_step(self, model: nn.Module, inputs: Any, items: Any) -> Tensor:
        if self.fisher is None or self.fisher.model is not model:
            assert self._make_fisher is not None
            self._check_not_sharded(model)
            self.fisher = self._make_fisher(model, lambda model, batch: self.compute_loss(model, dict(batch)))
        trainer: Any = self
        self.fisher.steps = trainer.state.global_step
        self.fisher.set_epoch(int(trainer.state.epoch or 0))
        model.train()
        batch = dict(trainer._prepare_inputs(inputs))
        weight = self._weight(batch, items)
        if items is not None and self.fisher.whole is None:
            self.fisher.whole = True  # a mean over labels, of which examples may have more or fewer
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        # Autocast around it all in place of one around forward: the penalty can then leave it, and must.
        with own_forward(inner), trainer.accelerator.autocast():
            loss = self.fisher.backward(batch, weight=weight, scaler=trainer.accelerator.scaler)
        return weight * loss

    def _weight(self, batch: dict[str, Any], items: Any) -> float:
        """Of a micro-batch among those of its step: by the number of its labels, where the Trainer counts those."""
        if items is None or not self._is_scaled(items):
            return 1 / self._micro_batches_per_step
        trainer: Any = self
        labels = batch["labels"][..., 1:] if getattr(trainer, "_loss_shifts_labels", False) else batch["labels"]
        # The count is that of all processes, whose gradients will be averaged.
        several = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
        return int(labels.ne(-100).sum()) * several / int(items)

    def _is_scaled(self, items: Any) -> bool:
        """Whether losses of micro-batches come as their shares of the step's, which the Trainer then just adds."""
        trainer: Any = self
        said = getattr(trainer, "loss_is_scaled_for_ga", None)
        counted = trainer.model_accepts_loss_kwargs and items is not None
        return bool(counted or trainer.compute_loss_func is not None) if said is None else bool(said)

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
        trainer.log(values)
        trainer.control.should_log = should_log  # to log something says that nothing is left to log
