"""Operations that notice the scale of what they are given."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from saltflat.errors import ModelError
from saltflat.symmetry.watch import OperationCall, rule

NAMES = """
    gelu silu sigmoid tanh elu celu selu softplus mish hardswish hardsigmoid log_sigmoid log_sigmoid_forward
    hardtanh relu6 hardshrink softshrink _softmax softmax _safe_softmax _log_softmax log_softmax logsumexp
    exp exp2 expm1 log log2 log10
    log1p erf erfc erfinv sin cos tan asin acos atan sinh cosh asinh acosh atanh round floor ceil trunc frac bucketize
    nll_loss_forward prod cumprod
"""


@rule(NAMES)
def propagate_nonhomogeneous(call: OperationCall) -> Any:
    tensors = [leaf for leaf in tree_flatten((call.args, call.kwargs))[0] if isinstance(leaf, Tensor)]
    call.pin(*tensors)
    return [call.make_fixed_scales(out) if isinstance(out, Tensor) else None for out in tree_flatten(call.out)[0]]


@rule("glu")
def propagate_glu(call: OperationCall) -> Any:
    """The first half of an axis times the sigmoid of the second: linear in the first."""
    values, gate = call.get_scale_ids(call.args[0]).chunk(2, call.get_argument(1, "dim", -1))
    call.watch.pin(call.name, [gate], known=True)
    return values


@rule("_local_scalar_dense equal is_nonzero nonzero masked_select _unique2 unique_dim _assert_async allclose")
def propagate_branch(call: OperationCall) -> Any:
    """A number or a shape that depends on the input's values: the next line may do what it likes with it."""
    tensors = [arg for arg in call.args if isinstance(arg, Tensor)]
    of_parameters = all(call.get_entry_numbers(arg) is not None or call.is_constant(arg) for arg in tensors)
    if of_parameters:
        call.pin(*tensors)
        return [call.make_fixed_scales(out) if isinstance(out, Tensor) else None for out in tree_flatten(call.out)[0]]
    if all(map(call.watch.is_discrete, tensors)):
        # A mask: no rescaling changes it, and the rest of the pass is that of inputs with such masks.
        call.watch.record_assumption()
        return [call.make_fixed_scales(out) if isinstance(out, Tensor) else None for out in tree_flatten(call.out)[0]]
    at = call.watch.find_location()
    where = f" ({at.line})" if at.line else f" in {at.module!r}" if at.module else ""
    raise ModelError(
        f"Got a forward pass that takes a value out of a tensor{where}. What it does next depends on the input, so one "
        "pass does not show what it does with others. Want a forward pass that does the same for every input. "
        "Do: write the choice with torch.where, take it out of forward, or look for settings and inputs with which the "
        "model makes no such choice."
    )
