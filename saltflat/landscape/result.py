"""A slice through the loss, with everything needed to read, draw and repeat it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saltflat.errors import ReportError
from saltflat.landscape.check import check_landscape
from saltflat.landscape.plot import plot_landscape
from saltflat.landscape.view import LandscapeRenderable, format_landscape_html
from saltflat.report.file import LANDSCAPE, check_schema, read_json, write_json
from saltflat.report.plain import decode_nonfinite, encode_nonfinite, to_plain_types
from saltflat.report.schema import MAPPING, check_structure
from saltflat.report.table import render_text
from saltflat.report.text import make_printable

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class Landscape:
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

    def __str__(self) -> str:
        return render_text(LandscapeRenderable(self))

    def __rich__(self) -> LandscapeRenderable:
        return LandscapeRenderable(self)

    def _repr_html_(self) -> str:
        return format_landscape_html(self)

    def plot(self, what: str = "loss", log: bool | None = None, levels: int = 20) -> Any:
        """A ``matplotlib`` Figure: a curve, or a map with contours; where the loss overflowed there are gaps.

        Args:
            what: ``"loss"``, or ``"error"`` for the share of wrong answers.
            log: a logarithmic scale; if None, where the values are positive and span more than two powers of ten.
            levels: how many contours a map has.
        """
        return plot_landscape(self, what, log, levels)

    def to_dict(self) -> dict[str, Any]:
        """As strict JSON has it; numbers that are not finite are coded, see ``saltflat.report.plain``."""
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
                f"Got {source}, a landscape that cannot be understood ({type(problem).__name__}: {problem}). "
                "Want what Landscape.to_dict gives. Do: take it again, or take the file from a backup."
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
