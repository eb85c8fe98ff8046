"""The searches of the feature robustness: for the change that raises the mean loss most, and each example's loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.bounds.feature_derivatives import Estimate, LayerDerivatives
from saltflat.bounds.feature_layer import Ball, FeatureLayer
from saltflat.engine.context import Context
from saltflat.engine.data import Batch
from saltflat.engine.full_loss import compute_gradient_at, compute_loss_at
from saltflat.engine.noise import compute_mean_and_error
from saltflat.engine.problem import cast_targets

SOLVED = 1e-6  # what the slope still promises, relative to the rise, when a search stops
LEAST_STEP = 1e-4  # relative size of a step at which a search stops
TINY = 1e-150  # least length that is divided by


@dataclass(frozen=True)
class Rise:
    """The rise of the mean loss at a B, and its gradient with respect to B."""

    value: float
    B: Tensor
    slope: Tensor


class RiseSearch:
    """Measures the rise of the mean loss under changes of a layer's features, and searches for the largest.

    Args:
        context: the problem.
        layer: the layer.
        ball: the matrices to search.
        derivatives: of the loss at the unchanged weights.
        restarts: the number of random starts.
        steps: the number of gradients of an ascent.
    """

    def __init__(
        self,
        context: Context,
        layer: FeatureLayer,
        ball: Ball,
        derivatives: LayerDerivatives,
        restarts: int,
        steps: int,
    ) -> None:
        self.context, self.layer, self.ball, self.derivatives = context, layer, ball, derivatives
        self.restarts, self.steps = restarts, steps
        self.weight = context.problem.network.measured[layer.name].double()
        self.slope = layer.pull_back(derivatives.gradient)
        self.passes = 0

    def compute_rise(self, delta: float, B: Tensor) -> float:
        """Return the rise of the mean loss at w + delta w A."""
        moved = self.weight + delta * self.layer.compute_change(B)
        return compute_loss_at(self.context, {self.layer.name: moved}) - self.derivatives.loss

    def average_orthogonal(self, deltas: Sequence[float], draws: int) -> list[Estimate]:
        """Return the mean rise over pairs A and -A of random orthogonal matrices, for each delta."""
        rises: list[list[float]] = [[] for _ in deltas]
        for draw in range(draws):
            # The same matrices for each delta, so that the curve is as smooth as the loss.
            B = self.layer.draw_orthogonal(self.context.seed, draw)
            for delta, found in zip(deltas, rises, strict=True):
                found.append((self.compute_rise(delta, B) + self.compute_rise(delta, -B)) / 2)
            self.context.tick("Random orthogonal matrices", draw + 1, draws)
        with np.errstate(over="ignore"):  # rises whose squares overflow have an infinite error
            return [compute_mean_and_error(each) if all(map(isfinite, each)) else (nan, nan) for each in rises]

    def find_largest(self, deltas: Sequence[float]) -> Iterator[Rise]:
        """Yield the largest rise that was found for each delta, in ascending order."""
        starts: list[Tensor] = []
        for number, delta in enumerate(deltas):
            best = self._search(delta, starts)
            yield best
            if number + 1 < len(deltas):
                # A larger delta reaches the same change with a smaller matrix, or goes further in its direction.
                smaller = best.B * (delta / deltas[number + 1])
                starts = [smaller, self.ball.project(best.B / max(self.ball.compute_norm(best.B), TINY))]

    def compute_gap(self, rise: Rise) -> float:
        """Return how much more the slope promises within the ball, which is 0 at a maximum."""
        return max(self.ball.compute_dual_norm(rise.slope) - float((rise.slope * rise.B).sum()), 0.0)

    def _search(self, delta: float, starts: Sequence[Tensor]) -> Rise:
        """Ascend from the best of these starts, the slope and the top eigenvector, and from each random matrix."""
        uphill = self.layer.pull_back(self.derivatives.top.vector)
        if float((uphill * self.slope).sum()) < 0:
            uphill = -uphill
        directions = [self.slope, uphill]
        directions += [self.layer.draw_orthogonal(self.context.seed, -1 - n) for n in range(self.restarts)]
        aimed = [self.ball.find_furthest(each) for each in directions]
        known = [self._evaluate(delta, B) for B in (*starts, *aimed[:2])]
        chosen = [max(known, key=lambda rise: rise.value), *(self._evaluate(delta, B) for B in aimed[2:])]
        unmoved = Rise(0.0, torch.zeros_like(self.slope), delta * self.slope)
        return max([*(self._ascend(delta, each) for each in chosen), unmoved], key=lambda rise: rise.value)

    def _evaluate(self, delta: float, B: Tensor) -> Rise:
        """Return the rise, -inf where it or its slope is not finite."""
        moved = self.weight + delta * self.layer.compute_change(B)
        loss, gradients = compute_gradient_at(self.context, {self.layer.name: moved})
        slope = delta * self.layer.pull_back(gradients[self.layer.name])
        self.passes += 1
        self.context.tick("Search for the largest rise", self.passes, None)
        is_finite = isfinite(loss) and bool(slope.isfinite().all())
        return Rise(loss - self.derivatives.loss if is_finite else -inf, B, slope)

    def _ascend(self, delta: float, best: Rise) -> Rise:
        """Follow the slope within the ball, with longer steps after each rise and shorter ones after each fall.

        The longest steps lead to the matrix that goes furthest along the slope, as in a power iteration.
        """
        groups, rank, _ = best.B.shape
        # The Frobenius norm of the largest matrices in the ball.
        radius = (groups * rank) ** 0.5 if self.ball.norm == "operator" else 1.0
        step = 1.0
        for _ in range(self.steps):
            length = float(best.slope.norm())
            if best.value == -inf or length == 0 or self.compute_gap(best) <= SOLVED * max(best.value, 0.0):
                break
            tried = self._evaluate(delta, self.ball.project(best.B + (step * radius / length) * best.slope))
            if tried.value > best.value:
                best, step = tried, 4 * step
            elif step < LEAST_STEP:
                break
            else:
                step /= 4
        return best


@dataclass(frozen=True)
class WorstRise:
    """The largest rise of a single example's loss, its position in the data, and the mean over all examples."""

    value: float
    example: int
    mean: float


