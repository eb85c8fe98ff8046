"""The first examples, run twice and taken apart: is the model a fixed function of each, and how is it best swept?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from saltflat import passes
from saltflat.data import Batch
from saltflat.errors import (
    CoupledExamplesError,
    ModelError,
    NondeterministicError,
    NonFiniteError,
    OptionError,
    PrecisionError,
    SaltflatError,
    format_error_line,
)
from saltflat.forms import FactoredGradient
from saltflat.losses import CustomLoss
from saltflat.model_loss import check_model_loss
from saltflat.problem import Problem, cast_targets

Way = Callable[..., tuple[Tensor, passes.Backward]]  # of a network and a batch

# The ways to take a chunk's gradients, the quickest first; `single` is `together` with chunks of one example.
LOOPED = "single, columns in a loop"
PLAIN = "single, without rules of layers"
WAYS: dict[str, Way] = {
    "together": passes.run_batched,
    "mapped": passes.run_vmapped,
    "single": passes.run_batched,
    LOOPED: partial(passes.run_batched, loop=True),
    PLAIN: partial(passes.run_batched, loop=True, rules=False),
}

# What torch and Python raise when shapes, types or arguments do not fit.
USUAL = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)

QUOTIENTS = (3.0, 1.0, 0.3)  # times the usual step
PAIRS = 4  # of examples at most, looked at while the first have no gradient
GROUP = 6  # examples, taken together to see whether the model changes their order: two times three, three times two
# Chunks whose largest array of gradients has about this size run from the caches of a CPU; larger ones wait for memory.
CPU_CHUNK = 6 << 20
OVERHEAD = 16 << 20  # bytes

# Largest difference between two ways that is still rounding. A wrong split of the examples differs in the first digit.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}


@dataclass(frozen=True)
class Probe:
    """How to sweep a problem, and what that takes.

    Attributes:
        way: a key of :data:`WAYS`.
        fallback: the same for an example of a chunk whose examples turn out not to be told apart by ``way``.
        fixed: bytes per example, whatever the number of columns.
        moving: bytes per example and column.
        widest: bytes of the largest activation of one example.
        calls: what one example shows the layers.
        tolerance: of differences between outputs that are still rounding.
    """

    way: str
    fallback: str
    fixed: int
    moving: int
    widest: int
    calls: passes.LayerCalls
    tolerance: float

    def choose_num_examples(self, batch: Batch, columns: int, limit: int) -> int:
        """How many examples of a batch to take at once."""
        fit = compute_working_memory(limit) // (
            self.fixed + self.moving * min(columns, self.choose_num_columns(1, limit))
        )
        if batch.targets.device.type == "cpu":
            fit = min(fit, CPU_CHUNK // (self.widest * columns))
        return max(1, fit)

    def choose_num_columns(self, examples: int, limit: int) -> int:
        """How many columns to propagate at once with so many examples."""
        return max(1, (compute_working_memory(limit) // examples - self.fixed) // self.moving)

    def forward(self, problem: Problem, batch: Batch, way: str | None = None) -> tuple[Tensor, passes.Backward]:
        """Outputs, checked, and the backward pass."""
        way = way or self.way
        if way == "together" and batch.examples > 1:
            outputs, backward = passes.run_batched(problem.network, batch, expected=self.calls)
        else:
            outputs, backward = WAYS[way](problem.network, batch)
        problem.check_outputs(outputs, batch)
        return outputs, backward


def compute_working_memory(limit: int) -> int:
    """What is left of the working memory for examples, beside kernels' own and Python's objects."""
    return limit - min(limit // 4, OVERHEAD)


def run_probe(problem: Problem, batch: Batch, limit: int) -> Probe:
    """Run examples of a batch in pairs and alone, and choose the quickest way that gives what single examples give.

    More than two are run at once only if as many fit into ``limit`` bytes: else no chunk will have them.
    """
    pairs = [batch.cut(start, start + 2) for start in range(0, min(batch.examples, 2 * PAIRS), 2)]
    outputs, noticed = compute_checked_outputs(problem, pairs[0])
    _check_loss_sees_outputs_alone(problem, outputs, pairs[0])
    check_model_loss(problem, pairs)
    coarsest = noticed.coarsest
    truths = [_ReferenceGradients.compute(problem, pairs[0], coarsest)]
    _check_fixed_function(problem, truths[0], outputs)
    truths[0] = _verify_reference(problem, truths[0])
    # A gradient of zero agrees with everything: look at more examples as long as some parameter has no other.
    for pair in pairs[1:]:
        if not _find_silent_parameters(truths):
            break
        truths.append(_verify_reference(problem, _ReferenceGradients.compute(problem, pair, coarsest)))
    checks = [truth for truth in truths if truth.batch.examples > 1]
    ways = ["together", "mapped"]
    if not checks or len(_find_silent_parameters(truths)) == len(problem.network.measured) or noticed.sizes:
        # Examples that take different paths through the layers have to take them alone.
        ways = []
    elif noticed.order:
        # Ones that are put into another order can be mapped.
        ways.remove("together")
    first = truths[0].select_example(0)
    results = noticed.bytes // pairs[0].examples
    needs, fallback = _measure_example_cost(problem, first, LOOPED, results), LOOPED
    if needs is None:
        # What a rule says of its layer is not all that the model does with it.
        needs, fallback, ways = _measure_example_cost(problem, first, PLAIN, results), PLAIN, []
    assert needs is not None
    # What a CPU's heap holds is up to four times what is in use: arrays of many sizes leave gaps. On a GPU the kernels
    # of convolutions take working memory of their own.
    held = 4 if outputs.device.type == "cpu" else 1.3
    # A backward pass holds a few activations' gradients at a time, a vectorised or a looped one all of them.
    few, all_of_them = 5 * needs.widest, needs.activations + needs.factors
    # The columns themselves are made in float64.
    columns = 2 * needs.moving + 24 * outputs[0].numel()
    fitting = int(limit // (held * (needs.fixed + min(few, all_of_them) + columns)))
    group = batch.cut(0, min(GROUP, max(2, fitting)))
    _check_uncoupled(problem, group, coarsest)
    if ways and group.examples > 2:
        checks += _make_group_references(problem, group, truths[0])
    way = next((way for way in ways if all(_is_way_consistent(problem, way, check) for check in checks)), None)
    way = way or ("single" if fallback == LOOPED and _is_way_consistent(problem, "single", first) else fallback)
    moving = columns + (few if way in ("together", "single") else all_of_them)
    return Probe(way, fallback, int(held * needs.fixed), int(held * moving), needs.widest, needs.calls, first.tolerance)


def check_same_outputs(problem: Problem, batch: Batch, outputs: Tensor, scales: Tensor, tolerance: float) -> None:
    """Refuse examples that have other outputs in this batch than they had in others; ``scales`` are the sizes of those.

    The first examples, which are probed, need not show that others are coupled.
    """
    with torch.no_grad():
        found = problem.network(batch)
    if found.shape != outputs.shape:
        raise _make_coupled_error()
    off = (found - outputs.to(found)).abs().reshape(batch.examples, -1).amax(1)
    if not bool((off <= tolerance * scales.to(off)).all()):
        raise _make_coupled_error()


def compute_checked_outputs(problem: Problem, pair: Batch) -> tuple[Tensor, _OperationRecorder]:
    """Outputs of a few examples, and what was noticed on the way; what model, data or loss do not fit is said."""
    outputs, noticed = _compute_first_outputs(problem, pair)
    problem.check_outputs(outputs, pair)
    try:
        _check_first_loss(problem, outputs, pair)
    except SaltflatError:
        raise
    except USUAL as error:
        raise OptionError(
            f"Got {format_error_line(error)} from the loss on the first examples. "
            "Want a function of (outputs, targets) that fits them; outputs and real targets come in float64. "
            "Do: check it on one batch of the model's outputs, and convert what it holds with .to(outputs)."
        ) from error
    return outputs, noticed


def _compute_first_outputs(problem: Problem, pair: Batch) -> tuple[Tensor, _OperationRecorder]:
    """Outputs of the model as it is, and what was noticed on the way."""
    network = problem.network
    try:
        try:
            with torch.no_grad(), _OperationRecorder() as noticed:
                outputs = network(pair, as_is=True)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            # The model differentiates in its forward pass.
            network.needs_graph = True
            with torch.no_grad(), _OperationRecorder() as noticed:
                outputs = network(pair, as_is=True)
    except SaltflatError:
        raise
    except USUAL as error:
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in pair.list_tensors())
        raise ModelError(
            f"Got {format_error_line(error)} from the model on the first examples (inputs {shapes}). "
            "Want a model that runs on this data. Do: check the inputs' shape and type against the model's."
        ) from error
    network.find_writes()
    return outputs, noticed


def _split_singles(batch: Batch) -> list[Batch]:
    return [batch.cut(n, n + 1) for n in range(batch.examples)]


@dataclass(frozen=True)
class _ReferenceGradients:
    """What the gradients of some examples must be, for a random column each.

    Attributes:
        batch: the examples.
        columns: ``(1, examples, *outputs)``.
        outputs: of each example alone.
        gradients: by parameter, each example's own, ``(examples, *parameter)``; empty where only ``along`` is known.
        directions: by parameter, random, such that every parameter has about the same share of ``along``.
        along: the derivative of each example's output along all directions at once, times its column.
        coarsest: the shortest floating-point type that the model computes in: what rounding there is to expect.
    """

    batch: Batch
    columns: Tensor
    outputs: Tensor
    gradients: dict[str, Tensor]
    directions: dict[str, Tensor]
    along: Tensor
    coarsest: torch.dtype

    @classmethod
    def compute(cls, problem: Problem, batch: Batch, coarsest: torch.dtype) -> _ReferenceGradients:
        """The definition: one example at a time, by autograd alone."""
        taken = [_differentiate_example(problem, single) for single in _split_singles(batch)]
        outputs = [outputs for outputs, _, _ in taken]
        same = all(each.shape[1:] == outputs[0].shape[1:] for each in outputs)
        if not same:
            raise _make_coupled_error()
        gradients = {name: torch.stack([found[name] for _, _, found in taken]) for name in problem.network.measured}
        columns = torch.cat([column for _, column, _ in taken], 1)
        rounding, tolerance = _compute_rounding(columns, coarsest), TOLERANCE.get(coarsest, TOLERANCE[torch.float32])
        norms = {name: value.norm() for name, value in gradients.items()}
        largest = torch.stack([norm.double() for norm in norms.values()]).amax()
        directions = {}
        for number, (name, value) in enumerate(gradients.items()):
            noise = torch.Generator().manual_seed(number)
            direction = torch.randn(value.shape[1:], generator=noise).to(value)
            # Gradients that are nothing but rounding stay small; where all are, they stay below the tolerance.
            size = torch.maximum(norms[name], 0.01 * largest.to(value)) if largest > rounding else rounding / tolerance
            directions[name] = direction / size
        along = torch.stack(
            [_project_gradients(value, directions[name]).double() for name, value in gradients.items()]
        ).sum(0)
        return cls(batch, columns, torch.cat(outputs), gradients, directions, along, coarsest)

    def select_example(self, n: int) -> _ReferenceGradients:
        gradients = {name: value[n : n + 1] for name, value in self.gradients.items()}
        columns, outputs, along = self.columns[:, n : n + 1], self.outputs[n : n + 1], self.along[n : n + 1]
        batch = self.batch.cut(n, n + 1)
        return replace(self, batch=batch, columns=columns, outputs=outputs, gradients=gradients, along=along)

    @cached_property
    def squares(self) -> dict[str, Tensor]:
        """By parameter, the squared gradients, summed over the examples."""
        return {name: value.square().sum(0) for name, value in self.gradients.items()}

    @cached_property
    def projections(self) -> dict[str, Tensor]:
        """By parameter, each example's gradient along the direction."""
        return {name: _project_gradients(value, self.directions[name]) for name, value in self.gradients.items()}

    @cached_property
    def sizes(self) -> dict[str, Tensor]:
        """By parameter, what the projections are about as large as."""
        return {
            name: value.flatten(1).norm(dim=1) * self.directions[name].square().mean().sqrt()
            if value.dim() > 1
            else value.abs() * self.directions[name].abs()
            for name, value in self.gradients.items()
            if value.numel()
        }

    @property
    def tolerance(self) -> float:
        return TOLERANCE.get(self.coarsest, TOLERANCE[torch.float32])


