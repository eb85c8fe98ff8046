"""What the Gauss-Newton matrix is worth for a model, found once before its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from saltflat.certificate import certify
from saltflat.errors import first_line
from saltflat.logits import normalized
from saltflat.losses import loss_from
from saltflat.measures.request import requests
from saltflat.measuring import is_gauss_newton


@dataclass(frozen=True)
class Doubt:
    """Why a value may not be what its name says.

    Attributes:
        text: goes on from "hessian_trace is ..."
        is_certain: False if nobody knows.
    """

    text: str
    is_certain: bool


def doubts(model: nn.Module, few: Any, loss: Any, measures: Any, options: Mapping[str, Any]) -> dict[str, Doubt]:
    """For measures made of the Gauss-Newton matrix, where that is not known to be the Hessian's; by their keys."""
    concerned = [request.key for request in requests(measures) if is_gauss_newton(request)]
    if not concerned:
        return {}
    shared = {name: options[name] for name in ("layers", "seed", "mode") if name in options}
    try:
        found = certify(model, few, normalized(loss_from(loss), options.get("logits", "none")), **shared)
    # Not every model has second derivatives, and float64 may not fit: no reason not to measure.
    except Exception as error:
        unknown = f"by the Gauss-Newton matrix; nobody knows whether it is the Hessian here ({first_line(error)})"
        return dict.fromkeys(concerned, Doubt(unknown, is_certain=False))
    if found.holds:
        return {}
    text = (
        "by the Gauss-Newton matrix, which is not the Hessian here (the certificate, on "
        f"{found.examples} examples at the start: they differ by up to {found.gap:.0%} in a parameter)"
    )
    return dict.fromkeys(concerned, Doubt(text, is_certain=True))
