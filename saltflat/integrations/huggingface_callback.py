"""Hugging Face's Trainer: monitor how flat the minimum is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from saltflat.engine.custom_losses import parse_loss
from saltflat.errors import MissingPackageError, OptionError, format_error_line, make_unknown_name_error
from saltflat.integrations.monitor import Monitor, check_monitor_options
from saltflat.integrations.rank_zero import OptimizerSnapshot, RankZeroMonitor
from saltflat.integrations.record import OneTimeWarnings, Record
from saltflat.integrations.schedule import DEFAULT_EVERY, Interval
from saltflat.training.asam import ASAM
from saltflat.training.distributed import check_not_sharded
from saltflat.training.fisher_penalty import FisherPenalty
from saltflat.training.gradient_norm import GradientNormPenalty
from saltflat.training.objective import Objective
from saltflat.training.penalty import Penalty, penalty
from saltflat.training.sam import SAM
from saltflat.training.two_pass import TwoPass
from saltflat.validation import check_non_negative

KINDS: dict[str, Callable[..., TwoPass]] = {"sam": SAM, "asam": ASAM, "gradient_norm": GradientNormPenalty}


def parse_sam_option(given: Mapping[str, Any] | bool | None) -> Callable[[nn.Module, Optimizer], TwoPass] | None:
    """How to wrap the Trainer's optimizer; None if it is to be left alone."""
    options = _parse_option_dict("sam", given)
    if options is None:
        return None
    kind = options.pop("kind", "sam")
    if kind not in KINDS:
        raise make_unknown_name_error("kind of sam", kind, KINDS)
    _check_option_names("sam", options, _list_options(KINDS[kind]), also=("kind",))
    # On a model of one weight: wrong values are found now, and not after the data are read.
    KINDS[kind](nn.Linear(1, 1), torch.optim.SGD, lr=0.1, **{k: v for k, v in options.items() if k != "sync"})
    return lambda model, base: KINDS[kind](model, base, **options)


def parse_fisher_option(
    given: Mapping[str, Any] | bool | None,
) -> Callable[[nn.Module, Objective], FisherPenalty] | None:
    """How to make the penalty for an objective; None if there is to be none."""
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
    """Terms for the loss, each with its strength."""
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
                f"Expected one, but got the penalty {name!r} without a strength. Try adding 'strength': 0.1, say."
            )
        strength = options.pop("strength")
        check_non_negative(strength=strength)
        made.append((penalty(name, **options), float(strength)))
    return made


def parse_flatness_option(given: Mapping[str, Any] | FlatnessCallback | None) -> FlatnessCallback | None:
    """The callback that watches; None if there is to be none."""
    if given is None or given is False or isinstance(given, FlatnessCallback):
        return given or None
    if not isinstance(given, Mapping) or "probe" not in given:
        raise OptionError(
            "Expected the options of FlatnessCallback, and among them the examples to measure on, but got "
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
            f"Expected a dict of options, or True for the usual ones, but got {name}={given!r}. Try passing one."
        )
    return dict(given)


