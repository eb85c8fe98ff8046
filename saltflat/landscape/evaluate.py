"""Evaluate the mean loss at every point of a slice, many points at a time, in one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import vmap

from saltflat.engine.context import Context
from saltflat.engine.data import Batch
from saltflat.engine.losses import Loss, find_hits
from saltflat.engine.network import Network
from saltflat.engine.per_example import LayerCalls
from saltflat.engine.problem import cast_targets
from saltflat.engine.reference_gradients import TOLERANCE
from saltflat.errors import EmptyDataError, ModelError, NotDefinedError, SaltflatError, format_error_line
from saltflat.landscape.directions import Direction

ALL, EACH = "points together", "point by point"


@dataclass(frozen=True)
class SlicePoints:
    """The points of a slice as weights.

    Attributes:
        network: the network whose weights are in the middle.
        places: the coordinates, ``(points, dimensions)``, in float64.
        directions: one for each dimension.
        beside: the numbers of a few neighboring points, to test vmap on.
        tried: whether inputs of each shape seen so far can be run under vmap.
        used: the strategies used so far.
    """

    network: Network
    places: Tensor
    directions: Sequence[Direction]
    beside: Sequence[int]
    tried: dict[object, bool] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def bytes_per_point(self) -> int:
        """The memory of the weights of one point, and of computing them."""
        moving = {name for each in self.directions for name in each.vector}
        return sum(
            value.numel() * (16 + value.element_size())
            for name, value in self.network.measured.items()
            if name in moving
        )

    def compute_weights(self, which: slice | Sequence[int]) -> dict[str, Tensor]:
        """Return the parameters that move, ``(points, *shape)`` each, computed in float64, in their own precision."""
        places, found = self.places[which], {}
        for name, value in self.network.measured.items():
            moved = [(axis, each.vector[name]) for axis, each in enumerate(self.directions) if name in each.vector]
            if not moved:
                continue
            weights = value.double().expand(len(places), *value.shape).clone()
            for axis, vector in moved:
                steps = places[:, axis].to(value.device).reshape(-1, *[1] * value.dim())
                weights.addcmul_(steps, vector)
            found[name] = weights.to(value)
        return found

    def compute_outputs(
        self, batch: Batch, which: slice, buffers: Mapping[str, Tensor], shared: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the outputs, ``(points, examples, *outputs)``.

        Args:
            batch: the examples.
            which: the points.
            buffers: buffers of the network, ``(points, *shape)`` each, which the passes may write to.
            shared: buffers that are the same at all points.
        """
        weights = self.compute_weights(which)
        if len(self.places[which]) > 1 and self._can_vmap(batch, buffers, shared):
            kept = {name: value.clone() for name, value in [*buffers.items(), *shared.items()]}
            try:
                outputs = _run_vmapped(self.network, batch, {**weights, **buffers}, shared)
            except SaltflatError:
                raise
            except Exception:
                # Out of memory, or control flow that depends on later examples: the loop handles both. A bug in the
                # model raises again there, with a readable traceback.
                for name, value in [*buffers.items(), *shared.items()]:
                    value.copy_(kept[name])
            else:
                self.used.add(ALL)
                return outputs
        self.used.add(EACH)
        return _run_point_by_point(self.network, batch, {**weights, **buffers}, shared)

    def _can_vmap(self, batch: Batch, buffers: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> bool:
        """Return whether inputs of this shape can be vmapped, which is tested when first seen."""
        kind = (LayerCalls.from_batch(batch, []).inputs, frozenset(buffers), frozenset(shared))
        if kind not in self.tried:
            self.tried[kind] = self._is_vmap_correct(batch, buffers, shared)
        return self.tried[kind]

    def _is_vmap_correct(self, batch: Batch, buffers: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> bool:
        """Return whether vmap and the loop agree on a few points."""
        few = self.compute_weights(self.beside)
        few |= {name: torch.stack([each[0]] * len(self.beside)) for name, each in buffers.items()}
        some = batch if buffers else batch.cut(0, 2)
        found = []
        for way in (_run_point_by_point, _run_vmapped):
            own = {name: each.clone() for name, each in few.items()}
            common = {name: each.clone() for name, each in shared.items()}
            try:
                outputs = way(self.network, some, own, common)
            except SaltflatError:
                raise
            except Exception:
                if way is _run_point_by_point:
                    raise
                return False
            found.append([outputs, *(own[name] for name in buffers), *common.values()])
        return all(_is_close_output(one, two) for one, two in zip(*found, strict=True))


def _run_vmapped(network: Network, batch: Batch, stacked: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> Tensor:
    def run_point(own: Mapping[str, Tensor]) -> Tensor:
        return network(batch, leaves={**shared, **own})

    outputs: Tensor = vmap(run_point)(dict(stacked))
    return outputs


def _run_point_by_point(
    network: Network, batch: Batch, stacked: Mapping[str, Tensor], shared: Mapping[str, Tensor]
) -> Tensor:
    count = len(next(iter(stacked.values())))
    outputs = []
    for point in range(count):
        # Shared buffers are updated once, not once for each point.
        common = shared if point == count - 1 else {name: each.clone() for name, each in shared.items()}
        outputs.append(network(batch, leaves={**common, **{name: each[point] for name, each in stacked.items()}}))
    return torch.stack(outputs)


def _is_close_output(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not one.is_floating_point():
        return bool((one == two).all())
    size = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, two, rtol=0.0, atol=TOLERANCE[one.dtype] * size, equal_nan=True)


# Passes whose widest activation is about this large run from the caches of a CPU; larger ones are memory-bound.
CPU_PASS = 4 << 20
# A pass at one point that is larger than this saturates a CPU: more points at a time only cost memory.
CPU_ALONE = 1 << 20


def split_batches(context: Context) -> Iterator[Batch]:
    """Yield all data in batches so small that a pass at one point fits in memory."""
    for batch in context.problem.read_batches():
        found = context.get_probe(batch)
        size = context.limit // max(1, found.fixed)
        if _is_on_cpu(batch):
            size = min(size, CPU_PASS // found.widest)
        size = max(1, size)
        for start in range(0, batch.examples, size):
            yield batch.cut(start, start + size)


def split_points(context: Context, points: SlicePoints, batch: Batch) -> Iterator[slice]:
    """Yield slices of points at which the whole batch can be run together."""
    found = context.get_probe(batch)
    size = context.limit // max(1, points.bytes_per_point + batch.examples * found.fixed)
    if _is_on_cpu(batch):
        one = batch.examples * found.widest
        size = 1 if one > CPU_ALONE else min(size, CPU_PASS // one)
    size = max(1, size)
    for start in range(0, len(points), size):
        yield slice(start, min(start + size, len(points)))


def make_progress_counter(context: Context, what: str, points: int) -> Callable[[int], None]:
    """Return a function to call with the amount of work just done."""
    total = None if context.problem.num_examples is None else context.problem.num_examples * points
    done = 0

    def tick(more: int) -> None:
        nonlocal done
        done += more
        context.tick(what, done, total)

    return tick


def _is_on_cpu(batch: Batch) -> bool:
    return batch.targets.device.type == "cpu"


BatchNorm = nn.modules.batchnorm._BatchNorm


def find_batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers that keep statistics."""
    return [module for module in model.modules() if isinstance(module, BatchNorm) and module.running_mean is not None]


class BatchNormStatistics:
    """Running means and variances of every BatchNorm layer at every point, as averages over the batches of the data.

    As in ``torch.optim.swa_utils.update_bn``, every layer normalizes a batch by its own statistics, and the means and
    (unbiased) variances of all batches are averaged with equal weights. Everything else stays in eval mode.
    """

    def __init__(self, network: Network, points: int) -> None:
        self.modules = find_batch_norms(network.model)
        self.buffers: dict[str, Tensor] = {}
        self.batches: dict[str, Tensor] = {}
        for module in self.modules:
            for key, first in (("running_mean", 0.0), ("running_var", 1.0)):
                name = network.names[id(getattr(module, key))]
                like = network.constants[name]
                self.buffers[name] = torch.full((points, *like.shape), first, dtype=like.dtype, device=like.device)
            tracked = network.names[id(module.num_batches_tracked)]
            self.batches[tracked] = torch.zeros_like(network.constants[tracked])

    def get_slice(self, which: slice) -> dict[str, Tensor]:
        """Return views of the statistics of some points."""
        return {name: each[which] for name, each in self.buffers.items()}

    @contextmanager
    def use_batch_statistics(self) -> Iterator[None]:
        """Make the layers use batch statistics inside the context, and average them without momentum."""
        kept = [(module, module.training, module.momentum) for module in self.modules]
        try:
            for module in self.modules:
                module.training, module.momentum = True, None  # type: ignore[assignment]
            yield
        finally:
            for module, training, momentum in kept:
                module.training, module.momentum = training, momentum


def compute_batch_norm_statistics(context: Context, points: SlicePoints) -> BatchNormStatistics:
    """Compute the statistics in one pass over the data, without splitting batches, which would change them."""
    found = BatchNormStatistics(context.problem.network, len(points))
    tick = make_progress_counter(context, "BatchNorm's statistics at points", len(points))
    with torch.no_grad():
        for batch in context.problem.read_batches():
            slices = list(split_points(context, points, batch))
            for number, which in enumerate(slices):
                # The number of batches is shared by all points: only the last slice counts this one.
                last = number == len(slices) - 1
                batches = found.batches if last else {name: each.clone() for name, each in found.batches.items()}
                with found.use_batch_statistics():
                    try:
                        points.compute_outputs(batch, which, found.get_slice(which), batches)
                    except (RuntimeError, ValueError) as error:
                        if isinstance(error, SaltflatError):
                            raise
                        raise ModelError(
                            "Expected batches with statistics, of more than one example, but got "
                            f"{format_error_line(error)} from the model with BatchNorm in train mode, on "
                            f"{batch.examples} examples. Try another batch size, or batch_norm='running'."
                        ) from error
                tick(batch.examples * len(points.places[which]))
    return found


@dataclass(frozen=True)
class PointLosses:
    """The losses at the points, in float64 on the CPU.

    Attributes:
        losses: the mean loss; nan or infinite where it overflows.
        errors: the fraction of wrong predictions; None where predictions cannot be right or wrong.
        examples: the number of examples.
    """

    losses: Tensor
    errors: Tensor | None
    examples: int


def compute_point_losses(context: Context, points: SlicePoints, statistics: BatchNormStatistics | None) -> PointLosses:
    """Compute the mean loss and the errors at all points, with the BatchNorm statistics of each point if given."""
    totals, wrong = torch.zeros(2, len(points), dtype=torch.float64)
    share, answers, examples, judged = 0.0, 0, 0, True
    tick = make_progress_counter(context, "Examples at points", len(points))
    with torch.no_grad():
        for batch in split_batches(context):
            share += _compute_loss_weight(context, batch)
            examples += batch.examples
            for which in split_points(context, points, batch):
                buffers = {} if statistics is None else statistics.get_slice(which)
                outputs = points.compute_outputs(batch, which, buffers, {}).double()
                totals[which] += _sum_losses(context.problem.loss, outputs, batch).cpu()
                missed = _count_errors(context, outputs, batch) if judged else None
                if missed is None:
                    judged = False
                else:
                    wrong[which] += missed[0].cpu()
                    answers += missed[1] if which.start == 0 else 0
                tick(batch.examples * len(outputs))
    if share <= 0:
        raise EmptyDataError(
            "Expected at least one target that counts, but got targets that are all ignored or have no weight. Check "
            "ignore_index and the class weights."
        )
    losses = totals / share
    # Outputs that overflowed predict nothing.
    errors = (wrong / max(1, answers)).where(~losses.isnan(), losses) if judged else None
    return PointLosses(losses, errors, examples)


def _compute_loss_weight(context: Context, batch: Batch) -> float:
    """Return what the batch adds to the denominator of the mean loss, which does not depend on the point."""
    loss, targets = context.problem.loss, cast_targets(batch.targets)
    outputs = context.problem.network(batch)
    context.problem.check_outputs(outputs, batch)
    loss.check(outputs.double(), targets)
    return float(loss.share(outputs.double(), targets).sum())


def _sum_losses(loss: Loss, outputs: Tensor, batch: Batch) -> Tensor:
    """Return the sum over the examples at each point, ``(points,)``."""
    each = loss.total(outputs.flatten(0, 1), _repeat_targets(batch, outputs))
    return each.reshape(outputs.shape[:2]).sum(1)


def _count_errors(context: Context, outputs: Tensor, batch: Batch) -> tuple[Tensor, int] | None:
    """Return the wrong predictions at each point and the number of predictions, or None if they are undefined."""
    try:
        right, kept = find_hits(context.problem.loss, outputs.flatten(0, 1), _repeat_targets(batch, outputs))
    except NotDefinedError:
        return None
    wrong = (~right & kept).reshape(len(outputs), -1).sum(1)
    return wrong.double(), int(kept.reshape(len(outputs), -1)[0].sum())


def _repeat_targets(batch: Batch, outputs: Tensor) -> Tensor:
    targets = cast_targets(batch.targets)
    return targets.expand(len(outputs), *targets.shape).flatten(0, 1)
