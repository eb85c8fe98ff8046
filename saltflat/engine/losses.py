r"""Losses: their value, gradient and curvature at the network's outputs.

The loss of the data is what ``reduction="mean"`` would give if all of it were one batch: a sum over examples of
``total(outputs, targets)``, divided by the sum of ``share``. A loss computes both for a batch, and the parts of the
second derivative that :mod:`saltflat.engine.output_curvature` turns into columns to propagate back:

* :class:`~saltflat.engine.output_curvature.SoftmaxCurvature`: :math:`m (\mathrm{diag}\, p - p p^T)` at every position;
* :class:`~saltflat.engine.output_curvature.DiagonalCurvature`: a number per output;
* :class:`~saltflat.engine.output_curvature.FactoredCurvature`: any symmetric matrix, as signed columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import Field, dataclass, fields, is_dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.engine.output_curvature import Curvature, DiagonalCurvature, SoftmaxCurvature
from saltflat.errors import LabelError, NotDefinedError, OptionError, make_unknown_name_error

# Largest logarithm of a sum of probabilities that counts as rounding, also in float32.
LOG_ONE = 1e-4


def format_shape(values: Tensor) -> str:
    """Return the shape with N for the number of examples, which differs between batches."""
    return f"({', '.join(['N', *map(str, values.shape[1:])])}{',' * (values.dim() == 1)})"


class Loss(ABC):
    """Base class of losses. All methods take outputs in float64."""

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that the targets fit the outputs; raise :class:`LabelError` otherwise."""

    @abstractmethod
    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each example's part of the sum, ``(examples,)``."""

    @abstractmethod
    def share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each example's part of the divisor, ``(examples,)``."""

    @abstractmethod
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the derivative of ``total``, ``(examples, *outputs)``."""

    @abstractmethod
    def curvature(self, outputs: Tensor, targets: Tensor) -> Curvature:
        """Return the second derivative of ``total``."""


# Everything that ``loss=`` accepts; see :func:`parse_loss`.
LossLike: TypeAlias = "str | Loss | nn.Module | Callable[[Tensor, Tensor], Tensor]"


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Softmax cross-entropy, as ``torch.nn.functional.cross_entropy`` defines it.

    Outputs are ``(N, C)``, or ``(N, T, C)`` with targets ``(N, T)``, or ``(N, C, *space)`` with targets
    ``(N, *space)``; targets are class numbers, or probabilities of the outputs' shape.
    """

    label_smoothing: float = 0.0
    weight: Tensor | None = None
    ignore_index: int = -100
    # Three-dimensional outputs can be ambiguous; torch's own module always has the classes at the second axis.
    classes_second: bool = False

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        axis = self.find_class_axis(outputs, targets)
        classes = outputs.shape[axis]
        if self.weight is not None and self.weight.numel() != classes:
            raise LabelError(
                f"Expected one weight per class, but got {self.weight.numel()} class weights and outputs with "
                f"{classes} classes. Check the weight given to the loss."
            )
        if self.weight is not None and bool((self.weight < 0).any()):
            raise LabelError("Expected class weights of at least 0, but got negative ones. Check the loss's weight.")
        if targets.is_floating_point():
            if bool((targets < 0).any()):
                raise LabelError("Expected probabilities of at least 0, but got negative targets. Check the targets.")
            return
        kept = targets[targets != self.ignore_index]
        if kept.numel() and (kept.min() < 0 or kept.max() >= classes):
            raise LabelError(
                f"Expected labels from 0 to {classes - 1}, or ignore_index={self.ignore_index}, but got labels from "
                f"{int(kept.min())} to {int(kept.max())} for {classes} classes. Try counting labels from 0, or "
                "giving the network as many outputs as there are classes."
            )

    def find_class_axis(self, outputs: Tensor, targets: Tensor) -> int:
        """Return the axis of the outputs that counts the classes, inferred from the shape of the targets."""
        if outputs.dim() < 2:
            raise LabelError(
                f"Expected outputs of shape (N, classes) for cross_entropy, but got {format_shape(outputs)}. Try "
                "'mse' or 'bce_with_logits' for a single output."
            )
        last = outputs.dim() - 1
        if targets.is_floating_point() and targets.shape == outputs.shape:
            return last if last == 2 and not self.classes_second else 1
        if not targets.is_floating_point() and not targets.is_complex() and targets.dtype != torch.bool:
            if targets.shape == outputs.shape[:1] + outputs.shape[2:] and (
                last != 2 or self.classes_second or targets.shape != outputs.shape[:-1]
            ):
                return 1
            if targets.shape == outputs.shape[:-1]:
                return last
        # Real targets are converted to the precision in use, so their own type is not known here.
        kind = "floating-point" if targets.is_floating_point() else str(targets.dtype).removeprefix("torch.")
        raise LabelError(
            "Expected integer class numbers, one for each position of the outputs, or probabilities of the outputs' "
            f"shape, but got {kind} targets of shape {format_shape(targets)} for outputs of shape "
            f"{format_shape(outputs)}. Try passing class numbers as torch.long."
        )

    def _compute_parts(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return log-probabilities, target masses, divisors and the axis of the classes.

        The first two are ``(examples, positions, classes)``, the divisors ``(examples, positions)``.
        """
        logp, axis = self._compute_log_probabilities(outputs, targets)
        classes = logp.shape[-1]
        ones = logp.new_ones(classes)
        weight = ones if self.weight is None else self.weight.to(logp)
        smooth = self.label_smoothing
        if targets.is_floating_point():
            mass = targets.to(logp).movedim(axis, -1).reshape_as(logp) * (1 - smooth) + smooth / classes
            share = torch.ones_like(logp[..., 0])
        else:
            index, share = self._select_labels(logp, targets)
            kept = (targets != self.ignore_index).reshape(index.shape).to(logp)
            mass = _mark_classes(index, classes).to(logp) * (1 - smooth) + smooth / classes
            mass = mass * kept.unsqueeze(-1)
        return logp, mass * weight, share, axis

    def _compute_log_probabilities(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Return ``(examples, positions, classes)`` and the axis of the classes."""
        axis = self.find_class_axis(outputs, targets)
        logp = F.log_softmax(outputs.movedim(axis, -1), -1)
        return logp.reshape(logp.shape[0], -1, logp.shape[-1]), axis

    def _select_labels(self, like: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class of each position, 0 where it is ignored, and its weight, which is then 0."""
        index = targets.reshape(len(targets), -1)
        kept = (index != self.ignore_index).to(like)
        index = index.where(index != self.ignore_index, index.new_zeros(())).long()
        return index, kept if self.weight is None else self.weight.to(like)[index] * kept

    def _has_one_class(self, targets: Tensor) -> bool:
        """Return whether each position has the mass of one class, which needs no array of all classes."""
        return not targets.is_floating_point() and self.label_smoothing == 0

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self._has_one_class(targets):
            logp, _ = self._compute_log_probabilities(outputs, targets)
            index, mass = self._select_labels(logp, targets)
            logp = logp.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        else:
            logp, mass, _, _ = self._compute_parts(outputs, targets)
        # Zero mass times minus infinity is 0, not NaN.
        return -(mass * logp).where(mass != 0, torch.zeros_like(logp)).flatten(1).sum(1)

    def share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not targets.is_floating_point():
            self.find_class_axis(outputs, targets)  # refuses other shapes
            return self._select_labels(outputs, targets)[1].sum(1)
        return self._compute_parts(outputs, targets)[2].sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self._has_one_class(targets):
            logp, axis = self._compute_log_probabilities(outputs, targets)
            index, mass = self._select_labels(logp, targets)
            mass = mass.unsqueeze(-1)
            gradient = logp.exp() * mass
            gradient = gradient - mass.where(_mark_classes(index, logp.shape[-1]), mass.new_zeros(()))
        else:
            logp, mass, _, axis = self._compute_parts(outputs, targets)
            gradient = logp.exp() * mass.sum(-1, keepdim=True) - mass
        return SoftmaxCurvature(logp, mass, axis, outputs.shape).reshape_to_outputs(gradient)

    def curvature(self, outputs: Tensor, targets: Tensor) -> SoftmaxCurvature:
        if self._has_one_class(targets):
            logp, axis = self._compute_log_probabilities(outputs, targets)
            return SoftmaxCurvature(logp.exp(), self._select_labels(logp, targets)[1], axis, outputs.shape)
        logp, mass, _, axis = self._compute_parts(outputs, targets)
        return SoftmaxCurvature(logp.exp(), mass.sum(-1), axis, outputs.shape)


def _mark_classes(index: Tensor, classes: int) -> Tensor:
    """Return where each class is the one of the position, ``(examples, positions, classes)``."""
    # Compared rather than scattered, which vmap does one example at a time on older versions of torch.
    return index.unsqueeze(-1) == torch.arange(classes, device=index.device)


@dataclass(frozen=True)
class NegativeLogLikelihood(CrossEntropy):
    r"""Cross-entropy of outputs that are log-probabilities, ``torch.nn.functional.nll_loss``.

    The loss itself is linear in the log-probabilities: all of its curvature is in the model's last layer, which the
    Gauss-Newton matrix ignores. But :math:`\mathrm{log\,softmax}` does not change normalized log-probabilities, so the
    loss is the cross-entropy of these outputs, whose curvature is that of the logits before them.
    """

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        super().check(outputs, targets)
        if targets.is_floating_point():
            raise LabelError(
                f"Expected class numbers, but got targets of type {targets.dtype} for NLLLoss. Try passing class "
                "numbers as torch.long, or using CrossEntropyLoss for probabilities."
            )
        total = outputs.detach().logsumexp(self.find_class_axis(outputs, targets))
        if bool((total.abs() > LOG_ONE).any()):
            worst = total.flatten()[total.abs().argmax()].exp()
            raise OptionError(
                "Expected log-probabilities, whose exponentials sum to 1, but got NLLLoss and outputs whose "
                f"exponentials sum to {float(worst):g}. Try passing CrossEntropyLoss() if the outputs are logits, or "
                "ending the model with log_softmax over the classes."
            )


class _PerOutputLoss(Loss):
    """A loss that is a mean over all outputs of all examples."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.dtype == torch.bool:
            raise LabelError(
                "Expected numbers, but got targets of type torch.bool. Try converting them with targets.float() (or "
                ".double())."
            )
        if targets.shape != outputs.shape:
            raise LabelError(
                f"Expected targets of the outputs' shape {format_shape(outputs)}, but got "
                f"{format_shape(targets)}. Broadcasting one over the other is nearly always a mistake. Try reshaping "
                "the targets, e.g. targets[:, None]."
            )

    def share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.new_full(outputs.shape[:1], outputs[0].numel())


@dataclass(frozen=True)
class SquaredError(_PerOutputLoss):
    """Mean squared error over all outputs, ``torch.nn.functional.mse_loss``."""

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().reshape(len(outputs), -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * (outputs - targets)

    def curvature(self, outputs: Tensor, targets: Tensor) -> DiagonalCurvature:
        return DiagonalCurvature(torch.full_like(outputs, 2.0))


@dataclass(frozen=True)
class BinaryCrossEntropy(_PerOutputLoss):
    """Binary cross-entropy of logits, mean over all outputs.

    As ``torch.nn.functional.binary_cross_entropy_with_logits`` defines it.
    """

    pos_weight: Tensor | None = None

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        super().check(outputs, targets)
        if targets.min() < 0 or targets.max() > 1:
            raise LabelError(
                f"Expected probabilities from 0 to 1, but got targets from {float(targets.min()):g} to "
                f"{float(targets.max()):g}. Check the labels given to bce_with_logits."
            )

    def _compute_softplus_weight(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weight of the logit's softplus, which is 1 without ``pos_weight``."""
        ones = torch.ones_like(outputs)
        return ones if self.pos_weight is None else ones + (self.pos_weight.to(outputs) - 1) * targets

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = (1 - targets) * outputs + self._compute_softplus_weight(outputs, targets) * F.softplus(-outputs)
        return each.reshape(len(outputs), -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (1 - targets) - self._compute_softplus_weight(outputs, targets) * torch.sigmoid(-outputs)

    def curvature(self, outputs: Tensor, targets: Tensor) -> DiagonalCurvature:
        return DiagonalCurvature(
            self._compute_softplus_weight(outputs, targets) * torch.sigmoid(outputs) * torch.sigmoid(-outputs)
        )


def find_hits(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return which targets are predicted correctly, and which of them count."""
    loss = getattr(loss, "inner", loss)  # with normalized logits, the largest one stays the largest
    if isinstance(loss, BinaryCrossEntropy):
        return (outputs > 0) == (targets > 0.5), torch.ones_like(targets, dtype=torch.bool)
    if not isinstance(loss, CrossEntropy):
        raise NotDefinedError(f"needs classes to be right or wrong about, which {type(loss).__name__} does not have")
    axis = loss.find_class_axis(outputs, targets)
    # Outputs that overflowed predict nothing.
    found = outputs.argmax(axis).where(outputs.isfinite().all(axis), targets.new_full((), -1, dtype=torch.long))
    if targets.is_floating_point():
        return found == targets.argmax(axis), torch.ones_like(found, dtype=torch.bool)
    return found == targets, targets != loss.ignore_index


LOSSES: dict[str, Callable[[], Loss]] = {
    "cross_entropy": CrossEntropy,
    "mse": SquaredError,
    "bce_with_logits": BinaryCrossEntropy,
}


def format_loss(loss: Loss) -> str:
    """Return the name of a loss and its options that are not the default ones. Equal losses give equal strings.

    >>> format_loss(CrossEntropy(label_smoothing=0.1, weight=torch.tensor([1.0, 2.5])))
    'cross_entropy(label_smoothing=0.1, weight=[1, 2.5])'
    """
    function = getattr(loss, "function", None)
    if function is not None:
        function = getattr(function, "func", function)  # of a partial
        return str(getattr(function, "__qualname__", type(function).__qualname__))
    name = next((name for name, kind in LOSSES.items() if kind is type(loss)), type(loss).__name__)
    parts = []
    options: tuple[Field[Any], ...] = fields(loss) if is_dataclass(loss) else ()
    for option in options:
        value = getattr(loss, option.name)
        if isinstance(value, Tensor):
            numbers = [f"{number:g}" for number in value.flatten().tolist()]
            mark = blake2b(" ".join(numbers).encode(), digest_size=4).hexdigest()  # if there are too many to read
            shown = f"[{', '.join(numbers)}]" if len(numbers) <= 8 else f"[{len(numbers)} numbers, {mark}]"
            parts.append(f"{option.name}={shown}")
        elif value != option.default and option.name != "classes_second":
            parts.append(f"{option.name}={value!r}")
    return f"{name}({', '.join(parts)})" if parts else name


def parse_loss(given: LossLike) -> Loss:
    """Return the loss given by a name, a :class:`Loss`, a loss module of torch, or a function."""
    if isinstance(given, Loss):
        return given
    if isinstance(given, str):
        if given == "model":
            from saltflat.engine.model_targets import ModelLoss  # which builds on this module

            return ModelLoss()
        if given not in LOSSES:
            raise make_unknown_name_error("loss", given, [*LOSSES, "model"])
        return LOSSES[given]()
    if isinstance(given, list | tuple):
        raise OptionError(
            f"Expected a loss, but got {given!r} as the third argument. Try naming measures as measures=[...]."
        )
    if not callable(given):
        raise make_unknown_name_error("loss", given, LOSSES)
    if isinstance(given, type):
        raise OptionError(
            f"Expected an instance of the loss, but got the class {given.__name__}. Try passing {given.__name__}()."
        )
    from saltflat.engine.custom_losses import convert_loss  # which builds on this module

    return convert_loss(given)
