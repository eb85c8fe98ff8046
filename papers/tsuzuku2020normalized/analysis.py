"""What the rows say: correlations with the gap, what is left of them at equal training loss, and slopes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NORMALIZED = (
    "normalized_sharpness",
    "normalized_sharpness_printed",
    "normalized_sharpness_printed(side='columns')",
    "parameterwise_normalized_sharpness",
    "regularized_normalized_sharpness",
)
BASELINES = ("hessian_trace", "squared_norm")
OTHERS = ("minimum_sharpness", "kappa_trace", "rho", "fisher_rao_norm", "fisher_rao_diagonal")
MEASURES = (*NORMALIZED, *BASELINES, *OTHERS)


@dataclass(frozen=True)
class Pass:
    """How the networks of a study are measured once more.

    Attributes:
        meaning: in words.
        logits: the option of :func:`saltflat.measure`.
        folded: whether BatchNorm is folded first.
    """

    meaning: str
    logits: str = "none"
    folded: bool = False


PASSES = {
    "logits_std": Pass("logits of unit deviation", logits="std"),
    "folded": Pass("BatchNorm folded", folded=True),
    "folded_logits_std": Pass("BatchNorm folded, logits of unit deviation", logits="std", folded=True),
}


@dataclass(frozen=True)
class Network:
    """A network of the paper.

    Attributes:
        title: its name in the paper.
        network: its name in saltflat.
        passes: how it is measured again.
    """

    title: str
    network: str
    passes: tuple[str, ...]


NETWORKS = {
    "mlp": Network("MLP", "mlp", ("logits_std",)),
    "lenet": Network("LeNet", "lenet5", ("logits_std",)),
    "wrn": Network("WRN-16-4", "wrn_16_4", tuple(PASSES)),
}


def list_datasets(part: str, network: str) -> tuple[str, ...]:
    """Return the data sets on which a part trains a network.

    >>> list_datasets("equal-loss", "lenet"), list_datasets("depth-width", "lenet")
    (('cifar10',), ())
    """
    if part == "equal-loss":
        return ("cifar10",) if network != "wrn" else ()
    if part == "depth-width":
        return ("mnist",) if network == "mlp" else ()
    return ("mnist", "cifar10")


def write_tables(out: Path) -> Iterator[str]:
    """Yield the README's lines."""
    yield "not tested (no rows yet)"
