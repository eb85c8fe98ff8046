"""Files of version 1, with the first names of settings: they are read, scored and continued as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from study_cases import own, study

from saltflat.errors import StudyError
from saltflat.studies import Results, Study, verify
from saltflat.studies.canonical import config_from_version_1, study_from_version_1, to_version_1
from saltflat.studies.recipe import ADDED
from saltflat.studies.store.packed_rows import PackedRows
from saltflat.studies.store.rows import add_digest

ROOT = Path(__file__).parent.parent.parent
COMMITTED = sorted(path.parent for path in (ROOT / "papers").glob("*/results/**/study.json"))


def make_version_1(folder: Path, digests: bool) -> None:
    """Rewrite the definition, rows and table of a study as version 1 wrote them."""
    plain = json.loads((folder / "study.json").read_text())
    plain["schema"] = "saltflat.study/1"
    renamed = {"batch_size": "batch", "weight_decay": "l2"}
    for part in ("settings", "axes"):
        named = {
            ", ".join(renamed.get(one, one) for one in name.split(", ")): value
            for name, value in plain["study"][part].items()
        }
        plain["study"][part] = named
    contents = {folder / "study.json": plain}
    for path in (folder / "rows").glob("*.json"):
        row = json.loads(path.read_text())
        contents[path] = {**row, "schema": "saltflat.row/1", "config": to_version_1(row["config"])}
    for path, content in contents.items():
        del content["digest"]
        path.write_text(json.dumps(add_digest(content) if digests else content))
    header, _, lines = (folder / "table.csv").read_text().partition("\n")
    (folder / "table.csv").write_text(",".join(renamed.get(name, name) for name in header.split(",")) + "\n" + lines)


@pytest.mark.parametrize("digests", [True, False])
def test_files_of_version_1_are_read_and_continued(digests: bool, tmp_path: Path) -> None:
    made = study(
        axes={"batch_size, lr": [[50, 0.1], [25, 0.2]], "width": [3, 4]},
        settings={"depth": 1, "weight_decay": 0.01, "momentum": 0.9},
    )
    before = made.run(tmp_path, progress=False)
    make_version_1(tmp_path, digests)
    found = Results.load(tmp_path)
    assert found.study == made
    assert found.rows == before.rows
    assert found.csv() == before.csv()
    assert not verify(tmp_path).problems
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").iterdir()}
    again = made.run(tmp_path, progress=False)
    assert again.rows == before.rows
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").iterdir()} == times, "nothing is made again"
    assert json.loads((tmp_path / "study.json").read_text())["schema"] == "saltflat.study/2"
    assert (tmp_path / "table.csv").read_text() == before.csv()
    assert not verify(tmp_path).problems


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_the_committed_studies_keep_their_keys(folder: Path) -> None:
    found = Results.load(folder)
    runs = found.study.runs()
    # A study may be committed before all its networks are trained; every row that is there is read.
    files = [path.stem for path in (folder / "rows").glob("*")]
    assert len(found.rows) == len({*files, *PackedRows(folder).contents}) > 0
    assert [key for key in runs if key in found.rows] == list(found.rows)
    for key, row in found.rows.items():
        assert {name: row.config[name] for name in runs[key]} == runs[key]
    assert not verify(folder).problems


def test_a_study_from_before_a_setting_can_vary_it(tmp_path: Path) -> None:
    axes = {"lr": [0.1, 0.2], "width": [3, 4]}
    study(axes=axes).run(tmp_path, progress=False)
    for path in (tmp_path / "rows").glob("*.json"):
        row = json.loads(path.read_text())
        row["config"] = {name: value for name, value in row["config"].items() if name not in ADDED}
        del row["digest"]
        path.write_text(json.dumps(add_digest(row)))
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").iterdir()}
    wider = study(axes={**axes, "sam": [0, 0.1]})
    found = wider.run(tmp_path, progress=False)
    assert found.counts["done"] == len(wider.runs()) == 2 * len(times)
    assert {path: path.stat().st_mtime_ns for path in times} == times, "nothing is made again"
    assert {row.config["sam"] for row in Results.load(tmp_path).rows.values()} == {0, 0.1}
    assert found.effects(missed="keep")["sam"][0.1].pairs == len(times)
    assert found.scores(missed="keep", resamples=0).runs == 2 * len(times)
    assert not verify(tmp_path).problems


CONFIG = {"optimizer": "adam", "lr": 0.1, "l2": 0.0, "weight_decay": 0.0, "batch": 64}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"optimizer": "adam", "weight_decay": 0.0}),
        ({"l2": 0.1}, {"optimizer": "adam", "weight_decay": 0.1}),
        ({"l2": 0.1, "optimizer": "sgd"}, {"optimizer": "sgd", "weight_decay": 0.1}),
        ({"weight_decay": 0.1}, {"optimizer": "adamw", "weight_decay": 0.1}),
    ],
)
def test_weight_decay_is_translated_both_ways(old: dict[str, Any], new: dict[str, Any]) -> None:
    config = {**CONFIG, **old}
    found = config_from_version_1(config)
    assert found == {"lr": 0.1, "batch_size": 64, **new}
    assert to_version_1(found) == config


@pytest.mark.parametrize("old", [{"optimizer": "sgd", "weight_decay": 0.1}, {"l2": 0.1, "weight_decay": 0.1}])
def test_a_weight_decay_that_torch_does_not_have_is_refused(old: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match=r"Expected a weight decay as torch\.optim has it"):
        config_from_version_1({**CONFIG, **old})
    with pytest.raises(StudyError, match=r"Expected a weight decay as torch\.optim has it"):
        study_from_version_1({"axes": {"lr": [0.1]}, "settings": {"optimizer": "adam", **old}})


def test_axes_of_version_1_are_translated() -> None:
    plain = {"axes": {"l2": [0, 0.1], "batch ,lr": [[1, 2]]}, "settings": {"weight_decay": 0.0, "depth": 2}}
    wanted = {"axes": {"weight_decay": [0, 0.1], "batch_size, lr": [[1, 2]]}, "settings": {"depth": 2}}
    assert study_from_version_1(plain) == wanted
    plain = {"axes": {"weight_decay": [0, 0.1]}, "settings": {"optimizer": "adam", "l2": 0.0}}
    assert study_from_version_1(plain) == {"axes": {"weight_decay": [0, 0.1]}, "settings": {"optimizer": "adamw"}}


def test_the_names_of_a_train_function_stay() -> None:
    made = own(train="study_cases:old_names", axes={"batch": [1, 2]}, settings={"l2": 0.5})
    assert Study.from_dict(study_from_version_1(made.to_dict())) == made
    for config in made.runs().values():
        assert config_from_version_1(config) == config
