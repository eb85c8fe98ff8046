"""Which operations of a forward pass its outputs depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from saltflat.symmetry.tracing.scales import NOWHERE, get_storage_address


class OperationRecorder(TorchDispatchMode):
    """While it is entered, the name of every operation, and the memory it reads and writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._read: list[set[int]] = []
        self._written: list[set[int]] = []
        # Kept, so that no other tensor takes the place of one that is gone.
        self._tensors: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        self._read.append(self._collect_storage((args, kwargs)))
        self._written.append(self._collect_storage(out))
        return out

    def _collect_storage(self, tree: Any) -> set[int]:
        tensors = [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
        self._tensors += tensors
        return set(map(get_storage_address, tensors))

    def find_live(self, outputs: Sequence[Tensor]) -> list[bool]:
        """Whether each operation has a part in the outputs, by the memory it writes to.

        Operations that give no tensor count: what they give may decide how the forward pass goes on.
        """
        needed = {NOWHERE, *map(get_storage_address, outputs)}
        found = []
        for read, written in zip(reversed(self._read), reversed(self._written), strict=True):
            reaches = not written or not needed.isdisjoint(written)
            needed |= read if reaches else set()
            found.append(reaches)
        return found[::-1]


class DeadOperationPerturber(TorchDispatchMode):
    """While it is entered, operations that are said to have no part in the outputs give other numbers."""

    def __init__(self, operations: Sequence[tuple[str, bool]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = iter(operations)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name, reaches = next(self._operations, ("", True))
        if name == str(func) and not reaches:
            given = {get_storage_address(leaf) for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)}
            for leaf in tree_flatten(out)[0]:
                # A view of a parameter is the parameter.
                if (
                    isinstance(leaf, Tensor)
                    and leaf.is_floating_point()
                    and get_storage_address(leaf) not in {NOWHERE, *given}
                ):
                    leaf.mul_(1.5).add_(0.1)
        return out


def find_live_operations(
    run: Callable[[], Callable[[], Any]], seen: Callable[[Any], Sequence[Tensor]]
) -> list[tuple[str, bool]]:
    """Return, for each operation of a forward pass, its name and whether the outputs depend on it.

    All do if an output changes with what an operation gives that seems to have no part in it: then values take a way
    outside of torch.

    Args:
        run: prepares a forward pass, and gives the pass itself.
        seen: which of its outputs are looked at.

    Example:
        >>> x = torch.ones(2)
        >>> def forward():
        ...     x.exp()  # to no purpose
        ...     return x.neg()
        >>> find_live_operations(lambda: forward, lambda found: [found])
        [('aten.exp.default', False), ('aten.neg.default', True)]
    """
    forward, recording = run(), OperationRecorder()
    with torch.random.fork_rng(devices=[]), recording:
        outputs = seen(forward())
    found = list(zip(recording.names, recording.find_live(outputs), strict=True))
    if all(reaches for _, reaches in found):
        return found
    forward = run()
    with torch.random.fork_rng(devices=[]), DeadOperationPerturber(found):
        again = seen(forward())
    same = len(outputs) == len(again) and all(map(_is_equal_or_nan, outputs, again))
    return found if same else [(name, True) for name, _ in found]


def _is_equal_or_nan(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and bool(((one == two) | (one.isnan() & two.isnan())).all())
