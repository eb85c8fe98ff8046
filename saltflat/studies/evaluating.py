"""How well a network does, in eval mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 1024


@torch.no_grad()
def evaluate_model(model: nn.Module, inputs: Tensor, labels: Tensor, batch: int = BATCH) -> tuple[float, float]:
    """Mean cross-entropy and the share of wrong answers; the model is given back in the mode it was in.

    Example:
        >>> evaluate_model(nn.Identity(), torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([0, 1]))
        (0.6931471..., 0.5)
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        loss = torch.zeros((), dtype=torch.float64, device=inputs.device)
        wrong = torch.zeros((), dtype=torch.int64, device=inputs.device)
        for some, answers in zip(inputs.split(batch), labels.split(batch), strict=True):
            logits = model(some)
            loss += F.cross_entropy(logits, answers, reduction="none").double().sum()
            wrong += (logits.argmax(-1) != answers).sum()
        return float(loss) / len(labels), float(wrong) / len(labels)
    finally:
        for module, training in modes:
            module.training = training
