"""The strategy: how a model can be swept, determined by running it on the first examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from saltflat.engine import per_example
from saltflat.engine.chunk_check import run_checked
from saltflat.engine.custom_losses import CustomLoss
from saltflat.engine.data import Batch
from saltflat.engine.model_loss import check_model_loss
from saltflat.engine.operation_recorder import OperationRecorder
from saltflat.engine.parameter_routes import PATHS, SILENT, SORTED, UNRULED, VECTORIZED, ParameterRoute, find_routes
from saltflat.engine.problem import Problem, cast_targets
from saltflat.engine.reference_gradients import (
    GROUP,
    PAIRS,
    RUN_ERRORS,
    TOLERANCE,
    ReferenceGradients,
    find_silent_parameters,
    make_coupled_error,
    make_group_references,
    split_singles,
    verify_reference,
)
from saltflat.engine.strategy_trial import (
    EXPANDED,
    LOOPED,
    PLAIN,
    TOGETHER,
    choose_strategy,
    measure_example_cost,
    measure_gradient_bytes,
    run_strategy,
    try_strategies,
    try_strategy,
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

CPU_CHUNK = 6 << 20  # bytes of a chunk's largest array of gradients that stays in the caches of a CPU
OVERHEAD = 16 << 20  # bytes


@dataclass(frozen=True)
class Probe:
    """How to sweep inputs of one kind, and the memory that needs.

    Attributes:
        strategy: a key of :data:`saltflat.engine.strategy_trial.STRATEGIES`.
        fallback: the same for single examples of a chunk for which ``strategy`` turns out not to work.
        fixed: bytes per example that do not depend on the number of columns.
        moving: bytes per example and column.
        widest: bytes of the largest activation of one example.
        calls: the calls of layers for one example.
        tolerance: largest relative difference between outputs that counts as rounding.
        is_doubtful: whether the model may reorder examples by their values, so that every chunk is checked.
        is_lasting: whether it holds while the model runs the same operations, at whatever weights.
        together: how many examples were run together.
        most: how many would have been run together, if there had been as many.
        operations: digests of the operations that the model ran on the first pair of examples, and on those together.
        indices: digest of the whole numbers and truth values that these took from tensors.
        routes: how the gradients of each parameter are computed, and why not faster.
        silent: the parameters without a gradient in all examples so far, for which no strategy has been compared.
    """

    strategy: str
    fallback: str
    fixed: int
    moving: int
    widest: int
    calls: per_example.LayerCalls
    tolerance: float
    is_doubtful: bool
    is_lasting: bool
    together: int
    most: int
    operations: tuple[str, str]
    indices: str
    routes: tuple[ParameterRoute, ...]
    silent: tuple[str, ...]

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
        run = partial(run_strategy, problem, strategy or self.strategy, batch, self.calls)
        is_doubtful = self.is_doubtful and (strategy or self.strategy) in TOGETHER and batch.examples > 1
        outputs, backward = run_checked(problem, batch, run, self.tolerance) if is_doubtful else run()
        problem.check_outputs(outputs, batch)
        return outputs, backward


def compute_working_memory(limit: int) -> int:
    """Return the part of the working memory that is for examples, not for kernels and Python objects."""
    return limit - min(limit // 4, OVERHEAD)


@dataclass(frozen=True)
class _FirstExamples:
    """The first examples of a batch, after all checks of model, loss and gradients that need no strategy.

    Attributes:
        pairs: the examples, two by two.
        outputs: of the first pair.
        noticed: the operations of the model on the first pair.
        truths: the gradients of the first pair, and of others while some parameter has no gradient.
    """

    pairs: list[Batch]
    outputs: Tensor
    noticed: OperationRecorder
    truths: list[ReferenceGradients]

    @classmethod
    def run(cls, problem: Problem, batch: Batch) -> _FirstExamples:
        """Run the examples together and alone, and compare."""
        pairs = [batch.cut(start, start + 2) for start in range(0, min(batch.examples, 2 * PAIRS), 2)]
        outputs, noticed = compute_checked_outputs(problem, pairs[0], digest=True)
        _check_loss_sees_outputs_alone(problem, outputs, pairs[0])
        check_model_loss(problem, pairs)
        truths = [ReferenceGradients.compute(problem, pairs[0], noticed.coarsest)]
        _check_fixed_function(problem, truths[0], outputs)
        truths[0] = verify_reference(problem, truths[0])
        # A gradient of zero agrees with everything: run more examples while some parameter has no other.
        for pair in pairs[1:]:
            if not find_silent_parameters(truths):
                break
            truths.append(verify_reference(problem, ReferenceGradients.compute(problem, pair, noticed.coarsest)))
        return cls(pairs, outputs, noticed, truths)

    @property
    def checks(self) -> list[ReferenceGradients]:
        """Return the references of more than one example, which a strategy for several has to reproduce."""
        return [truth for truth in self.truths if truth.batch.examples > 1]

    @property
    def alone(self) -> list[ReferenceGradients]:
        """Return the references of single examples: the first, and those where further parameters have gradients."""
        found: list[ReferenceGradients] = []
        waiting = {name for name, value in self.truths[0].gradients.items() if value.numel()}
        for single in (truth.select_example(n) for truth in self.truths for n in range(truth.batch.examples)):
            heard = {name for name in waiting if bool(single.gradients[name].any())}
            if heard or not found:
                found.append(single)
            waiting -= heard
            if not waiting:
                break
        return found

    def can_decide(self, problem: Problem) -> bool:
        """Return whether they show if a strategy for several examples is right."""
        return bool(self.checks) and len(find_silent_parameters(self.truths)) < len(problem.network.measured)


def run_probe(problem: Problem, batch: Batch, limit: int) -> Probe:
    """Run examples of a batch in pairs and alone, and choose the fastest strategy that agrees with single examples.

    More than two are run at once only if they fit into ``limit`` bytes; otherwise no chunk will have as many.
    """
    found = _FirstExamples.run(problem, batch)
    noticed, outputs, checks, decided = found.noticed, found.outputs, found.checks, found.can_decide(problem)
    strategies, alone = ["together", "mapped"], VECTORIZED
    if not decided or noticed.sizes:
        # Examples that take different paths through the layers have to be run alone.
        strategies, alone = [], PATHS if decided else SILENT
    elif noticed.order:
        # Examples that are reordered can be mapped.
        strategies, alone = ["mapped"], SORTED
    elif noticed.may_reorder:
        alone = SORTED
    singles = found.alone
    first, results = singles[0], noticed.bytes // found.pairs[0].examples
    needs, fallback = measure_example_cost(problem, first, LOOPED, results), LOOPED
    if needs is None or any(try_strategy(problem, LOOPED, each, needs.calls) != "right" for each in singles[1:]):
        # The model uses a layer's parameters in a way that its rule does not cover.
        needs, fallback, strategies = measure_example_cost(problem, first, PLAIN, results), PLAIN, []
        alone = UNRULED
    assert needs is not None
    # On a CPU the heap holds up to four times the memory in use, since arrays of many sizes leave gaps. On a GPU the
    # kernels of convolutions need working memory of their own.
    held = 4 if outputs.device.type == "cpu" else 1.3
    # A backward pass holds the gradients of a few activations at a time, a vectorized or a looped one all of them.
    few, all_of_them = 5 * needs.widest, needs.activations + needs.factors
    # The columns themselves are made in float64.
    columns = 2 * needs.moving + 24 * outputs[0].numel()
    fitting = int(limit // (held * (needs.fixed + min(few, all_of_them) + columns)))
    most = min(GROUP, max(2, fitting))
    check_model_loss(problem, [batch.cut(0, max(2, fitting))])
    group = batch.cut(0, most)
    ran_together = _check_uncoupled(problem, group, noticed.coarsest)
    if strategies and group.examples > 2:
        checks += make_group_references(problem, group, found.truths[0])
    choice = choose_strategy(problem, strategies, checks, singles if fallback == LOOPED else [], needs.calls)
    strategy, calls = choice.strategy or fallback, choice.calls
    held_copies = calls.count_elements() * outputs.element_size()
    if strategy == EXPANDED:
        # Copies hold their gradients until the end of the pass, but products and lookups of parameters are factored.
        columns += 2 * (measure_gradient_bytes(problem, strategy, first, calls) - needs.moving)
    moving = columns + (few + held_copies if strategy in (*TOGETHER, "single") else all_of_them)
    routes = find_routes(list(problem.network.measured), strategy, needs.outside, choice.blocked, alone)
    by_values = (
        noticed.sizes or noticed.order or noticed.sorts or noticed.reads or choice.was_wrong or fallback == PLAIN
    )
    return Probe(
        strategy,
        fallback,
        int(held * needs.fixed),
        int(held * moving),
        needs.widest,
        calls,
        first.tolerance,
        is_doubtful=noticed.may_reorder,
        is_lasting=decided and not by_values,
        together=group.examples,
        most=most,
        operations=(noticed.operations, ran_together),
        indices=noticed.indices,
        routes=routes,
        silent=tuple(find_silent_parameters(found.truths)),
    )


def confirm_probe(problem: Problem, batch: Batch, earlier: Probe) -> Probe | None:
    """Return a lasting probe of inputs of this kind if it is right for this batch at the current weights, else None.

    All checks of :func:`run_probe` are repeated. What is left out are the other strategies and the memory that an
    example needs: they do not change while the model runs the same operations.
    """
    if earlier.together != min(earlier.most, batch.examples):
        return None
    found = _FirstExamples.run(problem, batch)
    group = batch.cut(0, earlier.together)
    operations = found.noticed.operations, _run_together(problem, group)[1]
    if operations != earlier.operations or not found.can_decide(problem):
        return None
    checks = found.checks if not earlier.strategy.startswith("single") else []
    if checks and group.examples > 2:
        checks += make_group_references(problem, group, found.truths[0])
    if not checks or earlier.strategy == EXPANDED:
        checks = [*checks, *found.alone]
    if try_strategies(problem, [earlier.strategy], checks, earlier.calls)[earlier.strategy] != "right":
        return None
    silent = tuple(name for name in find_silent_parameters(found.truths) if name in earlier.silent)
    return replace(earlier, indices=found.noticed.indices, silent=silent)


def compute_checked_outputs(problem: Problem, pair: Batch, digest: bool = False) -> tuple[Tensor, OperationRecorder]:
    """Return the outputs of a few examples and a record of the operations, after checking model, data and loss.

    With ``digest``, the record has digests of all operations.
    """
    outputs, noticed = _compute_first_outputs(problem, pair, digest)
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


def _compute_first_outputs(problem: Problem, pair: Batch, digest: bool) -> tuple[Tensor, OperationRecorder]:
    """Return the outputs of the model, run without rewriting anything, and a record of the operations."""
    network = problem.network
    make_recorder = partial(OperationRecorder.make_for, network, pair) if digest else OperationRecorder
    try:
        try:
            with torch.no_grad(), make_recorder() as noticed:
                outputs = network(pair, as_is=True)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            # The model differentiates in its forward pass.
            network.needs_graph = True
            with torch.no_grad(), make_recorder() as noticed:
                outputs = network(pair, as_is=True)
    except SaltflatError:
        raise
    except RUN_ERRORS as error:
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in pair.list_tensors())
        hint = "Check the inputs' shape and type against the model's."
        if problem.dtype and any(value.dtype != problem.dtype for value in problem.model.parameters()):
            hint = f"It was run in {str(problem.dtype).removeprefix('torch.')}: check that it can be."
        raise ModelError(
            f"Expected a model that runs on this data, but got {format_error_line(error)} from the model on the "
            f"first examples (inputs {shapes}). {hint}"
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


def _run_together(problem: Problem, batch: Batch) -> tuple[Tensor, str]:
    """Return the outputs of examples together, and a digest of the operations."""
    with torch.no_grad(), OperationRecorder.make_for(problem.network, batch) as noticed:
        outputs = problem.network(batch, as_is=True)
    return outputs, noticed.operations


def _check_uncoupled(problem: Problem, batch: Batch, coarsest: torch.dtype) -> str:
    """Check more than two examples together: some models mix only larger batches, or reorder them.

    Return a digest of the operations.
    """
    together, operations = _run_together(problem, batch)
    if batch.examples < 3:
        return operations
    with torch.no_grad():
        alone = [problem.network(single, as_is=True) for single in split_singles(batch)]
    tolerance = TOLERANCE.get(coarsest, TOLERANCE[torch.float32])
    if any(one.shape[1:] != together.shape[1:] for one in alone) or not _is_allclose(
        together, torch.cat(alone), tolerance
    ):
        raise make_coupled_error()
    return operations


def _check_fixed_function(problem: Problem, truth: ReferenceGradients, outputs: Tensor) -> None:
    """Check that the outputs of a batch are those of its examples alone."""
    if _is_allclose(outputs, truth.outputs, truth.tolerance):
        return
    if torch.finfo(truth.coarsest).bits < 32:
        raise PrecisionError(
            f"Expected float32 or float64 throughout, but got operations in {truth.coarsest} inside the model, "
            "whose outputs then depend on the batch. Try removing casts to half precision from the model's forward."
        )
    with torch.no_grad():
        again = problem.network(truth.batch, as_is=True)
    if _is_allclose(outputs, again, truth.tolerance):
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


def _is_allclose(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether two tensors differ by at most ``tolerance`` times the largest entry."""
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())
