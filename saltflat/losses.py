r"""Losses: their value, their gradient and their curvature at the network's outputs.

The loss of the data is what ``reduction="mean"`` would give if all of it were one batch: a sum over examples of
``total(outputs, targets)``, divided by the sum of ``share``. A loss below gives, for a batch, those two and the pieces
of the second derivative that :mod:`saltflat.columns` turns into columns to propagate back:

* :class:`~saltflat.curvature.Softmax`: :math:`m (\mathrm{diag}\, p - p p^T)` at every position;
* :class:`~saltflat.curvature.Diagonal`: a number per output;
* :class:`~saltflat.curvature.Roots`: any symmetric matrix, as signed columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.curvature import Curvature, Diagonal, Roots, Softmax
from saltflat.errors import LabelError, OptionError, unknown


def shape_of(values: Tensor) -> str:
    """As a reader knows it, whatever part of the examples is at hand."""
    return f"({', '.join(['N', *map(str, values.shape[1:])])}{',' * (values.dim() == 1)})"


class Loss(ABC):
    """All methods take outputs in float64."""

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise :class:`LabelError` for targets that do not fit."""

    @abstractmethod
    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``(examples,)``: each example's part of the sum."""

    @abstractmethod
    def share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``(examples,)``: each example's part of what the sum is divided by."""

    @abstractmethod
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``(examples, *outputs)``: derivative of ``total``."""

    @abstractmethod
    def curvature(self, outputs: Tensor, targets: Tensor) -> Curvature:
        """Second derivative of ``total``."""


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Softmax cross-entropy, as ``torch.nn.functional.cross_entropy`` defines it.

    Outputs are ``(N, C)``, or ``(N, T, C)`` with targets ``(N, T)``, or ``(N, C, *space)`` with targets
    ``(N, *space)``; targets are class numbers, or probabilities of the outputs' shape.
    """

    label_smoothing: float = 0.0
    weight: Tensor | None = None
    ignore_index: int = -100
    # Three-dimensional outputs may allow two readings; torch's own module knows only the classes at the second place.
    classes_second: bool = False

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        axis = self.class_axis(outputs, targets)
        classes = outputs.shape[axis]
        if self.weight is not None and self.weight.numel() != classes:
            raise LabelError(
                f"Got {self.weight.numel()} class weights and outputs with {classes} classes. "
                "Want one weight per class. Do: check the weight given to the loss."
            )
        if self.weight is not None and bool((self.weight < 0).any()):
            raise LabelError("Got negative class weights. Want weights of at least 0. Do: check the loss's weight.")
        if targets.is_floating_point():
            if bool((targets < 0).any()):
                raise LabelError("Got negative target probabilities. Want at least 0. Do: check the targets.")
            return
        kept = targets[targets != self.ignore_index]
        if kept.numel() and (kept.min() < 0 or kept.max() >= classes):
            raise LabelError(
                f"Got labels from {int(kept.min())} to {int(kept.max())} for {classes} classes. "
                f"Want 0 to {classes - 1}, or ignore_index={self.ignore_index}. "
                "Do: count labels from 0, or give the network as many outputs as there are classes."
            )

    def class_axis(self, outputs: Tensor, targets: Tensor) -> int:
        if outputs.dim() < 2:
            raise LabelError(
                f"Got outputs of shape {shape_of(outputs)}. Want (N, classes) for cross_entropy. "
                "Do: use 'mse' or 'bce_with_logits' for a single output."
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
        raise LabelError(
            f"Got targets of type {targets.dtype} and shape {shape_of(targets)} "
            f"for outputs of shape {shape_of(outputs)}. "
            "Want integer class numbers, one for each position of the outputs, or probabilities of the outputs' shape. "
            "Do: pass class numbers as torch.long."
        )

    def _parts(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Log-probabilities, target masses, divisor, axis of the classes.

        The first two are ``(examples, positions, classes)``, the divisor is ``(examples, positions)``.
        """
        axis = self.class_axis(outputs, targets)
        logp = F.log_softmax(outputs.movedim(axis, -1), -1)
        classes = logp.shape[-1]
        logp = logp.reshape(logp.shape[0], -1, classes)
        ones = logp.new_ones(classes)
        weight = ones if self.weight is None else self.weight.to(logp)
        smooth = self.label_smoothing
        if targets.is_floating_point():
            mass = targets.to(logp).movedim(axis, -1).reshape_as(logp) * (1 - smooth) + smooth / classes
            share = torch.ones_like(logp[..., 0])
        else:
            index = targets.reshape(logp.shape[:2])
            kept = (index != self.ignore_index).to(logp)
            index = index.where(index != self.ignore_index, index.new_zeros(()))
            mass = F.one_hot(index.long(), classes).to(logp) * (1 - smooth) + smooth / classes
            mass = mass * kept.unsqueeze(-1)
            share = weight[index.long()] * kept
        return logp, mass * weight, share, axis

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logp, mass, _, _ = self._parts(outputs, targets)
        # Zero mass times minus infinity is nothing, not NaN.
        return -(mass * logp).where(mass != 0, torch.zeros_like(logp)).sum((1, 2))

    def share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._parts(outputs, targets)[2].sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logp, mass, _, axis = self._parts(outputs, targets)
        gradient = logp.exp() * mass.sum(-1, keepdim=True) - mass
        return Softmax(logp, mass, axis, outputs.shape).placed(gradient)

    def curvature(self, outputs: Tensor, targets: Tensor) -> Softmax:
        logp, mass, _, axis = self._parts(outputs, targets)
        return Softmax(logp.exp(), mass.sum(-1), axis, outputs.shape)


class _PerOutput(Loss):
    """A loss that is a mean over all outputs of all examples."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.shape != outputs.shape:
            raise LabelError(
                f"Got targets of shape {shape_of(targets)} for outputs of shape {shape_of(outputs)}. "
                "Want the same shape: broadcasting one over the other is nearly always a mistake. "
                "Do: reshape the targets, e.g. targets[:, None]."
            )

    def share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.new_full(outputs.shape[:1], outputs[0].numel())


@dataclass(frozen=True)
class SquaredError(_PerOutput):
    """Mean squared error over all outputs, ``torch.nn.functional.mse_loss``."""

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().reshape(len(outputs), -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * (outputs - targets)

    def curvature(self, outputs: Tensor, targets: Tensor) -> Diagonal:
        return Diagonal(torch.full_like(outputs, 2.0))


@dataclass(frozen=True)
class BinaryCrossEntropy(_PerOutput):
    """Binary cross-entropy of logits, mean over all outputs.

    As ``torch.nn.functional.binary_cross_entropy_with_logits`` defines it.
    """

    pos_weight: Tensor | None = None

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        super().check(outputs, targets)
        if targets.min() < 0 or targets.max() > 1:
            raise LabelError(
                f"Got targets from {float(targets.min()):g} to {float(targets.max()):g}. "
                "Want probabilities from 0 to 1. Do: check the labels given to bce_with_logits."
            )

    def _up(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Weight of the logit's softplus: 1 without ``pos_weight``."""
        ones = torch.ones_like(outputs)
        return ones if self.pos_weight is None else ones + (self.pos_weight.to(outputs) - 1) * targets

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = (1 - targets) * outputs + self._up(outputs, targets) * F.softplus(-outputs)
        return each.reshape(len(outputs), -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (1 - targets) - self._up(outputs, targets) * torch.sigmoid(-outputs)

    def curvature(self, outputs: Tensor, targets: Tensor) -> Diagonal:
        return Diagonal(self._up(outputs, targets) * torch.sigmoid(outputs) * torch.sigmoid(-outputs))


@dataclass(frozen=True)
class Custom(Loss):
    """Any ``function(outputs, targets)``; it is called on one example at a time, as a batch of one."""

    function: Callable[[Tensor, Tensor], Tensor]

    def of_one(self, output: Tensor, target: Tensor) -> Tensor:
        value = self.function(output.unsqueeze(0), target.unsqueeze(0))
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise OptionError(
                f"Got {got} from the loss function for one example. Want a single number. "
                "Do: reduce over everything but the examples, e.g. with .mean()."
            )
        return value.reshape(())

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        self.of_one(outputs[0], targets[0])

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([self.of_one(o, t) for o, t in zip(outputs, targets, strict=True)])

    def share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.new_ones(len(outputs))

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        free = outputs.detach().requires_grad_()
        return torch.autograd.grad(self.total(free, targets).sum(), free)[0]

    def curvature(self, outputs: Tensor, targets: Tensor) -> Roots:
        size = outputs[0].numel()
        matrices = self._hessians(outputs, targets).reshape(-1, size, size)
        values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
        # (examples, size, rank) to (rank, examples, *outputs), the largest first
        roots = (vectors * values.abs().sqrt().unsqueeze(1)).permute(2, 0, 1).flip(0)
        sign = values.T.flip(0).unsqueeze(-1)
        zero = torch.zeros_like(roots)
        positive, negative = roots.where(sign > 0, zero), roots.where(sign < 0, zero)
        # Rounding makes eigenvalues of -1e-17 out of zeros: not worth a second set of columns.
        real = bool((-values).max() > 1e-13 * values.abs().max())
        placed = (size, *outputs.shape)
        return Roots(positive.reshape(placed), negative.flip(0).reshape(placed) if real else None)

    def _hessians(self, outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            mapped: Tensor = torch.func.vmap(torch.func.hessian(self.of_one))(outputs, targets)
            return mapped
        except Exception:  # not every function can be mapped; one that is wrong fails again below, in plain view
            one: Callable[..., Tensor] = torch.autograd.functional.hessian
            each = [one(lambda o, t=t: self.of_one(o, t), o) for o, t in zip(outputs, targets, strict=True)]
            return torch.stack(each)


LOSSES: dict[str, Callable[[], Loss]] = {
    "cross_entropy": CrossEntropy,
    "mse": SquaredError,
    "bce_with_logits": BinaryCrossEntropy,
}


def loss_from(given: Any) -> Loss:
    """The loss meant by a name, a loss of ours, a loss module of torch, or a function."""
    if isinstance(given, Loss):
        return given
    if isinstance(given, str):
        if given not in LOSSES:
            raise unknown("loss", given, LOSSES)
        return LOSSES[given]()
    if isinstance(given, nn.CrossEntropyLoss | nn.MSELoss | nn.BCEWithLogitsLoss):
        if given.reduction != "mean":
            raise OptionError(
                f"Got a {type(given).__name__} with reduction={given.reduction!r}. "
                "Want 'mean', the only convention here. "
                "Do: multiply the result by the number of examples if you want the sum."
            )
        if isinstance(given, nn.CrossEntropyLoss):
            return CrossEntropy(given.label_smoothing, given.weight, given.ignore_index, classes_second=True)
        if isinstance(given, nn.MSELoss):
            return SquaredError()
        if given.weight is not None:
            raise OptionError(
                "Got a BCEWithLogitsLoss with a weight. Want pos_weight only. Do: write the loss as a function."
            )
        return BinaryCrossEntropy(given.pos_weight)
    if callable(given):
        return Custom(given)
    raise unknown("loss", given, LOSSES)
