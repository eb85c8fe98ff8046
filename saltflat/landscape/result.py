"""A slice through the loss, with everything needed to read, draw and repeat it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from saltflat._late import load_later
from saltflat.errors import ReportError
from saltflat.results.display import Displayable
from saltflat.results.files import LANDSCAPE, check_schema, read_json, write_json
from saltflat.results.json_codec import MAPPING, check_structure, decode_nonfinite, encode_nonfinite, to_plain_types
from saltflat.results.text import make_printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class Landscape(Displayable):
    """The mean loss along one direction, or over the plane of two.

    Two landscapes are equal when everything in them is; nan equals nan.

    Attributes:
        coordinates: where the points are along each direction, 0 in the middle.
        losses: ``(points,)`` or ``(points, points)``: ``losses[i, j]`` is that at ``coordinates[0][i]`` along the first
            direction and ``coordinates[1][j]`` along the second. Infinite or nan where it overflowed.
        errors: the share of wrong answers at the same points, nan where the loss is; None where the loss knows no right
            and wrong.
        directions: of each its ``kind`` (random, eigenvector, given), ``length``, how it was normalised
            (``normalize``), and the ``eigenvalue`` of an eigenvector.
        model: class name and number of parameters.
        examples: how many examples the mean is over.
        settings: how it was taken.
        versions: of saltflat, torch, numpy and python.
        seconds: how long it took.
        notes: what a reader should know besides.
        created: when, ISO time in UTC.
    """

    renderer = ("landscape", "LandscapeRenderable", "format_landscape_html")

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
        tidy: dict[str, Any] = {
            "coordinates": tuple(map(_make_readonly, self.coordinates)),
            "losses": _make_readonly(self.losses),
            "errors": None if self.errors is None else _make_readonly(self.errors),
            "directions": tuple(to_plain_types(each, "the directions") for each in self.directions),
            "model": str(self.model),
            "examples": int(self.examples),
            "settings": to_plain_types(self.settings, "the settings"),
            "versions": {str(name): str(each) for name, each in self.versions.items()},
            "seconds": float(self.seconds),
            "notes": tuple(str(note) for note in self.notes),
            "created": str(self.created),
        }
        for key, value in tidy.items():
            object.__setattr__(self, key, value)

    @property
    def dimensions(self) -> int:
        return len(self.coordinates)

    @property
    def loss(self) -> float:
        """The mean loss in the middle, of the weights as they are."""
        return float(self.losses[self._get_middle()])

    @property
    def error(self) -> float | None:
        """The share of wrong answers in the middle."""
        return None if self.errors is None else float(self.errors[self._get_middle()])

    @property
    def curvature(self) -> tuple[float, ...]:
        """How the loss bends in the middle along each direction: second differences of the points next to it.

        They tell the second derivative only as well as the points are close.
        """
        middle, found = self._get_middle(), []
        for axis, places in enumerate(self.coordinates):
            beside = [tuple(n + step * (a == axis) for a, n in enumerate(middle)) for step in (-1, 1)]
            width = float(places[middle[axis] + 1])
            found.append(float(sum(self.losses[each] - self.loss for each in beside)) / width / width)
        return tuple(found)

    def _get_middle(self) -> tuple[int, ...]:
        return tuple(len(each) // 2 for each in self.coordinates)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Landscape) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        size = " x ".join(str(len(each)) for each in self.coordinates)
        return f"<Landscape of {make_printable(self.model)}: {size} points; print() describes it, .plot() draws it>"

    def plot(self, what: str = "loss", log: bool | None = None, levels: int = 20) -> Figure:
        """A ``matplotlib`` Figure: a curve, or a map with contours; where the loss overflowed there are gaps.

        Args:
            what: ``"loss"``, or ``"error"`` for the share of wrong answers.
            log: a logarithmic scale; if None, where the values are positive and span more than two powers of ten.
            levels: how many contours a map has.
        """
        figure: Figure = load_later("render.landscape").plot_landscape(self, what, log, levels)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """As strict JSON has it; numbers that are not finite are coded, see ``saltflat.results.json_codec``."""
        parts = {
            each.name: encode_nonfinite(to_plain_types(getattr(self, each.name), each.name)) for each in fields(self)
        }
        return {"schema": LANDSCAPE.schema, **parts}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Landscape:
        """The landscape that ``to_dict`` was called on."""
        return cls._parse_dict(given, "a mapping")

    @classmethod
    def _parse_dict(cls, given: Mapping[str, Any], source: str) -> Landscape:
        check_schema(given, source, LANDSCAPE)
        try:
            found = cls(**{key: decode_nonfinite(value) for key, value in given.items() if key != "schema"})
            # Reading is lenient: what does not come out again as it went in was not written by us.
            if found.to_dict() != given:
                raise TypeError("a field has a value of another kind")
            check_structure(found.settings, MAPPING, "the settings")
            check_structure(list(found.directions), [MAPPING], "the directions")
            check_landscape(found)
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError, LookupError) as problem:
            raise ReportError(
                f"Expected what Landscape.to_dict gives, but got {source}, a landscape that cannot be understood "
                f"({type(problem).__name__}: {problem}). Try taking it again, or taking the file from a backup."
            ) from problem
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON and give the path back; a file that was there is replaced, whole or not at all."""
        return write_json(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Landscape:
        """The landscape that was saved there."""
        return cls._parse_dict(read_json(path, LANDSCAPE), f"the file {os.fspath(path)!r}")


def _make_readonly(values: Any) -> Array:
    """A copy that nobody can write to."""
    array = np.array(values, dtype=np.float64)
    array.setflags(write=False)
    return array


KINDS = ("random", "eigenvector", "given")


def check_landscape(landscape: Landscape) -> None:
    """Raise a ValueError that says what is wrong, if anything is."""
    for wrong in _find_problems(landscape):
        raise ValueError(wrong)


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
            yield "a direction does not say how it was normalised, or has an eigenvalue that is no number"
    if landscape.examples < 1:
        yield f"there are {landscape.examples} examples"


def plot_together(
    landscapes: Mapping[str, Landscape] | Sequence[Landscape], what: str = "loss", log: bool | None = None
) -> Figure:
    """Plot several landscapes of one dimension in one ``matplotlib`` Figure.

    Args:
        landscapes: by name, or one after the other.
        what: ``"loss"``, or ``"error"`` for the share of wrong answers.
        log: a logarithmic scale; if None, where the values are positive and span more than two powers of ten.
    """
    figure: Figure = load_later("render.landscape").plot_together(landscapes, what, log)
    return figure
