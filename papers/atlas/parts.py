"""The parts of the atlas: a network on a data set, stopped at one training loss or after equal epochs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from saltflat.studies import Study

# Those of one sweep, and those of a few passes; a determinant needs tiny networks, and its spectral radius tells less.
MEASURES = (
    *("normalized_sharpness", "normalized_sharpness_printed", "normalized_sharpness_arxiv"),
    *("parameterwise_normalized_sharpness", "fisher_rao_diagonal", "fisher_rao_norm", "rho", "rho_max"),
    *("relative_flatness", "kappa_trace", "kappa_trace_max", "minimum_sharpness", "minimum_unit_sharpness"),
    *("adaptive_sharpness", "input_robustness", "hessian_trace", "fisher_trace", "fisher_frobenius"),
    *("squared_norm", "distance_from_init", "path_norm", "input_margin"),
)
CONTROLS = ("squared_norm", "distance_from_init", "path_norm", "input_margin")
ARMS = {"equal-loss": "stopped at one training loss", "equal-epochs": "after equal epochs"}

# optimizer, radius of SAM, learning rate, weight decay as torch.optim means it: of L2 with SGD, decoupled with AdamW.
METHOD = "optimizer, sam, lr, weight_decay"
SGD, ADAMW, RHO = (0.02, 0.06), (1e-3, 3e-3), 0.05
DECAYS = {"sgd": (0.0, 1e-3), "adamw": (0.0, 0.3)}


def list_methods(decays: Mapping[str, tuple[float, ...]]) -> list[list[Any]]:
    """Return the values of the joint axis of optimizers, learning rates and weight decays."""
    kinds = (("sgd", 0.0, SGD), ("adamw", 0.0, ADAMW), ("sgd", RHO, SGD))
    return [[kind, radius, lr, decay] for kind, radius, rates in kinds for lr in rates for decay in decays[kind]]


def pair_methods(methods: list[list[Any]], varies: str) -> list[tuple[list[Any], list[Any]]]:
    """Return the pairs of methods that differ in one thing: the optimizer, the learning rate or the weight decay.

    Learning rates and weight decays of different optimizers correspond by their rank.

    >>> pair_methods([["sgd", 0.0, 0.02, 0.0], ["adamw", 0.0, 0.001, 0.0]], "optimizer")
    [(['sgd', 0.0, 0.02, 0.0], ['adamw', 0.0, 0.001, 0.0])]
    """

    def describe(method: list[Any]) -> dict[str, Any]:
        kind, radius, lr, decay = method
        rates = SGD if kind == "sgd" else ADAMW
        return {"optimizer": (kind, radius), "lr": rates.index(lr), "weight_decay": decay > 0}

    found = []
    for place, one in enumerate(methods):
        for other in methods[place + 1 :]:
            a, b = describe(one), describe(other)
            if [name for name in a if a[name] != b[name]] == [varies]:
                found.append((one, other))
    return found


@dataclass(frozen=True)
class Part:
    """Networks of one architecture on one data set.

    Attributes:
        network, dataset, arm: what it consists of; ``arm`` is a key of ``ARMS``.
        title: for the reader.
        axes: of the study.
        settings: of all its networks.
        stop: of the study.
        seeds: number of seeds.
        examples: on which a network is measured.
        dtype: of the measurement.
        folded: whether BatchNorm is folded before measuring.
    """

    network: str
    dataset: str
    arm: str
    title: str
    axes: Mapping[str, list[Any]]
    settings: Mapping[str, Any]
    stop: Mapping[str, Any]
    seeds: int
    examples: int
    dtype: str = "float64"
    folded: bool = False

    @property
    def pair(self) -> str:
        """The network and data set."""
        return f"{self.network}-{self.dataset}"

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.pair}-{self.arm}"

    @property
    def methods(self) -> list[list[Any]]:
        """The values of the joint axis."""
        return list(self.axes[METHOD])

    def build_study(self) -> Study:
        """Return the study. Networks with BatchNorm are measured after folding, in a pass of their own."""
        kind = self.network.removesuffix("_small")
        return Study(
            self.name,
            data={"name": self.dataset, "normalize": "standard"},
            network={"resnet": "resnet20", "lenet": "lenet5"}.get(kind, kind),
            axes=dict(self.axes),
            seeds=self.seeds,
            settings={"momentum": 0.9, "label_noise_kind": "uniform", **self.settings},
            stop=dict(self.stop),
            measures=["squared_norm"] if self.folded else list(MEASURES),
            measure={"examples": self.examples, "dtype": self.dtype, "memory": "8GiB"},
        )


ALL: dict[str, list[Any]] = {
    METHOD: list_methods(DECAYS),
    "batch_size": [32, 128],
    "dropout": [0.0, 0.2],
    "label_noise": [0.0, 0.1],
}
FEW: dict[str, list[Any]] = {METHOD: list_methods({"sgd": (0.0,), "adamw": (0.0,)}), "label_noise": [0.0, 0.1]}
WIDTHS: dict[str, tuple[str, list[Any]]] = {
    "mlp": ("width", [64, 256]),
    "lenet": ("channels, units", [[[6, 16], [120, 84]], [[12, 32], [240, 168]]]),
    "resnet": ("width", [8, 16]),
}
# Of networks for a CPU.
SMALL_WIDTHS: dict[str, tuple[str, list[Any]]] = {
    "mlp": ("width", [32, 96]),
    "lenet": ("channels, units", [[[3, 8], [60, 42]], [[6, 16], [120, 84]]]),
    "resnet": ("width", [4, 8]),
}
TITLES = {"mlp": "MLP", "lenet": "LeNet", "resnet": "ResNet-20"}
DATASETS = {"mnist": "MNIST", "cifar10": "CIFAR-10"}


PAIRS = (("mlp", "mnist"), ("mlp", "cifar10"), ("lenet", "mnist"), ("lenet", "cifar10"), ("resnet", "cifar10"))


def list_parts(scale: str = "full") -> dict[str, Part]:
    """Return all parts by name, in the order of their numbers, which begin at 1.

    Args:
        scale: ``"full"``, or ``"smoke"`` for tiny networks on few images.
    """
    found = [make(*pair, arm) for make in (make_small_part, make_part) for pair in PAIRS for arm in ARMS]
    if scale == "smoke":
        found = [shrink_part(part) for part in found]
    return {part.name: part for part in found}


def make_part(network: str, dataset: str, arm: str) -> Part:
    """Return a part of the atlas that is meant for a GPU."""
    name, values = WIDTHS[network]
    residual = network == "resnet"
    axes = {**FEW, "batch_size": [32, 128]} if residual else dict(ALL)
    settings: dict[str, Any] = {"train_size": 5000, "dtype": "bf16" if residual else "tf32"}
    settings |= {"depth": 2} if network == "mlp" else {}
    # Networks that fit 10 % random labels have to learn them by heart before their loss is this small.
    stop = {"epochs": 100, "loss": 0.2} if arm == "equal-loss" else {"epochs": 40}
    title = f"{TITLES[network]} on {DATASETS[dataset]}"
    seeds = 2 if arm == "equal-loss" else 1
    examples = 250 if residual else 1000
    dtype = "float32" if residual else "float64"
    return Part(network, dataset, arm, title, {**axes, name: values}, settings, stop, seeds, examples, dtype, residual)


def make_small_part(network: str, dataset: str, arm: str) -> Part:
    """Return a part that a CPU trains and measures in minutes: smaller networks, fewer images and fewer axes."""
    residual, widths = network == "resnet", SMALL_WIDTHS[network]
    axes = {**(ALL if (network, dataset) == ("mlp", "mnist") else FEW), **dict([widths])}
    settings: dict[str, Any] = {"train_size": 1000, "batch_size": 32}
    examples, dtype = (100, "float32") if residual else (250, "float64")
    if network == "mlp":
        axes |= {"batch_size": [16, 64], "dropout": [0.0, 0.15]}
        settings = {"train_size": 2000, "depth": 2}
        examples = 500
    # Residual networks this small do not learn 1,000 images by heart.
    stop = {"epochs": 60, "loss": 0.7} if residual else {"epochs": 100, "loss": 0.2}
    stop = stop if arm == "equal-loss" else {"epochs": 40}
    title = f"small {TITLES[network]} (CPU) on {DATASETS[dataset]}"
    seeds = 2 if arm == "equal-loss" and not residual else 1
    return Part(f"{network}_small", dataset, arm, title, axes, settings, stop, seeds, examples, dtype, residual)


def shrink_part(part: Part) -> Part:
    """Return a part of the smallest scale: a few tiny networks on few images."""
    tiny: dict[str, list[Any]] = {"width": [4, 8], "channels, units": [[[2, 3], [8, 8]], [[3, 4], [10, 8]]]}
    methods = [each for each in part.methods if each[2] in (SGD[0], ADAMW[0]) and not each[3]]
    axes = {METHOD: methods, "label_noise": part.axes["label_noise"]}
    seeds = part.seeds
    if part.folded:
        axes, seeds = {METHOD: methods[:2], "width": [2, 4]}, 1
    else:
        axes |= {name: values for name, values in tiny.items() if name in part.axes}
    stop = {"epochs": 3, "loss": 2.35} if part.arm == "equal-loss" else {"epochs": 2}
    settings = {**part.settings, "train_size": 100, "batch_size": 50, "dtype": "float32"}
    return replace(part, axes=axes, settings=settings, stop=stop, seeds=seeds, examples=20)
