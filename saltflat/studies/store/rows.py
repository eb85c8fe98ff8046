"""Rows as strict JSON, in files that carry a digest, so that damage is noticed before it is used."""

from __future__ import annotations

import errno
import json
import stat
import zlib
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from saltflat.errors import StudyError
from saltflat.results.files import FileFormat, check_schema
from saltflat.results.json_codec import decode_nonfinite, encode_key, encode_nonfinite
from saltflat.results.report import Reading
from saltflat.results.text import make_printable
from saltflat.studies.canonical import compute_digest, config_from_version_1
from saltflat.studies.row import STATUSES, Outcome, Row

ROW = FileFormat("saltflat.row/2", "a row of a study", "Study.run", older=("saltflat.row/1",))
ENDS = ("done", "missed", "diverged")
COUNTS = ("epochs", "train_examples", "test_examples", "parameters")
NUMBERS = ("train_loss", "train_error", "test_loss", "test_error", "norm")
TUPLES = ("curve", "notes")


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as strict JSON, nan and inf encoded as in ``saltflat.results.json_codec``."""
    return {each.name: encode_nonfinite(getattr(outcome, each.name)) for each in fields(outcome)}


def outcome_from_dict(given: Mapping[str, Any]) -> Outcome:
    """Return the outcome that ``outcome_to_dict`` was called on."""
    values: dict[str, Any] = {key: decode_nonfinite(value) for key, value in given.items()}
    values = {key: tuple(value) if key in TUPLES else value for key, value in values.items()}
    found = Outcome(**values)
    numbers = [*(values[name] for name in NUMBERS), *found.curve, *([] if found.distance is None else [found.distance])]
    if (
        found.status not in ENDS
        or not all(type(values[name]) is int for name in COUNTS)
        or not all(type(each) in (int, float) for each in numbers)
        or not all(isinstance(note, str) for note in found.notes)
    ):
        raise TypeError("a field of the outcome has a value of another kind")
    return found


def row_to_dict(row: Row, schema: str = ROW.schema) -> dict[str, Any]:
    """Return the row as strict JSON, with a digest of it: scores rely on rows, so nobody should have edited one."""
    plain = {
        "schema": schema,
        "key": row.key,
        "status": row.status,
        "config": encode_nonfinite(row.config),
        "outcome": None if row.outcome is None else outcome_to_dict(row.outcome),
        "readings": {encode_key(name): reading.to_dict() for name, reading in row.readings.items()},
        "measured": encode_nonfinite(row.measured),
        "failure": encode_nonfinite(row.failure),
        "seconds": encode_nonfinite(row.seconds),
        "made_with": encode_nonfinite(row.made_with),
    }
    return add_digest(plain)


def row_from_dict(given: Mapping[str, Any]) -> Row:
    """Return the row that ``row_to_dict`` was called on, with its settings by their present names."""
    try:
        check_digest(given)
        readings = {name.removeprefix("$"): Reading.from_dict(each) for name, each in given["readings"].items()}
        rest = {
            key: decode_nonfinite(given[key]) for key in ("key", "status", "config", "measured", "failure", "seconds")
        }
        outcome = None if given["outcome"] is None else outcome_from_dict(given["outcome"])
        row = Row(**rest, outcome=outcome, readings=readings, made_with=decode_nonfinite(given["made_with"]))
        # Reading is lenient: a row that is not written back as it was read is not one of ours.
        tables = (row.config, row.measured, row.seconds, row.made_with, row.failure or {})
        again = row_to_dict(row, given["schema"])
        if DIGEST not in given:
            del again[DIGEST]
        check_schema(given, "a row", ROW)
        if again != given or row.status not in STATUSES or not all(isinstance(t, dict) for t in tables):
            raise TypeError("a field has a value of another kind")
        _check_row_types(row)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as problem:
        raise StudyError(
            f"Expected a row as Study.run writes it, but got one that cannot be understood ({type(problem).__name__}: "
            f"{problem}). Try running the study again, which makes it again."
        ) from problem
    return row if given["schema"] == ROW.schema else replace(row, config=config_from_version_1(row.config))


def _check_row_types(row: Row) -> None:
    """Raise an error if a number that scores use, or a string that pages print, has another type."""
    texts: list[Any] = [] if row.failure is None else [row.failure["error"], *row.failure.values()]
    numbers: list[Any] = list(row.seconds.values())
    if row.outcome is not None:
        own = {each.name: getattr(row.outcome, each.name) for each in fields(row.outcome)}
        texts += [own.pop("status"), *own.pop("notes")]
        numbers += own.pop("curve")
        numbers += [value for name, value in own.items() if not (name == "distance" and value is None)]
    if not all(isinstance(each, str) for each in texts):
        raise TypeError("a string is of another kind")
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers):
        raise TypeError("a number is of another kind")
    for each in (*numbers, *row.config.values()):
        if isinstance(each, int):
            float(each)  # raises where there is no such float


DIGEST = "digest"
# Of the tensors alone, in files of earlier versions.
CHECKSUM = "checksum"
# Errors of the machine or its settings, not of the file: it must not be set aside.
PASSING = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DamageError(StudyError):
    """A file of a study changed after it was written.

    Attributes:
        path: path of the file.
        why: the reason, as the end of a sentence.
    """

    def __init__(self, path: Path, why: str) -> None:
        self.path, self.why = path, make_printable(why)  # it may quote what the file holds
        super().__init__(
            f"Expected {str(path)!r} as Study.run wrote it, but {self.why}. "
            "Try saltflat study run again: it sets the file aside and makes it again."
        )


def explain_damage(problem: BaseException) -> str:
    """Return why a file could not be understood, as the end of a sentence.

    Example:
        >>> explain_damage(KeyError("outcome"))
        "it lacks 'outcome'"
    """
    cause = problem.__cause__ or problem
    if isinstance(cause, KeyError):
        return f"it lacks {cause}"
    if isinstance(cause, json.JSONDecodeError | UnicodeDecodeError):
        return f"it is broken or cut short ({cause})"
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)


def has_file(path: Path) -> bool:
    """Return whether there is a readable regular file; raise a DamageError if there is anything else."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: a pipe would wait for a writer
            raise DamageError(path, f"it is {'a folder' if path.is_dir() else 'not a regular file'}")
        with path.open("rb"):
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as problem:
        if problem.errno in PASSING:
            raise StudyError(
                f"Expected a file that can be read, but got {str(path)!r} ({problem.strerror}). "
                "Try its permissions and the limits of this machine, then the same command again."
            ) from problem
        raise DamageError(path, problem.strerror or str(problem)) from problem


