"""Files of results with something wrong in them, and everything that can be done with a file."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import saltflat
from saltflat.audit.result import Audit
from saltflat.bounds import Assumption, Bound
from saltflat.bounds.robustness_result import FeatureRobustness
from saltflat.landscape.result import Landscape
from saltflat.spectrum.result import Spectrum

KINDS: dict[str, Any] = {
    "saltflat.report": saltflat.Report,
    "saltflat.audit": Audit,
    "saltflat.landscape": Landscape,
    "saltflat.spectrum": Spectrum,
    "saltflat.bound": Bound,
    "saltflat.feature_robustness": FeatureRobustness,
}


def originals() -> dict[str, dict[str, Any]]:
    """A file of every kind, as it was written."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    data = torch.randn(12, 4), torch.arange(12) % 3
    names = ["hessian_trace", "kappa", "rho(axis='row')", "minimum_sharpness", "sharpness"]
    made: dict[str, Any] = {
        "report": saltflat.measure(net, data, measures=[*names, "distance_from_init", "all"], progress=False),
        "report of random columns": saltflat.measure(net, data, measures=names, columns="sampled:2", progress=False),
        "audit": saltflat.audit_invariance(net, data, measures=names[:3], draws=2, progress=False),
        "landscape": saltflat.compute_landscape(net, data, points=3, progress=False),
        "map": saltflat.compute_landscape(net, data, dimensions=2, points=3, progress=False),
        "spectrum": saltflat.compute_spectrum(net, data, k=2, draws=2, steps=4, progress=False),
        "spectrum of layers": saltflat.compute_spectrum(net, data, k=1, per="layer", draws=2, steps=3, progress=False),
        "feature robustness": saltflat.feature_robustness(
            net, data, "2", deltas=[1e-3, 0.1], draws=2, restarts=0, steps=2, progress=False
        ),
    }
    made["bound"] = Bound(
        "Maurer",
        0.12,
        "A network drawn from the posterior",
        "error",
        0.05,
        {"empirical risk": 0.1, "divergence": 0.02, "prior": float("inf")},
        (Assumption("The prior was fixed.", True, "It is the network before training."), Assumption("Independent.")),
        0.9,
        "tsuzuku2020normalized",
        "L + :math:`\\frac12`",
        "valid",
        100,
        details={"by layer": {"0.weight": 3.2}},
        notes=("A note.",),
        settings={"draws": 3},
    )
    return {name: json.loads(json.dumps(each.to_dict())) for name, each in made.items()}


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2.5, -0.0, 1e308, -1e308, 5e-324, 10**30, -(10**30), 10**400, "", "x", "nan", "1",
    "\x00", "\x1b[31m", "\ud800", "x" * 3000, [], {}, [[]], [None], [1.0, "x"], [[1.0], [2.0, 3.0]], {"": None},
    {"a": {"b": []}}, {"$float": "nan"}, {"$float": "inf"}, {"$float": "small"}, {"$float": 1}, {"$float": None},
    {"$float": "nan", "a": 1}, {"$$float": "nan"},
]  # fmt: skip
SCHEMAS = [
    "saltflat.report/1",
    "saltflat.report/2",
    "saltflat.audit/1",
    "saltflat.landscape/1",
    "saltflat.spectrum/1",
    "saltflat.bound/1",
    "saltflat.feature_robustness/1",
]


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be changed: the path of every value in the file."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def mutated(original: dict[str, Any], dice: random.Random) -> tuple[dict[str, Any], str]:
    """The file with one to three changes, and what they are."""
    content, said = copy.deepcopy(original), []
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        every = list(places(content))
        # Few places are near the root, and most of what is read of a file stands there.
        depth = dice.randint(1, max(map(len, every), default=1))
        path = dice.choice([each for each in every if len(each) <= depth] or every)
        holder, key = at(content, path[:-1]), path[-1]
        how = dice.choice(["delete", "value", "value", "value", "wrap", "rename", "swap", "double", "schema"])
        if how == "delete":
            del holder[key]
        elif how == "wrap":
            holder[key] = dice.choice([[holder[key]], {"a": holder[key]}, str(holder[key])])
        elif how == "rename" and isinstance(holder, dict):
            holder[dice.choice(["", "x", "$", "$float", f"{key} ", "0.weight"])] = holder.pop(key)
        elif how == "swap":
            holder[key] = copy.deepcopy(at(content, dice.choice(every)))
        elif how == "double" and isinstance(holder[key], list):
            holder[key] = 2 * holder[key]
        elif how == "schema":
            content["schema"] = dice.choice(SCHEMAS)
        else:
            holder[key] = copy.deepcopy(dice.choice(VALUES))
        said.append(f"{how} {'/'.join(map(str, path))[:80]}")
        if not list(places(content)):
            break
    return content, "; ".join(said)


def uses(path: Path, kind: Any, other: saltflat.Report, plots: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Everything that can be done with a file, as far as it can be read."""
    found: list[Any] = []
    yield "load", lambda: found.append(kind.load(path))
    if not found:
        return
    (result,) = found
    yield "str", lambda: str(result)
    yield "repr", lambda: repr(result)
    yield "html", lambda: result._repr_html_()
    yield "save", lambda: result.save(path.with_name("again.json"))
    yield "equal", lambda: result == kind.load(path.with_name("again.json")) or 1 / 0
    yield "iterate", lambda: list(result) if hasattr(result, "__iter__") else None
    report = result.report if isinstance(result, Audit) else result
    if isinstance(report, saltflat.Report | Bound):
        yield "page", lambda: report.to_html(path.with_name("page.html"))
    if isinstance(report, saltflat.Report):
        yield "frame", lambda: report.to_frame()
        yield "compare", lambda: _shown(saltflat.compare(other, report), path)
        yield "compare with itself", lambda: _shown(saltflat.compare({"a": path, "b": report, "c": other}), path)
    if isinstance(result, Audit):
        yield (
            "lines",
            lambda: [
                (line.verdicts, [line.compute_draw_decades(kind) for kind in line.changes]) for line in result.values()
            ],
        )
    if isinstance(result, Landscape):
        yield "values", lambda: (result.loss, result.error, result.curvature)
    if isinstance(result, FeatureRobustness):
        yield "values", lambda: (result.kappa, result.kappa_trace, result.deltas, result.applies, result.applies_from)
    if isinstance(result, Spectrum):
        yield "values", lambda: [(block.trace, block.trace_stderr, block.eigenvalues) for block in result.values()]
        yield "density", lambda: [block.density() for block in result.values() if block.has_density]
    if plots:
        yield "plot", lambda: result.plot().canvas.draw()
        if isinstance(report, saltflat.Report):
            yield "plot of a comparison", lambda: saltflat.compare(other, report).plot().canvas.draw()


def _shown(comparison: Any, path: Path) -> None:
    str(comparison)
    comparison._repr_html_()
    comparison.to_frame()
    comparison.to_dict()
    comparison.to_html(path.with_name("comparison.html"))


def raw_errors(path: Path, kind: Any, other: saltflat.Report, plots: bool) -> dict[str, BaseException]:
    """What is done with a file and ends in an error that is not saltflat's."""
    raw: dict[str, BaseException] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, use in uses(path, kind, other, plots):
            try:
                use()
            except saltflat.SaltflatError as error:
                if not str(error):
                    raw[name] = error
            except Exception as error:
                raw[name] = error
    return raw
