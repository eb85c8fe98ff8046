"""Measures as penalties: a term for the training loss that pulls toward flat minima."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from saltflat.amounts import is_choice
from saltflat.columns import ExampleRNG, parse_column_plan
from saltflat.data import Batch
from saltflat.errors import (
    EmptyDataError,
    ModelError,
    NonFiniteError,
    NotSmoothError,
    OptionError,
    SaltflatError,
    format_error_line,
    make_unknown_name_error,
)
from saltflat.evaluating import compute_parts, is_axis_dependent
from saltflat.geometry import Geometry, find_geometries
from saltflat.loan import open_session
from saltflat.logits import normalize_logits
from saltflat.losses import parse_loss
from saltflat.measures import MEASURES
from saltflat.measures.request import MeasureRequest, parse_measure
from saltflat.probe import TOLERANCE, compute_checked_outputs
from saltflat.problem import Problem
from saltflat.statistic import find_keyword_defaults
from saltflat.sweep import check_seed
from saltflat.symmetry.same import compute_relative_difference
from saltflat.training.differentiable import DifferentiableProblem, compute_statistics_with_graph
from saltflat.training.trial import find_refusal_reason
from saltflat.training.written_out import DecomposedLayersMode
from saltflat.turns import take_turns

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
            raise OptionError(f"Got way={way!r}. Want 'auto', 'vectorised' or 'loop'. Do: leave it out for 'auto'.")
        if not is_choice(mode, ("eval", "keep")):
            raise OptionError(f"Got mode={mode!r}. Want 'eval' or 'keep'. Do: leave it out for eval mode.")
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
                f"Got {format_error_line(error)} for single examples. Want a model that can be differentiated twice. "
                "Do: replace the operation that cannot."
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
                f"Got no weights of two or more axes for {self.name}. Want at least one. Do: name others with layers=."
            )
        numbers = []
        for name, part in parts.items():
            if not isinstance(part.value, Tensor) or not bool(part.value.isfinite()):
                where = f"{self.name} of {name!r}" if name else self.name
                raise NonFiniteError(
                    f"Got no finite number for {where}{''.join(f' ({note})' for note in part.notes)}. "
                    "Want one that training can lower. "
                    "Do: name other layers with layers=, or pass dtype=torch.float64 if squares overflow."
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
        raise OptionError(f"Got measure={measure!r}. Want a name. Do: for instance penalty('fisher_trace').")
    request, known = parse_measure(measure), find_keyword_defaults(Penalty.__init__)
    for option in options:
        if option not in known:
            raise make_unknown_name_error("option of penalty", option, known)
    made = Penalty(request, loss, **options)
    reason = _find_measure_refusal(request.key)
    if reason is not None:
        works = ", ".join(name for name in MEASURES if _find_measure_refusal(name) is None)
        raise NotSmoothError(
            f"Got {request.key!r} as a penalty: {reason}. "
            f"Want a measure that is a smooth function of the weights, one of: {works}. "
            "Do: train with one of these and watch the other with saltflat.measure."
        )
    return made


@cache
def _find_measure_refusal(measure: str) -> str | None:
    request = parse_measure(measure)
    return find_refusal_reason(request, Penalty(request, way="vectorised"))
