"""A training that is watched: what is measured, when, and that nothing of the training changes."""

import json
import random
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import FrozenInstanceError
from importlib import import_module
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import saltflat
from saltflat.errors import (
    DataError,
    EmptyDataError,
    ModelError,
    OneShotDataError,
    OptionError,
    TrainingError,
    UnknownNameError,
)
from saltflat.integrations import JsonLines, Monitor, MonitorWarning, Record
from saltflat.integrations.probe_measurer import TopEigenvalueTracker
from saltflat.integrations.probe_set import ProbeSet
from saltflat.integrations.schedule import Interval, Schedule
from saltflat.training.sam import SAM

# When it is due.


@pytest.mark.parametrize(
    ("given", "count", "unit"),
    [(1, 1, "step"), (250, 250, "step"), ("7 steps", 7, "step"), ("1step", 1, "step"), (" 3 epochs ", 3, "epoch")],
)
def test_a_schedule_is_a_number_of_steps_or_epochs(given: int | str, count: int, unit: str) -> None:
    assert Interval.parse(given) == Interval(count, unit)


@pytest.mark.parametrize("given", [0, -1, True, 2.5, None, "", "100", "0 steps", "0 epochs", "-1 steps", "2 hours"])
def test_a_schedule_that_means_nothing_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="every="):
        Schedule(given, 0.05)


@pytest.mark.parametrize("cap", [0, -0.1, 1.5, 5, nan, True, "5%"])
def test_a_cap_that_is_no_share_is_refused(cap: Any) -> None:
    with pytest.raises(OptionError, match="cap="):
        Schedule(1, cap)


def simulated(schedule: Schedule, costs: Callable[[int], float], steps: int, step: float = 0.01) -> list[int]:
    """The steps after which it was measured, if a training step and the measurements take so many seconds."""
    now = 0.0
    measured: list[int] = []
    for number in range(1, steps + 1):
        now += step
        if schedule.after_step(number, now):
            started, now = now, now + costs(len(measured))
            schedule.record_measurement(started, now)
            measured.append(number)
    return measured


def test_without_a_cap_it_is_measured_whenever_it_is_due() -> None:
    schedule = Schedule(10, None)
    assert simulated(schedule, lambda _: 100.0, 50) == [10, 20, 30, 40, 50]
    assert schedule.skipped == 0
    assert schedule.share == pytest.approx(500 / 0.49)  # time is counted from the first call on


def test_what_costs_little_is_measured_whenever_it_is_due() -> None:
    schedule = Schedule(10, 0.05)
    # The first is made at once, and the second is due when 0.19 s of training have paid for 0.0095 s.
    assert simulated(schedule, lambda _: 0.004, 50) == [10, 20, 30, 40, 50]
    assert schedule.skipped == 0
    assert schedule.share == pytest.approx(5 * 0.004 / 0.49)


