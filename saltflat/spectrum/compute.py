"""Compute the spectrum of a network's curvature."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy
import torch
from torch import Tensor, nn

from saltflat.engine.context import Context, describe_context
from saltflat.engine.data import Data
from saltflat.engine.eigenvalues import ExtremeEigenvalues, find_extreme_eigenvalues, make_stacked_block_product
from saltflat.engine.full_loss import (
    check_finite_loss,
    check_symmetric,
    compute_gauss_newton_products,
    compute_hessian_block_products,
    compute_hessian_products,
)
from saltflat.engine.lanczos import LEAST, StackedProduct, Vectors, compute_quadratures
from saltflat.engine.losses import LossLike
from saltflat.engine.noise import draw_normals
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.progress import show_steps
from saltflat.engine.read_data import select_examples
from saltflat.engine.session import open_session
from saltflat.errors import ModelError, NonFiniteError, NotDefinedError, OptionError, make_unknown_name_error
from saltflat.results.report import describe_run
from saltflat.spectrum.result import Block, Eigenvalue, Spectrum
from saltflat.validation import check_count, check_seed, parse_bytes, take_turns

NETWORK = "network"  # the name of the only block when all parameters are taken together


class CurvatureOperator:
    """The curvature matrix of the network, or of each parameter, as a product with vectors.

    Args:
        context: the problem and its options.
        matrix: ``"hessian"`` or ``"gauss_newton"``.
        per: ``"network"`` or ``"layer"``.

    Attributes:
        sizes: the number of rows of each block.
    """

    def __init__(self, context: Context, matrix: str, per: str) -> None:
        self.context = context
        self.shapes = {name: each.shape for name, each in context.problem.network.measured.items()}
        self.whole = per == "network"
        entries = {name: shape.numel() for name, shape in self.shapes.items()}
        self.sizes = {NETWORK: sum(entries.values())} if self.whole else entries
        self._multiply = _PRODUCTS[matrix, per](self)

    def multiply(self, vectors: Vectors) -> Vectors:
        """Multiply each block by its vectors, ``(vectors, entries)``, in float64."""
        found = self._multiply(vectors)
        for name, each in found.items():
            if not bool(each.isfinite().all()):
                raise NonFiniteError(
                    f"Expected finite numbers, but got NaN or infinity in a product with the curvature of {name!r}. "
                    "Second derivatives overflowed. Try dtype=torch.float64."
                )
        return found

    def draw_vectors(self, number: int) -> Vectors:
        """Draw a standard normal vector for each block, the same for the same seed and number."""
        found = {name: each.flatten() for name, each in draw_normals(self.context, number).items()}
        return {NETWORK: torch.cat(list(found.values()))} if self.whole else found

    def split_by_name(self, row: Tensor) -> dict[str, Tensor]:
        """Split a vector of the whole network by parameter name."""
        parts = row.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def reshape_like_parameters(self, vectors: Vectors) -> Vectors:
        """Reshape vectors of blocks to the shapes of the parameters."""
        return {name: each.reshape(-1, *self.shapes[name]) for name, each in vectors.items()}


def _make_network_product(
    products: Callable[[Context, list[dict[str, Tensor]]], list[dict[str, Tensor]]],
) -> Callable[[CurvatureOperator], StackedProduct]:
    def bind_operator(operator: CurvatureOperator) -> StackedProduct:
        def multiply_network(vectors: Vectors) -> Vectors:
            found = products(operator.context, [operator.split_by_name(row) for row in vectors[NETWORK]])
            return {NETWORK: torch.stack([torch.cat([each.flatten() for each in one.values()]) for one in found])}

        return multiply_network

    return bind_operator


def _make_layer_product(
    products: Callable[[Context], StackedProduct],
) -> Callable[[CurvatureOperator], StackedProduct]:
    def bind_operator(operator: CurvatureOperator) -> StackedProduct:
        multiply = products(operator.context)

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
        lambda context: lambda vectors: compute_hessian_block_products(context, vectors)
    ),
    ("gauss_newton", "layer"): _make_layer_product(make_stacked_block_product),
}

MATRICES = ("hessian", "gauss_newton")
PER = ("network", "layer")
SMALLEST = 5  # default number of smallest eigenvalues of a Hessian
BASIS = 128  # largest number of basis vectors of a search, besides two for each eigenvalue
SMALL = 1 << 20  # bytes that are negligible
FAINT = 1e-3  # negligible curvature, relative to the largest
SEARCH = 500  # largest number of products of a search
# The tolerance of an eigenvalue's error, relative to the eigenvalue or to a fraction of the largest, whichever is more;
# that fraction; and the rounding of products.
TOLERANCE = {torch.float32: (1e-6, 1.0, 1e-6), torch.float64: (1e-8, 1e-3, 1e-14)}


@take_turns
def compute_spectrum(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    *,
    k: int = 10,
    smallest: int | None = None,
    matrix: Literal["hessian", "gauss_newton"] = "hessian",
    per: Literal["network", "layer"] = "network",
    density: bool = True,
    draws: int = 8,
    steps: int = 50,
    layers: Sequence[str] | str | None = None,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Callable[[str, int, int | None], None] | None = None,
    mode: Literal["eval", "keep"] = "eval",
    limit: int | None = None,
) -> Spectrum:
    r"""Compute the extreme eigenvalues of the curvature of the mean loss, and the density of all eigenvalues.

    The ``k`` largest and the ``smallest`` eigenvalues come from a Lanczos process with full reorthogonalization and
    thick restarts, each with a bound on its error. The rest of the spectrum is estimated by stochastic Lanczos
    quadrature from ``draws`` random probes that are orthogonal to those eigenvectors.

    Args:
        model: any module. It is run in eval mode and restored bit for bit.
        data: as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        k: the number of largest eigenvalues (by value, not by magnitude).
        smallest: the number of smallest eigenvalues, the most negative ones; if None, 5 for the Hessian of the network
            and 0 otherwise.
        matrix: ``"hessian"``, the second derivatives of the mean loss; or ``"gauss_newton"``, :math:`J' B J` with the
            curvature B of the loss at the outputs.
        per: ``"network"`` for the matrix over all measured parameters, ``"layer"`` for the diagonal block of each
            parameter, all of them in the same sweeps.
        density: also estimate the density and the trace, with about ``draws * steps`` products with the matrix.
        draws: the number of random probes, at least 2.
        steps: the number of Lanczos steps of each probe, which is its number of nodes.
        layers: names of modules or parameters; all that require a gradient if None. Other parameters are constants.
        memory: working memory beyond the model and the results, such as ``"512MiB"``.
        dtype: ``torch.float32`` or ``torch.float64`` to work in; the model's own if None.
        seed: the seed of the random vectors.
        progress: True for a progress bar (lines of text off a terminal), False for none, None for a bar on a terminal
            only, or a function of ``(step, done, total)``.
        mode: ``"eval"``, or ``"keep"`` to leave the modules in the modes they are in.
        limit: use at most this many examples, the first ones; all if None.

    Example:
        >>> net = nn.Linear(3, 1, bias=False).double()
        >>> data = torch.diag(torch.tensor([3.0, 2.0, 1.0])).double(), torch.zeros(3, 1).double()
        >>> found = compute_spectrum(net, data, "mse", k=2, smallest=1)  # 2 / 3 of 9, 4 and 1
        >>> found.eigenvalues.round(6).tolist(), round(found.trace, 6)
        ([6.0, 2.666667, 0.666667], 9.333333)
    """
    started = time.perf_counter()
    _check_spectrum_options(k, smallest, matrix, per, density, draws, steps)
    room, seed = parse_bytes(memory), check_seed(seed)
    data = select_examples(data, limit=limit)
    with open_session(model, mode, data) as notes, show_steps(progress) as tick:
        problem = Problem.build(model, data, loss, layers, dtype, mode)
        # Half of the memory for passes over the data, half for the vectors.
        context = Context(problem, parse_column_plan("exact"), seed, max(1, room // 2), tick=tick)
        # Run the first examples before anything long, so that errors in the model or data are raised early.
        context.get_probe(next(iter(problem.read_batches())))
        check_finite_loss(context.mean_loss)
        operator = CurvatureOperator(context, matrix, per)
        largest, smallest = _choose_counts(operator, k, smallest, matrix)
        try:
            found = _find_extremes(operator, largest, smallest)
            nodes = _estimate_density(operator, found, draws, steps, notes) if density else {}
        except NotDefinedError as error:
            raise ModelError(
                "Expected a loss with second derivatives, but got a model without a spectrum: the curvature "
                f"{str(error).rstrip('.')}. Try matrix='gauss_newton' with per='layer', which needs none."
            ) from error
        blocks = {name: _make_spectrum_block(name, each, nodes.get(name)) for name, each in found.items()}
        notes += _format_doubts(blocks)
        settings = {**describe_context(context), "memory": room}
        if matrix == "hessian":  # there are no columns in it, and no sweep
            del settings["columns"], settings["strategy"]
        return Spectrum(
            blocks=blocks,
            examples=context.examples,
            loss=context.mean_loss,
            settings={
                **settings,
                "matrix": matrix,
                "per": per,
                "k": k,
                "smallest": smallest,
                **({"draws": draws, "steps": steps} if density else {}),
            },
            notes=tuple(notes),
            **describe_run(model, started, torch, numpy),
        )


def _check_spectrum_options(
    k: int, smallest: int | None, matrix: str, per: str, density: bool, draws: int, steps: int
) -> None:
    check_count(1, k=k)
    if smallest is not None:
        check_count(0, smallest=smallest)
    check_count(2, draws=draws, steps=steps)
    for kind, given, known in (("matrix", matrix, MATRICES), ("per", per, PER)):
        if not isinstance(given, str) or given not in known:
            raise make_unknown_name_error(kind, given, known)
    if not isinstance(density, bool):
        raise OptionError(f"Expected True or False, but got density={density!r}. Try leaving it out for True.")


def _choose_counts(operator: CurvatureOperator, k: int, smallest: int | None, matrix: str) -> tuple[int, int]:
    """Return the number of eigenvalues at each end; of a smaller layer, all are computed."""
    size = max(operator.sizes.values())
    what = "parameters" if operator.whole else "parameters in the largest layer"
    if k > size:
        raise OptionError(f"Expected at most {size} eigenvalues, but got k={k} with {size} {what}. Try k={size}.")
    if smallest is None:
        return k, min(SMALLEST if matrix == "hessian" and operator.whole else 0, size - k)
    if k + smallest > size:
        raise OptionError(
            f"Expected at most {size} eigenvalues in total, but got k={k} and smallest={smallest} with {size} {what}. "
            f"Try smallest={size - k}."
        )
    return k, smallest


def _count_fitting_vectors(operator: CurvatureOperator) -> int:
    """Return the number of vectors of all blocks that fit in memory."""
    return operator.context.limit // (8 * sum(operator.sizes.values()))


def _find_extremes(operator: CurvatureOperator, largest: int, smallest: int) -> dict[str, ExtremeEigenvalues]:
    context, wanted = operator.context, largest + smallest
    room = _count_fitting_vectors(operator) - 2 * wanted
    need = 2 * 8 * sum(operator.sizes.values()) * (3 * wanted + LEAST)
    if room < wanted + LEAST and need > SMALL:
        raise OptionError(
            f"Expected at least {need} bytes, but got memory={2 * context.limit} bytes for {wanted} eigenvalues of "
            f"{sum(operator.sizes.values()):,} parameters. Try memory='{-(-need >> 20)}MiB', or a smaller k or "
            "smallest."
        )
    seen: Vectors | None = None
    products: Vectors = {}

    def multiply_and_keep_first(vectors: Vectors) -> Vectors:
        nonlocal seen, products
        found = operator.multiply(vectors)
        if seen is None:
            seen, products = vectors, found
        return found

    tolerance, relative, rounding = max(TOLERANCE[each.dtype] for each in context.problem.network.measured.values())
    what = "Eigenvalues of the network" if operator.whole else "Eigenvalues of the layers"
    found = find_extreme_eigenvalues(
        multiply_and_keep_first,
        operator.draw_vectors,
        largest,
        smallest,
        tolerance=tolerance,
        relative=relative,
        rounding=rounding,
        steps=SEARCH,
        basis=max(wanted + LEAST, min(room, 2 * wanted + BASIS)),
        tick=lambda done: context.tick(what, done, None),
    )
    assert seen is not None
    images = operator.multiply({name: each.vectors[:1] for name, each in found.items()})
    _check_blocks_symmetric(context, seen, products, {name: each.vectors for name, each in found.items()}, images)
    return found


def _check_blocks_symmetric(context: Context, u: Vectors, Hu: Vectors, v: Vectors, Hv: Vectors) -> None:
    """Check that u'Hv equals v'Hu in every block, relative to the norms of the products."""
    sizes = {name: float((Hu[name][0].square().sum() + Hv[name][0].square().sum()).sqrt()) for name in Hu}
    # A block without curvature holds only rounding.
    least = FAINT * max(sizes.values())
    for name, size in sizes.items():
        off = float((u[name][0] @ Hv[name][0] - v[name][0] @ Hu[name][0]).abs())
        check_symmetric(context, off / max(size, least) if off else 0.0)


def _estimate_density(
    operator: CurvatureOperator, found: dict[str, ExtremeEigenvalues], draws: int, steps: int, notes: list[str]
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Compute nodes and weights of each probe, in the complement of the converged eigenvectors."""
    context = operator.context
    known = {name: each.vectors[each.converged] for name, each in found.items()}
    room = _count_fitting_vectors(operator) - 3 * max(len(each.values) for each in found.values())
    fits = max(LEAST, room - 2)
    if fits < steps:
        notes.append(f"Only {fits} steps of each probe fit in memory, not {steps}: the density is coarser.")
        steps = fits
    open_ = {name: each for name, each in known.items() if len(each) < each.shape[1]}
    return compute_quadratures(
        operator.multiply,
        lambda number: operator.draw_vectors(-1 - number),  # other vectors than those of the eigenvalues
        draws if open_ else 0,
        steps,
        {name: torch.linalg.qr(each.mT).Q.mT for name, each in open_.items()},
        {name: each.scale for name, each in found.items()},
        max(1, min(draws, room // (steps + 2))),
        lambda done, total: context.tick("Density of the eigenvalues", done, total),
    )


def _make_spectrum_block(name: str, found: ExtremeEigenvalues, measures: list[tuple[Tensor, Tensor]] | None) -> Block:
    pairs = [
        Eigenvalue(*row)
        for row in zip(
            *(each.tolist() for each in (found.values, found.residuals, found.bounds, found.converged)), strict=True
        )
    ]
    exact = found.values[found.converged].tolist()
    return Block(
        name=name,
        parameters=found.vectors.shape[1],
        largest=tuple(pairs[: found.largest]),
        smallest=tuple(pairs[found.largest :]),
        complete=found.complete,
        exact=tuple(exact),
        nodes=tuple(tuple(nodes.tolist()) for nodes, _ in measures or ()),
        weights=tuple(tuple(weights.tolist()) for _, weights in measures or ()),
    )


def _format_doubts(blocks: dict[str, Block]) -> list[str]:
    """Return notes on eigenvalues that did not converge, may have been missed, or are all zero."""
    said = []
    loose = {name: sum(not pair.converged for pair in block.pairs) for name, block in blocks.items()}
    for name in [name for name, count in loose.items() if count][:4]:
        worst = max(pair.bound for pair in blocks[name].pairs if not pair.converged)
        said.append(
            f"{loose[name]} eigenvalue{'s' * (loose[name] != 1)} of {name} did not converge; the nearest eigenvalues "
            f"are within {worst:.1e}, and others may lie between. The density does not use them."
        )
    unsure = [name for name, block in blocks.items() if not block.complete]
    if unsure:
        said.append(f"Eigenvalues may have been missed in {', '.join(unsure[:4])}{' and others' * (len(unsure) > 4)}.")
    flat = [name for name, block in blocks.items() if not any(pair.value for pair in block.pairs)]
    if flat:
        said.append(f"There is no curvature at all in {', '.join(flat[:4])}{' and others' * (len(flat) > 4)}.")
    return said
