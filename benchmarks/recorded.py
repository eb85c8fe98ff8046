"""Time the training of studies on a GPU beside plain PyTorch loops in bfloat16, in seconds an epoch.

    python benchmarks/recorded.py --device cuda

A plain loop is what a user would write: channels last, autocast, flips and crops on the device, SGD of torch.optim.
Kernel time is the profiler's sum over all kernels of an epoch, beside the wall time of that epoch.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from parts.images import images
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from saltflat.studies.data import Examples
from saltflat.studies.recipe import Recipe
from saltflat.studies.training.build import build_network
from saltflat.studies.training.train_batched import train_together

BASE = Recipe(lr=0.05, momentum=0.9, weight_decay=5e-4, batch_size=128, dtype="bf16")
STACK = replace(BASE, network="lenet5", lr=0.01)
AUGMENTED = replace(BASE, augment="flip_crop")


@dataclass(frozen=True)
class Case:
    """One training to time: its recipe, the number of networks, and what it should reach.

    Attributes:
        recipe: settings of the training.
        networks: number of networks at once.
        goal: seconds an epoch at most; for ``of`` a ratio to that case.
        of: the case that it is compared with.
        plain: whether a plain loop runs beside it.
    """

    recipe: Recipe
    networks: int = 1
    goal: float | None = None
    of: str | None = None
    plain: bool = False


CASES = {
    "48 LeNets": Case(STACK, 48, 48 / 45),
    "48 LeNets, dropout": Case(replace(STACK, dropout=0.5), 48, 1 / 0.9, "48 LeNets"),
    "48 LeNets, flips and crops": Case(replace(STACK, augment="flip_crop"), 48, 1 / 0.9, "48 LeNets"),
    "48 LeNets, tf32": Case(replace(STACK, dtype="tf32"), 48),
    "48 LeNets, SAM": Case(replace(STACK, sam=0.05), 48),
    "cnn6": Case(replace(AUGMENTED, network="cnn6", lr=0.01), goal=0.8, plain=True),
    "ResNet-20": Case(replace(AUGMENTED, network="resnet20"), goal=2.0, plain=True),
    "ResNet-20, SAM": Case(replace(AUGMENTED, network="resnet20", sam=0.05)),
    "ResNet-20, Fisher penalty": Case(
        replace(AUGMENTED, network="resnet20", fisher_penalty=10.0, fisher_parts=8), goal=4.0, of="ResNet-20"
    ),
    "ResNet-20, float32": Case(replace(AUGMENTED, network="resnet20", dtype="float32")),
    "ResNet-20, float32, Fisher penalty": Case(
        replace(AUGMENTED, network="resnet20", dtype="float32", fisher_penalty=10.0, fisher_parts=8),
        goal=4.0,
        of="ResNet-20, float32",
    ),
    "WRN-16-4": Case(replace(AUGMENTED, network="wrn_16_4"), goal=2.2, plain=True),
    "2 WRN-16-4": Case(replace(AUGMENTED, network="wrn_16_4"), 2),
    "DenseNet-BC": Case(replace(AUGMENTED, network="densenet_bc"), plain=True),
}


def time_ours(case: Case, data: Examples, device: str, epochs: int) -> tuple[float, list[str]]:
    """Return the seconds of an epoch, from the end of the first to the end of the last but one, and notes."""
    clock: list[float] = []
    recipes = [replace(case.recipe, seed=seed, epochs=epochs + 2) for seed in range(case.networks)]
    found = train_together(recipes, data, device=device, tell=lambda *_: clock.append(time.perf_counter()))
    notes = sorted({note for each in found for note in each.outcome.notes})
    return (clock[epochs] - clock[0]) / epochs, notes


def profile_ours(case: Case, data: Examples, device: str, kernels: int) -> tuple[float, float]:
    """Return the seconds of all kernels in an epoch, and of the epoch itself, under the profiler."""
    watched = profile(activities=[ProfilerActivity.CUDA])
    clock: list[float] = []

    def tell(done: int, most: int) -> None:
        clock.append(time.perf_counter())
        if done == 2:
            watched.start()
            clock[-1] = time.perf_counter()
        elif done == 3:
            watched.stop()

    recipes = [replace(case.recipe, seed=seed, epochs=5) for seed in range(case.networks)]
    train_together(recipes, data, device=device, tell=tell)
    if kernels:
        print(watched.key_averages().table(sort_by="self_device_time_total", row_limit=kernels), file=sys.stderr)
    return sum(each.self_device_time_total for each in watched.key_averages()) * 1e-6, clock[2] - clock[1]


def time_plain(case: Case, data: Examples, device: str, epochs: int) -> float:
    """Return the seconds of an epoch of a plain loop with the same network, batches and augmentation."""
    recipe, place = case.recipe, torch.device(device)
    shape = tuple(data.train_inputs.shape[1:])
    model = build_network(recipe, shape, 10).to(place)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(
        model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    inputs, labels = data.train_inputs.to(place), data.train_labels.to(place)
    model.train()

    def train_epoch() -> None:
        for some in torch.randperm(len(inputs), device=place).split(recipe.batch_size):
            batch = _augment(inputs[some]).contiguous(memory_format=torch.channels_last)
            with torch.autocast(place.type, torch.bfloat16):
                loss = F.cross_entropy(model(batch), labels[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if place.type == "cuda":
            torch.cuda.synchronize()

    train_epoch()
    started = time.perf_counter()
    for _ in range(epochs):
        train_epoch()
    return (time.perf_counter() - started) / epochs


def _augment(batch: Tensor) -> Tensor:
    padded = F.pad(batch, (4, 4, 4, 4))
    count, _, height, width = batch.shape
    down, across = torch.randint(9, (2, count, 1), device=batch.device)
    rows = down + torch.arange(height, device=batch.device)
    columns = across + torch.arange(width, device=batch.device)
    which = torch.arange(count, device=batch.device)[:, None, None]
    found = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    mirrored = torch.rand(count, 1, 1, 1, device=batch.device) < 0.5
    return torch.where(mirrored, found.flip(-1), found)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE", help="default: all"
    )
    parser.add_argument("--epochs", type=int, default=3, help="that are timed")
    parser.add_argument("--examples", type=int, default=50_000, help="images of an epoch")
    parser.add_argument("--no-profile", action="store_true", help="leave out the kernels' time")
    parser.add_argument("--kernels", type=int, default=0, help="print this many kernels that take most time")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to see that it runs")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    given = parser.parse_args(words)
    epochs, count = (1, 24) if given.quick else (given.epochs, given.examples)
    found = images("cifar10", count, "standard")
    data = Examples(found.inputs, found.labels, found.inputs[:1000], found.labels[:1000])
    some = min(count, 64 * 128)
    few = Examples(found.inputs[:some], found.labels[:some], found.inputs[:100], found.labels[:100])
    rows: dict[str, dict[str, Any]] = {}
    for name in given.cases:
        case = CASES[name]
        if given.quick:
            small = {"wrn_16_4": {"width": 2}, "resnet20": {"width": 2}, "cnn6": {"width": 2}}
            small |= {"densenet_bc": {"depth": 10, "growth": 2}}
            architecture = small.get(case.recipe.network, {})
            case = replace(case, recipe=replace(case.recipe, architecture=architecture, batch_size=8))
            case = replace(case, networks=min(case.networks, 2))
        row: dict[str, Any] = {"networks": case.networks, "dtype": case.recipe.dtype}
        row["seconds"], row["notes"] = time_ours(case, data, given.device, epochs)
        row["model_epochs_per_second"] = case.networks / row["seconds"]
        if case.plain:
            row["plain_loop"] = time_plain(case, data, given.device, epochs)
        if given.device != "cpu" and not given.no_profile:
            kernels, wall = profile_ours(case, few, given.device, given.kernels)
            row["kernel_share"] = kernels / wall
        if case.goal is not None and given.device != "cpu" and not given.quick:
            reached = row["seconds"] / (rows[case.of]["seconds"] if case.of in rows else 1.0)
            row |= {"reached": reached, "goal": case.goal, "met": reached <= case.goal}
        rows[name] = row
        print(name, json.dumps(row), file=sys.stderr, flush=True)
        if given.out:
            card = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
            about = {"torch": torch.__version__, "device": card, "data": found.source, "epochs": epochs}
            given.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    table = Table("training", "dtype", "s / epoch", "networks x epochs / s", "plain loop, s", "kernels / wall", "goal")
    for name, row in rows.items():
        goal = (
            f"{row['reached']:.2f} of {row['goal']:.2f}: {'met' if row['met'] else 'NOT MET'}" if "met" in row else ""
        )
        table.add_row(
            name, row["dtype"], f"{row['seconds']:.3f}", f"{row['model_epochs_per_second']:.1f}",
            f"{row['plain_loop']:.3f}" if "plain_loop" in row else "",
            f"{row['kernel_share']:.2f}" if "kernel_share" in row else "", goal,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main()
