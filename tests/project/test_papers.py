"""The papers' scripts run at their smallest scale, and their pages show the tables of their rows."""

import doctest
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from scipy.stats import pearsonr

ROOT = Path(__file__).parent.parent.parent
PAPERS = sorted(path.parent for path in (ROOT / "papers").glob("*/run.py"))
DATA = Path(os.environ.get("SALTFLAT_DATA", "data")).absolute()


def run(paper: Path, *words: str) -> str:
    environment = {**os.environ, "SALTFLAT_DATA": str(DATA), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, paper / "run.py", *words], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


@cache
def print_table(paper: Path) -> str:
    return run(paper, "table").strip()


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_a_page_shows_the_table_of_its_rows(paper: Path) -> None:
    table = print_table(paper)
    assert table
    assert table in (paper / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_a_page_is_made_of_the_committed_rows_alone(paper: Path, tmp_path: Path) -> None:
    page = (paper / "README.md").read_bytes()
    for words in (["--out", str(tmp_path)], ["--scale", "smoke"]):
        with pytest.raises(subprocess.CalledProcessError) as raised:
            run(paper, "page", *words)
        assert raised.value.returncode == 2
    assert (paper / "README.md").read_bytes() == page


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_numbers_in_the_prose_of_a_page_are_those_of_its_tables_or_settings(paper: Path) -> None:
    page = (paper / "README.md").read_text(encoding="utf-8").partition("## How it was run")[0]
    tables = print_table(paper)
    prose = set(page.splitlines()) - set(tables.splitlines())
    settings = "".join(path.read_text(encoding="utf-8") for path in [*paper.glob("*.py"), *paper.glob("*.toml")])
    numbers = {number for line in prose for number in re.findall(r"(?<![\w.])\d+\.\d+(?!\.?\d)", line)}
    # Shares may be written in percent.
    known = {each for each in numbers if each in tables or each in settings or f"{float(each) / 100:g}" in settings}
    assert numbers == known


def test_the_list_of_all_claims_is_that_of_the_pages() -> None:
    index = ROOT / "papers" / "index.py"
    listed = subprocess.run([sys.executable, index], capture_output=True, text=True, check=True).stdout.strip()
    assert listed.count("\n| ") >= 30, "every claim of every paper has a row"
    assert listed in (ROOT / "papers" / "README.md").read_text(encoding="utf-8")
    for paper in PAPERS:
        assert f"({paper.name}/README.md)" in (ROOT / "papers" / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(not (DATA / "MNIST").exists(), reason="needs MNIST in SALTFLAT_DATA")
def test_the_smallest_scale_of_the_estimators_goes_on_where_it_was(tmp_path: Path) -> None:
    paper = ROOT / "papers" / "ibayashi2021minimum"
    words = ("estimators", "--scale", "smoke", "--out", str(tmp_path))
    assert "### Figure 3: errors of estimated diagonals" in run(paper, *words)
    rows = sorted((tmp_path / "estimators").glob("*.json"))
    assert len(rows) == 2
    assert (tmp_path / "figure3.png").exists()
    for row in (json.loads(path.read_text()) for path in rows):
        assert row["loop_differs_by"] < 1e-4, "the loop agrees with the exact trace"
        errors = {name: curve["error"][-1] for name, curve in row["curves"].items()}
        assert errors.pop("exact, float32") < 1e-5 < min(errors.values())
    rows[0].unlink()
    assert run(paper, *words).count("seed 0: trace") == 1, "only what was lost is measured again"


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


@pytest.mark.skipif(
    not ((DATA / "MNIST").exists() and (DATA / "cifar-10-batches-py").exists()),
    reason="needs MNIST and CIFAR-10 in SALTFLAT_DATA",
)
def test_the_smallest_scale_of_tsuzuku_et_al_goes_on_where_it_was(tmp_path: Path) -> None:
    paper = ROOT / "papers" / "tsuzuku2020normalized"
    words = ("--scale", "smoke", "--device", "cpu", "--out", str(tmp_path))
    tables = ("tables", "--network", "wrn", "--dataset", "cifar10", *words)
    run(paper, *tables)
    run(paper, "labels", "--network", "mlp", "--dataset", "mnist", *words)
    table = run(paper, "table", *words)
    verdicts = table.partition("## What is left at equal training loss")[0]
    assert "not tested (no rows yet)" in verdicts, "two of the studies have rows, the others none"
    assert "logits of unit deviation" in table
    assert "drew figure1.png" in run(paper, "figures", *words)
    rows = sorted((tmp_path / "tables-wrn-cifar10" / "rows").glob("*.json"))
    values = [json.loads(path.read_text())["readings"]["normalized_sharpness"]["value"] for path in rows]
    assert len(set(values)) == len(rows) == 8, "every network is another one"

    again = tmp_path / "tables-wrn-cifar10" / "folded.json"
    folded = json.loads(again.read_text())
    assert folded.keys() == {path.stem for path in rows}
    lost = rows[0].stem
    again.write_text(json.dumps({key: each for key, each in folded.items() if key != lost}))
    written = {path: path.stat().st_mtime_ns for path in rows}
    assert "folded: 8 of 8" in run(paper, *tables)
    assert {path: path.stat().st_mtime_ns for path in rows} == written, "no network is trained or measured again"
    assert json.loads(again.read_text())[lost] == pytest.approx(folded[lost]), "but by the pass that it lacked"


@pytest.mark.skipif(not (DATA / "MNIST").exists(), reason="needs MNIST in SALTFLAT_DATA")
def test_the_smallest_scale_of_the_certificates_goes_on_where_it_was(tmp_path: Path) -> None:
    paper = ROOT / "papers" / "bounds"
    words = ("--scale", "smoke", "--out", str(tmp_path / "results"), "--kept", str(tmp_path / "weights"))
    assert "at most" in run(paper, "certify", *words)
    rows = sorted((tmp_path / "results").glob("*.json"))
    assert len(rows) == 11, "five certificates and six bounds of the papers"
    values = {path.stem: json.loads(path.read_text())["value"] for path in rows}
    assert len(set(values.values())) >= 10, "the descent from a trained prior may have found nothing better"
    lost = rows[-1]
    lost.unlink()
    assert len(run(paper, "certify", *words).splitlines()) == 1, "only the bound that was lost is computed again"
    assert json.loads(lost.read_text())["value"] == pytest.approx(values[lost.stem], rel=1e-4)
    assert f"{values['mlp-trained']:.2%}" in run(paper, "table", *words)
    assert "drew bounds.png" in run(paper, "figures", *words)


@pytest.mark.skipif(not (DATA / "MNIST").exists(), reason="needs MNIST in SALTFLAT_DATA")
def test_the_smallest_scale_of_the_atlas_packs_its_rows_and_answers(tmp_path: Path) -> None:
    paper = ROOT / "papers" / "atlas"
    words = ("--scale", "smoke", "--device", "cpu", "--work", str(tmp_path))
    assert "12 done" in run(paper, "train", "--part", "2", *words)
    published = tmp_path / "results" / "mlp_small-mnist-equal-epochs"
    found = json.loads((published / "analysis.json").read_text())
    assert found["scored"] == 12
    assert {"path_norm", "input_margin", "noise"} <= found["scores"].keys()
    assert len(json.loads((published / "costs.json").read_text())["seconds"]) == len(found["leads"]) + 1


CHECK_ATLAS = """
import doctest, analysis, parts, summary, tables
for module in (analysis, parts, summary, tables):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed, module
ahead, level, behind = [0.2, 0.1, 0.3], [0.1, -0.1, 0.3], [-0.2, -0.3, -0.1]
kinds = [
    {"leads": {"rho": ahead, "kappa_trace": ahead, "path_norm": behind}},
    {"leads": {"rho": ahead, "kappa_trace": level, "path_norm": ahead}},
]
print(summary.sum_up_leads(kinds))
print(summary.sum_up_leads([{"leads": {"rho": level}}, *kinds]))
flat = {name: {"difference": [0.0, 0.0, 0.0]} for name in summary.FLAT}
moved = {**flat, "kappa_trace": {"difference": behind}, "hessian_trace": {"difference": level}}
print(summary.sum_up_rescaling([{"rescaled": moved}, {"rescaled": {**flat, "rho": None}}]))
"""


def test_the_atlas_sums_up_on_how_many_kinds_of_network_a_finding_holds() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CHECK_ATLAS],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=ROOT / "papers" / "atlas",
    )
    every, some, rescaled = done.stdout.splitlines()
    assert every == (
        "on every kind, at least one measure of flatness is clearly ahead of the squared norm and the training loss. "
        "Kinds on which a measure is: "
        "`rho` (2 of 2), `kappa_trace` (1). Controls: `path_norm` (1 of 2)."
    )
    assert some.startswith("on 1 of 3 kinds, no measure of flatness is clearly ahead of the squared norm and ")
    assert "`rho` (2 of 3), `kappa_trace` (1)" in some
    assert rescaled == (
        "tau-b clearly changes for `kappa_trace` (1 of 2), and stays exactly as it is on all kinds for 15 of 18 "
        "measures of flatness."
    )


