"""Directions of the user's own, such as from one network to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saltflat.errors import NonFiniteError, OptionError, make_unknown_name_error
from saltflat.network import Network
from saltflat.problem import is_finite


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
                f"Got a direction for {name!r}, which is frozen or not among layers=. Want it to stay where it is. "
                "Do: leave it out of the direction, or name it in layers=[...]."
            )
    return found


def _check_direction(name: str, value: Any, parameter: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.is_complex() or value.is_meta:
        got = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise OptionError(
            f"Got {got} as the direction of {name!r}. Want a real tensor of shape {tuple(parameter.shape)}. "
            "Do: take the difference of two state_dicts of this architecture, for instance."
        )
    if not is_finite(value):
        raise NonFiniteError(f"Got NaN or infinity in the direction of {name!r}. Want finite numbers. Do: check it.")
    return value.detach().double()
