"""Eigenvalues and spectral densities of symmetric matrices that are only known by their products, by Lanczos.

There may be many matrices, called blocks: one per parameter of a network, or one for the whole network. One product
multiplies all of them, each with vectors of its own, so the processes of all blocks advance together: many layers cost
as many products as the slowest alone. Every process keeps an orthonormal basis (full reorthogonalization, in float64)
and the block's projection on it; when the basis is full it is compressed to its best vectors (a thick restart).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, sqrt

import torch
from torch import Tensor

from saltflat.forms import FactoredGradient
from saltflat.noise import draw_normals
from saltflat.setting import Setting
from saltflat.statistic import ParameterSite, Statistic
from saltflat.totals import SweepTotals

Vectors = Mapping[str, Tensor]
# Multiplies the block of every given parameter with its vector.
Product = Callable[[Vectors], Vectors]
# The same for several vectors of each block, ``(vectors, entries)``.
StackedProduct = Callable[[Vectors], Vectors]

BASIS = 24  # vectors at most
LEAST = 6  # whatever the memory: fewer hardly get anywhere
# Products in single precision are not quite those of a symmetric matrix: below this the bound stops falling.
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-9}
PATIENCE = 60  # steps in which the bound has to halve
INVARIANT = 1e-14  # of the largest eigenvalue: a remainder this small is rounding, and the basis spans an eigenspace
SMALLEST = 100  # times the largest size: what errors of the smallest eigenvalues are compared with
COLUMNS = 1 << 16  # of a basis, to rotate at once
MISSED = 1e-6  # largest probability of having missed an eigenvalue


@dataclass(frozen=True)
class TopEigenvalue:
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


@dataclass(frozen=True)
class ExtremeEigenvalues:
    """The eigenvalues at both ends of one block's spectrum.

    Attributes:
        values: the largest ones, in descending order, then the smallest ones, in ascending order.
        vectors: ``(len(values), entries)``, orthonormal.
        residuals: |A v - value v| of each, from a product with the vector itself.
        bounds: how far each eigenvalue may be from its value: the residual, or its square over the distance to the
            nearest other eigenvalue seen, whichever is smaller.
        converged: for each, whether the bound is within the tolerance.
        largest: how many of them are the largest ones.
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


class _KrylovSpace:
    """A basis ``V``, the block's projection ``V' A V`` and the vector to multiply next.

    Everything is kept orthogonal to the rows of ``outside``.
    """

    def __init__(self, start: Tensor, basis: int, outside: Tensor | None = None) -> None:
        flat = start.reshape(-1).double()
        self.outside = outside
        self.room = len(flat) - (0 if outside is None else len(outside))
        self.basis = flat.new_empty(min(basis, self.room), len(flat))
        self.small = flat.new_zeros(len(self.basis), len(self.basis))
        self.size = self.steps = 0
        self.next = self.orthonormalize(flat)

    def extend(self, product: Tensor) -> Tensor:
        """Go on with the product of ``next``; what of it lies outside the basis is returned."""
        product = product.reshape(-1).double()
        self.basis[self.size] = self.next
        self.size += 1
        self.steps += 1
        known = self.basis[: self.size]
        inside = known @ product
        self.small[self.size - 1, : self.size] = self.small[: self.size, self.size - 1] = inside
        return self._project_out(product - inside @ known)

    def orthonormalize(self, vector: Tensor) -> Tensor:
        """The direction in which a vector leaves the basis."""
        rest: Tensor = self._project_out(self._project_out(vector / vector.norm()))
        return rest.div(rest.norm())

    def _project_out(self, vector: Tensor) -> Tensor:
        # Twice is enough (Kahan and Parlett): after ``extend`` this removes what rounding left.
        known = self.basis[: self.size]
        vector = vector - (known @ vector) @ known
        return vector if self.outside is None else vector - (self.outside @ vector) @ self.outside


