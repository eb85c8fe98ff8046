"""Run every test on one thread: tiny tensors gain nothing from more, and parallel workers lose."""

import importlib.util
import sys

import torch

torch.set_num_threads(1)

# pytest adds tests/ to the import path. Without this, tests/datasets would pass for Hugging Face's package of that name
# wherever it is not installed.
_spec = importlib.util.find_spec("datasets")
if _spec is not None and _spec.origin is None:
    sys.modules["datasets"] = None  # type: ignore[assignment]
