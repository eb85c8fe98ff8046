"""Inspect the arguments of the user's functions that build or train a network."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from saltflat.datasets.user_code import import_object
from saltflat.errors import StudyError
from saltflat.studies.canonical import to_json_value
from saltflat.studies.networks import find_network

T = TypeVar("T")
# Arguments that a study passes to every train function.
HANDED = ("seed", "data", "device")
STOPS = ("epochs", "target_loss", "target_error", "check_every")


@dataclass(frozen=True)
class ConfigurableFunction:
    """A function that takes settings as arguments.

    Attributes:
        what: its name in messages.
        function: the function.
        names: the arguments it takes by name, with their defaults; ``inspect.Parameter.empty`` for none.
        anything: whether it takes any other name as well.
        handed: the arguments it takes among those that a study passes itself.
    """

    what: str
    function: Callable[..., Any]
    names: dict[str, Any]
    anything: bool
    handed: tuple[str, ...] = ()

    def can_take(self, name: str) -> bool:
        """Return whether it takes an argument of this name."""
        return name in self.names or self.anything

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults that JSON can hold; they are part of a run's identity."""
        found = {}
        for name, value in self.names.items():
            try:
                found[name] = to_json_value(value, self.what)
            except StudyError:
                continue
        return found

    @property
    def required_names(self) -> list[str]:
        """The arguments without a default."""
        return [name for name, value in self.names.items() if value is inspect.Parameter.empty]


def inspect_network(name: str) -> ConfigurableFunction:
    """Inspect the function that makes this network, after its first arguments, the input shape and class count."""
    return _inspect_function(f"the network {name!r}", find_network(name).make, behind=2)


def inspect_train_function(spec: str) -> ConfigurableFunction:
    """Inspect the user's train function."""
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
            f"Expected {what} to have a signature, but got {function!r}, which has none ({problem}). "
            "Try a function of your own that calls it."
        ) from problem
    closed = [each.name for each in parameters if each.kind is kinds.POSITIONAL_ONLY]
    if closed:
        raise StudyError(
            f"Expected arguments that can be passed by name, but got {what}, which does not take {closed[0]!r} by its "
            "name. Try removing the / from its signature."
        )
    anything = any(each.kind is kinds.VAR_KEYWORD for each in parameters)
    names = {
        each.name: each.default for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    taken = tuple(name for name in handed if name in names or anything)
    own = {name: default for name, default in names.items() if name not in handed}
    return ConfigurableFunction(what, function, own, anything, taken)


def get_function_path(given: T, what: str) -> T | str:
    """Return the import path of a function; other values stay as they are."""
    if given is None or isinstance(given, str) or not callable(given):
        return given
    name, module = getattr(given, "__qualname__", ""), getattr(given, "__module__", "")
    if "<" in name or not name or not module:
        raise StudyError(
            f"Expected a function at the top of a module, which every process can find, but got {given!r} as {what}. "
            "Try moving it there."
        )
    return f"{module}:{name}"
