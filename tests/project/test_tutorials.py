"""Tutorials are executed: what their code prints and draws stands below it, and errors stop the build."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parent.parent.parent / "docs" / "site" / "tutorials.py"
DRAWING = "from matplotlib.figure import Figure\n"


@pytest.fixture(scope="module")
def tutorials() -> Any:
    spec = importlib.util.spec_from_file_location("tutorials", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_output_follows_the_code_and_names_last_from_block_to_block(tutorials: Any, tmp_path: Path) -> None:
    page = "A\n\n```python\nx = 6\n```\n\nB\n\n```python\nprint(7 * x, ' \\n')\n```\n\nC\n"
    made = tutorials.execute_tutorial("page", page, tmp_path)
    before, _, after = made.partition("print(7 * x, ' \\n')\n```\n")
    assert before == page.partition("print")[0]
    assert after == "\n````{code-block} text\n:class: output\n\n42\n````\n\nC\n"


def test_a_picture_follows_the_code_that_saves_it(tutorials: Any, tmp_path: Path) -> None:
    page = f'```python\n{DRAWING}# Nothing at all\nFigure().savefig("a.png")\n```\n'
    made = tutorials.execute_tutorial("page", page, tmp_path)
    assert made == f"{page}\n![Nothing at all](page-a.png)\n"
    assert [path.name for path in tmp_path.iterdir()] == ["page-a.png"]


def test_a_block_with_a_file_name_becomes_a_module(tutorials: Any, tmp_path: Path) -> None:
    page = "```python my_answer.py\nanswer = 42\n```\n```python\nfrom my_answer import answer\n\nprint(answer)\n```\n"
    path, folder = list(sys.path), os.getcwd()
    made = tutorials.execute_tutorial("page", page, tmp_path)
    assert made.startswith("```{code-block} python\n:caption: my_answer.py\n\nanswer = 42\n```\n")
    assert "\n42\n" in made
    assert (sys.path, os.getcwd()) == (path, folder)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("\n```python\n1 / 0\n```\n", r"^page\.md, line 2: ZeroDivisionError"),
        ("```python\nx = 1\n```\n<!-- check: x == 2 -->\n", r"line 4: ValueError: Expected x == 2, but got False\."),
        (
            f"```python\n{DRAWING}Figure().savefig('a.png')\n```\n",
            r"Expected a comment above the line that saves a\.png",
        ),
        ("```python\nimport warnings\n\nwarnings.warn('Old')\n```\n", "line 1: UserWarning: Old"),
    ],
    ids=["error", "check", "picture without description", "warning"],
)
def test_what_goes_wrong_is_an_error_that_names_the_line(
    page: str, message: str, tutorials: Any, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=message):
        tutorials.execute_tutorial("page", page, tmp_path)


def test_a_check_that_holds_is_not_shown(tutorials: Any, tmp_path: Path) -> None:
    assert tutorials.execute_tutorial("page", "A\n<!-- check: 1 < 2 -->\nB\n", tmp_path) == "A\nB\n"
