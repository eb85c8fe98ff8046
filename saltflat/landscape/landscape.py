"""Compute a slice through the loss around a network's weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn

from saltflat.engine.context import Context, describe_context
from saltflat.engine.data import Data
from saltflat.engine.full_loss import check_finite_loss
from saltflat.engine.losses import LossLike
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.progress import show_steps
from saltflat.engine.read_data import select_examples
from saltflat.engine.session import open_session
from saltflat.errors import ModelError, NotDefinedError, OptionError, ParameterError, make_unknown_name_error
from saltflat.landscape.directions import Direction, DirectionOptions, compute_directions, parse_direction_options
from saltflat.landscape.evaluate import (
    SlicePoints,
    compute_batch_norm_statistics,
    compute_point_losses,
    find_batch_norms,
)
from saltflat.landscape.result import Landscape
from saltflat.results.report import describe_run
from saltflat.validation import LARGEST_COUNT, check_positive, check_seed, parse_bytes, take_turns

MOST_POINTS = 250_000  # more is probably a typo


@dataclass(frozen=True)
class SliceGrid:
    """The grid of points at which the loss is evaluated.

    Attributes:
        dimensions: 1 or 2.
        points: the number of points along each direction, odd.
        radius: the distance of the outermost points from the middle, in lengths of the direction.
    """

    dimensions: int
    points: int
    radius: float

    @property
    def axis(self) -> Tensor:
        """The coordinates along one direction, in float64; the middle one is exactly 0.

        >>> SliceGrid(1, 5, 2.0).axis.tolist()
        [-2.0, -1.0, 0.0, 1.0, 2.0]
        """
        steps = torch.arange(self.points, dtype=torch.float64) * 2 - (self.points - 1)
        return steps * (self.radius / (self.points - 1))

    @property
    def places(self) -> Tensor:
        """The coordinates of every point, ``(points ** dimensions, dimensions)``; the last one changes fastest."""
        axes = torch.meshgrid(*[self.axis] * self.dimensions, indexing="ij")
        return torch.stack([each.flatten() for each in axes], 1)

    @property
    def middle(self) -> int:
        """The number of the point in the middle, at the model's own weights."""
        return int((self.points**self.dimensions) // 2)

    @property
    def neighbors(self) -> list[int]:
        """The numbers of the point in the middle and of its next neighbor along each direction."""
        return [self.middle, *(self.middle + self.points**axis for axis in range(self.dimensions))]


def make_grid(dimensions: int, points: int, radius: float) -> SliceGrid:
    """Check the options of the grid and return it."""
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or dimensions not in (1, 2):
        raise OptionError(
            f"Expected 1 for a curve or 2 for a map, but got dimensions={dimensions!r}. Try several slices for more."
        )
    if (
        isinstance(points, bool)
        or not isinstance(points, int)
        or points < 3
        or points % 2 == 0
        or points > LARGEST_COUNT
    ):
        raise OptionError(
            "Expected an odd number of at least 3, so that the weights themselves are the point in the middle, but "
            f"got points={points!r}. Try points=21."
        )
    if points**dimensions > MOST_POINTS:
        raise OptionError(
            f"Expected at most {MOST_POINTS:,}, but got points={points!r} in {dimensions} dimensions, "
            f"{points**dimensions:,} passes over the data. Try points=51."
        )
    check_positive(radius=radius)
    return SliceGrid(dimensions, points, float(radius))


BATCH_NORM = ("running", "recompute")


@take_turns
def compute_landscape(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    *,
    directions: Literal["filter", "random", "eigenvectors"] | Sequence[Mapping[str, Tensor]] = "filter",
    dimensions: int = 1,
    points: int = 21,
    radius: float = 1.0,
    normalize: Literal["filter", "layer", "entry", "length", "none"] | None = None,
    biases: Literal["ignore", "include"] = "ignore",
    batch_norm: Literal["running", "recompute"] = "running",
    layers: Sequence[str] | str | None = None,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Callable[[str, int, int | None], None] | None = None,
    limit: int | None = None,
) -> Landscape:
    r"""Compute the loss around a network's weights, along one or two directions.

    .. math::
        L(w + x d_1) \quad\text{or}\quad L(w + x d_1 + y d_2)

    Args:
        model: any module. It is run in eval mode and restored bit for bit.
        data: as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        directions: ``"filter"``: random, each filter scaled to the norm of that of the weights (Li et al., 2018);
            ``"random"``: random with another normalization; ``"eigenvectors"``: of the Hessian's largest eigenvalues;
            or a mapping for each dimension from parameter names to tensors, such as the difference of two
            ``state_dict``. Two random directions are independent and not orthogonalized.
        dimensions: 1 for a curve, 2 for a map.
        points: the number of points along each direction, odd, so that the weights themselves are in the middle.
        radius: the distance of the outermost points, in lengths of the direction.
        normalize: ``"filter"``, ``"layer"`` or ``"entry"``: scale each filter, parameter or entry to the norm of that
            of the weights (times a normal number, for entries); ``"length"``: scale the whole direction to length one;
            ``"none"``. If None, ``"filter"`` for filter directions, ``"length"`` for random directions and
            eigenvectors, ``"none"`` for given ones.
        biases: ``"ignore"``: biases and the parameters of norms do not move in random directions; ``"include"``: they
            do, each number as a filter.
        batch_norm: ``"running"``: use the running statistics of the model at every point; ``"recompute"``: recompute
            them at every point, as averages over the batches of the data.
        layers: names of modules or parameters that move; all that require a gradient if None.
        memory: working memory beyond the model and the results, such as ``"512MiB"``.
        dtype: ``torch.float32`` or ``torch.float64`` to work in; the model's own if None.
        seed: the seed of the random directions.
        progress: True for a progress bar (lines of text off a terminal), False for none, None for a bar on a terminal
            only, or a function of ``(step, done, total)``.
        limit: use at most this many examples, the first ones; all if None.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> _ = net.load_state_dict({"weight": torch.tensor([[3.0, 4.0]])})
        >>> data = torch.eye(2), torch.zeros(2, 1)
        >>> along = {"weight": torch.tensor([[1.0, 0.0]])}
        >>> found = compute_landscape(net, data, "mse", directions=[along], points=3)  # ((3 + x)^2 + 4^2) / 2
        >>> found.losses.tolist(), found.curvature
        ([10.0, 12.5, 16.0], (1.0,))
    """
    started = time.perf_counter()
    data = data if limit is None else select_examples(data, limit=limit)
    grid = make_grid(dimensions, points, radius)
    wanted = parse_direction_options(directions, dimensions, normalize, biases)
    if not isinstance(batch_norm, str) or batch_norm not in BATCH_NORM:
        raise make_unknown_name_error("treatment of BatchNorm", batch_norm, BATCH_NORM)
    limit, seed = parse_bytes(memory), check_seed(seed)
    with open_session(model, "eval", data) as notes, show_steps(progress) as tick:
        problem = Problem.build(model, data, loss, layers, dtype, "eval")
        context = Context(problem, parse_column_plan("exact"), seed, limit, tick=tick)
        along, told = _prepare_directions(context, wanted, dimensions)
        points_ = SlicePoints(problem.network, grid.places, along, grid.neighbors)
        again = batch_norm == "recompute" and find_batch_norms(model)
        statistics = compute_batch_norm_statistics(context, points_) if again else None
        found = compute_point_losses(context, points_, statistics)
        check_finite_loss(float(found.losses[grid.middle]))
        shape = (grid.points,) * grid.dimensions
        return Landscape(
            coordinates=(grid.axis.numpy(),) * grid.dimensions,
            losses=found.losses.reshape(shape).numpy(),
            errors=None if found.errors is None else found.errors.reshape(shape).numpy(),
            directions=tuple({**each.describe(), "normalize": wanted.normalize} for each in along),
            examples=found.examples,
            settings=_collect_settings(context, wanted, grid, batch_norm, points_),
            notes=(*notes, *told, *_explain_batch_norm(model, batch_norm, wanted)),
            **describe_run(model, started, torch, numpy),
        )


def _prepare_directions(context: Context, wanted: DirectionOptions, count: int) -> tuple[list[Direction], list[str]]:
    # Run the first examples before anything long, so that errors in the model or data are raised early.
    context.get_probe(next(iter(context.problem.read_batches())))
    try:
        found, notes = compute_directions(context, wanted, count)
    except NotDefinedError as error:
        raise ModelError(
            "Expected a loss with second derivatives, but got a model without Hessian eigenvectors: the Hessian "
            f"{str(error).rstrip('.')}. Try directions='filter'."
        ) from error
    if len(found) < count:
        raise ParameterError(f"Expected at least {count} numbers that can move, but got one. Try dimensions=1.")
    return found, notes


def _collect_settings(
    context: Context, wanted: DirectionOptions, grid: SliceGrid, batch_norm: str, points: SlicePoints
) -> dict[str, Any]:
    general = describe_context(context)
    # There are no columns here, and the strategy of the sweeps is not that of the points.
    del general["columns"]
    return {
        **general,
        "strategy": " + ".join(sorted(points.used)),
        "directions": wanted.kind,
        "normalize": wanted.normalize,
        "biases": wanted.biases,
        "batch_norm": batch_norm,
        "points": grid.points,
        "radius": grid.radius,
    }


def _explain_batch_norm(model: nn.Module, batch_norm: str, wanted: DirectionOptions) -> list[str]:
    count = len(find_batch_norms(model))
    if not count:
        return ["There is no BatchNorm with statistics to recompute."] if batch_norm == "recompute" else []
    if batch_norm == "running":
        return [
            "BatchNorm used the running statistics of the model at every point. Away from the middle they are not "
            "those of the data; batch_norm='recompute' recomputes them at every point."
        ]
    said = [
        "BatchNorm's statistics were recomputed at every point, in the middle too, as averages over the batches of the "
        "data: the loss in the middle is not exactly that of the model."
    ]
    if wanted.kind == "eigenvectors":
        said.append("The eigenvectors are those of the Hessian in eval mode, with the running statistics of the model.")
    return said
