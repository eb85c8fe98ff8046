"""Pages for a browser: complete in one file, safe with any name, and saying what the numbers say."""

import base64
import hashlib
import json
import math
import random
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from html_cases import AXES, HOSTILE, NAN, failed, report, row, study
from typer.testing import CliRunner

from saltflat.audit import Audit, AuditLine
from saltflat.audit.change import compute_change
from saltflat.cli import app
from saltflat.errors import ReportError
from saltflat.render.html import render_audit_page, render_comparison_page, render_report_page, render_study_page
from saltflat.render.html.page import build_small_scatter, encode_inert_json, encode_picture
from saltflat.render.html.pages import build_chart
from saltflat.render.html.runs import MOST_LETTERS, collect_failures
from saltflat.render.html.summary import collect_warnings, format_runs, format_score_summary
from saltflat.results import Reading, Report, compare
from saltflat.studies.row import Row
from saltflat.studies.scores import Score, Scores, score

EMPTY_TAGS = {"meta", "link", "img", "br", "wbr", "input"}


class Page(HTMLParser):
    """The page as a browser's parser sees it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY_TAGS:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif "style" not in self._open:
            self.text.append(data)
            if self.rows and ("td" in self._open or "th" in self._open):
                self.rows[-1][-1] += data

    @property
    def island(self) -> Any:
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("id") == "data"))

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def scored(rows: list[Row], **options: Any) -> dict[str, Scores]:
    return {gap: score(rows, AXES, gap=gap, **{"resamples": 40, **options}) for gap in ("error", "loss")}


def page_of(rows: list[Row], **changes: Any) -> str:
    given = {"title": "Digits", "facts": {"data": "digits"}, "rows": rows, "axes": AXES, **changes}
    return render_study_page(**given if "scores" in given else {**given, "scores": scored(rows)})


def small_audit(spread: float = 2.0) -> Audit:
    base = report(
        readings={"trace": Reading("trace", 2.0), "rho": Reading("rho", 1.0), "volume": Reading("volume", -3.0)},
        legend={"trace": {"meaning": HOSTILE}},
    )
    moved = [Reading("trace", 20.0), Reading("trace", 0.02)]
    lines = {
        "trace": AuditLine(base["trace"], (), False, {"layer": compute_change(base["trace"], moved, False, False)}),
        "rho": AuditLine(
            base["rho"],
            ("layer_scale",),
            False,
            {"layer": compute_change(base["rho"], [Reading("rho", 1.0)] * 2, True, False)},
        ),
        "volume": AuditLine(
            base["volume"],
            (),
            True,
            {"layer": compute_change(base["volume"], [Reading("volume", 97.0)] * 2, False, True)},
        ),
    }
    return Audit(base, lines, {"layer": 3}, (), {}, 2, spread, 0, 1e-6, 1.0, (HOSTILE,), "2025-01-31T12:00:00+00:00")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return study()


@pytest.fixture(scope="module")
def pages(rows: list[Row]) -> dict[str, str]:
    first, second = report(), replace(report(), model="Other")
    return {
        "study": page_of(
            rows,
            title=HOSTILE,
            facts={HOSTILE: {HOSTILE: [HOSTILE]}},
            audits={rows[0].key: small_audit(), HOSTILE: small_audit()},
            warnings=[HOSTILE],
            again=HOSTILE,
        ),
        "report": render_report_page(first),
        "comparison": render_comparison_page(compare({HOSTILE: first, "b": second})),
        "audit": render_audit_page(small_audit()),
    }


KINDS = ("study", "report", "comparison", "audit")


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_well_formed_and_asks_for_nothing(kind: str, pages: dict[str, str]) -> None:
    page = Page(pages[kind])
    for tag, attrs in page.elements:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "srcset", "action", "poster", "xlink:href"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)
    plain = pages[kind].replace("http://www.w3.org/2000/svg", "")
    for forbidden in ("http://", "https://", "@import", "url("):
        assert forbidden not in plain
    assert len(pages[kind].encode()) < 2_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_name_stays_text(kind: str, pages: dict[str, str]) -> None:
    page = Page(pages[kind])
    assert "hacked" in page.words
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert [attrs.get("src") for tag, attrs in page.elements if tag == "img"] == []
    # The early one, the main one, and the data where there are some.
    assert len(page.scripts) == 2 + (kind == "study")
    assert all("hacked" not in text for attrs, text in page.scripts if attrs.get("type") != "application/json")


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_of_a_page_allows_its_own_scripts_alone(kind: str, pages: dict[str, str]) -> None:
    page = Page(pages[kind])
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    assert policy is not None
    run = [text for attrs, text in page.scripts if attrs.get("type") != "application/json"]
    digests = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in run}
    allowed = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert set(allowed.split()[1:]) == digests
    assert "default-src 'none'" in policy


def test_the_data_in_a_page_hold_no_letter_that_html_or_javascript_could_act_on() -> None:
    text = encode_inert_json({HOSTILE: [HOSTILE, "\u2029]]>"]})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {HOSTILE: [HOSTILE, "\u2029]]>"]}


def test_the_data_in_a_page_are_those_of_the_rows(rows: list[Row], pages: dict[str, str]) -> None:
    data = Page(pages["study"]).island
    names = [each["name"] for each in data["measures"]]
    assert names[:2] == ["good", "measure_0(p=0)"]
    assert HOSTILE in names
    assert data["controls"] == ["parameters", "norm", "distance", "train_loss", "lr", "batch_size", "noise"]
    assert [each["name"] for each in data["settings"]] == ["lr", "batch_size", "widths", "seed"]
    for place, one in enumerate(rows):
        assert one.key.startswith(data["keys"][place])
        value = data["measures"][names.index(HOSTILE)]["values"][place]
        if HOSTILE in one.readings:
            assert value == pytest.approx(one.readings[HOSTILE].value, rel=1e-4)
            assert data["gaps"]["error"][place] == pytest.approx(one.gap["error"], rel=1e-4)
        else:
            assert value is None
            assert data["gaps"]["error"][place] is None
        for each in data["settings"]:
            wanted = one.config[each["name"]]
            told = each["levels"][each["of"][place]]
            assert told == ("32, 32" if wanted == [32, 32] else "128, 128" if isinstance(wanted, list) else str(wanted))


def test_a_study_of_200_runs_and_40_measures_stays_below_two_megabytes() -> None:
    draw = random.Random(1)
    rows = [
        row(
            f"{k:016x}",
            {"lr": 10.0 ** -(k % 10), "batch_size": 2 ** (k % 4), "widths": [k % 5] * 3, "seed": k},
            draw.random(),
            {f"a_measure_of_number_{i}(axis='row', p={i})": draw.random() * 10**i for i in range(40)},
        )
        for k in range(180)
    ]
    broken = [failed(f"{k:016x}", {"lr": 1.0, "seed": k}, f"RuntimeError: {k} " + "x" * 50_000) for k in range(20)]
    text = page_of([*rows, *broken], scores=scored(rows, resamples=0))
    assert len(text.encode()) < 2_000_000
    assert len(Page(text).island["measures"]) == 47


def test_numbers_that_are_equal_to_python_stay_different_settings() -> None:
    rows = [row(str(k), {"on": value}, 0.1 * k, {"trace": float(k)}) for k, value in enumerate([1, True, None, "1"])]
    data = Page(page_of(rows, axes=("on",), scores={})).island
    setting = data["settings"][0]
    assert [setting["levels"][k] for k in setting["of"]] == ["1", "yes", "none", "1"]
    assert len(set(setting["of"])) == 4


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [failed("a", {"lr": 0.1}, "ValueError: no")],
        [row("a", {"lr": 0.1}, 0.1, {"trace": 1.0})],
        [row(k, {"lr": 0.1}, NAN, {"trace": math.inf}) for k in "ab"],
        [row(k, {"lr": float(k)}, float(k), {"trace": 1e308 * (-1) ** int(k)}) for k in "12"],
        [row("a", {"\ud800": "\ud800", "lr": 1}, 0.1, {"\ud800": 1.0}), row("b", {"lr": 2}, 0.2, {"\ud800": 2.0})],
    ],
    ids=["no runs", "all failed", "one run", "nothing finite", "huge numbers", "half a character"],
)
def test_a_study_with_little_in_it_still_is_a_page(rows: list[Row]) -> None:
    text = page_of(rows, scores={})
    text.encode()
    assert len(Page(text).island["keys"]) == len(rows)
    assert "There are no scores: nothing can be said of measures yet." in Page(text).words


def test_warnings_stand_before_the_summary(rows: list[Row]) -> None:
    words = Page(page_of(rows, warnings=["The disk was full."])).words
    assert words.index("The disk was full.") < words.index("48 networks")


def test_a_warning_of_one_gap_says_of_which() -> None:
    both = {gap: replace(of("trace"), gap=gap, warnings=("Few runs.", *own)) for gap, own in OWN_WARNINGS.items()}
    assert collect_warnings(["Mine."], both) == ["Mine.", "Few runs.", "Gap in error: Unresolved."]


OWN_WARNINGS: dict[str, tuple[str, ...]] = {"error": ("Unresolved.",), "loss": ()}


def of(*names: str, **kendalls: tuple[float, float, float]) -> Scores:
    """Scores by name, with value and ends of the interval; names that begin with ``control_`` are controls."""
    found = {name: Score(name, "measure", 9) for name in names}
    for name, (value, low, high) in kendalls.items():
        kind, shown = ("control", name.removeprefix("control_")) if "control_" in name else ("measure", name)
        found[shown] = Score(shown, kind, 9, kendall_b=value, intervals={"kendall_b": (low, high)})
    return Scores(found, "error", ("lr",), 9, 9, {}, (), (), 100)


def test_the_summary_says_which_measures_go_with_the_gap() -> None:
    told = format_score_summary(of("bare", rho=(0.8, 0.7, 0.9), flat=(-0.5, -0.6, -0.4), dull=(0.1, -0.1, 0.3)))
    assert "Larger where the gap is larger: rho (0.80, 0.70 to 0.90)." in told
    assert "Smaller where the gap is larger: flat (-0.50, -0.60 to -0.40)." in told
    assert "No sign of a relation, the interval contains zero: dull (0.10, -0.10 to 0.30)." in told
    assert "Cannot be judged: bare." in told


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (
            of(rho=(0.8, 0.7, 0.9), control_lr=(-0.5, -0.6, -0.4)),
            "rho (0.80, 0.70 to 0.90) does better than every control; the best of those is lr (-0.50, -0.60 to -0.40).",
        ),
        (
            of(rho=(0.6, 0.4, 0.8), control_lr=(0.5, 0.4, 0.6)),
            "rho (0.60, 0.40 to 0.80) does better than every control; the best of those is lr (0.50, 0.40 to 0.60). "
            "That lead is within the uncertainty.",
        ),
        (
            of(rho=(0.6, 0.4, 0.8), control_lr=(-0.7, -0.8, -0.6), control_noise=(0.0, -0.2, 0.2)),
            "No measure that grows with the gap does better than lr (-0.70, -0.80 to -0.60).",
        ),
        (
            # Ahead of the noise by its value alone, with an interval that contains zero: that is no lead.
            of(rho=(0.3, -0.1, 0.6), control_noise=(0.1, -0.2, 0.4), control_train_loss=(0.2, 0.1, 0.3)),
            "No measure's 95 % interval lies above zero, so none can be said to beat the controls.",
        ),
        (
            # As strong as can be, in the wrong direction: sharper where the gap is smaller.
            of(rho=(-0.8, -0.9, -0.7), control_noise=(0.1, -0.2, 0.4)),
            "No measure's 95 % interval lies above zero, so none can be said to beat the controls.",
        ),
        (
            of(rho=(0.2, 0.1, 0.3), flat=(-0.8, -0.9, -0.7), control_noise=(0.1, -0.2, 0.4)),
            "rho (0.20, 0.10 to 0.30) does better than every control; the best of those is noise (0.10, -0.20 to "
            "0.40). That lead is within the uncertainty. By chance alone the best of as many unrelated measures would "
            "as often as not reach 0.28.",
        ),
        (of(rho=(0.3, 0.1, 0.6)), "There is no control to compare with."),
    ],
    ids=["clear", "close", "behind one", "unsure", "against", "chance", "no control"],
)
def test_the_summary_begins_with_how_measures_do_against_controls(scores: Scores, said: str) -> None:
    assert format_score_summary(scores)[0] == said


def test_the_summary_says_when_nothing_goes_with_the_gap() -> None:
    assert "No measure correlates with the gap: every interval contains zero." in format_score_summary(
        of(rho=(0.3, -0.1, 0.6))
    )


def test_the_summary_says_when_a_relation_is_gone_within_one_setting() -> None:
    both = {"kendall_b": (0.4, 0.8), "granulated": (-0.3, 0.3)}
    lost = Score("rho", "measure", 9, kendall_b=0.6, granulated=0.05, intervals=both)
    told = format_score_summary(replace(of(), scores={"rho": lost}))
    assert (
        "No longer sure where a single setting changes and all others stay (granulated score): "
        "rho (0.05, -0.30 to 0.30)." in told
    )


def test_the_summary_counts_how_runs_ended_and_what_differs(rows: list[Row]) -> None:
    assert format_runs(rows, AXES) == [
        "48 networks: 44 finished, 1 missed the stopping rule, 1 diverged and 2 failed with an error.",
        "They differ in lr (0.01; 0.03; 0.1), batch_size (16; 64), widths (32, 32; 128, 128) and seed (0; 1; 2; 3).",
    ]


def test_the_score_table_has_the_scores_the_strongest_first(rows: list[Row]) -> None:
    scores = scored(rows)
    page = Page(page_of(rows, scores={"error": scores["error"]}))
    start = next(i for i, cells in enumerate(page.rows) if "Kendall τ-b" in cells)
    head, body = page.rows[start], page.rows[start + 1 : start + 1 + len(scores["error"])]
    column = head.index("Kendall τ-b")
    found = [each for each in scores["error"].scores.values() if not math.isnan(each.kendall_b)]
    known = sorted(found, key=lambda each: -abs(each.kendall_b))
    for each, cells in zip(known, body, strict=False):
        low, high = each.intervals["kendall_b"]
        assert cells[0].startswith(each.name.replace("\u2028", "\\u2028"))
        assert ("control" in cells[0].removeprefix(each.name)) == (each.kind == "control")
        assert cells[column].replace("-0.00", "0.00") == (
            f"{each.kendall_b:.2f}{low:.2f} to {high:.2f}".replace("-0.00", "0.00")
        )
    assert known[0].name == "good"


def test_runs_that_failed_alike_are_told_once_with_the_error_in_full() -> None:
    rows = [failed(str(k), {"lr": k}, "ValueError: no") for k in range(3)]
    rows += [failed("9", {"lr": 9}, "y" * 100_000)]
    first, second = collect_failures(rows, ("lr",))
    assert first.runs == ("0 (lr 0)", "1 (lr 1)", "2 (lr 2)")
    assert first.traceback.endswith("ValueError: no")
    assert len(second.traceback) < MOST_LETTERS + 100
    assert "characters" in second.traceback


def test_every_run_that_did_not_end_well_is_named(rows: list[Row], pages: dict[str, str]) -> None:
    words = Page(pages["study"]).words
    for place in (5, 7, 9, 10):
        assert rows[place].key[:12] in words


def test_a_small_plot_has_the_largest_at_the_right_and_the_top() -> None:
    drawn = build_small_scatter("trace", [1.0, 3.0, 2.0, None, NAN], [0.1, 0.3, 0.2, 0.5, 0.5])
    assert drawn.path == "M8 112h0M172 8h0M90 60h0"
    assert (drawn.low, drawn.high, drawn.log, drawn.drawn) == ("1", "3", False, 3)


def test_a_small_plot_is_logarithmic_where_values_span_more_than_two_decades() -> None:
    drawn = build_small_scatter("trace", [1.0, 100.0, 10_000.0], [0.0, 1.0, 2.0])
    assert drawn.log
    assert drawn.path == "M8 112h0M90 60h0M172 8h0"


def test_bars_begin_at_zero_and_are_as_long_as_their_values() -> None:
    found = build_chart("signed", {"": Reading("signed", 0.0, {"a": -1.0, "b": 3.0, "c": NAN})}, [""])
    assert [(row, bars[0].start, bars[0].width, bars[0].told) for row, bars in found.rows] == [
        ("a", 0.0, 25.0, "-1"),
        ("b", 25.0, 75.0, "3"),
        ("c", 0.0, 0.0, "undefined"),
    ]


def test_bars_of_values_far_apart_are_logarithmic_and_keep_their_order() -> None:
    found = build_chart("trace", {"": Reading("trace", 0.0, {"a": 1e-3, "b": 1.0, "c": 1e3, "d": 0.0})}, [""])
    assert found.log
    widths = [bars[0].width for _, bars in found.rows]
    assert widths[0] < widths[1] < widths[2] == 100.0
    assert widths[3] == 0.0
    assert widths[2] - widths[1] == pytest.approx(widths[1] - widths[0], abs=0.02)


def test_the_interval_of_a_bar_is_that_of_its_standard_error() -> None:
    ((_, (bar,)),) = build_chart("rho", {"": Reading("rho", 0.0, {"a": 10.0}, layer_stderr={"a": 1.0})}, [""]).rows
    # The axis reaches as far as the interval, 10 + 1.96; two digits are kept.
    assert bar.low == pytest.approx(100 * 8.04 / 11.96, abs=0.01)
    assert bar.width == pytest.approx(100 * 10 / 11.96, abs=0.01)
    assert bar.high == 100.0


def test_only_the_largest_of_many_layers_have_bars_and_the_page_says_so() -> None:
    many = Reading("trace", 1.0, {f"layer{k}": float(k) for k in range(100)})
    page = Page(render_report_page(report(readings={"trace": many}, legend={})))
    assert "And 76 more layers with less." in page.words
    assert "layer99" in page.words


def test_a_page_of_a_report_says_what_the_report_says(pages: dict[str, str]) -> None:
    words = Page(pages["report"]).words
    assert "Certificate: the layers' Gauss-Newton blocks are the Hessian's (largest gap 1.0e-12, 8 examples)." in words
    assert "12.50 ± 0.50" in words
    assert "All weights are zero." in words
    assert "Left out:" in words


def test_a_page_of_a_comparison_has_verdicts_and_doubts() -> None:
    first, second = report(), report(readings={"trace": Reading("trace", 6.0)}, model="Other")
    page = Page(render_comparison_page(compare({"a": first, "b": second})))
    assert ["trace", "layers", "3", "6", "2", "not judged", ""] in [
        [cell.strip() for cell in cells] for cells in page.rows
    ]
    assert "Different models" in page.words


def test_dots_of_an_audit_stand_at_the_factors() -> None:
    page = render_audit_page(small_audit())
    # From 2 to 20 is one decade, to 0.02 minus two, which is the farthest: at the left end of the strip.
    assert 'd="M73.0 8h0M4.0 8h0"' in page
    # Logarithms are clamped to the end, they do not stretch the strip of others.
    assert 'd="M96.0 8h0M96.0 8h0"' in page
    assert "100 times or more at the right end" in page


def test_landscapes_are_pictures_inside_of_the_page(rows: list[Row]) -> None:
    from matplotlib.figure import Figure

    class Drawn:
        def plot(self) -> Any:
            figure = Figure(figsize=(3, 2))
            figure.add_subplot().plot([1, 2, 3], [3, 1, 2])
            return figure

    made: Any = {HOSTILE: Drawn()}
    page = Page(page_of(rows, landscapes=made, scores={}))
    (source,) = [attrs["src"] for tag, attrs in page.elements if tag == "img"]
    assert source is not None
    assert source.startswith("data:image/svg+xml;base64,")
    assert base64.b64decode(source.partition(",")[2]).strip().endswith(b"</svg>")
    assert encode_picture(Drawn().plot()) == encode_picture(Drawn().plot())


def test_pictures_that_would_make_the_page_heavy_are_named_instead(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    heavy = "data:image/png;base64," + "A" * 500_000
    monkeypatch.setattr("saltflat.render.html.study.encode_picture", lambda figure: heavy)

    class Drawn:
        def plot(self) -> None: ...

    made: Any = {"first": Drawn(), "second": Drawn()}
    page = Page(page_of(rows, landscapes=made, scores={}))
    assert [tag for tag, _ in page.elements].count("img") == 1
    assert "Left out, so that this file stays small: second." in page.words


def test_the_same_study_is_the_same_page(rows: list[Row]) -> None:
    assert page_of(rows) == page_of(study())


def test_pages_are_written_whole_and_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    assert report().to_html(path) == path
    assert path.read_text(encoding="utf-8") == render_report_page(report())
    both = compare(report(), report())
    assert both.to_html(path) == path
    assert path.read_text(encoding="utf-8") == render_comparison_page(both)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(ReportError, match="whose folder does not exist"):
        report().to_html(tmp_path / "no" / "report.html")


def test_the_command_line_writes_pages(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json", "audit.json")]
    for path in paths[:2]:
        report().save(path)
    small_audit().save(paths[2])
    page = tmp_path / "page.html"
    for arguments, said in {
        ("show", str(paths[0])): "Flatness of one network",
        ("show", str(paths[2])): "Measures under rescaling",
        ("compare", str(paths[0]), str(paths[1])): "Networks side by side",
    }.items():
        result = CliRunner().invoke(app, [*arguments, "--html", str(page)])
        assert result.exit_code == 0, result.output
        assert said in Page(page.read_text(encoding="utf-8")).words
        page.unlink()
    result = CliRunner().invoke(app, ["show", str(paths[0]), "--html", str(tmp_path / "no" / "page.html")])
    assert result.exit_code == 2
    assert "whose folder does not exist" in result.stderr


def test_measure_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = ["measure", "--model", "factories:mlp", "--data", "factories:pair", "--measures", "squared_norm"]
    result = CliRunner().invoke(app, [*arguments, "--quiet", "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "squared_norm" in Page(page.read_text(encoding="utf-8")).words


def test_templates_are_part_of_the_package() -> None:
    found = {each.name for each in (files("saltflat.render") / "templates").iterdir()}
    assert {"base.html", "study.html", "style.css", "page.js", "scatter.js"} <= found


def test_formulas_are_mathml_and_hostile_ones_stay_text() -> None:
    formula = r"Size: :math:`\frac1N \sum_n |g_n|^{2a}` with :math:`\gamma \le \sqrt w`, ``rho``, :math:`<script>`."
    legend = {"rho": {"meaning": formula, "formula": "of `subset` examples"}}
    page = render_report_page(report(legend=legend))
    assert ":math:" not in page
    assert "<mfrac><mn>1</mn><mi>N</mi></mfrac><msub><mo>∑</mo><mi>n</mi></msub>" in page
    assert "<mrow><mn>2</mn><mi>a</mi></mrow></msup>" in page
    assert "<math><mi>\u03b3</mi><mo>≤</mo><msqrt><mi>w</mi></msqrt></math>, <code>rho</code>" in page
    assert "<math><mo>&lt;</mo><mi>s</mi>" in page
    assert "of <code>subset</code> examples" in page


def test_a_report_from_a_file_makes_the_same_page(tmp_path: Path) -> None:
    loaded = Report.load(report().save(tmp_path / "report.json"))
    assert render_report_page(loaded) == render_report_page(report())
