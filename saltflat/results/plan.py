"""The plan of a measurement: how each parameter will be treated, and what the measurement will cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from saltflat.results.display import Displayable
from saltflat.results.files import PLAN, JsonFile
from saltflat.results.json_codec import JsonRecord
from saltflat.results.text import make_printable

Way: TypeAlias = Literal["layer", "expanded", "mapped", "single", "not measured"]


@dataclass(frozen=True, eq=False)
class ParameterPlan(JsonRecord):
    """How the per-example gradients of one parameter are computed.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        way: ``"layer"`` (all examples of a chunk in one pass, by the rule of the layer), ``"expanded"`` (in the same
            pass, with a copy for each example), ``"mapped"`` (vectorized passes of single examples), ``"single"`` (one
            example after the other) or ``"not measured"``.
        why: the reason.
    """

    name: str
    shape: tuple[int, ...]
    way: Way
    why: str

    def __post_init__(self) -> None:
        self._convert_fields(name=str(self.name), shape=tuple(map(int, self.shape)), why=str(self.why))
        if self.way not in get_args(Way):
            raise ValueError(f"a parameter goes no way {self.way!r}")


@dataclass(frozen=True, eq=False, repr=False)
class MeasurementPlan(Displayable, JsonFile):
    """What a measurement will do, and about what it will cost. It prints as a table.

    Attributes:
        model: class name and number of parameters.
        parameters: how each parameter is treated.
        measures: what will be computed.
        left_out: what will not be computed, and why.
        symmetries: the rescalings of the model, in a sentence; empty if they were not looked for.
        examples: the number of examples.
        predicted_seconds: how long the measurement will take.
        predicted_seconds_by_step: the same for each step.
        predicted_bytes: memory beyond what the process holds now; None where the system does not tell.
        settings: the options of the measurement.
        versions: of saltflat, torch, numpy, scipy and python.
        device: where it will run.
        seconds: how long it took to find this out.
        notes: what a reader should know besides.
        created: the time in UTC, in ISO format.
    """

    renderer = ("plan", "PlanRenderable", "")
    file_format = PLAN

    model: str
    parameters: tuple[ParameterPlan, ...]
    measures: tuple[str, ...]
    left_out: Mapping[str, str]
    symmetries: str
    examples: int
    predicted_seconds: float
    predicted_seconds_by_step: Mapping[str, float]
    predicted_bytes: int | None
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    device: str
    seconds: float
    created: str
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        self._convert_fields(
            parameters=tuple(self.parameters),
            measures=tuple(map(str, self.measures)),
            left_out={str(name): str(why) for name, why in self.left_out.items()},
            symmetries=str(self.symmetries),
            predicted_seconds=float(self.predicted_seconds),
            predicted_seconds_by_step={str(step): float(each) for step, each in self.predicted_seconds_by_step.items()},
            predicted_bytes=None if self.predicted_bytes is None else int(self.predicted_bytes),
            device=str(self.device),
        )

    def __repr__(self) -> str:
        model = make_printable(self.model)
        return f"<MeasurementPlan of {model}: {len(self.measures)} measures; print() shows it>"

    def _encode_parts(self) -> dict[str, Any]:
        return {"parameters": [each.to_dict() for each in self.parameters]}

    @classmethod
    def _decode_parts(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"parameters": tuple(ParameterPlan(**each) for each in given.pop("parameters"))}
