"""The numbers of one moment of a training; what cannot be measured is nan, with a note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any

from torch import nn

from saltflat.errors import first_line
from saltflat.integrations.doubts import Doubt
from saltflat.integrations.record import EDGE_NAME, PREFIX, Complaints
from saltflat.integrations.sharpest import Sharpest
from saltflat.measuring import measure


class Readout:
    """Measures the same things of the same model every time.

    Args:
        model: the module that is trained.
        measures: keys, as a report has them.
        loss: as for :func:`saltflat.measure`.
        by_layer: whether the parts of the parameters are wanted.
        spectrum: whether the largest eigenvalue is.
        options: of :func:`saltflat.measure`.
        complain: is told what went wrong.
        prefix: of all names.
        doubts: what there is to say of measures, by their names, beside what they say themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        measures: Sequence[str],
        loss: Any,
        by_layer: bool,
        spectrum: bool,
        options: Mapping[str, Any],
        complain: Complaints,
        prefix: str = PREFIX,
        doubts: Mapping[str, Doubt] | None = None,
    ) -> None:
        self.model, self.measures, self.loss, self.by_layer = model, measures, loss, by_layer
        self.options, self.complain, self.prefix, self.doubts = options, complain, prefix, doubts or {}
        self._said: set[str] = set()
        self.sharpest = Sharpest() if spectrum else None

    def __call__(self, data: Any, optimizer: Any, step: int) -> tuple[dict[str, float], tuple[str, ...]]:
        """Values by name, and what went wrong with the rest."""
        wrong: dict[object, str] = {}
        notes: list[str] = []
        values = self._measures(data, wrong, notes)
        if self.sharpest is not None:
            values |= self._sharpness(data, optimizer, wrong)
        for about, text in wrong.items():
            self.complain(about, f"At step {step}: {text} The training goes on.")
        # They may be long, and are the same every time.
        fresh = [note for note in dict.fromkeys(notes) if note not in self._said]
        self._said.update(fresh)
        return values, (*wrong.values(), *fresh)

    def _measures(self, data: Any, wrong: dict[object, str], notes: list[str]) -> dict[str, float]:
        values = {f"{self.prefix}/{name}": nan for name in ("loss", *self.measures)}
        try:
            report = measure(self.model, data, self.loss, self.measures, **self.options)
        # Whatever it is, a training of hours is worth more than this measurement.
        except Exception as error:
            wrong[type(error)] = f"The measures failed and are nan ({first_line(error)})."
            return values
        values[f"{self.prefix}/loss"] = report.loss
        for name, reading in report.items():
            values[f"{self.prefix}/{name}"] = reading.value
            if self.by_layer:
                values |= {f"{self.prefix}/{name}/{layer}": value for layer, value in reading.layers.items()}
            notes += [f"{name}: {note}" for note in reading.notes if not isnan(reading.value)]
            if name in self.doubts:
                notes.append(f"{name}: {self.doubts[name].text}")
                if self.doubts[name].is_certain:
                    self.complain("certificate", f"{name} is {self.doubts[name].text}.")
            if isnan(reading.value):
                wrong[name] = f"{name} is nan ({'; '.join(reading.notes)})."
        return values

    def _sharpness(self, data: Any, optimizer: Any, wrong: dict[object, str]) -> dict[str, float]:
        assert self.sharpest is not None
        shared = {name: value for name, value in self.options.items() if name in ("seed", "memory", "dtype", "mode")}
        try:
            found = self.sharpest(self.model, data, self.loss, **shared)
        except Exception as error:
            found = nan
            self.sharpest.forget()
            wrong.setdefault(type(error), f"The search for lambda_max failed and it is nan ({first_line(error)}).")
        if not self.sharpest.converged:
            wrong["lambda_max"] = (
                f"lambda_max may be larger: its search stopped after {self.sharpest.products} products."
            )
        values = {f"{self.prefix}/lambda_max": found}
        rates = [float(group["lr"]) for group in getattr(optimizer, "param_groups", ()) if "lr" in group]
        return values | {f"{self.prefix}/{EDGE_NAME}": max(rates) * found} if rates else values
