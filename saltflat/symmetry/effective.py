"""Scales without effect: those of units that no output depends on are not counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from saltflat.symmetry.elimination import Elimination, find_first_pairs
from saltflat.symmetry.group import Mask, Numbers, ScaledTensor, Symmetries, extract_forms

# Of random weights, until no output depends on what had no slope in any of them; and how often that is tried.
DRAWS = 16
TRIALS = 3

# The outputs of a model with these values in place of its parameters, for these inputs.
Run = Callable[[Mapping[str, Tensor], Any], list[Tensor]]


def drop_scales_without_effect(group: Symmetries, values: Mapping[str, Tensor], inputs: Any, run: Run) -> Symmetries:
    """Return the group without directions that move only entries no output depends on.

    Args:
        group: as the forward pass shows it.
        values: the parameters.
        inputs: of the model.
        run: gives the outputs that are looked at, for other parameters and inputs.
    """
    members = {name: each for name, each in group.members.items() if name in values}
    if not _can_have_idle_scales(group, list(members.values())):
        return group
    masks = _DependenceProbe(values, inputs, run).find_effective_entries()
    if masks is None or all(mask.all() for mask in masks.values()):
        return group
    system, rows = (
        Elimination(),
        extract_forms(
            _compute_factor_logs(group, [_select_pairs(each, masks[name]) for name, each in members.items()])
        ),
    )
    for form in rows.values():
        system.set_to_zero(form)
    idle = set(system.find_free_variables(range(group.scales)))
    kept = [scale for scale in range(group.scales) if scale not in idle]
    return replace(group, forms=csr_array(group.forms[:, kept]))


def _can_have_idle_scales(group: Symmetries, members: list[ScaledTensor]) -> bool:
    """Whether nothing shrinks as some scale grows: it has no effect, or a norm undoes it."""
    logs = _compute_factor_logs(group, [each.find_pairs() for each in members]).tocoo()
    grows, shrinks = (np.bincount(logs.col[logs.data * sign > 0], minlength=group.scales) for sign in (1, -1))
    return bool(((grows == 0) | (shrinks == 0)).any())


def _compute_factor_logs(group: Symmetries, pairs: list[Numbers]) -> csr_array:
    """The logarithms of the factors of entries between these heads and tails."""
    every = np.concatenate([np.empty((0, 2), dtype=np.int64), *pairs])
    return csr_array(group.forms[every[:, 0]] - group.forms[every[:, 1]])


def _select_pairs(member: ScaledTensor, mask: Mask) -> Numbers:
    if mask.all():
        return member.find_pairs()
    found = np.stack([side[mask] for side in (member.head, member.tail)], 1)
    return found[find_first_pairs(found[:, 0], found[:, 1])] if len(found) else found


class _DependenceProbe:
    """Finds by trial which entries an output depends on."""

    def __init__(self, values: Mapping[str, Tensor], inputs: Any, run: Run) -> None:
        self.values, self.inputs, self.run = values, inputs, run
        self.generator = torch.Generator().manual_seed(0)

    def find_effective_entries(self) -> dict[str, Mask] | None:
        """A mask for each parameter; None if it cannot be told."""
        found = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in self.values.items()}
        try:
            for _ in range(DRAWS):
                # The inputs as they are, which may be zeros, and others.
                for inputs in (self.inputs, self._draw_inputs()):
                    for name, slope in self._compute_gradients(inputs).items():
                        found[name] |= slope != 0
                if all(self._is_complete(found) for _ in range(TRIALS)):
                    return {name: each.cpu().numpy() for name, each in found.items()}
        except Exception:
            # Models may hold what cannot be differentiated, or refuse such numbers: then all that was found is kept.
            pass
        return None

    def _compute_gradients(self, inputs: Any) -> dict[str, Tensor]:
        """Of a random sum of the outputs, at random weights: at those of a trained model units may be dead."""
        leaves = {name: value.requires_grad_() for name, value in self._draw_weights().items()}
        with torch.enable_grad(), _StraightThroughReLU():  # type: ignore[no-untyped-call]
            outputs = [out for out in self.run(leaves, inputs) if out.requires_grad]
            if not outputs:
                return {}
            weights = [torch.randn(out.shape, generator=self.generator).to(out) for out in outputs]
            slopes = torch.autograd.grad(
                outputs, list(leaves.values()), weights, allow_unused=True, materialize_grads=True
            )
        return dict(zip(leaves, slopes, strict=True))

    def _is_complete(self, found: Mapping[str, Tensor]) -> bool:
        """Whether other numbers in all other places give the same outputs: a slope may be zero by chance."""
        if all(bool(each.all()) for each in found.values()):
            return True
        one, two, inputs = self._draw_weights(), self._draw_weights(), self._draw_inputs()
        mixed = {name: torch.where(found[name], one[name], two[name]) for name in found}
        return all(map(torch.equal, self.run(one, inputs), self.run(mixed, inputs)))

    def _draw_weights(self) -> dict[str, Tensor]:
        def draw_weight(value: Tensor) -> Tensor:
            sizes = 0.5 + torch.rand(value.shape, generator=self.generator)
            signs = torch.randint(2, value.shape, generator=self.generator) * 2 - 1
            inputs = value[:1].numel() if value.dim() > 1 else 1
            found: Tensor = (sizes * signs / max(1, inputs) ** 0.5).to(value)
            return found

        return {name: draw_weight(value) for name, value in self.values.items()}

    def _draw_inputs(self) -> Any:
        def draw_input(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            return torch.randn(leaf.shape, generator=self.generator).to(leaf)

        return tree_map(draw_input, self.inputs)


class _StraightThroughReLU(TorchDispatchMode):
    """Lets slopes through units that are off: they depend on their weights all the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.threshold_backward.default:
            return args[0].clone()
        return func(*args, **(kwargs or {}))
