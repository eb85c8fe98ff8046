"""The command line: certificates."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from factories import mlp, pair
from test_cli import Call, refused, run
from torch import Tensor, nn

import saltflat
from saltflat.bounds import Bound
from saltflat.datasets.checkpoints import save_weights

MLP = ["--model", "factories:mlp", "--data", "factories:pair"]


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def test_a_certificate_is_that_of_the_library(network: nn.Module, tmp_path: Path) -> None:
    out, page = tmp_path / "bound.json", tmp_path / "bound.html"
    result = run("certify", *MLP, "--draws", 2, "--of", "clipped_cross_entropy", "--out", out, "--html", page)
    assert result.exit_code == 0, result.output
    written = Bound.load(out)
    found = saltflat.certify_error(network, pair(), draws=2, of="clipped_cross_entropy")
    assert written.terms == found.terms
    assert written.notes[-1] == "Data: factories:pair."
    assert "clipped cross-entropy" in result.stdout
    assert "What it rests on" in page.read_text(encoding="utf-8")
    assert result.stderr == f"Wrote {out}.\nWrote {page}.\n"
    shown = run("show", out)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == result.stdout


def test_the_prior_and_what_it_has_seen_are_passed_on(
    network: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = saltflat.certify_error(network, pair(), draws=1)
    taken = Call(found)  # type: ignore[arg-type]
    monkeypatch.setattr(saltflat, "certify_error", taken)
    center = deepcopy(network)
    with torch.no_grad():
        for each in center.parameters():
            each.add_(1.0)
    weights = tmp_path / "prior.safetensors"
    save_weights(center, weights)
    options = ("--delta", 0.1, "--epochs", 3, "--move", "--lr", 0.01, "--draws", 4, "--precision", 0.5)
    result = run("certify", *MLP, "--prior", weights, "--prior-data", "first:2", *options, "--columns", "top:2")
    assert result.exit_code == 0, result.output
    prior = taken.options.pop("prior")
    assert all(torch.equal(one, two) for one, two in zip(prior.parameters(), center.parameters(), strict=True))
    assert taken.options.pop("prior_data") == range(2)
    assert {name: taken.options[name] for name in ("delta", "epochs", "move", "lr", "draws", "precision")} == {
        "delta": 0.1, "epochs": 3, "move": True, "lr": 0.01, "draws": 4, "precision": 0.5,
    }  # fmt: skip
    assert taken.options["columns"] == "top:2"
    assert f"Weights of the prior: {weights}." in " ".join(result.stdout.split())

    result = run("certify", *MLP, "--prior", weights, "--prior-data", "factories:pair")
    assert result.exit_code == 0, result.output
    seen: tuple[Tensor, Tensor] = taken.options["prior_data"]
    assert all(torch.equal(one, two) for one, two in zip(seen, pair(), strict=True))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prior", "missing.pt", "--prior-data", "none"), "missing.pt"),
        (("--prior-data", "first:0"), "first:N"),
        (("--prior-data", "first:" + "9" * 20), "first:N"),
        (("--prior-data", "first:" + "9" * 5000), "first:N"),
        (("--prior-data", "first:some"), "first:N"),
        (("--prior-data", "last:3"), "Try first:3"),
        (("--prior-data", "first:2"), "Expected no --prior-data for a prior at zero"),
        (("--prior", "somewhere"), "Expected --prior-data to say what the prior has seen"),
        (("--of", "mse"), "a loss in [0, 1]"),
        (("--delta", 1), "between 0 and 1"),
        (("--move",), "epochs"),
        (("--loss", "mse"), "a classifier"),
        (("--draws", 0), "draws=0"),
        (("--prior", "somewhere", "--html", "page.txt"), "page.html"),
    ],
)
def test_bad_options_are_refused_in_a_line(words: tuple[str | float, ...], said: str) -> None:
    refused(run("certify", *MLP, *words), said)
