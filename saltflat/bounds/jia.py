r"""Theorem 1 of Jia and Su (2020): a bound from the log-determinant of the Fisher matrix, as a heuristic.

.. math::
    L_0 + A + 2 \sqrt{\frac{2 L_0 + 2 A + \ln(2 N / \delta)}{N - 1}}, \qquad
    A = \frac{1}{2\pi} \left(V \, \Gamma(W/2 + 1)\right)^{2/W} e^{\gamma / W}

for W weights, N examples, the mean loss :math:`L_0`, the volume V of the set of weights over which the prior is
uniform, and :math:`\gamma = \ln |I(w)|`.
"""

from __future__ import annotations

from math import exp, inf, isfinite, lgamma, log, pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from saltflat.bounds.bound import Assumption
from saltflat.bounds.evidence import Evidence
from saltflat.bounds.pac_bayes import check_delta
from saltflat.bounds.registry import BoundResult, bound
from saltflat.engine.data import Data
from saltflat.engine.model_output import extract_logits
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session
from saltflat.errors import LabelError, NotDefinedError, OptionError, ParameterError
from saltflat.symmetry.equality import copy_model
from saltflat.validation import LARGEST_FLOAT, check_count, check_non_negative, is_choice, take_turns

LARGEST_MODEL = 2000  # parameters of a model whose Fisher matrix is written out
VOLUMES = ("exact", "stirling")


def compute_information_term(
    gamma_per_weight: float, weights: int, *, log_volume: float = 0.0, volume: str = "exact"
) -> float:
    r"""Return A of Theorem 1, with the Gamma function or, as printed, with Stirling's formula.

    .. math::
        \frac{1}{2\pi} \left(V \, \Gamma(W/2 + 1)\right)^{2/W} e^{\gamma / W}
        \approx \frac{W V^{2/W} \pi^{1/W} e^{\gamma / W}}{4 \pi e}

    The printed form leaves out a factor :math:`W^{1/W}`.

    Args:
        gamma_per_weight: :math:`\gamma / W`.
        weights: W.
        log_volume: ln V.
        volume: ``"exact"`` or ``"stirling"``.

    Example:
        >>> round(compute_information_term(0.0, 2), 6)  # Gamma(2) / (2 pi)
        0.159155
        >>> round(compute_information_term(0.0, 2, volume="stirling"), 6)  # 2 sqrt(pi) / (4 pi e)
        0.103777
    """
    check_count(1, weights=weights)
    _check_log_volume(log_volume)
    if not is_choice(volume, VOLUMES):
        raise OptionError(f"Expected 'exact' or 'stirling', but got volume={volume!r}. Try leaving it out for 'exact'.")
    if volume == "exact":
        logs = 2 / weights * (log_volume + lgamma(weights / 2 + 1)) - log(2 * pi)
    else:
        logs = log(weights) + (2 * log_volume + log(pi)) / weights - log(4 * pi) - 1
    try:
        return exp(logs + gamma_per_weight)
    except OverflowError:
        return inf


def bound_information(loss: float, information: float, examples: int, delta: float = 0.05) -> float:
    r"""Return the right side of Theorem 1 as it is printed.

    .. math::
        L_0 + A + 2 \sqrt{\frac{2 L_0 + 2 A + \ln(2 N / \delta)}{N - 1}}

    Args:
        loss: :math:`L_0`, the mean loss of the network.
        information: A, see :func:`compute_information_term`.
        examples: N.
        delta: the probability with which the bound is said to fail.

    Example:
        >>> from math import e
        >>> round(bound_information(0.0, 0.5, 5, delta=10 / e**8), 6)  # .5 + 2 sqrt((1 + 8) / 4)
        3.5
    """
    check_non_negative(loss=loss)
    check_count(2, examples=examples)
    check_delta(delta)
    return loss + information + 2 * sqrt((2 * loss + 2 * information + log(2 * examples / delta)) / (examples - 1))


