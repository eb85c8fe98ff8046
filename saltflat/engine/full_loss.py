"""The mean loss of all the data, and its derivatives, at any weights.

Nothing here uses the layers' rules, and the user's parameters are never touched: the network runs on stand-ins. Data is
taken in chunks that fit the memory; sums over them are kept in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from saltflat.engine.context import NotDefinedError, Setting
from saltflat.engine.custom_losses import NormalizedLogitsLoss
from saltflat.engine.data import Batch
from saltflat.engine.losses import BinaryCrossEntropy, CrossEntropy
from saltflat.engine.problem import cast_targets
from saltflat.engine.sampling import GroupedMean, iterate_groups
from saltflat.errors import EmptyDataError, NonFiniteError

Weights = Mapping[str, Tensor]

# Largest difference between u'Hv and v'Hu that is still rounding.
SYMMETRY = {torch.float32: 1e-3, torch.float64: 1e-8}
# Of differences of gradients, relative to the weights.
STEPS = {torch.float32: (1e-2, 3e-3, 1e-3), torch.float64: (1e-4, 1e-5, 1e-6, 1e-7)}
# What torch puts where a backward pass must not be differentiated.
ONCE = "torch::autograd::Error"
# Settings whose second derivatives were found to be there.
_CHECKED: WeakSet[Setting] = WeakSet()


def compute_loss_at(setting: Setting, weights: Weights | None = None) -> float:
    """The mean loss with ``weights`` in place of the parameters of these names; infinite or NaN if it overflows."""
    return compute_grouped_losses(setting, weights).compute_mean()


def compute_grouped_losses(setting: Setting, weights: Weights | None = None) -> GroupedMean:
    """The same, group of examples by group."""
    found = GroupedMean(setting.groups)
    with torch.no_grad():
        for batch in setting.read_chunks(0):
            outputs, targets = _compute_outputs(setting, batch, _make_leaves(setting, weights), weights is not None)
            loss = setting.problem.loss
            found.add(batch, loss.total(outputs, targets), loss.share(outputs, targets))
    _check_share(float(found.shares.sum()))
    return found


def compute_gradient_at(setting: Setting, weights: Weights | None = None) -> tuple[float, dict[str, Tensor]]:
    """The mean loss and its gradient, in float64."""
    total = share = 0.0
    sums = _make_zeros(setting)
    for batch in setting.read_chunks(0):
        leaves = _make_leaves(setting, weights)
        outputs, targets = _compute_outputs(setting, batch, leaves, weights is not None)
        loss = setting.problem.loss.total(outputs, targets).sum()
        _add_gradients(sums, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
        total += float(loss.detach())
        share += float(setting.problem.loss.share(outputs.detach(), targets).sum())
    share = _check_share(share)
    return total / share, {name: each / share for name, each in sums.items()}


def compute_hessian_product(setting: Setting, vector: Weights) -> dict[str, Tensor]:
    """The true Hessian of the mean loss times a vector, in float64, by differentiating twice."""
    return compute_hessian_products(setting, [vector])[0]


def compute_hessian_products(setting: Setting, vectors: Sequence[Weights]) -> list[dict[str, Tensor]]:
    """The same for several vectors, which share a forward pass and the first backward pass."""
    sums = [_make_zeros(setting) for _ in vectors]

    def add_chunk(leaves: Weights, slopes: Weights) -> None:
        for total, vector in zip(sums, vectors, strict=True):
            bent = [(g * vector[name].to(g)).sum().double() for name, g in slopes.items()]
            if bent:
                _add_gradients(total, _differentiate_again(torch.stack(bent).sum(), list(leaves.values())))

    share = _check_share(_visit_chunks(setting, add_chunk, setting.read_chunks(1)))
    return [{name: each / share for name, each in total.items()} for total in sums]


def compute_hessian_block_products(setting: Setting, vectors: Weights) -> dict[str, Tensor]:
    """The diagonal blocks of the Hessian, one for each given parameter, times ``(vectors, *shape)`` of its own."""
    sums = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in vectors.items()}

    def add_chunk(leaves: Weights, slopes: Weights) -> None:
        for name in slopes.keys() & vectors.keys():
            for total, vector in zip(sums[name], vectors[name], strict=True):
                (found,) = _differentiate_again((slopes[name] * vector.to(slopes[name])).sum(), [leaves[name]])
                if found is not None:
                    total += found

    share = _check_share(_visit_chunks(setting, add_chunk, setting.read_chunks(1)))
    return {name: each / share for name, each in sums.items()}


def compute_grouped_curvature(setting: Setting, vector: Weights) -> GroupedMean:
    """v' H v of the mean loss, group of examples by group."""
    assert setting.groups is not None
    found, along = GroupedMean(setting.groups), 0.0

    def add_chunk(leaves: Weights, slopes: Weights) -> None:
        nonlocal along
        bent = [(g * vector[name].to(g)).sum().double() for name, g in slopes.items()]
        if bent:
            product = _differentiate_again(torch.stack(bent).sum(), list(leaves.values()))
            pairs = zip(leaves, product, strict=True)
            along += sum(float((each.double() * vector[name]).sum()) for name, each in pairs if each is not None)

    for group, batch in iterate_groups(setting.problem.read_batches(), setting.groups, setting.limit // 8):
        along = 0.0
        share = _visit_chunks(setting, add_chunk, setting.split_batch(batch, 1))
        found.add_sums(group, batch, along, share)
    return found


def compute_gauss_newton_products(setting: Setting, vectors: Sequence[Weights]) -> list[dict[str, Tensor]]:
    """The Gauss-Newton matrix of the mean loss over all parameters times several vectors: J' B J v."""
    share, sums = 0.0, [_make_zeros(setting) for _ in vectors]
    for batch in setting.read_chunks(1):
        leaves = _make_leaves(setting, None)
        outputs, targets = _compute_outputs(setting, batch, leaves)
        at = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(setting.problem.loss.total(at, targets).sum(), at, create_graph=True)
        # The gradient of <w, outputs> is J'w, linear in w: its derivative along v with respect to w is Jv.
        w = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad((outputs * w).sum(), list(leaves.values()), create_graph=True, allow_unused=True)
        reached = {name: each for name, each in zip(leaves, pulled, strict=True) if each is not None}
        share += float(setting.problem.loss.share(outputs.detach(), targets).sum())
        if not slope.requires_grad or not reached:  # a loss without curvature, or outputs without parameters
            continue
        if any(node.name() == ONCE for node in _iterate_nodes(pulled)):
            raise NotDefinedError(
                "needs to differentiate the backward pass, and one of the model's autograd functions forbids it: it "
                "is marked once_differentiable"
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
    share = _check_share(share)
    return [{name: each / share for name, each in total.items()} for total in sums]


def _visit_chunks(setting: Setting, use: Callable[[Weights, Weights], None], chunks: Iterable[Batch]) -> float:
    """Call ``use`` with the leaves and the loss's gradients of each chunk; return the sum of the shares.

    Gradients come with a graph. A parameter without effect has none, and one that enters linearly a constant one: both
    are left out.
    """
    share = 0.0
    for batch in chunks:
        if setting not in _CHECKED:
            _check_second_derivatives(setting, batch.cut(0, 2))
            _CHECKED.add(setting)
        leaves = _make_leaves(setting, None)
        outputs, targets = _compute_outputs(setting, batch, leaves)
        loss = setting.problem.loss.total(outputs, targets).sum()
        share += float(setting.problem.loss.share(outputs.detach(), targets).sum())
        slopes: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
        use(leaves, {n: g for n, g in zip(leaves, slopes, strict=True) if g is not None and g.requires_grad})
        del outputs, loss, slopes  # and the graphs with them, before those of the next chunk
    return share


def _differentiate_again(inner: Tensor, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of something that is made of gradients; the graph stays."""
    try:
        return torch.autograd.grad(inner, leaves, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "not implemented" not in str(error) and "once_differentiable" not in str(error):
            raise
        raise NotDefinedError(f"needs second derivatives, which torch does not have for this model: {error}") from error


def _check_second_derivatives(setting: Setting, batch: Batch) -> None:
    """Refuse a model whose own autograd functions have a backward pass that cannot be differentiated.

    Torch leaves out what such a function hides, without a word: one marked ``once_differentiable``, or one whose
    backward pass detaches what it saved. The first shows in the graph; the second by comparing a product with the
    Hessian with differences of gradients.
    """
    leaves = _make_leaves(setting, None)
    outputs, targets = _compute_outputs(setting, batch, leaves)
    loss = setting.problem.loss.total(outputs, targets).sum()
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
    second = _make_zeros(setting)
    if bent:
        _add_gradients(second, _differentiate_again(torch.stack(bent).sum(), list(leaves.values())))
    size = compute_norm(setting.problem.network.measured) / compute_norm(vector)
    before: dict[str, Tensor] | None = None
    for step in STEPS[max((v.dtype for v in leaves.values()), key=lambda kind: SYMMETRY[kind])]:
        found = _make_zeros(setting)
        for sign in (1, -1):
            there = {name: leaf.detach() + sign * step * size * vector[name] for name, leaf in leaves.items()}
            places = _make_leaves(setting, there)
            moved_outputs, _ = _compute_outputs(setting, batch, places, True)
            total = setting.problem.loss.total(moved_outputs, targets).sum()
            slope = torch.autograd.grad(total, list(places.values()), allow_unused=True)
            _add_gradients(found, tuple(None if each is None else sign * each / (2 * step * size) for each in slope))
        # Where two steps agree there is no kink between them, and differences can be trusted.
        if before is not None and _compute_distance(found, before) <= 0.01:
            if _compute_distance(found, second) > 0.05:
                raise NotDefinedError(
                    "needs second derivatives, and those that torch gives for this model are wrong: the backward pass "
                    f"of its autograd function {named} cannot be differentiated"
                )
            return
        before = found


def _iterate_nodes(tensors: Sequence[Tensor | None]) -> Iterator[Any]:
    """Everything that backward passes from these go through."""
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
    """Relative to the longer one."""
    longest = max(compute_norm(one), compute_norm(two))
    return compute_norm({name: one[name] - two[name] for name in one}) / longest if longest else 0.0


def check_symmetric(setting: Setting, difference: float) -> None:
    """For any two vectors u'Hv is v'Hu; where torch's second derivatives are wrong they differ in the first digits.

    ``difference`` is relative to the lengths of u, v and their products.
    """
    coarsest = max(SYMMETRY[each.dtype] for each in setting.problem.network.measured.values())
    if difference > coarsest:
        raise NotDefinedError(
            f"needs second derivatives, and those that torch gives for this model are wrong: u'Hv and v'Hu differ by "
            f"{difference:.0e} of their size (weight_norm is known for it)"
        )


def compute_accuracy_at(setting: Setting, weights: Weights | None = None) -> float:
    """The fraction of targets that the network gets right; at every position, without those that are ignored."""
    right = counted = 0
    with torch.no_grad():
        for batch in setting.read_chunks(0):
            outputs, targets = _compute_outputs(setting, batch, _make_leaves(setting, weights), weights is not None)
            met, kept = find_hits(setting, outputs, targets)
            right, counted = right + int((met & kept).sum()), counted + int(kept.sum())
    return right / _check_share(counted)


def compute_scales(setting: Setting) -> dict[str, Tensor]:
    """The absolute values of the parameters, in float64."""
    return {name: value.double().abs() for name, value in setting.problem.network.measured.items()}


def compute_moved_weights(setting: Setting, step: Weights) -> dict[str, Tensor]:
    """The parameters plus ``step``, in float64."""
    return {name: value.double() + step[name] for name, value in setting.problem.network.measured.items()}


def compute_norm(vector: Weights) -> float:
    """The length of a vector that is kept by parameters."""
    return float(torch.stack([each.double().square().sum().cpu() for each in vector.values()]).sum().sqrt())


def check_finite_loss(loss: float) -> float:
    """The mean loss where the network stands must be a number."""
    if not isfinite(loss):
        raise NonFiniteError(
            f"Expected a finite one, but got a mean loss of {loss}. Check the targets and the weights."
        )
    return loss


def _make_leaves(setting: Setting, weights: Weights | None) -> dict[str, Tensor]:
    given = weights or {}
    measured = setting.problem.network.measured
    return {name: given.get(name, value).to(value).detach().requires_grad_() for name, value in measured.items()}


def _compute_outputs(setting: Setting, batch: Batch, leaves: Weights, is_moved: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs and targets in float64; ``is_moved`` if the leaves are not the model's own weights."""
    outputs, targets = setting.problem.network(batch, leaves=leaves).double(), cast_targets(batch.targets)
    setting.problem.loss.check(outputs, targets)
    if not is_moved:
        setting.check_uncoupled(batch, outputs)
    return outputs, targets


def find_hits(setting: Setting, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets are met, and which count."""
    loss = setting.problem.loss
    if isinstance(loss, NormalizedLogitsLoss):  # the largest logit stays the largest
        loss = loss.inner
    if isinstance(loss, BinaryCrossEntropy):
        return (outputs > 0) == (targets > 0.5), torch.ones_like(targets, dtype=torch.bool)
    if not isinstance(loss, CrossEntropy):
        raise NotDefinedError(f"needs classes to be right or wrong about, which {type(loss).__name__} does not have")
    axis = loss.find_class_axis(outputs, targets)
    # Outputs that overflowed predict nothing.
    found = outputs.argmax(axis).where(outputs.isfinite().all(axis), targets.new_full((), -1, dtype=torch.long))
    if targets.is_floating_point():
        return found == targets.argmax(axis), torch.ones_like(found, dtype=torch.bool)
    return found == targets, targets != loss.ignore_index


def _make_zeros(setting: Setting) -> dict[str, Tensor]:
    measured = setting.problem.network.measured
    return {name: torch.zeros_like(value, dtype=torch.float64) for name, value in measured.items()}


def _add_gradients(sums: dict[str, Tensor], found: tuple[Tensor | None, ...]) -> None:
    for total, each in zip(sums.values(), found, strict=True):
        if each is not None:
            total += each


def _check_share(share: float) -> float:
    if share <= 0:
        raise EmptyDataError(
            "Expected at least one that counts, but got targets that are all ignored or have no weight. Check "
            "ignore_index and the class weights."
        )
    return share
