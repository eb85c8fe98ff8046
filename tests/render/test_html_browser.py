"""Pages as a browser shows them: drawn, sorted, pointed at, tapped, walked through with keys, dark, small, printed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import LAPTOP, PHONE, Tab, browsing, chromium
from html_cases import AXES, HOSTILE, report, study

from saltflat.render.html import render_study_page
from saltflat.results import Reading, compare
from saltflat.studies.row import Row
from saltflat.studies.scores import score

FOUND = chromium()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no Chromium: pages are not tested in a browser")
KINDS = ("study", "report", "comparison")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return study()


@pytest.fixture(scope="module")
def pages(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    scores = {gap: score(rows, AXES, gap=gap, resamples=40) for gap in ("error", "loss")}
    path = folder / "study.html"
    path.write_text(render_study_page("Digits", {"data": HOSTILE}, rows, AXES, scores), encoding="utf-8")
    more = {f"a_measure_with_a_long_name_{k}": Reading("x", 1.0, {"0.weight": 1.0 + k}) for k in range(20)}
    wide = report(readings={**report().readings, **more})
    both = compare({"first": report(), HOSTILE: report()})
    return {
        "study": path,
        "report": wide.to_html(folder / "report.html"),
        "comparison": both.to_html(folder / "comparison.html"),
    }


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    assert FOUND is not None
    with browsing(FOUND) as browser:
        yield Tab(browser)


def opened(tab: Tab, path: Path, **screen: Any) -> Tab:
    tab.screen(**screen)
    tab.open(path)
    tab.settled()
    return tab


def drawn_runs(tab: Tab) -> dict[int, tuple[float, float]]:
    """Where the marks of the runs are in the window, by the place of the run."""
    found = tab("""(() => {
        document.querySelector("#scatter").scrollIntoView({ block: "center", behavior: "instant" });
        return [...document.querySelectorAll("#scatter .run")].map((each) => {
            const box = each.getBoundingClientRect();
            return [Number(each.dataset.run), box.x + box.width / 2, box.y + box.height / 2];
        });
    })()""")
    return {run: (x, y) for run, x, y in found}


def tip(tab: Tab) -> dict[str, str]:
    """What is told of a run; empty where nothing is."""
    found = tab("""(() => {
        const tip = document.querySelector("#tip");
        if (tip.hidden) return {};
        const names = [...tip.querySelectorAll("dt")].map((each) => each.textContent);
        const values = [...tip.querySelectorAll("dd")].map((each) => each.textContent);
        const facts = Object.fromEntries(names.map((name, index) => [name, values[index]]));
        return { run: tip.querySelector("strong").textContent, ...facts };
    })()""")
    return dict(found)


def alone(tab: Tab, among: dict[int, tuple[float, float]]) -> int:
    """A run whose mark has no neighbour near."""
    gaps = {
        run: min(abs(x - a) + abs(y - b) for other, (a, b) in among.items() if other != run)
        for run, (x, y) in among.items()
    }
    return max(gaps, key=lambda run: gaps[run])


def check_told(told: dict[str, str], row: Row, measure: str) -> None:
    assert told["run"] == f"Run {row.key[:12]}"
    assert told["lr"] == str(row.config["lr"])
    assert told["batch_size"] == str(row.config["batch_size"])
    assert told["seed"] == str(row.config["seed"])
    assert float(told["gap in error"]) == pytest.approx(row.gap["error"], rel=1e-3)
    assert float(told["train loss"]) == pytest.approx(0.02)
    assert float(told[measure]) == pytest.approx(row.readings[measure].value, rel=5e-3)


def choose(tab: Tab, name: str, value: str) -> None:
    tab(f"""(() => {{
        const select = document.querySelector("#{name}");
        select.value = {value!r};
        select.dispatchEvent(new Event("change", {{ bubbles: true }}));
    }})()""")
    tab.settled()


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_opens_without_errors_requests_or_sideways_scrolling(
    kind: str, dark: bool, size: tuple[int, int], tab: Tab, pages: dict[str, Path]
) -> None:
    opened(tab, pages[kind], size=size, dark=dark, touch=size == PHONE)
    tab('document.querySelectorAll("details").forEach((each) => { each.open = true; })')
    assert tab.wrongs() == []
    assert tab.requests() == []
    assert tab("window.hacked") is None
    assert tab("[document.documentElement.scrollWidth, innerWidth]") == [size[0], size[0]]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_text_of_a_page_can_be_told_from_its_ground(
    kind: str, dark: bool, tab: Tab, pages: dict[str, Path]
) -> None:
    opened(tab, pages[kind], dark=dark)
    tab('document.querySelectorAll("details").forEach((each) => { each.open = true; })')
    found = tab("""(() => {
        const seen = new Map();
        const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (walk.nextNode()) {
            const parent = walk.currentNode.parentElement;
            if (!walk.currentNode.textContent.trim() || !parent.getClientRects().length) continue;
            if (parent.closest("script, style, option")) continue;
            let ground = parent, colour = "rgba(0, 0, 0, 0)";
            while (ground && colour === "rgba(0, 0, 0, 0)") {
                colour = getComputedStyle(ground).backgroundColor;
                ground = ground.parentElement;
            }
            const style = getComputedStyle(parent);
            const letters = parent.ownerSVGElement ? style.fill : style.color;
            seen.set(`${letters}|${colour}`, parent.outerHTML.slice(0, 80));
        }
        return [...seen];
    })()""")
    assert len(found) > 3
    for colours, where in found:
        assert contrast(*colours.split("|")) >= 4.5, where


def test_light_and_dark_are_different(tab: Tab, pages: dict[str, Path]) -> None:
    grounds = []
    for dark in (False, True):
        opened(tab, pages["study"], dark=dark)
        grounds.append(brightness(tab("getComputedStyle(document.body).backgroundColor")))
    assert grounds[0] > 0.9
    assert grounds[1] < 0.05


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_colour_of_the_marks_can_be_told_from_the_ground(dark: bool, tab: Tab, pages: dict[str, Path]) -> None:
    opened(tab, pages["study"], dark=dark)
    ground = tab("getComputedStyle(document.body).backgroundColor")
    for kind in "cq":
        for place in range(7):
            colour = tab(f"""(() => {{
                const made = document.body.appendChild(document.createElement("i"));
                made.style.color = "var(--{kind}{place})";
                return getComputedStyle(made).color;
            }})()""")
            assert contrast(colour, ground) >= 3, (kind, place)


def test_what_a_study_consists_of_is_there(tab: Tab, pages: dict[str, Path], rows: list[Row]) -> None:
    opened(tab, pages["study"])
    for section in ("summary", "plots", "scores", "axes", "problems", "settings"):
        assert tab(f'document.querySelector("#{section} h2").textContent.length') > 3
    drawn = drawn_runs(tab)
    assert set(drawn) == {place for place, row in enumerate(rows) if row.readings}
    assert tab('document.querySelectorAll("#scatter .run.hollow").length') == 1
    assert tab('[...document.querySelectorAll("#legend span")].map((each) => each.textContent)')[:3] == [
        "0.01",
        "0.03",
        "0.1",
    ]
    assert "3 of 48 runs are not drawn" in tab('document.querySelector("#left").textContent')


def test_marks_lie_where_their_numbers_say(tab: Tab, pages: dict[str, Path], rows: list[Row]) -> None:
    opened(tab, pages["study"])
    assert tab('document.querySelector("#measure").selectedOptions[0].textContent') == "good"
    drawn = drawn_runs(tab)
    places = sorted(drawn)
    values = [rows[place].readings["good"].value for place in places]
    gaps = [rows[place].gap["error"] for place in places]
    low, high = places[values.index(min(values))], places[values.index(max(values))]
    least, most = places[gaps.index(min(gaps))], places[gaps.index(max(gaps))]
    assert drawn[low][0] + 100 < drawn[high][0]
    assert drawn[most][1] + 100 < drawn[least][1]  # upwards, where a window counts downwards
    log = tab('document.querySelector("#scale input:checked").value') == "log"
    assert log is (max(values) / min(values) > 100)
    for place in places:
        across = (rows[place].readings["good"].value - min(values)) / (max(values) - min(values))
        up = (rows[place].gap["error"] - min(gaps)) / (max(gaps) - min(gaps))
        x = (drawn[place][0] - drawn[low][0]) / (drawn[high][0] - drawn[low][0])
        y = (drawn[place][1] - drawn[least][1]) / (drawn[most][1] - drawn[least][1])
        # Pixels and shapes whose middle is not their centre.
        assert (x, y) == pytest.approx((across, up), abs=0.02)


def test_pointing_at_a_mark_tells_of_its_run(tab: Tab, pages: dict[str, Path], rows: list[Row]) -> None:
    opened(tab, pages["study"])
    drawn = drawn_runs(tab)
    place = alone(tab, drawn)
    x, y = drawn[place]
    tab.point(x + 4, y + 3)
    check_told(tip(tab), rows[place], "good")
    left, right = tab("(({ left, right }) => [left, right])(document.querySelector('#tip').getBoundingClientRect())")
    assert 0 <= left < right <= LAPTOP[0]
    tab.point(5, 5)
    assert tip(tab) == {}


def test_tapping_a_mark_tells_of_its_run_on_a_phone(tab: Tab, pages: dict[str, Path], rows: list[Row]) -> None:
    opened(tab, pages["study"], size=PHONE, touch=True)
    drawn = drawn_runs(tab)
    place = alone(tab, drawn)
    tab.tap(*drawn[place])
    check_told(tip(tab), rows[place], "good")
    left, right = tab("(({ left, right }) => [left, right])(document.querySelector('#tip').getBoundingClientRect())")
    assert 0 <= left < right <= PHONE[0]


def test_arrow_keys_walk_from_run_to_run(tab: Tab, pages: dict[str, Path], rows: list[Row]) -> None:
    opened(tab, pages["study"])
    drawn_runs(tab)
    ordered = sorted(
        (place for place, row in enumerate(rows) if row.readings), key=lambda place: rows[place].readings["good"].value
    )
    tab('document.querySelector("#scale input:checked").focus()')
    tab.press("Tab")
    check_told(tip(tab), rows[ordered[0]], "good")
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    check_told(tip(tab), rows[ordered[2]], "good")
    tab.press("End")
    check_told(tip(tab), rows[ordered[-1]], "good")
    tab.press("Escape")
    assert tip(tab) == {}
    assert tab('document.querySelectorAll("#scatter .run[tabindex=\\"0\\"]").length') == 1
    assert tab.wrongs() == []


def test_another_measure_gap_colour_or_axis_is_drawn_anew(tab: Tab, pages: dict[str, Path]) -> None:
    opened(tab, pages["study"])
    seen = [drawn_runs(tab)]
    hostile = tab("""[...document.querySelectorAll("#measure option")].map((each) => each.textContent)""").index(
        HOSTILE
    )
    choose(tab, "measure", str(hostile))
    seen.append(drawn_runs(tab))
    assert HOSTILE[:40] in tab('[...document.querySelectorAll("#scatter .title")][0].textContent')
    choose(tab, "gap", "loss")
    assert tab('[...document.querySelectorAll("#scatter .title")][1].textContent') == "gap in loss"
    assert tab('[...document.querySelectorAll("#scores .by-gap.chosen")].map((each) => each.dataset.gap)') == ["loss"]
    scale = tab('document.querySelector("#scale input:checked").value')
    tab('document.querySelector("#scale input:not(:checked)").click()')
    tab.settled()
    assert tab('document.querySelector("#scale input:checked").value') != scale
    seen.append(drawn_runs(tab))
    assert seen[0] != seen[1] != seen[2]
    choose(tab, "color", "3")
    assert tab('document.querySelector("#legend strong").textContent') == "seed"
    assert tab('document.querySelectorAll("#legend span").length') == 5
    assert tab.wrongs() == []


def test_a_small_plot_is_a_button_that_shows_it_large(tab: Tab, pages: dict[str, Path]) -> None:
    opened(tab, pages["study"])
    tab('document.querySelectorAll(".by-gap.chosen .small-plot")[1].click()')
    tab.settled()
    assert tab('document.querySelector("#measure").selectedOptions[0].textContent') == "measure_0(p=0)"
    assert tab('document.querySelectorAll(".by-gap.chosen .small-plot[aria-pressed=true]").length') == 1


def names_in_order(tab: Tab) -> list[str]:
    found = tab('[...document.querySelectorAll("#scores .chosen tbody th code")].map((each) => each.textContent)')
    return [str(each) for each in found]


def column_in_order(tab: Tab, column: int) -> list[float]:
    rows = '[...document.querySelectorAll("#scores .chosen tbody tr")]'
    found = tab(f"{rows}.map((row) => row.cells[{column}].dataset.order).filter((each) => each !== '')")
    return [float(each) for each in found]


def test_a_click_on_a_heading_sorts_the_table(tab: Tab, pages: dict[str, Path]) -> None:
    opened(tab, pages["study"])
    heads = tab('[...document.querySelectorAll("#scores .chosen thead th")].map((each) => each.textContent.trim())')
    column, before = heads.index("Pearson"), names_in_order(tab)
    head = f'document.querySelectorAll("#scores .chosen thead th")[{column}]'
    assert tab(f"{head}.getAttribute('aria-sort')") == "none"
    tab(f"{head}.querySelector('button').click()")
    assert tab(f"{head}.getAttribute('aria-sort')") == "descending"
    down = column_in_order(tab, column)
    assert down == sorted(down, reverse=True)
    assert sorted(names_in_order(tab)) == sorted(before)
    assert names_in_order(tab) != before
    tab(f"{head}.querySelector('button').focus()")
    tab.press("Enter")
    assert tab(f"{head}.getAttribute('aria-sort')") == "ascending"
    up = column_in_order(tab, column)
    assert up == sorted(up)
    tab('document.querySelector("#scores .chosen thead th button").click()')
    assert tab(f"{head}.getAttribute('aria-sort')") == "none"
    assert names_in_order(tab) == tab(
        f"{names_in_order(tab)!r}.sort((a, b) => a.localeCompare(b, 'en', {{ numeric: true }}))"
    )


def test_what_has_no_value_is_last_however_a_table_is_sorted(tab: Tab, pages: dict[str, Path]) -> None:
    opened(tab, pages["report"])
    button = 'document.querySelectorAll("#measures thead th button")[1]'
    names = '[...document.querySelectorAll("#measures tbody th code")].map((each) => each.textContent)'
    tab(f"{button}.click()")
    down = tab(names)
    tab(f"{button}.click()")
    up = tab(names)
    assert down[-1] == up[-1] == "lost"
    assert down[0] == "rho"
    assert up[0] == "signed"


def test_without_scripts_the_words_the_tables_and_small_plots_are_there(tab: Tab, pages: dict[str, Path]) -> None:
    tab.screen()
    tab.open(pages["study"], scripts=False)
    shown = "(each) => each.getClientRects().length > 0"
    assert tab(f'[...document.querySelectorAll("#summary li")].filter({shown}).length') > 4
    assert tab(f'[...document.querySelectorAll("#scores tbody tr")].filter({shown}).length') == 2 * 12
    assert tab(f'[...document.querySelectorAll(".small-plot .dots")].filter({shown}).length') == 2 * 12
    assert tab(f'[...document.querySelectorAll(".needs-script, .controls")].filter({shown}).length') == 0
    assert tab('document.querySelector(".only-static").getClientRects().length') == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_prints_dark_on_white_with_everything_open(kind: str, tab: Tab, pages: dict[str, Path]) -> None:
    opened(tab, pages[kind], dark=True)
    tab("window.count = () => document.querySelectorAll('details:not([open])').length")
    tab("window.folded = [count()]; addEventListener('beforeprint', () => folded.push(count()))")
    paper = tab.printed()
    assert paper.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) >= 1
    before, on_paper, after = tab("[...folded, count()]")
    assert before == after > 0
    assert on_paper == 0
    tab.screen(size=(794, 1123), dark=True, media="print")
    tab.settled()
    assert brightness(tab("getComputedStyle(document.body).backgroundColor")) == 1.0
    assert brightness(tab("getComputedStyle(document.body).color")) == 0.0
    assert tab("[...document.querySelectorAll('.controls, nav')].filter((e) => e.getClientRects().length).length") == 0
    assert tab("document.documentElement.scrollWidth") == 794


def brightness(colour: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines define it, of a colour as a browser tells it."""
    numbers = [float(each) for each in re.findall(r"[\d.]+", colour.replace("srgb", ""))][:3]
    parts = numbers if colour.startswith("color") else [each / 255 for each in numbers]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """From 1 to 21, of the same guidelines; 4.5 is asked of text, 3 of marks."""
    low, high = sorted([brightness(one), brightness(other)])
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_of_black_on_white_is_21() -> None:
    assert contrast("rgb(0, 0, 0)", "color(srgb 1 1 1)") == pytest.approx(21)
