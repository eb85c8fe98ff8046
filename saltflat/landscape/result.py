"""The result of a slice through the loss, with everything needed to read, plot and repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from saltflat._late import load_later
from saltflat.results.display import Displayable
from saltflat.results.files import LANDSCAPE, JsonFile
from saltflat.results.json_codec import MAPPING, check_structure, to_plain_types
from saltflat.results.text import make_printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class Landscape(Displayable, JsonFile):
    """The mean loss along one direction, or on the plane of two.

    Two landscapes are equal when everything in them is; nan equals nan.

    Attributes:
        coordinates: the points along each direction, 0 in the middle.
        losses: ``(points,)`` or ``(points, points)``: ``losses[i, j]`` is at ``coordinates[0][i]`` along the first
            direction and ``coordinates[1][j]`` along the second. Infinite or nan where it overflowed.
        errors: the fraction of wrong predictions at the same points, nan where the loss is; None where predictions
            cannot be right or wrong.
        directions: for each its ``kind`` (random, eigenvector, given), ``length``, normalization (``normalize``), and
            the ``eigenvalue`` of an eigenvector.
        model: class name and number of parameters.
        examples: the number of examples.
        settings: the options it was computed with.
        versions: of saltflat, torch, numpy and python.
        seconds: the time it took.
        notes: remarks for the reader.
        created: the time in UTC, in ISO format.
    """

    renderer = ("landscape", "LandscapeRenderable", "format_landscape_html")
    file_format = LANDSCAPE

    coordinates: tuple[Array, ...]
    losses: Array
    errors: Array | None
    directions: tuple[Mapping[str, Any], ...]
    model: str
    examples: int
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: float
    notes: tuple[str, ...]
    created: str

    def __post_init__(self) -> None:
        self._convert_fields(
            coordinates=tuple(map(_make_readonly, self.coordinates)),
            losses=_make_readonly(self.losses),
            errors=None if self.errors is None else _make_readonly(self.errors),
            directions=tuple(to_plain_types(each, "the directions") for each in self.directions),
        )

    @property
    def dimensions(self) -> int:
        """The number of directions."""
        return len(self.coordinates)

    @property
    def loss(self) -> float:
        """The mean loss in the middle, at the model's own weights."""
        return float(self.losses[self._get_middle()])

    @property
    def error(self) -> float | None:
        """The fraction of wrong predictions in the middle."""
        return None if self.errors is None else float(self.errors[self._get_middle()])

    @property
    def curvature(self) -> tuple[float, ...]:
        """The second differences of the loss in the middle, along each direction.

        They approximate the second derivative if the points are close.
        """
        middle, found = self._get_middle(), []
        for axis, places in enumerate(self.coordinates):
            beside = [tuple(n + step * (a == axis) for a, n in enumerate(middle)) for step in (-1, 1)]
            width = float(places[middle[axis] + 1])
            found.append(float(sum(self.losses[each] - self.loss for each in beside)) / width / width)
        return tuple(found)

    def _get_middle(self) -> tuple[int, ...]:
        return tuple(len(each) // 2 for each in self.coordinates)

    def __repr__(self) -> str:
        size = " x ".join(str(len(each)) for each in self.coordinates)
        return f"<Landscape of {make_printable(self.model)}: {size} points; print() describes it, .plot() draws it>"

    def plot(self, what: Literal["loss", "error"] = "loss", log: bool | None = None, levels: int = 20) -> Figure:
        """Return a ``matplotlib`` Figure: a curve, or a map with contours, with gaps where the loss overflowed.

        Args:
            what: ``"loss"``, or ``"error"`` for the fraction of wrong predictions.
            log: use a logarithmic scale; if None, where the values are positive and span more than two decades.
            levels: the number of contours of a map.
        """
        figure: Figure = load_later("render.landscape").plot_landscape(self, what, log, levels)
        return figure

    def _check_content(self) -> None:
        check_structure(self.settings, MAPPING, "the settings")
        check_structure(list(self.directions), [MAPPING], "the directions")
        for problem in _find_problems(self):
            raise ValueError(problem)


def _make_readonly(values: ArrayLike) -> Array:
    """Return a read-only copy in float64."""
    array = np.array(values, dtype=np.float64)
    array.setflags(write=False)
    return array


KINDS = ("random", "eigenvector", "given")


def _find_problems(landscape: Landscape) -> Iterator[str]:
    if landscape.dimensions not in (1, 2):
        yield f"there are {landscape.dimensions} dimensions"
    for places in landscape.coordinates:
        if places.ndim != 1 or len(places) < 3 or len(places) % 2 == 0 or places[len(places) // 2] != 0:
            yield "the coordinates are no odd number of points around 0"
        elif not np.isfinite(places).all() or not (np.diff(places) > 0).all():
            yield "the coordinates do not rise"
    shape = tuple(len(each) for each in landscape.coordinates)
    for name, values in (("losses", landscape.losses), ("errors", landscape.errors)):
        if values is not None and values.shape != shape:
            yield f"the {name} have the shape {values.shape}, and the coordinates {shape}"
    if not np.isfinite(landscape.loss):
        yield f"the loss in the middle is {landscape.loss}"
    if landscape.errors is not None and not np.all(
        np.isnan(landscape.errors) | (np.abs(landscape.errors - 0.5) <= 0.5)
    ):
        yield "the errors are no shares"
    if len(landscape.directions) != landscape.dimensions:
        yield f"there are {len(landscape.directions)} directions for {landscape.dimensions} dimensions"
    for each in landscape.directions:
        if each.get("kind") not in KINDS or type(each.get("length")) is not float:
            yield f"a direction is of the kind {each.get('kind')!r}, not of {', '.join(KINDS)}, or has no length"
        if type(each.get("normalize")) is not str or type(each.get("eigenvalue", 0.0)) is not float:
            yield "a direction does not say its normalization, or has an eigenvalue that is no number"
    if landscape.examples < 1:
        yield f"there are {landscape.examples} examples"


def plot_together(
    landscapes: Mapping[str, Landscape] | Sequence[Landscape],
    what: Literal["loss", "error"] = "loss",
    log: bool | None = None,
) -> Figure:
    """Plot several one-dimensional landscapes in one ``matplotlib`` Figure.

    Args:
        landscapes: by name, or in a list.
        what: ``"loss"``, or ``"error"`` for the fraction of wrong predictions.
        log: use a logarithmic scale; if None, where the values are positive and span more than two decades.
    """
    figure: Figure = load_later("render.landscape").plot_together(landscapes, what, log)
    return figure
