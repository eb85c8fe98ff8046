"""Render one self-contained HTML page: templates, styles, scripts, formulas and pictures."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from saltflat.errors import import_optional
from saltflat.results.json_codec import JsonValue
from saltflat.results.text import (
    MathNode,
    format_number,
    format_quantity,
    format_setting,
    make_printable,
    parse_markup,
    parse_math,
    strip_markup,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Characters that could end a script element, begin a comment in it, or end a line of JavaScript.
DANGEROUS = {each: f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}

# Runs before anything is drawn, so that nothing jumps when the other scripts run.
EARLY = 'document.documentElement.className = "scripted";'


def render_page(
    template: str, scripts: tuple[str, ...], island: Mapping[str, Any] | None = None, **content: Any
) -> str:
    """Return the page that a template makes of its content.

    The page fetches nothing, and runs no script but our own: its security policy names that by its hash, so that even
    a name that escaped its element would stay text.

    Args:
        template: the file of the template.
        scripts: files of JavaScript, in the order in which they run.
        island: the data that the scripts draw, as JSON.
        content: the variables of the template.
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
    # Names may hold lone surrogates, which no file can.
    return text.encode("utf-8", "replace").decode()


def encode_inert_json(value: JsonValue | Mapping[str, Any]) -> str:
    """Encode a value as JSON without any character that means something in HTML.

    Example:
        >>> print(encode_inert_json({"name": "</script>"}))
        {"name":"\\u003c/script\\u003e"}
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return "".join(DANGEROUS.get(each, each) for each in text)


def round_digits(value: float | None, digits: int = 5) -> float | int | None:
    """Round a number to a few digits for plotting; return None if it is not finite.

    Example:
        >>> round_digits(0.123456789), round_digits(1e6), round_digits(float("nan"))
        (0.12346, 1000000, None)
    """
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def format_quantity_html(value: float, stderr: float | None) -> str:
    """Format a number and its standard error with a ± sign."""
    return format_quantity(value, stderr).replace(" +- ", " ± ")


# Beside Greek letters; other commands are shown by their names, upright, as TeX shows ln.
_OPERATORS = {
    "sum": "∑", "prod": "∏", "nabla": "∇", "partial": "∂", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠",
    "cdot": "·", "times": "\u00d7", "circ": "∘", "pm": "±", "langle": "⟨", "rangle": "⟩", "infty": "∞", "top": "T",
    "Vert": "‖", "lVert": "‖", "rVert": "‖", "lvert": "|", "rvert": "|", "in": "∈", "to": "→",
}  # fmt: skip

_FENCES = "|()[]{}‖⟨⟩"


def render_markup(text: str) -> Markup:
    """Return a sentence of a docstring as HTML, with formulas as MathML.

    Example:
        >>> print(render_markup("Of :math:`w_0`, as ``rho`` has it."))
        Of <math><msub><mi>w</mi><mn>0</mn></msub></math>, as <code>rho</code> has it.
    """
    found = Markup("")
    for kind, part in parse_markup(make_printable(text)):
        found += (
            _render_math(part) if kind == "math" else Markup("<code>{}</code>").format(part) if kind == "code" else part
        )
    return found


def _render_math(tex: str) -> Markup:
    try:
        return Markup("<math>{}</math>").format(_render_node(parse_math(tex)))
    except RecursionError:
        return Markup("<code>{}</code>").format(tex)


def _render_node(node: MathNode) -> Markup:
    parts = [_render_node(each) for each in node.parts]
    if node.kind == "symbol":
        return _render_symbol(node.text)
    if node.kind == "space":
        return Markup("")
    if node.kind == "fraction":
        return Markup("<mfrac>{}{}</mfrac>").format(*map(_group_elements, parts))
    if node.kind == "root":
        return Markup("<msqrt>{}</msqrt>").format(*parts)
    if node.kind == "script":
        base, low, high = map(_group_elements, parts)
        if not parts[1] or not parts[2]:
            tag = Markup("msub") if parts[1] else Markup("msup")
            return Markup("<{}>{}{}</{}>").format(tag, base, low if parts[1] else high, tag)
        return Markup("<msubsup>{}{}{}</msubsup>").format(base, low, high)
    return Markup("").join(parts)


def _group_elements(content: Markup) -> Markup:
    """Return several elements as one, where MathML expects one."""
    return content if content.count("</") == 1 else Markup("<mrow>{}</mrow>").format(content)


def _render_symbol(text: str) -> Markup:
    size = "CAPITAL" if text[:1].isupper() else "SMALL"
    try:
        greek = unicodedata.lookup(f"GREEK {size} LETTER {text.upper().replace('LAMBDA', 'LAMDA')}")
    except KeyError:
        greek = ""
    shown = _OPERATORS.get(text, greek or text)
    named = greek or text.isalpha()
    tag = Markup("mn" if shown.isdigit() else "mi" if named and text not in _OPERATORS else "mo")
    # Fences would grow with what they enclose, and keep a distance from it.
    fence = Markup(' stretchy="false" lspace="0" rspace="0"' if shown in _FENCES else "")
    return Markup("<{}{}>{}</{}>").format(tag, fence, shown, tag)


def format_breakable_name(text: str) -> Markup:
    """Return a name with optional line breaks after underscores."""
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
        plain=strip_markup,
        markup=render_markup,
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
# An SVG of many filled areas is larger than a PNG.
LARGEST_SVG = 60_000


@dataclass(frozen=True)
class SmallScatter:
    """A small scatter plot of a measure against the gap.

    Attributes:
        name: the name of the measure.
        path: the dots, each a line of length zero with a round cap.
        low, high: the ends of the horizontal axis, as text.
        log: whether that axis is logarithmic.
        drawn: the number of runs with both numbers.
    """

    name: str
    path: str
    low: str
    high: str
    log: bool
    drawn: int


def build_small_scatter(name: str, values: Sequence[float | None], gaps: Sequence[float | None]) -> SmallScatter:
    """Return the scatter plot, with the measure on the horizontal axis."""
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
    # Dots in the same place are drawn once.
    path = "".join(dict.fromkeys(f"M{x:.0f} {HEIGHT - y:.0f}h0" for x, y in places))
    return SmallScatter(name, path, format_number(min(across), 3), format_number(max(across), 3), log, len(pairs))


def is_log_scaled(values: Sequence[float]) -> bool:
    """Return whether the values are positive and span more than two decades."""
    return min(values) > 0 and math.log10(max(values)) - math.log10(min(values)) > DECADES


def encode_picture(figure: Figure) -> str:
    """Encode a figure as a data URL of an image: SVG where that is small, else PNG."""
    drawn = _render_figure(figure, "svg")
    if len(drawn) <= LARGEST_SVG:
        return "data:image/svg+xml;base64," + base64.b64encode(drawn).decode()
    return "data:image/png;base64," + base64.b64encode(_render_figure(figure, "png")).decode()


def _render_figure(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    file = io.BytesIO()
    matplotlib = import_optional("matplotlib", "pictures in a page")
    # Without a date and random names, the same figure gives the same page.
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
