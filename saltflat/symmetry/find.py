"""Find every rescaling of a network that leaves its function unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from saltflat.engine.data import Batch
from saltflat.engine.network import Network
from saltflat.engine.session import open_session
from saltflat.symmetry.equality import (
    Example,
    ModelInputs,
    OutputSelector,
    clone_inputs,
    compute_relative_difference,
    find_tensors,
    parse_example,
    select_logits,
    wrap_model_errors,
)
from saltflat.symmetry.group import (
    Mask,
    Numbers,
    RescalingKind,
    ScaledTensor,
    Symmetries,
    build_form_matrix,
    check_rescaling_kind,
    extract_forms,
)
from saltflat.symmetry.tracing import rules  # noqa: F401 - importing it registers the rules
from saltflat.symmetry.tracing.entries import ParameterEntries, find_live_operations
from saltflat.symmetry.tracing.scales import ANY, GROUND, Elimination, collapse_repeats, find_first_pairs
from saltflat.symmetry.tracing.trace import Obstacle, ScaleTracker
from saltflat.validation import take_turns

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
SPREAD = 0.5  # of the scales that are tried: far from one, and far from overflow


@take_turns
def find_symmetries(model: nn.Module, example: Example, kind: RescalingKind = "unit") -> Symmetries:
    """Find every rescaling of the units of a network that leaves its function unchanged.

    One forward pass is traced, operation by operation. This works for any module whose forward pass runs the same
    operations on every input; operations without a rule are listed in ``obstacles`` and assumed to fix all scales they
    involve.

    Args:
        model: any module; it is not modified, and runs in eval mode.
        example: a typical input: a tensor, a tuple of positional inputs or a dict of named ones.
        kind: ``"unit"`` for one scale per unit, ``"layer"`` for rescalings that multiply each parameter by one number.

    Example:
        A ReLU network has as many scales as hidden units.

        >>> net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        >>> group = find_symmetries(net, torch.randn(1, 3))
        >>> group.scales, group.restrict_to_layers().scales
        (5, 1)
    """
    check_rescaling_kind(kind)
    group = find_output_symmetries(model, example, find_tensors)
    return group.restrict_to_layers() if kind == "layer" else group


def find_output_symmetries(model: nn.Module, example: Example, select_outputs: OutputSelector) -> Symmetries:
    """Find every rescaling that leaves the selected outputs of a model unchanged."""
    args, kwargs = parse_example(example)
    with open_session(model, "eval"):
        names = [name for name, value in model.named_parameters() if value.is_floating_point()]
        if not names:
            return Symmetries({}, csr_array((2, 0)), ())
        return find_network_symmetries(Network(model, names, None), args, kwargs, select_outputs)


def find_batch_symmetries(network: Network, batch: Batch) -> Symmetries:
    """Find every rescaling that leaves the logits of the first examples of a batch unchanged."""
    return trace_batch(network, batch.cut(0, 2))[0]


def trace_batch(network: Network, batch: Batch) -> tuple[Symmetries, ParameterEntries]:
    """Return the rescalings that leave the logits of a batch unchanged, and the uses of parameter entries."""
    return _trace_network(network, batch.args, batch.kwargs, select_logits)


def compute_output_change(network: Network, batch: Batch, group: Symmetries) -> tuple[float, float]:
    """Return the relative change of the outputs under one random rescaling, and the tolerance for rounding errors."""
    logs = group.compute_factor_logs(group.sample(spread=SPREAD))
    leaves = {
        name: group.members[name].rescale(network.constants[name], each) for name, each in logs.items() if np.any(each)
    }
    with torch.no_grad():
        before, after = network(batch), network(batch, leaves=leaves)
    return compute_relative_difference(before, after), TOLERANCE[before.dtype]


def find_network_symmetries(
    network: Network, args: tuple[Any, ...], kwargs: dict[str, Any], select_outputs: OutputSelector = find_tensors
) -> Symmetries:
    """Find every rescaling that leaves the selected outputs on given inputs unchanged."""
    return _trace_network(network, args, kwargs, select_outputs)[0]


def _trace_network(
    network: Network, args: tuple[Any, ...], kwargs: dict[str, Any], select_outputs: OutputSelector
) -> tuple[Symmetries, ParameterEntries]:
    model = network.model
    statistics = _find_running_statistics(network)
    parameters = {name for name, _ in model.named_parameters()}
    constants = {name: value for name, value in network.constants.items() if name in parameters or name in statistics}
    real = {name: value for name, value in constants.items() if value.is_floating_point()}

    given = args, kwargs

    def prepare_forward() -> Callable[[], Any]:
        positional, named = clone_inputs(given)

        def forward() -> Any:
            with network.use_parameters(network.constants):
                return model(*positional, **named)

        return forward

    with torch.no_grad(), wrap_model_errors(model):
        operations = find_live_operations(prepare_forward, select_outputs)
    args, kwargs = clone_inputs(given)
    modules = {id(module): name for name, module in model.named_modules()}
    tracker = ScaleTracker(real, (args, kwargs), modules, operations)
    with torch.no_grad(), network.use_parameters(network.constants), wrap_model_errors(model), tracker:
        outputs = model(*args, **kwargs)
    for number, tensor in enumerate(select_outputs(outputs)):
        marks = tracker.get_tensor_scales(tensor)
        pinned = tracker.scales.pin(tracker.entries.look_up_scales(marks.ids) if marks.entries else marks.ids)
        if number and pinned:
            # The first output is expected to be fixed. Others, such as caches, may be unexpected obstacles.
            tracker.obstacles["output", "", str(number)] = Obstacle(f"output {number + 1}", "", "", True, pinned)
    for name, kind in statistics.items():
        if kind == "variance" and tracker.entries.first[name] not in tracker.epsilons:
            # Not used by a BatchNorm, but by unknown code.
            tracker.scales.pin(tracker.entries.look_up_scales(tracker.entries.get_numbers(name, real[name])))
    group = _build_symmetries(tracker, real, statistics)

    def run_with_leaves(leaves: Mapping[str, Tensor], inputs: ModelInputs) -> list[Tensor]:
        positional, named = clone_inputs(inputs)
        with network.use_parameters({**network.constants, **leaves}):
            return select_outputs(model(*positional, **named))

    own = {name: value for name, value in real.items() if name in parameters}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return drop_scales_without_effect(group, own, given, run_with_leaves), tracker.entries


def _find_running_statistics(network: Network) -> dict[str, str]:
    """Return the kind, ``"mean"`` or ``"variance"``, of every running statistic by name."""
    found: dict[str, str] = {}
    for module in network.modules:
        for key, kind in (("running_mean", "mean"), ("running_var", "variance")):
            value = module._buffers.get(key)
            if value is not None and isinstance(module, nn.modules.batchnorm._NormBase):
                found[network.names[id(value)]] = kind
    return found


def _build_symmetries(
    tracker: ScaleTracker, members: Mapping[str, Tensor], statistics: Mapping[str, str]
) -> Symmetries:
    scales, entries = tracker.scales, tracker.entries
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
    # Unused entries are fixed.
    row[ANY] = GROUND
    free = sorted({variable for form in resolved for variable in form})
    found = {}
    for name, value in members.items():
        first, kind = entries.first[name], statistics.get(name, "parameter")
        head, tail = sides[name]
        for side in (head, tail):
            # In place: the old numbers are no longer needed, and for a large model allocating memory takes most time.
            side[...] = row[collapse_repeats(side)]
        found[name] = ScaledTensor(
            name,
            value.shape,
            head,
            tail,
            kind,
            tracker.epsilons.get(first, 0.0) if kind == "variance" else 0.0,
        )
    return Symmetries(
        found, build_form_matrix(resolved, free), tuple(tracker.obstacles.values()), assumed=tuple(tracker.assumed)
    )


# Maximum number of draws of random weights, and number of checks that no output depends on entries without gradient.
DRAWS = 16
TRIALS = 3

# Returns the outputs of a model for given parameters and inputs.
ForwardFunction: TypeAlias = Callable[[Mapping[str, Tensor], ModelInputs], list[Tensor]]


def drop_scales_without_effect(
    group: Symmetries, values: Mapping[str, Tensor], inputs: ModelInputs, run: ForwardFunction
) -> Symmetries:
    """Return the group without directions that change only entries on which no output depends.

    Args:
        group: the rescalings found by tracing.
        values: the parameters.
        inputs: inputs of the model.
        run: returns the selected outputs for given parameters and inputs.
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
    """Return whether some scale only increases or only decreases entries."""
    logs = _compute_factor_logs(group, [each.find_pairs() for each in members]).tocoo()
    grows, shrinks = (np.bincount(logs.col[logs.data * sign > 0], minlength=group.scales) for sign in (1, -1))
    return bool(((grows == 0) | (shrinks == 0)).any())


