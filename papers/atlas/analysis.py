"""The numbers behind the answers, computed from the rows of a part and kept beside them."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from parts import MEASURES, METHOD, Part, pair_methods

from saltflat.results.files import write_json
from saltflat.results.report import Reading
from saltflat.studies import Results, Row
from saltflat.studies.fragility.results import ShiftSurvival
from saltflat.studies.scores.correlation import resample_kendall
from saltflat.studies.scores.layout import Floats, compute_interval, draw_resamples
from saltflat.studies.scores.results import Score
from saltflat.studies.scores.sample import number_configurations
from saltflat.studies.scores.scoring import score

# How networks are measured again, and what that is called.
PASSES = {
    "folded": "BatchNorm folded",
    "rescaled": "rescaled at random",
    "examples": "other examples",
    "logits": "logits of unit deviation",
}
SCORES = ("kendall_b", "granulated", "cmi", "pgdl", "sign_error_mean")
NEGATED = "input_margin"  # taken with the other sign: a large margin should go with a small gap
NORM, LOSS = "squared_norm", "train_loss"
# The sum that normalized sharpness in its arXiv form is the smallest value of, where its minimization begins.
BEGINNING = "hessian_trace + squared_norm"
FORMS = ("normalized_sharpness_printed", "normalized_sharpness_arxiv", BEGINNING)
RESAMPLES, SEED = 1000, 0
LEAST = 10  # networks, below which nothing is answered
# Kendall's correlations are compared by paired resamples, so an estimate is a value with its interval.
Estimate = list[float | None]


def read_pass(path: Path) -> dict[str, dict[str, float]]:
    """Return the values of a further measurement by run and measure; nan where there is none."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {
        key: {name: math.nan if value is None else value for name, value in zip(found["measures"], values, strict=True)}
        for key, values in found["values"].items()
    }


def write_pass(path: Path, values: Mapping[str, Mapping[str, float]]) -> None:
    """Write the values of a further measurement, in a line per run."""

    def encode(value: float) -> float | None:
        return float(f"{value:.9g}") if math.isfinite(value) else None

    lines = [
        f'  "{key}": {json.dumps([encode(each[name]) for name in MEASURES], allow_nan=False)}'
        for key, each in sorted(values.items())
    ]
    text = f'{{\n "measures": {json.dumps(list(MEASURES))},\n "values": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def format_seconds(seconds: float) -> str:
    """Format a duration.

    >>> format_seconds(0.123), format_seconds(12.34)
    ('123 ms', '12.3 s')
    """
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"


class Networks:
    """The networks of a part.

    Args:
        part: the part.
        out: folder of all results.
    """

    def __init__(self, part: Part, out: Path) -> None:
        self.part, self.folder = part, out / part.name
        results = Results.load(self.folder)
        self.passes = {name: read_pass(self.folder / f"{name}.json") for name in PASSES}
        rows = {key: self._orient(row) for key, row in results.rows.items()}
        self.results = replace(results, rows=rows, study=replace(part, folded=False).build_study())
        self.statuses = dict(results.counts)
        self.kept = [row for row in rows.values() if row.status == "done" and row.readings]

    def _orient(self, row: Row) -> Row:
        """Return a row with the readings that count, each the smaller the better."""
        readings = dict(row.readings)
        if self.part.folded:
            again = self.passes["folded"].get(row.key, {})
            readings = {name: Reading(name, value) for name, value in again.items()}
        return replace(
            row, readings={name: replace(each, value=flip(name, each.value)) for name, each in readings.items()}
        )

    @property
    def gap(self) -> Floats:
        """Test error minus training error."""
        return np.array([row.gap["error"] for row in self.kept]).round(12)

    @cached_property
    def times(self) -> Any:
        """Resamples of configurations, each with all its seeds; the same for all measures."""
        return draw_resamples(number_configurations(self.kept), RESAMPLES, SEED)

    def get_values(self, name: str) -> Floats:
        """Return a measure, or the training loss, of every network."""
        if name == LOSS:
            return np.array([row.outcome.train_loss if row.outcome else math.nan for row in self.kept])
        if name == BEGINNING:
            return self.get_values("hessian_trace") + self.get_values(NORM)
        return np.array([row.readings[name].value if name in row.readings else math.nan for row in self.kept])

    def get_again(self, name: str) -> dict[str, dict[str, float]]:
        """Return the values of a further measurement, each the smaller the better."""
        return {key: {each: flip(each, value) for each, value in own.items()} for key, own in self.passes[name].items()}

    def correlate(self, values: Floats, keep: Any = None) -> Floats:
        """Return Kendall's tau-b with the gap, in the networks and in each resample."""
        use = np.isfinite(values) & (np.ones(len(values), dtype=bool) if keep is None else keep)
        if use.sum() < LEAST:
            return np.full(1 + RESAMPLES, np.nan)
        return np.asarray(resample_kendall(values[use], self.gap[use], self.times[use])[1])