def find_worst_examples(
    context: Context, layer: FeatureLayer, deltas: Sequence[float], steps: int
) -> Iterator[WorstRise]:
    """Yield the worst example for each delta, in ascending order."""
    values: list[list[Tensor]] = [[] for _ in deltas]
    positions: list[Tensor] = []
    done, total = 0, context.problem.num_examples
    for batch in context.read_chunks(2):
        together = context.get_probe(batch).strategy == "together"
        parts = [batch] if together else [batch.cut(n, n + 1) for n in range(batch.examples)]
        for part in parts:
            for found, rises in zip(
                values, _ExampleSearch(context, layer, part).find_largest(deltas, steps), strict=True
            ):
                found.append(rises.cpu())
            positions.append(torch.as_tensor(part.example_indices).cpu())
            done += part.examples
            context.tick("Worst changes of single examples", done, total)
    places = torch.cat(positions)
    for found in values:
        rises = torch.cat(found)
        worst = int(rises.argmax())
        yield WorstRise(float(rises[worst]), int(places[worst]), float(rises.mean()))


class _ExampleSearch:
    """Searches the worst changes of single examples' own features.

    The features of an example, at all its positions together, change by a vector of length delta times theirs. Only the
    part of the change in the row space of the weight has an effect. ``c`` holds it: the output changes by U S c.

    Args:
        context: the problem.
        layer: the layer.
        batch: the examples; several only if the first axis of the layer's input counts them.
    """

    def __init__(self, context: Context, layer: FeatureLayer, batch: Batch) -> None:
        self.problem, self.layer, self.batch = context.problem, layer, batch
        self.lengths, self.shape = self._inspect_features()
        self.best = torch.zeros(self.shape, dtype=torch.float64, device=self.lengths.device)
        self.plain, self.slope = self._compute_losses(self.best)
        self.rise = torch.zeros_like(self.plain)
        noise = torch.randn(self.shape, generator=torch.Generator().manual_seed(context.seed), dtype=torch.float64)
        # Where the slope is zero, any direction serves to start from.
        is_flat = self._spread(self._compute_lengths(self.slope) == 0)
        self.start = torch.where(is_flat, noise.to(self.slope), self.slope)

    def find_largest(self, deltas: Sequence[float], steps: int) -> Iterator[Tensor]:
        """Yield each example's largest rise for every delta, in ascending order."""
        for number, delta in enumerate(deltas):
            radius = delta * self.lengths
            starts = [self.start, self.best] if number else [self.start]
            # What was found for a smaller delta is in the larger ball too. Its slope matters only if a start beats it.
            self.slope = torch.zeros_like(self.best)
            for c in [self._stretch(each, radius) for each in starts]:
                self._try(c)
            step = torch.ones_like(self.rise)
            for _ in range(steps):
                gap = radius * self._compute_lengths(self.slope) - self._sum_examples(self.slope * self.best)
                if bool(((step < LEAST_STEP) | (gap <= SOLVED * self.rise)).all()):
                    break
                aimed = self.best + self._stretch(self.slope, step * radius)
                shrink = (radius / self._compute_lengths(aimed).clamp_min(TINY)).clamp_max(1.0)
                step = torch.where(self._try(aimed * self._spread(shrink)), 4 * step, step / 4)
            yield self.rise

    def _try(self, c: Tensor) -> Tensor:
        """Keep the changes of the examples whose losses they raise more, and return which these are."""
        losses, slopes = self._compute_losses(c)
        higher = (losses - self.plain > self.rise) & losses.isfinite()
        self.rise = torch.where(higher, losses - self.plain, self.rise)
        self.best = torch.where(self._spread(higher), c, self.best)
        self.slope = torch.where(self._spread(higher), slopes, self.slope)
        return higher

    def _compute_losses(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return each example's loss, and its gradient with respect to c."""
        c = c.detach().requires_grad_()

        def shift_output(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return y + self._apply(c, y) if module is self.layer.module else y

        with torch.enable_grad():
            outputs = self.problem.network(self.batch, shift_output, plain=True).double()
            targets = cast_targets(self.batch.targets)
            self.problem.loss.check(outputs, targets)
            totals = self.problem.loss.total(outputs, targets)
            share = self.problem.loss.share(outputs.detach(), targets).double()
            # An example whose targets are all ignored has no loss.
            losses = torch.where(share > 0, totals / share.where(share > 0, torch.ones_like(share)), 0.0)
        slope = None
        if losses.requires_grad:
            (slope,) = torch.autograd.grad(losses.sum(), c, allow_unused=True)
        return losses.detach(), torch.zeros_like(c) if slope is None else slope

    def _inspect_features(self) -> tuple[Tensor, torch.Size]:
        """Return the length of each example's features, and the shape of c."""
        seen: list[tuple[Tensor, torch.Size]] = []

        def inspect(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            if module is self.layer.module:
                squares, shape = self._square_features(x.detach().double(), y)
                seen.append((self._sum_examples(squares).sqrt(), shape))
            return y

        with torch.no_grad():
            self.problem.network(self.batch, inspect, plain=True)
        return seen[0]

    def _square_features(self, x: Tensor, y: Tensor) -> tuple[Tensor, torch.Size]:
        """Return the squared features, or their sums over patches, and the shape of c."""
        module = self.layer.module
        if isinstance(module, nn.Linear):
            return x.square(), torch.Size((*x.shape[:-1], self.layer.rank))
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        # A convolution with ones, padded as the layer pads.
        ones = x.new_ones(self.layer.groups, *self.layer.shape[1:])
        squares: Tensor = module._conv_forward(x.square(), ones, None)
        axis = y.dim() - len(module.kernel_size) - 1
        channels = self.layer.groups * self.layer.rank
        return squares, torch.Size((*y.shape[:axis], channels, *y.shape[axis + 1 :]))

    def _apply(self, c: Tensor, y: Tensor) -> Tensor:
        """Return the change of the layer's output y."""
        left = self.layer.left
        if isinstance(self.layer.module, nn.Linear):
            return (c @ left[0].mT).to(y)
        assert isinstance(self.layer.module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        places = y.shape[y.dim() - len(self.layer.module.kernel_size) :].numel()
        moved: Tensor = left @ c.reshape(-1, self.layer.groups, self.layer.rank, places)
        return moved.reshape(y.shape).to(y)

    def _sum_examples(self, values: Tensor) -> Tensor:
        return values.reshape(self.batch.examples, -1).sum(1)

    def _compute_lengths(self, c: Tensor) -> Tensor:
        lengths: Tensor = torch.linalg.vector_norm(c.reshape(self.batch.examples, -1), dim=1)
        return lengths

    def _spread(self, values: Tensor) -> Tensor:
        """Repeat one value of each example over its part of c."""
        each = self.shape.numel() // self.batch.examples
        return values[:, None].expand(-1, each).reshape(self.shape)

    def _stretch(self, c: Tensor, length: Tensor) -> Tensor:
        """Scale each example's part of c to a length; a zero remains one."""
        return c * self._spread(length / self._compute_lengths(c).clamp_min(TINY))
