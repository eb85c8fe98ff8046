"""The loss of all the data: its value, gradient and Hessian products at the model's or other weights.

Means over examples are kept group by group for standard errors; see :mod:`saltflat.engine.context`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from saltflat.engine.context import Context
from saltflat.engine.data import Batch
from saltflat.engine.example_groups import GroupedMean, iterate_groups
from saltflat.engine.losses import find_hits
from saltflat.engine.problem import cast_targets
from saltflat.errors import EmptyDataError, NonFiniteError, NotDefinedError

Weights = Mapping[str, Tensor]

# Largest relative difference between u'Hv and v'Hu that counts as rounding.
SYMMETRY = {torch.float32: 1e-3, torch.float64: 1e-8}
# Step sizes of differences of gradients, relative to the weights.
STEPS = {torch.float32: (1e-2, 3e-3, 1e-3), torch.float64: (1e-4, 1e-5, 1e-6, 1e-7)}
# The node that torch inserts if a backward pass must not be differentiated.
ONCE = "torch::autograd::Error"
# Contexts whose second derivatives were checked.
_CHECKED: WeakSet[Context] = WeakSet()


def compute_loss_at(context: Context, weights: Weights | None = None) -> float:
    """Return the mean loss with ``weights`` in place of the parameters of these names; not finite if it overflows."""
    return compute_grouped_losses(context, weights).compute_mean()


def compute_grouped_losses(context: Context, weights: Weights | None = None) -> GroupedMean:
    """Return the same group by group."""
    found = GroupedMean(context.groups)
    with torch.no_grad():
        for batch in context.read_own_chunks(0):
            outputs, targets = _compute_outputs(context, batch, _make_leaves(context, weights), weights is not None)
            loss = context.problem.loss
            found.add(batch, loss.total(outputs, targets), loss.share(outputs, targets))
    found.combine(context.processes)
    check_share(float(found.shares.sum()))
    return found


def compute_gradient_at(context: Context, weights: Weights | None = None) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss and its gradient, in float64."""
    total = share = 0.0
    sums = _make_zeros(context)
    for batch in context.read_own_chunks(0):
        leaves = _make_leaves(context, weights)
        outputs, targets = _compute_outputs(context, batch, leaves, weights is not None)
        loss = context.problem.loss.total(outputs, targets).sum()
        if loss.requires_grad:  # a constant loss has a gradient of zero
            _add_gradients(sums, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
        total += float(loss.detach())
        share += float(context.problem.loss.share(outputs.detach(), targets).sum())
    (total, share), (sums,) = context.processes.sum_parts("a gradient", (total, share), [sums])
    share = check_share(share)
    return total / share, {name: each / share for name, each in sums.items()}


def compute_hessian_product(context: Context, vector: Weights) -> dict[str, Tensor]:
    """Return the true Hessian of the mean loss times a vector, in float64, by differentiating twice."""
    return compute_hessian_products(context, [vector])[0]


def compute_hessian_products(context: Context, vectors: Sequence[Weights]) -> list[dict[str, Tensor]]:
    """Return the same for several vectors, which share a forward pass and the first backward pass."""
    sums = [_make_zeros(context) for _ in vectors]

    def add_chunk(leaves: Weights, slopes: Weights) -> None:
        for total, vector in zip(sums, vectors, strict=True):
            bent = [(g * vector[name].to(g)).sum().double() for name, g in slopes.items()]
            if bent:
                _add_gradients(total, _differentiate_again(torch.stack(bent).sum(), list(leaves.values())))

    return _compute_means(context, _visit_chunks(context, add_chunk, context.read_own_chunks(1)), sums)


def compute_hessian_block_products(context: Context, vectors: Weights) -> dict[str, Tensor]:
    """Return the diagonal block of the Hessian of each given parameter times its vectors, ``(vectors, *shape)``."""
    sums = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in vectors.items()}

    def add_chunk(leaves: Weights, slopes: Weights) -> None:
        for name in slopes.keys() & vectors.keys():
            for total, vector in zip(sums[name], vectors[name], strict=True):
                (found,) = _differentiate_again((slopes[name] * vector.to(slopes[name])).sum(), [leaves[name]])
                if found is not None:
                    total += found

    return _compute_means(context, _visit_chunks(context, add_chunk, context.read_own_chunks(1)), [sums])[0]


