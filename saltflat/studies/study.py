"""A study: which networks are trained on what, and what is measured of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from saltflat.errors import StudyError, make_unknown_name_error
from saltflat.report.file import parse_path
from saltflat.studies.definition import read_definition
from saltflat.studies.grid import expand_runs, split_axis_names
from saltflat.studies.measuring import USUAL_MEASURES, parse_measure_names, parse_measure_options
from saltflat.studies.source import DataSource
from saltflat.studies.takers import get_function_path
from saltflat.studies.tidying import parse_axes, parse_mapping, parse_seeds, parse_together

if TYPE_CHECKING:
    from saltflat.studies.executors import Executor
    from saltflat.studies.progress import ProgressDisplay
    from saltflat.studies.results import Results

# What ends a training, by the names that people use for it here and by those of the recipe.
STOP = {"epochs": "epochs", "loss": "target_loss", "error": "target_error", "check_every": "check_every"}
NEEDED = ("name", "data", "axes", "stop")


@dataclass(frozen=True, eq=False)
class Study:
    """Networks trained with every combination of the axes' values, each with every seed, and measured.

    Attributes:
        name: what the study is called; a folder holds the runs of one name.
        data: the name of a data set, or a mapping; see :class:`saltflat.studies.source.DataSource`.
        axes: for each name the values to try: any setting of :class:`saltflat.studies.recipe.Recipe`, any argument of
            the network, or ``network``. Names with commas between them go hand in hand: ``{"batch, lr": [[1000, 0.02],
            [2000, 0.04]]}`` has two values, not four; scores and plots know the axis by the first of its names.
        seeds: how many (0, 1, 2, ...), or a list of them.
        network: a ready-made network, or ``package.module:function``. With ``train``: what makes the network that the
            function trains, so that it can be measured again from its weights.
        train: ``package.module:function`` of your own that trains one network; None for the training here.
        settings: values that all runs share.
        stop: when a training ends: ``epochs`` at most; earlier when the training ``loss`` (and ``error``) is at most
            this, looked at ``check_every`` so many epochs. Runs that miss it are kept, and flagged.
        measures: their names.
        measure: how to measure: ``examples`` (the first so many of the training set), ``dtype``, and the options of
            :func:`saltflat.measure`.
        together: at most so many networks are trained at once.

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
            raise StudyError(f"Got the name {self.name!r}. Want a text. Do: for instance name: digits.")
        train, data = get_function_path(self.train, "train"), get_function_path(self.data, "data")
        network = get_function_path(self.network, "network")
        for what, value in {"train": train, "network": network}.items():
            if value is not None and (not isinstance(value, str) or not value):
                raise StudyError(f"Got {what}={value!r}. Want a name. Do: give one, or package.module:function.")
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
            raise StudyError("Got 'network' in axes and beside them. Want it in one. Do: take one away.")
        for key, value in tidy.items():
            object.__setattr__(self, key, value)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Study:
        """The study that a mapping describes: its keys are the arguments of this class."""
        if not isinstance(given, Mapping):
            raise StudyError(f"Got a {type(given).__name__} as a study. Want names with values. Do: give a mapping.")
        known = [each.name for each in fields(cls)]
        for key in given:
            if key not in known:
                raise make_unknown_name_error("key of a study", key, known)
        lacking = [key for key in NEEDED if key not in given and not (key == "stop" and "train" in given)]
        if lacking:
            raise StudyError(
                f"Got a study without {', '.join(lacking)}. Want at least {', '.join(NEEDED)}. Do: add what is missing."
            )
        return cls(**given)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Study:
        """The study in a YAML file. Functions that it names are not imported before :meth:`run` or :meth:`runs`."""
        return cls.from_dict(read_definition(parse_path(path, StudyError)))

    def to_dict(self) -> dict[str, Any]:
        """As JSON and YAML can hold it, and ``from_dict`` takes it."""
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
        """One setting for each axis, the first where several go hand in hand."""
        return [split_axis_names(axis)[0] for axis in self.axes]

    @property
    def stop_settings(self) -> dict[str, Any]:
        """What ends a training, by the names of the settings."""
        return {STOP[key]: value for key, value in self.stop.items()}

    @property
    def measure_options(self) -> dict[str, Any]:
        """How to measure, with all that was not said filled in."""
        return parse_measure_options(self.measure)

    def runs(self) -> dict[str, dict[str, Any]]:
        """Every run of the grid: its configuration by its key, in order. Impossible grids are refused here.

        Imports the functions that the study names as ``network`` and ``train``, to see what they take.
        """
        return expand_runs(self)

    def run(
        self,
        folder: str | os.PathLike[str],
        executor: str | Executor = "here",
        device: str = "cpu",
        retry_failed: bool = False,
        progress: bool | ProgressDisplay | None = None,
        *,
        data_folder: str | os.PathLike[str] | None = None,
        resources: Mapping[str, float] | None = None,
        every: float = 30.0,
        timeout: float | None = None,
    ) -> Results:
        """Train and measure what is not yet done; nothing that is finished is lost or repeated.

        Imports and calls the functions that the study names: run somebody else's study only if you trust it.

        Args:
            folder: where runs are kept; made if it is not there. Call it again with the same folder to go on.
            executor: ``"here"``, ``"processes"``, ``"ray"``, or one of :mod:`saltflat.studies.executors`.
            device: ``"cpu"``, ``"cuda"`` ..., or ``"auto"`` for a GPU if there is one.
            retry_failed: try the runs again that ended in an error.
            progress: True or False for progress bars; None for a terminal only.
            data_folder: where named data sets are, if not where the study says.
            resources: of one task, for clusters: ``{"cpus": 1, "gpus": 0}``, a GPU where the device is one.
            every: seconds between checkpoints of a training.
            timeout: seconds that training a run may take, and measuring it; networks that are trained together share
                the sum of theirs. A run that takes longer is stopped, and has failed. None for no limit; ``"here"``
                cannot stop a run, and refuses one.
        """
        from saltflat.studies.running import run_study  # at call time: it needs this module

        return run_study(
            self,
            folder,
            executor,
            device,
            retry_failed,
            progress,
            data_folder=data_folder,
            resources=resources or {},
            every=every,
            timeout=timeout,
        )
