"""The problem: a model, a loss and data, checked once before any work, and notes about doubtful inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import log

import torch
from torch import Tensor, nn

from saltflat.engine.custom_losses import CustomLoss
from saltflat.engine.data import Batch, Data, prepare_data, read_batches
from saltflat.engine.losses import BinaryCrossEntropy, CrossEntropy, Loss, LossLike, NegativeLogLikelihood, parse_loss
from saltflat.engine.model_targets import ModelLoss, TargetRule, takes_labels
from saltflat.engine.network import Network, check_precision, is_packed
from saltflat.engine.progress import count_examples
from saltflat.errors import (
    DeviceError,
    EmptyDataError,
    ModelError,
    NonFiniteError,
    NotDefinedError,
    PrecisionError,
    SaltflatError,
    format_error_line,
)
from saltflat.results.caveats import GUESSING

# What models raise where they check the type of their inputs; RuntimeError may be about second derivatives instead.
UNEXPECTED = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError)
CONVERTED = 4 << 20  # largest number of bytes of a batch to convert to another precision at once


@dataclass(frozen=True)
class Problem:
    """A model, a loss and data that have been checked and fit together.

    Attributes:
        model: the module.
        data: the data, prepared so that it can be read again.
        loss: the loss.
        network: runs the model.
        mode: ``"eval"`` or ``"keep"``.
        dtype: precision to work in; the model's own if None.
        rule: what the model does with labels before it compares its outputs with them.
    """

    model: nn.Module
    data: Data
    loss: Loss
    network: Network
    mode: str
    dtype: torch.dtype | None
    rule: TargetRule = field(default_factory=TargetRule)

    @classmethod
    def build(
        cls,
        model: nn.Module,
        data: Data,
        loss: LossLike = "cross_entropy",
        layers: Sequence[str] | str | None = None,
        dtype: torch.dtype | None = None,
        mode: str = "eval",
    ) -> Problem:
        """Check everything that can be checked without running the model, and return the problem.

        Args:
            model: any module; it is not changed.
            data: a ``DataLoader``, a pair of tensors ``(inputs, targets)``, a dataset, or any collection of batches
                that can be read again.
            loss: ``"cross_entropy"``, ``"mse"``, ``"bce_with_logits"``, ``"model"`` for the model's own, one of
                :mod:`saltflat.engine.losses`, the matching module of torch, or a function ``loss(outputs, targets)``.
            layers: names of modules or parameters to measure; all that require a gradient if None.
            dtype: precision to work in; the model's own if None.
            mode: ``"eval"``, or ``"keep"`` to leave the modules in their current modes.
        """
        chosen = parse_loss(loss)
        check_precision(model, dtype)
        network = Network(model, layers, dtype)
        problem = cls(model, prepare_data(data), chosen, network, mode, dtype)
        problem._check_weights()
        problem._check_modes()
        inner = getattr(chosen, "inner", chosen)  # with normalized logits
        if isinstance(inner, ModelLoss) or (takes_labels(model) and inner == CrossEntropy()):
            from saltflat.engine.model_loss import fit_targets  # which builds on this module

            fitted = fit_targets(replace(problem, loss=inner))
            problem = fitted if inner is chosen else replace(problem, rule=fitted.rule)
        return problem

    def to_float64(self) -> Problem:
        """Return the same problem in float64, in the same session. Nothing is checked a second time."""
        self.network.attributes.restore(thorough=True)  # passes in this precision may have written to them
        network = Network(self.model, list(self.network.measured), torch.float64)
        return replace(self, network=network, dtype=torch.float64)

    @contextmanager
    def use_float64(self) -> Iterator[Problem]:
        """Yield the same problem in float64.

        Raises:
            NotDefinedError: if the model runs in its own precision only.
        """
        try:
            yield self.to_float64()
        except (ModelError, *UNEXPECTED) as error:
            is_other = isinstance(error, SaltflatError) and not isinstance(error, ModelError)
            if is_other or all(value.dtype == torch.float64 for value in self.network.measured.values()):
                raise
            # What torch said is shorter than what this package makes of it.
            reason = format_error_line(error.__cause__ or error)
            raise NotDefinedError(f"needs float64, and this model does not run in it: {reason}") from error

    def read_batches(self, select: Callable[[Batch], Batch | None] | None = None) -> Iterator[Batch]:
        """Read the data once, and check every batch.

        Args:
            select: returns the part of a batch to yield, or None to skip it.
        """
        found = 0
        for number, batch in enumerate(read_batches(self.data)):
            self._check_batch(batch, number)
            found += 1
            own = batch if select is None else select(batch)
            for part in () if own is None else self._split_batch(own):
                yield self.rule.apply(part.to(self.dtype))
        if not found:
            raise EmptyDataError(
                "Expected at least one example, but got empty data. Check the path, the split and drop_last."
            )

    def iterate_pairs(self) -> Iterator[Batch]:
        """Read the data two examples at a time."""
        for batch in self.read_batches():
            yield from (batch.cut(start, start + 2) for start in range(0, batch.examples, 2))

    def _split_batch(self, batch: Batch) -> Iterator[Batch]:
        """Return the batch, in parts if its copy in another precision would be large."""
        floats = [each for each in batch.list_tensors() if each.is_floating_point() and each.dtype != self.dtype]
        size = 8 * sum(each.numel() for each in floats) if self.dtype is not None else 0
        parts = min(batch.examples, -(-size // CONVERTED)) or 1
        step = -(-batch.examples // parts)
        for start in range(0, batch.examples, step):
            yield batch if step == batch.examples else batch.cut(start, start + step)

    @property
    def num_examples(self) -> int | None:
        """Return the number of examples, or None if it is not known without reading them."""
        pair = isinstance(self.data, tuple) and isinstance(self.data[0], Tensor)
        return len(self.data[0]) if pair else count_examples(self.data)  # type: ignore[index]

    def check_outputs(self, outputs: Tensor, batch: Batch) -> None:
        """Check that the model's outputs are finite, in full precision, and have one entry per example."""
        if outputs.dim() == 0 or outputs.shape[0] != batch.examples:
            raise ModelError(
                "Expected one output (of any shape) per example, along the first axis, but got outputs of shape "
                f"{tuple(outputs.shape)} for {batch.examples} examples. Try making the model return outputs, not a "
                "loss or a mean."
            )
        if outputs.dtype not in (torch.float32, torch.float64):
            raise PrecisionError(
                f"Expected float32 or float64, but got outputs in {outputs.dtype}. Half precision underflows in "
                "squares. Try removing autocast from the model's forward."
            )
        if not is_finite(outputs):
            masked = outputs == -torch.inf
            if bool((masked | outputs.isfinite()).all()):
                classes = masked.reshape(-1, masked.shape[-1]).any(0).nonzero().flatten().tolist()
                raise NonFiniteError(
                    "Expected finite outputs, but got -inf in the model's outputs (at "
                    f"{', '.join(map(str, classes[:4]))} of their last axis): masked classes. Try masking with a "
                    "large negative number such as -1e9, which gives the same probabilities."
                )
            raise NonFiniteError(
                f"Expected finite outputs, but got NaN or infinity in the model's outputs for examples {batch.first} "
                f"to {batch.first + batch.examples - 1}. Check these inputs, or measure with dtype=torch.float64."
            )

    def _check_weights(self) -> None:
        members = [*self.model.named_parameters(), *self.model.named_buffers()]
        values = {name: v.detach() for name, v in members if v.is_floating_point() and not is_packed(v)}
        # All of them are checked at once first: on a GPU, each separate answer would have to be waited for.
        if not values or bool(all(flags.all() for flags in _stack_finite_flags(values.values()))):
            return
        name = next((name for name, v in values.items() if not is_finite(v)), None)
        if name is None:  # only sums overflow
            return
        bad = int((~_widen_float8(values[name]).isfinite()).sum())
        raise NonFiniteError(
            f"Expected finite weights, but got {bad} NaN or infinite numbers in {name!r}. This training has "
            "diverged. Try loading an earlier checkpoint."
        )

    def _check_modes(self) -> None:
        """Check that no module in train mode is random or couples examples; with ``mode="eval"`` there is none."""
        for name, module in self.model.named_modules():
            if not module.training:
                continue
            dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
            statistics = isinstance(module, nn.modules.batchnorm._NormBase) and not isinstance(
                module, nn.modules.instancenorm._InstanceNorm
            )
            if dropout or statistics:
                why = "drops units at random" if dropout else "normalizes by the batch, which couples the examples"
                raise ModelError(
                    f"Expected a fixed function of each example, but got {name!r} ({type(module).__name__}) in train "
                    f"mode with mode='keep': it {why}. Try leaving mode out to measure in eval mode; the model is "
                    "given back as it was."
                )

    def _check_batch(self, batch: Batch, number: int) -> None:
        device = next(iter(self.network.measured.values())).device
        for tensor in [*batch.list_tensors(), batch.targets]:
            if tensor.device != device:
                raise DeviceError(
                    f"Expected model and data on one device, but got batch {number} on {tensor.device} and the model "
                    f"on {device}. Try moving the batches with .to('{device}'), or the model with "
                    f".to('{tensor.device}')."
                )
            if tensor.is_floating_point() and not is_finite(tensor):
                raise NonFiniteError(
                    f"Expected finite inputs and targets, but got NaN or infinity in batch {number} (examples "
                    f"{batch.first} to {batch.first + batch.examples - 1}). Try cleaning or dropping these examples."
                )


