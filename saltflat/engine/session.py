"""A session on the user's model: one at a time, under fixed conditions, and the model given back as it was."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import checkpoint

from saltflat.engine.attributes import AttributeSnapshot
from saltflat.engine.data import find_unsupported_kind
from saltflat.errors import DeviceError, ModelError, OptionError
from saltflat.results.caveats import TRAIN_MODE
from saltflat.validation import is_choice


def snapshot_rng() -> Callable[[], None]:
    """A function that puts Python's, NumPy's and torch's random states back to what they are now.

    Example:
        >>> restore = snapshot_rng()
        >>> first = torch.rand(3)
        >>> restore()
        >>> bool((torch.rand(3) == first).all())
        True
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore_rng() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return restore_rng


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


@contextmanager
def open_session(model: nn.Module, mode: str, data: Any = None) -> Iterator[list[str]]:
    """Measure under fixed conditions: eval mode (unless ``mode="keep"``), gradients on, autocast and fused kernels off.

    Parameters and buffers are never handed out themselves (see :class:`saltflat.engine.network.Network`), so what is left to
    give back is the modes of the modules, the random states and a few global switches. Yields notes for the reader of
    the result.
    """
    check_module(model)
    _check_no_transforms()
    if not is_choice(mode, ("eval", "keep")):
        raise OptionError(
            f"Expected 'eval' or 'keep', but got mode={mode!r}. Try leaving it out to measure in eval mode."
        )
    notes: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(borrow_model(model))
        check_tensors(model)
        modes = [(module, module.training) for module in model.modules()]
        attributes = AttributeSnapshot(model.modules())
        stack.callback(attributes.restore, thorough=True)
        stack.callback(snapshot_rng())
        for generator in _find_generators(data):
            stack.callback(generator.set_state, generator.get_state())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in {"cpu", *(p.device.type for p in model.parameters())}:
            stack.enter_context(torch.autocast(device, enabled=False))
        # The fused encoder layers skip their sub-modules, and flash attention cannot be differentiated twice.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        stack.enter_context(use_full_precision(model))
        stack.enter_context(remove_accelerate_autocast(model))
        stack.enter_context(disable_checkpointing())
        # A compiled model would compile our taps into its graphs.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            if mode == "eval":
                for module, _ in modes:
                    module.training = False
                if any(training for _, training in modes):
                    notes.append(TRAIN_MODE)
            yield notes
        finally:
            for module, training in modes:
                module.training = training


@contextmanager
def use_full_precision(model: nn.Module) -> Iterator[None]:
    """Convolutions and products with all the digits of float32: TF32 leaves three of them, bfloat16 two."""
    # cuDNN's recurrent kernels have no backward pass in eval mode.
    cudnn, recurrent = torch.backends.cudnn, any(isinstance(module, nn.RNNBase) for module in model.modules())
    enabled, back = cudnn.enabled, snapshot_precision()
    try:
        set_precision("highest")
        if recurrent:
            cudnn.enabled = False
        yield
    finally:
        cudnn.enabled = enabled
        back()


# Which precision each backend takes for each kind of operation; "all" stands in for the kinds that say "none", and
# the generic setting for backends that do.
_PRECISIONS = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn", "all")]
_GENERIC = ("generic", "all")


def snapshot_precision() -> Callable[[], None]:
    """A function that puts torch's precision settings back, old and new ones, in whatever order they were set.

    The new settings (torch 2.9, ``fp32_precision``) show what is in force, not what was set, and the old ones
    (``allow_tf32``, ``set_float32_matmul_precision``) cannot be read where the new ones say something else. So what was
    set is read from the outermost setting inward, each setting out of the way of the next.
    """
    kept: dict[tuple[str, str], str] = {}
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        for key in [_GENERIC, *reversed(_PRECISIONS)]:
            kept[key] = torch._C._get_fp32_precision_getter(*key)
            torch._C._set_fp32_precision_setter(*key, "none")
    products = torch.get_float32_matmul_precision()
    try:
        allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # it is set, and the new settings, which are out of the way, say that it is not
        allowed = True

    def restore_precision() -> None:
        # Each of these writes to new settings, too.
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = allowed
        for key, value in kept.items():
            torch._C._set_fp32_precision_setter(*key, value)

    restore_precision()
    return restore_precision


