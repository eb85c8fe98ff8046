"""Find every rescaling of a small residual network, and use them.

A ResNet-20 of 8 to 32 channels, whose shortcuts are slices padded with zeros, is trained briefly on the 8 x 8 digits
that ship with scikit-learn. Its rescalings are printed as a table and drawn; random ones do not change its outputs;
BatchNorm is folded; the network is rescaled to the smallest Hessian trace, and to a canonical form in which rescaled
copies are equal.
"""

import os

import torch
import torch.nn.functional as F
from common import parse_arguments
from torch import Tensor, nn

import saltflat
from saltflat.datasets import read_data
from saltflat.symmetry import canonicalize, equal_up_to_rescaling

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
EPOCHS = 1 if QUICK else 6
MEASURED = 32 if QUICK else 128
BATCH = 64
LEARNING_RATE = 1e-2
MEASURES = ("hessian_trace", "minimum_sharpness", "minimum_unit_sharpness")


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride, self.more = outputs // inputs, outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        # The shortcut has no parameters: every other pixel, and channels of zeros.
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return F.relu(hidden + F.pad(shortcut, (0, 0, 0, 0, self.more // 2, self.more // 2)))


def make_stage(inputs: int, outputs: int, blocks: int) -> nn.Sequential:
    return nn.Sequential(Block(inputs, outputs), *(Block(outputs, outputs) for _ in range(blocks - 1)))


class ResNet(nn.Module):
    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = make_stage(width, width, blocks)
        self.layer2 = make_stage(width, 2 * width, blocks)
        self.layer3 = make_stage(2 * width, 4 * width, blocks)
        self.linear = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def train(model: nn.Module, inputs: Tensor, labels: Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    model.eval()


@torch.no_grad()
def compute_output_difference(one: nn.Module, two: nn.Module, images: Tensor) -> float:
    """Return the largest difference between the outputs of two networks, relative to the largest output."""
    before, after = one(images), two(images)
    return float((after - before).abs().max() / before.abs().max())


@torch.no_grad()
def compute_weight_distance(one: nn.Module, two: nn.Module) -> float:
    """Return the largest difference between the weights of two networks."""
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def main() -> None:
    out, seed = parse_arguments(
        __doc__,
        quick="there is one epoch of training, and 32 examples are measured",
        seed="weights, batches and rescalings",
    )

    inputs, labels = read_data("digits")
    test_inputs, test_labels = read_data("digits", split="test")
    torch.manual_seed(seed)
    model = ResNet()
    train(model, inputs, labels, seed)
    model.double()
    images = test_inputs.double()
    with torch.no_grad():
        right = float((model(images).argmax(dim=1) == test_labels).double().mean())
    print(f"A ResNet-20 of 8 to 32 channels, accuracy {right:.1%} on the test set\n")

    example = images[:2]
    group = saltflat.find_symmetries(model, example)
    print(f"{group}\n")
    group.plot().savefig(out / "graph.png")
    for draw in range(seed, seed + 3):
        other = saltflat.rescale(model, example, seed=draw)
        print(
            f"Rescaled at random: weights move by up to {compute_weight_distance(model, other):.3g}, "
            f"outputs by {compute_output_difference(model, other, images):.0e} of the largest"
        )

    folded = saltflat.fold(model)
    group = saltflat.find_symmetries(folded, example)
    off = compute_output_difference(model, folded, images)
    print(f"\nBatchNorm folded into the convolutions, outputs {off:.0e} off\n\n{group}\n")
    group.plot().savefig(out / "graph_folded.png")

    data = inputs[:MEASURED].double(), labels[:MEASURED]
    networks = {
        "as trained": model,
        "folded": folded,
        "folded, rescaled at random": (rescaled := saltflat.rescale(folded, example, seed=seed)),
        "folded, rebalanced": saltflat.rebalance(folded, data),
    }
    reports = {
        name: saltflat.measure(each, data, measures=MEASURES, certificate=False) for name, each in networks.items()
    }
    print(f"{'':27}" + "".join(f"{name:>24}" for name in MEASURES) + f"{'outputs off by':>18}")
    for name, report in reports.items():
        values = "".join(f"{reading.value:24.4g}" for reading in report.values())
        print(f"{name:27}{values}{compute_output_difference(model, networks[name], images):18.0e}")
    for note in reports["as trained"]["minimum_unit_sharpness"].notes:
        print(f"\nNot a minimum but a limit, as trained: {note}")

    forms = [canonicalize(each, example) for each in (folded, rescaled)]
    print(
        f"\nThe folded network and its rescaled copy are {compute_weight_distance(folded, rescaled):.3g} apart, "
        f"in canonical form {compute_weight_distance(*forms):.0e}"
    )
    print(f"The same up to rescaling: {equal_up_to_rescaling(folded, rescaled, example)}")
    with torch.no_grad():
        rescaled.get_parameter("linear.weight")[0, 0] *= 1.001
    print(f"And with one weight 0.1 % larger: {equal_up_to_rescaling(folded, rescaled, example)}")
    print(f"\nPictures of the rescalings are in {out}: graph.png, and graph_folded.png without BatchNorm.")


if __name__ == "__main__":
    main()
