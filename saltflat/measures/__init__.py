"""Every measure of flatness: pure functions of statistics, one file per family.

    @measure(on="weights", invariant_to=("layer_scale",), reference="petzka2019reparameterization", formula="...")
    def kappa_trace(weight: Tensor, curvature_trace: Tensor) -> Tensor:
        return weight.square().sum() * curvature_trace

The names of its parameters are the statistics it needs; keyword-only parameters are its options, and so are those of
the statistics. ``on="weights"`` calls it for every weight matrix and ``total`` says how the layers make one number;
``on="parameters"`` does the same with biases and other vectors; ``on="network"`` calls it once, with mappings from
parameter names. Weight-shaped statistics are ``(groups, out, in, positions)`` for a measure on weights.
"""

from importlib import import_module
from pkgutil import iter_modules

from saltflat.measures.registry import MEASURES, PRESETS, SYMMETRIES, Measure, MeasureResult, measure

__all__ = ["MEASURES", "PRESETS", "SYMMETRIES", "Measure", "MeasureResult", "measure"]

for _statistics in ("saltflat.statistics", "saltflat.symmetry.axes"):
    import_module(_statistics)  # what measures are functions of
for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
