"""Measures as people ask for them: a name, a name with options, such as ``"rho(axis='row')"``, or a preset.

The presets are :data:`saltflat.measures.PRESETS`: ``"quick"``, ``"invariant"`` and ``"all"``. In each of them the
measures that rescaling cannot fool come first.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saltflat.errors import OptionError, SaltflatError, make_unknown_name_error
from saltflat.measures import MEASURES, PRESETS, Measure, get_statistic_options


@dataclass(frozen=True)
class StatisticRequest:
    """A statistic with the options it is wanted with."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        return format_call(self.name, dict(self.options))


@dataclass(frozen=True)
class MeasureRequest:
    """A measure with its options.

    Attributes:
        key: how the report names it.
        measure: what is asked for.
        options: of the measure's own function.
        needs: the statistic behind each of its parameters.
        named: whether it was asked for by its name. What only a preset asks for may be left out, with the reason.
    """

    key: str
    measure: Measure
    options: Mapping[str, Any]
    needs: Mapping[str, StatisticRequest]
    named: bool = True


def parse_measures(measures: str | Sequence[str] | None) -> list[MeasureRequest]:
    """What is asked for, each once; the preset ``"quick"`` if None.

    >>> [each.key for each in parse_measures(["kappa", "rho( axis = 'row' )"])]
    ['kappa', "rho(axis='row')"]
    >>> [each.key for each in parse_measures(["kappa", "quick"])][:3]
    ['kappa', 'fisher_rao_norm', 'minimum_unit_sharpness']
    """
    texts = ["quick"] if measures is None else [measures] if isinstance(measures, str) else measures
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise OptionError(
            f"Got measures={measures!r}. Want a name or a list of names. Do: for instance ['kappa', 'rho']."
        )
    if not texts:
        raise OptionError("Got no measures. Want at least one name. Do: leave measures out for the quick ones.")
    found: dict[str, MeasureRequest] = {}
    for text in texts:
        several = _expand_preset(text.strip()) if text.strip() in PRESETS else [parse_measure(text)]
        for each in several:
            # A measure that is both in a preset and named is named.
            found[each.key] = each if each.named else found.get(each.key, each)
    return list(found.values())


def _expand_preset(name: str) -> list[MeasureRequest]:
    chosen = {
        "quick": [each for each in MEASURES.values() if each.cost == "sweep"],
        "invariant": [each for each in MEASURES.values() if each.invariant_to],
        "all": list(MEASURES.values()),
    }[name]
    first = sorted(chosen, key=lambda each: len(each.invariant_to), reverse=True)
    return [replace(_make_request(measure, {}), named=False) for measure in first]


def parse_measure(text: str) -> MeasureRequest:
    """One measure, by its name and options."""
    name, opened, rest = text.strip().partition("(")
    name = name.strip()
    if name in PRESETS:
        raise OptionError(
            f"Got {text.strip()!r} where one measure is wanted; {name} is {PRESETS[name]}. Want the name of a measure. "
            f"Do: take one of the list that saltflat.list_measures() prints, or plain {name!r} where several can be."
        )
    if name not in MEASURES:
        raise make_unknown_name_error("measure", name, (*MEASURES, *PRESETS))
    return _make_request(MEASURES[name], _parse_options(text, rest) if opened else {})


def get_measure_key(text: str) -> str:
    """The name under which a report keeps what was asked for as ``text``; the text itself if that is no measure.

    >>> [get_measure_key(each) for each in ("rho( axis = 'column' )", "rho(axis=row)", "of another version")]
    ['rho', "rho(axis='row')", 'of another version']
    """
    try:
        return parse_measure(text).key
    except SaltflatError:
        return text


def _parse_options(text: str, rest: str) -> dict[str, Any]:
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


def _make_request(measure: Measure, given: Mapping[str, Any]) -> MeasureRequest:
    for name in given:
        if not measure.options:
            raise OptionError(f"Got {name}= of {measure.name}. Want none: it has no options. Do: leave it out.")
        if name not in measure.options:
            raise make_unknown_name_error(f"option of {measure.name}", name, measure.options)
    # Only what differs from the usual is part of the name.
    changed = {name: value for name, value in given.items() if value != measure.options[name]}
    filled = {**measure.options, **given, **measure.fixed}
    needs = {
        name: StatisticRequest(
            name, tuple((o, filled[o]) for o, default in get_statistic_options(name).items() if filled[o] != default)
        )
        for name in measure.statistics
    }
    own = {name: filled[name] for name in measure.own_options}
    return MeasureRequest(format_call(measure.name, changed), measure, own, needs)


def format_call(name: str, options: Mapping[str, Any]) -> str:
    """
    >>> format_call("rho", {}), format_call("rho", {"axis": "row"})
    ('rho', "rho(axis='row')")
    """
    inside = ", ".join(f"{option}={value!r}" for option, value in sorted(options.items()))
    return f"{name}({inside})" if inside else name
