"""The command line: slices through the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories import mlp, pair
from test_cli import Call, refused, run

import saltflat
from saltflat.landscape import Landscape

MLP = ["--model", "factories:mlp", "--data", "factories:pair"]


@pytest.fixture
def found() -> Landscape:
    torch.manual_seed(0)
    return saltflat.compute_landscape(mlp(), pair(), points=5)


def test_a_landscape_is_that_of_the_library(found: Landscape, tmp_path: Path) -> None:
    out, plot = tmp_path / "landscape.json", tmp_path / "landscape.png"
    result = run("landscape", *MLP, "--points", 5, "--out", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    written = Landscape.load(out)
    assert written.losses.tolist() == found.losses.tolist()
    assert written.notes[-1] == "Data: factories:pair."
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "random direction 1 (by filter)" in result.stdout
    assert result.stderr == f"Wrote {out}.\nWrote {plot}.\n"


def test_landscape_passes_every_option_on(found: Landscape, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken = Call(found)  # type: ignore[arg-type]
    monkeypatch.setattr(saltflat, "compute_landscape", taken)
    result = run(
        *("landscape", *MLP, "--model-args", '{"width": 5}', "--limit", 3, "--loss", "mse"),
        *("--directions", "eigenvectors", "--dimensions", 2, "--points", 7, "--radius", 0.5),
        *("--normalize-directions", "filter", "--biases", "include", "--batch-norm", "recompute"),
        *("--layers", "1,3.weight", "--dtype", "float64", "--memory", "64MiB", "--seed", 7),
    )
    assert result.exit_code == 0, result.output
    model, data, loss = taken.args
    assert model[1].out_features == 5
    assert len(data[0]) == 3
    assert loss == "mse"
    assert taken.options == {
        "directions": "eigenvectors",
        "dimensions": 2,
        "points": 7,
        "radius": 0.5,
        "normalize": "filter",
        "biases": "include",
        "batch_norm": "recompute",
        "layers": ["1", "3.weight"],
        "dtype": torch.float64,
        "memory": "64MiB",
        "seed": 7,
        "progress": None,
    }


def test_show_prints_a_landscape_again(found: Landscape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = found.save(tmp_path / "landscape.json")
    result = run("show", path)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{found}\n"
    refused(run("compare", path, path), "not a report but a landscape", "saltflat show")
    path.write_text('{"schema": "saltflat.landscape/1"}')
    refused(run("show", path), "a landscape that cannot be understood")


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    result = run("landscape", *MLP, "--points", 3, "--dimensions", 2, "--quiet", "--out", tmp_path / "landscape.json")
    assert (result.exit_code, result.output) == (0, "")
    assert Landscape.load(tmp_path / "landscape.json").losses.shape == (3, 3)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--points", "4"], ["points=4"]),
        (["--dimensions", "3"], ["dimensions=3"]),
        (["--radius", "0"], ["radius=0"]),
        (["--directions", "filters"], ["Try 'filter'"]),
        (["--normalize-directions", "layer"], ["directions='random'"]),
        (["--batch-norm", "fresh"], ["recompute"]),
        (["--dtype", "float16"], ["float16"]),
        (["--out", "{}/missing/landscape.json"], ["--out", "missing"]),
        (["--plot", "{}/landscape.jpg"], ["--plot"]),
        (["--quiet"], ["--out"]),
        (["--model", "factories:careless"], ["KeyError"]),
    ],
)
def test_bad_landscapes_are_one_line(words: list[str], parts: list[str], tmp_path: Path) -> None:
    refused(run("landscape", *MLP, *(word.format(tmp_path) for word in words)), *parts)


def test_the_command_has_help() -> None:
    result = run("landscape", "--help")
    assert result.exit_code == 0
    assert "Evaluate the loss along one or two directions" in " ".join(result.stdout.split())
