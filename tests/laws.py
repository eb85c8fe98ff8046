"""What it takes to hold measures to their claims: all readings of a problem, and how far some are from others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy

import torch
from cases import Case
from torch import nn

import saltflat
from saltflat.measures.registry import MEASURES, SYMMETRIES

# Options under which a measure has a number on tiny problems, and quickly.
OPTIONS = {
    "fisher_logdet": "(subset=3, draws=3)",
    "fisher_spectral_radius": "(subset=3, draws=3)",
    # Every rescaling symmetry is a direction that no gradient sees: without jitter the determinant is zero.
    "fisher_determinant": "(jitter=1e-6)",
    "regularized_normalized_sharpness": "(strength=0.1)",
    "adaptive_sharpness": "(draws=4)",
    "sharpness": "(steps=4)",
    "pac_bayes_flatness": "(draws=4, depth=12)",
}
CLAIMED = [(name, symmetry) for name, each in MEASURES.items() for symmetry in each.invariant_to]
UNCLAIMED = [(name, symmetry) for name in MEASURES for symmetry in SYMMETRIES if (name, symmetry) not in CLAIMED]
# What a measure may move by that claims not to, relative; and what it must at least that does not.
LARGEST_MOVE = 1e-6
LEAST_MOVE = {False: 10.0, True: 1.0}  # a factor; for logarithms a difference


def readings(case: Case, initial: nn.Module, names: Iterable[str] = MEASURES) -> dict[str, float]:
    asked = {name: name + OPTIONS.get(name, "") for name in names}
    report = saltflat.measure(
        case.model, case.batches, case.loss, list(asked.values()), initial=initial, certificate=False
    )
    # Names in a report are in the order they were asked for.
    return {name: reading.value for name, reading in zip(asked, report.values(), strict=True)}


def start_of(case: Case) -> nn.Module:
    """Some other weights that training may have begun with."""
    model = deepcopy(case.model)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(0.5)
    return model


def furthest(name: str, pairs: Iterable[tuple[float, float]]) -> float:
    """The largest move of a measure between two readings: a factor of at least one, or a difference of logarithms."""
    moves = [
        abs(new - old) if MEASURES[name].logarithmic else max(new / old, old / new) if new and old else 1.0
        for old, new in pairs
    ]
    return max(each for each in moves if math.isfinite(each))