@pytest.mark.parametrize("cap", [0.02, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("every", [1, 10, 50])
def test_the_share_is_within_a_fifth_of_the_cap_also_if_costs_vary(cap: float, every: int) -> None:
    noise = np.random.default_rng(0)

    def cost(number: int) -> float:
        # The first is dear, and the others cost between a half and twice of 0.2 s.
        return 1.5 if number == 0 else float(0.2 * 2 ** noise.uniform(-1, 1))

    schedule = Schedule(every, cap)
    measured = simulated(schedule, cost, 30_000)
    assert schedule.share <= 1.2 * cap
    # As many as the cap allows, or as the schedule asks for once the first is paid for.
    assert schedule.share >= 0.8 * cap or len(measured) > 0.98 * 30_000 / every


def test_what_is_due_too_early_is_made_at_the_first_step_that_can_pay_for_it() -> None:
    schedule = Schedule(10, 0.25)
    # Seconds are multiples of 1/64: sums are exact. From step 1 on, 36 of them pay for two measurements.
    measured = simulated(schedule, lambda _: 4.5 / 64, 60, step=1 / 64)
    assert measured == [10, 37, 55]
    assert schedule.skipped == 5  # at 20 and 30, at 40 and 50, and at 60, for which there was no time any more


def test_epochs_count_where_epochs_are_asked_for() -> None:
    schedule = Schedule("2 epochs", None)
    for epoch in range(1, 5):
        assert not any(schedule.after_step(step, 0.0) for step in range(1, 9))
        due = schedule.after_epoch(epoch, 0.0)
        assert due == (epoch % 2 == 0)
        if due:
            schedule.record_measurement(0.0, 0.0)


def test_what_was_due_after_an_epoch_can_be_made_at_a_later_step() -> None:
    schedule = Schedule("1 epoch", 0.5)
    assert schedule.after_epoch(1, 0.0)
    schedule.record_measurement(0.0, 4.0)
    assert not schedule.after_epoch(2, 10.0)
    assert not schedule.after_step(1, 19.0)
    assert schedule.after_step(2, 20.0)  # 16 s of training pay for twice 4 s
    assert schedule.skipped == 1


# What is measured.


def digits(batch_norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    norm: list[nn.Module] = [nn.BatchNorm1d(8)] if batch_norm else []
    return nn.Sequential(nn.Linear(5, 8), *norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def data(count: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 5, generator=generator), torch.randint(3, (count,), generator=generator)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[int]:
    """Some steps, each with random numbers of all kinds; between them the caller has its turn."""
    inputs, labels = data()
    for step in range(steps):
        chosen = torch.randperm(len(inputs))[: 8 + random.randrange(4) + int(np.random.randint(4))]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
        yield step


def test_a_record_holds_what_measure_finds() -> None:
    model, probe = digits(), data()
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[4].parameters()}]
    optimizer = torch.optim.SGD(groups, 0.1)
    names = ["hessian_trace", "rho(axis='row')"]
    monitor = Monitor(model, probe, measures=names, by_layer=True, optimizer=optimizer)
    record = monitor.measure()
    report = saltflat.measure(model, probe, measures=names, sampling=False)
    for name in names:
        assert record.values[f"flatness/{name}"] == report[name].value
        for layer, value in report[name].layers.items():
            assert record.values[f"flatness/{name}/{layer}"] == value
    assert record.values["flatness/loss"] == report.loss
    assert record.values["flatness/lr_lambda_max_threshold"] == 2
    assert record.values["flatness/seconds"] == record.seconds > 0
    assert monitor.history == [record]
    assert all(type(value) is float for value in record.values.values())
    assert not record.notes
    with pytest.raises(FrozenInstanceError):
        record.step = 3  # type: ignore[misc]


def test_layers_and_the_eigenvalue_are_left_out_where_nobody_asks() -> None:
    values = Monitor(digits(), data(), measures="squared_norm", spectrum=False).measure().values
    assert set(values) == {"flatness/loss", "flatness/squared_norm", "flatness/seconds"}


def test_options_of_measure_go_through() -> None:
    model, probe = digits(), data()
    initial = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    options: dict[str, Any] = {"layers": ["0"], "dtype": torch.float64, "initial": initial}
    record = Monitor(model, probe, measures="distance_from_init", by_layer=True, spectrum=False, **options).measure()
    assert {name for name in record.values if name.count("/") > 1} <= {
        f"flatness/distance_from_init/0.{name}" for name in ("weight", "bias")
    }
    expected = sum(float(p.detach().double().square().sum()) for p in model[0].parameters()) ** 0.5
    assert record.values["flatness/distance_from_init"] == pytest.approx(expected, rel=1e-12)


def test_steps_and_epochs_are_counted_and_can_be_set() -> None:
    model, seen = digits(), []
    monitor = Monitor(model, data(), measures="squared_norm", every="3 steps", cap=None, spectrum=False)
    monitor.step = 100  # a training that is taken up again
    for _ in range(2):
        seen += [record for _ in range(4) if (record := monitor.after_step()) is not None]
        assert monitor.after_epoch() is None
    assert [(record.step, record.epoch) for record in seen] == [(102, 0), (105, 1), (108, 1)]
    assert monitor.history == seen


def test_the_learning_rate_is_that_of_the_moment_and_of_the_optimizer_at_hand() -> None:
    model = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    monitor = Monitor(model, data(), measures="squared_norm", every=1, cap=None)
    assert "flatness/lr_lambda_max" not in monitor.measure().values
    for rate in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        record = monitor.after_step(optimizer)
        assert record is not None
        assert record.values["flatness/lr_lambda_max"] == rate * record.values["flatness/lambda_max"]


def test_the_cost_of_measuring_and_logging_is_kept_under_the_cap() -> None:
    now = 0.0

    def slow(values: object, step: int) -> None:
        nonlocal now
        now += 1.0

    options: dict[str, Any] = {"spectrum": False, "loggers": slow, "clock": lambda: now}
    monitor = Monitor(digits(), data(), measures="squared_norm", every=1, cap=0.1, **options)
    for _ in range(101):
        monitor.after_step()
        now += 1.0
    # Time counts from the first call on; each of them costs 10 s of training, and is made when it can be paid for.
    assert [record.step for record in monitor.history] == [1, *range(21, 102, 10)]
    assert monitor.share == pytest.approx(0.1)
    assert monitor.num_skipped == 101 - len(monitor.history)


class Slow(nn.Sequential):
    """A second for every hundred examples, on a clock of its own."""

    now = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        Slow.now += 0.01 * len(inputs)
        return super().forward(inputs)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("every", [1, 40])
@pytest.mark.parametrize("spectrum", [False, True])
def test_the_cap_holds_from_the_first_measurement_on(every: int, spectrum: bool) -> None:
    Slow.now = 0.0
    model = Slow(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    inputs, labels = data(280)
    probe = list(zip(inputs.chunk(7), labels.chunk(7), strict=True))
    options: dict[str, Any] = {"every": every, "spectrum": spectrum, "optimizer": optimizer, "clock": lambda: Slow.now}
    monitor = Monitor(model, probe, measures="fisher_trace", cap=0.1, **options)
    F.cross_entropy(model(inputs), labels).backward()
    step = 1.0 if spectrum else 0.05
    for _ in range(2500):
        optimizer.step()
        Slow.now += step
        if monitor.after_step() is not None:
            # Searches for eigenvalues differ in length.
            assert monitor.share <= (1.2 if spectrum else 1.0001) * 0.1
    first = monitor.history[0]
    assert first.skipped == tuple(range(every, first.step, every))
    assert first.seconds > 0.1 * step * every  # it had to wait, and not much longer than needed
    # The estimate is paid for, too, and here costs as much as a measurement: most of both is looking at the model. It
    # takes the second look at the first chunk for one at every chunk, and here only forward passes take time.
    assert first.seconds > (0.2 if spectrum else 0.35) * 0.1 * step * first.step
    late = sum(record.step % every > 0 for record in monitor.history)
    assert monitor.num_skipped == monitor.step // every - len(monitor.history) + late


def test_a_run_shorter_than_the_interval_is_measured_at_its_end() -> None:
    model, seen = digits(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"cap": None, "loggers": lambda values, step: seen.append(step)}
    with Monitor(model, data(), every=100, **options) as monitor:
        for _ in trained(model, optimizer, 3):
            monitor.after_step(optimizer)
    (record,) = monitor.history
    assert (record.step, seen) == (3, [3])
    assert (
        record.values["flatness/hessian_trace"]
        == saltflat.measure(model, data(), measures="hessian_trace", sampling=False)["hessian_trace"].value
    )
    assert "flatness/lr_lambda_max" in record.values  # the optimizer of the last call
    monitor.close()
    assert monitor.finish() is None
    assert len(monitor.history) == 1
    # One that is measured on the way is not measured again, and one that never began or that failed is not at all.
    with Monitor(model, data(), every=2, **options) as other:
        for _ in range(3):
            other.after_step()
    assert [record.step for record in other.history] == [2]
    with Monitor(model, data(), **options) as empty:
        pass
    failed = Monitor(model, data(), **options)
    failed.after_step()
    failed.__exit__(KeyError, KeyError(), None)
    assert not empty.history
    assert not failed.history


def test_what_was_left_out_for_the_cap_is_said() -> None:
    Slow.now = 0.0
    model = Slow(nn.Linear(5, 3))
    options: dict[str, Any] = {"every": 10, "spectrum": False, "clock": lambda: Slow.now}
    monitor = Monitor(model, data(), measures="fisher_trace", cap=0.1, **options)
    for _ in range(49):
        Slow.now += 0.5
        monitor.after_step()
    records = monitor.history
    left = [step for record in records for step in record.skipped]
    assert 0 < len(records) < 4
    assert monitor.num_skipped >= len(left) > 0
    with pytest.warns(MonitorWarning, match=rf"Measured {len(records)} of the 4 times it was due: a measurement took"):
        monitor.close()
    short = Monitor(model, data(), measures="fisher_trace", cap=0.01, **options)
    for _ in range(5):
        Slow.now += 0.01
        short.after_step()
    with pytest.warns(MonitorWarning, match=r"Nothing was measured in 5 steps.* would take about .*cap=0.01 allows"):
        short.close()
    assert not short.history
    # What takes nobody knows how long is measured when it is due.
    inputs, labels = data(40)
    labels[:30] = -100  # of those that are tried, none counts
    unknown = Monitor(digits(), (inputs, labels), every=2, cap=1e-9, spectrum=False)
    assert unknown.after_step() is None
    assert unknown.after_step() is not None


# The largest eigenvalue.


def dense_top(case: Case) -> float:
    """The largest eigenvalue of the Hessian of the mean loss, all of it written down."""
    parameters = {name: p.detach() for name, p in case.model.named_parameters() if p.requires_grad}
    sizes = [p.numel() for p in parameters.values()]
    inputs = torch.cat([batch[0] for batch in case.batches])  # type: ignore[index, misc]
    targets = torch.cat([batch[1] for batch in case.batches])  # type: ignore[index]

    def loss(flat: Tensor) -> Tensor:
        parts = zip(parameters.items(), flat.split(sizes), strict=True)
        weights = {name: part.reshape(p.shape) for (name, p), part in parts}
        return case.loss_function(functional_call(case.model, weights, (inputs,)), targets)

    flat = torch.cat([p.flatten() for p in parameters.values()])
    return float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))[-1])


