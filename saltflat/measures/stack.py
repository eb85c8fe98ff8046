"""Measure networks of one architecture after each other, and determine only once what they have in common.

For a small network on a GPU, determining how it can be swept, what the axes of its weights count and how it can be
rescaled takes longer than the sweep itself. None of it depends on the weights. So the networks take turns as the
weights of one module, which is probed at the first of them; the sweep and the measures are those of
:func:`saltflat.measure`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy
import scipy
import torch
from torch import Tensor, nn

from saltflat.engine.data import Data
from saltflat.engine.session import open_session
from saltflat.engine.structure import Structure
from saltflat.measures.measurer import Measurer, add_certificate_notes, compute_certificate, format_device
from saltflat.results.report import Reading, describe_run
from saltflat.validation import take_turns


@dataclass(frozen=True)
class StackMember:
    """One network of a stack.

    Attributes:
        weights: its ``state_dict``.
        data: its examples.
        initial: its weights before training, if known.
    """

    weights: Mapping[str, Tensor]
    data: Data
    initial: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class StackReadings:
    """The measurement of one network of a stack.

    Attributes:
        readings: readings by measure.
        made_with: versions and device.
    """

    readings: dict[str, Reading]
    made_with: dict[str, str]


class NetworkStack:
    """Networks of one architecture, measured after each other as the weights of one module.

    Args:
        model: a network of the architecture, whose weights are overwritten. Nothing but its weights and the
            architecture may determine its forward pass.
        measurer: what to measure.
    """

    def __init__(self, model: nn.Module, measurer: Measurer) -> None:
        self.model, self.measurer, self.structure = model, measurer, Structure()

    @take_turns
    def measure(self, member: StackMember) -> StackReadings:
        """Return the readings of one network, as :func:`saltflat.measure` finds them.

        After an error, the next network is probed again.
        """
        started = time.perf_counter()
        measurer, agreement = self.measurer, None
        structure, self.structure = self.structure, Structure()
        self.model.load_state_dict(member.weights)
        with open_session(self.model, measurer.mode, member.data):
            search = measurer.collect(self.model, member.data, member.initial, structure=structure, brief=True)
            readings, _ = search.compute_readings(measurer.asked)
            if measurer.needs_certificate:
                agreement = compute_certificate(search.context)
        structure.keep_certain()
        self.structure = structure
        about = describe_run(self.model, started, torch, numpy, scipy)
        return StackReadings(
            add_certificate_notes(measurer.asked, readings, agreement),
            {**about["versions"], "device": format_device(search.context)},
        )
