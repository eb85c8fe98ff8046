"""An optimizer around another one, sharing its groups, state and defaults; and checks of the model it trains."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from saltflat.engine.session import check_tensors
from saltflat.errors import ModelError, OptionError, TrainingError
from saltflat.training.distributed import check_not_sharded
from saltflat.validation import check_non_negative, is_choice

Sync: TypeAlias = Literal["global", "local"]


def check_two_pass_model(model: nn.Module, sync: Sync) -> None:
    """Check the model, and that it supports ``sync``."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Expected the module that is trained, but got a {type(model).__name__} instead of the model, whose "
            "BatchNorm statistics are frozen in the second pass. Try SAM(model, torch.optim.SGD, lr=0.1), or "
            "SAM(model, optimizer) with an optimizer that has its own groups."
        )
    check_not_sharded(model)
    check_tensors(model, buffers=False)
    if not is_choice(sync, ("global", "local")):
        raise OptionError(f"Expected 'global' or 'local', but got sync={sync!r}. Try leaving it out for 'global'.")
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if sync == "local" and several and not isinstance(model, DistributedDataParallel):
        raise OptionError(
            "Expected a DistributedDataParallel, whose averaging is skipped in the first pass, but got sync='local' "
            f"with a {type(model).__name__}. Try passing the DistributedDataParallel around the model."
        )


def parse_base_optimizer(
    model: nn.Module, base: Optimizer | Callable[..., Optimizer], options: dict[str, Any]
) -> Optimizer:
    """Return the optimizer that steps: the given one, or a new one of the given class for all trained parameters."""
    if isinstance(base, Optimizer):
        if options:
            raise OptionError(
                f"Expected no options for an existing optimizer, but got {', '.join(options)}. Try passing the class "
                f"{type(base).__name__}, or leaving them out."
            )
        known = {id(p) for p in model.parameters()}
        strangers = sum(id(p) not in known for group in base.param_groups for p in group["params"])
        if strangers:
            raise OptionError(
                f"Expected an optimizer of this model's parameters, but got one with {strangers} parameters that are "
                "not the model's. Check that it was created from model.parameters()."
            )
        made: Any = base
    else:
        made = _make_base_optimizer(model, base, options)
    check_needs_no_closure(made)
    return made  # type: ignore[no-any-return]


def check_not_ambiguous(
    kind: type[Optimizer], base: Optimizer | Callable[..., Optimizer], made: Optimizer, given: Sequence[str]
) -> None:
    """Check that no option passed could belong to both the wrapper and the class of the base.

    Args:
        kind: the wrapper.
        base: the base the user passed; options for an existing optimizer belong to the wrapper.
        made: the optimizer created from it.
        given: names of the wrapper's options that the user passed.
    """
    if isinstance(base, Optimizer):
        return
    parameters = get_signature_parameters(base)
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    bound = base.keywords if isinstance(base, partial) else {}
    for name in given:
        if name not in bound and (name in parameters or (takes_all and name in made.defaults)):
            own = type(made).__name__
            raise OptionError(
                f"Expected an option of either {kind.__name__} or {own}, but got {name}=, which both have. Try "
                f"creating the base first: {kind.__name__}(model, {own}(model.parameters(), {name}=...), {name}=...)."
            )


def get_signature_parameters(call: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function or class; none if its signature is unknown."""
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError):
        return {}


def check_needs_no_closure(optimizer: Optimizer) -> None:
    """Check that the optimizer steps without a closure, unlike LBFGS, which computes gradients itself."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptionError(
            f"Expected an optimizer that steps without a closure, but got {type(optimizer).__name__}, which requires "
            "one. Try torch.optim.SGD."
        )


def is_lightning_closure(closure: Callable[[], Any]) -> bool:
    """Return whether this is Lightning's training step, not a closure for its manual optimization."""
    inner: Any = closure
    while isinstance(inner, partial) and inner.args:
        inner = inner.args[-1]
    return type(inner).__module__.startswith(("lightning.", "pytorch_lightning."))


