"""A bound as a result: what it says, what is saved of it, and what is drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import LAPTOP, PHONE, Tab, browsing, chromium
from html_cases import HOSTILE
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from typer.testing import CliRunner

from saltflat.bounds import Assumption, Bound
from saltflat.cli import app
from saltflat.errors import ReportError
from saltflat.render.bound import find_additive_terms, plot_bounds

INDEPENDENT = Assumption("The examples are independent draws from one distribution.")
PRIOR = Assumption("The prior was fixed before the examples were seen.", True, "It is drawn from seed 0.")
BROKEN = Assumption("The loss lies in [0, 1].", False, "One loss is 1.5.")


def make_bound(**changes: Any) -> Bound:
    given: dict[str, Any] = {
        "name": "Maurer's bound",
        "value": 0.02304,
        "quantity": "a network drawn from the posterior",
        "loss": "error",
        "delta": 0.05,
        "terms": {"empirical risk": 0.0123, "divergence": 210.4},
        "assumptions": (INDEPENDENT, PRIOR),
        "chance": 0.9,
        "reference": "tsuzuku2020normalized",
        "formula": r"At most :math:`\sqrt{m}`, as ``bound_maurer`` has it.",
        "kind": "valid",
        "examples": 50000,
        "details": {"by layer": {"0.weight": 3.2}},
        "notes": ("The prior has 97 scales.",),
        "model": "MLP with 1,290 parameters",
        "settings": {"draws": 10},
        "versions": {"saltflat": "0.2.0"},
        "seconds": 12.345,
    }
    return Bound(**{**given, **changes})


def first_line(bound: Bound) -> str:
    return " ".join(str(bound).split("\n\n")[0].split())


VACUOUS = (
    "With probability at least 95 %, {} at most 100 % of new examples; the bound is V. This is vacuous: "
    "guessing errs on 90 %."
)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "With probability at least 95 %, {} at most 2.31 % of new examples."),
        (
            {"value": 0.9, "chance": 0.91, "delta": 1e-6},
            "With probability at least 99.9999 %, {} at most 90 % of new examples.",
        ),
        (
            {"value": 0.0001234, "delta": 1 / 3},
            "With probability at least 66.66 %, {} at most 0.0124 % of new examples.",
        ),
        ({"kind": "heuristic"}, "Heuristic, not a guarantee: {} at most 2.31 % of new examples."),
        (
            {"assumptions": (PRIOR, BROKEN)},
            "Not a guarantee, since an assumption is not met: {} at most 2.31 % of new examples.",
        ),
        (
            {"value": 0.95},
            "With probability at least 95 %, {} at most 95 % of new examples. This is vacuous: guessing errs on 90 %.",
        ),
        ({"value": 12.3}, VACUOUS.replace("V", "12.3")),
        ({"value": math.inf}, VACUOUS.replace("V", "inf")),
        (
            {"value": math.nan},
            "The bound for a network drawn from the posterior is undefined. This is vacuous: guessing errs on 90 %.",
        ),
        (
            {"loss": "clipped_cross_entropy", "value": 0.0312345, "chance": 0.2},
            "With probability at least 95 %, a network drawn from the posterior has a clipped cross-entropy on new "
            "data of at most 0.03124.",
        ),
    ],
)
def test_the_first_line_says_what_is_bounded_and_how_surely(changes: dict[str, Any], says: str) -> None:
    expected = says.format("a network drawn from the posterior errs on")
    assert first_line(make_bound(**changes)) == expected


@pytest.mark.parametrize(
    ("value", "delta"), [(0.1 + 0.2, 0.1), (0.123456, 0.0123456), (1e-5, 1e-8), (0.999999, 0.9), (0.07, 0.29)]
)
def test_what_is_said_is_never_more_than_what_holds(value: float, delta: float) -> None:
    words = first_line(make_bound(value=value, delta=delta)).split(" %")
    assert float(words[0].split()[-1]) <= 100 * (1 - delta) + 1e-9
    assert value <= float(words[1].split()[-1]) / 100 <= value * 1.01


def test_text_and_html_hold_terms_assumptions_notes_source_and_facts() -> None:
    bound = make_bound(assumptions=(INDEPENDENT, PRIOR, BROKEN))
    for text in (" ".join(str(bound).split()), bound._repr_html_()):
        for part in (
            "empirical risk",
            "210.4",
            "Assumption, cannot be checked: The examples are independent draws from one distribution.",
            "Assumption, met: The prior was fixed before the examples were seen. It is drawn from seed 0.",
            "Assumption, not met: The loss lies in [0, 1]. One loss is 1.5.",
            "Note: The prior has 97 scales.",
            "Formula: At most sqrt(m), as bound_maurer has it.",
            "Tsuzuku, Sato, Sugiyama.",
            "50000 examples | delta 0.05 | loss error | 12.3 s",
        ):
            assert part in text
    assert repr(bound) == "<Bound Maurer's bound: 0.02304; print() shows it>"
    assert f"{bound:.3f}" == "0.023"
    assert f"{bound}" == str(bound)
    assert float(bound) == 0.02304


def test_a_bound_without_optional_parts_prints_no_empty_table() -> None:
    text = str(make_bound(terms={}, assumptions=(), notes=(), formula="", model="", reference="my own note"))
    assert "term" not in text.split("\n\n")[0]
    assert "Formula" not in text
    assert "Reference: my own note" in text


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    bound = make_bound(
        **dict.fromkeys(("name", "quantity", "reference", "formula", "model"), HOSTILE),
        terms={HOSTILE: 1.0},
        assumptions=(Assumption(HOSTILE, True, HOSTILE),),
        notes=(HOSTILE, "\x1b[31m"),
        settings={HOSTILE: HOSTILE},
    )
    assert "\x1b" not in str(bound)
    for page in (bound._repr_html_(), bound.to_html(tmp_path / "page.html").read_text(encoding="utf-8")):
        assert "<img src=x" not in page
        assert "&lt;img src=x" in page


@pytest.mark.parametrize(
    ("value", "chance", "vacuous"),
    [(0.89, 0.9, False), (0.9, 0.9, True), (1.5, 0.9, True), (math.nan, 0.9, True), (0.1, math.nan, True)],
)
def test_a_bound_is_vacuous_unless_it_is_below_guessing(value: float, chance: float, vacuous: bool) -> None:
    assert make_bound(value=value, chance=chance).is_vacuous is vacuous


def test_a_bound_is_valid_unless_heuristic_or_violated() -> None:
    assert make_bound().is_valid
    assert make_bound(assumptions=()).is_valid
    assert not make_bound(kind="heuristic").is_valid
    assert not make_bound(assumptions=(PRIOR, BROKEN)).is_valid


@pytest.mark.parametrize("value", [0.02304, 12.3, math.nan, math.inf])
def test_a_bound_is_saved_and_loaded(value: float, tmp_path: Path) -> None:
    bound = make_bound(value=value, terms={"risk": value, "$odd": -math.inf}, details={"none": None, "list": [1, 2.5]})
    path = bound.save(tmp_path / "bound.json")
    found = Bound.load(path)
    assert found == bound
    assert found.assumptions == (INDEPENDENT, PRIOR)
    assert found.terms.keys() == bound.terms.keys()
    assert Bound.from_dict(bound.to_dict()) == bound
    assert bound != replace(bound, delta=0.01)
    json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


@pytest.mark.parametrize(
    ("place", "wrong", "says"),
    [
        (("name",), 3, "the name is no text"),
        (("quantity",), None, "the quantity is no text"),
        (("loss",), 0.5, "the loss is no text"),
        (("reference",), [], "the reference is no text"),
        (("formula",), {}, "the formula is no text"),
        (("value",), "high", "could not convert"),
        (("delta",), 1.0, "delta is 1.0"),
        (("delta",), {"$float": "nan"}, "delta is nan"),
        (("kind",), "proven", "kind of bound"),
        (("terms",), [1.0], "items"),
        (("terms", "divergence"), "x", "could not convert"),
        (("assumptions", 0, "met"), "yes", "whether an assumption is met"),
        (("assumptions", 0, "met"), 1, "whether an assumption is met"),
        (("assumptions", 0, "text"), None, "an assumption"),
        (("assumptions", 0, "why"), "", "unexpected keyword"),
        (("assumptions",), None, "not iterable"),
        (("settings",), [1], "the settings is no mapping"),
        (("details",), "x", "the details is no mapping"),
        (("notes",), [3], "another kind"),
        (("examples",), 2.5, "another kind"),
        (("unknown",), 1, "unexpected keyword"),
    ],
)
def test_a_damaged_file_is_refused_with_one_clear_error(
    place: tuple[Any, ...], wrong: Any, says: str, tmp_path: Path
) -> None:
    content = json.loads(json.dumps(make_bound().to_dict()))
    holder = content
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = wrong
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ReportError, match=rf"wrong\.json.*a bound that cannot be understood.*{says}"):
        Bound.load(path)


def test_every_entry_of_a_file_is_needed(tmp_path: Path) -> None:
    whole = make_bound().to_dict()
    for name in set(whole) - {"details", "notes", "model", "settings", "versions", "seconds", "created"}:
        with pytest.raises(ReportError):
            Bound.from_dict({key: value for key, value in whole.items() if key != name})
    with pytest.raises(ReportError, match="not a bound but a spectrum"):
        Bound.from_dict({**whole, "schema": "saltflat.spectrum/1"})
    (tmp_path / "cut.json").write_text(json.dumps(whole)[:-20])
    with pytest.raises(ReportError, match="broken or cut short"):
        Bound.load(tmp_path / "cut.json")


def test_terms_that_add_up_to_the_bound_are_found() -> None:
    terms = {
        "error": 0.17,
        "noise": 0.08,
        "random": 0.25,
        "examples": 1000.0,
        "zero": 0.0,
        "weights": 0.06,
        "strength": 0.04,
    }
    bound = make_bound(terms=terms, value=0.35, details={"parts": ["random", "zero", "weights", "strength"]})
    assert find_additive_terms(bound) == {"random": 0.25, "weights": 0.06, "strength": 0.04}
    assert find_additive_terms(replace(bound, details={})) == {}
    assert find_additive_terms(replace(bound, value=0.36)) == {}
    assert find_additive_terms(replace(bound, value=math.inf)) == {}
    with pytest.raises(ReportError, match="its terms sum to"):
        Bound.from_dict({**bound.to_dict(), "value": 0.3})


def bar_widths(axis: Axes) -> list[float]:
    return [patch.get_width() for patch in axis.patches if isinstance(patch, Rectangle)]


def test_parts_of_a_bar_are_drawn_where_their_lengths_add_up() -> None:
    named = {"parts": ["risk", "complexity"]}
    parts = make_bound(terms={"risk": 0.25, "complexity": 0.1}, value=0.35, details=named)
    assert bar_widths(plot_bounds([parts]).axes[0]) == pytest.approx([0.25, 0.1])
    assert bar_widths(plot_bounds([replace(parts, value=0.4)]).axes[0]) == [0.4]
    figure = parts.plot([replace(parts, name="huge", terms={"risk": 0.25, "complexity": 1e4}, value=10000.25)])
    (axis,) = figure.axes
    assert axis.get_xscale() == "log"
    assert bar_widths(axis) == [0.35, 10000.25]
    texts = [text.get_text() for text in axis.texts]
    assert texts == ["35 %\n= 0.25 + 0.1", "1.001e+04\n= 0.25 + 1e+04"]
    assert [float(np.asarray(line.get_xdata())[0]) for line in axis.lines] == [0.9, 0.9]
    figure.canvas.draw()


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf, 1e308, 5e-324, 1.0])
@pytest.mark.parametrize("chance", [0.9, math.nan, 1e308, 0.0])
def test_any_value_can_be_drawn(value: float, chance: float) -> None:
    bound = make_bound(value=value, chance=chance, name="$x$ \\frac " + 100 * "n")
    figure = bound.plot([make_bound(kind="heuristic")])
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["$x$ \\frac " + 27 * "n" + "...", "Maurer's bound\n(no guarantee)"]


def test_bounds_on_different_losses_have_panels_of_their_own() -> None:
    figure = make_bound().plot([make_bound(loss="cross_entropy", value=0.7), make_bound(name="other")])
    assert [axis.get_xlabel() for axis in figure.axes] == [
        "bound on the error on new data",
        "bound on the cross entropy on new data",
    ]
    assert [len(bar_widths(axis)) for axis in figure.axes] == [2, 1]
    figure.canvas.draw()


def test_the_command_line_shows_a_bound_and_writes_its_page(tmp_path: Path) -> None:
    path, page = make_bound().save(tmp_path / "bound.json"), tmp_path / "page.html"
    found = CliRunner().invoke(app, ["show", str(path), "--html", str(page)])
    assert found.exit_code == 0
    assert "errs on at most 2.31 % of new examples." in " ".join(found.output.split())
    assert page.read_text(encoding="utf-8") == make_bound().to_html(tmp_path / "own.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium: pages are not tested in a browser")
    with browsing(program) as browser:
        yield Tab(browser)


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_opens_without_errors_requests_or_sideways_scrolling(
    dark: bool, size: tuple[int, int], tab: Tab, tmp_path: Path
) -> None:
    page = make_bound(assumptions=(INDEPENDENT, PRIOR, BROKEN), name=HOSTILE).to_html(tmp_path / "page.html")
    tab.screen(size=size, dark=dark, touch=size == PHONE)
    tab.open(page)
    assert tab.wrongs() == []
    assert tab.requests() == []
    assert tab("window.hacked") is None
    assert tab("[document.documentElement.scrollWidth, innerWidth]") == [size[0], size[0]]
    assert tab('document.querySelector("#answer strong").textContent').startswith("Not a guarantee")
    assert tab('[...document.querySelectorAll("#assumptions td:nth-child(2)")].map((each) => each.textContent)') == [
        "cannot be checked",
        "met",
        "not met",
    ]
    assert tab('document.querySelector("img").naturalWidth') > 100
