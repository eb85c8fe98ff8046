"""The simulation of bounds measures errors rightly, and notices a bound that fails."""

from importlib import import_module
from math import erf, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from saltflat.bounds.distributions import Gaussian, ScaledGaussian

SCRIPTS = Path(__file__).parent.parents[1] / "benchmarks"
F64 = torch.float64


@pytest.fixture
def validity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return import_module("validity")


def make_weights(spread: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    mean = {"weight": torch.tensor([[-0.5, 0.2], [0.5, 0.0]], dtype=F64), "bias": torch.tensor([0.1, 0.3], dtype=F64)}
    return mean, {name: torch.full_like(each, spread) for name, each in mean.items()}


def test_the_error_on_new_data_is_that_of_a_large_sample(validity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"weight": torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=F64), "bias": torch.zeros(2, dtype=F64)}
    still = {name: torch.full_like(each, 1e-6) for name, each in line.items()}
    exact = (1 - erf(validity.APART / sqrt(2))) / 2
    few = validity.draw_examples(0, False)
    risk, error = validity.compute_risks(Gaussian(line, still), 0, few)
    assert error == pytest.approx(exact, abs=1e-5)
    assert risk == pytest.approx(float(((few[0][:, 0] > 0) != few[1].bool()).double().mean()), abs=1e-3)

    monkeypatch.setattr(validity, "EXAMPLES", 200_000)
    x, y = validity.draw_examples(0, False)
    dice = torch.Generator().manual_seed(1)
    for weights in (Gaussian(*make_weights(0.4)), ScaledGaussian(*make_weights(0.4), 0.5)):

        def draw(label: str, like: Any = weights) -> torch.Tensor:
            shape = like.mean[label.partition("/")[0]].shape
            return torch.randn(len(y), *shape, generator=dice, dtype=F64)

        drawn = {name: weights.combine(name, draw) for name in ("weight", "bias")}
        outputs = torch.einsum("noi,ni->no", drawn["weight"], x) + drawn["bias"]
        sampled = float((outputs.argmax(1) != y).double().mean())
        assert validity.compute_risks(weights, 2, few)[1] == pytest.approx(sampled, abs=0.01)


def test_the_simulation_knows_every_bound_and_notices_a_failure(
    validity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = {name: [each] for name, each in validity.run_set(0, False).items()}
    guesses = validity.run_set(1, True)
    assert len(trials) == 14
    settings = {"sets": 1, "random": 1}
    found = {name: validity.summarize(each, [guesses[name]]) for name, each in trials.items()}
    validity.print_rates(found, settings)
    assert "0.0%, reached" in capsys.readouterr().out

    _, risk, error = trials["Maurer"][0]
    found["Maurer"] = validity.summarize([(error - 0.01, risk, error)], [(0.4, 0.5, 0.5)])
    validity.print_rates(found, settings)
    assert "100.0%, NOT REACHED" in (said := capsys.readouterr().out)
    assert "0.80, NOT REACHED" in said
