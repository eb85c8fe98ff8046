"""Extreme eigenvalues of symmetric matrices known by their products: the Lanczos process.

There may be many matrices, called blocks: one per parameter of a network, or one for the whole network. One product
multiplies all of them, each with its own vectors, so the processes of all blocks advance together, and many layers need
no more products than the slowest alone. Every process keeps an orthonormal basis (full reorthogonalization, in float64)
and the block's projection on it; when the basis is full it is compressed to its best vectors (a thick restart).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Vectors = Mapping[str, Tensor]
# Multiplies the block of every given parameter with its vector.
Product = Callable[[Vectors], Vectors]
# Multiplies each block with several vectors, ``(vectors, entries)``.
StackedProduct = Callable[[Vectors], Vectors]

BASIS = 24  # largest number of vectors
LEAST = 6  # smallest number of vectors, whatever the memory: fewer hardly converge
# Products in single precision are not exactly those of a symmetric matrix: below this the bound stops falling.
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-9}
PATIENCE = 60  # steps in which the bound has to halve
INVARIANT = 1e-14  # times the largest eigenvalue: a smaller remainder is rounding, and the basis spans an eigenspace
SMALLEST = 100  # times the largest absolute value: the scale of errors of the smallest eigenvalues
COLUMNS = 1 << 16  # entries of a basis to rotate at once


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
        steps: number of products.
        converged: whether the bound is within the tolerance.
    """

    value: float
    vector: Tensor
    residual: float
    bound: float
    steps: int
    converged: bool


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
        """Add ``next`` to the basis, given its product with the block; return the product's part outside the basis."""
        product = product.reshape(-1).double()
        self.basis[self.size] = self.next
        self.size += 1
        self.steps += 1
        known = self.basis[: self.size]
        inside = known @ product
        self.small[self.size - 1, : self.size] = self.small[: self.size, self.size - 1] = inside
        return self._project_out(product - inside @ known)

    def orthonormalize(self, vector: Tensor) -> Tensor:
        """Return the unit vector along the part of a vector outside the basis."""
        rest: Tensor = self._project_out(self._project_out(vector / vector.norm()))
        return rest.div(rest.norm())

    def _project_out(self, vector: Tensor) -> Tensor:
        # Twice is enough (Kahan and Parlett): after ``extend`` this removes the rounding error.
        known = self.basis[: self.size]
        vector = vector - (known @ vector) @ known
        return vector if self.outside is None else vector - (self.outside @ vector) @ self.outside


class EigenvalueSearch(_KrylovSpace):
    """A search for the ``largest`` and ``smallest`` eigenvalues.

    The error of each is compared with ``tolerance`` times its absolute value, or times ``relative`` of the largest one
    seen if that is more; the error of the smallest ones, which lie close together near zero, with 100 times the
    largest. If the basis spans an eigenspace before all are found, the search continues from a vector that ``fresh``
    draws.
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
        """Continue with the product of the block and ``next``."""
        rest = self.extend(product)
        length = float(rest.norm())
        values, vectors = torch.linalg.eigh(self.small[: self.size, : self.size])
        self.scale = max(self.scale, float(values.abs().max()))
        ends = self._find_ends()
        self.values = values[ends]
        # A V = V T + rest e', so the residual of V y is |rest| times y's last entry.
        self.residuals = length * vectors[-1, ends].abs()
        self.gaps = _compute_gaps(values)[ends]
        self.bounds = compute_error_bounds(self.residuals, self.gaps, min(self.largest, len(ends)))
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
        """Return the scale of each wanted eigenvalue's error."""
        return compute_error_scales(self.values, self.relative, self.scale, min(self.largest, len(self.values)))

    def compute_vectors(self) -> Tensor:
        """Return the unit eigenvectors of the wanted eigenvalues, as rows."""
        if not self.size:
            return self.next[None]
        _, vectors = torch.linalg.eigh(self.small[: self.size, : self.size])
        return torch.matmul(vectors[:, self._find_ends()].mT, self.basis[: self.size])

    def make_top_eigenvalue(self) -> TopEigenvalue:
        """Return the largest eigenvalue, with errors relative to the largest absolute value."""
        scale = self.scale or 1.0
        value, residual, bound = (float(each[0]) for each in (self.values, self.residuals, self.bounds))
        vector, converged = self.compute_vectors()[0].reshape(self.shape), bound / scale <= self.tolerance
        return TopEigenvalue(value, vector, residual / scale, bound / scale, self.steps, converged)

    def _find_ends(self) -> list[int]:
        """Return the indices of the wanted eigenvalues among the ascending ones: the largest first, then the rest."""
        top = min(self.largest, self.size)
        return [self.size - 1 - n for n in range(top)] + list(range(min(self.smallest, self.size - top)))

    def _restart(self, values: Tensor, vectors: Tensor) -> None:
        spare = max(0, self.size - self.largest - self.smallest) // 3
        above = spare * self.largest // (self.largest + self.smallest)
        below = spare - above if self.smallest else 0
        low, high = self.smallest + below, self.size - self.largest - above
        kept = [*range(low), *range(max(low, high), self.size)]
        # Some of the entries at a time: a second basis would not fit in memory.
        for part in self.basis.split(COLUMNS, 1):
            part[: len(kept)] = vectors[:, kept].mT @ part[: self.size]
        self.small.zero_()
        self.small[: len(kept), : len(kept)] = torch.diag(values[kept])
        self.size = len(kept)


