"""Architectures that people download are swept together, and their numbers are those of the definition."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
SCRIPTS = Path(__file__).parent.parents[1] / "benchmarks"
TEXT = ["BERT", "RoBERTa", "GPT-2", "Llama", "Qwen2", "Mistral", "T5", "OPT", "DeBERTa", "Mamba"]
TEXT += ["Mixtral, batched_mm", "Wav2Vec2"]
IMAGES = ["ViT", "DeiT", "Swin", "ConvNeXt", "MLP-Mixer", "BEiT"]
OTHERS = ["DeiT (timm)", "Swin (timm)", "MLP-Mixer (timm)", "ViT (torchvision)", "MaxViT (torchvision)"]
QUICK = TEXT + IMAGES + OTHERS


@pytest.fixture
def architectures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return import_module("architecture_table")


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.filterwarnings("ignore")  # of the libraries that build the models
def test_an_architecture_is_quick_and_right(architectures: Any, name: str) -> None:
    for library in ("timm", "torchvision"):
        if library in name:
            pytest.importorskip(library)
    row = architectures.examine(name)
    assert row.share >= 0.95
    assert not row.reasons
    assert row.difference < 1e-10
    assert row.loss_difference < 1e-12
    assert (row.rescaling, row.scales > 0) == ("passes", True)


@pytest.mark.filterwarnings("ignore")
def test_an_architecture_that_is_not_quick_is_right_and_has_a_reason(architectures: Any) -> None:
    row = architectures.examine("Mixtral, eager")
    assert row.share == 0
    assert row.reasons
    assert row.difference < 1e-10


def test_the_page_has_the_rows_of_the_results(architectures: Any) -> None:
    rows = architectures.read()
    assert len(rows) >= 24
    assert set(QUICK) <= {row.name for row in rows}
    assert all(row.difference < 1e-10 and row.loss_difference < 1e-12 for row in rows)
    assert architectures.format_table(rows) in architectures.PAGE.read_text()
