"""Optimizers whose gradient is taken at shifted weights: one pass says where to go, a second what to step with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from saltflat.errors import ModelError, OptionError, TrainingError
from saltflat.randomness import remembered
from saltflat.training.shift import shifted

COUNTS = "two_pass"  # the key of what state_dict holds beside the base's


class TwoPass(Optimizer, ABC):
    """A wrapper around any optimizer, which steps with a gradient taken somewhere else than where the weights are.

    ``param_groups``, ``state`` and ``defaults`` are the base's own: schedulers act on what the base uses. A subclass
    says where to go (:meth:`ascent`) and may say how the two gradients make one (:meth:`mixed`).

    Args:
        model: the module that is trained; with DistributedDataParallel, that.
        base: an optimizer, or a class of optimizers, which is given all parameters that require a gradient.
        sync: under DistributedDataParallel, whose gradient says where to go: that of all processes' examples
            (``"global"``: the same result for any number of processes), or of each process's own (``"local"``:
            m-sharpness as in the paper on SAM, with m the batch size of one process).
        own: options that this optimizer adds to every group, ``rho`` among them.
        options: of the base, if it is a class.

    Attributes:
        base: the optimizer that steps.
        perturbed_steps: how many steps were taken with a gradient from shifted weights. Steps that a GradScaler skipped
            and steps without any gradient to go along are not among them.
        perturbation: how far the weights were moved the last time, as a Euclidean length.
    """

    keeps_first = False  # whether mixed() is to be asked

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer | Callable[..., Optimizer],
        *,
        sync: str,
        own: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        _check(model, sync)
        self.model, self.sync, self.own = model, sync, dict(own)
        self.base = _based(model, base, options)
        self.base.defaults.update(own)
        self._add_own()
        super().__init__(self.base.param_groups, self.base.defaults)
        self._perturbation: Tensor | float = 0.0
        self._perturbed: Tensor | int = 0
        self._begin()

    def _begin(self) -> None:
        """Between two steps."""
        self._extra: ExitStack | None = None  # open while the weights are shifted
        self._back: Callable[[], None] | None = None
        self._is_local = self._is_finishing = self._is_cleared = False
        self._first: dict[Tensor, Tensor] = {}

    # The base's own, always: what torch's constructor would put in their place is not taken.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_made:
            self.base.param_groups = groups

    @property
    def state(self) -> Any:
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_made:
            self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._is_made:
            self.base.defaults = defaults

    @property
    def _is_made(self) -> bool:
        return "_first" in vars(self)

    @abstractmethod
    def ascent(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
        """A direction for every parameter, and the length that stands for one: the weights move by ``rho`` of those."""

    def mixed(self, group: dict[str, Any], first: Tensor, second: Tensor) -> Tensor:
        """The gradient to step with; asked only if ``keeps_first``."""
        return second

    def step(self, closure: Callable[[], Any] | None = None, scaler: GradScaler | None = None) -> Any:
        """Both passes and the base's step; returns what the closure returned at the weights themselves.

        Args:
            closure: clears the gradients, takes the loss of the batch (of all micro-batches), propagates it back and
                returns it. It is called twice, with the same random numbers.
            scaler: the closure's GradScaler, if it has one.
        """
        if closure is None:
            # A GradScaler and the second step come here when the gradient is there.
            if self._is_finishing:
                return self._finish()
            if self._extra is not None:
                return self.second_step(scaler)
            raise TrainingError(
                f"Got step() without a closure. Want two gradients: {type(self).__name__} takes one here and one at "
                "shifted weights. Do: step(closure), or first_step() and second_step() after a backward pass each."
            )
        self._check_not_moved()
        before = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        self._is_cleared = False
        with self.first_pass(), torch.enable_grad():
            loss = closure()
        if not self._is_cleared and any(p.grad is grad for p, grad in before.items()):
            raise TrainingError(
                "Got gradients from before the closure, which it added to. Want all of the step's gradient from the "
                "closure: what was added before cannot be taken again at shifted weights. "
                "Do: call zero_grad() in the closure, and accumulate over micro-batches inside of it."
            )
        self.first_step(scaler)
        try:
            with torch.enable_grad():
                closure()
        except BaseException:
            self.restore()
            raise
        self.second_step(scaler)
        return loss

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Around the first forward and backward pass: the second will see the same random numbers.

        With ``sync="local"`` the gradients stay on their process.
        """
        self._check_not_moved()
        self._back = remembered()
        if self.sync == "local" and isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
        else:
            yield
        self._is_local = True

    @torch.no_grad()
    def first_step(self, scaler: GradScaler | None = None) -> None:
        """Move the weights to where the second gradient is to be taken, and clear the first.

        Args:
            scaler: taken so that both calls look alike; a direction does not depend on the scale of the loss. A
                gradient that overflowed leads to a second one that did, which the scaler will see.
        """
        self._check_not_moved(restore=True)
        if self.sync == "local" and isinstance(self.model, DistributedDataParallel) and not self._is_local:
            raise TrainingError(
                "Got first_step() with sync='local' after a backward pass that averaged over the processes. "
                "Want each process's own gradient. Do: forward and backward inside of `with optimizer.first_pass():`."
            )
        groups, parameters, gradients = self._with_gradients()
        extra, back = ExitStack(), self._back
        if parameters:
            directions, length = self.ascent(parameters, gradients)
            rhos = [group["rho"] for group in groups]
            # Nothing to go along: stay. (NaN compares false, too, and stays NaN in the product.)
            per_length = torch.where(length > 0, 1 / length, 0.0)
            steps = _times(directions, rhos, per_length)
            self._perturbation = norm_of(steps)
            if self.keeps_first:
                self._first = {p: g.clone() for p, g in zip(parameters, gradients, strict=True)}
            extra.enter_context(shifted(self.model, parameters, steps))
        else:
            self._perturbation = 0.0
            extra.enter_context(shifted(self.model, [], []))
        self._extra = extra
        self.zero_grad()
        if back is not None:
            back()

    @torch.no_grad()
    def second_step(self, scaler: GradScaler | None = None) -> Any:
        """Put the weights back and step with the gradient that was taken at the shifted ones.

        Args:
            scaler: unscales, and skips the step if a gradient overflowed.
        """
        if self._extra is None:
            raise TrainingError(
                "Got second_step() before first_step(). Want both, after a backward pass each. "
                "Do: loss.backward(), first_step(), loss.backward(), second_step()."
            )
        first = self._first
        self.restore()
        if first:
            self._mix(first)
        self._is_finishing = True
        try:
            # By way of step(), for whoever watches it: schedulers, hooks.
            return scaler.step(self) if scaler is not None else self.step()
        finally:
            self._is_finishing = False

    def restore(self) -> None:
        """Put the weights back without a step, after an error between the two passes, say; else nothing happens."""
        extra = self._extra
        self._begin()
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
        self._is_cleared = True
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_made:
            self.base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The base's, and what is counted here."""
        self._check_not_moved()
        counts = {"perturbed_steps": self.perturbed_steps, "perturbation": self.perturbation}
        return {**self.base.state_dict(), COUNTS: counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this optimizer, or of a base that was trained alone so far."""
        self._check_not_moved()
        counts = state_dict.get(COUNTS, {})
        own = [{key: group[key] for key in self.own} for group in self.param_groups]
        self.base.load_state_dict({key: value for key, value in state_dict.items() if key != COUNTS})
        self._add_own(own)
        self._perturbed = int(counts.get("perturbed_steps", 0))
        self._perturbation = float(counts.get("perturbation", 0.0))

    def __getstate__(self) -> dict[str, Any]:
        self._check_not_moved()
        kept = ("model", "sync", "own", "base", "_perturbed", "_perturbation")
        return {key: vars(self)[key] for key in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def _add_own(self, own: Iterable[dict[str, Any]] | None = None) -> None:
        """Options of this optimizer for the groups that do not have them."""
        for group, options in zip(self.base.param_groups, own or [self.own] * len(self.base.param_groups), strict=True):
            for key, value in options.items():
                group.setdefault(key, value)

    def _finish(self) -> Any:
        moved = self._perturbation
        self._perturbed = self._perturbed + (moved > 0 if isinstance(moved, float) else (moved > 0).long())
        return self.base.step()

    def _with_gradients(self) -> tuple[list[dict[str, Any]], list[Tensor], list[Tensor]]:
        """Every parameter that has a gradient, with its group."""
        found = [(group, p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(gradient.is_sparse for _, _, gradient in found):
            raise TrainingError(
                "Got sparse gradients. Want dense ones. Do: make the embedding with sparse=False, or train it apart."
            )
        return [group for group, _, _ in found], [p for _, p, _ in found], [gradient for _, _, gradient in found]

    def _mix(self, first: dict[Tensor, Tensor]) -> None:
        if self.sync == "local" and isinstance(self.model, DistributedDataParallel):
            # Second gradients have been averaged over the processes; weights would drift apart if first ones were not.
            for each in first.values():
                dist.all_reduce(each, group=self.model.process_group)
                each.div_(dist.get_world_size(self.model.process_group))
        for group in self.param_groups:
            for p in group["params"]:
                if p in first:
                    second = p.grad if p.grad is not None else torch.zeros_like(p)
                    p.grad = self.mixed(group, first[p], second)

    def _check_not_moved(self, restore: bool = False) -> None:
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


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean length of all of them together, on the first one's device; at least in single precision."""
    squares = [each.float() if each.dtype in (torch.float16, torch.bfloat16) else each for each in tensors]
    norms = torch._foreach_norm(squares)
    length: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0]) for each in norms]))
    return length


