"""Reports written by hand: kept whole on disk, readable in every form, and compared with care."""

import io
import json
import math
import os
import re
import struct
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from rich.console import Console

import saltflat
from saltflat.errors import MissingPackageError, ReportError, SaltflatError, UnknownNameError, import_optional
from saltflat.results import Reading, Report, compare
from saltflat.results.caveats import TRAIN_MODE
from saltflat.results.text import render_text, strip_markup

ROOT = Path(__file__).parent.parent.parent
NAN, INF = float("nan"), float("inf")
HOSTILE = "<script>alert('x')</script> [bold red]loud[/] \x1b[2J $\\frac$ \u202egnp"


def report(*readings: Reading, **changes: Any) -> Report:
    given: dict[str, Any] = {
        "readings": {reading.name: reading for reading in readings},
        "left_out": {"distance": "it needs initial=."},
        "legend": {
            reading.name: {"meaning": "How sharp.", "formula": "tr H", "invariant_to": [], "smaller": "flatter"}
            for reading in readings
        },
        "model": "Net, 1234 parameters",
        "examples": 100,
        "loss": 0.25,
        "settings": {"columns": "exact", "dtype": "float64", "loss": "cross_entropy", "seed": 0, "memory": 1 << 30},
        "versions": {"saltflat": "0.1.0", "torch": "2.6.0"},
        "device": "cpu",
        "seconds": 1.5,
        "seconds_by_step": {"sweep": 1.25},
        "certificate": {"holds": True, "gap": 1e-12, "examples": 8, "gaps": {"0.weight": 1e-12}},
        "notes": (TRAIN_MODE,),
        "created": "2025-01-31T12:00:00+00:00",
        "sample": {"fingerprint": "0123456789abcdef", "groups": [50, 50]},
    }
    return Report(**{**given, **changes})


def sure(name: str, value: float, layers: dict[str, float] | None = None, **more: Any) -> Reading:
    """A reading that does not depend on the choice of the examples."""
    layers = layers or {}
    more = {"sampling_stderr": 0.0, "layer_sampling_stderr": dict.fromkeys(layers, 0.0), **more}
    return Reading(name, value, layers, **more)


def network(layers: int, measures: int) -> Report:
    """Many readings of a deep network; the value of layer i in measure k is k + i / 100."""
    names = [f"stages.{i // 5}.blocks.{i}.convolution.weight" for i in range(layers)]
    return report(
        *(
            sure(f"measure_number_{k}", float(k), {name: k + i / 100 for i, name in enumerate(names)}, stderr=0.1)
            for k in range(measures)
        )
    )


EVERYTHING = Reading(
    "rho(axis='row')",
    value=0.1 + 0.2,
    layers={"0.weight": 5e-324, "$odd": -INF},
    units={"0.weight": (1.0, NAN)},
    stderr=1e-3,
    layer_stderr={"0.weight": 1 / 3},
    sampling_stderr=0.5,
    layer_sampling_stderr={"0.weight": 0.25},
    without_group=(0.3, NAN),
    exact=False,
    converged=False,
    residual=1e308,
    notes=("Two units are dead.", "ünïcode"),
    details={"scales": [1.5, INF], "$float": "nan", "deep": {"$float": {"$float": NAN}}, "count": 3, "none": None},
)
FULL = report(
    EVERYTHING,
    Reading("trace", NAN, notes=("All weights are zero.",)),
    loss=INF,
    accuracy=0.5,
    gradient_norm=0.1,
    gradient_agreement=0.01,
)


