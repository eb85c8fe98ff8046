"""How many rescalings a network has, by numbers alone: no graph, and no rule for any operation.

Multiply every parameter entry p by exp(t_p). A rescaling is a direction of t in which the function stands still *at
every weight*. So draw many weights and inputs, stack the gradients of a random sum of the outputs with respect to t,
and take the null space. At one weight alone it would hold more: rotations inside an attention head are directions of t
too, but at other weights they are other directions.

What no draw reaches is not seen: an activation with a kink at 1000 would pass for a straight line.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from cases import Case, joined
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

EXAMPLES = 4  # in each draw: a few, so that hardly any unit is dead on all of them
CHUNK = 64  # draws at a time
LEAST = 512  # draws
EPS = 0.1  # of every norm that has one
ROUNDING = 1e-12  # zeros are smaller than this, beside a largest value of 1
CLEAR = 1e4  # and all others larger than this many times that


class UnclearGapError(AssertionError):
    """Numbers of which nobody can say whether they are zero."""


@dataclass(frozen=True, eq=False)
class Freedom:
    """All rescalings of a network, as directions of the logarithms of its entries.

    Attributes:
        dimension: how many of them are independent.
        basis: ``(columns, dimension)``, orthonormal; zero at the ineffective entries.
        blocks: the columns of each parameter (flattened), by name. A BatchNorm's ``running_mean`` and ``running_var``
            have the same columns, one per channel: the mean is multiplied by exp(s), variance + eps by exp(2 s).
        ineffective: ``(columns,)``, entries that the function does not depend on at all, such as the key biases of
            attention. They are free, but that is no rescaling.
        values: the singular values, largest first; the largest is 1.
    """

    dimension: int
    basis: Tensor
    blocks: dict[str, slice]
    ineffective: Tensor
    values: Tensor

    @property
    def kept(self) -> float:
        """The smallest singular value that counts as not zero."""
        return float(self.values[len(self.values) - self.dimension - 1])

    @property
    def dropped(self) -> float:
        """The largest one that counts as zero, or what rounding would make of one."""
        nothing = torch.full((1,), torch.finfo(torch.float64).eps, dtype=torch.float64)
        return float(torch.cat([self.values[len(self.values) - self.dimension :], nothing]).max())

    @property
    def gap(self) -> float:
        return self.kept / self.dropped

    def column(self, logs: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> Tensor:
        """Logarithms by name as one column; names left out stay, and ineffective entries are not looked at."""
        column = torch.zeros(len(self.ineffective), dtype=torch.float64)
        for name, values in logs.items():
            column[self.blocks[name]] = torch.as_tensor(values, dtype=torch.float64).flatten()
        return column.masked_fill(self.ineffective, 0)

    def logs(self, column: Tensor) -> dict[str, Tensor]:
        """A column as flat logarithms by name."""
        return {name: column[block] for name, block in self.blocks.items()}

    def outside(self, column: Tensor) -> float:
        """How far a column is from the rescalings: 0 for a rescaling."""
        return float((column - self.basis @ (self.basis.mT @ column)).norm())


def freedom(case: Case, seed: int = 0) -> Freedom:
    """The directions that leave the function alone at every weight; raises when zero cannot be told from not zero."""
    model = prepared(case.model)
    blocks = blocks_of(model)
    rows = slopes(case, model, blocks, torch.Generator().manual_seed(seed))
    # Neither a large draw nor a large entry may outweigh the others.
    rows = rows[rows.any(1)]
    rows = rows / rows.norm(dim=1, keepdim=True)
    sizes = rows.norm(dim=0)
    ineffective = zeros(sizes)
    sizes = sizes[~ineffective]
    _, values, directions = torch.linalg.svd(rows[:, ~ineffective] / sizes, full_matrices=False)
    null = zeros(values)
    basis = rows.new_zeros(len(ineffective), int(null.sum()))
    basis[~ineffective] = torch.linalg.qr(directions[null].mT / sizes.unsqueeze(1)).Q
    return Freedom(int(null.sum()), basis, blocks, ineffective, values / values.max())


def zeros(values: Tensor) -> Tensor:
    """Which of the values are zero up to rounding; raises when one is neither that nor clearly more.

    >>> zeros(torch.tensor([3.0, 1e-15, 0.3]).double())
    tensor([False,  True, False])
    """
    relative = values / values.max()
    zero = relative < ROUNDING
    smallest = float(relative[~zero].min())
    if smallest < CLEAR * ROUNDING:
        raise UnclearGapError(
            f"Expected less than {ROUNDING:.0e}, which is rounding, or more than {CLEAR * ROUNDING:.0e}, but got "
            f"{smallest:.1e} beside a largest value of 1. Try looking at the entries with almost no effect."
        )
    return zero


def slopes(case: Case, model: nn.Module, blocks: Mapping[str, slice], generator: torch.Generator) -> Tensor:
    """``(draws, columns)``: how fast a random sum of the outputs changes with the logarithm of each entry."""
    columns = max(block.stop for block in blocks.values())
    eps = {f"{prefix}running_var": norm.eps for prefix, norm in batch_norms(model).items()}

    def projected(logs: Tensor, values: dict[str, Tensor], inputs: Any, weights: Tensor) -> Tensor:
        moved = {}
        for name, value in values.items():
            factor = logs[blocks[name]].exp().view(value.shape)
            moved[name] = (value + eps[name]) * factor**2 - eps[name] if name in eps else value * factor
        return (outputs_of(model, moved, inputs) * weights).sum()

    known = inputs_of(joined(case.batches))
    parts = []
    # More draws than columns, and never few: what is left over must not be for want of draws.
    for _ in range(math.ceil(max(1.4 * columns, LEAST) / CHUNK)):
        values, inputs = drawn(model, generator), tree_map(lambda x: resampled(x, generator), known)
        outputs = outputs_of(model, {}, tree_map(lambda x: x[0], inputs))
        weights = torch.randn(CHUNK, *outputs.shape, dtype=torch.float64, generator=generator)
        logs = torch.zeros(CHUNK, columns, dtype=torch.float64)
        parts.append(vmap(grad(projected))(logs, values, inputs, weights))
    return torch.cat(parts)


def drawn(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Weights of random signs and sizes: none near zero, and a layer's outputs about as large as its inputs.

    Whole tensors are larger or smaller too, from draw to draw, so that an activation with a kink away from zero is seen
    on both sides of it.
    """

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(CHUNK, *shape, dtype=torch.float64, generator=generator)

    values = {}
    for name, parameter in model.named_parameters():
        sign = torch.randint(2, (CHUNK, *parameter.shape), generator=generator) * 2 - 1
        level = uniform(-1, 1, *[1] * parameter.ndim).exp() / math.sqrt(parameter[0].numel() if parameter.ndim else 1)
        values[name] = sign * level * uniform(0.5, 1.5, *parameter.shape)
    for prefix, norm in batch_norms(model).items():
        values[f"{prefix}running_mean"] = uniform(-1, 1, norm.num_features)
        values[f"{prefix}running_var"] = uniform(0.5, 2, norm.num_features)
    return values


