"""Results on disk, as strict JSON that is written atomically, and as data frames."""

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
from typing import TYPE_CHECKING, Any, NoReturn

from saltflat.errors import ReportError, SaltflatError, import_optional

if TYPE_CHECKING:
    from saltflat.results.report import Reading


@dataclass(frozen=True)
class FileFormat:
    """A kind of file: what it calls itself, and what people call it."""

    schema: str
    what: str
    writer: str

    @property
    def reader(self) -> str:
        return self.writer.replace("save", "load")

    @property
    def family(self) -> str:
        """The schema without its version."""
        return self.schema.partition("/")[0]


REPORT = FileFormat("saltflat.results/1", "a report", "Report.save")
AUDIT = FileFormat("saltflat.audit/1", "an audit", "Audit.save")
LANDSCAPE = FileFormat("saltflat.landscape/1", "a landscape", "Landscape.save")
SPECTRUM = FileFormat("saltflat.spectrum/1", "a spectrum", "Spectrum.save")
# Reading a file takes a few stack frames per level; how many there are differs between versions of Python.
MAX_DEPTH = 100


def write_json(content: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the content as JSON; whoever reads sees the old file or the new one, never half of it."""
    text = json.dumps(content, allow_nan=False, indent=1)
    with replace_atomically(path) as part, part.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text + "\n")
    return Path(path)


def parse_path(given: Any, error: type[SaltflatError] = ReportError) -> Path:
    """A path as the user gave it; what can be no path on this system is refused with the kind of error given."""
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
    """A name beside the place to write to; what was written there is renamed to the place if all went well.

    Without ``follow_links`` a link at the place is itself replaced, and what it leads to is left alone.
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
    """Where the file will be, links followed, if one can be there; ``what`` names the path in the error."""
    given = parse_path(path)
    target, shown = Path(os.path.realpath(given)) if follow_links else given, f"{what} {os.fspath(path)!r}"
    try:
        if not target.parent.is_dir():
            raise ReportError(
                f"Expected a folder that does, but got {shown}, whose folder does not exist. Try making it first, "
                f"Path({str(target.parent)!r}).mkdir(parents=True)."
            )
        with suppress(FileNotFoundError):
            mode = target.lstat().st_mode
            if stat.S_ISDIR(mode):
                raise ReportError(f"Expected a file, but got {shown}, which is a folder. Try adding a file name.")
            if not stat.S_ISREG(mode) and (follow_links or not stat.S_ISLNK(mode)):
                raise ReportError(
                    f"Expected a file to replace, or a new one, but got {shown}, which exists and is no regular "
                    "file. Try choosing another name."
                )
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as problem:
        raise _make_unwritable_error(what, path, problem) from problem
    return target


def _make_unwritable_error(what: str, path: str | os.PathLike[str], problem: OSError) -> ReportError:
    return ReportError(
        f"Expected a place that can, but got {what} {os.fspath(path)!r}, which cannot be written "
        f"({problem.strerror}). Try choosing another, or freeing this one."
    )


def read_json(path: str | os.PathLike[str], form: FileFormat = REPORT) -> dict[str, Any]:
    """What was written, once it is known to be whole and of the form understood here."""
    content = _parse_json(parse_path(path), f"{form.what} written by {form.writer}")
    check_schema(content, f"the file {os.fspath(path)!r}", form)
    return dict(content)


def find_file_format(path: str | os.PathLike[str], *forms: FileFormat) -> FileFormat:
    """Which of these forms the file has; the first where it has none of them, which then says what is wrong with it."""
    content = _parse_json(parse_path(path), " or ".join(f"{form.what} written by {form.writer}" for form in forms))
    schema = content.get("schema") if isinstance(content, Mapping) else None
    family = schema.partition("/")[0] if isinstance(schema, str) else None
    return next((form for form in forms if form.family == family), forms[0])


def check_schema(content: Any, source: str, form: FileFormat = REPORT) -> None:
    """Refuse what was not written in this form, or was written in a version of it that is not known here."""
    schema = content.get("schema") if isinstance(content, Mapping) else None
    if schema == form.schema:
        return
    if isinstance(schema, str) and schema.startswith(f"{form.family}/"):
        raise ReportError(
            f"Expected {form.schema!r}, but got {source} with the schema {schema!r}. Try reading it with the "
            "saltflat that wrote it."
        )
    other = next((each for each in (REPORT, AUDIT, LANDSCAPE, SPECTRUM) if schema == each.schema), None)
    if other is not None:
        raise ReportError(
            f"Expected {form.what}, written by {form.writer}, but got {source}, which is not {form.what} but "
            f"{other.what}. Try reading it with {other.reader}, or print it with saltflat show."
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
            f"Expected {want}, but got the file {shown!r}, which is broken or cut short ({problem}). Try measuring "
            "again, or taking the file from a backup."
        ) from problem


def _check_depth(content: Any) -> None:
    """Raise ValueError if containers are nested deeper than any file of ours, without recursion of its own."""
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


# The layer's name in the row of the whole network.
TOTAL = ""


def build_frame_rows(readings: Iterable[Reading]) -> Iterator[dict[str, Any]]:
    """One row per measure and layer, that of the whole network first."""
    for reading in readings:
        shared = {"exact": reading.exact, "converged": reading.converged}
        parts = {TOTAL: reading.value, **reading.layers}
        errors = {TOTAL: reading.stderr, **reading.layer_stderr}
        for layer, value in parts.items():
            error = errors.get(layer)
            stderr = float("nan") if error is None else error
            yield {"measure": reading.name, "layer": layer, "value": value, "stderr": stderr, **shared}


def build_frame(rows: Iterable[dict[str, Any]], columns: list[str]) -> Any:
    """A ``pandas.DataFrame`` of the rows; the columns are there even where no row is."""
    return import_optional("pandas", "to_frame()").DataFrame(list(rows), columns=columns)
