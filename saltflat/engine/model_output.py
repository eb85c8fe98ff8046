"""What a forward pass may return, and the tensor in it that the loss is computed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from saltflat.engine.data import find_unsupported_kind
from saltflat.errors import ModelError

# The outputs, or an object or mapping that holds them as ``logits``.
ModelOutput: TypeAlias = Tensor | Mapping[str, Any] | tuple[Any, ...]


def extract_logits(outputs: ModelOutput) -> Tensor:
    """Return the tensor the loss is computed from, also if the outputs hold it as ``logits``."""
    logits: Any = outputs
    start, end = (getattr(outputs, name, None) for name in ("start_logits", "end_logits"))
    if isinstance(start, Tensor) and isinstance(end, Tensor):
        logits = torch.stack([start, end], 1)  # of a model that answers questions
    if isinstance(logits, Mapping):
        logits = logits.get("logits", logits)
    logits = getattr(logits, "logits", logits)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(
            f"Expected a floating-point tensor, or an object with one as .logits or ['logits'], but got {got} from "
            "the model. Try wrapping the model in a module that returns the outputs the loss is computed from."
        )
    check_dense_outputs(logits)
    return logits


def check_dense_outputs(outputs: Tensor) -> None:
    """Check that outputs are a dense tensor."""
    kind = find_unsupported_kind(outputs)
    if kind is not None:
        raise ModelError(
            f"Expected a dense tensor from the model, but got a {kind} one. Try wrapping the model in a module that "
            "returns to_dense() or to_padded_tensor() of it."
        )