def resampled(known: Tensor, generator: torch.Generator) -> Tensor:
    """New examples for every draw: normal numbers, some examples large, or the whole numbers that occur in the data."""
    shape = (CHUNK, EXAMPLES, *known.shape[1:])
    if known.is_floating_point():
        level = torch.rand(CHUNK, EXAMPLES, *[1] * (known.ndim - 1), dtype=torch.float64, generator=generator)
        return torch.randn(shape, dtype=torch.float64, generator=generator) * (3 * level - 1).exp()
    return known.flatten()[torch.randint(known.numel(), shape, generator=generator)]


def prepared(model: nn.Module) -> nn.Module:
    """A copy in float64 and eval mode, where every norm that has an eps has a large one.

    Any eps above zero fixes the size of what it is added to, but a small one does so too weakly to be told from
    rounding. An RMSNorm's ``None`` is as small as rounding itself and is left so.
    """
    copied = deepcopy(model).double().eval().requires_grad_(False)
    for module in copied.modules():
        if getattr(module, "eps", None):
            module.eps = EPS  # type: ignore[assignment]
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # would hide the gradient of a row that has an effect
    for norm in batch_norms(copied).values():
        norm.forward = partial(batch_norm_by_definition, norm)  # type: ignore[method-assign]
    return copied


def batch_norm_by_definition(norm: _BatchNorm, x: Tensor) -> Tensor:
    """torch's own cannot be differentiated with respect to its statistics."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    shape = (1, -1) + (1,) * (x.ndim - 2)
    y = (x - norm.running_mean.view(shape)) / (norm.running_var.view(shape) + norm.eps).sqrt()
    return y * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else y


def blocks_of(model: nn.Module) -> dict[str, slice]:
    blocks: dict[str, slice] = {}
    end = 0
    for name, parameter in model.named_parameters():
        blocks[name] = slice(end, end + parameter.numel())
        end += parameter.numel()
    for prefix, norm in batch_norms(model).items():
        blocks[f"{prefix}running_mean"] = blocks[f"{prefix}running_var"] = slice(end, end + norm.num_features)
        end += norm.num_features
    return blocks


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Those that keep statistics, by what comes before the names of their members."""
    found = {f"{name}." if name else "": module for name, module in model.named_modules()}
    return {
        prefix: module
        for prefix, module in found.items()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def inputs_of(batch: Any) -> Any:
    return {key: value for key, value in batch.items() if key != "labels"} if isinstance(batch, dict) else batch[0]


def outputs_of(model: nn.Module, values: dict[str, Tensor], inputs: Any) -> Tensor:
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
    kwargs = inputs if isinstance(inputs, dict) else {}
    fast = torch.backends.mha.get_fastpath_enabled()
    # The fused kernels of attention have no derivative here.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            outputs: Any = functional_call(model, values, args, kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    tensor: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return tensor