def _compute_factor_logs(group: Symmetries, pairs: list[Numbers]) -> csr_array:
    """Return the log factors of entries between these heads and tails, as linear forms of the scales."""
    every = np.concatenate([np.empty((0, 2), dtype=np.int64), *pairs])
    return csr_array(group.forms[every[:, 0]] - group.forms[every[:, 1]])


def _select_pairs(member: ScaledTensor, mask: Mask) -> Numbers:
    if mask.all():
        return member.find_pairs()
    found = np.stack([side[mask] for side in (member.head, member.tail)], 1)
    return found[find_first_pairs(found[:, 0], found[:, 1])] if len(found) else found


class _DependenceProbe:
    """Determines empirically which entries an output depends on."""

    def __init__(self, values: Mapping[str, Tensor], inputs: ModelInputs, run: ForwardFunction) -> None:
        self.values, self.inputs, self.run = values, inputs, run
        self.generator = torch.Generator().manual_seed(0)

    def find_effective_entries(self) -> dict[str, Mask] | None:
        """Return a mask for each parameter, or None if this cannot be determined."""
        found = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in self.values.items()}
        try:
            for _ in range(DRAWS):
                # Use random inputs, too, since the given ones may be zeros.
                for inputs in (self.inputs, self._draw_inputs()):
                    for name, slope in self._compute_gradients(inputs).items():
                        found[name] |= slope != 0
                if all(self._is_complete(found) for _ in range(TRIALS)):
                    return {name: each.cpu().numpy() for name, each in found.items()}
        except Exception:
            # Models may not be differentiable, or may not accept such weights: then all scales are kept.
            pass
        return None

    def _compute_gradients(self, inputs: ModelInputs) -> dict[str, Tensor]:
        """Return the gradients of a random sum of outputs at random weights; trained ones may have dead units."""
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
        """Return whether changing all other entries leaves the outputs equal; a gradient may be zero by chance."""
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

    def _draw_inputs(self) -> ModelInputs:
        def draw_input(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return torch.randn(tensor.shape, generator=self.generator).to(tensor)

        inputs: ModelInputs = tree_map_only(Tensor, draw_input, self.inputs)
        return inputs


class _StraightThroughReLU(TorchDispatchMode):
    """Passes gradients through inactive ReLU units, whose outputs depend on their weights all the same."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.threshold_backward.default:
            return args[0].clone()
        return func(*args, **(kwargs or {}))
