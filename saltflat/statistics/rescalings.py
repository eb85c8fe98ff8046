"""Which rescalings leave the network's function alone: found by watching it once."""

from __future__ import annotations

from saltflat.data import Batch
from saltflat.errors import ModelError
from saltflat.network import Network
from saltflat.setting import Found, NotDefinedError, Setting
from saltflat.statistics import statistic
from saltflat.symmetry.graph import outputs_moved, symmetries_on
from saltflat.symmetry.group import Symmetries


@statistic(
    per="network", meaning="Every way to rescale the measured parameters that leaves the function alone.", passes=0
)
def rescalings(setting: Setting) -> Found:
    """The group of rescalings that change no other parameters than those measured."""
    network = setting.problem.network
    batch = next(iter(setting.problem.batches())).cut(0, 8)
    try:
        group = symmetries_on(network, batch)
    except ModelError as error:
        raise NotDefinedError(f"needs the rescalings of the model: {error}") from error
    group = group.moving_only(network.measured)
    _check(network, batch, group)
    notes = [f"rescalings are those of inputs whose masks decide as the first did: {line}" for line in group.assumed]
    return Found(group, notes=tuple(notes), without=lambda left_out: group)


def _check(network: Network, batch: Batch, group: Symmetries) -> None:
    """Try one: what leaves torch on the way (numpy, lists) cannot be watched."""
    off, tolerance = outputs_moved(network, batch, group)
    if not off <= tolerance:
        raise NotDefinedError(
            f"needs the rescalings of the model, and those found change its outputs (by {off:.1e}): its forward pass "
            "does something that cannot be watched, such as a calculation outside of torch"
        )
