"""A study as YAML: the same as in Python, and clear about what is wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from study_cases import study

from saltflat.errors import SaltflatError
from saltflat.studies import Study

TEXT = """
name: small
data: {name: digits, train_limit: 200, test_limit: 100}
axes:
  lr: [1e-1, 2E-1]
  width: [3, 4]
settings: {depth: 1, batch_size: 50}
stop: {epochs: 2}
measures: [squared_norm, distance_from_init, hessian_trace]
measure:
  examples: 30
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "study.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(folder: Path, text: str | bytes, *words: str) -> None:
    with pytest.raises(SaltflatError) as caught:
        Study.from_file(written(folder, text)).runs()
    told = str(caught.value)
    for word in ("Expected", ", but got ", *words):
        assert word in told, told


def test_yaml_and_python_give_the_same_study_and_keys(tmp_path: Path) -> None:
    found = Study.from_file(written(tmp_path, TEXT))
    assert found == study()
    assert list(found.runs()) == list(study().runs())


def test_a_study_comes_back_from_its_mapping(tmp_path: Path) -> None:
    for made in (study(), study(axes={"network": ["mlp", "study_cases:network"]}), study(train="study_cases:bare")):
        assert Study.from_dict(made.to_dict()) == made
        assert Study.from_file(written(tmp_path, yaml.safe_dump(made.to_dict()))) == made


def test_yaml_says_what_goes_hand_in_hand(tmp_path: Path) -> None:
    text = TEXT.replace("lr: [1e-1, 2E-1]", "batch_size, lr: [[50, 1e-1], [25, 2e-1]]").replace(", batch_size: 50", "")
    made = study(axes={"batch_size, lr": [[50, 0.1], [25, 0.2]], "width": [3, 4]}, settings={"depth": 1})
    assert Study.from_file(written(tmp_path, text)) == made
    assert Study.from_file(written(tmp_path, yaml.safe_dump(made.to_dict()))) == made
    refused(tmp_path, text.replace("[25, 2e-1]", "25"), "'batch_size, lr'", "2 values in a list")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("1E3", 1000.0), ("-2e+1", -20.0), ("1.5e2", 150.0), (".5e1", 5.0), ("3", 3), ("0.1", 0.1)],
)
def test_numbers_are_numbers_however_they_are_written(text: str, value: float, tmp_path: Path) -> None:
    found = Study.from_file(written(tmp_path, TEXT.replace("depth: 1", f"weight_decay: {text}")))
    assert found.settings["weight_decay"] == value
    assert type(found.settings["weight_decay"]) is type(value)