def _verify_reference(problem: Problem, truth: _ReferenceGradients) -> _ReferenceGradients:
    """The definition, compared with other ways to the same numbers.

    Single examples go through other kernels and memory layouts than batches do, and torch's are not all right.
    """
    wrong = _find_contradiction(problem, truth)
    if wrong is not None and not problem.network.rewrites_batch_norm:
        problem.network.rewrites_batch_norm = True
        truth = _ReferenceGradients.compute(problem, truth.batch, truth.coarsest)
        wrong = _find_contradiction(problem, truth)
    if wrong is not None:
        written = _find_written_parameters(problem)
        if written:
            raise ModelError(
                f"Got a forward pass that writes to its own parameter {written[0]!r}, which gradients do not know of. "
                "Want a function of the parameters. "
                "Do: compute the changed weight without writing to it, or write before measuring instead."
            )
        raise ModelError(
            f"Got gradients of {wrong} from torch's backward pass that are not those of the model's forward pass. "
            "Want both to agree: the numbers would be wrong. "
            "Do: take out hooks that change gradients; if there are none, report the operation to PyTorch."
        )
    return truth


def _find_contradiction(problem: Problem, truth: _ReferenceGradients) -> str | None:
    """A parameter whose gradient is another one in a batch, or for which the forward derivative is another one."""
    network, batch, columns = problem.network, truth.batch, truth.columns
    if batch.examples == 1:
        batch, columns = batch.take(torch.tensor([0, 0]), batch.first), columns.expand(1, 2, *columns.shape[2:])
    try:
        leaves = passes.make_leaves(network)
        outputs = network(batch, leaves=leaves)
        found = _compute_gradients(outputs, leaves, columns[0])
    except SaltflatError:
        raise
    except Exception as error:
        if truth.batch.examples > 1:
            raise _make_not_differentiable_error(error, "a batch") from error
        found = {}  # a model that takes one example at a time
    repeats = batch.examples // truth.batch.examples
    wanted = {name: repeats * value.sum(0) for name, value in truth.gradients.items()}
    sizes = {name: value.abs().sum(0) * repeats for name, value in truth.gradients.items()}
    for name in _find_differences(found, wanted, sizes, truth, _compute_rounding(columns, truth.coarsest)):
        return repr(name)
    every = ", ".join(map(repr, list(truth.gradients)[:3]))
    if _find_written_parameters(problem):
        # No kind of differentiation knows of that, but a difference quotient does.
        off = (_compute_difference_quotient(problem, truth) - truth.along).abs().max()
        return every if off > 0.05 * truth.along.abs().max() else None
    forward = _compute_forward_derivative(problem, truth)
    if forward is None:
        # Backward passes are what training uses, and cutting off a part is a convention: no error, but a note.
        network.has_other_slope = network.has_other_slope or _has_other_slope(problem, truth)
        return None
    if _is_near_reference(forward, truth):
        return None
    # Derivatives of either kind may be wrong. A difference quotient is coarse, but tells which.
    quotient = _compute_difference_quotient(problem, truth)
    # Where the two differ by rounding alone, it is as far from one as from the other.
    return every if (quotient - forward).abs().max() < (quotient - truth.along).abs().max() / 2 else None


