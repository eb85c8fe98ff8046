"""Products with the curvature of the mean loss: of the whole network, or of each parameter's own block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saltflat.errors import NonFiniteError
from saltflat.lanczos import StackedProduct, Vectors, make_stacked_block_product
from saltflat.noise import draw_normals
from saltflat.setting import Setting
from saltflat.whole import compute_gauss_newton_products, compute_hessian_block_products, compute_hessian_products

NETWORK = "network"  # the name of the only block when all parameters are taken together


class CurvatureOperator:
    """One matrix, or one for each parameter, that vectors can be multiplied with.

    Args:
        setting: what is measured.
        matrix: ``"hessian"`` or ``"gauss_newton"``.
        per: ``"network"`` or ``"layer"``.

    Attributes:
        sizes: the number of rows of each block.
    """

    def __init__(self, setting: Setting, matrix: str, per: str) -> None:
        self.setting = setting
        self.shapes = {name: each.shape for name, each in setting.problem.network.measured.items()}
        self.whole = per == "network"
        entries = {name: shape.numel() for name, shape in self.shapes.items()}
        self.sizes = {NETWORK: sum(entries.values())} if self.whole else entries
        self._multiply = _PRODUCTS[matrix, per](self)

    def multiply(self, vectors: Vectors) -> Vectors:
        """Each block times its rows, ``(vectors, entries)``, in float64."""
        found = self._multiply(vectors)
        for name, each in found.items():
            if not bool(each.isfinite().all()):
                raise NonFiniteError(
                    f"Got NaN or infinity in a product with the curvature of {name!r}. Want finite numbers: second "
                    "derivatives overflowed. Do: measure with dtype=torch.float64."
                )
        return found

    def draw_vectors(self, number: int) -> Vectors:
        """A standard normal vector for each block; the same for the same seed and number."""
        found = {name: each.flatten() for name, each in draw_normals(self.setting, number).items()}
        return {NETWORK: torch.cat(list(found.values()))} if self.whole else found

    def split_by_name(self, row: Tensor) -> dict[str, Tensor]:
        """A vector of the whole network by the names of the parameters."""
        parts = row.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def reshape_like_parameters(self, vectors: Vectors) -> Vectors:
        """Vectors of blocks in the shapes of the parameters."""
        return {name: each.reshape(-1, *self.shapes[name]) for name, each in vectors.items()}


def _make_network_product(
    products: Callable[[Setting, list[dict[str, Tensor]]], list[dict[str, Tensor]]],
) -> Callable[[CurvatureOperator], StackedProduct]:
    def bind_operator(operator: CurvatureOperator) -> StackedProduct:
        def multiply_network(vectors: Vectors) -> Vectors:
            found = products(operator.setting, [operator.split_by_name(row) for row in vectors[NETWORK]])
            return {NETWORK: torch.stack([torch.cat([each.flatten() for each in one.values()]) for one in found])}

        return multiply_network

    return bind_operator


def _make_layer_product(
    products: Callable[[Setting], StackedProduct],
) -> Callable[[CurvatureOperator], StackedProduct]:
    def bind_operator(operator: CurvatureOperator) -> StackedProduct:
        multiply = products(operator.setting)

        def multiply_blocks(vectors: Vectors) -> Vectors:
            return {
                name: each.reshape(len(each), -1)
                for name, each in multiply(operator.reshape_like_parameters(vectors)).items()
            }

        return multiply_blocks

    return bind_operator


_PRODUCTS: dict[tuple[str, str], Callable[[CurvatureOperator], StackedProduct]] = {
    ("hessian", "network"): _make_network_product(compute_hessian_products),
    ("gauss_newton", "network"): _make_network_product(compute_gauss_newton_products),
    ("hessian", "layer"): _make_layer_product(
        lambda setting: lambda vectors: compute_hessian_block_products(setting, vectors)
    ),
    ("gauss_newton", "layer"): _make_layer_product(make_stacked_block_product),
}