def _stack_finite_flags(values: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield flags that say whether the sum of each tensor is finite, one array per device."""
    sums: dict[torch.device, list[Tensor]] = {}
    for value in values:
        sums.setdefault(value.device, []).append(_widen_float8(value).sum().double())
    yield from (torch.stack(each).isfinite() for each in sums.values())


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite. The sum shows it without a large array, unless it overflows itself."""
    values = _widen_float8(values)
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def _widen_float8(values: Tensor) -> Tensor:
    """Convert 8-bit floating-point numbers to float32, since torch does not compute with them."""
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values


def cast_targets(targets: Tensor) -> Tensor:
    """Convert real targets to float64, the precision of losses. Class numbers are returned as they are."""
    return targets.double() if targets.is_floating_point() else targets


OTHER_SLOPE = (
    "The model's backward pass is not the derivative of its forward pass (a straight-through estimator, or a part that "
    "is detached). Gradients, curvature and certificate are those of the backward pass, as in training; they do not "
    "say how the loss changes with the weights."
)
FEW_OUTPUTS = 32  # fewer may lie between 0 and 1 by chance


def find_input_notes(problem: Problem, batch: Batch, mean_loss: float) -> list[str]:
    """Return notes about inputs, outputs and loss that suggest a mistake.

    Args:
        problem: model, loss and data.
        batch: a few of the examples.
        mean_loss: of all the data.
    """
    with torch.no_grad():
        outputs = problem.network(batch).double()
    targets = cast_targets(batch.targets)
    found = [_find_pixel_note(tensor) for tensor in batch.list_tensors() if batch.has_example_axis(tensor)]
    found += [
        _find_probability_note(problem.loss, outputs, targets),
        _find_chance_note(problem.loss, outputs, targets, mean_loss),
        _find_linear_loss_note(problem.loss, outputs, targets),
    ]
    if problem.network.has_other_slope:
        found.append(OTHER_SLOPE)
    found.append(problem.rule.describe(problem.model))
    return list(dict.fromkeys(note for note in found if note))


def _find_pixel_note(inputs: Tensor) -> str:
    """Return a note if the inputs look like pixel values from 0 to 255, whatever their type."""
    if inputs.dtype == torch.bool or inputs.is_complex() or not inputs.numel():
        return ""
    low, high = float(inputs.min()), float(inputs.max())
    is_image = inputs.dim() >= 4
    if inputs.is_floating_point():
        is_image = is_image or bool((inputs == inputs.round()).all())
        is_scaled = high < 100
    else:
        is_image = is_image or (inputs.dtype == torch.uint8 and inputs.dim() >= 3)
        is_scaled = high <= 1
    if not is_image or is_scaled or low < 0 or high > 255:
        return ""
    return (
        f"The inputs run from {low:g} to {high:g}, like pixels that were not scaled. Unless the network was trained on "
        "them as they are, prepare them as in training (for instance, divide by 255)."
    )


def _find_probability_note(loss: Loss, outputs: Tensor, targets: Tensor) -> str:
    if bool((outputs < 0).any()) or bool((outputs > 1).any()):
        return ""
    if isinstance(loss, CrossEntropy) and not isinstance(loss, NegativeLogLikelihood):
        axis = loss.find_class_axis(outputs, targets)
        if outputs.shape[axis] > 1 and bool(((outputs.sum(axis) - 1).abs() < 1e-4).all()):
            return (
                "The outputs are probabilities already: all lie between 0 and 1, and those of each example sum to 1. "
                "cross_entropy takes a softmax of them again. Measure the network without its last softmax."
            )
    if isinstance(loss, BinaryCrossEntropy) and outputs.numel() >= FEW_OUTPUTS:
        return (
            f"The outputs may be probabilities already: the first {outputs.numel()} all lie between 0 and 1. "
            "bce_with_logits takes a sigmoid of them again. Measure the network without its last sigmoid."
        )
    return ""


def _find_chance_note(loss: Loss, outputs: Tensor, targets: Tensor, mean_loss: float) -> str:
    """Return a note if the loss exceeds that of equal probabilities, log(classes) for any weights and smoothing."""
    if isinstance(loss, CrossEntropy):
        classes = outputs.shape[loss.find_class_axis(outputs, targets)]
    elif isinstance(loss, BinaryCrossEntropy) and loss.pos_weight is None:
        classes = 2
    else:
        return ""
    if not mean_loss > log(classes) * (1 + 1e-6) or classes < 2:
        return ""
    return (
        f"The mean loss is {mean_loss:.4g}, and equal probabilities for all {classes} classes would have "
        f"log {classes} = {log(classes):.4g}: the network is {GUESSING}. Check that trained weights were "
        "loaded, and that inputs and labels are prepared as in training."
    )


def _find_linear_loss_note(loss: Loss, outputs: Tensor, targets: Tensor) -> str:
    if not isinstance(loss, CustomLoss):
        return ""
    free = outputs.detach().requires_grad_()
    direction = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
    with torch.enable_grad():
        slope = loss.compute_slope(free, targets, create_graph=True)
        try:
            bent = _differentiate((slope * direction).sum(), free)
        except RuntimeError:  # torch has no second derivative of it, which measures made of gradients do not need
            return ""
    if (bent is not None and bool(bent.any())) or not bool(slope.any()):
        return ""
    return (
        "The loss function is linear in the outputs around those of the network, so its Gauss-Newton curvature is 0 "
        "whatever the network: measures made of it say nothing here. For log-probabilities, pass "
        "loss=torch.nn.NLLLoss() itself; for absolute values or hinges, use measures of the true Hessian."
    )


def _differentiate(value: Tensor, by: Tensor) -> Tensor | None:
    """Return the derivative, or None if the value does not depend on ``by``."""
    return torch.autograd.grad(value, by, allow_unused=True)[0] if value.requires_grad else None


def can_accept_labels(model: nn.Module, batch: Batch) -> bool:
    """Return whether forward accepts labels. One with ``**kwargs`` may, if the inputs are passed by name."""
    if not takes_labels(model) or "labels" in batch.kwargs:
        return False
    return bool(batch.kwargs) or "labels" in inspect.signature(model.forward).parameters
