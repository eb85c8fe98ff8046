"""Normalizations, reductions, and operations that do not commute with rescaling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from saltflat.errors import ModelError
from saltflat.layers import GROUP
from saltflat.symmetry.tracing.rules.products import add_bias
from saltflat.symmetry.tracing.scales import ANY
from saltflat.symmetry.tracing.trace import OperationCall, rule


@rule(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm batch_norm
    _batch_norm_no_update _batch_norm_with_update _batch_norm_impl_index miopen_batch_norm
    """
)
def propagate_batch_norm(call: OperationCall) -> Any:
    """Let running statistics scale with the input, the mean linearly and the variance quadratically."""
    x, weight, bias, mean, variance = call.args[:5]
    numbers = [float(arg) for arg in call.args[5:] if isinstance(arg, float)]
    eps = numbers[-1]
    ids = call.get_scale_ids(x)
    channels = call.scales.equate_along(ids, [dim for dim in range(ids.dim()) if dim != 1])
    followers = [call.get_entry_numbers(each) for each in (mean, variance)]
    by_batch = call.name == "_native_batch_norm_legit" and isinstance(mean, bool)
    training = any(arg is True for arg in call.args[5:6]) or by_batch
    if training or any(numbers is None for numbers in followers):
        # Statistics of the batch scale with the input, except for eps.
        if not training or eps:
            call.pin(x)
    else:
        for numbers_of in followers:
            assert numbers_of is not None
            call.entries.assign_scales(numbers_of, channels)
        assert followers[1] is not None
        call.tracker.epsilons[int(followers[1].min())] = eps
    out = assign_affine_scales(call, weight, bias, torch.Size([len(channels)]))
    first, *others = call.out if isinstance(call.out, tuple | list) else [call.out]
    full = out.reshape(-1, *[1] * (first.dim() - 2)).expand(first.shape).clone()
    return [full, *(call.make_fixed_scales(other) if isinstance(other, Tensor) else None for other in others)]


@rule("native_layer_norm layer_norm _fused_rms_norm rms_norm")
def propagate_layer_norm(call: OperationCall) -> Any:
    """Fix the scale of the input, or require one scale over the normalized axes if eps is 0."""
    x, shape, weight = call.args[:3]
    centered = "layer" in call.name
    bias = call.args[3] if centered else None
    eps = call.get_argument(4 if centered else 3, "eps")
    if eps == 0:
        call.scales.equate_along(call.get_scale_ids(x), range(-len(shape), 0))
    else:
        call.pin(x)
    return _expand_to_outputs(call, assign_affine_scales(call, weight, bias, torch.Size(shape)))


@rule("native_group_norm group_norm")
def propagate_group_norm(call: OperationCall) -> Any:
    """Fix the scale of the input, or require one scale per group if eps is 0."""
    x, weight, bias = call.args[:3]
    native = call.name == "native_group_norm"
    groups, eps = (call.args[6], call.args[7]) if native else (call.args[1], call.get_argument(4, "eps", 1e-5))
    if not native:
        weight, bias = call.get_argument(2, "weight"), call.get_argument(3, "bias")
    if eps == 0:
        ids = call.get_scale_ids(x)
        grouped = ids.reshape(x.shape[0], groups, -1)
        call.scales.equate_along(grouped, [2])
    else:
        call.pin(x)
    out = assign_affine_scales(call, weight, bias, torch.Size([x.shape[1]]))
    return _expand_to_outputs(call, out.reshape(-1, *[1] * (x.dim() - 2)))


def _expand_to_outputs(call: OperationCall, ids: Tensor) -> Any:
    first, *others = call.out if isinstance(call.out, tuple | list) else [call.out]
    # Further results are means and deviations, which only a backward pass uses.
    return [ids.expand(first.shape).clone(), *(call.make_fixed_scales(other) for other in others if other is not None)]


def assign_affine_scales(call: OperationCall, weight: Tensor | None, bias: Tensor | None, shape: torch.Size) -> Tensor:
    """Return the scales of normalized values after an affine transformation."""
    if weight is None:
        out = torch.ones(shape, dtype=torch.float64)
    else:
        numbers = call.get_entry_numbers(weight)
        if numbers is None:
            out = call.get_scale_ids(weight)
            out = torch.where(out == ANY, 1.0, out)
        else:
            out = call.scales.add_variables(shape.numel()).reshape(shape)
            call.entries.record_use(numbers, [GROUP] * numbers.dim())
            call.entries.assign_scales(numbers, out)
    return add_bias(call, out, bias)


NAMES = """
    gelu silu sigmoid tanh elu celu selu softplus mish hardswish hardsigmoid log_sigmoid log_sigmoid_forward
    hardtanh relu6 hardshrink softshrink _softmax softmax _safe_softmax _log_softmax log_softmax logsumexp
    exp exp2 expm1 log log2 log10
    log1p erf erfc erfinv sin cos tan asin acos atan sinh cosh asinh acosh atanh round floor ceil trunc frac bucketize
    nll_loss_forward prod cumprod
"""


@rule(NAMES)
def propagate_nonhomogeneous(call: OperationCall) -> Any:
    """Fix the scales of all operands of a function that does not commute with rescaling."""
    tensors = [leaf for leaf in tree_flatten((call.args, call.kwargs))[0] if isinstance(leaf, Tensor)]
    call.pin(*tensors)
    return [call.make_fixed_scales(out) if isinstance(out, Tensor) else None for out in tree_flatten(call.out)[0]]


