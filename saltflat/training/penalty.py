"""Measures as penalties: a term of the training loss that favors flat minima.

A penalty differentiates gradients. As of torch 2.13, ``torch._weight_norm`` has a wrong second derivative. When
examples are vectorised, so have normalisation layers with factors of their own (the statistics of the forward pass are
taken for constants), and ``prelu`` has a wrong first one. Factors that are a step of their own are plain products.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from saltflat.engine.custom_losses import normalize_logits, parse_loss
from saltflat.engine.data import Batch
from saltflat.engine.geometry import Geometry, find_geometries
from saltflat.engine.output_curvature import ExampleRNG, parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.reference_gradients import TOLERANCE
from saltflat.engine.session import open_session, snapshot_rng, take_turns
from saltflat.engine.statistic import STATISTICS, find_keyword_defaults
from saltflat.engine.strategy import compute_checked_outputs
from saltflat.errors import (
    EmptyDataError,
    ModelError,
    NonFiniteError,
    NotSmoothError,
    OptionError,
    SaltflatError,
    UnknownNameError,
    format_error_line,
    make_unknown_name_error,
)
from saltflat.measures.apply import compute_parts, is_axis_dependent
from saltflat.measures.registry import MEASURES, MeasureRequest, parse_measure
from saltflat.symmetry.equality import compute_relative_difference
from saltflat.training.differentiable import COMPUTED_WITH_GRAPH, DifferentiableProblem, compute_statistics_with_graph
from saltflat.validation import check_seed, is_choice


class DecomposedLayersMode(TorchFunctionMode):
    """Inside, these layers are taken apart; their values stay what they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return TAKEN_APART.get(func, func)(*args, **(kwargs or {}))


def _decompose_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()] if dim != -1 else list(range(v.dim()))
    return v * (g / v.square().sum(axes, keepdim=True).sqrt())


