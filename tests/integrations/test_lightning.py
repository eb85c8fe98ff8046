"""Lightning: SAM in its automatic optimisation, and FlatnessCallback, against plain loops in float64."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from two_processes import run_as_two

import saltflat
from saltflat.errors import ModelError, OptionError, TrainingError, UnknownNameError
from saltflat.integrations import MonitorWarning
from saltflat.integrations import lightning as part
from saltflat.integrations.lightning import FlatnessCallback, TwoPassPrecision
from saltflat.training import ASAM, SAM, FisherPenalty, GradientNormPenalty
from saltflat.training.two_pass import TwoPass

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore:{text}")
    for text in (
        ".*does not have many workers",
        "The number of training batches",
        ".*isinstance.treespec, LeafSpec.",  # Lightning uses what torch is about to drop
        "Checkpoint directory .* exists and is not empty",
        ".* is by the Gauss-Newton matrix",  # behind tanh
    )
]

EXAMPLES, BATCH, CLASSES = 24, 6, 3
Wrapper = Callable[..., TwoPass]


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, 4, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(CLASSES, (EXAMPLES,), generator=generator)


def batches(dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data(dtype)), batch_size=BATCH)


def network(dtype: torch.dtype = torch.float64, dropout: float = 0.3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))
        return nn.Sequential(*layers).to(dtype)


class Classifier(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, make: Callable[[nn.Module], Optimizer], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.net, self.make = network(dtype), make
        self.decay: Any = 1.0
        self.logged: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if not getattr(self.optimizers(), "is_shifted", False):
            self.logged.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)]


def fit(module: pl.LightningModule, folder: Path, seed: int = 7, **options: Any) -> pl.Trainer:
    dtype = module.net[0].weight.dtype
    ckpt = options.pop("ckpt_path", None)
    usual: dict[str, Any] = {"max_epochs": 2, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        **{**usual, **options},
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(seed)
    # A checkpoint holds the optimizer's own kind of object only, and is this test's.
    trainer.fit(module, batches(dtype), ckpt_path=ckpt, weights_only=False)
    return trainer


def plain(
    make: Callable[[nn.Module], TwoPass],
    decay: float = 1.0,
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[nn.Sequential, Optimizer, list[float]]:
    """The same training by hand."""
    net = network(dtype)
    optimizer = make(net)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    losses: list[float] = []
    torch.manual_seed(7)
    for _ in range(2):
        for inputs, labels in batches(dtype):

            def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
                with nullcontext() if autocast is None else torch.autocast("cpu", autocast, cache_enabled=False):
                    loss = F.cross_entropy(net(inputs), labels)
                optimizer.zero_grad()
                (loss if scaler is None else scaler.scale(loss)).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                return loss.detach()

            losses.append(float(optimizer.step(closure, scaler=scaler)))
            if scaler is not None:
                scaler.update()
        schedule.step()
    return net, optimizer, losses


def sam(model: nn.Module) -> SAM:
    return SAM(model, torch.optim.SGD, rho=0.5, lr=0.3, momentum=0.9)


WRAPPERS: dict[str, Callable[[nn.Module], TwoPass]] = {
    "SAM": sam,
    "ASAM": lambda model: ASAM(model, torch.optim.AdamW, rho=0.5, lr=0.05),
    "gradient norm": lambda model: GradientNormPenalty(model, torch.optim.SGD, rho=0.5, balance=0.6, lr=0.3),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_automatic_optimisation_goes_as_a_plain_loop_does(name: str, tmp_path: Path) -> None:
    module = Classifier(WRAPPERS[name])
    module.decay = 0.5
    trainer = fit(module, tmp_path)
    net, optimizer, losses = plain(WRAPPERS[name], decay=0.5)
    # Weights and BatchNorm's statistics, with dropout, momentum and a schedule.
    torch.testing.assert_close(module.net.state_dict(), net.state_dict(), rtol=1e-12, atol=1e-12)
    assert trainer.optimizers[0].perturbed_steps == 8
    assert trainer.optimizers[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert module.logged == pytest.approx(losses, rel=1e-12)  # at the weights themselves


def test_batch_norm_sees_every_batch_once(tmp_path: Path) -> None:
    module = Classifier(sam)
    fit(module, tmp_path)
    assert module.net[1].num_batches_tracked == 8


def test_both_gradients_are_clipped_and_the_first_keeps_its_direction(tmp_path: Path) -> None:
    module = Classifier(sam)
    fit(module, tmp_path, gradient_clip_val=0.05)
    net, _, _ = plain(sam, clip=0.05)
    torch.testing.assert_close(module.net.state_dict(), net.state_dict(), rtol=1e-12, atol=1e-12)
    unclipped, _, _ = plain(sam)
    assert not torch.allclose(unclipped.get_parameter("0.weight"), net.get_parameter("0.weight"))


class Skips(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("half", [False, True])
def test_a_training_step_that_returns_none_skips_its_batch(half: bool, tmp_path: Path) -> None:
    plugins = [TwoPassPrecision("16-mixed", "cpu", scaler())] if half else []
    trainer = fit(Skips(sam, torch.float32), tmp_path, plugins=plugins)
    assert trainer.optimizers[0].perturbed_steps == 4


def test_a_step_without_a_gradient_is_an_error(tmp_path: Path) -> None:
    class Forgets(Classifier):
        def backward(self, loss: Tensor) -> None:
            pass

    class ByHand(Classifier):
        def __init__(self, make: Callable[[nn.Module], Optimizer]) -> None:
            super().__init__(make)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.optimizers().step(closure=lambda: None)

    for kind in (Forgets, ByHand):
        with pytest.raises(TrainingError, match="but got a closure that made no gradient"):
            fit(kind(sam), tmp_path)


def test_bf16_goes_as_a_plain_loop_under_autocast_does(tmp_path: Path) -> None:
    module = Classifier(sam, torch.float32)
    fit(module, tmp_path, precision="bf16-mixed")
    net, _, _ = plain(sam, autocast=torch.bfloat16, dtype=torch.float32)
    torch.testing.assert_close(module.net.state_dict(), net.state_dict(), rtol=0, atol=0)


def test_float16_goes_as_a_plain_loop_with_a_scaler_does(tmp_path: Path) -> None:
    make = WRAPPERS["gradient norm"]
    module = Classifier(make, torch.float32)
    trainer = fit(module, tmp_path, plugins=[TwoPassPrecision("16-mixed", "cpu", scaler())])
    net, _, _ = plain(make, scaler=scaler(), autocast=torch.float16, dtype=torch.float32)
    torch.testing.assert_close(module.net.state_dict(), net.state_dict(), rtol=1e-6, atol=1e-6)
    assert trainer.optimizers[0].perturbed_steps == 8


def scaler(scale: float = 256.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def test_float16_clips_the_unscaled_second_gradient(tmp_path: Path) -> None:
    def once(model: nn.Module) -> SAM:
        return SAM(model, torch.optim.SGD, rho=0.5, lr=1.0)

    module = Classifier(once, torch.float32)
    before = [p.detach().clone() for p in module.parameters()]
    plugin = TwoPassPrecision("16-mixed", "cpu", scaler())
    fit(module, tmp_path, plugins=[plugin], gradient_clip_val=0.01, max_steps=1)
    moved = torch.cat([(p - q).flatten() for p, q in zip(module.parameters(), before, strict=True)])
    assert float(moved.detach().norm()) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # there was no step to come after
def test_float16_that_overflows_skips_the_step_and_leaves_the_weights(tmp_path: Path) -> None:
    module = Classifier(sam, torch.float32)
    weight = module.net.get_parameter("0.weight").detach().clone()
    plugin = TwoPassPrecision("16-mixed", "cpu", scaler(2.0**40))
    trainer = fit(module, tmp_path, plugins=[plugin], max_epochs=1, limit_train_batches=1)
    torch.testing.assert_close(module.net.get_parameter("0.weight").detach(), weight, rtol=0, atol=0)
    assert trainer.optimizers[0].perturbed_steps == 0
    assert plugin.scaler.get_scale() == 2.0**39


def test_the_precision_leaves_other_optimizers_alone(tmp_path: Path) -> None:
    def sgd(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.3)

    ours, theirs = Classifier(sgd, torch.float32), Classifier(sgd, torch.float32)
    fit(ours, tmp_path, plugins=[TwoPassPrecision("16-mixed", "cpu")])
    fit(theirs, tmp_path, plugins=[MixedPrecision("16-mixed", "cpu")])
    torch.testing.assert_close(ours.net.state_dict(), theirs.net.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        # What precision="16-mixed" stands for where there is a GPU.
        ({"plugins": MixedPrecision("16-mixed", "cpu")}, "TwoPassPrecision"),
    ],
)
def test_what_cannot_work_is_refused_in_lightnings_words(
    options: dict[str, Any], said: str, watched: bool, tmp_path: Path
) -> None:
    module = Classifier(sam, torch.float32)
    weight = module.net.get_parameter("0.weight").detach().clone()
    callbacks = [FlatnessCallback(data(torch.float32))] if watched else []
    with pytest.raises(TrainingError, match=said):
        fit(module, tmp_path, callbacks=callbacks, **options)
    torch.testing.assert_close(module.net.get_parameter("0.weight").detach(), weight, rtol=0, atol=0)


def test_a_checkpoint_in_the_middle_goes_on_the_same_way(tmp_path: Path) -> None:
    def run(**options: Any) -> Classifier:
        module = Classifier(WRAPPERS["ASAM"])
        module.decay = 0.5
        module.net[3] = nn.Identity()  # Lightning does not keep random states
        trainer = fit(module, tmp_path, **options)
        if options.get("max_epochs") == 1:
            trainer.save_checkpoint(tmp_path / "half.ckpt")
        return module

    whole = run()
    run(max_epochs=1)
    callback = FlatnessCallback(data(), every=5, cap=None, model="net", spectrum=False)
    half = run(ckpt_path=tmp_path / "half.ckpt", callbacks=[callback])
    torch.testing.assert_close(half.net.state_dict(), whole.net.state_dict(), rtol=0, atol=0)
    assert half.trainer.optimizers[0].perturbed_steps == 8
    assert [record.step for record in callback.history] == [5]  # four were taken before


class Kept(pl.Callback):  # type: ignore[misc]
    """What the trainer's callbacks could see after every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_the_values_are_those_of_measure_and_go_everywhere(tmp_path: Path) -> None:
    module = Classifier(sam)
    module.decay = 0.5
    logger, kept = CSVLogger(tmp_path, name="csv"), Kept()
    watch = FlatnessCallback(
        data(), measures=("hessian_trace", "fisher_trace"), every="4 steps", cap=None, by_layer=True
    )
    trainer = fit(module, tmp_path, callbacks=[watch, kept], logger=[logger])
    report = saltflat.measure(module, data(), measures=("hessian_trace", "fisher_trace"))
    assert [record.step for record in watch.history] == [4, 8]
    last = watch.history[-1].values
    for name in ("hessian_trace", "fisher_trace"):
        assert last[f"flatness/{name}"] == pytest.approx(report[name].value, rel=1e-9)
    assert "flatness/hessian_trace/net.0.weight" in last
    # The learning rate of the step: Lightning steps the second epoch's schedule before the callback.
    rate = 2 * trainer.optimizers[0].param_groups[0]["lr"]
    assert last["flatness/lr_lambda_max"] == pytest.approx(rate * last["flatness/lambda_max"], rel=1e-12)
    assert "flatness/hessian_trace" not in kept.seen[2]
    assert [kept.seen[i]["flatness/hessian_trace"] for i in (3, 6, 7)] == pytest.approx(
        [watch.history[i].values["flatness/hessian_trace"] for i in (0, 0, 1)], rel=1e-6
    )
    rows = Path(logger.log_dir, "metrics.csv").read_text(encoding="utf-8").splitlines()
    columns = rows[0].split(",")
    steps = [int(row.split(",")[columns.index("step")]) for row in rows[1:]]
    assert steps == [3, 7]  # Lightning counts from 0
    assert float(rows[2].split(",")[columns.index("flatness/fisher_trace")]) == last["flatness/fisher_trace"]


