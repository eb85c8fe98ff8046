"""Apply measures to statistics: combine layers, and propagate errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from saltflat.engine.context import Context, StatisticResult, find_geometries
from saltflat.engine.statistic import COMPUTED, STATISTICS
from saltflat.errors import NotDefinedError
from saltflat.layers import Geometry
from saltflat.measures.registry import Measure, MeasureRequest, MeasureResult
from saltflat.results.jackknife import Jackknife, compute_student_factor
from saltflat.results.report import Reading

# Draws are taken to first order if that misses the draw farthest away by at most this part of its distance.
SHORTFALL = 0.1
# Minima over more numbers average over so many entries that this is not looked at, unless some draw moves them far.
LARGE, SMALL_SHIFT = 1 << 20, 0.1

# What was found for each parameter of a measure: by layers, or of the network.
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """A measure applied to statistics: its reading, and the parts it is made of."""

    request: MeasureRequest
    needed: Mapping[str, StatisticResult]
    whole: Mapping[str, MeasureResult]
    reading: Reading


def evaluate_measure(request: MeasureRequest, found: Mapping[str, StatisticResult], context: Context) -> Evaluation:
    """Apply a measure, and estimate its error by leaving out one draw at a time."""
    needed = {name: found[need.key] for name, need in request.needs.items()}
    shapes = _select_geometries(request, context)
    whole = compute_parts(request, {name: each.value for name, each in needed.items()}, shapes)
    if not whole:
        raise NotDefinedError("needs weights of two or more axes: there are none among the measured parameters")
    value = _combine_parts(request, whole)
    only = next(iter(whole.values()))
    by_layer = {name: float(part.value) for name, part in whole.items()}
    layers = only.layers if request.measure.on == "network" else by_layer
    draws = {len(each.replicates) for each in needed.values() if each.replicates is not None}
    stderr, layer_stderr = only.stderr if len(whole) == 1 else None, {}
    if draws:
        replicas = _compute_replicas(request, needed, whole, shapes, min(draws))
        stderr = _compute_jackknife_error([_combine_parts(request, parts) for parts in replicas])
        layer_stderr = {
            name: _compute_jackknife_error([float(parts[name].value) for parts in replicas])
            for name in layers
            if name in whole
        }
    whole = {name: _add_doubts(request, part, shapes.get(name)) for name, part in whole.items()}
    notes = (*_collect_notes(whole), *dict.fromkeys(note for each in needed.values() for note in each.notes))
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
        details=_collect_details(request, whole),
    )
    return Evaluation(request, needed, whole, reading)


def add_sampling_errors(evaluations: Sequence[Evaluation], context: Context) -> dict[str, Reading]:
    """Add standard errors over examples to the readings whose statistics are known by groups of examples."""
    readings = {each.request.key: each.reading for each in evaluations}
    sizes = context.sizes
    if not sizes:
        return readings
    known = [
        each
        for each in evaluations
        if all(found.without is not None for found in each.needed.values())
        and not any(part.depends_on_all for part in each.whole.values())
    ]
    parts: dict[str, list[dict[str, MeasureResult]]] = {each.request.key: [] for each in known}
    for group in range(len(sizes)):
        # A statistic without this group is made once for all measures, and let go with it.
        cache: dict[int, Any] = {}
        for each in known:
            for found in each.needed.values():
                if id(found) not in cache and found.without is not None:
                    cache[id(found)] = found.without(group)
            values = {name: cache[id(found)] for name, found in each.needed.items()}
            parts[each.request.key].append(
                _compute_parts_without(each, values, _select_geometries(each.request, context))
            )
    for each in known:
        without, layers = parts[each.request.key], each.reading.layers
        total = Jackknife(each.reading.value, [_combine_parts(each.request, one) for one in without], sizes)
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


def _compute_replicas(
    request: MeasureRequest,
    needed: Mapping[str, StatisticResult],
    whole: Mapping[str, MeasureResult],
    shapes: Mapping[str, Geometry],
    draws: int,
) -> list[dict[str, MeasureResult]]:
    """Return the parts of a measure with one draw left out at a time.

    A minimum is not solved again for every draw: its slopes give it to first order. Only the draw that moves the
    measure most is computed in full. Where first order misses a part of it, that part is computed for all draws, and if
    it misses the sum of the others, all parts are.
    """
    values = [{name: _get_replicate(each, draw) for name, each in needed.items()} for draw in range(draws)]
    random = {name for name, each in needed.items() if each.replicates is not None}
    if not all(part.slopes and random <= part.slopes.keys() for part in whole.values()):
        return [compute_parts(request, each, shapes) for each in values]
    here = {name: each.value for name, each in needed.items()}
    replicas = [
        {name: _extrapolate_part(request, part, name, here, each, shapes) for name, part in whole.items()}
        for each in values
    ]

    totals = [_combine_parts(request, each) for each in replicas]
    value = _combine_parts(request, whole)
    shifts = [abs(each - value) for each in totals]
    farthest = max(range(draws), key=lambda draw: shifts[draw])
    if max(map(_count_entries, whole.values())) > LARGE and shifts[farthest] <= SMALL_SHIFT * abs(value):
        return replicas
    found = compute_parts(request, values[farthest], shapes)
    missed = 0.0
    for name, part in whole.items():
        own = max(abs(float(each[name].value) - float(part.value)) for each in replicas)
        shortfall = float(replicas[farthest][name].value) - float(found[name].value)
        if abs(shortfall) <= SHORTFALL * own:
            missed += shortfall
            continue
        for each, there in zip(values, replicas, strict=True):
            there[name] = _compute_part(request, each, shapes, name)
    if abs(missed) > SHORTFALL * shifts[farthest]:
        return [compute_parts(request, each, shapes) for each in values]
    return replicas


def _count_entries(part: MeasureResult) -> int:
    return sum(each.numel() for each in tree_leaves(dict(part.slopes)) if isinstance(each, Tensor))


def _select_geometries(request: MeasureRequest, context: Context) -> Mapping[str, Geometry]:
    return context.geometries if is_axis_dependent(request) else find_geometries(context.problem.network)


def _compute_parts_without(
    evaluation: Evaluation, values: Values, shapes: Mapping[str, Geometry]
) -> dict[str, MeasureResult]:
    request, whole = evaluation.request, evaluation.whole
    if not any(part.slopes for part in whole.values()):
        return compute_parts(request, values, shapes)
    here = {name: each.value for name, each in evaluation.needed.items()}
    return {name: _extrapolate_part(request, part, name, here, values, shapes) for name, part in whole.items()}


def _extrapolate_part(
    request: MeasureRequest, part: MeasureResult, name: str, here: Values, there: Values, shapes: Mapping[str, Geometry]
) -> MeasureResult:
    """Return the value of a measure for changed statistics, to first order."""
    value = float(part.value)
    for key, slope in part.slopes.items():
        if request.measure.on == "network":
            value += sum(float((slope[each] * (there[key][each] - here[key][each])).sum()) for each in slope)
        else:
            own = shapes if request.measure.on == "weights" else {}
            before, after = (_select_layer_value(key, values[key], name, own) for values in (here, there))
            value += float((slope.to(after.device) * (after - before)).sum())
    return MeasureResult(value)


def list_invariances(of: Measure, reading: Reading) -> tuple[str, ...]:
    """List the rescalings that a measure is invariant to on this network."""
    withdrawn = {
        symmetry
        for each in reading.details.values()
        if isinstance(each, Mapping)
        for symmetry in each.get("withdrawn", ())
    }
    return tuple(symmetry for symmetry in of.invariant_to if symmetry not in withdrawn)


def is_axis_dependent(request: MeasureRequest) -> bool:
    """Return whether the measure depends on which axes of a weight count inputs and outputs."""
    of = request.measure
    return of.by_matrix or any(name in STATISTICS and STATISTICS[name].kind == "matrix" for name in of.statistics)


def _add_doubts(request: MeasureRequest, part: MeasureResult, shape: Geometry | None) -> MeasureResult:
    """Add notes on what does not hold, or was guessed, for this parameter."""
    if shape is None or not is_axis_dependent(request):
        return part
    notes, details = part.notes, part.details
    if shape.guessed and (request.options.keys() & {"side"} or not request.measure.by_matrix):
        notes = (*notes, "which of its axes count inputs is not known, and they were taken as in a layer of torch")
    if shape.doubt and request.measure.by_matrix:
        notes, details = (*notes, shape.doubt), {**details, "withdrawn": ["unit_scale"]}
    return replace(part, notes=notes, details=details)


def compute_parts(request: MeasureRequest, values: Values, shapes: Mapping[str, Geometry]) -> dict[str, MeasureResult]:
    """Compute the value of the measure for each layer, or for the network under an empty name."""
    of = request.measure
    if of.on == "network":
        return {"": _compute_part(request, values, shapes, "")}
    names = shapes if of.on == "weights" else next(iter(each for each in values.values() if isinstance(each, Mapping)))
    return {name: _compute_part(request, values, shapes, name) for name in names}


def _compute_part(request: MeasureRequest, values: Values, shapes: Mapping[str, Geometry], name: str) -> MeasureResult:
    """Compute the value of the measure for one layer, or for the network under an empty name."""
    of = request.measure
    if of.on == "network":
        return _make_part(of.function(**values, **request.options))
    own = shapes if of.on == "weights" else {}
    selected = {key: _select_layer_value(key, value, name, own) for key, value in values.items()}
    return _make_part(of.function(**selected, **request.options))


def _select_layer_value(statistic: str, value: Any, name: str, shapes: Mapping[str, Geometry]) -> Any:
    if statistic in COMPUTED and COMPUTED[statistic].per == "network":
        return value
    own = value.get(name)
    entries = statistic in ("weight", "initial_weight") or (
        statistic in STATISTICS and STATISTICS[statistic].kind == "entries"
    )
    return shapes[name].view_as_matrices(own) if entries and name in shapes else own


def _make_part(found: Tensor | float | MeasureResult) -> MeasureResult:
    return found if isinstance(found, MeasureResult) else MeasureResult(found)


def _combine_parts(request: MeasureRequest, parts: Mapping[str, MeasureResult]) -> float:
    values = [float(part.value) for part in parts.values()]
    if any(map(math.isnan, values)):
        return math.nan
    return max(values) if request.measure.total == "max" else math.fsum(values)


def _get_replicate(found: StatisticResult, draw: int) -> Any:
    return found.value if found.replicates is None else found.replicates[draw]


def _compute_jackknife_error(values: Sequence[float]) -> float:
    """Compute the standard error from estimates that each leave out one draw.

    Stretched from the normal to Student's distribution, so that 1.96 of it make a 95 % interval with few draws, too.
    """
    count = len(values)
    mean = math.fsum(values) / count
    spread = math.sqrt((count - 1) / count * math.fsum((value - mean) ** 2 for value in values))
    return float(spread * compute_student_factor(count - 1))


def _collect_notes(parts: Mapping[str, MeasureResult]) -> Iterable[str]:
    """Collect notes, each once, with the layers it is about."""
    about: dict[str, list[str]] = {}
    for name, part in parts.items():
        for note in part.notes:
            about.setdefault(note, []).append(name)
    for note, names in about.items():
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield f"{shown}: {note}" if shown else note


def _collect_details(request: MeasureRequest, parts: Mapping[str, MeasureResult]) -> dict[str, Any]:
    if request.measure.on == "network":
        return dict(parts[""].details)
    return {name: dict(part.details) for name, part in parts.items() if part.details}
