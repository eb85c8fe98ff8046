"""Columns whose outer products sum to the curvature of the loss at the outputs, which a sweep propagates back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from math import inf

import numpy as np
import torch
from torch import Tensor

from saltflat.errors import OptionError, UnknownNameError
from saltflat.gradients.base import ColumnLayout


@dataclass(frozen=True)
class SoftmaxCurvature:
    """``mass * (diag(p) - p p')`` with ``p`` of shape ``(examples, positions, classes)``.

    ``axis`` is that of the classes in the outputs.
    """

    p: Tensor
    mass: Tensor
    axis: int
    shape: torch.Size

    def compute_quadratic_form(self, direction: Tensor) -> Tensor:
        """Return the sum of direction' B direction over the examples."""
        u = direction.movedim(self.axis, -1).reshape_as(self.p)
        mean = (self.p * u).sum(-1, keepdim=True)
        return (self.mass * (self.p * (u - mean).square()).sum(-1)).sum()

    def reshape_to_outputs(self, columns: Tensor) -> Tensor:
        """Reshape ``(..., positions, classes)`` to ``(..., *outputs)``."""
        lead = columns.shape[:-2]
        positions = [size for axis, size in enumerate(self.shape[1:], start=1) if axis != self.axis]
        return columns.reshape(*lead, *positions, columns.shape[-1]).movedim(-1, len(lead) - 1 + self.axis)


@dataclass(frozen=True)
class DiagonalCurvature:
    """One curvature per output, ``(examples, *outputs)``."""

    values: Tensor

    def compute_quadratic_form(self, direction: Tensor) -> Tensor:
        """Return the sum of direction' B direction over the examples."""
        return (self.values * direction.square()).sum()


@dataclass(frozen=True)
class FactoredCurvature:
    """``sum_k columns_k columns_k'`` minus the same of ``negative``; each ``(rank, examples, *outputs)``."""

    columns: Tensor
    negative: Tensor | None

    def compute_quadratic_form(self, direction: Tensor) -> Tensor:
        """Return the sum of direction' B direction over the examples."""

        def sum_squares(columns: Tensor) -> Tensor:
            return (columns * direction).reshape(*columns.shape[:2], -1).sum(2).square().sum()

        return sum_squares(self.columns) - (sum_squares(self.negative) if self.negative is not None else 0)


Curvature = SoftmaxCurvature | DiagonalCurvature | FactoredCurvature

JOINING = {"cuda"}  # types of devices where sets of columns share a pass
TOP = 3  # default number of classes of "top"
DRAWS = 4  # random draws for the remaining classes of "top"
SAMPLED = 8  # default number of draws of "sampled"
MOST = 10**6  # columns: the scatter of this many draws is a thousandth of that of one


@dataclass(frozen=True)
class ColumnPlan:
    """Which columns to use: ``kind`` and their number."""

    kind: str
    count: int = 0

    @property
    def is_random(self) -> bool:
        """Return whether random numbers are drawn."""
        return self.kind != "exact"

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}" if self.is_random else self.kind


def parse_column_plan(given: str | ColumnPlan) -> ColumnPlan:
    """Return the plan given by a string such as ``"exact"`` or ``"top:3"``.

    >>> parse_column_plan("top")
    ColumnPlan(kind='top', count=3)
    >>> parse_column_plan("sampled:16")
    ColumnPlan(kind='sampled', count=16)
    """
    if isinstance(given, ColumnPlan):
        return given
    defaults = {"exact": 0, "top": TOP, "sampled": SAMPLED}
    kind, colon, count = str(given).partition(":")
    if kind not in defaults:
        meant = next((each for each in defaults if each[:2] == kind[:2]), "sampled")
        hint = f"sampled:{kind}" if kind.isdigit() else meant if meant == "exact" else meant + colon + count
        raise UnknownNameError(
            f"Expected 'exact', 'top:r' or 'sampled:m', but got the choice of columns {given!r}. Try {hint!r}."
        )
    least = {"top": 1, "sampled": 2}.get(kind)
    is_number = count.isascii() and count.isdigit() and len(count) <= len(str(MOST))
    if colon and (least is None or not is_number or not least <= int(count) <= MOST):
        raise OptionError(
            "Expected 'exact', 'top:r' with r >= 1 classes, or 'sampled:m' with m >= 2 draws, to see their scatter "
            f"(both at most {MOST:,}), but got columns={given!r}. Try columns='top:3'."
        )
    return ColumnPlan(kind, int(count) if colon else defaults[kind])


