"""The structure of a model: what is known of it whatever the values of its weights, and what is kept of that."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from saltflat.engine.model_identity import identify_model
from saltflat.engine.strategy import Probe
from saltflat.layers import Geometry


@dataclass
class Structure:
    """What was determined on one network, and holds for all networks of its architecture.

    Contexts of networks that are measured after each other, as one module with changing weights, may share it.

    Attributes:
        probes: how to sweep each kind of input that was seen.
        geometries: how the model uses the measured parameters as matrices; None if not yet determined.
        computed: computed statistics that do not depend on the weights, by name.
        uncoupled: whether a whole sweep has shown that outputs do not depend on the other examples of a chunk.
        kept: probes of an earlier measurement, which are confirmed on the inputs at hand before they are used.
        source: the kind of the first inputs, and the operations that the model ran on them: with others, geometries and
            computed statistics are determined anew. None if they hold for one measurement only.
        num_probes: how many kinds of input were probed, not counting probes that were confirmed.
    """

    probes: dict[Hashable, Probe] = field(default_factory=dict)
    geometries: Mapping[str, Geometry] | None = None
    computed: dict[str, object] = field(default_factory=dict)
    uncoupled: bool = False
    kept: dict[Hashable, Probe] = field(default_factory=dict)
    source: Hashable = None
    num_probes: int = 0

    def keep_certain(self) -> None:
        """Keep what holds for other networks too, after one of them was measured without an error.

        Where no operation sorts, masks or reads values, all networks run the same operations. Otherwise, or if the
        first examples of this network had no gradient to compare, everything is forgotten.
        """
        self.uncoupled = all(probe.strategy == "together" for probe in self.probes.values())
        if not self.uncoupled:
            self.probes, self.geometries, self.computed = {}, None, {}

    def set_source(self, source: Hashable) -> None:
        """Forget what was determined on other first inputs, or while the model ran other operations."""
        if source != self.source:
            self.geometries, self.computed, self.source = None, {}, source

    def keep_unconfirmed(self) -> Structure:
        """Return what the next measurement of the same model may use once it is confirmed."""
        kept = {kind: probe for kind, probe in self.probes.items() if probe.is_lasting}
        if self.source is None:
            return Structure(kept=kept)
        # A doubt may be due to rounding at the weights it was found with.
        doubtful = self.geometries is not None and any(each.doubt for each in self.geometries.values())
        geometries = None if doubtful else self.geometries
        return Structure(geometries=geometries, computed=self.computed, kept=kept, source=self.source)


class Preparation:
    """What was determined about one model, from one measurement to the next.

    Attributes:
        count: how many measurements had to determine something anew.
    """

    def __init__(self) -> None:
        self.count = 0
        self._structure = Structure()
        self._identity: Hashable = None

    @contextmanager
    def lend_structure(self, model: nn.Module, *conditions: Hashable) -> Iterator[Structure]:
        """Lend what is known of the model for one measurement.

        Nothing is known if the model or the conditions are others than before, or if the measurement before failed.
        """
        identity = identify_model(model), conditions
        structure = self._structure if identity == self._identity else Structure()
        self._structure = Structure()  # nothing is known after an error, or to measurements that start meanwhile
        try:
            yield structure
        finally:
            self.count += structure.num_probes > 0
        self._structure, self._identity = structure.keep_unconfirmed(), identity