@pytest.mark.skipif(not (DATA / "MNIST").exists(), reason="needs MNIST in SALTFLAT_DATA")
def test_feature_robustness_is_measured_in_both_states_of_both_networks(tmp_path: Path) -> None:
    paper = ROOT / "papers" / "petzka2019reparameterization"
    words = ("robustness", "--scale", "smoke", "--out", str(tmp_path))
    assert "the bound held at" in run(paper, *words)
    rows = sorted((tmp_path / "robustness").glob("*.json"))
    assert len(rows) == 4
    assert (tmp_path / "robustness.png").exists()
    rows[0].unlink()
    assert run(paper, *words).count(", layer ") == 1, "only what was lost is measured again"


@pytest.fixture
def analysis(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    folders = [ROOT / "papers", ROOT / "papers" / "tsuzuku2020normalized"]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("analysis")
    for name in {path.stem for folder in folders for path in folder.glob("*.py")}:
        sys.modules.pop(name, None)


def test_the_examples_of_the_analysis_are_right(analysis: ModuleType) -> None:
    for module in (analysis, importlib.import_module("tables")):
        found = doctest.testmod(module)
        assert found.attempted > 0
        assert found.failed == 0


def test_a_partial_correlation_is_that_of_the_residuals(analysis: ModuleType) -> None:
    draw = np.random.default_rng(0)
    z = draw.normal(size=200)
    x, y = z + draw.normal(size=200), 2 * z - draw.normal(size=200)
    residuals = [each - np.polyval(np.polyfit(z, each, 1), z) for each in (x, y)]
    three = (np.array([pearsonr(one, other).statistic]) for one, other in ((x, y), (x, z), (y, z)))
    assert analysis.hold_fixed(*three) == pytest.approx(pearsonr(*residuals).statistic)
    fisher, known = analysis.compute_fisher_interval(pearsonr(x, y).statistic, 200), pearsonr(x, y)
    assert (fisher.low, fisher.high) == pytest.approx(tuple(known.confidence_interval(0.95)), abs=1e-6)


def test_at_equal_loss_both_the_loss_and_its_logarithm_are_held_fixed(analysis: ModuleType) -> None:
    draw = np.random.default_rng(1)
    loss = draw.lognormal(size=60)
    gap, x = loss + draw.normal(size=60), np.log(loss) + draw.normal(size=60)
    found = SimpleNamespace(gap=gap, loss=loss, log_loss=np.log(loss), units=np.arange(60))
    one = analysis.correlate(x, found)
    for controls, value in (
        ((loss, np.log(loss)), one.pearson_left),
        ((loss,), one.loss_held),
        ((np.log(loss),), one.log_held),
    ):
        columns = np.stack([np.ones(60), *controls], axis=1)
        residuals = [each - columns @ np.linalg.lstsq(columns, each)[0] for each in (x, gap)]
        assert value.value == pytest.approx(pearsonr(*residuals).statistic)


def test_slopes_of_a_power_law_are_its_exponents(analysis: ModuleType) -> None:
    depth, width = (np.log(each.ravel()) for each in np.meshgrid([1.0, 2.0, 4.0], [8.0, 32.0, 64.0]))
    once = np.ones((9, 1), dtype=np.float32)
    found = analysis._fit_slopes(depth, width, 3.0 + 1.1 * depth + 0.4 * width, once)
    assert np.ravel(found) == pytest.approx([1.1, 0.4])
    one_depth = (depth == 0).astype(np.float32)[:, None]
    assert np.isnan(analysis._fit_slopes(depth, width, width, one_depth)).all(), "one depth has no slope"
