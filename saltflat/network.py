"""A model as a function of constants: the user's own tensors are never handed to anything that could change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from saltflat.data import Batch
from saltflat.errors import ModelError, OptionError, ParameterError, PrecisionError, unknown
from saltflat.layers import Rule, rule_for

SMALL_MODEL = 64 << 20  # bytes

# (module, what it was given, what it gave) -> what it gives instead
Tap = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Constants:
    """A module as its rule sees it: its options, with constants for its parameters and buffers."""

    def __init__(self, module: nn.Module, values: Mapping[str, Tensor]) -> None:
        self._module, self._values = module, values

    def __getattr__(self, name: str) -> Any:
        values = self._values
        return values[name] if name in values else getattr(self._module, name)


@dataclass(frozen=True)
class Layer:
    """A module with a rule, and the names of those of its parameters that are measured."""

    rule: Rule
    names: Mapping[str, str]
    constants: Constants


class Network:
    """The model's function with every parameter and buffer replaced by a detached one.

    Attributes:
        measured: the parameters to measure, by the names ``named_parameters`` gives them, as detached tensors.
        layers: the modules whose parameters have a factored rule.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str] | str | None, dtype: torch.dtype | None) -> None:
        self.model = model
        names = _selected(model, layers)
        self.constants = _constants(model, dtype)
        self.measured = {name: self.constants[name] for name in names}
        self.layers: dict[nn.Module, Layer] = {}
        self.modules = list(model.modules())
        self.names = by_id = {id(value): name for name, value in _members(model)}
        for module in model.modules():
            held = {
                key: by_id[id(v)] for key, v in [*module._parameters.items(), *module._buffers.items()] if v is not None
            }
            own = {key: name for key, name in held.items() if name in self.measured}
            rule = rule_for(module) if own else None
            if rule is not None:
                constants = {key: self.constants[name] for key, name in held.items()}
                self.layers[module] = Layer(rule, own, Constants(module, constants))

        # On CPUs the convolution kernels reorder images that are not channels-last on entry and exit. With 16 channels
        # that is half of their time; with fewer, what the other layers lose by it weighs more.
        images = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        self.channels_last = bool(images) and all(
            m.out_channels >= 16 and m.weight.device.type == "cpu" for m in images
        )

    def __call__(
        self, batch: Batch, tap: Tap | None = None, leaves: Mapping[str, Tensor] | None = None, plain: bool = False
    ) -> Tensor:
        """Outputs of a batch.

        Inside a module with a rule its parameters are constants and ``tap`` sees the call; everywhere else the model
        finds ``leaves`` in place of the parameters of those names. ``plain`` leaves the rules' own forwards aside.
        """
        parameters = {**self.constants, **(leaves or {})}
        # Copies, because a model may write to its inputs.
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (batch.args, batch.kwargs))
        if tap is not None and not plain and self.channels_last:
            args, kwargs = tree_map(_channels_last, (args, kwargs))
        with self.lent(parameters), self._tapped(tap, plain):
            outputs = self.model(*args, **kwargs)
        return logits(outputs)

    @contextmanager
    def lent(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """The modules with these parameters and buffers; all their attributes are put back afterwards.

        That includes what a forward pass leaves behind (caches, counters, buffers registered on the fly), and modules
        that are reachable under several names.
        """
        holders = ("_parameters", "_buffers", "_modules")
        kept = [(m, dict(vars(m)), {key: dict(vars(m)[key]) for key in holders}) for m in self.modules]
        try:
            for module, _, held in kept:
                for holder in ("_parameters", "_buffers"):
                    present = {key: value for key, value in held[holder].items() if value is not None}
                    vars(module)[holder].update({key: parameters[self.names[id(v)]] for key, v in present.items()})
                if isinstance(module, nn.RNNBase):
                    vars(module)["_flat_weights"] = [getattr(module, name) for name in module._flat_weights_names]
            yield
        finally:
            for module, attributes, held in kept:
                vars(module).clear()
                vars(module).update(attributes)
                for holder, contents in held.items():
                    vars(module)[holder].clear()
                    vars(module)[holder].update(contents)

    @contextmanager
    def _tapped(self, tap: Tap | None, plain: bool) -> Iterator[None]:
        if tap is None:
            yield
            return
        try:
            for module, layer in self.layers.items():
                module.forward = _tapped_forward(module, layer.rule, tap, plain)
            yield
        finally:
            for module in self.layers:
                vars(module).pop("forward", None)


def _tapped_forward(module: nn.Module, rule: Rule, tap: Tap, plain: bool) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
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


def _channels_last(x: Any) -> Any:
    images = isinstance(x, Tensor) and x.dim() == 4
    return x.contiguous(memory_format=torch.channels_last) if images else x


def _members(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _constants(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Detached stand-ins. Buffers are always copied, since forward passes may write to them.

    Parameters are copied while that is cheap; those of a large model are shared, except where the layer is known to
    write to them (an embedding with ``max_norm``).
    """
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    written = {id(m.weight) for m in model.modules() if getattr(m, "max_norm", None) is not None}

    def one(value: Tensor) -> Tensor:
        constant = value.detach()
        if dtype is not None and value.is_floating_point():
            constant = constant.to(dtype)
        shared = isinstance(value, nn.Parameter) and size > SMALL_MODEL and id(value) not in written
        shared = shared and not value.is_inference()
        return constant.clone() if constant.data_ptr() == value.data_ptr() and not shared else constant

    return {name: one(value) for name, value in _members(model)}


def _selected(model: nn.Module, layers: Sequence[str] | str | None) -> list[str]:
    parameters = dict(model.named_parameters())
    if layers is None:
        names = [name for name, p in parameters.items() if p.requires_grad]
        if not names:
            raise ParameterError(
                f"Got a model with {len(parameters)} parameters, none of which requires a gradient. "
                "Want at least one to measure. "
                "Do: call requires_grad_() on what you train, or name parameters with layers=[...]."
            )
        suspects = parameters
    else:
        listed = [layers] if isinstance(layers, str) else layers
        if not isinstance(listed, Sequence) or not all(isinstance(name, str) for name in listed):
            raise OptionError(
                f"Got layers={layers!r}. Want a name or a list of names. Do: for instance layers=['conv1']."
            )
        names = _named(model, listed, parameters)
        suspects = {name: parameters[name] for name in names}
    for name, parameter in suspects.items():
        if not parameter.is_floating_point():
            kind = "complex" if parameter.is_complex() else "integer"
            raise ParameterError(
                f"Got the {kind} parameter {name!r} ({parameter.dtype}). "
                "Want real floating-point parameters: others have no curvature here. "
                "Do: leave it out by naming the others with layers=[...]."
            )
    return names


def _named(model: nn.Module, layers: Sequence[str], parameters: Mapping[str, Tensor]) -> list[str]:
    by_id = {id(p): name for name, p in parameters.items()}
    every = {name: by_id[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    modules = {name for name, _ in model.named_modules(remove_duplicate=False) if name}
    found: dict[str, None] = {}
    for layer in layers:
        inside = [every[layer]] if layer in every else [every[name] for name in every if name.startswith(f"{layer}.")]
        if not inside:
            if layer in modules:
                raise ParameterError(
                    f"Got the layer {layer!r}, which has no parameters. Want one that has. Do: name another."
                )
            raise unknown("layer", layer, {*every, *modules})
        found.update(dict.fromkeys(inside))
    if not found:
        raise ParameterError(
            "Got layers=[], which leaves nothing to measure. Want at least one name. Do: pass None for all."
        )
    return [name for name in parameters if name in found]


def check_precision(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Curvature needs at least float32."""
    if dtype is not None:
        if dtype not in (torch.float32, torch.float64):
            raise PrecisionError(
                f"Got dtype={dtype}. Want torch.float32 or torch.float64. Do: leave dtype out or pass one of these."
            )
        return
    for name, value in _members(model):
        if value.is_floating_point() and value.dtype not in (torch.float32, torch.float64):
            raise PrecisionError(
                f"Got {name!r} in {value.dtype}. "
                "Want float32 or float64: squares of gradients underflow in half precision. "
                "Do: pass dtype=torch.float32; the model itself stays as it is."
            )


def logits(outputs: Any) -> Tensor:
    """The tensor the loss is taken of, also from outputs that carry it as ``logits``."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", outputs)
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        got = outputs.dtype if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ModelError(
            f"Got {got} from the model. Want a floating-point tensor, or an object with one as .logits or ['logits']. "
            "Do: wrap the model in a module that returns the outputs the loss is taken of."
        )
    return outputs
