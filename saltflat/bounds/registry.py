"""The registry of bounds on a network and its training data: one function each.

    @bound(reference="tsuzuku2020normalized", formula="risk + ...")
    def my_bound(evidence: Evidence, *, constant: float = 2.0) -> BoundResult:
        return BoundResult(value, terms, assumptions)

A function receives an :class:`~saltflat.bounds.evidence.Evidence`, which computes what is needed on demand. Its
keyword-only parameters are its options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from saltflat.bounds.bound import Assumption, BoundKind
from saltflat.bounds.evidence import Evidence
from saltflat.engine.statistic import find_keyword_defaults
from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.measures.registry import REFERENCES

# An option of a bound: a number, or the name of a choice.
BoundOption: TypeAlias = float | str


@dataclass(frozen=True)
class BoundResult:
    """What the function of a bound returns.

    Attributes:
        value: the bound.
        terms: what it is computed from, by name.
        assumptions: the conditions under which it holds.
        details: further results.
        notes: remarks for the reader.
        quantity: whose risk is bounded.
        loss: which loss, if not the one that was asked for.
        chance: the risk of guessing in this loss, if it is another one.
    """

    value: float
    terms: Mapping[str, float]
    assumptions: tuple[Assumption, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    quantity: str = "a network drawn at random around the trained one"
    loss: str | None = None
    chance: float | None = None


BoundFunction: TypeAlias = Callable[..., BoundResult]


@dataclass(frozen=True)
class BoundRule:
    """A bound that can be computed.

    Attributes:
        name: of the bound.
        function: computes it from an :class:`Evidence` and its options.
        reference: key of the paper.
        formula: in words and symbols.
        kind: ``"valid"`` or ``"heuristic"``.
        options: keyword arguments of the function, with defaults.
    """

    name: str
    function: BoundFunction
    reference: str
    formula: str
    kind: BoundKind
    options: Mapping[str, BoundOption]

    def apply(self, evidence: Evidence, options: Mapping[str, BoundOption]) -> BoundResult:
        """Compute the bound."""
        return self.function(evidence, **options)


BOUNDS: dict[str, BoundRule] = {}


def bound(
    name: str = "", *, reference: str, formula: str, kind: BoundKind = "valid"
) -> Callable[[BoundFunction], BoundFunction]:
    """Register the function of a bound. Its keyword-only arguments are its options.

    Args:
        name: of the bound; that of the function if empty.
        reference: a key of ``REFERENCES`` in :mod:`saltflat.measures.registry`.
        formula: in words and symbols.
        kind: ``"valid"``, or ``"heuristic"`` for what does not hold with the stated probability.
    """
    if reference not in REFERENCES:
        raise make_unknown_name_error("reference", reference, REFERENCES)

    def register_function(function: BoundFunction) -> BoundFunction:
        called = name or getattr(function, "__name__", "")
        BOUNDS[called] = BoundRule(called, function, reference, formula, kind, find_keyword_defaults(function))
        return function

    return register_function


def parse_bounds(
    bounds: str | Sequence[str] | Mapping[str, Mapping[str, BoundOption]] | None,
) -> dict[str, Mapping[str, BoundOption]]:
    """Return the options of each bound that is asked for, by name; those of all bounds if None.

    Example:
        >>> parse_bounds("isotropic")
        {'isotropic': {}}
    """
    if bounds is None:
        return {name: {} for name in BOUNDS}
    given = {bounds: {}} if isinstance(bounds, str) else bounds
    if not isinstance(given, Mapping | Sequence) or not all(isinstance(each, str) for each in given):
        raise OptionError(f"Expected a name or a list of names, but got bounds={bounds!r}. Try ['isotropic'].")
    if not given:
        raise OptionError("Expected at least one name, but got no bounds. Try leaving bounds out for all of them.")
    found: dict[str, Mapping[str, BoundOption]] = {}
    for name in given:
        if name not in BOUNDS:
            raise make_unknown_name_error("bound", name, BOUNDS)
        options = given[name] if isinstance(given, Mapping) else {}
        if not isinstance(options, Mapping):
            raise OptionError(
                f"Expected options by name, but got {options!r} for the bound {name!r}. Try "
                f"bounds={{{name!r}: {{'constant': 8}}}}."
            )
        for option in options:
            if option not in BOUNDS[name].options:
                raise make_unknown_name_error(f"option of {name}", option, BOUNDS[name].options)
        found[name] = options
    return found
