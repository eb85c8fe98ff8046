"""The folder of a study, opened for one process to work in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saltflat.errors import StudyError
from saltflat.studies.canonical import digest
from saltflat.studies.lock import LOCK, locked
from saltflat.studies.store import DEFINITION, FOLDERS, ROWS, TABLE, Store, unwritable

if TYPE_CHECKING:
    from saltflat.studies.study import Study

OURS = {LOCK, DEFINITION, TABLE, *FOLDERS}


@contextmanager
def opened(
    study: Study,
    keys: list[str],
    fingerprint: str,
    folder: str | os.PathLike[str],
    tell: Callable[[str], None],
) -> Iterator[Store]:
    """The folder for this study and for nobody else; made if it is not there, refused if it is something else's."""
    store = Store(folder, tell)
    with ExitStack() as stack:
        try:
            _make(store.folder)
            _check_ours(store.folder)
            stack.enter_context(locked(store.folder))
            for each in FOLDERS:
                _make(store.folder / each)
            _remove_parts(store.folder)
        except OSError as problem:
            raise unwritable(store.folder, problem) from problem
        _define(store, study, keys, fingerprint)
        yield store


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as problem:
        raise StudyError(f"Got {str(folder)!r}, which is a file. Want a folder. Do: give another place.") from problem


def _check_ours(folder: Path) -> None:
    if (folder / DEFINITION).exists():
        return
    foreign = sorted(each.name for each in folder.iterdir() if each.name not in OURS and not _is_part(each))
    if foreign:
        raise StudyError(
            f"Got the folder {str(folder)!r}, which holds {', '.join(foreign[:3])}{' ...' if foreign[3:] else ''} and "
            "no study. Want an empty folder, or that of a study. Do: give another one."
        )


def _is_part(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".part")


def _remove_parts(folder: Path) -> None:
    """What processes that were killed had begun to write."""
    for place in (folder, *(folder / each for each in FOLDERS)):
        for path in place.iterdir():
            if _is_part(path):
                path.unlink(missing_ok=True)


def _define(store: Store, study: Study, keys: list[str], fingerprint: str) -> None:
    """Compare what the folder is about with the study, and write the study down if it is new there."""
    # Of all data that runs here were trained on: a definition may go back to what it was before.
    data = {digest(study.data.identity): fingerprint}
    path = store.folder / DEFINITION
    there: Mapping[str, Any] | None = store.kept(lambda _: store.definition(), "", path)
    content: dict[str, Any] = {"study": study.to_dict(), "data": data, "keys": keys}
    if there is not None:
        _check_same(there, study, data, store.folder)
        content["data"] = {**there["data"], **data}
        if all(there.get(key) == value for key, value in content.items()):
            return
        _tell_left_out(store, keys)
    store.write_definition(content)


def _check_same(there: Mapping[str, Any], study: Study, data: Mapping[str, str], folder: Path) -> None:
    name = there["study"]["name"]
    if name != study.name:
        raise StudyError(
            f"Got the folder {str(folder)!r}, which holds the study {name!r}. Want a folder for {study.name!r}. "
            "Do: give another one, --out."
        )
    if any(there["data"].get(source, fingerprint) != fingerprint for source, fingerprint in data.items()):
        raise StudyError(
            f"Got data {study.data.name!r} that are not those which the runs in {str(folder)!r} were trained on, "
            "though they have the same name. Want the same examples. Do: bring them back, or give another folder."
        )


def _tell_left_out(store: Store, keys: list[str]) -> None:
    known = set(keys)
    others = [each for each in (store.folder / ROWS).glob("*.json") if each.stem not in known]
    if others:
        store.tell(f"{len(others)} runs of an earlier definition are kept, and left out of this one.")
