"""Inner products between the gradients of single examples, of a random pool of them."""

from __future__ import annotations

import torch

from saltflat.errors import OptionError
from saltflat.gram import compute_gram_matrix
from saltflat.setting import Setting, StatisticResult
from saltflat.statistics import statistic


@statistic(per="network", meaning="Inner products between single examples' gradients, of a pool of examples.", passes=5)
def gradient_gram(setting: Setting, *, pool: int = 1000) -> StatisticResult:
    """``gram``, ``(P, P)`` in float64, with P the smaller of ``pool`` and the number of examples.

    Beside it ``eps``, the rounding of the precision the gradients were taken in, and the ``seed`` to draw subsets with.
    """
    if isinstance(pool, bool) or not isinstance(pool, int) or pool < 1:
        raise OptionError(f"Got pool={pool!r}. Want at least 1. Do: leave it out for 1000.")
    # Counted, not expected: a loader may drop the last examples or sample some of them.
    examples = setting.examples
    noise = torch.Generator().manual_seed(setting.seed)
    chosen = torch.randperm(examples, generator=noise)[:pool].sort().values
    eps = max(torch.finfo(value.dtype).eps for value in setting.problem.network.measured.values())
    return StatisticResult({"gram": compute_gram_matrix(setting, chosen), "eps": eps, "seed": setting.seed})
