"""Rules for layers of other libraries, recognized by what they compute: matrix products, and scales of units."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.gradients.base import DenseGradient, FactoredGradient
from saltflat.gradients.outer import OuterProductGradient
from saltflat.layers import LayerRule, recognize

POSITIONS = 3  # of the random inputs that a layer is tried on
TOLERANCE = 1e-3  # relative; some layers compute in float32 whatever their precision


@recognize
def find_product_rule(module: nn.Module) -> LayerRule | None:
    """Return the rule of ``x @ weight + bias``, which Hugging Face's ``Conv1D`` computes, or of its transpose."""
    values = dict(module._parameters)
    weight, bias = values.get("weight"), values.get("bias")
    if weight is None or weight.dim() != 2 or not values.keys() <= {"weight", "bias"}:
        return None
    drawn = _draw_values(module)
    table, shift = drawn["weight"], drawn.get("bias", 0.0)
    for is_transposed in (True, False):
        inner, outer = table.shape if is_transposed else table.shape[::-1]
        if bias is not None and bias.shape != (outer,):
            continue
        x = _draw_input(table, inner)
        expected = x @ (table if is_transposed else table.T) + shift
        if _is_close(_run(module, drawn, x), expected):
            return _make_rule(partial(_factor_product, is_transposed))
    return None


def _factor_product(is_transposed: bool, module: Any, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    x = x.reshape(1, x.shape[0], 1, -1, x.shape[-1])
    g = g.reshape(*g.shape[:2], 1, -1, g.shape[-1])
    bias = g[:, :, 0, 0] if g.shape[3] == 1 else g.sum((2, 3))
    factors = (x, g) if is_transposed else (g, x)
    return {"weight": OuterProductGradient(*factors, module.weight.shape), "bias": DenseGradient(bias)}


@recognize
def find_scale_rule(module: nn.Module) -> LayerRule | None:
    """Return the rule of a layer that is linear in a number for each unit: RMSNorm of any author, layer scale.

    A second parameter may be added to the outputs.
    """
    values = {name: value for name, value in module._parameters.items() if value is not None}
    if not values or any(value.dim() != 1 for value in values.values()) or len({v.shape for v in values.values()}) > 1:
        return None
    names = list(values)
    if len(names) > 1 and set(names) != {"weight", "bias"}:
        return None
    scale, shift = ("weight", "bias") if len(names) > 1 else (names[0], None)
    drawn = _draw_values(module)
    x = _draw_input(drawn[scale], len(drawn[scale]))
    found = _run(module, drawn, x)
    unit = _compute_unit(module, scale, x)
    if found is None or unit is None:
        return None
    start = _run(module, _fill(module, dict.fromkeys(names, 0.0)), x)
    expected = unit * drawn[scale] + (drawn[shift] if shift else 0.0)
    if start is None or not _is_close(found - start, expected):
        return None
    return _make_rule(partial(_factor_scale, module, scale, shift))


def _factor_scale(
    owner: nn.Module, scale: str, shift: str | None, module: Any, x: Tensor, g: Tensor
) -> dict[str, FactoredGradient]:
    unit = _compute_unit(owner, scale, x.flatten(0, 1))
    assert unit is not None
    unit = unit.unflatten(0, x.shape[:2])
    found: dict[str, FactoredGradient] = {scale: DenseGradient((g * unit).flatten(2, -2).sum(2))}
    if shift is not None:
        found[shift] = DenseGradient(g.flatten(2, -2).sum(2))
    return found


def _compute_unit(module: nn.Module, scale: str, x: Tensor) -> Tensor | None:
    """Return by how much the outputs grow with the scale."""
    zeros = dict.fromkeys(module._parameters, 0.0)
    one, none = (_run(module, _fill(module, {**zeros, scale: value}, x), x) for value in (1.0, 0.0))
    return None if one is None or none is None else one - none


def _make_rule(factor: Any) -> LayerRule:
    return LayerRule(factor, None, lambda module: True)


def _draw_values(module: nn.Module) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(value.shape, generator=dice, dtype=torch.float64).to(value.device, _get_precision(value))
        for name, value in module._parameters.items()
        if value is not None
    }


def _draw_input(like: Tensor, width: int) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    return torch.randn(1, POSITIONS, width, generator=dice, dtype=torch.float64).to(like.device, like.dtype)


def _get_precision(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def _fill(module: nn.Module, numbers: Mapping[str, float], like: Tensor | None = None) -> dict[str, Tensor]:
    return {
        name: torch.full_like(value, numbers[name], dtype=_get_precision(value) if like is None else like.dtype)
        for name, value in module._parameters.items()
        if value is not None
    }


def _run(module: nn.Module, values: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """Run a module with other values of its parameters; return None if that fails."""
    own: dict[str, Any] = module._parameters
    kept = dict(own)
    try:
        own.update(values)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = type(module).forward(module, x)
    except Exception:  # it is none of the known layers
        return None
    finally:
        own.update(kept)
    return found if isinstance(found, Tensor) else None


def _is_close(found: Tensor | None, expected: Tensor) -> bool:
    if found is None or found.shape != expected.shape or not found.is_floating_point():
        return False
    off, size = (float(each.double().abs().max()) for each in (found - expected, expected))
    return off <= TOLERANCE * size
