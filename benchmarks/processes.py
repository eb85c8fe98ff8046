"""Time one measurement shared by 1, 2, 4 ... processes of gloo, and compare their numbers.

    python benchmarks/processes.py                      up to as many processes as this machine has cores
    python benchmarks/processes.py --most 4 --examples 2000

Every process computes with one thread. A process more adds a core, until there are none left: on a busy machine the
speed-up says more about its other users. What one sweep sums has to agree within 1e-12; iterations, which amplify
rounding, within 1e-9.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from math import isnan
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn

import saltflat

TOLERANCE = {"sweep": 1e-12, "Lanczos": 1e-9, "forward passes": 1e-12}
MEASURES = {
    "sweep": ["quick"],
    "Lanczos": ["hessian_top_eigenvalue"],
    "forward passes": ["adaptive_sharpness"],
}


def make_network(width: int) -> nn.Sequential:
    """Return a convolutional network with random weights, for images of 16 x 16."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    ).double()


def run(rank: int, count: int, examples: int, width: int, folder: str) -> None:
    """Measure in one of several processes; the first one writes seconds and values."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store{count}"
    distributed.init_process_group("gloo", store, world_size=count, rank=rank)
    noise = torch.Generator().manual_seed(0)
    inputs = torch.randn(examples, 3, 16, 16, generator=noise, dtype=torch.float64)
    data: tuple[Tensor, Tensor] = inputs, torch.randint(10, (examples,), generator=noise)
    net, group, found = make_network(width), distributed.group.WORLD, {}
    saltflat.measure(net, (inputs[:64], data[1][:64]), measures=["quick"], progress=False, process_group=group)
    for kind, names in MEASURES.items():
        distributed.barrier()
        started = time.perf_counter()
        report = saltflat.measure(net, data, measures=names, progress=False, certificate=False, process_group=group)
        values = {name: reading.value for name, reading in report.readings.items()}
        found[kind] = time.perf_counter() - started, values
    if rank == 0:
        torch.save(found, Path(folder) / f"{count}.pt")
    distributed.barrier()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=os.cpu_count(), help="largest number of processes")
    parser.add_argument("--examples", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer (default: %(default)s)")
    given = parser.parse_args()
    counts = [1 << power for power in range(given.most.bit_length())]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            spawn(run, (count, given.examples, given.width, folder), nprocs=count)
            found[count] = torch.load(Path(folder) / f"{count}.pt", weights_only=True)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {given.examples} examples, width {given.width}\n")
    print("| processes | " + " | ".join(f"{kind} s | speed-up" for kind in MEASURES) + " | largest difference |")
    print("| ---: |" + " ---: | ---: |" * len(MEASURES) + " ---: |")
    agree = True
    for count in counts:
        cells, differences = [], [0.0]
        for kind in MEASURES:
            seconds, values = found[count][kind]
            alone, expected = found[1][kind]
            cells.append(f"{seconds:.2f} | {alone / seconds:.2f}")
            apart = [abs(values[name] / value - 1) for name, value in expected.items() if not isnan(value)]
            agree = agree and max(apart) <= TOLERANCE[kind]
            differences += apart
        print(f"| {count} | {' | '.join(cells)} | {max(differences):.1e} |")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
