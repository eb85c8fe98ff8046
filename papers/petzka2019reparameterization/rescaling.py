"""Networks rescaled as in the paper, and measured again: the function stays the same, the weights do not."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from costs import list_left
from torch import nn

import saltflat
from saltflat.results.files import write_json
from saltflat.studies import Results
from saltflat.studies.rebuild import load_trained_network

FACTORS = (5, 25)  # of the rescalings, whole numbers, both included


def rescale(model: nn.Sequential, seed: int, last: int | None = None) -> list[int]:
    """Divide each hidden layer by a random whole number and multiply the next by it, in place; return the numbers.

    Args:
        model: network with ReLU between its linear layers.
        seed: of the numbers.
        last: how many linear layers take part, from the end; all if None.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    factors = []
    with torch.no_grad():
        for layer, after in pairwise(layers if last is None else layers[-last:]):
            factor = int(torch.randint(FACTORS[0], FACTORS[1] + 1, (), generator=generator))
            layer.weight.div_(factor)
            layer.bias.div_(factor)
            after.weight.mul_(factor)
            factors.append(factor)
    return factors


def measure_rescaled(
    results: Results, path: Path, device: str, data: Path, measures: Sequence[str], last: int | None = None
) -> None:
    """Measure every network again after rescaling its layers, and record how much its outputs changed.

    Args:
        results: of the study, with its weights.
        path: file for the values; networks in it are not measured again.
        device: to measure on.
        data: folder of the data sets.
        measures: to compute.
        last: how many linear layers are rescaled; see :func:`rescale`.
    """
    done: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    finished = [key for key, row in results.rows.items() if row.outcome is not None and row.readings]
    wanted = list_left(results, done)
    left = [(number, key) for number, key in enumerate(finished) if key in wanted]
    if not left:
        return
    most = results.study.measure["examples"]
    examples = results.study.data.examples(data)
    for number, key in left:
        network = load_trained_network(results, key, examples)
        inputs, labels = network.inputs[:most].double().to(device), network.labels[:most].to(device)
        model = network.model.double().to(device)
        assert isinstance(model, nn.Sequential)
        with torch.no_grad():
            before = model(inputs)
            factors = rescale(model, number, last)
            off = float((model(inputs) - before).abs().max() / before.abs().max())
        report = saltflat.measure(
            model, (inputs, labels), measures=list(measures), certificate=False, sampling=False, progress=False
        )
        done[key] = {
            "outputs_differ_by": off,
            "factors": factors,
            "values": {name: reading.value for name, reading in report.items()},
            "layers": {name: dict(reading.layers) for name, reading in report.items()},
        }
        write_json(done, path)
        print(f"rescaled {len(done)} networks; the outputs of the last differ by {off:.0e}", flush=True)