NAMES = ["tanh_mlp", "residual_with_batch_norm", "frozen_parameters", "squared_error", "class_weights"]


@pytest.mark.parametrize("name", NAMES)
def test_lambda_max_is_the_top_of_the_dense_hessian(name: str) -> None:
    case = CASES[name]()
    expected = dense_top(case)
    sharpest = TopEigenvalueTracker(tolerance=1e-10)
    for _ in range(3):  # cold, and warm
        assert sharpest(case.model, case.batches, case.loss) == pytest.approx(expected, rel=1e-8)
        assert sharpest.converged
    record = Monitor(case.model, case.batches, case.loss, "squared_norm").measure()
    assert record.values["flatness/lambda_max"] == pytest.approx(expected, rel=1e-3)


def test_after_a_little_training_the_search_is_quicker_than_a_new_one() -> None:
    model, (inputs, labels) = digits().double().eval(), data(200)
    probe = inputs.double(), labels
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    warm, counts = TopEigenvalueTracker(), []
    warm(model, probe, "cross_entropy")
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(probe[0]), labels).backward()
        optimizer.step()
        cold, close = TopEigenvalueTracker(), TopEigenvalueTracker(tolerance=1e-9)
        value = warm(model, probe, "cross_entropy")
        assert value == pytest.approx(close(model, probe, "cross_entropy"), rel=1e-3)
        cold(model, probe, "cross_entropy")
        counts.append((warm.products, cold.products))
    assert all(one < other for one, other in counts), counts


