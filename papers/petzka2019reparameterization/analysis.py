"""What the rows say, for every reading of the paper: which networks are kept, and which layers its panels show."""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pages import NOT_TESTED, join_verdicts, make_row
from rescaling import FACTORS
from scipy.stats import pearsonr, t

from saltflat.studies import Results
from saltflat.studies.scores.correlation import resample_pearson
from saltflat.studies.scores.layout import Floats, compute_interval, draw_resamples

HERE = Path(__file__).parent
CLAIMS: list[dict[str, Any]] = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))["claim"]
HESSIAN = ("hessian_trace", "hessian_top_eigenvalue")
MEASURES = ("kappa_trace", "kappa_trace_max", "rho", "rho_max", *HESSIAN)
NETWORK_WISE: dict[str, str] = CLAIMS[3]["network_wise"]
MOST = 0.07  # "training error" of networks that are kept
# The paper's "training error" can be a loss, as its gap is, or the share of wrong answers.
FILTERS = {"loss": f"training loss at most {MOST:g}", "error": f"training error at most {MOST:.0%}"}
PANELS = {"2 to 5": slice(1, 5), "1 to 4": slice(0, 4)}  # which four of five layers
DRAWS = 2000  # of factors for the last layer alone, and resamples
CHANCE = 0.05


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation with its 95 % interval (Fisher's)."""

    value: float
    low: float
    high: float
    chance: float

    @classmethod
    def compute(cls, x: Floats, y: Floats) -> "Correlation":
        found = pearsonr(x, y)
        low, high = found.confidence_interval(0.95)
        return cls(float(found.statistic), float(low), float(high), float(found.pvalue))

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Found:
    """The networks that one reading keeps, as arrays.

    Args:
        folder: with the rows.
        kept_by: a key of ``FILTERS``.
    """

    def __init__(self, folder: Path, kept_by: str = "loss") -> None:
        self.kept_by = kept_by
        rows = Results.load(folder).rows
        self.trained = {key: row.outcome for key, row in rows.items() if row.outcome is not None and row.readings}
        self.outcomes = {key: each for key, each in self.trained.items() if getattr(each, f"train_{kept_by}") <= MOST}
        self.kept = {key: rows[key] for key in self.outcomes}
        self.gap: Floats = np.array([row.gap["loss"] for row in self.kept.values()])
        self.gap_in_error: Floats = np.array([row.gap["error"] for row in self.kept.values()])
        self.batch: Floats = np.array([float(row.config["batch_size"]) for row in self.kept.values()])
        self.loss: Floats = np.array([each.train_loss for each in self.outcomes.values()])
        path = folder / "rescaled.json"
        self.rescaled: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        first = next(iter(self.kept.values()), None)
        self.layers = list(first.readings["kappa_trace"].layers) if first else []

    @property
    def is_enough(self) -> bool:
        """Whether there are networks enough for a correlation."""
        return len(self.kept) >= 4

    @property
    def is_rescaled(self) -> bool:
        """Whether all networks were measured again after rescaling."""
        return all(key in self.rescaled for key in self.kept)

    def get_values(self, measure: str) -> Floats:
        """Return a measure of whole networks."""
        return np.array([row.readings[measure].value for row in self.kept.values()])

    def get_layer(self, measure: str, layer: str) -> Floats:
        """Return a layer's part of a measure."""
        return np.array([row.readings[measure].layers[layer] for row in self.kept.values()])

    def get_rescaled(self, measure: str) -> Floats:
        """Return a measure of whole networks after their layers were rescaled."""
        return np.array([self.rescaled[key]["values"][measure] for key in self.kept])

    def correlate(self, values: Floats) -> Correlation:
        """Correlate numbers with the gap."""
        return Correlation.compute(values, self.gap)

    def correlate_layers(self, measure: str) -> list[Correlation]:
        """Correlate each layer's part of a measure with the gap."""
        return [self.correlate(self.get_layer(measure, layer)) for layer in self.layers]

    def compute_lead(self, network_wise: str, panels: str) -> tuple[float, float, float]:
        """Return by how much a network-wise number correlates better than the best layer, with a 95 % interval."""
        layers = [self.get_layer(NETWORK_WISE[network_wise], layer) for layer in self.layers[PANELS[panels]]]
        found = resample_pearson(np.stack([self.get_values(network_wise), *layers]), self.gap, self._times)
        lead = found[0] - found[1:].max(0)
        return float(lead[0]), *compute_interval(lead[1:])

    @cached_property
    def _times(self) -> Any:
        return draw_resamples(np.arange(len(self.gap)), DRAWS, seed=0)

    def compute_partial(self, values: Floats) -> tuple[float, float]:
        """Return the correlation with the gap at equal batch size and log training loss, and its p-value."""
        batches = [(self.batch == batch).astype(float) for batch in sorted(set(self.batch))]
        held = np.stack([*batches, np.log(self.loss)], 1)
        x, y = (each - held @ np.linalg.lstsq(held, each, rcond=None)[0] for each in (values, self.gap))
        value = float(np.corrcoef(x, y)[0, 1])
        freedom = len(x) - 1 - held.shape[1]
        return value, float(2 * t.sf(abs(value) * np.sqrt(freedom / (1 - value**2)), freedom))

    def rescale_last(self) -> tuple[float, float, float]:
        """Return the last layer's correlation of the trace if only the last two layers are rescaled: median and range.

        The last layer's weights are multiplied by a factor, which divides its trace by the factor's square.
        """
        trace, dice = self.get_layer("hessian_trace", self.layers[-1]), np.random.default_rng(0)
        factors = dice.integers(FACTORS[0], FACTORS[1] + 1, (DRAWS, len(trace)))
        found = [float(np.corrcoef(trace / each**2.0, self.gap)[0, 1]) for each in factors]
        low, middle, high = np.percentile(found, [2.5, 50, 97.5])
        return float(middle), float(low), float(high)


def load_readings(folder: Path) -> dict[str, Found]:
    """Return the networks that every reading keeps; a reading with too few for correlations is left out."""
    if not (folder / "study.json").exists():
        return {}
    return {name: found for name in FILTERS if (found := Found(folder, name)).is_enough}


def write_table(readings: dict[str, Found]) -> Iterator[str]:
    """Yield the tables of the MLPs."""
    first = next(iter(readings.values()))
    yield from write_networks(readings)
    yield from write_layers(readings)
    yield from write_network_wise(readings)
    yield from write_controls(readings)
    yield from write_batches(first)
    if all(found.is_rescaled for found in readings.values()):
        yield from write_rescaled(first)


def head(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"
    yield "| --- " * len(cells) + "|"


def write_verdicts(readings: dict[str, Found]) -> Iterator[str]:
    """Yield a row for every claim about the MLPs."""
    for claim in CLAIMS[:3]:
        layers = {name: found.correlate_layers(claim["measure"])[1:] for name, found in readings.items()}
        judged = {name: judge_layers(claim, each) for name, each in layers.items()}
        here = {
            name: f"{min(each.value for each in some):.2f} to {max(each.value for each in some):.2f}"
            for name, some in layers.items()
        }
        yield format_row(claim, claim["says"], here, judged)
    for panels, name in {"2 to 5": CLAIMS[3]["name"], "1 to 4": "the same, if its panels were layers 1 to 4"}.items():
        above = {reading: count_above(found, panels) for reading, found in readings.items()}
        judged = {reading: judge_count(each) for reading, each in above.items()}
        here = {reading: f"{each} of {len(NETWORK_WISE)} numbers" for reading, each in above.items()}
        yield format_row({**CLAIMS[3], "name": name}, "yes", here, judged)
    if readings and all(found.is_rescaled for found in readings.values()):
        moved = {name: max(compute_moves(found)) for name, found in readings.items()}
        judged = {name: "reproduced" if each < 1e-3 else "not reproduced" for name, each in moved.items()}
        here = {name: f"moves by at most {each:.0e}" for name, each in moved.items()}
        yield format_row(CLAIMS[4], "unchanged", here, judged)


def format_row(claim: dict[str, Any], printed: str, here: dict[str, str], judged: dict[str, str]) -> str:
    """Return a row of verdicts, with what every reading found."""
    said = "; ".join(f"{FILTERS[name]}: {each}" for name, each in here.items())
    verdict = join_verdicts({FILTERS[name]: each for name, each in judged.items()} or {"": NOT_TESTED})
    return make_row([f"{claim['where']}: {claim['name']}", printed, said or "-", verdict])


def judge(claim: dict[str, Any], found: Correlation) -> str:
    """Return the verdict on one layer."""
    if "significant" in claim:
        return "reproduced" if found.value > 0 and found.chance < claim["significant"] else "not reproduced"
    if found.value >= claim["at_least"]:
        return "reproduced"
    return "same sign" if found.low > 0 else "not reproduced"


def judge_layers(claim: dict[str, Any], layers: list[Correlation]) -> str:
    """Return the worst of the layers' verdicts."""
    return max((judge(claim, each) for each in layers), key=("reproduced", "same sign", "not reproduced").index)


def judge_count(above: int) -> str:
    return "reproduced" if above == len(NETWORK_WISE) else "not reproduced"


def count_above(found: Found, panels: str) -> int:
    """Return how many network-wise numbers correlate better than all layers of the panels."""
    return sum(found.compute_lead(name, panels)[0] > 0 for name in NETWORK_WISE)


def compute_moves(found: Found) -> list[float]:
    """Return by how much rescaling moves the correlations that should not move."""
    return [
        abs(found.correlate(found.get_values(name)).value - found.correlate(found.get_rescaled(name)).value)
        for name in MEASURES
        if name not in HESSIAN
    ]


def write_networks(readings: dict[str, Found]) -> Iterator[str]:
    """Yield the networks of both readings, and the layers' ranges beside the paper's."""
    some = next(iter(readings.values()))
    epochs = ", ".join(map(str, sorted({each.epochs for each in some.trained.values()})))
    yield "## Which networks, and which layers?"
    yield ""
    yield f"{len(some.trained)} networks trained for {epochs} epochs."
    yield ""
    yield from head("reading", "networks", "training loss", "gap", *(f"layer {n + 1}" for n in range(len(some.layers))))
    for name, found in readings.items():
        ranges = [format_range(found.get_layer("kappa_trace", layer), 3) for layer in found.layers]
        loss, gap = format_range(found.loss, 3), format_range(found.gap, 2)
        yield f"| {FILTERS[name]} | {len(found.kept)} | {loss} | {gap} | {' | '.join(ranges)} |"
    figure = CLAIMS[0]
    yield (
        f"| the paper, its panels at layers 2 to 5 | about {figure['networks']} | | {' to '.join(figure['gap'])} | "
        f"| {' | '.join(f'{low} to {high}' for low, high in figure['ranges'])} |"
    )
    yield ""
    yield "Layers are the weight matrices 784-50, 50-50, 50-50, 50-30 and 30-10; columns show the range of kappa_trace."
    yield ""


def format_range(values: Floats, digits: int) -> str:
    low, high = (f"{each:.{digits}g}" if each < 1000 else f"{each:.0f}" for each in (values.min(), values.max()))
    return f"{low} to {high}"


def write_layers(readings: dict[str, Found]) -> Iterator[str]:
    """Yield Figures 3 to 5, layer by layer."""
    yield "## Figures 3 to 5, by layer"
    yield ""
    yield from head("figure", "number", "layer", "paper", *(FILTERS[name] for name in readings), "verdict")
    for claim in CLAIMS[:3]:
        columns = {name: found.correlate_layers(claim["measure"]) for name, found in readings.items()}
        for place in range(5):
            printed, verdict = "not shown", ""
            if place:
                printed = f"{claim['layers'][place - 1]:.2f}" if "layers" in claim else "significant"
                judged = {FILTERS[name]: judge(claim, each[place]) for name, each in columns.items()}
                verdict = join_verdicts(judged).replace("*", "")
            cells = [str(each[place]) for each in columns.values()]
            named = f"| {claim['where']} | {claim['measure']} | {place + 1} | {printed}"
            yield f"{named} | {' | '.join(cells)} | {verdict} |"
    yield ""


def write_network_wise(readings: dict[str, Found]) -> Iterator[str]:
    """Yield Figure 6 for every reading."""
    yield "## Figure 6: the whole network against its best layer"
    yield ""
    yield from head(
        "number",
        "networks",
        "correlation",
        *(f"ahead of the best of layers {panels} by" for panels in PANELS),
    )
    for measure in NETWORK_WISE:
        for name, found in readings.items():
            leads = ["{:.2f} [{:.2f}, {:.2f}]".format(*found.compute_lead(measure, panels)) for panels in PANELS]
            whole = found.correlate(found.get_values(measure))
            yield f"| {measure} | {FILTERS[name]} | {whole} | {' | '.join(leads)} |"
    yield ""


def write_controls(readings: dict[str, Found]) -> Iterator[str]:
    """Yield what is left at equal batch size and training loss, and the gap as a share of wrong answers."""
    yield "## Controls"
    yield ""
    yield from head(
        "number", "networks", "correlation", "at equal batch size and log training loss", "with the gap in error"
    )
    for name, found in readings.items():
        numbers = {measure: found.get_values(measure) for measure in MEASURES}
        for measure, values in numbers.items():
            left, chance = found.compute_partial(values)
            other = Correlation.compute(values, found.gap_in_error)
            yield (
                f"| {measure} | {FILTERS[name]} | {found.correlate(values)} | {left:.2f} (p = {chance:.2g}) | {other} |"
            )
        other = Correlation.compute(found.loss, found.gap_in_error)
        yield f"| training loss | {FILTERS[name]} | {found.correlate(found.loss)} | | {other} |"
    yield ""


def write_batches(found: Found) -> Iterator[str]:
    """Yield the correlations among networks that differ in their seed alone."""
    many = [batch for batch in sorted(set(found.batch)) if (found.batch == batch).sum() >= 4]
    if not many:
        return
    yield f"Correlation with the gap among the networks of one batch size ({FILTERS[found.kept_by]}):"
    yield ""
    yield from head("batch", "networks", "kappa_trace", "rho", "hessian_trace", "training loss")
    for batch in many:
        chosen = found.batch == batch
        numbers = (*(found.get_values(name) for name in ("kappa_trace", "rho", "hessian_trace")), found.loss)
        cells = [str(Correlation.compute(values[chosen], found.gap[chosen])) for values in numbers]
        yield f"| {batch:.0f} | {chosen.sum()} | {' | '.join(cells)} |"
    yield ""


def write_rescaled(found: Found) -> Iterator[str]:
    """Yield what rescaling all layers changes."""
    worst = max(found.rescaled[key]["outputs_differ_by"] for key in found.kept)
    yield "## After rescaling"
    yield ""
    yield (
        f"Each hidden layer divided by a random whole number from {FACTORS[0]} to {FACTORS[1]} and the next multiplied "
        f"by it ({FILTERS[found.kept_by]}; outputs differ by at most {worst:.0e}):"
    )
    yield ""
    yield from head("number", "correlation before", "after", "largest relative change of a network's number")
    for name in MEASURES:
        before, after = found.get_values(name), found.get_rescaled(name)
        change = float(np.abs(after / before - 1).max())
        yield f"| {name} | {found.correlate(before)} | {found.correlate(after)} | {change:.1e} |"
    yield ""
    trace = found.correlate(found.get_layer("hessian_trace", found.layers[-1])).value
    yield (
        "If only the last two layers are rescaled, as the paper does to LeNets, the correlation of the last layer's "
        f"trace falls from {trace:.2f} to {{:.2f}} [{{:.2f}}, {{:.2f}}].".format(*found.rescale_last())
    )
