"""Inner products between the gradients of single examples, from their factors where possible.

Eigenvalues of a Gram matrix range over many orders of magnitude, and those below the rounding of the gradients times
the largest are rounding alone. In float32 these may be half of them, so the gradients are taken in float64 whatever the
precision of the model: see :func:`use_float64`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from saltflat.engine.context import Context
from saltflat.engine.data import Batch
from saltflat.engine.network import Network
from saltflat.engine.per_example import Emit
from saltflat.engine.statistic import Statistic
from saltflat.engine.strategy import Probe
from saltflat.engine.sweep import Sweep
from saltflat.errors import ModelError, NonFiniteError, NotDefinedError, SaltflatError, format_error_line
from saltflat.gradients.base import ColumnLayout, DenseGradient, FactoredGradient, use_scratch

Forms = Mapping[str, FactoredGradient]
_GRADIENT = Statistic(
    "gradient", of="gradient", total=lambda form, site: form.to_dense(), spread=None, meaning="gradients"
)
WIDE = (torch.float64, torch.complex128)


@contextmanager
def use_float64(context: Context) -> Iterator[Context]:
    """Yield the context with a copy of the model in float64, or the context itself if the model is in float64.

    Integer inputs and the user's model are left alone. The copy is probed anew: how much memory its examples need, and
    which differences are rounding, depends on the precision, which integer inputs do not show.

    Raises:
        NotDefinedError: if the model does not run in float64.
    """
    network = context.problem.network
    if _is_float64(network):
        yield context
        return
    examples, share, loss = context.examples, context.mean_share, context.mean_loss
    try:
        wide = Context(
            context.problem.to_float64(),
            context.plan,
            context.seed,
            context.limit,
            tick=context.tick,
            processes=context.processes,
        )
        wide.store_counts(examples, share * examples, loss * share * examples)
        yield wide
    except (ModelError, NonFiniteError) as error:
        raise _make_float64_error(error) from error
    except (SaltflatError, Warning, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # The model ran in its own precision, whatever it raises in this one. Errors of the user's progress are not its.
        if error is getattr(context.tick, "error", None):
            raise
        raise _make_float64_error(error) from error
    finally:
        # Passes of the copy may have written to lists and arrays of the modules.
        network.attributes.restore(thorough=True)


def _is_float64(network: Network) -> bool:
    return all(value.dtype in WIDE for value in network.constants.values() if not _is_whole(value))


def _is_whole(value: Tensor) -> bool:
    """Return whether a tensor holds integers or truth values."""
    return not (value.is_floating_point() or value.is_complex())


def _make_float64_error(error: Exception) -> NotDefinedError:
    # What torch said is shorter than what this package makes of it.
    return NotDefinedError(
        f"needs gradients in float64, and this model does not run in it: {format_error_line(error.__cause__ or error)}"
    )


def compute_gram_matrix(context: Context, chosen: Tensor) -> Tensor:
    """Return the inner products between the gradients of the chosen examples' losses, ``(P, P)``, in float64.

    The gradients of as many examples as fit in memory are kept at a time, and multiplied with those of the others. This
    takes one sweep over the chosen examples if all fit.

    Args:
        context: the problem and the conditions.
        chosen: sorted numbers of examples.
    """
    result, start = torch.zeros(len(chosen), len(chosen), dtype=torch.float64), 0
    with use_scratch():
        while start < len(chosen):
            start = _fill_window(context, chosen, start, result)
    # Only the upper triangle was filled.
    return result.triu() + result.triu(1).mT


def iterate_gradients(context: Context) -> Iterator[Tensor]:
    """Yield the gradients of this process's examples over all parameters, ``(examples, parameters)``, in float64."""
    keeper = _GradientKeeper(context)
    keeper.written = dict.fromkeys(keeper.sites, True)
    with use_scratch():
        for batch in context.read_own_batches():
            for _, forms in keeper.collect_gradients(batch):
                if forms:
                    yield forms[""].to_dense()[0].double().cpu() / context.mean_share


