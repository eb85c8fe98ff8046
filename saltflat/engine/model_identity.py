"""The identity of a model: everything that determines how it computes, except the numbers in its weights."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules import module as all_modules

# The hooks of a module that run during a forward or a backward pass.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


@dataclass(frozen=True, eq=False)
class SameObject:
    """Equal only if it holds the very same object, whatever that takes for equality.

    Example:
        >>> one, two = [], []
        >>> SameObject(one) == SameObject(one), SameObject(one) == SameObject(two)
        (True, False)
    """

    held: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def identify_model(model: nn.Module) -> Hashable:
    """Return what two models, or one model at two times, have in common if they compute in the same way.

    That is all modules with their hooks and forward methods, and all parameters and buffers but for their
    numbers: names, shapes, types, devices, which require a gradient, and which are the same tensor. Modes are not
    among it, since a session changes them (see :func:`list_modes`), nor are plain attributes: what they change shows in
    the operations that the model runs.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3))
        >>> before = identify_model(net)
        >>> _ = nn.init.zeros_(net[0].weight)
        >>> identify_model(net) == before
        True
        >>> _ = net.append(nn.ReLU())
        >>> identify_model(net) == before
        False
    """
    numbers: dict[int, int] = {}
    modules = tuple((name, *_identify_module(each)) for name, each in model.named_modules(remove_duplicate=False))
    tensors = tuple(
        (name, numbers.setdefault(id(value), len(numbers)), *_identify_tensor(value))
        for members in (
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        for name, value in members
    )
    return modules, tensors, tuple(_list_hooks(getattr(all_modules, name, None)) for name in _GLOBAL_HOOKS)


def list_modes(model: nn.Module) -> tuple[bool, ...]:
    """Return the modes of all modules: whether each is in train mode."""
    return tuple(module.training for module in model.modules())


def _identify_module(module: nn.Module) -> tuple[Hashable, ...]:
    held = vars(module)
    return (
        weakref.ref(module),
        type(module),
        SameObject(type(module).forward),
        SameObject(held.get("forward")),
        *(_list_hooks(held.get(name)) for name in _HOOKS),
    )


def _list_hooks(hooks: object) -> tuple[SameObject, ...]:
    return tuple(map(SameObject, hooks.values())) if isinstance(hooks, dict) else ()


def _identify_tensor(value: Tensor) -> tuple[Hashable, ...]:
    return type(value), tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
