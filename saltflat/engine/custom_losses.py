"""Losses that users pass as functions or modules: torch's own are converted, others are called example by example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from saltflat.engine.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Loss,
    NegativeLogLikelihood,
    SquaredError,
    format_shape,
)
from saltflat.engine.output_curvature import FactoredCurvature
from saltflat.errors import LabelError, OptionError, SaltflatError, format_error_line, make_unknown_name_error
from saltflat.validation import is_choice

# Largest relative difference between a function of several examples and the mean over them that counts as rounding:
# the function may work in float32.
MEAN_TOLERANCE = 1e-5
COMPARED_AT_ONCE = 8  # examples whose mean is compared with the function of all of them
COMPARISONS = 64  # per loss, so that long sweeps in small chunks do not pay for them


# The advice for averages that a function of one example cannot compute.
PASS_MODULE = (
    "Try torch.nn.CrossEntropyLoss(weight=..., ignore_index=...) itself for class weights or ignored labels; else "
    "return the mean over the examples."
)


class _ComparisonHistory:
    """The targets that a function was compared on so far, and the last examples.

    The last examples are kept because a chunk may hold one example, or one class.
    """

    def __init__(self) -> None:
        self.left = COMPARISONS
        self.seen: set[float] = set()
        self.last: tuple[Tensor, Tensor] | None = None

    def select_examples(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return examples with targets that differ as much as possible, or None if all such targets were compared."""
        if self.left <= 0:
            return None
        # One number per target distinguishes classes, and is cheap for images.
        values = targets.reshape(len(targets), -1)
        keys = (values if values.is_complex() else values.double()).sum(1).tolist()
        first = {key: n for n, key in reversed(list(enumerate(keys)))}
        fresh = first.keys() - self.seen
        if not fresh and self.seen:
            return None
        order = sorted(first, key=lambda key: (key not in fresh, str(key)))
        step = max(1, len(order) // COMPARED_AT_ONCE)
        which = [first[key] for key in order[::step][:COMPARED_AT_ONCE]]
        if len(which) == 1:
            which += [n for n in range(len(keys)) if n != which[0]][:1]
        chosen = outputs[which], targets[which]
        last, self.last = self.last, chosen
        self.seen.update(keys)
        if last is not None and all(
            a.shape[1:] == b.shape[1:] and a.device == b.device and a.dtype == b.dtype
            for a, b in zip(last, chosen, strict=True)
        ):
            chosen = torch.cat([last[0], chosen[0]]), torch.cat([last[1], chosen[1]])
        if len(chosen[0]) == 1:
            return None
        self.left -= 1
        return chosen


@dataclass(frozen=True)
class CustomLoss(Loss):
    """Any ``function(outputs, targets)``, called on one example at a time, as a batch of one.

    So the loss of the data is the mean over examples of the function's value for each. On a whole batch, the function
    may compute something else (a sum, a mean weighted by class or over the labels that are not ignored): ``check``
    calls it on a few examples together and raises an error unless the result is their mean.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    _compared: _ComparisonHistory = field(default_factory=_ComparisonHistory, init=False, repr=False, compare=False)

    def compute_example_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of one example, a tensor without axes."""
        value = self._call_function(output.unsqueeze(0), target.unsqueeze(0))
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise OptionError(
                f"Expected a single number, but got {got} from the loss function for one example. Try reducing over "
                "everything but the examples, e.g. with .mean()."
            )
        if value.layout != torch.strided or not value.is_floating_point():
            raise OptionError(
                f"Expected a real number from the loss function for one example, but got a tensor of {value.dtype} "
                f"with the layout {value.layout}. Try returning a dense tensor of floating-point numbers."
            )
        return value.reshape(())

    def _call_function(self, outputs: Tensor, targets: Tensor) -> Any:
        """Call the function; the tensors of a module are converted to the outputs' precision and device."""
        module = self.function
        if isinstance(module, nn.Module):
            members = {name: value.detach() for name, value in [*module.named_parameters(), *module.named_buffers()]}
            cast = {k: v.to(outputs) if v.is_floating_point() else v.to(outputs.device) for k, v in members.items()}
            if any(cast[name] is not value for name, value in members.items()):
                return functional_call(module, cast, (outputs, targets))
        return module(outputs, targets)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        with torch.no_grad():
            chosen = self._compared.select_examples(outputs.detach(), targets)
            self.compute_example_loss(outputs[0], targets[0])
            if chosen is not None:
                self._check_mean(*chosen)

    def _check_mean(self, outputs: Tensor, targets: Tensor) -> None:
        alone = self.total(outputs, targets)
        try:
            together = self._call_function(outputs, targets)
        except Exception:  # a function of one example only: nothing to compare
            return
        count, name = len(alone), _format_function_name(self.function)
        if not isinstance(together, Tensor) or together.numel() not in (1, count):
            return  # the result for several examples is not a loss
        if not bool(together.isfinite().all()) or not bool(outputs.isfinite().all()):
            return  # the sweep reports where
        if not bool(alone.isfinite().all()):
            raise OptionError(
                f"Expected a finite loss for each example alone, but got {float(alone[~alone.isfinite()][0])} from "
                f"{name} for one of {count} examples whose loss together is finite. A mean over the labels that are "
                f"not ignored is undefined for an example without any. {PASS_MODULE}"
            )
        wanted = alone if together.numel() == count else alone.mean()
        off = (together.reshape(wanted.shape).to(alone) - wanted).abs().max()
        if bool(off <= MEAN_TOLERANCE * alone.abs().max()):
            return
        value = float(together.reshape(-1)[0])
        if together.numel() == 1 and bool((together - alone.sum()).abs() <= MEAN_TOLERANCE * alone.abs().sum()):
            raise OptionError(
                f"Expected the mean over the examples, which is what is measured, but got the sum of the losses from "
                f"{name}: {value:.6g} for {count} examples with a mean of {float(alone.mean()):.6g}. Try dividing by "
                "the number of examples, len(outputs), or using reduction='mean'."
            )
        raise OptionError(
            f"Expected the mean over the examples, {float(alone.mean()):.6g}, but got {value:.6g} from {name} for "
            f"{count} examples together. Functions are called on one example at a time. {PASS_MODULE}"
        )

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = torch.stack([self.compute_example_loss(o, t) for o, t in zip(outputs, targets, strict=True)])
        return each if outputs.requires_grad else each.detach()  # parameters of the loss are constants here

    def share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.new_ones(len(outputs))

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        free = outputs.detach().requires_grad_()
        return self.compute_slope(free, targets)

    def compute_slope(self, outputs: Tensor, targets: Tensor, create_graph: bool = False) -> Tensor:
        """Return the derivative of ``total`` by outputs that require a gradient, or zero if it is constant."""
        total = self.total(outputs, targets).sum()
        if not total.requires_grad:
            return torch.zeros_like(outputs)
        try:
            return torch.autograd.grad(total, outputs, create_graph=create_graph)[0]
        except RuntimeError as error:
            raise OptionError(
                f"Expected a loss that torch can differentiate, but got {format_error_line(error)} for the derivative "
                f"of {_format_function_name(self.function)}. Try converting its targets with .to(outputs), and using "
                "elementary operations."
            ) from error

    def curvature(self, outputs: Tensor, targets: Tensor) -> FactoredCurvature:
        size = outputs[0].numel()
        # Detached: a loss may have parameters of its own, which are constants here.
        matrices = self._compute_hessians(outputs, targets).detach().reshape(-1, size, size)
        values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
        # (examples, size, rank) to (rank, examples, *outputs), the largest first
        roots = (vectors * values.abs().sqrt().unsqueeze(1)).permute(2, 0, 1).flip(0)
        sign = values.T.flip(0).unsqueeze(-1)
        zero = torch.zeros_like(roots)
        positive, negative = roots.where(sign > 0, zero), roots.where(sign < 0, zero)
        # Zero eigenvalues may be computed as -1e-17, which is not worth a second set of columns.
        real = bool((-values).max() > 1e-13 * values.abs().max())
        placed = (size, *outputs.shape)
        return FactoredCurvature(positive.reshape(placed), negative.flip(0).reshape(placed) if real else None)

    def _compute_hessians(self, outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            mapped: Tensor = torch.func.vmap(torch.func.hessian(self.compute_example_loss))(outputs, targets)
            return mapped
        except Exception:  # not every function can be vectorized; one that is wrong fails again below
            one: Callable[..., Tensor] = torch.autograd.functional.hessian
            pairs = zip(outputs, targets, strict=True)
            try:
                return torch.stack([one(lambda o, t=t: self.compute_example_loss(o, t), o) for o, t in pairs])
            except SaltflatError:
                raise
            except RuntimeError as error:
                raise OptionError(
                    f"Expected a loss that torch can differentiate twice, but got {format_error_line(error)} for the "
                    f"second derivative of {_format_function_name(self.function)}, which curvature needs. Try writing "
                    "it with elementary operations, or measuring what needs gradients only, such as fisher_trace."
                ) from error


def _format_function_name(function: Callable[..., Any]) -> str:
    return f"the loss {getattr(function, '__name__', type(function).__name__)}"


# Functions of torch and the equivalent modules.
FUNCTIONS: tuple[tuple[Callable[..., Tensor], type[nn.Module]], ...] = (
    (F.cross_entropy, nn.CrossEntropyLoss),
    (F.nll_loss, nn.NLLLoss),
    (F.mse_loss, nn.MSELoss),
    (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss),
)

# The divisor of torch's reduction="mean".
DIVISORS = {
    nn.CrossEntropyLoss: "the number of labels that count (the sum of their weights, where classes have weights)",
    nn.NLLLoss: "the number of labels that count (the sum of their weights, where classes have weights)",
    nn.MSELoss: "the number of outputs of all examples",
    nn.BCEWithLogitsLoss: "the number of outputs of all examples",
}


def convert_loss(given: nn.Module | Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """Return the loss that is equivalent to a module or a function of torch, or a custom one."""
    module = _find_torch_module(given)
    return (_convert_torch_loss(module) if module is not None else None) or CustomLoss(given)


def _find_torch_module(given: nn.Module | Callable[..., Tensor]) -> nn.Module | None:
    """Return the module equivalent to a loss: itself, or that of a function of torch, with its keyword options."""
    if isinstance(given, nn.Module):
        # A patched instance or one with hooks may compute anything.
        patched = "forward" in vars(given) or given._forward_hooks or given._forward_pre_hooks
        return None if patched else given
    function: Callable[..., Tensor] = given
    options: dict[str, Any] = {}
    if type(given) is partial and not given.args:
        function, options = given.func, given.keywords
    kind = next((kind for known, kind in FUNCTIONS if known is function), None)
    try:
        return kind(**options) if kind is not None else None
    except TypeError:  # an option that only the function has
        return None


def _convert_torch_loss(given: nn.Module) -> Loss | None:
    """Return the loss of a known loss module of torch, or None for other modules."""
    kind = type(given)
    if kind.__module__ == nn.modules.loss.__name__ and getattr(given, "reduction", "mean") in ("sum", "none"):
        per = (
            f"; the sum is larger by the factor of {DIVISORS[kind]}"
            if given.reduction == "sum" and kind in DIVISORS
            else ""
        )
        raise OptionError(
            f"Expected reduction='mean', since the mean loss is measured, but got a {kind.__name__} with "
            f"reduction={given.reduction!r}. Try passing it with reduction='mean'{per}."
        )
    weight, smoothing = getattr(given, "weight", None), getattr(given, "label_smoothing", 0.0)
    if kind in (nn.CrossEntropyLoss, nn.NLLLoss):
        if weight is not None and (not isinstance(weight, Tensor) or weight.layout != torch.strided):
            raise OptionError(
                f"Expected class weights in a dense tensor, but got {type(weight).__name__} in weight=. Try to_dense()."
            )
        if isinstance(smoothing, bool) or not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
            raise OptionError(f"Expected label_smoothing from 0 to 1, but got {smoothing!r}. Try 0.1.")
    if type(given) is nn.CrossEntropyLoss:
        return CrossEntropy(given.label_smoothing, given.weight, given.ignore_index, classes_second=True)
    if type(given) is nn.NLLLoss:
        return NegativeLogLikelihood(0.0, given.weight, given.ignore_index, classes_second=True)
    if type(given) is nn.MSELoss:
        return SquaredError()
    if type(given) is nn.BCEWithLogitsLoss and given.weight is None:
        return BinaryCrossEntropy(given.pos_weight)
    return None


LOGITS = ("none", "std", "l2")


def normalize_logits(loss: Loss, logits: str) -> Loss:
    """Return the loss of outputs whose scale is normalized example by example.

    Args:
        loss: of the outputs as they are.
        logits: ``"none"``; ``"std"``: centered over the outputs and divided by their standard deviation; ``"l2"``:
            centered and divided by their norm.
    """
    if not is_choice(logits, LOGITS):
        raise make_unknown_name_error("normalization of the logits", logits, LOGITS)
    if logits == "none":
        return loss
    if not isinstance(loss, CrossEntropy) or loss.weight is not None:
        raise OptionError(
            f"Expected cross_entropy without class weights, whose predictions do not depend on the scale of the "
            f"outputs, but got logits={logits!r} with {type(loss).__name__}. Try leaving logits out."
        )
    return NormalizedLogitsLoss(loss, logits)


@dataclass(frozen=True)
class NormalizedLogitsLoss(CustomLoss):
    """Cross-entropy of logits of unit standard deviation or norm, with its own (indefinite) curvature."""

    function: Callable[[Tensor, Tensor], Tensor] = field(init=False)
    inner: CrossEntropy = field(kw_only=True)
    logits: str = field(kw_only=True)

    def __init__(self, inner: CrossEntropy, logits: str) -> None:
        def compute_normalized_loss(outputs: Tensor, targets: Tensor) -> Tensor:
            centered = outputs - outputs.mean(1, keepdim=True)
            squares = centered.square()
            size = squares.mean(1, keepdim=True) if logits == "std" else squares.sum(1, keepdim=True)
            return inner.total(centered / size.sqrt(), targets).sum()

        object.__setattr__(self, "function", compute_normalized_loss)
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "logits", logits)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        self.inner.check(outputs, targets)
        if outputs.dim() != 2:
            raise LabelError(
                f"Expected outputs of shape (N, classes) to normalize, but got {format_shape(outputs)}. Try leaving "
                "logits out."
            )

    def share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.inner.share(outputs, targets)
