"""Measures applied to statistics: layers put together, and errors from what the random draws say one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from saltflat.errorbars import stretch
from saltflat.geometry import Geometry, geometries
from saltflat.measures import Part
from saltflat.measures.request import Request
from saltflat.report import Reading
from saltflat.setting import Found, NotDefinedError, Setting
from saltflat.statistic import COMPUTED, STATISTICS

# What was found for each parameter of a measure: by layers, or of the network.
Values = Mapping[str, Any]


def reading_of(request: Request, found: Mapping[str, Found], setting: Setting) -> Reading:
    """A measure's reading; its error by leaving out one draw at a time."""
    needed = {name: found[need.key] for name, need in request.needs.items()}
    shapes = geometries(setting.problem.network)
    whole = parts_of(request, {name: each.value for name, each in needed.items()}, shapes)
    if not whole:
        raise NotDefinedError("needs weights of two or more axes: there are none among the measured parameters")
    value = _total(request, whole)
    only = next(iter(whole.values()))
    by_layer = {name: float(part.value) for name, part in whole.items()}
    layers = only.layers if request.measure.on == "network" else by_layer
    draws = {len(each.replicates) for each in needed.values() if each.replicates is not None}
    stderr, layer_stderr = only.stderr if len(whole) == 1 else None, {}
    if draws:
        replicas = [
            parts_of(request, {name: _replica(each, d) for name, each in needed.items()}, shapes)
            for d in range(min(draws))
        ]
        stderr = _jackknife([_total(request, parts) for parts in replicas])
        layer_stderr = {
            name: _jackknife([float(parts[name].value) for parts in replicas]) for name in layers if name in whole
        }
    notes = (*_notes(whole), *dict.fromkeys(note for each in needed.values() for note in each.notes))
    if math.isnan(value) and not notes:
        notes = ("the measure's formula gave no number",)
    residuals = [part.residual for part in whole.values() if part.residual is not None]
    return Reading(
        name=request.key,
        value=value,
        layers=layers,
        units={name: part.units for name, part in whole.items() if part.units is not None},
        stderr=stderr,
        layer_stderr=layer_stderr,
        exact=all(part.exact for part in whole.values()) and all(each.exact for each in needed.values()),
        converged=all(part.converged for part in whole.values()),
        residual=max(residuals) if residuals else None,
        notes=notes,
        details=_details(request, whole),
    )


def parts_of(request: Request, values: Values, shapes: Mapping[str, Geometry]) -> dict[str, Part]:
    """What the measure says of each layer; of the network under an empty name."""
    of = request.measure
    if of.on == "network":
        return {"": _part(of.function(**values, **request.options))}
    names = shapes if of.on == "weights" else next(iter(each for each in values.values() if isinstance(each, Mapping)))
    return {
        name: _part(
            of.function(
                **{
                    key: _of_layer(key, value, name, shapes if of.on == "weights" else {})
                    for key, value in values.items()
                },
                **request.options,
            )
        )
        for name in names
    }


def _of_layer(statistic: str, value: Any, name: str, shapes: Mapping[str, Geometry]) -> Any:
    if statistic in COMPUTED and COMPUTED[statistic].per == "network":
        return value
    own = value.get(name)
    entries = statistic in ("weight", "initial_weight") or (
        statistic in STATISTICS and STATISTICS[statistic].kind == "entries"
    )
    return shapes[name].matrices(own) if entries and name in shapes else own


def _part(found: Tensor | float | Part) -> Part:
    return found if isinstance(found, Part) else Part(found)


def _total(request: Request, parts: Mapping[str, Part]) -> float:
    values = [float(part.value) for part in parts.values()]
    if any(map(math.isnan, values)):
        return math.nan
    return max(values) if request.measure.total == "max" else math.fsum(values)


def _replica(found: Found, draw: int) -> Any:
    return found.value if found.replicates is None else found.replicates[draw]


def _jackknife(values: Sequence[float]) -> float:
    """Standard error from estimates with one draw left out each.

    Stretched from the normal to Student's distribution, so that 1.96 of it make a 95 % interval with few draws, too.
    """
    count = len(values)
    mean = math.fsum(values) / count
    spread = math.sqrt((count - 1) / count * math.fsum((value - mean) ** 2 for value in values))
    return float(spread * stretch(count - 1))


def _notes(parts: Mapping[str, Part]) -> Iterable[str]:
    """Each sentence once, with the layers it is about."""
    about: dict[str, list[str]] = {}
    for name, part in parts.items():
        for note in part.notes:
            about.setdefault(note, []).append(name)
    for note, names in about.items():
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield f"{shown}: {note}" if shown else note


def _details(request: Request, parts: Mapping[str, Part]) -> dict[str, Any]:
    if request.measure.on == "network":
        return dict(parts[""].details)
    return {name: dict(part.details) for name, part in parts.items() if part.details}
