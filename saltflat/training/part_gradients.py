"""Gradients of the parts of a batch, vectorized or in a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from saltflat.engine.session import snapshot_rng, use_full_precision
from saltflat.errors import ModelError, OptionError, SaltflatError, TrainingError, format_error_line
from saltflat.training.objective import Objective, compute_mean_loss
from saltflat.training.parts import BatchParts
from saltflat.training.shift import freeze_buffers, move_parameters
from saltflat.validation import is_choice

# One tensor per parameter, by name; parameters that a pass does not use are not among them.
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class PartGradients:
    r"""Both gradients of all parts, put together as :math:`\sum_i q_i (c\, g_i + \beta (g_i - g_i'))`.

    Here :math:`g_i` is the gradient of a part at the weights :math:`w`, :math:`g_i'` that at
    :math:`w - \alpha g_i` and :math:`q_i` the part's share of the examples.

    Attributes:
        parameters: those to take gradients of, each once.
        alpha: how far to go down along each part's own gradient.
        beta: of the differences.
        own: :math:`c`: 1 where the parts' gradients make that of the batch, 0 where it is taken apart.
    """

    model: nn.Module
    objective: Objective
    parameters: Mapping[str, Tensor]
    alpha: float
    beta: float
    own: float

    def compute_whole_gradient(self, batch: Any, scale: Tensor | None = None) -> tuple[Tensor, Gradients]:
        """The loss of a batch and its gradient (times ``scale``), by one plain pass."""
        with torch.enable_grad():
            loss = compute_mean_loss(self.objective, self.model, batch)
            _check_loss_depends(loss.requires_grad)
            scaled = loss if scale is None else loss * scale
            found = torch.autograd.grad(scaled, list(self.parameters.values()), allow_unused=True)
        used = {name: g for name, g in zip(self.parameters, found, strict=True) if g is not None}
        if any(each.layout is not torch.strided for each in used.values()):
            raise TrainingError(
                "Expected dense ones, but got sparse gradients. Try making the embedding with sparse=False, or "
                "training it apart."
            )
        return loss.detach(), used

    def run_loop(self, parts: BatchParts) -> tuple[Tensor, Gradients]:
        """The mean loss and the sum of gradients, one part after the other."""
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
        """The same in one pass of torch.func for all parts of a size, of which there are at most two."""
        losses: list[Tensor] = []
        sums: Gradients = {}
        here = {name: each.detach() for name, each in self.parameters.items()}
        holder = _ObjectiveModule(self.model, self.objective)
        used: set[str] = set()

        def compute_part_loss(values: Gradients, leaves: list[Tensor]) -> Tensor:
            for name, value in values.items():
                # Called only where a gradient arrives; torch.func itself gives zeros for what is not used.
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
                # Stacked weights lay out a layer's outputs otherwise in memory than shared ones do, and random numbers
                # are drawn in the order of memory. Both passes must draw the same, so both take stacked weights.
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
    """The objective as a module, because functional_call swaps the parameters of modules only."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Any) -> Tensor:
        return compute_mean_loss(self.objective, self.model, batch)


def _vmap_without_fallback(function: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """Where torch.func would go through the parts one by one after all, it says so: our own loop is faster."""
    mapped = vmap(function, in_dims=axes, randomness="different")

    def run_vmapped(*args: Any) -> Any:
        allowed = _functorch._is_vmap_fallback_enabled()  # type: ignore[attr-defined]
        _functorch._set_vmap_fallback_enabled(False)  # type: ignore[attr-defined]
        try:
            # The fused attention kernels are among what it cannot take at once.
            with sdpa_kernel(SDPBackend.MATH):
                return mapped(*args)
        finally:
            _functorch._set_vmap_fallback_enabled(allowed)  # type: ignore[attr-defined]

    return run_vmapped


def _subtract_gradients(first: Gradients, second: Gradients) -> Gradients:
    """Differences by name, taken before anything is summed: between neighbours subtraction is exact."""
    return dict(zip(first, torch._foreach_sub(list(first.values()), [second[name] for name in first]), strict=True))


def _fill_missing_gradients(first: Gradients, second: Gradients) -> None:
    """A parameter that is used at one of the two points only has a gradient of zero at the other."""
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
            "Expected one that does, but got a loss that does not depend on any parameter that requires a gradient. "
            "Check that the objective uses the model it is given, without detach() or no_grad()."
        )


VECTORISED_ON = ("cuda",)  # kinds of devices; on CPUs the loop is mostly faster
MOST_STACKED = 2 << 30  # bytes of gradients of all parts, at two points


class VmapOrLoop:
    """Vectorised where that is faster and the model allows it, else in a loop.

    Attributes:
        why_looped: why vectorised passes were given up, if they were.
    """

    def __init__(self, way: str) -> None:
        if not is_choice(way, ("auto", "vectorised", "loop")):
            raise OptionError(
                f"Expected 'auto', 'vectorised' or 'loop', but got way={way!r}. Try leaving it out for 'auto'."
            )
        self.way = way
        self.why_looped: str | None = None

    def __call__(self, passes: PartGradients, parts: BatchParts) -> tuple[Tensor, Gradients, bool]:
        """The mean loss, the gradients, and whether the model would have written to its buffers."""
        if self.way == "loop" or (self.way == "auto" and not self._can_vectorise(passes, parts)):
            return _run_isolated(passes, passes.run_loop, parts)
        back = snapshot_rng()
        try:
            return _run_isolated(passes, passes.run_vmap, parts)
        except SaltflatError:
            raise
        except Exception as error:
            why = self._explain_failure(error)
        # Out here, because the error held on to the memory of the pass that failed.
        back()
        found = _run_isolated(passes, passes.run_loop, parts)
        self.why_looped = why  # only now: what fails in the loop, too, says nothing about the way
        return found

    def _explain_failure(self, error: Exception) -> str:
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if is_memory and self.way == "vectorised":
            raise error
        if is_memory:
            return "The vectorised pass ran out of memory."
        why = f"torch.func does not take this model: {format_error_line(error)}"
        if self.way == "vectorised":
            raise TrainingError(
                f"Expected a model that it takes, but got way='vectorised', but {why}. Try leaving out way, or "
                "passing way='loop'; the numbers are the same."
            ) from error
        return why

    def _can_vectorise(self, passes: PartGradients, parts: BatchParts) -> bool:
        if self.why_looped is not None or any(p.device.type not in VECTORISED_ON for p in passes.parameters.values()):
            return False
        if any(isinstance(each, nn.RNNBase) for each in passes.model.modules()):
            return False  # torch.func takes them apart, slowly
        size = sum(p.numel() * p.element_size() for p in passes.parameters.values())
        return 2 * min(parts.count, parts.examples) * size <= MOST_STACKED


def _run_isolated(
    passes: PartGradients, run: Callable[[BatchParts], tuple[Tensor, Gradients]], parts: BatchParts
) -> tuple[Tensor, Gradients, bool]:
    """With all digits and without a trace in the buffers."""
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
    """Changes whenever a pass writes to a buffer or puts another in its place."""
    buffers = [b for each in model.modules() for b in each._buffers.values() if b is not None]
    return [(id(each), each._version) for each in buffers]
