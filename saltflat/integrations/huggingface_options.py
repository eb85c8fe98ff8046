"""What can be asked of FlatTraining, checked before anything is trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from saltflat.amounts import check_non_negative
from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.integrations.huggingface_callback import FlatnessCallback
from saltflat.training.asam import ASAM
from saltflat.training.fisher_penalty import FisherPenalty
from saltflat.training.gradient_norm import GradientNormPenalty
from saltflat.training.objective import Objective
from saltflat.training.penalty import Penalty, penalty
from saltflat.training.sam import SAM
from saltflat.training.two_pass import TwoPass

KINDS: dict[str, Callable[..., TwoPass]] = {"sam": SAM, "asam": ASAM, "gradient_norm": GradientNormPenalty}


def parse_sam_option(given: Mapping[str, Any] | bool | None) -> Callable[[nn.Module, Optimizer], TwoPass] | None:
    """How to wrap the Trainer's optimizer; None if it is to be left alone."""
    options = _parse_option_dict("sam", given)
    if options is None:
        return None
    kind = options.pop("kind", "sam")
    if kind not in KINDS:
        raise make_unknown_name_error("kind of sam", kind, KINDS)
    _check_option_names("sam", options, _list_options(KINDS[kind]), also=("kind",))
    # On a model of one weight: wrong values are found now, and not after the data are read.
    KINDS[kind](nn.Linear(1, 1), torch.optim.SGD, lr=0.1, **{k: v for k, v in options.items() if k != "sync"})
    return lambda model, base: KINDS[kind](model, base, **options)


def parse_fisher_option(
    given: Mapping[str, Any] | bool | None,
) -> Callable[[nn.Module, Objective], FisherPenalty] | None:
    """How to make the penalty for an objective; None if there is to be none."""
    options = _parse_option_dict("fisher", given)
    if options is None:
        return None
    if "clip" in options:
        raise OptionError(
            "Got clip= for the Fisher penalty of a Trainer. Want the Trainer to clip. "
            "Do: TrainingArguments(max_grad_norm=...)."
        )
    _check_option_names(
        "fisher", options, [name for name in _list_options(FisherPenalty) if name not in ("clip", "objective")]
    )
    FisherPenalty(nn.Linear(1, 1), **options)
    return lambda model, objective: FisherPenalty(model, objective=objective, **options)


def parse_penalties(given: Mapping[str, Any] | None) -> list[tuple[Penalty, float]]:
    """Terms for the loss, each with its strength."""
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise OptionError(
            f"Got penalties={given!r}. Want names of measures with strengths. Do: for instance {{'fisher_trace': 0.1}}."
        )
    made = []
    for name, value in given.items():
        options = dict(value) if isinstance(value, Mapping) else {"strength": value}
        if "strength" not in options:
            raise OptionError(f"Got the penalty {name!r} without a strength. Want one. Do: add 'strength': 0.1, say.")
        strength = options.pop("strength")
        check_non_negative(strength=strength)
        made.append((penalty(name, **options), float(strength)))
    return made


def parse_flatness_option(given: Mapping[str, Any] | FlatnessCallback | None) -> FlatnessCallback | None:
    """The callback that watches; None if there is to be none."""
    if given is None or given is False or isinstance(given, FlatnessCallback):
        return given or None
    if not isinstance(given, Mapping) or "probe" not in given:
        raise OptionError(
            f"Got flatness={given if isinstance(given, bool) else type(given).__name__} without a probe. "
            "Want the options of FlatnessCallback, and among them the examples to measure on. "
            "Do: for instance flatness={'probe': batch, 'every': '1 epoch'}."
        )
    return FlatnessCallback(**given)


def _parse_option_dict(name: str, given: Mapping[str, Any] | bool | None) -> dict[str, Any] | None:
    if given is None or given is False:
        return None
    if given is True:
        return {}
    if not isinstance(given, Mapping):
        raise OptionError(f"Got {name}={given!r}. Want a dict of options, or True for the usual ones. Do: pass one.")
    return dict(given)


def _list_options(made: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(made).parameters.values()
    named = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    return [name for name in named if name not in ("model", "base", "loss")]


def _check_option_names(of: str, options: Mapping[str, Any], known: list[str], also: tuple[str, ...] = ()) -> None:
    for name in options:
        if name not in known:
            raise make_unknown_name_error(f"option of {of}", name, [*known, *also])
