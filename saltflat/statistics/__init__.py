"""What a sweep averages over the examples, one file per statistic.

A statistic is a contraction of a parameter's per-example gradients (:mod:`saltflat.forms`), summed over the data:

    curvature_diagonal = register(Statistic("curvature_diagonal", of="curvature", total=..., spread=..., meaning="..."))

``of`` says which columns it is about: ``"curvature"`` (columns whose squares make the loss's curvature at the outputs)
or ``"gradient"`` (the one column that is the loss's gradient). ``spread`` is the scatter of ``total`` due to random
columns; a ``scalar`` statistic is one number per parameter, others have the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Literal

from torch import Tensor

from saltflat.errors import OptionError, unknown
from saltflat.forms import Form, Layout

Contraction = Callable[[Form, Layout], Tensor]


@dataclass(frozen=True)
class Statistic:
    name: str
    of: Literal["curvature", "gradient"]
    total: Contraction
    spread: Contraction | None
    meaning: str
    scalar: bool = False


STATISTICS: dict[str, Statistic] = {}


def register(statistic: Statistic) -> Statistic:
    STATISTICS[statistic.name] = statistic
    return statistic


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


for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