class _EigenvalueSearch(_KrylovSpace):
    """A search for the ``largest`` and ``smallest`` eigenvalues at both ends.

    The error of each is compared with ``tolerance`` times its size, or times ``relative`` of the largest size seen
    where that is more; of the smallest ones, which lie close together near zero, with 100 times the largest size. If
    the basis spans an eigenspace before all are found, the search goes on from a vector that ``fresh`` draws.
    """

    def __init__(
        self,
        start: Tensor,
        tolerance: float,
        basis: int,
        largest: int = 1,
        smallest: int = 0,
        relative: float = 1.0,
        outside: Tensor | None = None,
        fresh: Callable[[], Tensor] | None = None,
    ) -> None:
        super().__init__(start, basis, outside)
        self.shape, self.tolerance, self.relative, self.fresh = start.shape, tolerance, relative, fresh
        self.largest = min(largest, self.room)
        self.smallest = min(smallest, self.room - self.largest)
        self.best, self.since = torch.inf, 0
        self.scale = 0.0
        self.values = self.residuals = self.bounds = self.gaps = self.small.new_full((1,), torch.inf)
        self.done = False

    def add_product(self, product: Tensor) -> None:
        """Go on with the block times ``next``."""
        rest = self.extend(product)
        length = float(rest.norm())
        values, vectors = torch.linalg.eigh(self.small[: self.size, : self.size])
        self.scale = max(self.scale, float(values.abs().max()))
        ends = self._find_ends()
        self.values = values[ends]
        # A V = V T + rest e', so the residual of V y is |rest| times y's last entry.
        self.residuals = length * vectors[-1, ends].abs()
        self.gaps = _compute_gaps(values)[ends]
        self.bounds = _compute_error_bounds(self.residuals, self.gaps, min(self.largest, len(ends)))
        error = float((self.bounds / self.compute_error_scales()).max()) if self.scale else 0.0
        if error < self.best / 2:
            self.best, self.since = error, self.steps
        stuck = self.steps - self.since >= PATIENCE
        invariant = length <= INVARIANT * self.scale
        complete = len(ends) == self.largest + self.smallest
        finished = complete and (stuck or error <= self.tolerance or invariant)
        if self.size == self.room or finished or (invariant and self.fresh is None):
            self.done = True
            return
        if self.size == len(self.basis):
            self._restart(values, vectors)
        if invariant and self.fresh is not None:
            self.next = self.orthonormalize(self.fresh())
        else:
            self.next = rest / length

    def compute_error_scales(self) -> Tensor:
        """What the error of each wanted eigenvalue is compared with."""
        return _compute_error_scales(self.values, self.relative, self.scale, min(self.largest, len(self.values)))

    def compute_vectors(self) -> Tensor:
        """The unit vectors of the wanted eigenvalues, as rows."""
        if not self.size:
            return self.next[None]
        _, vectors = torch.linalg.eigh(self.small[: self.size, : self.size])
        return torch.matmul(vectors[:, self._find_ends()].mT, self.basis[: self.size])

    def make_top_eigenvalue(self) -> TopEigenvalue:
        """The largest eigenvalue; errors are relative to the largest size."""
        scale = self.scale or 1.0
        value, residual, bound = (float(each[0]) for each in (self.values, self.residuals, self.bounds))
        vector, converged = self.compute_vectors()[0].reshape(self.shape), bound / scale <= self.tolerance
        return TopEigenvalue(value, vector, residual / scale, bound / scale, self.steps, converged)

    def _find_ends(self) -> list[int]:
        """Places of the wanted ones among all, which ascend: the largest first, then the smallest."""
        top = min(self.largest, self.size)
        return [self.size - 1 - n for n in range(top)] + list(range(min(self.smallest, self.size - top)))

    def _restart(self, values: Tensor, vectors: Tensor) -> None:
        spare = max(0, self.size - self.largest - self.smallest) // 3
        above = spare * self.largest // (self.largest + self.smallest)
        below = spare - above if self.smallest else 0
        low, high = self.smallest + below, self.size - self.largest - above
        kept = [*range(low), *range(max(low, high), self.size)]
        # A part of the entries at a time: a second basis would not fit in memory.
        for part in self.basis.split(COLUMNS, 1):
            part[: len(kept)] = vectors[:, kept].mT @ part[: self.size]
        self.small.zero_()
        self.small[: len(kept), : len(kept)] = torch.diag(values[kept])
        self.size = len(kept)


