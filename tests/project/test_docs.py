"""The documents are right: links, code, the map of the package, and the generated list of measures."""

import ast
import importlib
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import saltflat
from saltflat.bounds import BOUNDS
from saltflat.measures.registry import MEASURES
from saltflat.studies.networks import NETWORKS
from saltflat.studies.recipe import SETTINGS

ROOT = Path(__file__).parent.parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(*sorted((ROOT / "docs").glob("*.md")), *TUTORIALS),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")

BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]


def test_the_list_of_measures_is_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, "docs/catalogue.py"], cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    written = (ROOT / "docs" / "measures.md").read_text(encoding="utf-8")
    assert made.stdout == written, "regenerate it: python docs/catalogue.py > docs/measures.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    local = [link.partition("#")[0] for link in links if not link.startswith(("http:", "https:", "#"))]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_file_of_the_repository_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(
        r"\b(?:saltflat|tests|examples|benchmarks)/[\w/]+(?:\.\w+)?(?![\w*])", page.read_text(encoding="utf-8")
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("block", BLOCKS)
def test_what_a_python_block_imports_and_calls_exists(block: str) -> None:
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []
        elif isinstance(node, ast.Import):
            for each in node.names:
                importlib.import_module(each.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "saltflat":
            assert hasattr(saltflat, node.attr), node.attr


def test_the_code_of_the_readme_prints_what_the_readme_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = BLOCK.findall(text)
    exec(block, {})
    printed = _read_comparison(capsys.readouterr().out)
    shown = _read_comparison(text)
    assert (
        printed.keys() == shown.keys() == {*re.findall(r'"(\w+)"', block.partition("measures = ")[2].splitlines()[0])}
    )
    for name, numbers in shown.items():  # training depends on the number of threads, in the last digits
        assert printed[name] == pytest.approx(numbers, rel=0.1), name


def _read_comparison(text: str) -> dict[str, list[float]]:
    """Return both values and their ratio for each measure in a printed comparison."""
    text = re.sub(r" \[[^\]\n]+\]", "", text)  # intervals
    rows = re.findall(r"^(\w+) .*?((?: +[\d.]+){3})   (?:same|\w+ flatter)$", text, re.MULTILINE)
    return {name: [float(each) for each in numbers.split()] for name, numbers in rows}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 800


def test_the_map_of_the_package_names_every_module_and_no_other() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    there = {
        path.relative_to(ROOT / "saltflat").as_posix()
        for path in (ROOT / "saltflat").rglob("*.py")
        if not path.name.startswith("__")
    }
    named = set()
    files = page.partition("## The files")[2].partition("## The sweep")[0]
    head, *folders = re.split(r"^\*\*`(\w+/)`\*\*", files, flags=re.MULTILINE)
    for folder, table in (("", head), *zip(folders[::2], folders[1::2], strict=True)):
        # `training/` (`train_one.py`, ...) names files of a folder within the folder.
        for inner, inside in re.findall(r"`(\w+/)` \(([^)]*)\)", table):
            named |= {f"{folder}{inner}{name}" for name in re.findall(r"`(\w+\.py)`", inside)}
        plain = re.sub(r"`\w+/` \([^)]*\)", "", table)
        named |= {f"{folder}{name}" for name in re.findall(r"`([\w/]+\.py)`", plain)}
    assert named == there


def test_the_code_about_rescalings_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    for block in BLOCK.findall((ROOT / "docs" / "symmetry.md").read_text(encoding="utf-8")):
        exec(block, known)
        for code, said in re.findall(r"^(group\S+)  # (\d+)", block, re.MULTILINE):
            assert eval(code, known) == int(said), code
    assert (tmp_path / "graph.png").stat().st_size > 0


@pytest.mark.parametrize("name", ["landscape.md", "spectrum.md", "feature-robustness.md"])
def test_the_code_about_pictures_of_the_loss_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    for block in BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8")):
        exec(block, known)
        for comparison in re.findall(r"^(\S+ == \S+)", block, re.MULTILINE):
            assert eval(comparison, known), comparison
    assert list(tmp_path.glob("*.png"))


def test_the_code_about_comparing_runs() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2)]
    known: dict[str, Any] = {
        "loader": (torch.randn(16, 3), torch.randint(3, (16,))),
        "model": models[0].eval(),
        "model_trained_with_sam": models[1].eval(),
    }
    for block in BLOCK.findall((ROOT / "docs" / "comparing.md").read_text(encoding="utf-8")):
        exec(block, known)
    assert known["plain"]["rho"].value != known["sam"]["rho"].value


