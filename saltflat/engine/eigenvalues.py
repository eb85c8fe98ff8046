"""Extreme eigenvalues of the curvature: products with its blocks, and a search that verifies that none was missed.

The Lanczos processes are those of :mod:`saltflat.engine.lanczos`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, sqrt

import torch
from torch import Tensor

from saltflat.engine.context import Context
from saltflat.engine.lanczos import (
    BASIS,
    LEAST,
    ROUNDING,
    EigenvalueSearch,
    Product,
    StackedProduct,
    Vectors,
    advance_searches,
    compute_error_bounds,
    compute_error_scales,
)
from saltflat.engine.noise import draw_normals
from saltflat.engine.statistic import ParameterSite, Statistic
from saltflat.engine.sweep import Sweep
from saltflat.gradients.base import FactoredGradient

MISSED = 1e-6  # accepted probability of having missed an eigenvalue


@dataclass(frozen=True)
class ExtremeEigenvalues:
    """The eigenvalues at both ends of one block's spectrum.

    Attributes:
        values: the largest ones in descending order, then the smallest ones in ascending order.
        vectors: ``(len(values), entries)``, orthonormal.
        residuals: |A v - value v| of each, from a product with the vector itself.
        bounds: how far each eigenvalue may be from its value: the residual, or its square over the distance to the
            nearest other eigenvalue seen, whichever is smaller.
        converged: for each, whether the bound is within the tolerance.
        largest: the number of largest ones.
        complete: whether a second search, orthogonal to the vectors found, confirmed that none was missed.
        scale: the largest eigenvalue in absolute value.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    bounds: Tensor
    converged: Tensor
    largest: int
    complete: bool
    scale: float


class _MissedEigenvalueSearch(EigenvalueSearch):
    """A search for eigenvalues beyond ``high`` and below ``low``, orthogonal to the vectors that were found.

    It ends as soon as there are none with high probability: with a random start, the largest Ritz value after m steps
    is below the largest eigenvalue by more than a fraction e of the spectrum's width with a probability of at most
    1.648 sqrt(n) exp(-sqrt(e) (2 m - 1)) (Kuczynski and Wozniakowski, 1992). It also ends after ``patience`` steps, the
    number that the first search needed to separate the outermost eigenvalues from the next ones.
    """

    def __init__(
        self, found: EigenvalueSearch, start: Tensor, outside: Tensor, low: float, high: float, basis: int
    ) -> None:
        super().__init__(start, found.tolerance, basis, 1, min(1, found.smallest), found.relative, outside)
        self.scale, self.patience = found.scale, found.steps
        self.low, self.high = low, high

    def add_product(self, product: Tensor) -> None:
        super().add_product(product)
        slack = self.tolerance * self.compute_error_scales()
        self.new = (self.values > self.high + slack) | (self.values < self.low - slack)
        if not bool(self.new.any()):
            self.done = self.done or self.steps >= self.patience or self._is_miss_unlikely()

    def _is_miss_unlikely(self) -> bool:
        """Return whether an eigenvalue beyond those found would have been seen by now."""
        if self.steps > self.size or len(self.values) < 1 + self.smallest:  # restarted, or too early
            return False
        top, bottom = float(self.values[0]), float(self.values[-1]) if self.smallest else self._compute_lowest()
        return all(
            width > 0 and 1.648 * sqrt(self.room) * exp(-sqrt(max(0.0, gap / width)) * (2 * self.steps - 1)) <= MISSED
            for gap, width in (
                (self.high - top, self.high - bottom),
                *([(bottom - self.low, top - self.low)] if self.smallest else []),
            )
        )

    def _compute_lowest(self) -> float:
        return float(torch.linalg.eigvalsh(self.small[: self.size, : self.size])[0])


