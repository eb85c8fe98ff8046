"""The command line: weights written anew for the same function."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Literal

import pytest
import torch
from factories import Tied, mlp, normed, pair
from safetensors.torch import load_file, save_file
from test_cli import refused, run
from torch import nn
from torch.testing import assert_close

import saltflat
from saltflat.datasets.checkpoints import load_weights, put_weights, save_weights
from saltflat.results import Report

MLP = ["--model", "factories:mlp", "--data", "factories:pair"]
NORMED = ["--model", "factories:normed", "--data", "factories:pair"]


def trained(tmp_path: Path, model: nn.Module) -> Path:
    """Weights whose statistics and sizes are not those of the start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator) + (0.5 if "running" in name else -0.3))
    path = tmp_path / "trained.pt"
    torch.save(model.state_dict(), path)
    return path


def test_folded_weights_are_those_of_the_folded_model(tmp_path: Path) -> None:
    model = normed()
    weights, out = trained(tmp_path, model), tmp_path / "folded.safetensors"
    result = run("fold", *NORMED, "--weights", weights, "--out", out)
    assert result.exit_code == 0, result.output
    assert "2 BatchNorm layers: 1 folded into the layer before, 1 became a factor and a shift" in result.stdout
    assert "Outputs differ by" in result.stdout
    assert result.stderr == f"Wrote {out}: 6 tensors.\n"
    wanted = saltflat.fold(model, pair()[0])
    assert_close(load_file(out), dict(wanted.state_dict()), rtol=0, atol=0)


def test_folded_weights_are_measured_in_a_model_that_is_folded_too(tmp_path: Path) -> None:
    model = normed()
    weights, out, report = trained(tmp_path, model), tmp_path / "folded.safetensors", tmp_path / "report.json"
    assert run("fold", *NORMED, "--weights", weights, "--out", out).exit_code == 0
    words = ("--measures", "hessian_trace", "--out", report, "--quiet")
    result = run("measure", *NORMED, "--weights", out, *words)
    assert result.exit_code == 0, result.output
    wanted = saltflat.measure(saltflat.fold(model, pair()[0]), pair(), measures="hessian_trace")
    found = Report.load(report)
    assert found["hessian_trace"].value == pytest.approx(wanted["hessian_trace"].value, rel=1e-6)
    assert any("folded before" in note for note in found.notes)
    balanced = tmp_path / "balanced.safetensors"
    assert run("rebalance", *NORMED, "--weights", out, "--out", balanced).exit_code == 0
    again = run("measure", *NORMED, "--weights", balanced, *words)
    assert again.exit_code == 0, again.output
    assert Report.load(report)["hessian_trace"].value < found["hessian_trace"].value


def test_a_model_without_batch_norm_has_nothing_to_fold(tmp_path: Path) -> None:
    refused(run("fold", *MLP, "--out", tmp_path / "new.safetensors"), "without a BatchNorm", "nothing was written")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("kind", ["unit", "layer"])
def test_rebalanced_weights_have_the_smallest_trace_and_fit_the_same_model(
    kind: Literal["unit", "layer"], tmp_path: Path
) -> None:
    model = mlp()
    weights, out = trained(tmp_path, model), tmp_path / "new.safetensors"
    result = run("rebalance", *MLP, "--weights", weights, "--out", out, "--kind", kind)
    assert result.exit_code == 0, result.output
    wanted = saltflat.rebalance(model, pair(), kind=kind)
    assert_close(load_file(out), dict(wanted.state_dict()), rtol=0, atol=0)
    name = "minimum_unit_sharpness" if kind == "unit" else "minimum_sharpness"
    before = saltflat.measure(model, pair(), measures=["hessian_trace", name])
    other = mlp()
    put_weights(other, load_weights(out))
    assert_close(other(pair()[0]), model(pair()[0]), rtol=1e-4, atol=1e-5)
    after = saltflat.measure(other, pair(), measures="hessian_trace")["hessian_trace"].value
    assert after == pytest.approx(before[name].value, rel=1e-3)
    trace = before["hessian_trace"].value
    assert f"Gauss-Newton trace: {trace:.4g} before, {after:.4g} now" in result.stdout
    assert f"Weights: {weights}." in result.stdout


def test_random_weights_are_said_to_be_random(tmp_path: Path) -> None:
    result = run("rebalance", *MLP, "--out", tmp_path / "new.safetensors", "--limit", 4)
    assert "No weights were given" in result.stdout
    assert "Data: factories:pair, limit 4." in result.stdout


