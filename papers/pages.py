"""What the papers' pages share: rows of tables, verdicts, and the part of a page that is made from rows."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

NOT_TESTED = "not tested (no rows yet)"
TOO_FEW = "not tested (too few networks)"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def make_row(cells: Iterable[object]) -> str:
    """Return a row of a table.

    >>> make_row(["a", 1])
    '| a | 1 |'
    """
    return f"| {' | '.join(map(str, cells))} |"


def make_head(*names: str) -> str:
    """Return the head of a table, two lines."""
    return f"{make_row(names)}\n{make_row(['---'] * len(names))}"


def join_verdicts(judged: Mapping[str, str]) -> str:
    """Return one verdict if all agree, else one for each reading.

    >>> join_verdicts({"one": "reproduced", "other": "reproduced"}), join_verdicts({"one": "a", "other": "b"})
    ('**reproduced**', '**a**: one; **b**: other')
    """
    if len(set(judged.values())) == 1:
        return f"**{next(iter(judged.values()))}**"
    return "; ".join(
        f"**{verdict}**: {', '.join(name for name, each in judged.items() if each == verdict)}"
        for verdict in dict.fromkeys(judged.values())
    )


def write_warning(out: Path) -> Iterator[str]:
    """Yield a warning if a study in the folder is of the smallest scale."""
    if any("-smoke" in path.read_text(encoding="utf-8") for path in out.rglob("study.json")):
        yield "**Smoke scale: tiny networks on few images, to see that everything runs. These verdicts mean nothing.**"
        yield ""


def write_page(path: Path, table: str) -> None:
    """Replace what stands between the two marks of a page by the table."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