def _make_base_optimizer(model: nn.Module, base: Callable[..., Optimizer], options: dict[str, Any]) -> Optimizer:
    if not callable(base) or isinstance(base, nn.Module):
        raise OptionError(
            f"Expected an optimizer or a class of optimizers, but got a base of type {type(base).__name__}. Try "
            "torch.optim.SGD."
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ModelError(
            "Expected at least one trainable parameter, but got a model in which none requires a gradient. Try calling "
            "requires_grad_() on what you train."
        )
    if isinstance(base, type) and not issubclass(base, Optimizer):
        raise OptionError(
            f"Expected an optimizer or a class of optimizers, but got the class {base.__name__} as the base. Try "
            "torch.optim.SGD."
        )
    made = base(trained, **options)
    if not isinstance(made, Optimizer):
        raise OptionError(
            f"Expected an optimizer or a class of optimizers, but got a base that makes a {type(made).__name__}. Try "
            "torch.optim.SGD."
        )
    return made


PREFIX = "sam_"  # of options whose name the base also uses
ADDED = "_saltflat_added"  # an attribute of bases: the keys of their defaults that a wrapper has added


class DefaultFloat(float):
    """The value of an option that the user did not pass."""


class OptimizerWrapper(Optimizer):
    """Wrap an optimizer: schedulers, hooks and checkpoints act on the base through it.

    The groups contain the options of the wrapper and of the base. If both have an option of the same name (``rho`` of
    ``Adadelta``), that of the wrapper is prefixed with ``sam_``; :meth:`get_key` returns the key.

    Args:
        base: the optimizer that steps.
        own: non-negative options that the wrapper adds to every group without them.
    """

    def __init__(self, base: Optimizer, own: dict[str, Any]) -> None:
        self.base = base
        check_non_negative(**own)
        added = vars(base).get(ADDED, frozenset())
        taken = (set(base.defaults) | set(get_signature_parameters(type(base)))) - added
        self.keys = {name: _find_free_key(name, taken) for name in own}
        self.own = {self.keys[name]: float(value) for name, value in own.items()}
        for group in base.param_groups:
            self._check_group(group)
        for group in base.param_groups:
            # Values from an earlier wrapper around the same base were not chosen by the user.
            earlier = {key for key in self.own if key in added and group.get(key) == base.defaults[key]}
            group.update({key: value for key, value in self.own.items() if key in earlier or key not in group})
        base.defaults.update(self.own)
        super().__init__(base.param_groups, base.defaults)
        self._reset_pass_state()
        self._record_added_keys()

    def get_key(self, name: str) -> str:
        """Return the key of one of this optimizer's options in ``param_groups``, ``defaults`` and checkpoints.

        It is ``name``, or ``"sam_" + name`` if the base has an option of that name.

        >>> import torch
        >>> from saltflat.training import SAM
        >>> model = torch.nn.Linear(2, 1)
        >>> SAM(model, torch.optim.SGD).get_key("rho"), SAM(model, torch.optim.Adadelta).get_key("rho")
        ('rho', 'sam_rho')
        """
        return self.keys[name]

    def _get_options(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group with this optimizer's options under their own names."""
        # A state loaded into the base alone may lack them.
        return {**group, **{name: group.setdefault(key, self.own[key]) for name, key in self.keys.items()}}

    def _check_group(self, group: dict[str, Any]) -> None:
        check_non_negative(**{key: group[key] for key in self.own if key in group})
        for name, key in self.keys.items():
            if key == name and PREFIX + name in group and PREFIX + name not in self.base.defaults:
                raise OptionError(
                    f"Expected {name!r}, but got a group with {PREFIX + name!r}. {type(self.base).__name__} has no "
                    f"option {name!r}, so that of {type(self).__name__} needs no prefix. Try renaming it."
                )

    def _record_added_keys(self) -> None:
        """Record, for a later wrapper, which defaults of the base come from this one."""
        vars(self.base)[ADDED] = vars(self.base).get(ADDED, frozenset()) | set(self.own)

    def _reset_pass_state(self) -> None:
        """Reset what is kept neither between steps nor in copies."""
        self._is_made = True

    # Always those of the base: what torch's constructor assigns is ignored.

    _is_made = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of the base."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_made:
            self.base.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Return the state of the base."""
        return self.base.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        if self._is_made:
            self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the defaults of the base."""
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._is_made:
            self.base.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the base."""
        if self._is_made:
            self._check_group(param_group)
            # The base's defaults, which torch fills in, include this optimizer's options.
            self.base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of a base that was trained alone so far."""
        before = [{key: group[key] for key in self.own} for group in self.param_groups]
        self.base.load_state_dict(state_dict)
        for group, own in zip(self.param_groups, before, strict=True):
            group.update({key: value for key, value in own.items() if key not in group})

    def _migrate_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert a state from before options with the same name were separated.

        In it the base's own option was overwritten with the wrapper's; it is read from the current base instead.
        """
        lost: set[str] = set()
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, now in zip(groups, self.param_groups, strict=False):
            for name, key in self.keys.items():
                if key != name and name in group and key not in group:
                    group[key], group[name] = group[name], now[name]
                    lost.add(name)
        if lost:
            names = ", ".join(sorted(lost))
            warnings.warn(
                f"In this checkpoint the {names} of {type(self.base).__name__} had been overwritten with that of "
                f"{type(self).__name__}. The base keeps its current value: check that it is the right one.",
                stacklevel=3,
            )
        return {**state_dict, "param_groups": groups}

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers replace the step of the optimizer they are created for; a copy must not have theirs.
        return {key: value for key, value in vars(self).items() if not key.startswith("_") and key != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"keys": {key: key for key in state["own"]}, **state})  # missing in older pickles
        self._reset_pass_state()
        self._record_added_keys()

    @Optimizer.profile_hook_step
    def _step_base(self) -> Any:
        """Run the base's step, with the hooks of this optimizer."""
        return self.base.step()


def _find_free_key(name: str, taken: set[str]) -> str:
    while name in taken:
        name = PREFIX + name
    return name


def check_state_dict(state_dict: Mapping[str, Any], base: Optimizer) -> None:
    """Check that this is the state of an optimizer with the same numbers of parameters in its groups."""
    groups: Any = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    is_state = isinstance(groups, Sequence) and isinstance(state_dict.get("state"), Mapping)
    if not is_state or not all(isinstance(each, Mapping) and isinstance(each.get("params"), list) for each in groups):
        raise TrainingError(
            f"Expected the state of an optimizer, but got {_format_state(state_dict)}. "
            "Try the result of state_dict(), of this optimizer or of its base."
        )
    sizes, own = [len(each["params"]) for each in groups], [len(each["params"]) for each in base.param_groups]
    if sizes != own:
        raise TrainingError(
            f"Expected the state of an optimizer with groups of {own} parameters, but got one with {sizes}. "
            "Try the state that was saved for this model and these groups."
        )


def _format_state(state_dict: Mapping[str, Any]) -> str:
    if isinstance(state_dict, Mapping):
        return f"a dict with the keys {sorted(map(str, state_dict))}"
    return f"a {type(state_dict).__name__}"
