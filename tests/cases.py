"""Tiny problems that every statistic is checked on: float64, seeded, small enough for a dense oracle."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from saltflat.layers.normalization import Affine

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Batch = tuple[Inputs, Tensor] | dict[str, Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """A model, its data in batches, and a loss said twice: as a user passes it, and in torch's own words.

    ``loss_function`` takes the outputs and targets of *all* examples at once and gives the loss of the data. ``copies``
    is how often an example is in its batch when the oracle runs it.
    """

    model: nn.Module
    batches: list[Batch]
    loss: str | LossFunction
    loss_function: LossFunction
    name: str = ""
    copies: int = 1


CASES: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    """Enter a builder in ``CASES``; each call builds the same problem anew and leaves the random state alone."""

    def seeded() -> Case:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return replace(build(), name=build.__name__)

    CASES[build.__name__] = seeded
    return seeded


class Net(nn.Module):
    """Named parts and a function of them: what ``nn.Sequential`` cannot say."""

    def __init__(self, rule: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.rule = rule
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.rule(self, *args, **kwargs)


def problem(
    model: nn.Module,
    inputs: Inputs,
    targets: Tensor,
    loss: str | LossFunction = "cross_entropy",
    sizes: Sequence[int] | None = None,
) -> Case:
    examples = examples_of([(inputs, targets)])
    half = len(examples) // 2
    # Unequal batches unless told otherwise: an average of batch averages must show in every case.
    batches = batched(examples, sizes or (half + 1, len(examples) - half - 1))
    return Case(shaken(model).eval(), batches, loss, torch_words(loss))


def examples_of(batches: Sequence[Batch]) -> list[Batch]:
    """The same data as batches of one example each."""
    return [rows(batch, slice(n, n + 1)) for batch in batches for n in range(len(targets_of(batch)))]


def batched(examples: Sequence[Batch], sizes: Sequence[int]) -> list[Batch]:
    """Batches of one example each, put together into batches of the given sizes."""
    assert sum(sizes) == len(examples)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [joined(examples[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def targets_of(batch: Batch) -> Tensor:
    return batch["labels"] if isinstance(batch, dict) else batch[1]


def rows(part: Any, which: slice) -> Any:
    if isinstance(part, dict):
        return {key: rows(value, which) for key, value in part.items()}
    return tuple(rows(value, which) for value in part) if isinstance(part, tuple) else part[which]


def joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: joined([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(joined(column) for column in zip(*parts, strict=True))
    return torch.cat(list(parts))


def torch_words(loss: str | LossFunction) -> LossFunction:
    """The loss of the whole data by torch's own ``reduction="mean"``; the mean over examples for a callable."""
    if loss == "mse":
        return F.mse_loss
    if loss == "bce_with_logits":
        return F.binary_cross_entropy_with_logits
    if loss == "cross_entropy" or isinstance(loss, nn.CrossEntropyLoss):
        return classes_second(F.cross_entropy if isinstance(loss, str) else loss)
    assert callable(loss)
    return mean_over_examples(loss)


def classes_second(loss: LossFunction) -> LossFunction:
    """Per-position logits ``(N, T, V)`` laid out as torch wants them, classes at dimension 1."""

    def of_all(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs.movedim(-1, 1) if outputs.ndim == 3 else outputs, targets)

    return of_all


def mean_over_examples(loss: LossFunction) -> LossFunction:
    def of_all(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([loss(outputs[n : n + 1], targets[n : n + 1]) for n in range(len(targets))]).mean()

    return of_all


def shaken(model: nn.Module) -> nn.Module:
    """In float64 and with no parameter left at a special value: zero biases and unit gains hide mistakes."""
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def with_history(model: nn.Module, *shape: int) -> nn.Module:
    """With running statistics that are neither zero means nor unit variances."""
    model.double().train()
    with torch.no_grad():
        for _ in range(5):
            model(2 * reals(*shape) + 0.5)
    return model


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def mlp(activation: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 5), activation(), nn.Linear(5, 3))


# Chains of common layers.


@case
def biased_mlp() -> Case:
    return problem(mlp(nn.ReLU), reals(6, 4), integers(3, 6))


@case
def gelu_mlp() -> Case:
    return problem(mlp(nn.GELU), reals(6, 4), integers(3, 6))


@case
def tanh_mlp() -> Case:
    return problem(mlp(nn.Tanh), reals(6, 4), integers(3, 6))


@case
def prelu_of_one_slope_and_of_one_per_unit() -> Case:
    model = nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 4), nn.PReLU(4), nn.Linear(4, 3))
    return problem(model, reals(5, 4), integers(3, 5))


