"""The largest eigenvalue of every parameter's block of the curvature, by one Lanczos process for all of them.

One sweep multiplies each block with a vector of its own, so the processes of all parameters advance together: many
layers cost as many sweeps as the slowest alone. Each keeps an orthonormal basis and the block's projection on it; when
the basis is full it is thrown together into its best vectors (a thick restart).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from saltflat.forms import Form
from saltflat.noise import normals
from saltflat.setting import Setting
from saltflat.statistic import Site, Statistic
from saltflat.totals import Totals

Vectors = Mapping[str, Tensor]
# Multiplies the block of every given parameter with its vector.
Product = Callable[[Vectors], Vectors]

BASIS = 24  # vectors at most
LEAST = 6  # whatever the memory: fewer hardly get anywhere
# Products in single precision are not quite those of a symmetric matrix: below this the bound stops falling.
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-9}
PATIENCE = 60  # steps in which the bound has to halve


@dataclass(frozen=True)
class Top:
    """The largest (algebraic) eigenvalue of one block.

    Attributes:
        value: the eigenvalue.
        vector: of unit length, in the parameter's shape.
        residual: |G v - value v|, relative to the largest eigenvalue seen (in absolute value). The block has an
            eigenvalue within that distance of ``value``.
        bound: how far the largest eigenvalue may lie above ``value``, relative: the residual, or its square over the
            distance to the next eigenvalue seen, whichever is smaller.
        steps: how many products it took.
        converged: whether the bound is within the tolerance.
    """

    value: float
    vector: Tensor
    residual: float
    bound: float
    steps: int
    converged: bool


class _Lanczos:
    """One block's basis ``V``, its projection ``V' G V`` and the vector to multiply next."""

    def __init__(self, start: Tensor, tolerance: float, basis: int) -> None:
        self.shape, self.tolerance = start.shape, tolerance
        flat = start.reshape(-1).double()
        self.next = flat / flat.norm()
        self.basis = flat.new_empty(min(basis, len(flat)), len(flat))
        self.small = flat.new_zeros(len(self.basis), len(self.basis))
        self.size = self.steps = 0
        self.best, self.since = torch.inf, 0
        self.value = self.residual = self.bound = torch.inf
        self.vector = self.next
        self.done = False

    def take(self, product: Tensor) -> None:
        """Go on with G times ``next``."""
        product = product.reshape(-1).double()
        self.basis[self.size] = self.next
        self.size += 1
        self.steps += 1
        known = self.basis[: self.size]
        inside = known @ product
        self.small[self.size - 1, : self.size] = self.small[: self.size, self.size - 1] = inside
        # Twice is enough (Kahan and Parlett): the second time removes what rounding left.
        rest = product - inside @ known
        rest = rest - (known @ rest) @ known
        length = float(rest.norm())
        values, vectors = torch.linalg.eigh(self.small[: self.size, : self.size])
        self.value = float(values[-1])
        top = vectors[:, -1]
        # G V = V T + rest e', so the residual of V y is |rest| times y's last entry.
        absolute = length * abs(float(top[-1]))
        scale = float(values.abs().max())
        self.residual = absolute / scale if scale else 0.0
        gap = float(values[-1] - values[-2]) / scale if self.size > 1 and scale else 0.0
        self.bound = min(self.residual, self.residual**2 / gap) if gap else self.residual
        self.vector = top @ known
        if self.bound < self.best / 2:
            self.best, self.since = self.bound, self.steps
        stuck = self.steps - self.since >= PATIENCE
        if stuck or self.bound <= self.tolerance or length <= 1e-14 * scale or self.size == known.shape[1]:
            self.done = True
            return
        self.next = rest / length
        if self.size == len(self.basis):
            self._restart(values, vectors)

    def _restart(self, values: Tensor, vectors: Tensor) -> None:
        kept = max(1, self.size // 3)
        self.basis[:kept] = vectors[:, -kept:].mT @ self.basis[: self.size]
        self.small.zero_()
        self.small[:kept, :kept] = torch.diag(values[-kept:])
        self.size = kept

    def result(self) -> Top:
        vector, converged = self.vector.reshape(self.shape), self.bound <= self.tolerance
        return Top(self.value, vector, self.residual, self.bound, self.steps, converged)


def top_eigenvalues(
    product: Product,
    starts: Vectors,
    tolerance: float = 1e-9,
    steps: int = 500,
    tick: Callable[[int, int], None] = lambda done, total: None,
    basis: int = BASIS,
) -> dict[str, Top]:
    """The largest eigenvalue of every block, from starting vectors; an earlier result's vectors make it quick.

    Args:
        product: multiplies the blocks of the parameters it is given with their vectors.
        starts: a vector for each block.
        tolerance: of the relative bound on the eigenvalue's error.
        steps: how many products at most.
        tick: called with the number of blocks done and of all blocks.
        basis: how many vectors each block may keep.

    Example:
        >>> matrix = torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64))
        >>> found = top_eigenvalues(lambda v: {"a": matrix @ v["a"]}, {"a": torch.ones(5)})["a"]
        >>> round(found.value, 6), found.steps
        (5.0, 5)
    """
    runs = {name: _Lanczos(start, tolerance, basis) for name, start in starts.items()}
    for _ in range(steps):
        open_ = {name: run for name, run in runs.items() if not run.done}
        tick(len(runs) - len(open_), len(runs))
        if not open_:
            break
        products = product({name: run.next.reshape(run.shape) for name, run in open_.items()})
        for name, run in open_.items():
            run.take(products[name])
    return {name: run.result() for name, run in runs.items()}


def block_products(setting: Setting) -> Product:
    """Multiplication with the Gauss-Newton block of each parameter, one sweep for all."""

    def product(vectors: Vectors) -> Vectors:
        def total(form: Form, site: Site) -> Tensor:
            return form.expand(form.project(vectors[site.name].to(site.value)))

        statistic = Statistic("product", of="curvature", total=total, spread=None, meaning="G v")
        return Totals(setting, [statistic], only=vectors.keys()).sweep().values()["product"]

    return product


def curvature_along(setting: Setting, vectors: Vectors) -> tuple[dict[str, Tensor], ...] | None:
    """v' G v of every parameter with one random draw of columns left out at a time; None if columns are exact."""

    def total(form: Form, site: Site) -> Tensor:
        return form.project(vectors[site.name].to(site.value)).double().square().sum()

    statistic = Statistic("along", of="curvature", total=total, spread=None, meaning="v' G v", kind="scalar")
    return Totals(setting, [statistic], replicate=True, only=vectors.keys()).sweep().replicates(statistic)


def start_vectors(setting: Setting, names: Collection[str]) -> dict[str, Tensor]:
    """A random vector for each parameter, the same for the same name and seed."""
    return {name: vector for name, vector in normals(setting, 0).items() if name in names}


def basis_within(setting: Setting, names: Collection[str]) -> int:
    """How many vectors of these parameters fit in memory, all blocks together."""
    numbers = sum(setting.problem.network.measured[name].numel() for name in names)
    return max(LEAST, min(BASIS, setting.limit // (8 * max(1, numbers))))


def rounding(setting: Setting) -> float:
    """How closely an eigenvalue can be told in the precision of the parameters."""
    return max(ROUNDING[value.dtype] for value in setting.problem.network.measured.values())
