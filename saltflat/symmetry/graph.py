"""The group of rescalings of a network: everything that can be made larger here and smaller there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from saltflat.data import Batch
from saltflat.errors import ModelError, OptionError, SaltflatError, first_line
from saltflat.loan import loan
from saltflat.network import Network
from saltflat.symmetry import rules as rules
from saltflat.symmetry.elimination import Elimination, Form, first_of, vanish_all
from saltflat.symmetry.scales import ANY, GROUND
from saltflat.symmetry.watch import Obstacle, Watch

__all__ = ["Member", "Obstacle", "Symmetries", "symmetries", "symmetries_on"]

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Member:
    """A parameter, or a running statistic, and the units its entries lie between.

    Attributes:
        name: in the model.
        shape: of the tensor.
        head: for every entry the row of ``forms`` of the unit it leads to.
        tail: the same of the unit it comes from; 1, which is fixed, for biases.
        kind: ``"parameter"``, or ``"mean"`` or ``"variance"`` of a BatchNorm.
        eps: what the BatchNorm adds to the variance.
    """

    name: str
    shape: torch.Size
    head: Numbers
    tail: Numbers
    kind: str = "parameter"
    eps: float = 0.0


@dataclass(frozen=True)
class Symmetries:
    """All positive factors of a network's weights that leave its function as it is.

    Every independent *scale* is the size of a unit that can be chosen freely. The logarithm of an entry's factor is
    ``(forms[head] - forms[tail]) @ logs`` with a number in ``logs`` for every scale.

    Attributes:
        members: every parameter, and the running statistics of every BatchNorm, by name.
        forms: ``(forms, scales)``, the sizes of units as combinations of scales; rows 0 and 1 are fixed.
        obstacles: operations that keep scales from being free.
        kind: ``"unit"``, or ``"layer"`` where every parameter has one factor for all its entries.
    """

    members: Mapping[str, Member]
    forms: csr_array
    obstacles: tuple[Obstacle, ...]
    kind: str = "unit"

    @property
    def scales(self) -> int:
        """How many can be chosen independently."""
        return int(self.forms.shape[1])

    def logs(self, logs: Array) -> dict[str, Array]:
        """The logarithm of every entry's factor, by parameter."""
        if np.shape(logs) != (self.scales,):
            raise OptionError(
                f"Got logarithms of shape {np.shape(logs)}. Want one for each of {self.scales} scales. "
                "Do: start from group.sample()."
            )
        sizes = self.forms @ np.asarray(logs, dtype=np.float64)
        return {name: sizes[each.head] - sizes[each.tail] for name, each in self.members.items()}

    def moving(self) -> dict[str, Mask]:
        """Whether an entry can move at all, by parameter."""
        # Combinations that differ are told apart by numbers without relations.
        moved = self.logs(np.sin(1.0 + np.e * np.arange(self.scales)))
        return {name: np.abs(each) > 1e-9 for name, each in moved.items()}

    def sample(self, seed: int = 0, spread: float = 2.0) -> Array:
        """Logarithms of random sizes: normal with the deviation ``spread``, and none beyond twice that."""
        generator = np.random.default_rng(seed)
        found = generator.standard_normal(self.scales)
        while (wide := np.abs(found) > 2).any():
            found[wide] = generator.standard_normal(int(wide.sum()))
        return spread * found

    def by_layer(self) -> Symmetries:
        """Those rescalings that multiply each parameter by one number."""
        # Every entry has the factor of the first.
        pairs = [_pairs(each) for each in self.members.values() if each.kind == "parameter" and each.head.size]
        equal = [np.concatenate([of, np.broadcast_to(of[:1], of.shape)], 1) for of in pairs]
        return replace(self, forms=self._where(equal), kind="layer")

    def fixing(self, names: Iterable[str]) -> Symmetries:
        """Those rescalings that leave these parameters alone."""
        pairs = [_pairs(self.members[name]) for name in names]
        return replace(self, forms=self._where([np.pad(of, ((0, 0), (0, 2)), constant_values=GROUND) for of in pairs]))

    def _where(self, equations: list[Numbers]) -> csr_array:
        """The sizes of units when factors ``h - t`` and ``H - T`` are the same, for rows ``h, t, H, T``."""
        system, rows = Elimination(), _rows(self.forms)
        for quads in equations:
            vanish_all(system, rows, quads)
        free = system.free(range(self.scales))
        basis = _matrix([system.resolved({scale: 1}) for scale in range(self.scales)], free)
        return csr_array(self.forms @ basis)


def _pairs(member: Member) -> Numbers:
    """The heads and tails of its entries, each pair once."""
    head, tail = member.head.reshape(-1), member.tail.reshape(-1)
    first = first_of(head, tail)
    return np.stack([head[first], tail[first]], 1)


