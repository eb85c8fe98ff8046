"""Weights at many points of a slice, and the network run at all of them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import vmap

from saltflat.data import Batch
from saltflat.errors import SaltflatError
from saltflat.landscape.directions import Direction
from saltflat.network import Network
from saltflat.passes import LayerCalls
from saltflat.probe import TOLERANCE

ALL, EACH = "points together", "point by point"


@dataclass(frozen=True)
class SlicePoints:
    """The points of a slice as weights.

    Attributes:
        network: whose weights they are around.
        places: ``(points, dimensions)``, float64.
        directions: one for each dimension.
        beside: numbers of a few points next to each other, to try the quick way on.
        tried: whether inputs of each shape can be run at several points together, as far as seen.
        used: the ways that were taken.
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
        """What the weights of one point take, with what it takes to make them."""
        moving = {name for each in self.directions for name in each.vector}
        return sum(
            value.numel() * (16 + value.element_size())
            for name, value in self.network.measured.items()
            if name in moving
        )

    def compute_weights(self, which: slice | Sequence[int]) -> dict[str, Tensor]:
        """The parameters that move, ``(points, *shape)`` each: made in float64, given in their own precision."""
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
        """``(points, examples, *outputs)``.

        Args:
            batch: the examples.
            which: the points.
            buffers: of the network, ``(points, *shape)`` each, which the passes may write to.
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
                # Out of memory, or control flow that depends on later examples: the slow way does not mind. A mistake
                # of the model's own comes again there, in plain view.
                for name, value in [*buffers.items(), *shared.items()]:
                    value.copy_(kept[name])
            else:
                self.used.add(ALL)
                return outputs
        self.used.add(EACH)
        return _run_point_by_point(self.network, batch, {**weights, **buffers}, shared)

    def _can_vmap(self, batch: Batch, buffers: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> bool:
        """Whether inputs of this shape can be; found out when they are first seen."""
        kind = (LayerCalls.from_batch(batch, []).inputs, frozenset(buffers), frozenset(shared))
        if kind not in self.tried:
            self.tried[kind] = self._is_vmap_correct(batch, buffers, shared)
        return self.tried[kind]

    def _is_vmap_correct(self, batch: Batch, buffers: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> bool:
        """Whether both ways give the same on a few points."""
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
        # What is shared moves on once, not once for each point.
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
