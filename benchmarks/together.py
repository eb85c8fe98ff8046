"""Time the training of many networks at once, in network-epochs per second, beside one at a time."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from parts.clock import in_turns
from parts.images import images
from rich.console import Console
from rich.table import Table

from saltflat import datasets
from saltflat.studies.data import Examples
from saltflat.studies.recipe import Recipe
from saltflat.studies.training.batched_convolution import WAYS
from saltflat.studies.training.train_batched import train_together
from saltflat.studies.training.train_one import train_alone

# The target speedup over one at a time, on two cores.
GOAL = 3.0
DIGITS = Recipe(network="mlp", architecture={"widths": (64, 32)}, lr=0.05, momentum=0.9, batch_size=64)
# What the papers train, and how many at once: 64 LeNets, and 11 shares of random labels with 5 seeds each.
STACKS = {
    "lenet5": (Recipe(network="lenet5", lr=0.01, momentum=0.9, batch_size=128), "cifar10", 50_000, 64),
    "ibayashi_lenet": (Recipe(network="ibayashi_lenet", lr=0.01, momentum=0.9, batch_size=1024), "mnist", 60_000, 55),
    "ibayashi_mlp": (Recipe(network="ibayashi_mlp", lr=0.1, momentum=0.9, batch_size=1024), "mnist", 60_000, 55),
}


def digits(networks: Sequence[int], epochs: int, repeats: int, device: str) -> list[dict[str, Any]]:
    """Train MLPs on the digits all at once and one after the other, alternating; the whole call is timed."""
    inputs, labels = datasets.read_data("digits", ".", "train", normalize="standard")
    data = Examples(inputs, labels, *datasets.read_data("digits", ".", "test", normalize="standard"))
    rows = []
    for count in networks:
        recipes = [replace(DIGITS, seed=seed, epochs=epochs) for seed in range(count)]

        def alone(recipes: list[Recipe] = recipes) -> object:
            return [train_alone(recipe, data, device=device) for recipe in recipes]

        def together(recipes: list[Recipe] = recipes) -> object:
            return train_together(recipes, data, device=device)

        short = [replace(recipe, epochs=1) for recipe in recipes[:2]]
        alone(short)
        together(short)
        times = in_turns({"alone": alone, "together": together}, repeats)
        for name, each in times.items():
            rows.append(
                {
                    "network": "digits MLP 64-64-32-10",
                    "data": "1200 digits",
                    "networks": count,
                    "batch": DIGITS.batch_size,
                    "way": name,
                    "seconds_per_epoch": median(each) / epochs,
                    "model_epochs_per_second": count * epochs / median(each),
                    "ratio": median(times["alone"]) / median(each),
                    "goal": GOAL if name == "together" and device == "cpu" else None,
                }
            )
    return rows


def stack(
    name: str, way: str, precision: str, device: str, epochs: int, networks: int | None, examples: int | None
) -> dict[str, Any]:
    """Train a stack of LeNets or MLPs; epochs are timed from the end of the first to the end of the last but one."""
    recipe, source, most, usual = STACKS[name]
    found = images(source, most if examples is None else examples, "half")
    inputs, labels = found.inputs, found.labels
    data = Examples(inputs, labels, inputs[:1000], labels[:1000])
    count = usual if networks is None else networks
    recipes = [replace(recipe, seed=seed, epochs=epochs + 2, dtype=precision) for seed in range(count)]
    clock: list[float] = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    results = train_together(recipes, data, device=device, way=way, tell=lambda *_: clock.append(time.perf_counter()))
    seconds = (clock[epochs] - clock[0]) / epochs
    return {
        "network": name,
        "data": found.source,
        "networks": count,
        "batch": recipe.batch_size,
        "way": f"{way}, {precision}",
        "seconds_per_epoch": seconds,
        "model_epochs_per_second": count / seconds,
        "loss": median(each.outcome.train_loss for each in results),
        "gibibytes": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "notes": sorted({note for each in results for note in each.outcome.notes}),
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", nargs="+", choices=["digits", *STACKS], help="digits on a CPU, the others on a GPU")
    parser.add_argument("--networks", nargs="+", type=int, help="at once; 24 and 64 digit MLPs, 64 or 55 others")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["banded", "grouped", "each"])
    parser.add_argument("--precisions", nargs="+", choices=["float32", "tf32"], default=["float32"])
    parser.add_argument("--epochs", type=int, default=5, help="that are timed")
    parser.add_argument("--examples", type=int, help="images of an epoch; all if not given")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repetitions of the digits")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to see that it runs")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    given = parser.parse_args(words)
    parts = given.parts or (["digits"] if given.device == "cpu" else ["lenet5", "ibayashi_lenet", "ibayashi_mlp"])
    epochs, repeats, examples = (1, 1, 40) if given.quick else (given.epochs, given.repeats, given.examples)
    networks = [3] if given.quick else given.networks
    rows: list[dict[str, Any]] = []
    for part in parts:
        if part == "digits":
            rows += digits(networks or [24, 64], epochs, repeats, given.device)
            continue
        for way in given.ways if "lenet" in part else ["auto"]:
            for precision in given.precisions:
                for count in networks or [None]:
                    rows.append(stack(part, way, precision, given.device, epochs, count, examples))
    table = Table("network", "data", "networks", "batch", "way", "s / epoch", "model-epochs / s", "ratio", "GiB")
    for row in rows:
        ratio = f"{row['ratio']:.1f}" if "ratio" in row else ""
        if row.get("goal"):
            ratio += f", goal {row['goal']:g}: {'met' if row['ratio'] >= row['goal'] else 'NOT MET'}"
        table.add_row(
            row["network"], row["data"], str(row["networks"]), str(row["batch"]), row["way"],
            f"{row['seconds_per_epoch']:.3f}", f"{row['model_epochs_per_second']:.1f}", ratio,
            f"{row['gibibytes']:.1f}" if row.get("gibibytes") else "",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    if given.out:
        card = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": card}
        given.out.write_text(json.dumps(about | {"epochs": epochs, "repeats": repeats, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
