"""Reference gradients: those of single examples by plain autograd, which every strategy must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from saltflat.engine import per_example
from saltflat.engine.data import Batch
from saltflat.engine.problem import Problem
from saltflat.errors import CoupledExamplesError, ModelError, SaltflatError, format_error_line

# The errors that torch, Python and checks of a model's own raise if shapes, types or arguments do not fit.
RUN_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError)

QUOTIENTS = (3.0, 1.0, 0.3)  # step sizes of difference quotients, in multiples of the default
PAIRS = 4  # largest number of pairs of examples to run while some parameter has no gradient
GROUP = 6  # examples to run together to see whether the model changes their order: 2 times 3, 3 times 2

# Largest relative difference that counts as rounding. Examples that are split wrongly differ in the first digit.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}


def split_singles(batch: Batch) -> list[Batch]:
    """Return the examples of a batch as batches of one."""
    return [batch.cut(n, n + 1) for n in range(batch.examples)]


@dataclass(frozen=True)
class ReferenceGradients:
    """The correct gradients of some examples, for a random column each.

    Attributes:
        batch: the examples.
        columns: ``(1, examples, *outputs)``.
        outputs: of each example alone.
        gradients: of each example, by parameter, ``(examples, *parameter)``; empty if only ``along`` is known.
        directions: random, by parameter, such that every parameter contributes about equally to ``along``.
        along: the derivative of each example's output along all directions at once, times its column.
        coarsest: the shortest floating-point type that the model computes in, which determines the rounding.
    """

    batch: Batch
    columns: Tensor
    outputs: Tensor
    gradients: dict[str, Tensor]
    directions: dict[str, Tensor]
    along: Tensor
    coarsest: torch.dtype

    @classmethod
    def compute(cls, problem: Problem, batch: Batch, coarsest: torch.dtype) -> ReferenceGradients:
        """Compute the gradients by their definition: one example at a time, by autograd alone."""
        taken = [_differentiate_example(problem, single) for single in split_singles(batch)]
        outputs = [outputs for outputs, _, _ in taken]
        if any(each.shape[1:] != outputs[0].shape[1:] for each in outputs):
            raise make_coupled_error()
        gradients = {name: torch.stack([found[name] for _, _, found in taken]) for name in problem.network.measured}
        columns = torch.cat([column for _, column, _ in taken], 1)
        rounding, tolerance = compute_rounding(columns, coarsest), TOLERANCE.get(coarsest, TOLERANCE[torch.float32])
        norms = {name: value.norm() for name, value in gradients.items()}
        largest = torch.stack([norm.double() for norm in norms.values()]).amax()
        directions = {}
        for number, (name, value) in enumerate(gradients.items()):
            # Gradients that are only rounding stay small; if all are, they stay below the tolerance.
            size = torch.maximum(norms[name], 0.01 * largest.to(value)) if largest > rounding else rounding / tolerance
            directions[name] = _draw_direction(value[0], number) / size
        along = torch.stack(
            [_project_gradients(value, directions[name]).double() for name, value in gradients.items()]
        ).sum(0)
        return cls(batch, columns, torch.cat(outputs), gradients, directions, along, coarsest)

    def select_example(self, n: int) -> ReferenceGradients:
        """Return the gradients of example ``n``."""
        gradients = {name: value[n : n + 1] for name, value in self.gradients.items()}
        columns, outputs, along = self.columns[:, n : n + 1], self.outputs[n : n + 1], self.along[n : n + 1]
        batch = self.batch.cut(n, n + 1)
        return replace(self, batch=batch, columns=columns, outputs=outputs, gradients=gradients, along=along)

    @cached_property
    def squares(self) -> dict[str, Tensor]:
        """Return the squared gradients, summed over the examples, by parameter."""
        return {name: value.square().sum(0) for name, value in self.gradients.items()}

    @cached_property
    def projections(self) -> dict[str, Tensor]:
        """Return each example's gradient along the direction, by parameter."""
        return {name: _project_gradients(value, self.directions[name]) for name, value in self.gradients.items()}

    @cached_property
    def sizes(self) -> dict[str, Tensor]:
        """Return the approximate size of the projections, by parameter."""
        return {
            name: value.flatten(1).norm(dim=1) * self.directions[name].square().mean().sqrt()
            if value.dim() > 1
            else value.abs() * self.directions[name].abs()
            for name, value in self.gradients.items()
            if value.numel()
        }

    @property
    def tolerance(self) -> float:
        """Return the largest relative difference that counts as rounding."""
        return TOLERANCE.get(self.coarsest, TOLERANCE[torch.float32])


