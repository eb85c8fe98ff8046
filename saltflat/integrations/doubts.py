"""What the Gauss-Newton matrix is worth for a model, found once before its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from saltflat.certificate import certify
from saltflat.errors import format_error_line
from saltflat.logits import normalize_logits
from saltflat.losses import parse_loss
from saltflat.measures.request import parse_measures
from saltflat.measuring import is_gauss_newton


@dataclass(frozen=True)
class GaussNewtonCaveat:
    """Why a value may not be what its name says.

    Attributes:
        text: goes on from "hessian_trace is ..."
        is_certain: False if nobody knows.
    """

    text: str
    is_certain: bool


def find_gauss_newton_caveats(
    model: nn.Module, few: Any, loss: Any, measures: Any, options: Mapping[str, Any]
) -> dict[str, GaussNewtonCaveat]:
    """For measures made of the Gauss-Newton matrix, where that is not known to be the Hessian's; by their keys."""
    concerned = [request.key for request in parse_measures(measures) if is_gauss_newton(request)]
    if not concerned:
        return {}
    shared = {name: options[name] for name in ("layers", "seed", "mode") if name in options}
    try:
        found = certify(model, few, normalize_logits(parse_loss(loss), options.get("logits", "none")), **shared)
    # Not every model has second derivatives, and float64 may not fit: no reason not to measure.
    except Exception as error:
        unknown = (
            f"by the Gauss-Newton matrix; nobody knows whether it is the Hessian here ({format_error_line(error)})"
        )
        return dict.fromkeys(concerned, GaussNewtonCaveat(unknown, is_certain=False))
    if found.holds:
        return {}
    text = (
        "by the Gauss-Newton matrix, which is not the Hessian here (the certificate, on "
        f"{found.examples} examples at the start: they differ by up to {found.gap:.0%} in a parameter)"
    )
    return dict.fromkeys(concerned, GaussNewtonCaveat(text, is_certain=True))
