"""The mean loss at every point of a slice, from one reading of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saltflat.data import Batch
from saltflat.errors import EmptyDataError
from saltflat.landscape.batch_norm import BatchNormStatistics
from saltflat.landscape.chunks import make_progress_counter, split_batches, split_points
from saltflat.landscape.points import SlicePoints
from saltflat.losses import Loss
from saltflat.problem import cast_targets
from saltflat.setting import NotDefinedError, Setting
from saltflat.whole import find_hits


@dataclass(frozen=True)
class PointLosses:
    """What was found at the points, float64 on the CPU.

    Attributes:
        losses: the mean loss; nan or infinite where it overflows.
        errors: the share of wrong answers; None where the loss knows no right and wrong.
        examples: how many there were.
    """

    losses: Tensor
    errors: Tensor | None
    examples: int


def compute_point_losses(setting: Setting, points: SlicePoints, statistics: BatchNormStatistics | None) -> PointLosses:
    """The mean loss and the errors at all points, with BatchNorm's statistics at each point where they are given."""
    totals, wrong = torch.zeros(2, len(points), dtype=torch.float64)
    share, answers, examples, judged = 0.0, 0, 0, True
    tick = make_progress_counter(setting, "Examples at points", len(points))
    with torch.no_grad():
        for batch in split_batches(setting):
            share += _compute_loss_weight(setting, batch)
            examples += batch.examples
            for which in split_points(setting, points, batch):
                buffers = {} if statistics is None else statistics.get_slice(which)
                outputs = points.compute_outputs(batch, which, buffers, {}).double()
                totals[which] += _sum_losses(setting.problem.loss, outputs, batch).cpu()
                missed = _count_errors(setting, outputs, batch) if judged else None
                if missed is None:
                    judged = False
                else:
                    wrong[which] += missed[0].cpu()
                    answers += missed[1] if which.start == 0 else 0
                tick(batch.examples * len(outputs))
    if share <= 0:
        raise EmptyDataError(
            "Got targets that are all ignored or have no weight. Want at least one that counts. "
            "Do: check ignore_index and the class weights."
        )
    losses = totals / share
    # Outputs that overflowed answer nothing.
    errors = (wrong / max(1, answers)).where(~losses.isnan(), losses) if judged else None
    return PointLosses(losses, errors, examples)


def _compute_loss_weight(setting: Setting, batch: Batch) -> float:
    """What the batch adds to the number that the loss is divided by; it does not depend on the point."""
    loss, targets = setting.problem.loss, cast_targets(batch.targets)
    outputs = setting.problem.network(batch)
    setting.problem.check_outputs(outputs, batch)
    loss.check(outputs.double(), targets)
    return float(loss.share(outputs.double(), targets).sum())


def _sum_losses(loss: Loss, outputs: Tensor, batch: Batch) -> Tensor:
    """``(points,)``: the sum over the examples at each point."""
    each = loss.total(outputs.flatten(0, 1), _repeat_targets(batch, outputs))
    return each.reshape(outputs.shape[:2]).sum(1)


def _count_errors(setting: Setting, outputs: Tensor, batch: Batch) -> tuple[Tensor, int] | None:
    """How many answers are wrong at each point, and how many there are; None where there is no right and wrong."""
    try:
        right, kept = find_hits(setting, outputs.flatten(0, 1), _repeat_targets(batch, outputs))
    except NotDefinedError:
        return None
    wrong = (~right & kept).reshape(len(outputs), -1).sum(1)
    return wrong.double(), int(kept.reshape(len(outputs), -1)[0].sum())


def _repeat_targets(batch: Batch, outputs: Tensor) -> Tensor:
    targets = cast_targets(batch.targets)
    return targets.expand(len(outputs), *targets.shape).flatten(0, 1)
