"""The runs of a study as few characters as can be, for the script that draws them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saltflat.report.html_page import format_setting, round_digits

if TYPE_CHECKING:
    from saltflat.studies.row import Row

# Beyond these a legend is no longer read, and settings become a scale.
FEW = 7


def find_varied_settings(rows: Iterable[Row], axes: Sequence[str]) -> list[str]:
    """The settings that differ between runs: the axes first, then others, the seed last."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.config.items():
            seen.setdefault(name, set()).add(_encode_value(value))
    found = [name for name, values in seen.items() if len(values) > 1]
    places = {name: index for index, name in enumerate(axes)}
    return sorted(found, key=lambda name: (name == "seed", places.get(name, len(places))))


def find_constant_settings(rows: Sequence[Row], axes: Sequence[str]) -> dict[str, Any]:
    """The settings that all runs share."""
    differing = set(find_varied_settings(rows, axes))
    return {name: value for row in rows for name, value in row.config.items() if name not in differing}


def find_levels(rows: Iterable[Row], name: str) -> list[Any]:
    """The values that a setting takes, each once, smallest first where they have an order."""
    found = {_encode_value(each): each for row in rows for each in [row.config.get(name)]}
    values = list(found.values())
    try:
        return sorted(values)
    except TypeError:  # some are texts, some numbers, some not set
        return sorted(values, key=lambda value: (value is not None, str(value)))


def build_scatter_data(
    rows: Sequence[Row],
    axes: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    controls: Iterable[str] = (),
    first: str = "",
) -> dict[str, Any]:
    """What is drawn: by name, a number per run; settings as places in their lists of values.

    Args:
        rows: the runs, in the order of all lists.
        axes: the settings that the grid varies.
        values: by measure or control, a number per run; None where there is none.
        controls: which of them are controls.
        first: which of them is drawn first.
    """
    settings = []
    for name in find_varied_settings(rows, axes):
        known = find_levels(rows, name)
        places = {_encode_value(each): place for place, each in enumerate(known)}
        settings.append(
            {
                "name": name,
                "levels": [format_setting(each) for each in known],
                "numbers": _convert_numbers(known) if len(known) > FEW else None,
                "of": [places[_encode_value(row.config.get(name))] for row in rows],
            }
        )
    return {
        "controls": list(controls),
        "first": list(values).index(first) if first in values else 0,
        "keys": [row.key[:12] for row in rows],
        "status": [row.status for row in rows],
        "settings": settings,
        "gaps": {gap: [round_digits(row.gap.get(gap)) for row in rows] for gap in ("error", "loss")},
        "outcomes": {
            name: [None if row.outcome is None else round_digits(getattr(row.outcome, name), 4) for row in rows]
            for name in ("train_loss", "train_error", "test_loss", "test_error", "epochs")
        },
        "measures": [
            {"name": name, "values": [round_digits(each) for each in numbers], "errors": _collect_errors(rows, name)}
            for name, numbers in values.items()
        ],
    }


def collect_values(
    rows: Sequence[Row], controls: Mapping[str, Sequence[float | None]]
) -> dict[str, list[float | None]]:
    """By measure, then by control, a number per run; a control that is called as a measure is gets its own name."""
    names = dict.fromkeys(name for row in rows for name in row.readings)
    found: dict[str, list[float | None]] = {
        name: [row.readings[name].value if name in row.readings else None for row in rows] for name in names
    }
    own = {f"{name} (control)" if name in found else name: list(each) for name, each in controls.items()}
    return {**found, **own}


def _collect_errors(rows: Sequence[Row], name: str) -> list[float | int | None] | None:
    errors = [round_digits(row.readings[name].stderr, 3) if name in row.readings else None for row in rows]
    return errors if any(errors) else None


def _convert_numbers(values: Sequence[Any]) -> list[float] | None:
    """The values as numbers, where all of them are."""
    numeric = all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
    return [float(each) for each in values] if numeric else None


def _encode_value(value: Any) -> str:
    """What tells values apart that Python calls equal: 1, 1.0 and True."""
    return json.dumps(value, sort_keys=True, default=str)