def verify_reference(problem: Problem, truth: ReferenceGradients) -> ReferenceGradients:
    """Return the reference gradients after comparing them with other computations of the same numbers.

    Single examples use other kernels and memory layouts than batches, and not all of torch's are correct.
    """
    wrong = _find_contradiction(problem, truth)
    if wrong is not None and not problem.network.rewrites_batch_norm:
        problem.network.rewrites_batch_norm = True
        truth = ReferenceGradients.compute(problem, truth.batch, truth.coarsest)
        wrong = _find_contradiction(problem, truth)
    if wrong is not None:
        written = _find_written_parameters(problem)
        if written:
            raise ModelError(
                "Expected a function of the parameters, but got a forward pass that writes to its own parameter "
                f"{written[0]!r}, which gradients ignore. Try computing the changed weight without writing to it, or "
                "writing before measuring instead."
            )
        raise ModelError(
            f"Expected the derivatives of the model's forward pass, but got other gradients of {wrong} from torch's "
            "backward pass. The numbers would be wrong. Try removing hooks that change gradients; if there are none, "
            "report the operation to PyTorch."
        )
    return truth


def _find_contradiction(problem: Problem, truth: ReferenceGradients) -> str | None:
    """Return parameters whose gradients differ in a batch or by forward differentiation, or None."""
    network, batch, columns = problem.network, truth.batch, truth.columns
    if batch.examples == 1:
        batch, columns = batch.take(torch.tensor([0, 0]), batch.first), columns.expand(1, 2, *columns.shape[2:])
    try:
        leaves = per_example.make_leaves(network)
        outputs = network(batch, leaves=leaves)
        found = compute_gradients(outputs, leaves, columns[0])
    except SaltflatError:
        raise
    except Exception as error:
        if truth.batch.examples > 1:
            raise _make_not_differentiable_error(error, "a batch") from error
        found = {}  # a model that accepts one example at a time
    repeats = batch.examples // truth.batch.examples
    wanted = {name: repeats * value.sum(0) for name, value in truth.gradients.items()}
    sizes = {name: value.abs().sum(0) * repeats for name, value in truth.gradients.items()}
    for name in find_differences(found, wanted, sizes, truth, compute_rounding(columns, truth.coarsest)):
        return repr(name)
    every = ", ".join(map(repr, list(truth.gradients)[:3]))
    if _find_written_parameters(problem):
        # No kind of differentiation sees that, but a difference quotient does.
        off = (_compute_difference_quotient(problem, truth) - truth.along).abs().max()
        return every if off > 0.05 * truth.along.abs().max() else None
    forward = _compute_forward_derivative(problem, truth)
    if forward is None:
        # Training uses backward passes, and detaching a part is a convention: no error, but a note.
        network.has_other_slope = network.has_other_slope or _has_other_slope(problem, truth)
        return None
    if is_near_reference(forward, truth):
        return None
    # Either derivative may be wrong. A difference quotient is coarse, but shows which.
    quotient = _compute_difference_quotient(problem, truth)
    # If the two differ by rounding alone, it is as far from one as from the other.
    return every if (quotient - forward).abs().max() < (quotient - truth.along).abs().max() / 2 else None


def _find_written_parameters(problem: Problem) -> list[str]:
    """Return the measured parameters that the forward pass writes to, except embeddings with ``max_norm``."""
    network = problem.network
    bounded = {id(m.weight) for m in network.modules if getattr(m, "max_norm", None) is not None}
    known = {network.names[key] for key in bounded}
    return [name for name in network.find_writes() if name in network.measured and name not in known]


def is_near_reference(found: Tensor, truth: ReferenceGradients) -> bool:
    """Return whether derivatives along all directions are those of the reference up to rounding."""
    scale = truth.along.abs().max().clamp_min(1.0)  # every parameter contributes about one
    return bool((found - truth.along).abs().max() <= truth.tolerance * scale)


class _BackwardConventions(TorchFunctionMode):
    """Makes forward differentiation ignore what backward differentiation ignores by convention."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
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


def _compute_forward_derivative(problem: Problem, truth: ReferenceGradients) -> Tensor | None:
    """Return each example's derivative along the directions by forward differentiation, or None if torch has none."""
    network = problem.network
    try:
        with forward_ad.dual_level(), torch.enable_grad(), _BackwardConventions():
            level = forward_ad._current_level
            # Same as forward_ad.make_dual, which first loads decompositions of rare operations for half a second.
            duals = {
                name: torch._VF._make_dual(value.detach(), truth.directions[name], level=level)
                for name, value in network.measured.items()
            }
            tangent = forward_ad.unpack_dual(network(truth.batch, leaves=duals)).tangent
    except Exception:
        # Some operations have no such derivative. Other comparisons are used then.
        return None
    if tangent is None:
        return truth.along.new_zeros(truth.batch.examples)
    return _sum_per_example(tangent.detach() * truth.columns[0]).to(truth.along)


