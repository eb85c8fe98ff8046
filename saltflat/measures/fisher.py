"""Measures made of single examples' gradients (Jia and Su, 2020; Liang et al., 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saltflat.engine.noise import compute_mean_and_error
from saltflat.errors import OptionError
from saltflat.measures.registry import MeasureResult, measure
from saltflat.results.jackknife import compute_student_factor
from saltflat.validation import check_count


@measure(
    on="network",
    reference="jia2020information",
    formula="ln det of the inner products between the gradients of `subset` random examples, mean over `draws`",
    logarithmic=True,
)
def fisher_logdet(
    gradient_gram: Mapping[str, Any],
    *,
    subset: int = 100,
    draws: int = 100,
    convention: str = "logdet",
    floor: float | None = None,
) -> MeasureResult:
    r"""Log-determinant of the Gram matrix of per-example gradients: smaller is flatter.

    .. math::
        \hat\gamma = \frac1T \sum_t \ln\det J_{S_t} J_{S_t}^T

    over random subsets of a pool of examples whose inner products are found once, of gradients in float64 whatever the
    precision of the model: eigenvalues range over so many orders of magnitude that in float32 half of them may be
    rounding. Where the model does not run in float64, the value is nan. ``convention="half"`` sums logarithms
    of singular values instead of squared ones. Multiplying the loss by c adds 2 ln c for each example of a subset.
    Examples that are fitted perfectly, or that occur twice, make the determinant zero: eigenvalues below ``floor``
    times the largest are counted as that, and how many were is in the notes.

    Args:
        gradient_gram: ``gram``, the ``(pool, pool)`` inner products; ``eps``, their rounding; ``seed``.
        subset: examples in each subset.
        draws: how many subsets.
        convention: ``"logdet"`` or ``"half"``.
        floor: relative to the largest eigenvalue; what rounding can tell from zero if None.

    Example:
        >>> found = fisher_logdet({"gram": 4 * torch.eye(3), "eps": 1e-16, "seed": 0}, subset=3, draws=2)
        >>> round(found.value, 6)  # ln 4^3
        4.158883
    """
    if convention not in ("logdet", "half"):
        raise OptionError(
            f"Expected 'logdet' or 'half', but got convention={convention!r}. Try leaving it out for the first."
        )
    if floor is not None and (isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 < floor < 1):
        raise OptionError(
            f"Expected a number between 0 and 1, but got floor={floor!r}. Try leaving it out for rounding."
        )
    values, notes = _compute_subset_spectra(gradient_gram, subset, draws)
    size = values.shape[1]
    least = values[:, -1:] * (gradient_gram["eps"] * size if floor is None else floor)
    if bool((least <= 0).any()):
        return MeasureResult(
            -torch.inf, notes=("all gradients of a subset are zero: the determinant is zero",), exact=False
        )
    floored = int((values < least).sum())
    if floored:
        notes = (*notes, f"{floored} of {values.numel()} eigenvalues were at the floor: the value is an upper bound")
    each = torch.maximum(values, least).log().sum(1) / (2 if convention == "half" else 1)
    value, stderr = _compute_mean(each)
    # The error of a bound is not known: how far below it the value lies is not.
    sampling = None if floored else _compute_sampling_error(each, size, len(gradient_gram["gram"]))
    return MeasureResult(
        value,
        exact=False,
        stderr=None if floored else stderr,
        sampling_stderr=sampling,
        notes=notes,
        details={
            "floored_eigenvalues": floored,
            "subset": size,
            "draws": len(each),
            "pool": len(gradient_gram["gram"]),
            "eps": gradient_gram["eps"],
        },
    )


@measure(
    on="network",
    reference="jia2020information",
    formula="largest eigenvalue of the inner products between gradients of `subset` random examples, mean over `draws`",
)
def fisher_spectral_radius(gradient_gram: Mapping[str, Any], *, subset: int = 100, draws: int = 100) -> MeasureResult:
    r"""Largest eigenvalue of the Gram matrix of per-example gradients.

    .. math::
        \frac1T \sum_t \|J_{S_t}\|_2^2

    Example:
        >>> fisher_spectral_radius({"gram": 4 * torch.eye(3), "eps": 1e-16, "seed": 0}, subset=3, draws=2).value
        4.0
    """
    values, notes = _compute_subset_spectra(gradient_gram, subset, draws)
    value, stderr = _compute_mean(values[:, -1])
    sampling = _compute_sampling_error(values[:, -1], values.shape[1], len(gradient_gram["gram"]))
    return MeasureResult(value, exact=False, stderr=stderr, sampling_stderr=sampling, notes=notes)


@measure(
    on="network",
    reference="jia2020information",
    formula="ln det of the mean over examples of gradient times gradient'",
    logarithmic=True,
)
def fisher_determinant(fisher_matrix: Tensor, *, jitter: float = 0.0) -> MeasureResult:
    r"""Log-determinant of the observed Fisher matrix: :math:`\gamma = \ln |I(w)|`.

    It is minus infinity as soon as there are more parameters than examples, or any direction that no gradient sees: so
    it is for every network that can be rescaled. For tiny models only. ``jitter`` is added to the diagonal.

    Example:
        >>> round(float(fisher_determinant(torch.diag(torch.tensor([1.0, 2.0]))).value), 6)
        0.693147
    """
    if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter < float("inf"):
        raise OptionError(f"Expected at least 0, but got jitter={jitter!r}. Try leaving it out for none.")
    values = torch.linalg.eigvalsh(fisher_matrix.double())
    rounding = torch.finfo(torch.float64).eps * len(values) * values[-1].abs()
    flat = int((values <= rounding).sum())
    if flat and jitter:  # those of a sum of squares are not negative, whatever rounding makes of them
        values = torch.where(values <= rounding, 0.0, values)
    elif flat:
        note = f"{flat} of {len(values)} eigenvalues of the Fisher matrix are zero to rounding: so is its determinant"
        return MeasureResult(-torch.inf, notes=(note,), details={"zero_eigenvalues": flat})
    return MeasureResult((values + jitter).log().sum())


@measure(
    on="parameters",
    reference="jia2020information",
    formula="mean over examples of the squared length of the gradient",
)
def fisher_trace(gradient_norms: Tensor) -> Tensor:
    r"""Trace of the observed Fisher matrix: mean squared norm of per-example gradients.

    .. math::
        \mathrm{tr}\, I = \frac1N \sum_n \|\nabla \ell_n\|^2

    Example:
        >>> float(fisher_trace(torch.tensor([1.0, 3.0])))
        2.0
    """
    return gradient_norms.mean()


@measure(
    on="network",
    reference="jia2020information",
    formula="mean over examples of the fourth power of the gradient's length",
)
def fisher_frobenius(gradient_norms: Mapping[str, Tensor]) -> Tensor:
    r"""Mean squared Frobenius norm of per-example Fisher matrices: :math:`\frac1N \sum_n \|g_n\|^4`.

    Example:
        >>> float(fisher_frobenius({"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([0.0, 1.0])}))
        8.5
    """
    return sum(gradient_norms.values(), torch.zeros(())).square().mean()


@measure(
    on="network",
    invariant_to=("layer_scale", "unit_scale"),
    reference="liang2019fisher",
    formula="mean over examples of (parameters . gradient)^2",
)
def fisher_rao_norm(gradient_along_weights: Mapping[str, Tensor]) -> Tensor:
    r"""Mean squared rate at which per-example losses change when all parameters grow by one factor.

    .. math::
        \theta^T I \theta = \frac1N \sum_n \langle \theta, \nabla \ell_n \rangle^2

    Example:
        >>> float(fisher_rao_norm({"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([0.0, 1.0])}))
        8.5
    """
    return sum(gradient_along_weights.values(), torch.zeros(())).square().mean()


@measure(
    on="network",
    invariant_to=("layer_scale", "unit_scale"),
    reference="jia2020information",
    formula="mean over examples of the squared largest singular value of d probabilities / d input",
    smaller="more robust to its inputs",
)
def input_robustness(input_jacobian: float) -> float:
    r"""Largest sensitivity of the predicted probabilities to the input.

    .. math::
        \frac1N \sum_n \|J_x \mathrm{softmax} f(x_n)\|_2^2

    It sees the function alone, so no change of the weights that keeps the function can change it.

    Example:
        >>> input_robustness(0.5)
        0.5
    """
    return input_jacobian


def _compute_subset_spectra(gram: Mapping[str, Any], subset: int, draws: int) -> tuple[Tensor, tuple[str, ...]]:
    """Compute the eigenvalues of the Gram matrices of random subsets, ascending, as ``(draws, subset)``."""
    check_count(1, subset=subset, draws=draws)
    matrix: Tensor = gram["gram"]
    pool, notes = len(matrix), tuple[str, ...]()
    if pool < subset:
        notes = (f"there are only {pool} examples for subsets of {subset}: all of them were taken, once",)
        subset, draws = pool, 1
    elif pool == subset:
        draws = 1
    noise = torch.Generator().manual_seed(gram["seed"])
    spectra = []
    for _ in range(draws):
        chosen = torch.randperm(pool, generator=noise)[:subset]
        spectra.append(torch.linalg.eigvalsh(matrix[chosen][:, chosen].double()))
    return torch.stack(spectra), notes


def _compute_mean(values: Tensor) -> tuple[float, float | None]:
    return compute_mean_and_error(values.tolist()) if len(values) > 1 else (float(values[0]), None)


def _compute_sampling_error(values: Tensor, subset: int, pool: int) -> float | None:
    r"""Compute the standard error over examples of a mean over random subsets of a pool.

    To first order in the examples the mean over all subsets varies as that over the pool's ``pool / subset`` disjoint
    ones; the scatter of subsets of one pool is short of the full one by what they share.
    """
    if len(values) < 2 or subset >= pool:
        return None
    scatter = float(values.std()) * math.sqrt(subset / pool / (1 - subset / pool))
    return scatter * float(compute_student_factor(max(pool / subset - 1, 1)))
