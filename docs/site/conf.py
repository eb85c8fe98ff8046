"""Sphinx configuration of the documentation site; `make docs` builds it (see build.py)."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.environment import BuildEnvironment
from sphinx.writers.html5 import HTML5Translator

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

import saltflat  # noqa: E402

project = "saltflat"
author = "the saltflat authors"
copyright = "the saltflat authors"
version = release = saltflat.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
highlight_language = "text"
exclude_patterns = ["README.md"]  # the home page and the quick start include its parts
nitpicky = False

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "colon_fence"]
suppress_warnings = ["myst.header"]  # some pages go from the title to the third level

autodoc_typehints = "description"
autodoc_typehints_description_target = "all"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "saltflat"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
pygments_style = "tango"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = (
    "div.highlight-python pre, div.highlight-default pre, div.highlight-sh pre, div.highlight-yaml pre"
)

SAVED: dict[str, list[str]] = {}


def convert_tex(text: str, as_block: bool = False) -> str:
    """Return a formula as MathML, which browsers render without scripts or fonts of their own."""
    # Commands that docutils does not know.
    text = re.sub(r"\\dots(?![a-zA-Z])", r"\\ldots", text)
    return str(tex2mathml(re.sub(r"\\[bB]ig(?![a-zA-Z])", "", text), as_block))


def visit_math(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(convert_tex(node.astext()))
    raise nodes.SkipNode


def visit_math_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math-block">{convert_tex(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def keep_first_paragraph(
    app: Sphinx, what: str, name: str, obj: object, options: dict[str, Any], lines: list[str]
) -> None:
    """Leave of a package's docstring what it is for; the rest is written for contributors."""
    if what == "module" and "" in lines:
        del lines[lines.index("") :]


def add_types(app: Sphinx, what: str, name: str, obj: object, options: dict[str, Any], lines: list[str]) -> None:
    """Write the types of a dataclass's fields into the list of its attributes, as napoleon reads them."""
    if what != "class" or not is_dataclass(obj) or "Attributes:" not in lines:
        return
    app.env.current_document.autodoc_annotations.pop(name, None)  # or the fields are listed again as parameters
    types = {each.name: each.type for each in fields(obj)}
    for number in range(lines.index("Attributes:") + 1, len(lines)):
        entry = re.match(r"    (\w+):(.*)", lines[number])
        if lines[number] and not lines[number].startswith(" "):
            return
        if entry and isinstance(types.get(entry[1]), str):
            lines[number] = f"    {entry[1]} ({types[entry[1]]}):{entry[2]}"


def drop_none(app: Sphinx, what: str, name: str, obj: object, options: dict[str, Any], lines: list[str]) -> None:
    """Say nothing of what a function returns if it returns nothing."""
    types = app.env.current_document.autodoc_annotations.get(name, {})
    if types.get("return") in ("None", ":py:obj:`None`"):
        types.pop("return")


def save_lines(app: Sphinx, what: str, name: str, obj: object, options: dict[str, Any], lines: list[str]) -> None:
    """Keep the docstring of a property from napoleon, which takes what stands before a colon for its type."""
    if what == "property":
        SAVED[name] = list(lines)


def restore_lines(app: Sphinx, what: str, name: str, obj: object, options: dict[str, Any], lines: list[str]) -> None:
    lines[:] = SAVED.pop(name, lines)


def find_documented(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Resolve a name of the module that defines it to the public name it is documented under."""
    if node.get("refdomain") != "py":
        return None
    objects = env.get_domain("py").objects  # type: ignore[attr-defined]
    target = node["reftarget"]
    for full in (target, f"{node.get('py:module')}.{target}"):
        found = _import_name(full)
        if found is None:
            continue
        for name, entry in objects.items():
            if name.rpartition(".")[2] == full.rpartition(".")[2] and _import_name(name) is found:
                uri = app.builder.get_relative_uri(node["refdoc"], entry.docname)
                return nodes.reference("", "", content, internal=True, refuri=f"{uri}#{entry.node_id}")
    return None


def _import_name(name: str) -> object | None:
    module = name
    attributes: list[str] = []
    while module:
        try:
            found: object = importlib.import_module(module)
        except (ImportError, ValueError):
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
            continue
        for each in attributes:
            found = getattr(found, each, None)
        return found
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    for each in PyObject.doc_field_types:
        if each.name == "variable":
            each.label = "Attributes"
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.connect("autodoc-process-docstring", keep_first_paragraph)
    app.connect("autodoc-process-docstring", add_types, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", drop_none)
    app.connect("autodoc-process-docstring", save_lines, priority=400)
    app.connect("autodoc-process-docstring", restore_lines, priority=600)
    app.connect("missing-reference", find_documented)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


html_math_renderer = "mathml"
