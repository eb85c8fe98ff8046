"""The certificate: compare the Gauss-Newton matrix of each parameter with its Hessian on a few examples."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from saltflat.engine.context import Context
from saltflat.engine.data import Batch, Data
from saltflat.engine.losses import LossLike
from saltflat.engine.problem import Problem, cast_targets
from saltflat.engine.session import open_session
from saltflat.engine.strategy import compute_checked_outputs
from saltflat.errors import EmptyDataError, OptionError
from saltflat.gradients.base import HeapTrimmer
from saltflat.validation import check_seed, parse_bytes, take_turns

EXAMPLES = 8  # compared unless the caller says otherwise
GRAPHS = 32  # memory to differentiate twice, in multiples of a forward pass's results, gaps in the heap included


@dataclass(frozen=True)
class CurvatureComparison:
    """Curvature of the mean loss along one random direction of a parameter, by its Hessian and by Gauss-Newton.

    Attributes:
        hessian: v'Hv.
        gauss_newton: v'Gv.
        gap: their relative difference.
    """

    hessian: float
    gauss_newton: float
    gap: float


@dataclass(frozen=True)
class Certificate(Mapping[str, CurvatureComparison]):
    """A mapping from parameter names to comparisons of their Gauss-Newton and Hessian blocks.

    If the network is piecewise linear in each layer's parameters (ReLU, max-pooling, BatchNorm in eval mode), they are
    equal and ``curvature_diagonal`` *is* the diagonal of the Hessian. With smooth activations it is not.

    Attributes:
        agreements: the comparison of each parameter.
        examples: number of examples used.
        tolerance: largest relative difference that counts as rounding.
    """

    agreements: Mapping[str, CurvatureComparison]
    examples: int
    tolerance: float = 1e-6

    @property
    def gap(self) -> float:
        """Return the largest relative difference."""
        return max(each.gap for each in self.agreements.values())

    @property
    def holds(self) -> bool:
        """Return whether the Gauss-Newton blocks equal the Hessian's up to rounding."""
        return all(each.gap <= self.tolerance for each in self.agreements.values())

    def __getitem__(self, name: str) -> CurvatureComparison:
        return self.agreements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.agreements)

    def __len__(self) -> int:
        return len(self.agreements)

    def __str__(self) -> str:
        width = max(map(len, self))
        lines = [
            f"{name:<{width}}  v'Hv {a.hessian: .6e}  v'Gv {a.gauss_newton: .6e}  gap {a.gap:.1e}"
            for name, a in self.items()
        ]
        verdict = "is the Hessian's" if self.holds else "is NOT the Hessian's"
        return "\n".join(
            [*lines, f"The Gauss-Newton diagonal {verdict} (largest gap {self.gap:.1e}, {self.examples} examples)."]
        )


@take_turns
def certify(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    layers: Sequence[str] | str | None = None,
    examples: int = EXAMPLES,
    seed: int = 0,
    mode: str = "eval",
    memory: str | int = "1GiB",
) -> Certificate:
    """Compare v'Hv with v'Gv for a random direction v of every parameter, in float64, on the first few examples.

    Args:
        model: any module; it is not changed.
        data: as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        layers: names of modules or parameters to compare; all that require a gradient if None.
        examples: number of examples to use.
        seed: of the directions.
        mode: ``"eval"``, or ``"keep"`` to leave the modules in their current modes.
        memory: working memory; the examples are processed in parts if they do not fit together.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> certify(net, (torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))).holds
        True
    """
    seed = check_seed(seed)
    if isinstance(examples, bool) or not isinstance(examples, int) or examples < 1:
        raise OptionError(f"Expected at least 1, but got examples={examples!r}. Try leaving it out for {EXAMPLES}.")
    room = parse_bytes(memory)
    with open_session(model, mode, data):
        return _compare_curvatures(Problem.build(model, data, loss, layers, torch.float64, mode), examples, seed, room)


def certify_context(context: Context) -> Certificate:
    """Return the certificate of a context, in the session that is already open.

    Model and data have been checked with the context's problem, and are not checked again.
    """
    return _compare_curvatures(context.problem.to_float64(), EXAMPLES, context.seed, context.limit)


