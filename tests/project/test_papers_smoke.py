"""The papers' larger experiments run at their smallest scale, in this process, which saves the time of imports."""

import doctest
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.nn import functional as F

from saltflat.studies import Results
from saltflat.studies.rebuild import load_trained_network

PAPERS = Path(__file__).parent.parent.parent / "papers"
DATA = Path(os.environ.get("SALTFLAT_DATA", "data")).absolute()
Run: TypeAlias = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Return what runs a paper's script at its smallest scale and returns what it prints."""
    path, modules = list(sys.path), set(sys.modules)

    def run_script(paper: str, *words: str) -> str:
        monkeypatch.syspath_prepend(PAPERS / paper)
        script = importlib.import_module("run")
        script.main([*words, "--scale", "smoke", "--device", "cpu", "--data", str(DATA)])
        return capsys.readouterr().out

    yield run_script
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(PAPERS)):
            sys.modules.pop(name)


@pytest.mark.skipif(not (DATA / "cifar-10-batches-py").exists(), reason="needs CIFAR-10 in SALTFLAT_DATA")
def test_the_smallest_scale_of_lenets_of_five_initializations_is_rescaled_and_goes_on_where_it_was(
    tmp_path: Path, run: Run
) -> None:
    study = ("lenets", "--study", "lenets-epochs-large", "--out", str(tmp_path))
    table = run("petzka2019reparameterization", *study)
    assert table.count("rescaled 1") == 2, "the first of ten networks, and the tenth"
    assert "Smoke scale" in table
    (found,) = re.findall(r"trace and eigenvalue of the last one are within (\S+) of the law", table)
    assert float(found) < 1e-9, "a layer's Hessian is divided by the square of its factor"
    (moved,) = re.findall(r"after a fixed number of epochs: moves by at most (\S+);", table)
    assert float(moved) < 1e-9, "kappa and kappa_trace are invariant"
    assert "| Figures 1 and 2, stopped at one training loss: batches of 20, 10 | 10 of 10 |" in table
    assert "| Figures 1 and 2, after a fixed number of epochs: batches of 20, 10 |" not in table, "it is not left"
    assert {path.name for path in tmp_path.glob("*.png")} == {"figure1.png", "figure2.png"}
    folder = tmp_path / "lenets-epochs-large"
    rows = [json.loads(path.read_text()) for path in folder.glob("rows/*.json")]
    assert len({row["readings"]["kappa"]["value"] for row in rows}) == 10, "every network is another one"

    rescaled = json.loads((folder / "rescaled.json").read_text())
    lost = sorted(rescaled)[0]
    (folder / "rescaled.json").write_text(json.dumps({key: each for key, each in rescaled.items() if key != lost}))
    written = {path: path.stat().st_mtime_ns for path in folder.glob("rows/*.json")}
    assert run("petzka2019reparameterization", *study).count("rescaled 1") == 1, "only what was lost is measured again"
    assert {path: path.stat().st_mtime_ns for path in written} == written
    again = json.loads((folder / "rescaled.json").read_text())[lost]
    assert again["factors"] == rescaled[lost]["factors"], "by the same factors"


