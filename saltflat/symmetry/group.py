"""The group of rescalings of a network: the factors that multiply its weights without changing its function."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from torch import Tensor

from saltflat._late import load_later
from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.results.display import Displayable
from saltflat.symmetry.tracing.scales import (
    GROUND,
    Elimination,
    LinearForm,
    equate_factors,
    find_first_pairs,
    select_independent_entries,
)
from saltflat.symmetry.tracing.trace import Obstacle
from saltflat.validation import check_non_negative, is_choice, parse_integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]
RescalingKind: TypeAlias = Literal["unit", "layer"]
KINDS: tuple[RescalingKind, ...] = get_args(RescalingKind)


@dataclass(frozen=True)
class ScaledTensor:
    """A parameter or running statistic, and the units that its entries connect.

    Attributes:
        name: name in the model.
        shape: shape of the tensor.
        head: for every entry, the row of ``forms`` of the unit it leads to.
        tail: for every entry, the row of ``forms`` of the unit it comes from; 1, which is fixed, for biases.
        kind: ``"parameter"``, or ``"mean"`` or ``"variance"`` of a BatchNorm.
        eps: the constant that the BatchNorm adds to the variance.
    """

    name: str
    shape: torch.Size
    head: Numbers
    tail: Numbers
    kind: str = "parameter"
    eps: float = 0.0

    def find_pairs(self) -> Numbers:
        """Return distinct pairs of head and tail that determine the factors of all entries."""
        found = select_independent_entries(self.head, self.tail)
        return found[find_first_pairs(found[:, 0], found[:, 1])]

    def rescale(self, value: Tensor, logs: Array) -> Tensor:
        """Return the tensor multiplied by factors with these logarithms, in float64 and rounded once."""
        factor = torch.from_numpy(np.asarray(np.exp(logs))).to(value.device)
        exact = value.detach().double()
        exact = (exact + self.eps) * factor**2 - self.eps if self.kind == "variance" else exact * factor
        return exact.to(value.dtype)


@dataclass(frozen=True)
class Symmetries(Displayable):
    """All rescalings of a network's weights by positive factors that leave its function unchanged.

    Every independent *scale* can be chosen freely. The logarithm of an entry's factor is
    ``(forms[head] - forms[tail]) @ logs``, where ``logs`` has one number per scale.

    Attributes:
        members: every parameter, and the running statistics of every BatchNorm, by name.
        forms: ``(forms, scales)``, log scales of units as linear forms of the independent scales; rows 0 and 1 are
            fixed.
        obstacles: operations that fix scales.
        kind: ``"unit"``, or ``"layer"`` if all entries of a parameter have the same factor.
        assumed: lines of code where control flow depends on the values of a mask; the rescalings hold for inputs that
            take the same path.
    """

    renderer = ("symmetry", "SymmetriesRenderable", "format_symmetries_html")

    members: Mapping[str, ScaledTensor]
    forms: csr_array
    obstacles: tuple[Obstacle, ...]
    kind: str = "unit"
    assumed: tuple[str, ...] = ()

    @property
    def scales(self) -> int:
        """The number of independent scales."""
        return int(self.forms.shape[1])

    def compute_factor_logs(self, logs: Array) -> dict[str, Array]:
        """Return the logarithm of every entry's factor, by parameter."""
        if np.shape(logs) != (self.scales,):
            raise OptionError(
                f"Expected one logarithm for each of {self.scales} scales, but got shape {np.shape(logs)}. Try "
                "starting from group.sample()."
            )
        if not np.isfinite(logs).all():
            raise OptionError("Expected finite logarithms, but got NaN or infinity. Try starting from group.sample().")
        sizes = self.forms @ np.asarray(logs, dtype=np.float64)
        return {name: sizes[each.head] - sizes[each.tail] for name, each in self.members.items()}

    def find_movable_entries(self) -> dict[str, Mask]:
        """Return which entries some rescaling changes, by parameter."""
        # Generic values distinguish all linear forms.
        moved = self.compute_factor_logs(np.sin(1.0 + np.e * np.arange(self.scales)))
        return {name: np.abs(each) > 1e-9 for name, each in moved.items()}

    def sample(self, seed: int = 0, spread: float = 2.0) -> Array:
        """Draw log scales from a normal distribution with deviation ``spread``, truncated at twice that."""
        number = parse_integer(seed)
        if number is None or number < 0:
            raise OptionError(f"Expected seed to be a nonnegative integer, but got {seed!r}. Try seed=0.")
        check_non_negative(spread=spread)
        generator = np.random.default_rng(number)
        found = generator.standard_normal(self.scales)
        while (wide := np.abs(found) > 2).any():
            found[wide] = generator.standard_normal(int(wide.sum()))
        return spread * found

    def restrict_to_layers(self) -> Symmetries:
        """Return the rescalings that multiply each parameter by one number."""
        return self._layer_rescalings

    @cached_property
    def _layer_rescalings(self) -> Symmetries:
        # Every entry has the factor of the first one.
        pairs = [each.find_pairs() for each in self.members.values() if each.kind == "parameter" and each.head.size]
        equal = [np.concatenate([of, np.broadcast_to(of[:1], of.shape)], 1) for of in pairs]
        return replace(self, forms=self._impose_equations(equal), kind="layer")

    def fix_parameters(self, names: Iterable[str]) -> Symmetries:
        """Return the rescalings that leave these parameters unchanged."""
        one = isinstance(names, str | Tensor) or not isinstance(names, Iterable)
        listed: list[Any] = [names] if one else list(names)
        for name in listed:
            if not is_choice(name, self.members):
                raise make_unknown_name_error("parameter", name, self.members)
        pairs = [self.members[name].find_pairs() for name in listed]
        return replace(
            self, forms=self._impose_equations([np.pad(of, ((0, 0), (0, 2)), constant_values=GROUND) for of in pairs])
        )

    def restrict_to_parameters(self, names: Container[str]) -> Symmetries:
        """Return the rescalings that change no other parameters than these."""
        kinds = {name: each.kind for name, each in self.members.items()}
        return self.fix_parameters(name for name, kind in kinds.items() if kind == "parameter" and name not in names)

    def _impose_equations(self, equations: list[Numbers]) -> csr_array:
        """Return ``forms`` under the equations ``h - t = H - T`` for rows ``h, t, H, T``."""
        system, rows = Elimination(), extract_forms(self.forms)
        for quads in equations:
            equate_factors(system, rows, quads)
        free = system.find_free_variables(range(self.scales))
        basis = build_form_matrix([system.substitute({scale: 1}) for scale in range(self.scales)], free)
        return csr_array(self.forms @ basis)

    def __repr__(self) -> str:
        return f"<Symmetries: {self.scales} independent scales of {len(self.members)} tensors; print() shows them>"

    def plot(self) -> Figure:
        """Return a ``matplotlib`` figure of blocks of scales and the layers between them."""
        figure: Figure = load_later("render.symmetry_graph").plot_symmetries(self)
        return figure


