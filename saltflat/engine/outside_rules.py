"""Rules for parameters used outside of layers: how an operation runs with a copy of them for each example."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saltflat.engine.example_tracker import (
    COMBINATIONS,
    EXPANSIONS,
    ExampleTracker,
    Operation,
    UnsupportedUseError,
    iterate_tensors,
)

_ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "true_divide", "divide", "multiply", "subtract", "pow")
_OTHERS = ("rsub", "maximum", "minimum", "where", "masked_fill", "lerp", "addcmul")
_FORMS = ("__{}__", "__r{}__", "__i{}__", "{}", "{}_")
ELEMENTWISE = tuple(form.format(word) for word in (*_ARITHMETIC, *_OTHERS) for form in _FORMS)


def _combines(*names: str) -> Callable[[Operation], Operation]:
    """Register a rule for operations of these names on common values and others that depend on the examples."""

    def register(rule: Operation) -> Operation:
        COMBINATIONS.update(dict.fromkeys(names, rule))
        return rule

    return register


def _expands(*names: str) -> Callable[[Operation], Operation]:
    """Register a rule for operations of these names that may make copies for the examples."""

    def register(rule: Operation) -> Operation:
        EXPANSIONS.update(dict.fromkeys(names, rule))
        return rule

    return register


@_combines(*ELEMENTWISE)
def combine_elementwise(tracker: ExampleTracker, func: Operation, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on each entry, with copies of common values."""
    tensors = list(iterate_tensors((args, kwargs)))
    shape = torch.broadcast_shapes(*(each.shape for each in tensors))
    _check_first_axis(tracker, tensors, len(shape), shape[0])

    def expand(value: Any) -> Any:
        return tracker.expand(value, len(shape), shape[0]) if tracker.is_common(value) else value

    return func(*map(expand, args), **{key: expand(value) for key, value in kwargs.items()})


@_combines("to", "type_as", "view_as", "reshape_as", "zeros_like", "ones_like", "empty_like", "full_like")
def ignore_values(tracker: ExampleTracker, func: Operation, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that uses only the shape or type of its other arguments."""
    if tracker.is_common(value):
        raise UnsupportedUseError("takes a shape or type from the examples")
    args, kwargs = tracker.detach_common((args, kwargs))
    return func(value, *args, **kwargs)


def _check_first_axis(tracker: ExampleTracker, tensors: Sequence[Tensor], rank: int, first: int) -> None:
    """Check that the first axis of a result is that of something that depends on the examples."""
    if not any(each.dim() == rank and each.shape[0] == first and tracker.is_separate(each) for each in tensors):
        raise UnsupportedUseError("has no axis for the examples")


@_combines("linear")
def combine_linear(
    tracker: ExampleTracker, func: Operation, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Multiply with a matrix, and add a bias."""
    if tracker.is_common(input) or weight.dim() != 2:
        raise UnsupportedUseError("multiplies what all examples share")
    y = F.linear(input, weight.detach() if tracker.is_common(weight) else weight)
    if tracker.is_common(weight):
        y = tracker.watcher.watch_product(input, weight, y, False)
    if bias is None:
        return y
    tracker.mark(y)
    result: Tensor = combine_elementwise(tracker, torch.add, y, bias)
    return result


@_combines("matmul", "__matmul__", "mm")
def combine_matmul(tracker: ExampleTracker, func: Operation, input: Tensor, other: Tensor) -> Tensor:
    """Multiply with a matrix, or with a stack of matrices that has copies for the examples."""
    if tracker.is_common(other) and other.dim() == 2 and input.dim() > 1:
        y = input @ other.detach()
        return tracker.watcher.watch_product(input, other, y, True)
    if min(input.dim(), other.dim()) < 2 or max(input.dim(), other.dim()) < 3:
        raise UnsupportedUseError("multiplies what all examples share")
    rank, first = max(input.dim(), other.dim()), torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])[0]
    _check_first_axis(tracker, (input, other), rank, first)
    one, two = (tracker.expand(v, rank, first) if tracker.is_common(v) else v for v in (input, other))
    return one @ two


