"""A study: the networks to train, the data, and the measures."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from saltflat.errors import OptionError, StudyError, import_optional, make_unknown_name_error
from saltflat.results.files import parse_path
from saltflat.studies.callables import get_function_path
from saltflat.studies.canonical import DEEPEST, JsonLike, dump_canonical_json, to_json_value
from saltflat.studies.data import DataSource, compute_fingerprint
from saltflat.studies.executors.executor import Executor
from saltflat.studies.grid import expand_runs, split_axis_names
from saltflat.studies.measurement import USUAL_MEASURES, parse_measure_names, parse_measure_options
from saltflat.studies.plan import check_fit, make_study_plan
from saltflat.studies.runner import ProgressDisplay, StudyRunner, select_executor, show_progress
from saltflat.studies.store import open_store
from saltflat.studies.tasks import TaskContext, resolve_resources
from saltflat.validation import check_non_negative, parse_device

if TYPE_CHECKING:
    from yaml.events import Event
    from yaml.nodes import Node

    from saltflat.studies.results import Results


def parse_mapping(given: JsonLike, what: str) -> dict[str, Any]:
    """Return a mapping of names to values, such as the settings."""
    if given is None:  # a name in YAML without a value
        return {}
    if not isinstance(given, Mapping):
        raise StudyError(
            f"Expected names with values, but got {what}={given!r}, a {type(given).__name__}. Try {what}: {{...}}."
        )
    return dict(to_json_value(given, what))


def parse_axes(given: JsonLike) -> dict[str, tuple[Any, ...]]:
    """Return the axes: lists of values by name."""
    if not isinstance(given, Mapping):
        raise StudyError(
            f"Expected names with lists of values, but got axes={given!r}, a {type(given).__name__}. Try axes: {{lr: "
            "[0.1, 0.2]}."
        )
    axes = to_json_value(given, "axes")
    for name, values in axes.items():
        if not isinstance(values, list):
            raise StudyError(
                f"Expected a list of values, but got the axis {name!r} with {values!r}. Try writing [{values!r}], or "
                "putting one value into settings."
            )
    return {name: tuple(values) for name, values in axes.items()}


def parse_seeds(given: JsonLike) -> tuple[Any, ...]:
    """Return the seeds: those of a list, or the first ones from 0 for a count.

    Example:
        >>> parse_seeds(3), parse_seeds([7, 9])
        ((0, 1, 2), (7, 9))
    """
    seeds = to_json_value(given, "seeds")
    if isinstance(seeds, list):
        return tuple(seeds)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 0:
        raise StudyError(f"Expected a count from 1, or a list of whole numbers, but got seeds={given!r}. Try seeds: 3.")
    if seeds > 100_000:
        raise StudyError(f"Expected at most 100,000 runs, but got {seeds:,} seeds. Try fewer.")
    return tuple(range(seeds))


def parse_together(given: JsonLike) -> int:
    """Return the maximum number of networks that are trained at once."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise StudyError(f"Expected a whole number from 1, but got together={given!r}. Try leaving it out for 64.")
    return given


# YAML 1.1 requires a dot and a sign in the exponent; people write 1e-3, and mean a number.
NUMBER = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
# A study is a page of text; a longer file is not one.
LONGEST = 1_000_000
LONGEST_NUMBER = 100  # characters: YAML reads 0xffff... and 1:59:59... at any length


def read_definition(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file as plain values, without running any code in it."""
    shown = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST + 1)
    except OSError as problem:
        raise StudyError(
            f"Expected a study as a YAML file, but got the path {shown!r}, which cannot be read "
            f"({problem.strerror}). Try another path."
        ) from problem
    if len(content) > LONGEST:
        raise _make_definition_error(shown, f"more than {LONGEST:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise _make_definition_error(shown, f"not UTF-8 ({problem.reason} at byte {problem.start})") from problem
    found = parse_yaml(text, shown)
    if found is None:
        raise _make_definition_error(shown, "empty")
    if not isinstance(found, dict):
        raise _make_definition_error(shown, f"a {_format_type(found)}, not names with values")
    return found


def parse_yaml(text: str, source: str) -> Any:
    """Return the plain values of a YAML text. Anchors, aliases and tags are refused: they can expand to gigabytes.

    Example:
        >>> parse_yaml("axes: {lr: [1e-3, 0.1]}", "here")
        {'axes': {'lr': [0.001, 0.1]}}
    """
    yaml = import_optional("yaml", "a study in YAML")
    try:
        return yaml.load(text, Loader=_make_loader(yaml))
    except yaml.YAMLError as problem:
        raise _make_definition_error(source, _format_yaml_error(problem)) from problem
    except ValueError as problem:  # a date such as 2024-13-45
        raise _make_definition_error(source, str(problem).splitlines()[0]) from problem


def _make_loader(yaml: ModuleType) -> Any:
    """Return a loader of plain values only, which refuses duplicate names in a mapping."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        depth = 0

        def compose_node(self, parent: Node | None, index: int) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent):
                raise self.make_error(f"the alias *{event.anchor}; write out what it refers to", event)
            if event.anchor is not None:
                raise self.make_error(f"the anchor &{event.anchor}; write out each part where it is needed", event)
            if event.tag is not None:
                raise self.make_error(f"the tag {event.tag}; plain numbers, texts, lists and mappings need none", event)
            if self.depth == DEEPEST:
                raise self.make_error(f"lists and mappings more than {DEEPEST} levels deep", event)
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            numeric = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
            if numeric and len(node.value) > LONGEST_NUMBER:
                raise self.make_error(f"a number of {len(node.value):,} characters", event)
            return node

        def construct_mapping(self, node: Node, deep: bool = False) -> Any:
            seen: set[Any] = set()
            for name, _ in node.value:
                key = self.construct_object(name, deep=True)
                if not isinstance(key, Hashable):
                    raise self.make_error("a list or mapping as a name", name)
                if key in seen:
                    raise self.make_error(f"{key!r} is there twice", name)
                seen.add(key)
            return super().construct_mapping(node, deep)

        def make_error(self, what: str, place: Node | Event) -> Exception:
            refused: Exception = yaml.MarkedYAMLError(problem=what, problem_mark=place.start_mark)
            return refused

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
    return Loader