def symmetries(model: nn.Module, example: Any) -> Symmetries:
    """Find every way to make units of a network larger and others smaller so that its function stays the same.

    One forward pass is watched, operation by operation. It works on any module whose forward pass does the same for
    every input; operations without a rule are listed among the ``obstacles`` and taken to allow nothing.

    Args:
        model: any module; it is left as it is, and looked at in eval mode.
        example: an input like those it will get: a tensor, a tuple of positional inputs or a dict of named ones.

    Example:
        Hidden units of a ReLU network: as many scales as there are units.

        >>> net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        >>> group = symmetries(net, torch.randn(1, 3))
        >>> group.scales, group.by_layer().scales
        (5, 1)
    """
    args, kwargs = inputs_of(example)
    with loan(model, "eval"):
        network = Network(model, [name for name, _ in model.named_parameters()] or None, None)
        return found_in(network, args, kwargs)


def inputs_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named inputs of a model."""
    if isinstance(example, Mapping):
        return (), dict(example)
    args = tuple(example) if isinstance(example, tuple | list) else (example,)
    if not any(isinstance(leaf, Tensor) for leaf in tree_flatten(args)[0]):
        raise OptionError(
            f"Got an example of type {type(example).__name__} without a tensor. Want an input of the model: a tensor, "
            "a tuple of inputs or a dict of named ones. Do: for instance next(iter(loader))[0]."
        )
    return args, {}


def symmetries_on(network: Network, batch: Batch) -> Symmetries:
    """The same for a model on loan and a batch of its data."""
    few = batch.cut(0, 2)
    return found_in(network, few.args, few.kwargs)


def found_in(network: Network, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symmetries:
    model = network.model
    statistics = _statistics(network)
    parameters = {name for name, _ in model.named_parameters()}
    constants = {name: value for name, value in network.constants.items() if name in parameters or name in statistics}
    real = {name: value for name, value in constants.items() if value.is_floating_point()}
    args, kwargs = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))
    modules = {id(module): name for name, module in model.named_modules()}
    watch = Watch(real, (args, kwargs), modules)
    with torch.no_grad(), network._lent(network.constants), _users_errors(model), watch:
        outputs = model(*args, **kwargs)
    for leaf in tree_flatten(outputs)[0]:
        tensor = getattr(leaf, "logits", leaf)
        if isinstance(tensor, Tensor):
            marks = watch.marks(tensor)
            watch.scales.pin(watch.entries.read(marks.ids) if marks.entries else marks.ids)
    return _gathered(watch, real, statistics)


def _statistics(network: Network) -> dict[str, str]:
    """Names of running means and variances, and which they are."""
    found: dict[str, str] = {}
    for module in network.modules:
        for key, kind in (("running_mean", "mean"), ("running_var", "variance")):
            value = module._buffers.get(key)
            if value is not None and isinstance(module, nn.modules.batchnorm._NormBase):
                found[network.names[id(value)]] = kind
    return found


@contextmanager
def _users_errors(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except SaltflatError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError, KeyError) as error:
        raise ModelError(
            f"Got an error from the model on this example ({first_line(error)}). "
            f"Want an example that {type(model).__name__} accepts. "
            "Do: pass inputs of the right shape and kind, with the axis of examples; several inputs as a tuple."
        ) from error


def _gathered(watch: Watch, members: Mapping[str, Tensor], statistics: Mapping[str, str]) -> Symmetries:
    scales, entries = watch.scales, watch.entries
    head, tail = (each.clamp_min(GROUND) for each in (entries.head, entries.tail))
    # What nothing has used has no place: it is not moved.
    tail[entries.head == ANY] = GROUND
    used, places = torch.cat([torch.tensor([ANY, GROUND]), head, tail]).unique(return_inverse=True)
    new_head, new_tail = places[2 : 2 + len(head)].numpy(), places[2 + len(head) :].numpy()
    resolved = [scales.system.resolved(scales.forms[number]) for number in used.tolist()]
    free = sorted({variable for form in resolved for variable in form})
    found = {}
    for name, value in members.items():
        first, kind = entries.first[name], statistics.get(name, "parameter")
        span = slice(first, first + value.numel())
        found[name] = Member(
            name,
            value.shape,
            new_head[span].reshape(value.shape),
            new_tail[span].reshape(value.shape),
            kind,
            watch.epsilons.get(first, 0.0) if kind == "variance" else 0.0,
        )
    return Symmetries(found, _matrix(resolved, free), tuple(watch.obstacles.values()))


def _matrix(forms: list[Form], variables: list[int]) -> csr_array:
    column = {variable: number for number, variable in enumerate(variables)}
    rows = np.repeat(np.arange(len(forms)), [len(form) for form in forms])
    columns = np.array([column[v] for form in forms for v in form], dtype=np.int64)
    values = np.array([float(c) for form in forms for c in form.values()], dtype=np.float64)
    return csr_array(coo_array((values, (rows, columns)), shape=(len(forms), len(variables))))


def _rows(matrix: csr_array) -> dict[int, Form]:
    """A sparse matrix as combinations of its columns."""
    found: dict[int, Form] = {}
    for row in range(matrix.shape[0]):
        span = slice(matrix.indptr[row], matrix.indptr[row + 1])
        values = [Fraction(float(v)).limit_denominator(1000) for v in matrix.data[span]]
        found[row] = {
            int(c): v.numerator if v.denominator == 1 else v
            for c, v in zip(matrix.indices[span], values, strict=True)
            if v
        }
    return found
