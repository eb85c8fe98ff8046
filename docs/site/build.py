"""Build the documentation site: python docs/site/build.py; open docs/_build/html/index.html

The pages are Markdown files of the repository, which keep their places, so that a link between two of them leads to the
same page here as on GitHub. They are copied to ``docs/_build/source`` with the figures they show. Some pages are made:
the measures and their formulas from the registry, the API reference from the public names, the examples from their
scripts. Tutorials are executed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from sphinx.cmd.build import build_main

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from api_pages import make_api_pages  # noqa: E402
from measures_page import make_measures_page  # noqa: E402
from tutorials import execute_tutorial  # noqa: E402

PAGES = ("*.md", "docs/*.md", "docs/tutorials/*.md", "papers/README.md", "papers/*/README.md", "benchmarks/README.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FIGURES = (".png", ".svg", ".jpg")

TUTORIALS = Path("docs/tutorials")

# Pages that are listed under another one, at its end.
LISTS = {
    Path("papers/README.md"): """
```{toctree}
:hidden:
:glob:

*/README
```
""",
    TUTORIALS / "README.md": """
```{toctree}
:hidden:

sam
audit
monitor
certificate
study
transformer
```
""",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "docs" / "_build",
        help="folder for the site; source/, doctrees/ and html/ in it are replaced",
    )
    out = parser.parse_args().out
    for name in ("source", "doctrees", "html"):
        shutil.rmtree(out / name, ignore_errors=True)  # pages show the titles of others, and code: all are made again
    write_sources(out / "source")
    options = ["-q", "-W", "--keep-going", "-c", str(HERE), "-d", str(out / "doctrees")]
    failed = build_main([*options, str(out / "source"), str(out / "html")])
    if not failed:
        print(f"The site is in {out / 'html' / 'index.html'}")
    return failed


def write_sources(folder: Path) -> None:
    """Write all pages to a folder, and the figures they show."""
    for place, text in read_pages():
        text, figures = resolve_links(place, text)
        for each in (place, *figures):
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
        if place.parent == TUTORIALS and place not in LISTS:
            text = execute_tutorial(place.stem, text, folder / place.parent)
        (folder / place).write_text(text, encoding="utf-8")
        for each in figures:
            shutil.copyfile(ROOT / each, folder / each)


def read_pages() -> Iterator[tuple[Path, str]]:
    """Yield the place and the text of every page."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT)
            yield place, path.read_text(encoding="utf-8") + LISTS.get(place, "")
    for path in sorted(HERE.glob("*.md")):
        yield Path(path.name), list_new_guides(path.read_text(encoding="utf-8"))
    yield Path("docs/measures.md"), make_measures_page()
    yield from make_api_pages()
    yield from make_example_pages()


def list_new_guides(text: str) -> str:
    """Return the home page with the guides that it does not list yet at the end of its list of guides."""
    new = [f"docs/{path.stem}\n" for path in sorted(ROOT.glob("docs/*.md")) if f"\ndocs/{path.stem}\n" not in text]
    last = "docs/command-line\n"
    return text.replace(last, last + "".join(new))


def make_example_pages() -> Iterator[tuple[Path, str]]:
    """Yield a page for each script in examples/, and their list."""
    rows = []
    for path in sorted(ROOT.glob("examples/*.py")):
        code = path.read_text(encoding="utf-8")
        title = code.removeprefix('"""').partition("\n")[0].partition('"""')[0]
        rows.append(f"* [{path.name}]({path.name}): {title}")
        yield path.relative_to(ROOT).with_suffix(".md"), f"# {path.name}\n\n```python\n{code}```\n"
    names = "\n".join(path.stem for path in sorted(ROOT.glob("examples/*.py")))
    yield (
        Path("examples/README.md"),
        "# Examples\n\nScripts that run as they are, from a clone: `python examples/01_digits.py --help`.\n\n"
        + "\n".join(rows)
        + f"\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n",
    )


def resolve_links(place: Path, text: str) -> tuple[str, set[Path]]:
    """Return a page whose links to folders and scripts lead to their pages, and the figures it shows.

    A figure that is not there yet, because its runs are not, is replaced with its description.
    """
    figures = set()

    def replace(match: re.Match[str]) -> str:
        shown, label, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = (ROOT / place.parent / target).resolve()
        if ":" in target or not path.is_relative_to(ROOT):
            return match[0]
        if path.suffix in FIGURES:
            if not path.is_file():
                return f"*{label} (not drawn yet)*"
            figures.add(path.relative_to(ROOT))
        if path.is_dir():
            return f"{shown}[{label}]({target.rstrip('/')}/README.md{anchor})"
        if path.parent == ROOT / "examples" and path.suffix == ".py":
            return f"{shown}[{label}]({target.removesuffix('.py')}.md{anchor})"
        return match[0]

    return LINK.sub(replace, text), figures


if __name__ == "__main__":
    sys.exit(main())
