"""Networks of a study, made again from their weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from saltflat.errors import StudyError
from saltflat.studies.examples import Examples
from saltflat.studies.grid import make_recipe
from saltflat.studies.networks import is_user_function
from saltflat.studies.row import Row
from saltflat.studies.source import check_code_allowed
from saltflat.studies.store import Store
from saltflat.studies.tasks import MeasureTask, RebuiltNetwork, TaskContext, rebuild_network

if TYPE_CHECKING:
    from saltflat.studies.results import Results


def find_user_functions(results: Results, rows: Iterable[Row]) -> list[str]:
    """Return the functions, ``package.module:function``, that are imported to rebuild the networks of these runs.

    Ready-made networks need none. The names come from the study's files: from its rows, where the training is ours.
    """
    if results.study.train is not None:
        names = [results.study.network]
    else:
        names = [make_recipe(row.config).network for row in rows]
    return [name for name in dict.fromkeys(names) if name is not None and is_user_function(name)]


def load_trained_network(results: Results, key: str, examples: Examples, *, allow_code: bool = False) -> RebuiltNetwork:
    """The trained network of a run, and what it was trained on.

    Args:
        results: of the study.
        key: of the run.
        examples: of the study, ``results.study.data.examples(folder)``.
        allow_code: import and call the function that makes the network, where the study's files name one. Ready-made
            networks need no permission.
    """
    study, store = results.study, Store(results.folder)
    if study.train is not None and study.network is None:
        raise StudyError("Got a study without network. Want one to fill with the weights. Do: add network:.")
    row, found = results.rows.get(key), store.read_trained(key)
    if row is None or found is None:
        raise StudyError(
            f"Got the run {key!r}, of which there are no weights in {str(results.folder)!r}. Want a finished run with "
            "its weights. Do: run the study in this folder."
        )
    check_code_allowed(find_user_functions(results, [row]), allow_code)
    context = TaskContext(examples, study.train, study.network, study.measures, study.measure_options, "cpu", 0.0)
    trained, initial = found
    return rebuild_network(MeasureTask(key, dict(row.config), trained.weights, initial, study.measures), context)
