"""Rules that factor the gradients of each type of layer, and the geometry of weights.

A rule is a function ``factor(module, x, g)`` that returns a :class:`~saltflat.gradients.FactoredGradient` for each
parameter of the layer, from the layer's input ``x`` and the gradients ``g`` at its output. ``x`` is ``(examples,
*input)`` and ``g`` is ``(columns, examples, *output)``, where ``input`` and ``output`` are the shapes of a batch of
*one* example.

    @layer(nn.Linear)
    def factor_linear(module, x, g):
        return {"weight": OuterProductGradient(...), "bias": DenseGradient(...)}

A rule may have a ``forward``, which computes the same values by operations whose backward pass is cheaper for many
columns at once. Layers without a rule are supported too: their parameters are differentiated example by example
(:mod:`saltflat.engine.per_example`).

For torch's own layers, the meaning of a weight's axes is known (:class:`Geometry`). For all others it is determined
from the operations that use the parameter: see :mod:`saltflat.symmetry.axes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.errors import OptionError
from saltflat.gradients.base import FactoredGradient

Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

# What an axis of a parameter counts: output units, input units, groups of units that are not connected with each other,
# or positions that share the units.
OUT, IN, GROUP, POSITION = "out", "in", "group", "position"


@dataclass(frozen=True)
class Geometry:
    """How a parameter of two or more axes is a stack of matrices.

    Attributes:
        shape: of the parameter.
        groups: number of groups of channels that are not connected with each other.
        inputs_first: whether the first axis counts inputs, as in transposed convolutions and embeddings.
        doubt: why rescaling units may multiply its entries by more than factors of rows and columns; empty if not.
        guessed: whether it is unknown which axes count inputs.
    """

    shape: torch.Size
    groups: int = 1
    inputs_first: bool = False
    doubt: str = ""
    guessed: bool = False

    def view_as_matrices(self, values: Tensor) -> Tensor:
        """Return an array of the parameter's shape as ``(groups, out, in, positions)``."""
        stacked: Tensor = values.reshape(self.groups, self.shape[0] // self.groups, self.shape[1], -1)
        return stacked.transpose(1, 2) if self.inputs_first else stacked

    def index_units(self, axis: str) -> tuple[Tensor, int]:
        """Return the unit of every entry of the parameter, and the number of units.

        ``"column"`` counts input units, ``"row"`` output units.
        """
        _check_unit_axis(axis)
        first, second = self.shape[:2]
        by_first = (axis == "column") == self.inputs_first
        leading = torch.arange(first)[:, None]
        # The second axis counts within a group: group g's channels follow those of the groups before.
        following = leading // (first // self.groups) * second + torch.arange(second)
        number = leading.expand(first, second) if by_first else following
        spread = number.reshape(first, second, *([1] * (len(self.shape) - 2))).expand(self.shape)
        return spread.contiguous(), first if by_first else second * self.groups


@dataclass(frozen=True)
class PermutedGeometry(Geometry):
    """A geometry with any order of axes, each of which may combine several.

    Attributes:
        sizes: of the axes, after splitting those that combine several.
        roles: what each of them counts.

    Example:
        Two heads, each from three inputs to four outputs.

        >>> heads = PermutedGeometry.from_roles(torch.Size([2, 3, 4]), (2, 3, 4), ("out", "in", "out"))
        >>> heads.view_as_matrices(torch.zeros(2, 3, 4)).shape
        torch.Size([1, 8, 3, 1])
    """

    sizes: tuple[int, ...] = ()
    roles: tuple[str, ...] = ()

    @classmethod
    def from_roles(cls, shape: torch.Size, sizes: tuple[int, ...], roles: tuple[str, ...]) -> PermutedGeometry:
        """Return the geometry of a parameter whose axes have these sizes and roles."""
        # ``inputs_first`` turns off the shortcuts of gradients for plain matrices.
        return cls(shape, inputs_first=True, sizes=sizes, roles=roles)

    @property
    def _axis_order(self) -> list[int]:
        return [axis for role in (GROUP, OUT, IN, POSITION) for axis, each in enumerate(self.roles) if each == role]

    def _count_role(self, role: str) -> int:
        return torch.Size(size for size, each in zip(self.sizes, self.roles, strict=True) if each == role).numel()

    def view_as_matrices(self, values: Tensor) -> Tensor:
        return (
            values.reshape(self.sizes)
            .permute(self._axis_order)
            .reshape([self._count_role(r) for r in (GROUP, OUT, IN, POSITION)])
        )

    def index_units(self, axis: str) -> tuple[Tensor, int]:
        _check_unit_axis(axis)
        groups, rows, columns, _ = sizes = [self._count_role(role) for role in (GROUP, OUT, IN, POSITION)]
        count = groups * (columns if axis == "column" else rows)
        number = torch.arange(count).reshape(groups, *((1, columns) if axis == "column" else (rows, 1)), 1)
        laid = number.expand(sizes).reshape([self.sizes[place] for place in self._axis_order])
        back = sorted(range(len(self.sizes)), key=self._axis_order.__getitem__)
        return laid.permute(back).reshape(self.shape).contiguous(), count


def _check_unit_axis(axis: str) -> None:
    if axis not in ("column", "row"):
        raise OptionError(f"Expected 'column' or 'row', but got axis={axis!r}. Try leaving it out for columns.")


def infer_geometry(owner: nn.Module, shape: torch.Size) -> Geometry:
    """Return the geometry of a parameter, determined by the module that owns it."""
    if isinstance(owner, Transposed):
        return Geometry(shape, owner.groups, inputs_first=True)
    if isinstance(owner, Convolution):
        return Geometry(shape, owner.groups)
    # Reading row i of a table is a multiplication with the i-th unit vector from the left.
    return Geometry(shape, inputs_first=isinstance(owner, nn.Embedding | nn.EmbeddingBag))


Factor = Callable[[Any, Tensor, Tensor], dict[str, FactoredGradient]]
Forward = Callable[[Any, Tensor], Tensor]
Guard = Callable[[Any], bool]


@dataclass(frozen=True)
class LayerRule:
    """How the gradients of a module type factor.

    Attributes:
        factor: computes the factored gradients.
        forward: a forward pass that is cheaper to differentiate for many columns; None for the module's own.
        applies: whether the rule holds for a module of the type.
    """

    factor: Factor
    forward: Forward | None
    applies: Guard


RULES: dict[type[nn.Module], LayerRule] = {}


def layer(
    *types: type[nn.Module], forward: Forward | None = None, applies: Guard = lambda module: True
) -> Callable[[Factor], Factor]:
    """Register a rule for the gradients of these module types."""

    def register(factor: Factor) -> Factor:
        for kind in types:
            RULES[kind] = LayerRule(factor, forward, applies)
        return factor

    return register


Recognizer = Callable[[nn.Module], LayerRule | None]
RECOGNIZERS: list[Recognizer] = []


def recognize(function: Recognizer) -> Recognizer:
    """Register a function that returns the rule of a module of another library, going by what it computes."""
    RECOGNIZERS.append(function)
    return function


def find_layer_rule(module: nn.Module) -> LayerRule | None:
    """Return the rule of a module, or None if it has none or does not compute what its type does.

    Rules of types do not apply to a subclass with its own forward. None applies to an instance with a patched one, and
    to parameters that are computed from others (``torch.nn.utils.parametrize``, pruning). Types that are not torch's
    are tried if they have no submodules and no buffers: whether a rule is right is checked again on the data.
    """
    if "forward" in vars(module) or hasattr(module, "parametrizations"):
        return None
    if set(module._parameters) <= {"weight", "bias"}:
        for kind, rule in RULES.items():
            if isinstance(module, kind) and type(module).forward is kind.forward and rule.applies(module):
                return rule
    if module._modules or module._buffers or type(module).forward.__module__.startswith("torch."):
        return None
    found = (recognizer(module) for recognizer in RECOGNIZERS)
    return next((each for each in found if each is not None), None)


for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
