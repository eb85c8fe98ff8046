"""Compute the directions of a slice: random, Hessian eigenvectors, or given; and normalize them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saltflat.engine.context import Context
from saltflat.engine.eigenvalues import get_rounding_tolerance, reserve_basis
from saltflat.engine.full_loss import check_symmetric, compute_hessian_product, compute_norm
from saltflat.engine.lanczos import Vectors, find_top_eigenvalues
from saltflat.engine.network import Network
from saltflat.engine.noise import draw_normals
from saltflat.engine.problem import is_finite
from saltflat.errors import NonFiniteError, OptionError, ParameterError, make_unknown_name_error
from saltflat.results.text import format_count
from saltflat.validation import is_choice


def parse_given_vector(network: Network, given: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """Return a direction by the names of measured parameters, in float64; parameters not named do not move."""
    own = {id(value): name for name, value in network.model.named_parameters()}
    names = {name: own[id(value)] for name, value in network.model.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in network.model.named_buffers(remove_duplicate=False)}
    found = {}
    for name, value in given.items():
        if name in buffers:
            note = "The directions name buffers, which were left unchanged: a slice moves only parameters."
            notes.extend([note] if note not in notes else [])
            continue
        if name not in names:
            raise make_unknown_name_error("parameter of a direction", name, names)
        direction = _check_direction(str(name), value, network.model.get_parameter(name))
        if names[name] in network.measured:
            found[names[name]] = direction.to(network.measured[names[name]].device)
        elif bool(direction.any()):
            raise OptionError(
                f"Expected directions of measured parameters, but got one for {name!r}, which is frozen or not among "
                "layers=. Try leaving it out of the direction, or adding it to layers=[...]."
            )
    return found


def _check_direction(name: str, value: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.is_complex() or value.is_meta:
        got = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise OptionError(
            f"Expected a real tensor of shape {tuple(parameter.shape)}, but got {got} as the direction of {name!r}. "
            "Try the difference of two state_dicts of this architecture, for instance."
        )
    if not is_finite(value):
        raise NonFiniteError(f"Expected finite numbers, but got NaN or infinity in the direction of {name!r}.")
    return value.detach().double()


@dataclass(frozen=True)
class Eigenvector:
    """An eigenvalue of the Hessian of all measured parameters, and its unit eigenvector by parameter name."""

    value: float
    vector: Mapping[str, Tensor]


def compute_eigenvectors(context: Context, count: int, notes: list[str]) -> list[Eigenvector]:
    """Compute the eigenvectors of the ``count`` largest eigenvalues, in descending order, by Hessian-vector products.

    Each is searched in the orthogonal complement of those before.
    """
    measured = context.problem.network.measured
    sizes = [each.numel() for each in measured.values()]
    found: list[Tensor] = []
    values: list[float] = []
    done = 0

    def split_by_name(flat: Tensor) -> dict[str, Tensor]:
        parts = zip(measured.items(), flat.split(sizes), strict=True)
        return {name: part.reshape(each.shape) for (name, each), part in parts}

    def multiply_hessian(flat: Tensor) -> Tensor:
        nonlocal done
        done += 1
        context.tick("Eigenvectors of the Hessian", done, None)
        return torch.cat([each.flatten() for each in compute_hessian_product(context, split_by_name(flat)).values()])

    def multiply_deflated(vectors: Vectors) -> Vectors:
        return {"": _orthogonalize(multiply_hessian(_orthogonalize(vectors[""], found)), found)}

    for number in range(min(count, sum(sizes))):
        start = _orthogonalize(torch.cat([each.flatten() for each in draw_normals(context, number).values()]), found)
        with reserve_basis(context, measured) as basis:
            top = find_top_eigenvalues(multiply_deflated, {"": start}, get_rounding_tolerance(context), basis=basis)[""]
        if number == 0:
            start, vector = start / start.norm(), top.vector
            check_symmetric(
                context, _compute_asymmetry(start, multiply_hessian(start), vector, multiply_hessian(vector))
            )
        if not top.converged:
            notes.append(f"Eigenvalue {number + 1} of the Hessian may be larger by {top.bound:.1e} of itself.")
        if top.value == 0:
            notes.append(f"Eigenvalue {number + 1} of the Hessian is 0: its vector is arbitrary.")
        vector = _orthogonalize(top.vector, found)
        found.append(_fix_sign(vector / vector.norm()))
        values.append(top.value)
    return [Eigenvector(value, split_by_name(flat)) for value, flat in zip(values, found, strict=True)]


def _orthogonalize(vector: Tensor, others: list[Tensor]) -> Tensor:
    """Project a vector onto the complement of unit vectors, twice for rounding."""
    for other in others * 2:
        vector = vector - (other @ vector) * other
    return vector


def _fix_sign(vector: Tensor) -> Tensor:
    """Return the vector with the sign that makes its largest entry positive."""
    return vector * vector[vector.abs().argmax()].sign()


def _compute_asymmetry(u: Tensor, Hu: Tensor, v: Tensor, Hv: Tensor) -> float:
    size = float((Hu.square().sum() + Hv.square().sum()).sqrt())
    return float((u @ Hv - v @ Hu).abs()) / size if size else 0.0


Vector = Mapping[str, Tensor]


def normalize_by_filter(context: Context, vector: Vector) -> dict[str, Tensor]:
    r"""Scale every filter of the direction to the norm of the same filter of the weights (Li et al., 2018).

    .. math::
        d_{l,i} \leftarrow \frac{d_{l,i}}{\|d_{l,i}\|} \|w_{l,i}\|

    A filter is all the weights into one unit: a row of a Linear layer, an output channel of a convolution. A single
    number (a bias, a factor of a norm) is a filter itself. Filters of zeros do not move.
    """
    shapes, found = context.geometries, {}
    for name, direction in vector.items():
        weight = context.problem.network.measured[name].double()
        if name not in shapes:
            found[name] = direction.sign() * weight.abs()
            continue
        units, count = shapes[name].index_units("row")
        units = units.to(weight.device).flatten()
        lengths = [
            weight.new_zeros(count).index_add_(0, units, each.double().square().flatten()).sqrt()
            for each in (weight, direction)
        ]
        found[name] = direction * _divide_or_zero(*lengths)[units].reshape(direction.shape)
    return found


def normalize_by_layer(context: Context, vector: Vector) -> dict[str, Tensor]:
    """Scale every parameter of the direction to the norm of the same parameter of the model."""
    return {
        name: direction * _divide_or_zero(context.problem.network.measured[name].double().norm(), direction.norm())
        for name, direction in vector.items()
    }


def normalize_by_entry(context: Context, vector: Vector) -> dict[str, Tensor]:
    """Multiply every entry of the direction by the magnitude of its weight, which no rescaling of units changes."""
    return {
        name: direction * context.problem.network.measured[name].double().abs() for name, direction in vector.items()
    }


def normalize_to_length_one(context: Context, vector: Vector) -> dict[str, Tensor]:
    """Scale the whole direction to length one."""
    length = compute_norm(vector)
    return {name: direction / length if length else direction for name, direction in vector.items()}


def skip_normalization(context: Context, vector: Vector) -> dict[str, Tensor]:
    """Return the direction unchanged."""
    return dict(vector)


Normalize = Callable[[Context, Vector], dict[str, Tensor]]
NORMALIZATIONS: dict[str, Normalize] = {
    "filter": normalize_by_filter,
    "layer": normalize_by_layer,
    "entry": normalize_by_entry,
    "length": normalize_to_length_one,
    "none": skip_normalization,
}
WORDS = {
    "filter": "each filter as long as that of the weights",
    "layer": "each parameter as long as that of the weights",
    "entry": "each entry times the size of its weight",
    "length": "of length 1",
    "none": "as given",
}


def check_normalization(name: str) -> str:
    """Check that a normalization exists, and return its name."""
    if not isinstance(name, str) or name not in NORMALIZATIONS:
        raise make_unknown_name_error("normalization", name, NORMALIZATIONS)
    return name


def _divide_or_zero(wanted: Tensor, got: Tensor) -> Tensor:
    return torch.where(got > 0, wanted / got.where(got > 0, torch.ones_like(got)), torch.zeros_like(got))


# The kinds of directions, and their default normalization.
USUAL = {"filter": "filter", "random": "length", "eigenvectors": "length", "given": "none"}
BIASES = ("ignore", "include")


@dataclass(frozen=True)
class Direction:
    """One direction in the space of all parameters.

    Attributes:
        kind: ``"random"``, ``"eigenvector"`` or ``"given"``.
        vector: by parameter name, in float64, without parameters that do not move.
        eigenvalue: the eigenvalue of an eigenvector.
    """

    kind: str
    vector: Mapping[str, Tensor]
    eigenvalue: float | None = None

    def describe(self) -> dict[str, Any]:
        """Return the facts about the direction that the result keeps."""
        known = {} if self.eigenvalue is None else {"eigenvalue": self.eigenvalue}
        return {"kind": self.kind, "length": compute_norm(self.vector), **known}


@dataclass(frozen=True)
class DirectionOptions:
    """The options of the directions, checked as far as possible without the model."""

    kind: str
    normalize: str
    biases: str
    given: tuple[Mapping[str, Tensor], ...] = ()


def parse_direction_options(
    directions: str | Sequence[Mapping[str, Tensor]], dimensions: int, normalize: str | None, biases: str
) -> DirectionOptions:
    """Check the options of the directions and fill in the defaults."""
    if not is_choice(biases, BIASES):
        raise make_unknown_name_error("treatment of biases", biases, BIASES)
    if isinstance(directions, str):
        if directions not in USUAL or directions == "given":
            raise make_unknown_name_error("kind of directions", directions, [name for name in USUAL if name != "given"])
        chosen = check_normalization(USUAL[directions] if normalize is None else normalize)
        if directions == "filter" and chosen != "filter":
            raise OptionError(
                f"Expected normalize='filter' or none, but got directions='filter' with normalize={normalize!r}. Try "
                "directions='random' for random directions with another normalization."
            )
        return DirectionOptions(directions, chosen, biases)
    vectors = directions
    if not isinstance(vectors, Sequence) or not all(isinstance(each, Mapping) for each in vectors):
        raise OptionError(
            "Expected 'filter', 'random', 'eigenvectors', or a list of mappings from names of parameters to "
            f"tensors, but got directions of type {type(directions).__name__}. Try a list of one "
            "mapping for a curve."
        )
    if len(vectors) != dimensions:
        raise OptionError(
            f"Expected as many directions as dimensions={dimensions}, but got "
            f"{format_count(len(vectors), 'direction')}. Try dimensions={len(vectors) or 1}."
        )
    return DirectionOptions("given", check_normalization(normalize or USUAL["given"]), biases, tuple(vectors))


def compute_directions(context: Context, wanted: DirectionOptions, count: int) -> tuple[list[Direction], list[str]]:
    """Return the directions, in float64, and notes about them."""
    notes: list[str] = []
    network = context.problem.network
    if wanted.kind == "given":
        found = [Direction("given", parse_given_vector(network, each, notes)) for each in wanted.given]
    elif wanted.kind == "eigenvectors":
        found = [Direction("eigenvector", top.vector, top.value) for top in compute_eigenvectors(context, count, notes)]
    else:
        found = [Direction("random", _drop_biases(network, draw_normals(context, n), wanted)) for n in range(count)]
    change = NORMALIZATIONS[wanted.normalize]
    done = [Direction(each.kind, _drop_zeros(change(context, each.vector)), each.eigenvalue) for each in found]
    for each in done:
        if not each.vector:
            raise ParameterError(
                "Expected a direction that moves some weight, but got one that is zero everywhere. Try "
                "biases='include' if there are only biases, or another normalization."
            )
    if count == 2 and wanted.kind in ("filter", "random"):
        notes.append(
            "The two directions are independent and not orthogonalized, as in Li et al. (2018): the cosine of "
            f"their angle is {_compute_cosine(*done):.2g}."
        )
    return done, notes


def _drop_biases(network: Network, vector: Mapping[str, Tensor], wanted: DirectionOptions) -> dict[str, Tensor]:
    """Drop parameters of one axis, such as biases and norms. (A LayerNorm over several axes counts as a weight.)"""
    keep = wanted.biases == "include"
    return {name: each for name, each in vector.items() if keep or network.measured[name].dim() > 1}


def _drop_zeros(vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in vector.items() if bool(each.any())}


def _compute_cosine(one: Direction, two: Direction) -> float:
    inner = sum(float((one.vector[name] * two.vector[name]).sum()) for name in one.vector.keys() & two.vector.keys())
    return inner / (compute_norm(one.vector) * compute_norm(two.vector))
