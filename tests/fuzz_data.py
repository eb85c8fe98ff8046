"""Random losses and random forms of the same data, one small function each; the plainest stands first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cases import Inputs, LossFunction, log_cosh, mean_over_examples, rows
from fuzz_blocks import Draw, Shape, size_of
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import saltflat.engine.losses


@dataclass(frozen=True)
class Loss:
    """A loss as a user passes it, and as a function of the outputs and targets of all the data.

    Attributes:
        targets: of all examples.
        logs: whether the model has to end in log-probabilities.
        refused: whether the package may refuse it.
    """

    given: Any
    whole: LossFunction
    targets: Tensor
    logs: bool = False
    refused: bool = False


LOSSES: dict[str, Callable[[Draw, int, Shape], Loss]] = {}
# Losses that need many classes, and the widths of the others.
CLASSES = {"labels_of_a_byte": 160}


def loss(build: Callable[[Draw, int, Shape], Loss]) -> Callable[[Draw, int, Shape], Loss]:
    LOSSES[build.__name__] = build
    return build


def labels(count: int, shape: Shape) -> Tensor:
    return torch.randint(shape[-1], (count, *shape[:-1]))


def reals(count: int, shape: Shape) -> Tensor:
    return torch.randn(count, *shape, dtype=torch.float64)


def last_axis(function: LossFunction) -> LossFunction:
    """Torch's losses of classes want them at the second axis; by its name the package finds them at the last."""
    return lambda outputs, targets: function(outputs.movedim(-1, 1), targets)


def positive(count: int) -> Tensor:
    return torch.rand(count, dtype=torch.float64) + 0.5


@loss
def cross_entropy(draw: Draw, count: int, shape: Shape) -> Loss:
    return Loss("cross_entropy", last_axis(F.cross_entropy), labels(count, shape))


@loss
def squared_error(draw: Draw, count: int, shape: Shape) -> Loss:
    given = draw.one_of(["mse", nn.MSELoss(), F.mse_loss, saltflat.engine.losses.SquaredError()])
    return Loss(given, F.mse_loss, reals(count, shape))


@loss
def squared_error_of_whole_numbers(draw: Draw, count: int, shape: Shape) -> Loss:
    kind = draw.one_of([torch.long, torch.uint8, torch.float32])
    return Loss("mse", lambda o, t: F.mse_loss(o, t.double()), torch.randint(3, (count, *shape)).to(kind))


@loss
def binary_cross_entropy(draw: Draw, count: int, shape: Shape) -> Loss:
    whole = F.binary_cross_entropy_with_logits
    targets = torch.randint(2, (count, *shape)).double() if draw.flag() else torch.rand(count, *shape).double()
    return Loss(draw.one_of(["bce_with_logits", nn.BCEWithLogitsLoss()]), whole, targets)


@loss
def binary_cross_entropy_of_whole_numbers(draw: Draw, count: int, shape: Shape) -> Loss:
    kind = draw.one_of([torch.long, torch.uint8, torch.int32, torch.bool])
    targets = torch.randint(2, (count, *shape)).to(kind)
    return Loss(
        "bce_with_logits",
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.double()),
        targets,
        refused=kind == torch.bool,
    )


@loss
def binary_cross_entropy_with_positive_weights(draw: Draw, count: int, shape: Shape) -> Loss:
    given = nn.BCEWithLogitsLoss(pos_weight=positive(shape[-1]))
    return Loss(given, given, torch.randint(2, (count, *shape)).double())


@loss
def cross_entropy_with_options(draw: Draw, count: int, shape: Shape) -> Loss:
    given = nn.CrossEntropyLoss(
        weight=draw.one_of([None, positive(shape[-1])]),
        label_smoothing=draw.one_of([0.0, 0.2]),
        ignore_index=draw.one_of([-100, 1, -1]),
    )
    if len(shape) > 1:  # as torch wants it: classes second
        return (
            Loss(given, given, torch.randint(shape[0], (count, *shape[1:])))
            if given.weight is None
            else Loss("cross_entropy", last_axis(F.cross_entropy), labels(count, shape))
        )
    return Loss(given, given, with_some(labels(count, shape), given.ignore_index))


