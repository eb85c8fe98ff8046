"""The feature robustness of a layer, with everything needed to read, plot and repeat it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from saltflat._late import load_later
from saltflat.results.display import Displayable
from saltflat.results.files import FEATURE_ROBUSTNESS, JsonFile
from saltflat.results.json_codec import MAPPING, check_structure, to_plain_types
from saltflat.results.text import make_printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTS = ("features", "rows", "groups", "rank", "examples")
NUMBERS = (
    "squared_norm",
    "top_eigenvalue",
    "eigenvalue_bound",
    "hessian_trace",
    "hessian_trace_stderr",
    "relative_flatness",
    "relative_flatness_stderr",
    "gradient_norm",
    "slope",
    "rounding",
    "loss",
)
OPTIONAL = ("given", "worst", "mean_worst")
ROUGH = 0.1  # of the second-order rise: the largest difference from it that counts as smooth
SMALL_SLOPE = 0.1  # of the bound: the largest first-order rise that counts as a gradient near zero


@dataclass(frozen=True)
class RobustnessPoint:
    r"""How the loss rises under changes of the features of relative size delta.

    Attributes:
        delta: the size of the changes.
        largest: the largest rise of the mean loss that was found over all A in the ball: a lower bound of the maximum.
        gap: what the slope there still promises within the ball, relative to the rise: 0 at a maximum.
        bound: :math:`\delta^2 \kappa / 2`, the paper's bound at a local minimum, without its third-order term.
        first_order: the largest rise to first order, which is 0 at a minimum.
        applies: whether that is at most a tenth of the bound: the gradient is near zero for this delta.
        orthogonal: the mean rise over random orthogonal A, drawn in pairs A and -A.
        orthogonal_stderr: its standard error: orthogonal +- 1.96 stderr is a 95 % interval.
        second_order: the mean second-order rise of the same matrices: what ``orthogonal`` would be, without any chance,
            if the loss were as smooth as Taylor's theorem asks.
        predicted: :math:`\delta^2 / (2 m)` times ``relative_flatness``, the second-order term of this mean.
        trace_bound: :math:`\delta^2 / (2 m)` times ``kappa_trace``, which is at least that if the Hessian of the layer
            has no negative eigenvalues.
        given: the rise under the given A; None if there was none.
        worst: the largest rise of a single example's loss that was found, when its own features change by delta times
            their length; None if not computed.
        worst_example: the position of that example in the data.
        mean_worst: the mean over the examples of their own largest rises.
    """

    delta: float
    largest: float
    gap: float
    bound: float
    first_order: float
    applies: bool
    orthogonal: float
    orthogonal_stderr: float
    second_order: float
    predicted: float
    trace_bound: float
    given: float | None = None
    worst: float | None = None
    worst_example: int | None = None
    mean_worst: float | None = None

    @property
    def is_smooth(self) -> bool:
        """Whether the mean over orthogonal A is that of second order, up to a tenth."""
        return abs(self.orthogonal - self.second_order) <= ROUGH * abs(self.second_order)


@dataclass(frozen=True, eq=False, repr=False)
class FeatureRobustness(Displayable, JsonFile):
    r"""How far small changes of a layer's features can raise the loss.

    It holds :math:`F(\delta, S, A)`, the rise of the mean loss when the features :math:`\phi(x)` of a layer become
    :math:`\phi(x) + \delta A \phi(x)`, at several delta and for several kinds of A.

    Attributes:
        points: one for each delta, in ascending order.
        layer: the name of the weight.
        features: the number of features m: inputs, or channels times kernel positions of a group.
        rows: the number of outputs of a group.
        groups: the number of groups.
        rank: the rank of the weight; that of a group.
        norm: of A: ``"operator"`` or ``"frobenius"``.
        squared_norm: the squared Frobenius norm of the weight.
        top_eigenvalue: the largest eigenvalue of the Hessian of the mean loss with respect to the weight.
        eigenvalue_bound: how far it may lie above that.
        hessian_trace: the trace of this Hessian.
        hessian_trace_stderr: its standard error; 0 if it is exact.
        relative_flatness: the sum over pairs of rows of <w_s, w_t> tr H_st.
        relative_flatness_stderr: its standard error; 0 if it is exact.
        gradient_norm: the norm of the gradient with respect to the weight.
        slope: the largest first-order rise, divided by delta.
        rounding: about how far a rise is off because the losses are rounded.
        model: class name and number of parameters.
        examples: the number of examples.
        loss: the mean loss.
        settings: the options it was computed with.
        versions: of saltflat, torch, numpy and python.
        seconds: the time it took.
        notes: remarks for the reader.
        created: the time in UTC, in ISO format.
    """

    renderer = ("feature_robustness", "FeatureRobustnessRenderable", "format_feature_robustness_html")
    file_format = FEATURE_ROBUSTNESS

    points: tuple[RobustnessPoint, ...]
    layer: str
    features: int
    rows: int
    groups: int
    rank: int
    norm: str
    squared_norm: float
    top_eigenvalue: float
    eigenvalue_bound: float
    hessian_trace: float
    hessian_trace_stderr: float
    relative_flatness: float
    relative_flatness_stderr: float
    gradient_norm: float
    slope: float
    rounding: float
    model: str
    examples: int
    loss: float
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: float
    notes: tuple[str, ...]
    created: str

    def __post_init__(self) -> None:
        self._convert_fields(points=tuple(self.points))

    @property
    def kappa(self) -> float:
        """:math:`|w|^2` times the largest eigenvalue, or 0 if that is negative."""
        return self.squared_norm * max(self.top_eigenvalue, 0.0)

    @property
    def kappa_trace(self) -> float:
        """:math:`|w|^2` times the trace."""
        return self.squared_norm * self.hessian_trace

    @property
    def deltas(self) -> NDArray[np.float64]:
        """The sizes of the changes."""
        return np.array([point.delta for point in self.points])

    @property
    def applies(self) -> bool:
        """Whether the gradient is near zero for every delta, so that the bound applies."""
        return all(point.applies for point in self.points)

    @property
    def applies_from(self) -> float:
        """The delta from which on the gradient is near zero: below, its share is more than a tenth of the bound.

        At large delta the terms of third order matter. It is 0 for a gradient of zero, and infinite without curvature.
        """
        if self.slope == 0:
            return 0.0
        return 2 * self.slope / (SMALL_SLOPE * self.kappa) if self.kappa else inf

    def __repr__(self) -> str:
        return (
            f"<FeatureRobustness of {make_printable(self.layer)} in {make_printable(self.model)}; print() describes "
            "it, .plot() draws it>"
        )

    def plot(self) -> Figure:
        """Return a ``matplotlib`` Figure: the rises over delta with bound and predictions, all logarithmic."""
        figure: Figure = load_later("render.feature_robustness").plot_feature_robustness(self)
        return figure

    def _encode_parts(self) -> dict[str, Any]:
        return {"points": [to_plain_types(asdict(point), "a point") for point in self.points]}

    @classmethod
    def _decode_parts(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"points": tuple(RobustnessPoint(**each) for each in given.pop("points"))}

    def _check_content(self) -> None:
        check_structure(self.settings, MAPPING, "the settings")
        for name in ("layer", "norm"):
            check_structure(getattr(self, name), str, name)
        for name in COUNTS:
            check_structure(getattr(self, name), int, name)
            if not 0 < getattr(self, name) < 2**63:
                raise ValueError(f"{name} is {getattr(self, name)}")
        for name in NUMBERS:
            if type(getattr(self, name)) is not float or not isfinite(getattr(self, name)):
                raise ValueError(f"{name} is no finite number")
        if self.norm not in ("operator", "frobenius"):
            raise ValueError(f"the norm is {self.norm!r}")
        if not self.points:
            raise ValueError("there are no points")
        for point in self.points:
            _check_point(point)
        if not (np.diff(self.deltas) > 0).all():
            raise ValueError("the deltas do not rise")


def _check_point(point: RobustnessPoint) -> None:
    """Raise an error if something is wrong with a point that was read from a file."""
    check_structure(point.applies, bool, "whether the bound applies")
    check_structure(point.worst_example, (int, None), "the worst example")
    for name, value in vars(point).items():
        is_number = type(value) is float or (value is None and name in OPTIONAL)
        if name not in ("applies", "worst_example") and not is_number:
            raise TypeError(f"the entry {name} of a point is no number")
    if not 0 < point.delta < inf:
        raise ValueError(f"a delta is {point.delta}")
    if point.worst_example is not None and point.worst_example < 0:
        raise ValueError(f"the worst example is {point.worst_example}")
