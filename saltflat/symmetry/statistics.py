"""Statistics that depend on the rescalings of a network."""

from __future__ import annotations

from saltflat.engine.context import Context, StatisticResult
from saltflat.engine.data import Batch
from saltflat.engine.network import Network
from saltflat.engine.statistic import statistic
from saltflat.errors import ModelError, NotDefinedError
from saltflat.symmetry.find import compute_output_change, find_batch_symmetries
from saltflat.symmetry.group import Symmetries


@statistic(
    per="network", meaning="Every rescaling of the measured parameters that leaves the function unchanged.", passes=0
)
def rescalings(context: Context) -> StatisticResult:
    """Return the group of rescalings that change only measured parameters."""
    network = context.problem.network
    batch = next(iter(context.problem.read_batches())).cut(0, 8)
    try:
        group = find_batch_symmetries(network, batch)
    except ModelError as error:
        raise NotDefinedError(f"needs the rescalings of the model: {error}") from error
    group = group.restrict_to_parameters(network.measured)
    _check_rescaling(network, batch, group)
    notes = [f"rescalings hold for inputs whose masks decide as those of the first: {line}" for line in group.assumed]
    return StatisticResult(group, notes=tuple(notes), without=lambda left_out: group)


def _check_rescaling(network: Network, batch: Batch, group: Symmetries) -> None:
    """Check that a random rescaling leaves the outputs unchanged: values that leave torch cannot be traced."""
    off, tolerance = compute_output_change(network, batch, group)
    if not off <= tolerance:
        raise NotDefinedError(
            f"needs the rescalings of the model, and those found change its outputs (by {off:.1e}): its forward pass "
            "contains operations that cannot be traced, such as a computation outside of torch"
        )
