"""What one sweep averages over the examples: curvature and gradients, per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from saltflat.engine.context import Context, StatisticResult
from saltflat.engine.statistic import ParameterSite, Statistic, register_statistic, statistic
from saltflat.errors import OptionError
from saltflat.gradients.base import ColumnLayout, FactoredGradient
from saltflat.layers import Convolution, Transposed
from saltflat.results.jackknife import compute_variance_of_mean

ROUNDINGS = 16  # of the precision: inputs that vary less than this many are constant


def compute_input_deviations(context: Context) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Compute the standard deviation of each input channel over examples and positions, by weight, with notes.

    A channel that is zero throughout has none and gets infinity: divided by it, it drops out. One that is constant up
    to rounding, but not zero, cannot be normalized and gets 1.
    """
    network = context.problem.network
    # A tied weight has the channels that the module sees which owns its name.
    owned = {
        module: layer.names["weight"]
        for module, layer in network.layers.items()
        if "weight" in layer.names and network.model.get_submodule(layer.names["weight"].rpartition(".")[0]) is module
    }
    found: dict[str, _RunningMoments] = {}

    def record_input(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = _unwrap_vmap(x)
        axis = find_channel_axis(module, x)
        if axis is not None and module in owned:
            rows = x.detach().movedim(axis, -1).reshape(-1, x.shape[axis])
            found.setdefault(owned[module], _RunningMoments()).add(rows.double())
        return y

    with torch.no_grad():
        for batch in context.read_own_chunks(0):
            network(batch, record_input)
    deviations, notes, measured = {}, [], network.measured
    for name, moments in _combine_moments(found, context).items():
        deviation = moments.compute_deviation()
        rounding = max(1e-12, ROUNDINGS * torch.finfo(measured[name].dtype).eps)
        empty, flat = moments.largest == 0, (deviation <= rounding * moments.largest) & (moments.largest > 0)
        deviations[name] = deviation.masked_fill(empty, torch.inf).masked_fill(flat, 1.0)
        if bool(flat.any()):
            notes.append(f"{int(flat.sum())} inputs of {name} are constant over the data and were left as they are")
    return deviations, tuple(notes)


def _combine_moments(found: Mapping[str, _RunningMoments], context: Context) -> dict[str, _RunningMoments]:
    """Return the moments over the examples of all processes."""
    if context.processes.count == 1:
        return dict(found)
    total: dict[str, _RunningMoments] = {}
    local = {name: each.to("cpu") for name, each in found.items()}
    for part in context.processes.gather("the inputs of layers", local):
        for name, each in part.items():
            total.setdefault(name, _RunningMoments()).merge(each)
    measured = context.problem.network.measured
    return {name: each.to(measured[name].device) for name, each in total.items()}


def find_channel_axis(module: nn.Module, x: Tensor) -> int | None:
    """Return the axis of a layer's input that counts channels."""
    if isinstance(module, nn.Linear):
        return x.dim() - 1
    if isinstance(module, Convolution | Transposed):
        return x.dim() - 1 - len(module.kernel_size)
    return None


def _unwrap_vmap(x: Tensor) -> Tensor:
    """Return the values of all examples if the model maps itself over them: inside ``vmap`` a tensor shows one."""
    functorch = torch._C._functorch
    while functorch.is_batchedtensor(x):
        x = functorch.get_unwrapped(x).movedim(functorch.maybe_get_bdim(x), 0)
    return x


@dataclass
class _RunningMoments:
    """Count, mean, sum of squared deviations and largest size, combined from parts without cancellation."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))
    largest: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, rows: Tensor) -> None:
        """Add the values of a chunk."""
        if not len(rows):  # an expert that no example of this chunk was sent to
            if not self.count:
                self.mean = self.squares = self.largest = rows.new_zeros(rows.shape[1])
            return
        mean = rows.mean(0)
        self.merge(_RunningMoments(len(rows), mean, (rows - mean).square().sum(0), rows.abs().amax(0)))

    def merge(self, other: _RunningMoments) -> None:
        """Add the values that other moments are of."""
        if not other.count and self.count:
            return
        if not self.count:
            self.count, self.mean, self.squares, self.largest = other.count, other.mean, other.squares, other.largest
            return
        total, step = self.count + other.count, other.mean - self.mean
        self.squares = self.squares + other.squares + step.square() * (self.count * other.count / total)
        self.mean, self.count = self.mean + step * (other.count / total), total
        self.largest = torch.maximum(self.largest, other.largest)

    def to(self, device: str | torch.device) -> _RunningMoments:
        """Return the moments on a device."""
        return _RunningMoments(self.count, self.mean.to(device), self.squares.to(device), self.largest.to(device))

    def compute_deviation(self) -> Tensor:
        """Return the standard deviation of all values added."""
        return (self.squares / max(self.count, 1)).sqrt()


curvature_diagonal = register_statistic(
    Statistic(
        "curvature_diagonal",
        of="curvature",
        total=lambda form, site: form.sum_squares(),
        spread=lambda form, layout: form.compute_spread(layout),
        meaning="How fast the mean loss bends along each single parameter.",
    )
)


def _sum_traces(form: FactoredGradient, site: ParameterSite) -> Tensor:
    return form.compute_squared_norms([slice(None)]).double().sum()


def _compute_trace_spread(form: FactoredGradient, layout: ColumnLayout) -> Tensor:
    variance = compute_variance_of_mean(form.compute_squared_norms(layout.make_group_slices()).double())
    return torch.stack([variance.sum(), variance.square().sum()])


curvature_trace = register_statistic(
    Statistic(
        "curvature_trace",
        of="curvature",
        total=_sum_traces,
        spread=_compute_trace_spread,
        meaning="How fast the mean loss bends along all directions of a parameter, added up.",
        kind="scalar",
    )
)


@statistic(per="layer", meaning="How far each input channel of a layer varies over the data.", passes=1)
def feature_deviation(context: Context) -> StatisticResult:
    """Return ``(channels,)`` for each weight of a Linear layer or a convolution."""
    deviations, notes = compute_input_deviations(context)
    return StatisticResult(deviations, notes=notes, without=lambda group: deviations)


gradient_along_weights = register_statistic(
    Statistic(
        "gradient_along_weights",
        of="gradient",
        total=lambda form, site: form.project(site.value)[0],
        spread=None,
        meaning="How fast each single example's loss changes when a parameter grows in proportion.",
        kind="example",
        degree=1,
    )
)

gradient_norms = register_statistic(
    Statistic(
        "gradient_norms",
        of="gradient",
        total=lambda form, site: form.compute_squared_norms([slice(None)])[0],
        spread=None,
        meaning="How large each single example's gradient is, squared.",
        kind="example",
    )
)

gradient_second_moment = register_statistic(
    Statistic(
        "gradient_second_moment",
        of="gradient",
        total=lambda form, site: form.sum_squares(),
        spread=None,
        meaning="How large the gradients of single examples are, in the mean square, for each parameter.",
    )
)


def _sum_gradients(form: FactoredGradient, site: ParameterSite) -> Tensor:
    return form.sum_weighted(site.value.new_ones(form.columns, form.examples))


mean_gradient = register_statistic(
    Statistic(
        "mean_gradient",
        of="gradient",
        total=_sum_gradients,
        spread=None,
        meaning="How fast the mean loss changes with each single parameter: 0 at a minimum.",
        degree=1,
        by_group=False,
    )
)


def _sum_unit_forms(form: FactoredGradient, site: ParameterSite, axis: str = "column") -> Tensor:
    return form.sum_unit_squares(site.value, *site.index_units(axis)).double()


unit_forms = register_statistic(
    Statistic(
        "unit_forms",
        of="curvature",
        total=_sum_unit_forms,
        spread=None,
        meaning="How fast the mean loss bends when all weights of one unit grow together.",
        kind="matrix",
        count_numbers=max,
        options={"axis": "column"},
    )
)


def _check_normalize(normalize: object) -> None:
    if not isinstance(normalize, bool):
        raise OptionError(f"Expected True or False, but got normalize={normalize!r}. Try leaving it out for True.")


def _sum_unit_traces(form: FactoredGradient, site: ParameterSite, normalize: bool = True) -> Tensor:
    assert site.geometry is not None
    _check_normalize(normalize)
    # A feature divided by its deviation has gradients divided by it, too.
    return form.compute_row_products(site.geometry, site.input_scale if normalize else None).double()


unit_trace = register_statistic(
    Statistic(
        "unit_trace",
        of="curvature",
        total=_sum_unit_traces,
        spread=None,
        meaning="How the bends of the mean loss along two units' incoming weights go together.",
        kind="matrix",
        count_numbers=lambda out, into: out * out,
        features=True,
        options={"normalize": True},
    )
)


def _sum_feature_maps(form: FactoredGradient, site: ParameterSite, normalize: bool = True) -> Tensor:
    assert site.geometry is not None
    _check_normalize(normalize)
    deviation = site.input_deviation if normalize else None
    weight = site.value if deviation is None else site.value * deviation
    return form.sum_map_squares(weight, site.geometry, site.input_scale if normalize else None).double()


feature_map_trace = register_statistic(
    Statistic(
        "feature_map_trace",
        of="curvature",
        total=_sum_feature_maps,
        spread=None,
        meaning="How fast the mean loss bends along all linear maps of a layer's inputs, added up.",
        kind="matrix",
        features=True,
        options={"normalize": True},
    )
)