def parabola(curvatures: Tensor) -> tuple[Tensor, Tensor]:
    """Data on which a linear map to one number has a diagonal Hessian of mean squared error with these entries."""
    n = len(curvatures)
    return torch.diag((n * curvatures / 2).sqrt()), torch.zeros(n, 1, dtype=torch.float64)


def test_a_second_eigenvalue_that_overtakes_the_first_is_seen() -> None:
    model = nn.Linear(60, 1, bias=False).double()
    curvatures = torch.linspace(0.0, 0.5, 60, dtype=torch.float64)
    curvatures[3], curvatures[7] = 2.0, 1.0
    sharpest = TopEigenvalueTracker()
    assert sharpest(model, parabola(curvatures), "mse") == pytest.approx(2.0, rel=1e-3)
    # The eigenvectors stay what they were: the earlier one is still an eigenvector, but no longer of the largest.
    curvatures[7] = 3.0
    assert sharpest(model, parabola(curvatures), "mse") == pytest.approx(3.0, rel=1e-3)


def test_parameters_frozen_on_the_way_start_the_search_anew() -> None:
    case = CASES["tanh_mlp"]()
    sharpest = TopEigenvalueTracker(1e-10)
    sharpest(case.model, case.batches, case.loss)
    case.model.get_parameter("0.weight").requires_grad_(False)
    assert sharpest(case.model, case.batches, case.loss) == pytest.approx(dense_top(case), rel=1e-8)


