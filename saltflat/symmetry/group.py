"""The group of rescalings of a network: which factors its weights can be multiplied by together."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from torch import Tensor

from saltflat._late import load_later
from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.results.display import Displayable
from saltflat.symmetry.tracing.elimination import (
    Elimination,
    Form,
    equate_factors,
    find_first_pairs,
    select_independent_entries,
)
from saltflat.symmetry.tracing.scales import GROUND
from saltflat.symmetry.tracing.trace import Obstacle
from saltflat.validation import check_non_negative, is_choice, parse_integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]
KINDS = ("unit", "layer")


@dataclass(frozen=True)
class ScaledTensor:
    """A parameter, or a running statistic, and the units its entries lie between.

    Attributes:
        name: in the model.
        shape: of the tensor.
        head: for every entry the row of ``forms`` of the unit it leads to.
        tail: the same of the unit it comes from; 1, which is fixed, for biases.
        kind: ``"parameter"``, or ``"mean"`` or ``"variance"`` of a BatchNorm.
        eps: what the BatchNorm adds to the variance.
    """

    name: str
    shape: torch.Size
    head: Numbers
    tail: Numbers
    kind: str = "parameter"
    eps: float = 0.0

    def find_pairs(self) -> Numbers:
        """The heads and tails between which its entries lie: each pair once, and only those that say something new."""
        found = select_independent_entries(self.head, self.tail)
        return found[find_first_pairs(found[:, 0], found[:, 1])]

    def rescale(self, value: Tensor, logs: Array) -> Tensor:
        """The tensor with these logarithms of factors, multiplied in float64 and rounded once."""
        factor = torch.from_numpy(np.asarray(np.exp(logs))).to(value.device)
        exact = value.detach().double()
        exact = (exact + self.eps) * factor**2 - self.eps if self.kind == "variance" else exact * factor
        return exact.to(value.dtype)


@dataclass(frozen=True)
class Symmetries(Displayable):
    """All positive factors of a network's weights that leave its function as it is.

    Every independent *scale* is the size of a unit that can be chosen freely. The logarithm of an entry's factor is
    ``(forms[head] - forms[tail]) @ logs`` with a number in ``logs`` for every scale.

    Attributes:
        members: every parameter, and the running statistics of every BatchNorm, by name.
        forms: ``(forms, scales)``, the sizes of units as combinations of scales; rows 0 and 1 are fixed.
        obstacles: operations that keep scales from being free.
        kind: ``"unit"``, or ``"layer"`` where every parameter has one factor for all its entries.
        assumed: lines of code that decide by the values of a mask how the forward pass goes on; the rescalings are
            those of inputs for which it goes on as it did.
    """

    renderer = ("symmetry", "SymmetriesRenderable", "format_symmetries_html")

    members: Mapping[str, ScaledTensor]
    forms: csr_array
    obstacles: tuple[Obstacle, ...]
    kind: str = "unit"
    assumed: tuple[str, ...] = ()

    @property
    def scales(self) -> int:
        """How many can be chosen independently."""
        return int(self.forms.shape[1])

    def compute_factor_logs(self, logs: Array) -> dict[str, Array]:
        """The logarithm of every entry's factor, by parameter."""
        if np.shape(logs) != (self.scales,):
            raise OptionError(
                f"Expected one for each of {self.scales} scales, but got logarithms of shape {np.shape(logs)}. Try "
                "starting from group.sample()."
            )
        if not np.isfinite(logs).all():
            raise OptionError(
                "Expected numbers, but got logarithms that are not finite. Try starting from group.sample()."
            )
        sizes = self.forms @ np.asarray(logs, dtype=np.float64)
        return {name: sizes[each.head] - sizes[each.tail] for name, each in self.members.items()}

    def find_movable_entries(self) -> dict[str, Mask]:
        """Whether an entry can move at all, by parameter."""
        # Combinations that differ are told apart by numbers without relations.
        moved = self.compute_factor_logs(np.sin(1.0 + np.e * np.arange(self.scales)))
        return {name: np.abs(each) > 1e-9 for name, each in moved.items()}

    def sample(self, seed: int = 0, spread: float = 2.0) -> Array:
        """Logarithms of random sizes: normal with the deviation ``spread``, and none beyond twice that."""
        number = parse_integer(seed)
        if number is None or number < 0:
            raise OptionError(f"Expected seed to be a whole number from 0, but got {seed!r}. Try seed=0.")
        check_non_negative(spread=spread)
        generator = np.random.default_rng(number)
        found = generator.standard_normal(self.scales)
        while (wide := np.abs(found) > 2).any():
            found[wide] = generator.standard_normal(int(wide.sum()))
        return spread * found

    def restrict_to_layers(self) -> Symmetries:
        """Those rescalings that multiply each parameter by one number."""
        # Every entry has the factor of the first.
        pairs = [each.find_pairs() for each in self.members.values() if each.kind == "parameter" and each.head.size]
        equal = [np.concatenate([of, np.broadcast_to(of[:1], of.shape)], 1) for of in pairs]
        return replace(self, forms=self._impose_equations(equal), kind="layer")

    def fix_parameters(self, names: Iterable[str]) -> Symmetries:
        """Those rescalings that leave these parameters alone."""
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
        """Those that leave alone all parameters but these."""
        kinds = {name: each.kind for name, each in self.members.items()}
        return self.fix_parameters(name for name, kind in kinds.items() if kind == "parameter" and name not in names)

    def _impose_equations(self, equations: list[Numbers]) -> csr_array:
        """The sizes of units when factors ``h - t`` and ``H - T`` are the same, for rows ``h, t, H, T``."""
        system, rows = Elimination(), extract_forms(self.forms)
        for quads in equations:
            equate_factors(system, rows, quads)
        free = system.find_free_variables(range(self.scales))
        basis = build_form_matrix([system.substitute({scale: 1}) for scale in range(self.scales)], free)
        return csr_array(self.forms @ basis)

    def __repr__(self) -> str:
        return f"<Symmetries: {self.scales} independent scales of {len(self.members)} tensors; print() shows them>"

    def plot(self) -> Figure:
        """A ``matplotlib`` Figure of blocks of scales and the layers between them; nothing is shown or kept."""
        figure: Figure = load_later("render.symmetry_graph").plot_symmetries(self)
        return figure


def check_rescaling_kind(kind: str) -> None:
    if not is_choice(kind, KINDS):
        raise OptionError(f"Expected 'unit' or 'layer', but got kind={kind!r}. Try leaving it out for 'unit'.")


def build_form_matrix(forms: list[Form], variables: list[int]) -> csr_array:
    column = {variable: number for number, variable in enumerate(variables)}
    rows = np.repeat(np.arange(len(forms)), [len(form) for form in forms])
    columns = np.array([column[v] for form in forms for v in form], dtype=np.int64)
    values = np.array([float(c) for form in forms for c in form.values()], dtype=np.float64)
    return csr_array(coo_array((values, (rows, columns)), shape=(len(forms), len(variables))))


def extract_forms(matrix: csr_array) -> dict[int, Form]:
    """A sparse matrix as combinations of its columns."""
    found: dict[int, Form] = {}
    for row in range(matrix.shape[0]):
        span = slice(matrix.indptr[row], matrix.indptr[row + 1])
        values = [Fraction(float(v)).limit_denominator(1000) for v in matrix.data[span]]
        found[row] = {
            int(c): v.numerator if v.denominator == 1 else v
            for c, v in zip(matrix.indices[span], values, strict=True)
            if v
        }
    return found
