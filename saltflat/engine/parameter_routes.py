"""Routes: how the gradients of each measured parameter are computed in a sweep, and why not faster."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

# From the fastest: by the rule of a layer; from a copy for each example; vectorized over passes of single examples; in
# a pass for each example.
Route: TypeAlias = Literal["layer", "expanded", "mapped", "single"]

OUTSIDE = "used outside of layers with a rule"
PATHS = "examples take different paths through the model, so they are run one at a time"
VECTORIZED = "an operation of the model cannot be vectorized over examples, so they are run one at a time"
SORTED = "the model sorts or selects by values, which may reorder examples, so they are run one at a time"
SILENT = "the first examples have no gradients to compare strategies by, so they are run one at a time"
UNRULED = "a layer uses its parameters in a way that its rule does not cover, so examples are run one at a time"
MOVED = "the model reorders the examples of a batch, so they are run one at a time"
SPLIT = "the layers' inputs cannot be split into examples along their first axis"


@dataclass(frozen=True)
class ParameterRoute:
    """How the gradients of one parameter are computed.

    Attributes:
        name: of the parameter.
        route: the way it takes.
        reason: why it is not a quicker one; empty for the quickest.
    """

    name: str
    route: Route
    reason: str = ""

    @property
    def is_quick(self) -> bool:
        """Return whether the gradients come from one pass of all examples of a chunk together."""
        return self.route in ("layer", "expanded")


def find_routes(
    names: Sequence[str], strategy: str, outside: Collection[str], blocked: Mapping[str, str], alone: str
) -> tuple[ParameterRoute, ...]:
    """Return the route of each parameter.

    Args:
        names: of the parameters.
        strategy: of the sweep.
        outside: parameters with uses outside of layers with a rule.
        blocked: those with uses that do not allow a copy for each example, and why.
        alone: why examples are run one at a time, if they are.
    """
    if strategy.startswith("together"):
        return tuple(ParameterRoute(name, "expanded" if name in outside else "layer") for name in names)
    if strategy == "mapped":
        listed = ", ".join(map(repr, list(blocked or outside)[:3]))
        whole = f"the model is mapped as a whole, because of {listed}" if listed else SPLIT
        reasons = {**(dict.fromkeys(outside, OUTSIDE) if not blocked else {}), **blocked}
        return tuple(ParameterRoute(name, "mapped", reasons.get(name, whole)) for name in names)
    return tuple(ParameterRoute(name, "single", alone) for name in names)
