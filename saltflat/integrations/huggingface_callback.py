"""How flat the minimum is while Hugging Face's Trainer trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist
from torch import nn

from saltflat.integrations.monitor import Monitor
from saltflat.integrations.one_for_all import DEFAULT_EVERY, OneForAll, check_not_sharded
from saltflat.integrations.record import Record
from saltflat.integrations.schedule import Every
from saltflat.report.optional import MissingPackageError


def host() -> Any:
    """The transformers package."""
    try:
        import transformers
    except ImportError as problem:
        raise MissingPackageError(
            "Got a request for Hugging Face's Trainer without transformers. Want that package, and accelerate. "
            "Do: pip install saltflat[hf]."
        ) from problem
    return transformers


_TrainerCallback: Any = host().TrainerCallback


class FlatnessCallback(_TrainerCallback):  # type: ignore[misc]
    """Measures how flat the minimum is while a Trainer trains, on a fixed set of examples.

    The values are added to ``state.log_history``, with ``step`` and ``epoch``, and go to the ``loggers`` given here. A
    callback cannot reach the Trainer's own reporters (``report_to``); :class:`FlatTraining` can, and passes them on.

    With several processes the first one measures, and the others wait for it and know what it found.

    **Language models.** Models for causal language modelling compare the output at each position with the *next* label,
    inside. :func:`saltflat.measure`, and so this callback, compare outputs and labels position by position. So give
    the probe labels that are shifted already: ``labels[:, :-1] = input_ids[:, 1:]`` and ``labels[:, -1] = -100``.

    Args:
        probe: the examples to measure on, as for :func:`saltflat.measure`: a dict of tensors with ``labels``, say.
        measures: names as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        every: ``100`` or ``"100 steps"``, or ``"1 epoch"``; a step is a step of the optimizer.
        options: of :class:`saltflat.integrations.Monitor`: ``cap``, ``by_layer``, ``loggers`` and so on.

    Attributes:
        history: a record for every measurement, on the first process.
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
        Every.of(every)
        self.probe, self.measures, self.loss, self.every, self.options = probe, measures, loss, every, options
        self.log: Callable[[dict[str, float]], None] | None = None  # the Trainer's, where there is a way to it
        self.watch: OneForAll | None = None

    @property
    def history(self) -> list[Record]:
        return [] if self.watch is None else self.watch.history

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        check_not_sharded(model)
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

        def make() -> Monitor:
            return Monitor(model, self.probe, self.measures, self.loss, every=self.every, **self.options)

        with own_forward(model):
            self.watch = OneForAll(
                *(make, self.every),
                broadcast=_broadcast if several else None,
                is_first=state.is_world_process_zero,
                step=state.global_step,
                epoch=int(state.epoch or 0),
            )

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any) -> None:
        if self.watch is not None:
            with own_forward(model):
                record = self.watch.after_step(optimizer)
            self._tell(record, state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any) -> None:
        if self.watch is not None:
            with own_forward(model):
                record = self.watch.after_epoch(optimizer)
            self._tell(record, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch is not None:
            self.watch.close()

    def _tell(self, record: Record | None, state: Any) -> None:
        if record is None:
            return
        if self.log is None:
            state.log_history.append({**record.values, "epoch": state.epoch, "step": state.global_step})
        else:
            self.log(dict(record.values))


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """The model without the autocast that Accelerate puts around its forward pass: curvature needs all the digits."""
    held = vars(model)
    original, wrapped = held.get("_original_forward"), held.get("forward")
    if original is None or wrapped is None:
        yield
        return
    held["forward"] = original
    try:
        yield
    finally:
        held["forward"] = wrapped


def _broadcast(found: Any) -> Any:
    box = [found]
    dist.broadcast_object_list(box, src=0)
    return box[0]
