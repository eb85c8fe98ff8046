"""Networks measured in a row on a GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from stack_cases import USUAL, assert_same_reading, make_context, make_tasks, measure_alone
from training_cases import SHRUNK

from saltflat.studies import tasks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", SHRUNK)
def test_networks_of_a_stack_on_a_gpu_have_the_readings_they_have_alone(name: str) -> None:
    context = make_context(device="cuda")
    # Libraries that initialize themselves in the first pass may warn, which is an error in tests.
    tasks.measure_run(make_tasks(name, context)[0], context)
    tasks.release_stack()
    for task in make_tasks(name, context):
        found, alone = tasks.measure_run(task, context), measure_alone(task, context)
        assert tasks._StackSession.current is not None
        assert tasks._StackSession.current.failures == 0
        assert found.made_with == alone.made_with
        for measure in USUAL:
            assert_same_reading(found.readings[measure], alone.readings[measure])
    tasks.release_stack()


@pytest.mark.parametrize("name", ["mlp", "lenet5", "cnn6"])
def test_a_stack_on_a_gpu_has_the_readings_of_a_cpu(name: str) -> None:
    there, here = make_context(device="cuda"), make_context()
    for task in make_tasks(name, there):
        found = tasks.measure_run(task, there)
        alone = measure_alone(task, here)
        for measure in USUAL:
            assert found.readings[measure].value == pytest.approx(alone.readings[measure].value, rel=1e-8)
            assert found.readings[measure].converged == alone.readings[measure].converged
    tasks.release_stack()