def _has_other_slope(problem: Problem, truth: ReferenceGradients) -> bool:
    """Return whether difference quotients contradict a backward pass that has no other reference.

    They can be trusted if two step sizes agree: then there is no kink between them.
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


def _compute_difference_quotient(problem: Problem, truth: ReferenceGradients, shrink: float = 1.0) -> Tensor:
    network = problem.network
    steps = {name: truth.directions[name].double() for name in network.measured}
    for module in network.modules:
        padding = getattr(module, "padding_idx", None)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and padding is not None:
            name = network.names.get(id(module.weight), "")  # it has no name if it is computed from others
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


def make_group_references(problem: Problem, batch: Batch, truth: ReferenceGradients) -> list[ReferenceGradients]:
    """Return references for more examples than a pair: a model may reorder larger batches."""
    group = replace(truth, batch=batch, columns=_draw_random_column(truth.outputs, batch), gradients={})
    along = _compute_forward_derivative(problem, group)
    if along is None:
        return [ReferenceGradients.compute(problem, batch.cut(0, 4), truth.coarsest)]
    return [replace(group, along=along)]


def find_silent_parameters(truths: list[ReferenceGradients]) -> list[str]:
    """Return the parameters whose gradients were all zero."""
    return [
        name
        for name, value in truths[0].gradients.items()
        if value.numel() and not any(bool(truth.gradients[name].any()) for truth in truths)
    ]


def make_coupled_error() -> CoupledExamplesError:
    """Return the error for a model that couples examples."""
    return CoupledExamplesError(
        "Expected a model that treats examples independently, without which per-example gradients are undefined, but "
        "got other outputs for an example in a batch than for the same example alone. Try replacing layers that mix "
        "the batch (BatchNorm without running statistics, attention across the batch)."
    )


def _project_gradients(gradients: Tensor, direction: Tensor) -> Tensor:
    return gradients.reshape(len(gradients), direction.numel()) @ direction.reshape(-1)


def compute_rounding(columns: Tensor, coarsest: torch.dtype) -> float:
    """Return the largest size of gradients that may be rounding alone, such as those of a norm of one feature."""
    return 300 * torch.finfo(coarsest).eps * float(columns.norm())


def _sum_per_example(values: Tensor) -> Tensor:
    """Return sums over all axes but the first."""
    return values.reshape(len(values), values[0].numel()).sum(1)


def find_differences(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    sizes: Mapping[str, Tensor],
    truth: ReferenceGradients,
    rounding: float,
    degree: int = 1,
) -> list[str]:
    """Return the parameters with differences larger than rounding.

    ``sizes`` are the sizes of the summands; if none exceeds ``rounding``, there is nothing to compare. ``degree`` is 2
    for squares.
    """
    names = [name for name in found if name in sizes and wanted[name].numel() and sizes[name].numel()]
    if not names:
        return []
    off = torch.stack([(found[name] - wanted[name]).abs().max().double() for name in names])
    size = torch.stack([sizes[name].max().double() for name in names])
    if size.max() <= rounding:
        return []
    # The gradient of a parameter without effect (a key's bias) is rounding of other gradients or of sums that cancel.
    floor = ((100 * torch.finfo(truth.coarsest).eps) ** degree * size.max()).clamp_min(rounding / 30**degree)
    bad = ~(off <= torch.maximum(truth.tolerance * size, floor))
    return [name for name, each in zip(names, bad.tolist(), strict=True) if each]


def _draw_direction(like: Tensor, seed: int) -> Tensor:
    """Return a random direction. That of a matrix is a product of two vectors, which shows any difference, too."""
    noise = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(shape, generator=noise).to(like) for shape in (like.shape[:1], like.shape[1:])]
    return vectors[0] if like.dim() < 2 else vectors[0].reshape(-1, *(1,) * (like.dim() - 1)) * vectors[1]


def _draw_random_column(outputs: Tensor, batch: Batch) -> Tensor:
    each = []
    for n in range(batch.examples):
        noise = torch.Generator().manual_seed(batch.first + n)
        each.append(torch.randn((1, *outputs.shape[1:]), generator=noise, dtype=torch.float64))
    return torch.stack(each, 1).to(outputs)


def _differentiate_example(problem: Problem, single: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the outputs of one example, a random column, and the gradients for that column."""
    network = problem.network
    try:
        leaves = per_example.make_leaves(network)
        outputs = network(single, leaves=leaves)
        per_example.check_hidden_parameters(network, outputs)
        column = _draw_random_column(outputs, single)
        return outputs.detach(), column, compute_gradients(outputs, leaves, column[0])
    except SaltflatError:
        raise
    except Exception as error:
        raise _make_not_differentiable_error(error, f"example {single.first} alone") from error


def _make_not_differentiable_error(error: Exception, what: str) -> ModelError:
    if "modified by an inplace operation" in str(error):
        return ModelError(
            "Expected a model that can be trained, but got one that overwrites in place what its backward pass needs: "
            f"{format_error_line(error)}. Try replacing the in-place operation."
        )
    return ModelError(
        f"Expected a model that can be differentiated for a single example, but got an error for {what} from a model "
        f"that runs on a batch: {type(error).__name__}: {error}. Check inputs whose first axis is not that of the "
        "examples, and functions without a backward pass."
    )


def compute_gradients(outputs: Tensor, leaves: Mapping[str, Tensor], column: Tensor) -> dict[str, Tensor]:
    """Return the gradients of outputs, times a column, by plain autograd."""
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if outputs.requires_grad:
        found = torch.autograd.grad(outputs, list(leaves.values()), column, allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {name: torch.zeros_like(leaf) if each is None else each.detach().to_dense() for (name, leaf), each in pairs}
