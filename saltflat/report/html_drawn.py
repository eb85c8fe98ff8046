"""Pictures that need no script: small scatter plots as SVG paths, and figures of matplotlib as data in the page."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saltflat.report.optional import import_optional
from saltflat.report.text import format_number

WIDTH, HEIGHT, EDGE = 180, 120, 8
# Beyond two decades a linear axis shows a heap at zero.
DECADES = 2.0
# An SVG of many filled areas is larger than the same in pixels.
LARGEST_SVG = 60_000


@dataclass(frozen=True)
class SmallScatter:
    """A small scatter plot of a measure against the gap.

    Attributes:
        name: of the measure.
        path: the dots, each a line of no length with a round cap.
        low, high: the ends of the horizontal axis, as text.
        log: whether that axis is logarithmic.
        drawn: how many runs have both numbers.
    """

    name: str
    path: str
    low: str
    high: str
    log: bool
    drawn: int


def build_small_scatter(name: str, values: Sequence[float | None], gaps: Sequence[float | None]) -> SmallScatter:
    """The measure from left to right, the gap upwards."""
    pairs = [
        (x, y)
        for x, y in zip(values, gaps, strict=True)
        if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)
    ]
    if not pairs:
        return SmallScatter(name, "", "", "", False, 0)
    across, up = [x for x, _ in pairs], [y for _, y in pairs]
    log = is_log_scaled(across)
    places = zip(
        _scale_to_pixels([math.log(x) for x in across] if log else across, WIDTH),
        _scale_to_pixels(up, HEIGHT),
        strict=True,
    )
    # Dots in the same place look like one.
    path = "".join(dict.fromkeys(f"M{x:.0f} {HEIGHT - y:.0f}h0" for x, y in places))
    return SmallScatter(name, path, format_number(min(across), 3), format_number(max(across), 3), log, len(pairs))


def is_log_scaled(values: Sequence[float]) -> bool:
    """Whether the values are positive and span more than two decades."""
    return min(values) > 0 and math.log10(max(values)) - math.log10(min(values)) > DECADES


def encode_picture(figure: Any) -> str:
    """A figure as a data address for an image: SVG where that is small, else PNG."""
    drawn = _render_figure(figure, "svg")
    if len(drawn) <= LARGEST_SVG:
        return "data:image/svg+xml;base64," + base64.b64encode(drawn).decode()
    return "data:image/png;base64," + base64.b64encode(_render_figure(figure, "png")).decode()


def _render_figure(figure: Any, kind: str) -> bytes:
    file = io.BytesIO()
    matplotlib = import_optional("matplotlib", "pictures in a page")
    # Without a date and random names the same figure is the same page.
    with matplotlib.rc_context({"svg.hashsalt": "saltflat"}):
        figure.savefig(
            file, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None, facecolor="white"
        )
    return file.getvalue()


def _scale_to_pixels(values: Sequence[float], size: int) -> list[float]:
    low, span = min(values), max(values) - min(values)
    if not span or not math.isfinite(span):
        return [size / 2] * len(values)
    return [EDGE + (value - low) / span * (size - 2 * EDGE) for value in values]
