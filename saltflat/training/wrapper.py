"""An optimizer around another, which shares its groups, state and defaults; and the model it trains."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from saltflat.engine.session import check_tensors
from saltflat.errors import ModelError, OptionError, TrainingError
from saltflat.training.distributed import check_not_sharded
from saltflat.validation import check_non_negative, is_choice


def check_two_pass_model(model: nn.Module, sync: str) -> None:
    """A module, and one that can say whose gradient is meant."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Expected the module that is trained, but got a {type(model).__name__} in place of the model. Its "
            "BatchNorm statistics are kept still in the second pass. Try SAM(model, torch.optim.SGD, lr=0.1), or "
            "SAM(model, optimizer) with an optimizer of your own groups."
        )
    check_not_sharded(model)
    check_tensors(model, buffers=False)
    if not is_choice(sync, ("global", "local")):
        raise OptionError(f"Expected 'global' or 'local', but got sync={sync!r}. Try leaving it out for 'global'.")
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if sync == "local" and several and not isinstance(model, DistributedDataParallel):
        raise OptionError(
            "Expected the DistributedDataParallel around it, whose averaging is left out in the first pass, but got "
            f"sync='local' and a {type(model).__name__}. Try passing that as the model."
        )


def parse_base_optimizer(
    model: nn.Module, base: Optimizer | Callable[..., Optimizer], options: dict[str, Any]
) -> Optimizer:
    """The optimizer that steps: the given one, or one of the given class for all that the model trains."""
    if isinstance(base, Optimizer):
        if options:
            raise OptionError(
                f"Expected its options in itself, but got {', '.join(options)} for an optimizer that is there "
                f"already. Try passing the class {type(base).__name__}, or leaving them out."
            )
        known = {id(p) for p in model.parameters()}
        strangers = sum(id(p) not in known for group in base.param_groups for p in group["params"])
        if strangers:
            raise OptionError(
                f"Expected one of this model's, but got an optimizer with {strangers} parameters that are not the "
                "model's. Check that it was made from model.parameters()."
            )
        made: Any = base
    else:
        made = _make_base_optimizer(model, base, options)
    check_needs_no_closure(made)
    return made  # type: ignore[no-any-return]


def check_not_ambiguous(
    kind: type[Optimizer], base: Optimizer | Callable[..., Optimizer], made: Optimizer, given: Sequence[str]
) -> None:
    """Refuse an option that both the wrapper and a base that is still to be made could take.

    Args:
        kind: the wrapper.
        base: what the user passed; options for an optimizer that is there already are the wrapper's.
        made: the optimizer made of it.
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
                f"Expected to know whose it is, but got {name}= for {kind.__name__} around {own}, and both have an "
                f"option {name}. Try making the base yourself; {kind.__name__}(model, {own}(model.parameters(), "
                f"{name}=...), {name}=...) gives each its own."
            )


def get_signature_parameters(call: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function or class; none if it does not say."""
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError):
        return {}