def test_a_tied_weight_is_written_once_and_stays_tied(tmp_path: Path) -> None:
    out = tmp_path / "new.safetensors"
    words = ("--model", "factories:Tied", "--data", "factories:pair", "--out", out, "--quiet")
    result = run("rebalance", *words)
    assert (result.exit_code, result.output) == (0, "")
    assert sorted(load_file(out)) == ["first.bias", "first.weight", "second.bias"]
    model = Tied()
    put_weights(model, load_weights(out))
    assert model.second.weight is model.first.weight


@pytest.mark.parametrize("command", ["fold", "rebalance"])
def test_files_are_replaced_only_with_overwrite(command: str, tmp_path: Path) -> None:
    model = normed() if command == "fold" else mlp()
    named = NORMED if command == "fold" else MLP
    weights, out = tmp_path / "trained.safetensors", tmp_path / "new.safetensors"
    save_file(model.state_dict(), weights)
    out.write_text("something dear")
    refused(run(command, *named, "--weights", weights, "--out", out), "which exists", "--overwrite")
    assert out.read_text() == "something dear"
    for same in (weights, tmp_path / "there" / ".." / "trained.safetensors"):
        (tmp_path / "there").mkdir(exist_ok=True)
        refused(run(command, *named, "--weights", weights, "--out", same, "--overwrite"), "both --out and --weights")
    before = weights.read_bytes()
    result = run(command, *named, "--weights", weights, "--out", out, "--overwrite")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"Replaced {out}")
    assert weights.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["new.safetensors", "there", "trained.safetensors"]


@pytest.mark.parametrize("command", ["fold", "rebalance"])
@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("new.pt", "ends in .safetensors"),
        ("new", "ends in .safetensors"),
        ("nowhere/new.safetensors", "folder does not exist"),
        ("folder.safetensors", "is a folder"),
        ("/proc/new.safetensors", "cannot be written"),
    ],
)
def test_an_output_path_that_cannot_be_written_fails_before_the_work(
    command: str, out: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    words = ("--model", "factories:broken", "--data", "factories:pair", "--out", tmp_path / out)
    refused(run(command, *words), says)


@pytest.mark.parametrize("command", ["fold", "rebalance"])
def test_nothing_is_written_if_the_function_is_not_the_same(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = saltflat.fold

    def wrong(model: nn.Module, *args: object, **options: object) -> nn.Module:
        other = fold(model, pair()[0]) if command == "fold" else mlp()
        nn.init.ones_(list(other.parameters())[-1])
        return other

    monkeypatch.setattr(saltflat, command, wrong)
    words = NORMED if command == "fold" else MLP
    refused(run(command, *words, "--out", tmp_path / "new.safetensors"), "outputs of the new network that differ")
    assert not os.listdir(tmp_path)


def test_warnings_of_rebalance_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubting(model: nn.Module, *args: object, **options: object) -> nn.Module:
        warnings.warn("The trace may not be the smallest: it is not.", stacklevel=1)
        return model

    monkeypatch.setattr(saltflat, "rebalance", doubting)
    result = run("rebalance", *MLP, "--out", tmp_path / "new.safetensors")
    assert result.exit_code == 0, result.output
    assert "Note: The trace may not be the smallest: it is not.\n" in result.stdout
    refused(run("rebalance", *MLP, "--kind", "size", "--out", tmp_path / "other.safetensors"), "'size'")


def test_state_that_is_no_tensor_is_not_written(tmp_path: Path) -> None:
    class Remembering(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

        def set_extra_state(self, state: object) -> None: ...

    with pytest.raises(saltflat.SaltflatError, match=r"Expected .*_extra_state"):
        save_weights(Remembering(2, 2), tmp_path / "new.safetensors")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("data", ["pair", "dataset", "loader", "batches", "stream", "words"])
def test_a_limit_works_with_whatever_a_factory_returns(data: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    words = ("--model", "factories:mlp", "--data", f"factories:{data}", "--measures", "hessian_trace", "--quiet")
    for skip, limit, left in ((0, 3, 3), (2, 3, 3), (4, 9, 2)):
        result = run("measure", *words, "--out", out, "--skip", skip, "--limit", limit)
        assert result.exit_code == 0, result.output
        assert Report.load(out).examples == left
    refused(run("measure", *words, "--out", out, "--skip", 6), "skip=6", "6 examples")
    refused(run("measure", *words, "--out", out, "--limit", 0), "limit=0")
