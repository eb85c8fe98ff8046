"""Statistics of one batch as functions of the model's own parameters, with a graph to differentiate through.

The shared sweep (:mod:`saltflat.totals`) finds the same numbers more cheaply and forgets where they came from. Here
every example's gradients are written out, by operations that torch can differentiate once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils._pytree import tree_map

from saltflat.columns import Dice, Plan
from saltflat.data import Batch
from saltflat.errors import CoupledExamplesError, EmptyDataError
from saltflat.features import channel_axis
from saltflat.forms import Dense
from saltflat.forms.base import Geometry as Matrices
from saltflat.forms.base import grouped
from saltflat.geometry import Geometry
from saltflat.measures.request import Need
from saltflat.network import Network
from saltflat.probe import TOLERANCE
from saltflat.problem import Problem, real
from saltflat.statistic import STATISTICS, Site, Statistic
from saltflat.symmetry.same import difference
from saltflat.training.smooth_columns import columns_with_graph, gradient_with_graph

Values = Mapping[str, Tensor]


class Written(Dense):
    """Gradients written out, and nothing overwritten on the way to a contraction: autograd needs it later."""

    def pieces(self) -> Iterator[Written]:
        yield self

    def norms(self, groups: Sequence[slice]) -> Tensor:
        return grouped(self.values.square().reshape(self.columns, self.examples, -1).sum(2), groups)

    def row_products(self, geometry: Matrices, scale: Tensor | None) -> Tensor:
        each = self.values.flatten(0, 1)
        rows: Tensor = vmap(geometry.matrices)(each if scale is None else each * scale)
        wide = rows.flatten(3).permute(1, 2, 0, 3).flatten(2)
        return wide @ wide.mT


@dataclass(frozen=True)
class Live:
    """One batch, and the model's parameters as they hang in the graph.

    Attributes:
        problem: the model, and the loss.
        batch: the examples.
        leaves: copies of all parameters that are trained or measured; differentiating them reaches the model's own.
        shapes: how the measured parameters are matrices.
    """

    problem: Problem
    batch: Batch
    leaves: Values
    shapes: Mapping[str, Geometry]

    @classmethod
    def of(cls, problem: Problem, batch: Batch, shapes: Mapping[str, Geometry]) -> Live:
        network = problem.network
        leaves = {}
        for name, value in problem.model.named_parameters():
            if value.requires_grad or name in network.measured:
                # A copy, because some layers write to their parameters (an embedding with max_norm).
                copy = value.to(network.constants[name].dtype, copy=True)
                leaves[name] = copy if copy.requires_grad else copy.requires_grad_()
        return cls(problem, batch, leaves, shapes)

    @property
    def measured(self) -> dict[str, Tensor]:
        return {name: self.leaves[name] for name in self.problem.network.measured}


def swept(live: Live, wanted: Sequence[Statistic], plan: Plan, dice: Dice, looped: bool, deviations: Values) -> Any:
    """What :class:`saltflat.totals.Totals` finds, for statistics of the shared sweep."""
    loss, targets = live.problem.loss, real(live.batch.targets)
    raw = live.problem.network(live.batch, leaves=live.leaves)
    live.problem.check_outputs(raw.detach(), live.batch)
    outputs = raw.double()
    loss.check(outputs.detach(), targets)
    share = float(loss.share(outputs.detach(), targets).sum())
    if share <= 0:
        raise EmptyDataError(
            "Got targets that are all ignored or have no weight. Want at least one that counts. "
            "Do: check ignore_index and the class weights, or leave the penalty out for this batch."
        )
    kinds, sets = {each.of for each in wanted}, []
    if "curvature" in kinds:
        sets += [("curvature", *found) for found in columns_with_graph(loss, outputs, targets, plan, dice)]
    if "gradient" in kinds:
        sets.append(("gradient", gradient_with_graph(loss, outputs, targets).unsqueeze(0), 1))
    columns = torch.cat([each for _, each, _ in sets]).to(raw)
    again, gradients = (one_by_one if looped else together)(live, columns)
    if not difference(raw.detach(), again.detach()) <= TOLERANCE[raw.dtype]:
        raise CoupledExamplesError(
            "Got other outputs for examples in a batch than for the same examples alone. "
            "Want a model that treats examples independently: per-example gradients mean nothing otherwise. "
            "Do: replace layers that mix the batch (BatchNorm without running statistics, attention across the batch)."
        )
    shapes, starts, start = live.shapes, [], 0
    for _, each, _ in sets:
        starts.append(slice(start, start + len(each)))
        start += len(each)

    def value(statistic: Statistic, name: str) -> Tensor:
        site = Site(name, live.leaves[name], shapes.get(name), deviations.get(name))
        total = sum(
            sign * statistic.total(Written(gradients[name][where]), site).double()
            for (kind, _, sign), where in zip(sets, starts, strict=True)
            if kind == statistic.of
        )
        assert isinstance(total, Tensor)
        if statistic.kind == "entries":
            # A sum of squares that is zero has no slope. Roots of it are not to be asked for one.
            total = total.where(total != 0, torch.zeros_like(total))
        return total * _scale(statistic, live.batch.examples, share)

    return {
        each.name: {name: value(each, name) for name in live.measured if each.kind != "matrix" or name in shapes}
        for each in wanted
    }


def _scale(statistic: Statistic, examples: int, share: float) -> float:
    """Curvature is of the mean loss; gradients are of single examples' losses, whose mean that is."""
    if statistic.of == "curvature":
        return 1 / share
    each: float = (examples / share) ** statistic.degree
    return each if statistic.kind == "example" else each / examples


