"""Rebuild networks of a study from their weights, and audit a few of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from saltflat.audit.audit import audit_invariance
from saltflat.audit.result import Audit
from saltflat.errors import StudyError
from saltflat.results.text import join_words
from saltflat.studies.canonical import compute_digest
from saltflat.studies.data import Examples, check_code_allowed, compute_fingerprint
from saltflat.studies.grid import make_recipe
from saltflat.studies.networks import is_user_function
from saltflat.studies.row import Row
from saltflat.studies.store import Store
from saltflat.studies.tasks import MeasureTask, RebuiltNetwork, TaskContext, rebuild_network

if TYPE_CHECKING:
    from saltflat.studies.results import Results


def find_user_functions(results: Results, rows: Iterable[Row]) -> list[str]:
    """Return the functions, ``package.module:function``, that are imported to rebuild the networks of these runs.

    Built-in networks need none. The names come from the study's files.
    """
    if results.study.train is not None:
        names = [results.study.network]
    else:
        names = [make_recipe(row.config).network for row in rows]
    return [name for name in dict.fromkeys(names) if name is not None and is_user_function(name)]


def load_trained_network(results: Results, key: str, examples: Examples, *, allow_code: bool = False) -> RebuiltNetwork:
    """Return the trained network of a run, and its training examples.

    Args:
        results: results of the study.
        key: key of the run.
        examples: examples of the study, ``results.study.data.examples(folder)``.
        allow_code: whether to import and call the function that makes the network, if the study's files name one.
            Built-in networks need no permission.
    """
    study, store = results.study, Store(results.folder)
    if study.train is not None and study.network is None:
        raise StudyError("Expected a network for the weights, but got a study without network. Try adding network:.")
    row, found = results.rows.get(key), store.read_trained(key)
    if row is None or found is None:
        raise StudyError(
            f"Expected a finished run with its weights, but got the run {key!r}, of which there are no weights in "
            f"{str(results.folder)!r}. Try running the study in this folder."
        )
    check_code_allowed(find_user_functions(results, [row]), allow_code)
    context = TaskContext(examples, study.train, study.network, study.measures, study.measure_options, "cpu", 0.0)
    trained, initial = found
    return rebuild_network(MeasureTask(key, dict(row.config), trained.weights, initial, study.measures), context)


EXAMPLES, DRAWS = 100, 3


def audit_runs(
    results: Results,
    count: int,
    data_folder: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    *,
    allow_code: bool = False,
    tell: Callable[[str], object] | None = None,
) -> dict[str, Audit]:
    """Audit some runs on their first 100 training examples, with 3 random rescalings of each kind.

    Args:
        results: results of the study.
        count: number of runs. They are spread over the range of gaps, from the smallest to the largest; runs with the
            status ``"done"`` are preferred.
        data_folder: folder of named data sets, if not the one in the study.
        progress: whether to show a progress bar; on a terminal only if None.
        allow_code: whether to import and call the functions that the study's files name. Without it, a study that needs
            them is refused.
        tell: called with the names of these functions before any of them is imported.

    Returns:
        The audits by the key of the run.
    """
    study, store = results.study, Store(results.folder)
    ended = [row for row in results.rows.values() if row.status in ("done", "missed") and _has_weights(store, row.key)]
    # A network that missed the stopping rule may have learned nothing, and then no measure changes.
    rows = [row for row in ended if row.status == "done"] or ended
    if not rows:
        raise StudyError(
            "Expected a run to rescale, but got no run with weights in the folder. Try running the study here first."
        )
    chosen = _choose_spread_rows(rows, count)
    code = [*([study.data.name] if study.data.is_function else []), *find_user_functions(results, chosen)]
    check_code_allowed(code, allow_code)
    if code and tell is not None:
        tell(f"Importing and calling {join_words(code)}, named by {results.folder}.")
    examples = study.data.examples(None if data_folder is None else os.fspath(data_folder), allow_code=allow_code)
    definition = store.read_definition() or {}
    if definition.get("data", {}).get(compute_digest(study.data.identity)) != compute_fingerprint(examples):
        raise StudyError(
            f"Expected the same examples, but got data {study.data.name!r} that are not those which the runs were "
            "trained on. Try naming the folder that they are in."
        )
    found = {}
    for row in chosen:
        network = load_trained_network(results, row.key, examples, allow_code=allow_code)
        found[row.key] = audit_invariance(
            network.model,
            (network.inputs[:EXAMPLES].double(), network.labels[:EXAMPLES]),
            measures=list(study.measures),
            draws=DRAWS,
            initial=network.initial,
            progress=progress,
        )
    return found


def _has_weights(store: Store, key: str) -> bool:
    try:
        return store.read_trained(key) is not None
    except StudyError:  # damaged: others will do
        return False


def _choose_spread_rows(rows: Sequence[Row], count: int) -> list[Row]:
    """Return rows spread over the range of gaps, including both ends; the middle one if ``count`` is 1."""
    ordered = sorted(rows, key=lambda row: (row.gap["error"], row.gap["loss"]))
    if count >= len(ordered):
        return list(ordered)
    if count == 1:
        return [ordered[len(ordered) // 2]]
    return [ordered[round(place * (len(ordered) - 1) / (count - 1))] for place in range(count)]
