"""Trained networks to measure in a row and alone, for the tests on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from training_cases import SHRUNK, examples

from saltflat.results.report import Reading
from saltflat.studies import tasks
from saltflat.studies.measurement import USUAL_MEASURES, Measurement, parse_measure_options
from saltflat.studies.recipe import Recipe
from saltflat.studies.tasks import MeasureTask, TaskContext
from saltflat.studies.training.build import build_network

VARIANTS = ("normalized_sharpness_arxiv", "normalized_sharpness_printed", "parameterwise_normalized_sharpness")
USUAL = (*USUAL_MEASURES, *VARIANTS)
IMAGES = examples((2, 16, 16))


def make_context(measures: Sequence[str] = USUAL, device: str = "cpu", **options: Any) -> TaskContext:
    usual = {"examples": 20, "dtype": "float64"}
    return TaskContext(
        IMAGES, None, None, tuple(measures), parse_measure_options({**usual, **options}), device, every=30.0
    )


def make_tasks(name: str, context: TaskContext, count: int = 3, **settings: Any) -> list[MeasureTask]:
    """Networks some way from their initial weights, each with labels of its own."""
    found = []
    for seed in range(count):
        config = {"network": name, **SHRUNK[name], "seed": seed, "label_noise": 0.25 * seed, **settings}
        model = build_network(Recipe.from_config(config), IMAGES.shape, IMAGES.classes)
        draws = torch.Generator().manual_seed(seed)
        weights = {
            key: value + 0.05 * torch.randn(value.shape, generator=draws) if value.is_floating_point() else value
            for key, value in model.state_dict().items()
        }
        weights |= {key: value.abs() + 0.1 for key, value in weights.items() if key.endswith("running_var")}
        found.append(MeasureTask(f"run {seed}", config, weights, None, context.measures))
    return found


def measure_alone(task: MeasureTask, context: TaskContext) -> Measurement:
    made = tasks.rebuild_network(task, context)
    return tasks.measure_model(made.model, made.inputs, made.labels, made.initial, task.measures, context)


def assert_same_reading(one: Reading, other: Reading, tolerance: float = 1e-10) -> None:
    """Numbers agree to rounding, and everything else exactly."""
    assert one.value == pytest.approx(other.value, rel=tolerance, nan_ok=True)
    assert one.layers == pytest.approx(other.layers, rel=tolerance, nan_ok=True)
    assert (one.residual is None, one.stderr is None) == (other.residual is None, other.stderr is None)
    assert (one.stderr or 0.0) == pytest.approx(other.stderr or 0.0, rel=tolerance)
    assert one.layer_stderr == pytest.approx(other.layer_stderr, rel=tolerance, abs=1e-12)
    numbers: dict[str, Any] = {"value": 0.0, "layers": {}, "residual": None, "stderr": None, "layer_stderr": {}}
    assert asdict(replace(one, **numbers)) == asdict(replace(other, **numbers))
