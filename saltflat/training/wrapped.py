"""What an optimizer of two passes wraps: a model, and the optimizer that steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from saltflat.amounts import is_choice
from saltflat.errors import ModelError, OptionError
from saltflat.loan import check_tensors
from saltflat.training.sharded import check_not_sharded


def check_two_pass_model(model: nn.Module, sync: str) -> None:
    """A module, and one that can say whose gradient is meant."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Got a {type(model).__name__} in place of the model. Want the module that is trained: its BatchNorm "
            "statistics are kept still in the second pass. Do: for instance SAM(model, torch.optim.SGD, lr=0.1), or "
            "SAM(model, optimizer) with an optimizer of your own groups."
        )
    check_not_sharded(model)
    check_tensors(model, buffers=False)
    if not is_choice(sync, ("global", "local")):
        raise OptionError(f"Got sync={sync!r}. Want 'global' or 'local'. Do: leave it out for 'global'.")
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if sync == "local" and several and not isinstance(model, DistributedDataParallel):
        raise OptionError(
            f"Got sync='local' and a {type(model).__name__}. Want the DistributedDataParallel around it, whose "
            "averaging is left out in the first pass. Do: pass that as the model."
        )


def parse_base_optimizer(
    model: nn.Module, base: Optimizer | Callable[..., Optimizer], options: dict[str, Any]
) -> Optimizer:
    """The optimizer that steps: the given one, or one of the given class for all that the model trains."""
    if isinstance(base, Optimizer):
        if options:
            raise OptionError(
                f"Got {', '.join(options)} for an optimizer that is there already. Want its options in itself. "
                f"Do: pass the class {type(base).__name__}, or leave them out."
            )
        known = {id(p) for p in model.parameters()}
        strangers = sum(id(p) not in known for group in base.param_groups for p in group["params"])
        if strangers:
            raise OptionError(
                f"Got an optimizer with {strangers} parameters that are not the model's. Want one of this model's. "
                "Do: check that it was made from model.parameters()."
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
                f"Got {name}= for {kind.__name__} around {own}, and both have an option {name}. Want to know whose it "
                f"is. Do: make the base yourself; {kind.__name__}(model, {own}(model.parameters(), {name}=...), "
                f"{name}=...) gives each its own."
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
            f"Got {type(optimizer).__name__}, which calls a closure as often as it likes. Want an optimizer that steps "
            "with the gradient that is there. Do: for instance torch.optim.SGD."
        )


def _make_base_optimizer(model: nn.Module, base: Callable[..., Optimizer], options: dict[str, Any]) -> Optimizer:
    if not callable(base) or isinstance(base, nn.Module):
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
    if isinstance(base, type) and not issubclass(base, Optimizer):
        raise OptionError(
            f"Got the class {base.__name__} as the base. Want an optimizer or a class of optimizers. "
            "Do: for instance torch.optim.SGD."
        )
    made = base(trained, **options)
    if not isinstance(made, Optimizer):
        raise OptionError(
            f"Got a base that makes a {type(made).__name__}. Want an optimizer or a class of optimizers. "
            "Do: for instance torch.optim.SGD."
        )
    return made
