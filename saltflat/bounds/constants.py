"""Numbers in a network that no bound sees: arrays that are neither parameters nor buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEEPEST = 3  # nested containers that are searched for arrays
OUTSIDE = "a tensor from outside of the modules"


def list_hidden_constants(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the names of arrays of real numbers that are neither parameters, nor buffers, nor computed from them.

    These are attributes of modules, and what a forward pass takes from elsewhere: from a closure or a global variable.

    Args:
        model: any module.
        args: an example, the positional inputs.
        kwargs: the named ones.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> list_hidden_constants(net, (torch.zeros(1, 2),), {})
        []
        >>> net.means = [torch.ones(3)]
        >>> list_hidden_constants(net, (torch.zeros(1, 2),), {})
        ['means']
    """
    own = [*model.parameters(), *model.buffers()]
    held = {id(value) for value in own}
    found: dict[str, list[Tensor]] = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            arrays = [each for each in _iter_arrays(value) if id(each) not in held]
            if key not in ("_parameters", "_buffers", "_modules") and arrays:
                found[f"{path}.{key}".removeprefix(".")] = [each for each in arrays if isinstance(each, Tensor)]
    known = [*own, *(each for tensors in found.values() for each in tensors)]
    recorder = _SourceRecorder([*known, *(e for e in tree_leaves((args, dict(kwargs))) if isinstance(e, Tensor))])
    with torch.no_grad(), recorder:
        model(*args, **kwargs)
    return [*found, *[OUTSIDE] * recorder.is_other_used]


def _iter_arrays(value: Any, depth: int = 0) -> Iterator[Tensor | numpy.ndarray[Any, Any]]:
    """Yield arrays of real numbers that were not computed from parameters, in nested containers, too."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and not value.requires_grad:
            yield value
    elif isinstance(value, numpy.ndarray):
        if value.dtype.kind == "f":
            yield value
    elif depth < DEEPEST and isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _iter_arrays(each, depth + 1)


class _SourceRecorder(TorchDispatchMode):
    """Finds whether operations take real numbers that are neither known nor results of operations.

    Args:
        known: tensors whose use is expected.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Storages are kept, so that no other tensor gets the place of one that was freed.
        self._kept = {each.untyped_storage()._cdata: each for each in known}
        self.is_other_used = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs or {})):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in self._kept:
                # A number alone is as good as one in the code.
                self.is_other_used = self.is_other_used or (each.is_floating_point() and each.numel() > 1)
        results = function(*args, **kwargs or {})
        self._kept |= {each.untyped_storage()._cdata: each for each in tree_leaves(results) if isinstance(each, Tensor)}
        return results