def estimate_certificate_seconds(context: Context, timed: int = 2) -> float:
    """Estimate how long :func:`certify_context` takes, from the second derivatives of a few parameters.

    Args:
        context: what is measured.
        timed: the number of parameters to differentiate twice.
    """
    started = time.perf_counter()
    problem = context.problem.to_float64()
    batch = next(iter(problem.read_batches())).cut(0, EXAMPLES)
    _, noticed = compute_checked_outputs(problem, batch.cut(0, 2))
    parts = -(-batch.examples // _count_fitting(context.limit, noticed.bytes, min(batch.examples, 2)))
    batch = batch.cut(0, -(-batch.examples // parts))
    prepared = time.perf_counter() - started
    names = list(problem.network.measured)
    few = names[:: -(-len(names) // timed)]
    seconds = []
    for only in ((), few):
        started = time.perf_counter()
        _compute_curvatures(problem, batch, context.seed, only)
        seconds.append(time.perf_counter() - started)
    # Derivatives that all parameters share, then those of each.
    return prepared + parts * (seconds[0] + max(seconds[1] - seconds[0], 0.0) * len(names) / len(few))


def _count_fitting(limit: int, pair_bytes: int, examples: int) -> int:
    """Return how many examples can be differentiated twice at once; ``examples`` of them have ``pair_bytes``."""
    return max(1, limit // max(1, GRAPHS * pair_bytes // examples))


def _compare_curvatures(problem: Problem, examples: int, seed: int, limit: int) -> Certificate:
    """Compare the curvatures of a problem in float64 on its first ``examples``, within ``limit`` bytes."""
    heap = HeapTrimmer(limit // 4)
    seen, share = 0, 0.0
    sums = {name: [0.0, 0.0] for name in problem.network.measured}
    for batch in problem.read_batches():
        few = batch.cut(0, examples - seen)
        pair = few.cut(0, 2)
        _, noticed = compute_checked_outputs(problem, pair)
        step = _count_fitting(limit, noticed.bytes, pair.examples)
        for start in range(0, few.examples, step):
            both, part = _compute_curvatures(problem, few.cut(start, start + step), seed)
            for name, found in both.items():
                sums[name] = [total + float(value) for total, value in zip(sums[name], found, strict=True)]
            share += part
            heap.release()
        seen += few.examples
        if seen >= examples:
            break
    if share <= 0:
        raise EmptyDataError(
            f"Expected at least one target that counts, but got {seen} first examples whose targets are all ignored "
            "or have no weight. Try raising examples=, or putting other examples first."
        )
    pairs = {name: (h / share, g / share) for name, (h, g) in sums.items()}
    # Where a parameter has no effect at all, both are rounding.
    floor = 1e-9 * max(abs(value) for pair in pairs.values() for value in pair)
    gaps = {name: abs(h - g) / max(abs(h), abs(g), floor) if h != g else 0.0 for name, (h, g) in pairs.items()}
    agreements = {name: CurvatureComparison(h, g, gaps[name]) for name, (h, g) in pairs.items()}
    return Certificate(agreements, seen)


def draw_direction(shape: torch.Size, seed: int) -> Tensor:
    """Return a random unit vector, the same for all parameters of one shape."""
    noise = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=noise, dtype=torch.float64)
    unit: Tensor = values / values.norm()
    return unit


def _compute_curvatures(
    problem: Problem, batch: Batch, seed: int, only: Collection[str] | None = None
) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """Return v'Hv and v'Gv of every parameter, by differentiating twice and without the layers' rules.

    Both belong to the sum over the examples. The second result is the divisor of that sum.

    Args:
        problem: model, loss and data.
        batch: the examples.
        seed: of the directions.
        only: the parameters; all that are measured if None.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in problem.network.measured.items()}
    targets = cast_targets(batch.targets)
    outputs = problem.network(batch, leaves=leaves)
    problem.check_outputs(outputs, batch)
    problem.loss.check(outputs, targets)
    share = problem.loss.share(outputs.detach(), targets).sum()
    curvature = problem.loss.curvature(outputs.detach(), targets)
    # The gradient of <w, outputs> is J'w, linear in w: its derivative along v with respect to w is Jv.
    w = torch.zeros_like(outputs, requires_grad=True)
    results = []
    for variable in (None, w):
        scalar = problem.loss.total(outputs, targets).sum() if variable is None else outputs
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if scalar.requires_grad:
            gradients = torch.autograd.grad(
                scalar, list(leaves.values()), variable, create_graph=True, allow_unused=True
            )
        found = {}
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            if only is not None and name not in only:
                continue
            v = draw_direction(leaf.shape, seed).to(leaf.device)
            second = None
            if gradient is not None and gradient.requires_grad:
                inner = (gradient * v).sum()
                target = leaf if variable is None else variable
                (second,) = torch.autograd.grad(inner, target, retain_graph=True, allow_unused=True)
            if second is None:
                found[name] = torch.zeros((), dtype=torch.float64)
            else:
                found[name] = (second * v).sum() if variable is None else curvature.compute_quadratic_form(second)
        results.append(found)
    return {name: (results[0][name], results[1][name]) for name in results[0]}, float(share)
