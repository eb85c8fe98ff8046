"""Gradients of single examples: their inner products, the Fisher matrix, and gradients by the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from saltflat.engine.context import Context, StatisticResult
from saltflat.engine.data import Batch
from saltflat.engine.example_groups import GroupedMean
from saltflat.engine.gram import compute_gram_matrix, iterate_gradients, use_float64
from saltflat.engine.losses import CrossEntropy
from saltflat.engine.statistic import statistic
from saltflat.errors import NotDefinedError, OptionError

LARGEST = 2000


@statistic(
    per="network",
    meaning="Mean over examples of gradient times gradient', over all parameters at once.",
    passes=5,
    in_float64=True,
)
def fisher_matrix(context: Context) -> StatisticResult:
    """Return the observed Fisher matrix, ``(W, W)`` for W parameters, of gradients in float64."""
    size = sum(value.numel() for value in context.problem.network.measured.values())
    if size > LARGEST:
        raise NotDefinedError(f"is for models of at most {LARGEST} parameters, and this one has {size}")
    total = torch.zeros(size, size, dtype=torch.float64)
    with use_float64(context) as wide:
        for rows in iterate_gradients(wide):
            total += rows.mT @ rows
    _, (sums,) = context.processes.sum_parts("the Fisher matrix", (), [{"": total}])
    return StatisticResult(sums[""] / context.examples)


@statistic(
    per="network",
    meaning="Inner products between single examples' gradients, of a pool of examples.",
    passes=5,
    in_float64=True,
)
def gradient_gram(context: Context, *, pool: int = 1000) -> StatisticResult:
    """Return ``gram``, ``(P, P)`` in float64, with P the smaller of ``pool`` and the number of examples.

    Beside it ``eps``, the rounding of the gradients, and the ``seed`` to draw subsets with. The gradients are taken in
    float64, whatever the precision of the model: most eigenvalues are smaller than the rounding of float32.
    """
    if isinstance(pool, bool) or not isinstance(pool, int) or pool < 1:
        raise OptionError(f"Expected at least 1, but got pool={pool!r}. Try leaving it out for 1000.")
    # Counted, not expected: a loader may drop the last examples or sample some of them.
    examples = context.examples
    noise = torch.Generator().manual_seed(context.seed)
    chosen = torch.randperm(examples, generator=noise)[:pool].sort().values
    with use_float64(context) as wide:
        gram = compute_gram_matrix(wide, chosen)
    return StatisticResult({"gram": gram, "eps": torch.finfo(torch.float64).eps, "seed": context.seed})


@statistic(
    per="network", meaning="Mean squared spectral norm of the derivative of the probabilities by the inputs.", passes=25
)
def input_jacobian(context: Context) -> StatisticResult:
    """Return the mean over examples of the largest squared singular value of d softmax(f(x)) / dx."""
    loss = context.problem.loss
    if not isinstance(loss, CrossEntropy):
        raise NotDefinedError(f"needs the class probabilities of cross-entropy; the loss is {type(loss).__name__}")
    by_group, done, room = GroupedMean(context.groups), 0, context.limit // 2
    with context.reserve(room):
        for batch in context.read_own_chunks(0):
            for part in _split_batch(context, batch, room):
                found = _compute_squared_norms(context, loss, part)
                by_group.add(part, found, torch.ones_like(found))
                done += part.examples
                context.tick("Derivatives by the inputs", done, None)
    by_group.combine(context.processes)
    return StatisticResult(by_group.compute_mean(), without=by_group.make_leave_one_out())


@statistic(
    per="network",
    meaning="First-order distance from each input to the decision boundary, negative where it is misclassified.",
    passes=4,
)
def input_margins(context: Context) -> StatisticResult:
    """Return one number per example, in order: its logit less the largest other, over the length of their gradient.

    Infinite where the gradient is zero and the logits differ. Ignored targets have none.
    """
    loss = context.problem.loss
    if not isinstance(loss, CrossEntropy):
        raise NotDefinedError(f"needs the classes of cross-entropy; the loss is {type(loss).__name__}")
    chunks: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in context.read_own_chunks(2):
        kept = batch.targets != loss.ignore_index
        chunks.append((batch.example_indices, kept.cpu(), _compute_margins(context, batch, kept).cpu()))
        context.tick("Margins of the inputs", batch.first + batch.examples, None)
    every = chain.from_iterable(context.processes.gather("margins", chunks))
    numbers, use, found = map(torch.cat, zip(*every, strict=True))
    order = torch.argsort(numbers)
    numbers, use, found = numbers[order], use[order], found[order]
    member = None if context.groups is None else context.groups.find_groups(numbers)
    if member is None or len(present := member.unique()) < 2:
        return StatisticResult(found[use])
    return StatisticResult(found[use], without=lambda group: found[use & (member != present[group])])


def _compute_margins(context: Context, batch: Batch, kept: Tensor) -> Tensor:
    """Return the first-order distances of the inputs of a batch, of those ``kept`` to the planes of their classes."""
    free, outputs = _run_on_free_inputs(context, batch)
    if outputs.dim() != 2 or batch.targets.is_floating_point() or outputs.shape[1] < 2:
        raise NotDefinedError("needs one class number per example, and outputs of shape (N, classes)")
    own = batch.targets.where(kept, 0)[:, None]  # ignored targets need not be classes
    others = outputs.detach().scatter(1, own, -torch.inf).argmax(1, keepdim=True)
    lead = (outputs.gather(1, own) - outputs.gather(1, others))[:, 0]
    slopes = torch.autograd.grad(lead.sum(), free)[0].reshape(batch.examples, -1).double().norm(dim=1)
    lead = lead.detach().double()
    return torch.where(lead == 0, lead, lead / slopes)


def _split_batch(context: Context, batch: Batch, room: int) -> Iterator[Batch]:
    """Split a chunk into parts whose Jacobians fit in so many bytes."""
    with torch.no_grad():
        outputs = context.problem.network(batch.cut(0, 1))
    # The rows as they are found, stacked, and in float64.
    size = 24 * outputs.numel() * get_only_input(batch)[0].numel()
    step = max(1, room // size)
    for start in range(0, batch.examples, step):
        yield batch.cut(start, start + step)


def get_only_input(batch: Batch) -> Tensor:
    """Return the only input, which must be a tensor of real numbers."""
    tensors = batch.list_tensors()
    if len(tensors) != 1 or not tensors[0].is_floating_point():
        got = ", ".join(str(each.dtype) for each in tensors)
        raise NotDefinedError(f"needs one input of real numbers; the inputs are {got}")
    return tensors[0]


def _run_on_free_inputs(context: Context, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the inputs, as a leaf of a graph, and the outputs."""
    free = get_only_input(batch).detach().requires_grad_()
    args, kwargs = batch.map_tensors(lambda tensor: free)
    return free, context.problem.network(Batch(args, kwargs, batch.targets, batch.first, batch.examples))


def _compute_squared_norms(context: Context, loss: CrossEntropy, batch: Batch) -> Tensor:
    free, outputs = _run_on_free_inputs(context, batch)
    axis = loss.find_class_axis(outputs, batch.targets)
    probabilities = outputs.softmax(axis).reshape(batch.examples, -1).sum(0)
    rows = [torch.autograd.grad(each, free, retain_graph=True)[0].reshape(batch.examples, -1) for each in probabilities]
    jacobian = torch.stack(rows, 1).double()
    small = jacobian if jacobian.shape[1] <= jacobian.shape[2] else jacobian.mT
    values: Tensor = torch.linalg.eigvalsh(small @ small.mT)
    return values[:, -1]
