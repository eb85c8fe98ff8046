"""Every measure of flatness: pure functions of statistics, one file per family.

    @measure(on="weights", invariant_to=("layer_scale",), reference="petzka2019reparameterization", formula="...")
    def kappa_trace(weight: Tensor, curvature_trace: Tensor) -> Tensor:
        return weight.square().sum() * curvature_trace

The names of its parameters are the statistics it needs; keyword-only parameters are its options, and so are those of
the statistics. ``on="weights"`` calls it for every weight matrix and ``total`` says how the layers make one number;
``on="parameters"`` does the same with biases and other vectors; ``on="network"`` calls it once, with mappings from
parameter names. Weight-shaped statistics are ``(groups, out, in, positions)`` for a measure on weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal, TypeVar

from torch import Tensor

from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.measures.references import REFERENCES
from saltflat.statistic import COSTS
from saltflat.statistics import COMPUTED, STATISTICS, find_keyword_defaults

# Of which a measure may claim to be independent.
SYMMETRIES = {
    "layer_scale": "multiplying layers by factors that cancel over the network",
    "unit_scale": "multiplying the weights into a unit by a factor and dividing those out of it",
}
# Not found in a sweep, but at hand: the parameters, and what they were before training.
GIVEN = ("weight", "initial_weight")
# Names that stand for several measures.
PRESETS = {
    "quick": "every measure that the one shared sweep gives: what is measured if nothing is named",
    "invariant": "every measure that rescaling layers, or layers and single units, leaves unchanged, whatever it costs",
    "all": "every measure there is",
}


@dataclass(frozen=True)
class MeasureResult:
    """What a measure says of one layer, or of the network, where a bare number does not say it all.

    Attributes:
        value: the number; nan where it is not defined, with the reason in ``notes``.
        residual: how far a solver was from the minimum.
        converged: whether that is close enough to call it one.
        exact: False for estimates, bounds and searches.
        stderr: standard error, where the measure knows it itself.
        sampling_stderr: standard error over examples, where the measure knows it itself.
        depends_on_all: whether it is made of something that is known of all examples together alone, so that its
            standard error over examples is not known.
        slopes: the derivative of ``value`` by each statistic, in its shape: where evaluating the measure again is
            expensive, its standard error over examples is found with these. At a minimum over scales they are the
            terms' own factors (the envelope theorem).
        units: one number per unit.
        layers: one number per parameter, for measures on the network.
        notes: plain sentences for the reader.
        details: whatever else was found.
    """

    value: Tensor | float
    residual: float | None = None
    converged: bool = True
    exact: bool = True
    stderr: float | None = None
    sampling_stderr: float | None = None
    depends_on_all: bool = False
    slopes: Mapping[str, Any] = field(default_factory=dict)
    units: tuple[float, ...] | None = None
    layers: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    name: str
    function: Callable[..., Tensor | float | MeasureResult]
    on: Literal["weights", "parameters", "network"]
    total: Literal["sum", "max"]
    invariant_to: tuple[str, ...]
    reference: str
    formula: str
    smaller: str
    logarithmic: bool
    by_matrix: bool
    statistics: tuple[str, ...]
    own_options: tuple[str, ...]
    options: Mapping[str, Any]
    fixed: Mapping[str, Any]
    own_cost: str = "sweep"

    @property
    def meaning(self) -> str:
        """The first sentence of its documentation."""
        return (inspect.getdoc(self.function) or "").split("\n\n")[0].replace("\n", " ")

    @property
    def cost(self) -> str:
        """One of :data:`COSTS`: that of the dearest statistic it needs, with the usual options, or its own."""
        costs = [COMPUTED[need].cost for need in self.statistics if need in COMPUTED]
        return max([self.own_cost, *costs], key=list(COSTS).index)


MEASURES: dict[str, Measure] = {}
Function = TypeVar("Function", bound=Callable[..., "Tensor | float | MeasureResult"])


def measure(
    *,
    on: Literal["weights", "parameters", "network"],
    reference: str,
    formula: str,
    invariant_to: tuple[str, ...] = (),
    total: Literal["sum", "max"] = "sum",
    smaller: str = "flatter",
    logarithmic: bool = False,
    by_matrix: bool = False,
    fixed: Mapping[str, Any] | None = None,
    cost: Literal["sweep", "passes", "search"] = "sweep",
) -> Callable[[Function], Function]:
    """Register a measure and its claims.

    Args:
        on: what it is called with; see the package.
        reference: a key of :data:`saltflat.measures.references.REFERENCES`.
        formula: in words.
        invariant_to: which of :data:`SYMMETRIES` leave it as it is. What is claimed must hold and what is not claimed
            must visibly fail: the tests try both.
        total: how the layers make one number.
        smaller: what a smaller value says of the minimum.
        logarithmic: whether differences, not ratios, tell.
        by_matrix: whether factors of units leave it as it is because each is one of a row times one of a column of the
            weight; where they are not, the reading of that weight withdraws the claim.
        fixed: options of the statistics that this measure is about and that nobody else may choose.
        cost: of the function itself, where it takes long beside its statistics.
    """

    def register_function(function: Function) -> Function:
        name = getattr(function, "__name__", "")
        if name in PRESETS:
            raise OptionError(
                f"Got a measure of the name {name!r}, which stands for {PRESETS[name]}. Want another name. "
                "Do: rename the function."
            )
        arguments = inspect.signature(function).parameters.values()
        needs = tuple(a.name for a in arguments if a.kind is not inspect.Parameter.KEYWORD_ONLY)
        own = options = find_keyword_defaults(function)
        for need in needs:
            if need not in STATISTICS and need not in COMPUTED and need not in GIVEN:
                raise make_unknown_name_error(
                    f"statistic (a parameter of the measure {name!r})", need, {*STATISTICS, *COMPUTED, *GIVEN}
                )
            options = {**get_statistic_options(need), **options}
        options = {option: value for option, value in options.items() if option not in (fixed or {})}
        for symmetry in invariant_to:
            if symmetry not in SYMMETRIES:
                raise make_unknown_name_error(f"symmetry (claimed by the measure {name!r})", symmetry, SYMMETRIES)
        if reference not in REFERENCES:
            raise make_unknown_name_error(f"reference (of the measure {name!r})", reference, REFERENCES)
        MEASURES[name] = Measure(
            name,
            function,
            on,
            total,
            invariant_to,
            reference,
            formula,
            smaller,
            logarithmic,
            by_matrix,
            needs,
            tuple(own),
            options,
            fixed or {},
            cost,
        )
        return function

    return register_function


def get_statistic_options(statistic: str) -> Mapping[str, Any]:
    if statistic in COMPUTED:
        return COMPUTED[statistic].options
    return STATISTICS[statistic].options if statistic in STATISTICS else {}


# The rest of the package asks for measures; these files define them.
for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
