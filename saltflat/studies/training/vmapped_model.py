"""Run a batch of networks of one architecture with vmap: their weights are the rows of a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from saltflat.engine.precision import use_full_precision
from saltflat.studies.training.batched_convolution import set_convolution_method
from saltflat.studies.training.dropout import find_mask_shapes
from saltflat.training.fisher_penalty import has_running_statistics
from saltflat.training.shift import has_training_batch_norm

# Activations that an evaluation may hold at once.
ROOM = {"cpu": 2**25, "cuda": 2**30}
ALIGNED = 32  # numbers, 128 bytes of float32: kernels of a GPU read 16 bytes at a time, or are slower or fail


class VmappedModel:
    """The passes of a batch of networks, and the place of each parameter in a row.

    Attributes:
        masks: shapes of the dropout masks of one example.
        trained: shapes of the trained parameters by name, in the order of a row. Each begins at a multiple of
            ``ALIGNED`` numbers; what lies between is zero.
        is_bias: which weights of a row belong to biases, by the parameters' names.
        numbers: activations of one network for one example.
        has_batch_norm: whether a BatchNorm layer makes examples depend on each other in train mode.
        has_running_statistics: whether layers that normalize track statistics in train mode.
    """

    def __init__(self, model: nn.Module, example: Tensor, way: str = "auto") -> None:
        self.model = deepcopy(model).to(example.device).eval()
        self.passing = deepcopy(self.model)
        set_convolution_method(self.passing, way)
        self.masks = find_mask_shapes(self.model, example)
        self.trained = {name: each.shape for name, each in self.model.named_parameters() if each.requires_grad}
        self.sizes = [shape.numel() for shape in self.trained.values()]
        self.pieces = [piece for size in self.sizes for piece in (size, -size % ALIGNED)]
        self.rest = [
            *(name for name, each in self.model.named_parameters() if not each.requires_grad),
            *(name for name, _ in self.model.named_buffers() if name not in self.masks),
        ]
        self.numbers = count_activations(self.model, example)
        # In train mode, which a network may define for itself.
        self.passing.train()
        self.has_batch_norm = has_training_batch_norm(self.passing)
        self.has_running_statistics = has_running_statistics(self.passing)
        self.passing.eval()
        biases = [flag for name in self.trained for flag in ("bias" in name.rpartition(".")[2], False)]
        self.is_bias = torch.tensor(biases).repeat_interleave(torch.tensor(self.pieces)).to(example.device)

    def pack_models(self, models: Sequence[nn.Module]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the trained parameters of each model as a row, and all its other tensors by name, networks first."""
        device = next(self.model.parameters()).device
        held = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]
        rows = [torch.cat([each[name].detach().flatten() for name in self.trained]) for each in held]
        rest = {name: torch.stack([each[name].detach() for each in held]).to(device) for name in self.rest}
        return self.align_rows(torch.stack(rows).to(device)), rest

    def align_rows(self, rows: Tensor) -> Tensor:
        """Return rows in which every parameter begins at an aligned place; those of earlier versions follow closely."""
        if rows.shape[1] == sum(self.pieces):
            return rows
        parts = zip(rows.split(self.sizes, dim=1), self.pieces[1::2], strict=True)
        return torch.cat([F.pad(part, (0, gap)) for part, gap in parts], dim=1)

    def split_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the parts of rows, of one or many networks, that hold each parameter, as views with its shape last."""
        parts = rows.split(self.pieces, dim=-1)[::2]
        return {
            name: part.unflatten(-1, shape) for (name, shape), part in zip(self.trained.items(), parts, strict=True)
        }

    def unpack_parameters(self, row: Tensor, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of one network by name."""
        own = self.split_rows(row)
        names = dict(self.model.named_parameters())
        return {name: own[name] if name in own else rest[name] for name in names}

    def make_state_dict(self, row: Tensor, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the ``state_dict`` of one network, on the CPU."""
        with torch.no_grad():
            held = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
            for name, value in {**self.unpack_parameters(row, rest), **rest}.items():
                held[name].copy_(value)
        return {name: each.detach().cpu().clone() for name, each in self.model.state_dict().items()}

    def compute_logits(
        self,
        rows: Tensor,
        rest: Mapping[str, Tensor],
        inputs: Tensor,
        *,
        training: bool,
        shared: bool = False,
        masks: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the outputs of all networks, ``(networks, examples, classes)``.

        In training, the running statistics in ``rest`` are updated in place.

        Args:
            rows: weights ``(networks, weights)``.
            rest: other tensors by name, networks first.
            inputs: inputs, networks first unless ``shared``.
            training: whether the networks are in train mode.
            shared: whether all networks get the same inputs.
            masks: dropout masks, networks first.
        """
        self.passing.train(training)
        found = self._run_networks(rows, {**rest, **(masks or {})}, inputs, shared)
        self.passing.eval()
        return found

    def _run_networks(self, rows: Tensor, others: dict[str, Tensor], inputs: Tensor, shared: bool) -> Tensor:
        own = self.split_rows(rows)

        def call_model(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            found: Tensor = functional_call(self.passing, weights, (x,))
            return found

        return vmap(call_model, in_dims=(0, None if shared else 0))({**own, **others}, inputs)

    @torch.no_grad()
    def evaluate(
        self,
        rows: Tensor,
        rest: Mapping[str, Tensor],
        inputs: Tensor,
        labels: Tensor,
        chosen: Tensor | None = None,
    ) -> list[tuple[float, float]]:
        """Return the mean loss and the error of every network, in eval mode.

        Args:
            rows: weights ``(networks, weights)``.
            rest: other tensors by name, networks first.
            inputs: inputs of the examples.
            labels: labels ``(examples,)``, or one row for each network.
            chosen: numbers of each network's examples, ``(networks, examples)``; None if all use the same inputs.
        """
        networks, count = len(rows), labels.shape[-1]
        chunk = max(1, min(count, ROOM.get(rows.device.type, ROOM["cpu"]) // (networks * self.numbers)))
        labels = labels.expand(networks, count)
        loss = torch.zeros(networks, dtype=torch.float64, device=rows.device)
        wrong = torch.zeros(networks, dtype=torch.float64, device=rows.device)
        for begin in range(0, count, chunk):
            end, shared = min(begin + chunk, count), chosen is None
            some = inputs[begin:end] if chosen is None else inputs[chosen[:, begin:end]]
            logits, answers = self.compute_logits(rows, rest, some, training=False, shared=shared), labels[:, begin:end]
            loss += compute_losses(logits, answers).double().sum(1)
            wrong += (logits.argmax(-1) != answers).sum(1)
        return list(zip((loss / count).tolist(), (wrong / count).tolist(), strict=True))


def compute_losses(logits: Tensor, labels: Tensor, smoothing: Tensor | None = None) -> Tensor:
    """Return the cross-entropies, ``(networks, examples)``.

    Args:
        logits: outputs ``(networks, examples, classes)``.
        labels: labels ``(networks, examples)``.
        smoothing: label smoothing of each network, ``(networks, 1)``; None for none.
    """
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    if smoothing is None:
        return losses
    # Smoothed labels are a mixture of the label and all classes alike.
    return losses + smoothing * (torch.logsumexp(logits, -1) - logits.mean(-1) - losses)


@torch.no_grad()
def count_activations(model: nn.Module, example: Tensor) -> int:
    """Return the number of activations of one network for one example."""
    found = [example.numel()]

    def count_output(_: nn.Module, __: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        if isinstance(output, Tensor):
            found.append(output.numel())

    hooks = [module.register_forward_hook(count_output) for module in model.modules()]
    try:
        model(example[None])
    finally:
        for hook in hooks:
            hook.remove()
    return sum(found)


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
