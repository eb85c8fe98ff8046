r"""Columns whose squares add up to the curvature of the loss at the outputs: what a sweep propagates back.

For a second derivative :math:`B = \sum_k s_k s_k^T` the Gauss-Newton matrix is :math:`\sum_k (J^T s_k)(J^T s_k)^T`.
Three ways to take the columns:

* ``exact``: all of them. Softmax cross-entropy with K classes needs K - 1.
* ``top`` or ``top:r``: the r classes that carry most mass exactly, the rest by random columns. At a trained minimum
  r = 3 serves any number of classes.
* ``sampled`` or ``sampled:m``: m random columns. For vocabularies.

Random columns are unbiased, and always drawn several times, so that their scatter is known. The draws belong to the
example's place in the data, not to its batch: other batches give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from saltflat.curvature import Curvature, Diagonal, Softmax
from saltflat.errors import OptionError, unknown
from saltflat.forms import Layout

TOP = 3
DRAWS = 4
SAMPLED = 8
MOST = 10**6  # columns: the scatter of so many draws is a thousandth of that of one


@dataclass(frozen=True)
class Plan:
    """Which columns to take: ``kind`` and how many of them."""

    kind: str
    count: int = 0

    @property
    def random(self) -> bool:
        return self.kind != "exact"

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}" if self.random else self.kind


def plan_from(given: str | Plan) -> Plan:
    """
    >>> plan_from("top")
    Plan(kind='top', count=3)
    >>> plan_from("sampled:16")
    Plan(kind='sampled', count=16)
    """
    if isinstance(given, Plan):
        return given
    defaults = {"exact": 0, "top": TOP, "sampled": SAMPLED}
    kind, colon, count = str(given).partition(":")
    if kind not in defaults:
        raise unknown("choice of columns", given, defaults)
    least = {"top": 1, "sampled": 2}.get(kind)
    is_number = count.isascii() and count.isdigit() and len(count) <= len(str(MOST))
    if colon and (least is None or not is_number or not least <= int(count) <= MOST):
        raise OptionError(
            f"Got columns={given!r}. Want 'exact', 'top:r' with r >= 1 classes, or 'sampled:m' with m >= 2 draws "
            f"(two show their scatter); neither has more than {MOST:,}. Do: for instance columns='top:3'."
        )
    return Plan(kind, int(count) if colon else defaults[kind])


@dataclass(frozen=True)
class Columns:
    """Columns of one batch, made in blocks when asked for, and whether their squares are added or subtracted."""

    layout: Layout
    block: Callable[[int, int], Tensor]
    sign: int = 1


@dataclass(frozen=True)
class Dice:
    """Random numbers that depend on the seed and the place of the example in the data alone."""

    seed: int
    first: int
    places: Tensor | None = None  # of the examples, where they are not first, first + 1, ...

    def uniform(self, examples: int, *shape: int) -> Tensor:
        """``(examples, *shape)`` in [0, 1)."""
        numbers = range(self.first, self.first + examples) if self.places is None else self.places.tolist()
        each = [np.random.Generator(np.random.Philox(key=[self.seed, n])).random(shape) for n in numbers]
        return torch.from_numpy(np.stack(each))

    def signs(self, examples: int, *shape: int) -> Tensor:
        return torch.where(self.uniform(examples, *shape) < 0.5, -1.0, 1.0).double()


def columns_of(curvature: Curvature, plan: Plan, dice: Dice) -> list[Columns]:
    """The columns of a batch; two sets where the curvature has negative parts."""
    if isinstance(curvature, Softmax):
        return [_softmax(curvature, plan, dice)]
    if isinstance(curvature, Diagonal):
        return [_diagonal(curvature.values, plan, dice)]
    sets = [_roots(curvature.columns, plan, dice, 1)]
    if curvature.negative is not None:
        sets.append(_roots(curvature.negative, plan, dice, -1))
    return sets


def stored(columns: Tensor, layout: Layout, sign: int = 1) -> Columns:
    return Columns(layout, lambda start, stop: columns[start:stop], sign)


def _softmax(curvature: Softmax, plan: Plan, dice: Dice) -> Columns:
    classes = curvature.p.shape[-1]
    if plan.kind == "exact" or (plan.kind == "top" and plan.count >= classes - 1 and curvature.p.shape[1] == 1):
        return _softmax_exact(curvature)
    if plan.kind == "sampled":
        return _softmax_sampled(curvature, plan.count, dice)
    return _softmax_top(curvature, min(plan.count, classes - 1), dice)


def softmax_root(p: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    r"""A square root of :math:`\mathrm{diag}\, p - p p^T` with one column fewer than classes.

    With :math:`q = \sqrt p` the matrix is :math:`D_q (I - q q^T) D_q`, and the Householder reflection that takes
    :math:`q` to a coordinate gives an orthonormal basis of the complement of q. Reflected at the likeliest class c
    nothing cancels, however close p is to one-hot: column k is :math:`q_k e_k - \frac{q_k}{1 + q_c} p` outside of c,
    and :math:`-q_c q_k` at c. The result is ``(..., classes, classes - 1)``.

    >>> p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    >>> root = softmax_root(p)
    >>> torch.allclose(root @ root.T, p.diag() - p.outer(p))
    True
    """
    classes = p.shape[-1]
    likeliest = p.argmax(-1, keepdim=True)
    slot = torch.arange(classes - 1, device=p.device)[start:stop].expand(*p.shape[:-1], -1)
    slot = slot.where(slot != likeliest, slot.new_full((), classes - 1))  # the last class takes the place of c
    q = p.sqrt()
    qc, qk = q.gather(-1, likeliest), q.gather(-1, slot)
    root = -p.unsqueeze(-1) * (qk / (1 + qc)).unsqueeze(-2)
    root.scatter_add_(-2, slot.unsqueeze(-2), qk.unsqueeze(-2))
    return root.scatter_(-2, likeliest.unsqueeze(-1).expand(*p.shape[:-1], 1, slot.shape[-1]), (-qc * qk).unsqueeze(-2))


def _softmax_exact(curvature: Softmax) -> Columns:
    examples, positions, classes = curvature.p.shape
    rank = classes - 1

    def block(start: int, stop: int) -> Tensor:
        # A column lives at one position: column j is number j % rank of position j // rank.
        # Only those asked for are made.
        columns = curvature.p.new_zeros(stop - start, examples, positions, classes)
        for t in range(start // rank, (stop - 1) // rank + 1):
            low, high = max(start, t * rank), min(stop, (t + 1) * rank)
            root = softmax_root(curvature.p[:, t], low - t * rank, high - t * rank)
            root = root * curvature.mass[:, t, None, None].sqrt()
            columns[low - start : high - start, :, t] = root.permute(2, 0, 1)
        return curvature.placed(columns)

    return Columns(Layout(fixed=positions * rank), block)


def _one_class(p: Tensor, index: Tensor) -> Tensor:
    """``e_k - p`` for the classes ``index``."""
    return torch.zeros_like(p).scatter_(-1, index.unsqueeze(-1), 1.0) - p


def _mixed(p: Tensor, part: Tensor, signs: Tensor) -> Tensor:
    r"""One column for many classes: :math:`\sum_k \epsilon_k \sqrt{q_k} (e_k - p)` with random signs.

    ``part`` holds the masses q of these classes. On average the outer product is that of all the classes' columns.
    Drawing a single class y ~ p instead is unbiased too, but at a trained minimum nearly every draw is the likeliest
    class, whose column is nearly zero: rare large values, and errors that do not know of them. Signs have the same
    relative scatter however sure the network is.
    """
    root = part.sqrt() * signs
    return root - p * root.sum(-1, keepdim=True)


def _softmax_sampled(curvature: Softmax, draws: int, dice: Dice) -> Columns:
    # Signs of different positions are independent, so one column serves all of them.
    p = curvature.p
    signs = dice.signs(p.shape[0], draws, *p.shape[1:]).to(p).transpose(0, 1)
    scale = (curvature.mass / draws).sqrt().unsqueeze(-1)
    columns = torch.stack([_mixed(p, p, sign) * scale for sign in signs])
    return stored(curvature.placed(columns), Layout(0, draws, 1))


def _softmax_top(curvature: Softmax, count: int, dice: Dice) -> Columns:
    p, scale = curvature.p, curvature.mass.sqrt().unsqueeze(-1)
    examples, positions, classes = p.shape
    top = p.topk(count, -1)
    kept = [_one_class(p, top.indices[..., k]) * top.values[..., k, None].sqrt() * scale for k in range(count)]
    rest = p.scatter(-1, top.indices, 0.0)
    signs = dice.signs(examples, DRAWS, positions, classes + count).to(p).transpose(0, 1)
    tails = [_mixed(p, rest, sign[..., :classes]) * scale / DRAWS**0.5 for sign in signs]
    if positions == 1:
        return stored(curvature.placed(torch.stack(kept + tails)), Layout(count, DRAWS, 1))
    # The kept columns of different positions may be added too, with signs of their own for every draw.
    columns = []
    for sign, tail in zip(signs, tails, strict=True):
        columns += [column * sign[..., classes + k, None] / DRAWS**0.5 for k, column in enumerate(kept)]
        columns.append(tail)
    return stored(curvature.placed(torch.stack(columns)), Layout(0, DRAWS, count + 1))


def _diagonal(values: Tensor, plan: Plan, dice: Dice) -> Columns:
    root = values.sqrt()
    size = root[0].numel()
    if plan.kind == "exact" or (plan.kind == "top" and plan.count >= size):
        flat = root.reshape(len(root), -1)

        def block(start: int, stop: int) -> Tensor:
            number = torch.arange(start, stop, device=root.device)
            columns = flat.new_zeros(len(number), *flat.shape)
            columns[torch.arange(len(number), device=root.device), :, number] = flat[:, number].T
            return columns.reshape(-1, *root.shape)

        return Columns(Layout(fixed=size), block)
    count = plan.count if plan.kind == "top" else 0
    flat = root.reshape(len(root), -1)
    top = flat.topk(count, 1)
    kept = torch.zeros_like(flat).expand(count, *flat.shape).clone()
    for k in range(count):
        kept[k].scatter_(1, top.indices[:, k : k + 1], top.values[:, k : k + 1])
    rest = flat.scatter(1, top.indices, 0.0)
    draws = DRAWS if plan.kind == "top" else plan.count
    signs = dice.signs(len(flat), draws, size).to(flat).transpose(0, 1)
    columns = torch.cat([kept, signs * rest / draws**0.5])
    return stored(columns.reshape(-1, *root.shape), Layout(count, draws, 1))


def _roots(roots: Tensor, plan: Plan, dice: Dice, sign: int) -> Columns:
    rank, examples = roots.shape[:2]
    if plan.kind == "exact" or (plan.kind == "top" and plan.count >= rank):
        return stored(roots, Layout(fixed=rank), sign)
    count = plan.count if plan.kind == "top" else 0
    draws = DRAWS if plan.kind == "top" else plan.count
    signs = dice.signs(examples, draws, rank - count).to(roots)
    mixed = torch.einsum("ndr,rn...->dn...", signs, roots[count:]) / draws**0.5
    return stored(torch.cat([roots[:count], mixed]), Layout(count, draws, 1), sign)
