"""Check the standard errors over examples: three trained networks, 200 random pairs of samples each.

    python benchmarks/sampling.py --data data            # writes benchmarks/results/sampling.json
    python benchmarks/sampling.py --splits 20 --networks mlp

``--data`` is laid out as torchvision does, or holds ``mnist.npz`` and ``cifar10.npz`` with ``inputs`` and ``targets``.

Each pair is a random subset of the training data, split into halves. For every network: how often ``compare`` calls one
network on two disjoint halves different (should be at most 5 % of measures), how often the 95 % intervals of the halves
cover the mean over all halves and the value of all the data, how often a second network is told from the first on one
half (power), and what the errors cost.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import saltflat
from saltflat.datasets import read_data

# By one sweep, with an error over examples.
MEASURES = (
    "normalized_sharpness",
    "normalized_sharpness_printed",
    "parameterwise_normalized_sharpness",
    "regularized_normalized_sharpness",
    "fisher_rao_diagonal",
    "fisher_rao_norm",
    "minimum_sharpness",
    "minimum_unit_sharpness",
    "rho",
    "rho_max",
    "kappa_trace",
    "kappa_trace_max",
    "hessian_trace",
    "fisher_trace",
    "fisher_frobenius",
)
Pair = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def cnn() -> nn.Module:
    """Return a CNN with smooth activations and GroupNorm: its Gauss-Newton blocks are not the Hessian's."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4),
        nn.GroupNorm(4, 8),
        nn.GELU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.GELU(),
        nn.Linear(32, 10),
    )


# The network, its data, examples to train on, examples in a half, and epochs of training.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, int, int, int]] = {
    "mlp": (mlp, "digits", 1200, 100, 40),
    "lenet": (lenet, "mnist", 10_000, 500, 5),
    "cnn": (cnn, "cifar10", 10_000, 250, 15),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sampling.json"))
    given = parser.parse_args()
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in given.networks:
        found[name] = examined(name, given.data, given.splits, given.workers)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found) + "\n")
        print_network(name, found[name])


def examined(name: str, folder: str, splits: int, workers: int) -> dict[str, Any]:
    build, source, examples, half, epochs = NETWORKS[name]
    torch.manual_seed(0)
    arrays = Path(folder) / f"{source}.npz"
    source = str(arrays) if arrays.exists() else source
    inputs, targets = read_data(source, folder, limit=examples)
    first, second = (trained(build, (inputs, targets), epochs, decay) for decay in (0.0, 1e-3))
    whole = measured(first, (inputs, targets))
    halves, others = [], []
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        run = partial(halved, first, second, inputs, targets, half)
        for split, (pair, other) in enumerate(pool.map(run, range(splits))):
            halves.append(pair)
            others.append(other)
            if split % 10 == 9:
                print(f"{name}: {split + 1} of {splits} splits", flush=True)
    return {
        "examples": examples,
        "half": half,
        "splits": splits,
        "loss": whole.loss,
        "accuracy": whole.accuracy,
        "measures": {each: judged(each, whole, halves, others) for each in MEASURES},
        "seconds": costs(first, (inputs[:2000], targets[:2000])),
    }


def halved(
    first: nn.Module, second: nn.Module, inputs: Tensor, targets: Tensor, half: int, split: int
) -> tuple[list[saltflat.Report], saltflat.Report]:
    """Measure the first network on two disjoint halves of a random subset, and the second on the first half."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(split))
    parts = [(inputs[which], targets[which]) for which in order[: 2 * half].split(half)]
    return [measured(first, part) for part in parts], measured(second, parts[0])


def trained(build: Callable[[], nn.Module], data: Pair, epochs: int, decay: float) -> nn.Module:
    torch.manual_seed(1)
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=100 * decay)
    noise = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for which in torch.randperm(len(data[1]), generator=noise).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(data[0][which]), data[1][which]).backward()
            optimizer.step()
    return net.eval()


def measured(net: nn.Module, data: Pair, sampling: bool = True) -> saltflat.Report:
    return saltflat.measure(net, data, measures=MEASURES, certificate=False, sampling=sampling, progress=False)


def judged(
    name: str, whole: saltflat.Report, halves: Sequence[Sequence[saltflat.Report]], others: Sequence[saltflat.Report]
) -> dict[str, Any]:
    values = [each[name] for pair in halves for each in pair]
    mean = math.fsum(each.value for each in values) / len(values)

    def rate(hits: Sequence[bool]) -> float:
        return sum(hits) / len(hits)

    def covers(truth: float) -> float:
        return rate([abs(each.value - truth) <= 1.96 * (each.sampling_stderr or 0.0) for each in values])

    scatter = math.sqrt(math.fsum((each.value - mean) ** 2 for each in values) / (len(values) - 1))
    apart = {
        "different halves": [contrasted(name, one, two) for one, two in halves],
        "power paired": [contrasted(name, pair[0], other) for pair, other in zip(halves, others, strict=True)],
        "power unpaired": [contrasted(name, pair[1], other) for pair, other in zip(halves, others, strict=True)],
    }
    return {
        **{key: rate([different for different, _ in each]) for key, each in apart.items()},
        # Roots of small curvatures, and largest values, have a bias that falls with the number of examples.
        "covers all data": covers(whole[name].value),
        "covers mean": covers(mean),
        "relative error": (values[0].sampling_stderr or math.nan) / abs(mean),
        "relative scatter": scatter / abs(mean),
        "differences in standard errors": {key: [round(size, 3) for _, size in each] for key, each in apart.items()},
    }


def contrasted(name: str, one: saltflat.Report, two: saltflat.Report) -> tuple[bool, float]:
    """Return whether two reports differ in a measure, and by how many standard errors of the difference."""
    contrast = saltflat.compare(one, two, names=name)[name]
    error = contrast.errors["2"]
    return contrast.verdicts["2"] == "different", abs(contrast.differences["2"]) / error if error else math.nan


def costs(net: nn.Module, data: Pair) -> dict[str, float]:
    """Return the seconds of a measurement with and without errors over examples, the least of three each."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(3):
        for key, sampling in (("with", True), ("without", False)):
            started = time.perf_counter()
            measured(net, data, sampling)
            found[key].append(time.perf_counter() - started)
    return {key: min(each) for key, each in found.items()}


def print_network(name: str, found: dict[str, Any]) -> None:
    columns = ("different halves", "covers all data", "covers mean", "power paired", "power unpaired")
    print(f"\n{name}: loss {found['loss']:.3g}, accuracy {found['accuracy']:.2%}, {found['splits']} splits")
    print(f"{'measure':36s}" + "".join(f"{each:>18s}" for each in (*columns, "relative error")))
    rows = found["measures"]
    for measure, row in rows.items():
        print(f"{measure:36s}" + "".join(f"{row[each]:18.1%}" for each in columns) + f"{row['relative error']:18.3f}")
    means = {each: sum(row[each] for row in rows.values()) / len(rows) for each in columns}
    print(f"{'mean':36s}" + "".join(f"{means[each]:18.1%}" for each in columns))
    seconds = found["seconds"]
    print(f"cost: {seconds['with']:.3f} s with errors, {seconds['without']:.3f} s without\n")


if __name__ == "__main__":
    main()
