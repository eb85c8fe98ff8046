"""Gather the verdicts of all papers' pages into papers/README.md: one row for each claim.

python papers/index.py            print the tables
python papers/index.py page       put them into papers/README.md
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from costs import TITLE
from pages import make_head, make_row, write_page

HERE = Path(__file__).parent
TITLES = {
    "tsuzuku2020normalized": "Tsuzuku, Sato and Sugiyama: Normalized Flat Minima (ICML 2020)",
    "petzka2019reparameterization": "Petzka et al.: A Reparameterization-Invariant Flatness Measure (2019)",
    "ibayashi2021minimum": "Ibayashi, Hamaguchi and Imaizumi: Minimum Sharpness (2021)",
    "jia2020information": "Jia and Su: Information-Theoretic Local Minima (ICML 2020)",
}
# In this order: a verdict that begins with the second begins with "not", too.
KINDS = ("reproduced", "same sign", "not reproduced", "not decided", "not tested")
MIXED = "that depend on network or reading"


def read_table(paper: str, title: str) -> list[list[str]]:
    """Return the rows of a page's table under a title, the header first; none if there is none."""
    page = (HERE / paper / "README.md").read_text(encoding="utf-8")
    lines = page.partition(f"{title}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [rows[0], *rows[2:]] if len(rows) > 2 else []


def read_verdicts(paper: str) -> list[list[str]]:
    """Return the rows of a page's table of verdicts, the header first."""
    rows = read_table(paper, "## Verdicts")
    if not rows:
        raise ValueError(f"Expected a table under '## Verdicts' in {paper}/README.md, but found none.")
    return rows


def classify(verdict: str) -> str:
    """Return the kind of a verdict: one of the five, or that it differs between networks or readings.

    >>> classify("**reproduced**: MLP; **not tested (no rows yet)**: LeNet"), classify("**not reproduced (p = 0.9)**")
    ('reproduced in part', 'not reproduced')
    """
    text = verdict.replace("not reproduced", "NR").replace("*", "")
    found = [kind for kind in KINDS if kind.replace("not reproduced", "NR") in text]
    if len(found) == 1:
        return found[0]
    if set(found) == {"reproduced", "not tested"}:
        return "reproduced in part"
    return MIXED


def write_index() -> Iterator[str]:
    """Yield how many claims have which verdict, and a table for each paper."""
    tables = {paper: read_verdicts(paper) for paper in TITLES}
    counts = Counter(classify(row[-1]) for rows in tables.values() for row in rows[1:])
    total = counts.total()
    yield f"{total} claims: {', '.join(f'{count} {kind}' for kind, count in counts.most_common())}."
    for paper, (header, *rows) in tables.items():
        yield ""
        yield f"## [{TITLES[paper]}]({paper}/README.md)"
        yield ""
        yield "| claim | paper | here | verdict |"
        yield "| --- | --- | --- | --- |"
        for claim, printed, *here, verdict in rows:
            names = header[2:-1]
            cells = [f"{name}: {cell}" for name, cell in zip(names, here, strict=True) if cell]
            said = "; ".join(cells) if len(names) > 1 else here[0]
            yield f"| {claim} | {printed} | {said} | {verdict} |"
    yield from write_left()


def write_left() -> Iterator[str]:
    """Yield what has not been run, with its command and estimated cost, from the pages that say so."""
    papers = sorted(path.parent.name for path in HERE.glob("*/README.md"))
    left = [(paper, row) for paper in papers for row in read_table(paper, TITLE)[1:]]
    if not left:
        return
    total = sum(int(row[-1]) for _, row in left)
    yield ""
    yield TITLE
    yield ""
    yield (
        f"{len(left)} studies, about {total} minutes of one H200 in all. Minutes are estimates, as each page "
        "says. An interrupted command resumes where it stopped."
    )
    yield ""
    yield make_head("study", "networks left", "command", "estimated GPU minutes")
    for paper, (what, count, command, minutes) in left:
        full = command.replace("`run.py", f"`python papers/{paper}/run.py")
        yield make_row([f"[{paper}]({paper}/README.md): {what}", count, full, minutes])


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("table", "page"), default="table")
    table = "\n".join(write_index())
    if parser.parse_args(words).what == "page":
        write_page(HERE / "README.md", table)
    else:
        print(table)


if __name__ == "__main__":
    main()
