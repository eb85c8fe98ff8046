"""Executors by name."""

from __future__ import annotations

import inspect
from typing import Any

from saltflat.errors import OptionError, unknown
from saltflat.studies.executors.executor import Executor
from saltflat.studies.executors.here import Here
from saltflat.studies.executors.processes import Processes
from saltflat.studies.executors.ray import Ray

EXECUTORS: dict[str, type[Executor]] = {each.name: each for each in (Here, Processes, Ray)}


def executor_named(name: str, *, workers: int | None = None, address: str | None = None, **options: Any) -> Executor:
    """The executor of this name: ``here``, ``processes`` or ``ray``.

    Args:
        name: of the executor.
        workers: how many processes (``processes``), or cores of a cluster that is started (``ray``).
        address: of a running Ray cluster.
        options: what else the executor takes.

    Example:
        >>> executor_named("processes", workers=2).name
        'processes'
        >>> executor_named("proceses")
        Traceback (most recent call last):
        saltflat.errors.UnknownNameError: Got the executor 'proceses', which does not exist. Want one of: here,
        processes, ray. Do: use 'processes'.
    """
    if name not in EXECUTORS:
        raise unknown("executor", name, EXECUTORS)
    executor = EXECUTORS[name]
    given = {
        key: value for key, value in {"workers": workers, "address": address, **options}.items() if value is not None
    }
    # An executor without a constructor of its own shows the parameters of none in particular.
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = [name for name, each in inspect.signature(executor).parameters.items() if each.kind in named]
    for key in given:
        if key not in taken:
            raise OptionError(
                f"Got {key}={given[key]!r} for the executor {name!r}. Want {', '.join(taken) or 'no options'}. "
                "Do: leave it out, or choose another executor."
            )
    return executor(**given)
