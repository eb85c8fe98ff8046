"""The passes of one step of a batch of networks: losses and gradients on all examples, or on parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from saltflat.engine.session import use_full_precision
from saltflat.studies.training.vmapped_model import VmappedModel, compute_losses


@dataclass(frozen=True)
class StepPasses:
    """The passes of one step.

    Attributes:
        model: the networks.
        rest: their other tensors by name, networks first; running statistics are updated in place.
        inputs: inputs ``(networks, examples, ...)``.
        labels: labels ``(networks, examples)``.
        masks: dropout masks by name, networks and examples first.
        smoothing: label smoothing of each network, ``(networks, 1)``; None for none.
        bfloat16: whether passes run under autocast with bfloat16.
    """

    model: VmappedModel
    rest: Mapping[str, Tensor]
    inputs: Tensor
    labels: Tensor
    masks: Mapping[str, Tensor]
    smoothing: Tensor | None
    bfloat16: bool

    @property
    def count(self) -> int:
        """The number of examples."""
        return self.labels.shape[1]

    @property
    def is_bias(self) -> Tensor:
        """Which weights of a row belong to biases."""
        return self.model.is_bias

    @property
    def has_batch_norm(self) -> bool:
        """Whether a BatchNorm layer in training mode makes examples of a batch depend on each other."""
        return self.model.has_batch_norm

    @torch.no_grad()
    def update_statistics(self, rows: Tensor) -> None:
        """Update the running statistics of layers other than BatchNorm, as a pass over all examples does."""
        if self.model.has_running_statistics:
            self.model.compute_logits(rows, self.rest, self.inputs, training=True, masks=self.masks)

    def compute_gradient(self, rows: Tensor, *, shifted: bool = False) -> tuple[Tensor, Tensor]:
        """Return the losses and their gradients on all examples; at shifted weights running statistics are kept."""
        rest = {name: each.clone() for name, each in self.rest.items()} if shifted else self.rest
        return self._run(rows, rest, self.inputs, self.labels, self.masks, self.smoothing, self.bfloat16)

    def compute_part_gradients(self, rows: Tensor, begin: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the losses and gradients on parts of ``size`` examples from ``begin`` on, each at its own weights.

        They run in the precision of the weights: bfloat16 and TF32 have too few digits for the Fisher penalty.

        Args:
            rows: weights ``(networks, parts, weights)``.
            begin: first example of the first part.
            size: number of examples in each part.
        """
        networks, parts, _ = rows.shape
        end = begin + parts * size

        def cut(each: Tensor) -> Tensor:
            return each[:, begin:end].reshape(-1, size, *each.shape[2:])

        rest = {name: each.repeat_interleave(parts, dim=0) for name, each in self.rest.items()}
        masks = {name: cut(each) for name, each in self.masks.items()}
        smoothing = None if self.smoothing is None else self.smoothing.repeat_interleave(parts, dim=0)
        with use_full_precision(self.model.model):
            losses, gradients = self._run(
                rows.flatten(0, 1), rest, cut(self.inputs), cut(self.labels), masks, smoothing, bfloat16=False
            )
        return losses.view(networks, parts), gradients.view(networks, parts, -1)

    def _run(
        self,
        rows: Tensor,
        rest: Mapping[str, Tensor],
        inputs: Tensor,
        labels: Tensor,
        masks: Mapping[str, Tensor],
        smoothing: Tensor | None,
        bfloat16: bool,
    ) -> tuple[Tensor, Tensor]:
        leaf = rows.detach().requires_grad_()
        device = rows.device.type
        with torch.autocast(device, torch.bfloat16) if bfloat16 else nullcontext():
            logits = self.model.compute_logits(leaf, rest, inputs, training=True, masks=masks)
        losses = compute_losses(logits.to(rows.dtype), labels, smoothing).mean(1)
        # No network's loss depends on another's weights: the gradient of the sum holds each one's own.
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradient
