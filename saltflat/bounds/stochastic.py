"""Random networks: outputs of a network whose weights are drawn anew for every example, and their empirical risk.

The losses of examples with a draw of their own are independent given the data, so that the mean over m examples and k
draws has the precision of m k samples. Where many examples share a draw, it has that of the draws alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import ceil, log
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from saltflat.bounds.pac_bayes import MonteCarlo, bound_monte_carlo
from saltflat.engine.context import Context
from saltflat.engine.data import Batch
from saltflat.engine.losses import BinaryCrossEntropy, CrossEntropy, Loss, find_hits
from saltflat.engine.network import extract_logits
from saltflat.engine.problem import cast_targets
from saltflat.errors import NotDefinedError, OptionError, make_unknown_name_error

# A loss in [0, 1] whose mean is the risk.
BoundedLoss: TypeAlias = Literal["error", "clipped_cross_entropy"]
# How weights are drawn: at the layers, by mapping the network over examples, or once for a group of examples.
Sampling: TypeAlias = Literal["layers", "mapped", "groups"]

LEAST_PROBABILITY = 1e-5  # cross-entropy is clipped at its negative logarithm
BLOCK = 32  # examples whose random numbers are drawn at once, whatever the batches are
GROUP = 64  # examples that share a draw, where every example cannot have its own
MOST_NUMBERS = 10**11  # random numbers that are drawn for one estimate, before examples share draws
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-9}  # relative difference of outputs that counts as rounding


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution over weights with independent entries.

    Attributes:
        mean: of every parameter, by name.
        deviation: the standard deviations.
    """

    mean: Mapping[str, Tensor]
    deviation: Mapping[str, Tensor]


class Noise:
    """Standard normal numbers of every example, the same however the examples are batched.

    Args:
        seed: of the numbers.
        draw: number of the draw.
    """

    def __init__(self, seed: int, draw: int) -> None:
        self.seed, self.draw = seed, draw

    def draw_rows(self, label: str, first: int, count: int, width: int, like: Tensor) -> Tensor:
        """Return ``(count, width)`` numbers for the examples from number ``first`` on."""
        start, stop = first // BLOCK, -(-(first + count) // BLOCK)
        blocks = []
        for block in range(start, stop):
            key = sha256(f"{self.seed}/{self.draw}/{label}/{block}".encode()).digest()
            generator = torch.Generator(like.device).manual_seed(int.from_bytes(key[:7], "little"))
            blocks.append(torch.randn(BLOCK, width, generator=generator, dtype=like.dtype, device=like.device))
        offset = first - start * BLOCK
        return torch.cat(blocks)[offset : offset + count]


@dataclass
class _Pass:
    """What the layers need to know during a forward pass."""

    weights: Gaussian
    noise: Noise
    first: int
    examples: int
    calls: dict[str, int]


