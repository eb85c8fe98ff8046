"""Random networks: outputs of a network whose weights are drawn anew for every example, and their empirical risk.

The losses of examples with a draw of their own are independent given the data, so that the mean over m examples and k
draws has the precision of m k samples. Where many examples share a draw, it has that of the draws alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from saltflat.bounds.distributions import BLOCK, ScaledGaussian, WeightDistribution
from saltflat.bounds.distributions import Gaussian as Gaussian
from saltflat.bounds.distributions import Noise as Noise
from saltflat.bounds.losses import LEAST_PROBABILITY as LEAST_PROBABILITY
from saltflat.bounds.losses import BoundedLoss as BoundedLoss
from saltflat.bounds.losses import check_bounded_loss as check_bounded_loss
from saltflat.bounds.losses import compute_bounded_losses as compute_bounded_losses
from saltflat.bounds.pac_bayes import MonteCarlo, bound_monte_carlo
from saltflat.engine.context import Context
from saltflat.engine.data import Batch
from saltflat.engine.example_groups import can_join, join_batches
from saltflat.engine.problem import Problem
from saltflat.errors import NotDefinedError, make_unknown_name_error

# How weights are drawn: at the layers, by mapping the network over examples, or once for a group of examples.
Sampling: TypeAlias = Literal["layers", "mapped", "groups"]

GROUP = 64  # examples that share a draw, where every example cannot have its own
FEW = 4  # examples that ways of drawing are tried on
MOST_NUMBERS = 10**11  # random numbers that are drawn for one estimate, before examples share draws
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-9}  # relative difference of outputs that counts as rounding


@dataclass
class _Pass:
    """What the layers need to know during a forward pass."""

    weights: WeightDistribution
    noise: Noise
    first: int
    examples: int
    calls: dict[str, int]


class RandomNetwork:
    """Runs a model with weights that are drawn from a distribution.

    Numbers are assigned to units and entries by their rank among the means, so that a permutation of hidden units
    carries them along.

    Args:
        context: of a model that belongs to the caller: its layers get other forward methods.
        sampling: how to draw; the best possible if None.
        kind: the type of distribution. Only normal weights have normal sums, which linear layers draw as outputs.

    Attributes:
        sampling: how weights are drawn.
    """

    def __init__(
        self, context: Context, sampling: Sampling | None = None, kind: type[WeightDistribution] = Gaussian
    ) -> None:
        problem = context.problem
        self.context, self.model, self.kind = context, problem.model, kind
        self.names = list(problem.network.measured)
        self._pass: _Pass | None = None
        self._plain = False
        self._ranks: dict[str, Tensor] = {}
        first = _read_first_examples(problem)
        probe = context.get_probe(first)
        self._layers = self._find_layers() if probe.strategy == "together" and first.examples > 1 else {}
        self._with_rows: set[nn.Module] = set()  # linear layers whose input is a row per example
        possible: list[Sampling] = [each for each in get_args(Sampling) if self._can_sample(each, first)]
        if sampling is not None and sampling not in possible:
            raise make_unknown_name_error("way to sample this model", sampling, possible)
        self.sampling: Sampling = sampling or possible[0]

    @property
    def group_size(self) -> int:
        """The number of examples that share a draw."""
        return GROUP if self.sampling == "groups" else 1

    def rank_entries(self, mean: Mapping[str, Tensor]) -> None:
        """Determine the order in which units and entries receive random numbers."""
        for name in self.names:
            flat = mean[name].detach().double().reshape(-1)
            self._ranks[name] = flat.argsort(stable=True).argsort()
            if flat.numel() and mean[name].dim() > 1:
                units = mean[name].detach().double().flatten(1).pow(3).sum(1)
                self._ranks[f"{name}/units"] = units.argsort(stable=True).argsort()

    def run(self, batch: Batch, weights: WeightDistribution, noise: Noise) -> Tensor:
        """Return the outputs of a batch, with a draw of its own for each example or group."""
        assert isinstance(weights, self.kind)
        if not self._ranks:
            self.rank_entries(weights.mean)
        ways = {"layers": self._run_layers, "mapped": self._run_mapped, "groups": self._run_groups}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # of operations that vmap runs in a loop
            return ways[self.sampling](batch, weights, noise)

    def iterate_parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch in parts whose draws fit in memory; groups of examples stay together."""
        numbers = self._count_numbers()
        size = max(each.element_size() for each in self.context.problem.network.measured.values())
        unit = GROUP if self.sampling == "groups" else BLOCK
        step = GROUP if self.sampling == "groups" else max(1, self.context.limit // (8 * size * max(1, numbers)))
        start, whole = 0, step // unit * unit
        while start < batch.examples:
            # Groups and blocks begin at multiples of their size, counted over all data.
            stop = start + (whole - (batch.first + start) % unit if whole else step)
            yield batch.cut(start, stop)
            start = stop

    def _count_numbers(self) -> int:
        """Return how many random numbers an example needs."""
        measured = self.context.problem.network.measured
        if self.sampling != "layers" or self.kind is ScaledGaussian:
            return self.kind.numbers * sum(each.numel() for each in measured.values())
        total = 0
        for module, names in self._layers.items():
            local = module in self._with_rows
            sizes = [measured[name].shape[0] if local else measured[name].numel() for name in names.values()]
            total += max(sizes) if local else sum(sizes)
        return total

    def _find_layers(self) -> dict[nn.Module, dict[str, str]]:
        """Return the modules that own the measured parameters, with the parameters' names; empty if shared."""
        network = self.context.problem.network
        found: dict[nn.Module, dict[str, str]] = {}
        for name, value in self.model.named_parameters(remove_duplicate=False):
            owner, _, key = name.rpartition(".")
            if any(value is self.model.get_parameter(each) and each != name for each in self.names):
                return {}
            if name in self.names:
                module = self.model.get_submodule(owner)
                if module not in network.layers:
                    return {}
                found.setdefault(module, {})[key] = name
        return found

    def _can_sample(self, sampling: Sampling, batch: Batch) -> bool:
        """Return whether this way of drawing gives the outputs of the network at other weights, without deviations."""
        if sampling == "groups":
            return True
        if sampling == "layers" and not self._layers:
            return False
        # At other weights, those that are used in a way that the draws miss would show.
        network = self.context.problem.network
        means = {name: _move_slightly(value) for name, value in network.measured.items()}
        zeros = {name: torch.zeros_like(value) for name, value in means.items()}
        still = Gaussian(means, zeros) if self.kind is Gaussian else ScaledGaussian(means, zeros, 0.0)
        self.sampling = sampling
        self.rank_entries(means)
        try:
            with torch.no_grad():
                expected, found = network(batch, leaves=means, as_is=True), self.run(batch, still, Noise(0, 0))
        except Exception:
            # Whatever keeps the network from being mapped, examples can share draws.
            return False
        finally:
            self._ranks = {}
        if self._count_numbers() * (self.context.problem.num_examples or 1) > MOST_NUMBERS:
            return False
        limit = CLOSE.get(expected.dtype, CLOSE[torch.float32]) * (1 + float(expected.abs().max()))
        return expected.shape == found.shape and bool(((expected - found).abs() <= limit).all())

    def _run_layers(self, batch: Batch, weights: WeightDistribution, noise: Noise) -> Tensor:
        self._pass = _Pass(weights, noise, batch.first, batch.examples, {})
        with self._install_layers():
            outputs = self.context.problem.network(batch, as_is=True)
        if any(self._pass.calls.get(name, 0) != 1 for names in self._layers.values() for name in names.values()):
            raise NotDefinedError("needs every layer to be called once in a forward pass")
        return outputs

    @contextmanager
    def _install_layers(self) -> Iterator[None]:
        try:
            for module, names in self._layers.items():
                module.forward = self._make_forward(module, names)
            yield
        finally:
            for module in self._layers:
                vars(module).pop("forward", None)

    def _make_forward(self, module: nn.Module, names: Mapping[str, str]) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if self._plain:
                plain: Tensor = type(module).forward(module, *args, **kwargs)
                return plain
            state = self._pass
            assert state is not None
            for name in names.values():
                state.calls[name] = state.calls.get(name, 0) + 1
            x = args[0] if args else kwargs.get("input")
            if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] != state.examples:
                raise NotDefinedError("needs the examples along the first axis of every layer's input")
            linear = type(module).forward is nn.Linear.forward and "weight" in names
            if self.kind is Gaussian and linear and x.dim() == 2:
                self._with_rows.add(module)
                return self._run_matrix_layer(module, names, x, state)
            return self._run_mapped_layer(module, names, x, state)

        return forward

    def _run_matrix_layer(self, module: nn.Module, names: Mapping[str, str], x: Tensor, state: _Pass) -> Tensor:
        """Draw the outputs of a linear layer: sums of normal weights are normal, and independent of each other."""
        mean, deviation = state.weights.mean, state.weights.deviation
        weight, bias = names["weight"], names.get("bias")
        fixed: Tensor | None = module.bias if bias is None else None  # type: ignore[assignment]
        center = F.linear(x, mean[weight], mean[bias] if bias is not None else fixed)
        wide = F.linear(x.square(), deviation[weight].square(), deviation[bias].square() if bias is not None else None)
        numbers = state.noise.draw_rows(weight, state.first, state.examples, center.shape[1], center)
        # The square root has no derivative at zero, where nothing is random.
        root = wide.clamp_min(torch.finfo(wide.dtype).tiny).sqrt() * (wide > 0)
        return center + root * numbers[:, self._ranks[f"{weight}/units"]]

    def _run_mapped_layer(self, module: nn.Module, names: Mapping[str, str], x: Tensor, state: _Pass) -> Tensor:
        """Run a layer with weights of its own for each example."""
        drawn = {
            key: self._draw_entries(name, state.weights, state.noise, state.first, state.examples)
            for key, name in names.items()
        }
        if type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros":
            found = _convolve_each(module, drawn, x)
            if found is not None:
                return found

        def call_one(own: dict[str, Tensor], one: Tensor) -> Tensor:
            result: Tensor = functional_call(module, own, (one[None],))[0]
            return result

        self._plain = True
        try:
            return vmap(call_one)(drawn, x)
        finally:
            self._plain = False

    def _draw_entries(self, name: str, weights: WeightDistribution, noise: Noise, first: int, count: int) -> Tensor:
        mean = weights.mean[name]

        def draw_numbers(label: str) -> Tensor:
            rows = noise.draw_rows(label, first, count, mean.numel(), mean)
            return rows[:, self._ranks[name]].reshape(count, *mean.shape)

        return weights.combine(name, draw_numbers)

    def _run_mapped(self, batch: Batch, weights: WeightDistribution, noise: Noise) -> Tensor:
        drawn = {name: self._draw_entries(name, weights, noise, batch.first, batch.examples) for name in self.names}
        leaves, tree = tree_flatten((batch.args, batch.kwargs))
        axes = [0 if isinstance(leaf, Tensor) and batch.has_example_axis(leaf) else None for leaf in leaves]
        tensors = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis == 0]

        def call_one(own: dict[str, Tensor], *mine: Tensor) -> Tensor:
            given = iter(mine)
            filled = [next(given)[None] if axis == 0 else leaf for leaf, axis in zip(leaves, axes, strict=True)]
            args, kwargs = tree_unflatten(filled, tree)
            alone = Batch(args, kwargs, batch.targets[:1], batch.first, 1)
            return self.context.problem.network(alone, leaves=own, as_is=True)[0]

        return vmap(call_one)(drawn, *tensors)

    def _run_groups(self, batch: Batch, weights: WeightDistribution, noise: Noise) -> Tensor:
        """Run a batch that belongs to one group, or several groups one after another."""
        outputs = []
        start = 0
        while start < batch.examples:
            group = (batch.first + start) // GROUP
            part = batch.cut(start, (group + 1) * GROUP - batch.first)
            drawn = {name: self._draw_entries(name, weights, noise, group, 1)[0] for name in self.names}
            outputs.append(self.context.problem.network(part, leaves=drawn, as_is=True))
            start += part.examples
        return torch.cat(outputs)