@_combines("addmm")
def combine_addmm(tracker: ExampleTracker, func: Operation, input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """Multiply with a matrix, and add a bias."""
    y = combine_matmul(tracker, torch.matmul, mat1, mat2) if tracker.is_common(mat2) else mat1 @ mat2
    tracker.mark(y)
    result: Tensor = combine_elementwise(tracker, torch.add, y, input)
    return result


@_combines("embedding")
def combine_embedding(
    tracker: ExampleTracker,
    func: Operation,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows of a table."""
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedUseError("changes with the batch")
    return tracker.watcher.watch_rows(input, weight, padding_idx, F.embedding(input, weight.detach(), padding_idx))


@_combines("__getitem__")
def combine_index(tracker: ExampleTracker, func: Operation, values: Tensor, index: Any) -> Tensor:
    """Look up rows of a table."""
    is_rows = (
        isinstance(index, Tensor) and not index.is_floating_point() and index.dtype not in (torch.bool, torch.uint8)
    )
    if not is_rows or not tracker.is_common(values) or values.dim() != 2:
        raise UnsupportedUseError("does not take whole rows of a table")
    return tracker.watcher.watch_rows(index, values, None, values.detach()[index])


@_combines("layer_norm")
def combine_layer_norm(
    tracker: ExampleTracker,
    func: Operation,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalize, scale and shift."""
    y = F.layer_norm(input, normalized_shape, None, None, eps)
    return _scale_and_shift(tracker, input, y, weight, bias)


@_combines("rms_norm")
def combine_rms_norm(
    tracker: ExampleTracker,
    func: Operation,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Normalize and scale."""
    return _scale_and_shift(tracker, input, F.rms_norm(input, normalized_shape, None, eps), weight, None)


def _scale_and_shift(
    tracker: ExampleTracker, x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    if tracker.is_common(x):
        raise UnsupportedUseError("normalizes what all examples share")
    tracker.mark(y)
    for func, each in ((torch.mul, weight), (torch.add, bias)):
        if each is not None:
            y = combine_elementwise(tracker, func, y, each)
            tracker.mark(y)
    return y


@_combines("scaled_dot_product_attention")
def combine_attention(
    tracker: ExampleTracker,
    func: Operation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Attend with a mask or bias of scores that has copies for the examples."""
    if any(map(tracker.is_common, (query, key, value))):
        raise UnsupportedUseError("attends to what all examples share")
    assert attn_mask is not None
    mask = tracker.expand(attn_mask, query.dim(), query.shape[0])
    return F.scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)


@_combines("multi_head_attention_forward")
def combine_attention_layer(
    tracker: ExampleTracker,
    func: Operation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run torch's attention layer, whose inputs are ``(positions, examples, units)``, by its products."""
    is_plain = in_proj_weight is not None and not (use_separate_proj_weight or add_zero_attn or training)
    if not is_plain or query.dim() != 3 or bias_k is not None or others.get("static_k") is not None:
        raise UnsupportedUseError("is an attention layer with options that have no rule")
    assert in_proj_weight is not None

    def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found = x.transpose(0, 1)
        tracker.mark(found)
        product: Tensor = combine_linear(tracker, F.linear, found, weight, bias)
        tracker.mark(product)
        return product

    if query is key and key is value:
        parts = project(query, in_proj_weight, in_proj_bias).chunk(3, 2)
    else:
        biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None,) * 3
        parts = tuple(map(project, (query, key, value), in_proj_weight.chunk(3), biases))
    q, k, v = (each.unflatten(2, (num_heads, -1)).transpose(1, 2) for each in parts)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if attn_mask is not None:
        scores = _mask_scores(scores, attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (len(q), -1)))
    if key_padding_mask is not None:
        scores = _mask_scores(scores, key_padding_mask[:, None, None])
    weights = scores.softmax(-1)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    tracker.mark(mixed)
    result = combine_linear(tracker, F.linear, mixed, out_proj_weight, out_proj_bias).transpose(0, 1)
    return result, (weights.mean(1) if average_attn_weights else weights) if need_weights else None


def _mask_scores(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask


@_expands("expand", "broadcast_to")
def expand_common(
    tracker: ExampleTracker, func: Operation, value: Tensor, *sizes: Any, size: Sequence[int] = ()
) -> Tensor | None:
    """Return the copies of a common value for the examples, or None if its expansion has no axis for them."""
    shape = _flatten_sizes(sizes) or list(size)
    if not shape or shape[0] != tracker.examples or (len(shape) == value.dim() and value.shape[0] != 1):
        return None
    return tracker.expand(value, len(shape), tracker.examples).expand(shape)


@_expands("repeat")
def repeat_common(tracker: ExampleTracker, func: Operation, value: Tensor, *repeats: Any) -> Tensor | None:
    """Return the copies of a common value for the examples, or None if none of its axes is repeated for them."""
    counts = _flatten_sizes(repeats)
    if not counts or counts[0] != tracker.examples:
        return None
    copies = tracker.expand(value, value.dim() + 1, tracker.examples)
    if len(counts) == value.dim():
        return copies.flatten(0, 1).repeat(1, *counts[1:])
    return copies.reshape(len(copies), *(1,) * (len(counts) - value.dim() - 1), *value.shape).repeat(1, *counts[1:])


def _flatten_sizes(sizes: Sequence[Any]) -> list[int]:
    return list(sizes[0]) if sizes and isinstance(sizes[0], (tuple, list)) else list(sizes)


@_combines("expand_as")
def expand_as(tracker: ExampleTracker, func: Operation, value: Tensor, other: Tensor) -> Tensor:
    """Return the copies of a common value in the shape of a value that depends on the examples."""
    if not tracker.is_common(value):
        raise UnsupportedUseError("takes a shape from what all examples share")
    return tracker.expand(value, other.dim(), len(other)).expand_as(other)
