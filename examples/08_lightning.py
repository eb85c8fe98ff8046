"""Train with SAM in Lightning, and monitor how flat the minimum becomes.

A LightningModule learns the 8 x 8 digits that ship with scikit-learn, once with SGD and once with SAM, in automatic
optimization. FlatnessCallback measures both after every epoch and logs to Lightning's own logger. Lightning's
checkpoints keep the flattest state of each that fits its data: without a condition on the loss that could be a network
that has learned nothing. Writes the logs and the checkpoints.
"""

import argparse
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from saltflat.datasets import read_data
from saltflat.integrations.lightning import FlatnessCallback
from saltflat.training import SAM

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
EPOCHS = 3 if QUICK else 20
BATCH = 64
LEARNING_RATE = 0.1
RHO = 0.1
PROBE = 100  # training examples to measure on
FITS = 0.5 if QUICK else 0.1  # the largest loss on these of a state that is worth keeping


class Digits(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, rho: float | None) -> None:
        super().__init__()
        self.rho = rho
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self.net(inputs), labels)
        # With SAM this runs a second time, at shifted weights: that loss is not the one to log.
        if not getattr(self.optimizers(), "is_shifted", False):
            self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        if self.rho is None:
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=0.9)
        return SAM(self, torch.optim.SGD, rho=self.rho, lr=LEARNING_RATE, momentum=0.9)


class FlattestFitted(ModelCheckpoint):  # type: ignore[misc]
    """Keep the flattest state among those that fit their data."""

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        fits = bool(trainer.callback_metrics["flatness/loss"] <= FITS)
        return fits and bool(super().check_monitor_top_k(trainer, current))


def silence_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for text in (
        ".*does not have many workers",
        "The number of training batches",
        ".*LeafSpec",
        "Checkpoint directory",
    ):
        warnings.filterwarnings("ignore", message=text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Path("demo", "lightning")
    parser.add_argument("--out", type=Path, default=usual, help="folder for the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    arguments = parser.parse_args()
    silence_lightning()
    inputs, labels = read_data("digits")
    test_inputs, test_labels = read_data("digits", split="test")

    for name, rho in {"SGD": None, "SAM": RHO}.items():
        torch.manual_seed(arguments.seed)
        module, folder = Digits(rho), arguments.out / name.lower()
        probe = inputs[:PROBE], labels[:PROBE]
        watch = FlatnessCallback(
            probe, measures=("hessian_trace", "fisher_rao_norm"), every="1 epoch", cap=None, model="net"
        )
        flattest = FlattestFitted(folder, filename="flattest", monitor="flatness/hessian_trace")
        trainer = pl.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=[watch, flattest],
            logger=CSVLogger(folder, name="", version="log"),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(TensorDataset(inputs, labels), BATCH, shuffle=True))
        with torch.no_grad():
            right = float((module.net(test_inputs).argmax(dim=1) == test_labels).double().mean())
        values, threshold = watch.history[-1].values, "flatness/lr_lambda_max_threshold"
        print(
            f"{name}: {right:.1%} of the test set right after {trainer.global_step} steps; "
            f"loss {values['flatness/loss']:.4f}, Hessian trace {values['flatness/hessian_trace']:.4g}, "
            f"largest eigenvalue {values['flatness/lambda_max']:.4g}, "
            f"lr * lambda_max {values['flatness/lr_lambda_max']:.3g} ("
            # SAM changes the gradient, and with it where SGD becomes unstable.
            + (f"unstable above {values[threshold]:.3g})" if threshold in values else "threshold not known)")
        )
        kept = [record for record in watch.history if record.values["flatness/loss"] <= FITS]
        if kept:
            best = min(kept, key=lambda record: record.values["flatness/hessian_trace"])
            print(f"  flattest of the {len(kept)} epochs with a loss of at most {FITS}: epoch {best.epoch}")
        else:
            print(f"  no epoch had a loss of at most {FITS}: none is kept")
    print(f"\nLogs and the flattest states are in {arguments.out}.")


if __name__ == "__main__":
    main()
