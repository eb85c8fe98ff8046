"""The runs of a study: every combination of the axes' values, with every seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import product
from typing import TYPE_CHECKING, Any

from saltflat.errors import SaltflatError, StudyError, make_unknown_name_error
from saltflat.studies.callables import STOPS, ConfigurableFunction, inspect_network, inspect_train_function
from saltflat.studies.canonical import (
    FORMAT,
    JsonLike,
    canonicalize,
    compute_digest,
    dump_canonical_json,
    make_hashable,
    to_version_1,
)
from saltflat.studies.recipe import ADDED, RENAMED, SETTINGS, Recipe, make_renamed_error
from saltflat.studies.schema import ALLOWED

if TYPE_CHECKING:
    from saltflat.studies.study import Study


MOST_RUNS = 100_000
# Settings by names they have elsewhere, or had in earlier versions.
OTHER_NAMES = {"learning_rate": "lr", "num_epochs": "epochs", "max_epochs": "epochs", "wd": "weight_decay", **RENAMED}
USUAL = {each.name: each.default for each in fields(Recipe) if each.name in SETTINGS}


def expand_runs(study: Study) -> dict[str, dict[str, Any]]:
    """Return the settings of each run by its key, in the order of the grid; raise one error for all problems."""
    where = f"the study {study.name!r}"
    raise_problems(_find_grid_problems(study), where)
    count = count_runs(study)
    if count > MOST_RUNS:
        raise StudyError(
            f"Expected at most {MOST_RUNS:,} runs, but got a grid of {count:,}. Try fewer values or axes, or several "
            "studies."
        )
    takers, problems = _inspect_functions(study)
    problems += _find_name_problems(study, takers)
    if study.train is None:
        problems += _find_value_problems(study)
    raise_problems(problems, where)
    found = {}
    for place in iter_grid_points(study):
        given = {**study.settings, **study.stop_settings, **place}
        config, identity = _make_config(study, given, takers)
        found[compute_digest(identity)] = config
    return found


def count_runs(study: Study) -> int:
    """Return the number of runs in the grid."""
    return math.prod(len(values) for values in study.axes.values()) * len(study.seeds)


def iter_grid_points(study: Study) -> Iterator[dict[str, Any]]:
    """Yield each run's values on the axes, and its seed, in the order of the grid."""
    for values in product(*study.axes.values(), study.seeds):
        place: dict[str, Any] = {}
        for axis, value in zip(study.axes, values, strict=False):
            names = split_axis_names(axis)
            place |= {axis: value} if len(names) == 1 else dict(zip(names, value, strict=True))
        yield {**place, "seed": values[-1]}


def split_axis_names(axis: str) -> list[str]:
    """Return the settings of an axis: several names, separated by commas, vary together.

    Example:
        >>> split_axis_names("batch_size, lr")
        ['batch_size', 'lr']
    """
    return [name.strip() for name in axis.split(",")]


def collect_axis_values(study: Study) -> dict[str, tuple[Any, ...]]:
    """Return the values of every setting that varies."""
    found: dict[str, tuple[Any, ...]] = {}
    for axis, values in study.axes.items():
        names = split_axis_names(axis)
        found |= {axis: tuple(values)} if len(names) == 1 else dict(zip(names, zip(*values, strict=True), strict=True))
    return found


