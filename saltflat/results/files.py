"""Write results to disk as strict JSON, atomically, read them back with checks, and build data frames of them."""

from __future__ import annotations

import json
import os
import reprlib
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from saltflat.errors import ReportError, SaltflatError, import_optional
from saltflat.results.json_codec import JsonRecord, JsonValue, decode_nonfinite

if TYPE_CHECKING:
    from saltflat.results.report import Reading


@dataclass(frozen=True)
class FileFormat:
    """A kind of file.

    Attributes:
        schema: the name and version that the file itself states.
        what: what people call it, with an article.
        writer: the method that writes it.
        older: earlier schemas that can still be read.
    """

    schema: str
    what: str
    writer: str
    older: tuple[str, ...] = ()

    @property
    def reader(self) -> str:
        """The method that reads it."""
        return self.writer.replace("save", "load")

    @property
    def family(self) -> str:
        """The schema without its version."""
        return self.schema.partition("/")[0]


REPORT = FileFormat("saltflat.report/1", "a report", "Report.save")
AUDIT = FileFormat("saltflat.audit/1", "an audit", "Audit.save")
LANDSCAPE = FileFormat("saltflat.landscape/1", "a landscape", "Landscape.save")
SPECTRUM = FileFormat("saltflat.spectrum/1", "a spectrum", "Spectrum.save")
BOUND = FileFormat("saltflat.bound/1", "a bound", "Bound.save")
FEATURE_ROBUSTNESS = FileFormat("saltflat.feature_robustness/1", "a feature robustness", "FeatureRobustness.save")
PLAN = FileFormat("saltflat.plan/1", "a plan", "MeasurementPlan.save")
# Reading a file takes a few stack frames per level, and their limit differs between versions of Python.
MAX_DEPTH = 100


