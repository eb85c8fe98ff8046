"""Measures as penalties: a term of the training loss that favors flat minima.

A penalty differentiates gradients. As of torch 2.13, ``torch._weight_norm`` has a wrong second derivative. When
examples are vectorized, so do normalization layers with affine parameters (the statistics of the forward pass are
treated as constants), and ``prelu`` has a wrong first derivative. These layers are therefore decomposed into plain
products.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.engine.context import find_geometries
from saltflat.engine.custom_losses import normalize_logits
from saltflat.engine.data import Batch
from saltflat.engine.losses import LossLike, parse_loss
from saltflat.engine.operation_derivatives import ReplacementMode, write_out_prelu, write_out_weight_norm
from saltflat.engine.output_curvature import ExampleRNG, parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.reference_gradients import TOLERANCE
from saltflat.engine.session import open_session, snapshot_rng
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
from saltflat.layers import Geometry
from saltflat.measures.apply import compute_parts, is_axis_dependent
from saltflat.measures.registry import MEASURES, MeasureRequest, parse_measure
from saltflat.symmetry.equality import compute_relative_difference
from saltflat.training.differentiable import COMPUTED_WITH_GRAPH, DifferentiableProblem, compute_statistics_with_graph
from saltflat.training.part_gradients import PassStrategy, check_strategy
from saltflat.training.parts import TrainingBatch
from saltflat.validation import check_seed, is_choice, take_turns


def _decompose_layer_norm(
    input: Tensor,
    normalized_shape: list[int],
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


DECOMPOSED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch._weight_norm: write_out_weight_norm,
    torch.prelu: write_out_prelu,
    F.prelu: write_out_prelu,
    torch.layer_norm: _decompose_layer_norm,
    F.layer_norm: _decompose_layer_norm,
    F.instance_norm: _decompose_instance_norm,
}

STEP, AGREE = 1e-6, 1e-5  # of the finite difference, and its relative tolerance


def find_refusal_reason(request: MeasureRequest, value: Callable[[nn.Module, Any], Tensor]) -> str | None:
    """Return why a measure cannot be used as a penalty; None if it can.

    Its statistics must have a graph to the weights, and its gradient must agree with finite differences.

    Args:
        request: the measure, with its options.
        value: maps a model and a batch to the value of the penalty.
    """
    for need in request.needs.values():
        if need.name not in STATISTICS and need.name not in COMPUTED_WITH_GRAPH and need.name != "weight":
            return f"it uses {need.name}, which has no graph to the weights"
    restore = snapshot_rng()
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")  # about formulas that convert tensors to numbers
            return _find_gradient_fault(value)
    except (OptionError, UnknownNameError):  # the options are wrong, not the measure
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
        return "its gradient is not finite for weights or curvatures of zero, which occur in training"
    direction = torch.randn_like(weights)

    def evaluate_at(step: float) -> float:
        nn.utils.vector_to_parameters(weights + step * direction, model.parameters())
        return value(model, batch).item()

    promised, risen = float(slope @ direction), (evaluate_at(STEP) - evaluate_at(-STEP)) / (2 * STEP)
    if not abs(risen - promised) <= AGREE * max(abs(risen), abs(promised)):
        return f"its gradient ({promised:.6g} along a direction) differs from a finite difference ({risen:.6g})"
    return None


def _make_small_network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a network and a batch, with features of real ones: a dead unit, and biases of zero."""
    torch.manual_seed(0)
    where: Any = {"dtype": torch.float64, "device": "cpu"}
    model = nn.Sequential(
        nn.Linear(3, 5, **where), nn.ReLU(), nn.Linear(5, 4, **where), nn.ReLU(), nn.Linear(4, 3, **where)
    )
    with torch.no_grad():
        model.get_parameter("0.bias")[0] = -100.0
        model.get_parameter("2.bias").zero_()
    return model, (torch.randn(6, 3, **where), torch.arange(6, device="cpu") % 3)


COMPARED = 4  # examples on which the vectorized pass is compared with a loop, once per model