@rule("glu")
def propagate_glu(call: OperationCall) -> Any:
    """Keep the scales of the values and fix those of the gates."""
    values, gate = call.get_scale_ids(call.args[0]).chunk(2, call.get_argument(1, "dim", -1))
    call.tracker.pin(call.name, [gate], known=True)
    return values


@rule("_local_scalar_dense equal is_nonzero nonzero masked_select _unique2 unique_dim _assert_async allclose")
def propagate_branch(call: OperationCall) -> Any:
    """Raise an error if control flow may depend on the input: a number or a shape depends on values."""
    tensors = [arg for arg in call.args if isinstance(arg, Tensor)]
    of_parameters = all(call.get_entry_numbers(arg) is not None or call.is_constant(arg) for arg in tensors)
    if of_parameters:
        call.pin(*tensors)
        return [call.make_fixed_scales(out) if isinstance(out, Tensor) else None for out in tree_flatten(call.out)[0]]
    if all(map(call.tracker.is_discrete, tensors)):
        # No rescaling changes a mask; the result holds for inputs with equivalent masks.
        call.tracker.record_assumption()
        return [call.make_fixed_scales(out) if isinstance(out, Tensor) else None for out in tree_flatten(call.out)[0]]
    at = call.tracker.find_location()
    where = f" ({at.line})" if at.line else f" in {at.module!r}" if at.module else ""
    raise ModelError(
        "Expected a forward pass that runs the same operations on every input, but got a forward pass that reads a "
        f"value out of a tensor{where}: its operations may depend on the input, and one pass cannot show them all. "
        "Try using torch.where, or moving the decision out of forward."
    )


POOLS = """
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa mkldnn_max_pool2d max_unpool2d max_unpool3d
"""


@rule(POOLS)
def propagate_pool(call: OperationCall) -> Any:
    """Require one scale for all positions of a channel, which pooling and upsampling combine."""
    found = re.search(r"([123])d", call.name)
    assert found is not None
    space = int(found[1])
    ids = call.scales.equate_along(call.get_scale_ids(call.args[0]), range(-space, 0), keepdim=True)
    outs = [out for out in tree_flatten(call.out)[0] if isinstance(out, Tensor)]
    # Further results are indices of maxima, which do not depend on the scale.
    return [ids.expand(outs[0].shape).clone(), *(call.make_fixed_scales(out) for out in outs[1:])]


@rule("sum mean amax amin nansum median std var var_mean std_mean aminmax")
def propagate_reduction(call: OperationCall) -> Any:
    """Require equal scales along the reduced axes."""
    x, dims = call.args[0], call.get_argument(1, "dim")
    return _reduce_scales(call, x, dims, bool(call.get_argument(2, "keepdim", False)))


@rule("max min mode kthvalue sort topk cummax cummin argmax argmin argsort")
def propagate_max(call: OperationCall) -> Any:
    """Require equal scales along the axis of a maximum, minimum or sort."""
    if call.name in ("max", "min") and len(call.args) > 1 and isinstance(call.args[1], Tensor):
        return call.scales.equate(call.get_scale_ids(call.args[0]), call.get_scale_ids(call.args[1]))
    dim = call.get_argument(2, "dim", -1) if call.name in ("topk", "kthvalue") else call.get_argument(1, "dim")
    if isinstance(dim, bool) or (dim is None and call.name in ("sort", "topk", "cummax", "cummin", "mode", "argsort")):
        dim = -1
    return _reduce_scales(call, call.args[0], dim, True)


@rule("linalg_vector_norm norm")
def propagate_norm(call: OperationCall) -> Any:
    """Require equal scales along the axes of a norm."""
    if call.get_argument(1, "ord" if call.name == "linalg_vector_norm" else "p") == 0:
        return call.make_fixed_scales()  # the number of nonzero entries
    dims = call.get_argument(2, "dim")
    return _reduce_scales(call, call.args[0], dims, bool(call.get_argument(3, "keepdim", False)))


def _reduce_scales(call: OperationCall, x: Tensor, dims: int | Sequence[int] | None, keepdim: bool) -> Any:
    ids = call.get_scale_ids(x)
    dims = list(range(x.dim())) if dims is None or dims == [] else [dims] if isinstance(dims, int) else list(dims)
    joined = call.scales.equate_along(ids, dims, keepdim=True)
    results = []
    for number, out in enumerate(tree_flatten(call.out)[0]):
        if not out.is_floating_point():
            results.append(call.make_fixed_scales(out))
            continue
        one = call.scales.multiply(joined, 2) if call.name.startswith("var") and number == 0 else joined
        shape = out.shape
        flat = one if len(shape) == one.dim() else one.reshape(shape)
        results.append(flat.expand(shape).clone())
    return results


@rule("cumsum logcumsumexp")
def propagate_cumsum(call: OperationCall) -> Any:
    """Require equal scales along the axis of a cumulative sum."""
    if call.name == "logcumsumexp":
        call.pin(call.args[0])
        return call.make_fixed_scales()
    dim = call.get_argument(1, "dim")
    return (
        call.scales.equate_along(call.get_scale_ids(call.args[0]), [dim], keepdim=True).expand(call.out.shape).clone()
    )
