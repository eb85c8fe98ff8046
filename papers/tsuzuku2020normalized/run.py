"""Tsuzuku et al.'s experiments, Tables 1 and 2 and Figures 1 and 2: does normalized sharpness follow the gap?

    python papers/tsuzuku2020normalized/run.py tables --network mlp --dataset mnist    Tables 1 and 2
    python papers/tsuzuku2020normalized/run.py equal-loss --network mlp                the same, stopped at one loss
    python papers/tsuzuku2020normalized/run.py labels --network mlp --dataset mnist    Figure 1
    python papers/tsuzuku2020normalized/run.py depth-width                             Figure 2
    python papers/tsuzuku2020normalized/run.py tables --jobs 3                         three studies at a time
    python papers/tsuzuku2020normalized/run.py all --scale smoke                       everything, tiny, on a CPU
    python papers/tsuzuku2020normalized/run.py table                                   what was found, beside the paper
    python papers/tsuzuku2020normalized/run.py figures                                 draw from the rows
    python papers/tsuzuku2020normalized/run.py page                                    put the table into README.md

MNIST and CIFAR-10 have to be in data/ (or the folder that SALTFLAT_DATA names) as torchvision lays them out. If
interrupted, a part resumes where it stopped.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import saltflat
from saltflat.engine.custom_losses import normalize_logits
from saltflat.engine.losses import parse_loss
from saltflat.measures.normalized import (
    normalized_sharpness,
    normalized_sharpness_printed,
    parameterwise_normalized_sharpness,
)
from saltflat.measures.registry import MeasureResult
from saltflat.results.files import write_json
from saltflat.studies import Results, Study
from saltflat.studies.measurement import measure_network
from saltflat.studies.rebuild import load_trained_network
from saltflat.symmetry.fold import fold

sys.path.append(str(Path(__file__).parent.parent))  # what the papers share

from analysis import DATASETS, MEASURES, NEGATIVE, NETWORKS, NORMALIZED, PASSES, REGULARIZED, list_datasets
from costs import Part, list_left, write_left, write_spent
from figures import draw_figures
from pages import write_page
from tables import write_tables

HERE = Path(__file__).parent
PARTS = ("tables", "equal-loss", "labels", "depth-width")
ARCHITECTURES: dict[str, dict[str, Any]] = {"mlp": {"depth": 3, "width": 512}, "lenet": {}, "wrn": {}}
TINY: dict[str, dict[str, Any]] = {
    "mlp": {"depth": 3, "width": 24},
    "lenet": {"channels": [4, 6], "units": [24, 16]},
    "wrn": {"width": 4, "factor": 1},
}
SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "schedule": "cosine", "batch_size": 128}
TRAINING: dict[str, dict[str, Any]] = {
    "mlp": {**SGD, "lr": 0.02, "dtype": "tf32"},
    "lenet": {**SGD, "lr": 0.02, "dtype": "tf32"},
    "wrn": {**SGD, "lr": 0.1, "dtype": "bf16"},
}
# The three ways to regularize that the networks of Tables 1 and 2 differ in.
REGULARIZERS: dict[str, dict[str, list[float]]] = {
    "mlp": {
        "weight_decay": [0.0, 1e-5, 1e-4, 1e-3],
        "decoupled_weight_decay": [0.0, 1e-3, 1e-2],
        "dropout": [0.0, 0.25, 0.5],
    },
    "wrn": {
        "weight_decay": [0.0, 1e-4, 5e-4, 1e-3],
        "decoupled_weight_decay": [0.0, 1e-2],
        "dropout": [0.0, 0.3],
    },
}
REGULARIZERS["lenet"] = REGULARIZERS["mlp"]
SMOKE_REGULARIZERS = {"weight_decay": [0.0, 3e-3], "decoupled_weight_decay": [0.0, 0.03], "dropout": [0.0, 0.2]}
EPOCHS = {
    "tables": {"mlp": 100, "lenet": 100, "wrn-cifar10": 30, "wrn-mnist": 10},
    "labels": {"mlp": 200, "lenet": 300, "wrn": 40},
}
TARGET_LOSS = {"mlp": 0.7, "lenet": 0.7}  # of the study that stops every network at one training loss
# Random labels: on 10,000 images all three networks can fit them, on 50,000 a LeNet-5 cannot.
LABELED = 10_000
SHARES = {
    "mlp": [tenth / 10 for tenth in range(11)],
    "lenet": [tenth / 10 for tenth in range(11)],
    "wrn": [0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
}
SEEDS: dict[str, Any] = {
    "tables": {"mlp": 3, "lenet": 3, "wrn": 1},
    "equal-loss": 2,
    "labels": {"mlp": 5, "lenet": 5, "wrn": 2},
}
EXACT = {"examples": 2000, "dtype": "float64", "memory": "16GiB"}
# Float32 and fewer images: 9 gradients of 2.7 million weights for each image, four times over.
MEASUREMENT = {"mlp": EXACT, "lenet": EXACT, "wrn": {"examples": 500, "dtype": "float32", "memory": "16GiB"}}
SMOKE_MEASUREMENT = {"examples": 20, "dtype": "float64"}


def build_study(
    name: str, network: str, dataset: str, scale: str, axes: dict[str, Any], seeds: int, epochs: int, **changed: Any
) -> Study:
    """Return a study of one network on one data set, at the smallest scale with tiny networks on few images.

    Args:
        name: of the study.
        network: ``"mlp"``, ``"lenet"`` or ``"wrn"``.
        dataset: ``"mnist"`` or ``"cifar10"``.
        scale: ``"full"`` or ``"smoke"``.
        axes: of the study.
        seeds: number of seeds.
        epochs: the maximum number of epochs.
        changed: settings that differ from those of the network; ``stop``, the targets at which training stops; and
            ``more``, further measures.
    """
    small = scale == "smoke"
    stop, more = changed.pop("stop", {}), changed.pop("more", ())
    settings = {**TRAINING[network], **(TINY if small else ARCHITECTURES)[network], **changed}
    settings = {key: value for key, value in settings.items() if key not in axes}
    return Study(
        name=f"tsuzuku2020-{name}-{scale}",
        data={"name": dataset, "normalize": "standard", **({"train_limit": 200, "test_limit": 200} if small else {})},
        network=NETWORKS[network].network,
        axes=axes,
        seeds=seeds,
        settings={**settings, "batch_size": 20, "lr": 0.05, "dtype": "float32"} if small else settings,
        stop={"epochs": 20 if small else epochs, **stop},
        measures=(*MEASURES, *more),
        measure=SMOKE_MEASUREMENT if small else MEASUREMENT[network],
        together=4 if network == "wrn" else 128,  # the rows of a group are written together
    )


def build_tables_study(network: str, dataset: str, scale: str) -> Study:
    """Return the study of Tables 1 and 2: networks that differ in L2, decoupled weight decay and dropout."""
    small = scale == "smoke"
    axes = SMOKE_REGULARIZERS if small else REGULARIZERS[network]
    epochs = EPOCHS["tables"].get(network) or EPOCHS["tables"][f"{network}-{dataset}"]
    seeds = 1 if small else SEEDS["tables"][network]
    more = (REGULARIZED,) if network == "lenet" else ()
    return build_study(f"tables-{network}-{dataset}", network, dataset, scale, axes, seeds, epochs, more=more)


def build_equal_loss_study(network: str, scale: str) -> Study:
    """Return the study of Table 2 again, with every network stopped at the same training loss."""
    small = scale == "smoke"
    axes = SMOKE_REGULARIZERS if small else {**REGULARIZERS[network], "decoupled_weight_decay": [0.0, 1e-2]}
    return build_study(
        f"equal-loss-{network}",
        network,
        "cifar10",
        scale,
        axes,
        1 if small else SEEDS["equal-loss"],
        EPOCHS["tables"][network],
        schedule="constant",
        stop={"loss": 2.0 if small else TARGET_LOSS[network]},
    )


def build_labels_study(network: str, dataset: str, scale: str) -> Study:
    """Return the study of Figure 1: the share of random labels."""
    small = scale == "smoke"
    return build_study(
        f"labels-{network}-{dataset}",
        network,
        dataset,
        scale,
        {"label_noise": [0.0, 0.5, 1.0] if small else SHARES[network]},
        2 if small else SEEDS["labels"][network],
        EPOCHS["labels"][network],
        label_noise_kind="uniform",
        train_size=100 if small else LABELED,
    )


def build_depth_width_study(equal_loss: bool, scale: str) -> Study:
    """Return the study of Figure 2: MLPs of several depths and widths, for 20 epochs or up to one training loss."""
    small = scale == "smoke"
    rule: dict[str, Any] = {"stop": {"loss": 2.0 if small else 0.01}, "schedule": "constant"} if equal_loss else {}
    return build_study(
        "depth-width-equal-loss" if equal_loss else "depth-width",
        "mlp",
        "mnist",
        scale,
        {"depth": [1, 2] if small else [1, 2, 3, 4], "width": [4, 16] if small else [32, 128, 512, 2048]},
        2 if small else 3,
        40 if equal_loss else 20,
        **rule,
    )


def list_studies(part: str, networks: list[str], datasets: list[str], scale: str) -> Iterator[tuple[str, Study]]:
    """Yield the studies of a part with the names of their folders."""
    for network in networks:
        for dataset in list_datasets(part, network):
            if dataset not in datasets:
                continue
            if part == "tables":
                yield f"tables-{network}-{dataset}", build_tables_study(network, dataset, scale)
            elif part == "equal-loss":
                yield f"equal-loss-{network}", build_equal_loss_study(network, scale)
            elif part == "labels":
                yield f"labels-{network}-{dataset}", build_labels_study(network, dataset, scale)
            elif part == "depth-width":
                yield "depth-width", build_depth_width_study(False, scale)
                yield "depth-width-equal-loss", build_depth_width_study(True, scale)


def measure_again(results: Results, name: str, device: str, data: Path) -> None:
    """Measure every network of a study once more, with the logits normalized, BatchNorm folded, or both.

    Args:
        results: of the study, with its weights.
        name: of the pass, and of the file beside the rows that its values go to.
        device: to measure on.
        data: folder of the data sets.
    """
    path = results.folder / f"{name}.json"
    done: dict[str, dict[str, float | None]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    left = list_left(results, done)
    if not left:
        return
    again = PASSES[name]
    options = {**results.study.measure_options, "logits": again.logits}
    examples = results.study.data.examples(data)
    for number, key in enumerate(left, 1):
        made = load_trained_network(results, key, examples)
        inputs = made.inputs[: options["examples"]].to(device, next(made.model.parameters()).dtype)
        model = made.model.to(device)
        if again.folded:
            model = fold(model, inputs[:2])
        labels = made.labels[: len(inputs)].to(device)
        # Normalized sharpness of normalized logits comes from measure_clamped.
        names = MEASURES if again.logits == "none" else [name for name in MEASURES if name not in NORMALIZED]
        found = measure_network(model, inputs, labels, None, names, options).readings
        values = {measure: reading.value for measure, reading in found.items()}
        if again.logits != "none":
            values |= measure_clamped(model, inputs, labels, options)
        done[key] = {measure: value if value == value else None for measure, value in values.items()}
        write_json(done, path)
        if number % 10 == 0 or number == len(left):
            print(f"{results.study.name}, {name}: {len(done)} of {len(results.rows)} networks", flush=True)


def measure_clamped(model: nn.Module, inputs: Tensor, labels: Tensor, options: Mapping[str, Any]) -> dict[str, float]:
    """Return the forms of normalized sharpness with negative curvature taken as zero, as in the paper's equation (31).

    The loss of normalized logits is not convex in the outputs, so some entries of the Hessian's diagonal are negative.
    Their share is returned, too.
    """
    loss = normalize_logits(parse_loss("cross_entropy"), options["logits"])
    found = saltflat.compute_statistics(
        model, (inputs, labels), loss, "curvature_diagonal", memory=options["memory"], progress=False
    )["curvature_diagonal"]
    values = dict.fromkeys(NORMALIZED, 0.0)
    entries, negative = 0, 0
    for name, weight in model.named_parameters():
        diagonal = found[name].clamp_min(0.0)
        entries, negative = entries + diagonal.numel(), negative + int((found[name] < 0).sum())
        values[NORMALIZED[3]] += get_value(parameterwise_normalized_sharpness(weight.detach(), diagonal))
        if weight.dim() < 2:
            continue
        # Kernel positions of a convolution share the scales of their channels.
        w, f = (each if each.dim() == 2 else each.flatten(2)[None] for each in (weight.detach(), diagonal))
        values[NORMALIZED[0]] += get_value(normalized_sharpness(w, f))
        values[NORMALIZED[1]] += get_value(normalized_sharpness_printed(w, f))
        values[NORMALIZED[2]] += get_value(normalized_sharpness_printed(w, f, side="columns"))
    return {**values, NEGATIVE: negative / entries}


def get_value(found: MeasureResult | Tensor) -> float:
    """Return the number that a measure returned."""
    return float(found.value if isinstance(found, MeasureResult) else found)


def run_study(folder: Path, study: Study, again: bool, device: str, data: Path) -> None:
    """Train and measure the networks of a study, and measure them again if asked to."""
    results = study.run(folder, device=device, data_folder=data, every=120.0)
    counts = ", ".join(f"{count} {status}" for status, count in results.counts.items() if count)
    print(f"{study.name}: {counts}", flush=True)
    if again:
        network = next(name for name, each in NETWORKS.items() if each.network == study.network)
        for name in NETWORKS[network].passes:
            measure_again(results, name, device, data)


def run_studies(wanted: list[tuple[Path, Study, bool, str, Path]], jobs: int) -> None:
    """Run studies, several at a time in processes of their own: while one measures, another trains on the GPU."""
    if jobs <= 1 or len(wanted) <= 1:
        for each in wanted:
            run_study(*each)
        return
    with ProcessPoolExecutor(min(jobs, len(wanted)), mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_study, *each) for each in wanted]):
            done.result()


def list_parts(out: Path, scale: str) -> Iterator[Part]:
    """Yield the studies of the paper, for what is left to run."""
    titles = {"tables": "Tables 1 and 2", "equal-loss": "the same at one training loss", "labels": "Figure 1"}
    for part in PARTS:
        for name, study in list_studies(part, list(NETWORKS), list(DATASETS), scale):
            network = next(network for network, each in NETWORKS.items() if each.network == study.network)
            dataset = study.data.name
            times = len(NETWORKS[network].passes) if part in ("tables", "equal-loss") else 0
            title = f"{titles.get(part, 'Figure 2')}: {NETWORKS[network].title} on {DATASETS[dataset]}"
            command = part if part == "depth-width" else f"{part} --network {network} --dataset {dataset}"
            yield Part(title, command, out / name, study, again=times * study.measure_options["examples"])


def write_lines(out: Path, scale: str) -> str:
    """Return the generated part of the page."""
    return "\n".join([*write_tables(out), "", *write_spent(out), *write_left(list_parts(out, scale))]).rstrip()


def main(words: list[str] | None = None) -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*PARTS, "all", "table", "figures", "page"))
    parser.add_argument("--network", nargs="+", choices=tuple(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--dataset", nargs="+", choices=tuple(DATASETS), default=list(DATASETS))
    parser.add_argument("--scale", choices=("full", "smoke"), default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SALTFLAT_DATA", "data")))
    parser.add_argument("--out", type=Path, help="where rows go; results/ beside this script, or demo/ for smoke")
    parser.add_argument("--jobs", type=int, default=1, help="studies to run at the same time, on the same device")
    parser.add_argument("--once", action="store_true", help="leave the further measurements for a later call")
    given = parser.parse_args(words)
    if given.what == "page" and (given.scale == "smoke" or given.out is not None):
        parser.error("Expected the rows in results/ for the page, but got --scale smoke or --out. Try table instead.")
    out = given.out or (HERE / "results" if given.scale == "full" else Path("demo") / HERE.name)
    parts = PARTS if given.what == "all" else (given.what,) if given.what in PARTS else ()
    wanted = [
        (out / name, study, part in ("tables", "equal-loss") and not given.once, given.device, given.data)
        for part in parts
        for name, study in list_studies(part, given.network, given.dataset, given.scale)
    ]
    run_studies(wanted, given.jobs)
    if given.what in PARTS:
        smoke = " --scale smoke" if given.scale == "smoke" else ""
        where = "" if given.out is None else f" --out {given.out}"
        print(f"Next: run.py table{smoke}{where}, or run.py figures{smoke}{where}.")
    if given.what in ("all", "figures"):
        for path in draw_figures(out):
            print(f"drew {path.name}")
    if given.what in ("all", "table"):
        print(write_lines(out, given.scale))
    if given.what == "page":
        write_page(HERE / "README.md", write_lines(out, given.scale))


if __name__ == "__main__":
    main()
