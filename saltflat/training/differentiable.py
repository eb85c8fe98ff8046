"""Statistics of one batch as differentiable functions of the model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils._pytree import tree_map

from saltflat.engine.custom_losses import CustomLoss
from saltflat.engine.data import Batch
from saltflat.engine.losses import Loss
from saltflat.engine.network import Network
from saltflat.engine.output_curvature import (
    ColumnPlan,
    Curvature,
    DiagonalCurvature,
    ExampleRNG,
    FactoredCurvature,
    SoftmaxCurvature,
    make_columns,
)
from saltflat.engine.problem import Problem, cast_targets
from saltflat.engine.reference_gradients import TOLERANCE
from saltflat.engine.statistic import STATISTICS, ParameterSite, Statistic
from saltflat.errors import CoupledExamplesError, EmptyDataError
from saltflat.gradients.base import DenseGradient, sum_groups
from saltflat.gradients.base import MatrixGeometry as Matrices
from saltflat.layers import Geometry
from saltflat.measures.registry import StatisticRequest
from saltflat.statistics.averages import find_channel_axis
from saltflat.symmetry.equality import compute_relative_difference

# The root of a probability that has underflowed has no gradient; this value is indistinguishable from it.
TINY = 1e-290


def compute_columns_with_graph(
    loss: Loss, outputs: Tensor, targets: Tensor, plan: ColumnPlan, dice: ExampleRNG
) -> list[tuple[Tensor, int]]:
    """Return ``(columns, examples, *outputs)`` and the sign, for each set of curvature columns."""
    curvature = _compute_smooth_curvature(loss, outputs, targets)
    return [(each.block(0, each.layout.total), each.sign) for each in make_columns(curvature, plan, dice)]


def compute_gradient_with_graph(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of the loss at the outputs, differentiable itself."""
    if not isinstance(loss, CustomLoss):
        return loss.gradient(outputs, targets)
    free = outputs if outputs.requires_grad else outputs.detach().requires_grad_()
    return torch.autograd.grad(loss.total(free, targets).sum(), free, create_graph=True)[0]


def _compute_smooth_curvature(loss: Loss, outputs: Tensor, targets: Tensor) -> Curvature:
    if isinstance(loss, CustomLoss):
        return _compute_smooth_roots(loss, outputs, targets)
    found = loss.curvature(outputs, targets)
    if isinstance(found, SoftmaxCurvature):
        return replace(found, p=found.p.clamp_min(TINY))
    return DiagonalCurvature(found.values.clamp_min(TINY)) if isinstance(found, DiagonalCurvature) else found


def _compute_smooth_roots(loss: CustomLoss, outputs: Tensor, targets: Tensor) -> FactoredCurvature:
    r"""Return roots of any second derivative, without differentiating eigenvectors, which fails for equal eigenvalues.

    Let :math:`B_0 = \sum_k \pm s_k s_k^T` be the matrix as a constant, and B the same with its graph. The columns

    .. math::
        s_k \pm \tfrac12 (B - B_0) \, s_k / |s_k|^2

    are the roots :math:`s_k`, and their squares change as B does: to first order
    :math:`\sum_k \pm s_k s_k^T + \tfrac12 ((B - B_0) P + P (B - B_0))` with P the projection on the range of
    :math:`B_0`, which is that of B unless an eigenvalue is about to leave zero.
    """
    with torch.no_grad():
        here = loss.curvature(outputs.detach(), targets)
    size = outputs[0].numel()
    B = _compute_hessians(loss, outputs, targets).reshape(-1, size, size)
    change = B - B.detach()

    def follow_outputs(roots: Tensor, sign: int) -> Tensor:
        flat = roots.reshape(*roots.shape[:2], size)
        square = flat.square().sum(2, keepdim=True)
        unit = flat / square.where(square > 0, torch.ones_like(square))
        return (flat + sign / 2 * torch.einsum("nij,knj->kni", change, unit)).reshape(roots.shape)

    return FactoredCurvature(
        follow_outputs(here.columns, 1), None if here.negative is None else follow_outputs(here.negative, -1)
    )