@dataclass(frozen=True)
class Columns:
    """Columns of one batch.

    Attributes:
        layout: of the columns.
        block: returns the columns from a start to a stop.
        sign: whether their outer products are added (1) or subtracted (-1).
    """

    layout: ColumnLayout
    block: Callable[[int, int], Tensor]
    sign: int = 1

    def split(self, fitting: int, apart: bool) -> list[tuple[int, int, ColumnLayout, int]]:
        """Return start, stop, layout and first draw of blocks of at most ``fitting`` columns.

        Draws are compared with each other in one block, unless their sums are kept ``apart`` and they do not fit.
        """
        layout = self.layout
        if layout.draws and (not apart or layout.total <= fitting):
            return [(0, layout.total, layout, 0)]
        fixed = [(start, min(start + fitting, layout.fixed)) for start in range(0, layout.fixed, fitting)]
        drawn = [(each.start, each.stop) for each in layout.make_group_slices()]
        return [
            *((start, stop, ColumnLayout(stop - start), 0) for start, stop in fixed),
            *((start, stop, ColumnLayout(0, 1, layout.size), n) for n, (start, stop) in enumerate(drawn)),
        ]


@dataclass(frozen=True)
class ExampleRNG:
    """Random numbers that depend only on the seed and the position of the example in the data."""

    seed: int
    first: int
    places: Tensor | None = None  # positions of the examples, if they are not first, first + 1, ...

    def draw_uniform(self, examples: int, *shape: int) -> Tensor:
        """Return numbers in [0, 1), ``(examples, *shape)``."""
        return torch.from_numpy(np.stack([each.random(shape) for each in self._make_generators(examples)]))

    def _make_generators(self, examples: int) -> list[np.random.Generator]:
        numbers = range(self.first, self.first + examples) if self.places is None else self.places.tolist()
        return [np.random.Generator(np.random.Philox(key=[self.seed, n])) for n in numbers]

    def iterate_negative(self, examples: int, *shape: int) -> Iterator[Tensor]:
        """Yield where the signs of one draw after the other are -1, ``(examples, *shape)``.

        The signs are those of :meth:`draw_signs` for all draws together, which for a large vocabulary would take more
        memory than the columns.
        """
        each = self._make_generators(examples)
        while True:
            yield torch.from_numpy(np.stack([generator.random(shape) < 0.5 for generator in each]))

    def draw_signs(self, examples: int, *shape: int) -> Tensor:
        """Return 1 or -1 with equal probability, ``(examples, *shape)``."""
        return torch.where(self.draw_uniform(examples, *shape) < 0.5, -1.0, 1.0).double()


def make_columns(
    curvature: Curvature, plan: ColumnPlan, dice: ExampleRNG, dtype: torch.dtype | None = None
) -> list[Columns]:
    """Return the columns of a batch, in two sets if the curvature has negative parts.

    Random ones of a softmax, which may have many classes, are rounded one by one to ``dtype`` if one is given.
    """
    if isinstance(curvature, SoftmaxCurvature):
        return [_make_softmax_columns(curvature, plan, dice, dtype)]
    if isinstance(curvature, DiagonalCurvature):
        return [_make_diagonal_columns(curvature.values, plan, dice)]
    sets = [_make_root_columns(curvature.columns, plan, dice, 1)]
    if curvature.negative is not None:
        sets.append(_make_root_columns(curvature.negative, plan, dice, -1))
    return sets


def wrap_columns(columns: Tensor, layout: ColumnLayout, sign: int = 1) -> Columns:
    """Return columns that are already computed."""
    return Columns(layout, lambda start, stop: columns[start:stop], sign)


def can_join_columns(sets: Sequence[Columns], device: torch.device, fitting: float = inf) -> bool:
    """Return whether sets of columns are propagated in one pass, if they are at most ``fitting`` together.

    On a GPU a pass with one column more takes as long; on a CPU single columns have faster kernels. Random draws are
    compared with each other, so they stay by themselves.
    """
    is_small = sum(each.layout.total for each in sets) <= fitting
    return device.type in JOINING and len(sets) > 1 and is_small and not any(each.layout.draws for each in sets)


