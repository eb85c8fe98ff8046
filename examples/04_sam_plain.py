"""Train one network twice, with SGD and with SAM around it, in a plain loop, and measure how flat both minima are.

The data are the 8 x 8 digits that ship with scikit-learn. SAM changes two lines of the loop: the optimizer is wrapped,
and its step receives a closure, because it computes the gradient twice.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import saltflat
from saltflat.datasets import read_data
from saltflat.training import SAM

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
EPOCHS = 3 if QUICK else 20
MEASURED = 100 if QUICK else 600  # training examples
BATCH = 64
LEARNING_RATE = 0.1
RHO = 0.1
MEASURES = ("hessian_trace", "normalized_sharpness")


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
    )


def train(model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor, seed: int) -> None:
    """Train with any optimizer: a scheduler on SAM acts on the SGD inside it."""
    generator = torch.Generator().manual_seed(seed)
    steps = EPOCHS * -(-len(labels) // BATCH)
    schedule = OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps)
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):

            def closure(batch: Tensor = batch) -> float:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs[batch]), labels[batch])
                loss.backward()
                return loss.item()

            optimizer.step(closure)
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    return float((model(inputs).argmax(dim=1) == labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="With SALTFLAT_QUICK=1 in the environment there are 3 epochs, and 100 examples are measured.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    seed = parser.parse_args().seed

    inputs, labels = read_data("digits")
    test_inputs, test_labels = read_data("digits", split="test")
    reports = {}
    for name in ("SGD", "SAM"):
        torch.manual_seed(seed)
        model = network()
        if name == "SGD":
            optimizer: Optimizer = SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, nesterov=True)
        else:
            optimizer = SAM(model, SGD, rho=RHO, lr=LEARNING_RATE, momentum=0.9, nesterov=True)
        train(model, optimizer, inputs, labels, seed)
        print(
            f"{name}: accuracy {accuracy(model, inputs, labels):.1%} on the training set and "
            f"{accuracy(model, test_inputs, test_labels):.1%} on the test set"
        )
        if isinstance(optimizer, SAM):
            print(
                f"{optimizer.perturbed_steps} steps were taken with a gradient from elsewhere, "
                f"{optimizer.perturbation:.2g} away the last time"
            )
        # Networks that fit their data have curvatures so small that float32 loses them; and BatchNorm is folded away,
        # since what it does to the layer before it is no matter of flatness.
        data = inputs[:MEASURED].double(), labels[:MEASURED]
        reports[name] = saltflat.measure(saltflat.fold(model.double()), data, measures=MEASURES, seed=seed)
    print(f"\n{saltflat.compare(reports)}")


if __name__ == "__main__":
    main()
