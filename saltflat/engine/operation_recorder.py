"""Record the operations of a forward pass: which of them depend on values, and a digest of all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from saltflat.engine.data import Batch
from saltflat.engine.network import Network

COPIES = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
aten = torch.ops.aten
SELECTIONS = (aten.where, aten.masked_fill, aten.masked_fill_)  # which choose for every entry by itself
RUNNING = ("running_mean", "running_var")  # buffers that training changes


class OperationRecorder(TorchDispatchMode):
    """Records operations that may treat the examples of a batch differently depending on their values.

    Args:
        names: names of parameters and buffers by their ids; without them, no digests are made.
        settings: the ids of buffers that training does not change, whose values are part of a digest.
        inputs: the ids of the examples.

    Attributes:
        sizes: whether there are results whose size depends on values (masks, experts).
        order: whether numbers are read from tensors, other than truth values.
        sorts: whether values are sorted.
        compares: whether whole numbers and truth values found by comparing values have an effect on others, other than
            on single entries.
        reads: whether values, truth values included, are read from tensors that depend on parameters or buffers;
            without names, from any tensor.
        coarsest: the shortest floating-point type among all results.
        bytes: of all results.
    """

    def __init__(
        self,
        names: Mapping[int, str] | None = None,
        settings: Collection[int] = frozenset(),
        inputs: Collection[int] = frozenset(),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = self.order = self.sorts = self.compares = self.reads = False
        self.coarsest, self.bytes = torch.float64, 0
        self._names, self._settings, self._inputs = names, settings, inputs
        self._operations, self._indices = blake2b(digest_size=16), blake2b(digest_size=16)
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._met = 0
        self._weighted = WeakIdKeyDictionary()  # tensors that depend on parameters or buffers
        self._varying = WeakIdKeyDictionary()  # tensors that depend on these or on the examples
        self._chosen = WeakIdKeyDictionary()  # whole numbers and truth values that are found by comparing
        self._copies = _CopyWatcher(self)

    def __enter__(self) -> OperationRecorder:
        self._copies.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._copies.__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def make_for(cls, network: Network, batch: Batch) -> OperationRecorder:
        """Return a recorder that makes digests of passes of a network over a batch."""
        parameters = {name for name, _ in network.model.named_parameters(remove_duplicate=False)}
        settings = {
            id(value)
            for name, value in network.constants.items()
            if name not in parameters and not name.endswith(RUNNING)
        }
        names = {id(value): name for name, value in network.constants.items()}
        return cls(names, settings, {id(tensor) for tensor in batch.list_tensors()})

    @property
    def may_reorder(self) -> bool:
        """Return whether the model may reorder its examples by their values."""
        return self.sorts or self.compares

    @property
    def operations(self) -> str:
        """Return a digest of all operations: what they compute, from which tensors, with which other arguments.

        It does not depend on the numbers in the tensors.
        """
        return self._operations.hexdigest()

    @property
    def indices(self) -> str:
        """Return a digest of the whole numbers and truth values that operations take from tensors, such as tokens.

        It has the numbers in buffers and in other tensors of the model's own, too, unless training changes them.
        """
        return self._indices.hexdigest()

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leaves = tree_flatten((args, sorted((kwargs or {}).items())))[0]
        is_weighted = any(isinstance(each, Tensor) and self._is_weighted(each) for each in leaves)
        if torch.Tag.dynamic_output_shape in func.tags:
            # Indexing by integers gives a result of the index's size.
            masks = func is not aten.index.Tensor or any(i is not None and i.dtype == torch.bool for i in args[1])
            self.sizes |= masks
        elif func is aten._local_scalar_dense.default:
            self.reads |= is_weighted
            self.order |= args[0].dtype != torch.bool
        elif func.overloadpacket in (aten.sort, aten.argsort, aten.topk):
            self.sorts = True
        if self._names is not None:
            self._add_operands(func, leaves)
        result = func(*args, **(kwargs or {}))
        results = list(result) if isinstance(result, tuple | list) else [result]
        written = [*results, *(leaves if func._schema.is_mutable else ())]
        if self._names is not None:
            if is_weighted:
                _mark(self._weighted, written)
            if any(isinstance(each, Tensor) and self.is_varying(each) for each in leaves):
                _mark(self._varying, written)
            self._follow_choices(func, [each for each in leaves if isinstance(each, Tensor)], results)
        for each in results:
            if isinstance(each, Tensor):
                self.bytes += each.numel() * each.element_size()
                if each.is_floating_point() and torch.finfo(each.dtype).bits < torch.finfo(self.coarsest).bits:
                    self.coarsest = each.dtype
                if self._names is not None:
                    self._operations.update(self._describe_tensor(each).encode())
        return result

    def _is_weighted(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or a buffer, or depends on one; without names, that is assumed."""
        return self._names is None or _is_derived(tensor, self._names, self._weighted)

    def is_varying(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the examples, parameters or buffers; without names, that is assumed."""
        return self._is_weighted(tensor) or _is_derived(tensor, self._inputs, self._varying)

    def _follow_choices(
        self, func: OpOverload[..., Any], operands: Sequence[Tensor], results: Sequence[object]
    ) -> None:
        """Note whether an operation compares numbers, or uses what was found by comparing."""
        chosen = any(not _is_fractional(each) and _is_derived(each, (), self._chosen) for each in operands)
        if not chosen and not any(_is_fractional(each) and self.is_varying(each) for each in operands):
            return
        for each in results:
            if isinstance(each, Tensor) and not _is_fractional(each):
                _mark(self._chosen, [each])
            elif chosen and func.overloadpacket not in SELECTIONS:
                self.compares = True

    def _add_operands(self, func: OpOverload[..., Any], leaves: Sequence[Any]) -> None:
        own = [each for each in leaves if isinstance(each, Tensor) and self._is_setting(each)]
        described = [self._describe_tensor(each) if isinstance(each, Tensor) else repr(each) for each in leaves]
        self._operations.update(f"{func}({', '.join(described)})".encode())
        whole = [each for each in leaves if isinstance(each, Tensor) and not _is_fractional(each)]
        for each in [*whole, *own]:
            try:
                self._indices.update(each.detach().cpu().contiguous().numpy().tobytes())
            except (RuntimeError, TypeError, NotImplementedError):  # of a type that NumPy does not have
                self.reads = True

    def _is_setting(self, tensor: Tensor) -> bool:
        """Return whether a tensor is neither an example nor a weight, and was not computed in this pass."""
        assert self._names is not None
        if not _is_fractional(tensor):
            return False
        if id(tensor) in self._names:
            return id(tensor) in self._settings
        known = self._numbers.get(id(tensor))
        return id(tensor) not in self._inputs and (known is None or known[0]() is not tensor)

    def _describe_tensor(self, tensor: Tensor) -> str:
        """Return the name or number of a tensor, and what can be known of it without its numbers."""
        assert self._names is not None
        name = self._names.get(id(tensor))
        if name is None:
            known = self._numbers.get(id(tensor))
            if known is None or known[0]() is not tensor:  # an id is used again when its tensor is gone
                self._met += 1
                known = self._numbers[id(tensor)] = weakref.ref(tensor), self._met
            name = str(known[1])
        return f"{name}:{tuple(tensor.shape)}:{tensor.stride()}:{tensor.dtype}:{tensor.device}"


class _CopyWatcher(TorchFunctionMode):
    """Notices tensors that are copied to Python or NumPy as a whole, which no kernel does."""

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in COPIES and self.recorder.is_varying(args[0]):
            self.recorder.order = self.recorder.reads = True
        return func(*args, **(kwargs or {}))


def _is_derived(tensor: Tensor, sources: Collection[int], known: WeakIdKeyDictionary) -> bool:
    """Return whether a tensor, or the one it is a view of, is among sources, given by their ids, or known tensors."""
    own = [tensor] if tensor._base is None else [tensor, tensor._base]
    return any(id(each) in sources or each in known for each in own)


def _mark(known: WeakIdKeyDictionary, values: Sequence[object]) -> None:
    """Add tensors, and those that they are views of."""
    for each in values:
        if isinstance(each, Tensor):
            known[each] = True
            if each._base is not None:
                known[each._base] = True


def _is_fractional(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
