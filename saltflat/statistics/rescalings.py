"""Which rescalings leave the network's function alone: found by watching it once."""

from __future__ import annotations

from saltflat.errors import ModelError
from saltflat.setting import Found, NotDefinedError, Setting
from saltflat.statistics import statistic
from saltflat.symmetry.graph import symmetries_on


@statistic(per="network", meaning="Every way to rescale the measured parameters that leaves the function alone.")
def rescalings(setting: Setting) -> Found:
    """The group of rescalings that change no other parameters than those measured."""
    network = setting.problem.network
    try:
        group = symmetries_on(network, next(iter(setting.problem.batches())))
    except ModelError as error:
        raise NotDefinedError(f"needs the rescalings of the model: {error}") from error
    others = [name for name, each in group.members.items() if each.kind == "parameter" and name not in network.measured]
    return Found(group.fixing(others))