class Penalty:
    """The value of a measure on a batch, with a graph to the model's parameters; created by :func:`penalty`.

    Attributes:
        name: the measure, with its non-default options.
        seed: the seed of the next call's random columns, increased by one at every call.
    """

    def __init__(
        self,
        request: MeasureRequest,
        loss: LossLike = "cross_entropy",
        *,
        columns: str = "exact",
        layers: Sequence[str] | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        mode: Literal["eval", "keep"] = "eval",
        logits: str = "none",
        strategy: PassStrategy = "auto",
    ) -> None:
        self.strategy = check_strategy(strategy)
        if not is_choice(mode, ("eval", "keep")):
            raise OptionError(f"Expected 'eval' or 'keep', but got mode={mode!r}. Try leaving it out for eval mode.")
        self.name, self.request, self.loss = request.key, request, normalize_logits(parse_loss(loss), logits)
        self.plan, self.layers, self.dtype, self.mode = parse_column_plan(columns), layers, dtype, mode
        self.seed = check_seed(seed)
        self._loops: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._shapes: WeakKeyDictionary[nn.Module, Mapping[str, Geometry]] = WeakKeyDictionary()

    @take_turns
    def __call__(self, model: nn.Module, batch: TrainingBatch) -> Tensor:
        """Return the penalty of a batch ``(inputs, targets)``: a scalar to add to its loss."""
        wants_graph = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with open_session(model, self.mode):
            problem = Problem.build(model, [batch], self.loss, self.layers, self.dtype, self.mode)
            examples = next(problem.read_batches())
            shapes = self._find_geometries(problem, examples)
            with ReplacementMode(DECOMPOSED):
                value = self._compute_penalty(DifferentiableProblem.build(problem, examples, shapes))
        self.seed += 1
        return value if wants_graph else value.detach()

    def _find_geometries(self, problem: Problem, batch: Batch) -> Mapping[str, Geometry]:
        """Return how the weights are viewed as matrices, determined once per model."""
        usual, known = find_geometries(problem.network), self._shapes.get(problem.model, {})
        if not is_axis_dependent(self.request):
            return usual
        if {name: each.shape for name, each in usual.items()} != {name: each.shape for name, each in known.items()}:
            known = self._shapes[problem.model] = find_geometries(problem.network, batch)
        return known

    def _compute_penalty(self, live: DifferentiableProblem) -> Tensor:
        """Compute all examples together where that is known to be correct, else one at a time."""
        model = live.problem.model
        if self.strategy != "auto":
            return self._compute_value(live, self.strategy == "loop")
        if model not in self._loops:
            self._compare_vmap_with_loop(live)
        if not self._loops.get(model, False):
            try:
                return self._compute_value(live, looped=False)
            except (SaltflatError, torch.OutOfMemoryError):
                raise
            except Exception:
                # What works for a few examples may fail for all.
                self._loops[model] = True
        return self._compute_value(live, looped=True)

    def _compare_vmap_with_loop(self, live: DifferentiableProblem) -> None:
        """Check a few examples: not every operation can be vectorized, and torch computes some incorrectly."""
        compute_checked_outputs(live.problem, live.batch.cut(0, 2))
        few = replace(live, batch=live.batch.cut(0, COMPARED))
        try:
            truth = self._compute_value_and_gradient(few, looped=True)
        except EmptyDataError:  # their targets do not count: try again with the next batch
            return
        except SaltflatError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise ModelError(
                f"Expected a model that can be differentiated twice, but got {format_error_line(error)} for single "
                "examples. Try replacing the operation that fails."
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
                f"Expected at least one weight with two or more axes for {self.name}, but got none. Try naming other "
                "layers with layers=."
            )
        numbers = []
        for name, part in parts.items():
            if not isinstance(part.value, Tensor) or not bool(part.value.isfinite()):
                where = f"{self.name} of {name!r}" if name else self.name
                raise NonFiniteError(
                    f"Expected a finite value of {where}, but got none"
                    f"{''.join(f' ({note})' for note in part.notes)}. Try naming other layers with layers=, or "
                    "dtype=torch.float64 if squares overflow."
                )
            numbers.append(part.value.double())
        total = torch.stack(numbers).max() if self.request.measure.total == "max" else torch.stack(numbers).sum()
        return total.to(next(iter(live.leaves.values())).dtype)

    def __repr__(self) -> str:
        return f"<Penalty {self.name}, columns {self.plan}>"


def penalty(measure: str, loss: LossLike = "cross_entropy", **options: Any) -> Penalty:
    r"""Return a term for the training loss: the value of a measure on the batch, differentiable.

    In a training loop::

        flat = penalty("relative_flatness", layers="fc", columns="sampled:2")
        for x, y in loader:
            loss = criterion(model(x), y) + 0.1 * flat(model, (x, y))
            loss.backward()

    Its value is that of :func:`saltflat.measure` on the same batch, and its gradient reaches all parameters that
    require one, including those outside of ``layers``: the curvature of a layer depends on the layers before and after
    it. Where a measure uses the Gauss-Newton matrix, so does the penalty.

    The model always runs in eval mode: BatchNorm uses its running statistics as constants, and dropout is off.
    Gradients of single examples are not defined otherwise. Modes, buffers, hooks and ``.grad`` are restored. It runs in
    float32 (or float64), with autocast off. With DistributedDataParallel pass ``model.module``.

    Every example's gradient is computed explicitly for every column, and differentiated once more: this costs about
    eight plain training steps per column for LeNet on a CPU, and memory for several times (columns x examples x
    parameters) numbers. There is one exact column fewer than classes. For many classes use ``columns="sampled:2"``: new
    random columns at every call, unbiased for measures that are linear in the curvature, which all are except maxima
    and roots. For large networks name few ``layers``. ``fisher_trace`` and other measures of the loss's own gradients
    always have one column.

    Args:
        measure: a name with options, such as ``"hessian_trace"`` or ``"rho(axis='row')"``. It must be a smooth function
            of the weights: searches, eigenvalues and minima over scales raise an error.
        loss: the loss whose flatness is measured, as for :func:`saltflat.measure`; usually the training loss.
        options: ``columns``, ``layers``, ``dtype``, ``seed``, ``mode`` and ``logits`` as for :func:`saltflat.measure`;
            and ``strategy``: ``"vectorized"`` for one pass over all examples, ``"loop"`` for one at a time, or
            ``"auto"`` for the first if it agrees with the second on a few examples of the first batch.

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
        raise OptionError(f"Expected the name of a measure, but got measure={measure!r}. Try penalty('fisher_trace').")
    request, known = parse_measure(measure), find_keyword_defaults(Penalty.__init__)
    for option in options:
        if option not in known:
            raise make_unknown_name_error("option of penalty", option, known)
    made = Penalty(request, loss, **options)
    reason = _find_measure_refusal(request.key)
    if reason is not None:
        works = ", ".join(name for name in MEASURES if _find_measure_refusal(name) is None)
        raise NotSmoothError(
            f"Expected a measure that is a smooth function of the weights, but got {request.key!r} as a penalty: "
            f"{reason}. Try one of {works}, and monitor {request.key!r} with saltflat.measure."
        )
    return made


@cache
def _find_measure_refusal(measure: str) -> str | None:
    request = parse_measure(measure)
    return find_refusal_reason(request, Penalty(request, strategy="vectorized"))
