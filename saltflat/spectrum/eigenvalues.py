"""Compute the largest curvature eigenvalue of every layer, with warm starts for repeated calls during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from saltflat.engine.context import Context, find_geometries
from saltflat.engine.data import Data
from saltflat.engine.eigenvalues import draw_start_vectors, get_rounding_tolerance, make_block_product, reserve_basis
from saltflat.engine.lanczos import TopEigenvalue, find_top_eigenvalues
from saltflat.engine.losses import LossLike
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.progress import show_steps
from saltflat.engine.session import open_session
from saltflat.errors import OptionError, ParameterError, make_unknown_name_error
from saltflat.validation import check_count, check_positive, check_seed, parse_bytes, take_turns


@take_turns
def compute_eigenvalues(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    *,
    start: Mapping[str, TopEigenvalue] | None = None,
    tolerance: float | None = None,
    steps: int = 500,
    columns: str = "exact",
    layers: Sequence[str] | str | None = None,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Callable[[str, int, int | None], None] | None = None,
    mode: Literal["eval", "keep"] = "eval",
) -> dict[str, TopEigenvalue]:
    """Compute the largest eigenvalue of every weight's curvature block, with its vector and an error bound.

    Args:
        model: any module; it is restored bit for bit.
        data: as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        start: an earlier result to start from; close eigenvectors save sweeps.
        tolerance: the relative error bound to reach; what the precision allows if None.
        steps: the largest number of sweeps.
        columns: as for :func:`saltflat.measure`, like the options below.
        layers: names of modules or parameters.
        memory: working memory.
        dtype: the precision to work in.
        seed: the seed of the start vectors and of random columns.
        progress: True, False, or a function of ``(step, done, total)``.
        mode: ``"eval"`` or ``"keep"``.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        >>> data = torch.randn(20, 2).double(), torch.randint(3, (20,))
        >>> first = compute_eigenvalues(net, data)
        >>> again = compute_eigenvalues(net, data, start=first)
        >>> [top.steps for top in again.values()]
        [2, 2]
    """
    check_count(1, steps=steps)
    if tolerance is not None:
        check_positive(tolerance=tolerance)
    plan, limit, seed = parse_column_plan(columns), parse_bytes(memory), check_seed(seed)
    with open_session(model, mode, data), show_steps(progress) as tick:
        problem = Problem.build(model, data, loss, layers, dtype, mode)
        context = Context(problem, plan, seed, limit, tick=tick)
        starts = draw_start_vectors(context, find_geometries(problem.network))
        if not starts:
            raise ParameterError(
                "Expected at least one weight, but got no parameter of two or more axes. Try other layers=."
            )
        if start is not None and not (
            isinstance(start, Mapping) and all(isinstance(t, TopEigenvalue) for t in start.values())
        ):
            raise OptionError(
                f"Expected an earlier result of compute_eigenvalues, but got start={type(start).__name__}. Try "
                "leaving it out."
            )
        for name, top in (start or {}).items():
            if name not in starts:
                raise make_unknown_name_error("layer of the earlier result", name, starts)
            if top.vector.shape != starts[name].shape:
                raise OptionError(
                    f"Expected {tuple(starts[name].shape)}, but got an earlier vector of shape "
                    f"{tuple(top.vector.shape)} for {name!r}. Try starting from a result of the same architecture."
                )
            starts[name] = top.vector.to(starts[name])
        with reserve_basis(context, starts) as basis:
            return find_top_eigenvalues(
                make_block_product(context),
                starts,
                get_rounding_tolerance(context) if tolerance is None else tolerance,
                steps,
                lambda done, total: tick("Largest eigenvalues of the layers", done, total),
                basis,
            )
