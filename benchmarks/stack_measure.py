"""Time the measurement of a study's networks, which share what does not depend on their weights, beside one by one."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from parts.images import images
from rich.console import Console
from rich.table import Table

from saltflat.studies import tasks
from saltflat.studies.data import Examples
from saltflat.studies.measurement import USUAL_MEASURES, Measurement, parse_measure_options
from saltflat.studies.recipe import Recipe
from saltflat.studies.row import TrainedNetwork
from saltflat.studies.tasks import MeasureTask, TaskContext
from saltflat.studies.training.train_batched import train_together

# The largest share of the time of 30 epochs of training that measuring may take, on a GPU.
GOAL, EPOCHS = 0.15, 30
VARIANTS = ("normalized_sharpness_arxiv", "normalized_sharpness_printed", "parameterwise_normalized_sharpness")
RECIPES = {
    "lenet5": Recipe(network="lenet5", lr=0.01, momentum=0.9, batch_size=128),
    "mlp": Recipe(network="mlp", lr=0.05, momentum=0.9, batch_size=128),
    "cnn6": Recipe(network="cnn6", architecture={"width": 16}, lr=0.01, momentum=0.9, batch_size=128),
}


def train(recipes: list[Recipe], data: Examples, epochs: int, device: str) -> tuple[list[TrainedNetwork], float]:
    """Train the networks, and return the seconds of an epoch, between the end of the first and the last but one."""
    clock: list[float] = []
    longer = [replace(recipe, epochs=epochs + 2) for recipe in recipes]
    found = train_together(longer, data, device=device, tell=lambda *_: clock.append(time.perf_counter()))
    return found, (clock[epochs] - clock[0]) / epochs


def measure_alone(task: MeasureTask, context: TaskContext) -> Measurement:
    made = tasks.rebuild_network(task, context)
    return tasks.measure_model(made.model, made.inputs, made.labels, made.initial, task.measures, context)


def timed(
    measure: Callable[[MeasureTask, TaskContext], Measurement], runs: list[MeasureTask], context: TaskContext
) -> tuple[list[Measurement], float]:
    """Measure the networks, and return the measurements and the seconds of one network."""
    started = time.perf_counter()
    found = [measure(task, context) for task in runs]
    tasks.release_stack()
    return found, (time.perf_counter() - started) / len(runs)


def difference(one: list[Measurement], other: list[Measurement]) -> float:
    """Return the largest relative difference between readings."""
    pairs = [
        (each.readings[name].value, reading.value)
        for each, alone in zip(one, other, strict=False)
        for name, reading in alone.readings.items()
    ]
    return max(abs(a - b) / max(abs(b), 1e-300) for a, b in pairs)


def compare(
    name: str, networks: int, alone: int, examples: int, epochs: int, memory: str, device: str, most: int
) -> dict[str, Any]:
    """Train networks, and measure them in a row and alone."""
    source = images("cifar10", most, "half")
    data = Examples(source.inputs, source.labels, source.inputs[:1000], source.labels[:1000])
    recipes = [replace(RECIPES[name], seed=seed, label_noise=0.1 * (seed % 3)) for seed in range(networks)]
    trained, seconds = train(recipes, data, epochs, device)
    measures = (*USUAL_MEASURES, *VARIANTS)
    options = parse_measure_options({"examples": examples, "memory": memory})
    context = TaskContext(data, None, None, measures, options, device, every=30.0)

    def make_task(recipe: Recipe, network: TrainedNetwork) -> MeasureTask:
        plain = asdict(recipe)
        config = {**plain.pop("architecture"), **plain}
        return MeasureTask(f"{recipe.seed}", config, network.weights, None, measures)

    runs = [make_task(*each) for each in zip(recipes, trained, strict=True)]
    timed(tasks.measure_run, runs[:1], context)  # kernels and caches are loaded
    together, stacked = timed(tasks.measure_run, runs, context)
    singles, single = timed(measure_alone, runs[:alone], context)
    return {
        "network": name,
        "data": source.source,
        "networks": networks,
        "examples": examples,
        "memory": memory,
        "seconds_in_a_row": stacked * networks,
        "seconds_one_by_one": single * networks,
        "measured_alone": len(singles),
        "ratio": single / stacked,
        "seconds_of_training": seconds * EPOCHS,
        "epochs_timed": epochs,
        "share_of_training": stacked * networks / (seconds * EPOCHS),
        "difference": difference(together, singles),
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", nargs="+", choices=list(RECIPES), default=["lenet5"])
    parser.add_argument("--networks", type=int, help="how many; 48 on a GPU, 6 on a CPU")
    parser.add_argument("--alone", type=int, help="how many of them are also measured alone; all on a GPU, 2 on a CPU")
    parser.add_argument("--examples", type=int, default=2000, help="that are measured on")
    parser.add_argument("--images", type=int, help="of an epoch; 50,000 on a GPU, 2000 on a CPU")
    parser.add_argument("--epochs", type=int, default=3, help="that are timed")
    parser.add_argument("--memory", default="1GiB", help="working memory of a measurement")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to see that it runs")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    given = parser.parse_args(words)
    gpu = given.device != "cpu"
    networks = given.networks or (48 if gpu else 6)
    alone = given.alone or (networks if gpu else 2)
    most = given.images or (50_000 if gpu else 2000)
    epochs, examples = given.epochs, given.examples
    if given.quick:
        networks, alone, epochs, examples, most = 2, 2, 1, 20, 200
    rows = [compare(part, networks, alone, examples, epochs, given.memory, given.device, most) for part in given.parts]
    table = Table("network", "data", "networks", "examples", "in a row", "one by one", "ratio", "of training", "differ")
    for row in rows:
        share = f"{row['share_of_training']:.1%} of {row['seconds_of_training']:.3g} s"
        if gpu and not given.quick:
            share += f", goal {GOAL:.0%}: {'met' if row['share_of_training'] <= GOAL else 'NOT MET'}"
        single = f"{row['seconds_one_by_one']:.3g} s (from {row['measured_alone']})"
        table.add_row(
            row["network"], row["data"], str(row["networks"]), str(row["examples"]),
            f"{row['seconds_in_a_row']:.3g} s", single, f"{row['ratio']:.2f}", share, f"{row['difference']:.1e}",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    print(f"Training: {EPOCHS} epochs, extrapolated from {epochs}.")
    if given.out:
        card = torch.cuda.get_device_name() if gpu else "cpu"
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": card}
        given.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
