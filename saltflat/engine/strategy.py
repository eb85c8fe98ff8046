"""The strategy: how a model can be swept, determined by running it on the first examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from saltflat.engine import per_example
from saltflat.engine.custom_losses import CustomLoss
from saltflat.engine.data import Batch
from saltflat.engine.model_loss import check_model_loss
from saltflat.engine.per_example import OperationRecorder
from saltflat.engine.problem import Problem, can_accept_labels, cast_targets
from saltflat.engine.reference_gradients import (
    GROUP,
    PAIRS,
    RUN_ERRORS,
    TOLERANCE,
    ReferenceGradients,
    compute_rounding,
    find_differences,
    find_silent_parameters,
    is_allclose,
    is_near_reference,
    make_coupled_error,
    make_group_references,
    split_singles,
    verify_reference,
)
from saltflat.errors import (
    ModelError,
    NondeterministicError,
    NonFiniteError,
    OptionError,
    PrecisionError,
    SaltflatError,
    format_error_line,
)
from saltflat.gradients.base import FactoredGradient

Strategy = Callable[..., tuple[Tensor, per_example.Backward]]  # called with a network and a batch

# How to compute a chunk's gradients, the fastest strategy first; `single` is `together` with chunks of one example.
LOOPED = "single, columns in a loop"
PLAIN = "single, without rules of layers"
STRATEGIES: dict[str, Strategy] = {
    "together": per_example.run_batched,
    "mapped": per_example.run_vmapped,
    "single": per_example.run_batched,
    LOOPED: partial(per_example.run_batched, loop=True),
    PLAIN: partial(per_example.run_batched, loop=True, rules=False),
}
# The size in bytes of a chunk's largest array of gradients up to which it stays in the caches of a CPU.
CPU_CHUNK = 6 << 20
OVERHEAD = 16 << 20  # bytes


@dataclass(frozen=True)
class Probe:
    """How to sweep inputs of one kind, and the memory that needs.

    Attributes:
        strategy: a key of :data:`STRATEGIES`.
        fallback: the same for single examples of a chunk for which ``strategy`` turns out not to work.
        fixed: bytes per example that do not depend on the number of columns.
        moving: bytes per example and column.
        widest: bytes of the largest activation of one example.
        calls: the calls of layers for one example.
        tolerance: largest relative difference between outputs that counts as rounding.
    """

    strategy: str
    fallback: str
    fixed: int
    moving: int
    widest: int
    calls: per_example.LayerCalls
    tolerance: float

    def choose_num_examples(self, batch: Batch, columns: int, limit: int) -> int:
        """Return how many examples of a batch to process at once."""
        fit = compute_working_memory(limit) // (
            self.fixed + self.moving * min(columns, self.choose_num_columns(1, limit))
        )
        if batch.targets.device.type == "cpu":
            fit = min(fit, CPU_CHUNK // (self.widest * columns))
        return max(1, fit)

    def choose_num_columns(self, examples: int, limit: int) -> int:
        """Return how many columns to propagate at once with this many examples."""
        return max(1, (compute_working_memory(limit) // examples - self.fixed) // self.moving)

    def forward(
        self, problem: Problem, batch: Batch, strategy: str | None = None
    ) -> tuple[Tensor, per_example.Backward]:
        """Return the outputs, checked, and the backward pass."""
        strategy = strategy or self.strategy
        if strategy == "together" and batch.examples > 1:
            outputs, backward = per_example.run_batched(problem.network, batch, expected=self.calls)
        else:
            outputs, backward = STRATEGIES[strategy](problem.network, batch)
        problem.check_outputs(outputs, batch)
        return outputs, backward


def compute_working_memory(limit: int) -> int:
    """Return the part of the working memory that is for examples, not for kernels and Python objects."""
    return limit - min(limit // 4, OVERHEAD)


def run_probe(problem: Problem, batch: Batch, limit: int) -> Probe:
    """Run examples of a batch in pairs and alone, and choose the fastest strategy that agrees with single examples.

    More than two are run at once only if they fit into ``limit`` bytes; otherwise no chunk will have as many.
    """
    pairs = [batch.cut(start, start + 2) for start in range(0, min(batch.examples, 2 * PAIRS), 2)]
    outputs, noticed = compute_checked_outputs(problem, pairs[0])
    _check_loss_sees_outputs_alone(problem, outputs, pairs[0])
    if can_accept_labels(problem.model, pairs[0]):
        check_model_loss(problem, pairs)
    coarsest = noticed.coarsest
    truths = [ReferenceGradients.compute(problem, pairs[0], coarsest)]
    _check_fixed_function(problem, truths[0], outputs)
    truths[0] = verify_reference(problem, truths[0])
    # A gradient of zero agrees with everything: run more examples while some parameter has no other.
    for pair in pairs[1:]:
        if not find_silent_parameters(truths):
            break
        truths.append(verify_reference(problem, ReferenceGradients.compute(problem, pair, coarsest)))
    checks = [truth for truth in truths if truth.batch.examples > 1]
    strategies = ["together", "mapped"]
    if not checks or len(find_silent_parameters(truths)) == len(problem.network.measured) or noticed.sizes:
        # Examples that take different paths through the layers have to be run alone.
        strategies = []
    elif noticed.order:
        # Examples that are reordered can be mapped.
        strategies.remove("together")
    first = truths[0].select_example(0)
    results = noticed.bytes // pairs[0].examples
    needs, fallback = _measure_example_cost(problem, first, LOOPED, results), LOOPED
    if needs is None:
        # The model uses a layer's parameters in a way that its rule does not cover.
        needs, fallback, strategies = _measure_example_cost(problem, first, PLAIN, results), PLAIN, []
    assert needs is not None
    # On a CPU the heap holds up to four times the memory in use, since arrays of many sizes leave gaps. On a GPU the
    # kernels of convolutions need working memory of their own.
    held = 4 if outputs.device.type == "cpu" else 1.3
    # A backward pass holds the gradients of a few activations at a time, a vectorized or a looped one all of them.
    few, all_of_them = 5 * needs.widest, needs.activations + needs.factors
    # The columns themselves are made in float64.
    columns = 2 * needs.moving + 24 * outputs[0].numel()
    fitting = int(limit // (held * (needs.fixed + min(few, all_of_them) + columns)))
    group = batch.cut(0, min(GROUP, max(2, fitting)))
    _check_uncoupled(problem, group, coarsest)
    if strategies and group.examples > 2:
        checks += make_group_references(problem, group, truths[0])
    strategy = next(
        (strategy for strategy in strategies if all(_is_consistent(problem, strategy, check) for check in checks)), None
    )
    strategy = strategy or ("single" if fallback == LOOPED and _is_consistent(problem, "single", first) else fallback)
    moving = columns + (few if strategy in ("together", "single") else all_of_them)
    return Probe(
        strategy, fallback, int(held * needs.fixed), int(held * moving), needs.widest, needs.calls, first.tolerance
    )


def check_same_outputs(problem: Problem, batch: Batch, outputs: Tensor, scales: Tensor, tolerance: float) -> None:
    """Check that examples have the same outputs in this batch as in others; ``scales`` are the sizes of those outputs.

    The first examples, which are probed, need not reveal that others are coupled.
    """
    with torch.no_grad():
        found = problem.network(batch)
    if found.shape != outputs.shape:
        raise make_coupled_error()
    off = (found - outputs.to(found)).abs().reshape(batch.examples, -1).amax(1)
    if not bool((off <= tolerance * scales.to(off)).all()):
        raise make_coupled_error()


def compute_checked_outputs(problem: Problem, pair: Batch) -> tuple[Tensor, OperationRecorder]:
    """Return the outputs of a few examples and a record of the operations, after checking model, data and loss."""
    outputs, noticed = _compute_first_outputs(problem, pair)
    problem.check_outputs(outputs, pair)
    try:
        _check_first_loss(problem, outputs, pair)
    except SaltflatError:
        raise
    except RUN_ERRORS as error:
        raise OptionError(
            "Expected a loss that accepts these outputs and targets (real ones in float64), but got "
            f"{format_error_line(error)} from the loss on the first examples. Check it on one batch of the model's "
            "outputs, and convert its own tensors with .to(outputs)."
        ) from error
    return outputs, noticed


def _compute_first_outputs(problem: Problem, pair: Batch) -> tuple[Tensor, OperationRecorder]:
    """Return the outputs of the model, run without rewriting anything, and a record of the operations."""
    network = problem.network
    try:
        try:
            with torch.no_grad(), OperationRecorder() as noticed:
                outputs = network(pair, as_is=True)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            # The model differentiates in its forward pass.
            network.needs_graph = True
            with torch.no_grad(), OperationRecorder() as noticed:
                outputs = network(pair, as_is=True)
    except SaltflatError:
        raise
    except RUN_ERRORS as error:
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in pair.list_tensors())
        raise ModelError(
            f"Expected a model that runs on this data, but got {format_error_line(error)} from the model on the "
            f"first examples (inputs {shapes}). Check the inputs' shape and type against the model's."
        ) from error
    network.find_writes()
    return outputs, noticed


def _check_loss_sees_outputs_alone(problem: Problem, outputs: Tensor, batch: Batch) -> None:
    """Check that a loss does not use the model's parameters, since that curvature would be missed."""
    if not isinstance(problem.loss, CustomLoss):
        return
    with torch.enable_grad():
        value = problem.loss.compute_example_loss(outputs[0].detach().double(), cast_targets(batch.targets)[0])
    found = per_example.find_reached_leaves(value, dict(problem.model.named_parameters()))
    if found:
        raise OptionError(
            "Expected a function of outputs and targets only, but got a loss that uses the model's parameter "
            f"{found[0]!r} (a penalty, say), whose curvature would be missed. Try measuring without that term."
        )


