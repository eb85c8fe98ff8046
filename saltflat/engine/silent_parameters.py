"""Parameters without a gradient in the first examples, with which no strategy can be compared until one has some."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from saltflat.engine import per_example
from saltflat.engine.data import Batch
from saltflat.engine.problem import Problem
from saltflat.engine.strategy import Probe, run_probe
from saltflat.engine.strategy_trial import STRATEGIES


def verify_silent_parameters(problem: Problem, batch: Batch, earlier: Probe, limit: int) -> Probe:
    """Return a probe that has been compared with single examples wherever this batch has gradients.

    A parameter may have no gradient in the examples that were probed: a branch that they do not take, an expert for
    others. Where an example of this batch has one, the strategy is chosen again with it, and the slower one is kept.

    Args:
        problem: the model, loss and data.
        batch: the examples that will be swept next.
        earlier: the probe of inputs like these.
        limit: bytes of working memory.
    """
    if not earlier.silent:
        return earlier
    size = earlier.choose_num_examples(batch, 1, limit)
    for start in range(0, batch.examples, size):
        chunk = batch.cut(start, start + size)
        while earlier.silent and (place := _find_example(problem, chunk, earlier.silent)) is not None:
            order = torch.arange(chunk.examples).roll(-place)
            found = run_probe(problem, chunk.take(order, chunk.first), limit)
            earlier = _combine_probes(earlier, found)
    return earlier


def _combine_probes(earlier: Probe, found: Probe) -> Probe:
    """Return a probe that is right for the examples of both."""
    silent = tuple(name for name in earlier.silent if name in found.silent)
    order = list(STRATEGIES)
    slower = max(earlier, found, key=lambda probe: (order.index(probe.strategy), order.index(probe.fallback)))
    if (slower.strategy, slower.fallback) == (earlier.strategy, earlier.fallback):
        return replace(earlier, silent=silent)
    return replace(
        slower,
        fixed=max(earlier.fixed, found.fixed),
        moving=max(earlier.moving, found.moving),
        is_lasting=False,  # examples before these were swept in another way
        silent=silent,
    )


def _find_example(problem: Problem, batch: Batch, names: Collection[str]) -> int | None:
    """Return the first example with a gradient of one of these parameters, or None."""
    if not _has_gradient(problem, batch, names):
        return None
    start, stop = 0, batch.examples
    while stop - start > 1:
        middle = (start + stop) // 2
        if _has_gradient(problem, batch.cut(start, middle), names):
            stop = middle
        else:
            start = middle
    return start


def _has_gradient(problem: Problem, batch: Batch, names: Collection[str]) -> bool:
    """Return whether some output of some example depends on one of these parameters."""
    leaves = {name: leaf for name, leaf in per_example.make_leaves(problem.network).items() if name in names}
    with torch.enable_grad():
        outputs = problem.network(batch, leaves=leaves)
        if not outputs.requires_grad:
            return False
        noise = torch.Generator().manual_seed(batch.first)
        column = torch.randn(outputs.shape, generator=noise).to(outputs)  # no sum over examples cancels by chance
        found = torch.autograd.grad(outputs, list(leaves.values()), column, allow_unused=True)
    return any(bool((each.coalesce().values() if each.is_sparse else each).any()) for each in found if each is not None)
