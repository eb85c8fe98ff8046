"""Gradients of the parts of a batch, at the weights and a step down from them: in one vectorised pass, or in a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from saltflat.errors import ModelError, TrainingError
from saltflat.randomness import snapshot_rng
from saltflat.training.objective import Objective, compute_mean_loss
from saltflat.training.parts import BatchParts
from saltflat.training.shift import move_parameters

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
                "Got sparse gradients. Want dense ones. Do: make the embedding with sparse=False, or train it apart."
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
            "Got a loss that does not depend on any parameter that requires a gradient. Want one that does. "
            "Do: check that the objective uses the model it is given, without detach() or no_grad()."
        )
