"""Statistics: what a sweep or a function computes from a problem, and the registry of all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from saltflat.engine.context import StatisticResult
from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.gradients.base import ColumnLayout, FactoredGradient
from saltflat.layers import Geometry


@dataclass(frozen=True)
class ParameterSite:
    """The parameter of a contraction.

    Attributes:
        name: of the parameter.
        value: the parameter itself.
        geometry: how it is a matrix; None for a vector.
        deviation: standard deviation of each input channel, for statistics with ``features``.
    """

    name: str
    value: Tensor
    geometry: Geometry | None = None
    deviation: Tensor | None = None
    units: dict[str, tuple[Tensor, int]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def index_units(self, axis: str) -> tuple[Tensor, int]:
        """Return the unit of every entry, on the parameter's device, and the number of units; found once per axis."""
        if axis not in self.units:
            assert self.geometry is not None
            unit, count = self.geometry.index_units(axis)
            self.units[axis] = unit.to(self.value.device), count
        return self.units[axis]

    @cached_property
    def input_scale(self) -> Tensor | None:
        """The factor of every entry that brings the layer's inputs to unit deviation; None if that is not known."""
        if self.deviation is None:
            return None
        return (1 / self.deviation)[self.index_units("column")[0]].to(self.value)

    @cached_property
    def input_deviation(self) -> Tensor | None:
        """The deviation of the input of every entry, 0 for inputs that are always zero; None if that is not known."""
        if self.deviation is None:
            return None
        finite = self.deviation.masked_fill(self.deviation.isinf(), 0.0)
        return finite[self.index_units("column")[0]].to(self.value)


@dataclass(frozen=True)
class Statistic:
    """A contraction of per-example gradients that the shared sweep sums.

    Attributes:
        name: by which measures request it.
        of: the columns it is computed from.
        total: maps the gradients of some examples to their part of the sum.
        spread: the scatter of ``total`` due to random columns.
        meaning: for the reader.
        kind: ``"entries"`` (the parameter's shape), ``"scalar"``, ``"matrix"`` (for parameters with a geometry only;
            any shape) or ``"example"`` (one number per example, kept instead of summed).
        degree: how the value scales with the gradients: 2 for squares.
        features: whether it needs the standard deviations of the layer's inputs.
        options: keyword arguments of ``total``, with defaults.
        by_group: whether sums over groups of examples are worth their memory.
        count_numbers: of a ``"matrix"``, how many numbers it has for a group of channels with so many outputs and
            inputs.
    """

    name: str
    of: Literal["curvature", "gradient"]
    total: Callable[..., Tensor]
    spread: Callable[[FactoredGradient, ColumnLayout], Tensor] | None
    meaning: str
    kind: Literal["entries", "scalar", "matrix", "example"] = "entries"
    degree: int = 2
    features: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    by_group: bool = True
    count_numbers: Callable[[int, int], int] = lambda out, into: 1

    def bind(self, key: str, options: Mapping[str, Any]) -> Statistic:
        """Return the statistic with these options, under another name."""
        total = partial(self.total, **options) if options else self.total
        return replace(self, name=key, total=total, options={})


# The costs of measures, cheapest first.
COSTS = {
    "sweep": "at most the one sweep over the data that all measures share",
    "passes": "also some forward passes over the data, a few dozen at most",
    "search": "also hundreds of passes, or a search for every single weight",
}
# Largest numbers of forward passes over the data that are nearly free beside a sweep, and that cost a few sweeps.
NEARLY_FREE, FEW = 2, 50


@dataclass(frozen=True)
class ComputedStatistic:
    """A statistic with passes of its own.

    Attributes:
        name: by which measures request it.
        per: whether it has one value per layer, or one for the network.
        function: of a context.
        meaning: for the reader.
        options: keyword arguments of ``function``, with defaults.
        passes: about how much time it takes, in forward passes over the data; or a function of its options.
        in_float64: whether it runs a copy of the model in float64, which takes memory.
    """

    name: str
    per: Literal["layer", "network"]
    function: Callable[..., StatisticResult]
    meaning: str
    options: Mapping[str, Any]
    passes: float | Callable[..., float]
    in_float64: bool = False

    def estimate_passes(self, options: Mapping[str, Any]) -> float:
        """Return about how many forward passes over the data it takes with these options."""
        return self.passes(**{**self.options, **options}) if callable(self.passes) else self.passes

    @property
    def cost(self) -> str:
        """Return the cost with the default options, a key of :data:`COSTS`."""
        passes = self.estimate_passes({})
        return "sweep" if passes <= NEARLY_FREE else "passes" if passes <= FEW else "search"


STATISTICS: dict[str, Statistic] = {}
COMPUTED: dict[str, ComputedStatistic] = {}


def register_statistic(statistic: Statistic) -> Statistic:
    """Register a statistic of the shared sweep."""
    STATISTICS[statistic.name] = statistic
    return statistic


def statistic(
    per: Literal["layer", "network"],
    meaning: str,
    passes: float | Callable[..., float] = 100,
    in_float64: bool = False,
) -> Callable[[Callable[..., StatisticResult]], Callable[..., StatisticResult]]:
    """Register a statistic that is a function of a context. Its keyword-only arguments are its options.

    Args:
        per: whether it has one value per layer, or one for the network.
        meaning: for the reader.
        passes: about how much time it takes, in forward passes over the data; a number, or a function of the options.
            It determines the cost of the measures that need the statistic, and the estimates of the remaining time.
        in_float64: whether it runs a copy of the model in float64, which takes memory.
    """

    def register_function(function: Callable[..., StatisticResult]) -> Callable[..., StatisticResult]:
        name = getattr(function, "__name__", "")
        options = find_keyword_defaults(function)
        COMPUTED[name] = ComputedStatistic(name, per, function, meaning, options, passes, in_float64)
        return function

    return register_function


def find_keyword_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only arguments of a function with their defaults."""
    arguments = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in arguments if each.kind is inspect.Parameter.KEYWORD_ONLY}


def find_statistics(names: str | Sequence[str]) -> list[Statistic]:
    """Return the statistics of these names, without duplicates."""
    if not isinstance(names, str) and not (isinstance(names, Sequence) and all(isinstance(n, str) for n in names)):
        raise OptionError(f"Expected a name or a list of names, but got names={names!r}. Try 'curvature_trace'.")
    wanted = [names] if isinstance(names, str) else list(names)
    if not wanted:
        raise OptionError("Expected at least one name, but got no statistics. Try 'curvature_trace'.")
    for name in wanted:
        if name not in STATISTICS:
            raise make_unknown_name_error("statistic", name, STATISTICS)
    return [STATISTICS[name] for name in dict.fromkeys(wanted)]


def count_sum_bytes(statistic: Statistic, sites: Iterable[ParameterSite]) -> int:
    """Return the bytes that a sum of this statistic over examples needs."""
    if statistic.kind == "matrix":
        shapes = [
            site.geometry.view_as_matrices(torch.empty(site.value.shape, device="meta")).shape
            for site in sites
            if site.geometry is not None
        ]
        return 8 * sum(groups * statistic.count_numbers(out, into) for groups, out, into, _ in shapes)
    return 8 * sum(site.value.numel() for site in sites) if statistic.kind == "entries" else 0
