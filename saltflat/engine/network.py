"""A model as a function of constants: the user's own tensors are never handed to anything that could change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from saltflat.engine.data import Batch, find_unsupported_kind
from saltflat.engine.session import AttributeSnapshot, get_tensor_version
from saltflat.errors import ModelError, OptionError, ParameterError, PrecisionError, make_unknown_name_error
from saltflat.layers import LayerRule, find_layer_rule
from saltflat.layers.normalization import normalize_with_fixed_statistics
from saltflat.validation import mark_running

# (module, what it was given, what it gave) -> what it gives instead
Tap = Callable[[nn.Module, Tensor, Tensor], Tensor]


class ModuleConstants:
    """A module as its rule sees it: its options, with constants for its parameters and buffers."""

    def __init__(self, module: nn.Module, values: Mapping[str, Tensor]) -> None:
        self._module, self._values = module, values

    def __getattr__(self, name: str) -> Any:
        values = self._values
        return values[name] if name in values else getattr(self._module, name)


@dataclass(frozen=True)
class MeasuredLayer:
    """A module with a rule, and the names of those of its parameters that are measured."""

    rule: LayerRule
    names: Mapping[str, str]
    constants: ModuleConstants


class Network:
    """The model's function with every parameter and buffer replaced by a detached copy.

    Attributes:
        measured: the parameters to measure, by the names ``named_parameters`` gives them, as detached tensors.
        layers: the modules whose parameters have a factored rule.
        rewrites_batch_norm: whether BatchNorm with fixed statistics is computed by elementary operations, and GroupNorm
            in torch's usual memory layout. The backward passes of torch's own kernels are wrong on a CPU where the
            memory layouts of input and gradient differ, or crash.
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
        self._originals = {name: (value, get_tensor_version(value)) for name, value in _iterate_members(model)}
        self._versions = {name: value._version for name, value in self.constants.items()}
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

        # On CPUs the convolution kernels reorder images that are not channels-last on entry and exit. With 16 channels
        # that is half of their time; with fewer, what the other layers lose by it weighs more.
        images = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        self.channels_last = bool(images) and all(
            m.out_channels >= 16 and m.weight.device.type == "cpu" for m in images
        )

    def __call__(
        self,
        batch: Batch,
        tap: Tap | None = None,
        leaves: Mapping[str, Tensor] | None = None,
        plain: bool = False,
        as_is: bool = False,
    ) -> Tensor:
        """Outputs of a batch.

        Inside a module with a rule its parameters are constants and ``tap`` sees the call; everywhere else the model
        finds ``leaves`` in place of the parameters of those names. ``plain`` leaves the rules' own forwards aside,
        ``as_is`` every other replacement too.
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
                stack.enter_context(_BatchNormRewriter())
            if self.needs_graph:
                stack.enter_context(torch.enable_grad())
            outputs = extract_logits(self.model(*args, **kwargs))
        return outputs if wanted or not self.needs_graph else outputs.detach()

    @contextmanager
    def use_parameters(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """The modules with these parameters and buffers; all their attributes are put back afterwards.

        That includes what a forward pass leaves behind (caches, counters, buffers registered on the fly), and modules
        that are reachable under several names.
        """
        self.undo_writes()
        self.attributes.restore()
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
        """Give constants that an earlier pass wrote to their values again.

        Not right after that pass: its backward pass needs what it wrote.
        """
        for name, constant in self.constants.items():
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
        """Names of the constants that passes so far have changed, also past their version counters (``.data``).

        From now on these are given their values again before every pass.
        """
        for name, constant in self.constants.items():
            original = self._get_original(name)
            if original is not None and (constant.shape != original.shape or not _is_unchanged(constant, original)):
                self._written.add(name)
        return [name for name in self.constants if name in self._written]

    def _get_original(self, name: str) -> Tensor | None:
        """The user's own tensor, unless it was changed since it was copied."""
        value, version = self._originals[name]
        return value.detach() if get_tensor_version(value) == version else None

    @contextmanager
    def _install_taps(self, tap: Tap | None, plain: bool) -> Iterator[None]:
        if tap is None:
            yield
            return
        try:
            for module, layer in self.layers.items():
                module.forward = _make_tapped_forward(module, layer.rule, tap, plain)
            yield
        finally:
            for module in self.layers:
                vars(module).pop("forward", None)


def _make_tapped_forward(module: nn.Module, rule: LayerRule, tap: Tap, plain: bool) -> Callable[..., Tensor]:
    # What the session has put into the module. A model may put something else there for a call (functional_call): the
    # rule does not know what that was made of, autograd does.
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
            own.update({key: value.detach() for key, value in kept.items() if value is not None})  # type: ignore[misc]
            if rule.forward is not None and len(args) == 1 and not kwargs and not plain:
                y = rule.forward(module, args[0])
            else:
                y = type(module).forward(module, *args, **kwargs)
        finally:
            own.update(kept)
        x = args[0] if args else kwargs["input"]
        return tap(module, x, y)

    return forward