def with_some(targets: Tensor, value: int) -> Tensor:
    """Labels of which the last is ``value``."""
    return targets if len(targets) < 2 else torch.cat([targets[:-1], torch.full_like(targets[-1:], value)])


@loss
def ignored_labels(draw: Draw, count: int, shape: Shape) -> Loss:
    targets = with_some(labels(count, shape), -100)
    return Loss("cross_entropy", last_axis(F.cross_entropy), targets)


@loss
def narrow_labels(draw: Draw, count: int, shape: Shape) -> Loss:
    kind = draw.one_of([torch.int32, torch.uint8, torch.int16, torch.int8])
    given = draw.one_of(["cross_entropy", nn.CrossEntropyLoss()]) if len(shape) == 1 else "cross_entropy"
    whole = last_axis(F.cross_entropy)
    return Loss(given, lambda o, t: whole(o, t.long()), labels(count, shape).to(kind))


@loss
def labels_of_a_byte(draw: Draw, count: int, shape: Shape) -> Loss:
    """Class 156 of a byte is -100 modulo 256."""
    targets = torch.cat([torch.tensor([156]), torch.randint(shape[-1], (count - 1,))]).to(torch.uint8)
    return Loss("cross_entropy", lambda o, t: F.cross_entropy(o, t.long()), targets)


@loss
def probabilities(draw: Draw, count: int, shape: Shape) -> Loss:
    kinds: list[Any] = ["cross_entropy", nn.CrossEntropyLoss(label_smoothing=0.1)]
    given = draw.one_of(kinds) if len(shape) == 1 else kinds[0]
    whole: LossFunction = F.cross_entropy if isinstance(given, str) else given
    soft = reals(count, shape).softmax(-1)
    if len(shape) == 1:
        return Loss(given, whole, soft)
    return Loss(given, lambda o, t: F.cross_entropy(o.movedim(-1, 1), t.movedim(-1, 1)), soft)


@loss
def negative_log_likelihood(draw: Draw, count: int, shape: Shape) -> Loss:
    given = nn.NLLLoss(weight=draw.one_of([None, positive(shape[-1])]), ignore_index=draw.one_of([-100, 1]))
    flat = size_of(shape[:-1]) if len(shape) > 1 else 0
    if flat:
        return Loss("cross_entropy", last_axis(F.cross_entropy), labels(count, shape))
    # Log-probabilities are their own logits, and the curvature is that of the softmax.
    whole = partial(F.cross_entropy, weight=given.weight, ignore_index=given.ignore_index)
    targets = with_some(labels(count, shape), given.ignore_index) if draw.flag() else labels(count, shape)
    return Loss(given, whole, targets, logs=True)