def _find_written_parameters(problem: Problem) -> list[str]:
    """Measured parameters that the forward pass writes to, except for embeddings with a largest norm."""
    network = problem.network
    bounded = {id(m.weight) for m in network.modules if getattr(m, "max_norm", None) is not None}
    known = {network.names[key] for key in bounded}
    return [name for name in network.find_writes() if name in network.measured and name not in known]


def _is_near_reference(found: Tensor, truth: _ReferenceGradients) -> bool:
    scale = truth.along.abs().max().clamp_min(1.0)  # every parameter's share is about one
    return bool((found - truth.along).abs().max() <= truth.tolerance * scale)


class _BackwardConventions(TorchFunctionMode):
    """Forward differentiation that leaves out what backward differentiation leaves out by convention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            with forward_ad._set_fwd_grad_enabled(False):
                return func(*args, **kwargs)
        if func not in (F.embedding, F.embedding_bag):
            return func(*args, **kwargs)
        given = dict(zip(signature(func).parameters, args, strict=False)) | kwargs
        padding = given.get("padding_idx")
        if given.get("scale_grad_by_freq") or (func is F.embedding_bag and padding is not None):
            raise NotImplementedError
        result = func(*args, **kwargs)
        if padding is None:
            return result
        # The row of padding has no gradient.
        rows = len(given["weight"])
        return torch.where((given["input"] == padding % rows).unsqueeze(-1), result.detach(), result)


def _compute_forward_derivative(problem: Problem, truth: _ReferenceGradients) -> Tensor | None:
    """Derivatives of each example's output along the directions, by forward differentiation; None if there is none."""
    network = problem.network
    try:
        with forward_ad.dual_level(), torch.enable_grad(), _BackwardConventions():
            level = forward_ad._current_level
            # As forward_ad.make_dual, which first loads decompositions of rare operations for half a second.
            duals = {
                name: torch._VF._make_dual(value.detach(), truth.directions[name], level=level)
                for name, value in network.measured.items()
            }
            tangent = forward_ad.unpack_dual(network(truth.batch, leaves=duals)).tangent
    except Exception:
        # Some operations have no such derivative. Other comparisons have to do then.
        return None
    if tangent is None:
        return truth.along.new_zeros(truth.batch.examples)
    return _sum_per_example(tangent.detach() * truth.columns[0]).to(truth.along)


