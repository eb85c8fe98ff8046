"""Files with something wrong in them: whatever is done with them works, or raises an error of saltflat's own."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from mutated_files import KINDS, mutated, originals, raw_errors

import saltflat
from saltflat.errors import ReportError
from saltflat.results.jackknife import Jackknife

# So that they take some ten seconds. More of them: SALTFLAT_FUZZ_SECONDS=1 and another SALTFLAT_FUZZ_SEED.
FILES, PLOTTED = 500, 10


@pytest.fixture(scope="module")
def written() -> dict[str, dict[str, Any]]:
    return originals()


def test_no_mutated_file_gives_a_raw_error(written: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    dice = random.Random(os.environ.get("SALTFLAT_FUZZ_SEED", "0"))
    other, path = saltflat.Report.from_dict(written["report"]), tmp_path / "mutated.json"
    count, raw, read = 20_000 if "SALTFLAT_FUZZ_SECONDS" in os.environ else FILES, {}, 0
    for number in range(count):
        name = dice.choice(list(written))
        content, said = mutated(written[name], dice)
        path.write_text(json.dumps(content))
        kind = KINDS[written[name]["schema"].partition("/")[0]]
        found = raw_errors(path, kind, other, plots=read < PLOTTED)
        if found:
            raw[f"file {number}, {name}: {said}"] = {use: repr(error) for use, error in found.items()}
        try:
            kind.load(path)
            read += 1
        except ReportError:
            pass
    assert raw == {}
    assert 0 < read < count / 2


def test_files_that_were_not_changed_are_read(written: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    other, path = saltflat.Report.from_dict(written["report"]), tmp_path / "whole.json"
    for content in written.values():
        path.write_text(json.dumps(content))
        kind = KINDS[content["schema"].partition("/")[0]]
        found = kind.load(path)
        assert found.to_dict() == content
        assert found == kind.load(found.save(path))
        assert path.read_text() == json.dumps(content, indent=1) + "\n"
        assert raw_errors(path, kind, other, plots=False) == {}


@pytest.mark.parametrize(
    ("name", "place", "value", "says"),
    [
        ("report", ("legend", "kappa", "meaning"), 3, "'meaning' is no text"),
        ("report", ("legend", "kappa", "meaning"), {"$float": "nan"}, "'meaning' is no text"),
        ("report", ("legend", "kappa", "invariant_to"), 2.5, "'invariant_to' is no list"),
        ("report", ("legend", "kappa", "invariant_to"), ["x", None], "an entry of .*'invariant_to' is no text"),
        ("report", ("legend", "kappa", "logarithmic"), "no", "'logarithmic' is no truth value"),
        ("report", ("legend", "kappa"), None, "'kappa' is no mapping"),
        ("report", ("certificate", "gaps"), [1.0], "the certificate"),
        ("report", ("settings",), "exact", "the settings is no mapping"),
        ("report", ("sample", "groups"), [0], "a group of the sample is empty"),
        ("audit", ("report", "legend", "kappa", "invariant_to"), 5, "'invariant_to' is no list"),
        ("landscape", ("settings",), None, "the settings is no mapping"),
        ("landscape", ("directions",), [3], "directions"),
        ("spectrum", ("blocks", 0, "name"), 3, "the name of a block is no text"),
        ("spectrum", ("blocks", 0, "parameters"), 10**400, "parameters"),
        ("spectrum", ("blocks", 0, "complete"), None, "no truth value"),
        ("bound", ("delta",), 2.0, "delta is 2.0"),
        ("feature robustness", ("norm",), "nuclear", "the norm is 'nuclear'"),
        ("feature robustness", ("points", 0, "applies"), 1, "no truth value"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_when_it_is_read(
    written: dict[str, dict[str, Any]], tmp_path: Path, name: str, place: tuple[Any, ...], value: Any, says: str
) -> None:
    content = json.loads(json.dumps(written[name]))
    holder = content
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ReportError, match=rf"wrong\.json.*{says}"):
        KINDS[content["schema"].partition("/")[0]].load(path)


@pytest.mark.parametrize("scale", [1e150, 1e200, 1e300])
def test_errors_of_numbers_whose_squares_overflow(scale: float) -> None:
    usual = Jackknife(2.0, [2.5, 2.0, 1.5], [1, 1, 1]).stderr
    large = Jackknife(2.0 * scale, [2.5 * scale, 2.0 * scale, 1.5 * scale], [1, 1, 1]).stderr
    assert large / scale == pytest.approx(usual, rel=1e-12)
