"""What bounds are computed from: the network's weights, curvature and risk, each computed once and on demand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import log

import torch
from torch import Tensor, nn

from saltflat.bounds.bound import Assumption
from saltflat.bounds.constants import list_hidden_constants
from saltflat.bounds.distributions import WeightDistribution
from saltflat.bounds.losses import LEAST_PROBABILITY, BoundedLoss, check_bounded_loss, compute_bounded_losses
from saltflat.bounds.pac_bayes import MonteCarlo
from saltflat.bounds.stochastic import RandomNetwork, estimate_risk
from saltflat.engine.context import Context
from saltflat.engine.losses import CrossEntropy
from saltflat.engine.problem import cast_targets
from saltflat.engine.statistic import COMPUTED, STATISTICS
from saltflat.engine.sweep import Sweep
from saltflat.errors import NotDefinedError
from saltflat.layers import Geometry
from saltflat.measures.collect import StatisticCollector
from saltflat.measures.registry import parse_measures
from saltflat.results.report import Reading
from saltflat.symmetry.equality import EXAMPLE_SIZE
from saltflat.symmetry.group import Symmetries

MONTE_CARLO_SHARE = 0.1  # of delta, for the risk of random networks; the inequality has the rest
CLIPPED = log(1 / LEAST_PROBABILITY)  # the cross-entropy that counts as a loss of 1


class Evidence:
    """A network, its data and what bounds need to know of them, computed on demand and kept.

    Args:
        context: the problem and the conditions. Its model must belong to the caller: layers get other forward methods.
        of: the loss in [0, 1] whose mean is the risk.
        delta: the probability with which a bound may fail.
        draws: of random weights for each example.

    Attributes:
        bound_delta: the part of delta for the inequality.
        monte_carlo_delta: the part for the risk of random networks.
    """

    def __init__(self, context: Context, of: BoundedLoss, delta: float, draws: int) -> None:
        check_bounded_loss(of, context.problem.loss)
        self.context, self.of, self.delta, self.draws = context, of, delta, draws
        self.monte_carlo_delta = MONTE_CARLO_SHARE * delta
        self.bound_delta = delta - self.monte_carlo_delta
        self._networks: dict[type[WeightDistribution], RandomNetwork] = {}
        self._last: RandomNetwork | None = None
        self._readings: dict[str, Reading] = {}

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The measured parameters, in float64."""
        return {name: value.detach().double() for name, value in self.context.problem.network.measured.items()}

    @property
    def size(self) -> int:
        """The number of measured parameters."""
        return sum(value.numel() for value in self.context.problem.network.measured.values())

    @property
    def unit(self) -> float:
        """The value of the loss that is measured per unit of the loss in [0, 1]: its clipping point, or 1."""
        return CLIPPED if self.of == "clipped_cross_entropy" else 1.0

    @cached_property
    def curvature(self) -> dict[str, Tensor]:
        """The diagonal of the Gauss-Newton matrix of the mean loss, at least 0, in float64.

        For the clipped cross-entropy it is divided by the clipping point, as the loss is. The 0-1 error has no
        curvature of its own, and that of the loss stands in.
        """
        context, total = self.context, self.context.problem.num_examples
        sweep = Sweep(context, [STATISTICS["curvature_diagonal"]])
        sweep.run(lambda done: context.tick("Sweeping examples", done, total))
        context.store_counts(sweep.examples, sweep.share, sweep.loss)
        found = sweep.compute_values()["curvature_diagonal"]
        return {name: value.double().clamp_min(0.0) / self.unit for name, value in found.items()}

    def estimate_curvature(self, draws: int) -> tuple[dict[str, Tensor], int]:
        """Return the diagonal of the Hessian by differences of gradients, and how many negative entries were set to 0.

        Equations (29) to (31) of Tsuzuku et al. with the sign that the second one lacks in print.
        """
        found = COMPUTED["finite_difference"].function(self.context, kind="corrected", draws=draws).value
        negative = sum(int((value < 0).sum()) for value in found.values())
        return {name: value.double().clamp_min(0.0) / self.unit for name, value in found.items()}, negative

    @property
    def geometries(self) -> Mapping[str, Geometry]:
        """How the model uses its parameters as matrices."""
        return self.context.geometries

    @property
    def examples(self) -> int:
        """The number m of examples."""
        return self.context.examples

    @property
    def mean_loss(self) -> float:
        """The mean of the loss that the network was trained with, which is not clipped."""
        return self.context.mean_loss

    @cached_property
    def risk(self) -> float:
        """The mean over the examples of the network's own loss in [0, 1]."""
        total, seen = 0.0, 0
        with torch.no_grad():
            for batch in self.context.read_chunks(0):
                outputs = self.context.problem.network(batch)
                total += float(compute_bounded_losses(self.of, self.context.problem.loss, outputs, batch.targets).sum())
                seen += batch.examples
        return total / seen

    @cached_property
    def classes(self) -> int:
        """The number of classes; 2 for a single output."""
        loss = getattr(self.context.problem.loss, "inner", self.context.problem.loss)
        if not isinstance(loss, CrossEntropy):
            return 2
        batch = next(iter(self.context.problem.read_batches())).cut(0, 1)
        with torch.no_grad():
            outputs = self.context.problem.network(batch)
        return outputs.shape[loss.find_class_axis(outputs, cast_targets(batch.targets))]

    @property
    def chance(self) -> float:
        """The risk of guessing."""
        return 1 - 1 / self.classes if self.of == "error" else log(self.classes) / CLIPPED

    def estimate(self, weights: WeightDistribution, delta: float) -> MonteCarlo:
        """Estimate the empirical risk of networks with random weights; the upper bound may fail with ``delta``."""
        kind = type(weights)
        if kind not in self._networks:
            self._networks[kind] = RandomNetwork(self.context, kind=kind)
        network = self._last = self._networks[kind]
        network.rank_entries(weights.mean)
        return estimate_risk(network, weights, self.of, draws=self.draws, seed=self.context.seed, delta=delta)

    def read_measure(self, name: str) -> Reading:
        """Return the reading of a measure."""
        if name not in self._readings:
            asked = parse_measures([name])
            collector = StatisticCollector(self.context, None)
            collector.gather(asked)
            readings, _ = collector.compute_readings(asked)
            self._readings[name] = readings[asked[0].key]
        return self._readings[name]

    @cached_property
    def rescalings(self) -> Symmetries | None:
        """The rescalings of the measured parameters that keep the function; None if they cannot be found."""
        try:
            found: Symmetries = COMPUTED["rescalings"].function(self.context).value
        except NotDefinedError:
            return None
        return found

    def list_assumptions(self) -> tuple[Assumption, ...]:
        """Return the conditions of a PAC-Bayes bound on the random networks that were estimated last."""
        shared = "" if self._last is None or self._last.group_size == 1 else f"{self._last.group_size} examples"
        drawn = f"Each {shared or 'example'} has {self.draws} of its own."
        clipped = f"It is the cross-entropy, clipped at {CLIPPED:.4g} and divided by it."
        return (
            Assumption("The examples are independent draws from the distribution of the new data."),
            Assumption("The architecture was chosen without these examples."),
            Assumption("The loss lies in [0, 1].", True, "It is the 0-1 error." if self.of == "error" else clipped),
            Assumption(
                "The prior does not depend on the examples.",
                True,
                "Its mean is 0, and all its grids are constants or follow from the number of parameters.",
            ),
            Assumption("The weights that estimate the risk are independent draws.", True, drawn),
            *self._check_constants(),
        )

    def _check_constants(self) -> tuple[Assumption, ...]:
        text = "The network has no numbers from the data beside the parameters that are drawn."
        network, model = self.context.problem.network, self.context.problem.model
        norms = [
            name or type(module).__name__
            for name, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
            and getattr(module, "running_mean", None) is not None
            and not module.training
        ]
        if norms:
            listed = ", ".join(norms[:4]) + " and others" * (len(norms) > 4)
            found = f"There are running statistics in {listed}. Try saltflat.fold, which turns them into weights."
            return (Assumption(text, False, found),)
        others = [
            name
            for name, value in network.constants.items()
            if name not in network.measured and value.is_floating_point()
        ]
        first = next(self.context.problem.read_batches()).cut(0, EXAMPLE_SIZE)
        others += list_hidden_constants(model, first.args, first.kwargs)
        if others:
            listed = ", ".join(others[:4]) + " and others" * (len(others) > 4)
            return (Assumption(text, None, f"{listed} are not drawn; they must not come from these examples."),)
        return (Assumption(text, True, f"All {self.size:,} parameters are drawn, and no other tensors are used."),)
