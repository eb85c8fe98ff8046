"""One HTML file that needs nothing else: templates, styles and scripts put together, every name escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from saltflat.report.text import format_number, format_quantity, make_printable

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
        loader=PackageLoader("saltflat.report", "templates"),
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