def make_recipe(config: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a configuration, with hashable values."""
    return Recipe.from_config({name: make_hashable(value) for name, value in config.items()})


def raise_problems(problems: Iterable[str], where: str) -> None:
    """Raise one error for all problems, if there are any."""
    told = list(dict.fromkeys(problems))
    if len(told) == 1:
        raise StudyError(told[0])
    if told:
        listed = " ".join(f"({number}) {each}" for number, each in enumerate(told, start=1))
        raise StudyError(f"Expected a valid definition, but got {len(told)} problems in {where}. {listed}")


def _make_config(
    study: Study, given: dict[str, Any], takers: Mapping[str, ConfigurableFunction]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all settings of one run, and all that determines its training."""
    order = [*collect_axis_values(study), "seed"]
    if study.train is None:
        network = given.get("network", study.network)
        filled = {**USUAL, "network": network, **given}
        config = {name: ALLOWED[name].convert(value) if name in ALLOWED else value for name, value in filled.items()}
        config = {name: config[name] for name in [*order, *(each for each in config if each not in order)]}
        known = {name: value for name, value in config.items() if name not in ADDED or value != USUAL[name]}
        whole = to_version_1({**takers[network].defaults, **known})
    else:
        taker = takers[study.train]
        filled = {**taker.defaults, **given, **({} if study.network is None else {"network": study.network})}
        config = whole = {name: filled[name] for name in [*order, *(each for each in filled if each not in order)]}
    identity = {"format": FORMAT, "data": study.data.identity, "train": study.train, "config": whole}
    return config, identity


def _find_grid_problems(study: Study) -> list[str]:
    """Return the problems of the grid itself."""
    problems: list[str] = []
    names: list[str] = []
    for name, values in study.axes.items():
        if not values:
            problems.append(f"Expected at least one value, but got the axis {name!r} without values. Try adding one.")
        texts = [dump_canonical_json(value) for value in values]
        twice = [value for place, value in enumerate(values) if texts[place] in texts[:place]]
        if twice:
            problems.append(
                f"Expected each value once, but got {twice[0]!r} twice in the axis {name!r}. Try removing one."
            )
        own = split_axis_names(name)
        if len(own) > 1:
            problems += [
                f"Expected {len(own)} values in a list, one for each name, but got {value!r} in the axis {name!r}. "
                f"Try {own[0]}, {own[1]}: [[1000, 0.02], [2000, 0.04]]."
                for value in values
                if not isinstance(value, list | tuple) or len(value) != len(own)
            ]
        names += own
        if "seed" in own:
            problems.append(
                "Expected seeds apart from the axes, but got the axis 'seed'. Try seeds: with a count or a list."
            )
        for each in own:
            for other, place in ((study.settings, "settings"), (study.stop_settings, "stop")):
                if each in other:
                    problems.append(
                        f"Expected each setting once, but got {each!r} in axes and in {place}. Try removing one."
                    )
    problems += [
        f"Expected each setting once, but got {name!r} in more than one axis. Try removing it from the others."
        for name, count in Counter(names).items()
        if count > 1
    ]
    for name in study.settings:
        if name == "seed":
            problems.append("Expected seeds apart, but got 'seed' in settings. Try seeds: with a count or a list.")
        if name in study.stop_settings:
            problems.append(
                f"Expected each setting once, but got {name!r} in settings and in stop. Try removing it from settings."
            )
        if name == "network":
            problems.append(
                "Expected network as a key of the study, but got 'network' in settings. Try network: on its own line."
            )
    if not study.seeds:
        problems.append("Expected at least one seed, but got no seeds. Try a count from 1, or a list.")
    if len(set(study.seeds)) < len(study.seeds):
        problems.append(f"Expected each seed once, but got a seed twice in {list(study.seeds)}. Try removing one.")
    problems += [str(error) for seed in study.seeds if (error := ALLOWED["seed"].find_problem("seed", seed))]
    return problems


def _inspect_functions(study: Study) -> tuple[dict[str, ConfigurableFunction], list[str]]:
    """Return the functions that take the settings, by name, and the problems of finding them."""
    takers, problems = {}, []
    if study.train is not None:
        if study.network is not None:
            try:
                inspect_network(study.network)  # that it exists: it is needed only after the first training
            except SaltflatError as error:
                problems.append(str(error))
        return {study.train: inspect_train_function(study.train)}, problems
    for name in collect_axis_values(study).get("network", (study.network,)):
        try:
            takers[str(name)] = inspect_network(str(name))
        except SaltflatError as error:
            problems.append(str(error))
    return takers, problems


def _find_name_problems(study: Study, takers: Mapping[str, ConfigurableFunction]) -> list[str]:
    """Return the problems of settings that no function takes, and of missing ones."""
    problems = []
    own = (*SETTINGS, "seed") if study.train is None else ("seed",)
    given = [*collect_axis_values(study), *study.settings, *study.stop_settings]
    for taker in takers.values():
        for name in given:
            # Targets also decide the status of a run; only the number of epochs must reach a train function.
            judged = study.train is not None and name in STOPS and name != "epochs"
            if study.train is None and name in RENAMED:  # even where a network takes any name
                problems.append(str(make_renamed_error(name)))
            elif study.train is None and name in SETTINGS and name in taker.names:
                problems.append(
                    f"Expected an argument with a name of its own, but got {name!r}, which is a setting of training "
                    f"and an argument of {taker.what}, so only the training would get it. Try renaming the argument."
                )
            elif name not in own and not taker.can_take(name) and not judged:
                known = [*own, *taker.names]
                other = OTHER_NAMES.get(name)
                problems.append(
                    f"Expected {other!r}, but got {name!r}. Try {other}."
                    if other in known
                    else str(make_unknown_name_error(f"setting or argument of {taker.what}:", name, known))
                )
        for name in taker.required_names:
            if name not in given:
                problems.append(
                    f"Expected a value for {name!r}, which {taker.what} needs, but got none. Try adding it to settings "
                    "or axes."
                )
    return problems


def _find_value_problems(study: Study) -> list[str]:
    """Return the problems of values of the wrong type, or out of range."""
    given = {name: (value,) for name, value in {**study.settings, **study.stop_settings}.items()}
    problems = []
    for name, values in {**given, **collect_axis_values(study)}.items():
        for value in values:
            problem = ALLOWED[name].find_problem(name, value) if name in ALLOWED else None
            if problem is not None:
                problems.append(str(problem))
    return problems


def is_same_value(one: JsonLike, other: JsonLike) -> bool:
    """Return whether two values mean the same."""
    return bool(canonicalize(one) == canonicalize(other))
