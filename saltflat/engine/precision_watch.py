"""The precision watch: notices where the passes of a model in float64 round numbers to lower precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDE = (torch.float64, torch.complex128)
TORCH = ("aten", "prims", "prim")
UNROUNDED = {*WIDE, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def is_whole(value: Tensor) -> bool:
    """Return whether a tensor holds integers or truth values."""
    return not (value.is_floating_point() or value.is_complex())


class PrecisionWatch:
    """Notices where forward or backward passes round numbers in float64 to lower precision.

    Constants of lower precision (a mask, positions) are allowed: they belong to the function, and round nothing that
    depends on weights or inputs. Numbers may also leave torch, for NumPy or Python, and come back rounded; and the
    results of other libraries' operations show whether these compute in float32.

    Attributes:
        loss: the first loss of precision, in words; empty if there was none.
    """

    def __init__(self) -> None:
        self.loss = ""
        self.left = False  # whether numbers have left torch

    @contextmanager
    def look(self) -> Iterator[None]:
        """Watch the passes inside."""
        self.left = False
        with ExitStack() as stack:
            stack.enter_context(_ExitMode(self))
            stack.enter_context(_ResultMode(self))
            yield

    def inspect_call(self, func: OpOverload[..., Any], arguments: Sequence[Any], results: Sequence[Any]) -> None:
        """Look at the arguments and results of an operation."""
        if self.loss:
            return
        numbers = [each for each in results if isinstance(each, Tensor) and not is_whole(each)]
        narrow = [each for each in numbers if each.dtype not in WIDE]
        name = func.overloadpacket.__name__
        if func is torch.ops.aten.lift_fresh.default:
            if self.left and (narrow or any(map(_is_rounded, numbers))):
                self.loss = "numbers that NumPy or Python computed are rounded to it"
            return
        if narrow and not name.endswith("_like") and not name.startswith("new_"):
            kind = next((each.dtype for each in _select_wide(arguments)), None)
            if kind is not None:
                self.loss = f"{name} makes {_format_dtype(narrow[0].dtype)} of {_format_dtype(kind)}"
            return
        foreign = func.namespace not in TORCH and any(map(_is_rounded, numbers))
        if foreign and not all(map(_is_rounded, _select_wide(arguments))):
            self.loss = f"{func.namespace}::{name} gives numbers of it"


@cache
def _belongs_to_torch(func: OpOverload[..., Any]) -> bool:
    """Return whether an operation is torch's own, and does not bring numbers from outside."""
    return func.namespace in TORCH and func is not torch.ops.aten.lift_fresh.default


def _is_harmless(func: OpOverload[..., Any], result: Any) -> bool:
    """Return whether an operation of torch returns numbers that are not rounded, as almost all do."""
    if result is None or not _belongs_to_torch(func):
        return False
    values = result if isinstance(result, tuple | list) else (result,)
    return all(each is None or (isinstance(each, Tensor) and each.dtype in UNROUNDED) for each in values)


class _ResultMode(TorchDispatchMode):
    def __init__(self, watch: PrecisionWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # of other modes, which take longer than looking at a result
            if _is_harmless(func, result):
                return result
        # Some operations return nothing, but write to their arguments.
        given = tree_leaves((args, kwargs))
        self.watch.inspect_call(func, given, given if result is None else tree_leaves(result))
        return result


class _ExitMode(TorchFunctionMode):
    EXITS = (Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.item, Tensor.__float__)

    def __init__(self, watch: PrecisionWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in self.EXITS and args[0].dtype in WIDE:
            self.watch.left = True
        return func(*args, **(kwargs or {}))


def _select_wide(values: Sequence[Any]) -> list[Tensor]:
    return [each for each in values if isinstance(each, Tensor) and each.dtype in WIDE]


def _is_rounded(values: Tensor) -> bool:
    """Return whether numbers in float64 have the digits of float32, and more than those of bfloat16.

    Few digits are no sign of rounding: signs, masks and counts have them, too.
    """
    if values.dtype != torch.float64 or values.layout != torch.strided:
        return False
    values = values.detach()
    return bool((values == values.float().double()).all()) and bool((values != values.bfloat16().double()).any())


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