@pytest.mark.skipif(not (DATA / "cifar-10-batches-py").exists(), reason="needs CIFAR-10 in SALTFLAT_DATA")
def test_the_smallest_scale_of_jia_and_su_chooses_a_penalty_and_goes_on_where_it_was(tmp_path: Path, run: Run) -> None:
    paper, out = "jia2020information", ("--out", str(tmp_path))
    with pytest.raises(SystemExit, match=r"Expected all networks of tune-cnn, .* Try run.py train --study tune-cnn"):
        run(paper, "train", "--study", "table1-cnn-cifar10", *out)
    run(paper, "train", "--study", "scenario-i", "tune-cnn", "table1-cnn-cifar10", *out)
    table = run(paper, "table", *out)
    assert "Smoke scale" in table
    assert "| Scenario I |" not in table.partition("## Not run yet")[2].partition("## Scenario I")[0], "it is not left"
    assert "| Table 1, CNN on CIFAR-100 | 2 of 2 |" in table
    assert "drew scenarios.png\ndrew table1.png" in run(paper, "figures", *out)

    rows = {name: read_rows(tmp_path / name) for name in ("scenario-i", "tune-cnn", "table1-cnn-cifar10")}
    assert {row["config"]["confusion"] for row in rows["scenario-i"].values()} == {0, 10, 20}
    assert all(row["outcome"]["test_examples"] == 10 for row in rows["tune-cnn"].values()), "of the training images"
    tuned = {row["config"]["fisher_penalty"]: row["outcome"]["test_error"] for row in rows["tune-cnn"].values()}
    trained = {row["config"]["fisher_penalty"] for row in rows["table1-cnn-cifar10"].values()} - {0.0}
    assert trained == {min(set(tuned) - {0.0}, key=lambda beta: tuned[beta])}

    again = tmp_path / "table1-cnn-cifar10" / "norm25.json"
    before = json.loads(again.read_text())
    assert before.keys() == rows["table1-cnn-cifar10"].keys()
    lost = min(before)
    again.write_text(json.dumps({key: each for key, each in before.items() if key != lost}))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("rows/*.json")}
    run(paper, "train", "--study", "table1-cnn-cifar10", *out)
    assert {path: path.stat().st_mtime_ns for path in written} == written, "no network is trained or measured again"
    assert json.loads(again.read_text())[lost] == pytest.approx(before[lost]), "but by the pass that it lacked"
    ((measure, value),) = before[lost].items()
    assert measure == "fisher_logdet(pool=10000)"
    assert value == pytest.approx(compute_log_determinant(tmp_path / "table1-cnn-cifar10", lost))


def read_rows(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "rows").glob("*.json")}


def compute_log_determinant(folder: Path, key: str) -> float:
    """Return ln det of the inner products of all examples' gradients, with logits of norm 25, one by one."""
    results = Results.load(folder)
    network = load_trained_network(results, key, results.study.data.examples(DATA))
    model, gradients = network.model.double(), []
    for x, y in zip(network.inputs.double(), network.labels, strict=True):
        logits = model(x[None])
        loss = F.cross_entropy(25 * logits / logits.norm(), y[None])
        gradients.append(torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))]))
    stacked = torch.stack(gradients)
    return float(torch.linalg.slogdet(stacked @ stacked.T).logabsdet)


def test_scenarios_share_the_networks_that_they_have_in_common(run: Run) -> None:
    run("jia2020information", "table", "--out", "nowhere")
    scenarios, studies = importlib.import_module("scenarios"), importlib.import_module("studies")
    study = studies.build_study("scenarios-ii-iii", "full")
    configs, first = list(study.runs().values()), study.axes["augment, crop, batch_size"][0][2]
    levels = {
        title: [scenario.get_level(config) for config in configs if scenario.contains(config, first)]
        for title, scenario in scenarios.SCENARIOS.items()
        if title != "Scenario I"
    }
    assert levels["Scenario II"] == [name for name in ("none", "flips", "1-crop-f", "4-crop-f") for _ in range(3)]
    assert levels["Scenario III"] == [batch for batch in (128, 256, 512, 1024) for _ in range(3)]
    assert len(configs) == 21


def test_verdicts_of_jia_and_su_follow_the_rules_of_the_page(run: Run) -> None:
    run("jia2020information", "table", "--out", "nowhere")
    tables, scenarios = importlib.import_module("tables"), importlib.import_module("scenarios")
    estimate = importlib.import_module("estimates").Estimate
    nan = float("nan")
    for change, verdict in (
        (estimate(-1.0, -1.2, -0.8), "reproduced"),
        (estimate(-2.0, -2.2, -1.8), "reproduced"),
        (estimate(-0.3, -0.5, -0.1), "same sign"),
        (estimate(-0.5, -1.5, 0.5), "not decided"),
        (estimate(-0.03, -0.54, 0.49), "not reproduced"),
        (estimate(0.5, 0.1, 0.9), "not reproduced"),
        (estimate(-0.5, nan, nan), "not tested (too few networks)"),
    ):
        assert tables.judge_fall(change, -1.06) == verdict, change
    for tau, tracks, fails in (
        (estimate(0.5, 0.2, 0.8), "reproduced", "not reproduced"),
        (estimate(0.2, -0.1, 0.5), "not decided", "not decided"),
        (estimate(-0.2, -0.5, 0.1), "not reproduced", "reproduced"),
        (None, "not tested (too few networks)", "not tested (too few networks)"),
    ):
        assert (scenarios.judge_tracking(tau, True), scenarios.judge_tracking(tau, False)) == (tracks, fails)
    assert doctest.testmod(tables).failed == 0