@case
def in_place_relu() -> Case:
    model = nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(9, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)
    )
    return problem(model, reals(5, 2, 4), integers(3, 5))


@case
def in_place_addition_to_a_layers_output() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        y = net.first(x)
        y += x
        z = net.second(y.relu())
        z.mul_(2).add_(y)
        return net.head(z)

    model = Net(rule, first=nn.Linear(4, 4), second=nn.Linear(4, 4), head=nn.Linear(4, 3))
    return problem(model, reals(5, 4), integers(3, 5))


@case
def frozen_parameters() -> Case:
    model = mlp(nn.ReLU)
    model.get_parameter("0.weight").requires_grad_(False)
    model[2].requires_grad_(False)
    return problem(model, reals(5, 4), integers(3, 5))


@case
def layer_never_called() -> Case:
    model = Net(lambda net, x: net.head(x), head=nn.Linear(4, 3), spare=nn.Linear(2, 2))
    return problem(model, reals(4, 4), integers(3, 4))


@case
def dropout_left_in_train_mode() -> Case:
    built = problem(
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3)), reals(5, 4), integers(3, 5)
    )
    built.model.train()
    return built


# Convolutions and pooling.


@case
def grouped_dilated_strided_convolution() -> Case:
    model = nn.Sequential(
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(2, 1), groups=2),
        nn.ReLU(),
        nn.Conv2d(6, 6, 2, stride=2, groups=6, bias=False),
        nn.Flatten(),
        nn.Linear(12, 3),
    )
    return problem(model, reals(4, 4, 6, 4), integers(3, 4))


@case
def convolution_1d() -> Case:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding=1, dilation=2),
        nn.ReLU(),
        nn.Conv1d(4, 4, 2, groups=2, padding="valid"),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return problem(model, reals(5, 2, 7), integers(3, 5))


@case
def convolution_3d() -> Case:
    model = nn.Sequential(
        nn.Conv3d(2, 2, (2, 3, 2), stride=(1, 2, 1), padding=(0, 1, 1)),
        nn.ReLU(),
        nn.Conv3d(2, 4, 2, groups=2, dilation=(1, 1, 2)),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return problem(model, reals(4, 2, 3, 4, 3), integers(3, 4))


@case
def padding_circular() -> Case:
    return problem(padded("circular"), reals(4, 2, 4, 3), integers(3, 4))


@case
def padding_reflect() -> Case:
    return problem(padded("reflect"), reals(4, 2, 4, 3), integers(3, 4))


@case
def padding_replicate() -> Case:
    return problem(padded("replicate"), reals(4, 2, 4, 3), integers(3, 4))


def padded(mode: Literal["circular", "reflect", "replicate"]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), padding=(2, 1), stride=(1, 2), padding_mode=mode),
        nn.ReLU(),
        nn.Flatten(2),
        nn.Conv1d(3, 2, 3, padding=2, padding_mode=mode),
        nn.Flatten(),
        nn.Linear(28, 3),
    )