def refuse_constant(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def test_a_reading_holds_plain_numbers_whatever_it_was_given() -> None:
    tensor = torch.tensor(2.0)
    reading = Reading("x", tensor, layers={"a": tensor}, units={"a": torch.ones(2)}, details={"s": torch.ones(2)})  # type: ignore
    assert type(reading.value) is float
    assert type(reading.layers["a"]) is float
    assert reading.units["a"] == (1.0, 1.0)
    assert reading.details == {"s": [1.0, 1.0]}


def test_a_reading_is_a_number_where_one_is_needed() -> None:
    reading = Reading("rho", 0.123456789, stderr=0.001)
    assert float(reading) == 0.123456789
    assert f"{reading:.3g}" == "0.123"
    assert f"{reading:10.2e}" == "  1.23e-01"
    assert math.isnan(float(Reading("rho", NAN)))
    with pytest.raises(ValueError, match="format"):
        f"{reading:s}"


@pytest.mark.parametrize(
    ("reading", "line"),
    [
        (Reading("rho", 3.0), "rho = 3"),
        (Reading("rho", 12.3456, stderr=0.0213), "rho = 12.346 +- 0.021"),
        (Reading("rho", 3.0, exact=False), "rho = 3 (estimate)"),
        (Reading("rho", 3.0, converged=False), "rho = 3 (not converged)"),
        (Reading("rho", 3.0, stderr=0.5, exact=False, converged=False), "rho = 3.00 +- 0.50 (estimate, not converged)"),
        (Reading("rho", NAN, exact=False, notes=("All weights are zero.",)), "rho = undefined"),
        (Reading("two\nlines", 1.0), "two\\nlines = 1"),
    ],
)
def test_a_reading_prints_as_one_line(reading: Reading, line: str) -> None:
    assert str(reading) == f"{reading}" == line


def test_formulas_of_a_legend_are_plain_text_in_a_terminal_and_in_a_hint() -> None:
    meaning = r"How large: :math:`\frac1N \sum_n \|g_n\|^4`, as ``rho`` of the `subset`."
    plain = "How large: 1/N sum_n ||g_n||^4, as rho of the subset."
    found = report(X, legend={"x": {"meaning": meaning, "formula": meaning}})
    assert strip_markup(meaning) == plain
    assert f'title="{plain}"' in found._repr_html_()
    other = report(X, legend={"x": {"formula": "tr H"}})
    assert f"Different formulas of x: {plain}; tr H." in str(compare(found, other)).replace("\n", " ")


def test_the_list_of_measures_is_plain_text() -> None:
    listed = str(saltflat.list_measures())
    assert "sum_l |W_l|_F^2" in listed
    assert ":math:" not in listed
    assert "`" not in listed
    assert "\\" not in listed


def test_details_that_no_file_can_hold_are_refused_at_once() -> None:
    with pytest.raises(ReportError, match="but got a dtype in the details of 'x', 'kind'"):
        Reading("x", 1.0, details={"kind": torch.float32})


def test_a_report_is_a_mapping_of_its_readings() -> None:
    assert list(FULL) == ["rho(axis='row')", "trace"]
    assert FULL["rho(axis='row')"] is EVERYTHING
    assert len(FULL) == 2
    assert "trace" in FULL
    assert "distance" not in FULL
    assert FULL.get("tracer") is None


def test_an_unknown_measure_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Try 'trace'"):
        FULL["tracer"]


def test_a_measure_that_was_left_out_is_answered_with_the_reason() -> None:
    with pytest.raises(UnknownNameError, match="left out: it needs initial="):
        FULL["distance"]


def test_undefined_values_are_equal_to_each_other() -> None:
    assert Reading("x", float("nan")) == Reading("x", math.inf - math.inf)
    assert report(Reading("x", float("nan"))) == report(Reading("x", math.inf - math.inf))


@pytest.mark.parametrize("field", [each.name for each in fields(Reading)])
def test_readings_that_differ_anywhere_are_not_equal(field: str) -> None:
    assert replace(EVERYTHING, **{field: getattr(Reading("y", 1.0), field)}) != EVERYTHING


@pytest.mark.parametrize("field", [each.name for each in fields(Report)])
def test_reports_that_differ_anywhere_are_not_equal(field: str) -> None:
    other = Report({}, {}, {}, "", 0, 0.0, {}, {}, "", 0.0, {}, None, (), "")
    assert replace(FULL, **{field: getattr(other, field)}) != FULL


def test_a_report_comes_back_from_disk_as_it_was(tmp_path: Path) -> None:
    path = FULL.save(tmp_path / "full.json")
    back = Report.load(path)
    assert back == FULL
    assert list(back) == list(FULL)
    assert math.isnan(back["rho(axis='row')"].details["deep"]["$float"]["$float"])
    assert math.isnan(back["rho(axis='row')"].units["0.weight"][1])


@pytest.mark.parametrize("value", [0.1 + 0.2, 5e-324, -0.0, 1.7976931348623157e308, 1 / 3, INF, -INF])
def test_numbers_come_back_bit_for_bit(value: float, tmp_path: Path) -> None:
    back = Report.load(report(Reading("x", value)).save(tmp_path / "x.json"))["x"].value
    assert struct.pack("d", back) == struct.pack("d", value)


def test_a_mapping_that_looks_like_a_coded_number_comes_back_as_a_mapping() -> None:
    details = {"a": {"$float": "nan"}, "$$b": 1, "$c": {"$float": "inf", "d": 2}}
    assert Reading.from_dict(Reading("x", 1.0, details=details).to_dict()).details == details


def test_the_file_is_strict_json_and_names_its_schema(tmp_path: Path) -> None:
    text = FULL.save(tmp_path / "full.json").read_text(encoding="utf-8")
    content = json.loads(text, parse_constant=refuse_constant)
    assert content["schema"] == "saltflat.report/1"
    assert content["readings"]["trace"]["value"] == {"$float": "nan"}
    assert content == FULL.to_dict()


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = FULL.save(tmp_path / "full.json")
    text = path.read_text(encoding="utf-8").rstrip()
    for length in [*range(0, len(text), 53), len(text) - 1]:
        path.write_text(text[:length], encoding="utf-8")
        with pytest.raises(ReportError, match="broken or cut short"):
            Report.load(path)


def changed(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(FULL.to_dict())), **changes}


BROKEN = {
    "a list": [1, 2],
    "no schema": {key: value for key, value in FULL.to_dict().items() if key != "schema"},
    "another schema": changed(schema="saltflat.report/2"),
    "a field missing": {key: value for key, value in FULL.to_dict().items() if key != "loss"},
    "a field too many": changed(colour="red"),
    "a text for a number": changed(loss="small"),
    "a number as text": changed(loss="0.25"),
    "a list for a mapping": changed(left_out=["trace"]),
    "readings that are none": changed(readings={"trace": 3.0}),
    "a reading with a field too many": changed(readings={"x": {**Reading("x", 1.0).to_dict(), "colour": "red"}}),
    "a text for a truth": changed(readings={"x": {**Reading("x", 1.0).to_dict(), "exact": "no"}}),
    "a coded number that is none": changed(loss={"$float": "small"}),
    "a number too large": changed(loss=10**400),
    "a reading too large": changed(readings={"x": {**Reading("x", 1.0).to_dict(), "value": 10**400}}),
    "a reading without a name": changed(readings={"x": {**Reading("x", 1.0).to_dict(), "name": 3}}),
    "details in a list": changed(readings={"x": {**Reading("x", 1.0).to_dict(), "details": []}}),
    "a list for the certificate": changed(certificate=["holds"]),
    "a text for the settings": changed(settings="exact"),
    "a text in the legend": changed(legend={"trace": "How sharp."}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_a_report_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(BROKEN[case]), encoding="utf-8")
    with pytest.raises(ReportError, match=r"Expected .*, but got .*broken\.json.*\. (Try|Check) ") as caught:
        Report.load(path)
    assert str(caught.value).count("Expected ") == 1


def test_a_report_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    for depth in (100, 400):  # the settings are one level below the top; more than 400 is too much for some parsers
        deep = depth * '{"a":' + "1" + depth * "}"
        path.write_text(json.dumps(changed(settings="DEEP")).replace('"DEEP"', deep), encoding="utf-8")
        with pytest.raises(ReportError, match=r"deep\.json.*nested more than 100 levels deep"):
            Report.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b'{"schema": NaN}', b"[" * 100_000])
