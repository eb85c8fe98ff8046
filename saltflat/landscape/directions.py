"""Directions of a slice: random, along the sharpest curvature, or the user's own; and their lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saltflat.engine.context import Setting
from saltflat.engine.eigenvalues import get_rounding_tolerance, reserve_basis
from saltflat.engine.full_loss import check_symmetric, compute_hessian_product, compute_norm
from saltflat.engine.lanczos import Vectors, find_top_eigenvalues
from saltflat.engine.network import Network
from saltflat.engine.noise import draw_normals
from saltflat.engine.problem import is_finite
from saltflat.errors import NonFiniteError, OptionError, ParameterError, make_unknown_name_error
from saltflat.validation import is_choice


def parse_given_vector(network: Network, given: Mapping[str, Any], notes: list[str]) -> dict[str, Tensor]:
    """The mapping by the names of the measured parameters, in float64; parameters it does not name do not move."""
    own = {id(value): name for name, value in network.model.named_parameters()}
    names = {name: own[id(value)] for name, value in network.model.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in network.model.named_buffers(remove_duplicate=False)}
    found = {}
    for name, value in given.items():
        if name in buffers:
            note = "The directions name buffers, which were left as they are: a slice moves parameters."
            notes.extend([note] if note not in notes else [])
            continue
        if name not in names:
            raise make_unknown_name_error("parameter of a direction", name, names)
        direction = _check_direction(str(name), value, network.model.get_parameter(name))
        if names[name] in network.measured:
            found[names[name]] = direction.to(network.measured[names[name]].device)
        elif bool(direction.any()):
            raise OptionError(
                f"Expected it to stay where it is, but got a direction for {name!r}, which is frozen or not among "
                "layers=. Try leaving it out of the direction, or naming it in layers=[...]."
            )
    return found


def _check_direction(name: str, value: Any, parameter: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.is_complex() or value.is_meta:
        got = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise OptionError(
            f"Expected a real tensor of shape {tuple(parameter.shape)}, but got {got} as the direction of {name!r}. "
            "Try taking the difference of two state_dicts of this architecture, for instance."
        )
    if not is_finite(value):
        raise NonFiniteError(
            f"Expected finite numbers, but got NaN or infinity in the direction of {name!r}. Check it."
        )
    return value.detach().double()


@dataclass(frozen=True)
class Eigenvector:
    """An eigenvalue of the Hessian over all measured parameters, and its vector of length one, by their names."""

    value: float
    vector: Mapping[str, Tensor]


def compute_eigenvectors(setting: Setting, count: int, notes: list[str]) -> list[Eigenvector]:
    """Those of the ``count`` largest eigenvalues, the largest first, by products with the true Hessian.

    Each is looked for among the vectors that are orthogonal to those found before.
    """
    measured = setting.problem.network.measured
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
        setting.tick("Eigenvectors of the Hessian", done, None)
        return torch.cat([each.flatten() for each in compute_hessian_product(setting, split_by_name(flat)).values()])

    def multiply_deflated(vectors: Vectors) -> Vectors:
        return {"": _orthogonalize(multiply_hessian(_orthogonalize(vectors[""], found)), found)}

    for number in range(min(count, sum(sizes))):
        start = _orthogonalize(torch.cat([each.flatten() for each in draw_normals(setting, number).values()]), found)
        with reserve_basis(setting, measured) as basis:
            top = find_top_eigenvalues(multiply_deflated, {"": start}, get_rounding_tolerance(setting), basis=basis)[""]
        if number == 0:
            start, vector = start / start.norm(), top.vector
            check_symmetric(
                setting, _compute_asymmetry(start, multiply_hessian(start), vector, multiply_hessian(vector))
            )
        if not top.converged:
            notes.append(f"Eigenvalue {number + 1} of the Hessian may be larger by {top.bound:.1e} of itself.")
        if top.value == 0:
            notes.append(f"Eigenvalue {number + 1} of the Hessian is 0: nothing singles its vector out.")
        vector = _orthogonalize(top.vector, found)
        found.append(_fix_sign(vector / vector.norm()))
        values.append(top.value)
    return [Eigenvector(value, split_by_name(flat)) for value, flat in zip(values, found, strict=True)]


def _orthogonalize(vector: Tensor, others: list[Tensor]) -> Tensor:
    """What is left of a vector without its parts along others of length one, twice for rounding."""
    for other in others * 2:
        vector = vector - (other @ vector) * other
    return vector


def _fix_sign(vector: Tensor) -> Tensor:
    """One of the two signs that an eigenvector can have: the largest entry is positive."""
    return vector * vector[vector.abs().argmax()].sign()


def _compute_asymmetry(u: Tensor, Hu: Tensor, v: Tensor, Hv: Tensor) -> float:
    size = float((Hu.square().sum() + Hv.square().sum()).sqrt())
    return float((u @ Hv - v @ Hu).abs()) / size if size else 0.0


Vector = Mapping[str, Tensor]


def normalize_by_filter(setting: Setting, vector: Vector) -> dict[str, Tensor]:
    r"""Every filter of the direction as long as the filter of the weights (Li et al., 2018).

    .. math::
        d_{l,i} \leftarrow \frac{d_{l,i}}{\|d_{l,i}\|} \|w_{l,i}\|

    A filter is all the weights into one unit: a row of a Linear layer, an output channel of a convolution. A number
    that stands alone (a bias, a factor of a norm) is a filter of its own. Filters of zeros do not move.
    """
    shapes, found = setting.geometries, {}
    for name, direction in vector.items():
        weight = setting.problem.network.measured[name].double()
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


def normalize_by_layer(setting: Setting, vector: Vector) -> dict[str, Tensor]:
    """Every parameter of the direction as long as that parameter of the weights."""
    return {
        name: direction * _divide_or_zero(setting.problem.network.measured[name].double().norm(), direction.norm())
        for name, direction in vector.items()
    }


def normalize_by_entry(setting: Setting, vector: Vector) -> dict[str, Tensor]:
    """Every entry of the direction times the size of its weight: no rescaling of units changes the slice."""
    return {
        name: direction * setting.problem.network.measured[name].double().abs() for name, direction in vector.items()
    }


def normalize_to_length_one(setting: Setting, vector: Vector) -> dict[str, Tensor]:
    """The whole direction of length one."""
    length = compute_norm(vector)
    return {name: direction / length if length else direction for name, direction in vector.items()}


def skip_normalization(setting: Setting, vector: Vector) -> dict[str, Tensor]:
    """The direction unchanged."""
    return dict(vector)


Normalize = Callable[[Setting, Vector], dict[str, Tensor]]
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
    if not isinstance(name, str) or name not in NORMALIZATIONS:
        raise make_unknown_name_error("normalization", name, NORMALIZATIONS)
    return name


def _divide_or_zero(wanted: Tensor, got: Tensor) -> Tensor:
    return torch.where(got > 0, wanted / got.where(got > 0, torch.ones_like(got)), torch.zeros_like(got))


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
                f"Expected one of the two, but got directions='filter' with normalize={normalize!r}. Try "
                "directions='random' for random directions that are normalised otherwise."
            )
        return DirectionOptions(directions, chosen, biases)
    if not isinstance(directions, Sequence) or not all(isinstance(each, Mapping) for each in directions):
        raise OptionError(
            "Expected 'filter', 'random', 'eigenvectors', or a list of mappings from names of parameters to "
            f"tensors, but got directions of type {type(directions).__name__}. Try putting a single mapping into a "
            "list."
        )
    if len(directions) != dimensions:
        raise OptionError(
            f"Expected as many as dimensions, but got {len(directions)} directions with dimensions={dimensions}. Try "
            f"dimensions={len(directions) or 1}, or leave some out."
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
                "Expected one that moves some weight, but got a direction that is zero everywhere. Try including "
                "biases with biases='include' if there is nothing else, or choosing another normalization."
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