# Nothing of the training changes.


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return deepcopy(
        {
            "model": model.state_dict(),
            "gradients": {name: p.grad for name, p in model.named_parameters()},
            "modes": [module.training for module in model.modules()],
            "attributes": [sorted(vars(module)) for module in model.modules()],
            "optimizer": optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "python": random.getstate(),
        }
    )


def assert_same(one: Any, two: Any) -> None:
    torch.testing.assert_close(one.pop("numpy")["state"]["key"], two.pop("numpy")["state"]["key"], rtol=0, atol=0)
    assert one.pop("python") == two.pop("python")
    for key in ("modes", "attributes"):
        assert one.pop(key) == two.pop(key)
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_a_watched_training_goes_the_same_way_bit_for_bit(tmp_path: Path) -> None:
    def run(watched: bool) -> list[dict[str, Any]]:
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        model = digits()
        model[3].train()
        model[0].eval()  # modes of the parts are the user's own
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(*data(10)), batch_size=4, shuffle=True)
        monitor = None
        if watched:
            names = ["hessian_trace", "kappa", "adaptive_sharpness", "fisher_trace"]
            monitor = Monitor(model, loader, measures=names, every=2, cap=None, by_layer=True, optimizer=optimizer)
        states = []
        for _ in trained(model, optimizer, 8):
            if monitor is not None:
                monitor.after_step()
            states.append(state(model, optimizer))
        assert monitor is None or len(monitor.history) == 4
        return states

    for one, two in zip(run(False), run(True), strict=True):
        assert_same(one, two)


def test_a_failed_measurement_leaves_the_model_as_it_was() -> None:
    model = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, data(), every=1, cap=None)
    for _ in trained(model, optimizer, 1):
        with torch.no_grad():
            model.get_parameter("4.bias")[0] = torch.inf
        before = state(model, optimizer)
        with pytest.warns(MonitorWarning):
            monitor.after_step()
        assert_same(before, state(model, optimizer))


# What goes wrong.


def test_a_training_that_diverged_is_said_so_once_and_goes_on() -> None:
    model = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, data(), measures=["hessian_trace", "rho"], every=1, cap=None, optimizer=optimizer)
    good = model.get_parameter("4.weight").detach().clone()
    with torch.no_grad():
        model.get_parameter("4.weight")[0, 0] = nan
    with pytest.warns(MonitorWarning, match="step 1.*NaN.*diverged") as told:
        first = monitor.after_step()
    assert len(told) == 1
    with warnings.catch_warnings(action="error"):
        second = monitor.after_step()
        assert first is not None
        assert second is not None
        for record in (first, second):
            names = ("loss", "hessian_trace", "rho", "lambda_max", "lr_lambda_max")
            assert all(isnan(record.values[f"flatness/{name}"]) for name in names)
            assert len(record.notes) == 1
        with torch.no_grad():
            model.get_parameter("4.weight").copy_(good)
        third = monitor.after_step()
    assert third is not None
    assert not any(isnan(value) for value in third.values.values())
    assert not third.notes


def test_a_measure_without_a_value_is_nan_with_its_reason() -> None:
    model = digits(batch_norm=False)
    for p in model.parameters():
        nn.init.zeros_(p)  # any noise changes what it predicts
    monitor = Monitor(model, data(), measures=["pac_bayes_flatness", "squared_norm"], spectrum=False)
    with pytest.warns(MonitorWarning, match="pac_bayes_flatness is nan .*accuracy drops"):
        record = monitor.measure()
    assert isnan(record.values["flatness/pac_bayes_flatness"])
    assert record.values["flatness/squared_norm"] == 0


def test_behind_smooth_activations_the_trace_is_said_to_be_gauss_newtons() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    monitor = Monitor(model, data(), measures=["hessian_trace", "fisher_trace"], spectrum=False)
    with pytest.warns(
        MonitorWarning, match="hessian_trace is by the Gauss-Newton matrix, which is not the Hes"
    ) as told:
        first, second = monitor.measure(), monitor.measure()
    assert len(told) == 1
    (note,) = first.notes  # the Fisher trace is made of gradients
    assert note.startswith("hessian_trace: by the Gauss-Newton matrix")
    assert not second.notes
    # Nobody can tell for examples that do not count.
    inputs, labels = data()
    labels[:8] = -100
    with warnings.catch_warnings(action="error"):
        record = Monitor(model, (inputs, labels), spectrum=False).measure()
    assert "whether it is the Hessian here is unknown" in record.notes[0]