def test_what_is_not_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match="broken or cut short"):
        Report.load(path)


def test_a_missing_file_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"none\.json.*cannot be read"):
        Report.load(tmp_path / "none.json")
    with pytest.raises(ReportError, match="folder does not exist"):
        FULL.save(tmp_path / "none" / "full.json")
    with pytest.raises(ReportError, match="is a folder"):
        FULL.save(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "none" / "full.json")
    for name, why in {"pipe": "no regular file", "link": "folder does not exist", 300 * "a": "too long"}.items():
        with pytest.raises(ReportError, match=why):
            FULL.save(tmp_path / name)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FULL.save(tmp_path / "full.json")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ReportError, match="No space left"):
        network(3, 3).save(path)
    assert Report.load(path) == FULL
    assert os.listdir(tmp_path) == ["full.json"]


def test_saving_again_replaces_the_file_and_follows_links(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    FULL.save(target)
    link.symlink_to(target)
    network(2, 1).save(link)
    assert link.is_symlink()
    assert Report.load(target) == network(2, 1)


@pytest.mark.parametrize("width", [20, 40, 100, 160])
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 4), (20, 12), (60, 30)])
def test_print_keeps_to_the_width(shape: tuple[int, int], width: int) -> None:
    text = render_text(network(*shape), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()


def test_print_shows_every_value_where_layers_fit() -> None:
    text = render_text(report(Reading("rho", 3.25, {"a.weight": 1.25, "b.weight": 2.0}, stderr=0.5)), 100)
    (row,) = [line for line in text.splitlines() if line.startswith("rho")]
    assert row.split() == ["rho", "3.25", "+-", "0.50", "1.25", "2"]


def test_print_turns_the_table_where_layers_do_not_fit() -> None:
    lines = render_text(network(12, 3), 100).splitlines()
    (total,) = [line.split() for line in lines if line.startswith("measure_number_2")]
    assert total == ["measure_number_2", "2.00", "+-", "0.10"]
    (layer,) = [line.split() for line in lines if line.startswith("stages.2.blocks.11.")]
    assert layer == ["stages.2.blocks.11.convolution.weight", "0.11", "1.11", "2.11"]


def test_of_many_layers_print_shows_the_largest_and_counts_the_others() -> None:
    text = render_text(network(60, 2), 100)
    shown = [line.split()[0].split(".")[3] for line in text.splitlines() if line.startswith("stages.")]
    assert shown == [str(i) for i in range(40, 60)]
    assert "40 more layers" in text


def test_print_says_what_is_uncertain_left_out_and_certified() -> None:
    uncertain = Reading("rho", 1.0, exact=False, converged=False, notes=("Two units are dead.",))
    lines = render_text(report(uncertain, Reading("trace", NAN)), 120).splitlines()
    assert ["rho", "~![1]", "1"] in [line.split() for line in lines]
    assert ["trace", "undefined"] in [line.split() for line in lines]
    assert "~ an estimate, a bound or the result of a search" in lines
    assert "! the solver stopped before it was done" in lines
    assert "[1] Two units are dead." in lines
    assert f"Note: {TRAIN_MODE}" in lines
    assert "Left out: distance: it needs initial=." in lines
    assert any("blocks are the Hessian's (largest gap 1.0e-12, 8 examples)" in line for line in lines)


def test_what_is_undefined_is_no_estimate() -> None:
    text = render_text(report(Reading("trace", NAN, exact=False, notes=("There are no weights.",))), 100)
    assert "~" not in text
    assert "undefined" in text
    assert "[1] There are no weights." in text


def test_print_speaks_of_signs_only_where_they_are_used() -> None:
    text = render_text(report(Reading("rho", 1.0)), 100)
    assert "~" not in text
    assert "!" not in text


@pytest.mark.parametrize(("certificate", "said"), [(None, "not requested"), ({"holds": False, "gap": NAN}, "are NOT")])
def test_print_says_when_there_is_no_certificate(certificate: Mapping[str, Any] | None, said: str) -> None:
    assert said in str(report(certificate=certificate))


def test_the_head_says_what_was_measured_and_how() -> None:
    head = render_text(report(), 120).splitlines()[:2]
    assert head == [
        "Net, 1234 parameters",
        "100 examples | loss 0.25 (cross_entropy) | columns exact | float64 | cpu | 1.5 s",
    ]


def test_an_empty_report_prints() -> None:
    empty = report(settings={}, left_out={}, notes=(), certificate=None)
    assert "Nothing was measured." in str(empty)
    assert "Nothing was measured." in empty._repr_html_()


def test_rich_and_str_show_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    console = Console(file=io.StringIO(), width=90, color_system=None)
    with console.capture() as capture:
        console.print(FULL)
    assert "\n".join(line.rstrip() for line in capture.get().splitlines()) == str(FULL)


def hostile() -> Report:
    reading = Reading(HOSTILE, 1.0, {HOSTILE: 1.0}, notes=(HOSTILE,))
    return report(reading, left_out={HOSTILE: HOSTILE}, notes=(HOSTILE,), model=HOSTILE, device=HOSTILE)


def test_hostile_names_are_printed_as_they_are_and_steer_no_terminal() -> None:
    for text in (render_text(hostile(), 300), render_text(compare(hostile(), hostile()), 300)):
        assert "[bold red]loud[/]" in text
        assert "\\x1b[2J" in text
        assert "\x1b" not in text
        assert "\u202e" not in text


class Tags(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("page", [hostile()._repr_html_(), compare(hostile(), hostile())._repr_html_()])
def test_html_escapes_everything_and_fetches_nothing(page: str) -> None:
    found = Tags(page)
    assert found.tags <= {"div", "style", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert found.attributes <= {"class", "title"}
    assert "url(" not in page
    assert "@import" not in page
    assert any("<script>alert('x')</script>" in text for text in found.texts)


def test_html_has_every_layer_and_the_meaning_of_the_measure() -> None:
    page = network(60, 2)._repr_html_()
    texts = Tags(page).texts
    assert all(f"stages.{i // 5}.blocks.{i}.convolution.weight" in texts for i in range(60))
    assert "1.59" in texts
    assert 'title="How sharp."' in page


def test_a_frame_has_a_row_for_every_layer_and_one_for_the_network() -> None:
    reading = Reading("rho", 3.0, {"a": 1.0, "b": 2.0}, stderr=0.5, layer_stderr={"a": 0.25}, exact=False)
    reading = replace(reading, sampling_stderr=0.75, layer_sampling_stderr={"b": 0.125})
    frame = report(reading, Reading("trace", 7.0)).to_frame()
    assert list(frame.columns) == ["measure", "layer", "value", "stderr", "sampling_stderr", "exact", "converged"]
    rows = frame.fillna(-1).values.tolist()
    assert rows == [
        ["rho", "", 3.0, 0.5, 0.75, False, True],
        ["rho", "a", 1.0, 0.25, -1, False, True],
        ["rho", "b", 2.0, -1, 0.125, False, True],
        ["trace", "", 7.0, -1, -1, True, True],
    ]


def test_an_empty_report_has_an_empty_frame_with_the_same_columns() -> None:
    assert list(report().to_frame().columns) == list(FULL.to_frame().columns)
    assert len(report().to_frame()) == 0


def test_a_package_is_named_as_pip_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingPackageError, match=r"Try pip install PyYAML\."):
        import_optional("yaml", "a study in YAML")


def test_no_message_advises_to_install_what_cannot_be() -> None:
    """The library is not on the package index: its extras cannot be had from there."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*known["dependencies"], *chain(*known["optional-dependencies"].values())]
    names = {re.split(r"[<>=]", each)[0] for each in listed}
    advised = [
        word
        for path in (ROOT / "saltflat").rglob("*.py")
        for words in re.findall(r"pip install ([^.,\"]+)", path.read_text(encoding="utf-8"))
        for word in words.split()
    ]
    assert len(advised) >= 5
    assert set(advised) <= {*names, "{wanted}"}


@pytest.mark.parametrize(("module", "method"), [("pandas", "to_frame"), ("matplotlib.figure", "plot")])
def test_a_missing_package_is_named(module: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    name = module.partition(".")[0]
    with pytest.raises(MissingPackageError, match=rf"Try pip install {name}"):
        getattr(FULL, method)()


def drawn(figure: Any) -> Any:
    """The figure, once it has really been rendered."""
    figure.savefig(io.BytesIO(), format="png", dpi=30)
    return figure


def bars(axis: Any) -> list[float]:
    return [float(patch.get_width()) for patch in axis.patches]


def labels(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_yticklabels()]


def test_a_plot_has_a_panel_per_measure_and_a_bar_per_layer() -> None:
    figure = drawn(
        report(
            Reading("rho", 3.0, {"a": 1.0, "b": 2.0}, stderr=0.5, layer_stderr={"a": 0.25}),
            Reading("trace", 7.0, stderr=0.5),
        ).plot()
    )
    layered, whole = figure.axes
    assert layered.get_title(loc="left") == "rho\n3.00 +- 0.50"
    assert bars(layered) == [1.0, 2.0]
    assert labels(layered) == ["a", "b"]
    assert layered.get_xscale() == "linear"
    ((start, _), (end, _)) = layered.collections[0].get_segments()[0]
    assert (start, end) == pytest.approx((1 - 1.96 * 0.25, 1 + 1.96 * 0.25))
    assert len(layered.collections[0].get_segments()) == 1
    assert bars(whole) == [7.0]
    assert labels(whole) == ["network"]


@pytest.mark.parametrize(
    ("values", "scale"),
    [((1.0, 90.0), "linear"), ((1.0, 110.0), "log"), ((0.0, 1.0, 110.0), "log"), ((-1.0, 1.0, 110.0), "linear")],
)
def test_a_plot_is_logarithmic_where_positive_values_span_two_decades(values: tuple[float, ...], scale: str) -> None:
    figure = drawn(report(Reading("x", 1.0, {str(i): value for i, value in enumerate(values)})).plot())
    assert figure.axes[0].get_xscale() == scale


def test_a_plot_needs_no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert len(drawn(network(3, 4).plot()).axes) == 4


def test_a_plot_shows_the_largest_of_many_layers() -> None:
    axis = drawn(network(60, 1).plot()).axes[0]
    assert bars(axis) == [i / 100 for i in range(30, 60)]
    assert "the 30 largest of 60 layers" in axis.get_title(loc="left")
    assert labels(axis)[-1] == "...s.59.convolution.weight"


def test_a_plot_of_chosen_measures_has_only_these() -> None:
    titles = [axis.get_title(loc="left").split("\n")[0] for axis in network(3, 5).plot(["measure_number_3"]).axes]
    assert titles == ["measure_number_3"]
    assert len(network(3, 5).plot("measure_number_3").axes) == 1
    with pytest.raises(UnknownNameError, match="Try 'measure_number_3'"):
        network(3, 4).plot("measure_nunber_3")


@pytest.mark.parametrize(
    "case",
    [report(), hostile(), report(Reading("x", NAN, {"a": NAN, "b": INF}, stderr=NAN)), report(Reading("x", 1e300))],
)
def test_whatever_a_report_holds_can_be_drawn(case: Report) -> None:
    drawn(case.plot())


def test_fewer_than_two_reports_are_refused() -> None:
    for given in ((), (FULL,), ({"only": FULL},)):
        with pytest.raises(ReportError, match="Expected two or more reports"):
            compare(*given)


def test_what_is_no_report_is_refused() -> None:
    with pytest.raises(ReportError, match="but got a int to compare"):
        compare(FULL, 3)  # type: ignore[arg-type]


def test_reports_paths_and_mappings_are_compared_alike(tmp_path: Path) -> None:
    path = FULL.save(tmp_path / "sgd.json")
    assert list(compare(FULL, FULL).reports) == ["1", "2"]
    assert list(compare(path, str(path), FULL).reports) == ["sgd", "sgd (2)", "3"]
    assert list(compare({"a": FULL, "b": path}).reports) == ["a", "b"]
    assert compare({"a": FULL, "b": path}).reports["b"] == FULL


VERDICTS: list[tuple[Reading, Reading, str]] = [
    (sure("x", 1.0, sampling_stderr=0.3), sure("x", 2.28, sampling_stderr=0.4), "within errors"),
    (sure("x", 1.0, sampling_stderr=0.3), sure("x", 2.3, sampling_stderr=0.4), "different"),
    (sure("x", 1.0, sampling_stderr=0.3, stderr=0.4), sure("x", 2.28), "within errors"),
    (sure("x", 1.0), sure("x", 1.0), "same"),
    (sure("x", 1.0), sure("x", 1 + 9e-10), "same"),
    (sure("x", 1.0), sure("x", 1 + 1.1e-9), "different"),
    (sure("x", 0.0), sure("x", 1e-300), "different"),
    (sure("x", INF), sure("x", INF), "same"),
    (sure("x", INF), sure("x", 1.0), "different"),
    (sure("x", NAN), sure("x", 1.0), "undefined"),
    # 2.58 sqrt(3^2 + 4^2) = 12.9
    (sure("x", 100.0, stderr=3.0), sure("x", 112.8, stderr=4.0), "within errors"),
    (sure("x", 100.0, stderr=3.0), sure("x", 113.0, stderr=4.0), "different"),
    (sure("x", 100.0, stderr=5.0), sure("x", 112.8), "within errors"),
    (sure("x", 100.0, stderr=5.0), sure("x", 113.0), "different"),
    (sure("x", 1.0, stderr=0.0), sure("x", 1 + 1e-12, stderr=0.0), "within errors"),
    (sure("x", 1.0, stderr=NAN), sure("x", 2.0), "not judged"),
    (Reading("x", 1.0), sure("x", 2.0), "not judged"),
    (Reading("x", 1.0), Reading("x", 1.0), "same"),
    (sure("x", 1.0, exact=False, stderr=0.1), sure("x", 2.0), "different"),
    (sure("x", 1.0), sure("x", 2.0, stderr=0.1, converged=False), "not judged"),
]


@pytest.mark.parametrize(("first", "other", "verdict"), VERDICTS)
def test_a_difference_counts_when_it_exceeds_the_errors(first: Reading, other: Reading, verdict: str) -> None:
    assert compare(report(first), report(other))["x"].verdicts == {"2": verdict}
    assert compare(report(other), report(first))["x"].verdicts == {"2": verdict}


def test_differences_and_ratios_are_from_the_first() -> None:
    contrast = compare(report(sure("x", 4.0)), report(sure("x", 1.0)), report(sure("x", 6.0)))["x"]
    assert contrast.differences == {"2": -3.0, "3": 2.0}
    assert contrast.ratios == {"2": 0.25, "3": 1.5}
    zero = compare(report(sure("x", 0.0)), report(sure("x", 1.0)))["x"]
    assert math.isnan(zero.ratios["2"])


def flatter(values: list[float], smaller: str = "flatter", **uncertain: Any) -> tuple[str | None, bool]:
    legend = {"x": {"smaller": smaller}}
    contrast = compare(*(report(sure("x", value, **uncertain), legend=legend) for value in values))["x"]
    return contrast.flattest, contrast.sure


def test_the_flattest_is_named_where_it_stands_out() -> None:
    assert flatter([2.0, 1.0]) == ("2", True)
    assert flatter([2.0, 1.0], "sharper") == ("1", True)
    assert flatter([2.0, 3.0, 1.0]) == ("3", True)
    assert flatter([2.0, 1.0], "larger network") == (None, True)
    assert flatter([1.0, 1.0]) == (None, True)
    assert flatter([1.0, 1.0, 2.0]) == (None, True)
    assert flatter([2.0, 1.0, NAN]) == (None, True)
    assert flatter([2.0, 1.0], stderr=0.1) == ("2", True)
    assert flatter([2.0, 1.0], stderr=1.0) == (None, True)
    assert flatter([2.0, 1.0], sampling_stderr=None) == ("2", False)
    assert flatter([1.0, 1.0], exact=False, sampling_stderr=None) == (None, False)


X = sure("x", 1.0)
DOUBTS: dict[str, tuple[Report, str]] = {
    "model": (report(X, model="Other, 5 parameters"), "Different models"),
    "data": (report(X, examples=99), "Different numbers of examples (not the same data): 100 in 1; 99 in 2."),
    "columns": (report(X, settings={**FULL.settings, "columns": "sampled(3)"}), "Different settings of columns"),
    "loss": (report(X, settings={**FULL.settings, "loss": "mse"}), "Different settings of loss"),
    "dtype": (report(X, settings={**FULL.settings, "dtype": "float32"}), "Different settings of dtype"),
    "new setting": (report(X, settings={**FULL.settings, "logits": "std"}), "logits: not said in 1; std in 2."),
    "versions": (report(X, versions={"saltflat": "0.2.0", "torch": "2.6.0"}), "Different versions of saltflat"),
    "device": (report(X, device="cuda:0"), "Different devices"),
    "certificate": (report(X, certificate={"holds": False}), "Different certificates"),
    "formula": (report(X, legend={"x": {"formula": "tr G"}}), "Different formulas of x"),
    "unconverged": (report(replace(X, converged=False)), "Not converged in 2: x."),
    "estimate": (report(replace(X, exact=False, sampling_stderr=None)), "unknown error in 2: x."),
    "other examples": (report(X, sample={"fingerprint": "1", "groups": [50, 50]}), "Different examples"),
    "other groups": (report(X, sample={"fingerprint": "0123456789abcdef", "groups": []}), "in other groups"),
    "unknown examples": (report(X, sample={}), "not known of 2"),
    "no error over examples": (report(replace(X, sampling_stderr=None)), "x in 2: no standard error over examples"),
    "doubtful input": (report(X, notes=("The inputs run from 0 to 255.",)), "2: The inputs run from 0 to 255."),
    "unequal loss": (report(X, loss=0.4), "Unequal loss"),
    "no minimum": (report(X, gradient_agreement=0.5, gradient_norm=3.0), "2 is not at a minimum: 50.0%"),
    "not attained": (
        report(replace(X, details={"0.weight": {"attained": False}})),
        "Minima that rescaling approaches but never reaches in 2",
    ),
    "floored": (report(replace(X, details={"floored_eigenvalues": 3})), "floor of rounding (upper bounds) in 2: x"),
    "left out": (report(left_out={"x": "it has no layers."}), "No x in 2: it has no layers."),
}


@pytest.mark.parametrize("case", DOUBTS)
def test_what_stands_against_comparing_is_said(case: str) -> None:
    other, said = DOUBTS[case]
    comparison = compare(report(X), other)
    assert [doubt for doubt in comparison.doubts if said in doubt] == list(comparison.doubts)
    assert len(comparison.doubts) == 1
    assert said in render_text(comparison, 200)
    assert said in " ".join(Tags(comparison._repr_html_()).texts)


def test_nothing_stands_against_comparing_the_same_way_of_measuring() -> None:
    other = report(X, seconds=9.0, created="later", settings={**FULL.settings, "seed": 5, "memory": 1})
    comparison = compare(report(X), other)
    assert comparison.doubts == ()
    assert "Nothing is known against comparing these." in str(comparison)


def test_rounding_is_no_difference() -> None:
    settings = {**FULL.settings, "dtype": "float32"}
    pair = [report(sure("x", value), settings=settings) for value in (1.0, 1 + 1e-6)]
    assert compare(*pair)["x"].verdicts == {"2": "same"}
    double = [report(sure("x", value)) for value in (1.0, 1 + 1e-6)]
    assert compare(*double)["x"].verdicts == {"2": "different"}


def test_the_same_examples_make_pairs_and_pairs_see_more() -> None:
    values = [(10.0, (11.0, 9.0)), (10.5, (11.51, 9.49))]
    pair = [report(Reading("x", value, sampling_stderr=6.5, without_group=group)) for value, group in values]
    assert compare(*pair).paired
    assert compare(*pair)["x"].verdicts == {"2": "different"}
    assert compare(*pair)["x"].errors["2"] == pytest.approx(0.01 * 6.48287, rel=1e-4)
    apart = compare(pair[0], replace(pair[1], sample={"fingerprint": "1", "groups": [50, 50]}))
    assert not apart.paired
    assert apart["x"].verdicts == {"2": "within errors"}


def invariant(*values: float, **changes: Any) -> Report:
    names = [f"x{number}" for number in range(len(values))]
    legend = {name: {"smaller": "flatter", "invariant_to": ["layer_scale", "unit_scale"]} for name in names}
    return report(*(sure(name, value) for name, value in zip(names, values, strict=True)), legend=legend, **changes)


ANSWERS: list[tuple[Report, Report, str]] = [
    (
        invariant(2, 2),
        invariant(1, 1),
        "2 is flatter beyond chance, by all 2 measures that rescaling cannot fool.",
    ),
    (
        invariant(2, 2),
        invariant(1, 2),
        "2 is flatter beyond chance, by 1 of the 2 measures that rescaling cannot fool; the other does not tell.",
    ),
    (invariant(2, 2), invariant(1, 3), "disagree on which is flatter: 2 by 1 and 1 by 1."),
    (invariant(2, 2), invariant(2, 2), "No difference beyond chance, by any of the 2 measures"),
    (invariant(2), invariant(1, loss=0.5), "But the losses are unequal."),
    (invariant(2), invariant(1, model="Other"), "But the models differ."),
    (invariant(2), invariant(1, sample={"fingerprint": "1", "groups": [50, 50]}), "But the examples differ."),
    (invariant(2, 2, 2), invariant(1, 2, 2), "Little difference: 1 of the 3 measures"),
    (report(sure("x", 2.0)), report(sure("y", 1.0)), "No measure is in more than one report"),
    (invariant(2), invariant(1), "2 is flatter beyond chance, by the only measure here that rescaling cannot fool."),
    (report(sure("x", 2.0)), report(sure("x", 1.0)), "None of these measures is invariant to rescaling"),
]


def test_measures_that_single_out_none_of_three_networks_do_not_tell() -> None:
    three = [invariant(3, 3), invariant(2, 1), invariant(1, 1)]
    assert compare(*three).answer.endswith(
        "by 1 of the 2 measures that rescaling cannot fool; the other does not tell."
    )


def test_other_forms_of_a_measure_have_no_vote() -> None:
    names = ("normalized_sharpness", "normalized_sharpness_arxiv")
    legend = {name: {"smaller": "flatter", "invariant_to": ["layer_scale", "unit_scale"]} for name in names}
    pair = [report(*(sure(name, value) for name in names), legend=legend) for value in (2.0, 1.0)]
    assert "by the only measure here" in compare(*pair).answer


@pytest.mark.parametrize(
    "sample", ["x", [], {"fingerprint": [1]}, {"groups": [0, 4]}, {"groups": ["a"]}, {"groups": 3}]
)
def test_a_report_with_a_damaged_sample_is_refused(sample: Any, tmp_path: Path) -> None:
    content = {**FULL.to_dict(), "sample": sample}
    with pytest.raises(ReportError):
        Report.from_dict(content)


@pytest.mark.parametrize(("first", "other", "answer"), ANSWERS)
def test_a_comparison_begins_with_an_answer(first: Report, other: Report, answer: str) -> None:
    comparison = compare(first, other)
    assert answer in comparison.answer
    assert " ".join(render_text(comparison, 200).split()).startswith(comparison.answer)
    assert comparison.answer in " ".join(Tags(comparison._repr_html_()).texts)


def test_only_the_named_measures_are_compared() -> None:
    pair = [report(X, Reading("y", 1.0)) for _ in range(2)]
    assert list(compare(*pair, names="y")) == ["y"]
    assert list(compare(*pair, names=["y", "x", "y"])) == ["y", "x"]
    with pytest.raises(UnknownNameError, match="but got the measure 'z'"):
        compare(*pair, names="z")
    with pytest.raises(UnknownNameError, match="left out: it needs initial="):
        compare(*pair, names="distance")
    with pytest.raises(UnknownNameError, match="but got the measure 'z'"):
        compare(*pair)["z"]


def test_two_reports_are_printed_side_by_side() -> None:
    pair = {"sgd": report(sure("x", 4.0)), "sam": report(sure("x", 1.0), sure("y", 5.0))}
    rows = [line.split() for line in render_text(compare(pair), 120).splitlines()]
    assert ["measure", "unchanged", "by", "sgd", "sam", "difference", "ratio", "verdict", "flatter"] in rows
    assert ["x", "4", "1", "-3", "0.25", "different", "sam"] in rows
    assert ["y", "5", "only", "in", "sam"] in rows


def test_a_narrow_terminal_has_the_flatter_one_as_the_verdict() -> None:
    pair = {
        "sgd": report(sure("x", 4.0), sure("z", 2.0)),
        "sam": report(sure("x", 1.0), sure("y", 5.0), sure("z", 2.0)),
    }
    rows = [line.split() for line in render_text(compare(pair), 64).splitlines()]
    assert ["measure", "unchanged", "by", "sgd", "sam", "ratio", "verdict"] in rows
    assert ["x", "4", "1", "0.25", "sam", "flatter"] in rows
    assert ["y", "5", "only", "in", "sam"] in rows
    assert ["z", "2", "2", "1", "same"] in rows


def test_ratios_have_the_interval_of_their_verdict() -> None:
    pair = {
        "sgd": report(sure("x", 4.0, sampling_stderr=0.3), sure("same", 2.0), sure("near", 100.0)),
        "sam": report(sure("x", 1.0, sampling_stderr=0.4), sure("same", 2.0), sure("near", 101.0, sampling_stderr=0.4)),
    }
    found = compare(pair)
    assert found["x"].compute_ratio_interval("sam") == pytest.approx((0.25 - 2.58 * 0.5 / 4, 0.25 + 2.58 * 0.5 / 4))
    assert found["x"].compute_ratio_interval("sgd") is None
    for name, each in found.items():
        low, high = each.compute_ratio_interval("sam") or (1.0, 1.0)
        assert (low <= 1 <= high) == (each.verdicts["sam"] in ("within errors", "same")), name
    text = render_text(found, 130)
    rows = [line.split() for line in text.splitlines()]
    assert [
        "measure",
        "unchanged",
        "by",
        "sgd",
        "sam",
        "difference",
        "ratio",
        "[99",
        "%]",
        "verdict",
        "flatter",
    ] in rows
    assert "0.25 [-0.0725, 0.573]" in text
    assert "1.01 [0.9997, 1.02]" in text
    assert "0.25 [-0.0725, 0.573]" in found._repr_html_()
    assert "ratio [99 %]" in render_text(found, 78), "without differences"
    assert "[99" not in render_text(found, 60), "without intervals"
    logarithmic = replace(found["x"], logarithmic=True)
    assert logarithmic.compute_ratio_interval("sam") is None
    assert repr(found["x"]) == "<Contrast of x: sgd 4, sam 1, different; sam is flatter>"


def test_losses_that_differ_by_more_than_a_tenth_are_unequal() -> None:
    def says_unequal(loss: float) -> bool:
        found = compare({"1": report(sure("x", 4.0), loss=1.0), "2": report(sure("x", 4.0), loss=loss)})
        return "the losses are unequal" in found.answer and any("Unequal loss" in each for each in found.doubts)

    assert [says_unequal(loss) for loss in (0.85, 0.95, 1.05, 1.15)] == [True, False, False, True]


def test_more_reports_are_printed_below_each_other() -> None:
    trio = {"a": report(sure("x", 4.0)), "b": report(sure("x", 1.0)), "c": report(sure("x", 4.0))}
    rows = [line.split() for line in render_text(compare(trio), 120).splitlines()]
    assert ["x", "a", "4", "b"] in rows
    assert ["b", "1", "-3", "0.25", "different"] in rows
    assert ["c", "4", "0", "1", "same"] in rows


@pytest.mark.parametrize("width", [20, 40, 100, 160])
@pytest.mark.parametrize("count", [2, 5])
def test_a_comparison_keeps_to_the_width(count: int, width: int) -> None:
    text = render_text(compare(*[network(4, 6)] * count), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()
    assert text.count("within") >= 6 * (count - 1)


def test_reports_without_readings_can_be_compared() -> None:
    comparison = compare(report(), report())
    assert "no readings" in str(comparison)
    assert "no readings" in comparison._repr_html_()
    assert len(comparison.to_frame()) == 0
    drawn(comparison.plot())


def test_a_comparison_is_strict_json() -> None:
    content = json.loads(json.dumps(compare(FULL, FULL).to_dict(), allow_nan=False))
    assert content["schema"] == "saltflat.comparison/1"
    assert content["contrasts"]["trace"]["values"]["1"] == {"$float": "nan"}
    assert content["contrasts"]["trace"]["verdicts"] == {"2": "undefined"}


def test_a_comparison_has_a_frame_by_layer_and_report() -> None:
    pair = [report(sure("x", total, {"a": total / 2})) for total in (4.0, 1.0)]
    frame = compare(*pair).to_frame().drop(columns="stderr")
    assert frame.values.tolist() == [
        ["x", "", "1", 4.0, 0.0, 1.0, ""],
        ["x", "a", "1", 2.0, 0.0, 1.0, ""],
        ["x", "", "2", 1.0, -3.0, 0.25, "different"],
        ["x", "a", "2", 0.5, -1.5, 0.25, "different"],
    ]


def test_a_comparison_plots_a_bar_per_report_in_its_own_colour() -> None:
    first = report(Reading("x", 4.0, {"a": 1.0, "b": 3.0}))
    second = report(Reading("x", 2.0, {"a": 0.5, "b": 1.5}), Reading("y", 1.0))
    both, alone = drawn(compare(first, second).plot(by="layer")).axes
    assert bars(both) == [1.0, 3.0, 0.5, 1.5]
    colours = [patch.get_facecolor() for patch in both.patches]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert alone.patches[0].get_facecolor() == colours[2]


def test_a_comparison_plots_ratios_with_their_intervals() -> None:
    first = report(sure("x", 4.0, sampling_stderr=0.3), Reading("y", 2.0))
    second = report(sure("x", 2.0, sampling_stderr=0.4), Reading("y", 3.0))
    (axis,) = drawn(compare(first, second).plot()).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["x *", "y *"]
    places = [float(line.get_xdata()[0]) for line in axis.lines if line.get_marker() == "o"]
    assert places == [0.5, 1.5]
    (interval,) = [each.get_segments()[0] for each in axis.collections]
    # The same interval as in the verdict: a difference of 2 +- 0.5, over the first value.
    assert interval[:, 0].tolist() == pytest.approx([0.5 - 2.58 * 0.5 / 4, 0.5 + 2.58 * 0.5 / 4])
    with pytest.raises(UnknownNameError, match="'layer'"):
        compare(first, second).plot(by="layers")  # type: ignore[arg-type]


@pytest.mark.parametrize("errors", [(0.01, 0.01), (0.01, 30.0)])
def test_ratios_have_numbers_on_their_axis_and_one_wide_interval_hides_no_other(errors: tuple[float, float]) -> None:
    first = report(*(sure(name, 1.0, sampling_stderr=error) for name, error in zip("xy", errors, strict=True)))
    second = report(*(sure(name, 0.9, sampling_stderr=error) for name, error in zip("xy", errors, strict=True)))
    (axis,) = drawn(compare(first, second).plot()).axes
    low, high = axis.get_xlim()
    assert high - low < 1.2
    assert sum(low <= tick <= high for tick in axis.get_xticks()) >= 3
    intervals = [each.get_segments()[0][:, 0] for each in axis.collections]
    crossing = [bool(start < 1 < end) for start, end in intervals]
    verdicts = [each.verdicts["2"] for each in compare(first, second).values()]
    assert crossing == [verdict == "within errors" for verdict in verdicts]


def test_every_error_is_one_of_ours() -> None:
    assert issubclass(ReportError, SaltflatError)
    assert issubclass(ReportError, ValueError)
    assert issubclass(MissingPackageError, SaltflatError)
    assert issubclass(MissingPackageError, ImportError)


def test_what_one_report_lacks_is_one_sentence() -> None:
    few, many = report(Reading("a", 1.0)), report(*(Reading(name, 1.0) for name in "abcd"))
    lacks = [doubt for doubt in compare(few, many).doubts if doubt.startswith("No ")]
    assert lacks == ["No b, c and d in 1: not requested."]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("value", True),
        ("sampling_stderr", True),
        ("sampling_stderr", -1.0),
        ("stderr", -1.0),
        ("layers", {"0.weight": False}),
        ("layer_stderr", {"0.weight": -0.5}),
        ("exact", 1),
    ],
)
def test_numbers_that_a_reading_cannot_have_are_refused(key: str, value: object) -> None:
    content = Reading("x", 1.0, layers={"0.weight": 1.0}, stderr=0.5).to_dict()
    assert Reading.from_dict(content).stderr == 0.5
    with pytest.raises(ReportError, match="cannot be understood"):
        Reading.from_dict({**content, key: value})


def test_a_measure_that_was_not_measured_is_called_that() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    report = saltflat.measure(net, (torch.randn(6, 2), torch.randint(2, (6,))), measures="kappa_trace")
    with pytest.raises(saltflat.SaltflatError, match=r"got 'rho', which was not measured\. Try adding it to measures="):
        report["rho"]


def test_a_report_written_by_the_first_version_is_read(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    report = saltflat.measure(net, (torch.randn(6, 2), torch.randint(2, (6,))), measures="kappa_trace")
    content = {**report.to_dict(), "schema": "saltflat.report/1"}
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert saltflat.Report.load(tmp_path / "old.json") == report