def _fill_window(context: Context, chosen: Tensor, start: int, result: Tensor) -> int:
    """Fill the rows of the examples kept from ``start`` on; return where they end."""
    kept: list[tuple[int, Forms]] = []
    room, end = context.limit // 4, len(chosen)
    with context.reserve(3 * room):
        keeper = _GradientKeeper(context)
    for batch in _select_batches(context, chosen, start):
        for first, forms in keeper.collect_gradients(batch):
            count = next(iter(forms.values())).examples if forms else 0
            if first < end:
                room -= sum(sum(form.count_bytes()) * form.examples for form in forms.values())
                kept.append((first, forms))
                if room < 0:
                    end = first + count
            for row, before in kept:
                for name in before.keys() & forms.keys():
                    block = before[name].compute_gram(forms[name]).double().cpu()
                    result[row : row + block.shape[0], first : first + block.shape[1]] += block
        context.tick("Gradients of single examples", min(batch.first + batch.examples, len(chosen)), len(chosen))
    result[start:end] /= context.mean_share**2
    return end


def _select_batches(context: Context, chosen: Tensor, start: int) -> Iterator[Batch]:
    """Yield the chosen examples from number ``start`` of them on, numbered among themselves."""
    for batch in context.problem.read_batches():
        here = (chosen >= batch.first) & (chosen < batch.first + batch.examples)
        which = torch.nonzero(here)[:, 0]
        which = which[which >= start]
        if len(which):
            yield batch.take(chosen[which] - batch.first, int(which[0]))


class _GradientKeeper(Sweep):
    """Keeps the gradients of single examples instead of summing statistics of them.

    Those that need less memory written out than in factors are concatenated to one array, for a single product.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context, [_GRADIENT])
        self.found: dict[int, dict[str, FactoredGradient]] = {}
        self.written: dict[str, bool] = {}
        # Gradients in float32 claim no more than that.
        self.watch = PrecisionWatch() if _is_float64(context.problem.network) else None

    def collect_gradients(self, batch: Batch) -> Iterator[tuple[int, Forms]]:
        """Yield the gradients of a batch's chunks, each with the number of its first example."""
        for _ in self.add_batch(batch):
            for first, forms in self.found.items():
                yield first, self._concatenate_dense(forms)
            self.found = {}

    def _add_chunk(self, batch: Batch, found: Probe, strategy: str | None = None) -> None:
        if self.watch is None:
            super()._add_chunk(batch, found, strategy)
            return
        with self.watch.look():
            super()._add_chunk(batch, found, strategy)
        if self.watch.loss:
            raise NotDefinedError(
                "needs gradients in float64, and this model computes in lower precision even if its weights and inputs "
                f"are in float64: {self.watch.loss}"
            )

    def _make_collector(self, kind: str, layout: ColumnLayout, sign: int, batch: Batch, first_draw: int = 0) -> Emit:
        first = batch.first
        self.found[first] = {}

        def emit(name: str, form: FactoredGradient) -> None:
            self.emitted += 1
            smaller = form.shape.numel() * torch.finfo(torch.float64).bits // 8 < sum(form.count_bytes())
            written = self.written.setdefault(name, smaller or isinstance(form, DenseGradient))
            self.found[first][name] = DenseGradient(form.to_dense()) if written else form

        return emit

    def _concatenate_dense(self, forms: Forms) -> Forms:
        if not forms:
            return forms
        some = next(iter(forms.values()))
        # A parameter that no example has used yet gets its place from the beginning.
        for name in self.sites:
            self.written.setdefault(name, True)
        rows = [
            forms[name].to_dense().reshape(1, some.examples, -1)
            if name in forms
            else site.value.new_zeros(1, some.examples, site.value.numel())
            for name, site in self.sites.items()
            if self.written[name]
        ]
        kept = {name: form for name, form in forms.items() if not self.written[name]}
        return {**kept, "": DenseGradient(torch.cat(rows, 2))} if rows else kept


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
        numbers = [each for each in results if isinstance(each, Tensor) and not _is_whole(each)]
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
        foreign = func.namespace not in ("aten", "prims", "prim") and any(map(_is_rounded, numbers))
        if foreign and not all(map(_is_rounded, _select_wide(arguments))):
            self.loss = f"{func.namespace}::{name} gives numbers of it"


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
