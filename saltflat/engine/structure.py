"""The structure of a model: what is known of it whatever the values of its weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

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
    """

    probes: dict[Hashable, Probe] = field(default_factory=dict)
    geometries: Mapping[str, Geometry] | None = None
    computed: dict[str, object] = field(default_factory=dict)
    uncoupled: bool = False

    def keep_certain(self) -> None:
        """Keep what holds for other networks too, after one of them was measured without an error.

        Where no operation sorts, masks or reads values, all networks run the same operations. Otherwise, or if the
        first examples of this network had no gradient to compare, everything is forgotten.
        """
        self.uncoupled = all(probe.strategy == "together" for probe in self.probes.values())
        if not self.uncoupled:
            self.probes, self.geometries, self.computed = {}, None, {}
