"""Time reports on networks as people download them, with random weights, beside their sweep and a plain backward pass.

    python benchmarks/large_models.py --device cuda --out benchmarks/results/large_models.jsonl
    python benchmarks/large_models.py --scale tiny                     # small versions, on a CPU
    python benchmarks/large_models.py --models vit gpt2 --kinds trace --precision tf32

Every network is planned, then measured twice by one Meter: the first call prepares, the second only checks. A row is
written as soon as it is known, and rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import saltflat

MIB = 2**20
CLASSES = 1000
Batches = list[dict[str, Tensor]]
Built = tuple[nn.Module, Batches]
# What is measured: one number without certificate, and a report with one.
KINDS: dict[str, dict[str, Any]] = {
    "trace": {"measures": "hessian_trace", "certificate": False, "sampling": False},
    "report": {"measures": ["hessian_trace", "normalized_sharpness", "rho", "minimum_unit_sharpness"]},
}
TEXT = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_images(model: str, tiny: dict[str, Any], **options: Any) -> Callable[[bool], Built]:
    """Return a builder of a classifier of 64 images of 224 x 224 pixels, or of its small version."""

    def build_classifier(is_tiny: bool) -> Built:
        count, side, classes = (6, 32, 7) if is_tiny else (64, 224, CLASSES)
        config = getattr(transformers, f"{model}Config")(**(tiny if is_tiny else options), num_labels=classes)
        network: nn.Module = getattr(transformers, f"{model}ForImageClassification")(config)
        pixels, labels = torch.randn(count, 3, side, side), torch.randint(classes, (count,))
        return network, [
            {"pixel_values": x, "labels": y} for x, y in zip(pixels.split(16), labels.split(16), strict=True)
        ]

    return build_classifier


def make_text(model: str, kind: str, tiny: dict[str, Any], **options: Any) -> Callable[[bool], Built]:
    """Return a builder of a model of 8 texts of 256 tokens, or of its small version."""

    def build_model(is_tiny: bool) -> Built:
        config = getattr(transformers, f"{model}Config")(**(tiny if is_tiny else options))
        network: nn.Module = getattr(transformers, f"{model}{kind}")(config)
        tokens = torch.randint(config.vocab_size, (4, 12) if is_tiny else (8, 256))
        labels = tokens if "LM" in kind else torch.randint(2, (len(tokens),))
        return network, [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}]

    return build_model


SMALL_RESNET = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
SMALL_VIT = {**TEXT, "image_size": 32, "patch_size": 8}
LLAMA = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
RESNET_18 = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
# The columns of the loss, and how the network is built.
MODELS: dict[str, tuple[str, Callable[[bool], Built]]] = {
    "gpt2": (
        "sampled:4",
        make_text("GPT2", "LMHeadModel", {"vocab_size": 97, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    ),
    "llama-110m": ("sampled:4", make_text("Llama", "ForCausalLM", TEXT, **LLAMA, num_attention_heads=12)),
    "bert-base": ("exact", make_text("Bert", "ForSequenceClassification", TEXT)),
    "vit-b16": ("top:3", make_images("ViT", SMALL_VIT)),
    "resnet50": ("top:3", make_images("ResNet", SMALL_RESNET)),
    "resnet18": ("top:3", make_images("ResNet", SMALL_RESNET, **RESNET_18)),
    "convnext-t": ("top:3", make_images("ConvNext", {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2})),
    "swin-t": (
        "top:3",
        make_images(
            "Swin", {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
        ),
    ),
}


def prepare_model(build: Callable[[bool], Built], is_tiny: bool, device: torch.device) -> Built:
    """Return a network in eval mode with realistic running statistics, and its batches, on the device."""
    torch.manual_seed(0)
    model, batches = build(is_tiny)
    model = model.to(device)
    batches = [{name: value.to(device) for name, value in batch.items()} for batch in batches]
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the mean over the batches that follow
    if norms:
        with torch.no_grad():
            for batch in batches[:2]:
                model.train()(**batch)
    return model.eval(), batches


@contextmanager
def time_block(device: torch.device, into: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that a block takes to a row, the work of the GPU included."""
    synchronize(device)
    begin = time.perf_counter()
    yield
    synchronize(device)
    into[name] = time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_plain_pass(model: nn.Module, batches: Batches, device: torch.device) -> float:
    """Return the seconds of a forward and a backward pass over all examples, the least of three after a warm-up."""
    seconds: dict[str, float] = {}
    for number in range(4):
        with time_block(device, seconds, str(number)):
            for batch in batches:
                model(**batch).loss.backward()
        model.zero_grad()
    return min(seconds[str(number)] for number in (1, 2, 3))


