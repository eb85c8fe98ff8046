"""Find every rescaling of a network that leaves its function unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from saltflat.engine.data import Batch
from saltflat.engine.network import Network
from saltflat.engine.session import open_session, take_turns
from saltflat.symmetry.equality import compute_relative_difference
from saltflat.symmetry.group import (
    Mask,
    Numbers,
    ScaledTensor,
    Symmetries,
    build_form_matrix,
    check_rescaling_kind,
    extract_forms,
)
from saltflat.symmetry.tracing import rules as rules
from saltflat.symmetry.tracing.elimination import Elimination, collapse_repeats, find_first_pairs
from saltflat.symmetry.tracing.entries import ParameterEntries
from saltflat.symmetry.tracing.reachability import find_live_operations
from saltflat.symmetry.tracing.run import Seen, find_tensors, parse_example, select_logits, wrap_model_errors
from saltflat.symmetry.tracing.scales import ANY, GROUND
from saltflat.symmetry.tracing.trace import Obstacle, ScaleTracker

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
SPREAD = 0.5  # of the sizes that are tried: far from one, and far from overflowing


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


# Of random weights, until no output depends on what had no slope in any of them; and how often that is tried.
DRAWS = 16
TRIALS = 3

# The outputs of a model with these values in place of its parameters, for these inputs.
Run = Callable[[Mapping[str, Tensor], Any], list[Tensor]]


def drop_scales_without_effect(group: Symmetries, values: Mapping[str, Tensor], inputs: Any, run: Run) -> Symmetries:
    """Return the group without directions that move only entries no output depends on.

    Args:
        group: as the forward pass shows it.
        values: the parameters.
        inputs: of the model.
        run: gives the outputs that are looked at, for other parameters and inputs.
    """
    members = {name: each for name, each in group.members.items() if name in values}
    if not _can_have_idle_scales(group, list(members.values())):
        return group
    masks = _DependenceProbe(values, inputs, run).find_effective_entries()
    if masks is None or all(mask.all() for mask in masks.values()):
        return group
    system, rows = (
        Elimination(),
        extract_forms(
            _compute_factor_logs(group, [_select_pairs(each, masks[name]) for name, each in members.items()])
        ),
    )
    for form in rows.values():
        system.set_to_zero(form)
    idle = set(system.find_free_variables(range(group.scales)))
    kept = [scale for scale in range(group.scales) if scale not in idle]
    return replace(group, forms=csr_array(group.forms[:, kept]))


def _can_have_idle_scales(group: Symmetries, members: list[ScaledTensor]) -> bool:
    """Whether nothing shrinks as some scale grows: it has no effect, or a norm undoes it."""
    logs = _compute_factor_logs(group, [each.find_pairs() for each in members]).tocoo()
    grows, shrinks = (np.bincount(logs.col[logs.data * sign > 0], minlength=group.scales) for sign in (1, -1))
    return bool(((grows == 0) | (shrinks == 0)).any())


def _compute_factor_logs(group: Symmetries, pairs: list[Numbers]) -> csr_array:
    """The logarithms of the factors of entries between these heads and tails."""
    every = np.concatenate([np.empty((0, 2), dtype=np.int64), *pairs])
    return csr_array(group.forms[every[:, 0]] - group.forms[every[:, 1]])


def _select_pairs(member: ScaledTensor, mask: Mask) -> Numbers:
    if mask.all():
        return member.find_pairs()
    found = np.stack([side[mask] for side in (member.head, member.tail)], 1)
    return found[find_first_pairs(found[:, 0], found[:, 1])] if len(found) else found


class _DependenceProbe:
    """Finds by trial which entries an output depends on."""

    def __init__(self, values: Mapping[str, Tensor], inputs: Any, run: Run) -> None:
        self.values, self.inputs, self.run = values, inputs, run
        self.generator = torch.Generator().manual_seed(0)

    def find_effective_entries(self) -> dict[str, Mask] | None:
        """A mask for each parameter; None if it cannot be told."""
        found = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in self.values.items()}
        try:
            for _ in range(DRAWS):
                # The inputs as they are, which may be zeros, and others.
                for inputs in (self.inputs, self._draw_inputs()):
                    for name, slope in self._compute_gradients(inputs).items():
                        found[name] |= slope != 0
                if all(self._is_complete(found) for _ in range(TRIALS)):
                    return {name: each.cpu().numpy() for name, each in found.items()}
        except Exception:
            # Models may hold what cannot be differentiated, or refuse such numbers: then all that was found is kept.
            pass
        return None

    def _compute_gradients(self, inputs: Any) -> dict[str, Tensor]:
        """Of a random sum of the outputs, at random weights: at those of a trained model units may be dead."""
        leaves = {name: value.requires_grad_() for name, value in self._draw_weights().items()}
        with torch.enable_grad(), _StraightThroughReLU():  # type: ignore[no-untyped-call]
            outputs = [out for out in self.run(leaves, inputs) if out.requires_grad]
            if not outputs:
                return {}
            weights = [torch.randn(out.shape, generator=self.generator).to(out) for out in outputs]
            slopes = torch.autograd.grad(
                outputs, list(leaves.values()), weights, allow_unused=True, materialize_grads=True
            )
        return dict(zip(leaves, slopes, strict=True))

    def _is_complete(self, found: Mapping[str, Tensor]) -> bool:
        """Whether other numbers in all other places give the same outputs: a slope may be zero by chance."""
        if all(bool(each.all()) for each in found.values()):
            return True
        one, two, inputs = self._draw_weights(), self._draw_weights(), self._draw_inputs()
        mixed = {name: torch.where(found[name], one[name], two[name]) for name in found}
        return all(map(torch.equal, self.run(one, inputs), self.run(mixed, inputs)))

    def _draw_weights(self) -> dict[str, Tensor]:
        def draw_weight(value: Tensor) -> Tensor:
            sizes = 0.5 + torch.rand(value.shape, generator=self.generator)
            signs = torch.randint(2, value.shape, generator=self.generator) * 2 - 1
            inputs = value[:1].numel() if value.dim() > 1 else 1
            found: Tensor = (sizes * signs / max(1, inputs) ** 0.5).to(value)
            return found

        return {name: draw_weight(value) for name, value in self.values.items()}

    def _draw_inputs(self) -> Any:
        def draw_input(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            return torch.randn(leaf.shape, generator=self.generator).to(leaf)

        return tree_map(draw_input, self.inputs)


class _StraightThroughReLU(TorchDispatchMode):
    """Lets slopes through units that are off: they depend on their weights all the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.threshold_backward.default:
            return args[0].clone()
        return func(*args, **(kwargs or {}))