@pytest.mark.parametrize("kind", ["none", "model", "state_dict"])
def test_the_distance_is_that_from_the_weights_at_the_start(kind: str) -> None:
    model = digits()
    given: Any = {"none": None, "model": model, "state_dict": model.state_dict()}[kind]
    monitor = Monitor(model, data(), measures="distance_from_init", spectrum=False, initial=given)
    before = [p.detach().clone() for p in model.parameters()]
    list(trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 2))
    moved = sum(
        float((p.detach() - q).double().square().sum()) for p, q in zip(model.parameters(), before, strict=True)
    )
    assert monitor.measure().values["flatness/distance_from_init"] == pytest.approx(moved**0.5, rel=1e-6)


def test_a_probe_that_is_written_to_stays_what_it_was() -> None:
    model, (inputs, labels) = digits(), data()
    monitor = Monitor(model, (inputs, labels), measures="squared_norm", spectrum=False)
    before = monitor.measure().values["flatness/loss"]
    inputs.zero_()
    assert monitor.measure().values["flatness/loss"] == before


def test_another_prefix_tells_monitors_apart() -> None:
    record = Monitor(digits(), data(), by_layer=True, prefix="test").measure()
    assert all(name.startswith("test/") for name in record.values)
    assert {"test/hessian_trace", "test/hessian_trace/0.weight", "test/lambda_max", "test/seconds"} <= set(
        record.values
    )


