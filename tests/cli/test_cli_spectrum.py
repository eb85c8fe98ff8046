"""The command line: spectra."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories import mlp, pair
from test_cli import Call, refused, run

import saltflat
from saltflat.spectrum import Spectrum

MLP = ["--model", "factories:mlp", "--data", "factories:pair"]


@pytest.fixture
def found() -> Spectrum:
    torch.manual_seed(0)
    return saltflat.compute_spectrum(mlp(), pair(), k=3, draws=2, steps=5)


def test_a_spectrum_is_that_of_the_library(found: Spectrum, tmp_path: Path) -> None:
    out, plot = tmp_path / "spectrum.json", tmp_path / "spectrum.png"
    result = run("spectrum", *MLP, "--k", 3, "--draws", 2, "--steps", 5, "--out", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    written = Spectrum.load(out)
    assert written.blocks == found.blocks
    assert written.notes[-1] == "Data: factories:pair."
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "largest 3" in result.stdout
    assert result.stderr == f"Wrote {out}.\nWrote {plot}.\n"


def test_spectrum_passes_every_option_on(found: Spectrum, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Call(found)  # type: ignore[arg-type]
    monkeypatch.setattr(saltflat, "compute_spectrum", taken)
    result = run(
        *("spectrum", *MLP, "--model-args", '{"width": 5}', "--limit", 3, "--loss", "mse"),
        *("--k", 4, "--smallest", 2, "--matrix", "gauss_newton", "--per", "layer", "--no-density"),
        *("--draws", 5, "--steps", 9, "--layers", "1,3.weight", "--dtype", "float64", "--memory", "64MiB"),
        *("--seed", 7),
    )
    assert result.exit_code == 0, result.output
    model, data, loss = taken.args
    assert model[1].out_features == 5
    assert len(data[0]) == 3
    assert loss == "mse"
    assert taken.options == {
        "k": 4,
        "smallest": 2,
        "matrix": "gauss_newton",
        "per": "layer",
        "density": False,
        "draws": 5,
        "steps": 9,
        "layers": ["1", "3.weight"],
        "dtype": torch.float64,
        "memory": "64MiB",
        "seed": 7,
        "progress": None,
    }


def test_show_prints_a_spectrum_again(found: Spectrum, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = found.save(tmp_path / "spectrum.json")
    result = run("show", path)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{found}\n"
    refused(run("show", path, "--html", tmp_path / "page.html"), "a spectrum with --html")
    refused(run("compare", path, path), "not a report but a spectrum", "saltflat show")
    path.write_text('{"schema": "saltflat.spectrum/1"}')
    refused(run("show", path), "a spectrum that cannot be understood")


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    out = tmp_path / "spectrum.json"
    result = run("spectrum", *MLP, "--k", 1, "--no-density", "--per", "layer", "--quiet", "--out", out)
    assert (result.exit_code, result.output) == (0, "")
    assert len(Spectrum.load(out)) == 4


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--k", "0"], ["k=0"]),
        (["--k", "1000"], ["k=1000", "parameters"]),
        (["--draws", "1"], ["draws=1"]),
        (["--matrix", "hessians"], ["Try 'hessian'"]),
        (["--per", "unit"], ["layer"]),
        (["--plot", "{}/spectrum.jpg"], ["--plot"]),
        (["--quiet"], ["--out"]),
        (["--model", "factories:careless"], ["KeyError"]),
    ],
)
def test_bad_spectra_are_one_line(words: list[str], parts: list[str], tmp_path: Path) -> None:
    refused(run("spectrum", *MLP, *(word.format(tmp_path) for word in words)), *parts)
