"""Whether a landscape that was read from a file is one that can have been written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from saltflat.landscape.result import Landscape

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
