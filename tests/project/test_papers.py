"""The papers' scripts run at their smallest scale, and their pages show the tables of their rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAPERS = sorted(path.parent for path in (ROOT / "papers").glob("*/run.py"))
DATA = Path(os.environ.get("SALTFLAT_DATA", "data")).absolute()


def run(paper: Path, *words: str) -> str:
    environment = {**os.environ, "SALTFLAT_DATA": str(DATA), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, paper / "run.py", *words], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_a_page_shows_the_table_of_its_rows(paper: Path) -> None:
    table = run(paper, "table").strip()
    assert table
    assert table in (paper / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(not (DATA / "cifar-10-batches-py").exists(), reason="needs CIFAR-10 in SALTFLAT_DATA")
def test_the_smallest_scale_trains_measures_and_goes_on_where_it_was(tmp_path: Path) -> None:
    (paper,) = (each for each in PAPERS if each.name == "jia2020information")
    words = ("train", "--scale", "smoke", "--seeds", "0", "--out", str(tmp_path))
    assert "3 runs are done, 0 of them were before" in run(paper, *words)
    rows = {path.name.partition("_")[0]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert rows.keys() == {"sgd", "fisher", "sam"}
    for row in rows.values():
        assert row["epochs_done"] == 2
        assert row["measures"].keys() == {"fisher_logdet", "fisher_trace", "normalized_sharpness", "minimum_sharpness"}
    assert len({row["measures"]["fisher_trace"] for row in rows.values()}) == 3, "three methods, three networks"
    assert "3 runs are done, 3 of them were before" in run(paper, *words)


@pytest.mark.skipif(not (DATA / "MNIST").exists(), reason="needs MNIST in SALTFLAT_DATA")
@pytest.mark.parametrize(
    ("name", "studies", "networks", "measure"),
    [
        ("petzka2019reparameterization", ("",), 6, "kappa_trace"),
        ("ibayashi2021minimum", ("ibayashi_mlp", "ibayashi_lenet"), 6, "minimum_sharpness"),
    ],
)
def test_the_smallest_scale_of_a_study_goes_on_where_it_was(
    tmp_path: Path, name: str, studies: tuple[str, ...], networks: int, measure: str
) -> None:
    paper = ROOT / "papers" / name
    words = ("--scale", "smoke", "--device", "cpu", "--out", str(tmp_path))
    table = run(paper, *words)
    assert "| verdict |" in table
    rows = sorted(path for study in studies for path in (tmp_path / study / "rows").glob("*.json"))
    assert len(rows) == networks * len(studies)
    values = {path: json.loads(path.read_text())["readings"][measure]["value"] for path in rows}
    assert len(set(values.values())) == len(rows), "every network is another one"
    assert all(value > 0 for value in values.values())
    assert list(tmp_path.rglob("*.png")), "the figures are drawn"

    written = {path: path.stat().st_mtime_ns for path in rows}
    lost = rows[0]
    lost.unlink()
    assert "| verdict |" in run(paper, *words)
    now = {path: path.stat().st_mtime_ns for path in rows}
    assert {path for path in rows if now[path] != written[path]} == {lost}, "only the row that was lost is made again"
    # Fewer networks are trained at once the second time, so sums are rounded another way.
    assert json.loads(lost.read_text())["readings"][measure]["value"] == pytest.approx(values[lost], rel=1e-2)
