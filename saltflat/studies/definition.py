"""A study as one YAML file."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from saltflat.errors import StudyError
from saltflat.report.optional import import_optional
from saltflat.studies.canonical import DEEPEST

# YAML 1.1 asks for a dot and a sign in the exponent; people write 1e-3, and mean a number.
NUMBER = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
# A study is a page of text. What is longer is another file by mistake.
LONGEST = 1_000_000
LONGEST_NUMBER = 100  # characters: YAML reads 0xffff... and 1:59:59... at any length


def read_definition(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the file says, as plain values; nothing in it is run."""
    shown = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST + 1)
    except OSError as problem:
        raise StudyError(
            f"Got the path {shown!r}, which cannot be read ({problem.strerror}). Want a study as a YAML file. "
            "Do: check the path."
        ) from problem
    if len(content) > LONGEST:
        raise _make_definition_error(shown, f"more than {LONGEST:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise _make_definition_error(shown, f"not UTF-8 ({problem.reason} at byte {problem.start})") from problem
    found = parse_yaml(text, shown)
    if found is None:
        raise _make_definition_error(shown, "empty")
    if not isinstance(found, dict):
        raise _make_definition_error(shown, f"a {_format_type(found)}, not names with values")
    return found


def parse_yaml(text: str, source: str) -> Any:
    """The plain values of a YAML text. Anchors, aliases and tags are refused: a few lines of them expand to gigabytes.

    Example:
        >>> parse_yaml("axes: {lr: [1e-3, 0.1]}", "here")
        {'axes': {'lr': [0.001, 0.1]}}
    """
    yaml: Any = import_optional("yaml", "a study in YAML")
    try:
        return yaml.load(text, Loader=_make_loader(yaml))
    except yaml.YAMLError as problem:
        raise _make_definition_error(source, _format_yaml_error(problem)) from problem
    except ValueError as problem:  # a date such as 2024-13-45
        raise _make_definition_error(source, str(problem).splitlines()[0]) from problem


def _make_loader(yaml: Any) -> Any:
    """Return a loader of plain values only, in which every name of a mapping is there once."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent):
                raise self.make_error(f"the alias *{event.anchor}; write out what it stands for", event)
            if event.anchor is not None:
                raise self.make_error(f"the anchor &{event.anchor}; write out each part where it is needed", event)
            if event.tag is not None:
                raise self.make_error(f"the tag {event.tag}; plain numbers, texts, lists and mappings need none", event)
            if self.depth == DEEPEST:
                raise self.make_error(f"lists and mappings more than {DEEPEST} levels deep", event)
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            numeric = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
            if numeric and len(node.value) > LONGEST_NUMBER:
                raise self.make_error(f"a number of {len(node.value):,} characters", event)
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[Any] = set()
            for name, _ in node.value:
                key = self.construct_object(name, deep=True)
                if not isinstance(key, Hashable):
                    raise self.make_error("a list or mapping as a name", name)
                if key in seen:
                    raise self.make_error(f"{key!r} is there twice", name)
                seen.add(key)
            return super().construct_mapping(node, deep)

        def make_error(self, what: str, place: Any) -> Exception:
            refused: Exception = yaml.MarkedYAMLError(problem=what, problem_mark=place.start_mark)
            return refused

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
    return Loader


def _format_yaml_error(problem: Any) -> str:
    mark = getattr(problem, "problem_mark", None)
    what = getattr(problem, "problem", None) or str(problem).splitlines()[0]
    return f"{what}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else str(what)


def _format_type(value: object) -> str:
    return {"list": "list", "str": "text"}.get(type(value).__name__, type(value).__name__)


def _make_definition_error(source: str, what: str) -> StudyError:
    return StudyError(
        f"Got the file {source!r}, which is no study: {what}. Want YAML with name, data, axes and stop. "
        "Do: correct it there."
    )
