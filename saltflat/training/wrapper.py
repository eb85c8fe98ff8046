"""An optimizer around another, which shares its groups, state and defaults."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from saltflat.amounts import check_amount


class Wrapper(Optimizer):
    """To schedulers, hooks and checkpoints it is the optimizer, and what they change is what the base uses.

    Args:
        base: the optimizer that steps.
        own: options that the wrapper adds to every group that does not have them, amounts all of them.
    """

    def __init__(self, base: Optimizer, own: dict[str, Any]) -> None:
        self.base, self.own = base, dict(own)
        check_amount(**own)
        for group in base.param_groups:
            _check(group, own)
        for group in base.param_groups:
            # What an earlier wrapper around the same base has put there is not the user's choice.
            earlier = {key for key in own if key in base.defaults and group.get(key) == base.defaults[key]}
            group.update({key: value for key, value in own.items() if key in earlier or key not in group})
        base.defaults.update(own)
        super().__init__(base.param_groups, base.defaults)
        self._begin()

    def _begin(self) -> None:
        """What is not kept from one step to the next, nor in copies."""
        self._is_made = True

    # The base's own, always: what torch's constructor would put in their place is not taken.

    _is_made = False

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_made:
            _check(param_group, self.own)
            # The base's defaults, which torch fills in, have this optimizer's options.
            self.base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this optimizer, or of a base that was trained alone so far."""
        before = [{key: group[key] for key in self.own} for group in self.param_groups]
        self.base.load_state_dict(state_dict)
        for group, own in zip(self.param_groups, before, strict=True):
            group.update({key: value for key, value in own.items() if key not in group})

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers put a step of their own into the optimizer they are made for: not for a copy.
        return {key: value for key, value in vars(self).items() if not key.startswith("_") and key != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    @Optimizer.profile_hook_step
    def _step_base(self) -> Any:
        """The base's step, with the hooks that are on this optimizer's."""
        return self.base.step()


def _check(group: dict[str, Any], own: dict[str, Any]) -> None:
    check_amount(**{key: group[key] for key in own if key in group})
