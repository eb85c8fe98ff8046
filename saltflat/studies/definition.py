"""A study as one YAML file."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from saltflat.errors import StudyError
from saltflat.report.optional import package

# YAML 1.1 asks for a dot and a sign in the exponent; people write 1e-3, and mean a number.
NUMBER = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
# A study is a page of text. What is longer is another file by mistake.
LONGEST = 1_000_000


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
        raise _wrong(shown, f"more than {LONGEST:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise _wrong(shown, f"not UTF-8 ({problem.reason} at byte {problem.start})") from problem
    found = parsed(text, shown)
    if found is None:
        raise _wrong(shown, "empty")
    if not isinstance(found, dict):
        raise _wrong(shown, f"a {_kind(found)}, not names with values")
    return found


def parsed(text: str, source: str) -> Any:
    """The plain values of a YAML text.

    Example:
        >>> parsed("axes: {lr: [1e-3, 0.1]}", "here")
        {'axes': {'lr': [0.001, 0.1]}}
    """
    yaml: Any = package("yaml", "a study in YAML")
    loader: Any = type("Loader", (yaml.SafeLoader,), {"construct_mapping": _construct_mapping})
    loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as problem:
        raise _wrong(source, _told(problem)) from problem
    except (ValueError, RecursionError) as problem:  # a date such as 2024-13-45, or brackets without end
        raise _wrong(source, str(problem).splitlines()[0] if str(problem) else type(problem).__name__) from problem


def _construct_mapping(self: Any, node: Any, deep: bool = False) -> Any:
    """A mapping in which every name is there once; YAML would silently take the last."""
    yaml: Any = package("yaml", "a study in YAML")
    seen: set[Any] = set()
    for name, _ in node.value:
        key = self.construct_object(name, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a list or mapping as a name", name.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is there twice", name.start_mark)
        seen.add(key)
    return super(type(self), self).construct_mapping(node, deep)


def _told(problem: Any) -> str:
    mark = getattr(problem, "problem_mark", None)
    what = getattr(problem, "problem", None) or str(problem).splitlines()[0]
    return f"{what}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else str(what)


def _kind(value: object) -> str:
    return {"list": "list", "str": "text"}.get(type(value).__name__, type(value).__name__)


def _wrong(source: str, what: str) -> StudyError:
    return StudyError(
        f"Got the file {source!r}, which is no study: {what}. Want YAML with name, data, axes and stop. "
        "Do: correct it there."
    )
