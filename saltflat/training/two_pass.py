"""Optimizers whose gradient is taken at shifted weights: one pass says where to go, a second what to step with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from saltflat.engine.session import snapshot_rng, take_turns
from saltflat.errors import OptionError, TrainingError
from saltflat.training.distributed import average_gradients, check_not_unscaled, get_gradient_scale
from saltflat.training.shift import (
    NoGradientError,
    check_gradients_cleared,
    compute_norm,
    scale_directions,
    shift_weights,
)
from saltflat.training.wrapper import (
    DefaultFloat,
    OptimizerWrapper,
    check_not_ambiguous,
    check_state_dict,
    check_two_pass_model,
    parse_base_optimizer,
)
from saltflat.validation import check_non_negative

STEPPED_WITH = "_stepped_with"  # an attribute of gradients: they belong to the step before
CLEARED = "_cleared"  # an attribute of gradients: their version when they were set to zero
COUNTS = "two_pass"  # the key of what state_dict holds beside the base's


class TwoPass(OptimizerWrapper, ABC):
    """A wrapper around any optimizer, which steps with a gradient taken somewhere else than where the weights are.

    ``param_groups``, ``state`` and ``defaults`` are the base's own: schedulers act on what the base uses. A subclass
    says where to go (:meth:`compute_ascent`) and may say how the two gradients make one (:meth:`mix_gradients`). Hooks
    on ``step`` run once for every step that is taken, just before and after the base's, when ``.grad`` is what the base
    steps with.

    Args:
        model: the module that is trained; with DistributedDataParallel, that.
        base: an optimizer, or a class of optimizers, which is given all parameters that require a gradient.
        sync: under DistributedDataParallel, whose gradient says where to go: that of all processes' examples
            (``"global"``: the same result for any number of processes), or of each process's own (``"local"``:
            m-sharpness as in the paper on SAM, with m the batch size of one process).
        own: options that this optimizer adds to every group, ``rho`` among them; those that the user did not pass are
            :class:`~saltflat.training.wrapper.DefaultFloat`. In what :meth:`compute_ascent` and
            :meth:`mix_gradients` are given they have these names; for their keys in ``param_groups`` see
            :meth:`get_key`.
        options: of the base, if it is a class.

    Attributes:
        base: the optimizer that steps.
        perturbed_steps: how many steps were taken with a gradient from shifted weights. Steps that a GradScaler skipped
            and steps without a gradient to go along (one whose length is 0 or infinite in the gradients' precision) are
            not among them.
        perturbation: how far the weights were moved for the last step that was taken, as a Euclidean length.
    """

    keeps_first = False  # whether mixed() is to be asked

    @take_turns
    def __init__(
        self,
        model: nn.Module,
        base: Optimizer | Callable[..., Optimizer],
        *,
        sync: str,
        own: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        check_two_pass_model(model, sync)
        if isinstance(base, TwoPass):
            raise OptionError(
                f"Expected an optimizer that takes one pass, but got a {type(base).__name__} as the base. Try "
                "passing its base."
            )
        self.model, self.sync = model, sync
        self._perturbation: Tensor | float = 0.0
        self._perturbed: Tensor | int = 0
        made = parse_base_optimizer(model, base, options)
        check_not_ambiguous(type(self), base, made, [name for name in own if not isinstance(own[name], DefaultFloat)])
        super().__init__(made, own)

    def _reset_pass_state(self) -> None:
        super()._reset_pass_state()
        self._extra: ExitStack | None = None  # open while the weights are shifted
        self._back: Callable[[], None] | None = None
        self._scaler: GradScaler | None = None
        self._moved: Tensor | float = 0.0
        self._is_local = self._in_closure = False
        self._first: dict[Tensor, Tensor] = {}

    @abstractmethod
    def compute_ascent(
        self, groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """A direction for every parameter, and the length that stands for one: the weights move by ``rho`` of those."""

    def mix_gradients(self, group: dict[str, Any], first: Tensor, second: Tensor) -> Tensor:
        """The gradient to step with; asked only if ``keeps_first``."""
        return second

    @take_turns
    def step(self, closure: Callable[[], Any] | None = None, scaler: GradScaler | None = None) -> Any:
        """Both passes and the base's step; returns what the closure returned at the weights themselves.

        Args:
            closure: clears the gradients, takes the loss of the batch (of all micro-batches), propagates it back and
                returns it. It is called twice, with the same random numbers. It is an error if it leaves no gradient;
                one of zero is a gradient.
            scaler: the closure's GradScaler, if it has one.
        """
        if closure is None:
            if self._extra is None:
                raise TrainingError(
                    f"Expected two gradients, but got step() without a closure. {type(self).__name__} takes one here "
                    "and one at shifted weights. Try step(closure), or first_step() and second_step() after a "
                    "backward pass each. (With 16-mixed in Lightning: "
                    "saltflat.integrations.lightning.TwoPassPrecision.)"
                )
            return self.second_step(scaler) if scaler is not None else self._finish_step()
        if not callable(closure):
            raise TrainingError(
                f"Expected a closure that computes the loss and its gradient, but got a {type(closure).__name__}. "
                "Try a function that calls zero_grad(), takes the loss, calls backward() and returns the loss."
            )
        self._check_not_shifted()
        self._back = None
        parameters = [p for group in self.param_groups for p in group["params"]]
        loss = None
        try:
            with self.first_pass(), check_gradients_cleared(parameters), torch.enable_grad():
                loss = closure()
        except NoGradientError:
            if loss is None and _is_lightning_closure(closure):
                return None  # a training_step that returns None skips its batch
            raise
        for _, _, gradient in self._iterate_gradients():
            vars(gradient).pop(STEPPED_WITH, None)  # it has been seen to be cleared
        try:
            self.first_step(scaler)
            self._in_closure = True
            with torch.enable_grad():
                closure()
            self._in_closure = False
            self.second_step(scaler)
        except BaseException:
            self.restore()
            raise
        return loss

    # torch runs the hooks on step around every call of it, and step(closure) ends in another: _step_base has them.
    step.hooked = True  # type: ignore[attr-defined]

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Around the first forward and backward pass, of all micro-batches: the second sees the same random numbers.

        With ``sync="local"`` the gradients stay on their process.
        """
        self._check_not_shifted()
        back = self._back or snapshot_rng()  # once for all micro-batches
        self._reset_pass_state()
        alone = self._local_model
        with nullcontext() if alone is None else alone.no_sync():
            yield
        # Not after an error: that pass is over.
        self._back, self._is_local = back, True

    @take_turns
    @torch.no_grad()
    def first_step(self, scaler: GradScaler | None = None) -> None:
        """Move the weights to where the second gradient is to be taken, and clear the first.

        Args:
            scaler: what the loss was scaled with, if it was. A direction does not depend on it. After a gradient that
                overflowed the weights are moved to NaN, so the second one is NaN, too, and the scaler will see it.
        """
        self._check_not_shifted(restore=True)
        if self._local_model is not None and not self._is_local:
            raise TrainingError(
                "Expected each process's own gradient, but got first_step() with sync='local' after a backward pass "
                "that averaged over the processes. Try forwarding and backward inside of `with "
                "optimizer.first_pass():`."
            )
        check_not_unscaled(scaler, self)
        for group in self.param_groups:  # schedules may have changed it
            check_non_negative(**{self.get_key("rho"): self._get_options(group)["rho"]})
        groups, parameters, gradients = self._collect_gradients()
        if any(STEPPED_WITH in vars(each) for each in gradients):
            raise TrainingError(
                "Expected those of this step alone, but got gradients that the last step was taken with, added to "
                "since. Try calling optimizer.zero_grad() before the first backward pass."
            )
        cleared = all(vars(each).get(CLEARED) == each._version for each in gradients)
        if cleared and not any(bool(each.any()) for each in gradients):
            raise NoGradientError("Got first_step() without a gradient")
        directions, length = self.compute_ascent(groups, parameters, gradients)
        # Nothing to go along: stay. (NaN compares false, too, and stays NaN in the product.)
        per_length = torch.where(length > 0, 1 / length, 0.0)
        # Up, which is down for those that are to make the loss large.
        rhos = [-group["rho"] if group.get("maximize") else group["rho"] for group in groups]
        steps = scale_directions(directions, rhos, per_length)
        if self.keeps_first:
            self._first = {p: g.clone() for p, g in zip(parameters, gradients, strict=True)}
        self._moved = compute_norm(steps)
        self._scaler = scaler
        extra = ExitStack()
        extra.enter_context(shift_weights(self.model, parameters, steps))
        self._extra = extra
        self.zero_grad()
        if self._back is not None:
            self._back()

    @take_turns
    @torch.no_grad()
    def second_step(self, scaler: GradScaler | None = None) -> Any:
        """Put the weights back and step with the gradient that was taken at the shifted ones.

        Args:
            scaler: unscales, and skips the step if a gradient overflowed. To clip, call ``scaler.unscale_(optimizer)``
                before, as always. (Where the step mixes both gradients, that clips the second alone: clip in a hook,
                ``register_step_pre_hook``, which sees the mixture.)
        """
        self._check_second_gradient()
        if self._extra is None:
            raise TrainingError(
                "Expected both, after a backward pass each, but got second_step() before first_step(). Try "
                "loss.backward(), first_step(), loss.backward(), second_step()."
            )
        try:
            if scaler is None:
                return self.step()
            self._scaler = scaler
            return scaler.step(self)
        finally:
            self.restore()

    @take_turns
    @torch.no_grad()
    def take_gradient(self) -> None:
        """Put the weights back and leave in ``.grad`` what the base is to step with; second_step() without the step.

        For loops that clip and step the base by themselves, which ``perturbed_steps`` does not hear of. Both gradients
        must be scaled alike, or not at all.
        """
        if self._extra is None:
            raise TrainingError(
                "Expected a backward pass, first_step() and another one before, but got take_gradient() before "
                "first_step(). Try loss.backward(), first_step(), loss.backward(), take_gradient()."
            )
        self._check_second_gradient()
        first, self._perturbation = self._first, self._moved
        self.restore()
        if self.keeps_first:
            self._apply_mix(first, None)

    @take_turns
    def restore(self) -> None:
        """Put the weights back without a step, after an error between the two passes, say; else nothing happens."""
        extra = self._extra
        self._reset_pass_state()
        if extra is not None:
            extra.close()

    @property
    def is_shifted(self) -> bool:
        """Whether the weights are away from where they belong, between first_step and second_step."""
        return self._extra is not None

    @property
    def perturbed_steps(self) -> int:
        return int(self._perturbed)

    @property
    def perturbation(self) -> float:
        return float(self._perturbation)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for _, _, gradient in self._iterate_gradients():
            vars(gradient).pop(STEPPED_WITH, None)
            vars(gradient)[CLEARED] = gradient._version
        if self._extra is None:
            self._back = None  # a new step begins

    def state_dict(self) -> dict[str, Any]:
        """The base's, and what is counted here."""
        self._check_not_shifted()
        counts = {"perturbed_steps": self.perturbed_steps, "perturbation": self.perturbation}
        return {**super().state_dict(), COUNTS: counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this optimizer, or of a base that was trained alone so far."""
        self._check_not_shifted()
        check_state_dict(state_dict, self.base)
        counts = state_dict.get(COUNTS)
        # A base that was trained alone has no counts, and its options are its own.
        state_dict = {key: value for key, value in state_dict.items() if key != COUNTS}
        super().load_state_dict(state_dict if counts is None else self._migrate_state_dict(state_dict))
        counts = counts or {}
        self._perturbed = int(counts.get("perturbed_steps", 0))
        self._perturbation = float(counts.get("perturbation", 0.0))

    def __getstate__(self) -> dict[str, Any]:
        self._check_not_shifted()
        return {**super().__getstate__(), "_perturbed": self._perturbed, "_perturbation": self._perturbation}

    @property
    def _local_model(self) -> DistributedDataParallel | None:
        """The model, if every process goes its own way in the first pass."""
        return self.model if self.sync == "local" and isinstance(self.model, DistributedDataParallel) else None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by a GradScaler: whether it is to call ``step`` even after an overflow.

        It is, to put the weights back. It then leaves ``found_inf`` and ``grad_scale`` here, and the gradients as they
        are. Others ask in a closure, Lightning before it clips: there the gradients are like any optimizer's.
        """
        return self.is_shifted and not self._in_closure

    def _finish_step(self) -> Any:
        first, moved, scaler = self._first, self._moved, self._scaler
        self.restore()
        overflow, scale = vars(self).get("found_inf"), vars(self).get("grad_scale")
        # A model may hide that its weights were NaN; how far they were moved does not.
        if overflow is not None and (float(overflow) or not isfinite(float(moved))):
            return None
        if scale is not None:
            for _, _, gradient in self._iterate_gradients():
                gradient.div_(scale.to(gradient.device))
        if self.keeps_first:
            if scale is None and overflow is not None:
                scale = get_gradient_scale(scaler)  # the second gradient has been unscaled before
            self._apply_mix(first, scale)
        self._perturbation = moved
        self._perturbed = self._perturbed + (moved > 0 if isinstance(moved, float) else (moved > 0).long())
        found = self._step_base()
        for _, _, gradient in self._iterate_gradients():
            vars(gradient)[STEPPED_WITH] = True
        return found

    def _iterate_gradients(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        """Every parameter that has a gradient, between its group (with this optimizer's options) and that."""
        for group in map(self._get_options, self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p, p.grad

    def _collect_gradients(self) -> tuple[list[dict[str, Any]], list[Tensor], list[Tensor]]:
        found = list(self._iterate_gradients())
        if any(gradient.layout != torch.strided for _, _, gradient in found):
            raise TrainingError(
                "Expected dense ones, but got sparse gradients. Try making the embedding with sparse=False, or "
                "training it apart."
            )
        return [group for group, _, _ in found], [p for _, p, _ in found], [gradient for _, _, gradient in found]

    def _apply_mix(self, first: dict[Tensor, Tensor], scale: Tensor | float | None) -> None:
        if self._local_model is not None:
            # Second gradients have been averaged over the processes; weights would drift apart if first ones were not.
            trained = {name: p for name, p in self.model.named_parameters() if p.grad is not None}
            mean = average_gradients(
                self._local_model, trained, {name: first[p] for name, p in trained.items() if p in first}
            )
            first = {trained[name]: each for name, each in mean.items()}
        for group in map(self._get_options, self.param_groups):
            for p in group["params"]:
                if p not in first and p.grad is None:
                    continue
                one = first[p] if p in first else torch.zeros_like(p)
                if scale is not None:
                    one = one / (scale.to(one.device) if isinstance(scale, Tensor) else scale)
                mixed = self.mix_gradients(group, one, torch.zeros_like(p) if p.grad is None else p.grad)
                if p.grad is None:
                    p.grad = mixed
                else:
                    p.grad.copy_(mixed)  # in its place: it may be a view of what processes exchange

    def _check_second_gradient(self) -> None:
        """Someone may forget the second backward pass."""
        if self._extra is not None and next(self._iterate_gradients(), None) is None:
            self.restore()
            raise TrainingError(
                "Expected one, taken at the shifted weights, but got no gradient since first_step(). Try forwarding "
                "and backward again before the second step. The weights are back."
            )

    def _check_not_shifted(self, restore: bool = False) -> None:
        if self._extra is None:
            return
        if restore:
            self.restore()
        raise TrainingError(
            "Got weights that are still shifted: a first_step() had no second_step(), perhaps after an error. "
            "Want them where they belong. "
            + (
                "They are now. Do: call restore() where you catch the error, and take this batch's gradient again."
                if restore
                else "Do: call second_step() or restore() first."
            )
        )


def _is_lightning_closure(closure: Callable[[], Any]) -> bool:
    """Whether this is Lightning's training step, and not a closure that Lightning was given for manual optimisation."""
    inner: Any = closure
    while isinstance(inner, partial) and inner.args:
        inner = inner.args[-1]
    return type(inner).__module__.startswith(("lightning.", "pytorch_lightning."))
