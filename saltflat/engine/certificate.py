"""The certificate: compare the Gauss-Newton matrix of each parameter with its Hessian on a few examples."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from saltflat.engine.context import Context
from saltflat.engine.data import Batch, Data
from saltflat.engine.losses import LossLike
from saltflat.engine.operation_derivatives import ReplacementMode, write_out_weight_norm
from saltflat.engine.problem import Problem, cast_targets
from saltflat.engine.reference_gradients import RUN_ERRORS
from saltflat.engine.session import open_session
from saltflat.engine.strategy import compute_checked_outputs
from saltflat.engine.tangents import DerivativeTrace, TangentPass, Tangents, differentiate_twice
from saltflat.errors import EmptyDataError, ModelError, NotDefinedError, OptionError, format_error_line
from saltflat.gradients.base import HeapTrimmer
from saltflat.validation import check_seed, parse_bytes, take_turns

EXAMPLES = 8  # compared unless the caller says otherwise
PAIR = 2  # examples that refute a certificate in a report, and on which differentiation forward is checked
TOLERANCE = 1e-6  # largest relative difference that counts as rounding
AGREE = 1e-7  # largest relative difference between differentiation forward and backward
ROW = 16  # memory to carry one direction forward, in multiples of the largest result of an operation
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
    tolerance: float = TOLERANCE

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
    """Check whether the Gauss-Newton matrix G is the Hessian H within each parameter, on the first few examples.

    Compares v'Hv with v'Gv in float64, for a random direction v of every parameter. To bound the error on new data,
    see :func:`saltflat.certify_error`.

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
        problem = Problem.build(model, data, loss, layers, torch.float64, mode)
        try:
            found = _compare_curvatures(problem, examples, seed, room)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in ("not implemented", "once_differentiable")):
                raise
            got = format_error_line(error).rstrip(".")
            raise ModelError(
                f"Expected second derivatives of the model, but got {got}. Try naming other layers with layers=[...]."
            ) from error
    gaps = found.find_gaps()
    agreements = {
        name: CurvatureComparison(found.sums[name][0] / found.share, found.sums[name][1] / found.share, gap)
        for name, gap in gaps.items()
    }
    return Certificate(agreements, found.examples)


def compute_gaps(context: Context) -> tuple[dict[str, float], int]:
    """Return the gap of each parameter of a context, and how many examples all were compared on.

    Parameters that no operation is curved along have none. The others are compared on two examples, and those that have
    no gap there on as many as :func:`certify` takes. The session has to be open. Model and data have been checked with
    the context's problem, and are not checked again.
    """
    seed, limit = context.seed, context.limit
    with context.problem.use_float64() as problem:
        try:
            found = _compare_curvatures(problem, PAIR, seed, limit, set())
        except EmptyDataError:  # the first two targets do not count
            found = _compare_curvatures(problem, EXAMPLES, seed, limit, set())
        gaps = found.find_gaps()
        doubtful = {name for name in found.curved if gaps[name] <= TOLERANCE}
        if doubtful and found.examples < EXAMPLES:
            more = _compare_curvatures(problem, EXAMPLES, seed, limit, set(gaps) - doubtful, found.forward).find_gaps()
            gaps |= {name: more[name] for name in doubtful}
    return gaps, found.examples