def check_rescaling_kind(kind: str) -> RescalingKind:
    """Return the kind of rescaling, or raise an error unless it is ``"unit"`` or ``"layer"``."""
    if not is_choice(kind, KINDS):
        raise OptionError(f"Expected 'unit' or 'layer', but got kind={kind!r}. Try omitting it for 'unit'.")
    return cast(RescalingKind, kind)


def build_form_matrix(forms: list[LinearForm], variables: list[int]) -> csr_array:
    """Return linear forms as a sparse matrix with one column per variable."""
    column = {variable: number for number, variable in enumerate(variables)}
    rows = np.repeat(np.arange(len(forms)), [len(form) for form in forms])
    columns = np.array([column[v] for form in forms for v in form], dtype=np.int64)
    values = np.array([float(c) for form in forms for c in form.values()], dtype=np.float64)
    return csr_array(coo_array((values, (rows, columns)), shape=(len(forms), len(variables))))


def extract_forms(matrix: csr_array) -> dict[int, LinearForm]:
    """Return the rows of a sparse matrix as linear forms of its columns."""
    found: dict[int, LinearForm] = {}
    for row in range(matrix.shape[0]):
        span = slice(matrix.indptr[row], matrix.indptr[row + 1])
        values = [Fraction(float(v)).limit_denominator(1000) for v in matrix.data[span]]
        found[row] = {
            int(c): v.numerator if v.denominator == 1 else v
            for c, v in zip(matrix.indices[span], values, strict=True)
            if v
        }
    return found
