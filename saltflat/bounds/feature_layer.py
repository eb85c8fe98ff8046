r"""A layer as a matrix that acts on features, and the matrices that act on its features.

A Linear layer multiplies its input :math:`\phi` by w. A convolution does so with every patch of its input, so that its
features are the channels and kernel positions of a patch. For a matrix A that acts on features,

.. math::
    w (\phi + \delta A \phi) = (w + \delta w A) \phi,

so changes of the features are changes of the weights. Each group of a convolution has features of its own, and a block
of A.

With the singular value decomposition :math:`w = U S Q^T`, only :math:`B = Q^T A` has an effect: :math:`w A = U S B`.
Every B with norm at most 1 belongs to :math:`A = Q B` of the same norm, so a search over A is one over the smaller B,
and A is never built.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.errors import NonFiniteError, OptionError, ParameterError, make_unknown_name_error
from saltflat.layers import Convolution, find_layer_rule
from saltflat.validation import check_count

Norm: TypeAlias = Literal["operator", "frobenius"]
NORMS = ("operator", "frobenius")
ROUNDING = 1e-9  # by which the norm of a given matrix may exceed 1, and at most, in a type of few digits
MOST_ROUNDING = 1e-4


@dataclass(frozen=True)
class FeatureLayer:
    """The weight of a Linear layer or a convolution as matrices on features, in float64.

    Attributes:
        name: of the weight in the model.
        module: the layer.
        shape: of the weight.
        weight: ``(groups, rows, features)``.
        left: ``U S``, ``(groups, rows, rank)``.
        right: ``Q'``, with orthonormal rows, ``(groups, rank, features)``.
    """

    name: str
    module: nn.Module
    shape: torch.Size
    weight: Tensor
    left: Tensor
    right: Tensor

    @classmethod
    def build(cls, name: str, module: nn.Module, value: Tensor) -> FeatureLayer:
        """Decompose the weight of a layer."""
        matrices = view_as_features(value.double(), getattr(module, "groups", 1))
        U, S, Qt = torch.linalg.svd(matrices, full_matrices=False)
        rank = max(1, int((_compute_cutoff(S, matrices) < S).sum(1).max()))
        return cls(name, module, value.shape, matrices, U[:, :, :rank] * S[:, None, :rank], Qt[:, :rank])

    @property
    def groups(self) -> int:
        """The number of groups."""
        return self.weight.shape[0]

    @property
    def rows(self) -> int:
        """The number of outputs of a group."""
        return self.weight.shape[1]

    @property
    def features(self) -> int:
        """The number of features of a group."""
        return self.weight.shape[2]

    @property
    def rank(self) -> int:
        """The largest rank of a group's weight."""
        return self.right.shape[1]

    @property
    def squared_norm(self) -> float:
        """The squared Frobenius norm of the weight."""
        return float(self.weight.square().sum())

    def compute_change(self, B: Tensor) -> Tensor:
        """Return w A, of the weight's shape."""
        return (self.left @ B).reshape(self.shape)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return the gradient with respect to B, given that with respect to the weight."""
        return self.left.mT @ gradient.double().reshape(self.weight.shape)

    def restrict(self, A: Tensor) -> Tensor:
        """Return B of a matrix A."""
        return self.right @ A

    def draw_orthogonal(self, seed: int, number: int) -> Tensor:
        """Return B of a random orthogonal A of each group, uniform by Haar's measure.

        These are the first columns of the Q of a QR decomposition of normal numbers, with signs that make the diagonal
        of R positive; without them the distribution would depend on the algorithm. ``Q' A`` has the distribution of the
        first rows of A.
        """
        own = int.from_bytes(sha256(f"orthogonal/{number}/{self.name}".encode()).digest()[:8], "little")
        generator = np.random.Generator(np.random.Philox(key=[seed, own]))
        numbers = torch.as_tensor(generator.standard_normal((self.groups, self.features, self.rank)))
        Q, R = torch.linalg.qr(numbers)
        signed: Tensor = Q * R.diagonal(dim1=1, dim2=2).sign()[:, None]
        return signed.mT.contiguous().to(self.weight.device)


@dataclass(frozen=True)
class Ball:
    """All matrices whose norm is at most 1: the operator norm, or the Frobenius norm of all blocks together."""

    norm: Norm

    def project(self, B: Tensor) -> Tensor:
        """Return the nearest matrix in the ball."""
        if self.norm == "frobenius":
            return B / max(1.0, float(B.norm()))
        U, S, Vt = torch.linalg.svd(B, full_matrices=False)
        nearest: Tensor = U @ (S.clamp_max(1.0)[..., None] * Vt)
        return nearest

    def find_furthest(self, slope: Tensor) -> Tensor:
        """Return the matrix in the ball that goes furthest along a slope."""
        if self.norm == "frobenius":
            return slope / (float(slope.norm()) or 1.0)
        U, _, Vt = torch.linalg.svd(slope, full_matrices=False)
        furthest: Tensor = U @ Vt
        return furthest

    def compute_dual_norm(self, slope: Tensor) -> float:
        """Return how far that matrix goes."""
        if self.norm == "frobenius":
            return float(slope.norm())
        return float(torch.linalg.svdvals(slope).sum())

    def compute_norm(self, A: Tensor) -> float:
        """Return the norm of a matrix."""
        return float(A.norm()) if self.norm == "frobenius" else float(torch.linalg.matrix_norm(A, 2).max())


def view_as_features(value: Tensor, groups: int = 1) -> Tensor:
    """Return a weight, or an array of its shape, as ``(groups, rows, features)``."""
    return value.reshape(groups, value.shape[0] // groups, -1)


def _compute_cutoff(S: Tensor, matrices: Tensor) -> Tensor:
    """Return the size up to which a singular value is rounding."""
    return S.amax() * max(matrices.shape[1:]) * torch.finfo(torch.float64).eps


def find_feature_module(model: nn.Module, layer: str) -> tuple[str, nn.Module]:
    """Return the name of a layer's weight, and the layer, after checking that it is of a type that fits.

    Args:
        model: the model.
        layer: the name of the layer or of its weight.
    """
    if not isinstance(layer, str):
        raise OptionError(f"Expected the name of a layer, but got layer={layer!r}. Try layer='fc' or 'fc.weight'.")
    modules = dict(model.named_modules(remove_duplicate=False))
    fitting = {name: module for name, module in modules.items() if _is_feature_module(module)}
    names = [name or "weight" for name in fitting]
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if layer not in modules.keys() | known or not layer:
        if not names:
            raise ParameterError(
                f"Expected a model with a Linear layer or a convolution, but got layer={layer!r} and none of them. Try "
                "another model."
            )
        raise make_unknown_name_error("layer", layer, names)
    owner = layer if layer in modules else layer.removesuffix("weight").removesuffix(".")
    if owner not in fitting or (layer not in modules and not layer.endswith("weight")):
        kind = type(modules[layer]).__name__ if layer in modules else "parameter"
        several = " (weights that are computed from other parameters do not count)" if owner in modules else ""
        raise ParameterError(
            f"Expected the weight of a Linear layer or a convolution, but got {layer!r}, a {kind}{several}. Try "
            + (f"{names[0]!r}." if names else "another model.")
        )
    module = fitting[owner]
    weight = module._parameters["weight"]
    holders = {id(m) for m in modules.values() for value in m._parameters.values() if value is weight}
    if len(holders) > 1:
        raise ParameterError(
            f"Expected a weight that one layer uses, but got {layer!r}, whose weight {len(holders)} modules share: its "
            "changes are not those of one layer's features. Try another layer."
        )
    return next(name for name, value in model.named_parameters() if value is weight), module


def _is_feature_module(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Convolution) and find_layer_rule(module) is not None


def parse_feature_matrix(given: Tensor, layer: FeatureLayer, norm: Norm) -> Tensor:
    """Return a given A as ``(groups, features, features)`` after checking its shape and norm."""
    wanted = (layer.features, layer.features)
    if (
        not isinstance(given, Tensor)
        or given.is_complex()
        or given.is_meta
        or given.layout != torch.strided
        or tuple(given.shape) not in (wanted, (layer.groups, *wanted))
    ):
        got = f"one of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        more = f", or {(layer.groups, *wanted)} for one in each group" if layer.groups > 1 else ""
        raise OptionError(
            f"Expected a real matrix of shape {wanted}{more}, but got {got} for the features of {layer.name!r}. Try "
            f"matrix=torch.eye({layer.features})."
        )
    A = given.detach().to(layer.weight).expand(layer.groups, *wanted)
    if not bool(A.isfinite().all()):
        raise NonFiniteError("Expected finite numbers, but got NaN or infinity in matrix. Check how it was computed.")
    size = Ball(norm).compute_norm(A)
    # An orthogonal matrix in float32 has a norm of 1 up to rounding in its own type.
    rounding = layer.features * torch.finfo(given.dtype).eps if given.is_floating_point() else 0.0
    if size > 1 + max(ROUNDING, min(rounding, MOST_ROUNDING)):
        raise OptionError(
            f"Expected a matrix of {norm} norm at most 1, but got one of norm {size:.12g}. Try "
            f"matrix=matrix / {size:.12g}, and deltas that are larger by this factor."
        )
    return A / max(1.0, size)


@dataclass(frozen=True)
class FeatureMatrix:
    """A matrix A that acts on features, for a wanted change V of the weights.

    Attributes:
        matrix: A, ``(features, features)``, or ``(groups, features, features)`` if there are several groups.
        residual: |w A - V| / |V| in Frobenius norms; 0 if V is zero.
        norm: the operator norm of A, the largest of all groups.
        full_row_rank: whether the rows of w are linearly independent, so that there is an A for every V.
    """

    matrix: Tensor
    residual: float
    norm: float
    full_row_rank: bool


def solve_feature_matrix(weight: Tensor, change: Tensor, groups: int = 1) -> FeatureMatrix:
    r"""Return the A for which w A is nearest to a wanted change of the weights, :math:`A = w^+ V`.

    It is the smallest such A. If the rows of w are linearly independent, w A is V.

    Args:
        weight: of a Linear layer or a convolution.
        change: V, of the same shape.
        groups: of the convolution.

    Example:
        >>> found = solve_feature_matrix(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
        >>> found.matrix.tolist(), found.residual, found.full_row_rank
        ([[0.0, 0.5], [0.0, 0.0]], 0.0, True)
    """
    check_count(1, groups=groups)
    for name, value in (("weight", weight), ("change", change)):
        if not isinstance(value, Tensor) or value.dim() < 2 or not value.is_floating_point():
            got = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise OptionError(f"Expected a real tensor of two or more axes, but got {got} as {name}. Try layer.weight.")
        if not bool(value.isfinite().all()):
            raise NonFiniteError(f"Expected finite numbers, but got NaN or infinity in {name}. Check its values.")
    if change.shape != weight.shape or weight.shape[0] % groups or not weight.numel():
        raise OptionError(
            f"Expected a change of the weight's shape {tuple(weight.shape)}, whose first axis the groups divide, but "
            f"got {tuple(change.shape)} and groups={groups}. Try groups=1."
        )
    w, V = (view_as_features(each.detach().double(), groups) for each in (weight, change))
    U, S, Qt = torch.linalg.svd(w, full_matrices=False)
    kept = _compute_cutoff(S, w) < S
    inverse = torch.where(kept, 1 / S.where(kept, torch.ones_like(S)), torch.zeros_like(S))
    A = Qt.mT @ (inverse[..., None] * (U.mT @ V))
    size = float(V.norm())
    residual = float((w @ A - V).norm()) / size if size else 0.0
    full = w.shape[1] <= w.shape[2] and bool(kept.all())
    return FeatureMatrix(A[0] if groups == 1 else A, residual, Ball("operator").compute_norm(A), full)