def huber_of_sums(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.huber_loss(outputs.flatten(1).sum(1), targets.flatten(1).sum(1))


def bilinear(outputs: Tensor, targets: Tensor) -> Tensor:
    """With an indefinite second derivative."""
    flat = outputs.flatten(1)
    return (flat[:, 0] * flat[:, -1] + (outputs - targets).flatten(1).sin().sum(1)).mean()


@loss
def function(draw: Draw, count: int, shape: Shape) -> Loss:
    beta = partial(F.smooth_l1_loss, beta=0.5)
    functions: list[LossFunction] = [log_cosh, huber_of_sums, bilinear, beta, lambda o, t: (o - t).pow(4).mean()]
    given = draw.one_of(functions)
    return Loss(given, mean_over_examples(given), reals(count, shape))


@loss
def function_of_labels(draw: Draw, count: int, shape: Shape) -> Loss:
    def plain(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o.flatten(0, -2), t.flatten())

    def smooth(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o.flatten(0, -2), t.flatten(), label_smoothing=0.1)

    def margin(o: Tensor, t: Tensor) -> Tensor:
        return -(o.flatten(0, -2).softmax(-1).gather(1, t.reshape(-1, 1))).mean()

    given = draw.one_of([plain, smooth, margin])
    return Loss(given, mean_over_examples(given), labels(count, shape))


class Focal(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(input.flatten(0, -2), target.flatten(), reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()


class Quartic(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return (input - target).pow(4).mean()


class Tempered(nn.BCEWithLogitsLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input / 2, target)


class Same(nn.CrossEntropyLoss):
    """A subclass with nothing of its own."""


@loss
def subclass(draw: Draw, count: int, shape: Shape) -> Loss:
    given = draw.one_of([Focal(), Quartic(), Tempered()])
    if isinstance(given, Focal):
        return Loss(given, given, labels(count, shape))
    return Loss(given, given, torch.rand(count, *shape).double())


@loss
def subclass_with_weights(draw: Draw, count: int, shape: Shape) -> Loss:
    """One example at a time the weights of the classes cancel: refuse, or know better."""
    if len(shape) > 1:
        return Loss("cross_entropy", last_axis(F.cross_entropy), labels(count, shape))
    given = Same(weight=positive(shape[-1]))
    return Loss(given, given, labels(count, shape), refused=True)


@loss
def other_module(draw: Draw, count: int, shape: Shape) -> Loss:
    given = draw.one_of(
        [nn.SmoothL1Loss(), nn.HuberLoss(delta=0.7), nn.PoissonNLLLoss(), nn.L1Loss(), nn.MultiLabelSoftMarginLoss()]
    )
    targets = torch.randint(2, (count, *shape)).double()
    return Loss(given, mean_over_examples(given), targets)


class WithTemperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy((outputs / self.temperature).flatten(0, -2), targets.flatten())


@loss
def module_with_a_parameter(draw: Draw, count: int, shape: Shape) -> Loss:
    given = WithTemperature()
    return Loss(given, mean_over_examples(given), labels(count, shape))


@loss
def sum_of_the_examples(draw: Draw, count: int, shape: Shape) -> Loss:
    given = nn.MSELoss(reduction="sum")
    return Loss(given, mean_over_examples(given), reals(count, shape), refused=True)


# Forms of data.


@dataclass(frozen=True)
class Form:
    """Data as a user passes it.

    Attributes:
        ordered: whether every pass has the examples in the same order.
        refused: whether the package may refuse it.
    """

    data: Any
    ordered: bool = True
    refused: bool = False


FORMS: dict[str, Callable[[Draw, Inputs, Tensor], Form]] = {}


def form(build: Callable[[Draw, Inputs, Tensor], Form]) -> Callable[[Draw, Inputs, Tensor], Form]:
    FORMS[build.__name__] = build
    return build


class Examples(Dataset[Any]):
    """Single examples; labels as numbers where they are numbers."""

    def __init__(self, inputs: Inputs, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, n: int) -> Any:
        return rows(self.inputs, n), self.targets[n]  # type: ignore[arg-type]


class Streamed(IterableDataset[Any]):
    def __init__(self, examples: Dataset[Any]) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[Any]:
        return (self.examples[n] for n in range(len(self.examples)))  # type: ignore[arg-type]


def doubled(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: doubled(value) for key, value in part.items()}
    if isinstance(part, tuple | list):
        return tuple(doubled(value) for value in part)
    return 2 * part if part.is_floating_point() else part


class Doubling(DataLoader[Any]):
    """A loader that does something of its own to what it loads."""

    def __iter__(self) -> Any:
        for inputs, targets in super().__iter__():
            yield doubled(inputs), targets


class Halving(DataLoader[Any]):
    """A loader that leaves out its last batch."""

    def __iter__(self) -> Any:
        batches = list(super().__iter__())
        yield from batches[: max(1, len(batches) - 1)]


def doubling_collate(examples: Sequence[Any]) -> Any:
    inputs, targets = default_collate(list(examples))
    return doubled(inputs), targets


class Backwards(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter([*range(self.count - 1, -1, -1), 0])

    def __len__(self) -> int:
        return self.count + 1


class EvenOnly(RandomSampler):
    """A sampler that passes for a random one."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, len(self.data_source), 2))


class Buckets(Sampler[list[int]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        yield [self.count - 1]
        yield from ([n] if n == 0 else [n, 0] for n in range(self.count - 1))

    def __len__(self) -> int:
        return self.count


class Again:
    """Anything that can be iterated over again."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def cut(inputs: Inputs, targets: Tensor, size: int) -> list[Any]:
    return [(rows(inputs, slice(n, n + size)), targets[n : n + size]) for n in range(0, len(targets), size)]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@form
def tensors(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    return Form((inputs, targets))


@form
def list_of_batches(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    return Form(cut(inputs, targets, draw.integer(1, 4)))


@form
def iterable(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    return Form(Again([(rows(inputs, slice(0, 1)), targets[:1]), (rows(inputs, slice(1, None)), targets[1:])]))


@form
def dataset(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    return Form(TensorDataset(inputs, targets) if isinstance(inputs, Tensor) else Examples(inputs, targets))


@form
def loader(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    return Form(DataLoader(Examples(inputs, targets), draw.integer(1, 4), drop_last=draw.flag() and len(targets) >= 4))


@form
def shuffled_loader(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    return Form(DataLoader(Examples(inputs, targets), 3, shuffle=True, generator=generator()), ordered=False)


@form
def loader_subclass(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    kind, shuffle = draw.one_of([Doubling, Halving]), draw.flag()
    data = kind(Examples(inputs, targets), 3, shuffle=shuffle, generator=generator())
    return Form(data, ordered=not shuffle, refused=shuffle)


@form
def collated(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    shuffle = draw.flag()
    data = DataLoader(Examples(inputs, targets), 3, shuffle=shuffle, collate_fn=doubling_collate, generator=generator())
    return Form(data, ordered=not shuffle)


@form
def sampler(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    examples = Examples(inputs, targets)
    kinds: list[Callable[[], Sampler[int]]] = [
        lambda: Backwards(len(examples)),
        lambda: EvenOnly(examples),
        lambda: SequentialSampler(examples),
    ]
    return Form(DataLoader(examples, 3, sampler=draw.one_of(kinds)()))


@form
def random_sampler(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    examples = Examples(inputs, targets)
    half = range(len(examples) // 2 + 1)
    kinds: list[Callable[[], Sampler[int]]] = [
        lambda: SubsetRandomSampler(half, generator()),
        lambda: WeightedRandomSampler([1.0] * len(examples), len(examples), generator=generator()),
        lambda: RandomSampler(examples, replacement=True, generator=generator()),
    ]
    return Form(DataLoader(examples, 2, sampler=draw.one_of(kinds)()), ordered=False, refused=True)


@form
def batch_sampler(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    examples = Examples(inputs, targets)
    if draw.flag():
        return Form(DataLoader(examples, batch_sampler=Buckets(len(examples))))
    random = BatchSampler(RandomSampler(examples, generator=generator()), 2, drop_last=False)
    return Form(DataLoader(examples, batch_sampler=random), ordered=False, refused=True)


@form
def streamed(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    return Form(DataLoader(Streamed(Examples(inputs, targets)), 3))


@form
def batched_by_the_dataset(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    return Form(DataLoader(cut(inputs, targets, 3), batch_size=None, shuffle=False))  # type: ignore[arg-type]


@form
def batches_shuffled(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    """The dataset's examples are whole batches, which come in any order."""
    batches: Any = cut(inputs, targets, 3)
    data: DataLoader[Any] = DataLoader(batches, batch_size=None, shuffle=True, generator=generator())
    return Form(data, ordered=False, refused=True)


@form
def laid_out_backwards(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    """Tensors whose memory is not in the usual order."""

    def turned(x: Any) -> Any:
        if isinstance(x, Tensor):
            axes = tuple(range(x.dim() - 1, -1, -1))
            return x.permute(axes).contiguous().permute(axes)
        return {k: turned(v) for k, v in x.items()} if isinstance(x, dict) else tuple(map(turned, x))

    return Form((turned(inputs), turned(targets)))


@form
def dicts(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    if not isinstance(inputs, dict):
        return Form(cut(inputs, targets, 3))
    return Form([{**part, "labels": labels} for part, labels in cut(inputs, targets, 3)])


@form
def inputs_that_require_gradients(draw: Draw, inputs: Inputs, targets: Tensor) -> Form:
    def free(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.clone().requires_grad_() if x.is_floating_point() else x
        return {k: free(v) for k, v in x.items()} if isinstance(x, dict) else tuple(map(free, x))

    return Form((free(inputs), targets))
