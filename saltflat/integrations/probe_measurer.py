"""Measure flatness at one moment of a training; a value that cannot be measured is nan, with a note."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isfinite, isnan, nan
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from saltflat.engine.context import Context
from saltflat.engine.data import Data
from saltflat.engine.eigenvalues import reserve_basis
from saltflat.engine.full_loss import check_symmetric, compute_hessian_product
from saltflat.engine.lanczos import TopEigenvalue, Vectors, find_top_eigenvalues
from saltflat.engine.losses import LossLike
from saltflat.engine.model_identity import SameObject, list_modes
from saltflat.engine.noise import draw_normals
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session
from saltflat.engine.structure import Preparation
from saltflat.errors import NonFiniteError, format_error_line
from saltflat.integrations.probe_set import GaussNewtonCaveat
from saltflat.integrations.record import EDGE_NAME, PREFIX, THRESHOLD_NAME, OneTimeWarnings, Topic
from saltflat.integrations.stability import (
    OptimizerLike,
    StabilityMatrix,
    compute_stability_matrix,
    is_preconditioned,
)
from saltflat.measures.meter import Meter
from saltflat.validation import parse_bytes

TOLERANCE = 1e-3  # relative: enough for a curve over steps
STEPS = 100  # maximum number of products
# How much of a new direction is mixed with the previous eigenvector. Without it, a second eigenvalue that overtakes the
# first might never be found: its vector is orthogonal to the start, and stays so. With this much, one that is larger by
# half is found immediately, and one that is larger by a tenth within a few measurements.
FRESH = 0.3

Failures: TypeAlias = dict[Topic, str]  # sentences by topic


class TopEigenvalueTracker:
    """Find the largest eigenvalue of the Hessian, starting from the previous eigenvector.

    Args:
        tolerance: the relative tolerance for the error bound of the eigenvalue.
        steps: the maximum number of products with the Hessian.

    Attributes:
        products: how many products with the Hessian the latest search took.
        converged: whether the latest bound was within the tolerance.
    """

    def __init__(self, tolerance: float = TOLERANCE, steps: int = STEPS) -> None:
        self.tolerance, self.steps = tolerance, steps
        self.products = 0
        self.converged = True
        self._vector: Tensor | None = None
        self._sizes: dict[str, int] = {}
        self._times = 0
        self._preparation = Preparation()

    def reset(self) -> None:
        """Start the next search from a random direction."""
        self._vector, self.converged = None, True

    def __call__(
        self,
        model: nn.Module,
        data: Data,
        loss: LossLike,
        *,
        seed: int = 0,
        memory: str | int = "1GiB",
        dtype: torch.dtype | None = None,
        mode: str = "eval",
        stability: StabilityMatrix | None = None,
    ) -> float:
        """Return the eigenvalue, over all parameters that require a gradient.

        With ``stability``, return the eigenvalue of that matrix instead of the Hessian.
        """
        conditions = list_modes(model), SameObject(loss), dtype, mode
        with open_session(model, mode, data), self._preparation.lend_structure(model, *conditions) as structure:
            problem = Problem.build(model, data, loss, None, dtype, mode)
            plan, limit = parse_column_plan("exact"), parse_bytes(memory)
            context = Context(problem, plan, seed, limit, structure=structure)
            top = self._find_top_eigenvalue(context, stability)
        if not isfinite(top.value):
            raise NonFiniteError(
                f"Expected a finite largest eigenvalue, but got {top.value}: second derivatives overflow. Try "
                "dtype=torch.float64."
            )
        self.converged = top.converged
        self._vector = top.vector
        return top.value

    def _find_top_eigenvalue(self, context: Context, stability: StabilityMatrix | None) -> TopEigenvalue:
        measured = context.problem.network.measured
        sizes = {name: each.numel() for name, each in measured.items()}
        seen: list[tuple[Tensor, Tensor]] = []
        self.products = 0

        def multiply_by_hessian(vector: Tensor) -> Tensor:
            parts = zip(measured.items(), vector.split(list(sizes.values())), strict=True)
            found = compute_hessian_product(context, {name: part.reshape(each.shape) for (name, each), part in parts})
            flat = torch.cat([each.flatten() for each in found.values()])
            if len(seen) < 2:
                seen.append((vector, flat))
            return flat

        if stability is not None:
            scale, decay = (
                _flatten_values(stability.rates, measured).sqrt(),
                _flatten_values(stability.decays, measured),
            )

        def multiply_by_matrix(vectors: Vectors) -> Vectors:
            self.products += 1
            if stability is None:
                return {"": multiply_by_hessian(vectors[""])}
            scaled = scale * vectors[""].double()
            return {"": scale * (stability.sign * multiply_by_hessian(scaled) + decay * scaled)}

        random = torch.cat([each.flatten() for each in draw_normals(context, self._times).values()])
        start = random / random.norm()
        if self._vector is not None and self._sizes == sizes:
            # One product turns a random direction toward all directions of high curvature.
            fresh = multiply_by_matrix({"": start})[""]
            start = self._vector.to(start) + FRESH * fresh / fresh.norm().clamp_min(1e-300)
        self._sizes, self._times = sizes, self._times + 1
        with reserve_basis(context, measured) as basis:
            top = find_top_eigenvalues(multiply_by_matrix, {"": start}, self.tolerance, self.steps, basis=basis)[""]
        if len(seen) == 2 and stability is None:  # otherwise the vectors differ in length
            (u, Hu), (v, Hv) = seen
            size = float((Hu.square().sum() + Hv.square().sum()).sqrt())
            check_symmetric(context, float((u @ Hv - v @ Hu).abs()) / size if size else 0.0)
        return top


def _flatten_values(values: Mapping[str, Tensor | float], measured: Mapping[str, Tensor]) -> Tensor:
    """Return one number for every entry of the parameters."""
    parts = [
        torch.as_tensor(values[name], dtype=torch.float64).to(each.device).expand(each.shape).flatten()
        for name, each in measured.items()
    ]
    return torch.cat(parts)


TIMED, USUAL = (1, 4), 20  # products of the timed searches, and those a search from a random start usually needs


class ProbeMeasurer:
    """Compute the same values for the same model at every call.

    Args:
        meter: measures the module that is trained.
        measures: keys of its measures, as in a report.
        by_layer: whether to include the contribution of each parameter.
        spectrum: whether to include the largest eigenvalue.
        options: options of the meter.
        warn_once: receives warnings about what failed.
        prefix: the prefix of all names.
        caveats: additional notes on measures, by name.
    """

    def __init__(
        self,
        meter: Meter,
        measures: Sequence[str],
        by_layer: bool,
        spectrum: bool,
        options: Mapping[str, Any],
        warn_once: OneTimeWarnings,
        prefix: str = PREFIX,
        caveats: Mapping[str, GaussNewtonCaveat] | None = None,
    ) -> None:
        self.meter, self.model, self.loss = meter, meter.model, meter.loss
        self.measures, self.by_layer = measures, by_layer
        self.options, self.warn_once, self.prefix, self.caveats = options, warn_once, prefix, caveats or {}
        self._noted: set[str] = set()
        self.sharpest = TopEigenvalueTracker() if spectrum else None
        self._edge = TopEigenvalueTracker()  # keeps an eigenvector of its own

    def __call__(
        self, data: Data, optimizer: OptimizerLike | None, step: int, changed_by: str = ""
    ) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return values by name, and notes on failures and caveats."""
        failures: Failures = {}
        notes: list[str] = []
        values = self._compute_measures(data, failures, notes)
        if self.sharpest is not None:
            values |= self._compute_sharpness(data, failures)
            if optimizer is not None:
                values |= self._compute_edge_of_stability(
                    data, values[f"{self.prefix}/lambda_max"], optimizer, changed_by, failures, notes
                )
        for topic, text in failures.items():
            self.warn_once(topic, f"At step {step}: {text} Training continues.")
        # Notes may be long, and are the same every time.
        fresh = [note for note in dict.fromkeys(notes) if note not in self._noted]
        self._noted.update(fresh)
        return values, (*failures.values(), *fresh)

    def _compute_measures(self, data: Data, failures: Failures, notes: list[str]) -> dict[str, float]:
        values = {f"{self.prefix}/{name}": nan for name in ("loss", *self.measures)}
        try:
            report = self.meter.measure(data)
        # Whatever the error, hours of training are worth more than this measurement.
        except Exception as error:
            failures[type(error)] = f"The measures failed and are nan ({format_error_line(error)})."
            return values
        values[f"{self.prefix}/loss"] = report.loss
        for name, reading in report.items():
            values[f"{self.prefix}/{name}"] = reading.value
            if self.by_layer:
                values |= {f"{self.prefix}/{name}/{layer}": value for layer, value in reading.layers.items()}
            notes += [f"{name}: {note}" for note in reading.notes if not isnan(reading.value)]
            if name in self.caveats:
                notes.append(f"{name}: {self.caveats[name].text}")
                if self.caveats[name].is_certain:
                    self.warn_once("certificate", f"{name} is {self.caveats[name].text}.")
            if isnan(reading.value):
                failures[name] = f"{name} is nan ({'; '.join(reading.notes)})."
        return values

    def time_measurement(self, data: Data, optimizer: OptimizerLike | None, clock: Callable[[], float]) -> float | None:
        """Estimate the seconds a measurement on these examples takes, without running full searches; None if it fails.

        A search for an eigenvalue is assumed to need the usual number of products.
        """
        searches = 0 if self.sharpest is None else 1 + (optimizer is not None and is_preconditioned(optimizer))
        times = [clock()]
        try:
            self.meter.measure(data)
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

    def _compute_sharpness(self, data: Data, failures: Failures) -> dict[str, float]:
        assert self.sharpest is not None
        return {f"{self.prefix}/lambda_max": self._find_eigenvalue(self.sharpest, "lambda_max", data, failures)}

    def _compute_edge_of_stability(
        self,
        data: Data,
        top: float,
        optimizer: OptimizerLike,
        changed_by: str,
        failures: Failures,
        notes: list[str],
    ) -> dict[str, float]:
        """Return lambda_max of the preconditioned Hessian times the learning rate, and its threshold."""
        found = compute_stability_matrix(optimizer, self.model, changed_by)
        if isinstance(found, str):
            notes.append(found)
            return {}
        if found.uniform_rate_and_decay is not None:
            rate, decay = found.uniform_rate_and_decay
            value = rate * (top + decay)
        else:
            value = self._find_eigenvalue(self._edge, EDGE_NAME, data, failures, found)
        values = {f"{self.prefix}/{EDGE_NAME}": value}
        if found.threshold is None:
            notes.append(found.note)
            return values
        return values | {f"{self.prefix}/{THRESHOLD_NAME}": found.threshold}

    def _find_eigenvalue(
        self,
        search: TopEigenvalueTracker,
        name: str,
        data: Data,
        failures: Failures,
        stability: StabilityMatrix | None = None,
    ) -> float:
        try:
            found = search(self.model, data, self.loss, **self._search_options, stability=stability)
        except Exception as error:
            search.reset()
            failures.setdefault(
                type(error), f"The search for {name} failed and it is nan ({format_error_line(error)})."
            )
            return nan
        if not search.converged:
            failures[name] = f"{name} may be larger: its search stopped after {search.products} products."
        return found
