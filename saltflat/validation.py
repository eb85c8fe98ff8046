"""Check the arguments of public calls, and let calls on models take turns."""

from __future__ import annotations

import operator
import os
import re
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, SupportsIndex, TypeVar

import torch
from torch import Tensor, nn

from saltflat.errors import DeviceError, ModelError, OptionError, format_error_line

LARGEST_FLOAT = sys.float_info.max  # Python integers can exceed it, and would become infinite as floats
LARGEST_COUNT = 10**7  # anything larger is taken for a typing error


def is_choice(value: object, choices: Container[str]) -> bool:
    """Return whether the value is one of the names. Arrays and tensors, whose comparison is ambiguous, are not."""
    return isinstance(value, str) and value in choices


def parse_integer(value: object) -> int | None:
    """Return the value as an integer, or None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # arrays and classes have the method too
        return None


def check_flag(**given: bool) -> None:
    """Check that the arguments are True or False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise OptionError(
                f"Expected True or False, but got {name}={value!r}. Try leaving it out to use the default."
            )


def check_positive(**given: float) -> None:
    """Check that the arguments are positive and finite."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_FLOAT:
            raise OptionError(
                f"Expected a positive number, but got {name}={value!r}. Try leaving it out to use the default."
            )


def check_count(least: int, **given: int) -> None:
    """Check that the arguments are integers of at least ``least``."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_COUNT:
            raise OptionError(
                f"Expected a whole number from {least} to {LARGEST_COUNT}, but got {name}={value!r}. Try leaving "
                "it out to use the default."
            )


def check_non_negative(**given: float) -> None:
    """Check that the arguments are finite and at least 0."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_FLOAT:
            raise OptionError(
                f"Expected a number of at least 0, but got {name}={value!r}. Try leaving it out to use the default."
            )


def parse_bytes(memory: str | int) -> int:
    """Return a size in bytes.

    >>> parse_bytes("1GiB"), parse_bytes("500 MB"), parse_bytes(4096)
    (1073741824, 500000000, 4096)
    """
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(memory), re.IGNORECASE)
    size = float(match[1]) * units[match[2].lower()] if match and match[2].lower() in units else 0.0
    if not 1 <= size < 2**63:
        raise OptionError(f"Expected a positive size, but got memory={memory!r}. Try memory='2GiB' or '500MB'.")
    return int(size)


def check_seed(seed: SupportsIndex) -> int:
    """Return the seed as an integer that torch accepts."""
    number = parse_integer(seed)
    if number is None or not 0 <= number < 2**63:
        raise OptionError(f"Expected a whole number from 0 to 2^63 - 1, but got seed={seed!r}. Try seed=0.")
    return number


def parse_device(device: str | torch.device, probe: bool = True) -> torch.device:
    """Return the device of this name, after checking that it can be used.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` ..., a :class:`torch.device`, or ``"auto"`` for a GPU if CUDA is
            available and the CPU otherwise.
        probe: whether to allocate a tensor on it. Pass False if another process will use the device.

    Example:
        >>> parse_device("cpu")
        device(type='cpu')
    """
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        if probe:
            torch.empty(1, device=found).tolist()  # fails on the meta device, which holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError, OverflowError) as error:
        raise DeviceError(
            f"Expected a device that torch can use here, but got {str(device)!r} ({format_error_line(error)}). "
            "Try device='cpu'."
        ) from error
    return found


P = ParamSpec("P")
T = TypeVar("T")


class _TurnState:
    """What the thread that holds the lock is doing. No other thread changes it."""

    lock = threading.RLock()
    borrowed = 0  # models that are borrowed: more than one where a loss function measures another model
    is_running = False  # whether a borrowed model's forward pass is running
    # Ids of the parameters that are shifted at the moment, and the thread that shifted them.
    moved: list[tuple[threading.Thread, frozenset[int]]] = []  # noqa: RUF012


def _reset_in_child() -> None:
    # A process that is forked while another thread is measuring does not have that thread to wait for.
    _TurnState.lock = threading.RLock()
    _TurnState.borrowed, _TurnState.is_running = 0, False


os.register_at_fork(after_in_child=_reset_in_child)


def take_turns(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that threads run such functions one at a time."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        _check_can_wait()
        with _TurnState.lock:
            return function(*args, **kwargs)

    return call


@contextmanager
def borrow_model(model: nn.Module) -> Iterator[None]:
    """Wait for other threads. Inside of the context, only this thread uses the model.

    Calls from the model's own forward or backward pass raise an error: they would find other tensors in place of the
    parameters, or never end.
    """
    _check_can_wait()
    with _TurnState.lock:
        if _TurnState.is_running or (_TurnState.borrowed and _is_in_backward()):
            raise OptionError(
                "Expected a call outside of a model's forward and backward pass, but got one from inside of a pass "
                "that saltflat itself is running (from a hook, or from the forward pass). "
                "Try calling before or after the other call, or removing the hook meanwhile."
            )
        check_not_moved(model.parameters())
        try:
            _TurnState.borrowed += 1
            yield
        finally:
            _TurnState.borrowed -= 1


@contextmanager
def mark_running() -> Iterator[None]:
    """Mark that the forward pass of a borrowed model is running."""
    before = _TurnState.is_running
    try:
        _TurnState.is_running = True
        yield
    finally:
        _TurnState.is_running = before


@contextmanager
def mark_moved(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep other threads from measuring or shifting these parameters, which are shifted inside of the context."""
    check_not_moved(parameters)
    entry = threading.current_thread(), frozenset(map(id, parameters))
    try:
        _TurnState.moved.append(entry)
        yield
    finally:
        _TurnState.moved.remove(entry)


def check_not_moved(parameters: Iterable[Tensor]) -> None:
    """Check that no other thread has shifted these parameters."""
    own = threading.current_thread()
    away = [ids for thread, ids in list(_TurnState.moved) if thread is not own]
    if away and any(id(each) in ids for each in parameters for ids in away):
        raise ModelError(
            "Expected weights in place, but got weights that another thread has shifted: it is between first_step() "
            "and second_step(). Try again later, or train with step(closure), which other threads wait for."
        )


def _check_can_wait() -> None:
    """Check that this is not a backward pass that the thread with the lock is itself waiting for.

    On a GPU, hooks run in a thread of torch's own.
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
