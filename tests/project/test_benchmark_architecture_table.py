"""Architectures that people download are swept together, and their numbers are those of the definition."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
SCRIPTS = Path(__file__).parent.parents[1] / "benchmarks"


@pytest.fixture
def architectures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return import_module("architecture_table")


@pytest.mark.parametrize(
    "name", ["T5", "OPT", "ViT", "DeiT", "Swin", "ConvNeXt", "MLP-Mixer", "DeBERTa", "BEiT", "Mamba", "Wav2Vec2"]
)
@pytest.mark.filterwarnings("ignore")  # of the libraries that build the models
def test_an_architecture_is_quick_and_right(architectures: Any, name: str) -> None:
    row = architectures.examine(name)
    assert row.share >= 0.95
    assert not row.reasons
    assert row.difference < 1e-10
    assert row.loss_difference < 1e-12
    assert (row.rescaling, row.scales > 0) == ("passes", True)


@pytest.mark.filterwarnings("ignore")
def test_an_architecture_that_is_not_quick_is_right_and_has_a_reason(architectures: Any) -> None:
    row = architectures.examine("Mixtral, batched_mm")
    assert row.share == 0
    assert row.reasons
    assert row.difference < 1e-10


def test_the_page_has_the_rows_of_the_results(architectures: Any) -> None:
    rows = architectures.read()
    assert len(rows) >= 24
    assert architectures.format_table(rows) in architectures.PAGE.read_text()