def _list_options(made: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(made).parameters.values()
    named = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    return [name for name in named if name not in ("model", "base", "loss")]


def _check_option_names(of: str, options: Mapping[str, Any], known: list[str], also: tuple[str, ...] = ()) -> None:
    for name in options:
        if name not in known:
            raise make_unknown_name_error(f"option of {of}", name, [*known, *also])


def import_transformers() -> Any:
    """The transformers package."""
    try:
        import transformers
    except ImportError as problem:
        raise MissingPackageError(
            "Expected that package, and accelerate, but got a request for Hugging Face's Trainer without "
            "transformers. Try pip install transformers accelerate."
        ) from problem
    return transformers


_TrainerCallback: Any = import_transformers().TrainerCallback


class FlatnessCallback(_TrainerCallback):  # type: ignore[misc]
    """Measures how flat the minimum is while a Trainer trains, on a fixed set of examples.

    The values are added to ``state.log_history``, with ``step`` and ``epoch``, and go to the ``loggers`` given here. A
    callback cannot reach the Trainer's own reporters (``report_to``); :class:`FlatTraining` can, and passes them on.

    With several processes the first one measures, and the others wait for it and know what it found.

    **Language models.** Models for causal language modelling compare the output at each position with the *next* label,
    inside. :func:`saltflat.measure`, and so this callback, compare outputs and labels position by position. So give
    the probe labels that are shifted already: ``labels[:, :-1] = input_ids[:, 1:]`` and ``labels[:, -1] = -100``.

    **Other losses.** Regression (``num_labels=1``) needs ``loss="mse"``, and labels of shape ``(N, 1)``, as the outputs
    have; several labels for an example need ``loss="bce_with_logits"``; ``label_smoothing_factor`` needs
    ``loss=nn.CrossEntropyLoss(label_smoothing=...)``. If the loss of the probe is not the model's own, training does
    not start: a :class:`~saltflat.errors.ModelError` says which it is.

    ``flatness/lr_lambda_max`` has the learning rate of the step just taken.

    Args:
        probe: the examples to measure on, as for :func:`saltflat.measure`: a dict of tensors with ``labels``, say.
        measures: names as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        every: ``100`` or ``"100 steps"``, or ``"1 epoch"``; a step is a step of the optimizer.
        options: of :class:`saltflat.integrations.Monitor`: ``cap``, ``by_layer``, ``loggers`` and so on.

    Attributes:
        history: a record for every measurement, on the first process; those of an earlier training stay.
    """

    def __init__(
        self,
        probe: Any,
        measures: Any = ("hessian_trace",),
        loss: Any = "cross_entropy",
        *,
        every: int | str = DEFAULT_EVERY,
        **options: Any,
    ) -> None:
        super().__init__()
        Interval.parse(every)
        check_monitor_options(options, without=("model",))
        self.probe, self.measures, self.loss, self.every, self.options = probe, measures, loss, every, options
        self.log: Callable[[dict[str, float]], None] | None = None  # the Trainer's, where there is a way to it
        self.changed_by = ""  # what changes the gradient before the optimizer steps
        self.watch: RankZeroMonitor | None = None
        self._earlier: list[Record] = []
        self._stepped: OptimizerSnapshot | None = None
        self._complain = OneTimeWarnings()

    @property
    def history(self) -> list[Record]:
        return [*self._earlier, *([] if self.watch is None else self.watch.history)]

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        check_not_sharded(model)
        self._earlier = self.history
        self.watch = self._stepped = None
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

        def make_monitor() -> Monitor:
            return Monitor(model, self.probe, self.measures, self.loss, every=self.every, **self.options)

        self.watch = RankZeroMonitor(
            *(make_monitor, self.every),
            broadcast=_broadcast_object if several else None,
            is_first=state.is_world_process_zero,
            step=state.global_step,
            epoch=int(state.epoch or 0),
        )
        if self.watch.monitor is not None:
            self.watch.monitor.changed_by = self.changed_by
            self._check_label_smoothing(getattr(args, "label_smoothing_factor", 0.0))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        self._stepped = OptimizerSnapshot(optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any) -> None:
        if self.watch is not None:
            self._log_record(self.watch.after_step(self._stepped or optimizer), state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any) -> None:
        if self.watch is not None:
            self._log_record(self.watch.after_epoch(self._stepped or optimizer), state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch is not None:
            self._log_record(self.watch.finish(self._stepped), state)
            self.watch.close()

    def give_up(self) -> None:
        """Close the loggers of a training that ended with an error."""
        if self.watch is not None:
            self.watch.close(quiet=True)

    def _check_label_smoothing(self, smoothing: float) -> None:
        """Say if labels are smoothed where the model is trained, and not where it is measured."""
        if self.options.get("logits", "none") != "none" or not smoothing:
            return
        if getattr(parse_loss(self.loss), "label_smoothing", 0.0) != smoothing:
            self._complain(
                "smoothing",
                f"The training smooths its labels by {smoothing}, and the loss of the probe does not. "
                f"Do: pass loss=torch.nn.CrossEntropyLoss(label_smoothing={smoothing}).",
            )

    def _log_record(self, record: Record | None, state: Any) -> None:
        if record is None:
            return
        if self.log is None:
            state.log_history.append({**record.values, "epoch": state.epoch, "step": state.global_step})
        else:
            try:
                self.log(dict(record.values))
            # A lost connection is no reason to end a training.
            except Exception as error:
                self._complain("log", f"The Trainer's log did not take the values ({format_error_line(error)}).")


def _broadcast_object(found: Any) -> Any:
    box = [found]
    dist.broadcast_object_list(box, src=0)
    return box[0]
