"""Train with SAM in mixed precision: bfloat16 autocast on the CPU, and float16 with a GradScaler on a GPU.

Both APIs are shown. ``step(closure)`` does everything. ``first_step`` and ``second_step`` leave the loop to you: here
the gradient of a batch is accumulated over micro-batches, and clipped.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler, autocast
from torch.optim import AdamW

from saltflat.datasets import read_data
from saltflat.training import SAM

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
EPOCHS = 2 if QUICK else 10
BATCH, MICRO = 128, 32
LEARNING_RATE = 1e-2


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def step_with_closure(model: nn.Module, optimizer: SAM, scaler: GradScaler, inputs: Tensor, labels: Tensor) -> None:
    def closure() -> None:
        optimizer.zero_grad()
        with autocast(inputs.device.type, precision(inputs.device.type)):
            loss = F.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()

    optimizer.step(closure, scaler=scaler)


def step_explicitly(model: nn.Module, optimizer: SAM, scaler: GradScaler, inputs: Tensor, labels: Tensor) -> None:
    def backward() -> None:
        for x, y in zip(inputs.split(MICRO), labels.split(MICRO), strict=True):
            with autocast(inputs.device.type, precision(inputs.device.type)):
                loss = F.cross_entropy(model(x), y, reduction="sum") / len(labels)
            scaler.scale(loss).backward()

    optimizer.zero_grad()
    with optimizer.first_pass():  # so that dropout drops the same units in both passes
        backward()
    optimizer.first_step(scaler)
    backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.second_step(scaler)


def precision(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cpu" else torch.float16


def train(device: str, is_explicit: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = network().to(device)
    optimizer = SAM(model, AdamW, rho=0.05, lr=LEARNING_RATE)
    scaler = GradScaler(device, enabled=device != "cpu")  # bfloat16 has the range of float32: nothing to scale
    inputs, labels = (each.to(device) for each in read_data("digits"))
    steps = 0
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).to(device).split(BATCH):
            one_step = step_explicitly if is_explicit else step_with_closure
            one_step(model, optimizer, scaler, inputs[batch], labels[batch])
            scaler.update()
            steps += 1
    model.eval()
    test_inputs, test_labels = (each.to(device) for each in read_data("digits", split="test"))
    with torch.no_grad():
        right = float((model(test_inputs).argmax(dim=1) == test_labels).double().mean())
    print(
        f"{device}, {precision(device)}, {'explicit calls' if is_explicit else 'closure'}: accuracy {right:.1%} on the "
        f"test set after {steps} steps, {optimizer.perturbed_steps} of them taken with a gradient from "
        f"{optimizer.perturbation:.2g} away"
        # The first steps in float16 are skipped on purpose: the scale starts too high and falls until it fits.
        + (f" and {steps - optimizer.perturbed_steps} skipped" if scaler.is_enabled() else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="With SALTFLAT_QUICK=1 in the environment there are 2 epochs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    seed = parser.parse_args().seed
    for is_explicit in (False, True):
        train("cpu", is_explicit, seed)
    if not torch.cuda.is_available():
        print("No GPU here: float16 with a GradScaler is skipped.")
        return
    for is_explicit in (False, True):
        train("cuda", is_explicit, seed)


if __name__ == "__main__":
    main()