def _has_other_slope(problem: Problem, truth: _ReferenceGradients) -> bool:
    """Whether difference quotients contradict a backward pass that nothing else could be compared with.

    They can be trusted where two steps agree: then there is no kink between them.
    """
    before: Tensor | None = None
    for shrink in QUOTIENTS:
        found = _compute_difference_quotient(problem, truth, shrink)
        if before is not None:
            size = torch.maximum(found.abs().max(), truth.along.abs().max())
            if (found - before).abs().max() <= 0.01 * size:
                return bool((found - truth.along).abs().max() > 0.1 * size)
        before = found
    return False


def _compute_difference_quotient(problem: Problem, truth: _ReferenceGradients, shrink: float = 1.0) -> Tensor:
    network = problem.network
    steps = {name: truth.directions[name].double() for name in network.measured}
    for module in network.modules:
        padding = getattr(module, "padding_idx", None)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and padding is not None:
            name = network.names.get(id(module.weight), "")  # none of its own if it is computed from others
            if name in steps:  # by convention the row of padding has no gradient
                steps[name] = steps[name].index_fill(0, torch.tensor([padding], device=steps[name].device), 0.0)
    ratio = max(
        float(step.norm() / network.measured[name].double().norm().clamp_min(1e-3)) for name, step in steps.items()
    )
    size = shrink * (1e-6 if truth.coarsest == torch.float64 else 1e-3) / ratio
    with torch.no_grad():
        ahead, behind = (
            network(
                truth.batch,
                leaves={
                    name: (value + sign * size * steps[name]).to(value) for name, value in network.measured.items()
                },
            ).double()
            for sign in (1, -1)
        )
    return _sum_per_example((ahead - behind) / (2 * size) * truth.columns[0]).to(truth.along)


