"""First and second derivatives of single operations of torch along many directions at once.

Where an operation is linear in all that moves, or a product, or acts on every number alone, its second derivative is
written down here, since that is much cheaper than differentiating forward twice. Everything else is differentiated, and
layers whose derivatives torch does not have, or gets wrong, are written out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.overrides import TorchFunctionMode

_Found = TypeVar("_Found")
Tensors: TypeAlias = tuple[Tensor, ...]
Gradients: TypeAlias = Sequence[Tensor | None]
Function: TypeAlias = Callable[..., Tensors]

# Linear or piecewise linear in all arguments together.
_LINEAR = """
abs absolute adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d add alpha_dropout amax amin avg_pool1d
avg_pool2d avg_pool3d broadcast_tensors broadcast_to cat channel_shuffle chunk clamp clamp_max clamp_min clip clone
col2im concat concatenate constant_pad_nd contiguous cumsum diag diagonal double dropout expand expand_as flatten
flip float gather getitem hardtanh hsplit hstack im2col index_select leaky_relu masked_fill masked_select max
max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d maximum mean min
minimum movedim moveaxis narrow neg negative nan_to_num pad permute pixel_shuffle pixel_unshuffle positive relu
repeat repeat_interleave reshape reshape_as roll rot90 rsub select split split_with_sizes squeeze stack sub subtract
sum swapaxes swapdims t take tensor_split threshold tile to transpose tril triu type_as unbind unflatten unfold
unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
upsample_nearest3d upsample_trilinear3d view view_as vsplit vstack where
"""
LINEAR = frozenset(_LINEAR.split())
# Linear in each argument but the bias; the value is the argument that is added.
PRODUCTS: Mapping[str, int | None] = {
    **dict.fromkeys(["bmm", "einsum", "matmul", "mm", "mul", "multiply", "mv", "outer", "dot", "rmatmul"]),
    **dict.fromkeys(["addbmm", "addmm", "addmv", "baddbmm"], 0),
    **dict.fromkeys(["linear", "conv1d", "conv2d", "conv3d"], 2),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], 2),
    "bilinear": 3,
}
# Linear in all arguments but one.
LINEAR_BUT_FOR: Mapping[str, int] = {
    **dict.fromkeys(["div", "divide", "truediv", "true_divide"], 1),
    **dict.fromkeys(["rms_norm", "embedding_bag"], 0),
    "embedding": 1,  # tokens do not move
}
# Act on every number alone.
_ELEMENTWISE = """
acos acosh asin asinh atan atanh celu cos cosh elu erf erfc exp expm1 gelu hardsigmoid hardswish log log10 log1p
log2 log_sigmoid logit mish pow reciprocal rsqrt selu sigmoid silu sin sinh softplus sqrt square tan tanh
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())


def is_linear(name: str, roles: Collection[int | str]) -> bool:
    """Return whether an operation is linear, or piecewise linear, in some arguments together.

    Args:
        name: of the operation.
        roles: positions or names of the arguments, each as often as it holds tensors that move.
    """
    if name in LINEAR:
        return True
    if name in PRODUCTS:
        return _count_factors(name, roles) <= 1
    if name in LINEAR_BUT_FOR:
        return LINEAR_BUT_FOR[name] not in roles and not {"input", "other"} & set(roles)
    return False


def _count_factors(name: str, roles: Collection[int | str]) -> int:
    return sum(role not in (PRODUCTS[name], "bias") for role in roles)


def _spread(values: Tensor) -> Tensor:
    """Return values that each have a place of their own, as differentiation forward demands."""
    return values.clone() if 0 in values.stride() else values


def differentiate(function: Function, points: Tensors, along: Tensors) -> Tensors:
    """Return the derivatives of a function along each row of directions."""

    def push(*directions: Tensor) -> Tensors:
        found: Tensors = jvp(function, points, directions)[1]
        return found

    points = tuple(map(_spread, points))
    return _map_rows(push, along)


def contract_second(
    name: str,
    arguments: Mapping[int | str, object],
    roles: Sequence[int | str],
    function: Function,
    points: Tensors,
    along: Tensors,
    gradients: Gradients,
) -> tuple[Tensors, Tensor]:
    """Return the first derivatives along each row of directions, and the second ones times the gradients.

    Args:
        name: of the operation.
        arguments: all that it is called with, by position or name.
        roles: positions or names of those that move.
        function: of these arguments.
        points: their values.
        along: for every argument, the directions, one per row.
        gradients: by the results.
    """
    if len(gradients) == 1 and gradients[0] is not None:
        gradient = gradients[0]
        if name in ELEMENTWISE and len(points) == 1 and gradient.shape == points[0].shape:
            return _bend_elements(function, points[0], along[0], gradient)
        if name in PRODUCTS and PRODUCTS[name] is None and len(points) == _count_factors(name, roles) == 2:
            (product,) = _map_rows(function, along)
            return differentiate(function, points, along), 2 * _sum_rows(product * gradient)
        axis = arguments.get(1, arguments.get("dim"))
        if name in ("softmax", "log_softmax") and len(points) == 1 and isinstance(axis, int):
            return _bend_softmax(name == "log_softmax", axis, function(*points)[0], along[0], gradient)
    first, second = _differentiate_twice(function, points, along)
    total = sum(
        (_sum_rows(bend * each) for bend, each in zip(second, gradients, strict=True) if each is not None),
        along[0].new_zeros(len(along[0])),
    )
    return first, total