def measure_model(name: str, kind: str, precision: str, is_tiny: bool, device: torch.device) -> dict[str, Any]:
    """Return the row of a network and a kind of report."""
    columns, build = MODELS[name]
    model, batches = prepare_model(build, is_tiny, device)
    seconds: dict[str, float] = {"forward_backward": time_plain_pass(model, batches, device)}
    options = {**KINDS[kind], "columns": columns, "precision": precision, "memory": "16GiB", "progress": False}
    with time_block(device, seconds, "plan"):
        plan = saltflat.plan(
            model, batches, "model", **{key: each for key, each in options.items() if key != "progress"}
        )
    meter = saltflat.Meter(model, "model", **options)
    used = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        used = torch.cuda.memory_allocated(device)
    with time_block(device, seconds, "first"):
        report = meter.measure(batches)
    peak = (torch.cuda.max_memory_allocated(device) - used) / MIB if device.type == "cuda" else None
    with time_block(device, seconds, "second"):
        report = meter.measure(batches)
    numbers: Counter[str] = Counter()
    for each in plan.parameters:
        numbers[each.way] += prod(each.shape)
    return {
        "model": name,
        "kind": kind,
        "precision": precision,
        "scale": "tiny" if is_tiny else "full",
        "examples": report.examples,
        "parameters": sum(value.numel() for value in model.parameters()),
        "columns": columns,
        "strategy": report.settings["strategy"],
        "numbers_by_way": numbers,
        "preparations": meter.num_preparations,
        "seconds": seconds,
        "seconds_by_step": dict(report.seconds_by_step),
        "predicted_seconds": plan.predicted_seconds,
        "predicted_mib": plan.predicted_bytes / MIB if plan.predicted_bytes is not None else None,
        "peak_mib": peak,
        "certificate": report.certificate,
        "readings": {key: reading.value for key, reading in report.items()},
        "left_out": dict(report.left_out),
        "device": report.device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def make_table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    table = Table("model", "kind", "strategy")
    headers = ("fwd-bwd s", "sweep s", "/ fwd-bwd", "first s", "second s", "second / sweep", "certificate s")
    for header in (*headers, "predicted s", "peak MiB", "predicted MiB"):
        table.add_column(header, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(row["model"], row["kind"], row["error"][:60])
            continue
        seconds, steps = row["seconds"], row["seconds_by_step"]
        sweep, plain = steps.get("sweep", float("nan")), seconds["forward_backward"]
        numbers = [plain, sweep, sweep / plain, seconds["first"], seconds["second"], seconds["second"] / sweep]
        numbers += [steps.get("certificate"), row["predicted_seconds"], row["peak_mib"], row["predicted_mib"]]
        cells = ["" if each is None else f"{each:.3g}" for each in numbers]
        table.add_row(row["model"], row["kind"], row["strategy"], *cells)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models that have no row yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--precision", choices=("ieee", "tf32"), default="ieee")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, help="append the rows here, as lines of JSON")
    given = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    torch.backends.cudnn.allow_tf32 = False  # convolutions on a GPU would otherwise keep 10 bits only
    known: list[dict[str, Any]] = []
    if given.out and given.out.exists():
        known = [json.loads(line) for line in given.out.read_text().splitlines()]
    asked = [(kind, name) for kind in given.kinds for name in given.models]
    done = {(row["kind"], row["model"], row["precision"], row["scale"]) for row in known if "error" not in row}
    rows = []
    for kind, name in asked:
        if (kind, name, given.precision, given.scale) in done:
            continue
        try:
            row = measure_model(name, kind, given.precision, given.scale == "tiny", torch.device(given.device))
        except Exception as error:  # the others are measured all the same
            row = {"model": name, "kind": kind, "precision": given.precision, "scale": given.scale}
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        print(f"{name}, {kind}: {row.get('error') or row['seconds']}", flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if given.device == "cuda":
            torch.cuda.empty_cache()
    Console(width=200).print(make_table([*known, *rows]))


if __name__ == "__main__":
    main()
