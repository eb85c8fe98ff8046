r"""Determine how far an optimizer is from diverging on a parabola.

Freeze an optimizer with its learning rates, momenta and preconditioner, and let it minimize
:math:`\tfrac12 w^\top H w`. Its steps are then a linear recurrence. With :math:`D` the diagonal matrix of learning
rates over preconditioner and :math:`W` that of weight decays that are added to the gradient, a mode
:math:`w_{t+1} = z w_t` satisfies :math:`f(z)\, w = -D (H + W) w`, and on the unit circle the imaginary part of
:math:`f(z)` vanishes only at :math:`z = \pm 1`, for all optimizers here. So as :math:`H` grows, the first mode to
diverge flips its sign at every step, :math:`z = -1`, when the largest eigenvalue of :math:`D^{1/2} (H + W) D^{1/2}`
reaches the threshold :math:`-f(-1)`:

* gradient descent: 2; with momentum :math:`\mu` and dampening :math:`d`: :math:`2 (1 + \mu) / (1 - d)`; with
  Nesterov's: :math:`2 (1 + \mu) / (1 + 2 \mu)`;
* Adam and its variants: :math:`2 (1 + \beta_1) / (1 - \beta_1)`, which is 38 for :math:`\beta_1 = 0.9` (Cohen et al.,
  2022, "Adaptive gradient methods at the edge of stability"), with :math:`D` the learning rate over
  :math:`(1 - \beta_1^t) (\sqrt{\hat v} + \epsilon)`;
* weight decay :math:`\lambda` that is applied to the weights themselves (AdamW): the threshold times
  :math:`1 - \eta \lambda / 2`.

The imaginary part has the same sign for all of these, so parameter groups may differ in all of it: the rate of a
parameter whose threshold is :math:`T` is multiplied by :math:`T_{\min} / T`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop

from saltflat.training.two_pass import TwoPass

# Packages whose wrappers around an optimizer do not change its steps.
TRANSPARENT = ("accelerate.", "lightning.", "pytorch_lightning.", "saltflat.integrations.")


class OptimizerLike(Protocol):
    """An optimizer, or a wrapper around one with ``param_groups`` of its own."""

    param_groups: list[dict[str, Any]]


@dataclass(frozen=True)
class ParameterDynamics:
    """How the optimizer moves one parameter.

    Attributes:
        rate: the learning rate over the preconditioner, a number or a tensor of the parameter's shape.
        threshold: the threshold of this parameter alone.
        decay: weight decay that is added to the gradient.
    """

    rate: Tensor | float
    threshold: float
    decay: float = 0.0


@dataclass(frozen=True)
class StabilityMatrix:
    """The matrix whose largest eigenvalue is compared with a threshold: D^1/2 (sign H + W) D^1/2.

    Attributes:
        rates: the diagonal of D, by the parameters' names; 0 where a parameter does not move.
        decays: the diagonal of W.
        sign: -1 for an optimizer that maximizes.
        threshold: the stability threshold; None if steps do not follow the gradient of the loss, so none is known.
        note: why there is no threshold.
    """

    rates: Mapping[str, Tensor | float]
    decays: Mapping[str, float]
    sign: int
    threshold: float | None
    note: str = ""

    @property
    def uniform_rate_and_decay(self) -> tuple[float, float] | None:
        """Return the rate and decay all parameters share, so that the matrix is ``rate * (H + decay)``, or None."""
        rates = {rate if isinstance(rate, float) else None for rate in self.rates.values()}
        if self.sign < 0 or len(rates) != 1 or None in rates or len(set(self.decays.values())) != 1:
            return None
        return next(iter(self.rates.values())), next(iter(self.decays.values()))  # type: ignore[return-value]


def compute_stability_matrix(optimizer: OptimizerLike, model: nn.Module, changed_by: str = "") -> StabilityMatrix | str:
    """Return the matrix that governs the stability of the optimizer's next step; a sentence if it is unknown.

    Args:
        optimizer: the optimizer, with the ``param_groups`` of the step in question.
        model: the model it trains.
        changed_by: what changes the gradient before the optimizer uses it.
    """
    groups, inner = optimizer.param_groups, _unwrap_optimizer(optimizer)
    if isinstance(inner, TwoPass):
        changed_by, inner = type(inner).__name__, inner.base
    name = type(inner).__name__
    rule = RULES.get(type(inner))
    if rule is None:
        return f"lr_lambda_max is left out: how {name} scales its steps is not known"
    if len({bool(group.get("maximize")) for group in groups}) > 1:
        return f"lr_lambda_max is left out: some groups of {name} maximize and others do not"
    if any(_get_momentum(group) >= 1 for group in groups):
        return f"lr_lambda_max is left out: {name} with a momentum of 1 or more is not stable for any curvature"
    motions: dict[int, ParameterDynamics] = {}
    for group in groups:
        for p in group["params"]:
            motion = rule(group, inner.state.get(p, {}))
            if motion is not None:
                motions[id(p)] = motion
    if not motions:
        return f"lr_lambda_max is left out: {name} has taken no step yet and so has no preconditioner"
    trained = {each: p for each, p in model.named_parameters() if p.requires_grad}
    if not any(id(p) in motions for p in trained.values()):
        return f"lr_lambda_max is left out: {name} has none of the parameters of the measured model"
    found = {each: motions.get(id(p), ParameterDynamics(0.0, inf)) for each, p in trained.items()}
    threshold = min((each.threshold for each in found.values()), default=inf)
    rates = {
        each: motion.rate if motion.threshold == threshold else motion.rate * (threshold / motion.threshold)
        for each, motion in found.items()
    }
    note = changed_by and (
        f"lr_lambda_max has no threshold: {changed_by} changes the gradient, and with it where {name} becomes unstable"
    )
    return StabilityMatrix(
        rates,
        {each: motion.decay for each, motion in found.items()},
        -1 if groups[0].get("maximize") else 1,
        None if changed_by else threshold,
        note,
    )


def is_preconditioned(optimizer: OptimizerLike) -> bool:
    """Return whether the optimizer has a preconditioner."""
    inner = _unwrap_optimizer(optimizer)
    inner = inner.base if isinstance(inner, TwoPass) else inner
    return type(inner) in RULES and type(inner) is not SGD


def _unwrap_optimizer(optimizer: OptimizerLike) -> Any:
    inner: Any = optimizer
    while type(inner) not in RULES and not isinstance(inner, TwoPass):
        modules = [f"{each.__module__}." for each in type(inner).__mro__]
        wrapped = getattr(inner, "optimizer", None)
        if wrapped is None or not any(each.startswith(TRANSPARENT) for each in modules):
            break
        inner = wrapped
    return inner


def _get_momentum(group: Mapping[str, Any]) -> float:
    return float(group.get("momentum", 0.0))


def _get_option(group: Mapping[str, Any], key: str) -> float:
    return float(group.get(key, 0.0))


def _get_step_count(state: Mapping[str, Any]) -> float:
    return float(state.get("step", 0.0))


def _get_sgd_dynamics(group: Mapping[str, Any], _: Mapping[str, Any]) -> ParameterDynamics:
    momentum, dampening = _get_momentum(group), _get_option(group, "dampening")
    if momentum == 0:
        threshold = 2.0
    elif group.get("nesterov"):
        threshold = 2 * (1 + momentum) / (1 + 2 * momentum)
    else:
        threshold = 2 * (1 + momentum) / (1 - dampening) if dampening < 1 else inf
    return ParameterDynamics(_get_option(group, "lr"), threshold, _get_option(group, "weight_decay"))


def _apply_weight_decay(group: Mapping[str, Any], rate: Tensor, threshold: float, decoupled: bool) -> ParameterDynamics:
    decay = _get_option(group, "weight_decay")
    if decoupled:
        return ParameterDynamics(rate, threshold * (1 - _get_option(group, "lr") * decay / 2))
    return ParameterDynamics(rate, threshold, decay)


def _get_betas(group: Mapping[str, Any]) -> tuple[float, float]:
    one, two = group["betas"]
    return float(one), float(two)


def _compute_state_root(state: Mapping[str, Any], key: str) -> Tensor:
    root: Tensor = state[key].detach().double().sqrt()
    return root


def _get_adam_dynamics(
    group: Mapping[str, Any], state: Mapping[str, Any], decoupled: bool = False
) -> ParameterDynamics | None:
    t = _get_step_count(state)
    if not t:
        return None
    one, two = _get_betas(group)
    second = _compute_state_root(state, "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
    preconditioner = (1 - one**t) * (second / (1 - two**t) ** 0.5 + group["eps"])
    rate = _get_option(group, "lr") / preconditioner
    decoupled = decoupled or bool(group.get("decoupled_weight_decay"))
    return _apply_weight_decay(group, rate, 2 * (1 + one) / (1 - one), decoupled)


def _get_adamw_dynamics(group: Mapping[str, Any], state: Mapping[str, Any]) -> ParameterDynamics | None:
    return _get_adam_dynamics(group, state, decoupled=True)


def _get_nadam_dynamics(group: Mapping[str, Any], state: Mapping[str, Any]) -> ParameterDynamics | None:
    t = _get_step_count(state)
    if not t:
        return None
    one, two = _get_betas(group)
    preconditioner = _compute_state_root(state, "exp_avg_sq") / (1 - two**t) ** 0.5 + group["eps"]
    # The step is along the gradient, times `direct`, and its running mean, times `mean`.
    now, after = (one * (1 - 0.5 * 0.96 ** (n * group["momentum_decay"])) for n in (t, t + 1))
    product = float(state["mu_product"])
    direct, mean = (1 - now) / (1 - product), after / (1 - product * after)
    threshold = 2 / (direct + mean * (1 - one) / (1 + one))
    rate = _get_option(group, "lr") / preconditioner
    return _apply_weight_decay(group, rate, threshold, bool(group.get("decoupled_weight_decay")))


def _get_radam_dynamics(group: Mapping[str, Any], state: Mapping[str, Any]) -> ParameterDynamics | None:
    t = _get_step_count(state)
    if not t:
        return None
    one, two = _get_betas(group)
    longest = 2 / (1 - two) - 1
    length = longest - 2 * t * two**t / (1 - two**t)
    second = _compute_state_root(state, "exp_avg_sq")
    factor = torch.ones_like(second)
    if length > 5:
        rectified = ((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5
        factor = rectified * (1 - two**t) ** 0.5 / (second + group["eps"])
    rate = _get_option(group, "lr") / (1 - one**t) * factor
    return _apply_weight_decay(group, rate, 2 * (1 + one) / (1 - one), bool(group.get("decoupled_weight_decay")))


def _get_adamax_dynamics(group: Mapping[str, Any], state: Mapping[str, Any]) -> ParameterDynamics | None:
    t = _get_step_count(state)
    if not t:
        return None
    one, _ = _get_betas(group)
    rate = _get_option(group, "lr") / ((1 - one**t) * state["exp_inf"].detach().double())
    return ParameterDynamics(rate, 2 * (1 + one) / (1 - one), _get_option(group, "weight_decay"))


def _get_rmsprop_dynamics(group: Mapping[str, Any], state: Mapping[str, Any]) -> ParameterDynamics | None:
    if not _get_step_count(state):
        return None
    square = state["square_avg"].detach().double()
    if group["centered"]:
        square = (square - state["grad_avg"].detach().double().square()).clamp_min(0)
    rate = _get_option(group, "lr") / (square.sqrt() + group["eps"])
    return ParameterDynamics(rate, 2 * (1 + _get_momentum(group)), _get_option(group, "weight_decay"))


def _get_adagrad_dynamics(group: Mapping[str, Any], state: Mapping[str, Any]) -> ParameterDynamics | None:
    t = _get_step_count(state)
    if not t:
        return None
    rate = (
        _get_option(group, "lr")
        / (1 + (t - 1) * group["lr_decay"])
        / (_compute_state_root(state, "sum") + group["eps"])
    )
    return ParameterDynamics(rate, 2.0, _get_option(group, "weight_decay"))


def _get_adadelta_dynamics(group: Mapping[str, Any], state: Mapping[str, Any]) -> ParameterDynamics | None:
    if not _get_step_count(state):
        return None
    above, below = (state[key].detach().double() + group["eps"] for key in ("acc_delta", "square_avg"))
    return ParameterDynamics(_get_option(group, "lr") * (above / below).sqrt(), 2.0, _get_option(group, "weight_decay"))


# Exactly these classes: a subclass may step differently.
RULES: dict[type, Callable[[Mapping[str, Any], Mapping[str, Any]], ParameterDynamics | None]] = {
    SGD: _get_sgd_dynamics,
    Adam: _get_adam_dynamics,
    AdamW: _get_adamw_dynamics,
    NAdam: _get_nadam_dynamics,
    RAdam: _get_radam_dynamics,
    Adamax: _get_adamax_dynamics,
    RMSprop: _get_rmsprop_dynamics,
    Adagrad: _get_adagrad_dynamics,
    Adadelta: _get_adadelta_dynamics,
}
