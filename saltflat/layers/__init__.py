"""How the gradient of each type of layer factors, one file per type.

A rule is a function ``factor(module, x, g)``: from what the layer was given and the gradients at what it gave it makes,
for each parameter the layer owns, a :class:`~saltflat.gradients.FactoredGradient`. Both arrays have what a batch of *one*
example would have shown the layer behind their leading axes: ``x`` is ``(examples, *input)`` and ``g`` is
``(columns, examples, *output)``.

    @layer(nn.Linear)
    def factor_linear(module, x, g):
        return {"weight": OuterProductGradient(...), "bias": DenseGradient(...)}

A rule may name a ``forward``: the same values by operations whose backward pass is cheaper for many columns at once.
Layers without a rule need none: their parameters are then differentiated example by example (``saltflat.engine.per_example``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch import Tensor, nn

from saltflat.gradients.base import FactoredGradient

Factor = Callable[[Any, Tensor, Tensor], dict[str, FactoredGradient]]
Forward = Callable[[Any, Tensor], Tensor]
Guard = Callable[[Any], bool]


@dataclass(frozen=True)
class LayerRule:
    factor: Factor
    forward: Forward | None
    applies: Guard


RULES: dict[type[nn.Module], LayerRule] = {}


def layer(
    *types: type[nn.Module], forward: Forward | None = None, applies: Guard = lambda module: True
) -> Callable[[Factor], Factor]:
    """Register how the gradients of these module types factor."""

    def register(factor: Factor) -> Factor:
        for kind in types:
            RULES[kind] = LayerRule(factor, forward, applies)
        return factor

    return register


def find_layer_rule(module: nn.Module) -> LayerRule | None:
    """The rule of a module, if it computes what its type does.

    A subclass with a forward of its own, an instance with a patched one, and parameters that are computed from others
    (``torch.nn.utils.parametrize``, pruning) are not what the rule was written for.
    """
    if "forward" in vars(module) or hasattr(module, "parametrizations") or set(module._parameters) - {"weight", "bias"}:
        return None
    for kind, rule in RULES.items():
        if isinstance(module, kind) and type(module).forward is kind.forward and rule.applies(module):
            return rule
    return None


for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