@case
def padding_same() -> Case:
    # Even kernels need one more column on one side than on the other.
    model = nn.Sequential(
        nn.Conv2d(2, 3, (2, 3), padding="same", dilation=(1, 2)),
        nn.ReLU(),
        nn.Conv2d(3, 2, (4, 1), padding="same", padding_mode="circular"),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    return problem(model, reals(4, 2, 4, 3), integers(3, 4))


@case
def transposed_convolution_1d() -> Case:
    model = nn.Sequential(
        nn.ConvTranspose1d(2, 4, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        nn.ConvTranspose1d(4, 4, 2, groups=2, dilation=2, bias=False),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    return problem(model, reals(4, 2, 3), integers(3, 4))


@case
def transposed_convolution_2d() -> Case:
    model = nn.Sequential(
        nn.ConvTranspose2d(4, 4, (3, 2), stride=2, padding=(1, 0), output_padding=(1, 0), groups=2, dilation=(1, 2)),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 2, 2),
        nn.AdaptiveAvgPool2d((3, 2)),
        nn.Flatten(),
        nn.Linear(12, 3),
    )
    return problem(model, reals(4, 4, 2, 3), integers(3, 4))


@case
def transposed_convolution_3d() -> Case:
    model = nn.Sequential(
        nn.ConvTranspose3d(2, 2, 2, stride=(2, 1, 1), padding=(0, 1, 0), groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 3),
    )
    return problem(model, reals(3, 2, 2, 3, 2), integers(3, 3))


@case
def max_and_average_pooling() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
        nn.Conv2d(3, 3, 2),
        nn.ReLU(),
        nn.AvgPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(3, 3),
    )
    return problem(model, reals(4, 2, 6, 6), integers(3, 4))


@case
def convolution_called_on_two_sizes() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        fine = net.conv(x).relu()
        coarse = net.conv(F.avg_pool2d(fine, 2)).relu()
        return net.head(coarse.mean((2, 3)) + fine.mean((2, 3)))

    model = Net(rule, conv=nn.Conv2d(2, 2, 3, padding=1), head=nn.Linear(2, 3))
    return problem(model, reals(4, 2, 4, 6), integers(3, 4))


# Normalization.


@case
def residual_with_batch_norm() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        x = net.relu(net.norm0(net.stem(x)))
        branch = net.norm2(net.conv2(net.relu(net.norm1(net.conv1(x)))))
        branch += net.shortcut(x)
        return net.head(net.relu(branch).mean((2, 3)))

    model = Net(
        rule,
        stem=nn.Conv2d(1, 2, 3, padding=1, bias=False),
        norm0=nn.BatchNorm2d(2),
        conv1=nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False),
        norm1=nn.BatchNorm2d(3),
        conv2=nn.Conv2d(3, 3, 3, padding=1),
        norm2=nn.BatchNorm2d(3),
        shortcut=nn.Sequential(nn.Conv2d(2, 3, 1, stride=2, bias=False), nn.BatchNorm2d(3)),
        relu=nn.ReLU(inplace=True),
        head=nn.Linear(3, 3),
    )
    return problem(with_history(model, 8, 1, 4, 4), reals(5, 1, 4, 4), integers(3, 5))


@case
def batch_norm_of_vectors_sequences_and_volumes() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        x = net.units(net.lift(x)).relu()
        x = net.steps(x.reshape(len(x), 2, 4)).tanh()
        return net.head(net.bare(net.voxels(x.reshape(len(x), 2, 2, 2, 1)).flatten(1)))

    model = Net(
        rule,
        lift=nn.Linear(3, 8),
        units=nn.BatchNorm1d(8),
        steps=nn.BatchNorm1d(2),
        voxels=nn.BatchNorm3d(2),
        bare=nn.BatchNorm1d(8, affine=False),
        head=nn.Linear(8, 3),
    )
    return problem(with_history(model, 8, 3), reals(5, 3), integers(3, 5))


@case
def factors_and_shifts_of_channels() -> Case:
    model = nn.Sequential(
        Affine(2), nn.Conv2d(2, 3, 2), Affine(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), Affine(4), nn.Tanh()
    )
    return problem(model, reals(4, 2, 3, 3), integers(4, 4))


@case
def group_norm() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.GroupNorm(2, 6), nn.Tanh()
    )
    return problem(model, reals(4, 2, 3, 3), integers(6, 4))


@case
def instance_norm() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    )
    return problem(model, reals(4, 2, 3, 3), integers(3, 4))


@case
def instance_norm_before_channels_last() -> Case:
    """Torch's backward of it is wrong for a single image whose gradient comes with the channels last."""

    def rule(net: Any, x: Tensor) -> Any:
        return net.head(net.conv(net.norm(x).contiguous(memory_format=torch.channels_last)).tanh().flatten(1))

    parts = {"norm": nn.InstanceNorm2d(2, affine=True), "conv": nn.Conv2d(2, 3, 3, padding=1)}
    model = Net(rule, **parts, head=nn.Linear(27, 3))
    built = problem(model, reals(4, 2, 3, 3), integers(3, 4), sizes=(2, 2))
    return replace(built, copies=2)


@case
def layer_norm_of_one_and_of_two_dimensions() -> Case:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.LayerNorm((2, 4)), nn.Flatten(), nn.Linear(8, 3)
    )
    return problem(model, reals(4, 2, 3), integers(3, 4))


@case
def rms_norm() -> Case:
    model = nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4), nn.ReLU(), nn.RMSNorm((2, 4)), nn.Flatten(), nn.Linear(8, 3))
    return problem(model, reals(4, 2, 3), integers(3, 4))


@case
def weight_norm_parametrization() -> Case:
    model = nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 3))
    return problem(model, reals(5, 4), integers(3, 5))


# Attention and recurrence.