def test_a_training_that_was_never_measured_is_said_so() -> None:
    monitor = Monitor(digits(), data())
    monitor.close()  # nothing was seen
    for _ in range(3):
        monitor.after_step()
    monitor.__exit__(KeyError, KeyError(), None)  # that says enough
    with pytest.warns(MonitorWarning, match="Nothing was measured in 3 steps"):
        monitor.close()


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """With the state it keeps for a whole process as if the test were alone in it."""
    host = pytest.importorskip("accelerate")
    host.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield host
    host.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_that_accelerate_prepared_is_measured_in_full_precision(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    plain, probe = digits(), data()
    model = accelerator.prepare(digits())
    prepared = vars(model)["forward"]
    one, two = (
        saltflat.measure(each, probe, measures="hessian_trace")["hessian_trace"].value for each in (plain, model)
    )
    assert one == two
    assert vars(model)["forward"] is prepared
    # Others may keep an original forward for reasons of their own.
    vars(plain)["_original_forward"] = plain.forward
    vars(plain)["forward"] = lambda inputs: 2 * vars(plain)["_original_forward"](inputs)
    assert saltflat.measure(plain, probe, measures="hessian_trace")["hessian_trace"].value != one


def test_any_error_of_the_model_is_survived() -> None:
    class Fragile(nn.Linear):
        broken = False

        def forward(self, inputs: Tensor) -> Tensor:
            if self.broken:
                raise KeyError("cache")
            return super().forward(inputs)

    model = Fragile(5, 3)
    monitor = Monitor(model, data())
    model.broken = True
    with pytest.warns(MonitorWarning, match="KeyError"):
        assert isnan(monitor.measure().values["flatness/hessian_trace"])


def test_shifted_weights_are_not_measured() -> None:
    model, (inputs, labels) = digits(), data()
    optimizer = SAM(model, torch.optim.SGD, lr=0.1)
    monitor = Monitor(model, (inputs, labels), measures="squared_norm", every=1, cap=None)

    class Wrapper:  # as Lightning and Accelerate wrap optimizers
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups = inner, inner.param_groups

    F.cross_entropy(model(inputs), labels).backward()
    optimizer.first_step()
    for call in (monitor.after_step, monitor.after_epoch, monitor.measure):
        for given in (optimizer, Wrapper(optimizer)):
            with pytest.raises(TrainingError, match="second_step"):
                call(given)
    assert (monitor.step, monitor.epoch) == (0, 0)
    optimizer.restore()
    assert monitor.after_step(optimizer) is not None


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no module": ({"model": lambda x: x}, ModelError, "function"),
    "unknown measure": ({"measures": ["hessian_trase"]}, UnknownNameError, "'hessian_trace'"),
    "no measures": ({"measures": []}, OptionError, "no measures"),
    "unknown option of a measure": ({"measures": "rho(axes='row')"}, UnknownNameError, "'axis'"),
    "wrong option of a measure": ({"measures": "rho(axis='diagonal')"}, (OptionError, UnknownNameError), "diagonal"),  # type: ignore[dict-item]
    "unknown loss": ({"loss": "cross_entropie"}, UnknownNameError, "'cross_entropy'"),
    "unknown option": ({"colums": "top"}, UnknownNameError, "'columns'"),
    "wrong option": ({"columns": "most"}, (OptionError, UnknownNameError), "most"),  # type: ignore[dict-item]
    "wrong seed": ({"seed": -1}, OptionError, "seed"),
    "wrong mode": ({"mode": "train"}, OptionError, "mode"),
    "kept in train mode": ({"mode": "keep"}, ModelError, "train mode"),
    "unknown layer": ({"layers": ["5"]}, UnknownNameError, "'5'"),
    "wrong initial weights": ({"measures": "distance_from_init", "initial": {}}, OptionError, "initial"),
    "empty probe": ({"probe": []}, EmptyDataError, "at least one example, but got empty data"),
    "probe of no examples": (
        {"probe": (torch.zeros(0, 5), torch.zeros(0).long())},
        EmptyDataError,
        "at least one example, but got empty data",
    ),
    "probe that is used up": ({"probe": iter([data()])}, OneShotDataError, "only once"),
    "probe of another kind": ({"probe": 3}, DataError, "int"),
    "probe without labels": ({"probe": {"input": data()[0]}}, DataError, "'labels'"),
    "prefix with a slash": ({"prefix": "a/b"}, OptionError, "prefix="),
    "misspelt option of the monitor": ({"by_layers": True}, UnknownNameError, "Try 'by_layer'"),
    "a logger's class": ({"loggers": [JsonLines]}, OptionError, r"Try JsonLines\(\.\.\.\)"),
    "one label out of range": ({"probe": (data()[0], torch.tensor([0] * 23 + [3]))}, DataError, "class"),
    "labels out of range": ({"probe": (data()[0], 7 + data()[1])}, DataError, "class"),
    "no optimizer": ({"optimizer": 0.1}, OptionError, "param_groups"),
    "no logger": ({"loggers": ["flatness.jsonl"]}, OptionError, "JsonLines"),
    "no table": ({"table": "yes"}, OptionError, "table"),
    "cap in percent": ({"cap": 5}, OptionError, "cap=0.05"),
    "every nothing": ({"every": "0 steps"}, OptionError, "every="),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_options_are_errors_before_the_training(name: str) -> None:
    given, error, words = BAD[name]
    options = {"model": digits(), "probe": data(), **given}
    with pytest.raises(error, match=words):
        Monitor(**options)


# Models and probes of other kinds.


def test_the_module_inside_of_a_parallel_wrapper_is_measured(tmp_path: Path) -> None:
    model, probe = digits(), data()
    expected = Monitor(model, probe).measure().values["flatness/hessian_trace"]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        record = Monitor(wrapped, probe, by_layer=True).measure()
    finally:
        torch.distributed.destroy_process_group()
    assert record.values["flatness/hessian_trace"] == expected
    assert "flatness/hessian_trace/0.weight" in record.values


def test_a_compiled_model_is_measured_under_the_names_of_the_plain_one() -> None:
    plain: Any = digits()
    compiled: Any = torch.compile(digits(), backend="eager")
    one, two = (Monitor(model, data(), by_layer=True).measure().values for model in (plain, compiled))
    assert one.keys() == two.keys()
    assert two["flatness/hessian_trace/0.weight"] == one["flatness/hessian_trace/0.weight"]


@pytest.mark.parametrize("kind", ["loader", "shuffled", "dataset", "list", "dicts"])
def test_a_probe_may_be_anything_that_measure_takes(kind: str) -> None:
    inputs, labels = data()
    dataset = TensorDataset(inputs, labels)
    probes: dict[str, Any] = {
        "loader": DataLoader(dataset, batch_size=7),
        "shuffled": DataLoader(dataset, batch_size=7, shuffle=True),
        "dataset": dataset,
        "list": [(inputs[:5], labels[:5]), (inputs[5:], labels[5:])],
        "dicts": [{"input": inputs[:5], "labels": labels[:5]}, {"input": inputs[5:], "labels": labels[5:]}],
    }
    values = Monitor(digits(), probes[kind]).measure().values
    expected = Monitor(digits(), (inputs, labels)).measure().values
    for name in ("loss", "hessian_trace", "lambda_max"):
        assert values[f"flatness/{name}"] == pytest.approx(expected[f"flatness/{name}"], rel=2e-3)


def test_the_probe_is_read_once() -> None:
    class Counted(TensorDataset):
        reads = 0

        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            self.reads += 1
            return tuple(tensor[index] for tensor in self.tensors)

    dataset = Counted(*data(10))
    monitor = Monitor(digits(), DataLoader(dataset, batch_size=5), measures="squared_norm")
    once = dataset.reads
    for _ in range(3):
        monitor.measure()
    assert dataset.reads == once


def test_a_probe_follows_the_model_to_its_device() -> None:
    inputs, labels = data(4)
    probe = ProbeSet([{"a": inputs, "b": {"c": [inputs]}, "labels": labels}, ({"x": inputs}, labels)])
    assert probe.examples == 8
    # The one other device that every machine has; tensors there have no numbers.
    for (moved, targets), keys in zip(probe.get_batches(torch.device("meta")), ({"a", "b"}, {"x"}), strict=True):
        assert set(moved) == keys
        leaves = [*torch.utils._pytree.tree_leaves(moved), targets]
        assert {leaf.device.type for leaf in leaves} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_values_are_those_of_the_cpu() -> None:
    here, there = digits().double(), digits().double().cuda()
    inputs, labels = data()
    probe = inputs.double(), labels
    one, two = (Monitor(model, probe, by_layer=True).measure().values for model in (here, there))
    for name in one.keys() - {"flatness/seconds"}:
        assert two[name] == pytest.approx(one[name], rel=1e-3 if "lambda" in name else 1e-9)


# Pictures.


def test_the_history_becomes_a_figure(tmp_path: Path) -> None:
    model = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, data(), every=1, cap=None, by_layer=True, optimizer=optimizer)
    assert monitor.plot().texts[0].get_text() == "Nothing was measured yet."
    for _ in trained(model, optimizer, 3):
        monitor.after_step()
    monitor.history.append(Record(4, 0, {"flatness/loss": nan}, 0.1))
    figure = monitor.plot(tmp_path / "history.png")
    panels = {axis.get_title(): axis for axis in figure.axes}
    assert set(panels) == {"loss", "hessian_trace", "lambda_max", "lr_lambda_max", "seconds"}
    curve = panels["hessian_trace"].lines[-1]
    assert np.asarray(curve.get_xdata()).tolist() == [1, 2, 3]
    assert np.asarray(curve.get_ydata()).tolist() == [
        record.values["flatness/hessian_trace"] for record in monitor.history[:3]
    ]
    assert len(panels["hessian_trace"].lines) == 1 + 6  # and every parameter's
    edge = panels["lr_lambda_max"].lines[-1]
    assert np.asarray(edge.get_ydata()).tolist() == [2, 2, 2]
    assert (tmp_path / "history.png").stat().st_size > 1000


# What it costs is a matter of the benchmark, which must run; times are not tested.


def test_the_benchmark_trains_the_same_network_with_and_without_a_monitor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parents[1] / "benchmarks")
    monkeypatch.setenv("SALTFLAT_DATA", str(tmp_path / "nothing"))
    benchmark = import_module("monitor")
    for name, value in {"PROBE": 8, "SLICE": 3, "WARM_UP": 1}.items():
        monkeypatch.setattr(benchmark, name, value)
    out = tmp_path / "found.json"
    benchmark.main(["--seconds", "0.001", "--examples", "128", "--every", "2 steps", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["same_weights"]
    assert "RANDOM" in found["source"]
    assert [row["cap"] for row in found["rows"]] == [None, 0.05, 0.2, None]
    assert [row["measured"] for row in found["rows"]] == [0, 0, 0, 0]  # no time for that under the cap
    assert {row["steps"] for row in found["rows"]} == {3}
    assert (benchmark.verdict(0.061, 0.05), benchmark.verdict(0.059, 0.05)) == ("NOT KEPT", "kept")
