"""One self-contained HTML page: templates, styles, scripts, and pictures without scripts."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from saltflat.errors import import_optional
from saltflat.results.text import format_number, format_quantity, make_printable

# Characters that could end a script element, begin a comment in it, or end a line of JavaScript.
DANGEROUS = {each: f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}

# Before anything is drawn, so that nothing jumps when the other scripts run.
EARLY = 'document.documentElement.className = "scripted";'


def render_page(template: str, scripts: tuple[str, ...], island: Any = None, **content: Any) -> str:
    """The page that a template makes of its content.

    Nothing is fetched from anywhere, and no script runs but our own: the page's policy names it by its hash, so that
    even a name that broke out of its place would stay text.

    Args:
        template: its file.
        scripts: files of JavaScript, in the order in which they run.
        island: what the scripts draw, as JSON has it.
        content: what the template asks for.
    """
    script = "\n".join(_read_template_text(each) for each in scripts)
    data = None if island is None else Markup(encode_inert_json(island))
    page = _load_templates().get_template(template)
    text = page.render(
        style=Markup(_read_template_text("style.css")),
        script=Markup(script),
        early=Markup(EARLY),
        data=data,
        digests=Markup(" ".join(f"'sha256-{_compute_digest(each)}'" for each in (EARLY, script))),
        **content,
    )
    # Names may hold halves of characters, which no file can.
    return text.encode("utf-8", "replace").decode()


def encode_inert_json(value: Any) -> str:
    """JSON that no HTML parser sees anything in.

    Example:
        >>> print(encode_inert_json({"name": "</script>"}))
        {"name":"\\u003c/script\\u003e"}
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return "".join(DANGEROUS.get(each, each) for each in text)


def round_digits(value: float | None, digits: int = 5) -> float | int | None:
    """A number with few digits, for the eye; None where there is none to draw.

    Example:
        >>> round_digits(0.123456789), round_digits(1e6), round_digits(float("nan"))
        (0.12346, 1000000, None)
    """
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def format_setting(value: Any) -> str:
    """A setting as a person reads it.

    Example:
        >>> format_setting((64, 32)), format_setting(None), format_setting(1e-3), format_setting(True)
        ('64, 32', 'none', '0.001', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, float):
        return format_number(value, 6)
    if isinstance(value, list | tuple):
        return ", ".join(map(format_setting, value))
    if isinstance(value, dict):
        return "; ".join(f"{key}: {format_setting(each)}" for key, each in value.items())
    return make_printable(str(value))


def format_quantity_html(value: float, stderr: float | None) -> str:
    """A number and its error, with the sign that terminals may lack."""
    return format_quantity(value, stderr).replace(" +- ", " ± ")


def strip_markup(text: str) -> str:
    """A sentence of a docstring without its marks.

    Example:
        >>> strip_markup("Of :math:`w`, as ``rho`` has it.")
        'Of w, as rho has it.'
    """
    return re.sub(r":math:`([^`]*)`|``([^`]*)``", lambda found: found[1] or found[2] or "", make_printable(text))


def format_breakable_name(text: str) -> Markup:
    """A name that may be broken after underscores, where there is no room for all of it."""
    return Markup("_<wbr>").join(make_printable(text).split("_"))


@cache
def _load_templates() -> Environment:
    found = Environment(
        loader=PackageLoader("saltflat.render", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        name=format_breakable_name,
        number=format_number,
        quantity=format_quantity_html,
        setting=format_setting,
        shown=lambda text: make_printable(str(text)),
        plainly=strip_markup,
    )
    return found


def _compute_digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _read_template_text(name: str) -> str:
    environment = _load_templates()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


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