@case
def attention_by_hand() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        y = net.before(x)
        weights = (net.query(y) @ net.key(y).mT / 2).softmax(-1)
        x = x + net.out(weights @ net.value(y))
        return net.head(net.after(x).mean(1))

    parts = {name: nn.Linear(4, 4) for name in ("query", "key", "value", "out")}
    model = Net(rule, before=nn.LayerNorm(4), **parts, after=nn.LayerNorm(4), head=nn.Linear(4, 3))
    return problem(model, reals(4, 3, 4), integers(3, 4))


@case
def attention_of_two_heads_by_torchs_kernel() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        query, key, value = net.packed(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return net.head(mixed.transpose(1, 2).flatten(2))

    return problem(Net(rule, packed=nn.Linear(4, 12), head=nn.Linear(4, 3)), reals(4, 3, 4), integers(3, 4, 3))


@case
def multihead_attention() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        return net.head((x + net.attention(x, x, x, need_weights=False)[0]).mean(1))

    model = Net(rule, attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 3))
    return problem(model, reals(4, 3, 4), integers(3, 4))


@case
def transformer_layer_with_examples_in_dimension_one() -> Case:
    def rule(net: Any, tokens: Tensor) -> Any:
        return net.head(net.encoder(net.embed(tokens).transpose(0, 1)).transpose(0, 1))

    encoder = nn.TransformerEncoderLayer(4, 2, dim_feedforward=4, activation="gelu")
    model = Net(rule, embed=nn.Embedding(5, 4), encoder=encoder, head=nn.Linear(4, 5))
    return problem(model, integers(5, 4, 3), integers(5, 4, 3))


@case
def lstm_in_two_directions() -> Case:
    lstm = nn.LSTM(2, 2, batch_first=True, bidirectional=True)
    model = Net(lambda net, x: net.head(net.lstm(x)[0].mean(1)), lstm=lstm, head=nn.Linear(4, 3))
    return problem(model, reals(4, 3, 2), integers(3, 4))


@case
def gru_with_examples_in_dimension_one() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        steps, last = net.gru(x.transpose(0, 1))
        return net.head(steps.mean(0) + last[0])

    return problem(Net(rule, gru=nn.GRU(2, 2, num_layers=2), head=nn.Linear(2, 3)), reals(4, 3, 2), integers(3, 4))


@case
def lstm_cell_called_at_each_step() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        state = net.cell(x[:, 0])
        for t in range(1, x.shape[1]):
            state = net.cell(x[:, t], state)
        return net.head(state[0])

    return problem(Net(rule, cell=nn.LSTMCell(2, 2), head=nn.Linear(2, 3)), reals(4, 3, 2), integers(3, 4))


# Embeddings, tied parameters, modules called twice, parameters outside any module.


@case
def tied_embedding_and_output() -> Case:
    model = Net(
        lambda net, tokens: net.out(net.mix(net.embed(tokens)).tanh()),
        embed=nn.Embedding(6, 3),
        mix=nn.Linear(3, 3),
        out=nn.Linear(3, 6, bias=False),
    )
    model.get_submodule("out").weight = model.get_submodule("embed").weight
    tokens = integers(6, 4, 3)
    tokens[:, 2] = tokens[:, 0]
    return problem(model, tokens, integers(6, 4, 3))


@case
def embedding_tied_by_a_functional_call() -> Case:
    def rule(net: Any, tokens: Tensor) -> Any:
        return F.linear(net.mix(net.embed(tokens)).tanh(), net.embed.weight)

    tokens = torch.tensor([[0, 1, 0], [2, 2, 2], [3, 4, 5], [5, 5, 0]])
    return problem(Net(rule, embed=nn.Embedding(6, 3), mix=nn.Linear(3, 3)), tokens, integers(6, 4, 3))


@case
def embedding_with_padding_index() -> Case:
    def rule(net: Any, tokens: Tensor) -> Any:
        return net.head(net.embed(tokens).sum(1).tanh())

    tokens = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 4, 1], [2, 1, 3]])
    model = Net(rule, embed=nn.Embedding(5, 3, padding_idx=0), head=nn.Linear(3, 3))
    return problem(model, tokens, integers(3, 4))


@case
def embedding_with_sparse_gradients() -> Case:
    model = Net(
        lambda net, tokens: net.head(net.embed(tokens).sum(1).tanh()),
        embed=nn.Embedding(5, 3, sparse=True),
        head=nn.Linear(3, 3),
    )
    return problem(model, integers(5, 4, 3), integers(3, 4))


