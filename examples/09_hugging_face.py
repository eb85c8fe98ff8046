"""Train a small transformer toward a flat minimum with Hugging Face's Trainer.

A randomly initialized BERT with two layers and 32 channels learns which of two tokens comes first in a sequence. It is
trained with the plain Trainer, with SAM, and with the Fisher penalty; each run is measured on a few training examples
and logged where the Trainer logs. The trace is that of the Gauss-Newton matrix, which in a transformer is not the
Hessian; a note in the first record says so. Nothing is downloaded. Writes the three logs.
"""

import argparse
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

from saltflat.integrations import MonitorWarning
from saltflat.integrations.huggingface import FlatTraining

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
STEPS = 12 if QUICK else 120
LENGTH, TOKENS = 10, 16
PROBE = 32 if QUICK else 64  # training examples to measure on
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "SAM": {"sam": {"rho": 0.05}},
    "Fisher penalty": {"fisher": {"beta": 10.0, "parts": 4}},
}


class FlatTrainer(FlatTraining, Trainer):  # type: ignore[misc]
    """A Trainer with ``sam``, ``fisher``, ``penalties`` and ``flatness`` among its arguments."""


def examples(count: int, seed: int) -> dict[str, Tensor]:
    """Draw sequences in which tokens 1 and 2 occur once each; the label says whether 1 comes first."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, TOKENS, (count, LENGTH), generator=generator)
    places = torch.rand(count, LENGTH, generator=generator).argsort(dim=1)
    ids.scatter_(1, places[:, :1], 1).scatter_(1, places[:, 1:2], 2)
    return {"input_ids": ids, "labels": (places[:, 0] < places[:, 1]).long()}


def rows(columns: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{key: value[n] for key, value in columns.items()} for n in range(len(columns["labels"]))]


def model(seed: int) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(
        BertConfig(vocab_size=TOKENS, max_position_embeddings=LENGTH, num_labels=2, **size)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Path("demo", "hugging_face")
    parser.add_argument("--out", type=Path, default=usual, help="folder for the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity(logging.ERROR)
    # That the trace is not the Hessian's is printed at the end.
    warnings.filterwarnings("ignore", message=".*by the Gauss-Newton matrix", category=MonitorWarning)
    columns, test = examples(1024, seed=1), examples(256, seed=2)
    probe = {key: value[:PROBE] for key, value in columns.items()}

    for name, options in RUNS.items():
        folder = arguments.out / name.replace(" ", "_").lower()
        settings = TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            learning_rate=2e-3,
            # Two micro-batches of 16 for each step: SAM takes both again at the shifted weights.
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            logging_steps=STEPS // 3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=arguments.seed,
        )
        trainer = FlatTrainer(
            model=model(arguments.seed),
            args=settings,
            train_dataset=rows(columns),
            flatness={"probe": probe, "every": STEPS // 3, "cap": None, "spectrum": False},
            **options,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        loss = trainer.evaluate(rows(test))["eval_loss"]
        last = trainer.flatness.history[-1].values
        print(
            f"{name}: test loss {loss:.4f} after {trainer.state.global_step} steps; on the probe loss "
            f"{last['flatness/loss']:.4f}, Gauss-Newton trace {last['flatness/hessian_trace']:.4g}"
        )
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history, indent=1), encoding="utf-8")
    print("\nNote:", *trainer.flatness.history[0].notes)
    print(f"Logs are in {arguments.out}.")


if __name__ == "__main__":
    main()