def check_needs_no_closure(optimizer: Any) -> None:
    """LBFGS, say, cannot: it takes gradients by itself."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptionError(
            f"Expected an optimizer that steps with the gradient that is there, but got {type(optimizer).__name__}, "
            "which calls a closure as often as it likes. Try torch.optim.SGD."
        )


def _make_base_optimizer(model: nn.Module, base: Callable[..., Optimizer], options: dict[str, Any]) -> Optimizer:
    if not callable(base) or isinstance(base, nn.Module):
        raise OptionError(
            f"Expected an optimizer or a class of optimizers, but got a base of type {type(base).__name__}. Try "
            "torch.optim.SGD."
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ModelError(
            "Expected at least one to train, but got a model without parameters that require a gradient. Try "
            "calling requires_grad_() on what you train."
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


PREFIX = "sam_"  # of options whose name the base uses for one of its own
ADDED = "_saltflat_added"  # an attribute of bases: the keys of their defaults that a wrapper has added


class DefaultFloat(float):
    """The value of an option that the user did not pass."""


class OptimizerWrapper(Optimizer):
    """To schedulers, hooks and checkpoints it is the optimizer, and what they change is what the base uses.

    The groups hold the wrapper's options beside the base's: under their own names, or with ``sam_`` in front where the
    base has an option of the same name (``rho`` of ``Adadelta``). :meth:`get_key` says which.

    Args:
        base: the optimizer that steps.
        own: options that the wrapper adds to every group that does not have them, amounts all of them.
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
            # What an earlier wrapper around the same base has put there is not the user's choice.
            earlier = {key for key in self.own if key in added and group.get(key) == base.defaults[key]}
            group.update({key: value for key, value in self.own.items() if key in earlier or key not in group})
        base.defaults.update(self.own)
        super().__init__(base.param_groups, base.defaults)
        self._reset_pass_state()
        self._record_added_keys()

    def get_key(self, name: str) -> str:
        """The key of one of this optimizer's options in ``param_groups``, ``defaults`` and checkpoints.

        It is ``name``, unless the base has an option of that name: then it is ``"sam_" + name``.

        >>> import torch
        >>> from saltflat.training import SAM
        >>> model = torch.nn.Linear(2, 1)
        >>> SAM(model, torch.optim.SGD).get_key("rho"), SAM(model, torch.optim.Adadelta).get_key("rho")
        ('rho', 'sam_rho')
        """
        return self.keys[name]

    def _get_options(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group as this optimizer sees it: its own options under their own names."""
        # A state that was loaded into the base alone may have left them out.
        return {**group, **{name: group.setdefault(key, self.own[key]) for name, key in self.keys.items()}}

    def _check_group(self, group: dict[str, Any]) -> None:
        check_non_negative(**{key: group[key] for key in self.own if key in group})
        for name, key in self.keys.items():
            if key == name and PREFIX + name in group and PREFIX + name not in self.base.defaults:
                raise OptionError(
                    f"Expected {name!r}, but got a group with {PREFIX + name!r}. {type(self.base).__name__} has no "
                    f"option of that name, so {type(self).__name__}'s needs no prefix. Try renaming it."
                )

    def _record_added_keys(self) -> None:
        """Remember, for a later wrapper, which of the base's defaults are not its own."""
        vars(self.base)[ADDED] = vars(self.base).get(ADDED, frozenset()) | set(self.own)

    def _reset_pass_state(self) -> None:
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
            self._check_group(param_group)
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

    def _migrate_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state from before options of one name were kept apart, with the two of them in their places.

        There the base's own option was overwritten with the wrapper's. It is taken from the base as it is now.
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
                f"{type(self).__name__}. The base keeps the value it was made with: check that it is the one you want.",
                stacklevel=3,
            )
        return {**state_dict, "param_groups": groups}

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers put a step of their own into the optimizer they are made for: not for a copy.
        return {key: value for key, value in vars(self).items() if not key.startswith("_") and key != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"keys": {key: key for key in state["own"]}, **state})  # none in older pickles
        self._reset_pass_state()
        self._record_added_keys()

    @Optimizer.profile_hook_step
    def _step_base(self) -> Any:
        """The base's step, with the hooks that are on this optimizer's."""
        return self.base.step()


def _find_free_key(name: str, taken: set[str]) -> str:
    while name in taken:
        name = PREFIX + name
    return name


def check_state_dict(state_dict: Any, base: Optimizer) -> None:
    """Refuse what is no state of an optimizer with as many groups of as many parameters each."""
    groups: Any = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    is_state = isinstance(groups, Sequence) and isinstance(state_dict.get("state"), Mapping)
    if not is_state or not all(isinstance(each, Mapping) and isinstance(each.get("params"), list) for each in groups):
        raise TrainingError(
            f"Expected the state of an optimizer, but got {_format_state(state_dict)}. "
            "Try what state_dict() gave, of this optimizer or of its base."
        )
    sizes, own = [len(each["params"]) for each in groups], [len(each["params"]) for each in base.param_groups]
    if sizes != own:
        raise TrainingError(
            f"Expected the state of an optimizer with groups of {own} parameters, but got one with {sizes}. "
            "Try the state that was saved for this model and these groups."
        )


def _format_state(state_dict: Any) -> str:
    if isinstance(state_dict, Mapping):
        return f"a dict with the keys {sorted(map(str, state_dict))}"
    return f"a {type(state_dict).__name__}"
