"""Compare what ``saltflat.plan`` predicts with what ``saltflat.measure`` then takes, each network in its own process.

    python benchmarks/plan.py                                # prints a table
    python benchmarks/plan.py --cases mlp,lenet --out benchmarks/results/plan.json

Both calls are made in one process, the plan first. Memory is the growth of the resident set from before the plan to the
peak of the measurement, so it includes what the plan leaves behind. With ``--cpu-time``, seconds are those of the
processor, which equal those of the clock on one thread unless other programs use the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from memory import MIB, resident
from networks import NETWORKS
from torch import nn

import saltflat


class Case(NamedTuple):
    """A measurement: model, data, and options."""

    model: nn.Module
    data: Any
    options: dict[str, Any]


def make_labeled(name: str, examples: int, measures: str) -> Case:
    """Return a network of the benchmarks with random examples."""
    network = NETWORKS[name]
    data = torch.randn(examples, *network.shape), torch.randint(10, (examples,))
    return Case(network.build(), data, {"measures": measures})


def make_gpt2(examples: int) -> Case:
    """Return a small GPT-2 with random tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1000, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(1000, (examples, 32))
    batches = [{"input_ids": part, "labels": part} for part in ids.split(16)]
    return Case(GPT2LMHeadModel(config), batches, {"measures": "quick", "columns": "sampled:4", "loss": "model"})


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: make_labeled("mlp", 1000, "quick"),
    "mlp_4000": lambda: make_labeled("mlp", 4000, "quick"),
    "lenet": lambda: make_labeled("lenet", 256, "quick"),
    "lenet_4000": lambda: make_labeled("lenet", 4000, "quick"),
    "lenet_all": lambda: make_labeled("lenet", 256, "all"),
    "resnet20": lambda: make_labeled("resnet20", 64, "quick"),
    "resnet20_512": lambda: make_labeled("resnet20", 512, "quick"),
    "gpt2_sampled": lambda: make_gpt2(32),
    "gpt2_sampled_256": lambda: make_gpt2(256),
}


def run_case(name: str) -> dict[str, Any]:
    """Return what was predicted and what was measured."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    small = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 10))
    saltflat.measure(small, (torch.randn(20, 1, 4, 4), torch.randint(10, (20,))), memory="1MiB")  # loads code
    model, data, options = CASES[name]()
    before = resident("VmRSS:")
    plan = saltflat.plan(model, data, **options)
    assert plan.predicted_bytes is not None
    Path("/proc/self/clear_refs").write_text("5")
    report = saltflat.measure(model, data, progress=False, **options)
    return {
        "case": name,
        "plan_seconds": plan.seconds,
        "predicted_seconds": plan.predicted_seconds,
        "seconds": report.seconds,
        "predicted_mib": plan.predicted_bytes / MIB,
        "mib": (resident("VmHWM:") - before) / MIB,
        "predicted_by_step": dict(plan.predicted_seconds_by_step),
        "by_step": dict(report.seconds_by_step),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="names, separated by commas")
    parser.add_argument("--out", type=Path, help="write the rows here, as JSON")
    parser.add_argument("--cpu-time", action="store_true", help="count seconds of the processor")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cpu_time:
        time.perf_counter = time.process_time
    if given.one:
        print(json.dumps(run_case(given.one)))
        return
    rows = []
    print(f"{'case':18} {'plan s':>7} {'predicted':>9} {'measured':>9} {'error':>6}", end="   ")
    print(f"{'MiB':>5} {'measured':>9} {'error':>6}")
    for case in given.cases.split(","):
        command = [sys.executable, __file__, "--one", case, *(["--cpu-time"] if given.cpu_time else [])]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            print(f"{case:18} failed: {run.stderr.strip().splitlines()[-1][:200]}", flush=True)
            continue
        row = json.loads(run.stdout.splitlines()[-1])
        rows.append(row)
        time_error, memory_error = (row[f"predicted_{what}"] / row[what] - 1 for what in ("seconds", "mib"))
        print(
            f"{case:18} {row['plan_seconds']:7.2f} {row['predicted_seconds']:9.2f} {row['seconds']:9.2f} "
            f"{time_error:+6.0%}   {row['predicted_mib']:5.0f} {row['mib']:9.0f} {memory_error:+6.0%}",
            flush=True,
        )
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
