"""Minimum sharpness of a residual network: its cost beyond the sweep, and the same minimum by a general optimizer.

The peer is SciPy's L-BFGS on the logarithms of all scales, with the exact gradient: what one would write by hand once
the rescalings of the network are known. It is given those, and the same start.
"""

from statistics import median

import numpy as np
import torch
from networks import resnet20
from rich.table import Table
from scipy.optimize import minimize

import saltflat
from parts import Options, Outcome, Target
from parts.clock import in_turns, seconds_of
from parts.images import images
from saltflat.symmetry.group import Symmetries
from saltflat.symmetry.minimize import minimize_trace_by_unit

LIMIT = 2.0  # seconds beyond the sweep


def descended(group: Symmetries, diagonal: dict[str, torch.Tensor], steps: int) -> float:
    """Return the smallest trace that L-BFGS finds."""
    heads = np.concatenate([group.members[name].head.reshape(-1) for name in diagonal])
    tails = np.concatenate([group.members[name].tail.reshape(-1) for name in diagonal])
    curvature = np.concatenate([value.double().numpy().reshape(-1) for value in diagonal.values()])
    forms = group.forms[heads] - group.forms[tails]

    def trace(logs: np.ndarray) -> tuple[float, np.ndarray]:
        terms = curvature * np.exp(-2 * (forms @ logs))
        return float(terms.sum()), -2 * (forms.T @ terms)

    start = np.zeros(group.scales)
    found = minimize(trace, start, jac=True, method="L-BFGS-B", options={"maxiter": steps, "maxfun": 10 * steps})
    return float(found.fun)


def run(options: Options) -> Outcome:
    count = 8 if options.quick else 64
    source = images("cifar10", count, "standard")
    torch.manual_seed(0)
    model = saltflat.fold(resnet20().eval())
    data = source.inputs, source.labels
    options.tell("minimum: sweeping")
    diagonal = dict(
        saltflat.compute_statistics(model, data, names="curvature_diagonal", progress=False)["curvature_diagonal"]
    )
    group = saltflat.find_symmetries(model, source.inputs[:2])
    best = minimize_trace_by_unit(group, diagonal)
    steps = 20 if options.quick else 2000
    theirs: list[float] = []
    calls = {
        "the sweep": lambda: saltflat.compute_statistics(model, data, names="curvature_diagonal", progress=False),
        "finding the rescalings": lambda: saltflat.find_symmetries(model, source.inputs[:2]),
        "balancing": lambda: minimize_trace_by_unit(group, diagonal),
    }
    seconds = in_turns(calls, options.repeats)
    options.tell("minimum: L-BFGS")
    seconds["L-BFGS instead"] = [seconds_of(lambda: theirs.append(descended(group, diagonal, steps)))]
    beyond = median(seconds["finding the rescalings"]) + median(seconds["balancing"])
    ratio = median(seconds["L-BFGS instead"]) / median(seconds["balancing"])
    above = theirs[0] / best.value - 1
    trace = sum(float(value.sum()) for value in diagonal.values())
    table = Table(title=f"Minimum unit sharpness of a folded ResNet-20, {group.scales} scales; {source.source}")
    for heading in ("step", "seconds", "value"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    values = {
        "the sweep": f"{trace:.9g} (trace)",
        "balancing": f"{best.value:.9g}",
        "L-BFGS instead": f"{theirs[0]:.9g}",
    }
    for name, each in seconds.items():
        table.add_row(name, f"{median(each):.4f}", values.get(name, ""))
    targets = (
        Target(f"under {LIMIT:g} s beyond the sweep", f"{beyond:.2f} s", beyond < LIMIT and best.converged),
        Target(
            "faster than L-BFGS on the same problem, value no larger",
            f"{ratio:.0f} times, theirs is {above:.1e} above",
            ratio > 1 and above > -1e-9,
        ),
    )
    record = {
        "images": source.source,
        "scales": group.scales,
        "trace": trace,
        "minimum": best.value,
        "residual": best.residual,
        "lbfgs": theirs[0],
        "lbfgs_steps": steps,
        "seconds": seconds,
    }
    return Outcome(table, targets, record)
