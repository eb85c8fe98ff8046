"""The command line: audits of measures, and the rescalings of a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import mlp, pair
from test_cli import Call, refused, run
from torch import Tensor

import saltflat
from saltflat.audit import Audit
from saltflat.audit.audit import audit_invariance
from saltflat.measures.registry import MEASURES, measure

MLP = ["--model", "factories:mlp", "--data", "factories:pair"]
QUICK = ["--measures", "hessian_trace,rho", "--draws", "2"]


@pytest.fixture
def found() -> Audit:
    torch.manual_seed(0)
    return audit_invariance(mlp(), pair(), measures=["hessian_trace", "rho"], draws=2)


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch, found: Audit) -> Call:
    """Stands in for the audit and keeps what it was given."""
    call = Call(found)  # type: ignore[arg-type]
    monkeypatch.setattr(saltflat, "audit_invariance", call)
    return call


@pytest.fixture
def boastful() -> Iterator[str]:
    @measure(on="weights", invariant_to=("unit_scale",), reference="petzka2019reparameterization", formula="|w|_1")
    def boastful_norm(weight: Tensor) -> Tensor:
        """How large the weights are, said to be something else."""
        return weight.abs().sum()

    yield "boastful_norm"
    del MEASURES["boastful_norm"]


def test_an_audit_is_that_of_the_library(found: Audit, tmp_path: Path) -> None:
    out, plot = tmp_path / "audit.json", tmp_path / "audit.png"
    result = run("audit", *MLP, *QUICK, "--out", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    written = Audit.load(out)
    assert written.lines == found.lines
    assert written.notes[-1] == "Data: factories:pair."
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "stays, as claimed" in result.stdout
    assert "hessian_trace moved by a factor of " in result.stdout
    assert result.stderr == f"Wrote {out}.\nWrote {plot}.\n"


def test_audit_passes_every_option_on(audited: Call, tmp_path: Path) -> None:
    torch.save(mlp(width=5).state_dict(), tmp_path / "initial.pt")
    result = run(
        *("audit", *MLP, "--model-args", '{"width": 5}', "--initial", tmp_path / "initial.pt", "--limit", 3),
        *("--loss", "mse", "--columns", "top:2", "--measures", "rho(axis='row', p=2),trace", "--layers", "1,3.weight"),
        *("--memory", "64MiB", "--seed", 7, "--logits", "std", "--diagonal", "hutchinson"),
        *("--draws", 3, "--spread", 1.5, "--kinds", "unit"),
    )
    assert result.exit_code == 0, result.output
    model, data, loss, measures = audited.args
    assert model[1].out_features == 5
    assert len(data[0]) == 3
    assert (loss, measures) == ("mse", ["rho(axis='row', p=2)", "trace"])
    assert set(audited.options.pop("initial")) == set(mlp().state_dict())
    assert audited.options == {
        "draws": 3,
        "spread": 1.5,
        "kinds": ["unit"],
        "seed": 7,
        "columns": "top:2",
        "layers": ["1", "3.weight"],
        "memory": "64MiB",
        "progress": None,
        "logits": "std",
        "diagonal": "hutchinson",
    }


def test_a_broken_claim_is_exit_code_1_and_everything_is_kept(boastful: str, tmp_path: Path) -> None:
    out = tmp_path / "audit.json"
    result = run("audit", *MLP, "--measures", boastful, "--draws", 2, "--out", out)
    assert result.exit_code == 1
    assert "MOVES, though claimed to stay" in result.stdout
    assert Audit.load(out).broken_claims == [boastful]
    quiet = run("audit", *MLP, "--measures", boastful, "--draws", 2, "--out", out, "--quiet")
    assert (quiet.exit_code, quiet.output) == (1, "")


def test_show_prints_an_audit_again(found: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = run("show", found.save(tmp_path / "audit.json"))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{found}\n"


def test_compare_says_that_a_file_is_an_audit(found: Audit, tmp_path: Path) -> None:
    path = found.save(tmp_path / "audit.json")
    refused(run("compare", path, path), "not a report but an audit", "saltflat show")


def test_missing_arguments_are_named_as_options() -> None:
    for words in (["audit", *MLP, "--draws", 1], ["measure", *MLP]):
        assert "pass --initial" in run(*words).stdout
        assert "pass --initial" in run(*words, "--measures", "distance_from_init").stdout


def test_show_names_what_is_wrong_with_an_audit(tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text('{"schema": "saltflat.audit/1"}')
    refused(run("show", tmp_path / "audit.json"), "an audit that cannot be understood")
    (tmp_path / "audit.json").write_text('{"schema": "saltflat.audit/9"}')
    refused(run("show", tmp_path / "audit.json"), "saltflat.audit/9")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--draws", "0"], ["draws=0"]),
        (["--kinds", "units"], ["'units'", "Try 'unit'"]),
        (["--spread", "-1"], ["spread=-1"]),
        (["--measures", "hessian_tract"], ["hessian_trace"]),
        (["--out", "{}/missing/audit.json"], ["--out", "missing"]),
        (["--plot", "{}/audit.jpg"], ["--plot"]),
        (["--device", "nonsense"], ["nonsense"]),
        (["--quiet"], ["--out"]),
        (["--model-args", '{{"inputs": 5}}'], ["on this example"]),
        (["--model", "factories:careless"], ["on this example", "KeyError"]),
    ],
)
def test_bad_audits_are_one_line(words: list[str], parts: list[str], tmp_path: Path) -> None:
    refused(run("audit", *MLP, *QUICK, *(word.format(tmp_path) for word in words)), *parts)


def test_symmetries_prints_the_group_and_draws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    from saltflat.symmetry.find import find_symmetries

    group = find_symmetries(mlp(), pair()[0][:2])
    result = run("symmetries", *MLP, "--plot", tmp_path / "graph.png")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{group}\n"
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")
    assert result.stderr == f"Wrote {tmp_path / 'graph.png'}.\n"
    assert run("symmetries", *MLP, "--kind", "layer").stdout == f"{group.restrict_to_layers()}\n"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--kind", "units"], ["kind='units'"]),
        (["--plot", "{}/graph.jpg"], ["--plot"]),
        (["--model-args", '{{"inputs": 5}}'], ["on this example"]),
        (["--data", "mnits"], ["Try 'mnist'"]),
    ],
)
def test_bad_requests_for_symmetries_are_one_line(words: list[str], parts: list[str], tmp_path: Path) -> None:
    refused(run("symmetries", *MLP, *(word.format(tmp_path) for word in words)), *parts)


@pytest.mark.parametrize("command", ["audit", "symmetries"])
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


def test_the_help_says_what_the_exit_code_means() -> None:
    said: Any = " ".join(run("audit", "--help").stdout.split())
    assert "The exit code is 1 if a measure changed that claims to be invariant" in said