def _make_group_references(problem: Problem, batch: Batch, truth: _ReferenceGradients) -> list[_ReferenceGradients]:
    """More examples at once than a pair: a model may change an order that two examples do not have."""
    group = replace(truth, batch=batch, columns=_draw_random_column(truth.outputs, batch), gradients={})
    along = _compute_forward_derivative(problem, group)
    if along is None:
        return [_ReferenceGradients.compute(problem, batch.cut(0, 4), truth.coarsest)]
    return [replace(group, along=along)]


def _find_silent_parameters(truths: list[_ReferenceGradients]) -> list[str]:
    """Parameters whose gradient was zero so far."""
    return [
        name
        for name, value in truths[0].gradients.items()
        if value.numel() and not any(bool(truth.gradients[name].any()) for truth in truths)
    ]


class _OperationRecorder(TorchDispatchMode):
    """Notices operations that may treat the examples of a batch by their values.

    ``sizes``: results whose size depends on values (masks, experts). ``order``: sorting, and numbers read from tensors.
    ``coarsest``: the shortest floating-point type among all results. ``bytes``: of all results.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = self.order = False
        self.coarsest, self.bytes = torch.float64, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if torch.Tag.dynamic_output_shape in func.tags:
            # Indexing by numbers has the size of the numbers.
            masks = func is not aten.index.Tensor or any(i is not None and i.dtype == torch.bool for i in args[1])
            self.sizes |= masks
        elif func.overloadpacket in (aten.sort, aten.argsort, aten.topk) or (
            func is aten._local_scalar_dense.default and args[0].dtype != torch.bool
        ):
            self.order = True
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.bytes += each.numel() * each.element_size()
                if each.is_floating_point() and torch.finfo(each.dtype).bits < torch.finfo(self.coarsest).bits:
                    self.coarsest = each.dtype
        return result


def _check_loss_sees_outputs_alone(problem: Problem, outputs: Tensor, batch: Batch) -> None:
    """A loss that reads the model's parameters has a curvature of its own, which outputs know nothing of."""
    if not isinstance(problem.loss, CustomLoss):
        return
    with torch.enable_grad():
        value = problem.loss.compute_example_loss(outputs[0].detach().double(), cast_targets(batch.targets)[0])
    found = passes.find_reached_leaves(value, dict(problem.model.named_parameters()))
    if found:
        raise OptionError(
            f"Got a loss that uses the model's parameter {found[0]!r} itself (a penalty, say). Want a function of "
            "outputs and targets: the curvature of anything else would be lost. Do: measure without that term."
        )