def flip(name: str, value: float) -> float:
    """Return the value of a measure with the sign that makes smaller ones better."""
    return -value if name == NEGATED else value


def estimate(found: Floats) -> Estimate:
    """Return the first number with the interval of the others, rounded; None where it is not known."""
    low, high = compute_interval(found[1:]) if len(found) > 1 else (math.nan, math.nan)
    return [round(each, 4) if math.isfinite(each) else None for each in (float(found[0]), low, high)]


def compute_digest(folder: Path) -> str:
    """Return a digest of what the numbers of a part are computed from: its files, and the atlas' own code."""
    names = ["study.json", "rows.tar.xz", *(f"{name}.json" for name in (*PASSES, "costs"))]
    digest = hashlib.sha256(
        b"".join(Path(__file__).with_name(name).read_bytes() for name in ("analysis.py", "parts.py"))
    )
    for path in (folder / name for name in names):
        digest.update(f"{path.name}\0".encode() + (path.read_bytes() if path.exists() else b"") + b"\0")
    return digest.hexdigest()


def analyze_part(part: Part, out: Path) -> dict[str, Any]:
    """Return all numbers of a part; computed anew unless nothing has changed since they were written."""
    folder, path = out / part.name, out / part.name / "analysis.json"
    other = out / f"{part.pair}-equal-epochs"
    digest = compute_digest(folder) + compute_digest(other)[:16]
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if known["digest"] == digest:
            return known
    networks = Networks(part, out)
    found: dict[str, Any] = {"digest": digest, "statuses": networks.statuses, "scored": len(networks.kept)}
    found["made_with"] = count_devices(networks.kept)
    found["seconds"] = {
        name: round(sum(row.seconds.get(name, 0.0) for row in networks.results.rows.values()), 1)
        for name in ("training", "measuring")
    }
    if len(networks.kept) >= LEAST:
        gap, loss = networks.gap, networks.get_values(LOSS)
        found["gap"] = [round(float(each), 4) for each in (gap.min(), gap.max())]
        found["loss"] = [round(float(each), 4) for each in (loss.min(), loss.max())]
        found["scores"] = compute_scores(networks)
        found["leads"] = compute_leads(networks)
        found["rescaled"] = compare_pass(networks, "rescaled")
        found["logits"] = compare_pass(networks, "logits")
        found["forms"] = compare_forms(networks)
        found["fragility"] = compute_fragility(networks, other)
        costs = folder / "costs.json"
        found["costs"] = json.loads(costs.read_text(encoding="utf-8")) if costs.exists() else None
    write_json(found, path)
    return found


def count_devices(rows: Iterable[Row]) -> list[str]:
    """Return the devices and versions that the networks were measured with."""
    return sorted({f"{row.made_with.get('device', '?')}, torch {row.made_with.get('torch', '?')}" for row in rows})


def compute_scores(networks: Networks) -> dict[str, dict[str, Estimate]]:
    """Return all five scores of every measure and control, with intervals."""
    axes = [name for name in networks.results.study.axis_names if name != "seed"]
    kept = {row.key: row for row in networks.kept}
    found = score(kept, axes, resamples=RESAMPLES, seed=SEED)
    return {name: {key: encode_score(each, key) for key in SCORES} for name, each in found.scores.items()}