class _Quadrature(_KrylovSpace):
    """The Gauss quadrature of a start vector's spectral measure, built step by step."""

    def __init__(self, start: Tensor, steps: int, outside: Tensor, scale: float) -> None:
        super().__init__(start, steps, outside)
        self.scale = scale
        self.done = False

    def add_product(self, product: Tensor) -> None:
        """Continue with the product of the block and ``next``."""
        rest = self.extend(product)
        length = float(rest.norm())
        self.scale = max(self.scale, float(self.small[self.size - 1, self.size - 1].abs()))
        self.done = self.size == len(self.basis) or length <= INVARIANT * self.scale
        if not self.done:
            self.next = rest / length

    def compute_nodes_and_weights(self) -> tuple[Tensor, Tensor]:
        """Return nodes and weights; the weights sum to one."""
        nodes, vectors = torch.linalg.eigh(self.small[: self.size, : self.size])
        return nodes.cpu(), vectors[0].square().cpu()


def _compute_gaps(values: Tensor) -> Tensor:
    """Return the distance of each of the ascending values to its nearest neighbor."""
    apart = values.diff()
    end = values.new_full((1,), torch.inf)
    return torch.minimum(torch.cat([end, apart]), torch.cat([apart, end]))


def compute_error_scales(values: Tensor, relative: float, scale: float, largest: int) -> Tensor:
    """Return the scales of errors; the first of the values are the ``largest`` ones."""
    least = torch.full_like(values, SMALLEST * scale)
    least[:largest] = relative * scale
    return torch.maximum(values.abs(), least)


def compute_error_bounds(residuals: Tensor, gaps: Tensor, largest: int) -> Tensor:
    """Return bounds on the errors of Rayleigh quotients, which are quadratic in the residuals if the gaps are large.

    The quadratic bound is used for the first, ``largest`` ones only: the smallest ones often have unseen neighbors.
    """
    quadratic = (residuals.square() / gaps).where((gaps > 0) & gaps.isfinite(), residuals)
    quadratic[largest:] = torch.inf
    return torch.minimum(residuals, quadratic)


def advance_searches(
    product: Product,
    runs: Mapping[str, EigenvalueSearch],
    steps: int,
    tick: Callable[[int, int], None] = lambda done, total: None,
    noise: float = 0.0,
) -> None:
    """Advance all searches until they are done. Blocks below ``noise`` times the largest curvature end early."""
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
    """Return the largest eigenvalue of every block.

    Args:
        product: multiplies the blocks of the given parameters with their vectors.
        starts: a vector for each block; the eigenvectors of an earlier result converge fast.
        tolerance: of the relative bound on the eigenvalue's error.
        steps: largest number of products.
        tick: called with the number of blocks done and the number of all blocks.
        basis: number of vectors each block may keep.

    Example:
        >>> matrix = torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64))
        >>> found = find_top_eigenvalues(lambda v: {"a": matrix @ v["a"]}, {"a": torch.ones(5)})["a"]
        >>> round(found.value, 6), found.steps
        (5.0, 5)
    """
    runs = {name: EigenvalueSearch(start, tolerance, basis) for name, start in starts.items()}
    advance_searches(product, runs, steps, tick)
    return {name: run.make_top_eigenvalue() for name, run in runs.items()}


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
    """Return the spectral measure of each block for each probe vector, as nodes and weights that sum to one.

    Args:
        product: multiplies each block with several vectors.
        draw: returns the probe vector of this number for each block.
        draws: number of probes.
        steps: largest number of nodes; there are fewer if a probe's Krylov space is smaller.
        outside: orthonormal eigenvectors of each block, as rows, which the measures exclude.
        scales: the largest eigenvalue of each block in absolute value.
        at_once: number of probes that are advanced together.
        tick: called with the number of products done and of all products.
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