class _MissedEigenvalueSearch(_EigenvalueSearch):
    """A search for eigenvalues beyond ``high`` and below ``low``, orthogonal to the vectors that were found.

    It ends as soon as there are hardly any: with a random start, the largest Ritz value after m steps is short of the
    largest eigenvalue by more than a fraction e of the spectrum's width with a probability of at most
    1.648 sqrt(n) exp(-sqrt(e) (2 m - 1)) (Kuczynski and Wozniakowski, 1992). It also ends after ``patience`` steps, as
    many as the first search took to tell the outermost eigenvalues from the next ones.
    """

    def __init__(
        self, found: _EigenvalueSearch, start: Tensor, outside: Tensor, low: float, high: float, basis: int
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
        """Whether an eigenvalue beyond those found would have been seen by now."""
        if self.steps > self.size or len(self.values) < 1 + self.smallest:  # restarted, or hardly begun
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


class _Quadrature(_KrylovSpace):
    """The Gauss quadrature of a start vector's spectral measure, built up step by step."""

    def __init__(self, start: Tensor, steps: int, outside: Tensor, scale: float) -> None:
        super().__init__(start, steps, outside)
        self.scale = scale
        self.done = False

    def add_product(self, product: Tensor) -> None:
        rest = self.extend(product)
        length = float(rest.norm())
        self.scale = max(self.scale, float(self.small[self.size - 1, self.size - 1].abs()))
        self.done = self.size == len(self.basis) or length <= INVARIANT * self.scale
        if not self.done:
            self.next = rest / length

    def compute_nodes_and_weights(self) -> tuple[Tensor, Tensor]:
        """Nodes and weights; the weights sum to one."""
        nodes, vectors = torch.linalg.eigh(self.small[: self.size, : self.size])
        return nodes.cpu(), vectors[0].square().cpu()


def _compute_gaps(values: Tensor) -> Tensor:
    """The distance of each to its nearest neighbor; the values ascend."""
    apart = values.diff()
    end = values.new_full((1,), torch.inf)
    return torch.minimum(torch.cat([end, apart]), torch.cat([apart, end]))


def _compute_error_scales(values: Tensor, relative: float, scale: float, largest: int) -> Tensor:
    """What errors are compared with; the first of the values are the ``largest`` ones."""
    least = torch.full_like(values, SMALLEST * scale)
    least[:largest] = relative * scale
    return torch.maximum(values.abs(), least)


def _compute_error_bounds(residuals: Tensor, gaps: Tensor, largest: int) -> Tensor:
    """How far eigenvalues can be from Rayleigh quotients, which are quadratically close where the next one is far.

    That is used for the first, ``largest`` ones only. The smallest ones often have neighbors that are not seen.
    """
    quadratic = (residuals.square() / gaps).where((gaps > 0) & gaps.isfinite(), residuals)
    quadratic[largest:] = torch.inf
    return torch.minimum(residuals, quadratic)


def _advance_searches(
    product: Product,
    runs: Mapping[str, _EigenvalueSearch],
    steps: int,
    tick: Callable[[int, int], None] = lambda done, total: None,
    noise: float = 0.0,
) -> None:
    """Carry all searches on until they are done; a block that has hardly any of the largest curvature is noise."""
    for _ in range(steps):
        open_ = {name: run for name, run in runs.items() if not run.done}
        tick(len(runs) - len(open_), len(runs))
        if not open_:
            break
        products = product({name: run.next.reshape(run.shape) for name, run in open_.items()})
        for name, run in open_.items():
            run.add_product(products[name])
        most = max(run.scale for run in runs.values())
        for run in open_.values():
            run.done |= run.scale < noise * most and run.size >= run.largest + run.smallest


def find_top_eigenvalues(
    product: Product,
    starts: Vectors,
    tolerance: float = 1e-9,
    steps: int = 500,
    tick: Callable[[int, int], None] = lambda done, total: None,
    basis: int = BASIS,
) -> dict[str, TopEigenvalue]:
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
        >>> found = find_top_eigenvalues(lambda v: {"a": matrix @ v["a"]}, {"a": torch.ones(5)})["a"]
        >>> round(found.value, 6), found.steps
        (5.0, 5)
    """
    runs = {name: _EigenvalueSearch(start, tolerance, basis) for name, start in starts.items()}
    _advance_searches(product, runs, steps, tick)
    return {name: run.make_top_eigenvalue() for name, run in runs.items()}


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
    """The ``largest`` and ``smallest`` eigenvalues of every block; a block of fewer entries has them all.

    A Lanczos process sees one vector of the eigenspace of a repeated eigenvalue. So the search is repeated from a new
    random vector, orthogonal to all that were found, until it finds nothing beyond them.

    Args:
        product: multiplies each block with several vectors.
        draw: a random vector for each block; the same for the same number.
        largest: how many at the upper end, at least one.
        smallest: how many at the lower end.
        tolerance: of the errors, relative to the eigenvalue, or to ``relative`` times the largest in size.
        relative: see ``tolerance``.
        rounding: the relative error of the products.
        steps: how many products at most in each search.
        basis: how many vectors each search may keep, at least ``largest + smallest + 2``.
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
        name: _EigenvalueSearch(start, tolerance, basis, largest, smallest, relative, fresh=make_drawer(name))
        for name, start in draw(0).items()
    }
    _advance_searches(multiply_single, runs, steps, noise=rounding)
    found = {name: _EigenPairs(run) for name, run in runs.items()}
    unsure = [name for name, pairs in found.items() if len(pairs.values) < pairs.vectors.shape[1]]
    for _ in range(largest + smallest + 1):
        if not unsure:
            break
        starts = draw_next()
        checks = {name: found[name].make_missed_search(runs[name], starts[name], basis) for name in unsure}
        _advance_searches(multiply_single, checks, steps, noise=rounding)
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
    """Eigenvalues and vectors of one block that were found so far: the largest ones first, then the smallest."""

    def __init__(self, run: _EigenvalueSearch) -> None:
        self.tolerance, self.relative = run.tolerance, run.relative
        self.largest, self.smallest, self.scale = run.largest, run.smallest, run.scale
        self.values, self.vectors, self.gaps = run.values, run.compute_vectors(), run.gaps
        run.basis = run.basis.new_empty(0)  # makes room for that of the next search

    def make_missed_search(self, run: _EigenvalueSearch, start: Tensor, basis: int) -> _MissedEigenvalueSearch:
        """A search for what was missed."""
        high = float(self.values[: self.largest].min())
        low = float(self.values[self.largest :].max()) if len(self.values) > self.largest else -torch.inf
        return _MissedEigenvalueSearch(run, start, torch.linalg.qr(self.vectors.mT).Q.mT, low, high, basis)

    def add_missed(self, check: _MissedEigenvalueSearch) -> bool:
        """Put what was missed in its place, and say whether there was anything."""
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
        """With errors from the products of the vectors themselves, which are no better than ``rounding``.

        An error within ``noise`` is none, in a block that is zero.
        """
        values = (products * self.vectors).sum(1)
        ends = [values[: self.largest].argsort(descending=True), self.largest + values[self.largest :].argsort()]
        order = torch.cat(ends)
        values, vectors, products, gaps = values[order], self.vectors[order], products[order], self.gaps[order]
        residuals = (products - values[:, None] * vectors).norm(dim=1)
        references = _compute_error_scales(values, self.relative, self.scale, self.largest)
        # Copies of an eigenvalue are not its neighbors: the bound holds for an eigenvalue of any multiplicity.
        apart = (values[:, None] - values).abs()
        apart = apart.where(apart > self.tolerance * references, torch.inf)
        bounds = _compute_error_bounds(residuals, torch.minimum(gaps, apart.min(1).values), self.largest).clamp_min(
            rounding
        )
        converged = bounds <= (10 * self.tolerance * references).clamp_min(noise)
        return ExtremeEigenvalues(values, vectors, residuals, bounds, converged, self.largest, complete, self.scale)