def test_the_code_for_those_who_come_from_other_libraries_runs() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    known: dict[str, Any] = {}
    for block in BLOCK.findall(page):
        exec(block, known)
    report, spectrum = known["report"], known["spectrum"]
    assert report["hessian_top_eigenvalue"].value == pytest.approx(spectrum.largest[0].value, rel=1e-4)
    assert known["optimizer"].perturbed_steps == 2
    for block in re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        ast.parse(block)  # their calls


@pytest.mark.parametrize("name", ["README.md", "docs/site/index.md"])
def test_the_number_of_measures_is_right(name: str) -> None:
    assert re.findall(r"computes (\d+) measures", (ROOT / name).read_text(encoding="utf-8")) == [str(len(MEASURES))]


@pytest.mark.parametrize("name", ["README.md", "docs/choosing.md"])
def test_every_measure_is_named(name: str) -> None:
    told = set(CODE.findall((ROOT / name).read_text(encoding="utf-8")))
    # Variants are listed by their suffix or prefix.
    short = {f"normalized_sharpness{each}" for each in told if each.startswith("_")}
    short |= {f"{each}normalized_sharpness" for each in told if each.endswith("_")}
    assert MEASURES.keys() - told - short == set()


def test_the_tables_say_of_rescaling_what_the_measures_claim() -> None:
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").partition("## Which ones rescaling fools")[2]
    rows = {
        "factors of layers and of single units": {"layer_scale", "unit_scale"},
        "factors of layers only": {"layer_scale"},
        "neither": set(),
    }
    for label, claims in rows.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
        named = [name for name in CODE.findall(row) if name in MEASURES]
        assert named
        assert [name for name in named if set(MEASURES[name].invariant_to) != claims] == []


@pytest.mark.filterwarnings("ignore:Nothing was measured")  # a training of no time cannot pay for it
def test_the_code_about_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(fc=nn.Linear(3, 8), act=nn.ReLU(), head=nn.Linear(8, 3)))
    inputs, targets = torch.randn(16, 3), torch.randint(3, (16,))
    known: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "loader": [(inputs, targets)] * 100,
        "inputs": inputs,
        "targets": targets,
        "probe_inputs": inputs,
        "probe_targets": targets,
    }
    before = [p.detach().clone() for p in model.parameters()]
    for block in BLOCK.findall((ROOT / "docs" / "training.md").read_text(encoding="utf-8")):
        exec(block, known)
    assert not any(map(torch.equal, before, model.parameters()))


def test_the_optimizer_of_the_page_on_adding_steps() -> None:
    page = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8").partition("## An optimizer")[2]
    known: dict[str, Any] = {}
    exec(BLOCK.findall(page)[0], known)
    model = nn.Linear(2, 1)
    optimizer = known["BoxSAM"](model, torch.optim.SGD, rho=0.01, lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(4, 2)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.perturbation == pytest.approx(0.01 * 3**0.5)


def test_the_bound_of_the_page_on_adding_is_computed() -> None:
    page = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8").partition("## A bound")[2]
    before, model = dict(BOUNDS), nn.Linear(2, 2).double()
    data = torch.randn(1000, 2).double(), torch.arange(1000) % 2
    try:
        exec(BLOCK.findall(page)[0], {})
        found = saltflat.compute_bounds(model, data, bounds={"fixed_deviation": {"deviation": 0.5}})["fixed_deviation"]
    finally:
        BOUNDS.clear()
        BOUNDS.update(before)
    squares = sum(float(value.detach().square().sum()) for value in model.parameters())
    assert found.terms["kl"] == pytest.approx(2 * squares)
    assert found.terms["risk of random networks"] < found.value < 1
    assert found.is_valid


def test_the_page_on_studies_names_every_setting_and_network() -> None:
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    for name in (*SETTINGS, *NETWORKS, *(each for made in NETWORKS.values() for each in made.arguments)):
        assert f"`{name}`" in page, name