def encode_score(found: Score, key: str) -> Estimate:
    """Return one score of a measure with its interval, rounded."""
    numbers = (getattr(found, key), *found.intervals.get(key, (math.nan, math.nan)))
    return [round(float(each), 4) if math.isfinite(each) else None for each in numbers]


def compute_leads(networks: Networks) -> dict[str, Estimate]:
    """Return by how much a measure's tau-b exceeds the larger one of the squared norm and the training loss.

    The controls count with the sign that favors them.
    """
    controls = np.stack([np.abs(networks.correlate(networks.get_values(name))) for name in (NORM, LOSS)])
    best = np.nanmax(np.where(np.isnan(controls), -1.0, controls), axis=0)
    names = [name for name in MEASURES if name != NORM]
    return {name: estimate(networks.correlate(networks.get_values(name)) - best) for name in names}


def compare_pass(networks: Networks, name: str) -> dict[str, dict[str, Estimate] | None]:
    """Return tau-b with the gap as measured first and as measured again, and the difference, by measure.

    None for a measure that more than a tenth of the networks do not have: the others are no sample of them.
    """
    again = networks.get_again(name)
    keep = np.array([row.key in again for row in networks.kept])
    found: dict[str, dict[str, Estimate] | None] = {}
    for measure in MEASURES if keep.sum() >= LEAST else ():
        after = np.array([again.get(row.key, {}).get(measure, math.nan) for row in networks.kept])
        both = keep & np.isfinite(after) & np.isfinite(networks.get_values(measure))
        if both.sum() < 0.9 * keep.sum():
            found[measure] = None
            continue
        first, second = (networks.correlate(values, both) for values in (networks.get_values(measure), after))
        found[measure] = {
            "before": estimate(first),
            "after": estimate(second),
            "difference": estimate(second - first),
        }
    return found


def compare_forms(networks: Networks) -> dict[str, dict[str, Estimate]]:
    """Return tau-b of the forms of normalized sharpness, and the difference from the converged one."""
    converged = networks.correlate(networks.get_values("normalized_sharpness"))
    found: dict[str, dict[str, Estimate]] = {
        "normalized_sharpness": {"tau": estimate(converged), "difference": [0.0, 0.0, 0.0]}
    }
    for name in FORMS:
        own = networks.correlate(networks.get_values(name))
        found[name] = {"tau": estimate(own), "difference": estimate(own - converged)}
    return found


def compute_fragility(networks: Networks, other: Path) -> dict[str, dict[str, Any]]:
    """Return how much of each order survives another seed, examples, training past the target, optimizer or labels."""
    results, part = networks.results, networks.part
    found: dict[str, ShiftSurvival] = {}
    options = {"measures": list(MEASURES), "resamples": RESAMPLES, "seed": SEED}
    plain = [axis for axis in results.study.axes if axis != METHOD]
    against: dict[str, Any] = {PASSES[name]: networks.get_again(name) for name in ("rescaled", "examples")}
    against = {name: values for name, values in against.items() if values}
    if part.arm == "equal-loss" and (other / "rows.tar.xz").exists():
        longer = replace(part, arm="equal-epochs")
        against["trained past the target"] = Networks(longer, other.parent).results
    shifts = results.fragility(axes=["seed", *plain] if part.seeds > 1 else plain, against=against, **options)
    found |= shifts.shifts
    for thing in ("optimizer", "lr", "weight_decay"):
        pairs = pair_methods(part.methods, thing)
        if pairs:
            one = results.fragility(axes=[METHOD], pairs={METHOD: pairs}, **options)
            found[thing] = one.shifts[METHOD]
    return {
        name: {
            "configurations": shift.configurations,
            "survivals": {
                measure: {
                    "tau": [
                        None if math.isnan(n) else round(n, 4) for n in (each.tau.value, each.tau.low, each.tau.high)
                    ],
                    "runs": each.runs,
                    "verdict": each.verdict,
                }
                for measure, each in shift.survivals.items()
            },
        }
        for name, shift in found.items()
        if shift.configurations
    }
