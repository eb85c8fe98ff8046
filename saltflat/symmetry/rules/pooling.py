"""Sums, means and largest values over several numbers, which must have one scale."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from saltflat.symmetry.watch import OperationCall, rule

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
    """All positions of a channel, which an upsampling mixes too."""
    found = re.search(r"([123])d", call.name)
    assert found is not None
    space = int(found[1])
    ids = call.scales.equate_along(call.get_scale_ids(call.args[0]), range(-space, 0), keepdim=True)
    outs = [out for out in tree_flatten(call.out)[0] if isinstance(out, Tensor)]
    # Beside largest values stand their places, which are the same at every scale.
    return [ids.expand(outs[0].shape).clone(), *(call.make_fixed_scales(out) for out in outs[1:])]


@rule("sum mean amax amin nansum median std var var_mean std_mean aminmax")
def propagate_reduction(call: OperationCall) -> Any:
    x, dims = call.args[0], call.get_argument(1, "dim")
    return _reduce_scales(call, x, dims, bool(call.get_argument(2, "keepdim", False)))


@rule("max min mode kthvalue sort topk cummax cummin argmax argmin argsort")
def propagate_max(call: OperationCall) -> Any:
    """Largest and smallest values and their places."""
    if call.name in ("max", "min") and len(call.args) > 1 and isinstance(call.args[1], Tensor):
        return call.scales.equate(call.get_scale_ids(call.args[0]), call.get_scale_ids(call.args[1]))
    dim = call.get_argument(2, "dim", -1) if call.name in ("topk", "kthvalue") else call.get_argument(1, "dim")
    if isinstance(dim, bool) or (dim is None and call.name in ("sort", "topk", "cummax", "cummin", "mode", "argsort")):
        dim = -1
    return _reduce_scales(call, call.args[0], dim, True)


@rule("linalg_vector_norm norm")
def propagate_norm(call: OperationCall) -> Any:
    if call.get_argument(1, "ord" if call.name == "linalg_vector_norm" else "p") == 0:
        return call.make_fixed_scales()  # how many are not zero
    dims = call.get_argument(2, "dim")
    return _reduce_scales(call, call.args[0], dims, bool(call.get_argument(3, "keepdim", False)))


def _reduce_scales(call: OperationCall, x: Tensor, dims: Any, keepdim: bool) -> Any:
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
    if call.name == "logcumsumexp":
        call.pin(call.args[0])
        return call.make_fixed_scales()
    dim = call.get_argument(1, "dim")
    return (
        call.scales.equate_along(call.get_scale_ids(call.args[0]), [dim], keepdim=True).expand(call.out.shape).clone()
    )