def _times(directions: Sequence[Tensor], rhos: Sequence[float], factor: Tensor) -> list[Tensor]:
    if len({each.device for each in directions}) > 1 or len(set(rhos)) > 1:
        return [each * (factor * rho).to(each) for each, rho in zip(directions, rhos, strict=True)]
    return list(torch._foreach_mul(list(directions), factor * rhos[0]))


def _check(model: nn.Module, sync: str) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Got a {type(model).__name__} in place of the model. Want the module that is trained: its BatchNorm "
            "statistics are kept still in the second pass. Do: for instance SAM(model, torch.optim.SGD, lr=0.1), or "
            "SAM(model, optimizer) with an optimizer of your own groups."
        )
    if sync not in ("global", "local"):
        raise OptionError(f"Got sync={sync!r}. Want 'global' or 'local'. Do: leave it out for 'global'.")
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if sync == "local" and several and not isinstance(model, DistributedDataParallel):
        raise OptionError(
            f"Got sync='local' and a {type(model).__name__}. Want the DistributedDataParallel around it, whose "
            "averaging is left out in the first pass. Do: pass that as the model."
        )


def _based(model: nn.Module, base: Optimizer | Callable[..., Optimizer], options: dict[str, Any]) -> Optimizer:
    if isinstance(base, Optimizer):
        if options:
            raise OptionError(
                f"Got {', '.join(options)} for an optimizer that is there already. Want its options in itself. "
                f"Do: pass the class {type(base).__name__}, or leave them out."
            )
        if isinstance(base, TwoPass):
            raise OptionError(
                f"Got a {type(base).__name__} as the base. Want an optimizer that takes one pass. Do: pass its base."
            )
        known = {id(p) for p in model.parameters()}
        strangers = sum(id(p) not in known for group in base.param_groups for p in group["params"])
        if strangers:
            raise OptionError(
                f"Got an optimizer with {strangers} parameters that are not the model's. Want one of this model's. "
                "Do: check that it was made from model.parameters()."
            )
        return base
    if not callable(base):
        raise OptionError(
            f"Got a base of type {type(base).__name__}. Want an optimizer or a class of optimizers. "
            "Do: for instance torch.optim.SGD."
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ModelError(
            "Got a model without parameters that require a gradient. Want at least one to train. "
            "Do: call requires_grad_() on what you train."
        )
    return base(trained, **options)
