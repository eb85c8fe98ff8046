"""Train networks with a user's own function."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.engine.precision import snapshot_precision
from saltflat.errors import StudyError, format_error_line
from saltflat.studies.callables import ConfigurableFunction, inspect_train_function
from saltflat.studies.data import Examples
from saltflat.studies.executors.executor import make_failure
from saltflat.studies.recipe import Recipe
from saltflat.studies.row import TrainedNetwork
from saltflat.studies.tasks import TaskContext, TrainedRun, measure_model
from saltflat.studies.training.outcome import evaluate_outcome


@contextmanager
def preserve_torch_state() -> Iterator[None]:
    """Restore torch's global settings, such as the default dtype, at the end of the block."""
    dtype, device, threads = torch.get_default_dtype(), _get_default_device(), torch.get_num_threads()
    gradients, anomaly = torch.is_grad_enabled(), torch.is_anomaly_enabled()
    deterministic, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    cudnn, precision_back = torch.backends.cudnn, snapshot_precision()
    flags = cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if _get_default_device() != device:
            # None for the CPU: an explicit default device slows down every call of torch.
            torch.set_default_device(None if device.type == "cpu" else device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
        torch.autograd.set_detect_anomaly(anomaly)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn)
        precision_back()
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = flags


def _get_default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.6, once the default was set to None
        return torch.device("cpu")


def run_user_training(config: Mapping[str, Any], context: TaskContext) -> TrainedRun:
    """Call the user's train function for one run; measure the network now if it cannot be rebuilt later."""
    assert context.train is not None
    started = time.perf_counter()
    taker = inspect_train_function(context.train)
    # Paths of the study may be relative: return to this folder if the function changes it.
    with _use_seed(config["seed"]), preserve_torch_state(), chdir(Path.cwd()):
        try:
            found = taker.function(**_collect_arguments(taker, config, context))
        except SystemExit as leaving:  # ends the run, not the study
            raise RuntimeError(f"the train function left with sys.exit({leaving.code!r})") from leaving
        except BaseException as leaving:
            if isinstance(leaving, Exception | KeyboardInterrupt):
                raise
            raise RuntimeError(f"the train function left with {format_error_line(leaving)}") from leaving
    model, initial = _unpack_train_result(found, context.train)
    seconds = time.perf_counter() - started
    outcome = evaluate_outcome(
        model,
        Recipe(target_loss=config.get("target_loss"), target_error=config.get("target_error")),
        _move_examples(model, context.examples),
        initial,
        int(config.get("epochs", 0)),
        notes=(f"trained by {context.train}; the number of epochs is that of the settings",),
    )
    weights = {
        name: value.detach().cpu().clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)
    }
    run = TrainedRun(TrainedNetwork(weights, outcome, seconds), initial)
    if context.can_rebuild or outcome.status == "diverged":
        return run
    started = time.perf_counter()
    examples = context.examples
    try:
        readings = measure_model(
            model, examples.train_inputs, examples.train_labels, initial, context.measures, context
        )
    except Exception as error:
        failure = make_failure(error)
        return replace(run, failure={"error": failure.error, "traceback": failure.traceback})
    return replace(run, measured=replace(readings, seconds=time.perf_counter() - started))


def _collect_arguments(taker: ConfigurableFunction, config: Mapping[str, Any], context: TaskContext) -> dict[str, Any]:
    """Return the settings that the function accepts, and the seed, data and device if it has these arguments."""
    settings = {name: value for name, value in config.items() if taker.can_take(name) and name != "seed"}
    given = {"seed": config["seed"], "data": context.examples, "device": context.device}
    asked = {name: value for name, value in given.items() if name in taker.handed}
    if "data" in asked:
        # A copy: the function may change its data, but not those of other runs or of the measures.
        asked["data"] = context.examples.copy()
    return {**settings, **asked}


def _unpack_train_result(
    found: nn.Module | tuple[nn.Module, Mapping[str, Tensor]], spec: str
) -> tuple[nn.Module, dict[str, Tensor] | None]:
    model, initial = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module) or not (initial is None or isinstance(initial, Mapping)):
        got = f"{type(model).__name__} and {type(initial).__name__}" if initial is not None else type(model).__name__
        raise StudyError(
            f"Expected a torch.nn.Module, or the module and its state_dict before training, but got {got} from "
            f"{spec!r}. Try returning the network that was trained."
        )
    if initial is None:
        return model, None
    return model, {name: each.detach().cpu().clone() for name, each in initial.items() if isinstance(each, Tensor)}


def _move_examples(model: nn.Module, examples: Examples) -> Examples:
    """Return the examples on the device of the model, in its precision."""
    first = next((each for each in model.parameters() if each.is_floating_point()), None)
    return examples if first is None else examples.to(first.device, first.dtype)


@contextmanager
def _use_seed(seed: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch, and restore them at the end of the block."""
    kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
