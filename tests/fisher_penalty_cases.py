"""The Fisher penalty by its definition, slow: sums over parts that are written down by hand, and small networks."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from cases import Case, integers, joined, reals, shaken
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from saltflat.training import part_gradients

Batch = Any
WAYS: tuple[part_gradients.PassStrategy, ...] = ("loop", "vectorized")


def cut(batch: Batch, sizes: list[int]) -> list[Batch]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [rows(batch, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def rows(tree: Any, which: slice) -> Any:
    if isinstance(tree, dict):
        return {key: rows(value, which) for key, value in tree.items()}
    return tuple(rows(value, which) for value in tree) if isinstance(tree, tuple) else tree[which]


def loss_at(built: Case, values: dict[str, Tensor], batch: Batch) -> Tensor:
    """The mean loss of a batch with these parameters, BatchNorm's running statistics left alone."""
    model = built.model
    values = {**{name: b.clone() for name, b in model.named_buffers()}, **values}
    if isinstance(batch, dict):
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        outputs = torch.func.functional_call(model, values, (), inputs)
        return built.loss_function(outputs.logits, batch["labels"])
    inputs, targets = batch
    if isinstance(inputs, dict):
        return built.loss_function(torch.func.functional_call(model, values, (), inputs), targets)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    return built.loss_function(torch.func.functional_call(model, values, args), targets)


def gradient_at(built: Case, values: dict[str, Tensor], batch: Batch, graph: bool = False) -> dict[str, Tensor]:
    free = {name: v if graph else v.detach().requires_grad_() for name, v in values.items()}
    loss = loss_at(built, free, batch)
    found = torch.autograd.grad(loss, list(free.values()), create_graph=graph, materialize_grads=True)
    return dict(zip(free, found, strict=True))


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def along(values: dict[str, Tensor], direction: dict[str, Tensor], step: float) -> dict[str, Tensor]:
    return {name: value + step * direction[name] for name, value in values.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def length(values: Mapping[str, Tensor]) -> float:
    return float(torch.cat([each.flatten() for each in values.values()]).norm())


def whole_batch(built: Case) -> Batch:
    return joined(built.batches)


def plain_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def same_bits(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def smooth_mlp() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return Case(shaken(model), [(reals(7, 4), integers(3, 7))], "cross_entropy", F.cross_entropy)


def smooth_cnn() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.GELU(), nn.AvgPool2d(2, 1), nn.Conv2d(3, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)
    )
    return Case(shaken(model), [(reals(7, 1, 4, 4), integers(3, 7))], "cross_entropy", F.cross_entropy)


def smooth_batch_norm() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3), nn.BatchNorm1d(3)
    )
    return Case(shaken(model), [(reals(7, 1, 4, 4), integers(3, 7))], "cross_entropy", F.cross_entropy)


def single(build: Callable[[], Case]) -> tuple[nn.Module, Batch]:
    built = build()
    inputs, targets = whole_batch(built)
    return built.model.float(), (inputs.float(), targets)


def on_cpus(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(part_gradients, "VECTORIZED_ON", ("cpu",))


# Of the cases of all measures those that a penalty can train, kinks and all.
KINKED = (
    "biased_mlp",
    "in_place_relu",
    "in_place_addition_to_a_layers_output",
    "frozen_parameters",
    "layer_never_called",
    "grouped_dilated_strided_convolution",
    "max_and_average_pooling",
    "group_norm",
    "instance_norm",
    "layer_norm_of_one_and_of_two_dimensions",
    "attention_of_two_heads_by_torchs_kernel",
    "multihead_attention",
    "transformer_layer_with_examples_in_dimension_one",
    "tied_embedding_and_output",
    "linear_called_on_a_parameter",
    "dict_batches_and_an_output_object",
    "unequal_batches",
    "one_example",
    "sequence_with_ignored_positions",
    "class_weights_and_label_smoothing",
    "probability_targets_with_weights_and_smoothing",
    "image_of_labels",
    "squared_error_of_one_number",
    "squared_error_of_images",
    "binary_cross_entropy",
)
