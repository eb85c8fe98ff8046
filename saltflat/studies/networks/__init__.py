"""Built-in networks: one file per family, found by name.

    @register_network("mlp", "linear layers with ReLU between them")
    def mlp(shape: tuple[int, ...], classes: int, *, width: int = 64, depth: int = 2) -> nn.Module: ...

A study may vary the keyword arguments. A study names its own network as ``package.module:function``; the
function takes the shape of one input and the number of classes first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeAlias

from torch import nn

from saltflat.datasets.user_code import import_object
from saltflat.errors import ModelError, OptionError, make_unknown_name_error

Make: TypeAlias = Callable[..., nn.Module]
NETWORKS: dict[str, NetworkFactory] = {}


@dataclass(frozen=True)
class NetworkFactory:
    """A function that makes networks.

    Attributes:
        name: its name in a recipe.
        meaning: a short description.
        make: takes the shape of one input, the number of classes and the network's own arguments by name.
    """

    name: str
    meaning: str
    make: Make

    @property
    def arguments(self) -> dict[str, Any]:
        """The network's own arguments, with their defaults; ``inspect.Parameter.empty`` for none."""
        parameters = list(inspect.signature(self.make).parameters.values())[2:]
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return {each.name: each.default for each in parameters if each.kind not in kinds}

    def check_architecture(self, architecture: Mapping[str, Any]) -> None:
        """Check that the network takes these arguments."""
        kinds = {each.kind for each in inspect.signature(self.make).parameters.values()}
        for name in architecture:
            if name in self.arguments or inspect.Parameter.VAR_KEYWORD in kinds:
                continue
            if not self.arguments:
                raise OptionError(
                    f"Expected no arguments, but got {name!r} for the network {self.name!r}, which takes no arguments. "
                    f"Try leaving {name!r} out, or correcting its spelling if it is a setting of training."
                )
            raise make_unknown_name_error(f"argument of the network {self.name!r}", name, self.arguments)

    def build_model(self, shape: tuple[int, ...], classes: int, architecture: Mapping[str, Any]) -> nn.Module:
        """Return a network for inputs of this shape."""
        self.check_architecture(architecture)
        try:
            model = self.make(shape, classes, **architecture)
        except TypeError as error:
            raise OptionError(
                f"Expected values as in {self.arguments}, but got {dict(architecture)} for the network "
                f"{self.name!r}: {error}. Try other values."
            ) from error
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"Expected a torch.nn.Module, but got a {type(model).__name__} from {self.name!r}. Try returning the "
                "network from the function."
            )
        return model


def register_network(name: str, meaning: str) -> Callable[[Make], Make]:
    """Register a function that makes networks."""

    def register(make: Make) -> Make:
        NETWORKS[name] = NetworkFactory(name, meaning, make)
        return make

    return register


def is_user_function(name: str) -> bool:
    """Return whether a network's name is the path of a function, not that of a built-in network."""
    return ":" in name


def find_network(name: str) -> NetworkFactory:
    """Return the network of this name, or of the user's function ``package.module:function``."""
    if is_user_function(name):
        make = import_object(name, "network")
        if not callable(make):
            raise OptionError(
                f"Expected a function that makes a network, but got {name!r}, a {type(make).__name__}. Try the name of "
                "a function."
            )
        return NetworkFactory(name, "the user's own", make)
    if name not in NETWORKS:
        raise make_unknown_name_error("network", name, NETWORKS)
    return NETWORKS[name]


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