def _check_uncoupled(problem: Problem, batch: Batch, coarsest: torch.dtype) -> None:
    """Check more than two examples together: some models mix only larger batches, or reorder them."""
    if batch.examples < 3:
        return
    with torch.no_grad():
        together = problem.network(batch, as_is=True)
        alone = [problem.network(single, as_is=True) for single in split_singles(batch)]
    tolerance = TOLERANCE.get(coarsest, TOLERANCE[torch.float32])
    if any(one.shape[1:] != together.shape[1:] for one in alone) or not is_allclose(
        together, torch.cat(alone), tolerance
    ):
        raise make_coupled_error()


def _check_fixed_function(problem: Problem, truth: ReferenceGradients, outputs: Tensor) -> None:
    """Check that the outputs of a batch are those of its examples alone."""
    if is_allclose(outputs, truth.outputs, truth.tolerance):
        return
    if torch.finfo(truth.coarsest).bits < 32:
        raise PrecisionError(
            f"Expected float32 or float64 throughout, but got operations in {truth.coarsest} inside the model, "
            "whose outputs then depend on the batch. Try removing casts to half precision from the model's forward."
        )
    with torch.no_grad():
        again = problem.network(truth.batch, as_is=True)
    if is_allclose(outputs, again, truth.tolerance):
        raise make_coupled_error()
    names = [name for name, m in problem.model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    raise NondeterministicError(
        "Expected a fixed function, but got different outputs from the same inputs: the model draws random numbers "
        f"even in eval mode{(' (it has dropout: ' + ', '.join(names[:3]) + ')' if names else '')}. Try making its "
        "randomness depend on self.training, or turning it off."
    )


def _check_first_loss(problem: Problem, outputs: Tensor, batch: Batch) -> None:
    targets = cast_targets(batch.targets)
    problem.loss.check(outputs.double(), targets)
    with torch.enable_grad():
        problem.loss.gradient(outputs.double(), targets)
    if not bool(problem.loss.total(outputs.double(), targets).isfinite().all()):
        raise NonFiniteError(
            "Expected a finite loss, but got NaN or infinity on the first examples. Check loss and targets."
        )


def _is_consistent(problem: Problem, strategy: str, truth: ReferenceGradients) -> bool:
    """Return whether a strategy computes the reference gradients of every example, for each parameter."""
    comparison = _GradientComparison(problem, truth)
    try:
        _, backward = STRATEGIES[strategy](problem.network, truth.batch)
        backward(truth.columns, comparison.emit, True)
    except SaltflatError:
        raise
    except Exception:
        # If anything keeps this strategy from working (an operation that cannot be vectorized, examples that cannot be
        # separated, control flow on values), a slower one is used.
        return False
    return comparison.is_consistent()


class _GradientComparison:
    """Compares gradients with the reference as they are emitted."""

    def __init__(self, problem: Problem, truth: ReferenceGradients) -> None:
        self.truth, measured = truth, problem.network.measured
        self.squares = {name: torch.zeros_like(value) for name, value in measured.items()}
        self.along = {name: value.new_zeros(truth.batch.examples) for name, value in measured.items()}

    def emit(self, name: str, form: FactoredGradient) -> None:
        """Receive the gradients of a parameter."""
        self.along[name] = form.project(self.truth.directions[name])[0]
        if self.truth.gradients:
            self.squares[name] = form.sum_squares()

    def is_consistent(self) -> bool:
        """Return whether all gradients agree with the reference up to rounding."""
        truth, squares, along = self.truth, self.squares, self.along
        if not truth.gradients:
            return is_near_reference(torch.stack([each.double() for each in along.values()]).sum(0), truth)
        rounding = compute_rounding(truth.columns, truth.coarsest)
        if find_differences(squares, truth.squares, truth.squares, truth, rounding**2, degree=2):
            return False
        # Sums over the examples do not show that examples were swapped, but projections do. The directions are scaled
        # so that rounding is below the tolerance.
        return not find_differences(along, truth.projections, truth.sizes, truth, truth.tolerance)


@dataclass(frozen=True)
class _ExampleCost:
    """The memory one example needs, in bytes, and the calls of layers."""

    fixed: int
    moving: int
    widest: int
    activations: int
    factors: int
    calls: per_example.LayerCalls


def _measure_example_cost(
    problem: Problem, truth: ReferenceGradients, strategy: str, results: int
) -> _ExampleCost | None:
    """Return the cost of an example, from a pass of it alone in a looped strategy, or None if its gradients are wrong.

    ``results`` are the bytes of all results of its forward pass.
    """
    single = truth.batch
    network = problem.network
    constants = {value.untyped_storage().data_ptr() for value in network.constants.values()}
    saved: dict[int, int] = {}

    def record_saved(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor
        # Not the bytes of the storage: an example is a slice of its batch.
        where, size = tensor.untyped_storage().data_ptr(), tensor.numel() * tensor.element_size()
        if where not in constants:
            saved[where] = max(size, saved.get(where, 0))
        return tensor

    record: list[tuple[nn.Module, Tensor, Tensor]] = []
    factors: list[tuple[int, int]] = [(0, 0)]
    comparison = _GradientComparison(problem, truth)

    def emit(name: str, form: FactoredGradient) -> None:
        factors.append(form.count_bytes())
        comparison.emit(name, form)

    try:
        try:
            with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor):
                outputs, backward = STRATEGIES[strategy](network, single, record=record)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            # torch.func transforms inside the model do not allow hooks. At most all results are saved.
            record.clear()
            outputs, backward = STRATEGIES[strategy](network, single, record=record)
            saved[0] = results
        backward(truth.columns, emit, True)
    except SaltflatError:
        raise
    except Exception:
        if strategy == PLAIN:
            raise
        return None
    if strategy != PLAIN and not comparison.is_consistent():
        return None
    for _, x, _ in record:
        record_saved(x)
    activations = [outputs.numel() * outputs.element_size(), *(y.numel() * y.element_size() for _, _, y in record)]
    still, moving = (max(part) for part in zip(*factors, strict=True))
    calls = per_example.LayerCalls.from_batch(single, [(module, x.shape) for module, x, _ in record])
    every = sum(each for _, each in factors)
    return _ExampleCost(sum(saved.values()) + still, moving, max(activations), sum(activations), every, calls)
