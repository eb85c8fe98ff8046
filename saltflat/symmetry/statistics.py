"""Statistics that need the rescalings of a network."""

from __future__ import annotations

from saltflat.engine.context import NotDefinedError, Setting, StatisticResult
from saltflat.engine.data import Batch
from saltflat.engine.network import Network
from saltflat.engine.statistic import statistic
from saltflat.errors import ModelError
from saltflat.symmetry.find import compute_output_change, find_batch_symmetries
from saltflat.symmetry.group import Symmetries


@statistic(
    per="network", meaning="Every way to rescale the measured parameters that leaves the function alone.", passes=0
)
def rescalings(setting: Setting) -> StatisticResult:
    """The group of rescalings that change no other parameters than those measured."""
    network = setting.problem.network
    batch = next(iter(setting.problem.read_batches())).cut(0, 8)
    try:
        group = find_batch_symmetries(network, batch)
    except ModelError as error:
        raise NotDefinedError(f"needs the rescalings of the model: {error}") from error
    group = group.restrict_to_parameters(network.measured)
    _check_rescaling(network, batch, group)
    notes = [f"rescalings are those of inputs whose masks decide as the first did: {line}" for line in group.assumed]
    return StatisticResult(group, notes=tuple(notes), without=lambda left_out: group)


def _check_rescaling(network: Network, batch: Batch, group: Symmetries) -> None:
    """Try one: what leaves torch on the way (numpy, lists) cannot be watched."""
    off, tolerance = compute_output_change(network, batch, group)
    if not off <= tolerance:
        raise NotDefinedError(
            f"needs the rescalings of the model, and those found change its outputs (by {off:.1e}): its forward pass "
            "does something that cannot be watched, such as a calculation outside of torch"
        )
