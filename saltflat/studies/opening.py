"""The folder of a study, opened for one process to work in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saltflat.errors import StudyError
from saltflat.studies.canonical import compute_digest
from saltflat.studies.integrity import DamageError, find_digest_coverage
from saltflat.studies.lock import LOCK, lock_folder
from saltflat.studies.store import ASIDE, DEFINITION, FOLDERS, ROWS, TABLE, Store, make_write_error

if TYPE_CHECKING:
    from saltflat.studies.study import Study

OURS = {LOCK, DEFINITION, TABLE, *FOLDERS}


@contextmanager
def open_store(
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
            _make_folder(store.folder)
            _check_study_folder(store.folder)
            stack.enter_context(lock_folder(store.folder))
            for each in FOLDERS:
                _make_subfolder(store, store.folder / each)
            _remove_partial_files(store.folder)
        except OSError as problem:
            raise make_write_error(store.folder, problem) from problem
        _update_definition(store, study, keys, fingerprint)
        yield store


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as problem:
        raise StudyError(f"Got {str(folder)!r}, which is a file. Want a folder. Do: give another place.") from problem


def _make_subfolder(store: Store, folder: Path) -> None:
    """Make a folder inside of the study's; a file in its place is set aside."""
    if folder.is_symlink():  # not followed: files would be written and removed in a folder of something else
        raise StudyError(
            f"Expected {str(folder)!r} to be a folder, but it is a link to {os.readlink(folder)!r}. Try moving the "
            "folder itself here, or put the whole study where there is room and name that place as its folder."
        )
    if folder.exists() and not folder.is_dir():
        store.set_aside(DamageError(folder, "it is not a folder"))
    folder.mkdir(exist_ok=True)


def _check_study_folder(folder: Path) -> None:
    if (folder / DEFINITION).exists():
        return
    others = [each.name for each in folder.iterdir() if not _is_partial_file(each)]
    # What was damaged and set aside is ours, too.
    foreign = sorted(name for name in others if name.partition(ASIDE)[0] not in OURS)
    if foreign:
        raise StudyError(
            f"Got the folder {str(folder)!r}, which holds {', '.join(foreign[:3])}{' ...' if foreign[3:] else ''} and "
            "no study. Want an empty folder, or that of a study. Do: give another one."
        )


def _is_partial_file(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".part")


def _remove_partial_files(folder: Path) -> None:
    """What processes that were killed had begun to write."""
    for place in (folder, *(folder / each for each in FOLDERS)):
        for path in place.iterdir():
            if _is_partial_file(path) and (path.is_symlink() or not path.is_dir()):
                path.unlink(missing_ok=True)


def _update_definition(store: Store, study: Study, keys: list[str], fingerprint: str) -> None:
    """Compare what the folder is about with the study, and write the study down if it is new there."""
    # Of all data that runs here were trained on: a definition may go back to what it was before.
    data = {compute_digest(study.data.identity): fingerprint}
    there = store.read_or_set_aside(store.read_definition)
    content: dict[str, Any] = {"study": study.to_dict(), "data": data, "keys": keys}
    if there is not None:
        _check_same_study(there, study, data, store.folder)
        content["data"] = {**there["data"], **data}
        # As texts, in which the order of the axes counts.
        known = all(json.dumps(there[key]) == json.dumps(value) for key, value in content.items())
        if known and find_digest_coverage(store.folder / DEFINITION) == "everything":
            return
        _tell_left_out_runs(store, keys)
    store.write_definition(content)


def _check_same_study(there: Mapping[str, Any], study: Study, data: Mapping[str, str], folder: Path) -> None:
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


def _tell_left_out_runs(store: Store, keys: list[str]) -> None:
    known = set(keys)
    others = [each for each in (store.folder / ROWS).glob("*.json") if each.stem not in known]
    if others:
        store.tell(f"{len(others)} runs of an earlier definition are kept, and left out of this one.")