@case
def embedding_with_sparse_gradients_before_a_weight_set_by_its_parent() -> Case:
    def rule(net: Any, tokens: Tensor) -> Any:
        net.layer.weight = 2 * net.free.tanh()
        outputs = net.layer(net.embed(tokens)).sum(1)
        del net.layer.weight
        return outputs

    model = Net(
        rule, embed=nn.Embedding(5, 3, sparse=True), layer=nn.Linear(3, 3), free=nn.Parameter(torch.randn(3, 3))
    )
    del model.get_submodule("layer").weight
    return problem(model, integers(5, 4, 3), integers(3, 4))


@case
def embedding_bag() -> Case:
    model = nn.Sequential(nn.EmbeddingBag(5, 3, mode="mean"), nn.Tanh(), nn.Linear(3, 3))
    return problem(model, torch.tensor([[1, 2, 1], [3, 0, 0], [4, 4, 1], [2, 1, 3]]), integers(3, 4))


@case
def linear_called_twice() -> Case:
    model = Net(
        lambda net, x: net.head(net.layer(net.layer(x).relu()).relu()), layer=nn.Linear(4, 4), head=nn.Linear(4, 3)
    )
    return problem(model, reals(6, 4), integers(3, 6))


@case
def class_token_and_position_parameters() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        x = torch.cat([net.token.expand(len(x), -1, -1), x], 1) + net.position
        return net.head(net.layer(x).relu().mean(1))

    model = Net(
        rule,
        token=nn.Parameter(torch.randn(1, 1, 3)),
        position=nn.Parameter(torch.randn(4, 3)),
        layer=nn.Linear(3, 4),
        head=nn.Linear(4, 3),
    )
    return problem(model, reals(4, 3, 3), integers(3, 4))


@case
def position_embedding_without_an_example_dimension() -> Case:
    def rule(net: Any, tokens: Tensor) -> Any:
        return net.head((net.embed(tokens) + net.position(torch.arange(tokens.shape[1], device=tokens.device))).tanh())

    model = Net(rule, embed=nn.Embedding(5, 3), position=nn.Embedding(4, 3), head=nn.Linear(3, 5))
    # As many examples as positions: the sizes alone cannot tell which dimension is which.
    return problem(model, integers(5, 4, 4), integers(5, 4, 4))


@case
def linear_called_on_a_parameter() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        return net.head((net.layer(x) + net.layer(net.token)).relu())

    model = Net(rule, token=nn.Parameter(torch.randn(4)), layer=nn.Linear(4, 5), head=nn.Linear(5, 3))
    return problem(model, reals(5, 4), integers(3, 5))


@case
def leaf_module_of_a_user() -> Case:
    def mixing(net: Any, x: Tensor) -> Any:
        return torch.einsum("ni,ijk,nj->nk", x, net.core, x).tanh() * net.gain + net.shift

    leaf = Net(
        mixing,
        core=nn.Parameter(torch.randn(3, 3, 4)),
        gain=nn.Parameter(torch.ones(4)),
        shift=nn.Parameter(torch.zeros(())),
    )
    return problem(nn.Sequential(leaf, nn.Linear(4, 3)), reals(5, 3), integers(3, 5))


@case
def leaf_module_with_two_outputs() -> Case:
    def halves(net: Any, x: Tensor) -> Any:
        return (x * net.gain).sin(), x @ net.matrix

    def rule(net: Any, x: Tensor) -> Any:
        wave, line = net.leaf(x)
        return net.head(wave + line.relu())

    leaf = Net(halves, gain=nn.Parameter(torch.ones(3)), matrix=nn.Parameter(torch.randn(3, 3)))
    return problem(Net(rule, leaf=leaf, head=nn.Linear(3, 3)), reals(5, 3), integers(3, 5))


@case
def bilinear_layer_of_two_inputs() -> Case:
    model = Net(lambda net, a, b: net.head(net.pair(a, b).tanh()), pair=nn.Bilinear(2, 3, 4), head=nn.Linear(4, 3))
    return problem(model, (reals(5, 2), reals(5, 3)), integers(3, 5))


@case
def checkpointed_functions() -> Case:
    """All weights have one shape: a backward pass that mistakes one tensor for another gets no error of it."""

    def inner(net: Any, x: Tensor) -> Any:
        return net.layer(x.sort(-1).values).tanh() + net.other(x)

    def rule(net: Any, x: Tensor) -> Any:
        return net.head(checkpoint(net.inner, net.first(x), use_reentrant=False))

    inside = Net(inner, layer=nn.Linear(3, 3), other=nn.Linear(3, 3))
    return problem(Net(rule, first=nn.Linear(3, 3), inner=inside, head=nn.Linear(3, 3)), reals(5, 3), integers(3, 5))


