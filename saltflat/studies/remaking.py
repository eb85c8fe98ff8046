"""Networks of a study, made again from their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saltflat.errors import StudyError
from saltflat.studies.examples import Examples
from saltflat.studies.store import Store
from saltflat.studies.tasks import Context, MeasureTask, Remade, network_of

if TYPE_CHECKING:
    from saltflat.studies.results import Results


def remade(results: Results, key: str, examples: Examples) -> Remade:
    """The trained network of a run, and what it was trained on.

    Args:
        results: of the study.
        key: of the run.
        examples: of the study, ``results.study.data.examples(folder)``.
    """
    study, store = results.study, Store(results.folder)
    if study.train is not None and study.network is None:
        raise StudyError("Got a study without network. Want one to fill with the weights. Do: add network:.")
    row, weights = results.rows.get(key), store.weights(key)
    if row is None or weights is None:
        raise StudyError(
            f"Got the run {key!r}, of which there are no weights in {str(results.folder)!r}. Want a finished run with "
            "its weights. Do: run the study in this folder."
        )
    context = Context(examples, study.train, study.network, study.measures, study.measure_options, "cpu", 0.0)
    return network_of(MeasureTask(key, dict(row.config), weights[0], store.initial(key), study.measures), context)
