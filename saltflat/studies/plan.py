"""Plan the runs of a study that are left to do, and check them against its examples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from saltflat.engine.problem import Problem
from saltflat.errors import SaltflatError, format_error_line
from saltflat.studies.canonical import compute_digest, dump_canonical_json
from saltflat.studies.data import Examples
from saltflat.studies.grid import is_same_value, make_recipe, raise_problems
from saltflat.studies.recipe import SETTINGS, Recipe
from saltflat.studies.row import Row
from saltflat.studies.schema import DTYPES, find_conflict
from saltflat.studies.store import PARTIAL, DamageError, Store, has_damaged_copy
from saltflat.studies.training.build import build_network
from saltflat.studies.training.train_batched import group_runs

if TYPE_CHECKING:
    from saltflat.studies.study import Study


# Settings besides the architecture that can make building fail.
BUILDING = ("network", "init", "dropout", "dtype")


def check_fit(study: Study, runs: Mapping[str, Mapping[str, Any]], examples: Examples) -> None:
    """Check that a study can be run on its examples; raise one error for all problems."""
    if study.train is not None:
        return
    recipes = [make_recipe(config) for config in runs.values()]
    sizes = dict.fromkeys(
        (r.train_size, r.confusion, r.batch_size, r.nesterov, r.momentum, r.optimizer) for r in recipes
    )
    problems = [text for each in sizes for text in _find_size_problems(*each, len(examples.train_inputs))]
    problems += [text for text in map(find_conflict, recipes) if text is not None]
    if len(examples.shape) != 3:
        problems += [
            f"Expected images (channels, height, width) for augment={kind!r}, but got inputs of shape "
            f"{examples.shape}. Try leaving augment out."
            for kind in dict.fromkeys(recipe.augment for recipe in recipes if recipe.augment != "none")
        ]
    structures = {
        dump_canonical_json([{name: getattr(r, name) for name in BUILDING}, r.architecture]): r for r in recipes
    }
    # An epoch that ends in a single example, of which BatchNorm cannot compute a variance.
    lonely = {_compute_last_batch_size(recipe, examples): recipe for recipe in recipes}.get(1)
    problems += [
        text for recipe in structures.values() for text in _find_structure_problems(study, recipe, examples, lonely)
    ]
    raise_problems(problems, f"the study {study.name!r}")


def _find_size_problems(
    train_size: int | None, confusion: int, batch_size: int, nesterov: bool, momentum: float, optimizer: str, there: int
) -> Iterator[str]:
    taken = there - confusion if train_size is None else train_size
    if taken < 1 or taken + confusion > there:
        wanted = "all" if train_size is None else f"{train_size:,}"
        yield (
            f"Expected at most {there:,} training examples, but got train_size={wanted} and "
            f"confusion={confusion:,}. Try lowering one of them."
        )
    elif batch_size > taken + confusion:
        yield (
            f"Expected at most {taken + confusion:,}, the number of training examples, but got "
            f"batch_size={batch_size:,}. Try a smaller one, or more examples."
        )
    if nesterov and momentum == 0 and optimizer == "sgd":
        yield "Expected a momentum above 0 with nesterov=True, but got momentum=0. Try momentum=0.9."


def _compute_last_batch_size(recipe: Recipe, examples: Examples) -> int:
    """Return the number of examples in the last step of an epoch."""
    there = len(examples.train_inputs)
    taken = there if recipe.train_size is None else recipe.train_size + recipe.confusion
    return taken % recipe.batch_size or recipe.batch_size


def _find_structure_problems(study: Study, recipe: Recipe, examples: Examples, lonely: Recipe | None) -> Iterator[str]:
    """Build the network once, run it on two examples, and check that the layers to measure exist."""
    told = ", ".join(f"{name}={value!r}" for name, value in recipe.architecture.items()) or "no arguments"
    network = f"the network {recipe.network!r} with {told}"
    try:
        model = build_network(recipe, examples.shape, examples.classes)
        inputs = examples.train_inputs[:2]
        inputs = inputs.to(DTYPES[recipe.dtype]) if inputs.is_floating_point() else inputs
        with torch.no_grad():
            outputs = model(inputs)
    except SaltflatError as error:  # its message says what is wrong
        yield str(error)
        return
    except Exception as error:  # a user's network, or sizes that do not match, can fail in any way
        yield (
            f"Expected a network for inputs of shape {examples.shape}, but got {format_error_line(error)} from "
            f"{network}. Try changing its arguments, or the data."
        )
        return
    if tuple(outputs.shape) != (len(inputs), examples.classes):
        yield (
            f"Expected outputs of shape {(len(inputs), examples.classes)} for {len(inputs)} examples, but got "
            f"{tuple(outputs.shape)} from {network}. Try making it end in one output per class."
        )
        return
    if lonely is not None:
        try:
            with torch.no_grad():
                model.train()(inputs[:1])
        except Exception as error:
            yield (
                f"Expected at least two examples in every batch, but got batch_size={lonely.batch_size}, with which an "
                f"epoch ends in a single example, and {network} cannot be trained on one "
                f"({format_error_line(error)}). Try another batch_size or train_size."
            )
            return
        finally:
            model.eval()
    layers = study.measure.get("layers")
    if layers is not None:
        try:
            Problem.build(model, (inputs, examples.train_labels[:2]), layers=layers)
        except Exception as error:
            yield str(error)


assert set(BUILDING) <= set(SETTINGS)


@dataclass(frozen=True)
class StudyPlan:
    """The runs to train and to measure.

    Attributes:
        train: groups of runs to train, by the name of the group. A new group, or one with a checkpoint or a damaged
            run, is trained as a whole, as without interruption.
        wanted: the runs among them whose weights are kept; the others of a group already have theirs.
        measure: measures to compute for each run with weights.
        rows: existing rows, which are kept or extended.
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
    """Plan what to do by every run's files: set damaged files aside, keep finished runs."""
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
            row = None  # row and weights belong together, so both are written again
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
        why = "their weights are missing" if rebuilt else "the study has no network: to fill with their weights"
        store.tell(f"{short} runs lack measures and stay without them: {why}. Delete their rows to train them again.")
    whole = _group_all_runs(study, runs, examples)
    return StudyPlan(_select_groups(whole, train, damaged, rows, store), frozenset(train), measure, rows)


