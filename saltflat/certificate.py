"""Whether the Gauss-Newton matrix of a layer is its Hessian: measured, not guessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.columns import plan_from
from saltflat.data import Batch
from saltflat.errors import OptionError
from saltflat.forms import Form, Layout
from saltflat.loan import loan
from saltflat.probe import probe
from saltflat.problem import Problem, real
from saltflat.statistics import Statistic
from saltflat.sweep import Totals, bytes_from, check_seed


@dataclass(frozen=True)
class Agreement:
    """Curvature of the mean loss along one random direction of a parameter, by the Hessian and by the Gauss-Newton matrix."""

    hessian: float
    gauss_newton: float
    gap: float


@dataclass(frozen=True)
class Certificate(Mapping[str, Agreement]):
    """For each parameter, how far its Gauss-Newton block is from its Hessian block.

    For networks that are piecewise linear in every single layer (ReLU, max-pooling, BatchNorm in eval mode) the two are the same, and
    ``curvature_diagonal`` *is* the diagonal of the Hessian. Behind smooth activations it is not.
    """

    agreements: Mapping[str, Agreement]
    examples: int
    tolerance: float = 1e-6

    @property
    def gap(self) -> float:
        """The largest relative difference."""
        return max(each.gap for each in self.agreements.values())

    @property
    def holds(self) -> bool:
        """Whether the Gauss-Newton blocks are the Hessian's, to rounding."""
        return all(each.gap <= self.tolerance for each in self.agreements.values())

    def __getitem__(self, name: str) -> Agreement:
        return self.agreements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.agreements)

    def __len__(self) -> int:
        return len(self.agreements)

    def __str__(self) -> str:
        width = max(map(len, self))
        lines = [f"{name:<{width}}  v'Hv {a.hessian: .6e}  v'Gv {a.gauss_newton: .6e}  gap {a.gap:.1e}" for name, a in self.items()]
        verdict = "is the Hessian's" if self.holds else "is NOT the Hessian's"
        return "\n".join([*lines, f"The Gauss-Newton diagonal {verdict} (largest gap {self.gap:.1e}, {self.examples} examples)."])


def certify(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    layers: Sequence[str] | str | None = None,
    examples: int = 8,
    seed: int = 0,
    mode: str = "eval",
) -> Certificate:
    """Compare v'Hv with v'Gv for a random direction v of every parameter, in float64, on the first few examples.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> certify(net, (torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))).holds
        True
    """
    check_seed(seed)
    if isinstance(examples, bool) or not isinstance(examples, int) or examples < 1:
        raise OptionError(f"Got examples={examples!r}. Want at least 1. Do: leave it out for 8.")
    with loan(model, mode):
        problem = Problem.of(model, data, loss, layers, torch.float64, mode)
        found = probe(problem)
        batch = next(problem.batches()).cut(0, examples)
        totals = Totals(problem, found, [_along(seed)], plan_from("exact"), seed, bytes_from("1GiB"))
        for _ in totals.add(batch):
            pass
        gauss_newton = totals.result(0.0, {})["curvature_along"]
        hessian = _hessian_along(problem, batch, seed)
    pairs = {name: (float(hessian[name]), float(gauss_newton[name])) for name in gauss_newton}
    # Where a parameter has no effect at all, both are rounding.
    floor = 1e-12 * max(abs(value) for pair in pairs.values() for value in pair)
    gaps = {name: abs(h - g) / max(abs(h), abs(g), floor) if max(abs(h), abs(g)) > 0 else 0.0 for name, (h, g) in pairs.items()}
    agreements = {name: Agreement(h, g, gaps[name]) for name, (h, g) in pairs.items()}
    return Certificate(agreements, batch.examples)


def _direction(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """A random unit vector; parameters of one shape share it, which does no harm."""
    noise = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=noise, dtype=torch.float64)
    return (values / values.norm()).to(device)


def _along(seed: int) -> Statistic:
    def total(form: Form, layout: Layout) -> Tensor:
        return form.project(_direction(form.shape, seed, form.device)).square().sum()

    return Statistic("curvature_along", "curvature", total, None, "Curvature along one random direction.", scalar=True)


def _hessian_along(problem: Problem, batch: Batch, seed: int) -> dict[str, Tensor]:
    """By differentiating twice, without any of the rules."""
    leaves = {name: value.detach().requires_grad_() for name, value in problem.network.measured.items()}
    outputs = problem.network(batch, leaves=leaves)
    targets = real(batch.targets)
    mean = problem.loss.total(outputs, targets).sum() / problem.loss.share(outputs, targets).sum()
    gradients = torch.autograd.grad(mean, list(leaves.values()), create_graph=True, allow_unused=True)
    result = {}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        along = _direction(leaf.shape, seed, leaf.device)
        result[name] = torch.zeros((), dtype=torch.float64)
        if gradient is not None and gradient.requires_grad:
            (second,) = torch.autograd.grad((gradient * along).sum(), leaf, retain_graph=True, allow_unused=True)
            if second is not None:
                result[name] = (second * along).sum()
    return result
