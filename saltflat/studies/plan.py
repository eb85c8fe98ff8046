"""What of a study is still to be done."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from saltflat.studies.canonical import compute_digest
from saltflat.studies.examples import Examples
from saltflat.studies.grid import is_same_value, make_recipe
from saltflat.studies.grouping import group_runs
from saltflat.studies.integrity import DamageError
from saltflat.studies.row import Row
from saltflat.studies.store import PARTIAL, Store, has_damaged_copy

if TYPE_CHECKING:
    from saltflat.studies.study import Study


@dataclass(frozen=True)
class StudyPlan:
    """What is to be done.

    Attributes:
        train: groups of runs to train, by the name of the group. A group that is begun anew, has a checkpoint, or lacks
            a run that was damaged, is trained whole, as it would have been without interruption.
        wanted: those of them whose weights are kept; the others of a group have theirs already.
        measure: for each run with weights the measures that are wanted of it.
        rows: that are there and stay, or are added to.
    """

    train: dict[str, tuple[str, ...]]
    wanted: frozenset[str]
    measure: dict[str, tuple[str, ...]]
    rows: dict[str, Row]


def make_study_plan(
    study: Study,
    runs: Mapping[str, Mapping[str, Any]],
    examples: Examples,
    store: Store,
    retry_failed: bool = False,
) -> StudyPlan:
    """Look at every run's files: damaged ones are set aside, what is finished is left alone."""
    rebuilt = study.train is None or study.network is not None
    rows: dict[str, Row] = {}
    measure: dict[str, tuple[str, ...]] = {}
    train: set[str] = set()
    damaged: set[str] = set()
    short = 0
    for key in runs:
        row, weights = store.read_or_set_aside(partial(store.read_row, key)), False
        if row is not None and row.status == "failed" and not retry_failed:
            rows[key] = row
            continue
        try:
            weights = store.read_trained(key) is not None
        except DamageError as damage:
            store.set_aside(damage)
            damaged.add(key)
            row = None  # row and weights belong together, so both are made again
        if row is not None:
            rows[key] = row
        elif has_damaged_copy(store.row_path(key)):
            damaged.add(key)
        lacking = study.measures if row is None else _find_missing_measures(study, row)
        again = row is None or row.status == "failed"
        if again and not (weights and rebuilt):
            train.add(key)
        elif again or (lacking and row is not None and row.status in ("done", "missed")):
            if weights and rebuilt:
                measure[key] = study.measures if again else lacking
            else:
                short += 1
    if short:
        why = (
            "their weights are not there" if rebuilt else "no network: is given that could be filled with their weights"
        )
        store.tell(f"{short} runs lack measures, and are left so: {why}. Delete their rows to train them again.")
    whole = _group_all_runs(study, runs, examples)
    return StudyPlan(_select_groups(whole, train, damaged, rows, store), frozenset(train), measure, rows)


def _group_all_runs(study: Study, runs: Mapping[str, Mapping[str, Any]], examples: Examples) -> list[tuple[str, ...]]:
    """Of the whole grid, so that they are the same whenever a study is begun."""
    if study.train is not None:
        return [(key,) for key in runs]
    recipes = {key: make_recipe(config) for key, config in runs.items()}
    return group_runs(recipes, examples.shape, examples.classes, study.together)


def _select_groups(
    whole: list[tuple[str, ...]], train: set[str], damaged: set[str], rows: Mapping[str, Row], store: Store
) -> dict[str, tuple[str, ...]]:
    found = {}
    for group in whole:
        wanted = tuple(key for key in group if key in train)
        if not wanted:
            continue
        taken, begun = group, any(key in rows for key in group)
        resumable = _is_resumable(store, group)
        # Fewer networks at once are rounded another way: what was damaged comes out as it was only in its whole group.
        if begun and not resumable and damaged.isdisjoint(wanted) and wanted != group:
            taken = wanted
            _is_resumable(store, taken)  # sets its checkpoint aside where it is damaged
        found[compute_digest(list(taken))] = taken
    for path in (store.folder / PARTIAL).iterdir():
        ours = re.fullmatch(r"[0-9a-f]{16}\.safetensors", path.name) and (path.is_symlink() or path.is_file())
        if ours and path.stem not in found:
            store.remove(path)
    return found


def _is_resumable(store: Store, group: tuple[str, ...]) -> bool:
    """Return whether a training has a checkpoint, or had one that was damaged and is set aside."""
    name = compute_digest(list(group))
    there = store.read_or_set_aside(partial(store.has_checkpoint, name))
    return bool(there) or has_damaged_copy(store.checkpoint_path(name))


def _find_missing_measures(study: Study, row: Row) -> tuple[str, ...]:
    """The measures that a row has not, or has with other settings."""
    if row.measured and not is_same_value(row.measured, study.measure_options):
        return tuple(study.measures)
    return tuple(name for name in study.measures if name not in row.readings)
