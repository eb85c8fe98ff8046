"""What a statistic is, and the register of all of them; :mod:`saltflat.statistics` holds them, one file each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor

from saltflat.errors import OptionError, unknown
from saltflat.forms import Form, Layout
from saltflat.geometry import Geometry
from saltflat.setting import Found


@dataclass(frozen=True)
class Site:
    """The parameter that a contraction is about.

    Attributes:
        name: of the parameter.
        value: the parameter itself.
        geometry: how it is a matrix; None for a vector.
        deviation: standard deviation of each input channel, for statistics that ask for ``features``.
    """

    name: str
    value: Tensor
    geometry: Geometry | None = None
    deviation: Tensor | None = None


@dataclass(frozen=True)
class Statistic:
    """A contraction that the shared sweep sums.

    Attributes:
        name: how measures ask for it.
        of: which columns it is about.
        total: from the gradients of some examples to their part of the sum.
        spread: the scatter of ``total`` due to random columns.
        meaning: for the reader.
        kind: ``"entries"`` (the parameter's shape), ``"scalar"``, ``"matrix"`` (for parameters with a geometry only;
            any shape) or ``"example"`` (one number per example, kept instead of summed).
        degree: how the value scales with the gradients: 2 for squares.
        features: whether it needs the standard deviations of the layer's inputs.
        options: keyword arguments of ``total``, with defaults.
    """

    name: str
    of: Literal["curvature", "gradient"]
    total: Callable[..., Tensor]
    spread: Callable[[Form, Layout], Tensor] | None
    meaning: str
    kind: Literal["entries", "scalar", "matrix", "example"] = "entries"
    degree: int = 2
    features: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def bound(self, key: str, options: Mapping[str, Any]) -> Statistic:
        """The same with options filled in, under another name."""
        total = partial(self.total, **options) if options else self.total
        return Statistic(key, self.of, total, self.spread, self.meaning, self.kind, self.degree, self.features)


@dataclass(frozen=True)
class Computed:
    """A statistic with passes of its own."""

    name: str
    per: Literal["layer", "network"]
    function: Callable[..., Found]
    meaning: str
    options: Mapping[str, Any]


STATISTICS: dict[str, Statistic] = {}
COMPUTED: dict[str, Computed] = {}


def register(statistic: Statistic) -> Statistic:
    STATISTICS[statistic.name] = statistic
    return statistic


def statistic(per: Literal["layer", "network"], meaning: str) -> Callable[[Callable[..., Found]], Callable[..., Found]]:
    """Register a statistic that is a function of a setting; its keyword-only arguments are its options."""

    def enter(function: Callable[..., Found]) -> Callable[..., Found]:
        name = getattr(function, "__name__", "")
        COMPUTED[name] = Computed(name, per, function, meaning, keywords(function))
        return function

    return enter


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only arguments with their defaults."""
    arguments = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in arguments if each.kind is inspect.Parameter.KEYWORD_ONLY}


def statistics_named(names: str | Sequence[str]) -> list[Statistic]:
    """The statistics of these names, each once."""
    if not isinstance(names, str) and not (isinstance(names, Sequence) and all(isinstance(n, str) for n in names)):
        raise OptionError(f"Got names={names!r}. Want a name or a list of names. Do: for instance 'curvature_trace'.")
    wanted = [names] if isinstance(names, str) else list(names)
    if not wanted:
        raise OptionError("Got no statistics. Want at least one name. Do: for instance 'curvature_trace'.")
    for name in wanted:
        if name not in STATISTICS:
            raise unknown("statistic", name, STATISTICS)
    return [STATISTICS[name] for name in dict.fromkeys(wanted)]
