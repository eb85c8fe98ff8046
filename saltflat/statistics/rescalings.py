"""Which rescalings leave the network's function alone: found by watching it once."""

from __future__ import annotations

import numpy as np
import torch

from saltflat.data import Batch
from saltflat.errors import ModelError
from saltflat.network import Network
from saltflat.setting import Found, NotDefinedError, Setting
from saltflat.statistics import statistic
from saltflat.symmetry.graph import symmetries_on
from saltflat.symmetry.group import Symmetries
from saltflat.symmetry.same import difference

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
SPREAD = 0.5  # of the sizes that are tried: far from one, and far from overflowing


@statistic(per="network", meaning="Every way to rescale the measured parameters that leaves the function alone.")
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
    return Found(group)


def _check(network: Network, batch: Batch, group: Symmetries) -> None:
    """Try one: what leaves torch on the way (numpy, lists) cannot be watched."""
    logs = group.logs(group.sample(spread=SPREAD))
    leaves = {
        name: group.members[name].scaled(network.constants[name], each) for name, each in logs.items() if np.any(each)
    }
    with torch.no_grad():
        before, after = network(batch), network(batch, leaves=leaves)
    off = difference(before, after)
    if not off <= TOLERANCE[before.dtype]:
        raise NotDefinedError(
            f"needs the rescalings of the model, and those found change its outputs (by {off:.1e}): its forward pass "
            "does something that cannot be watched, such as a calculation outside of torch"
        )