def find_extreme_eigenvalues(
    product: StackedProduct,
    draw: Callable[[int], Vectors],
    largest: int,
    smallest: int = 0,
    *,
    tolerance: float = 1e-8,
    relative: float = 1e-3,
    rounding: float = 1e-15,
    steps: int = 500,
    basis: int = BASIS,
    tick: Callable[[int], None] = lambda done: None,
) -> dict[str, ExtremeEigenvalues]:
    """Return the ``largest`` and ``smallest`` eigenvalues of every block, or all if the block has fewer.

    A Lanczos process sees only one vector of the eigenspace of a repeated eigenvalue. So the search is repeated from a
    new random vector, orthogonal to all that were found, until it finds nothing beyond them.

    Args:
        product: multiplies each block with several vectors.
        draw: returns a random vector for each block, the same for the same number.
        largest: number of eigenvalues at the upper end, at least one.
        smallest: number of eigenvalues at the lower end.
        tolerance: of the errors, relative to the eigenvalue, or to ``relative`` times the largest in absolute value.
        relative: see ``tolerance``.
        rounding: the relative error of the products.
        steps: largest number of products in each search.
        basis: number of vectors each search may keep, at least ``largest + smallest + 2``.
        tick: called with the number of products done.

    Example:
        >>> matrix = torch.diag(torch.tensor([3.0, 3.0, 1.0, 0.5, -2.0], dtype=torch.float64))
        >>> noise = torch.Generator().manual_seed(0)
        >>> found = find_extreme_eigenvalues(
        ...     lambda v: {"a": v["a"] @ matrix},
        ...     lambda number: {"a": torch.randn(5, dtype=torch.float64, generator=noise)},
        ...     largest=3,
        ...     smallest=1,
        ... )["a"]
        >>> found.values.round(decimals=6).tolist(), found.complete
        ([3.0, 3.0, 1.0, -2.0], True)
    """
    number = done = 0

    def multiply_single(vectors: Vectors) -> Vectors:
        nonlocal done
        done += 1
        tick(done)
        return product({name: each[None] for name, each in vectors.items()})

    def draw_next() -> Vectors:
        nonlocal number
        number += 1
        return draw(number)

    def make_drawer(name: str) -> Callable[[], Tensor]:
        return lambda: draw_next()[name]

    runs = {
        name: EigenvalueSearch(start, tolerance, basis, largest, smallest, relative, fresh=make_drawer(name))
        for name, start in draw(0).items()
    }
    advance_searches(multiply_single, runs, steps, noise=rounding)
    found = {name: _EigenPairs(run) for name, run in runs.items()}
    unsure = [name for name, pairs in found.items() if len(pairs.values) < pairs.vectors.shape[1]]
    for _ in range(largest + smallest + 1):
        if not unsure:
            break
        starts = draw_next()
        checks = {name: found[name].make_missed_search(runs[name], starts[name], basis) for name in unsure}
        advance_searches(multiply_single, checks, steps, noise=rounding)
        unsure = [name for name, check in checks.items() if found[name].add_missed(check)]
        del checks  # and their bases
    products = product({name: pairs.vectors for name, pairs in found.items()})
    tick(done + 1)
    noise = rounding * max(pairs.scale for pairs in found.values())
    return {
        name: pairs.compute_extremes(products[name], name not in unsure, rounding * pairs.scale, noise)
        for name, pairs in found.items()
    }


