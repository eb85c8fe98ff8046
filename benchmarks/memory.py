"""Check that ``memory=`` is respected: twelve calls at three limits, each in a separate process.

    python benchmarks/memory.py                       # writes benchmarks/results/memory.json
    python benchmarks/memory.py --limits 64 --cases cnn_fisher_rao_4096

Each row is the growth of the resident set during one call, beside the limit and what the call says it needs in any case
(``Report.settings``): ``results_bytes``, statistics and copies of the model's size, and ``example_bytes``, one example,
where that is more than the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import saltflat

MIB = 1 << 20


class Decoder(nn.Module):
    """A small transformer with a large vocabulary."""

    def __init__(self, vocabulary: int = 20_000, positions: int = 256, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(positions, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, numbers: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(numbers.shape[1])
        hidden = self.block(self.tokens(numbers) + self.places, src_mask=mask, is_causal=True)
        result: Tensor = self.head(hidden)
        return result


def cnn() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def images(examples: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, *shape), torch.randint(10, (examples,))


def batches(data: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data[0].split(size), data[1].split(size), strict=True))


def measured(model: nn.Module, data: Any, measures: Any, **options: Any) -> Callable[[str], Any]:
    return lambda memory: saltflat.measure(model, data, measures=measures, memory=memory, **options)


def text(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(20_000, (examples, 256)), torch.randint(20_000, (examples, 256))


# Each case: the call, as a function of the limit.
CASES: dict[str, Callable[[], Callable[[str], Any]]] = {
    "cnn_fisher_rao_512": lambda: measured(cnn(), batches(images(4096, 3, 32, 32), 512), "fisher_rao_norm"),
    "cnn_fisher_rao_2048": lambda: measured(cnn(), batches(images(4096, 3, 32, 32), 2048), "fisher_rao_norm"),
    "cnn_fisher_rao_4096": lambda: measured(cnn(), images(4096, 3, 32, 32), "fisher_rao_norm"),
    "cnn_quick": lambda: measured(cnn(), images(1024, 3, 32, 32), "quick"),
    "cnn_input_robustness": lambda: measured(cnn(), images(1024, 3, 32, 32), "input_robustness"),
    "cnn_kappa": lambda: measured(cnn(), images(256, 3, 32, 32), "kappa"),
    "cnn_fisher_logdet": lambda: measured(cnn(), images(1024, 3, 32, 32), "fisher_logdet"),
    "cnn_hessian_top": lambda: measured(cnn(), images(128, 3, 32, 32), "hessian_top_eigenvalue"),
    "mlp_quick": lambda: measured(mlp(), images(8192, 784), "quick"),
    "mlp_hessian_top": lambda: measured(mlp(), images(4096, 784), "hessian_top_eigenvalue"),
    "mlp_sharpness": lambda: measured(mlp(), images(4096, 784), ["sharpness", "adaptive_sharpness"]),
    "decoder_trace": lambda: measured(Decoder(), text(4), "hessian_trace", columns="sampled:2"),
}


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def one(case: str, limit: int) -> dict[str, float]:
    """Return the growth of this process during one call."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    small = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 10))
    saltflat.measure(small, images(20, 1, 4, 4), measures="all", memory="1MiB")  # loads what is loaded once
    call = CASES[case]()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS:")
    report = call(f"{limit}MiB")
    growth = (resident("VmHWM:") - before) / MIB
    stated = {name: report.settings[f"{name}_bytes"] / MIB for name in ("results", "example")}
    return {"growth": growth, **stated, "seconds": report.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", default="64,256,1024", help="MiB, separated by commas")
    parser.add_argument("--cases", default=",".join(CASES), help="names, separated by commas")
    parser.add_argument("--out", type=Path, help="write the rows here, as JSON")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "LIMIT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one[0], int(given.one[1]))))
        return
    rows = []
    print(f"{'case':24} {'limit':>6} {'results':>8} {'example':>8} {'growth':>8} {'seconds':>8}   MiB")
    for case in given.cases.split(","):
        for limit in map(int, given.limits.split(",")):
            run = subprocess.run(
                [sys.executable, __file__, "--one", case, str(limit)], capture_output=True, text=True, check=False
            )
            if run.returncode:
                print(f"{case:24} {limit:6}   failed: {run.stderr.strip().splitlines()[-1][:200]}", flush=True)
                continue
            found = json.loads(run.stdout.splitlines()[-1])
            rows.append({"case": case, "limit": limit, **found})
            over = "" if found["growth"] <= max(limit, found["example"]) + found["results"] else "  OVER"
            numbers = f"{found['results']:8.0f} {found['example']:8.0f} {found['growth']:8.0f} {found['seconds']:8.1f}"
            print(f"{case:24} {limit:6} {numbers}{over}", flush=True)
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
