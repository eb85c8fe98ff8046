"""What a train function of the user's own does to the process is not felt by the next run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from study_cases import own, train
from torch import nn

from saltflat.studies import Examples


def spoils_data(*, seed: int, data: Examples, width: int, epochs: int) -> Any:
    found = train(seed=seed, data=data, width=width, epochs=epochs)
    data.train_inputs.zero_()
    data.train_labels.fill_(0)
    return found


def spoils_torch(*, seed: int, data: Examples, width: int, epochs: int) -> Any:
    found = train(seed=seed, data=data, width=width, epochs=epochs)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_default_device("meta")
    return found


class LeavingError(BaseException):
    pass


def leaves(*, seed: int, data: Examples, width: int, epochs: int) -> nn.Module:
    raise LeavingError("for good")


def state() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.empty(()).device,
    )


@pytest.mark.parametrize("name", ["spoils_data", "spoils_torch"])
def test_runs_are_as_after_a_train_function_that_leaves_everything_alone(name: str, tmp_path: Path) -> None:
    before = state()
    wanted = own().run(tmp_path / "calm", progress=False)
    found = own(train=f"{__name__}:{name}").run(tmp_path / "wild", progress=False)
    for one, other in zip(found.rows.values(), wanted.rows.values(), strict=True):
        assert one.status == other.status == "done"
        assert one.outcome is not None
        assert other.outcome is not None
        assert one.outcome.train_loss == other.outcome.train_loss
        assert {name: each.value for name, each in one.readings.items()} == {
            name: each.value for name, each in other.readings.items()
        }
    assert state() == before


def test_whatever_a_train_function_leaves_with_fails_its_run_alone(tmp_path: Path) -> None:
    found = own(train=f"{__name__}:leaves").run(tmp_path / "runs", progress=False)
    assert [row.status for row in found.rows.values()] == ["failed", "failed"]
    assert all("left with LeavingError" in (row.failure or {})["error"] for row in found.rows.values())