class _BatchNormRewriter(TorchFunctionMode):
    """Computes BatchNorm with fixed statistics, and InstanceNorm, by elementary operations wherever they are called.

    GroupNorm whose input has the channels last and no gradient gets a copy of it in the usual layout: on a CPU torch's
    backward pass of the rest ends the process.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BATCH_NORMS:
            given = dict(zip(_BATCH_NORMS[func], args, strict=False)) | kwargs
            x, mean, variance = given["input"], given.get("running_mean"), given.get("running_var")
            weight, bias = given.get("weight"), given.get("bias")
            fixed = mean is not None and variance is not None
            of_batch = given.get("training", False) or given.get("use_input_stats", func is F.instance_norm)
            fixed = fixed and not of_batch
            if func in (torch.instance_norm, F.instance_norm) and of_batch and mean is None and variance is None:
                return _normalize_instances(x, weight, bias, given.get("eps", 1e-5))
            if fixed and all(each is None or each.dtype == x.dtype for each in (mean, variance, weight, bias)):
                return normalize_with_fixed_statistics(x, mean, variance, weight, bias, given.get("eps", 1e-5))
        elif func in (torch.group_norm, F.group_norm) and args and not args[0].requires_grad:
            args = (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        return func(*args, **kwargs)


def _normalize_instances(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``(examples, channels, *space)`` with the statistics of each channel of each example."""
    along = [1] * (x.dim() - 2)
    variance, mean = torch.var_mean(x, list(range(2, x.dim())), correction=0, keepdim=True)
    y = (x - mean) * (variance + eps).rsqrt()
    y = y if weight is None else y * weight.reshape(-1, *along)
    return y if bias is None else y + bias.reshape(-1, *along)


# The parameters of each function, in their order. F.instance_norm takes statistics of the batch unless told otherwise.
_INPUTS = ("input", "weight", "bias", "running_mean", "running_var")
_BATCH_NORMS: dict[Any, tuple[str, ...]] = {
    torch.batch_norm: (*_INPUTS, "training", "momentum", "eps"),
    torch.instance_norm: (*_INPUTS, "use_input_stats", "momentum", "eps"),
    F.batch_norm: tuple(signature(F.batch_norm).parameters),
    F.instance_norm: tuple(signature(F.instance_norm).parameters),
}


def _convert_channels_last(x: Any) -> Any:
    images = isinstance(x, Tensor) and x.dim() == 4
    return x.contiguous(memory_format=torch.channels_last) if images else x


def _iterate_members(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _copy_constants(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Detached copies of all parameters and buffers: a forward pass may write to any of them, also past torch's back.

    That takes as much memory as the model, which is less than the statistics of its parameters take.
    """

    def copy_tensor(value: Tensor) -> Tensor:
        constant = value.detach()
        if dtype is not None and value.is_floating_point():
            constant = constant.to(dtype)
        return constant.clone() if constant.data_ptr() == value.data_ptr() else constant

    return {name: copy_tensor(value) for name, value in _iterate_members(model)}


def _is_unchanged(constant: Tensor, original: Tensor) -> bool:
    return bool(((constant == original.to(constant.dtype)) | (constant != constant)).all())


def _select_parameters(model: nn.Module, layers: Sequence[str] | str | None) -> list[str]:
    parameters = dict(model.named_parameters())
    if layers is None:
        names = [name for name, p in parameters.items() if p.requires_grad]
        if not names:
            raise ParameterError(
                f"Expected at least one to measure, but got a model with {len(parameters)} parameters, none of which "
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
        if not parameter.is_floating_point():
            kind = "complex" if parameter.is_complex() else "integer"
            raise ParameterError(
                f"Expected real floating-point parameters, but got the {kind} parameter {name!r} "
                f"({parameter.dtype}). Others have no curvature here. Try leaving it out by naming the others with "
                "layers=[...]."
            )
    return names


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
                    f"Expected one that has, but got the layer {layer!r}, which has no parameters. Try naming another."
                )
            raise make_unknown_name_error("layer", layer, {*every, *modules})
        found.update(dict.fromkeys(inside))
    if not found:
        raise ParameterError(
            "Expected at least one name, but got layers=[], which leaves nothing to measure. Try passing None for all."
        )
    return [name for name in parameters if name in found]


def check_precision(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Curvature needs at least float32."""
    if dtype is not None:
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):
            raise PrecisionError(
                f"Expected torch.float32 or torch.float64, but got dtype={dtype}. Try leaving dtype out or passing "
                "one of these."
            )
        return
    for name, value in _iterate_members(model):
        if value.is_floating_point() and value.dtype not in (torch.float32, torch.float64):
            raise PrecisionError(
                f"Expected float32 or float64, but got {name!r} in {value.dtype}. Squares of gradients underflow in "
                "half precision. Try passing dtype=torch.float32; the model itself stays as it is."
            )


def extract_logits(outputs: Any) -> Tensor:
    """The tensor the loss is taken of, also from outputs that carry it as ``logits``."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", outputs)
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        got = outputs.dtype if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ModelError(
            f"Expected a floating-point tensor, or an object with one as .logits or ['logits'], but got {got} from "
            "the model. Try wrapping the model in a module that returns the outputs the loss is taken of."
        )
    check_dense_outputs(outputs)
    return outputs


def check_dense_outputs(outputs: Tensor) -> None:
    """Refuse outputs that are not dense tensors."""
    kind = find_unsupported_kind(outputs)
    if kind is not None:
        raise ModelError(
            f"Expected a dense tensor from the model, but got a {kind} one. Try wrapping the model in a module that "
            "returns to_dense() or to_padded_tensor() of it."
        )
