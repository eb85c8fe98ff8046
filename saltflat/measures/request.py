"""Measures as people ask for them: a name, or a name with options, such as ``"rho(axis='row')"``."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saltflat.errors import OptionError, unknown
from saltflat.measures import MEASURES, Measure, options_of


@dataclass(frozen=True)
class Need:
    """A statistic with the options it is wanted with."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        return call(self.name, dict(self.options))


@dataclass(frozen=True)
class Request:
    """A measure with its options.

    Attributes:
        key: how the report names it.
        measure: what is asked for.
        options: of the measure's own function.
        needs: the statistic behind each of its parameters.
    """

    key: str
    measure: Measure
    options: Mapping[str, Any]
    needs: Mapping[str, Need]


def requests(measures: str | Sequence[str] | None) -> list[Request]:
    """What is asked for, each once; every measure there is if None.

    >>> [each.key for each in requests(["kappa", "rho( axis = 'row' )"])]
    ['kappa', "rho(axis='row')"]
    """
    if measures is None:
        return [_request(measure, {}) for measure in MEASURES.values()]
    texts = [measures] if isinstance(measures, str) else measures
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise OptionError(
            f"Got measures={measures!r}. Want a name or a list of names. Do: for instance ['kappa', 'rho']."
        )
    if not texts:
        raise OptionError("Got no measures. Want at least one name. Do: leave measures out for all of them.")
    return list({each.key: each for each in map(_parsed, texts)}.values())


def _parsed(text: str) -> Request:
    name, opened, rest = text.strip().partition("(")
    name = name.strip()
    if name not in MEASURES:
        raise unknown("measure", name, MEASURES)
    return _request(MEASURES[name], _options(text, rest) if opened else {})


def _options(text: str, rest: str) -> dict[str, Any]:
    wrong = OptionError(
        f"Got the measure {text!r}. Want options as name=value in parentheses. Do: for instance \"rho(axis='row')\"."
    )
    try:
        tree = ast.parse(f"f({rest}", mode="eval").body
    except SyntaxError:
        raise wrong from None
    if not isinstance(tree, ast.Call) or tree.args or any(each.arg is None for each in tree.keywords):
        raise wrong
    if len({each.arg for each in tree.keywords}) < len(tree.keywords):
        raise wrong
    found = {}
    for each in tree.keywords:
        # A bare word is text: shells take quotes away.
        if isinstance(each.value, ast.Name):
            found[str(each.arg)] = each.value.id
            continue
        try:
            found[str(each.arg)] = ast.literal_eval(each.value)
        except (ValueError, TypeError, SyntaxError):
            raise wrong from None
    return found


def _request(measure: Measure, given: Mapping[str, Any]) -> Request:
    for name in given:
        if not measure.options:
            raise OptionError(f"Got {name}= of {measure.name}. Want none: it has no options. Do: leave it out.")
        if name not in measure.options:
            raise unknown(f"option of {measure.name}", name, measure.options)
    # Only what differs from the usual is part of the name.
    changed = {name: value for name, value in given.items() if value != measure.options[name]}
    filled = {**measure.options, **given, **measure.fixed}
    needs = {
        name: Need(name, tuple((o, filled[o]) for o, default in options_of(name).items() if filled[o] != default))
        for name in measure.statistics
    }
    own = {name: filled[name] for name in measure.own_options}
    return Request(call(measure.name, changed), measure, own, needs)


def call(name: str, options: Mapping[str, Any]) -> str:
    """
    >>> call("rho", {}), call("rho", {"axis": "row"})
    ('rho', "rho(axis='row')")
    """
    inside = ", ".join(f"{option}={value!r}" for option, value in sorted(options.items()))
    return f"{name}({inside})" if inside else name
