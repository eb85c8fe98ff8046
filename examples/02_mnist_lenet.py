"""Train a LeNet on MNIST, save its weights and measure it on the first training images.

The data is read from the folder in SALTFLAT_DATA, or from data/, in torchvision's layout. The saved weights can also be
measured from the command line; the command is printed at the end.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from lenet import lenet
from safetensors.torch import save_file
from torch import Tensor, nn

import saltflat
from saltflat.datasets import read_data
from saltflat.errors import DataError

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
IMAGES = 1_000 if QUICK else 20_000
EPOCHS = 1 if QUICK else 3
MEASURED = 100 if QUICK else 1_000
BATCH = 64
LEARNING_RATE = 2e-3


def train(model: nn.Module, inputs: Tensor, labels: Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps = EPOCHS * -(-len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    parts = zip(inputs.split(1000), labels.split(1000), strict=True)
    return sum(float((model(x).argmax(1) == y).sum()) for x, y in parts) / len(labels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    arguments = parser.parse_args()
    out, folder = arguments.out, os.environ.get("SALTFLAT_DATA", "data")
    out.mkdir(parents=True, exist_ok=True)
    try:
        inputs, labels = read_data("mnist", folder, limit=IMAGES)
        test_inputs, test_labels = read_data("mnist", folder, "test")
    except DataError as error:
        print(f"{error}\nOr set SALTFLAT_DATA to the folder that holds MNIST/raw.", file=sys.stderr)
        return 2

    torch.manual_seed(arguments.seed)
    model, started = lenet(), time.perf_counter()
    train(model, inputs, labels, arguments.seed)
    print(
        f"LeNet trained on {len(labels)} images for {EPOCHS} epochs in {time.perf_counter() - started:.0f} s, "
        f"accuracy {accuracy(model, test_inputs, test_labels):.1%} on the test set"
    )
    weights, report = out / "lenet.safetensors", out / "report_lenet.json"
    save_file(model.state_dict(), weights)
    found = saltflat.measure(model.eval(), (inputs[:MEASURED], labels[:MEASURED]), seed=arguments.seed)
    found.save(report)
    print(found)
    print(
        f"\nThe same from the command line:\n  saltflat measure --model examples.lenet:lenet --weights {weights} "
        f"--data mnist --data-dir {folder} --limit {MEASURED} --out {report}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
