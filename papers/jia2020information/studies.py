"""The paper's scenarios and tables as studies: networks, recipes and grids, in the order of their value."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from costs import Part

from saltflat.studies import Results, Study

# The Gram matrix is that of 10,000 random training images, 100 subsets of which are drawn; in float64 always.
LOGDET, SPECTRAL = "fisher_logdet(pool=10000)", "fisher_spectral_radius(pool=10000)"
BASELINES = {
    "fisher_frobenius": "Frobenius norm",
    SPECTRAL: "spectral radius",
    "input_robustness": "robustness",
    "fisher_trace": "Fisher trace",
}
MEASURES = (LOGDET, *BASELINES)  # of the scenarios
FISHER = (LOGDET, "fisher_trace")  # of the tables
# Measured again with BatchNorm folded, and the log-determinant with logits of norm 25, as in the authors' code.
INVARIANT = ("normalized_sharpness", "minimum_sharpness", "kappa_trace", "rho", "relative_flatness", "fisher_rao_norm")
FOLDED, NORM = "folded", "norm25"
FEW = 2000  # images that the invariant measures look at, a tenth of them with 100 classes, which cost ten times as much
AXIS = "fisher_penalty, sam, asam"
Method: TypeAlias = tuple[float, float, float]  # a value of the axis
METHODS: dict[str, Method] = {
    "sgd": (0.0, 0.0, 0.0),
    "fisher": (10.0, 0.0, 0.0),  # beta of the authors' code
    "sam": (0.0, 0.05, 0.0),
    "asam": (0.0, 0.0, 0.5),
}
BETAS = (10.0, 20.0, 30.0, 40.0, 50.0, 75.0, 100.0, 125.0)  # all that the paper tries
RADII = {"sam": (0.02, 0.05, 0.1), "asam": (0.2, 0.5, 1.0)}
TUNED = "cnn"  # beta and radii of the others are those of METHODS
HELD_OUT, TUNING_EPOCHS = 5000, 40
SEEDS = 3
TARGET_ERROR, TARGET_LOSS = 0.05, 0.15
CONFUSION = (0, 1000, 2000, 3000, 4000, 5000)
IMAGES = 10_000  # of Scenario I
# Scenarios II and III share the networks with the fourth augmentation and batches of 128.
AUGMENTATIONS = {("none", 4): "none", ("flip", 4): "flips", ("flip_crop", 1): "1-crop-f", ("flip_crop", 4): "4-crop-f"}
BATCHES = (128, 256, 512, 1024)


@dataclass(frozen=True)
class Network:
    """A network of Table 1.

    Attributes:
        title: its name in the paper.
        network: its name in saltflat.
        epochs: how many it is trained for here.
        recipe: settings of training.
        tiny: arguments at the smallest scale.
        equal: the constant learning rate, and the most epochs, of networks that are stopped at a target.
    """

    title: str
    network: str
    epochs: int
    recipe: Mapping[str, Any]
    tiny: Mapping[str, Any]
    equal: tuple[float, int]
    penalty: Mapping[str, Any] = field(default_factory=dict)


COMMON = {"momentum": 0.9, "batch_size": 128, "augment": "flip_crop", "dtype": "bf16", "schedule": "steps"}
NETWORKS = {
    "cnn": Network(
        "CNN",
        "cnn6",
        200,
        {"lr": 0.01, "weight_decay": 1e-4, "nesterov": True, "milestones": [0.5, 0.75]},
        {"width": 2},
        (0.01, 200),
        {"fisher_clip": 5.0},
    ),
    "resnet20": Network(
        "ResNet-20",
        "resnet20",
        60,
        {"lr": 0.1, "weight_decay": 1e-4, "milestones": [0.5, 0.75]},
        {"width": 2},
        (0.02, 100),
        {"fisher_start_epoch": 18},
    ),
    "wrn": Network(
        "WRN-28-2",
        "wrn_28_2",
        60,
        {"lr": 0.1, "weight_decay": 5e-4, "nesterov": True, "decay": 0.2, "milestones": [0.3, 0.6, 0.8]},
        {"width": 2, "factor": 1},
        (0.02, 100),
        {"fisher_start_epoch": 18},
    ),
    "densenet": Network(
        "DenseNet-BC",
        "densenet_bc",
        60,
        {"lr": 0.1, "weight_decay": 1e-4, "nesterov": True, "batch_size": 64, "milestones": [0.5, 0.75]},
        {"growth": 2, "depth": 10},
        (0.02, 100),
        {"fisher_start_epoch": 18},
    ),
}
# In the order of their value.
NAMES = (
    "scenario-i", "tune-cnn", "table1-cnn-cifar10", "error-cnn", "scenarios-ii-iii", "table1-resnet20-cifar10",
    "table1-wrn-cifar10", "loss-resnet20", "loss-wrn", "error-resnet20", "error-wrn", "table1-cnn-cifar100",
    "table1-wrn-cifar100", "table1-densenet-cifar10", "table1-densenet-cifar100", "loss-densenet",
)  # fmt: skip
TITLES = {
    "scenario": "Scenario I",
    "scenarios": "Scenarios II and III",
    "tune": "beta and radii on held-out images",
    "table1": "Table 1",
    "loss": "Table 2, stopped at one training loss",
    "error": "all methods, stopped at one training error",
}


def make_study(name: str, scale: str, network: str, dataset: str = "cifar10", **given: Any) -> Study:
    """Return a study; at the smallest scale of a tiny network on few images.

    Args:
        name: of the study.
        scale: ``"full"`` or ``"smoke"``.
        network: a key of ``NETWORKS``.
        dataset: ``"cifar10"`` or ``"cifar100"``.
        given: ``axes``, ``epochs``, and where they differ ``seeds``, ``stop``, ``held_out``, ``measures`` and
            ``examples`` (all training images); all others are settings.
    """
    small, of = scale == "smoke", NETWORKS[network]
    axes, epochs, seeds = given.pop("axes"), given.pop("epochs"), given.pop("seeds", SEEDS)
    stop, held_out = given.pop("stop", {}), given.pop("held_out", None)
    measures, examples = given.pop("measures", FISHER), given.pop("examples", None)
    settings = {**COMMON, **of.recipe, **given, **(of.tiny if small else {})}
    if small:
        settings |= {"dtype": "float32", "batch_size": 20, "lr": 0.02, "fisher_start_epoch": 0}
    data = {"name": dataset, "normalize": "standard", **({"train_limit": 40, "test_limit": 40} if small else {})}
    return Study(
        name=f"jia2020-{name}-{scale}",
        data={**data, **({"held_out": 10 if small else held_out} if held_out else {})},
        network=of.network,
        axes=axes,
        seeds=1 if small else seeds,
        settings={key: value for key, value in settings.items() if not any(key in axis.split(", ") for axis in axes)},
        stop={"epochs": 2 if small else epochs, **stop},
        measures=measures,
        measure={"examples": examples, "dtype": "float64", "memory": "48GiB"},
        together=8,
    )


def build_study(name: str, scale: str, chosen: Mapping[str, Method] | None = None) -> Study:
    """Return one of the studies.

    Args:
        name: one of ``NAMES``.
        scale: ``"full"`` or ``"smoke"``.
        chosen: penalty and radii of the CNN, by :func:`choose_methods`; those of ``METHODS`` if None.
    """
    small = scale == "smoke"
    kind, *rest = name.split("-")
    # The learning rate is divided by 10 where the loss does not improve; patience is not said in the paper.
    plateau: dict[str, Any] = {"schedule": "plateau", "epochs": 200, "nesterov": False, "measures": MEASURES}
    if kind == "scenario":
        axes: dict[str, Any] = {"confusion": [0, 10, 20] if small else list(CONFUSION)}
        sizes: dict[str, Any] = {"train_size": 20 if small else IMAGES, "train_subset": "random"}
        return make_study(name, scale, "resnet20", axes=axes, **plateau, **sizes)
    if kind == "scenarios":
        batches = (20, 10) if small else BATCHES
        grid = [(*each, batches[0]) for each in AUGMENTATIONS] + [("flip_crop", 4, batch) for batch in batches[1:]]
        return make_study(name, scale, "resnet20", axes={"augment, crop, batch_size": grid}, **plateau)
    network = NETWORKS[rest[0]]
    methods = {**METHODS, **(chosen if chosen is not None and rest[0] == TUNED else {})}
    if kind == "tune":
        tries = [METHODS["sgd"], *((beta, 0.0, 0.0) for beta in BETAS)]
        tries += [(0.0, rho, 0.0) for rho in RADII["sam"]] + [(0.0, 0.0, rho) for rho in RADII["asam"]]
        axes = {AXIS: [tries[0], tries[1], tries[9], tries[12]] if small else tries}
        options: dict[str, Any] = {"seeds": 1, "held_out": HELD_OUT, "measures": ("squared_norm",), "examples": 1}
        return make_study(name, scale, rest[0], axes=axes, epochs=TUNING_EPOCHS, **options, **network.penalty)
    if kind == "table1":
        axes = {AXIS: [methods["sgd"], methods["fisher"]] if rest[1] == "cifar100" else list(methods.values())}
        return make_study(name, scale, rest[0], rest[1], axes=axes, epochs=network.epochs, **network.penalty)
    lr, epochs = network.equal
    axes = {AXIS: [methods["sgd"], methods["fisher"]] if kind == "loss" else list(methods.values())}
    target = {"loss": 2.5 if small else TARGET_LOSS} if kind == "loss" else {"error": 0.95 if small else TARGET_ERROR}
    penalty = {key: value for key, value in network.penalty.items() if key != "fisher_start_epoch"}
    constant: dict[str, Any] = {"schedule": "constant", "lr": lr, "epochs": epochs, "stop": target}
    return make_study(name, scale, rest[0], axes=axes, **constant, **penalty)


def list_passes(name: str) -> tuple[str, ...]:
    """Return how the networks of a study are measured again."""
    kind = name.partition("-")[0]
    return () if kind == "tune" else (FOLDED, NORM) if kind in ("table1", "loss") else (FOLDED,)


def choose_methods(out: Path, scale: str) -> dict[str, Method] | None:
    """Return, of every method, the value with the smallest error on the held-out images; None before all are trained.

    Args:
        out: folder with a folder for each study.
        scale: ``"full"`` or ``"smoke"``.
    """
    folder = out / f"tune-{TUNED}"
    if not (folder / "study.json").exists():
        return None
    results = Results.load(folder)
    if results.counts["missing"] or results.study != build_study(f"tune-{TUNED}", scale):
        return None
    errors: dict[Method, float] = {
        tuple(float(row.config[name]) for name in AXIS.split(", ")): row.outcome.test_error  # type: ignore[misc]
        for row in results.rows.values()
        if row.outcome is not None and row.status == "done"
    }
    best = {}
    for place, method in enumerate(("fisher", "sam", "asam")):
        tried = [each for each in errors if each[place] > 0]
        best[method] = min(tried, key=lambda each: errors[each]) if tried else METHODS[method]
    return {"sgd": METHODS["sgd"], **best}


def get_method(config: Mapping[str, Any]) -> str:
    """Return the method of a network."""
    active = [name for name in AXIS.split(", ") if config[name] > 0]
    return {"fisher_penalty": "fisher"}.get(active[0], active[0]) if active else "sgd"


def list_parts(out: Path, scale: str, names: Sequence[str] = NAMES) -> Iterator[Part]:
    """Yield studies in the order of their value."""
    chosen = choose_methods(out, scale)
    for name in names:
        study, passes = build_study(name, scale, chosen), list_passes(name)
        kind, *rest = name.split("-")
        what = f", {NETWORKS[rest[0]].title}" if rest and rest[0] in NETWORKS else ""
        dataset = {"cifar100": " on CIFAR-100", "cifar10": " on CIFAR-10"}.get(rest[-1], "") if rest else ""
        # A log-determinant alone takes a gradient of every image: little beside exact curvature.
        again = FEW if FOLDED in passes else 0
        yield Part(f"{TITLES[kind]}{what}{dataset}", f"train --study {name}", out / name, study, again)
