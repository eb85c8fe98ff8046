"""Gradients of the parts of a batch, vectorized or in a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from saltflat.engine.precision import use_full_precision
from saltflat.engine.session import snapshot_rng
from saltflat.errors import ModelError, OptionError, SaltflatError, TrainingError, format_error_line
from saltflat.training.objective import Objective, compute_mean_loss
from saltflat.training.parts import BatchParts, TrainingBatch
from saltflat.training.shift import check_dense, freeze_buffers, move_parameters
from saltflat.validation import is_choice

# One tensor per parameter, by name, without parameters that a pass does not use.
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class PartGradients:
    r"""Compute both gradients of all parts, combined as :math:`\sum_i q_i (c\, g_i + \beta (g_i - g_i'))`.

    Here :math:`g_i` is the gradient of a part at the weights :math:`w`, :math:`g_i'` that at
    :math:`w - \alpha g_i` and :math:`q_i` the part's share of the examples.

    Attributes:
        model: the model to differentiate.
        objective: maps the model and a batch to the mean loss of the batch.
        parameters: the parameters to differentiate, each once.
        alpha: the length of the descent step along each part's own gradient.
        beta: the weight of the differences.
        own: :math:`c`: 1 if the gradients of the parts add up to that of the batch, 0 if it is computed separately.
    """

    model: nn.Module
    objective: Objective
    parameters: Mapping[str, Tensor]
    alpha: float
    beta: float
    own: float

    def compute_whole_gradient(self, batch: TrainingBatch, scale: Tensor | None = None) -> tuple[Tensor, Gradients]:
        """Return the loss of a batch and its gradient (times ``scale``), in one plain pass."""
        with torch.enable_grad():
            loss = compute_mean_loss(self.objective, self.model, batch)
            _check_loss_depends(loss.requires_grad)
            scaled = loss if scale is None else loss * scale
            found = torch.autograd.grad(scaled, list(self.parameters.values()), allow_unused=True)
        used = {name: g for name, g in zip(self.parameters, found, strict=True) if g is not None}
        check_dense(used.values())
        return loss.detach(), used

    def run_loop(self, parts: BatchParts) -> tuple[Tensor, Gradients]:
        """Return the mean loss and the sum of gradients, one part after the other."""
        losses: list[Tensor] = []
        sums: Gradients = {}
        for part, share in parts.iterate_parts():
            back = snapshot_rng()
            loss, first = self.compute_whole_gradient(parts.copy_part(part))
            back()
            steps = torch._foreach_mul(list(first.values()), -self.alpha)
            with move_parameters([self.parameters[name] for name in first], list(steps)):
                _, second = self.compute_whole_gradient(parts.copy_part(part))
            losses.append(loss * share)
            _fill_missing_gradients(first, second)
            self._add_gradients(sums, first, self.own * share)
            self._add_gradients(sums, _subtract_gradients(first, second), self.beta * share)
        return torch.stack(losses).sum(), sums

    def run_vmap(self, parts: BatchParts) -> tuple[Tensor, Gradients]:
        """Return the same with one pass of torch.func for all parts of a size, of which there are at most two."""
        losses: list[Tensor] = []
        sums: Gradients = {}
        here = {name: each.detach() for name, each in self.parameters.items()}
        holder = _ObjectiveModule(self.model, self.objective)
        used: set[str] = set()

        def compute_part_loss(values: Gradients, leaves: list[Tensor]) -> Tensor:
            for name, value in values.items():
                # Called only if a gradient arrives; torch.func itself returns zeros for unused parameters.
                value.register_hook(_make_usage_hook(used, name))
            swapped = {f"model.{name}": value for name, value in values.items()}
            loss: Tensor = functional_call(holder, swapped, (parts.copy_part(parts.replace_tensors(leaves)),))
            return loss

        shared = _vmap_without_fallback(grad_and_value(compute_part_loss), (None, 0))
        stacked = _vmap_without_fallback(grad_and_value(compute_part_loss), (0, 0))
        for leaves, share in parts.iterate_stacks():
            many = len(leaves[0])
            used.clear()
            back, states = snapshot_rng(), _get_random_states()
            first, loss = shared(here, leaves)
            if not all(map(torch.equal, states, _get_random_states())):
                # The memory layout of a layer's outputs differs between stacked and shared weights, and random numbers
                # are drawn in memory order. Both passes must draw the same numbers, so both use stacked weights.
                back()
                copies = {name: each.expand(many, *each.shape).contiguous() for name, each in here.items()}
                first, loss = stacked(copies, leaves)
            _check_loss_depends(bool(used))
            there = {name: torch.add(here[name], g, alpha=-self.alpha).contiguous() for name, g in first.items()}
            back()
            second, _ = stacked(there, leaves)
            losses.append(loss.sum() * share)
            first, second = ({name: g[name] for name in here if name in used} for g in (first, second))
            self._add_gradients(sums, {name: g.sum(0) for name, g in first.items()}, self.own * share)
            self._add_gradients(
                sums, {name: g.sum(0) for name, g in _subtract_gradients(first, second).items()}, self.beta * share
            )
        return torch.stack(losses).sum(), sums

    def _add_gradients(self, sums: Gradients, gradients: Gradients, factor: float) -> None:
        if factor == 0 or not gradients:
            return
        for name in gradients.keys() - sums.keys():
            sums[name] = torch.zeros_like(self.parameters[name])  # the parameter's own layout in memory
        torch._foreach_add_([sums[name] for name in gradients], list(gradients.values()), alpha=factor)


class _ObjectiveModule(nn.Module):
    """The objective as a module, since functional_call only swaps parameters of modules."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: TrainingBatch) -> Tensor:
        """Return the mean loss of a batch."""
        return compute_mean_loss(self.objective, self.model, batch)


