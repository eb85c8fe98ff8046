"""How long a direction is: as the weights are, filter by filter, layer by layer or entry by entry, or of length one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from saltflat.errors import make_unknown_name_error
from saltflat.setting import Setting
from saltflat.whole import compute_norm

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