def together(live: Live, columns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs of every example alone, and ``(columns, examples, *shape)`` gradients, in one vectorised pass."""
    batch, network = live.batch, live.problem.network

    def one(inputs: tuple[Any, Any], own: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        alone = Batch(*inputs, batch.targets[:1], batch.first, 1)
        pulled: Any = vjp(lambda leaves: network(alone, leaves={**live.leaves, **leaves}), live.measured)
        outputs, pull = pulled
        return outputs.squeeze(0), vmap(pull)(own.unsqueeze(1))[0]

    inputs = batch.map(lambda leaf: leaf.unsqueeze(1))
    axes = tree_map(lambda leaf: 0 if batch.counts(leaf) else None, (batch.args, batch.kwargs))
    outputs, gradients = vmap(one, in_dims=(axes, 1))(inputs, columns)
    return outputs, {name: each.transpose(0, 1) for name, each in gradients.items()}


def one_by_one(live: Live, columns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The same, an example and a column at a time: for models that cannot be vectorised."""
    outputs, rows = [], []
    for n in range(live.batch.examples):
        alone = live.problem.network(live.batch.cut(n, n + 1), leaves=live.leaves)
        outputs.append(alone)
        rows.append([_pulled(alone, live.measured, column[n : n + 1]) for column in columns])
    gradients = {
        name: torch.stack([torch.stack([column[name] for column in row]) for row in rows], 1) for name in live.measured
    }
    return torch.cat(outputs), gradients


def _pulled(outputs: Tensor, measured: Values, column: Tensor) -> dict[str, Tensor]:
    if not outputs.requires_grad:
        return {name: torch.zeros_like(value) for name, value in measured.items()}
    found = torch.autograd.grad(
        outputs, list(measured.values()), column, create_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(measured, found, strict=True))


def feature_deviation(live: Live) -> dict[str, Tensor]:
    """As :func:`saltflat.features.input_deviations` has it."""
    network, seen, handles = live.problem.network, dict[str, list[Tensor]](), []
    try:
        for module, name in _owners(network).items():

            def look(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                x = args[0] if args else kwargs["input"]
                axis = channel_axis(module, x)
                if axis is not None:
                    seen.setdefault(name, []).append(x.movedim(axis, -1).reshape(-1, x.shape[axis]).double())

            handles.append(module.register_forward_pre_hook(look, with_kwargs=True))
        network(live.batch, leaves=live.leaves)
    finally:
        for handle in handles:
            handle.remove()
    return {name: _deviation(torch.cat(rows)) for name, rows in seen.items()}


def _owners(network: Network) -> dict[nn.Module, str]:
    """The modules with a rule that own the name of their weight: a tied one has the channels that its owner sees."""
    named = {module: layer.names["weight"] for module, layer in network.layers.items() if "weight" in layer.names}
    return {m: name for m, name in named.items() if network.model.get_submodule(name.rpartition(".")[0]) is m}


def _deviation(rows: Tensor) -> Tensor:
    variance, largest = rows.var(0, correction=0), rows.detach().abs().amax(0)
    flat = variance.detach().sqrt() <= 1e-12 * largest
    # The root of zero has no slope: it is taken of the others alone.
    root = variance.masked_fill(flat, 1.0).sqrt()
    return root.masked_fill(largest == 0, torch.inf)


# Statistics with passes of their own that have a graph here; all others of that kind do not.
COMPUTED_WITH_GRAPH: dict[str, Callable[[Live], dict[str, Tensor]]] = {"feature_deviation": feature_deviation}


def statistics(live: Live, needs: Sequence[Need], plan: Plan, dice: Dice, looped: bool = False) -> dict[str, Values]:
    """Every statistic that is needed, by its key."""
    found: dict[str, Values] = {"weight": live.measured}
    for need in needs:
        if need.name in COMPUTED_WITH_GRAPH:
            found[need.key] = COMPUTED_WITH_GRAPH[need.name](live)
    wanted = [STATISTICS[need.name].bound(need.key, dict(need.options)) for need in needs if need.name in STATISTICS]
    if wanted:
        found.update(swept(live, wanted, plan, dice, looped, found.get("feature_deviation", {})))
    return found
