"""Find the operations that the outputs of a forward pass depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from saltflat.symmetry.tracing.scales import NO_STORAGE, get_storage_address


class OperationRecorder(TorchDispatchMode):
    """Records the name of every operation and the memory it reads and writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._read: list[set[int]] = []
        self._written: list[set[int]] = []
        # References keep memory addresses from being reused.
        self._tensors: list[Tensor] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        self._read.append(self._collect_storage(tree_leaves((args, kwargs))))
        self._written.append(self._collect_storage(tree_leaves(out)))
        return out

    def _collect_storage(self, leaves: Iterable[Any]) -> set[int]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._tensors += tensors
        return set(map(get_storage_address, tensors))

    def find_live(self, outputs: Sequence[Tensor]) -> list[bool]:
        """Return for each operation whether the outputs depend on the memory it writes.

        Operations that return no tensor count as live: their results may control the forward pass.
        """
        needed = {NO_STORAGE, *map(get_storage_address, outputs)}
        found = []
        for read, written in zip(reversed(self._read), reversed(self._written), strict=True):
            reaches = not written or not needed.isdisjoint(written)
            needed |= read if reaches else set()
            found.append(reaches)
        return found[::-1]


class DeadOperationPerturber(TorchDispatchMode):
    """Perturbs the results of operations that the outputs supposedly do not depend on."""

    def __init__(self, operations: Sequence[tuple[str, bool]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = iter(operations)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name, reaches = next(self._operations, ("", True))
        if name == str(func) and not reaches:
            given = {get_storage_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for leaf in tree_leaves(out):
                # Views share the memory of parameters, which must not change.
                if (
                    isinstance(leaf, Tensor)
                    and leaf.is_floating_point()
                    and get_storage_address(leaf) not in {NO_STORAGE, *given}
                ):
                    leaf.mul_(1.5).add_(0.1)
        return out


def find_live_operations(
    prepare: Callable[[], Callable[[], Any]], select_outputs: Callable[[Any], Sequence[Tensor]]
) -> list[tuple[str, bool]]:
    """Return, for each operation of a forward pass, its name and whether the outputs depend on it.

    If perturbing the seemingly unused results changes an output, values pass outside of torch (numpy, lists) and all
    operations count as live.

    Args:
        prepare: prepares a forward pass and returns a function that runs it.
        select_outputs: selects the output tensors to consider.

    Example:
        >>> x = torch.ones(2)
        >>> def forward():
        ...     x.exp()  # unused
        ...     return x.neg()
        >>> find_live_operations(lambda: forward, lambda out: [out])
        [('aten.exp.default', False), ('aten.neg.default', True)]
    """
    forward, recording = prepare(), OperationRecorder()
    with torch.random.fork_rng(devices=[]), recording:
        outputs = select_outputs(forward())
    found = list(zip(recording.names, recording.find_live(outputs), strict=True))
    if all(reaches for _, reaches in found):
        return found
    forward = prepare()
    with torch.random.fork_rng(devices=[]), DeadOperationPerturber(found):
        again = select_outputs(forward())
    same = len(outputs) == len(again) and all(map(_is_equal_or_nan, outputs, again))
    return found if same else [(name, True) for name, _ in found]


def _is_equal_or_nan(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and bool(((one == two) | (one.isnan() & two.isnan())).all())
