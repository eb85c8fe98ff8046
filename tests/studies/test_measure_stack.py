"""Networks measured in a row, which share what does not depend on their weights, have the readings they have alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stack_cases import USUAL, assert_same_reading, make_context, make_tasks, measure_alone
from study_cases import study
from training_cases import SHRUNK

from saltflat.engine.data import Batch
from saltflat.engine.problem import Problem
from saltflat.engine.strategy import Probe, run_probe
from saltflat.errors import NonFiniteError
from saltflat.measures import stack as measures_stack
from saltflat.studies import tasks
from saltflat.studies.tasks import MeasureTask


@pytest.fixture(autouse=True)
def no_stack() -> None:
    tasks.release_stack()


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The problems that were probed."""
    found: list[object] = []

    def noting(problem: Problem, batch: Batch, limit: int) -> Probe:
        found.append(problem)
        return run_probe(problem, batch, limit)

    monkeypatch.setattr("saltflat.engine.context.run_probe", noting)
    return found


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The networks that were measured as members of a stack."""
    found: list[object] = []
    measure = measures_stack.NetworkStack.measure

    def noting(self: Any, member: Any) -> Any:
        readings = measure(self, member)
        found.append(member)
        return readings

    monkeypatch.setattr(measures_stack.NetworkStack, "measure", noting)
    return found


@pytest.mark.parametrize("name", SHRUNK)
def test_networks_of_a_stack_have_the_readings_they_have_alone(
    name: str, probed: list[object], stacked: list[object]
) -> None:
    context = make_context()
    runs = make_tasks(name, context)
    found = [tasks.measure_run(task, context) for task in runs]
    assert len(probed) == 1, "probed once for all of them"
    assert len(stacked) == len(runs)
    for task, together in zip(runs, found, strict=True):
        alone = measure_alone(task, context)
        assert list(together.readings) == list(alone.readings) == list(USUAL)
        for measure in USUAL:
            assert_same_reading(together.readings[measure], alone.readings[measure])
        assert together.made_with == alone.made_with
        assert together.seconds > 0
    # Other weights and labels, other readings: nothing of one network was taken for another's.
    for measure in USUAL:
        assert len({each.readings[measure].value for each in found}) == len(runs)


@pytest.mark.parametrize(
    ("measures", "options"),
    [
        (USUAL, {"dtype": "float32"}),
        (USUAL, {"columns": "sampled:4"}),
        (USUAL, {"columns": "top:2"}),
        (("hessian_trace", "rho"), {"certificate": True}),
        (("normalized_sharpness", "hessian_trace"), {"diagonal": "hutchinson"}),
        (("hessian_trace", "fisher_rao_norm"), {"logits": "std"}),
        (("hessian_trace", "squared_norm", "minimum_sharpness"), {"layers": ["0"]}),
        (("hessian_trace", "relative_flatness(normalize=False)"), {"memory": "2MiB"}),
        (("squared_norm",), {}),
        (("kappa", "fisher_logdet(draws=3, subset=5)", "minimum_unit_sharpness", "fisher_frobenius"), {}),
        (("hessian_top_eigenvalue", "adaptive_sharpness", "pac_bayes_flatness"), {}),
    ],
)
def test_every_option_and_measure_gives_what_it_gives_alone(
    measures: tuple[str, ...], options: dict[str, Any], stacked: list[object]
) -> None:
    context = make_context(measures, **options)
    tolerance = 1e-4 if options.get("dtype") == "float32" else 1e-9
    runs = make_tasks("lenet5", context, 2)
    found = [tasks.measure_run(task, context) for task in runs]
    assert len(stacked) == 2
    for task, together in zip(runs, found, strict=True):
        alone = measure_alone(task, context)
        for measure in measures:
            assert_same_reading(together.readings[measure], alone.readings[measure], tolerance)


def test_a_network_without_finite_outputs_fails_as_alone_and_harms_no_other(stacked: list[object]) -> None:
    context = make_context()
    runs = make_tasks("mlp", context)
    bad = {name: torch.full_like(value, torch.inf) for name, value in runs[1].weights.items()}
    runs[1] = replace(runs[1], weights=bad)
    good = [tasks.measure_run(runs[0], context)]
    for _ in range(tasks.GIVE_UP):
        with pytest.raises(NonFiniteError) as together:
            tasks.measure_run(runs[1], context)
    with pytest.raises(NonFiniteError) as alone:
        measure_alone(runs[1], context)
    assert str(together.value) == str(alone.value)
    good.append(tasks.measure_run(runs[2], context))
    assert len(stacked) == 2
    for task, found in zip([runs[0], runs[2]], good, strict=True):
        expected = measure_alone(task, context)
        for measure in USUAL:
            assert_same_reading(found.readings[measure], expected.readings[measure])


def test_a_network_whose_units_are_all_dead_has_the_notes_it_has_alone() -> None:
    context = make_context()
    runs = make_tasks("mlp", context)
    dead = {name: torch.zeros_like(value) for name, value in runs[0].weights.items()}
    runs[0] = replace(runs[0], weights=dead)
    for task in runs:  # the first, with no gradient in most layers, determines nothing for the others
        found, alone = tasks.measure_run(task, context), measure_alone(task, context)
        for measure in USUAL:
            assert_same_reading(found.readings[measure], alone.readings[measure])
    assert any("no curvature at all" in note for note in measure_alone(runs[0], context).readings["rho"].notes)


def test_a_stack_that_fails_twice_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context(("hessian_trace",))
    runs = make_tasks("mlp", context, 4)
    tried = []

    def fail(self: Any, member: Any) -> Any:
        tried.append(member)
        raise RuntimeError("not today")

    monkeypatch.setattr(measures_stack.NetworkStack, "measure", fail)
    found = [tasks.measure_run(task, context) for task in runs]
    assert len(tried) == tasks.GIVE_UP
    for task, each in zip(runs, found, strict=True):
        assert_same_reading(each.readings["hessian_trace"], measure_alone(task, context).readings["hessian_trace"])


def test_other_architectures_measures_and_options_begin_another_stack(probed: list[object]) -> None:
    usual = make_context(("hessian_trace",))
    wide = {**SHRUNK["mlp"], "widths": (7,)}
    for context, settings in [
        (usual, {}),
        (usual, wide),
        (make_context(("rho",)), {}),
        (make_context(("rho",), examples=10), {}),
    ]:
        (task,) = make_tasks("mlp", context, 1, **settings)
        tasks.measure_run(task, context)
    assert len(probed) == 4


def test_networks_of_the_user_are_measured_alone(stacked: list[object]) -> None:
    context = make_context(("hessian_trace",))
    task = MeasureTask("own", {"network": "study_cases:network", "seed": 0}, {}, None, context.measures)
    assert tasks._find_stack_key(task, context) is None
    moved = make_context(("hessian_trace",), device="cpu")
    (task,) = make_tasks("mlp", moved, 1)
    other = replace(moved, options={**moved.options, "device": "cpu"})
    tasks.measure_run(task, other)
    assert stacked == []


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_study_has_the_same_rows_with_and_without_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    settings: dict[str, Any] = {
        "seeds": 2,
        "settings": {"depth": 1, "batch_size": 50, "dropout": 0.1, "label_noise": 0.2},
        "measures": list(USUAL),
    }
    together = study(**settings).run(tmp_path / "together", executor, progress=False)
    assert tasks._StackSession.current is None, "nothing is held after the study"
    monkeypatch.setattr(tasks, "_measure_in_stack", lambda *_: None)
    alone = study(**settings).run(tmp_path / "alone", "serial", progress=False)
    assert list(together.rows) == list(alone.rows)
    for key, row in together.rows.items():
        other = alone.rows[key]
        assert (row.status, row.measured, row.made_with) == (other.status, other.measured, other.made_with)
        assert list(row.readings) == list(other.readings)
        for measure in USUAL:
            assert_same_reading(row.readings[measure], other.readings[measure])
