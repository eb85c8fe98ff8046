"""Hugging Face's Trainer: the options of flat training, and a callback that measures flatness."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from saltflat.engine.losses import parse_loss
from saltflat.errors import MissingPackageError, OptionError, make_unknown_name_error
from saltflat.integrations.flatness_callback import BaseFlatnessCallback
from saltflat.integrations.record import Record
from saltflat.training.asam import ASAM
from saltflat.training.fisher_penalty import FisherPenalty
from saltflat.training.gradient_norm import GradientNormPenalty
from saltflat.training.measure_penalty import Penalty, penalty
from saltflat.training.objective import Objective
from saltflat.training.sam import SAM
from saltflat.training.two_pass import TwoPass
from saltflat.validation import check_non_negative

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

T = TypeVar("T")

KINDS: dict[str, Callable[..., TwoPass]] = {"sam": SAM, "asam": ASAM, "gradient_norm": GradientNormPenalty}


def parse_sam_option(given: Mapping[str, Any] | bool | None) -> Callable[[nn.Module, Optimizer], TwoPass] | None:
    """Return a function that wraps the Trainer's optimizer; None to leave it as it is."""
    options = _parse_option_dict("sam", given)
    if options is None:
        return None
    kind = options.pop("kind", "sam")
    if kind not in KINDS:
        raise make_unknown_name_error("kind of sam", kind, KINDS)
    _check_option_names("sam", options, _list_options(KINDS[kind]), also=("kind",))
    # Try the options on a model with one weight, so that wrong values raise an error before the data are read.
    KINDS[kind](nn.Linear(1, 1), torch.optim.SGD, lr=0.1, **{k: v for k, v in options.items() if k != "sync"})
    return lambda model, base: KINDS[kind](model, base, **options)


def parse_fisher_option(
    given: Mapping[str, Any] | bool | None,
) -> Callable[[nn.Module, Objective], FisherPenalty] | None:
    """Return a function that builds the penalty for an objective; None for no penalty."""
    options = _parse_option_dict("fisher", given)
    if options is None:
        return None
    if "clip" in options:
        raise OptionError(
            "Expected the Trainer to clip, but got clip= for the Fisher penalty of a Trainer. Try "
            "TrainingArguments(max_grad_norm=...)."
        )
    _check_option_names(
        "fisher", options, [name for name in _list_options(FisherPenalty) if name not in ("clip", "objective")]
    )
    FisherPenalty(nn.Linear(1, 1), **options)
    return lambda model, objective: FisherPenalty(model, objective=objective, **options)


def parse_penalties(given: Mapping[str, Any] | None) -> list[tuple[Penalty, float]]:
    """Return the terms to add to the loss, each with its strength."""
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise OptionError(
            f"Expected names of measures with strengths, but got penalties={given!r}. Try {{'fisher_trace': 0.1}}."
        )
    made = []
    for name, value in given.items():
        options = dict(value) if isinstance(value, Mapping) else {"strength": value}
        if "strength" not in options:
            raise OptionError(
                f"Expected every penalty to have a strength, but got {name!r} without one. Try adding 'strength': 0.1."
            )
        strength = options.pop("strength")
        check_non_negative(strength=strength)
        made.append((penalty(name, **options), float(strength)))
    return made


def parse_flatness_option(given: Mapping[str, Any] | FlatnessCallback | None) -> FlatnessCallback | None:
    """Return the callback that measures flatness; None for no callback."""
    if given is None or given is False or isinstance(given, FlatnessCallback):
        return given or None
    if not isinstance(given, Mapping) or "probe" not in given:
        raise OptionError(
            "Expected the options of FlatnessCallback, including the examples to measure on, but got "
            f"flatness={(given if isinstance(given, bool) else type(given).__name__)} without a probe. Try "
            "flatness={'probe': batch, 'every': '1 epoch'}."
        )
    return FlatnessCallback(**given)


def _parse_option_dict(name: str, given: Mapping[str, Any] | bool | None) -> dict[str, Any] | None:
    if given is None or given is False:
        return None
    if given is True:
        return {}
    if not isinstance(given, Mapping):
        raise OptionError(
            f"Expected a dict of options, or True for the defaults, but got {name}={given!r}. Try {name}=True."
        )
    return dict(given)


