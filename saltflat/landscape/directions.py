"""Where a slice leads: at random, along the sharpest curvature, or wherever the user says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from saltflat.amounts import is_choice
from saltflat.errors import OptionError, ParameterError, make_unknown_name_error
from saltflat.landscape.eigenvectors import compute_eigenvectors
from saltflat.landscape.given import parse_given_vector
from saltflat.landscape.normalizing import NORMALIZATIONS, check_normalization
from saltflat.network import Network
from saltflat.noise import draw_normals
from saltflat.setting import Setting
from saltflat.whole import compute_norm

# What is asked for, and how it is normalised if nothing else is said.
USUAL = {"filter": "filter", "random": "length", "eigenvectors": "length", "given": "none"}
BIASES = ("ignore", "include")


@dataclass(frozen=True)
class Direction:
    """One direction in the space of all parameters.

    Attributes:
        kind: ``"random"``, ``"eigenvector"`` or ``"given"``.
        vector: by the names of the parameters, float64; parameters that do not move are not there.
        eigenvalue: of the Hessian, for an eigenvector.
    """

    kind: str
    vector: Mapping[str, Tensor]
    eigenvalue: float | None = None

    def describe(self) -> dict[str, Any]:
        """What a reader is told of it."""
        known = {} if self.eigenvalue is None else {"eigenvalue": self.eigenvalue}
        return {"kind": self.kind, "length": compute_norm(self.vector), **known}


@dataclass(frozen=True)
class DirectionOptions:
    """What was asked for, checked as far as that can be without the model."""

    kind: str
    normalize: str
    biases: str
    given: tuple[Mapping[str, Any], ...] = ()


def parse_direction_options(directions: Any, dimensions: int, normalize: str | None, biases: str) -> DirectionOptions:
    """What is asked for, if it makes sense."""
    if not is_choice(biases, BIASES):
        raise make_unknown_name_error("treatment of biases", biases, BIASES)
    if isinstance(directions, str):
        if directions not in USUAL or directions == "given":
            raise make_unknown_name_error("kind of directions", directions, [name for name in USUAL if name != "given"])
        chosen = check_normalization(USUAL[directions] if normalize is None else normalize)
        if directions == "filter" and chosen != "filter":
            raise OptionError(
                f"Got directions='filter' with normalize={normalize!r}. Want one of the two. "
                "Do: directions='random' for random directions that are normalised otherwise."
            )
        return DirectionOptions(directions, chosen, biases)
    if not isinstance(directions, Sequence) or not all(isinstance(each, Mapping) for each in directions):
        raise OptionError(
            f"Got directions of type {type(directions).__name__}. Want 'filter', 'random', 'eigenvectors', or a list "
            "of mappings from names of parameters to tensors. Do: put a single mapping into a list."
        )
    if len(directions) != dimensions:
        raise OptionError(
            f"Got {len(directions)} directions with dimensions={dimensions}. Want as many as dimensions. "
            f"Do: dimensions={len(directions) or 1}, or leave some out."
        )
    return DirectionOptions("given", check_normalization(normalize or USUAL["given"]), biases, tuple(directions))


def compute_directions(setting: Setting, wanted: DirectionOptions, count: int) -> tuple[list[Direction], list[str]]:
    """The directions, in float64, and what is to be said of them."""
    notes: list[str] = []
    network = setting.problem.network
    if wanted.kind == "given":
        found = [Direction("given", parse_given_vector(network, each, notes)) for each in wanted.given]
    elif wanted.kind == "eigenvectors":
        found = [Direction("eigenvector", top.vector, top.value) for top in compute_eigenvectors(setting, count, notes)]
    else:
        found = [Direction("random", _drop_biases(network, draw_normals(setting, n), wanted)) for n in range(count)]
    change = NORMALIZATIONS[wanted.normalize]
    done = [Direction(each.kind, _drop_zeros(change(setting, each.vector)), each.eigenvalue) for each in found]
    for each in done:
        if not each.vector:
            raise ParameterError(
                "Got a direction that is zero everywhere. Want one that moves some weight. Do: include biases with "
                "biases='include' if there is nothing else, or choose another normalization."
            )
    if count == 2 and wanted.kind in ("filter", "random"):
        notes.append(
            "The two directions were drawn independently and not made orthogonal, as Li et al. (2018) do: the cosine "
            f"of their angle is {_compute_cosine(*done):.2g}."
        )
    return done, notes


def _drop_biases(network: Network, vector: Mapping[str, Tensor], wanted: DirectionOptions) -> dict[str, Tensor]:
    """Biases and parameters of norms have one axis, weights more. (A LayerNorm over several counts as a weight.)"""
    keep = wanted.biases == "include"
    return {name: each for name, each in vector.items() if keep or network.measured[name].dim() > 1}


def _drop_zeros(vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in vector.items() if bool(each.any())}


def _compute_cosine(one: Direction, two: Direction) -> float:
    inner = sum(float((one.vector[name] * two.vector[name]).sum()) for name in one.vector.keys() & two.vector.keys())
    return inner / (compute_norm(one.vector) * compute_norm(two.vector))