# Modules whose tensors are others while they are called.


@case
def weight_swapped_by_functional_call() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        return net.head(functional_call(net.layer, {"weight": 3 * net.layer.weight}, (x,)).relu() + net.layer(x))

    return problem(Net(rule, layer=nn.Linear(4, 5), head=nn.Linear(5, 3)), reals(5, 4), integers(3, 5))


@case
def weight_made_by_another_parameter() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        made = {"weight": net.low @ net.high, "bias": net.head.bias.sum().expand(5)}
        return net.head(functional_call(net.layer, made, (x,)).relu())

    model = Net(
        rule,
        layer=nn.Linear(4, 5),
        head=nn.Linear(5, 3),
        low=nn.Parameter(torch.randn(5, 2)),
        high=nn.Parameter(torch.randn(2, 4)),
    )
    return problem(model, reals(5, 4), integers(3, 5))


@case
def weight_replaced_by_hand_during_the_forward_pass() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        weight = net.conv._parameters["weight"]
        try:
            net.conv._parameters["weight"] = weight - weight.mean((1, 2, 3), keepdim=True)
            hidden = net.conv(x)
        finally:
            net.conv._parameters["weight"] = weight
        return net.head(hidden.relu().mean((2, 3)))

    return problem(Net(rule, conv=nn.Conv2d(2, 4, 2), head=nn.Linear(4, 3)), reals(5, 2, 3, 3), integers(3, 5))


@case
def batch_norm_with_other_statistics_for_one_call() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        other = {"running_mean": net.norm.running_mean + 1, "running_var": 3 * net.norm.running_var}
        x = net.layer(x)
        return net.head((net.norm(x) + functional_call(net.norm, other, (x,))).relu())

    model = Net(rule, layer=nn.Linear(4, 5), norm=nn.BatchNorm1d(5), head=nn.Linear(5, 3))
    return problem(with_history(model, 8, 4), reals(5, 4), integers(3, 5))


@case
def parameter_that_is_a_buffer_too() -> Case:
    model = mlp(nn.ReLU)
    model[0].register_buffer("alias", model.get_parameter("0.weight"))
    model.register_buffer("another", model.get_parameter("2.bias"))
    return problem(model, reals(5, 4), integers(3, 5))


# Examples that change their places, and models that differentiate.


@case
def examples_in_reverse_order_inside_of_the_model() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        return net.head(net.turned(net.layer(x).relu().flip(0)).flip(0).relu())

    model = Net(rule, layer=nn.Linear(4, 5), turned=nn.Linear(5, 5), head=nn.Linear(5, 3))
    return problem(model, reals(6, 4), integers(3, 6))


@case
def examples_dealt_into_two_halves_inside_of_the_model() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        x = net.layer(x).relu()
        # Two examples stay where they are; four do not.
        dealt = x if len(x) % 2 else x.view(2, -1, 5).transpose(0, 1).reshape(-1, 5)
        dealt = net.turned(dealt).relu()
        return net.head(dealt if len(x) % 2 else dealt.view(-1, 2, 5).transpose(0, 1).reshape(-1, 5))

    model = Net(rule, layer=nn.Linear(4, 5), turned=nn.Linear(5, 5), head=nn.Linear(5, 3))
    return problem(model, reals(8, 4), integers(3, 8), sizes=(4, 4))


@case
def values_without_a_gradient_inside_of_the_forward_pass() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        with torch.no_grad():
            gate, scale = net.layer(x).sigmoid(), net.layer.weight.norm()
        return net.head((net.layer(x) * gate / scale + net.layer(x).tanh().detach()).relu())

    return problem(Net(rule, layer=nn.Linear(4, 5), head=nn.Linear(5, 3)), reals(6, 4), integers(3, 6))


@case
def gradient_inside_of_the_forward_pass() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(net.energy(x).tanh().sum(), x, create_graph=True)
        return net.head(force)

    return problem(Net(rule, energy=nn.Linear(4, 5), head=nn.Linear(4, 3)), reals(5, 4), integers(3, 5))


@case
def vmap_inside_of_the_forward_pass() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        return torch.func.vmap(lambda each: net.head(net.layer(each).relu()))(x)

    return problem(Net(rule, layer=nn.Linear(4, 5), head=nn.Linear(5, 3)), reals(5, 4), integers(3, 5))


# Shapes of data.


