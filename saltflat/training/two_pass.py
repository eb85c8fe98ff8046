"""Optimizers with two passes: the first gradient shifts the weights, the second one, taken there, makes the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from saltflat.engine.session import snapshot_rng
from saltflat.errors import OptionError, TrainingError
from saltflat.training.distributed import average_gradients, check_not_unscaled, get_gradient_scale
from saltflat.training.shift import (
    NoGradientError,
    check_dense,
    check_gradients_cleared,
    compute_norm,
    scale_directions,
    shift_weights,
)
from saltflat.training.wrapper import (
    DefaultFloat,
    OptimizerWrapper,
    Sync,
    check_not_ambiguous,
    check_state_dict,
    check_two_pass_model,
    is_lightning_closure,
    parse_base_optimizer,
)
from saltflat.validation import check_non_negative, take_turns

STEPPED_WITH = "_stepped_with"  # an attribute of gradients: the previous step used them
CLEARED = "_cleared"  # an attribute of gradients: their version when they were set to zero
COUNTS = "two_pass"  # the key of the counts in state_dict


class TwoPass(OptimizerWrapper, ABC):
    """A wrapper around any optimizer that steps with a gradient taken at shifted weights.

    ``param_groups``, ``state`` and ``defaults`` belong to the base: schedulers act on what the base uses. A subclass
    defines the shift (:meth:`compute_ascent`) and optionally how to combine both gradients (:meth:`mix_gradients`).
    Hooks on ``step`` run once per step, just before and after the base's, when ``.grad`` is what the base uses.

    Args:
        model: the module that is trained, or the DistributedDataParallel around it.
        base: an optimizer, or a class of optimizers, which receives all parameters that require a gradient.
        sync: under DistributedDataParallel, whose gradient sets the direction: that of the examples of all processes
            (``"global"``: the same result for any number of processes), or of each process's own (``"local"``:
            m-sharpness as in the paper on SAM, with m the batch size of one process).
        own: options that this optimizer adds to every group, including ``rho``; those the user did not pass are
            :class:`~saltflat.training.wrapper.DefaultFloat`. :meth:`compute_ascent` and :meth:`mix_gradients` receive
            them under these names; for their keys in ``param_groups`` see :meth:`get_key`.
        options: options of the base, if it is a class.

    Attributes:
        base: the optimizer that steps.
        perturbed_steps: how many steps used a gradient from shifted weights, not counting steps that a GradScaler
            skipped and steps whose first gradient has norm 0 or infinity.
        perturbation: the Euclidean norm of the shift in the last step.
    """

    keeps_first = False  # whether mix_gradients is called

    @take_turns
    def __init__(
        self,
        model: nn.Module,
        base: Optimizer | Callable[..., Optimizer],
        *,
        sync: Sync,
        own: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        check_two_pass_model(model, sync)
        if isinstance(base, TwoPass):
            raise OptionError(f"Expected a base with one pass, but got a {type(base).__name__}. Try passing its base.")
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
        """Return a direction for every parameter, and the norm to divide by; the weights move by ``rho`` times that."""

    def mix_gradients(self, group: dict[str, Any], first: Tensor, second: Tensor) -> Tensor:
        """Return the gradient to step with; called only if ``keeps_first``."""
        return second

    @take_turns
    def step(self, closure: Callable[[], Any] | None = None, scaler: GradScaler | None = None) -> Any:
        """Run both passes and the base's step, and return the loss at the original weights.

        Args:
            closure: clears the gradients, computes the loss of the batch (of all micro-batches), calls backward and
                returns the loss. It is called twice, with the same random numbers, and must leave a gradient.
            scaler: the GradScaler of the closure, if any.
        """
        if closure is None:
            if self._extra is None:
                raise TrainingError(
                    f"Expected a closure, since {type(self).__name__} needs a second gradient at shifted weights, but "
                    "got step() without one. Try step(closure), or first_step() and second_step() after a backward "
                    "pass each. (With 16-mixed in Lightning: saltflat.integrations.lightning.TwoPassPrecision.)"
                )
            return self.second_step(scaler) if scaler is not None else self._finish_step()
        if not callable(closure):
            raise TrainingError(
                f"Expected a closure that computes the loss and its gradient, but got a {type(closure).__name__}. "
                "Try a function that calls zero_grad(), computes the loss, calls backward() and returns the loss."
            )
        self._check_not_shifted()
        self._back = None
        parameters = [p for group in self.param_groups for p in group["params"]]
        loss = None
        try:
            with self.first_pass(), check_gradients_cleared(parameters), torch.enable_grad():
                loss = closure()
        except NoGradientError:
            if loss is None and is_lightning_closure(closure):
                return None  # a training_step that returns None skips its batch
            raise
        for _, _, gradient in self._iterate_gradients():
            vars(gradient).pop(STEPPED_WITH, None)  # check_gradients_cleared has confirmed it
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

    # torch runs hooks around every call of step, and step(closure) ends in another one: _step_base runs them instead.
    step.hooked = True  # type: ignore[attr-defined]

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Wrap the first forward and backward pass, of all micro-batches; the second uses the same random numbers.

        With ``sync="local"``, gradients stay on their process.
        """
        self._check_not_shifted()
        back = self._back or snapshot_rng()  # once for all micro-batches
        self._reset_pass_state()
        alone = self._local_model
        with nullcontext() if alone is None else alone.no_sync():
            yield
        # Not after an error, which ends the pass.
        self._back, self._is_local = back, True

    @take_turns
    @torch.no_grad()
    def first_step(self, scaler: GradScaler | None = None) -> None:
        """Shift the weights, and clear the first gradient.

        Args:
            scaler: the scaler of the loss, if any. The direction does not depend on the scale. A gradient that
                overflowed moves the weights to NaN, so the second one is NaN, too, which the scaler detects.
        """
        self._check_not_shifted(restore=True)
        if self._local_model is not None and not self._is_local:
            raise TrainingError(
                "Expected each process's own gradient with sync='local', but got one averaged over the processes. Try "
                "running forward and backward inside `with optimizer.first_pass():`."
            )
        check_not_unscaled(scaler, self)
        for group in self.param_groups:  # schedules may have changed it
            check_non_negative(**{self.get_key("rho"): self._get_options(group)["rho"]})
        groups, parameters, gradients = self._collect_gradients()
        if any(STEPPED_WITH in vars(each) for each in gradients):
            raise TrainingError(
                "Expected gradients of this step only, but got gradients that include those of the last step. Try "
                "calling optimizer.zero_grad() before the first backward pass."
            )
        cleared = all(vars(each).get(CLEARED) == each._version for each in gradients)
        if cleared and not any(bool(each.any()) for each in gradients):
            raise NoGradientError("first_step() without a gradient")
        directions, length = self.compute_ascent(groups, parameters, gradients)
        # Without a direction, stay. (NaN compares false, too, and stays NaN in the product.)
        per_length = torch.where(length > 0, 1 / length, 0.0)
        # Ascend, which is descend where the loss is maximized.
        rhos = [-group["rho"] if group.get("maximize") else group["rho"] for group in groups]
        steps = scale_directions(directions, rhos, per_length)
        if self.keeps_first:
            self._first = {p: g.clone() for p, g in zip(parameters, gradients, strict=True)}
        self._moved, self._scaler = compute_norm(steps), scaler
        extra = ExitStack()
        extra.enter_context(shift_weights(self.model, parameters, steps))
        self._extra = extra
        self.zero_grad()
        if self._back is not None:
            self._back()

    @take_turns
    @torch.no_grad()
    def second_step(self, scaler: GradScaler | None = None) -> Any:
        """Restore the weights and step with the gradient taken at the shifted ones.

        Args:
            scaler: unscales, and skips the step if a gradient overflowed. To clip, call ``scaler.unscale_(optimizer)``
                first, as usual. (If the step mixes both gradients, this clips only the second: clip in a hook,
                ``register_step_pre_hook``, which sees the mixture.)
        """
        self._check_second_gradient("second_step")
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
        """Restore the weights and leave in ``.grad`` what the base should step with; second_step() without the step.

        For loops that clip and step the base themselves, which ``perturbed_steps`` does not count. Both gradients must
        have the same scale.
        """
        self._check_second_gradient("take_gradient")
        first, self._perturbation = self._first, self._moved
        self.restore()
        if self.keeps_first:
            self._apply_mix(first, None)

    @take_turns
    def restore(self) -> None:
        """Restore shifted weights without a step, for instance after an error between the two passes."""
        extra = self._extra
        self._reset_pass_state()
        if extra is not None:
            extra.close()

    @property
    def is_shifted(self) -> bool:
        """Return whether the weights are shifted, between first_step and second_step."""
        return self._extra is not None

    @property
    def perturbed_steps(self) -> int:
        """Return how many steps used a gradient from shifted weights."""
        return int(self._perturbed)

    @property
    def perturbation(self) -> float:
        """Return the norm of the shift in the last step."""
        return float(self._perturbation)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        super().zero_grad(set_to_none)
        for _, _, gradient in self._iterate_gradients():
            vars(gradient).pop(STEPPED_WITH, None)
            vars(gradient)[CLEARED] = gradient._version
        if self._extra is None:
            self._back = None  # a new step begins

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base, and the counts of this optimizer."""
        self._check_not_shifted()
        counts = {"perturbed_steps": self.perturbed_steps, "perturbation": self.perturbation}
        return {**super().state_dict(), COUNTS: counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of a base that was trained alone so far."""
        self._check_not_shifted()
        check_state_dict(state_dict, self.base)
        counts = state_dict.get(COUNTS)
        # A base that was trained alone has no counts, and only its own options.
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
        """Return the model, if every process uses its own gradient in the first pass."""
        return self.model if self.sync == "local" and isinstance(self.model, DistributedDataParallel) else None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tell a GradScaler whether to call ``step`` even after an overflow: yes, to restore the weights.

        It then sets ``found_inf`` and ``grad_scale`` and leaves the gradients unchanged. Lightning reads this in a
        closure before it clips, where the gradients are like those of any optimizer.
        """
        return self.is_shifted and not self._in_closure

    def _finish_step(self) -> Any:
        first, moved, scaler = self._first, self._moved, self._scaler
        self.restore()
        overflow, scale = vars(self).get("found_inf"), vars(self).get("grad_scale")
        # A model may hide that its weights were NaN; the norm of the shift does not.
        if overflow is not None and (float(overflow) or not isfinite(float(moved))):
            return None
        if scale is not None:
            for _, _, gradient in self._iterate_gradients():
                gradient.div_(scale.to(gradient.device))
        if self.keeps_first:
            if scale is None and overflow is not None:
                scale = get_gradient_scale(scaler)  # the second gradient is already unscaled
            self._apply_mix(first, scale)
        self._perturbation = moved
        self._perturbed = self._perturbed + (moved > 0 if isinstance(moved, float) else (moved > 0).long())
        found = self._step_base()
        for _, _, gradient in self._iterate_gradients():
            vars(gradient)[STEPPED_WITH] = True
        return found

    def _iterate_gradients(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        """Yield group (with this optimizer's options), parameter and gradient, for all parameters with a gradient."""
        for group in map(self._get_options, self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p, p.grad

    def _collect_gradients(self) -> tuple[list[dict[str, Any]], list[Tensor], list[Tensor]]:
        found = list(self._iterate_gradients())
        check_dense(gradient for _, _, gradient in found)
        return [group for group, _, _ in found], [p for _, p, _ in found], [gradient for _, _, gradient in found]

    def _apply_mix(self, first: dict[Tensor, Tensor], scale: Tensor | float | None) -> None:
        if self._local_model is not None:
            # Second gradients are averaged over the processes; weights would diverge if first ones were not.
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
                    p.grad.copy_(mixed)  # in place: it may be a view of a communication bucket

    def _check_second_gradient(self, method: str) -> None:
        """Check that there were a first step and a second backward pass."""
        if self._extra is None:
            raise TrainingError(
                f"Expected first_step() and another backward pass first, but got {method}() before first_step(). Try "
                f"loss.backward(), first_step(), loss.backward(), {method}()."
            )
        if next(self._iterate_gradients(), None) is None:
            self.restore()
            raise TrainingError(
                "Expected a gradient at the shifted weights, but got no gradient since first_step(). Try running "
                "forward and backward again before second_step(). The weights are restored."
            )

    def _check_not_shifted(self, restore: bool = False) -> None:
        if self._extra is None:
            return
        hint = "Try calling second_step() or restore() first."
        if restore:
            self.restore()
            hint = (
                "They are restored now. Try calling restore() where you catch errors, then compute the gradient again."
            )
        raise TrainingError(
            "Expected the original weights, but got weights that are still shifted: a first_step() had no "
            f"second_step(), perhaps after an error. {hint}"
        )