def write_json(content: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the content as JSON and return the path; readers see the old file or the new one, never a part."""
    text = json.dumps(content, allow_nan=False, indent=1)
    with replace_atomically(path) as part, part.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text + "\n")
    return Path(path)


def parse_path(given: str | os.PathLike[str], error: type[SaltflatError] = ReportError) -> Path:
    """Return the path as given; raise ``error`` for what cannot be a path on this system."""
    try:
        path = Path(given)
        if b"\0" in os.fsencode(path):
            raise ValueError("it holds a NUL character")
    except (TypeError, ValueError) as problem:
        raise error(
            f"Expected the path of a file, but got {reprlib.repr(given)} ({problem}). Try a str or a pathlib.Path."
        ) from problem
    return path


@contextmanager
def replace_atomically(path: str | os.PathLike[str], *, follow_links: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to the target; on success, rename it to the target.

    Without ``follow_links``, a link at the target is replaced itself, and the file it points to is left alone.
    """
    target = check_writable_path(path, follow_links=follow_links)
    part = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        try:
            yield part
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as problem:
        raise _make_unwritable_error("the path", path, problem) from problem


def check_writable_path(path: str | os.PathLike[str], what: str = "the path", *, follow_links: bool = True) -> Path:
    """Return the path that will be written, links resolved; raise an error that names it if it cannot be."""
    given = parse_path(path)
    target, shown = Path(os.path.realpath(given)) if follow_links else given, f"{what} {os.fspath(path)!r}"
    try:
        if not target.parent.is_dir():
            raise ReportError(
                f"Expected a path in an existing folder, but got {shown}, whose folder does not exist. Try "
                f"Path({str(target.parent)!r}).mkdir(parents=True)."
            )
        with suppress(FileNotFoundError):
            mode = target.lstat().st_mode
            if stat.S_ISDIR(mode):
                raise ReportError(f"Expected a file, but got {shown}, which is a folder. Try adding a file name.")
            if not stat.S_ISREG(mode) and (follow_links or not stat.S_ISLNK(mode)):
                raise ReportError(
                    f"Expected a regular file or a new name, but got {shown}, which exists and is no regular file. "
                    "Try another name."
                )
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as problem:
        raise _make_unwritable_error(what, path, problem) from problem
    return target


def _make_unwritable_error(what: str, path: str | os.PathLike[str], problem: OSError) -> ReportError:
    return ReportError(
        f"Expected a writable path, but got {what} {os.fspath(path)!r}, which cannot be written "
        f"({problem.strerror}). Try another path."
    )


def read_json(path: str | os.PathLike[str], form: FileFormat = REPORT) -> dict[str, Any]:
    """Return the content of a file after checking that it is complete and of this format."""
    content = _parse_json(parse_path(path), f"{form.what} written by {form.writer}")
    check_schema(content, f"the file {os.fspath(path)!r}", form)
    return dict(content)


def find_file_format(path: str | os.PathLike[str], *forms: FileFormat) -> FileFormat:
    """Return which of these formats the file has, or the first if none, so that reading it raises a clear error."""
    content = _parse_json(parse_path(path), " or ".join(f"{form.what} written by {form.writer}" for form in forms))
    schema = content.get("schema") if isinstance(content, Mapping) else None
    family = schema.partition("/")[0] if isinstance(schema, str) else None
    return next((form for form in forms if form.family == family), forms[0])


def check_schema(content: JsonValue | Mapping[str, Any], source: str, form: FileFormat = REPORT) -> None:
    """Check that the content is of this format and of a version that this saltflat reads."""
    schema = content.get("schema") if isinstance(content, Mapping) else None
    if schema in (form.schema, *form.older):
        return
    if isinstance(schema, str) and schema.startswith(f"{form.family}/"):
        raise ReportError(
            f"Expected {form.schema!r}, but got {source} with the schema {schema!r}. Try the version of "
            "saltflat that wrote it."
        )
    known = (REPORT, AUDIT, LANDSCAPE, SPECTRUM, BOUND, FEATURE_ROBUSTNESS, PLAN)
    other = next((each for each in known if schema == each.schema), None)
    if other is not None:
        raise ReportError(
            f"Expected {form.what}, written by {form.writer}, but got {source}, which is not {form.what} but "
            f"{other.what}. Try {other.reader}, or saltflat show on the command line."
        )
    raise ReportError(
        f"Expected the schema {form.schema!r}, but got {source}, which is not {form.what}. Check which file it is."
    )


def _parse_json(path: str | os.PathLike[str], want: str) -> Any:
    shown = os.fspath(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        _check_depth(content)
        return content
    except OSError as problem:
        raise ReportError(
            f"Expected {want}, but got the path {shown!r}, which cannot be read ({problem.strerror}). Check the path."
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise ReportError(
            f"Expected {want}, but got the file {shown!r}, which is broken or cut short ({problem}). Try "
            "computing it again, or restoring the file from a backup."
        ) from problem


def _check_depth(content: JsonValue) -> None:
    """Raise ValueError if containers are nested deeper than in any file of ours, without recursion."""
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = (
            each for container in level for each in (container.values() if isinstance(container, dict) else container)
        )
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


class JsonFile(JsonRecord):
    """A dataclass that is saved to a JSON file and loaded from it, with strict checks.

    Attributes:
        file_format: how the file identifies itself.
    """

    file_format: ClassVar[FileFormat]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as strict JSON; nan and infinities are encoded, see ``saltflat.results.json_codec``."""
        parts = self._encode_parts()
        return {"schema": self.file_format.schema, **parts, **self._encode_fields(without=parts)}

    def _encode_parts(self) -> dict[str, Any]:
        """Return the entries that need an encoding of their own; they come first in the file."""
        return {}

    @classmethod
    def _decode_parts(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Remove the entries of ``_encode_parts`` from the JSON and return the fields that they hold."""
        return {}

    def _check_content(self) -> None:
        """Raise one of Python's own errors if something is wrong with a result that was read."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Return the result that ``to_dict`` was called on; raise a ReportError for anything else."""
        return cls._from_json(given, "a mapping")

    @classmethod
    def _from_json(cls, given: Mapping[str, Any], source: str) -> Self:
        check_schema(given, source, cls.file_format)
        try:
            rest = {key: value for key, value in given.items() if key != "schema"}
            parts = cls._decode_parts(rest)
            found = cls(**parts, **{key: decode_nonfinite(value) for key, value in rest.items()})
            found._check_content()
            # Constructors convert (bool("no") is True): only what encodes to the same JSON was written by us.
            if found.to_dict() != given:
                raise TypeError("a field has a value of another kind")
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError, LookupError) as problem:
            # An error about a part already is a sentence; its cause is what matters here.
            why = problem.__cause__ if isinstance(problem, ReportError) and problem.__cause__ else problem
            raise ReportError(
                f"Expected what {cls.__name__}.to_dict returns, but got {source}, {cls.file_format.what} that cannot "
                f"be understood ({type(why).__name__}: {why}). Try computing it again, or restoring the file from a "
                "backup."
            ) from problem
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result as JSON and return the path; an existing file is replaced atomically."""
        return write_json(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the result that was saved at this path."""
        return cls._from_json(read_json(path, cls.file_format), f"the file {os.fspath(path)!r}")


# The layer's name in the row of the whole network.
TOTAL = ""


def build_frame_rows(readings: Iterable[Reading]) -> Iterator[dict[str, Any]]:
    """Yield one row per measure and layer, the whole network first."""
    for reading in readings:
        shared = {"exact": reading.exact, "converged": reading.converged}
        parts = {TOTAL: reading.value, **reading.layers}
        errors = {
            "stderr": {TOTAL: reading.stderr, **reading.layer_stderr},
            "sampling_stderr": {TOTAL: reading.sampling_stderr, **reading.layer_sampling_stderr},
        }
        for layer, value in parts.items():
            known = {kind: by_layer.get(layer) for kind, by_layer in errors.items()}
            filled = {kind: float("nan") if error is None else error for kind, error in known.items()}
            yield {"measure": reading.name, "layer": layer, "value": value, **filled, **shared}


def build_frame(rows: Iterable[dict[str, Any]], columns: list[str]) -> Any:
    """Return a ``pandas.DataFrame`` of the rows, with all columns even if there are no rows."""
    return import_optional("pandas", "to_frame()").DataFrame(list(rows), columns=columns)
