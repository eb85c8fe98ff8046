"""The tutorials, executed: pages of docs/tutorials/ with what their code prints and draws.

The ``python`` blocks of a tutorial are executed one after another, as the cells of a notebook are, in an empty folder.
A block with a file name (```` ```python my_model.py ````) is written to that file instead. Pictures that a block saves
follow it; the comment above the line that saves one describes it. ``<!-- check: expression -->`` fails the build unless
the expression is true, so that the prose cannot say what the output no longer shows.

To see one page while writing it: ``python docs/site/tutorials.py sam``
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from unittest import mock

PART = re.compile(
    r"^```python(?: (?P<file>[\w.]+))?\n(?P<code>.*?)^```\n|^<!-- check: (?P<check>.*?) -->\n", re.MULTILINE | re.DOTALL
)
SAVED = re.compile(r"^ *# (?P<words>.+)\n.*\"(?P<name>[\w.]+\.png)\"", re.MULTILINE)
WIDTH = 100  # columns of what is printed


def execute_tutorial(name: str, text: str, pictures: Path) -> str:
    """Return a page with the output of its code, and move the pictures that it draws to a folder.

    Args:
        name: the name of the page, for errors and for its pictures.
        text: its Markdown.
        pictures: a folder that exists.

    Raises:
        RuntimeError: a block failed, a picture has no description, or a check is false.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    parts, end = [], 0
    with _enter_empty_folder() as folder:
        for match in PART.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            parts.append(text[end : match.start()])
            end = match.end()
            try:
                parts.append(_execute_part(match, names, name, line))
                described = {saved["name"]: saved["words"] for saved in SAVED.finditer(match[0])}
                for file in sorted(folder.glob("*.png")):
                    if file.name not in described:
                        raise ValueError(f"Expected a comment above the line that saves {file.name}. Try adding one.")
                    parts.append(f"\n![{described[file.name]}]({name}-{file.name})\n")
                    shutil.move(file, pictures / f"{name}-{file.name}")
            except Exception as error:
                raise RuntimeError(f"{name}.md, line {line}: {type(error).__name__}: {error}") from error
    return "".join([*parts, text[end:]])


def _execute_part(match: re.Match[str], names: dict[str, object], page: str, line: int) -> str:
    """Execute a block or a check, and return what stands in its place."""
    if match["check"]:
        if not eval(match["check"], names):
            raise ValueError(f"Expected {match['check']}, but got False. Try to change what the page says.")
        return ""
    if match["file"]:
        Path(match["file"]).write_text(match["code"], encoding="utf-8")
        return f"```{{code-block}} python\n:caption: {match['file']}\n\n{match['code']}```\n"
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile("\n" * line + match["code"], f"{page}.md", "exec"), names)  # with the line numbers of the page
    output = "\n".join(each.rstrip() for each in printed.getvalue().strip("\n").splitlines())
    return match[0] + (f"\n````{{code-block}} text\n:class: output\n\n{output}\n````\n" if output else "")


@contextmanager
def _enter_empty_folder() -> Iterator[Path]:
    """Work in an empty folder, whose modules can be imported; warnings are errors, and lines have a fixed width."""
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        warnings.catch_warnings(action="error"),
        mock.patch.object(sys, "path", [folder, *sys.path]),
        mock.patch.dict(os.environ, COLUMNS=str(WIDTH)),
    ):
        yield Path(folder)


if __name__ == "__main__":
    page = Path(__file__).parent.parent / "tutorials" / f"{sys.argv[1]}.md"
    with tempfile.TemporaryDirectory() as folder:
        print(execute_tutorial(page.stem, page.read_text(encoding="utf-8"), Path(folder)))
