r"""Feature robustness: how far small changes of a layer's features can raise the loss (Petzka et al., 2019).

For a matrix A with :math:`\|A\| \le 1` that acts on the features of a layer, the rise of the mean loss is

.. math:: F(\delta, S, A) = L(w + \delta w A) - L(w)

Its maximum is searched, and its mean over random orthogonal A is measured. Both stand beside what second derivatives
predict; see :mod:`saltflat.bounds.feature_derivatives`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy
import torch
from torch import Tensor, nn

from saltflat.bounds.feature_derivatives import LayerDerivatives
from saltflat.bounds.feature_layer import NORMS, Ball, FeatureLayer, Norm, find_feature_module, parse_feature_matrix
from saltflat.bounds.feature_search import RiseSearch, find_worst_examples
from saltflat.bounds.robustness_result import SMALL_SLOPE, FeatureRobustness, RobustnessPoint
from saltflat.engine.context import Context, describe_context
from saltflat.engine.data import Data
from saltflat.engine.full_loss import check_finite_loss
from saltflat.engine.lanczos import TopEigenvalue
from saltflat.engine.losses import LossLike
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.per_example import find_reached_leaves, make_leaves
from saltflat.engine.problem import Problem, find_input_notes
from saltflat.engine.progress import show_steps
from saltflat.engine.read_data import select_examples
from saltflat.engine.session import open_session
from saltflat.errors import OptionError, ParameterError, make_unknown_name_error
from saltflat.results.report import describe_run
from saltflat.results.text import format_number
from saltflat.validation import check_count, check_flag, check_positive, check_seed, is_choice, parse_bytes, take_turns

# From 1e-4 to 1, two in each decade.
DELTAS = tuple(float(f"{10 ** (n / 2):.3g}") for n in range(-8, 1))
MOST_DELTAS = 1000  # more is probably a typo
LARGEST_DELTA = 1e100  # whose square is a finite number
COPIES = 12  # of the weight, in float64, that a search keeps


@take_turns
def feature_robustness(
    model: nn.Module,
    data: Data,
    layer: str,
    loss: LossLike = "cross_entropy",
    *,
    deltas: Sequence[float] | float = DELTAS,
    norm: Norm = "operator",
    matrix: Tensor | None = None,
    draws: int = 10,
    restarts: int = 2,
    steps: int = 20,
    per_example: bool = True,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Callable[[str, int, int | None], None] | None = None,
    mode: str = "eval",
    limit: int | None = None,
) -> FeatureRobustness:
    r"""Measure how far changes of a layer's features can raise the loss, beside the paper's bounds.

    The features :math:`\phi(x)` of a layer become :math:`\phi(x) + \delta A \phi(x)`. The rise of the mean loss is
    searched for its largest value over all A in a ball, and averaged over random orthogonal A.

    Args:
        model: any module. It is run in eval mode and restored bit for bit.
        data: as for :func:`saltflat.measure`.
        layer: the name of a Linear layer or a convolution, or of its weight. The features of a convolution are the
            channels and kernel positions of a patch; groups have features of their own.
        loss: as for :func:`saltflat.measure`; twice differentiable.
        deltas: the sizes of the changes, or a single one.
        norm: of A, at most 1: ``"operator"``, as in the paper, or ``"frobenius"``, a smaller ball.
        matrix: an A of your own, ``(features, features)``, whose rise is computed too.
        draws: the number of pairs A and -A of random orthogonal matrices, at least 2.
        restarts: the number of random starts of each search, beside the slope, the top eigenvector and the matrix that
            was found for the delta before.
        steps: the number of gradients that each ascent takes.
        per_example: also search each example's own worst change, of length :math:`\delta |\phi(x)|`.
        memory: working memory beyond the model and the results, such as ``"512MiB"``.
        dtype: ``torch.float32`` or ``torch.float64`` to work in; the model's own if None. Small rises need float64.
        seed: of everything random.
        progress: True for a progress bar (lines of text off a terminal), False for none, None for a bar on a terminal
            only, or a function of ``(step, done, total)``.
        mode: ``"eval"``, or ``"keep"`` to leave the modules in the modes they are in.
        limit: use at most this many examples, the first ones; all if None.

    Example:
        >>> net = nn.Linear(2, 1, bias=False).double()
        >>> _ = net.load_state_dict({"weight": torch.tensor([[1.0, 0.0]])})
        >>> data = torch.eye(2).double(), torch.tensor([[1.0], [0.0]]).double()  # a minimum: L = |w - (1, 0)|^2 / 2
        >>> found = feature_robustness(net, data, "weight", "mse", deltas=[0.1])
        >>> found.kappa, round(found.points[0].largest, 9), round(found.points[0].bound, 9)
        (1.0, 0.005, 0.005)
    """
    started = time.perf_counter()
    sizes = _parse_deltas(deltas)
    if not is_choice(norm, NORMS):
        raise make_unknown_name_error("norm", norm, NORMS)
    check_count(2, draws=draws)
    check_count(0, restarts=restarts)
    check_count(1, steps=steps)
    check_flag(per_example=per_example)
    room, seed = parse_bytes(memory), check_seed(seed)
    data = data if limit is None else select_examples(data, limit=limit)
    with open_session(model, mode, data) as notes, show_steps(progress) as tick:
        name, module = find_feature_module(model, layer)
        problem = Problem.build(model, data, loss, [name], dtype, mode)
        context = Context(problem, parse_column_plan("exact"), seed, room, tick=tick)
        # Run the first examples before anything long, so that errors in the model or data are raised early.
        context.get_probe(next(iter(problem.read_batches())))
        check_finite_loss(context.mean_loss)
        features = FeatureLayer.build(name, module, problem.network.measured[name])
        given = None if matrix is None else parse_feature_matrix(matrix, features, norm)
        _check_used_once(context, features)
        with context.reserve(COPIES * 8 * features.weight.numel()):
            derivatives = LayerDerivatives.compute(context, features, draws)
            search = RiseSearch(context, features, Ball(norm), derivatives, restarts, steps)
            points = _compute_points(search, sizes, draws, given)
        if per_example:
            worst = find_worst_examples(context, features, sizes, steps)
            points = [
                replace(point, worst=each.value, worst_example=each.example, mean_worst=each.mean)
                for point, each in zip(points, worst, strict=True)
            ]
        if context.first is not None:
            notes += find_input_notes(problem, context.first, context.mean_loss)
        precision = torch.finfo(problem.network.measured[name].dtype).eps
        settings = describe_context(context)
        del settings["columns"]
        result = FeatureRobustness(
            points=tuple(points),
            layer=name,
            features=features.features,
            rows=features.rows,
            groups=features.groups,
            rank=features.rank,
            norm=norm,
            squared_norm=features.squared_norm,
            top_eigenvalue=derivatives.top.value,
            eigenvalue_bound=derivatives.top.bound * abs(derivatives.top.value),
            hessian_trace=derivatives.trace[0],
            hessian_trace_stderr=derivatives.trace[1],
            relative_flatness=derivatives.pairs[0],
            relative_flatness_stderr=derivatives.pairs[1],
            gradient_norm=float(derivatives.gradient.norm()),
            slope=search.ball.compute_dual_norm(search.slope),
            rounding=4 * precision * abs(context.mean_loss),
            examples=context.examples,
            loss=context.mean_loss,
            settings={
                **settings,
                "memory": room,
                "deltas": list(sizes),
                "norm": norm,
                "matrix": matrix is not None,
                "draws": draws,
                "restarts": restarts,
                "steps": steps,
                "per_example": per_example,
            },
            notes=(),
            **describe_run(model, started, torch, numpy),
        )
        return replace(
            result, notes=(*notes, *_explain(result, derivatives.top)), seconds=time.perf_counter() - started
        )


def _parse_deltas(given: Sequence[float] | float) -> tuple[float, ...]:
    listed = [given] if isinstance(given, int | float | numpy.number) else given
    if (
        not isinstance(listed, Sequence | numpy.ndarray)
        or isinstance(listed, str)
        or (isinstance(listed, numpy.ndarray) and listed.ndim != 1)
        or not 0 < len(listed) <= MOST_DELTAS
    ):
        raise OptionError(
            f"Expected a positive number or a list of 1 to {MOST_DELTAS} of them, but got deltas of type "
            f"{type(given).__name__}. Try deltas=[1e-3, 1e-2, 1e-1]."
        )
    numbers = [each.item() if isinstance(each, numpy.generic) else each for each in listed]
    for each in numbers:
        check_positive(deltas=each)
        if each > LARGEST_DELTA:
            raise OptionError(
                f"Expected a number of at most {LARGEST_DELTA:g}, but got deltas={each!r}. Try deltas of at most 1."
            )
    return tuple(sorted({float(each) for each in numbers}))


def _check_used_once(context: Context, layer: FeatureLayer) -> None:
    """Check that a forward pass calls the layer once, and does not use its weight otherwise."""
    batch = next(iter(context.problem.read_batches())).cut(0, 2)
    calls = 0

    def count_call(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += module is layer.module
        return y

    leaves = make_leaves(context.problem.network)
    outputs = context.problem.network(batch, count_call, leaves, plain=True)
    if calls == 1 and not find_reached_leaves(outputs, leaves):
        return
    how = f"is called {calls} times" if calls != 1 else "has a weight that is used outside of it, too"
    raise ParameterError(
        f"Expected a layer that the model calls once, but got {layer.name!r}, whose layer {how} in a forward pass: "
        "changes of the weight are not those of one layer's features. Try another layer."
    )


def _compute_points(
    search: RiseSearch, deltas: Sequence[float], draws: int, given: Tensor | None
) -> list[RobustnessPoint]:
    """Return the rises of the mean loss for each delta, beside their predictions."""
    layer, derivatives = search.layer, search.derivatives
    kappa = layer.squared_norm * max(derivatives.top.value, 0.0)
    slope = search.ball.compute_dual_norm(search.slope)
    means = search.average_orthogonal(deltas, draws)
    points = []
    for delta, (mean, stderr), largest in zip(deltas, means, search.find_largest(deltas), strict=True):
        half = delta**2 / 2
        points.append(
            RobustnessPoint(
                delta=delta,
                largest=largest.value,
                gap=search.compute_gap(largest) / largest.value if largest.value > 0 else 0.0,
                bound=half * kappa,
                first_order=delta * slope,
                applies=delta * slope <= SMALL_SLOPE * half * kappa,
                orthogonal=mean,
                orthogonal_stderr=stderr,
                second_order=half * derivatives.forms,
                predicted=half * derivatives.pairs[0] / layer.features,
                trace_bound=half * layer.squared_norm * derivatives.trace[0] / layer.features,
                given=None if given is None else search.compute_rise(delta, layer.restrict(given)),
            )
        )
    return points


def _explain(found: FeatureRobustness, top: TopEigenvalue) -> Iterator[str]:
    """Yield notes on what the numbers are and when the bound applies."""
    yield "The largest rise is the largest that a search found: a lower bound of the maximum."
    yield _explain_gradient(found)
    if found.top_eigenvalue < 0:
        yield "The Hessian of the layer has no positive eigenvalue: the bound is 0, up to third order."
    if not top.converged:
        yield f"The largest eigenvalue may be larger by {top.bound:.1e} of itself, and the bound with it."
    if found.hessian_trace_stderr:
        yield (
            "The predicted mean and its bound are estimates from random products with the Hessian: the Gauss-Newton "
            "matrix of this layer is not its Hessian, and it is too large for exact traces."
        )
    if found.kappa_trace < found.relative_flatness - 2 * found.relative_flatness_stderr - 1e-9 * abs(found.kappa_trace):
        yield "kappa_trace does not bound the mean over orthogonal A here: the Hessian has negative eigenvalues."
    if found.rank < found.rows:
        yield (
            f"The weight has rank {found.rank} and {found.rows} rows: some changes of the weight are no changes of the "
            "features."
        )
    rough = [p for p in found.points if not p.is_smooth and abs(p.second_order) > 10 * found.rounding]
    if rough:
        listed = ", ".join(format_number(point.delta, 3) for point in rough)
        yield (
            f"The mean over orthogonal A is not that of second order at delta = {listed}. At large delta, higher "
            "orders count; at small delta, units of ReLU or max-pooling switch, and their kinks add a term of order "
            "delta^2 that H does not contain. Neither the bound nor the predicted mean covers it."
        )
    if found.norm == "frobenius":
        yield "Orthogonal A lie outside of this ball: their Frobenius norm is the root of the number of features."
    coarse = [point for point in found.points if 0 < max(point.largest, point.bound) < 10 * found.rounding]
    if coarse:
        yield (
            f"Rises below {format_number(10 * found.rounding, 2)} are rounding of the loss in "
            f"{found.settings.get('dtype')}, up to delta = {format_number(coarse[-1].delta)}."
            + (" Try dtype=torch.float64." if found.settings.get("dtype") == "float32" else "")
        )


def _explain_gradient(found: FeatureRobustness) -> str:
    size = f"the gradient has norm {format_number(found.gradient_norm, 3)}"
    if found.applies:
        return f"The bound applies at every delta: {size}, and the first-order rise is at most a tenth of the bound."
    here = [point.delta for point in found.points if point.applies]
    where = f"from delta = {format_number(here[0])} on, if terms of third order are small" if here else "at no delta"
    return (
        f"The bound applies {where}: {size}, and below delta = {format_number(found.applies_from, 3)} the first-order "
        "rise is more than a tenth of the bound. Add it to the bound there."
    )