def add_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with its digest."""
    return {**content, DIGEST: compute_digest(content)}


def check_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``add_digest`` was given; raise a ValueError if it changed. Earlier versions wrote no digest.

    Example:
        >>> check_digest({**add_digest({"lr": 0.1}), "lr": 0.2})
        Traceback (most recent call last):
        ValueError: it was changed after it was written
    """
    plain = {name: value for name, value in content.items() if name != DIGEST}
    if DIGEST in content and content[DIGEST] != compute_digest(plain):
        raise ValueError("it was changed after it was written")
    return plain


def serialize_tensors(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """Return the content of a safetensors file with a digest over tensors on the CPU and the facts beside them."""
    return save(dict(tensors), {**facts, DIGEST: compute_digest(facts, tensors)})


def read_tensors(path: Path, known: Collection[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what ``serialize_tensors`` was given; raise a DamageError if it changed.

    Args:
        path: path of the file.
        known: names of the facts in files of earlier versions, which their digest does not cover.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = dict(file.metadata() or {})
    except Exception as problem:  # the reader raises various errors
        raise DamageError(path, explain_damage(problem)) from problem
    stated, before = facts.pop(DIGEST, None), facts.pop(CHECKSUM, None)
    if stated is None:
        # A digest whose name was damaged must not pass for one that was never written.
        foreign = [name for name in facts if name not in known]
        if foreign:
            raise DamageError(path, f"it has {foreign[0]!r} beside its tensors, which no study wrote")
        fine = before in (None, compute_checksum(tensors))
    else:
        fine = before is None and stated == compute_digest(facts, tensors)
    if not fine:
        raise DamageError(path, "it was changed after it was written")
    return tensors, facts


def compute_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return eight hexadecimal digits for tensors on the CPU, whatever their order.

    Example:
        >>> one = compute_checksum({"a": torch.zeros(2)})
        >>> compute_checksum({"a": torch.zeros(2)}) == one != compute_checksum({"a": torch.ones(2)})
        True
    """
    found = 0
    for name in sorted(tensors):
        each = tensors[name].detach().contiguous()
        found = zlib.crc32(f"{name} {tuple(each.shape)} {each.dtype}".encode(), found)
        # As bytes: numpy does not know every type of torch's.
        found = zlib.crc32(each.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def find_digest_coverage(path: Path) -> str:
    """Return what of a whole file its digest covers: ``"everything"``, ``"tensors"`` or ``"nothing"``."""
    if path.suffix == ".json":
        return "everything" if DIGEST in json.loads(path.read_text(encoding="utf-8")) else "nothing"
    with safe_open(str(path), framework="pt") as file:
        facts = file.metadata() or {}
    return "everything" if DIGEST in facts else "tensors" if CHECKSUM in facts else "nothing"