def _sum_rows(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).sum(1)


def _bend_elements(function: Function, x: Tensor, along: Tensor, gradient: Tensor) -> tuple[Tensors, Tensor]:
    (slope,), (bend,) = _differentiate_twice(function, (x,), (torch.ones_like(x)[None],))
    flat = along.reshape(len(along), -1)
    return (along * slope,), flat.square() @ (bend[0] * gradient).reshape(-1)


def _bend_softmax(is_log: bool, axis: int, y: Tensor, along: Tensor, gradient: Tensor) -> tuple[Tensors, Tensor]:
    axis = axis % y.dim() - y.dim()
    p = y.exp() if is_log else y
    centered = along - (p * along).sum(axis, keepdim=True)
    spread = (p * centered.square()).sum(axis, keepdim=True)
    if is_log:
        return (centered,), -_sum_rows(spread * gradient.sum(axis, keepdim=True))
    weighted = p * gradient
    total = _sum_rows(weighted * centered.square()) - _sum_rows(spread * weighted.sum(axis, keepdim=True))
    return (p * centered,), total


def _differentiate_twice(function: Function, points: Tensors, along: Tensors) -> tuple[Tensors, Tensors]:
    """Return the first and second derivatives of a function along each row of directions."""

    def push(*directions: Tensor) -> tuple[Tensors, Tensors]:
        def push_once(*values: Tensor) -> Tensors:
            found: Tensors = jvp(function, values, directions)[1]
            return found

        found = jvp(push_once, points, directions)
        return found[0], found[1]

    points = tuple(map(_spread, points))
    return _map_rows(push, along)


def copy_plainly(input: Tensor, memory_format: torch.memory_format | None = None) -> Tensor:
    """Copy without a memory layout, which is that of a stack of tensors here."""
    return input.clone()


def _map_rows(push: Callable[..., _Found], along: Tensors) -> _Found:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # where vmap makes a loop
        warnings.filterwarnings("ignore", "`torch.jit.script`")  # in torch's first differentiation forward
        found: _Found = vmap(push)(*map(_spread, along))
    return found


def write_out_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Compute LayerNorm by elementary operations: the second derivative of torch's own kernel is wrong."""
    axes = list(range(-len(normalized_shape), 0))
    centered = input - input.mean(axes, keepdim=True)
    unit = centered * (centered.square().mean(axes, keepdim=True) + eps).rsqrt()
    unit = unit if weight is None else unit * weight
    return unit if bias is None else unit + bias


def write_out_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    grouped = input.reshape(input.shape[0], num_groups, -1)
    unit = write_out_layer_norm(grouped, grouped.shape[2:], eps=eps).reshape(input.shape)
    along = (-1, *[1] * (input.dim() - 2))
    unit = unit if weight is None else unit * weight.reshape(along)
    return unit if bias is None else unit + bias.reshape(along)


def write_out_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise NotImplementedError("attention with dropout")
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    elif attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1) @ value


def write_out_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()] if dim != -1 else list(range(v.dim()))
    return v * (g / v.square().sum(axes, keepdim=True).sqrt())


def write_out_prelu(input: Tensor, weight: Tensor) -> Tensor:
    per_unit = weight.numel() > 1 and input.dim() > 2
    return input.where(input > 0, input * (weight.reshape(-1, *(1 for _ in input.shape[2:])) if per_unit else weight))


def write_out_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """Look up rows, of which that of padding has no gradient in torch."""
    if padding_idx >= 0:
        moves = torch.arange(len(weight), device=weight.device)[:, None] != padding_idx
        weight = weight.where(moves, weight.detach())
    return weight[indices]


# What torch cannot differentiate forward twice, or gets wrong. The second derivative of ``_weight_norm`` is wrong in
# reverse mode too.
WRITTEN_OUT: Mapping[str, Callable[..., Tensor]] = {
    "layer_norm": write_out_layer_norm,
    "group_norm": write_out_group_norm,
    "scaled_dot_product_attention": write_out_attention,
    "_weight_norm": write_out_weight_norm,
    "prelu": write_out_prelu,
    "embedding": write_out_embedding,
}


class ReplacementMode(TorchFunctionMode):
    """Calls other functions in place of some of torch's.

    Args:
        replacements: the function to call, by the function of torch.
    """

    def __init__(self, replacements: Mapping[Callable[..., Any], Callable[..., Tensor]]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the replacement of a function, or the function itself."""
        chosen: Callable[..., Any] = self.replacements.get(func, func)
        return chosen(*args, **(kwargs or {}))
