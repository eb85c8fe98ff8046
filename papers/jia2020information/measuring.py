"""Train and measure the networks of studies, and measure them again in other forms."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from costs import list_left
from studies import FEW, FOLDED, INVARIANT, LOGDET, TUNED, build_study, choose_methods, list_passes
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.results.files import write_json
from saltflat.studies import Results
from saltflat.studies.measurement import measure_network
from saltflat.studies.rebuild import load_trained_network
from saltflat.symmetry.fold import fold

LENGTH = 25.0  # of the logits, in the authors' code


class ScaledLogits(nn.Module):
    """A network whose outputs are scaled to one length, example by example.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled outputs."""
        return LENGTH * F.normalize(self.model(x), dim=1)


def run_studies(names: Sequence[str], out: Path, scale: str, device: str, data: Path) -> None:
    """Train and measure the networks of studies, one after another, and measure them again.

    Args:
        names: of the studies.
        out: folder with a folder for each study.
        scale: ``"full"`` or ``"smoke"``.
        device: to train and measure on.
        data: folder of the data sets.
    """
    for name in names:
        chosen = choose_methods(out, scale)
        if TUNED in name and not name.startswith("tune") and chosen is None:
            raise SystemExit(
                f"Expected all networks of tune-{TUNED}, by which the penalty of {name} is chosen, but got some "
                f"or none in {out}. Try run.py train --study tune-{TUNED}."
            )
        results = build_study(name, scale, chosen).run(out / name, device=device, data_folder=data, every=60.0)
        counts = ", ".join(f"{count} {status}" for status, count in results.counts.items() if count)
        print(f"{results.study.name}: {counts}", flush=True)
        for again in list_passes(name):
            measure_again(results, again, device, data)


def measure_again(results: Results, name: str, device: str, data: Path) -> None:
    """Measure every network of a study once more: with BatchNorm folded, or with logits of one length.

    Args:
        results: of the study, with its weights.
        name: of the pass, and of the file beside the rows that its values go to.
        device: to measure on.
        data: folder of the data sets.
    """
    path = results.folder / f"{name}.json"
    done: dict[str, dict[str, float | None]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    left = list_left(results, done)
    if not left:
        return
    options, examples = results.study.measure_options, results.study.data.examples(data)
    for key in left:
        made = load_trained_network(results, key, examples)
        count = FEW * 10 // max(examples.classes, 10) if name == FOLDED else None
        inputs, labels = made.inputs[:count].to(device, torch.float64), made.labels[:count].to(device)
        model = made.model.to(device, torch.float64)
        model = fold(model, inputs[:2]) if name == FOLDED else ScaledLogits(model)
        measures = INVARIANT if name == FOLDED else (LOGDET,)
        readings = measure_network(model, inputs, labels, None, measures, options).readings
        # A value that is not defined is none in JSON.
        done[key] = {
            each: reading.value if abs(reading.value) < float("inf") else None for each, reading in readings.items()
        }
        write_json(done, path)
    print(f"{results.study.name}, {name}: {len(done)} of {len(results.rows)} networks", flush=True)
