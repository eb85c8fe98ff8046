"""The documentation site builds without warnings, needs no network, and its links lead somewhere."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from browser import PHONE, Tab, browsing, chromium
from filelock import FileLock

import saltflat
from saltflat.measures.registry import MEASURES

for package in ("furo", "myst_parser", "sphinx", "sphinx_copybutton"):
    pytest.importorskip(package, reason="needs the docs extra")

ROOT = Path(__file__).parent.parent.parent
ELSEWHERE = re.compile(r"(?:https?:)?//")


@dataclass
class Page(HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        if "id" in found:
            self.anchors.add(found["id"])
        if tag == "a":
            self.links += [found["href"]] if "href" in found else []
        else:
            self.loaded += [found[name] for name in ("href", "src", "srcset", "data") if name in found]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return the folder of the built site; workers share one build."""
    shared = tmp_path_factory.getbasetemp()
    shared = (shared if worker_id == "master" else shared.parent) / "site"
    with FileLock(f"{shared}.lock"):
        if not (shared / "built").exists():
            build = [sys.executable, "docs/site/build.py", "--out", str(shared)]
            done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stdout + done.stderr
            (shared / "built").touch()
    return shared / "html"


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Page]:
    """Return every page of the site by its file."""
    found = {path: Page() for path in site.rglob("*.html")}
    for path, page in found.items():
        page.feed(path.read_text(encoding="utf-8"))
    return found


def test_every_page_of_the_repository_is_built(site: Path) -> None:
    written = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("papers/*/README.md"), ROOT / "CHANGELOG.md"]
    written = [path for path in written if path.parent.name != "site" and "_build" not in path.parts]
    built = [(site / path.relative_to(ROOT)).with_suffix(".html") for path in written]
    assert [path for path in built if not path.is_file()] == []
    assert (site / "index.html").is_file()


def test_every_link_and_every_image_leads_somewhere(pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            if not file.is_file() or (anchor and file in pages and unquote(anchor) not in pages[file].anchors):
                lost.append((path.name, link))
    assert lost == []


def test_nothing_is_loaded_from_the_network(site: Path, pages: dict[Path, Page]) -> None:
    loaded = [(path.name, link) for path, page in pages.items() for link in page.loaded if ELSEWHERE.match(link)]
    for path in site.rglob("*.css"):
        urls = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s;]+)", path.read_text(encoding="utf-8"))
        loaded += [(path.name, url) for url in urls if ELSEWHERE.match(url)]
    assert loaded == []


def test_the_page_of_measures_has_the_formula_of_each(site: Path) -> None:
    text = (site / "docs" / "measures.html").read_text(encoding="utf-8")
    sections = {each.partition("<")[0]: each for each in text.split("<h3>")[1:]}
    assert sections.keys() == MEASURES.keys()
    assert [name for name, each in sections.items() if "<math" not in each] == []


def test_every_public_name_is_documented(site: Path) -> None:
    text = (site / "api" / "saltflat.html").read_text(encoding="utf-8")
    assert [name for name in saltflat.__all__ if f'id="saltflat.{name}"' not in text] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/tutorials/[a-z]*.md")), ids=lambda path: path.stem)
def test_a_tutorial_shows_what_its_code_printed(path: Path, site: Path, pages: dict[Path, Page]) -> None:
    built = site / "docs" / "tutorials" / f"{path.stem}.html"
    text = built.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert text.count('class="output highlight-text') >= sum("print(" in block for block in blocks) > 0
    drawn = re.findall(r"\"(\w+\.png)\"", "".join(blocks))
    assert [name for name in drawn if f"{path.stem}-{name}" not in "".join(pages[built].loaded)] == []


def test_pages_fit_a_phone(site: Path) -> None:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium here")
    kinds = ("index", "quick-start", "docs/measures", "docs/tutorials/study", "api/saltflat", "papers/README")
    with browsing(program) as browser:
        tab = Tab(browser)
        tab.screen(PHONE, dark=True, touch=True)
        for kind in kinds:
            tab.open(site / f"{kind}.html")
            assert tab("document.documentElement.scrollWidth") == PHONE[0], kind
            assert tab.wrongs() == [], kind
