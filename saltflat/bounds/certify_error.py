"""A certificate: an upper bound on a network's error on new data that holds with a stated probability."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from math import ceil, log, sqrt
from typing import Literal

import numpy
import torch
from torch import nn

from saltflat.bounds.bound import Assumption, Bound
from saltflat.bounds.constants import list_hidden_constants
from saltflat.bounds.distributions import Gaussian
from saltflat.bounds.losses import LEAST_PROBABILITY, BoundedLoss, check_bounded_loss
from saltflat.bounds.pac_bayes import MOST_COUNTED, MonteCarlo, MonteCarloMethod, bound_monte_carlo, check_delta
from saltflat.bounds.posterior import (
    PARTS,
    SCALES,
    TRIAL,
    Certificate,
    Posterior,
    choose_posterior,
    compute_distance,
    descend_bound,
)
from saltflat.bounds.prior import (
    Gauge,
    OwnRisk,
    check_unseen,
    choose_gauge,
    measure_risk,
)
from saltflat.bounds.seen import PriorData, PriorLike, Split, combine_marks, split_data
from saltflat.bounds.stochastic import RandomNetwork, bound_empirical_risk, estimate_risk
from saltflat.engine.context import Context, describe_context
from saltflat.engine.data import Data
from saltflat.engine.losses import LossLike, parse_loss
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.progress import Progress, show_steps
from saltflat.engine.session import open_session
from saltflat.engine.statistic import find_statistics
from saltflat.engine.sweep import Sweep
from saltflat.errors import OptionError
from saltflat.results.report import describe_run
from saltflat.symmetry.equality import EXAMPLE_SIZE, parse_example
from saltflat.validation import check_count, check_flag, check_positive, check_seed, parse_bytes, take_turns

MONTE_CARLO_SHARE = 0.1  # of delta
MOST_DRAWS = 1 << 20
MOST_REPEATED = 0.1  # share of the inputs that may repeat another before copies are suspected
LARGEST_RATE = 1e6  # of the descent
TRIAL_DELTA = 1e-6  # the probability with which a suggested number of draws may not suffice
FORMULA = (
    "kl^-1(kl^-1(risk of samples, ln(1/d') / samples), (KL + ln(choices of scales) + ln(2 sqrt(m) / d)) / m), "
    "d' = 0.1 delta, d = 0.9 delta"
)


@take_turns
def certify_error(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    *,
    prior: PriorLike = "zero",
    prior_data: PriorData = None,
    delta: float = 0.05,
    of: BoundedLoss = "error",
    epochs: int = 0,
    move: bool = False,
    lr: float = 1e-3,
    draws: int = 10,
    precision: float | None = None,
    columns: str = "exact",
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Progress | None = None,
    mode: Literal["eval", "keep"] = "eval",
    limit: int | None = None,
) -> Bound:
    r"""Compute an upper bound on the error on new data that holds with probability 1 - delta.

    The bound is on the error of a *random network*: its weights are drawn anew for every prediction, from a normal
    distribution Q around the weights of ``model``. The variances come from the curvature of the loss, so that Q is wide
    where the minimum is flat. The more Q tells about the data beyond the prior P, the larger the bound (Maurer 2004):

    .. math::
        \mathrm{kl}^{-1}\left(\hat L(Q), \frac{\mathrm{KL}(Q \| P) + \ln(2 \sqrt m / \delta)}{m}\right)

    Q and P live on the canonical form of the network (:func:`saltflat.symmetry.canonicalize`), and the random numbers
    are attached to its units, so that neither rescaling units changes the bound, nor permuting them, in model and prior
    alike.

    Args:
        model: a trained classifier; it is not modified. BatchNorm is folded into the layers before it. Frozen
            parameters are not drawn, and must not depend on the examples.
        data: the examples of the bound: those the model was trained on, or others.
        loss: ``"cross_entropy"`` or ``"bce_with_logits"``, the loss of the curvature.
        prior: center of the prior: ``"zero"``, or another model of the same architecture or its ``state_dict``: the
            model before training, or one that was trained on other examples.
        prior_data: what the prior has seen: ``"none"``, the examples, or their positions in ``data``. The bound uses
            only examples that the prior has not seen. Examples are compared by their inputs, in float32.
        delta: the probability with which the bound may fail.
        of: the loss in [0, 1] that is bounded: ``"error"``, or ``"clipped_cross_entropy"``, divided by its largest
            value.
        epochs: lower the bound further by gradient descent, for so many passes over the data, which is held in memory.
        move: let the descent move the center of Q away from the weights of ``model``, too. It may begin closer to a
            prior that was trained.
        lr: learning rate of the descent.
        draws: number of networks drawn for each example.
        precision: the largest acceptable Monte Carlo margin; no limit if None.
        columns: how the curvature is computed, as for :func:`saltflat.measure`.
        memory: working memory beyond the model and the results, such as ``"512MiB"``.
        dtype: ``torch.float32`` or ``torch.float64`` to work in; the model's own if None.
        seed: of the random numbers.
        progress: True for a progress bar (lines of text off a terminal), False for none, None for a bar on a terminal
            only, or a function of ``(step, done, total)``.
        mode: ``"eval"``, or ``"keep"`` to leave the modules in the modes they are in.
        limit: use at most this many examples, the first ones that the prior has not seen; all if None.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(2000, 2, dtype=torch.float64)
        >>> y, net = (x[:, 0] > 0).long(), nn.Linear(2, 2).double()
        >>> with torch.no_grad():  # a line at x1 = 0
        ...     _ = net.weight.copy_(torch.tensor([[-9.0, 0.0], [9.0, 0.0]])), net.bias.zero_()
        >>> bound = certify_error(net, (x, y), draws=2)
        >>> bound.is_vacuous, bound.value < 0.1
        (False, True)
    """
    started = time.perf_counter()
    room, seed, plan = parse_bytes(memory), check_seed(seed), parse_column_plan(columns)
    chosen = parse_loss(loss)
    check_delta(delta)
    check_bounded_loss(of, chosen)
    check_count(1, draws=draws)
    check_count(0, epochs=epochs)
    check_flag(move=move)
    check_positive(lr=lr)
    if lr > LARGEST_RATE:
        raise OptionError(f"Expected a learning rate of at most {LARGEST_RATE:g}, but got lr={lr:g}. Try lr=1e-3.")
    if precision is not None:
        check_positive(precision=precision)
    if move and not epochs:
        raise OptionError("Expected epochs of at least 1 with move=True, but got epochs=0. Try epochs=20.")
    with open_session(model, mode, data) as notes, open_session(model, mode, prior_data):
        split = split_data(data, prior, prior_data, limit)
        # Errors are about the user's own model and data.
        first = next(Problem.build(model, split.data, chosen, None, dtype, mode).read_batches()).cut(0, EXAMPLE_SIZE)
        example = first.kwargs or first.args
        marks = split.count_inputs()
        gauge = choose_gauge(model, prior, example, dtype)
    with show_steps(progress) as tick:

        def measure_prior(examples: Data) -> OwnRisk:
            assert gauge.prior is not None
            with open_session(gauge.prior, mode, examples):
                built = Problem.build(gauge.prior, examples, chosen, None, dtype, mode)
                return measure_risk(Context(built, plan, seed, room, tick=tick), of, "Outputs of the prior")

        before = None
        if gauge.prior is not None:
            before = measure_prior(split.data)
            check_unseen(before, None if split.seen_data is None else measure_prior(split.seen_data))
        with open_session(gauge.model, mode, split.data):
            problem = Problem.build(gauge.model, split.data, chosen, None, dtype, mode)
            context = Context(problem, plan, seed, room, tick=tick)
            own = measure_risk(context, of, "Outputs of the network")
            hidden = list_hidden_constants(gauge.model, *parse_example(example))
            network = RandomNetwork(context)
            center = {name: gauge.get_center(name, value) for name, value in problem.network.measured.items()}
            sweep = Sweep(context, find_statistics("curvature_diagonal"))
            sweep.run(lambda done: tick("Sweeping examples", done, problem.num_examples))
            curvature = sweep.compute_values()["curvature_diagonal"]
            context.store_counts(sweep.examples, sweep.share, sweep.loss)
            examples = context.examples
            # A descent that may move the center can begin anywhere between the network and the prior's.
            shares = (1.0, 0.5, 0.0) if move and split.seen else (1.0,)
            tried = [
                choose_posterior(network, center, curvature, of, examples, delta, seed + 1, share) for share in shares
            ]
            _, strength, closed = min(tried, key=lambda each: each[0])
            posterior = descend_bound(network, closed, of, examples, delta, seed + 2, epochs=epochs, move=move, lr=lr)
            _check_precision(network, posterior, of, delta, draws, precision, seed + 3, examples)
            risk = estimate_risk(
                network, posterior.weights, of, draws=draws, seed=seed + 4, delta=MONTE_CARLO_SHARE * delta
            )
            moved = compute_distance(posterior.weights.mean, problem.network.measured)
            still = {name: torch.zeros_like(each) for name, each in posterior.weights.mean.items()}
            middle = Gaussian(posterior.weights.mean, still)
            at_center = estimate_risk(network, middle, of, draws=1, seed=seed, delta=delta).mean if moved else own.risk
        found = Certificate(posterior, risk, own.risk, at_center, examples, (1 - MONTE_CARLO_SHARE) * delta)
        kind: MonteCarloMethod = "binomial" if of == "error" and examples <= MOST_COUNTED else "kl"
        holdout = bound_monte_carlo(before.risk, examples, delta, kind) if before is not None and split.seen else None
        guess = 1 - 1 / own.classes
        chance = guess if of == "error" else log(own.classes) / log(1 / LEAST_PROBABILITY)
        return Bound(
            name="certificate",
            value=found.value,
            quantity=_describe_network(posterior, moved),
            loss=of,
            delta=delta,
            terms=found.list_terms(),
            assumptions=_list_assumptions(found, split, marks, [*gauge.fixed, *hidden], network),
            chance=chance,
            reference="maurer2004note",
            formula=FORMULA,
            kind="valid",
            examples=examples,
            details={
                "parts": list(PARTS),
                "kl": posterior.compute_kl_by_parameter(),
                "prior_scales": dict(posterior.scales),
                "strength": strength,
                "moved": moved,
                "data": combine_marks(marks),
                **split.record,
                **({} if before is None else {"prior_risk": before.risk}),
                **({} if holdout is None else {"holdout": holdout.upper}),
            },
            notes=(
                *_format_notes(found, of, holdout, gauge, marks),
                *_format_descent_notes(found, posterior is closed, moved, epochs, lr),
                *[f"delta={delta:g} is the probability that the bound fails. Try delta=0.05."] * (delta > 0.5),
                *notes,
            ),
            settings={
                **describe_context(context),
                "of": of,
                "prior": "zero" if isinstance(prior, str) else "trained" if split.seen else "initial",
                "gauge": gauge.name,
                "draws": draws,
                "epochs": epochs,
                "move": move,
                **({"lr": lr} if epochs else {}),
                "sampling": network.sampling,
            },
            **describe_run(model, started, torch, numpy),
        )


def _describe_network(posterior: Posterior, moved: float) -> str:
    """Return whose error is bounded: a descent may have left the weights that were given."""
    if not moved:
        center = ""
    elif compute_distance(posterior.weights.mean, posterior.center) == 0:
        center = ", around the prior's own weights and not those given,"
    else:
        center = f", around weights {moved:.1%} away from those given,"
    return f"a network whose weights are drawn anew for every prediction{center}"


def _check_precision(
    network: RandomNetwork,
    posterior: Posterior,
    of: BoundedLoss,
    delta: float,
    draws: int,
    precision: float | None,
    seed: int,
    examples: int,
) -> None:
    """Check before the long evaluation that the number of draws suffices for the wanted precision."""
    if precision is None:
        return
    share = MONTE_CARLO_SHARE * delta
    trial = estimate_risk(network, posterior.weights, of, draws=1, seed=seed, delta=share, examples=TRIAL).mean
    # The mean of all draws will be in this range.
    tried = max(1, min(examples, TRIAL) // network.group_size)
    high = bound_monte_carlo(trial, tried, TRIAL_DELTA).upper
    low = 1 - bound_monte_carlo(1 - trial, tried, TRIAL_DELTA).upper

    def find_margin(number: int) -> float:
        # Margins are largest where the interval from mean to upper bound is around 1/2.
        widest = 0.5 - sqrt(-log(share) / (8 * number * ceil(examples / network.group_size)))
        mean = min(max(widest, low), high)
        return bound_empirical_risk(mean, examples, network.group_size, number, share).margin

    needed = draws
    while needed <= MOST_DRAWS and find_margin(needed) > precision:
        needed *= 2
    if needed > MOST_DRAWS:
        raise OptionError(
            f"Expected a precision that at most {MOST_DRAWS:,} draws can reach, but got precision={precision:g}. Try "
            f"precision={1.1 * find_margin(draws):.1e} for draws={draws}."
        )
    if needed > draws:
        raise OptionError(
            f"Expected enough draws for precision={precision:g}, but got draws={draws}, with which the Monte Carlo "
            f"margin can be {find_margin(draws):.1e}. Try draws={needed}, or leaving precision out."
        )


def _list_assumptions(
    found: Certificate, split: Split, marks: Counter[bytes], constants: Sequence[str], network: RandomNetwork
) -> tuple[Assumption, ...]:
    repeated = sum(count - 1 for count in marks.values())
    same = f"{repeated} of {marks.total()} inputs repeat another." if repeated else "No input occurs twice."
    fixed = ", ".join(constants[:3]) + " and others" * (len(constants) > 3)
    sharing = (
        "Every example has draws of its own."
        if network.group_size == 1
        else f"{network.group_size} examples share a draw, and count as one sample."
    )
    return (
        Assumption(
            "The examples and new data are independent draws from one distribution.",
            False if repeated > MOST_REPEATED * marks.total() else None,
            same,
        ),
        Assumption("The prior does not depend on these examples.", split.met, split.evidence),
        Assumption(
            "The scales of the prior are from a grid that was fixed in advance.",
            True,
            f"{len(found.posterior.scales)} tensors, {len(SCALES)} possible scales; the choice is one of the terms.",
        ),
        Assumption(
            "Everything else in the network is independent of these examples.",
            None if fixed else True,
            f"Not drawn: {fixed}." if fixed else "All parameters are drawn, and no other tensors are used.",
        ),
        Assumption("The loss lies in [0, 1].", True, "It is bounded by its definition."),
        Assumption(
            "The draws are independent.",
            True,
            f"{sharing} {found.risk.samples:,} samples; {found.risk.delta:g} of delta is spent on them.",
        ),
    )


def _format_notes(
    found: Certificate, of: BoundedLoss, holdout: MonteCarlo | None, gauge: Gauge, marks: Counter[bytes]
) -> list[str]:
    what = "error" if of == "error" else "clipped cross-entropy"
    notes = [
        f"The bound is for random networks. The network itself has {what} {found.own:.4g} on these examples; no bound "
        "for it alone follows." + " The error of a majority vote is at most twice the bound." * (of == "error")
    ]
    if holdout is not None:
        smaller = ", which is smaller" if holdout.upper < found.value else ""
        notes.append(
            f"For comparison: a plain test of the prior's network on the same examples bounds the {what} of that one "
            f"network by {holdout.upper:.4g}{smaller}."
        )
    repeated = sum(count - 1 for count in marks.values())
    if repeated > MOST_REPEATED * sum(marks.values()):
        notes.append(
            f"{repeated} of {marks.total()} inputs repeat another. If they are copies, the examples are not "
            "independent, and the bound does not hold. Try removing the copies. If different examples happen to have "
            "equal inputs, the bound holds as it is."
        )
    if gauge.problem:
        notes.append(
            "The canonical form could not be used, so that the bound depends on the scale of the weights: "
            f"{gauge.problem}"
        )
    return notes


def _format_descent_notes(found: Certificate, is_closed: bool, moved: float, epochs: int, lr: float) -> list[str]:
    """Return notes on where the center is, and on what makes the bound large."""
    notes = []
    kl = found.posterior.compute_kl_by_parameter()
    worst = max(kl, key=lambda name: kl[name])
    at_prior = compute_distance(found.posterior.weights.mean, found.posterior.center) == 0
    if moved:
        notes.append(
            "The smallest bound was found at the prior's own weights: it is for networks around these, not around the "
            "weights given, whose KL divergence is too large."
            if at_prior
            else f"The center of the posterior is {moved:.1%} of its norm away from the weights given."
        )
    if epochs and is_closed:
        start = "From there, the" if moved else "The"
        notes.append(f"{start} descent did not lower the bound. Try more epochs, or another learning rate.")
    terms = found.list_terms()
    if terms["added by the KL divergence"] > found.value / 4:
        notes.append(
            f"What hurts most is the KL divergence, {sum(kl.values()) / found.examples:.2g} per example, of which "
            f"{worst!r} has {kl[worst] / max(sum(kl.values()), 1e-300):.0%}. Try "
            + (
                f"more epochs than {epochs}, or a larger learning rate than {lr:g}"
                if epochs
                else "epochs=100, move=True, which certifies networks around other weights"
            )
            + ", or a prior that other examples have trained (prior=, prior_data=)."
        )
    elif found.risk.mean > found.center + max(found.center, 0.05):
        notes.append(
            f"What hurts most is the risk of random networks, {found.risk.mean:.3g} around a network with "
            f"{found.center:.3g}: smaller variances would cost too much KL divergence."
        )
    return notes
