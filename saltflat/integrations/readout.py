"""The numbers of one moment of a training; what cannot be measured is nan, with a note."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isnan, nan
from typing import Any

from torch import nn

from saltflat.errors import format_error_line
from saltflat.integrations.doubts import GaussNewtonCaveat
from saltflat.integrations.record import EDGE_NAME, PREFIX, THRESHOLD_NAME, OneTimeWarnings
from saltflat.integrations.sharpest import TopEigenvalueTracker
from saltflat.integrations.stability import StabilityMatrix, compute_stability_matrix, is_preconditioned
from saltflat.measuring import measure

TIMED, USUAL = (1, 4), 20  # products of the searches that are timed, and those that one needs from a random start


class ProbeMeasurer:
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
        complain: OneTimeWarnings,
        prefix: str = PREFIX,
        doubts: Mapping[str, GaussNewtonCaveat] | None = None,
    ) -> None:
        self.model, self.measures, self.loss, self.by_layer = model, measures, loss, by_layer
        self.options, self.complain, self.prefix, self.doubts = options, complain, prefix, doubts or {}
        self._said: set[str] = set()
        self.sharpest = TopEigenvalueTracker() if spectrum else None
        self._at_the_edge = TopEigenvalueTracker()  # remembers another vector

    def __call__(
        self, data: Any, optimizer: Any, step: int, changed_by: str = ""
    ) -> tuple[dict[str, float], tuple[str, ...]]:
        """Values by name, and what went wrong with the rest."""
        wrong: dict[object, str] = {}
        notes: list[str] = []
        values = self._compute_measures(data, wrong, notes)
        if self.sharpest is not None:
            values |= self._compute_sharpness(data, wrong)
            if optimizer is not None:
                values |= self._compute_edge_of_stability(
                    data, values[f"{self.prefix}/lambda_max"], optimizer, changed_by, wrong, notes
                )
        for about, text in wrong.items():
            self.complain(about, f"At step {step}: {text} The training goes on.")
        # They may be long, and are the same every time.
        fresh = [note for note in dict.fromkeys(notes) if note not in self._said]
        self._said.update(fresh)
        return values, (*wrong.values(), *fresh)

    def _compute_measures(self, data: Any, wrong: dict[object, str], notes: list[str]) -> dict[str, float]:
        values = {f"{self.prefix}/{name}": nan for name in ("loss", *self.measures)}
        try:
            report = measure(self.model, data, self.loss, self.measures, **self.options)
        # Whatever it is, a training of hours is worth more than this measurement.
        except Exception as error:
            wrong[type(error)] = f"The measures failed and are nan ({format_error_line(error)})."
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

    def time_measurement(self, data: Any, optimizer: Any, clock: Callable[[], float]) -> float | None:
        """Seconds that a measurement on these examples takes, without all of its searches; None if it fails.

        A search for an eigenvalue is taken to need as many products as they usually do.
        """
        searches = 0 if self.sharpest is None else 1 + (optimizer is not None and is_preconditioned(optimizer))
        times = [clock()]
        try:
            measure(self.model, data, self.loss, self.measures, **self.options)
            times.append(clock())
            for steps in TIMED if searches else ():
                TopEigenvalueTracker(steps=steps)(self.model, data, self.loss, **self._search_options)
                times.append(clock())
        except Exception:
            return None
        measured, *few = (later - earlier for earlier, later in pairwise(times))
        if not few:
            return measured
        one_product = max(0.0, few[1] - few[0]) / (TIMED[1] - TIMED[0])
        return measured + searches * (few[0] + one_product * (USUAL - TIMED[0]))

    @property
    def _search_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in ("seed", "memory", "dtype", "mode")}

    def _compute_sharpness(self, data: Any, wrong: dict[object, str]) -> dict[str, float]:
        assert self.sharpest is not None
        return {f"{self.prefix}/lambda_max": self._find_eigenvalue(self.sharpest, "lambda_max", data, wrong)}

    def _compute_edge_of_stability(
        self, data: Any, top: float, optimizer: Any, changed_by: str, wrong: dict[object, str], notes: list[str]
    ) -> dict[str, float]:
        """lambda_max times the learning rate, of the Hessian as the optimizer preconditions it, and its threshold."""
        found = compute_stability_matrix(optimizer, self.model, changed_by)
        if isinstance(found, str):
            notes.append(found)
            return {}
        if found.uniform_rate_and_decay is not None:
            rate, decay = found.uniform_rate_and_decay
            value = rate * (top + decay)
        else:
            value = self._find_eigenvalue(self._at_the_edge, EDGE_NAME, data, wrong, found)
        values = {f"{self.prefix}/{EDGE_NAME}": value}
        if found.threshold is None:
            notes.append(found.note)
            return values
        return values | {f"{self.prefix}/{THRESHOLD_NAME}": found.threshold}

    def _find_eigenvalue(
        self,
        search: TopEigenvalueTracker,
        name: str,
        data: Any,
        wrong: dict[object, str],
        stability: StabilityMatrix | None = None,
    ) -> float:
        try:
            found = search(self.model, data, self.loss, **self._search_options, stability=stability)
        except Exception as error:
            search.reset()
            wrong.setdefault(type(error), f"The search for {name} failed and it is nan ({format_error_line(error)}).")
            return nan
        if not search.converged:
            wrong[name] = f"{name} may be larger: its search stopped after {search.products} products."
        return found