class RandomNetwork:
    """Runs a model with weights that are drawn from a :class:`Gaussian`.

    Numbers are assigned to units and entries by their rank among the means, so that a permutation of hidden units
    carries them along.

    Args:
        context: of a model that belongs to the caller: its layers get other forward methods.
        sampling: how to draw; the best possible if None.

    Attributes:
        sampling: how weights are drawn.
    """

    def __init__(self, context: Context, sampling: Sampling | None = None) -> None:
        problem = context.problem
        self.context, self.model = context, problem.model
        self.names = list(problem.network.measured)
        self._pass: _Pass | None = None
        self._plain = False
        self._ranks: dict[str, Tensor] = {}
        first = next(iter(problem.read_batches())).cut(0, 4)
        probe = context.get_probe(first)
        self._layers = self._find_layers() if probe.strategy == "together" and first.examples > 1 else {}
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

    def run(self, batch: Batch, weights: Gaussian, noise: Noise) -> Tensor:
        """Return the outputs of a batch, with a draw of its own for each example or group."""
        if not self._ranks:
            self.rank_entries(weights.mean)
        if self.sampling == "layers":
            return self._run_layers(batch, weights, noise)
        if self.sampling == "mapped":
            return self._run_mapped(batch, weights, noise)
        return self._run_groups(batch, weights, noise)

    def iterate_parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch in parts whose draws fit in memory; groups of examples stay together."""
        numbers = self._count_numbers()
        size = max(each.element_size() for each in self.context.problem.network.measured.values())
        step = max(1, self.context.limit // (8 * size * max(1, numbers)))
        if self.sampling == "groups":
            step = GROUP
        start = 0
        while start < batch.examples:
            # Groups and blocks begin at multiples of their size, counted over all data.
            unit = GROUP if self.sampling == "groups" else BLOCK
            whole = max(unit, step // unit * unit) if step >= unit else step
            stop = start + whole - (batch.first + start) % unit if step >= unit else start + step
            yield batch.cut(start, stop)
            start = stop

    def _count_numbers(self) -> int:
        """Return how many random numbers an example needs."""
        measured = self.context.problem.network.measured
        if self.sampling != "layers":
            return sum(each.numel() for each in measured.values())
        total = 0
        for module, names in self._layers.items():
            local = _is_matrix_layer(module)
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
        """Return whether this way of drawing gives the network's own outputs where the deviations are zero."""
        if sampling == "groups":
            return True
        if sampling == "layers" and not self._layers:
            return False
        means = dict(self.context.problem.network.measured)
        still = Gaussian(means, {name: torch.zeros_like(value) for name, value in means.items()})
        self.sampling = sampling
        examples = self.context.problem.num_examples or 1
        if self._count_numbers() * examples > MOST_NUMBERS:
            return False
        self.rank_entries(means)
        try:
            with torch.no_grad():
                expected, found = self._call_model(batch), self.run(batch, still, Noise(0, 0))
        except Exception:
            # Whatever keeps the network from being mapped, examples can share draws.
            return False
        finally:
            self._ranks = {}
        limit = CLOSE.get(expected.dtype, CLOSE[torch.float32]) * (1 + float(expected.abs().max()))
        return expected.shape == found.shape and bool(((expected - found).abs() <= limit).all())

    def _call_model(self, batch: Batch) -> Tensor:
        return extract_logits(self.model(*batch.args, **batch.kwargs))

    def _run_layers(self, batch: Batch, weights: Gaussian, noise: Noise) -> Tensor:
        self._pass = _Pass(weights, noise, batch.first, batch.examples, {})
        with self._install_layers():
            outputs = self._call_model(batch)
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
            if _is_matrix_layer(module) and x.dim() == 2 and "weight" in names:
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

    def _draw_entries(self, name: str, weights: Gaussian, noise: Noise, first: int, count: int) -> Tensor:
        mean = weights.mean[name]
        numbers = noise.draw_rows(name, first, count, mean.numel(), mean)[:, self._ranks[name]]
        return mean + weights.deviation[name] * numbers.reshape(count, *mean.shape)

    def _run_mapped(self, batch: Batch, weights: Gaussian, noise: Noise) -> Tensor:
        drawn = {name: self._draw_entries(name, weights, noise, batch.first, batch.examples) for name in self.names}
        leaves, tree = tree_flatten((batch.args, batch.kwargs))
        axes = [0 if isinstance(leaf, Tensor) and batch.has_example_axis(leaf) else None for leaf in leaves]
        tensors = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis == 0]

        def call_one(own: dict[str, Tensor], *mine: Tensor) -> Tensor:
            given = iter(mine)
            filled = [next(given)[None] if axis == 0 else leaf for leaf, axis in zip(leaves, axes, strict=True)]
            args, kwargs = tree_unflatten(filled, tree)
            return extract_logits(functional_call(self.model, own, args, kwargs))[0]

        return vmap(call_one)(drawn, *tensors)

    def _run_groups(self, batch: Batch, weights: Gaussian, noise: Noise) -> Tensor:
        """Run a batch that belongs to one group, or several groups one after another."""
        outputs = []
        start = 0
        while start < batch.examples:
            group = (batch.first + start) // GROUP
            part = batch.cut(start, (group + 1) * GROUP - batch.first)
            drawn = {name: self._draw_entries(name, weights, noise, group, 1)[0] for name in self.names}
            outputs.append(extract_logits(functional_call(self.model, drawn, part.args, part.kwargs)))
            start += part.examples
        return torch.cat(outputs)


def _is_matrix_layer(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


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


def check_bounded_loss(kind: str, loss: Loss) -> None:
    """Check that this loss in [0, 1] is defined for a network that was trained with the other loss."""
    if kind not in get_args(BoundedLoss):
        known = " or ".join(map(repr, get_args(BoundedLoss)))
        raise OptionError(
            f"Expected a loss in [0, 1], {known}, but got {kind!r}, for which no bound holds. Try 'error'."
        )
    inner = getattr(loss, "inner", loss)
    if not isinstance(inner, CrossEntropy | BinaryCrossEntropy) or getattr(inner, "weight", None) is not None:
        raise OptionError(
            "Expected a classifier with the loss 'cross_entropy' or 'bce_with_logits' without weights, but got "
            f"{type(inner).__name__}. Try loss='cross_entropy'."
        )


def compute_bounded_losses(kind: BoundedLoss, loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss in [0, 1] of each example, in float64."""
    outputs, targets = outputs.double(), cast_targets(targets)
    loss.check(outputs, targets)
    met, kept = find_hits(loss, outputs, targets)
    if met.numel() != len(outputs) or not bool(kept.all()):
        raise OptionError(
            f"Expected one label per example, but got targets of shape {tuple(targets.shape)}, or some that are "
            "ignored: predictions for one example are not independent. Try data with one label per example."
        )
    if kind == "error":
        return (~met).double().reshape(-1)
    cap = log(1 / LEAST_PROBABILITY)
    return loss.total(outputs, targets).reshape(-1).nan_to_num(cap, cap, cap).clamp(0.0, cap) / cap


def estimate_risk(
    network: RandomNetwork,
    weights: Gaussian,
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
        examples: use the first so many; all if None.
        what: name of the step, for the progress bar.
    """
    context, loss = network.context, network.context.problem.loss
    total, seen = 0.0, 0
    with torch.no_grad():
        for batch in context.read_chunks(0):
            if examples is not None:
                if seen >= examples:
                    break
                batch = batch.cut(0, examples - seen)
            for part in network.iterate_parts(batch):
                for draw in range(draws):
                    outputs = network.run(part, weights, Noise(seed, draw))
                    total += float(compute_bounded_losses(kind, loss, outputs, part.targets).sum())
            seen += batch.examples
            context.tick(what, seen, examples or context.problem.num_examples)
    groups = ceil(seen / network.group_size)
    # A last group that is not full counts as one: its losses are divided by the full size, and the mean scaled back.
    scale = groups * network.group_size / seen
    found = bound_monte_carlo(min(1.0, total / (seen * draws * scale)), groups * draws, delta)
    return MonteCarlo(total / (seen * draws), found.samples, delta, min(1.0, found.upper * scale), found.method)