class _EigenPairs:
    """The eigenvalues and eigenvectors of one block found so far: the largest ones first, then the smallest."""

    def __init__(self, run: EigenvalueSearch) -> None:
        self.tolerance, self.relative = run.tolerance, run.relative
        self.largest, self.smallest, self.scale = run.largest, run.smallest, run.scale
        self.values, self.vectors, self.gaps = run.values, run.compute_vectors(), run.gaps
        run.basis = run.basis.new_empty(0)  # frees memory for the next search

    def make_missed_search(self, run: EigenvalueSearch, start: Tensor, basis: int) -> _MissedEigenvalueSearch:
        """Return a search for eigenvalues that were missed."""
        high = float(self.values[: self.largest].min())
        low = float(self.values[self.largest :].max()) if len(self.values) > self.largest else -torch.inf
        return _MissedEigenvalueSearch(run, start, torch.linalg.qr(self.vectors.mT).Q.mT, low, high, basis)

    def add_missed(self, check: _MissedEigenvalueSearch) -> bool:
        """Insert the eigenvalues that were missed; return whether there were any."""
        if not bool(check.new.any()):
            return False
        values = torch.cat([self.values, check.values[check.new]])
        vectors = torch.cat([self.vectors, check.compute_vectors()[check.new]])
        gaps = torch.cat([self.gaps, check.gaps[check.new]])
        order = values.argsort(descending=True)
        kept = torch.cat([order[: self.largest], order.flip(0)[: self.smallest]])
        self.values, self.vectors, self.gaps = values[kept], vectors[kept], gaps[kept]
        self.scale = max(self.scale, float(values.abs().max()))
        return True

    def compute_extremes(self, products: Tensor, complete: bool, rounding: float, noise: float) -> ExtremeEigenvalues:
        """Return the eigenvalues, with errors from products of the vectors themselves, but at least ``rounding``.

        Errors within ``noise`` are ignored, as in a block that is zero.
        """
        values = (products * self.vectors).sum(1)
        ends = [values[: self.largest].argsort(descending=True), self.largest + values[self.largest :].argsort()]
        order = torch.cat(ends)
        values, vectors, products, gaps = values[order], self.vectors[order], products[order], self.gaps[order]
        residuals = (products - values[:, None] * vectors).norm(dim=1)
        references = compute_error_scales(values, self.relative, self.scale, self.largest)
        # Copies of an eigenvalue are not its neighbors: the bound holds for an eigenvalue of any multiplicity.
        apart = (values[:, None] - values).abs()
        apart = apart.where(apart > self.tolerance * references, torch.inf)
        bounds = compute_error_bounds(residuals, torch.minimum(gaps, apart.min(1).values), self.largest).clamp_min(
            rounding
        )
        converged = bounds <= (10 * self.tolerance * references).clamp_min(noise)
        return ExtremeEigenvalues(values, vectors, residuals, bounds, converged, self.largest, complete, self.scale)


def make_block_product(context: Context) -> Product:
    """Return a function that multiplies the Gauss-Newton block of each parameter with a vector, in one sweep."""
    stacked = make_stacked_block_product(context)

    def multiply(vectors: Vectors) -> Vectors:
        return {name: each[0] for name, each in stacked({name: v[None] for name, v in vectors.items()}).items()}

    return multiply


def make_stacked_block_product(context: Context) -> StackedProduct:
    """Return the same for several vectors of each parameter, ``(vectors, *shape)``, also in one sweep."""

    def multiply(vectors: Vectors) -> Vectors:
        def compute_total(form: FactoredGradient, site: ParameterSite) -> Tensor:
            return torch.stack([form.sum_weighted(form.project(each.to(site.value))) for each in vectors[site.name]])

        statistic = Statistic("product", of="curvature", total=compute_total, spread=None, meaning="G v")
        found = Sweep(context, [statistic], only=vectors.keys()).run().compute_values()["product"]
        # A parameter without effect has zeros in its own shape.
        return {name: each.expand(vectors[name].shape) for name, each in found.items()}

    return multiply


def compute_curvature_replicates(context: Context, vectors: Vectors) -> tuple[dict[str, Tensor], ...] | None:
    """Return v' G v of every parameter with one random draw of columns left out at a time; None for exact columns."""

    def compute_total(form: FactoredGradient, site: ParameterSite) -> Tensor:
        return form.project(vectors[site.name].to(site.value)).double().square().sum()

    statistic = Statistic("along", of="curvature", total=compute_total, spread=None, meaning="v' G v", kind="scalar")
    return Sweep(context, [statistic], replicate=True, only=vectors.keys()).run().compute_replicates(statistic)


def draw_start_vectors(context: Context, names: Collection[str]) -> dict[str, Tensor]:
    """Return a random vector for each parameter, the same for the same name and seed."""
    return {name: vector for name, vector in draw_normals(context, 0).items() if name in names}


@contextmanager
def reserve_basis(context: Context, names: Collection[str]) -> Iterator[int]:
    """Reserve up to half of the memory for vectors of these parameters; yield how many fit."""
    size = 8 * max(1, sum(context.problem.network.measured[name].numel() for name in names))
    basis = max(LEAST, min(BASIS, context.limit // (2 * size)))
    with context.reserve(basis * size):
        yield basis


def get_rounding_tolerance(context: Context) -> float:
    """Return the relative accuracy of eigenvalues in the precision of the parameters."""
    return max(ROUNDING[value.dtype] for value in context.problem.network.measured.values())