def set_precision(products: str) -> None:
    """Set all of torch's precision settings: ``"highest"`` for all digits of float32, ``"high"`` for TF32."""
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = products != "highest"
    if hasattr(torch._C, "_set_fp32_precision_setter"):
        for backend, kind in _PRECISIONS:
            if products == "highest" or backend == "cuda":
                torch._C._set_fp32_precision_setter(backend, kind, "ieee" if products == "highest" else "tf32")


@contextmanager
def remove_accelerate_autocast(model: nn.Module) -> Iterator[None]:
    """The model without the autocast that Accelerate puts around its forward pass: curvature needs all the digits."""
    with ExitStack() as stack:
        for held in map(vars, model.modules()):
            wrapped = held.get("forward")
            # Others keep an original forward, too, for reasons of their own.
            if type(getattr(wrapped, "__wrapped__", None)).__name__ == "ConvertOutputsToFp32":
                stack.callback(held.__setitem__, "forward", wrapped)
                held["forward"] = held["_original_forward"]
        yield


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Run checkpointed functions as if they were not: ``torch.utils.checkpoint`` in either of its kinds.

    The backward pass would run them again, when the model has its own parameters back, and take what that saves for
    what the forward pass saved: by position, so that tensors of the same shape are mistaken for each other.
    """

    class PlainFunction:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args)

    instead = {"CheckpointFunction": PlainFunction, "_checkpoint_hook": lambda frame: nullcontext()}
    with ExitStack() as stack:
        for name, value in instead.items():
            if hasattr(checkpoint, name):
                stack.callback(setattr, checkpoint, name, getattr(checkpoint, name))
                setattr(checkpoint, name, value)
        yield


def _check_no_transforms() -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise OptionError(
            "Expected a call outside, but got a call inside of a torch.func transform (vmap, grad, vjp, jvp). "
            "Measuring differentiates the model itself. Try calling it before or after, once per model."
        )


def check_module(model: Any) -> None:
    """Refuse what is no module, or only holds the one that is meant."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Expected a torch.nn.Module, but got a model of type {type(model).__name__}. Try wrapping the function "
            "in one."
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(
            f"Expected the model inside of it, but got a {type(model).__name__}. Try passing model.module."
        )


def check_tensors(model: nn.Module, buffers: bool = True) -> None:
    """Refuse modules whose tensors cannot be swapped or moved: TorchScript's, and all but dense ones with values.

    Args:
        model: any module.
        buffers: whether its buffers are looked at, too; training leaves them to the model.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"a TorchScript module as {name!r}" if name else "a TorchScript model"
            raise ModelError(f"Expected an ordinary module, but got {which}. Try passing the model it was made from.")
    for name, value in [*model.named_parameters(), *(model.named_buffers() if buffers else ())]:
        if isinstance(value, UninitializedParameter | UninitializedBuffer):
            raise ModelError(
                f"Expected initialised layers, but got {name!r} without a shape yet. Try running a batch through the "
                "model."
            )
        kind = find_unsupported_kind(value)
        if kind == "meta":
            raise DeviceError(
                f"Expected a model that can be run, on cpu or a GPU, but got {name!r} on the meta device, without "
                "values. Try loading its weights first."
            )
        if kind is not None:
            raise ModelError(
                f"Expected parameters and buffers that are dense tensors, but got {name!r}, a {kind} tensor. "
                "Try keeping a dense one in its place, with to_dense() or to_padded_tensor()."
            )


def _find_generators(data: Any) -> list[torch.Generator]:
    """Random generators that reading the data would move on."""
    holders = [data, getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None)]
    found = {id(g): g for g in (getattr(h, "generator", None) for h in holders) if isinstance(g, torch.Generator)}
    return list(found.values())