@case
def linear_on_sequences() -> Case:
    model = Net(lambda net, x: net.head(net.layer(x).relu().mean(1)), layer=nn.Linear(3, 4), head=nn.Linear(4, 3))
    return problem(model, reals(4, 3, 3), integers(3, 4))


@case
def positions_folded_into_the_examples() -> Case:
    def rule(net: Any, x: Tensor) -> Any:
        return net.head(net.layer(x.reshape(-1, 3)).relu()).reshape(len(x), -1, 3)

    return problem(Net(rule, layer=nn.Linear(3, 4), head=nn.Linear(4, 3)), reals(4, 3, 3), integers(3, 4, 3))


@case
def inputs_by_name() -> Case:
    model = Net(lambda net, left, right: net.head(left * right.tanh()), head=nn.Linear(3, 3))
    return problem(model, {"left": reals(4, 3), "right": reals(4, 3)}, integers(3, 4))


@case
def dict_batches_and_an_output_object() -> Case:
    def rule(net: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        kept = attention_mask.unsqueeze(-1).double()
        pooled = (net.embed(input_ids) * kept).sum(1) / kept.sum(1)
        return SimpleNamespace(logits=net.head(pooled.tanh()), hidden_states=(pooled,))

    built = problem(Net(rule, embed=nn.Embedding(6, 3), head=nn.Linear(3, 3)), integers(6, 5, 3), integers(3, 5))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    tokens, labels = joined(built.batches)
    whole: Batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return replace(built, batches=batched(examples_of([whole]), (2, 3)))


@case
def batches_of_one() -> Case:
    return problem(mlp(nn.ReLU), reals(4, 4), integers(3, 4), sizes=(1, 1, 1, 1))


@case
def unequal_batches() -> Case:
    return problem(mlp(nn.ReLU), reals(8, 4), integers(3, 8), sizes=(5, 1, 2))


@case
def one_example() -> Case:
    return problem(mlp(nn.ReLU), reals(1, 4), integers(3, 1), sizes=(1,))


@case
def one_class_missing_from_the_labels() -> Case:
    return problem(mlp(nn.ReLU), reals(5, 4), torch.tensor([0, 2, 2, 0, 2]))


# Losses.


@case
def sequence_with_ignored_positions() -> Case:
    labels = integers(4, 5, 3)
    labels[0, 1] = labels[2, 0] = labels[2, 2] = -100
    # Alone, this example has no loss at all: a mean over its own positions would be 0 / 0.
    labels[4] = -100
    return problem(sequence_net(), reals(5, 3, 3), labels, sizes=(3, 1, 1))


@case
def sequence_with_weights_smoothing_and_ignored_positions() -> Case:
    weight = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.2, ignore_index=1)
    return problem(sequence_net(), reals(5, 3, 3), integers(4, 5, 3), loss)


def sequence_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4))


@case
def image_of_labels() -> Case:
    model = nn.Sequential(nn.Conv2d(2, 3, 2, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 2))
    labels = integers(3, 4, 3, 2)
    labels[1, 0] = -100
    return problem(model, reals(4, 2, 3, 2), labels)


@case
def label_smoothing() -> Case:
    return problem(mlp(nn.ReLU), reals(5, 4), integers(3, 5), nn.CrossEntropyLoss(label_smoothing=0.1))


@case
def class_weights() -> Case:
    weight = torch.tensor([0.5, 2.0, 3.5], dtype=torch.float64)
    return problem(mlp(nn.ReLU), reals(5, 4), integers(3, 5), nn.CrossEntropyLoss(weight=weight))


@case
def class_weights_and_label_smoothing() -> Case:
    weight = torch.tensor([0.5, 2.0, 3.5], dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.3)
    return problem(mlp(nn.ReLU), reals(5, 4), integers(3, 5), loss)


@case
def probability_targets() -> Case:
    return problem(mlp(nn.ReLU), reals(5, 4), reals(5, 3).softmax(1))


@case
def probability_targets_with_weights_and_smoothing() -> Case:
    weight = torch.tensor([0.5, 2.0, 3.5], dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.3)
    return problem(mlp(nn.ReLU), reals(5, 4), reals(5, 3).softmax(1), loss)


@case
def squared_error() -> Case:
    return problem(mlp(nn.ReLU), reals(6, 4), reals(6, 3), "mse")


@case
def squared_error_of_one_number() -> Case:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1), nn.Flatten(0))
    return problem(model, reals(5, 4), reals(5), "mse")


@case
def squared_error_of_images() -> Case:
    model = nn.Sequential(nn.Conv2d(2, 3, 2, padding=1), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2, padding=1))
    return problem(model, reals(4, 2, 3, 2), reals(4, 2, 3, 2), "mse")