def _read_first_examples(problem: Problem) -> Batch:
    """Return the first few examples, whatever the batches are."""
    found: list[Batch] = []
    for batch in problem.read_batches():
        if found and not can_join(found[-1], batch):
            break
        found.append(batch)
        if sum(each.examples for each in found) >= FEW:
            break
    return join_batches(found).cut(0, FEW)


def _move_slightly(value: Tensor) -> Tensor:
    generator = torch.Generator(value.device).manual_seed(0)
    return value + (0.1 * value.abs() + 0.01) * torch.empty_like(value).normal_(generator=generator)


def _convolve_each(module: nn.Conv2d, drawn: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """Convolve every image with a kernel of its own, as a product with its patches; None for uncommon paddings."""
    if isinstance(module.padding, str) or "weight" not in drawn:
        return None
    kernel, fixed = drawn["weight"], module.bias if "bias" not in drawn else None
    patches = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
    found: Tensor = torch.bmm(kernel.flatten(2), patches)
    bias = drawn["bias"][:, :, None] if "bias" in drawn else fixed[:, None] if fixed is not None else 0.0
    sizes = [
        (x.shape[2 + axis] + 2 * module.padding[axis] - module.dilation[axis] * (module.kernel_size[axis] - 1) - 1)
        // module.stride[axis]
        + 1
        for axis in range(2)
    ]
    return (found + bias).reshape(len(x), -1, *sizes)


def estimate_risk(
    network: RandomNetwork,
    weights: WeightDistribution,
    kind: BoundedLoss,
    *,
    draws: int,
    seed: int,
    delta: float,
    examples: int | None = None,
    what: str = "Random networks",
) -> MonteCarlo:
    """Estimate the empirical risk of random networks, with an upper bound that holds with probability 1 - delta.

    Args:
        network: runs the model.
        weights: what to draw from.
        kind: the loss in [0, 1].
        draws: number of draws for each example or group.
        seed: of the draws.
        delta: the probability with which the upper bound may fail.
        examples: use so many, spread evenly over the data; all if None.
        what: name of the step, for the progress bar.
    """
    context, loss = network.context, network.context.problem.loss
    total, seen = 0.0, 0
    count = None if examples is None else min(examples, context.examples)
    with torch.no_grad():
        for batch in context.read_chunks(0):
            if count is not None:
                start, stop = (-(-at * count // context.examples) for at in (batch.first, batch.first + batch.examples))
                batch = batch.take(torch.arange(start, stop) * context.examples // count - batch.first, start)
            for part in network.iterate_parts(batch):
                for draw in range(draws):
                    outputs = network.run(part, weights, Noise(seed, draw))
                    total += float(compute_bounded_losses(kind, loss, outputs, part.targets).sum())
            seen += batch.examples
            context.tick(what, seen, count or context.problem.num_examples)
    return bound_empirical_risk(total / (seen * draws), seen, network.group_size, draws, delta)


def bound_empirical_risk(mean: float, examples: int, group: int, draws: int, delta: float) -> MonteCarlo:
    """Return an upper bound on the empirical risk of random networks, each drawn for a group of examples."""
    groups = ceil(examples / group)
    # The losses of a last group that is not full are divided by the full size, and the mean is scaled back.
    scale = groups * group / examples
    found = bound_monte_carlo(min(1.0, mean / scale), groups * draws, delta)
    return replace(found, mean=mean, upper=min(1.0, found.upper * scale))
