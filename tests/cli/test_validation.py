"""Checks of arguments that every public call shares, and the errors they raise."""

from __future__ import annotations

import pytest
import torch

from saltflat.errors import DeviceError, MissingPackageError, import_optional, make_unknown_name_error
from saltflat.validation import parse_device


def test_auto_is_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, wanted in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert parse_device("auto") == torch.device(wanted)


def test_a_device_is_used_before_it_is_returned() -> None:
    assert parse_device(torch.device("cpu")) == parse_device("cpu") == torch.device("cpu")
    for name in ("meta", "nonsense", "cuda:77"):
        with pytest.raises(DeviceError, match=f"can use here, but got '{name}' .* Try device='cpu'"):
            parse_device(name)
    assert parse_device("cuda:77", probe=False) == torch.device("cuda:77"), "another process may have it"
    with pytest.raises(DeviceError, match="nonsense"):
        parse_device("nonsense", probe=False)


def test_an_unknown_name_raises_an_error_that_suggests_the_closest() -> None:
    many = [f"measure_{number:02}" for number in range(20)]
    said = str(make_unknown_name_error("measure", "measure_9", many))
    assert said.startswith("Expected one of measure_00, measure_01, ")
    assert said.endswith(", ... (20 in all), but got the measure 'measure_9'. Try 'measure_19'.")
    losses = ["bce_with_logits", "cross_entropy", "mse"]
    assert str(make_unknown_name_error("loss", "ce", losses)).endswith("the loss 'ce'. Try 'cross_entropy'.")
    assert str(make_unknown_name_error("loss", "bce", losses)).endswith("the loss 'bce'. Try 'bce_with_logits'.")
    assert str(make_unknown_name_error("gap", 3, ["error"])) == "Expected error, but got the gap 3. Try 'error'."
    assert str(make_unknown_name_error("option", "x", [])) == "Expected no option, but got 'x'. Try leaving it out."


def test_a_missing_package_is_named_with_what_needs_it() -> None:
    assert import_optional("json", "a test") is __import__("json")
    with pytest.raises(
        MissingPackageError, match=r"Expected no_such_package .* for plot\(\), but got .*pip install no_"
    ):
        import_optional("no_such_package.figure", "plot()")
