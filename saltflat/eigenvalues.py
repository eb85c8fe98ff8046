"""The largest curvature eigenvalue of every layer, for a model and data; quick again after a little training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from saltflat.amounts import check_count, check_positive
from saltflat.columns import plan_from
from saltflat.errors import OptionError, ParameterError, unknown
from saltflat.geometry import geometries
from saltflat.lanczos import Top, block_products, room_for_basis, rounding, start_vectors, top_eigenvalues
from saltflat.loan import loan
from saltflat.problem import Problem
from saltflat.progress import steps_shown
from saltflat.setting import Setting
from saltflat.sweep import bytes_from, check_seed
from saltflat.turns import in_turn


@in_turn
def eigenvalues_of(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    start: Mapping[str, Top] | None = None,
    *,
    tolerance: float | None = None,
    steps: int = 500,
    columns: str = "exact",
    layers: Sequence[str] | str | None = None,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Callable[[str, int, int | None], None] | None = None,
    mode: str = "eval",
) -> dict[str, Top]:
    """The largest eigenvalue of every weight's curvature block, with its vector and a bound on its error.

    Args:
        model: any module; it is given back as it was.
        data: as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        start: an earlier result; close eigenvectors make it quick.
        tolerance: of the relative bound on the eigenvalues' error; what the precision allows if None.
        steps: sweeps at most.
        columns: as for :func:`saltflat.measure`, like all that follow.
        layers: names of modules or parameters.
        memory: working memory.
        dtype: to work in.
        seed: of the vectors to start from and of random columns.
        progress: True, False, or a function of ``(step, done, total)``.
        mode: ``"eval"`` or ``"keep"``.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        >>> data = torch.randn(20, 2).double(), torch.randint(3, (20,))
        >>> first = eigenvalues_of(net, data)
        >>> again = eigenvalues_of(net, data, start=first)
        >>> [top.steps for top in again.values()]
        [2, 2]
    """
    check_count(1, steps=steps)
    if tolerance is not None:
        check_positive(tolerance=tolerance)
    plan, limit, seed = plan_from(columns), bytes_from(memory), check_seed(seed)
    with loan(model, mode, data), steps_shown(progress) as tick:
        problem = Problem.of(model, data, loss, layers, dtype, mode)
        setting = Setting(problem, plan, seed, limit, tick=tick)
        starts = start_vectors(setting, geometries(problem.network))
        if not starts:
            raise ParameterError(
                "Got no parameter of two or more axes. Want at least one weight. Do: name layers that have one."
            )
        if start is not None and not (isinstance(start, Mapping) and all(isinstance(t, Top) for t in start.values())):
            raise OptionError(
                f"Got start={type(start).__name__}. Want an earlier result of eigenvalues_of. Do: leave it out."
            )
        for name, top in (start or {}).items():
            if name not in starts:
                raise unknown("layer of the earlier result", name, starts)
            if top.vector.shape != starts[name].shape:
                raise OptionError(
                    f"Got an earlier vector of shape {tuple(top.vector.shape)} for {name!r}. "
                    f"Want {tuple(starts[name].shape)}. Do: start from a result of the same architecture."
                )
            starts[name] = top.vector.to(starts[name])
        with room_for_basis(setting, starts) as basis:
            return top_eigenvalues(
                block_products(setting),
                starts,
                rounding(setting) if tolerance is None else tolerance,
                steps,
                lambda done, total: tick("Largest eigenvalues of the layers", done, total),
                basis,
            )