def estimate_certificate_seconds(context: Context, timed: int = 2) -> float:
    """Estimate how long :func:`compute_gaps` takes, from the derivatives along a few parameters.

    Args:
        context: what is measured.
        timed: the number of parameters to differentiate along.
    """
    names = list(context.problem.network.measured)
    few = set(names[:: -(-len(names) // timed)])
    seconds = []
    with context.problem.use_float64() as problem:
        for chosen in (set(), few):
            started = time.perf_counter()
            try:
                found = _compare_curvatures(problem, PAIR, context.seed, context.limit, set(names) - chosen)
            except EmptyDataError:
                found = _compare_curvatures(problem, EXAMPLES, context.seed, context.limit, set(names) - chosen)
            seconds.append(time.perf_counter() - started)
    # Derivatives that all parameters share, then those of each; in reverse mode, on more examples afterwards.
    each = max(seconds[1] - seconds[0], 0.0) / max(1, len(few & found.curved))
    is_forward = found.forward is not False
    return seconds[0] + (1 if is_forward else 1 + EXAMPLES / PAIR) * each * len(found.curved if is_forward else names)


@dataclass
class _Comparison:
    """Sums over examples.

    Attributes:
        sums: v'Hv, v'Gv and their difference, of each parameter and, under an empty name, of all of them together.
        curved: the parameters whose difference is not known to be zero.
        examples: how many were compared.
        share: the divisor of the sums.
        forward: whether differentiation forward is right, as found on examples with gradients; None before.
    """

    sums: dict[str, tuple[float, float, float]]
    curved: set[str] = field(default_factory=set)
    examples: int = 0
    share: float = 0.0
    forward: bool | None = None

    def add(self, name: str, hessian: float, gauss_newton: float, gap: float) -> None:
        """Add the values of some examples."""
        h, g, difference = self.sums.get(name, (0.0, 0.0, 0.0))
        self.sums[name] = h + hessian, g + gauss_newton, difference + gap

    def find_gaps(self) -> dict[str, float]:
        """Return the relative difference of each parameter."""
        # Where a parameter has no effect at all, both are rounding.
        floor = 1e-9 * max(abs(each) for of in self.sums.values() for each in of[:2])
        return {
            name: abs(gap) / max(abs(h), abs(g), floor) if gap else 0.0
            for name, (h, g, gap) in self.sums.items()
            if name
        }


def _compare_curvatures(
    problem: Problem,
    examples: int,
    seed: int,
    limit: int,
    settled: Collection[str] | None = None,
    forward: bool | None = None,
) -> _Comparison:
    """Compare the curvatures of a problem in float64 on its first ``examples``, within ``limit`` bytes.

    The values of parameters that are ``settled``, or that no operation is curved along, may be left out, unless it is
    None. ``forward`` says whether differentiation forward is known to be right.
    """
    heap = HeapTrimmer(limit // 4)
    found = _Comparison(dict.fromkeys(problem.network.measured, (0.0, 0.0, 0.0)), forward=forward)
    for batch in problem.read_batches():
        few = batch.cut(0, examples - found.examples)
        pair = few.cut(0, PAIR)
        _, noticed = compute_checked_outputs(problem, pair)
        step = max(1, limit // max(1, GRAPHS * noticed.bytes // pair.examples))
        start = 0
        while start < few.examples:
            # The first examples with gradients tell whether differentiation forward is right.
            count = min(step, PAIR) if found.forward is None else step
            _add_examples(found, problem, few.cut(start, start + count), seed, limit, settled)
            start += count
            heap.release()
        found.examples += few.examples
        if found.examples >= examples:
            break
    if found.share <= 0:
        raise EmptyDataError(
            f"Expected at least one target that counts, but got {found.examples} first examples whose targets are all "
            "ignored or have no weight. Try raising examples=, or putting other examples first."
        )
    return found


def _add_examples(
    found: _Comparison, problem: Problem, batch: Batch, seed: int, limit: int, settled: Collection[str] | None
) -> None:
    """Add the curvatures of the sum over some examples, by differentiating forward where that is right."""
    if found.forward is not False:
        try:
            found.forward = _add_forward_curvatures(found, problem, batch, seed, limit, settled)
        except (*RUN_ERRORS, NotDefinedError):  # if it is the model's own, it will be found again
            found.forward = False
    if found.forward is False:
        only = problem.network.measured.keys() - (settled or ())
        both, share = _compute_reverse_curvatures(problem, batch, seed, only)
        for name, (h, g) in both.items():
            found.add(name, float(h), float(g), float(h) - float(g))
        found.curved |= both.keys()
        found.share += share


def _run_loss(problem: Problem, batch: Batch, leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return outputs and targets, checked."""
    targets = cast_targets(batch.targets)
    outputs = problem.network(batch, leaves=leaves)
    problem.check_outputs(outputs, batch)
    problem.loss.check(outputs, targets)
    return outputs, targets


def _add_forward_curvatures(
    found: _Comparison, problem: Problem, batch: Batch, seed: int, limit: int, settled: Collection[str] | None
) -> bool | None:
    """Add the curvatures by differentiating forward; return False if that disagrees with differentiating twice.

    What is compared is the second derivative along all parameters' directions together, until every curved parameter
    has had gradients: zeros agree with everything. The result is None before.
    """
    names = list(problem.network.measured)
    leaves = {name: value.detach().requires_grad_() for name, value in problem.network.measured.items()}
    directions = [draw_direction(leaf.shape, seed).to(leaf.device) for leaf in leaves.values()]
    with DerivativeTrace(list(leaves.values())) as trace:
        outputs, targets = _run_loss(problem, batch, leaves)
    share = float(problem.loss.share(outputs.detach(), targets).sum())
    curvature = problem.loss.curvature(outputs.detach(), targets)
    total = problem.loss.total(outputs, targets).sum()
    curved = [number for number in range(len(names)) if trace.curved >> number & 1]
    expected, silent, joint = 0.0, set[int](), [0] if found.forward is None else []
    if joint:
        expected, silent = differentiate_twice(total, list(leaves.values()), directions)
    gradients = trace.compute_gradients(total)
    chosen = list(range(len(names))) if settled is None else [each for each in curved if names[each] not in settled]
    del outputs, total
    # Row 0 moves all parameters together, the others one parameter each.
    step = max(1, limit // max(1, ROW * trace.widest + trace.bytes // 4))
    parts = [chosen[start : start + step] for start in range(0, len(chosen), step)]
    parts = parts or [[]] if joint else parts
    values: list[tuple[str, float, float, float]] = []
    for part in parts:
        rows = dict(zip(part, range(len(joint), len(joint) + len(part)), strict=True))
        tangents = {}
        for number, direction in enumerate(directions):
            own = (*joint, *([rows[number]] if number in rows else []))
            if own:
                tangents[number] = Tangents(own, direction.expand(len(own), *direction.shape))
        constants = {name: leaf.detach() for name, leaf in leaves.items()}
        with TangentPass(list(constants.values()), tangents, gradients, len(joint) + len(part)) as moved:
            outputs, _ = _run_loss(problem, batch, constants)
        first = moved.get_tangents(outputs)
        quadratic = {row: float(curvature.compute_quadratic_form(each)) for row, each in first.items()}
        second = moved.second.tolist()
        if joint:
            g = quadratic.get(0, 0.0)
            if not abs(g + second[0] - expected) <= AGREE * max(abs(g), abs(second[0])):
                return False
            values.append(("", expected, g, second[0]))
        for number, row in rows.items():
            g = quadratic.get(row, 0.0)
            values.append((names[number], g + second[row], g, second[row]))
        joint = []
    for value in values:
        found.add(*value)
    found.curved |= {names[number] for number in curved}
    found.share += share
    return None if silent.intersection(curved) else True


def draw_direction(shape: torch.Size, seed: int) -> Tensor:
    """Return a random unit vector, the same for all parameters of one shape."""
    noise = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=noise, dtype=torch.float64)
    unit: Tensor = values / values.norm()
    return unit


def _compute_reverse_curvatures(
    problem: Problem, batch: Batch, seed: int, only: Collection[str]
) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """Return v'Hv and v'Gv of some parameters, by differentiating twice and without the layers' rules.

    Both belong to the sum over the examples. The second result is the divisor of that sum.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in problem.network.measured.items()}
    with ReplacementMode({torch._weight_norm: write_out_weight_norm}):
        outputs, targets = _run_loss(problem, batch, leaves)
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
            if name not in only:
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