@bound(
    reference="jia2020information",
    formula="Thm. 1: loss + A + 2 sqrt((2 loss + 2 A + ln(2 N/delta))/(N - 1)), A = (V Gamma(W/2 + 1))^(2/W) "
    "e^(gamma/W)/(2 pi)",
    kind="heuristic",
)
def information(
    evidence: Evidence, *, log_volume: float = 0.0, volume: str = "exact", subset: int = 100, sets: int = 100
) -> BoundResult:
    r"""Compute Theorem 1 with :math:`\gamma` estimated from the gradients of random subsets of the examples.

    The determinant of the Fisher matrix is zero for nearly every network, so :math:`\gamma` itself is minus infinity.
    In its place is the paper's estimate from the Gram matrices of N' gradients,

    .. math::
        \gamma \approx \frac{W}{N'} \hat\gamma - W \ln W.

    Args:
        evidence: the network and its data.
        log_volume: ln V, which the paper leaves open; 0 is a set of weights of volume 1.
        volume: ``"exact"`` for the Gamma function, ``"stirling"`` for the printed approximation.
        subset: N', examples in a subset.
        sets: how many subsets.
    """
    examples, W = evidence.examples, evidence.size
    if examples < 2:
        raise NotDefinedError("needs at least 2 examples")
    asked = [f"subset={subset!r}"] * (subset != 100) + [f"draws={sets!r}"] * (sets != 100)
    reading = evidence.read_measure(f"fisher_logdet({', '.join(asked)})")
    trace = evidence.read_measure("fisher_trace").value
    size = int(reading.details.get("subset", subset))
    per_weight = reading.value / size - log(W)
    from_trace = log(trace / W) if trace > 0 else -inf
    terms_A = {each: compute_information_term(per_weight, W, log_volume=log_volume, volume=each) for each in VOLUMES}
    A = compute_information_term(per_weight, W, log_volume=log_volume, volume=volume)
    A_trace = compute_information_term(from_trace, W, log_volume=log_volume, volume=volume)
    loss, delta = evidence.mean_loss, evidence.delta
    value = bound_information(loss, A, examples, delta)
    shares = {"loss of the network": loss, "information": A, "confidence": value - loss - A}
    if isfinite(value):
        largest = max(shares, key=shares.__getitem__)
    else:
        shares["confidence"], largest = inf, "information"
    symmetries = evidence.rescalings
    scales = None if symmetries is None else symmetries.scales
    details: dict[str, Any] = {
        "largest_term": largest,
        "bound_exact": bound_information(loss, terms_A["exact"], examples, delta),
        "bound_stirling": bound_information(loss, terms_A["stirling"], examples, delta),
        "bound_trace": bound_information(loss, A_trace, examples, delta),
        "gamma": -inf if scales or examples < W else None,
        "rescalings": scales,
        "subset": size,
        "log_volume": log_volume,
    }
    return BoundResult(
        value,
        {
            **shares,
            "gamma hat": reading.value,
            "gamma / W": per_weight,
            "its bound by the trace": from_trace,
            "information, Gamma function": terms_A["exact"],
            "information, Stirling": terms_A["stirling"],
            "information, trace": A_trace,
            "delta": delta,
        },
        _list_doubts(evidence, scales, log_volume),
        details,
        (
            f"The largest term is {largest}: {shares[largest]:.4g}.",
            *_explain_determinant(evidence, scales),
            "The theorem adds the loss twice to the KL divergence, which the information alone bounds: that makes it "
            "larger, not wrong.",
            *reading.notes,
        ),
        "a network drawn at random around the trained one",
        "cross_entropy",
        log(evidence.classes),
    )


def _list_doubts(evidence: Evidence, scales: int | None, log_volume: float) -> tuple[Assumption, ...]:
    found = "its determinant is zero" if scales or evidence.examples < evidence.size else "not checked"
    return (
        Assumption("The examples are independent draws from the distribution of the new data."),
        Assumption(
            "The prior does not depend on the examples.",
            False,
            "It is uniform on the weights around the minimum whose loss is low, and both come from the examples.",
        ),
        Assumption("The loss lies in [0, 1].", False, "It is the cross-entropy, which has no largest value."),
        Assumption(
            "The inequality of PAC-Bayes is one that was proved.",
            False,
            "McAllester's has 2 (KL + ln(2 N / delta)) under the root; here the logarithm has no factor 2.",
        ),
        Assumption(
            "The volume of the set of weights is known.",
            False,
            f"The paper does not say how to choose it; ln V = {log_volume:g} was assumed.",
        ),
        Assumption(
            "The Fisher matrix is not degenerate.", False if found != "not checked" else None, found.capitalize() + "."
        ),
    )


def _explain_determinant(evidence: Evidence, scales: int | None) -> list[str]:
    """Return why the determinant is zero, if it is known to be."""
    reasons = []
    if scales:
        reasons.append(
            f"{scales:,} independent rescalings of the weights leave the function unchanged, so no gradient points "
            "along them"
        )
    if evidence.examples < evidence.size:
        reasons.append(f"{evidence.examples:,} gradients do not span {evidence.size:,} parameters")
    if not reasons:
        return []
    return [
        f"The determinant of the Fisher matrix is zero and its logarithm minus infinity: {', and '.join(reasons)}. The "
        "theorem would then add nothing to the loss but the confidence term, whatever the network. The estimate from "
        "subsets is finite, but it estimates something else."
    ]


