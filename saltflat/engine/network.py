"""The network: it runs the model that the session lends, with copies in place of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from saltflat.engine.data import Batch
from saltflat.engine.model_output import extract_logits
from saltflat.engine.session import AttributeSnapshot, get_tensor_version
from saltflat.errors import OptionError, ParameterError, PrecisionError, make_unknown_name_error
from saltflat.layers import LayerRule, find_layer_rule
from saltflat.layers.normalization import NormalizationRewriter
from saltflat.validation import mark_running

T = TypeVar("T")
# Called with a module, its input and its output; returns the output to use instead.
Tap = Callable[[nn.Module, Tensor, Tensor], Tensor]
Watch = Callable[[nn.Module, Tensor], None]


class ModuleConstants:
    """A module as its rule sees it: its options, and constants in place of its parameters and buffers."""

    def __init__(self, module: nn.Module, values: Mapping[str, Tensor]) -> None:
        self._module, self._values = module, values

    def __getattr__(self, name: str) -> Any:
        values = self._values
        return values[name] if name in values else getattr(self._module, name)


@dataclass(frozen=True)
class MeasuredLayer:
    """A module with a rule.

    Attributes:
        rule: of the module's type.
        names: of the measured parameters in the model, by their names in the module.
        constants: the module with constants in place of its parameters and buffers.
    """

    rule: LayerRule
    names: Mapping[str, str]
    constants: ModuleConstants


class Network:
    """Runs the model with a detached copy in place of every parameter and buffer.

    The model has to be lent by :func:`saltflat.engine.session.open_session` while it runs.

    Attributes:
        constants: the copies of all parameters and buffers, by name.
        measured: the copies of the parameters to measure, by their names in ``named_parameters``.
        layers: the modules whose parameters have a factored rule.
        rewrites_batch_norm: whether BatchNorm with fixed statistics is computed by elementary operations, and GroupNorm
            in torch's usual memory layout. On a CPU, the backward passes of torch's own kernels crash or are wrong if
            the memory layouts of input and gradient differ.
        needs_graph: whether the forward pass differentiates, so that it cannot run with gradients off.
        has_other_slope: whether the backward pass was found not to be the derivative of the forward pass.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str] | str | None, dtype: torch.dtype | None) -> None:
        self.model = model
        names = _select_parameters(model, layers)
        self.constants = _copy_constants(model, dtype)
        self.measured = {name: self.constants[name] for name in names}
        self.layers: dict[nn.Module, MeasuredLayer] = {}
        self.modules = list(model.modules())
        self.attributes = AttributeSnapshot(self.modules)
        # A parameter that is also registered as a buffer is a parameter.
        self.names: dict[int, str] = {}
        for name, value in _iterate_members(model):
            self.names.setdefault(id(value), name)
        self.rewrites_batch_norm = any(
            isinstance(m, nn.modules.batchnorm._NormBase | nn.GroupNorm) for m in self.modules
        )
        self.needs_graph = False
        self.has_other_slope = False
        self._watch: Watch | None = None
        self._originals = {
            name: (value, get_tensor_version(value)) for name, value in _iterate_members(model) if not is_packed(value)
        }
        self._versions = {name: self.constants[name]._version for name in self._originals}
        self._written: set[str] = set()
        by_id = self.names
        for module in model.modules():
            held = {
                key: by_id[id(v)] for key, v in [*module._parameters.items(), *module._buffers.items()] if v is not None
            }
            own = {key: held[key] for key in module._parameters if held.get(key) in self.measured}
            rule = find_layer_rule(module) if own else None
            if rule is not None:
                constants = {key: self.constants[name] for key, name in held.items()}
                self.layers[module] = MeasuredLayer(rule, own, ModuleConstants(module, constants))

        # On a CPU the convolution kernels reorder images that are not channels-last on entry and exit. With 16 channels
        # that takes half of their time; with fewer, the other layers lose more by the layout than it gains. Those of
        # float64 take the usual layout.
        images = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        self.channels_last = bool(images) and all(
            m.out_channels >= 16 and m.weight.device.type == "cpu" and (dtype or m.weight.dtype) != torch.float64
            for m in images
        )

    def __call__(
        self,
        batch: Batch,
        tap: Tap | None = None,
        leaves: Mapping[str, Tensor] | None = None,
        plain: bool = False,
        as_is: bool = False,
    ) -> Tensor:
        """Return the model's outputs for a batch.

        Args:
            batch: the examples.
            tap: called with each call of a module with a rule, whose parameters are constants inside.
            leaves: tensors to use in place of the parameters of these names, outside of modules with a rule.
            plain: do not use the rules' own forwards.
            as_is: do not rewrite BatchNorm and GroupNorm either.
        """
        parameters = {**self.constants, **(leaves or {})}
        # Copies, because a model may write to its inputs.
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (batch.args, batch.kwargs))
        if tap is not None and not plain and self.channels_last:
            args, kwargs = tree_map(_convert_channels_last, (args, kwargs))
        wanted = torch.is_grad_enabled()
        with ExitStack() as stack:
            stack.enter_context(self.use_parameters(parameters))
            stack.enter_context(self._install_taps(tap, plain))
            if self.rewrites_batch_norm and not as_is:
                stack.enter_context(NormalizationRewriter())
            if self.needs_graph:
                stack.enter_context(torch.enable_grad())
            outputs = extract_logits(self.model(*args, **kwargs))
        return outputs if wanted or not self.needs_graph else outputs.detach()

    @contextmanager
    def use_parameters(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Put these parameters and buffers into the modules, and restore all attributes of the modules afterwards.

        That includes what a forward pass leaves behind (caches, counters, buffers registered on the fly), and modules
        with several names.
        """
        self.undo_writes()
        self.attributes.restore()
        # With the scales that belong to them. Their layers may move these elsewhere, or pack them in another way.
        parameters = {name: deepcopy(value) if is_packed(value) else value for name, value in parameters.items()}
        holders = ("_parameters", "_buffers", "_modules")
        kept = [(m, dict(vars(m)), {key: dict(vars(m)[key]) for key in holders}) for m in self.modules]
        try:
            for module, _, held in kept:
                for holder in ("_parameters", "_buffers"):
                    present = {key: value for key, value in held[holder].items() if value is not None}
                    vars(module)[holder].update({key: parameters[self.names[id(v)]] for key, v in present.items()})
                if isinstance(module, nn.RNNBase):
                    vars(module)["_flat_weights"] = [getattr(module, name) for name in module._flat_weights_names]
            self.attributes.replace_aliases({key: parameters[name] for key, name in self.names.items()})
            with mark_running():
                yield
        finally:
            self.attributes.restore_aliases()
            for module, attributes, held in kept:
                vars(module).clear()
                vars(module).update(attributes)
                for holder, contents in held.items():
                    vars(module)[holder].clear()
                    vars(module)[holder].update(contents)

    def undo_writes(self) -> None:
        """Restore the constants that an earlier pass wrote to.

        This is not done right after that pass, since its backward pass needs what it wrote.
        """
        for name in self._originals:
            constant = self.constants[name]
            if constant._version == self._versions[name] and name not in self._written:
                continue
            original = self._get_original(name)
            if original is None:
                continue
            with torch.no_grad():
                if constant.shape != original.shape:
                    constant.data = original.to(constant.dtype, copy=True)
                constant.copy_(original)
            self._versions[name] = constant._version

    def find_writes(self) -> list[str]:
        """Return the names of the constants that passes have changed so far, also through ``.data``.

        From now on these are restored before every pass.
        """
        for name in self._originals:
            constant, original = self.constants[name], self._get_original(name)
            if original is not None and (constant.shape != original.shape or not _is_unchanged(constant, original)):
                self._written.add(name)
        return [name for name in self.constants if name in self._written]

    def _get_original(self, name: str) -> Tensor | None:
        """Return the user's own tensor, or None if it was changed after it was copied."""
        value, version = self._originals[name]
        return value.detach() if get_tensor_version(value) == version else None

    @contextmanager
    def watch_inputs(self, watch: Watch | None) -> Iterator[None]:
        """Call a function with each module that is tapped and its input, until the end of the block."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @contextmanager
    def _install_taps(self, tap: Tap | None, plain: bool) -> Iterator[None]:
        if tap is None:
            yield
            return
        if self._watch is not None:
            tap = _watch_first(self._watch, tap)
        try:
            for module, layer in self.layers.items():
                module.forward = _make_tapped_forward(module, layer.rule, tap, plain)
            yield
        finally:
            for module in self.layers:
                vars(module).pop("forward", None)


def _make_tapped_forward(module: nn.Module, rule: LayerRule, tap: Tap, plain: bool) -> Callable[..., Tensor]:
    # What the network has put into the module. If the model replaces it for a call (functional_call), the rule does not
    # know how the replacement was computed, but autograd does.
    expected = {**module._parameters, **module._buffers}

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        held = {**module._parameters, **module._buffers}
        same = held.keys() == expected.keys() and all(held[key] is value for key, value in expected.items())
        same = same and not any(key in vars(module) for key in expected)
        if not same or not rule.applies(module) or not (args or "input" in kwargs):
            untouched: Tensor = type(module).forward(module, *args, **kwargs)
            return untouched
        own = module._parameters
        kept = dict(own)
        try:
            own.update({key: _detach(value) for key, value in kept.items() if value is not None})  # type: ignore[misc]
            if rule.forward is not None and len(args) == 1 and not kwargs and not plain:
                y = rule.forward(module, args[0])
            else:
                y = type(module).forward(module, *args, **kwargs)
        finally:
            own.update(kept)
        x = args[0] if args else kwargs["input"]
        return tap(module, x, y)

    return forward


def _watch_first(watch: Watch, tap: Tap) -> Tap:
    def watch_and_tap(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        watch(module, x)
        return tap(module, x, y)

    return watch_and_tap


def _detach(value: Tensor) -> Tensor:
    return value if is_packed(value) else value.detach()


def _convert_channels_last(x: T) -> T | Tensor:
    return x.contiguous(memory_format=torch.channels_last) if isinstance(x, Tensor) and x.dim() == 4 else x


def _iterate_members(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _copy_constants(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return detached copies of all parameters and buffers: a forward pass may write to any of them.

    They take as much memory as the model, which is less than the statistics of its parameters take.
    """

    def copy_tensor(value: Tensor) -> Tensor:
        if is_packed(value):
            return value  # every pass gets a copy
        constant = value.detach()
        if dtype is not None and value.is_floating_point():
            constant = constant.to(dtype)
        return constant.clone() if constant.data_ptr() == value.data_ptr() else constant

    return {name: copy_tensor(value) for name, value in _iterate_members(model)}


def is_packed(value: Tensor) -> bool:
    """Return whether a tensor holds its numbers in a form of its own, as quantized weights of 8 or 4 bits do."""
    is_own_kind = isinstance(value, nn.Parameter) and type(value) is not nn.Parameter
    return is_traceable_wrapper_subclass(value) or (is_own_kind and not value.is_floating_point())


def _is_unchanged(constant: Tensor, original: Tensor) -> bool:
    original = original.to(constant.dtype)
    return torch.equal(constant, original) or bool(((constant == original) | (constant != constant)).all())


def _select_parameters(model: nn.Module, layers: Sequence[str] | str | None) -> list[str]:
    parameters = dict(model.named_parameters())
    if layers is None:
        names = [name for name, p in parameters.items() if p.requires_grad]
        if not names:
            raise ParameterError(
                f"Expected at least one parameter to measure, but got a model with {len(parameters)}, none of which "
                "requires a gradient. Try calling requires_grad_() on what you train, or naming parameters with "
                "layers=[...]."
            )
        suspects = parameters
    else:
        listed = [layers] if isinstance(layers, str) else layers
        if not isinstance(listed, Sequence) or not all(isinstance(name, str) for name in listed):
            raise OptionError(f"Expected a name or a list of names, but got layers={layers!r}. Try layers=['conv1'].")
        names = _find_named_parameters(model, listed, parameters)
        suspects = {name: parameters[name] for name in names}
    for name, parameter in suspects.items():
        if is_packed(parameter) or not parameter.is_floating_point():
            raise ParameterError(_explain_other_numbers(name, parameter))
    return names


def _explain_other_numbers(name: str, parameter: Tensor) -> str:
    """Return why a parameter without real floating-point numbers cannot be measured."""
    got = f"{name!r} ({type(parameter).__name__ if is_packed(parameter) else parameter.dtype})"
    if is_packed(parameter) or parameter.dtype in (torch.int8, torch.uint8):
        return (
            f"Expected real floating-point parameters, but got {got}, 8- or 4-bit weights, which "
            "are not trained. Try measuring adapters trained on top of them, by naming the parameters that require a "
            "gradient: layers=[name for name, each in model.named_parameters() if each.requires_grad]."
        )
    kind = "complex" if parameter.is_complex() else "integer"
    return (
        f"Expected real floating-point parameters, but got the {kind} parameter {got}, for which curvature is not "
        "defined here. Try naming the other layers with layers=[...]."
    )


def _find_named_parameters(model: nn.Module, layers: Sequence[str], parameters: Mapping[str, Tensor]) -> list[str]:
    by_id = {id(p): name for name, p in parameters.items()}
    every = {name: by_id[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    modules = {name for name, _ in model.named_modules(remove_duplicate=False) if name}
    found: dict[str, None] = {}
    for layer in layers:
        inside = [every[layer]] if layer in every else [every[name] for name in every if name.startswith(f"{layer}.")]
        if not inside:
            if layer in modules:
                raise ParameterError(
                    f"Expected a layer with parameters, but got {layer!r}, which has none. Try naming another."
                )
            raise make_unknown_name_error("layer", layer, {*every, *modules})
        found.update(dict.fromkeys(inside))
    if not found:
        raise ParameterError(
            "Expected at least one name, but got layers=[], which leaves nothing to measure. Try layers=None for all."
        )
    return [name for name in parameters if name in found]


def check_precision(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Check that the precision is at least float32, which curvature needs."""
    if dtype is not None:
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):
            raise PrecisionError(
                f"Expected torch.float32 or torch.float64, but got dtype={dtype!r}. Try leaving dtype out, or passing "
                "one of these."
            )
        return
    for name, value in _iterate_members(model):
        if value.is_floating_point() and value.dtype not in (torch.float32, torch.float64):
            raise PrecisionError(
                f"Expected float32 or float64, but got {name!r} in {value.dtype}. Squares of gradients underflow in "
                "half precision. Try passing dtype=torch.float32; the model itself is not changed."
            )
