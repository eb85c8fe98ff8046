"""Finding everything in a network that can be made larger here and smaller there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from saltflat.data import Batch
from saltflat.loan import loan
from saltflat.network import Network
from saltflat.symmetry import rules as rules
from saltflat.symmetry.effective import drop_scales_without_effect
from saltflat.symmetry.elimination import narrowed
from saltflat.symmetry.entries import Entries
from saltflat.symmetry.group import Member, Symmetries, check_kind, matrix_of
from saltflat.symmetry.reaching import reaching_operations
from saltflat.symmetry.running import Seen, inputs_of, of_loss, tensors_in, users_errors
from saltflat.symmetry.same import difference
from saltflat.symmetry.scales import ANY, GROUND
from saltflat.symmetry.watch import Obstacle, Watch
from saltflat.turns import in_turn

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
SPREAD = 0.5  # of the sizes that are tried: far from one, and far from overflowing

__all__ = ["Member", "Obstacle", "Symmetries", "outputs_moved", "symmetries", "symmetries_on"]


@in_turn
def symmetries(model: nn.Module, example: Any, kind: str = "unit") -> Symmetries:
    """Find every way to make units of a network larger and others smaller so that its function stays the same.

    One forward pass is watched, operation by operation. It works on any module whose forward pass does the same for
    every input; operations without a rule are listed among the ``obstacles`` and taken to allow nothing.

    Args:
        model: any module; it is left as it is, and looked at in eval mode.
        example: an input like those it will get: a tensor, a tuple of positional inputs or a dict of named ones.
        kind: ``"unit"``, or ``"layer"`` for those that multiply each parameter by one number.

    Example:
        Hidden units of a ReLU network: as many scales as there are units.

        >>> net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        >>> group = symmetries(net, torch.randn(1, 3))
        >>> group.scales, group.by_layer().scales
        (5, 1)
    """
    check_kind(kind)
    group = symmetries_seen(model, example, tensors_in)
    return group.by_layer() if kind == "layer" else group


def symmetries_seen(model: nn.Module, example: Any, seen: Seen) -> Symmetries:
    """Those that leave alone what is looked at of a model's outputs."""
    args, kwargs = inputs_of(example)
    with loan(model, "eval"):
        names = [name for name, value in model.named_parameters() if value.is_floating_point()]
        if not names:
            return Symmetries({}, csr_array((2, 0)), ())
        return found_in(Network(model, names, None), args, kwargs, seen)


def symmetries_on(network: Network, batch: Batch) -> Symmetries:
    """The same for a model on loan and a batch of its data."""
    return watched_on(network, batch.cut(0, 2))[0]


def watched_on(network: Network, batch: Batch) -> tuple[Symmetries, Entries]:
    """The same for all of a batch, and how the entries of parameters were used."""
    return _found_in(network, batch.args, batch.kwargs, of_loss)


def outputs_moved(network: Network, batch: Batch, group: Symmetries) -> tuple[float, float]:
    """How far one random rescaling moves the outputs of a batch, and how far rounding may."""
    logs = group.logs(group.sample(spread=SPREAD))
    leaves = {
        name: group.members[name].scaled(network.constants[name], each) for name, each in logs.items() if np.any(each)
    }
    with torch.no_grad():
        before, after = network(batch), network(batch, leaves=leaves)
    return difference(before, after), TOLERANCE[before.dtype]


def found_in(network: Network, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen = tensors_in) -> Symmetries:
    return _found_in(network, args, kwargs, seen)[0]


def _found_in(
    network: Network, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen
) -> tuple[Symmetries, Entries]:
    model = network.model
    statistics = _statistics(network)
    parameters = {name for name, _ in model.named_parameters()}
    constants = {name: value for name, value in network.constants.items() if name in parameters or name in statistics}
    real = {name: value for name, value in constants.items() if value.is_floating_point()}

    given = args, kwargs

    def run() -> Callable[[], Any]:
        # Copies, because a model may write to its inputs.
        positional, named = _cloned(given)

        def forward() -> Any:
            with network.lent(network.constants):
                return model(*positional, **named)

        return forward

    with torch.no_grad(), users_errors(model):
        operations = reaching_operations(run, seen)
    args, kwargs = _cloned(given)
    modules = {id(module): name for name, module in model.named_modules()}
    watch = Watch(real, (args, kwargs), modules, operations)
    with torch.no_grad(), network.lent(network.constants), users_errors(model), watch:
        outputs = model(*args, **kwargs)
    for number, tensor in enumerate(seen(outputs)):
        marks = watch.marks(tensor)
        pinned = watch.scales.pin(watch.entries.read(marks.ids) if marks.entries else marks.ids)
        if number and pinned:
            # The first is what everybody expects to be fixed. Others, such as caches, may come as a surprise.
            watch.obstacles["output", "", str(number)] = Obstacle(f"output {number + 1}", "", "", True, pinned)
    for name, kind in statistics.items():
        if kind == "variance" and watch.entries.first[name] not in watch.epsilons:
            # Used by something else than a BatchNorm: who knows how.
            watch.scales.pin(watch.entries.read(watch.entries.numbers(name, real[name])))
    group = _gathered(watch, real, statistics)

    def outputs_with(leaves: Mapping[str, Tensor], inputs: Any) -> list[Tensor]:
        positional, named = _cloned(inputs)
        with network.lent({**network.constants, **leaves}):
            return seen(model(*positional, **named))

    own = {name: value for name, value in real.items() if name in parameters}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return drop_scales_without_effect(group, own, given, outputs_with), watch.entries


def _cloned(inputs: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, inputs)


def _statistics(network: Network) -> dict[str, str]:
    """Names of running means and variances, and which they are."""
    found: dict[str, str] = {}
    for module in network.modules:
        for key, kind in (("running_mean", "mean"), ("running_var", "variance")):
            value = module._buffers.get(key)
            if value is not None and isinstance(module, nn.modules.batchnorm._NormBase):
                found[network.names[id(value)]] = kind
    return found


def _gathered(watch: Watch, members: Mapping[str, Tensor], statistics: Mapping[str, str]) -> Symmetries:
    scales, entries = watch.scales, watch.entries
    entries.idle = entries.head == ANY
    sides = {}
    there = np.zeros(max(scales.forms) + 1, dtype=bool)
    there[[ANY, GROUND]] = True
    for name, value in members.items():
        span = slice(entries.first[name], entries.first[name] + value.numel())
        sides[name] = [side[span].reshape(value.shape).numpy() for side in (entries.head, entries.tail)]
        for side in sides[name]:
            there[narrowed(side)] = True
    resolved = [scales.system.resolved(scales.forms[number]) for number in np.flatnonzero(there).tolist()]
    row = np.cumsum(there) - 1
    # What nothing has used has no place: it is not moved.
    row[ANY] = GROUND
    free = sorted({variable for form in resolved for variable in form})
    found = {}
    for name, value in members.items():
        first, kind = entries.first[name], statistics.get(name, "parameter")
        head, tail = sides[name]
        for side in (head, tail):
            # In place: nothing asks for the old numbers any more, and for a large model new memory is most of the time.
            side[...] = row[narrowed(side)]
        found[name] = Member(
            name,
            value.shape,
            head,
            tail,
            kind,
            watch.epsilons.get(first, 0.0) if kind == "variance" else 0.0,
        )
    return Symmetries(found, matrix_of(resolved, free), tuple(watch.obstacles.values()), assumed=tuple(watch.assumed))
