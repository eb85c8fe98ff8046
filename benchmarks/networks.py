"""The three networks of the comparison, and the plain PyTorch baseline."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

CLASSES = 10


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES),
    )  # fmt: skip


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        out: Tensor = self.relu2(branch + self.shortcut(x))
        return out


def resnet20() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width_in = 16
    for width in (16, 32, 64):
        for block in range(3):
            layers.append(Block(width_in, width, stride=2 if width > 16 and block == 0 else 1))
            width_in = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    # Fresh running statistics (mean 0, variance 1) would hide an error in how they are used.
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(32, 3, 32, 32))
    return model


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    examples: int


NETWORKS = {
    "mlp": Network(mlp, (784,), 1000),
    "lenet": Network(lenet, (3, 32, 32), 256),
    "resnet20": Network(resnet20, (3, 32, 32), 64),
}


@dataclass(frozen=True)
class Problem:
    """A network in eval mode with one batch of labeled examples, for softmax cross-entropy."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    def first(self, examples: int) -> "Problem":
        return Problem(self.model, self.inputs[:examples], self.targets[:examples])

    def chunks(self, examples: int) -> Iterator[tuple[Tensor, Tensor]]:
        step = examples or len(self.inputs)
        for start in range(0, len(self.inputs), step):
            yield self.inputs[start : start + step], self.targets[start : start + step]


def problem(name: str, examples: int | None = None, device: str = "cpu", seed: int = 0) -> Problem:
    """Return the same weights, inputs and labels for every competitor and in every process."""
    network = NETWORKS[name]
    torch.manual_seed(seed)
    model = network.build().eval().to(device)
    n = examples or network.examples
    return Problem(model, torch.randn(n, *network.shape).to(device), torch.randint(CLASSES, (n,)).to(device))


class Setting(NamedTuple):
    """How a competitor is run: examples at a time (0: all), and which of its methods if it has several."""

    chunk: int = 0
    way: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.way, f"chunk {self.chunk}" if self.chunk else "") if part)


Values = Mapping[str, Tensor]
Call = Callable[[], Values]


def traced(diagonal: Values, statistic: str) -> Values:
    return {k: v.sum() for k, v in diagonal.items()} if statistic == "curvature_trace" else diagonal


def difference(values: Values, reference: Values) -> float:
    """Return the largest relative difference in norm over the parameters, or of the totals if there is only a total."""
    if values.keys() != reference.keys():
        values, reference = ({"": torch.stack([v.sum() for v in side.values()]).sum()} for side in (values, reference))
    pairs = [(values[k].double(), reference[k].double()) for k in reference]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-300)) for a, b in pairs)


def forward_backward(task: Problem, statistic: str, setting: Setting) -> Call:
    model = deepcopy(task.model)
    names, parameters = zip(*model.named_parameters(), strict=True)

    def call() -> Values:
        loss = nn.functional.cross_entropy(model(task.inputs), task.targets)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    return call


def plain_vmap(task: Problem, statistic: str, setting: Setting) -> Call:
    model = deepcopy(task.model)
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    buffers = dict(model.named_buffers())
    identity = torch.eye(CLASSES, device=task.inputs.device)

    def squares(example: Tensor) -> dict[str, Tensor]:
        def outputs(weights: dict[str, Tensor]) -> Tensor:
            row: Tensor = functional_call(model, (weights, buffers), (example[None],))[0]
            return row

        logits, pull_back, *_ = vjp(outputs, parameters)
        p = logits.softmax(0)
        # diag(p) - p p' = S S' with columns sqrt(p_k) (e_k - p).
        (gradients,) = vmap(pull_back)(p.sqrt()[:, None] * (identity - p))
        return {k: g.square().sum(0) for k, g in gradients.items()}

    def call() -> Values:
        total = {k: torch.zeros_like(v) for k, v in parameters.items()}
        for examples, _ in task.chunks(setting.chunk):
            for k, v in vmap(squares)(examples).items():
                total[k] += v.sum(0)
        return traced({k: v / len(task.inputs) for k, v in total.items()}, statistic)

    return call