@pytest.mark.parametrize("text", ["1e", "e3", "1e-3x", "'1e-3'"])
def test_what_is_no_number_stays_text(text: str, tmp_path: Path) -> None:
    assert isinstance(
        Study.from_file(written(tmp_path, TEXT.replace("depth: 1", f"weight_decay: {text}"))).settings["weight_decay"],
        str,
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("axes:", "axis:", ("'axis'", "Try 'axes'")),
        ("train_limit", "train_limits", ("'train_limits'", "Try 'train_limit'")),
        ("name: digits", "name: digit", ("Try 'digits'",)),
        ("examples: 30", "exampels: 30", ("'exampels'", "Try 'examples'")),
        ("examples: 30", "dtype: float16", ("float16",)),
        ("examples: 30", "examples: 0", ("examples=0",)),
        ("examples: 30", "columns: exakt", ("exakt",)),
        ("examples: 30", "logits: stdd", ("stdd",)),
        ("examples: 30", "diagonal: hutch", ("Try 'hutchinson'",)),
        ("examples: 30", "memory: much", ("much",)),
        ("examples: 30", "certificate: 3", ("certificate=3",)),
        ("hessian_trace", "hessian_trase", ("Try 'hessian_trace'",)),
        ("epochs: 2", "epoch: 2", ("Try 'epochs'",)),
        ("batch_size: 50", "bacth_size: 50", ("Try 'batch_size'",)),
        ("lr: [1e-1, 2E-1]", "lr: 0.1", ("axis 'lr'", "list")),
        ("lr: [1e-1, 2E-1]", "lr: [.nan]", ("nan", "finite")),
        ("lr: [1e-1, 2E-1]", "lr: [2024-01-01]", ("date",)),
        ("lr: [1e-1, 2E-1]", "lr: [2024-99-01]", ("no study",)),
        ("lr: [1e-1, 2E-1]", "3: [1]", ("3", "quotes")),
        ("settings: {depth: 1, batch_size: 50}", "settings: [1]", ("settings=[1]",)),
        ("stop: {epochs: 2}", "stop: 2", ("stop=2",)),
        ("stop: {epochs: 2}", "", ("without stop",)),
        ("name: small", "name: ''", ("name",)),
        ("name: small", "name: [a]", ("name",)),
        ("name: small", "seeds: two\nname: small", ("seeds='two'",)),
        ("name: small", "together: 0\nname: small", ("together=0",)),
        ("name: small", "network: 7\nname: small", ("network=7",)),
        ("name: small", "name: small\nname: other", ("'name' is there twice", "line 3")),
        ("depth: 1", "depth: 1, depth: 2", ("'depth' is there twice",)),
        ("  width", "\twidth", ("line 6",)),
        ("name: small", "name: !!python/object/apply:os.system ['echo no']", ("no study",)),
        ("name: small", "name: small\n---\nname: other", ("no study",)),
        ("name: small", "name: &a [*a]", ("anchor &a",)),
        ("name: small", "? [a, b]\n: c\nname: small", ("no study",)),
    ],
)
def test_a_wrong_line_is_told(old: str, new: str, words: tuple[str, ...], tmp_path: Path) -> None:
    assert old in TEXT
    refused(tmp_path, TEXT.replace(old, new), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("empty",)),
        (b"# nothing but a comment\n", ("empty",)),
        (b"- a\n- b\n", ("list",)),
        (b"digits", ("text",)),
        (b"name: \xff\xfe", ("not UTF-8", "byte 6")),
        (b"name: [unclosed", ("line 1",)),
        (b"name: a\x00b", ("no study",)),
        (b"[" * 5000, ("no study",)),
        (b"name: " + b"x" * 1_100_000, ("1,000,000",)),
    ],
)
def test_a_file_that_is_no_study_is_told(content: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    refused(tmp_path, content, *words)


def test_a_file_that_is_not_there_or_a_folder_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(SaltflatError, match="cannot be read"):
            Study.from_file(path)


def test_tags_run_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "made"
    refused(tmp_path, f"name: !!python/object/apply:pathlib.Path.touch [{mark}]", "no study")
    assert not mark.exists()


def test_a_byte_order_mark_is_no_harm(tmp_path: Path) -> None:
    assert Study.from_file(written(tmp_path, b"\xef\xbb\xbf" + TEXT.encode())) == study()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "digits", "source": "digits"}, ("once",)),
        ({}, ("name",)),
        ({"name": "digits", "test": "b.npz"}, ("test",)),
        ({"name": "a.npz"}, ("test",)),
        ({"name": "digits", "train_limit": 0}, ("train_limit=0",)),
        ({"name": "digits", "held_out": True}, ("held_out=True",)),
        ({"name": "digits", "normalize": "haf"}, ("Try 'half'",)),
        ({"name": 3}, ("name=3",)),
        (3, ("type int", "a function of a module")),
    ],
)
def test_data_that_mean_nothing_are_refused(data: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(SaltflatError) as caught:
        study(data=data)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_study_of_the_documents_can_be_run_and_is_the_one_in_python(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "studies.md").read_text(encoding="utf-8")
    text = page.partition("```yaml\n")[2].partition("```")[0]
    code = page.partition("```python\n")[2].partition("results =")[0]
    known: dict[str, Any] = {}
    exec(code, known)
    found = Study.from_file(written(tmp_path, text))
    assert found == known["study"]
    assert len(found.runs()) == 24
    table = page.partition("## The definition")[2].partition("## ")[0]
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == [
        "name", "data", "network", "train", "axes", "seeds", "settings", "stop", "measures", "measure", "together",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("rho(axis='diag')", "Expected 'column' or 'row'"),
        ("fisher_logdet(subset=0)", "Expected a whole number from 1"),
        ("hessian_trace(x=1)", "no options"),
        ("rho(axes='row')", "Try 'axis'"),
    ],
)
def test_options_of_measures_are_tried_before_anything_is_trained(asked: str, told: str) -> None:
    for measures in ([asked], asked):
        with pytest.raises(SaltflatError, match=told):
            study(measures=measures)


def test_options_that_only_many_examples_allow_are_no_mistake() -> None:
    assert study(measures=["fisher_logdet(subset=5000)"]).measures == ("fisher_logdet(subset=5000)",)


def test_aliases_are_refused_before_they_grow(tmp_path: Path) -> None:
    """A few hundred bytes that took 2 GB and a minute: lists of nine lists of nine lists ..."""
    levels = [f"  a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 7)]
    bomb = "\n".join(["settings:", "  a0: &a0 [x, x, x, x, x, x, x, x, x]", *levels])
    bomb = TEXT.replace("settings: {depth: 1, batch_size: 50}", bomb)
    started = time.process_time()
    refused(tmp_path, bomb, "anchor &a0", "line 8")
    assert time.process_time() - started < 5
    refused(tmp_path, TEXT.replace("[3, 4]", "*lr"), "alias *lr", "line 6", "write out")
    refused(tmp_path, TEXT.replace("[3, 4]", "&width [3, 4]"), "anchor &width", "line 6")
    refused(tmp_path, TEXT.replace("[1e-1, 2E-1]", "&a [0.1, *a]"), "anchor &a")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        pytest.param("!!int ''", "tag", id="tag"),
        pytest.param("!!bool x", "tag", id="bool"),
        pytest.param("!!timestamp x", "tag", id="timestamp"),
        pytest.param("0x" + 9000 * "f", "9,002 characters", id="hexadecimal"),
        pytest.param("1" + 9000 * ":59", "27,001 characters", id="base 60"),
        pytest.param("1" + 9000 * ":59" + ".5", "27,003 characters", id="base 60 with a fraction"),
        pytest.param(9000 * "9", "9,000 characters", id="decimal"),
        pytest.param(25 * "[" + 25 * "]", "20 levels", id="nested"),
        pytest.param("\n" + "\n".join(" " * level + "a:" for level in range(1, 300)), "20 levels", id="indented"),
    ],
)
def test_values_that_no_study_has_are_refused_where_they_stand(value: str, word: str, tmp_path: Path) -> None:
    refused(tmp_path, TEXT.replace("depth: 1, batch_size: 50", "").replace("{}", value), word, "line ")


def test_all_that_is_wrong_with_measures_is_told_at_once() -> None:
    with pytest.raises(SaltflatError, match=r"2 problems in the measures. \(1\) .*'rho'.* \(2\) .*'column' or 'row'"):
        study(measures=["roh", "rho(axis='diag')", "squared_norm"])