def _compute_hessians(loss: CustomLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    try:
        mapped: Tensor = torch.func.vmap(torch.func.hessian(loss.compute_example_loss))(outputs, targets)
        return mapped
    except Exception:  # not every function can be vectorized; one that is wrong fails again below
        one: Callable[..., Tensor] = torch.autograd.functional.hessian
        pairs = zip(outputs, targets, strict=True)
        return torch.stack(
            [one(lambda o, t=t: loss.compute_example_loss(o, t), o, create_graph=True) for o, t in pairs]
        )


Values = Mapping[str, Tensor]


class DifferentiableGradients(DenseGradient):
    """Dense gradients whose contractions overwrite nothing, since autograd needs all intermediate results."""

    def split_examples(self) -> Iterator[DifferentiableGradients]:
        """Yield all examples at once."""
        yield self

    def compute_squared_norms(self, groups: Sequence[slice]) -> Tensor:
        """Return the squared norm of every example's columns, summed within groups."""
        return sum_groups(self.values.square().reshape(self.columns, self.examples, -1).sum(2), groups)

    def compute_row_products(self, geometry: Matrices, scale: Tensor | None) -> Tensor:
        """Return the products between rows of the gradients as matrices, summed over columns and examples."""
        each = self.values.flatten(0, 1)
        rows: Tensor = vmap(geometry.view_as_matrices)(each if scale is None else each * scale)
        wide = rows.flatten(3).permute(1, 2, 0, 3).flatten(2)
        return wide @ wide.mT


@dataclass(frozen=True)
class DifferentiableProblem:
    """One batch, and the model's parameters with their graph.

    Attributes:
        problem: the model and the loss.
        batch: the examples.
        leaves: copies of all parameters that are trained or measured, connected to the model's own by the graph.
        shapes: how the measured parameters are viewed as matrices.
    """

    problem: Problem
    batch: Batch
    leaves: Values
    shapes: Mapping[str, Geometry]

    @classmethod
    def build(cls, problem: Problem, batch: Batch, shapes: Mapping[str, Geometry]) -> DifferentiableProblem:
        """Copy the parameters, keeping their graph."""
        network = problem.network
        leaves = {}
        for name, value in problem.model.named_parameters():
            if value.requires_grad or name in network.measured:
                # A copy, since some layers write to their parameters (an embedding with max_norm).
                copy = value.to(network.constants[name].dtype, copy=True)
                leaves[name] = copy if copy.requires_grad else copy.requires_grad_()
        return cls(problem, batch, leaves, shapes)

    @property
    def measured_leaves(self) -> dict[str, Tensor]:
        """Return the copies of the measured parameters."""
        return {name: self.leaves[name] for name in self.problem.network.measured}


def compute_sweep_statistics(
    live: DifferentiableProblem,
    wanted: Sequence[Statistic],
    plan: ColumnPlan,
    dice: ExampleRNG,
    looped: bool,
    deviations: Values,
) -> dict[str, dict[str, Tensor]]:
    """Return what :class:`saltflat.engine.sweep.Sweep` computes, for statistics of the shared sweep."""
    loss, targets = live.problem.loss, cast_targets(live.batch.targets)
    raw = live.problem.network(live.batch, leaves=live.leaves)
    live.problem.check_outputs(raw.detach(), live.batch)
    outputs = raw.double()
    loss.check(outputs.detach(), targets)
    share = float(loss.share(outputs.detach(), targets).sum())
    if share <= 0:
        raise EmptyDataError(
            "Expected at least one target that counts, but got targets that are all ignored or have no weight. Check "
            "ignore_index and the class weights, or omit the penalty for this batch."
        )
    kinds, sets = {each.of for each in wanted}, []
    if "curvature" in kinds:
        sets += [("curvature", *found) for found in compute_columns_with_graph(loss, outputs, targets, plan, dice)]
    if "gradient" in kinds:
        sets.append(("gradient", compute_gradient_with_graph(loss, outputs, targets).unsqueeze(0), 1))
    columns = torch.cat([each for _, each, _ in sets]).to(raw)
    again, gradients = (compute_gradients_by_loop if looped else compute_gradients_by_vmap)(live, columns)
    if not compute_relative_difference(raw.detach(), again.detach()) <= TOLERANCE[raw.dtype]:
        raise CoupledExamplesError(
            "Expected a model that treats examples independently, but got other outputs for examples in a batch than "
            "for the same examples alone, so per-example gradients are not defined. Try replacing layers that mix the "
            "batch (BatchNorm without running statistics, attention across the batch)."
        )
    shapes, starts, start = live.shapes, [], 0
    for _, each, _ in sets:
        starts.append(slice(start, start + len(each)))
        start += len(each)

    def compute_value(statistic: Statistic, name: str) -> Tensor:
        site = ParameterSite(name, live.leaves[name], shapes.get(name), deviations.get(name))
        total = sum(
            sign * statistic.total(DifferentiableGradients(gradients[name][where]), site).double()
            for (kind, _, sign), where in zip(sets, starts, strict=True)
            if kind == statistic.of
        )
        assert isinstance(total, Tensor)
        if statistic.kind == "entries":
            # The root of a sum of squares that is zero has no gradient; disconnect it.
            total = total.where(total != 0, torch.zeros_like(total))
        return total * _compute_statistic_scale(statistic, live.batch.examples, share)

    return {
        each.name: {
            name: compute_value(each, name) for name in live.measured_leaves if each.kind != "matrix" or name in shapes
        }
        for each in wanted
    }


def _compute_statistic_scale(statistic: Statistic, examples: int, share: float) -> float:
    """Return the factor that turns sums into curvature of the mean loss, or into gradients of single examples."""
    if statistic.of == "curvature":
        return 1 / share
    each: float = (examples / share) ** statistic.degree
    return each if statistic.kind == "example" else each / examples


def compute_gradients_by_vmap(live: DifferentiableProblem, columns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return outputs of every example alone, and ``(columns, examples, *shape)`` gradients, in one vectorized pass."""
    batch, network = live.batch, live.problem.network

    def compute_example(inputs: tuple[Any, Any], own: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        alone = Batch(*inputs, batch.targets[:1], batch.first, 1)
        pulled: Any = vjp(lambda leaves: network(alone, leaves={**live.leaves, **leaves}), live.measured_leaves)
        outputs, pull = pulled
        return outputs.squeeze(0), vmap(pull)(own.unsqueeze(1))[0]

    inputs = batch.map_tensors(lambda leaf: leaf.unsqueeze(1))
    axes = tree_map(lambda leaf: 0 if batch.has_example_axis(leaf) else None, (batch.args, batch.kwargs))
    outputs, gradients = vmap(compute_example, in_dims=(axes, 1))(inputs, columns)
    return outputs, {name: each.transpose(0, 1) for name, each in gradients.items()}


def compute_gradients_by_loop(live: DifferentiableProblem, columns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same, one example and column at a time, for models that cannot be vectorized."""
    outputs, rows = [], []
    for n in range(live.batch.examples):
        alone = live.problem.network(live.batch.cut(n, n + 1), leaves=live.leaves)
        outputs.append(alone)
        rows.append([_compute_vjp(alone, live.measured_leaves, column[n : n + 1]) for column in columns])
    gradients = {
        name: torch.stack([torch.stack([column[name] for column in row]) for row in rows], 1)
        for name in live.measured_leaves
    }
    return torch.cat(outputs), gradients


def _compute_vjp(outputs: Tensor, measured: Values, column: Tensor) -> dict[str, Tensor]:
    if not outputs.requires_grad:
        return {name: torch.zeros_like(value) for name, value in measured.items()}
    found = torch.autograd.grad(
        outputs, list(measured.values()), column, create_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(measured, found, strict=True))


def compute_feature_deviation(live: DifferentiableProblem) -> dict[str, Tensor]:
    """Return what :func:`saltflat.statistics.averages.compute_input_deviations` computes, with a graph."""
    network, seen, handles = live.problem.network, dict[str, list[Tensor]](), []
    try:
        for module, name in _find_weight_owners(network).items():

            def record_inputs(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name
            ) -> None:
                x = args[0] if args else kwargs["input"]
                axis = find_channel_axis(module, x)
                if axis is not None:
                    seen.setdefault(name, []).append(x.movedim(axis, -1).reshape(-1, x.shape[axis]).double())

            handles.append(module.register_forward_pre_hook(record_inputs, with_kwargs=True))
        network(live.batch, leaves=live.leaves)
    finally:
        for handle in handles:
            handle.remove()
    return {name: _compute_deviation(torch.cat(rows)) for name, rows in seen.items()}


def _find_weight_owners(network: Network) -> dict[nn.Module, str]:
    """Return modules with a layer rule that own the name of their weight; a tied weight uses its owner's channels."""
    named = {module: layer.names["weight"] for module, layer in network.layers.items() if "weight" in layer.names}
    return {m: name for m, name in named.items() if network.model.get_submodule(name.rpartition(".")[0]) is m}


def _compute_deviation(rows: Tensor) -> Tensor:
    variance, largest = rows.var(0, correction=0), rows.detach().abs().amax(0)
    flat = variance.detach().sqrt() <= 1e-12 * largest
    # The root of zero has no gradient.
    root = variance.masked_fill(flat, 1.0).sqrt()
    return root.masked_fill(largest == 0, torch.inf)


# Statistics that need their own pass and have a graph here; no others do.
COMPUTED_WITH_GRAPH: dict[str, Callable[[DifferentiableProblem], dict[str, Tensor]]] = {
    "feature_deviation": compute_feature_deviation
}


def compute_statistics_with_graph(
    live: DifferentiableProblem,
    needs: Sequence[StatisticRequest],
    plan: ColumnPlan,
    dice: ExampleRNG,
    looped: bool = False,
) -> dict[str, Values]:
    """Return every requested statistic by its key, with a graph to the parameters."""
    found: dict[str, Values] = {"weight": live.measured_leaves}
    for need in needs:
        if need.name in COMPUTED_WITH_GRAPH:
            found[need.key] = COMPUTED_WITH_GRAPH[need.name](live)
    wanted = [STATISTICS[need.name].bind(need.key, dict(need.options)) for need in needs if need.name in STATISTICS]
    if wanted:
        found.update(compute_sweep_statistics(live, wanted, plan, dice, looped, found.get("feature_deviation", {})))
    return found