def _vmap_without_fallback(function: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """Return a vectorized function that raises an error where torch.func would loop: our own loop is faster."""
    mapped = vmap(function, in_dims=axes, randomness="different")

    def run_vmapped(*args: Any) -> Any:
        allowed = _functorch._is_vmap_fallback_enabled()  # type: ignore[attr-defined]
        _functorch._set_vmap_fallback_enabled(False)  # type: ignore[attr-defined]
        try:
            # Fused attention kernels cannot be vectorized.
            with sdpa_kernel(SDPBackend.MATH):
                return mapped(*args)
        finally:
            _functorch._set_vmap_fallback_enabled(allowed)  # type: ignore[attr-defined]

    return run_vmapped


def _subtract_gradients(first: Gradients, second: Gradients) -> Gradients:
    """Return differences by name, before summation: subtraction of close numbers is exact."""
    return dict(zip(first, torch._foreach_sub(list(first.values()), [second[name] for name in first]), strict=True))


def _fill_missing_gradients(first: Gradients, second: Gradients) -> None:
    """Fill in zeros for parameters that are used at only one of the two points."""
    for name in first.keys() - second.keys():
        second[name] = torch.zeros_like(first[name])
    for name in second.keys() - first.keys():
        first[name] = torch.zeros_like(second[name])


def _make_usage_hook(used: set[str], name: str) -> Callable[[Tensor], None]:
    return lambda _: used.add(name)


def _get_random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _check_loss_depends(depends: bool) -> None:
    if not depends:
        raise ModelError(
            "Expected a loss that depends on the parameters, but got one that does not depend on any parameter that "
            "requires a gradient. Check that the objective uses the model it receives, without detach() or no_grad()."
        )


VECTORIZED_ON = ("cuda",)  # device types; on CPUs the loop is usually faster
MOST_STACKED = 2 << 30  # bytes of gradients of all parts, at two points


PassStrategy: TypeAlias = Literal["auto", "vectorized", "loop"]


def check_strategy(strategy: PassStrategy) -> PassStrategy:
    """Return the strategy if there is one of that name."""
    if not is_choice(strategy, ("auto", "vectorized", "loop")):
        raise OptionError(
            f"Expected 'auto', 'vectorized' or 'loop', but got strategy={strategy!r}. Try leaving it out for 'auto'."
        )
    return strategy


class VmapOrLoop:
    """Compute the gradients of parts vectorized, where that is faster and the model allows it, or in a loop.

    Attributes:
        why_looped: why vectorized passes were abandoned, if they were.
    """

    def __init__(self, strategy: PassStrategy) -> None:
        self.strategy = check_strategy(strategy)
        self.why_looped: str | None = None

    def __call__(self, passes: PartGradients, parts: BatchParts) -> tuple[Tensor, Gradients, bool]:
        """Return the mean loss, the gradients, and whether the model would have written to its buffers."""
        if self.strategy == "loop" or (self.strategy == "auto" and not self._can_vectorize(passes, parts)):
            return _run_isolated(passes, passes.run_loop, parts)
        back = snapshot_rng()
        try:
            return _run_isolated(passes, passes.run_vmap, parts)
        except SaltflatError:
            raise
        except Exception as error:
            why = self._explain_failure(error)
        # Outside of the except block, since the error keeps the memory of the failed pass alive.
        back()
        found = _run_isolated(passes, passes.run_loop, parts)
        self.why_looped = why  # not before: a failure in the loop, too, has another cause
        return found

    def _explain_failure(self, error: Exception) -> str:
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if is_memory and self.strategy == "vectorized":
            raise error
        if is_memory:
            return "The vectorized pass ran out of memory."
        why = f"torch.func does not support this model: {format_error_line(error)}"
        if self.strategy == "vectorized":
            raise TrainingError(
                f"Expected a model that can be vectorized with strategy='vectorized', but got one that cannot: {why}. "
                "Try strategy='loop', which gives the same numbers, or leaving it out."
            ) from error
        return why

    def _can_vectorize(self, passes: PartGradients, parts: BatchParts) -> bool:
        if self.why_looped is not None or any(p.device.type not in VECTORIZED_ON for p in passes.parameters.values()):
            return False
        if any(isinstance(each, nn.RNNBase) for each in passes.model.modules()):
            return False  # torch.func decomposes them, slowly
        size = sum(p.numel() * p.element_size() for p in passes.parameters.values())
        return 2 * min(parts.count, parts.examples) * size <= MOST_STACKED


def _run_isolated(
    passes: PartGradients, run: Callable[[BatchParts], tuple[Tensor, Gradients]], parts: BatchParts
) -> tuple[Tensor, Gradients, bool]:
    """Run in full precision, without changing buffers."""
    with _use_full_precision(passes), freeze_buffers(passes.model):
        before = _get_buffer_versions(passes.model)
        loss, gradients = run(parts)
        return loss, gradients, before != _get_buffer_versions(passes.model)


@contextmanager
def _use_full_precision(passes: PartGradients) -> Iterator[None]:
    with ExitStack() as stack:
        for device in {"cpu", *(p.device.type for p in passes.parameters.values())}:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(use_full_precision(passes.model))
        yield


def _get_buffer_versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return a value that changes whenever a pass writes to a buffer or replaces it."""
    buffers = [b for each in model.modules() for b in each._buffers.values() if b is not None]
    return [(id(each), each._version) for each in buffers]
