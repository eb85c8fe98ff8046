"""Time a step toward flat minima beside a plain one: ratios of alternating steps in one run."""

import argparse
import json
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import torch
from networks import CLASSES, NETWORKS
from parts.clock import in_turns
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.training import ASAM, SAM, FisherPenalty, GradientNormPenalty, penalty

SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
PARTS = 8
# Which ratio to a plain step was hoped for.
GOALS = {"SAM": 2.1, "FisherPenalty": 2.3, "FisherPenalty, whole=False": 2.3}


def plain(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def two_pass(kind: Callable[..., SAM | ASAM | GradientNormPenalty]) -> Callable[..., Callable[[], None]]:
    def build(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
        optimizer = kind(model, torch.optim.SGD, **SGD)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)

    return build


def make_penalized_step(**options: Any) -> Callable[..., Callable[[], None]]:
    def build(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        fisher = FisherPenalty(model, parts=PARTS, clip=5.0, **options)

        def step() -> None:
            fisher.step(optimizer, (inputs, targets))

        return step

    return build


def with_term(measure: str, **options: Any) -> Callable[..., Callable[[], None]]:
    def build(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        term = penalty(measure, **options)

        def step() -> None:
            optimizer.zero_grad()
            (F.cross_entropy(model(inputs), targets) + 1e-3 * term(model, (inputs, targets))).backward()
            optimizer.step()

        return step

    return build


COMPETITORS: dict[str, Callable[..., Callable[[], None]]] = {
    "plain": plain,
    "SAM": two_pass(SAM),
    "ASAM": two_pass(ASAM),
    "GradientNormPenalty": two_pass(GradientNormPenalty),
    "FisherPenalty": make_penalized_step(),
    "FisherPenalty, whole=False": make_penalized_step(whole=False),
    "FisherPenalty, vectorised": make_penalized_step(strategy="vectorized"),
    "FisherPenalty, loop": make_penalized_step(strategy="loop"),
}
# Penalties of measures write out every example's gradient: on small networks only.
TERMS: dict[str, Callable[..., Callable[[], None]]] = {
    "penalty fisher_trace": with_term("fisher_trace"),
    "penalty relative_flatness, last layer": with_term("relative_flatness", layers="11.weight"),
    "penalty hessian_trace, sampled:2": with_term("hessian_trace", columns="sampled:2"),
    "penalty hessian_trace": with_term("hessian_trace"),
}


def folded() -> nn.Module:
    """Return ResNet-20 with BatchNorm folded, so that the loss of a batch is the mean over its parts."""
    return saltflat.fold(NETWORKS["resnet20"].build().eval())


BUILDS = {name: each.build for name, each in NETWORKS.items()} | {"resnet20 folded": folded}


def ratios(network: str, batch: int, device: str, repeats: int, quick: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = BUILDS[network]().to(device).train()
    inputs = torch.randn(batch, *NETWORKS[network.split()[0]].shape, device=device)
    targets = torch.randint(CLASSES, (batch,), device=device)

    def finished(step: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            step()
            if device == "cuda":
                torch.cuda.synchronize()

        return call

    steps = COMPETITORS | (TERMS if network == "lenet" else {})
    calls = {name: finished(build(deepcopy(model), inputs, targets)) for name, build in steps.items()}
    for call in calls.values():  # what is done once: choosing kernels, trying torch.func
        call()
        if not quick:
            call()
    times = in_turns(calls, repeats)
    base = median(times["plain"])
    return [
        {
            "network": network,
            "batch": batch,
            "device": device,
            "step": name,
            "milliseconds": 1000 * median(each),
            "ratio": median(each) / base,
            "goal": GOALS.get(name),
        }
        for name, each in times.items()
    ]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(BUILDS), default=["resnet20", "resnet20 folded", "lenet"])
    parser.add_argument("--batches", nargs="+", type=int, default=[128])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repetitions")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to see that it runs")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    given = parser.parse_args(words)
    batches, repeats = ([16], 1) if given.quick else (given.batches, given.repeats)
    rows = [
        row
        for network in given.networks
        for batch in batches
        for row in ratios(network, batch, given.device, repeats, given.quick)
    ]
    title = f"A step, beside a plain one of SGD with momentum; {PARTS} parts"
    table = Table("network", "batch", "step", "ms", "ratio", "goal", title=title)
    for row in rows:
        goal = "" if row["goal"] is None else f"{row['goal']}: {'met' if row['ratio'] <= row['goal'] else 'NOT MET'}"
        table.add_row(
            row["network"], str(row["batch"]), row["step"], f"{row['milliseconds']:.1f}", f"{row['ratio']:.2f}", goal
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    if given.out:
        card = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": card}
        given.out.write_text(json.dumps(about | {"repeats": repeats, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
