"""Products with the curvature of the mean loss: of the whole network, or of each parameter's own block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saltflat.errors import NonFiniteError
from saltflat.lanczos import StackedProduct, Vectors, stacked_block_products
from saltflat.noise import normals
from saltflat.setting import Setting
from saltflat.whole import gauss_newton_products, hessian_block_products, hessian_products

NETWORK = "network"  # the name of the only block when all parameters are taken together


class Operator:
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

    def product(self, vectors: Vectors) -> Vectors:
        """Each block times its rows, ``(vectors, entries)``, in float64."""
        found = self._multiply(vectors)
        for name, each in found.items():
            if not bool(each.isfinite().all()):
                raise NonFiniteError(
                    f"Got NaN or infinity in a product with the curvature of {name!r}. Want finite numbers: second "
                    "derivatives overflowed. Do: measure with dtype=torch.float64."
                )
        return found

    def draw(self, number: int) -> Vectors:
        """A standard normal vector for each block; the same for the same seed and number."""
        found = {name: each.flatten() for name, each in normals(self.setting, number).items()}
        return {NETWORK: torch.cat(list(found.values()))} if self.whole else found

    def named(self, row: Tensor) -> dict[str, Tensor]:
        """A vector of the whole network by the names of the parameters."""
        parts = row.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def shaped(self, vectors: Vectors) -> Vectors:
        """Vectors of blocks in the shapes of the parameters."""
        return {name: each.reshape(-1, *self.shapes[name]) for name, each in vectors.items()}


def _of_network(
    products: Callable[[Setting, list[dict[str, Tensor]]], list[dict[str, Tensor]]],
) -> Callable[[Operator], StackedProduct]:
    def of(operator: Operator) -> StackedProduct:
        def product(vectors: Vectors) -> Vectors:
            found = products(operator.setting, [operator.named(row) for row in vectors[NETWORK]])
            return {NETWORK: torch.stack([torch.cat([each.flatten() for each in one.values()]) for one in found])}

        return product

    return of


def _of_layers(
    products: Callable[[Setting], StackedProduct],
) -> Callable[[Operator], StackedProduct]:
    def of(operator: Operator) -> StackedProduct:
        multiply = products(operator.setting)

        def product(vectors: Vectors) -> Vectors:
            return {name: each.reshape(len(each), -1) for name, each in multiply(operator.shaped(vectors)).items()}

        return product

    return of


_PRODUCTS: dict[tuple[str, str], Callable[[Operator], StackedProduct]] = {
    ("hessian", "network"): _of_network(hessian_products),
    ("gauss_newton", "network"): _of_network(gauss_newton_products),
    ("hessian", "layer"): _of_layers(lambda setting: lambda vectors: hessian_block_products(setting, vectors)),
    ("gauss_newton", "layer"): _of_layers(stacked_block_products),
}