def _group_all_runs(study: Study, runs: Mapping[str, Mapping[str, Any]], examples: Examples) -> list[tuple[str, ...]]:
    """Return the groups of the whole grid, which do not depend on the runs that are finished."""
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
        # Other group sizes round differently: a damaged run is reproduced only in its whole group.
        if begun and not resumable and damaged.isdisjoint(wanted) and wanted != group:
            taken = wanted
            _is_resumable(store, taken)  # sets its checkpoint aside if it is damaged
        found[compute_digest(list(taken))] = taken
    for path in (store.folder / PARTIAL).iterdir():
        ours = re.fullmatch(r"[0-9a-f]{16}\.safetensors", path.name) and (path.is_symlink() or path.is_file())
        if ours and path.stem not in found:
            store.remove(path)
    return found


def _is_resumable(store: Store, group: tuple[str, ...]) -> bool:
    """Return whether a training has a checkpoint, or had a damaged one that was set aside."""
    name = compute_digest(list(group))
    there = store.read_or_set_aside(partial(store.has_checkpoint, name))
    return bool(there) or has_damaged_copy(store.checkpoint_path(name))


def _find_missing_measures(study: Study, row: Row) -> tuple[str, ...]:
    """Return the measures that a row lacks, or has with other options."""
    if row.measured and not is_same_value(row.measured, study.measure_options):
        return tuple(study.measures)
    return tuple(name for name in study.measures if name not in row.readings)