def compute_grouped_curvature(context: Context, vector: Weights) -> GroupedMean:
    """Return v' H v of the mean loss, group by group."""
    assert context.groups is not None
    found, along = GroupedMean(context.groups), 0.0

    def add_chunk(leaves: Weights, slopes: Weights) -> None:
        nonlocal along
        bent = [(g * vector[name].to(g)).sum().double() for name, g in slopes.items()]
        if bent:
            product = _differentiate_again(torch.stack(bent).sum(), list(leaves.values()))
            pairs = zip(leaves, product, strict=True)
            along += sum(float((each.double() * vector[name]).sum()) for name, each in pairs if each is not None)

    for group, batch in iterate_groups(context.read_own_batches(), context.groups, context.limit // 8):
        along = 0.0
        share = _visit_chunks(context, add_chunk, context.split_batch(batch, 1))
        found.add_sums(group, batch, along, share)
    found.combine(context.processes)
    return found


def compute_gauss_newton_products(context: Context, vectors: Sequence[Weights]) -> list[dict[str, Tensor]]:
    """Return the Gauss-Newton matrix of the mean loss over all parameters times several vectors: J' B J v."""
    share, sums = 0.0, [_make_zeros(context) for _ in vectors]
    for batch in context.read_own_chunks(1):
        leaves = _make_leaves(context, None)
        outputs, targets = _compute_outputs(context, batch, leaves)
        at = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(context.problem.loss.total(at, targets).sum(), at, create_graph=True)
        # The gradient of <w, outputs> is J'w, linear in w: its derivative along v with respect to w is Jv.
        w = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad((outputs * w).sum(), list(leaves.values()), create_graph=True, allow_unused=True)
        reached = {name: each for name, each in zip(leaves, pulled, strict=True) if each is not None}
        share += float(context.problem.loss.share(outputs.detach(), targets).sum())
        if not slope.requires_grad or not reached:  # a loss without curvature, or outputs without parameters
            continue
        if any(node.name() == ONCE for node in _iterate_nodes(pulled)):
            raise NotDefinedError(
                "needs to differentiate the backward pass, which one of the model's autograd functions forbids: it is "
                "marked once_differentiable"
            )
        for total, vector in zip(sums, vectors, strict=True):
            inner = torch.stack([(each * vector[name].to(each)).sum().double() for name, each in reached.items()]).sum()
            (along,) = _differentiate_again(inner, [w])
            if along is None:
                continue
            (bent,) = torch.autograd.grad(slope, at, along, retain_graph=True)
            _add_gradients(
                total, torch.autograd.grad(outputs, list(leaves.values()), bent, retain_graph=True, allow_unused=True)
            )
        del outputs, pulled, reached  # and the graphs with them, before those of the next chunk
    return _compute_means(context, share, sums)


def _compute_means(context: Context, share: float, sums: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return sums over the examples of all processes, divided by their share."""
    (share,), totals = context.processes.sum_parts("products with the curvature", (share,), sums)
    check_share(share)
    return [{name: each / share for name, each in total.items()} for total in totals]


def _visit_chunks(context: Context, use: Callable[[Weights, Weights], None], chunks: Iterable[Batch]) -> float:
    """Call ``use`` with the leaves and the loss's gradients of each chunk; return the sum of the shares.

    Gradients have a graph. Parameters without effect, and those with a constant gradient, are left out.
    """
    share = 0.0
    for batch in chunks:
        if context not in _CHECKED:
            _check_second_derivatives(context, batch.cut(0, 2))
            _CHECKED.add(context)
        leaves = _make_leaves(context, None)
        outputs, targets = _compute_outputs(context, batch, leaves)
        loss = context.problem.loss.total(outputs, targets).sum()
        share += float(context.problem.loss.share(outputs.detach(), targets).sum())
        slopes: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
        use(leaves, {n: g for n, g in zip(leaves, slopes, strict=True) if g is not None and g.requires_grad})
        del outputs, loss, slopes  # and the graphs with them, before those of the next chunk
    return share


def _differentiate_again(inner: Tensor, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Differentiate a function of gradients; the graph is kept."""
    try:
        return torch.autograd.grad(inner, leaves, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "not implemented" not in str(error) and "once_differentiable" not in str(error):
            raise
        raise NotDefinedError(f"needs second derivatives, which torch does not have for this model: {error}") from error


def _check_second_derivatives(context: Context, batch: Batch) -> None:
    """Check that the backward passes of the model's own autograd functions can be differentiated.

    Torch silently ignores the second derivatives of functions that are marked ``once_differentiable``, or whose
    backward pass detaches what it saved. The first can be seen in the graph; the second is found by comparing a product
    with the Hessian with differences of gradients.
    """
    leaves = _make_leaves(context, None)
    outputs, targets = _compute_outputs(context, batch, leaves)
    loss = context.problem.loss.total(outputs, targets).sum()
    if not loss.requires_grad:
        return
    own = {
        type(node).__name__.removesuffix("Backward")
        for node in _iterate_nodes([loss])
        if isinstance(node, BackwardCFunction)
    }
    if not own:
        return
    named = " and ".join(sorted(own))
    slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
    if any(node.name() == ONCE for node in _iterate_nodes(slopes)):
        raise NotDefinedError(
            f"needs second derivatives, which the model's autograd function {named} does not have: its backward pass "
            "is marked once_differentiable"
        )
    vector = {n: torch.ones_like(v).bernoulli_(generator=_make_generator(v)).mul_(2).sub_(1) for n, v in leaves.items()}
    bent = [(g * vector[n]).sum() for n, g in zip(leaves, slopes, strict=True) if g is not None and g.requires_grad]
    second = _make_zeros(context)
    if bent:
        _add_gradients(second, _differentiate_again(torch.stack(bent).sum(), list(leaves.values())))
    size = compute_norm(context.problem.network.measured) / compute_norm(vector)
    before: dict[str, Tensor] | None = None
    for step in STEPS[max((v.dtype for v in leaves.values()), key=lambda kind: SYMMETRY[kind])]:
        found = _make_zeros(context)
        for sign in (1, -1):
            there = {name: leaf.detach() + sign * step * size * vector[name] for name, leaf in leaves.items()}
            places = _make_leaves(context, there)
            moved_outputs, _ = _compute_outputs(context, batch, places, True)
            total = context.problem.loss.total(moved_outputs, targets).sum()
            slope = torch.autograd.grad(total, list(places.values()), allow_unused=True)
            _add_gradients(found, tuple(None if each is None else sign * each / (2 * step * size) for each in slope))
        # If two step sizes agree, there is no kink between them, and differences can be trusted.
        if before is not None and _compute_distance(found, before) <= 0.01:
            if _compute_distance(found, second) > 0.05:
                raise NotDefinedError(
                    "needs second derivatives, and those that torch gives for this model are wrong: the backward pass "
                    f"of its autograd function {named} cannot be differentiated"
                )
            return
        before = found


def _iterate_nodes(tensors: Sequence[Tensor | None]) -> Iterator[Any]:
    """Yield all nodes of the graph of these tensors."""
    seen: set[Any] = set()
    waiting = [each.grad_fn for each in tensors if each is not None]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def _make_generator(value: Tensor) -> torch.Generator:
    return torch.Generator(value.device).manual_seed(0)


def _compute_distance(one: Weights, two: Weights) -> float:
    """Return the distance of two vectors relative to the longer one."""
    longest = max(compute_norm(one), compute_norm(two))
    return compute_norm({name: one[name] - two[name] for name in one}) / longest if longest else 0.0


def check_symmetric(context: Context, difference: float) -> None:
    """Check that u'Hv equals v'Hu, which differ in the first digits if torch's second derivatives are wrong.

    ``difference`` is relative to the lengths of u, v and their products.
    """
    coarsest = max(SYMMETRY[each.dtype] for each in context.problem.network.measured.values())
    if difference > coarsest:
        raise NotDefinedError(
            f"needs second derivatives, and those that torch gives for this model are wrong: u'Hv and v'Hu differ by "
            f"{difference:.0e} of their size (weight_norm is known for it)"
        )


def compute_accuracy_at(context: Context, weights: Weights | None = None) -> float:
    """Return the fraction of targets that are predicted correctly, over all positions that are not ignored."""
    right = counted = 0
    with torch.no_grad():
        for batch in context.read_own_chunks(0):
            outputs, targets = _compute_outputs(context, batch, _make_leaves(context, weights), weights is not None)
            met, kept = find_hits(context.problem.loss, outputs, targets)
            right, counted = right + int((met & kept).sum()), counted + int(kept.sum())
    (met_all, counted_all), _ = context.processes.sum_parts("the accuracy", (right, counted))
    return met_all / check_share(counted_all)


def compute_scales(context: Context) -> dict[str, Tensor]:
    """Return the absolute values of the parameters, in float64."""
    return {name: value.double().abs() for name, value in context.problem.network.measured.items()}


def compute_moved_weights(context: Context, step: Weights) -> dict[str, Tensor]:
    """Return the parameters plus ``step``, in float64."""
    return {name: value.double() + step[name] for name, value in context.problem.network.measured.items()}


def compute_norm(vector: Weights) -> float:
    """Return the norm of a vector with one part per parameter."""
    return float(torch.stack([each.double().square().sum().cpu() for each in vector.values()]).sum().sqrt())


def check_finite_loss(loss: float) -> float:
    """Return the mean loss after checking that it is finite."""
    if not isfinite(loss):
        raise NonFiniteError(f"Expected a finite mean loss, but got {loss}. Check the targets and the weights.")
    return loss


def _make_leaves(context: Context, weights: Weights | None) -> dict[str, Tensor]:
    given = weights or {}
    measured = context.problem.network.measured
    return {name: given.get(name, value).to(value).detach().requires_grad_() for name, value in measured.items()}


def _compute_outputs(context: Context, batch: Batch, leaves: Weights, is_moved: bool = False) -> tuple[Tensor, Tensor]:
    """Return outputs and targets in float64; ``is_moved`` says that the leaves are not the model's own weights."""
    outputs, targets = context.problem.network(batch, leaves=leaves).double(), cast_targets(batch.targets)
    context.problem.loss.check(outputs, targets)
    if not is_moved:
        context.independence.add(batch, outputs)
    return outputs, targets


def _make_zeros(context: Context) -> dict[str, Tensor]:
    measured = context.problem.network.measured
    return {name: torch.zeros_like(value, dtype=torch.float64) for name, value in measured.items()}


def _add_gradients(sums: dict[str, Tensor], found: tuple[Tensor | None, ...]) -> None:
    for total, each in zip(sums.values(), found, strict=True):
        if each is not None:
            total += each


def check_share(share: float) -> float:
    """Return the divisor of the loss, or raise an error if there is none."""
    if share <= 0:
        raise EmptyDataError(
            "Expected at least one target that counts, but got targets that are all ignored or have no weight. Check "
            "ignore_index and the class weights."
        )
    return share