def join_columns(sets: Sequence[Columns]) -> tuple[Tensor, list[slice]]:
    """Return all columns of several sets as one array, and the place of each set."""
    ends = list(accumulate((each.layout.total for each in sets), initial=0))
    columns = torch.cat([each.block(0, each.layout.total) for each in sets])
    return columns, [slice(start, stop) for start, stop in pairwise(ends)]


def _make_softmax_columns(
    curvature: SoftmaxCurvature, plan: ColumnPlan, dice: ExampleRNG, dtype: torch.dtype | None
) -> Columns:
    classes = curvature.p.shape[-1]
    if plan.kind == "exact" or (plan.kind == "top" and plan.count >= classes - 1 and curvature.p.shape[1] == 1):
        return _make_exact_softmax_columns(curvature)
    if plan.kind == "sampled":
        return _sample_softmax_columns(curvature, plan.count, dice, dtype)
    return _make_top_softmax_columns(curvature, min(plan.count, classes - 1), dice, dtype)


def compute_softmax_root(p: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    r"""Return a square root of :math:`\mathrm{diag}\, p - p p^T` with one column fewer than classes.

    With :math:`q = \sqrt p` the matrix is :math:`D_q (I - q q^T) D_q`, and the Householder reflection that maps
    :math:`q` to a coordinate gives an orthonormal basis of the complement of q. With the most likely class c as that
    coordinate nothing cancels, however close p is to one-hot: column k is
    :math:`q_k e_k - \frac{q_k}{1 + q_c} p` outside of c, and :math:`-q_c q_k` at c. The result is
    ``(..., classes, classes - 1)``.

    >>> p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    >>> root = compute_softmax_root(p)
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


def _make_exact_softmax_columns(curvature: SoftmaxCurvature) -> Columns:
    examples, positions, classes = curvature.p.shape
    rank = classes - 1

    def make_block(start: int, stop: int) -> Tensor:
        # Each column belongs to one position: column j is number j % rank of position j // rank.
        # Only the requested ones are computed.
        columns = curvature.p.new_zeros(stop - start, examples, positions, classes)
        for t in range(start // rank, (stop - 1) // rank + 1):
            low, high = max(start, t * rank), min(stop, (t + 1) * rank)
            root = compute_softmax_root(curvature.p[:, t], low - t * rank, high - t * rank)
            root = root * curvature.mass[:, t, None, None].sqrt()
            columns[low - start : high - start, :, t] = root.permute(2, 0, 1)
        return curvature.reshape_to_outputs(columns)

    return Columns(ColumnLayout(fixed=positions * rank), make_block)


def _compute_class_column(p: Tensor, index: Tensor) -> Tensor:
    """Return ``e_k - p`` for the classes ``index``."""
    return torch.zeros_like(p).scatter_(-1, index.unsqueeze(-1), 1.0) - p


def _mix_class_columns(p: Tensor, part_root: Tensor, negative: Tensor) -> Tensor:
    r"""Return one column for many classes: :math:`\sum_k \epsilon_k \sqrt{q_k} (e_k - p)` with random signs.

    ``part_root`` holds the roots of the masses q of these classes, ``negative`` says where signs are -1. The expected
    outer product is the sum over the classes' columns. Drawing a single class y ~ p instead is unbiased too, but at a
    trained minimum nearly every draw is the most likely class, whose column is nearly zero: large values are rare, and
    error estimates miss them. The relative scatter of signs does not depend on how confident the network is.
    """
    root = torch.where(negative, -part_root, part_root)
    root -= p * root.sum(-1, keepdim=True)
    return root


def _write_columns(
    curvature: SoftmaxCurvature,
    iterate: Callable[[], Iterator[Tensor]],
    layout: ColumnLayout,
    dtype: torch.dtype | None,
) -> Columns:
    """Return columns that are made when they are asked for, one after the other."""
    p, following, done = curvature.p, iterate(), 0

    def make_block(start: int, stop: int) -> Tensor:
        nonlocal following, done
        if start < done:
            following, done = iterate(), 0
        found = torch.empty(stop - start, *p.shape, dtype=dtype or p.dtype, device=p.device)
        for number, column in enumerate(islice(following, start - done, stop - done)):
            found[number] = column
        done = stop
        return curvature.reshape_to_outputs(found)

    return Columns(layout, make_block)


def _sample_softmax_columns(
    curvature: SoftmaxCurvature, draws: int, dice: ExampleRNG, dtype: torch.dtype | None
) -> Columns:
    # Signs of different positions are independent, so one column covers all of them.
    p, scale = curvature.p, (curvature.mass / draws).sqrt().unsqueeze(-1)

    def iterate_columns() -> Iterator[Tensor]:
        root = p.sqrt()
        for negative in dice.iterate_negative(*p.shape):
            yield _mix_class_columns(p, root, negative.to(p.device)) * scale

    return _write_columns(curvature, iterate_columns, ColumnLayout(0, draws, 1), dtype)


def _make_top_softmax_columns(
    curvature: SoftmaxCurvature, count: int, dice: ExampleRNG, dtype: torch.dtype | None
) -> Columns:
    p, scale = curvature.p, curvature.mass.sqrt().unsqueeze(-1)
    examples, positions, classes = p.shape
    top = p.topk(count, -1)

    def compute_kept(k: int) -> Tensor:
        return _compute_class_column(p, top.indices[..., k]) * top.values[..., k, None].sqrt() * scale

    def iterate_columns() -> Iterator[Tensor]:
        if positions == 1:
            yield from map(compute_kept, range(count))
        root = p.scatter(-1, top.indices, 0.0).sqrt()
        for each in dice.iterate_negative(examples, positions, classes + count):
            negative = each.to(p.device)
            # The kept columns of different positions can be added too, with their own signs for every draw.
            for k in range(count if positions > 1 else 0):
                column = compute_kept(k) / DRAWS**0.5
                yield torch.where(negative[..., classes + k, None], -column, column)
            yield _mix_class_columns(p, root, negative[..., :classes]) * scale / DRAWS**0.5

    layout = ColumnLayout(count, DRAWS, 1) if positions == 1 else ColumnLayout(0, DRAWS, count + 1)
    return _write_columns(curvature, iterate_columns, layout, dtype)


def _make_diagonal_columns(values: Tensor, plan: ColumnPlan, dice: ExampleRNG) -> Columns:
    root = values.sqrt()
    size = root[0].numel()
    if plan.kind == "exact" or (plan.kind == "top" and plan.count >= size):
        flat = root.reshape(len(root), -1)

        def make_block(start: int, stop: int) -> Tensor:
            number = torch.arange(start, stop, device=root.device)
            columns = flat.new_zeros(len(number), *flat.shape)
            columns[torch.arange(len(number), device=root.device), :, number] = flat[:, number].T
            return columns.reshape(-1, *root.shape)

        return Columns(ColumnLayout(fixed=size), make_block)
    count = plan.count if plan.kind == "top" else 0
    flat = root.reshape(len(root), -1)
    top = flat.topk(count, 1)
    kept = torch.zeros_like(flat).expand(count, *flat.shape).clone()
    for k in range(count):
        kept[k].scatter_(1, top.indices[:, k : k + 1], top.values[:, k : k + 1])
    rest = flat.scatter(1, top.indices, 0.0)
    draws = DRAWS if plan.kind == "top" else plan.count
    signs = dice.draw_signs(len(flat), draws, size).to(flat).transpose(0, 1)
    columns = torch.cat([kept, signs * rest / draws**0.5])
    return wrap_columns(columns.reshape(-1, *root.shape), ColumnLayout(count, draws, 1))


def _make_root_columns(roots: Tensor, plan: ColumnPlan, dice: ExampleRNG, sign: int) -> Columns:
    rank, examples = roots.shape[:2]
    if plan.kind == "exact" or (plan.kind == "top" and plan.count >= rank):
        return wrap_columns(roots, ColumnLayout(fixed=rank), sign)
    count = plan.count if plan.kind == "top" else 0
    draws = DRAWS if plan.kind == "top" else plan.count
    signs = dice.draw_signs(examples, draws, rank - count).to(roots)
    mixed = torch.einsum("ndr,rn...->dn...", signs, roots[count:]) / draws**0.5
    return wrap_columns(torch.cat([roots[:count], mixed]), ColumnLayout(count, draws, 1), sign)
