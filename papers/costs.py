"""What is left to run, and what it would take on one H200: estimates from rates that were measured."""

import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pages import make_head, make_row

from saltflat.results.text import format_count
from saltflat.studies import Results, Study

TITLE = "## Not run yet"
SIZES = {"mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}  # training images of the data sets


@dataclass(frozen=True)
class Rate:
    """How long a network takes on an H200.

    Attributes:
        epoch: seconds of an epoch of 50,000 images in batches of 128, in bf16, of networks that are trained at once.
        together: how many these are.
        measuring: seconds in which one network is measured on 1000 images, in float64.
        penalty: epochs of the Fisher penalty, in plain ones.
    """

    epoch: float
    together: int
    measuring: float
    penalty: float


# Measured: the epochs of LeNets, cnn6, ResNet-20 and WRN-16-4 and the LeNets' measuring (docs/figures.md#studies), the
# MLPs (rows of Tsuzuku et al.), the penalty of ResNet-20 and that of cnn6 (rows of Jia and Su). Estimated: the epochs
# of WRN-28-2 and DenseNet-BC, from ResNet-20 and WRN-16-4 by the numbers of convolutions and multiplications; all other
# measuring, from the diagonal of a ResNet-20 in float32, four times as long for float64 and further measures, and in
# proportion to multiplications.
RATES = {
    "mlp": Rate(2.3, 108, 0.25, 5.0),
    "lenet5": Rate(0.98, 48, 0.11, 5.0),
    "cnn6": Rate(0.45, 1, 2.2, 5.0),
    "resnet20": Rate(0.99, 1, 0.7, 5.5),
    "wrn_16_4": Rate(0.96, 1, 5.0, 5.5),
    "wrn_28_2": Rate(1.4, 1, 3.6, 5.5),
    "densenet_bc": Rate(5.2, 1, 5.1, 5.5),
}
TWO_PASSES = 2.1  # SAM and ASAM, in plain epochs
FLOOR = 1e-3  # seconds of a step, however small: assumed, not measured
GRADIENTS = 0.25  # measures of gradients and inputs alone, in those of curvature: assumed, not measured
KAPPA = 1.0  # seconds for the eigenvalues of all layers' blocks of a LeNet: assumed, not measured


@dataclass(frozen=True)
class Part:
    """A study of a page.

    Attributes:
        title: what it is, in words.
        command: the words after ``run.py`` that run it.
        folder: of its rows.
        study: its definition.
        again: images on which its networks are measured again, in another form.
    """

    title: str
    command: str
    folder: Path
    study: Study
    again: int = 0

    @property
    def left(self) -> dict[str, dict[str, Any]]:
        """The settings of the networks without a row."""
        rows = {path.stem for path in (self.folder / "rows").glob("*.json")}
        return {key: config for key, config in self.study.runs().items() if key not in rows}


def list_left(results: Results, done: Container[str]) -> list[str]:
    """Return the keys of the finished networks that a further measurement lacks and whose weights are there.

    Args:
        results: of the study.
        done: keys of the networks that were measured again before.
    """
    left = [key for key, row in results.rows.items() if row.readings and key not in done]
    there = [key for key in left if (results.folder / "weights" / f"{key}.safetensors").exists()]
    if len(there) < len(left):
        print(
            f"{results.study.name}: {len(left) - len(there)} networks cannot be measured again without their weights, "
            "which are not here. Delete their rows to train them again.",
            flush=True,
        )
    return there


def estimate_seconds(study: Study, configs: Iterable[Mapping[str, Any]], again: int = 0) -> float:
    """Return how many seconds it would take to train and measure networks, at most, where a target stops them.

    Args:
        study: the study.
        configs: settings of the networks.
        again: images on which they are measured again.
    """
    configs = list(configs)
    sizes = Counter(config["batch_size"] for config in configs)
    data = min(SIZES[study.data.name], study.data.train_limit or 10**9) - (study.data.held_out or 0)
    total = 0.0
    for config in configs:
        rate = RATES[config["network"]]
        measured = config["train_size"] or data
        images = measured + config["confusion"]
        at_once = min(study.together, sizes[config["batch_size"]], rate.together)
        step = config["batch_size"] * rate.epoch / rate.together / SIZES["cifar10"] * at_once
        epoch = images / config["batch_size"] * max(step, FLOOR) / at_once
        slower = rate.penalty if config["fisher_penalty"] else TWO_PASSES if config["sam"] or config["asam"] else 1.0
        examples = min(study.measure_options["examples"] or measured, measured)
        eigenvalues = KAPPA * (1 + bool(again)) if "kappa" in study.measures else 0.0
        alone = all(name.startswith(("fisher_", "input_", "squared_norm")) for name in study.measures)
        measuring = rate.measuring * (examples * (GRADIENTS if alone else 1.0) + again) / 1000 + eigenvalues
        total += config["epochs"] * epoch * slower + measuring
    return total


def write_spent(out: Path) -> Iterator[str]:
    """Yield how many networks of studies have rows, and how long they took on GPUs."""
    seconds: Counter[str] = Counter()
    networks: Counter[str] = Counter()
    others = 0
    for path in sorted(out.rglob("rows/*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        device = re.fullmatch(r"cuda\S* \((.*)\)", row["made_with"].get("device", ""))
        if device is None:
            others += 1
        else:
            seconds[device[1]] += sum(row["seconds"].values())
            networks[device[1]] += 1
    beside = f" Not in this time: {format_count(others, 'network')} last measured on a CPU." if others else ""
    for name, number in networks.items():
        took = seconds[name] / 60
        yield f"Rows so far: {number} networks, trained and measured in {took:.1f} minutes of an {name}.{beside}"
        yield ""


def write_left(parts: Iterable[Part]) -> Iterator[str]:
    """Yield what is left to run, with its command and its estimated cost; nothing if nothing is."""
    left = [(part, configs) for part in parts if (configs := part.left)]
    if not left:
        return
    yield TITLE
    yield ""
    yield (
        "In the order of their value. Minutes are estimates for one H200: from measured rates "
        "([figures](../../docs/figures.md#studies)) and, where there is none, from assumptions that `papers/costs.py` "
        "names; where a target stops networks, all epochs are counted. An interrupted command resumes where it stopped."
    )
    yield ""
    yield make_head("what", "networks left", "command", "estimated GPU minutes")
    for part, configs in left:
        minutes = estimate_seconds(part.study, configs.values(), part.again) / 60
        count = f"{len(configs)} of {len(part.study.runs())}"
        yield make_row([part.title, count, f"`run.py {part.command}`", f"{max(minutes, 1):.0f}"])
    yield ""
