"""Plain tensors and containers on modules: restored after forward passes that write to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What every module has: parameters, buffers, submodules and hooks, which others take care of.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

# Containers with more entries are compared by their length between passes, and entry by entry only at the end.
FEW = 64

Container = list[Any] | dict[Any, Any] | set[Any] | deque[Any]


class AttributeSnapshot:
    """The lists, dicts, sets, arrays and tensors that modules hold beside their parameters and buffers.

    A forward pass may append to a list or write into a tensor. Attributes that are bound anew need nothing of this:
    whoever runs the module keeps its ``vars``.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._registered = {
            id(value): value
            for module in modules
            for value in (*module._parameters.values(), *module._buffers.values())
            if value is not None
        }
        self._containers: list[tuple[Container, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor, list[int]]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._aliases: list[Container] = []
        self._seen: set[int] = set()
        for module in modules:
            own = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
            if any(id(value) in self._registered for value in own.values()):
                self._aliases.append(vars(module))
            for value in own.values():
                self._visit_value(value)

    def _visit_value(self, value: Any) -> None:
        if id(value) in self._seen or id(value) in self._registered:
            return
        if isinstance(value, Tensor):
            if value.layout == torch.strided and value.device.type != "meta" and not value.is_nested:
                self._seen.add(id(value))
                self._tensors.append((value, value.detach().clone(), [get_tensor_version(value)]))
        elif isinstance(value, np.ndarray):
            self._seen.add(id(value))
            self._arrays.append((value, value.copy()))
        elif isinstance(value, list | dict | set | deque | tuple):
            self._seen.add(id(value))
            entries = list(value.values()) if isinstance(value, dict) else list(value)
            if not isinstance(value, tuple):
                self._containers.append((value, _copy_container(value)))
                if not isinstance(value, set) and any(id(entry) in self._registered for entry in entries):
                    self._aliases.append(value)
            for entry in entries:
                self._visit_value(entry)
        elif isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
            self._visit_value(getattr(value, "__dict__", None))

    def replace_aliases(self, values: Mapping[int, Tensor]) -> None:
        """Put other tensors in the place of parameters that are held by an attribute or a container as well."""
        for container in self._aliases:
            keys = container.keys() if isinstance(container, dict) else range(len(container))
            for key in list(keys):
                if id(container[key]) in values:  # type: ignore[index]
                    container[key] = values[id(container[key])]  # type: ignore[index]

    def restore_aliases(self) -> None:
        """Undo :meth:`replace_aliases` in containers; a module's are put back with all of its attributes."""
        kept = {id(container): copy for container, copy in self._containers}
        for container in self._aliases:
            if id(container) in kept:
                _refill_container(container, kept[id(container)])

    def restore(self, thorough: bool = False) -> None:
        """Give everything its contents again; ``thorough`` also finds writes that leave no trace."""
        for container, copy in self._containers:
            if len(container) != len(copy) or (
                (thorough or len(copy) <= FEW) and not _has_same_entries(container, copy)
            ):
                _refill_container(container, copy)
        for tensor, copy, version in self._tensors:
            if (
                get_tensor_version(tensor) != version[0]
                or tensor.shape != copy.shape
                or (thorough and not _is_same_tensor(tensor, copy))
            ):
                _write_tensor(tensor, copy)
                version[0] = get_tensor_version(tensor)
        if thorough:
            for array, saved in self._arrays:
                np.copyto(array, saved)


def get_tensor_version(tensor: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count that."""
    return -1 if tensor.is_inference() else tensor._version


def _is_same_tensor(tensor: Tensor, copy: Tensor) -> bool:
    return bool(((tensor == copy) | (copy != copy)).all())


def _write_tensor(tensor: Tensor, copy: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape != copy.shape:
            tensor.data = copy.clone()
        else:
            tensor.detach().copy_(copy)


def _copy_container(container: Container) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _has_same_entries(container: Container, copy: Any) -> bool:
    def is_identical(one: Iterable[Any], two: Iterable[Any]) -> bool:
        return all(a is b for a, b in zip(one, two, strict=True))

    if isinstance(container, dict):
        return is_identical(container, copy) and is_identical(container.values(), copy.values())
    if isinstance(container, set):
        return all(entry in container for entry in copy)
    return is_identical(container, copy)


def _refill_container(container: Container, copy: Any) -> None:
    add: Callable[[Any], Any] = container.extend if isinstance(container, list | deque) else container.update
    container.clear()
    add(copy)