def _check_uncoupled(problem: Problem, batch: Batch, coarsest: torch.dtype) -> None:
    """More than two examples together: some models mix examples only where there are more, or in another order."""
    if batch.examples < 3:
        return
    with torch.no_grad():
        together = problem.network(batch, as_is=True)
        alone = [problem.network(single, as_is=True) for single in _split_singles(batch)]
    tolerance = TOLERANCE.get(coarsest, TOLERANCE[torch.float32])
    if any(one.shape[1:] != together.shape[1:] for one in alone) or not _is_allclose(
        together, torch.cat(alone), tolerance
    ):
        raise _make_coupled_error()


def _check_fixed_function(problem: Problem, truth: _ReferenceGradients, outputs: Tensor) -> None:
    """The outputs of a batch are those of its examples alone."""
    if _is_allclose(outputs, truth.outputs, truth.tolerance):
        return
    if torch.finfo(truth.coarsest).bits < 32:
        raise PrecisionError(
            f"Got operations in {truth.coarsest} inside of the model, whose outputs then depend on the batch. "
            "Want float32 or float64 throughout. Do: take casts to half precision out of the model's forward."
        )
    with torch.no_grad():
        again = problem.network(truth.batch, as_is=True)
    if _is_allclose(outputs, again, truth.tolerance):
        raise _make_coupled_error()
    names = [name for name, m in problem.model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    raise NondeterministicError(
        "Got different outputs from the same inputs: the model draws random numbers even in eval mode"
        f"{' (it has dropout: ' + ', '.join(names[:3]) + ')' if names else ''}. Want a fixed function. "
        "Do: make its randomness depend on self.training, or turn it off."
    )


def _make_coupled_error() -> CoupledExamplesError:
    return CoupledExamplesError(
        "Got other outputs for an example in a batch than for the same example alone. "
        "Want a model that treats examples independently: per-example gradients mean nothing otherwise. "
        "Do: replace layers that mix the batch (BatchNorm without running statistics, attention across the batch)."
    )


def _check_first_loss(problem: Problem, outputs: Tensor, batch: Batch) -> None:
    targets = cast_targets(batch.targets)
    problem.loss.check(outputs.double(), targets)
    with torch.enable_grad():
        problem.loss.gradient(outputs.double(), targets)
    if not bool(problem.loss.total(outputs.double(), targets).isfinite().all()):
        raise NonFiniteError(
            "Got a NaN or infinite loss on the first examples. Want a finite one. Do: check loss and targets."
        )


def _is_way_consistent(problem: Problem, way: str, truth: _ReferenceGradients) -> bool:
    """Whether a way gives every example its own gradients, for each parameter."""
    comparison = _GradientComparison(problem, truth)
    try:
        _, backward = WAYS[way](problem.network, truth.batch)
        backward(truth.columns, comparison.emit, True)
    except SaltflatError:
        raise
    except Exception:
        # Whatever keeps this way from working (an operation without a vectorised form, examples that cannot be told
        # apart, control flow on values), the slower ways are there for it.
        return False
    return comparison.is_consistent()


class _GradientComparison:
    """Gradients as they are emitted, beside what they must be."""

    def __init__(self, problem: Problem, truth: _ReferenceGradients) -> None:
        self.truth, measured = truth, problem.network.measured
        self.squares = {name: torch.zeros_like(value) for name, value in measured.items()}
        self.along = {name: value.new_zeros(truth.batch.examples) for name, value in measured.items()}

    def emit(self, name: str, form: FactoredGradient) -> None:
        self.along[name] = form.project(self.truth.directions[name])[0]
        if self.truth.gradients:
            self.squares[name] = form.sum_squares()

    def is_consistent(self) -> bool:
        truth, squares, along = self.truth, self.squares, self.along
        if not truth.gradients:
            return _is_near_reference(torch.stack([each.double() for each in along.values()]).sum(0), truth)
        rounding = _compute_rounding(truth.columns, truth.coarsest)
        if _find_differences(squares, truth.squares, truth.squares, truth, rounding**2, degree=2):
            return False
        # Sums over the examples do not notice examples that were taken for each other.
        # Directions are such that rounding is below the tolerance.
        return not _find_differences(along, truth.projections, truth.sizes, truth, truth.tolerance)


def _project_gradients(gradients: Tensor, direction: Tensor) -> Tensor:
    return gradients.reshape(len(gradients), direction.numel()) @ direction.reshape(-1)


def _compute_rounding(columns: Tensor, coarsest: torch.dtype) -> float:
    """The size of gradients that can be rounding alone: of what a norm over a single feature leaves, say."""
    return 300 * torch.finfo(coarsest).eps * float(columns.norm())


def _sum_per_example(values: Tensor) -> Tensor:
    """Sums over everything but the first axis."""
    return values.reshape(len(values), values[0].numel()).sum(1)


def _find_differences(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    sizes: Mapping[str, Tensor],
    truth: _ReferenceGradients,
    rounding: float,
    degree: int = 1,
) -> list[str]:
    """Parameters with differences that are more than rounding.

    ``sizes`` are what the values were summed up from; where none is above ``rounding``, there is nothing to compare.
    ``degree`` is 2 for squares.
    """
    names = [name for name in found if name in sizes and wanted[name].numel() and sizes[name].numel()]
    if not names:
        return []
    off = torch.stack([(found[name] - wanted[name]).abs().max().double() for name in names])
    size = torch.stack([sizes[name].max().double() for name in names])
    if size.max() <= rounding:
        return []
    # A parameter without effect (a key's bias) has nothing but rounding to compare: of others' gradients, or of sums
    # that cancel.
    floor = ((100 * torch.finfo(truth.coarsest).eps) ** degree * size.max()).clamp_min(rounding / 30**degree)
    bad = ~(off <= torch.maximum(truth.tolerance * size, floor))
    return [name for name, each in zip(names, bad.tolist(), strict=True) if each]


def _draw_random_column(outputs: Tensor, batch: Batch) -> Tensor:
    each = []
    for n in range(batch.examples):
        noise = torch.Generator().manual_seed(batch.first + n)
        each.append(torch.randn((1, *outputs.shape[1:]), generator=noise, dtype=torch.float64))
    return torch.stack(each, 1).to(outputs)


@dataclass(frozen=True)
class _ExampleCost:
    """What one example takes, in bytes, and shows the layers."""

    fixed: int
    moving: int
    widest: int
    activations: int
    factors: int
    calls: passes.LayerCalls


def _differentiate_example(problem: Problem, single: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One example by the definition: its outputs, a random column and the gradients for that."""
    network = problem.network
    try:
        leaves = passes.make_leaves(network)
        outputs = network(single, leaves=leaves)
        passes.check_hidden_parameters(network, outputs)
        column = _draw_random_column(outputs, single)
        return outputs.detach(), column, _compute_gradients(outputs, leaves, column[0])
    except SaltflatError:
        raise
    except Exception as error:
        raise _make_not_differentiable_error(error, f"example {single.first} alone") from error


def _make_not_differentiable_error(error: Exception, what: str) -> ModelError:
    if "modified by an inplace operation" in str(error):
        return ModelError(
            f"Got a model that overwrites in place what its backward pass needs: {format_error_line(error)}. "
            "Want it to stay (training refuses this too). Do: replace the in-place operation."
        )
    return ModelError(
        f"Got an error for {what} from a model that runs on a batch: {type(error).__name__}: {error}. "
        "Want a model that can be differentiated for a single example. "
        "Do: check inputs whose first axis is not that of the examples, and functions without a backward pass."
    )


def _compute_gradients(outputs: Tensor, leaves: Mapping[str, Tensor], column: Tensor) -> dict[str, Tensor]:
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if outputs.requires_grad:
        found = torch.autograd.grad(outputs, list(leaves.values()), column, allow_unused=True)
    dense = [each.to_dense() if each is not None and each.layout != torch.strided else each for each in found]
    pairs = zip(leaves.items(), dense, strict=True)
    return {name: torch.zeros_like(leaf) if value is None else value.detach() for (name, leaf), value in pairs}


def _measure_example_cost(problem: Problem, truth: _ReferenceGradients, way: str, results: int) -> _ExampleCost | None:
    """What an example takes, from a pass of it alone in one of the looped ways; None if that gives other gradients.

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
                outputs, backward = WAYS[way](network, single, record=record)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            # Transforms of torch.func inside of a model do not allow them. No more is saved than there are results.
            record.clear()
            outputs, backward = WAYS[way](network, single, record=record)
            saved[0] = results
        backward(truth.columns, emit, True)
    except SaltflatError:
        raise
    except Exception:
        if way == PLAIN:
            raise
        return None
    if way != PLAIN and not comparison.is_consistent():
        return None
    for _, x, _ in record:
        record_saved(x)
    activations = [outputs.numel() * outputs.element_size(), *(y.numel() * y.element_size() for _, _, y in record)]
    still, moving = (max(part) for part in zip(*factors, strict=True))
    calls = passes.LayerCalls.from_batch(single, [(module, x.shape) for module, x, _ in record])
    every = sum(each for _, each in factors)
    return _ExampleCost(sum(saved.values()) + still, moving, max(activations), sum(activations), every, calls)


def _is_allclose(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())