def _list_options(made: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(made).parameters.values()
    named = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    return [name for name in named if name not in ("model", "base", "loss")]


def _check_option_names(of: str, options: Collection[str], known: list[str], also: tuple[str, ...] = ()) -> None:
    for name in options:
        if name not in known:
            raise make_unknown_name_error(f"option of {of}", name, [*known, *also])


def import_transformers() -> ModuleType:
    """Return the transformers package."""
    try:
        import transformers
    except ImportError as problem:
        raise MissingPackageError(
            "Expected the packages transformers and accelerate, which Hugging Face's Trainer needs, but got no "
            "transformers. Try pip install transformers accelerate."
        ) from problem
    module: ModuleType = transformers
    return module


_TrainerCallback: Any = import_transformers().TrainerCallback


class FlatnessCallback(BaseFlatnessCallback, _TrainerCallback):  # type: ignore[misc]
    """Measure flatness on a fixed set of examples while a Trainer trains.

    The values are added to ``state.log_history``, with ``step`` and ``epoch``, and sent to the ``loggers`` given here.
    A callback has no access to the Trainer's own reporters (``report_to``); :class:`FlatTraining` does, and uses them.

    With several processes the first one measures; the others wait for it and receive its values.

    **Language models.** Models for causal language modeling compare the output at each position with the *next* label
    internally. :func:`saltflat.measure`, and so this callback, compares outputs and labels position by position. Give
    the probe labels that are already shifted: ``labels[:, :-1] = input_ids[:, 1:]`` and ``labels[:, -1] = -100``.

    **Other losses.** Regression (``num_labels=1``) needs ``loss="mse"`` and labels of shape ``(N, 1)``, like the
    outputs; several labels per example need ``loss="bce_with_logits"``; ``label_smoothing_factor`` needs
    ``loss=nn.CrossEntropyLoss(label_smoothing=...)``. If the loss of the probe differs from the model's own, a
    :class:`~saltflat.errors.ModelError` is raised before training starts.

    ``flatness/lr_lambda_max`` uses the learning rate of the step just taken.

    Args:
        probe: the examples to measure on, as for :func:`saltflat.measure`, such as a dict of tensors with ``labels``.
        loss: as for :func:`saltflat.measure`.
        measures: names, as for :func:`saltflat.measure`.
        every: ``100`` or ``"100 steps"``, or ``"1 epoch"``; a step is a step of the optimizer.
        options: options of :class:`saltflat.integrations.Monitor`: ``cap``, ``by_layer``, ``loggers`` and so on.

    Attributes:
        history: a record for every measurement, on the first process; includes those of earlier trainings.
        log: logs values to the Trainer's reporters; None without access to them.
    """

    unavailable = ("model",)
    log: Callable[[dict[str, float]], None] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        """Build the monitor on the first process."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        started = self._start(
            model,
            broadcast=_broadcast_object if several else None,
            is_first=state.is_world_process_zero,
            step=state.global_step,
            epoch=int(state.epoch or 0),
        )
        if started.monitor is not None:
            self._check_label_smoothing(getattr(args, "label_smoothing_factor", 0.0))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Optimizer, **_: Any
    ) -> None:
        """Remember the options of this step."""
        self._take_snapshot(optimizer)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Optimizer, **_: Any
    ) -> None:
        """Measure if due."""
        self._log_record(self._after_step(optimizer), state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Optimizer, **_: Any
    ) -> None:
        """Measure if due."""
        self._log_record(self._after_epoch(optimizer), state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure if nothing was measured before, and close the loggers."""
        self._log_record(self._finish(), state)
        self._close()

    def give_up(self) -> None:
        """Close the loggers after a training that ended with an error."""
        self._close(quiet=True)

    def _check_label_smoothing(self, smoothing: float) -> None:
        """Warn if labels are smoothed in training but not in the measurement."""
        if self.options.get("logits", "none") != "none" or not smoothing:
            return
        if getattr(parse_loss(self.loss), "label_smoothing", 0.0) != smoothing:
            self._warn_once(
                "smoothing",
                f"The training smooths its labels by {smoothing}, but the loss of the probe does not. "
                f"Try loss=torch.nn.CrossEntropyLoss(label_smoothing={smoothing}).",
            )

    def _log_record(self, record: Record | None, state: TrainerState) -> None:
        log = self.log
        if record is None:
            return
        if log is None:
            state.log_history.append({**record.values, "epoch": state.epoch, "step": state.global_step})
        else:
            self._pass_on("The Trainer's log", lambda: log(dict(record.values)))


def _broadcast_object(value: T) -> T:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
