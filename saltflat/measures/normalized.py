"""Normalized sharpness (Tsuzuku et al., 2020): as the theory has it, as printed, and parameter by parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from saltflat.balance.matrix import balance_bipartite, balance_factored
from saltflat.balance.solver import BalanceResult
from saltflat.errors import OptionError
from saltflat.measures.registry import MeasureResult, measure

BOTH = ("layer_scale", "unit_scale")
SMALL = 1 << 22  # entries of matrices whose balancing a CPU finishes before a GPU has been told what to do


@measure(
    on="weights",
    invariant_to=BOTH,
    by_matrix=True,
    reference="tsuzuku2020normalized",
    formula="sum over columns of sqrt(curvature of the column * squared weights of it), smallest over row scales",
)
def normalized_sharpness(weight: Tensor, curvature_diagonal: Tensor) -> MeasureResult:
    r"""Curvature times squared weights, minimized over the scales of rows and columns.

    .. math::
        \min_\gamma \sum_j \sqrt{ (F^T e^{\gamma})_j \, (U^T e^{-\gamma})_j }, \quad U = W \circ W

    with F the curvature diagonal in the shape of W. Multiplying a row or a column of W by a multiplies its entries of U
    by :math:`a^2` and divides those of F by it, which another :math:`\gamma` undoes. This is what the PAC-Bayes
    argument supports; the published equation has one root over everything (``normalized_sharpness_printed``). Kernel
    positions of a convolution share the scales of their channels.

    Args:
        weight: ``(groups, out, in, positions)``, or ``(out, in)``.
        curvature_diagonal: of the same shape.

    Example:
        >>> round(float(normalized_sharpness(torch.ones(1, 4), torch.ones(1, 4)).value), 9)
        4.0
    """
    found = _prepare_matrices(weight, curvature_diagonal)
    if isinstance(found, MeasureResult):
        return found
    balanced = balance_bipartite(*found)
    return _make_balance_result(balanced, balanced.values.sum() / 2, balanced.slopes / 2)


@measure(
    on="weights",
    invariant_to=BOTH,
    by_matrix=True,
    reference="tsuzuku2020normalized",
    formula="sum over entries of curvature times row and column scales plus squared weight over them, smallest",
)
def normalized_sharpness_arxiv(weight: Tensor, curvature_diagonal: Tensor) -> MeasureResult:
    r"""Normalized sharpness before the columns' scales are eliminated, as in the paper's first version: twice as large.

    .. math::
        \min_{s, t > 0} \sum_{ij} F_{ij} s_i t_j + U_{ij} / (s_i t_j)

    Example:
        >>> round(float(normalized_sharpness_arxiv(torch.ones(1, 4), torch.ones(1, 4)).value), 9)
        8.0
    """
    found = _prepare_matrices(weight, curvature_diagonal)
    if isinstance(found, MeasureResult):
        return found
    balanced = balance_bipartite(*found)
    return _make_balance_result(balanced, balanced.values.sum(), balanced.slopes)


@measure(
    on="weights",
    invariant_to=BOTH,
    by_matrix=True,
    reference="tsuzuku2020normalized",
    formula="sqrt(sum over columns of curvature of the column * squared weights of it), smallest over row scales",
)
def normalized_sharpness_printed(weight: Tensor, curvature_diagonal: Tensor, *, side: str = "rows") -> MeasureResult:
    r"""Normalized sharpness as its published equation reads, with one root over the whole sum.

    .. math::
        \min_\gamma \sqrt{ e^{\gamma T} F U^T e^{-\gamma} }

    No bound follows from it: it can lie below what any choice of scales allows. ``side="columns"`` scales the columns
    instead, :math:`F^T U`; the two differ. Groups of a convolution are matrices of their own.

    Example:
        >>> round(float(normalized_sharpness_printed(torch.ones(1, 4), torch.ones(1, 4)).value), 9)
        2.0
    """
    if side not in ("rows", "columns"):
        raise OptionError(f"Expected 'rows' or 'columns', but got side={side!r}. Try leaving it out for rows.")
    found = _prepare_matrices(weight, curvature_diagonal)
    if isinstance(found, MeasureResult):
        return found
    F, U = found if side == "rows" else (each.mT for each in found)
    balanced = balance_factored(F, U)
    roots = balanced.values.sqrt()
    slopes = balanced.slopes / (2 * roots.where(roots > 0, 1.0)).reshape(-1, *[1] * (F.dim() - 1))
    return _make_balance_result(
        balanced, roots.sum(), slopes.reshape(F.shape) if side == "rows" else slopes.reshape(F.shape).mT
    )


@measure(
    on="parameters",
    invariant_to=BOTH,
    reference="tsuzuku2020normalized",
    formula="sum over parameters of |parameter| * sqrt(curvature)",
)
def parameterwise_normalized_sharpness(weight: Tensor, curvature_diagonal: Tensor) -> MeasureResult | Tensor:
    r"""Curvature times squared weights, with a scale for every parameter: a lower bound of normalized sharpness.

    .. math::
        \sum_i \sqrt{H_{ii}} \, |\theta_i|

    Example:
        >>> float(parameterwise_normalized_sharpness(torch.tensor([3.0, -1.0]), torch.tensor([4.0, 9.0])))
        9.0
    """
    bad = _refuse_negative(curvature_diagonal)
    return bad or (weight.double().abs() * curvature_diagonal.double().sqrt()).sum()


@measure(
    on="parameters",
    reference="tsuzuku2020normalized",
    formula="sum over parameters of the smallest curvature * e^2s + squared parameter * e^-2s + (s - b)^2 / strength, "
    "over s and over b in the grid",
    cost="search",
)
def regularized_normalized_sharpness(
    weight: Tensor,
    curvature_diagonal: Tensor,
    *,
    grid: tuple[float, ...] = (-2.0, -1.0, 0.0, 1.0, 2.0),
    strength: float = 1.0,
) -> MeasureResult:
    r"""Parameter-wise term of the bound before its limit, where scales may leave the grid at a cost.

    .. math::
        \sum_i \min_{\sigma, \beta \in B} H_{ii} e^{2\sigma} + \theta_i^2 e^{-2\sigma} + (\sigma - \beta)^2 / \lambda'

    For large :math:`\lambda'` it is twice ``parameterwise_normalized_sharpness``; a finite grid knows the scale of the
    weights, so rescaling changes it.

    Args:
        weight: any shape.
        curvature_diagonal: of the same shape.
        grid: the set B.
        strength: :math:`\lambda'`.

    Example:
        >>> found = regularized_normalized_sharpness(torch.tensor([2.0]), torch.tensor([4.0]), grid=(0.0,))
        >>> round(float(found.value), 9)  # both terms are 4 at s = 0
        8.0
    """
    if not isinstance(grid, tuple | list) or not grid or not all(isinstance(b, int | float) for b in grid):
        raise OptionError(f"Expected numbers, at least one, but got grid={grid!r}. Try grid=(-2, -1, 0, 1, 2).")
    if isinstance(strength, bool) or not isinstance(strength, int | float) or not 0 < strength < float("inf"):
        raise OptionError(f"Expected a positive number, but got strength={strength!r}. Try leaving it out for 1.")
    bad = _refuse_negative(curvature_diagonal)
    if bad:
        return bad
    H, squares = curvature_diagonal.double().reshape(-1), weight.double().square().reshape(-1)
    values, slopes = zip(*(_minimize_regularized(H, squares, float(b), float(strength)) for b in grid), strict=True)
    best, which = torch.stack(values).min(0)
    slope = torch.stack(slopes).gather(0, which[None])[0]
    return MeasureResult(best.sum(), slopes={"curvature_diagonal": slope.reshape(curvature_diagonal.shape)})


@measure(
    on="parameters",
    invariant_to=BOTH,
    reference="tsuzuku2020normalized",
    formula="sum over parameters of curvature * squared parameter",
)
def fisher_rao_diagonal(weight: Tensor, curvature_diagonal: Tensor) -> Tensor:
    r"""Curvature of the loss under independent relative changes of the parameters.

    .. math::
        \sum_i H_{ii} \theta_i^2

    Only the diagonal: ``fisher_rao_norm`` has the whole matrix.

    Example:
        >>> float(fisher_rao_diagonal(torch.tensor([3.0, -1.0]), torch.tensor([4.0, 9.0])))
        45.0
    """
    return (weight.double().square() * curvature_diagonal.double()).sum()


def _prepare_matrices(weight: Tensor, curvature_diagonal: Tensor) -> tuple[Tensor, Tensor] | MeasureResult:
    """Return F and U with kernel positions summed, or the reason why there is no number."""
    F, U = curvature_diagonal.double(), weight.double().square()
    if F.dim() == 4:
        F, U = F.sum(-1), U.sum(-1)
    if F.numel() < SMALL:
        F, U = F.cpu(), U.cpu()
    return _refuse_negative(F) or (F, U)


def _refuse_negative(F: Tensor) -> MeasureResult | None:
    if bool((F < 0).any()):
        count = int((F < 0).sum())
        note = f"{count} of {F.numel()} curvatures are negative: there is no minimum over scales"
        return MeasureResult(torch.nan, notes=(note,))
    return None


def _make_balance_result(found: BalanceResult, value: Tensor, slopes: Tensor) -> MeasureResult:
    return MeasureResult(
        value,
        residual=found.residual,
        converged=found.converged,
        # Kernel positions share their channels' scales.
        slopes={"curvature_diagonal": slopes.unsqueeze(-1) if slopes.dim() == 3 else slopes},
        notes=found.notes,
        details={"attained": found.attained, "sweeps": found.sweeps},
    )


def _minimize_regularized(H: Tensor, squares: Tensor, b: float, strength: float) -> tuple[Tensor, Tensor]:
    """Minimize H e^2s + q e^-2s + (s - b)^2 / strength over s for every entry; return the value and e^2s."""
    # Through logarithms, so that no curvature stays none however large s becomes.
    log_H, log_q = H.log(), squares.log()

    def compute_terms(s: Tensor) -> tuple[Tensor, Tensor]:
        return (log_H + 2 * s).exp(), (log_q - 2 * s).exp()

    # The minimum lies between b and the minimum of the first two terms, and no farther than their slope at b pushes.
    here = torch.full_like(H, b)
    grows, falls = compute_terms(here)
    free = 0.25 * (log_q - log_H)
    low = torch.maximum(b - strength * grows, torch.minimum(free.nan_to_num(b, b, -torch.inf), here))
    high = torch.minimum(b + strength * falls, torch.maximum(free.nan_to_num(b, torch.inf, b), here))
    s = here
    for _ in range(200):
        grows, falls = compute_terms(s)
        slope = grows - falls + (s - b) / strength
        low, high = torch.where(slope < 0, s, low), torch.where(slope > 0, s, high)
        newton = s - slope / (2 * grows + 2 * falls + 1 / strength)
        inside = (newton > low) & (newton < high)
        following = torch.where(inside, newton, (low + high) / 2)
        if bool(((following - s).abs() <= 1e-14 * (1 + s.abs())).all()):
            break
        s = following
    return sum(compute_terms(s), (s - b).square() / strength), (2 * s).exp()
