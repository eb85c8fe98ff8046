"""Measure one moment of a training; what cannot be measured is nan, with a note."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, isnan, nan
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.engine.certificate import certify
from saltflat.engine.context import Setting
from saltflat.engine.custom_losses import normalize_logits, parse_loss
from saltflat.engine.eigenvalues import reserve_basis
from saltflat.engine.full_loss import check_symmetric, compute_hessian_product
from saltflat.engine.lanczos import TopEigenvalue, Vectors, find_top_eigenvalues
from saltflat.engine.noise import draw_normals
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session
from saltflat.errors import NonFiniteError, format_error_line
from saltflat.integrations.record import EDGE_NAME, PREFIX, THRESHOLD_NAME, OneTimeWarnings
from saltflat.integrations.stability import StabilityMatrix, compute_stability_matrix, is_preconditioned
from saltflat.measures.compute import is_gauss_newton, measure
from saltflat.measures.registry import parse_measures
from saltflat.validation import parse_bytes

TOLERANCE = 1e-3  # relative: a curve over steps needs no more
STEPS = 100  # products at most
# How much of a new direction is mixed with the earlier eigenvector. Without any, a second eigenvalue that overtakes the
# first might never be seen: its vector is orthogonal to the start, and stays so. With this much, one that is larger by
# half is seen at once, and one that is larger by a tenth within a few times.
FRESH = 0.3


class TopEigenvalueTracker:
    """How steeply the loss curves along the steepest direction, which is remembered from one time to the next.

    Args:
        tolerance: of the bound on the eigenvalue's error, relative.
        steps: products at most.

    Attributes:
        products: how many products with the Hessian the latest one took.
        converged: whether the latest bound was within the tolerance.
    """

    def __init__(self, tolerance: float = TOLERANCE, steps: int = STEPS) -> None:
        self.tolerance, self.steps = tolerance, steps
        self.products = 0
        self.converged = True
        self._vector: Tensor | None = None
        self._sizes: dict[str, int] = {}
        self._times = 0

    def reset(self) -> None:
        """Start from a random direction the next time."""
        self._vector, self.converged = None, True

    def __call__(
        self,
        model: nn.Module,
        data: Any,
        loss: Any,
        *,
        seed: int = 0,
        memory: str | int = "1GiB",
        dtype: torch.dtype | None = None,
        mode: str = "eval",
        stability: StabilityMatrix | None = None,
    ) -> float:
        """The eigenvalue, of all parameters that require a gradient.

        With ``stability`` that of its matrix in place of the Hessian itself.
        """
        with open_session(model, mode, data):
            problem = Problem.build(model, data, loss, None, dtype, mode)
            setting = Setting(problem, parse_column_plan("exact"), seed, parse_bytes(memory))
            top = self._find_top_eigenvalue(setting, stability)
        if not isfinite(top.value):
            raise NonFiniteError(
                f"Expected finite ones, but got {top.value} as the largest eigenvalue: second derivatives overflow. "
                "Try measuring with dtype=torch.float64."
            )
        self.converged = top.converged
        self._vector = top.vector
        return top.value

    def _find_top_eigenvalue(self, setting: Setting, stability: StabilityMatrix | None) -> TopEigenvalue:
        measured = setting.problem.network.measured
        sizes = {name: each.numel() for name, each in measured.items()}
        seen: list[tuple[Tensor, Tensor]] = []
        self.products = 0

        def multiply_by_hessian(vector: Tensor) -> Tensor:
            parts = zip(measured.items(), vector.split(list(sizes.values())), strict=True)
            found = compute_hessian_product(setting, {name: part.reshape(each.shape) for (name, each), part in parts})
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

        random = torch.cat([each.flatten() for each in draw_normals(setting, self._times).values()])
        start = random / random.norm()
        if self._vector is not None and self._sizes == sizes:
            # One product turns a random direction toward all that curve strongly.
            fresh = multiply_by_matrix({"": start})[""]
            start = self._vector.to(start) + FRESH * fresh / fresh.norm().clamp_min(1e-300)
        self._sizes, self._times = sizes, self._times + 1
        with reserve_basis(setting, measured) as basis:
            top = find_top_eigenvalues(multiply_by_matrix, {"": start}, self.tolerance, self.steps, basis=basis)[""]
        if len(seen) == 2 and stability is None:  # whose vectors have no common length
            (u, Hu), (v, Hv) = seen
            size = float((Hu.square().sum() + Hv.square().sum()).sqrt())
            check_symmetric(setting, float((u @ Hv - v @ Hu).abs()) / size if size else 0.0)
        return top


def _flatten_values(values: Mapping[str, Tensor | float], measured: Mapping[str, Tensor]) -> Tensor:
    """One number for every entry of the parameters."""
    parts = [
        torch.as_tensor(values[name], dtype=torch.float64).to(each.device).expand(each.shape).flatten()
        for name, each in measured.items()
    ]
    return torch.cat(parts)


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