def _decompose_layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    y = F.layer_norm(input, normalized_shape, None, None, eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _decompose_instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    y = F.instance_norm(input, running_mean, running_var, None, None, use_input_stats, momentum, eps)
    channels = (-1, *(1 for _ in input.shape[2:]))
    y = y if weight is None else y * weight.reshape(channels)
    return y if bias is None else y + bias.reshape(channels)


def _decompose_prelu(input: Tensor, weight: Tensor) -> Tensor:
    per_unit = weight.numel() > 1 and input.dim() > 2
    return input.where(input > 0, input * (weight.reshape(-1, *(1 for _ in input.shape[2:])) if per_unit else weight))


TAKEN_APART: dict[Any, Any] = {
    torch._weight_norm: _decompose_weight_norm,
    torch.prelu: _decompose_prelu,
    F.prelu: _decompose_prelu,
    torch.layer_norm: _decompose_layer_norm,
    F.layer_norm: _decompose_layer_norm,
    F.instance_norm: _decompose_instance_norm,
}

STEP, AGREE = 1e-6, 1e-5  # of the finite difference, and how well it must agree with the gradient


def find_refusal_reason(request: MeasureRequest, value: Callable[[nn.Module, Any], Tensor]) -> str | None:
    """Why a measure cannot be trained on; None if it can.

    What it is made of must have a graph to the weights, and its gradient must be that of finite differences.

    Args:
        request: the measure, with its options.
        value: what it says of a model and a batch, as a penalty.
    """
    for need in request.needs.values():
        if need.name not in STATISTICS and need.name not in COMPUTED_WITH_GRAPH and need.name != "weight":
            return f"it is made of {need.name}, which comes without a graph to the weights"
    restore = snapshot_rng()
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")  # formulas that read numbers off the graph
            return _find_gradient_fault(value)
    except (OptionError, UnknownNameError):  # its options, not the measure
        raise
    except Exception as error:
        return f"its formula cannot be differentiated ({format_error_line(error)})"
    finally:
        restore()


def _find_gradient_fault(value: Callable[[nn.Module, Any], Tensor]) -> str | None:
    model, batch = _make_small_network()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    here = value(model, batch)
    if not here.requires_grad:
        return "its formula leaves the graph"
    slopes = torch.autograd.grad(here, list(model.parameters()), allow_unused=True, materialize_grads=True)
    slope = torch.cat([each.reshape(-1) for each in slopes])
    if not bool(slope.isfinite().all()):
        return "its gradient is not finite for weights or curvatures of zero, which training meets"
    direction = torch.randn_like(weights)

    def evaluate_at(step: float) -> float:
        nn.utils.vector_to_parameters(weights + step * direction, model.parameters())
        return value(model, batch).item()

    promised, risen = float(slope @ direction), (evaluate_at(STEP) - evaluate_at(-STEP)) / (2 * STEP)
    if not abs(risen - promised) <= AGREE * max(abs(risen), abs(promised)):
        return f"its gradient is not the slope of its value ({promised:.6g} where that rises by {risen:.6g})"
    return None


def _make_small_network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """With what real ones have: a dead unit, and biases of zero."""
    torch.manual_seed(0)
    where: Any = {"dtype": torch.float64, "device": "cpu"}
    model = nn.Sequential(
        nn.Linear(3, 5, **where), nn.ReLU(), nn.Linear(5, 4, **where), nn.ReLU(), nn.Linear(4, 3, **where)
    )
    with torch.no_grad():
        model.get_parameter("0.bias")[0] = -100.0
        model.get_parameter("2.bias").zero_()
    return model, (torch.randn(6, 3, **where), torch.arange(6, device="cpu") % 3)


COMPARED = 4  # examples for which the vectorised pass is compared with single ones, once for every model


class Penalty:
    """What a measure says of a batch, with a graph to the model's parameters; made by :func:`penalty`.

    Attributes:
        name: the measure, with those of its options that are not the usual ones.
        seed: of the next call's random columns; it goes up by one at every call.
    """

    def __init__(
        self,
        request: MeasureRequest,
        loss: Any = "cross_entropy",
        *,
        columns: str = "exact",
        layers: Sequence[str] | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        mode: str = "eval",
        logits: str = "none",
        way: str = "auto",
    ) -> None:
        if not is_choice(way, ("auto", "vectorised", "loop")):
            raise OptionError(
                f"Expected 'auto', 'vectorised' or 'loop', but got way={way!r}. Try leaving it out for 'auto'."
            )
        if not is_choice(mode, ("eval", "keep")):
            raise OptionError(f"Expected 'eval' or 'keep', but got mode={mode!r}. Try leaving it out for eval mode.")
        self.name, self.request, self.loss = request.key, request, normalize_logits(parse_loss(loss), logits)
        self.plan, self.layers, self.dtype, self.mode, self.way = parse_column_plan(columns), layers, dtype, mode, way
        self.seed = check_seed(seed)
        self._loops: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._shapes: WeakKeyDictionary[nn.Module, Mapping[str, Geometry]] = WeakKeyDictionary()

    @take_turns
    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The penalty of a batch ``(inputs, targets)``: a scalar to add to its loss."""
        wants_graph = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with open_session(model, self.mode):
            problem = Problem.build(model, [batch], self.loss, self.layers, self.dtype, self.mode)
            examples = next(problem.read_batches())
            shapes = self._find_geometries(problem, examples)
            with DecomposedLayersMode():
                value = self._compute_penalty(DifferentiableProblem.build(problem, examples, shapes))
        self.seed += 1
        return value if wants_graph else value.detach()

    def _find_geometries(self, problem: Problem, batch: Batch) -> Mapping[str, Geometry]:
        """How the weights are matrices, found once for each model."""
        usual, known = find_geometries(problem.network), self._shapes.get(problem.model, {})
        if not is_axis_dependent(self.request):
            return usual
        if {name: each.shape for name, each in usual.items()} != {name: each.shape for name, each in known.items()}:
            known = self._shapes[problem.model] = find_geometries(problem.network, batch)
        return known

    def _compute_penalty(self, live: DifferentiableProblem) -> Tensor:
        """All examples together where that is known to be right, else one at a time."""
        model = live.problem.model
        if self.way != "auto":
            return self._compute_value(live, self.way == "loop")
        if model not in self._loops:
            self._compare_vmap_with_loop(live)
        if not self._loops.get(model, False):
            try:
                return self._compute_value(live, looped=False)
            except (SaltflatError, torch.OutOfMemoryError):
                raise
            except Exception:
                # What could be vectorised for some examples need not be for all.
                self._loops[model] = True
        return self._compute_value(live, looped=True)

    def _compare_vmap_with_loop(self, live: DifferentiableProblem) -> None:
        """Not every operation can be vectorised, and torch gets some of them wrong: try it on a few examples."""
        compute_checked_outputs(live.problem, live.batch.cut(0, 2))
        few = replace(live, batch=live.batch.cut(0, COMPARED))
        try:
            truth = self._compute_value_and_gradient(few, looped=True)
        except EmptyDataError:  # their targets do not count: ask again with the next batch
            return
        except SaltflatError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise ModelError(
                f"Expected a model that can be differentiated twice, but got {format_error_line(error)} for single "
                "examples. Try replacing the operation that cannot."
            ) from error
        try:
            off = compute_relative_difference(truth, self._compute_value_and_gradient(few, looped=False))
        except Exception:
            off = torch.inf
        self._loops[live.problem.model] = not off <= TOLERANCE[truth.dtype]

    def _compute_value_and_gradient(self, live: DifferentiableProblem, looped: bool) -> Tensor:
        leaves = list(live.leaves.values())
        value = self._compute_value(live, looped)
        slopes = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        return torch.cat([value.detach().reshape(1), *(slope.reshape(-1) for slope in slopes)])

    def _compute_value(self, live: DifferentiableProblem, looped: bool) -> Tensor:
        needs = self.request.needs
        found = compute_statistics_with_graph(live, list(needs.values()), self.plan, ExampleRNG(self.seed, 0), looped)
        values = {name: found[need.key] for name, need in needs.items()}
        parts = compute_parts(self.request, values, live.shapes)
        if not parts:
            raise OptionError(
                f"Expected at least one, but got no weights of two or more axes for {self.name}. Try naming others "
                "with layers=."
            )
        numbers = []
        for name, part in parts.items():
            if not isinstance(part.value, Tensor) or not bool(part.value.isfinite()):
                where = f"{self.name} of {name!r}" if name else self.name
                raise NonFiniteError(
                    "Expected one that training can lower, but got no finite number for "
                    f"{where}{''.join(f' ({note})' for note in part.notes)}. Try naming other layers with layers=, "
                    "or passing dtype=torch.float64 if squares overflow."
                )
            numbers.append(part.value.double())
        total = torch.stack(numbers).max() if self.request.measure.total == "max" else torch.stack(numbers).sum()
        return total.to(next(iter(live.leaves.values())).dtype)

    def __repr__(self) -> str:
        return f"<Penalty {self.name}, columns {self.plan}>"


def penalty(measure: str, loss: Any = "cross_entropy", **options: Any) -> Penalty:
    r"""A term for the training loss: what a measure says of the batch, differentiable.

        flat = penalty("relative_flatness", layers="fc", columns="sampled:2")
        for x, y in loader:
            loss = criterion(model(x), y) + 0.1 * flat(model, (x, y))
            loss.backward()

    Its value is that of :func:`saltflat.measure` on the same batch, and its gradient reaches all parameters that
    require one, also those outside of ``layers``: the curvature of a layer depends on what comes before and after it.
    Where measures take the curvature from the Gauss-Newton matrix, so does the penalty.

    The model runs in eval mode, whatever mode it is in: BatchNorm with its running statistics as constants, dropout
    off. Single examples' gradients are not defined otherwise. Modes, buffers, hooks and ``.grad`` are as before
    afterwards. It runs in float32 (or float64), with autocast off. With DistributedDataParallel pass ``model.module``.

    Every example's gradient is written out for every column, and differentiated once more: about eight plain training
    steps per column for LeNet on a CPU, and memory for several times (columns x examples x parameters) numbers. Exact
    columns are one fewer than classes. For many classes take ``columns="sampled:2"``: other random columns at every
    call, unbiased for measures that are linear in the curvature, which all are but maxima and roots. For large networks
    name few ``layers``. ``fisher_trace`` and others made of the loss's own gradients have one column in any case.

    Args:
        measure: a name with options, such as ``"hessian_trace"`` or ``"rho(axis='row')"``. It must be a smooth function
            of the weights: searches, eigenvalues and minima over scales are refused.
        loss: the loss whose flatness is meant, as for :func:`saltflat.measure`; usually the one that is trained on.
        options: ``columns``, ``layers``, ``dtype``, ``seed``, ``mode`` and ``logits`` as for :func:`saltflat.measure`;
            and ``way``: ``"vectorised"`` for one pass over all examples, ``"loop"`` for one at a time, or ``"auto"``
            for the first if it agrees with the second on a few examples of the first batch.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.zeros_(net.weight)
        >>> flat = penalty("fisher_trace", "mse")  # the mean of |2 (w x - y) x|^2
        >>> value = flat(net, (torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0]])))
        >>> value.backward()
        >>> value.item(), net.weight.grad.tolist()
        (100.0, [[-600.0, -800.0]])
    """
    if not isinstance(measure, str):
        raise OptionError(f"Expected a name, but got measure={measure!r}. Try penalty('fisher_trace').")
    request, known = parse_measure(measure), find_keyword_defaults(Penalty.__init__)
    for option in options:
        if option not in known:
            raise make_unknown_name_error("option of penalty", option, known)
    made = Penalty(request, loss, **options)
    reason = _find_measure_refusal(request.key)
    if reason is not None:
        works = ", ".join(name for name in MEASURES if _find_measure_refusal(name) is None)
        raise NotSmoothError(
            f"Expected a measure that is a smooth function of the weights, one of, but got {request.key!r} as a "
            f"penalty: {reason}. {works}. Try training with one of these and watch the other with saltflat.measure."
        )
    return made


@cache
def _find_measure_refusal(measure: str) -> str | None:
    request = parse_measure(measure)
    return find_refusal_reason(request, Penalty(request, way="vectorised"))