@take_turns
def compute_soft_fisher(model: nn.Module, data: Data, *, smoothing: float = 0.0) -> Tensor:
    r"""Return the observed Fisher matrix with soft labels, in float64, for tiny models.

    .. math::
        I(w) = \frac1N \sum_x \sum_{i=1}^K y_{x,i} \, g_{x,i} g_{x,i}^T,
        \qquad g_{x,i} = -\nabla_w \ln f_w(x)_i

    It is the Hessian of the mean cross-entropy where the network predicts exactly y on all examples. For its
    log-determinant see ``fisher_determinant`` of :mod:`saltflat.measures.fisher`.

    Args:
        model: a classifier of at most 2000 parameters, in the order of ``model.parameters()``. It is not modified.
        data: as for :func:`saltflat.measure`; targets are class numbers, or probabilities of each class.
        smoothing: the share of each label that is spread over all classes.

    Example:
        >>> net = nn.Linear(1, 2, bias=False)
        >>> _ = nn.init.zeros_(net.weight)
        >>> compute_soft_fisher(net, (torch.ones(1, 1), torch.tensor([0]))).tolist()  # g = (-1/2, 1/2)
        [[0.25, -0.25], [-0.25, 0.25]]
    """
    if isinstance(smoothing, bool) or not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
        raise OptionError(f"Expected a number from 0 to 1, but got smoothing={smoothing!r}. Try smoothing=0.1.")
    with open_session(model, "eval", data):
        own = copy_model(model).double()
        with open_session(own, "eval", data):
            problem = Problem.build(own, data, "cross_entropy", dtype=torch.float64)
            parameters = {name: value.detach() for name, value in own.named_parameters() if value.requires_grad}
            size = sum(value.numel() for value in parameters.values())
            if size > LARGEST_MODEL:
                raise ParameterError(
                    f"Expected a model of at most {LARGEST_MODEL:,} parameters, whose Fisher matrix can be written "
                    f"out, but got one with {size:,}. Try the measure 'fisher_logdet'."
                )

            def compute_log_probabilities(given: dict[str, Tensor], *args: Tensor) -> Tensor:
                outputs = functional_call(own, given, tuple(each[None] for each in args))
                return extract_logits(outputs)[0].log_softmax(-1)

            total, count = next(iter(parameters.values())).new_zeros(size, size), 0
            for batch in problem.read_batches():
                if batch.kwargs or not all(isinstance(each, Tensor) for each in batch.args):
                    raise OptionError(
                        "Expected inputs as tensors by position, but got inputs by name. Try a model with one input."
                    )
                with torch.no_grad():
                    outputs = problem.network(batch)
                labels = _make_soft_labels(outputs, batch.targets, smoothing)
                axes = (None, *[0] * len(batch.args))
                rows = vmap(jacrev(compute_log_probabilities), axes)(parameters, *batch.args)
                g = torch.cat([each.flatten(2) for each in rows.values()], 2)
                total += torch.einsum("nk,nki,nkj->ij", labels, g, g)
                count += batch.examples
    return total / count


def _make_soft_labels(outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    if outputs.dim() != 2:
        raise LabelError(
            f"Expected outputs of shape (N, classes), but got {tuple(outputs.shape)}. Try a classifier with one label "
            "per example."
        )
    classes = outputs.shape[1]
    if targets.is_floating_point() and targets.shape == outputs.shape:
        labels = targets.double()
    elif (
        targets.dim() == 1
        and not targets.is_floating_point()
        and 0 <= int(targets.min()) <= int(targets.max()) < classes
    ):
        labels = nn.functional.one_hot(targets.long(), classes).double()
    else:
        raise LabelError(
            f"Expected class numbers from 0 to {classes - 1}, or probabilities of shape {tuple(outputs.shape)}, but "
            f"got targets of type {targets.dtype} and shape {tuple(targets.shape)}. Check the targets."
        )
    return (1 - smoothing) * labels + smoothing / classes


def _check_log_volume(log_volume: float) -> None:
    if isinstance(log_volume, bool) or not isinstance(log_volume, int | float) or not abs(log_volume) <= LARGEST_FLOAT:
        raise OptionError(f"Expected a finite number, but got log_volume={log_volume!r}. Try log_volume=0.")
