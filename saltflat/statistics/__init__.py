"""What is found out about a network, one file per statistic; measures are functions of these.

Most are contractions of per-example gradients (:mod:`saltflat.gradients`), summed over the data in one shared sweep:

    curvature_diagonal = register_statistic(
        Statistic("curvature_diagonal", of="curvature", total=..., spread=..., meaning="...")
    )

``of`` says which columns it is about: ``"curvature"`` (columns whose squares make the loss's curvature at the outputs)
or ``"gradient"`` (the one column that is the loss's gradient). Others need passes of their own and are functions of a
:class:`~saltflat.engine.context.Context`:

    @statistic(per="network", meaning="...")
    def average_rise(context, *, radius=0.05, draws=20): ...
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from saltflat.engine.statistic import (
    COMPUTED,
    STATISTICS,
    ComputedStatistic,
    ParameterSite,
    Statistic,
    find_keyword_defaults,
    register_statistic,
    statistic,
)

__all__ = [
    "COMPUTED",
    "STATISTICS",
    "ComputedStatistic",
    "ParameterSite",
    "Statistic",
    "find_keyword_defaults",
    "register_statistic",
    "statistic",
]

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
