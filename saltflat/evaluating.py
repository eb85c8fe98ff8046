"""Measures applied to statistics: layers put together, and errors from what the random draws say one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from saltflat.errorbars import stretch
from saltflat.geometry import Geometry, geometries
from saltflat.measures import Measure, Part
from saltflat.measures.request import Request
from saltflat.report import Reading
from saltflat.sampling import Jackknife
from saltflat.setting import Found, NotDefinedError, Setting
from saltflat.statistic import COMPUTED, STATISTICS

# What was found for each parameter of a measure: by layers, or of the network.
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """A measure applied to statistics: its reading, and the parts it is made of."""

    request: Request
    needed: Mapping[str, Found]
    whole: Mapping[str, Part]
    reading: Reading


def evaluate(request: Request, found: Mapping[str, Found], setting: Setting) -> Evaluation:
    """A measure's reading; its error by leaving out one draw at a time."""
    needed = {name: found[need.key] for name, need in request.needs.items()}
    shapes = _shapes(request, setting)
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
    whole = {name: _doubted(request, part, shapes.get(name)) for name, part in whole.items()}
    notes = (*_notes(whole), *dict.fromkeys(note for each in needed.values() for note in each.notes))
    if math.isnan(value) and not notes:
        notes = ("the measure's formula gave no number",)
    residuals = [part.residual for part in whole.values() if part.residual is not None]
    reading = Reading(
        name=request.key,
        value=value,
        layers=layers,
        units={name: part.units for name, part in whole.items() if part.units is not None},
        stderr=stderr,
        layer_stderr=layer_stderr,
        sampling_stderr=only.sampling_stderr,
        exact=all(part.exact for part in whole.values()) and all(each.exact for each in needed.values()),
        converged=all(part.converged for part in whole.values()),
        residual=max(residuals) if residuals else None,
        notes=notes,
        details=_details(request, whole),
    )
    return Evaluation(request, needed, whole, reading)


def with_sampling_errors(evaluations: Sequence[Evaluation], setting: Setting) -> dict[str, Reading]:
    """The readings with standard errors over examples, where all their statistics are known by groups."""
    readings = {each.request.key: each.reading for each in evaluations}
    sizes = setting.sizes
    if not sizes:
        return readings
    known = [
        each
        for each in evaluations
        if all(found.without is not None for found in each.needed.values())
        and not any(part.depends_on_all for part in each.whole.values())
    ]
    parts: dict[str, list[dict[str, Part]]] = {each.request.key: [] for each in known}
    for group in range(len(sizes)):
        # A statistic without this group is made once for all measures, and let go with it.
        cache: dict[int, Any] = {}
        for each in known:
            for found in each.needed.values():
                if id(found) not in cache and found.without is not None:
                    cache[id(found)] = found.without(group)
            values = {name: cache[id(found)] for name, found in each.needed.items()}
            parts[each.request.key].append(_parts_without(each, values, _shapes(each.request, setting)))
    for each in known:
        without, layers = parts[each.request.key], each.reading.layers
        total = Jackknife(each.reading.value, [_total(each.request, one) for one in without], sizes)
        by_layer = {
            name: Jackknife(layers[name], [float(one[name].value) for one in without], sizes).stderr
            for name in without[0]
            if name
        }
        readings[each.request.key] = replace(
            each.reading,
            sampling_stderr=total.stderr,
            layer_sampling_stderr=by_layer,
            without_group=tuple(total.without),
        )
    return readings


def _shapes(request: Request, setting: Setting) -> Mapping[str, Geometry]:
    return setting.geometries if by_unit(request) else geometries(setting.problem.network)


def _parts_without(evaluation: Evaluation, values: Values, shapes: Mapping[str, Geometry]) -> dict[str, Part]:
    request, whole = evaluation.request, evaluation.whole
    if not any(part.slopes for part in whole.values()):
        return parts_of(request, values, shapes)
    here = {name: each.value for name, each in evaluation.needed.items()}
    return {name: _moved(request, part, name, here, values, shapes) for name, part in whole.items()}


def _moved(
    request: Request, part: Part, name: str, here: Values, there: Values, shapes: Mapping[str, Geometry]
) -> Part:
    """What a measure says of changed statistics, to first order."""
    value = float(part.value)
    for key, slope in part.slopes.items():
        if request.measure.on == "network":
            value += sum(float((slope[each] * (there[key][each] - here[key][each])).sum()) for each in slope)
        else:
            own = shapes if request.measure.on == "weights" else {}
            before, after = (_of_layer(key, values[key], name, own) for values in (here, there))
            value += float((slope.to(after.device) * (after - before)).sum())
    return Part(value)


def claims(of: Measure, reading: Reading) -> tuple[str, ...]:
    """The symmetries that leave a measure as it is, without those that do not on this network."""
    withdrawn = {
        symmetry
        for each in reading.details.values()
        if isinstance(each, Mapping)
        for symmetry in each.get("withdrawn", ())
    }
    return tuple(symmetry for symmetry in of.invariant_to if symmetry not in withdrawn)


def by_unit(request: Request) -> bool:
    """Whether it matters which axes of a weight count its inputs and outputs."""
    of = request.measure
    return of.by_matrix or any(name in STATISTICS and STATISTICS[name].kind == "matrix" for name in of.statistics)


def _doubted(request: Request, part: Part, shape: Geometry | None) -> Part:
    """With what does not hold for this parameter, and what was guessed of it."""
    if shape is None or not by_unit(request):
        return part
    notes, details = part.notes, part.details
    if shape.guessed and (request.options.keys() & {"side"} or not request.measure.by_matrix):
        notes = (*notes, "which of its axes count inputs is not known, and they were taken as in a layer of torch")
    if shape.doubt and request.measure.by_matrix:
        notes, details = (*notes, shape.doubt), {**details, "withdrawn": ["unit_scale"]}
    return replace(part, notes=notes, details=details)


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
