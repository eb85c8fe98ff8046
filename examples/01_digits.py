"""Train three small networks on handwritten digits and measure the curvature of what they learned.

The data are the 8 x 8 digits that come with scikit-learn, so nothing is downloaded. One of the networks is trained on
partly random labels, which it can only memorise. Prints one table and writes report.json.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import saltflat

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
PACKAGES = ("saltflat", "torch", "numpy", "scikit-learn")
STATISTICS = ("curvature_diagonal", "curvature_trace", "gradient_second_moment")
CLASSES = 10
TRAINING_EXAMPLES = 1200  # of 1797; the rest is the test set
BATCH = 64
LEARNING_RATE = 3e-3
MEANING = (
    "The curvature trace adds up, over all directions in which the weights can move, how strongly the training loss "
    "bends upwards; the certificate gap says how far that curvature is from the Hessian's (near zero: it is the "
    "Hessian's). The trace alone can be changed by rescaling weights while the network computes the same, so a larger "
    "trace does not by itself mean a sharper minimum."
)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(inputs)))
        return F.relu(inputs + self.second_norm(self.second(hidden)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
    )


def residual_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Residual(16), Residual(16)),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 2 * 2, CLASSES)),
    )


@dataclass(frozen=True)
class Network:
    name: str
    make: Callable[[], nn.Module]
    epochs: int
    random_labels: float = 0.0  # the share of training labels replaced by a random class


NETWORKS = (
    Network("MLP", mlp, epochs=40),
    # Memorising labels that follow no rule takes longer than learning digits.
    Network("CNN", cnn, epochs=60, random_labels=0.3),
    Network("ResNet", residual_net, epochs=30),
)


@dataclass(frozen=True)
class Digits:
    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


def digits(seed: int) -> Digits:
    images, classes = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16  # pixels are 0 to 16
    labels = torch.tensor(classes, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:TRAINING_EXAMPLES], order[TRAINING_EXAMPLES:]
    return Digits(inputs[train], labels[train], inputs[test], labels[test])


def with_random_labels(labels: Tensor, share: float, seed: int) -> Tensor:
    # A random class is the true one in a tenth of the cases, so 30 % random labels are about 27 % wrong ones.
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    changed = labels.clone()
    changed[chosen] = torch.randint(CLASSES, (len(chosen),), generator=generator)
    return changed


def train(
    model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int, seed: int, advance: Callable[[], None]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(labels) // BATCH)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
        advance()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    return float((model(inputs).argmax(dim=1) == labels).double().mean())


def run(network: Network, data: Digits, seed: int, progress: Progress) -> dict[str, Any]:
    epochs = min(network.epochs, 3) if QUICK else network.epochs
    labels = with_random_labels(data.labels, network.random_labels, seed)
    torch.manual_seed(seed)
    model = network.make()

    training = progress.add_task(f"training {network.name}", total=epochs)
    started = time.perf_counter()
    train(model, data.inputs, labels, epochs, seed, lambda: progress.advance(training))
    training_seconds = time.perf_counter() - started

    measuring = progress.add_task(f"measuring {network.name}", total=2)
    started = time.perf_counter()
    statistics = saltflat.statistics_of(model, (data.inputs, labels), STATISTICS, seed=seed, progress=False)
    progress.advance(measuring)
    certificate = saltflat.certify(model, (data.inputs, labels), seed=seed)
    progress.advance(measuring)
    measuring_seconds = time.perf_counter() - started

    curvature = {name: float(trace) for name, trace in statistics["curvature_trace"].items()}
    fisher = {name: float(moment.sum()) for name, moment in statistics["gradient_second_moment"].items()}
    return {
        "network": network.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "random_labels": network.random_labels,
        "epochs": epochs,
        "train_accuracy": accuracy(model, data.inputs, labels),
        "test_accuracy": accuracy(model, data.test_inputs, data.test_labels),
        "mean_loss": statistics.loss,
        "examples": statistics.examples,
        "curvature_trace": sum(curvature.values()),
        "empirical_fisher_trace": sum(fisher.values()),
        "certificate_gap": max(agreement.gap for agreement in certificate.values()),
        "certificate_holds": certificate.holds,
        "training_seconds": training_seconds,
        "measuring_seconds": measuring_seconds,
        "per_parameter": {
            name: {
                "curvature_trace": curvature[name],
                "largest_curvature": float(statistics["curvature_diagonal"][name].max()),
                "empirical_fisher_trace": fisher[name],
                "certificate_gap": certificate[name].gap,
            }
            for name in curvature
        },
        "notes": list(statistics.notes),
        "settings": dict(statistics.settings),
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="Three networks on 8 x 8 digits, measured on their training sets",
        caption="CNN and ResNet have BatchNorm. Seconds: to measure.",
        box=box.SIMPLE_HEAD,
        padding=0,  # fits 80 columns
    )
    table.add_column("network")
    for heading in (
        *("para-\nmeters", "labels\nrandom", "train\nacc.", "test\nacc.", "mean\nloss"),
        *("curvature\ntrace", "empirical\nFisher\ntrace", "certifi-\ncate gap", "seconds"),
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["network"],
            f"{row['parameters']:,}",
            f"{row['random_labels']:.0%}",
            f"{row['train_accuracy']:.1%}",
            f"{row['test_accuracy']:.1%}",
            f"{row['mean_loss']:.2g}",
            f"{row['curvature_trace']:.3g}",
            f"{row['empirical_fisher_trace']:.3g}",
            f"{row['certificate_gap']:.0e}",
            f"{row['measuring_seconds']:.2f}",
        )
    return table


def write_atomically(path: Path, text: str) -> None:
    """A reader finds the old report or the whole new one, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="With SALTFLAT_QUICK=1 in the environment training stops after 3 epochs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for report.json (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of data split, weights, batches (default: %(default)s)")
    arguments = parser.parse_args()
    try:  # now, not after all the work
        arguments.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=arguments.out):
            pass
    except OSError as error:
        parser.error(f"cannot write to --out {arguments.out} ({error.strerror}); name a folder you can write to")

    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    data = digits(arguments.seed)
    with Progress(*columns, console=console) as progress:
        rows = [run(network, data, arguments.seed, progress) for network in NETWORKS]
    console.print(table_of(rows))

    report = {
        "networks": rows,
        "seed": arguments.seed,
        "settings": {
            "quick": QUICK,
            "batch": BATCH,
            "learning_rate": LEARNING_RATE,
            "training_examples": len(data.labels),
            "test_examples": len(data.test_labels),
            "threads": torch.get_num_threads(),
        },
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }
    path = arguments.out / "report.json"
    write_atomically(path, json.dumps(report, indent=2) + "\n")
    console.print(MEANING)
    console.print(f"Everything, parameter by parameter, is in {path}.")


if __name__ == "__main__":
    main()