def _format_yaml_error(problem: Exception) -> str:
    mark = getattr(problem, "problem_mark", None)
    what = getattr(problem, "problem", None) or str(problem).splitlines()[0]
    return f"{what}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else str(what)


def _format_type(value: JsonLike) -> str:
    return {"list": "list", "str": "text"}.get(type(value).__name__, type(value).__name__)


def _make_definition_error(source: str, what: str) -> StudyError:
    return StudyError(
        f"Expected YAML with name, data, axes and stop, but got the file {source!r}, which is no study: {what}. "
        "Try correcting that place."
    )


# Names in stop, and the settings that they set.
STOP = {"epochs": "epochs", "loss": "target_loss", "error": "target_error", "check_every": "check_every"}
NEEDED = ("name", "data", "axes", "stop")


@dataclass(frozen=True, eq=False)
class Study:
    """Networks trained with every combination of the axes' values and seeds, and measured.

    Attributes:
        name: name of the study; a folder holds the runs of one study.
        data: the name of a data set, or a mapping; see :class:`saltflat.studies.data.DataSource`.
        axes: the values to try by name: any setting of :class:`saltflat.studies.recipe.Recipe`, any argument of
            the network, or ``network``. Names separated by commas vary together: ``{"batch_size, lr": [[1000, 0.02],
            [2000, 0.04]]}`` has two values, not four; scores and plots name the axis by the first of its names.
        seeds: the number of seeds (0, 1, 2, ...), or a list of them.
        network: a built-in network, or ``package.module:function``. With ``train``: the network that the function
            trains, so that it can be rebuilt from its weights.
        train: ``package.module:function`` of your own that trains one network; None for saltflat's training.
        settings: settings that all runs share.
        stop: the stopping rule: the maximum number of ``epochs``, and targets for the training ``loss`` and ``error``,
            checked every ``check_every`` epochs. Runs that miss the targets are kept and flagged.
        measures: names of the measures.
        measure: options of the measurement: ``examples`` (number of training examples), ``dtype``, and those of
            :func:`saltflat.measure`.
        together: the maximum number of networks that are trained at once.

    Example:
        >>> study = Study("first", "digits", {"lr": [0.1, 0.2], "width": [8, 16]}, seeds=3, stop={"epochs": 5})
        >>> len(study.runs())
        12
    """

    name: str
    data: Any
    axes: Mapping[str, Sequence[Any]]
    seeds: Any = 1
    network: Any = None
    train: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    stop: Mapping[str, Any] = field(default_factory=dict)
    measures: Any = USUAL_MEASURES
    measure: Mapping[str, Any] = field(default_factory=dict)
    together: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise StudyError(f"Expected a string, but got the name {self.name!r}. Try name: digits.")
        train, data = get_function_path(self.train, "train"), get_function_path(self.data, "data")
        network = get_function_path(self.network, "network")
        for what, value in {"train": train, "network": network}.items():
            if value is not None and (not isinstance(value, str) or not value):
                raise StudyError(f"Expected a name, but got {what}={value!r}. Try a name, or package.module:function.")
        tidy: dict[str, Any] = {
            "data": DataSource.parse(data),
            "axes": parse_axes(self.axes),
            "seeds": parse_seeds(self.seeds),
            "network": "mlp" if network is None and train is None else network,
            "train": train,
            "settings": parse_mapping(self.settings, "settings"),
            "stop": parse_mapping(self.stop, "stop"),
            "measures": parse_measure_names(self.measures),
            "measure": parse_mapping(self.measure, "measure"),
            "together": parse_together(self.together),
        }
        for key in tidy["stop"]:
            if key not in STOP:
                raise make_unknown_name_error("key of stop", key, STOP)
        parse_measure_options(tidy["measure"])
        if any("network" in split_axis_names(axis) for axis in tidy["axes"]) and network is not None:
            raise StudyError("Expected one network, but got 'network' in axes and beside them. Try removing one.")
        for key, value in tidy.items():
            object.__setattr__(self, key, value)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Study:
        """Return the study of a mapping whose keys are the arguments of this class."""
        if not isinstance(given, Mapping):
            raise StudyError(f"Expected names with values, but got a {type(given).__name__} as a study. Try a mapping.")
        known = [each.name for each in fields(cls)]
        for key in given:
            if key not in known:
                raise make_unknown_name_error("key of a study", key, known)
        lacking = [key for key in NEEDED if key not in given and not (key == "stop" and "train" in given)]
        if lacking:
            raise StudyError(
                f"Expected at least {', '.join(NEEDED)}, but got a study without {', '.join(lacking)}. Try adding "
                "what is missing."
            )
        return cls(**given)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Study:
        """Return the study in a YAML file. Only :meth:`run` and :meth:`runs` import the functions it names."""
        return cls.from_dict(read_definition(parse_path(path, StudyError)))

    def to_dict(self) -> dict[str, Any]:
        """Return the study as plain values for JSON, YAML and ``from_dict``."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {**own, "data": self.data.to_dict(), "axes": {name: list(each) for name, each in self.axes.items()}}
        plain = {**plain, "seeds": list(self.seeds), "measures": list(self.measures)}
        if any("network" in split_axis_names(axis) for axis in self.axes):
            plain["network"] = None
        return {name: value for name, value in plain.items() if value is not None}

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Study) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def axis_names(self) -> list[str]:
        """The name of each axis: of settings that vary together the first, or all if its values do not differ."""
        found = []
        for axis, values in self.axes.items():
            names = split_axis_names(axis)
            firsts = {dump_canonical_json(value[0] if len(names) > 1 else value) for value in values}
            found.append(names[0] if len(firsts) == len(values) else axis)
        return found

    @property
    def stop_settings(self) -> dict[str, Any]:
        """The stopping rule by the names of the settings."""
        return {STOP[key]: value for key, value in self.stop.items()}

    @property
    def measure_options(self) -> dict[str, Any]:
        """The options of the measurement, with defaults filled in."""
        return parse_measure_options(self.measure)

    def runs(self) -> dict[str, dict[str, Any]]:
        """Return the settings of every run by its key, in the order of the grid, after checking the grid.

        It imports the functions that the study names as ``network`` and ``train``, to inspect their arguments.
        """
        return expand_runs(self)

    def run(
        self,
        folder: str | os.PathLike[str],
        executor: str | Executor = "serial",
        device: str | torch.device = "auto",
        retry_failed: bool = False,
        progress: bool | ProgressDisplay | None = None,
        *,
        data_folder: str | os.PathLike[str] | None = None,
        resources: Mapping[str, float] | None = None,
        every: float = 30.0,
        timeout: float | None = None,
    ) -> Results:
        """Train and measure all runs that are not finished yet, and return all results.

        If interrupted, call it again with the same folder: it resumes where it stopped. It imports and calls the
        functions that the study names, so run somebody else's study only if you trust it.

        Args:
            folder: folder of the study; created if it does not exist.
            executor: ``"serial"``, ``"processes"``, ``"ray"``, or one of :mod:`saltflat.studies.executors`.
            device: ``"cpu"``, ``"cuda"`` ..., a :class:`torch.device`, or ``"auto"`` for a GPU if CUDA is available.
            retry_failed: whether to repeat the runs that ended in an error.
            progress: True or False for progress bars; None for bars on a terminal only.
            data_folder: folder of named data sets, if not the one in the study.
            resources: resources of one task on a cluster, ``{"cpus": 1, "gpus": 0}``; by default one GPU if the device
                is one.
            every: seconds between checkpoints of a training.
            timeout: maximum seconds for training a run, and for measuring it. Networks that are trained together share
                the sum of their times. A run that takes longer is stopped and counts as failed. ``"serial"`` cannot
                stop a run and does not accept a timeout.
        """
        from saltflat.studies.results import Results  # at call time: it imports this module

        if resources is not None and not isinstance(resources, Mapping):
            raise OptionError(f"Expected a mapping of resources, but got resources={resources!r}. Try {{'cpus': 2}}.")
        check_non_negative(every=every, **(resources or {}))
        workers = select_executor(executor, timeout)
        runs = self.runs()
        local = workers.name == "serial"
        place = str(parse_device(device, probe=local))
        needs = resolve_resources(workers.name, place, resources or {})
        where = None if data_folder is None else os.fspath(data_folder)
        examples = self.data.examples(where, allow_code=True)  # to run a study is to run the functions it names
        check_fit(self, runs, examples)
        with (
            show_progress(progress) as display,
            open_store(self, list(runs), compute_fingerprint(examples), folder, display.tell) as store,
        ):
            plan = make_study_plan(self, runs, examples, store, retry_failed)
            context = TaskContext(
                examples,
                self.train,
                self.network,
                self.measures,
                self.measure_options,
                place,
                every,
                tuple(sys.path),
                display.update_epochs if local else None,
            )
            StudyRunner(self, runs, store, plan, display, context, needs, timeout).run(workers)
            results = Results.load(store.folder)
            store.write_table(results.csv())
        return results