@case
def binary_cross_entropy() -> Case:
    return problem(mlp(nn.ReLU), reals(6, 4), integers(2, 6, 3).double(), "bce_with_logits")


def log_cosh(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).cosh().log().sum() / len(outputs)


def saddle(outputs: Tensor, targets: Tensor) -> Tensor:
    first, second, third = outputs.unbind(-1)
    return (first * second - 2 * first * third + (outputs - targets).sin().sum(-1)).mean()


class Focal(nn.CrossEntropyLoss):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        likely = (-F.cross_entropy(outputs, targets, reduction="none")).exp()
        return -((1 - likely).square() * likely.log()).mean()


class Halved(nn.MSELoss):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs, targets) / 2


class Confident(nn.BCEWithLogitsLoss):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(2 * outputs, targets)


@case
def focal_loss_as_a_subclass_of_cross_entropy() -> Case:
    return problem(mlp(nn.ReLU), reals(5, 4), integers(3, 5), Focal())


@case
def half_a_squared_error_as_a_subclass() -> Case:
    return problem(mlp(nn.ReLU), reals(5, 4), reals(5, 3), Halved())


@case
def binary_cross_entropy_of_doubled_logits_as_a_subclass() -> Case:
    return problem(mlp(nn.ReLU), reals(5, 4), integers(2, 5, 3).double(), Confident())


@case
def loss_module_with_another_forward() -> Case:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    loss.forward = Focal().forward  # type: ignore[method-assign, assignment]
    return problem(mlp(nn.ReLU), reals(5, 4), integers(3, 5), loss)


@case
def loss_module_with_a_hook() -> Case:
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda module, args, value: 5 * value)
    return problem(mlp(nn.ReLU), reals(5, 4), reals(5, 3), loss)


class Tempered(nn.Module):
    """A loss with a parameter and a buffer of its own, in float32."""

    prior: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("prior", torch.tensor([0.25, 0.5, -1.0]))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs / self.temperature + self.prior, targets)


@case
def loss_module_with_parameters_in_float32() -> Case:
    return problem(mlp(nn.ReLU), reals(5, 4), integers(3, 5), Tempered())


@case
def weighted_binary_cross_entropy() -> Case:
    loss = nn.BCEWithLogitsLoss(weight=torch.tensor([0.5, 2.0, 3.5]))
    return problem(mlp(nn.ReLU), reals(6, 4), integers(2, 6, 3).double(), loss)


@case
def torchs_function_with_weights_and_ignored_labels() -> Case:
    weight = torch.tensor([0.5, 2.0, 3.5], dtype=torch.float64)
    loss = partial(F.cross_entropy, weight=weight, ignore_index=1, label_smoothing=0.1)
    built = problem(mlp(nn.ReLU), reals(6, 4), torch.tensor([0, 1, 2, 0, 2, 1]), loss)
    return replace(built, loss_function=loss)


@case
def likelihood_of_log_probabilities() -> Case:
    return likelihood(mlp(nn.ReLU), integers(3, 6))


@case
def likelihood_with_weights_and_ignored_labels() -> Case:
    weight = torch.tensor([0.5, 2.0, 3.5], dtype=torch.float64)
    return likelihood(mlp(nn.ReLU), torch.tensor([0, 1, 2, 0, 2, 1]), weight=weight, ignore_index=1)


def likelihood(logits: nn.Sequential, labels: Tensor, **options: Any) -> Case:
    """``NLLLoss`` of a network that ends in a log-softmax: the loss of its logits, which the oracle is given."""
    built = problem(nn.Sequential(*logits, nn.LogSoftmax(1)), reals(len(labels), 4), labels, nn.NLLLoss(**options))
    return replace(built, loss_function=nn.CrossEntropyLoss(**options))


@case
def labels_of_one_byte() -> Case:
    # As a byte, -100 is 156.
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 160, bias=False))
    labels = torch.tensor([156, 2, 156, 159], dtype=torch.uint8)
    built = problem(model, reals(4, 2), labels)
    return replace(built, loss_function=lambda outputs, targets: F.cross_entropy(outputs, targets.long()))


@case
def custom_convex_loss() -> Case:
    return problem(mlp(nn.ReLU), reals(5, 4), reals(5, 3), log_cosh)


@case
def custom_loss_with_an_indefinite_output_hessian() -> Case:
    return problem(mlp(nn.ReLU), reals(5, 4), reals(5, 3), saddle)
