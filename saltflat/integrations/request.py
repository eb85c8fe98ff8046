"""A request to measure, tried on a few examples before an hour of training has passed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from saltflat.errors import DataError, EmptyDataError, ModelError, OptionError, SaltflatError, UnknownNameError, unknown
from saltflat.measuring import measure

# Given to the monitor under names of their own.
TAKEN = ("model", "data", "loss", "measures")


def tried(model: nn.Module, few: Any, loss: Any, measures: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raises what is wrong with the names, options, model or data; values are of no interest here."""
    known = [name for name in inspect.signature(measure).parameters if name not in TAKEN]
    for name in options:
        if name not in known:
            raise unknown("option", name, known)
    try:
        measure(model, few, loss, measures, **options)
    except (OptionError, UnknownNameError, ModelError):
        raise
    except DataError as error:
        # A few examples may have all their targets ignored; that says nothing of the others.
        if not isinstance(error, EmptyDataError):
            raise
    except SaltflatError:
        # NaN, say: that may pass.
        pass
