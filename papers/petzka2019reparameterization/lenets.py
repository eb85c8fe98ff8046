"""Figures 1 and 2: LeNets on CIFAR-10 with four initializations and four batch sizes, as studies."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from costs import Part
from rescaling import measure_rescaled

from saltflat.studies import Study

MEASURES = ("kappa", "kappa_trace", "rho", "hessian_trace", "squared_norm")
# The paper's N(0, sqrt .1) can mean a variance or a deviation of 0.1: both are trained (choose_normal in lenet_tables).
INITS: dict[str, tuple[str, float]] = {
    "Xavier normal": ("xavier_normal", 1.0),
    "Kaiming uniform": ("kaiming_uniform", 1.0),
    "uniform(-0.1, 0.1)": ("uniform", 0.1),
    "normal, variance 0.1": ("normal", 0.1**0.5),
    "normal, deviation 0.1": ("normal", 0.1),
}
RULES = {"epochs": "after a fixed number of epochs", "loss": "stopped at one training loss"}
TARGET_LOSS = 0.5
# Batches with their learning rates, and how many epochs. An epoch in batches of 4 takes 12,500 steps: fewer of them.
BATCHES = {"large": ((32, 0.008), (64, 0.02), (512, 0.1)), "small": ((4, 0.001),)}
EPOCHS = {"epochs": {"large": 150, "small": 40}, "loss": {"large": 150, "small": 80}}
SEEDS = 9
EXAMPLES = 2000  # images that are measured
LAST = 2  # linear layers that the paper rescales: those of 84 and of 10 units
NAMES = tuple(f"lenets-{rule}-{size}" for size in BATCHES for rule in RULES)  # in the order of their value


def build_study(name: str, scale: str) -> Study:
    """Return one of the studies: at the smallest scale tiny networks on few images."""
    _, rule, size = name.split("-")
    small = scale == "smoke"
    tiny = {"channels": [4, 6], "units": [24, 16]} if small else {}
    batches = (((20, 0.2), (10, 0.1)) if size == "large" else ((5, 0.05),)) if small else BATCHES[size]
    stop = {"loss": 2.2 if small else TARGET_LOSS} if rule == "loss" else {}
    return Study(
        name=f"petzka2019-{name}-{scale}",
        data={"name": "cifar10", "normalize": "half", **({"train_limit": 60, "test_limit": 60} if small else {})},
        network="lenet5",
        axes={"init, init_scale": list(INITS.values()), "batch_size, lr": list(batches)},
        seeds=1 if small else SEEDS,
        settings={"optimizer": "sgd", "dtype": "float32" if small else "tf32", **tiny},
        stop={"epochs": 20 if small else EPOCHS[rule][size], **stop},
        measures=MEASURES,
        measure={"examples": 6 if small else EXAMPLES, "dtype": "float64", "memory": "16GiB"},
        together=len(INITS) * SEEDS,
    )


def list_parts(out: Path, scale: str = "full") -> Iterator[Part]:
    """Yield the studies in the order of their value.

    Args:
        out: folder with a folder for each study.
        scale: ``"full"`` or ``"smoke"``.
    """
    for name in NAMES:
        rule = name.split("-")[1]
        study = build_study(name, scale)
        batches = ", ".join(str(batch) for batch, _ in study.axes["batch_size, lr"])
        title = f"Figures 1 and 2, {RULES[rule]}: batches of {batches}"
        yield Part(title, f"lenets --study {name}", out / name, study, again=EXAMPLES)


def run_studies(names: Sequence[str], out: Path, scale: str, device: str, data: Path) -> None:
    """Train and measure the networks of studies, rescale them, and measure them again."""
    for name in names:
        results = build_study(name, scale).run(out / name, device=device, data_folder=data, every=60.0)
        counts = ", ".join(f"{count} {status}" for status, count in results.counts.items() if count)
        print(f"{results.study.name}: {counts}", flush=True)
        measure_rescaled(results, out / name / "rescaled.json", device, data, MEASURES, LAST)
