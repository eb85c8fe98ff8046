"""The papers' larger experiments run at their smallest scale, in this process, which saves the time of imports."""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

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
