"""Follow what depends on the examples through a forward pass, and find where parameters outside of layers meet it.

Such a parameter has one gradient for a whole batch. If it is expanded to a copy for each example before it meets
anything that differs between examples, the gradient of every copy is that of one example. What is computed from
parameters alone before that (rows of a table of relative positions, a reshaped token) is the same for all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from saltflat.engine.data import Batch
from saltflat.engine.per_example import NotBatchableError

T = TypeVar("T")
Operation = Callable[..., Any]

# Rules by the names that functions, methods and operators of torch have in common. They are called with the tracker,
# the operation and its arguments.
# For operations on common values and others that depend on the examples:
COMBINATIONS: dict[str, Operation] = {}
# For operations on common values alone that may make copies for the examples; None where they do not:
EXPANSIONS: dict[str, Operation] = {}

_IN_PLACE = frozenset(f"__i{word}__" for word in ("add", "sub", "mul", "truediv", "pow", "matmul", "and", "or", "xor"))


class UseWatcher(Protocol):
    """What receives the uses of parameters outside of layers."""

    def expand(self, value: Tensor, shape: torch.Size) -> Tensor:
        """Return a value that all examples share as ``shape``, whose first axis counts the examples."""

    def watch_product(self, x: Tensor, weight: Tensor, y: Tensor, is_transposed: bool) -> Tensor:
        """Return ``y``, the product of an input with a matrix that all examples share."""

    def watch_rows(self, index: Tensor, table: Tensor, padding: int | None, y: Tensor) -> Tensor:
        """Return ``y``, rows of a table that all examples share."""

    def watch_operation(self, function: Operation, args: Sequence[Any]) -> Tensor:
        """Return the result of an operation that is differentiated for each example on its own."""

    def block(self, values: Sequence[Tensor], reason: str) -> None:
        """Note that the gradients of what these values are computed from need another way."""


class UnsupportedUseError(Exception):
    """Raised if an operation does not allow a copy for each example."""


class ExampleTracker(TorchFunctionMode):
    """Follows the tensors that depend on the examples of a batch.

    Tensors that do not, but require gradients, are *common*: they are computed from parameters alone.
    """

    def __init__(self, batch: Batch, watcher: UseWatcher) -> None:
        super().__init__()
        self.examples, self.watcher = batch.examples, watcher
        self._separate = WeakIdKeyDictionary()
        for leaf in batch.list_tensors():
            if batch.has_example_axis(leaf):
                self.mark(leaf)

    def mark(self, values: object) -> None:
        """Mark tensors as depending on the examples."""
        for value in iterate_tensors(values):
            self._separate[value] = True
            if value._base is not None:
                self._separate[value._base] = True

    def is_separate(self, value: Tensor) -> bool:
        """Return whether a tensor depends on the examples."""
        return value in self._separate or (value._base is not None and value._base in self._separate)

    def is_common(self, value: object) -> bool:
        """Return whether a value is a tensor computed from parameters alone."""
        return isinstance(value, Tensor) and value.requires_grad and not self.is_separate(value)

    def __torch_function__(
        self,
        func: Operation,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(iterate_tensors((args, kwargs)))
        is_separate = any(map(self.is_separate, tensors))
        name = getattr(func, "__name__", "")
        if torch.is_grad_enabled() and any(map(self.is_common, tensors)):
            if is_separate:
                result = self._combine(name, func, args, kwargs)
                self.mark(result)
                if _writes(name):
                    self.mark(args[0])
                return result
            if name in EXPANSIONS:
                expanded = EXPANSIONS[name](self, func, *args, **kwargs)
                if expanded is not None:
                    self.mark(expanded)
                    return expanded
        result = func(*args, **kwargs)
        if name.startswith("new_"):  # of a tensor's type, not of its values
            is_separate = self._has_examples(result)
        elif name in EXPANSIONS:
            is_separate = is_separate or self._has_copies(args[0], result)
        if is_separate:
            self.mark(result)
            if is_separate and _writes(name):
                self.mark(args[0])
            if "out" in kwargs:
                self.mark(kwargs["out"])
        return result

    def expand(self, value: Tensor, rank: int, first: int) -> Tensor:
        """Return a common value with a copy for each example, if its first axis of ``rank`` can count them."""
        shape = (1,) * (rank - value.dim()) + tuple(value.shape)
        if shape[0] != 1 or first % self.examples:
            raise UnsupportedUseError("has no axis for the examples")
        return self.watcher.expand(value, torch.Size((first, *shape[1:])))

    def _has_copies(self, value: Tensor, result: Tensor) -> bool:
        """Return whether a constant was expanded to a copy for each example, such as the positions of tokens."""
        return self._has_examples(result) and (value.dim() < result.dim() or value.shape[0] == 1)

    def _has_examples(self, value: Tensor) -> bool:
        """Return whether the first axis of a constant may count the examples."""
        return value.dim() > 0 and value.shape[0] == self.examples

    def _combine(self, name: str, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on common values and on others that depend on the examples."""
        if "out" in kwargs or (_writes(name) and self.is_common(args[0])):
            raise NotBatchableError(f"{name} writes to what all examples share")
        try:
            if name in COMBINATIONS:
                return COMBINATIONS[name](self, func, *args, **kwargs)
        except UnsupportedUseError:
            pass
        try:
            if _writes(name):
                raise UnsupportedUseError("overwrites a part of its input")
            return self._watch_operation(func, args, kwargs)
        except UnsupportedUseError as error:
            values = [each for each in iterate_tensors((args, kwargs)) if self.is_common(each)]
            self.watcher.block(values, f"used in {name}, which {error}")
            args, kwargs = self.detach_common((args, kwargs))
            return func(*args, **kwargs)

    def _watch_operation(self, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run an operation without a rule, whose arguments have the examples at their first axes."""
        values, spec = tree_flatten((args, kwargs))

        def run(*given: Any) -> Any:
            args, kwargs = tree_unflatten(list(given), spec)
            return func(*args, **kwargs)

        return self.watcher.watch_operation(run, values)

    def detach_common(self, values: T) -> T:
        """Return arguments with constants in place of common values."""
        return tree_map(lambda each: each.detach() if self.is_common(each) else each, values)  # type: ignore[no-any-return]


def _writes(name: str) -> bool:
    """Return whether an operation of this name overwrites its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE
    return name.endswith("_")


def iterate_tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for each in values:
            yield from iterate_tensors(each)
    elif isinstance(values, dict):
        for each in values.values():
            yield from iterate_tensors(each)
