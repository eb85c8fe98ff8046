"""Calls on models take turns: one thread at a time, and none from inside of a pass that another runs.

A call swaps a model's tensors and modes, and sets precision, random states and other switches that all threads share.
So there is one lock for all models, which every public function that is given a model holds from its beginning to its
end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from saltflat.errors import ModelError, OptionError

P = ParamSpec("P")
T = TypeVar("T")


class _TurnState:
    """What the thread that holds the lock is doing; no other thread changes it."""

    lock = threading.RLock()
    borrowed = 0  # models that are borrowed: more than one where a loss function measures another model
    is_running = False  # whether a borrowed model's forward pass is running
    # The parameters that are moved at present, by their ids, and the thread that moved them.
    moved: list[tuple[threading.Thread, frozenset[int]]] = []  # noqa: RUF012


def _reset_in_child() -> None:
    # A process that is forked while another thread measures has no such thread to wait for.
    _TurnState.lock = threading.RLock()
    _TurnState.borrowed, _TurnState.is_running = 0, False


os.register_at_fork(after_in_child=_reset_in_child)


def take_turns(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function wait until no other thread is in a function made so."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        _check_can_wait()
        with _TurnState.lock:
            return function(*args, **kwargs)

    return call


@contextmanager
def borrow_model(model: nn.Module) -> Iterator[None]:
    """Wait for the turn; inside, the model is this thread's alone.

    A call from the model's own forward or backward pass is refused: that would find other tensors in the place of the
    parameters, or never end.
    """
    _check_can_wait()
    with _TurnState.lock:
        if _TurnState.is_running or (_TurnState.borrowed and _is_in_backward()):
            raise OptionError(
                "Expected a call outside of a model's forward and backward pass, but got one from inside of a pass "
                "that saltflat itself is running (from a hook, or from the forward pass). "
                "Try calling before or after the other call, or removing the hook for its time."
            )
        check_not_moved(model.parameters())
        try:
            _TurnState.borrowed += 1
            yield
        finally:
            _TurnState.borrowed -= 1


@contextmanager
def mark_running() -> Iterator[None]:
    """Around the forward pass of a borrowed model."""
    before = _TurnState.is_running
    try:
        _TurnState.is_running = True
        yield
    finally:
        _TurnState.is_running = before


@contextmanager
def mark_moved(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep other threads from measuring or moving these parameters: inside, they are not where they belong."""
    check_not_moved(parameters)
    entry = threading.current_thread(), frozenset(map(id, parameters))
    try:
        _TurnState.moved.append(entry)
        yield
    finally:
        _TurnState.moved.remove(entry)


def check_not_moved(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters that another thread has moved; the thread that did so knows what it does."""
    own = threading.current_thread()
    away = [ids for thread, ids in list(_TurnState.moved) if thread is not own]
    if away and any(id(each) in ids for each in parameters for ids in away):
        raise ModelError(
            "Expected weights where they belong, but another thread has shifted them: it is between first_step() and "
            "second_step(). Try again later, or train with step(closure), which other threads wait for."
        )


def _check_can_wait() -> None:
    """Refuse to wait inside of a backward pass, which the thread that holds the lock may itself be waiting for.

    On a GPU hooks run in a thread of torch's own.
    """
    if not _is_in_backward():
        return
    if not _TurnState.lock.acquire(blocking=False):
        raise OptionError(
            "Expected a call outside of a backward pass, but got one from inside while another call is running, which "
            "may be waiting for this very pass. Try calling after backward() has returned."
        )
    _TurnState.lock.release()


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
