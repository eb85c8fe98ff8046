"""The largest eigenvalue of every layer's block: all layers at once, one by one, and by ARPACK on the true Hessian."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import networks
import numpy as np
import torch
from networks import Problem
from rich.table import Table
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import nn
from torch.nn import functional as F

from parts import Options, Outcome, Target
from parts.images import images
from saltflat.engine import problem
from saltflat.engine.context import Context, find_geometries
from saltflat.engine.eigenvalues import draw_start_vectors, make_block_product
from saltflat.engine.lanczos import TopEigenvalue, Vectors, find_top_eigenvalues
from saltflat.engine.output_curvature import parse_column_plan


@dataclass(frozen=True)
class Search:
    """Eigenvalues by layer, the number of products with all blocks at once, and the time."""

    tops: dict[str, TopEigenvalue]
    sweeps: int
    seconds: float


def search(task: Problem, layers: Collection[str] | None = None, starts: Vectors | None = None) -> Search:
    started = time.perf_counter()
    chosen = None if layers is None else list(layers)
    looked_at = problem.Problem.build(task.model, (task.inputs, task.targets), layers=chosen)
    context = Context(looked_at, parse_column_plan("exact"), seed=0, limit=2**30)
    product, sweeps = make_block_product(context), 0

    def counted(vectors: Vectors) -> Vectors:
        nonlocal sweeps
        sweeps += 1
        return product(vectors)

    tops = find_top_eigenvalues(
        counted, starts or draw_start_vectors(context, list(find_geometries(looked_at.network)))
    )
    return Search(tops, sweeps, time.perf_counter() - started)


def by_arpack(task: Problem, name: str) -> tuple[float, int]:
    """Return the largest eigenvalue of one block of the Hessian by double backward passes, and their number."""
    weight = task.model.get_parameter(name)
    loss = F.cross_entropy(task.model(task.inputs), task.targets)
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    products = 0

    def product(vector: np.ndarray) -> np.ndarray:
        nonlocal products
        products += 1
        direction = torch.from_numpy(vector).reshape(weight.shape)
        (found,) = torch.autograd.grad(gradient, weight, direction, retain_graph=True)
        return found.reshape(-1).numpy()

    size = weight.numel()
    start = np.random.default_rng(0).standard_normal(size)
    block = LinearOperator((size, size), matvec=product, dtype=np.float64)
    values = eigsh(block, k=1, which="LA", tol=1e-9, v0=start, return_eigenvectors=False)
    return float(values[0]), products


def network(quick: bool) -> tuple[str, nn.Module]:
    torch.manual_seed(0)
    return ("LeNet-5", networks.lenet()) if quick else ("ResNet-20", networks.resnet20())


def run(options: Options) -> Outcome:
    title, model = network(options.quick)
    source = images("cifar10", 4 if options.quick else 32, "standard")
    task = Problem(model.eval().double(), source.inputs.double(), source.labels)
    search(task.first(2))  # warms up
    options.tell("spectrum: all layers at once")
    together = search(task)
    options.tell("spectrum: again from the eigenvectors")
    again = search(task, starts={name: top.vector for name, top in together.tops.items()})

    names = list(together.tops)
    steps = {name: top.steps for name, top in together.tops.items()}
    slowest = max(names, key=lambda name: steps[name])
    alone: dict[str, Search] = {}
    for name in dict.fromkeys((slowest, names[0], names[len(names) // 2])):
        options.tell(f"spectrum: {name} alone")
        alone[name] = search(task, [name])
    # A layer's Lanczos process does not see the others: where it was not run alone, its steps among them are counted.
    sweeps = {name: alone[name].sweeps if name in alone else steps[name] for name in names}
    per_sweep = sum(each.seconds for each in alone.values()) / sum(each.sweeps for each in alone.values())
    one_by_one = per_sweep * sum(sweeps.values())

    rows: list[dict[str, Any]] = []
    table = Table(
        *("layer", "largest eigenvalue", "ARPACK differs by", "error bound", "sweeps", "alone", "ARPACK's products"),
        title=f"{title}, float64, {source.source}: largest eigenvalues of {len(names)} layers",
    )
    for number, name in enumerate(names):
        options.tell(f"spectrum: ARPACK, layer {number + 1} of {len(names)}")
        value, products = by_arpack(task, name)
        top = together.tops[name]
        off = abs(top.value / value - 1)
        single = alone[name].sweeps if name in alone else None
        rows.append(
            {"layer": name, "value": top.value, "arpack": value, "difference": off, "bound": top.bound}
            | {"steps": top.steps, "sweeps_alone": single, "arpack_products": products}
        )
        table.add_row(
            *(name, f"{top.value:.9g}", f"{off:.1e}", f"{top.bound:.1e}", str(top.steps)),
            *("not run" if single is None else str(single), str(products)),
        )
    most, mean = max(sweeps.values()), sum(sweeps.values()) / len(sweeps)
    target = Target(
        "all layers in 1.5 times the sweeps of the slowest layer alone",
        f"{together.sweeps} / {most} = {together.sweeps / most:.2f}",
        together.sweeps <= 1.5 * most,
    )
    worst = max(row["difference"] for row in rows)
    notes = (
        f"All at once: {together.sweeps} sweeps, {together.sweeps / mean:.2f} times the mean layer's {mean:.1f}.",
        f"Time: {together.seconds:.2f} s all at once; {one_by_one:.2f} s one after the other, EXTRAPOLATED from "
        f"{len(alone)} layers run alone ({per_sweep:.3f} s a sweep) to {sum(sweeps.values())} sweeps.",
        f"Started from the eigenvectors: {again.sweeps} sweeps, {again.seconds:.2f} s.",
        f"Largest relative difference from ARPACK on blocks of the true Hessian: {worst:.1e}.",
    )
    record = {
        "network": title,
        "images": source.source,
        "sweeps": together.sweeps,
        "seconds": together.seconds,
        "sweeps_slowest": most,
        "sweeps_mean": mean,
        "seconds_one_by_one_extrapolated": one_by_one,
        "seconds_alone": {name: each.seconds for name, each in alone.items()},
        "sweeps_warm": again.sweeps,
        "seconds_warm": again.seconds,
        "rows": rows,
    }
    return Outcome(table, (target,), record, notes)
