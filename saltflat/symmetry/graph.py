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
from saltflat.loan import open_session
from saltflat.network import Network
from saltflat.symmetry import rules as rules
from saltflat.symmetry.effective import drop_scales_without_effect
from saltflat.symmetry.elimination import collapse_repeats
from saltflat.symmetry.entries import ParameterEntries
from saltflat.symmetry.group import ScaledTensor, Symmetries, build_form_matrix, check_rescaling_kind
from saltflat.symmetry.reaching import find_live_operations
from saltflat.symmetry.running import Seen, find_tensors, parse_example, select_logits, wrap_model_errors
from saltflat.symmetry.same import compute_relative_difference
from saltflat.symmetry.scales import ANY, GROUND
from saltflat.symmetry.watch import Obstacle, ScaleTracker
from saltflat.turns import take_turns

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
SPREAD = 0.5  # of the sizes that are tried: far from one, and far from overflowing

__all__ = [
    "Obstacle",
    "ScaledTensor",
    "Symmetries",
    "compute_output_change",
    "find_batch_symmetries",
    "find_symmetries",
]


@take_turns
def find_symmetries(model: nn.Module, example: Any, kind: str = "unit") -> Symmetries:
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
        >>> group = find_symmetries(net, torch.randn(1, 3))
        >>> group.scales, group.restrict_to_layers().scales
        (5, 1)
    """
    check_rescaling_kind(kind)
    group = find_output_symmetries(model, example, find_tensors)
    return group.restrict_to_layers() if kind == "layer" else group


def find_output_symmetries(model: nn.Module, example: Any, seen: Seen) -> Symmetries:
    """Those that leave alone what is looked at of a model's outputs."""
    args, kwargs = parse_example(example)
    with open_session(model, "eval"):
        names = [name for name, value in model.named_parameters() if value.is_floating_point()]
        if not names:
            return Symmetries({}, csr_array((2, 0)), ())
        return find_network_symmetries(Network(model, names, None), args, kwargs, seen)


def find_batch_symmetries(network: Network, batch: Batch) -> Symmetries:
    """The same for a model on loan and a batch of its data."""
    return trace_batch(network, batch.cut(0, 2))[0]


def trace_batch(network: Network, batch: Batch) -> tuple[Symmetries, ParameterEntries]:
    """The same for all of a batch, and how the entries of parameters were used."""
    return _trace_network(network, batch.args, batch.kwargs, select_logits)


def compute_output_change(network: Network, batch: Batch, group: Symmetries) -> tuple[float, float]:
    """How far one random rescaling moves the outputs of a batch, and how far rounding may."""
    logs = group.compute_factor_logs(group.sample(spread=SPREAD))
    leaves = {
        name: group.members[name].rescale(network.constants[name], each) for name, each in logs.items() if np.any(each)
    }
    with torch.no_grad():
        before, after = network(batch), network(batch, leaves=leaves)
    return compute_relative_difference(before, after), TOLERANCE[before.dtype]


def find_network_symmetries(
    network: Network, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen = find_tensors
) -> Symmetries:
    return _trace_network(network, args, kwargs, seen)[0]


def _trace_network(
    network: Network, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen
) -> tuple[Symmetries, ParameterEntries]:
    model = network.model
    statistics = _find_running_statistics(network)
    parameters = {name for name, _ in model.named_parameters()}
    constants = {name: value for name, value in network.constants.items() if name in parameters or name in statistics}
    real = {name: value for name, value in constants.items() if value.is_floating_point()}

    given = args, kwargs

    def prepare_forward() -> Callable[[], Any]:
        # Copies, because a model may write to its inputs.
        positional, named = _clone_inputs(given)

        def forward() -> Any:
            with network.use_parameters(network.constants):
                return model(*positional, **named)

        return forward

    with torch.no_grad(), wrap_model_errors(model):
        operations = find_live_operations(prepare_forward, seen)
    args, kwargs = _clone_inputs(given)
    modules = {id(module): name for name, module in model.named_modules()}
    watch = ScaleTracker(real, (args, kwargs), modules, operations)
    with torch.no_grad(), network.use_parameters(network.constants), wrap_model_errors(model), watch:
        outputs = model(*args, **kwargs)
    for number, tensor in enumerate(seen(outputs)):
        marks = watch.get_tensor_scales(tensor)
        pinned = watch.scales.pin(watch.entries.look_up_scales(marks.ids) if marks.entries else marks.ids)
        if number and pinned:
            # The first is what everybody expects to be fixed. Others, such as caches, may come as a surprise.
            watch.obstacles["output", "", str(number)] = Obstacle(f"output {number + 1}", "", "", True, pinned)
    for name, kind in statistics.items():
        if kind == "variance" and watch.entries.first[name] not in watch.epsilons:
            # Used by something else than a BatchNorm: who knows how.
            watch.scales.pin(watch.entries.look_up_scales(watch.entries.get_numbers(name, real[name])))
    group = _build_symmetries(watch, real, statistics)

    def run_with_leaves(leaves: Mapping[str, Tensor], inputs: Any) -> list[Tensor]:
        positional, named = _clone_inputs(inputs)
        with network.use_parameters({**network.constants, **leaves}):
            return seen(model(*positional, **named))

    own = {name: value for name, value in real.items() if name in parameters}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return drop_scales_without_effect(group, own, given, run_with_leaves), watch.entries


def _clone_inputs(inputs: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, inputs)


def _find_running_statistics(network: Network) -> dict[str, str]:
    """Names of running means and variances, and which they are."""
    found: dict[str, str] = {}
    for module in network.modules:
        for key, kind in (("running_mean", "mean"), ("running_var", "variance")):
            value = module._buffers.get(key)
            if value is not None and isinstance(module, nn.modules.batchnorm._NormBase):
                found[network.names[id(value)]] = kind
    return found


def _build_symmetries(watch: ScaleTracker, members: Mapping[str, Tensor], statistics: Mapping[str, str]) -> Symmetries:
    scales, entries = watch.scales, watch.entries
    entries.idle = entries.head == ANY
    sides = {}
    there = np.zeros(max(scales.forms) + 1, dtype=bool)
    there[[ANY, GROUND]] = True
    for name, value in members.items():
        span = slice(entries.first[name], entries.first[name] + value.numel())
        sides[name] = [side[span].reshape(value.shape).numpy() for side in (entries.head, entries.tail)]
        for side in sides[name]:
            there[collapse_repeats(side)] = True
    resolved = [scales.system.substitute(scales.forms[number]) for number in np.flatnonzero(there).tolist()]
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
            side[...] = row[collapse_repeats(side)]
        found[name] = ScaledTensor(
            name,
            value.shape,
            head,
            tail,
            kind,
            watch.epsilons.get(first, 0.0) if kind == "variance" else 0.0,
        )
    return Symmetries(
        found, build_form_matrix(resolved, free), tuple(watch.obstacles.values()), assumed=tuple(watch.assumed)
    )