def compute_quadratures(
    product: StackedProduct,
    draw: Callable[[int], Vectors],
    draws: int,
    steps: int,
    outside: Vectors,
    scales: Mapping[str, float],
    at_once: int,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """The spectral measure of each block that each probe sees, as nodes and weights that sum to one.

    Args:
        product: multiplies each block with several vectors.
        draw: a random vector for each block, the probe of this number.
        draws: how many probes.
        steps: nodes at most; fewer where a probe's Krylov space is smaller.
        outside: orthonormal eigenvectors of each block, as rows, which the measures leave out.
        scales: the largest eigenvalue of each block in absolute value.
        at_once: how many probes are carried on together.
        tick: called with the products done and their number.
    """
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in outside}
    total = steps * -(-draws // at_once)
    for first in range(0, draws, at_once):
        probes = [draw(number) for number in range(first, min(first + at_once, draws))]
        runs = {
            name: [_Quadrature(probe[name], steps, each, scales[name]) for probe in probes]
            for name, each in outside.items()
        }
        for step in range(steps):
            open_ = {name: [run for run in each if not run.done] for name, each in runs.items()}
            open_ = {name: each for name, each in open_.items() if each}
            if not open_:
                break
            products = product({name: torch.stack([run.next for run in each]) for name, each in open_.items()})
            for name, each in open_.items():
                for run, row in zip(each, products[name], strict=True):
                    run.add_product(row)
            tick(first // at_once * steps + step + 1, total)
        for name, each in runs.items():
            found[name] += [run.compute_nodes_and_weights() for run in each]
    tick(total, total)
    return found


def make_block_product(setting: Setting) -> Product:
    """Multiplication with the Gauss-Newton block of each parameter, one sweep for all."""
    stacked = make_stacked_block_product(setting)

    def multiply(vectors: Vectors) -> Vectors:
        return {name: each[0] for name, each in stacked({name: v[None] for name, v in vectors.items()}).items()}

    return multiply


def make_stacked_block_product(setting: Setting) -> StackedProduct:
    """The same for several vectors of each parameter, ``(vectors, *shape)``, still one sweep for all."""

    def multiply(vectors: Vectors) -> Vectors:
        def compute_total(form: FactoredGradient, site: ParameterSite) -> Tensor:
            return torch.stack([form.sum_weighted(form.project(each.to(site.value))) for each in vectors[site.name]])

        statistic = Statistic("product", of="curvature", total=compute_total, spread=None, meaning="G v")
        found = SweepTotals(setting, [statistic], only=vectors.keys()).sweep().compute_values()["product"]
        # A parameter without effect has zeros in its own shape.
        return {name: each.expand(vectors[name].shape) for name, each in found.items()}

    return multiply


def compute_curvature_replicates(setting: Setting, vectors: Vectors) -> tuple[dict[str, Tensor], ...] | None:
    """v' G v of every parameter with one random draw of columns left out at a time; None if columns are exact."""

    def compute_total(form: FactoredGradient, site: ParameterSite) -> Tensor:
        return form.project(vectors[site.name].to(site.value)).double().square().sum()

    statistic = Statistic("along", of="curvature", total=compute_total, spread=None, meaning="v' G v", kind="scalar")
    return SweepTotals(setting, [statistic], replicate=True, only=vectors.keys()).sweep().compute_replicates(statistic)


def draw_start_vectors(setting: Setting, names: Collection[str]) -> dict[str, Tensor]:
    """A random vector for each parameter, the same for the same name and seed."""
    return {name: vector for name, vector in draw_normals(setting, 0).items() if name in names}


@contextmanager
def reserve_basis(setting: Setting, names: Collection[str]) -> Iterator[int]:
    """How many vectors of these parameters fit in half of the memory, all blocks together; the rest is for passes."""
    size = 8 * max(1, sum(setting.problem.network.measured[name].numel() for name in names))
    basis = max(LEAST, min(BASIS, setting.limit // (2 * size)))
    with setting.reserve(basis * size):
        yield basis


def get_rounding_tolerance(setting: Setting) -> float:
    """How closely an eigenvalue can be told in the precision of the parameters."""
    return max(ROUNDING[value.dtype] for value in setting.problem.network.measured.values())