def test_the_training_goes_the_same_way_with_and_without_it(tmp_path: Path) -> None:
    watched, alone = Classifier(sam), Classifier(sam)
    fit(watched, tmp_path, callbacks=[FlatnessCallback(data(), every=1, cap=None, model="net")])
    fit(alone, tmp_path)
    torch.testing.assert_close(watched.net.state_dict(), alone.net.state_dict(), rtol=0, atol=0)


class Logging(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


def rows_of(logger: CSVLogger) -> list[dict[str, str]]:
    lines = Path(logger.log_dir, "metrics.csv").read_text(encoding="utf-8").splitlines()
    return [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]


@pytest.mark.parametrize("every", ["2 steps", "1 epoch"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_values_are_logged_at_lightnings_own_step(every: str, accumulated: int, tmp_path: Path) -> None:
    def sgd(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.3)

    logger = CSVLogger(tmp_path, name="csv")
    watch = FlatnessCallback(data(), every=every, cap=None, spectrum=False)
    options: dict[str, Any] = {"log_every_n_steps": 1, "accumulate_grad_batches": accumulated}
    trainer = fit(Logging(sgd), tmp_path, callbacks=[watch], logger=[logger], **options)
    steps = [int(row["step"]) for row in rows_of(logger) if row["flatness/loss"]]
    assert steps == [record.step - 1 for record in watch.history]
    assert watch.history[-1].step == trainer.global_step
    # In the rows of the loss of that step, and in that of the epoch.
    column = "train_loss_step" if every == "2 steps" else "train_loss_epoch"
    own = [int(row["step"]) for row in rows_of(logger) if row[column]]
    assert set(steps) <= set(own)
    assert steps[-1] == own[-1]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_training_that_goes_on_within_an_epoch_counts_its_steps_right(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(Classifier(sam), tmp_path, callbacks=[saved], enable_checkpointing=True)
    watch = FlatnessCallback(data(), every=1, cap=None, spectrum=False)
    logger = CSVLogger(tmp_path, name="csv")
    again = Classifier(sam)
    trainer = fit(again, tmp_path, callbacks=[watch], logger=[logger], ckpt_path=tmp_path / "kept" / "step=3.ckpt")
    assert [record.step for record in watch.history] == [4, 5, 6, 7, 8]
    assert trainer.global_step == 8
    assert [int(row["step"]) for row in rows_of(logger) if row["flatness/loss"]] == [3, 4, 5, 6, 7]


def test_a_training_shorter_than_the_interval_is_measured_at_its_end(tmp_path: Path) -> None:
    logger, module = CSVLogger(tmp_path, name="csv"), Classifier(sam)
    watch = FlatnessCallback(data(), every=100, cap=None, spectrum=False)
    trainer = fit(module, tmp_path, callbacks=[watch], logger=[logger])
    (record,) = watch.history
    trace = saltflat.measure(module, data(), measures="hessian_trace")["hessian_trace"].value
    assert record.values["flatness/hessian_trace"] == pytest.approx(trace, rel=1e-9)
    assert (record.step, trainer.global_step) == (8, 8)
    assert [int(row["step"]) for row in rows_of(logger)] == [7]
    assert float(trainer.callback_metrics["flatness/hessian_trace"]) == pytest.approx(trace, rel=1e-6)


def test_accumulated_batches_are_one_step_and_epochs_are_counted(tmp_path: Path) -> None:
    def sgd(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.3)

    by_step = FlatnessCallback(data(), every=2, cap=None, spectrum=False)
    by_epoch = FlatnessCallback(data(), every="1 epoch", cap=None, spectrum=False, model=lambda module: module.net)
    fit(Classifier(sgd), tmp_path, callbacks=[by_step, by_epoch], accumulate_grad_batches=2)
    assert [(record.step, record.epoch) for record in by_step.history] == [(2, 0), (4, 1)]
    assert [(record.step, record.epoch) for record in by_epoch.history] == [(2, 1), (4, 2)]
    assert by_epoch.history[1].values["flatness/loss"] == by_step.history[1].values["flatness/loss"]


def test_checkpoints_and_early_stopping_can_go_by_it(tmp_path: Path) -> None:
    name = "flatness/hessian_trace"
    best = ModelCheckpoint(tmp_path / "best", monitor=name, save_top_k=1, filename="flattest")
    stop = EarlyStopping(name, patience=0, min_delta=1e9, check_on_train_epoch_end=True)
    watch = FlatnessCallback(data(), every="1 epoch", cap=None, spectrum=False)
    trainer = fit(*(Classifier(sam), tmp_path), callbacks=[watch, best, stop], max_epochs=5, enable_checkpointing=True)
    assert trainer.current_epoch == 2  # nothing gets flatter by so much
    traces = [record.values[name] for record in watch.history]
    assert float(best.best_model_score) == pytest.approx(min(traces), rel=1e-6)
    assert Path(best.best_model_path).is_file()


def test_a_checkpoint_that_goes_by_old_values_is_refused(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="flatness/hessian_trace")
    with pytest.raises(OptionError, match="cap=None"):
        fit(Classifier(sam), tmp_path, callbacks=[FlatnessCallback(data()), best], enable_checkpointing=True)
    other = FlatnessCallback(data(), every=8, cap=0.5, prefix="other", clock=lambda: 0.0)
    watch = FlatnessCallback(data(), every="1 epoch", cap=None, spectrum=False)
    fit(Classifier(sam), tmp_path, callbacks=[watch, other, best], enable_checkpointing=True)
    assert float(best.best_model_score) > 0
    assert "other/hessian_trace" in other.history[0].values


def test_a_second_fit_keeps_what_was_found_and_a_bad_logger_does_not_end_it(tmp_path: Path) -> None:
    class Broken(CSVLogger):  # type: ignore[misc]
        def log_metrics(self, *_: Any, **__: Any) -> None:
            raise ConnectionError("gone")

    watch = FlatnessCallback(data(), every=4, cap=None, spectrum=False)
    with pytest.warns(MonitorWarning, match="Broken did not take the values .*gone"):
        fit(Classifier(sam), tmp_path, callbacks=[watch], logger=[Broken(tmp_path)])
    fit(Classifier(sam), tmp_path, callbacks=[watch], logger=[Broken(tmp_path)])  # no second warning, which would raise
    assert [record.step for record in watch.history] == [4, 8, 4, 8]


def test_an_error_of_the_training_closes_the_loggers(tmp_path: Path) -> None:
    closed = []

    class Closes:
        def log(self, values: Any, step: int) -> None:
            pass

        def close(self) -> None:
            closed.append(True)

    class Breaks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="out of luck"):
        fit(Breaks(sam), tmp_path, callbacks=[FlatnessCallback(data(), loggers=Closes())])
    assert closed


def test_of_several_optimizers_it_takes_the_one_that_trains_the_module(tmp_path: Path) -> None:
    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__(sam)
            self.automatic_optimization = False
            self.other = nn.Linear(4, 1).double()

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            first, second = self.optimizers()
            for optimizer, loss in (
                (first, self.other(batch[0]).square().mean()),
                (second, F.cross_entropy(self(batch[0]), batch[1])),
            ):
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.other.parameters(), lr=0.5),
                torch.optim.SGD(self.net.parameters(), lr=0.125),
            ]

    watch, whole = (FlatnessCallback(data(), every=1, cap=None, model=part) for part in ("net", None))
    logger = CSVLogger(tmp_path, name="csv")
    trainer = fit(Two(), tmp_path, callbacks=[watch, whole], max_epochs=1, logger=[logger])
    assert [record.step for record in watch.history] == [1, 2, 3, 4]
    rows = Path(logger.log_dir, "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert {int(row.split(",")[rows[0].split(",").index("step")]) for row in rows[1:]} == {0, 1, 2, 3}
    assert "flatness/lr_lambda_max" not in whole.history[0].values  # there are two rates
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    again = FlatnessCallback(data(), every=1, cap=None, model="net")
    fit(Two(), tmp_path, callbacks=[again], ckpt_path=tmp_path / "two.ckpt")
    assert [record.step for record in again.history] == [5, 6, 7, 8]
    values = watch.history[0].values
    assert values["flatness/lr_lambda_max"] == pytest.approx(0.125 * values["flatness/lambda_max"], rel=1e-12)


def test_the_fisher_penalty_goes_with_manual_optimisation(tmp_path: Path) -> None:
    options: dict[str, Any] = {"parts": 2, "alpha": 1e-2, "beta": 5.0, "clip": 1.0}

    class Penalised(Classifier):
        def __init__(self) -> None:
            super().__init__(lambda model: torch.optim.SGD(model.parameters(), lr=0.3))
            self.automatic_optimization = False
            self.penalty = FisherPenalty(self, **options)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.penalty.step(self.optimizers(), batch)

    module = Penalised()
    trainer = fit(module, tmp_path)
    net = network()
    optimizer, penalty = torch.optim.SGD(net.parameters(), lr=0.3), FisherPenalty(net, **options)
    torch.manual_seed(7)
    for _ in range(2):
        for batch in batches():
            penalty.step(optimizer, batch)
    torch.testing.assert_close(module.net.state_dict(), net.state_dict(), rtol=1e-10, atol=1e-12)
    assert (trainer.global_step, module.penalty.steps) == (8, 8)


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_weights_spread_over_processes_are_refused(name: str) -> None:
    trainer = SimpleNamespace(strategy=type(name, (), {})())
    with pytest.raises(ModelError, match=f"whole on every process.*{name}"):
        FlatnessCallback(data()).setup(trainer, Classifier(sam), "fit")


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="name of an attribute"):
        FlatnessCallback(data(), model=3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="Expected a module"):
        fit(Classifier(sam), tmp_path, callbacks=[FlatnessCallback(data(), model="decay")])
    with pytest.raises(UnknownNameError, match=r"'nett'.*Try 'net'"):
        fit(Classifier(sam), tmp_path, callbacks=[FlatnessCallback(data(), model="nett")])
    with pytest.raises(UnknownNameError, match="Try 'model'"):
        FlatnessCallback(data(), modell="net")

    class Silent(Classifier):
        forward = pl.LightningModule.forward

    with pytest.raises(OptionError, match=r"without a forward.*model='net'"):
        fit(Silent(sam), tmp_path, callbacks=[FlatnessCallback(data())])
    with pytest.raises(OptionError, match="every='often'"):
        FlatnessCallback(data(), every="often")


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install lightning\."):
        part.import_lightning()


def test_the_name_that_is_imported_already_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert part.import_lightning() is pl
    other = ModuleType("pytorch_lightning")
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", other)
    assert part.import_lightning() is other


TWO_PROCESSES = """
import os
import time
import conftest
from test_lightning import *

out = Path(sys.argv[1])


class Distributed(Classifier):
    def __init__(self, mode):
        super().__init__(None)
        self.net, self.mode = without_noise(), mode

    def train_dataloader(self):
        inputs, labels = data()
        rank = self.trainer.global_rank
        return DataLoader(TensorDataset(inputs[rank::2], labels[rank::2]), batch_size=3)

    def configure_optimizers(self):
        if self.mode == "local":
            with pytest.raises(OptionError, match="DistributedDataParallel"):
                SAM(self, torch.optim.SGD, lr=0.3, sync="local")
        model = self.trainer.strategy.model if self.mode == "local" else self
        return SAM(model, torch.optim.SGD, rho=0.5, sync=self.mode, lr=0.3)


for mode in ("global", "local"):
    watch = FlatnessCallback(data(), every=2, cap=0.5, model="net", spectrum=False, clock=lambda: 0.0)
    module = Distributed(mode)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=out, callbacks=[watch],
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    torch.save((module.net.state_dict(), metrics, len(watch.history)), out / f"{mode}{trainer.global_rank}.pt")

# An error of the first process must not leave the others waiting.
watch = FlatnessCallback(data(), measures=("no_such_measure",))
with pytest.raises(saltflat.errors.SaltflatError, match="no_such_measure"):
    pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=out, callbacks=[watch],
        use_distributed_sampler=False,
    ).fit(Distributed("global"))
(out / f"refused{trainer.global_rank}").touch()
# The first process has started the other. It leaves last, and not in the usual way: threads of gloo may abort that.
while not (out / "refused1").exists():
    time.sleep(0.1)
os._exit(0)
"""


def without_noise() -> nn.Sequential:
    net = network()
    net[1], net[3] = nn.Identity(), nn.Identity()
    return net


def shares() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What the two processes see at every step."""
    inputs, labels = data()
    for start in range(0, EXAMPLES // 2, 3):
        yield [(inputs[rank::2][start : start + 3], labels[rank::2][start : start + 3]) for rank in range(2)]


def reference(mode: str) -> nn.Sequential:
    """Both processes in one: the second gradient is the mean of both, at weights shifted together or apart."""
    net = without_noise()
    parameters = list(net.parameters())
    for both in shares():
        losses: list[Callable[[], Tensor]] = [lambda b=b: F.cross_entropy(net(b[0]), b[1]) for b in both]  # type: ignore[misc]
        firsts = [torch.autograd.grad(loss(), parameters) for loss in losses]
        if mode == "global":
            mean = [(a + b) / 2 for a, b in zip(*firsts, strict=True)]
            firsts = [tuple(mean), tuple(mean)]
        seconds = []
        with torch.no_grad():
            kept = [p.clone() for p in parameters]
        for loss, first in zip(losses, firsts, strict=True):
            length = torch.cat([g.flatten() for g in first]).norm()
            with torch.no_grad():
                for p, g in zip(parameters, first, strict=True):
                    p.add_(0.5 * g / length)
            seconds.append(torch.autograd.grad(loss(), parameters))
            with torch.no_grad():
                for p, k in zip(parameters, kept, strict=True):
                    p.copy_(k)
        with torch.no_grad():
            for p, a, b in zip(parameters, *seconds, strict=True):
                p.sub_(0.3 * (a + b) / 2)
    return net


def test_two_processes_step_together_and_know_what_the_first_measured(tmp_path: Path) -> None:
    run_as_two(TWO_PROCESSES, tmp_path)
    for mode in ("global", "local"):
        (first, seen, measured), (second, seen_too, others) = (
            torch.load(tmp_path / f"{mode}{rank}.pt", weights_only=True) for rank in range(2)
        )
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        torch.testing.assert_close(first, reference(mode).state_dict(), rtol=1e-10, atol=1e-12)
        assert (measured > 0, others) == (True, 0)
        assert seen == seen_too
        assert "flatness/hessian_trace" in seen
    assert all((tmp_path / f"refused{rank}").is_file() for rank in range(2))
