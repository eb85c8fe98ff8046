"""The arguments of the user's functions: one that builds a network, one that trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from saltflat.datasets.user_code import import_object
from saltflat.errors import StudyError
from saltflat.studies.canonical import to_json_value
from saltflat.studies.networks import find_network

# What a study hands to every train function by itself.
HANDED = ("seed", "data", "device")
STOPS = ("epochs", "target_loss", "target_error", "check_every")


@dataclass(frozen=True)
class ConfigurableFunction:
    """A function that settings are handed to.

    Attributes:
        what: how to call it in a message.
        function: itself.
        names: the settings it takes by name, with their defaults; ``inspect.Parameter.empty`` where it has none.
        anything: whether it takes any other name as well.
        handed: what it takes of that which a study hands over by itself.
    """

    what: str
    function: Callable[..., Any]
    names: dict[str, Any]
    anything: bool
    handed: tuple[str, ...] = ()

    def can_take(self, name: str) -> bool:
        return name in self.names or self.anything

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults that can be written down; they are part of what a run is."""
        found = {}
        for name, value in self.names.items():
            try:
                found[name] = to_json_value(value, self.what)
            except StudyError:
                continue
        return found

    @property
    def required_names(self) -> list[str]:
        return [name for name, value in self.names.items() if value is inspect.Parameter.empty]


def inspect_network(name: str) -> ConfigurableFunction:
    """Of the function that makes the network of this name; it gets the shape of an input and the number of classes."""
    return _inspect_function(f"the network {name!r}", find_network(name).make, behind=2)


def inspect_train_function(spec: str) -> ConfigurableFunction:
    """Of the user's own train function."""
    function = import_object(spec, "train function")
    if not callable(function):
        raise StudyError(
            f"Expected a function, but got {spec!r} as train, a {type(function).__name__}. Try naming the function "
            "that trains."
        )
    return _inspect_function(f"the train function {spec!r}", function, handed=HANDED)


def _inspect_function(
    what: str, function: Callable[..., Any], behind: int = 0, handed: tuple[str, ...] = ()
) -> ConfigurableFunction:
    kinds = inspect.Parameter
    try:
        parameters = list(inspect.signature(function).parameters.values())[behind:]
    except ValueError as problem:
        raise StudyError(
            f"Expected {what} to say which arguments it takes, but got {function!r}, which does not ({problem}). "
            "Try a function of your own that calls it."
        ) from problem
    closed = [each.name for each in parameters if each.kind is kinds.POSITIONAL_ONLY]
    if closed:
        raise StudyError(
            f"Expected arguments that it does, but got {what}, which does not take {closed[0]!r} by its name. Try "
            "taking the / out of its signature."
        )
    anything = any(each.kind is kinds.VAR_KEYWORD for each in parameters)
    names = {
        each.name: each.default for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    taken = tuple(name for name in handed if name in names or anything)
    own = {name: default for name, default in names.items() if name not in handed}
    return ConfigurableFunction(what, function, own, anything, taken)


def get_function_path(given: Any, what: str) -> Any:
    """A function that was handed over, by the name under which it can be found again; texts stay."""
    if given is None or isinstance(given, str) or not callable(given):
        return given
    name, module = getattr(given, "__qualname__", ""), getattr(given, "__module__", "")
    if "<" in name or not name or not module:
        raise StudyError(
            f"Expected a function at the top of a module, which every process can find, but got {given!r} as {what}. "
            "Try moving it there."
        )
    return f"{module}:{name}"
