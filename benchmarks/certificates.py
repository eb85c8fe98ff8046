"""Time certificates and minima over rescalings on the CPU, in the ways they are computed now and were before.

Models with random weights and random inputs. Certificates: differentiating forward, as a report does, against
differentiating every parameter twice in reverse mode on eight examples, beside the sweep of the report. Minima: errors
over draws from slopes, against solving every draw again, with the ratio of the two errors. Both ways take turns, after
one round that warms up; the medians count.
"""

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from networks import CLASSES, lenet, resnet20
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

import saltflat
from saltflat.engine import certificate as engine
from saltflat.measures import apply

IMAGES = 64
TOKENS = 100
Data = tuple[Tensor, Tensor]


class ChannelsLastNorm(nn.LayerNorm):
    """LayerNorm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """A depthwise convolution and two layers over the channels, beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(self.act(self.up(y)))
        outputs: Tensor = x + y.permute(0, 3, 1, 2)
        return outputs


def convnext() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 2, 2), ChannelsLastNorm(24)]
    for width in (24, 48, 96):
        if width > 24:
            layers += [ChannelsLastNorm(width // 2), nn.Conv2d(width // 2, width, 2, 2)]
        layers += [ConvNextBlock(width), ConvNextBlock(width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(96), nn.Linear(96, CLASSES))


def vit() -> nn.Module:
    model: nn.Module = ViTForImageClassification(
        ViTConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, image_size=32,
                  patch_size=4, num_labels=CLASSES)
    )  # fmt: skip
    return model


def gpt2(layers: int = 2, width: int = 64) -> nn.Module:
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=width, n_head=4, vocab_size=TOKENS, n_positions=64, bos_token_id=0,
                   eos_token_id=0, loss_type="ForCausalLM")
    )  # fmt: skip
    return model


def resnet50() -> nn.Module:
    model: nn.Module = ResNetForImageClassification(ResNetConfig(num_labels=CLASSES))
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the statistics of the first batches
    with torch.no_grad():
        for _ in range(2):
            model.train()(torch.randn(8, 3, 64, 64))
    return model


def draw_images(examples: int, size: int = 32) -> Data:
    return torch.randn(examples, 3, size, size), torch.randint(CLASSES, (examples,))


def draw_tokens(examples: int, length: int = 32) -> Data:
    tokens = torch.randint(TOKENS, (examples, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


CERTIFIED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Data]]] = {
    "resnet20": (resnet20, draw_images),
    "convnext": (convnext, draw_images),
    "vit": (vit, draw_images),
    "gpt2": (gpt2, draw_tokens),
}
MINIMA: dict[str, tuple[Callable[[], nn.Module], Callable[[], Data], str, list[str]]] = {
    "lenet": (lenet, lambda: draw_images(64), "sampled:4", ["normalized_sharpness", "minimum_unit_sharpness"]),
    "resnet20": (resnet20, lambda: draw_images(16), "sampled:4", ["normalized_sharpness", "minimum_unit_sharpness"]),
    "gpt2, 21M": (lambda: gpt2(12, 384), lambda: draw_tokens(4), "sampled:4", ["normalized_sharpness"]),
    "resnet50": (resnet50, lambda: draw_images(2, 64), "sampled:4", ["minimum_unit_sharpness"]),
}


@dataclass(frozen=True)
class CertificateRow:
    """Seconds of a certificate, and of the sweep of the same report.

    Attributes:
        network: its name.
        parameters: how many were compared.
        forward: seconds, differentiating forward.
        reverse: seconds, differentiating twice in reverse mode.
        sweep: seconds of ``hessian_trace`` with ``top:3``.
        holds: whether the Gauss-Newton blocks are the Hessian's, which both say.
    """

    network: str
    parameters: int
    forward: float
    reverse: float
    sweep: float
    holds: bool


@dataclass(frozen=True)
class MinimumRow:
    """Seconds of measures that are minima, and their errors over draws.

    Attributes:
        network: its name.
        measures: their names.
        slopes: seconds of the measures with errors from slopes.
        solved: seconds where each draw is solved again.
        ratios: of the errors from slopes to those of draws solved again, by measure.
        sweep: seconds of the sweep.
    """

    network: str
    measures: list[str]
    slopes: float
    solved: float
    ratios: dict[str, float]
    sweep: float


@contextmanager
def use_reverse_mode() -> Iterator[None]:
    """Differentiate every parameter twice in reverse mode, on eight examples at once."""
    with patch.object(engine, "_add_forward_curvatures", return_value=False), patch.object(engine, "PAIR", 8):
        yield


def time_certificate(name: str, rounds: int) -> CertificateRow:
    """Return the row of a network."""
    build, draw = CERTIFIED[name]
    torch.manual_seed(0)
    model, data = build().eval(), draw(IMAGES)
    found: dict[bool, list[saltflat.Report]] = {True: [], False: []}
    for _ in range(rounds + 1):
        for forward in (True, False):
            options: dict[str, Any] = {"measures": ["hessian_trace"], "columns": "top:3", "progress": False}
            if forward:
                found[forward].append(saltflat.measure(model, data, **options))
            else:
                with use_reverse_mode():
                    found[forward].append(saltflat.measure(model, data, **options))
    verdicts = {bool((each.certificate or {})["holds"]) for reports in found.values() for each in reports}
    if len(verdicts) > 1:
        raise SystemExit(f"Expected one verdict, but got both for {name}.")
    forward_, reverse = (
        median(each.seconds_by_step["certificate"] for each in found[mode][1:]) for mode in (True, False)
    )
    sweep = median(each.seconds_by_step["sweep"] for each in found[True][1:])
    return CertificateRow(name, len(list(model.parameters())), forward_, reverse, sweep, verdicts.pop())


def time_minimum(name: str, rounds: int) -> MinimumRow:
    """Return the row of a network."""
    build, draw, columns, measures = MINIMA[name]
    torch.manual_seed(0)
    model, data = build().eval(), draw()
    options: dict[str, Any] = {
        "measures": measures, "columns": columns, "certificate": False, "sampling": False, "progress": False,
        "dtype": torch.float64, "memory": "4GiB",
    }  # fmt: skip
    quick, full = [], []
    for _ in range(rounds):
        quick.append(saltflat.measure(model, data, **options))
        with patch.object(apply, "SHORTFALL", -1.0), patch.object(apply, "LARGE", float("inf")):
            full.append(saltflat.measure(model, data, **options))
    ratios = {each: float(quick[0][each].stderr or 0) / float(full[0][each].stderr or 1) for each in measures}
    slopes, solved = (median(each.seconds_by_step["measures"] for each in reports) for reports in (quick, full))
    return MinimumRow(name, measures, slopes, solved, ratios, median(each.seconds_by_step["sweep"] for each in quick))


def main() -> None:
    """Time what is asked for, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--certificates", nargs="*", default=list(CERTIFIED), choices=list(CERTIFIED))
    parser.add_argument("--minima", nargs="*", default=list(MINIMA), choices=list(MINIMA))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: dict[str, list[dict[str, Any]]] = {"certificates": [], "minima": []}
    for name in arguments.certificates:
        rows["certificates"].append(asdict(time_certificate(name, arguments.rounds)))
        print(rows["certificates"][-1], flush=True)
    for name in arguments.minima:
        rounds = 1 if name in ("resnet50", "gpt2, 21M") else arguments.rounds
        rows["minima"].append(asdict(time_minimum(name, rounds)))
        print(rows["minima"][-1], flush=True)
    about = {"torch": torch.__version__, "processor": platform.processor() or platform.machine()}
    about |= {"threads": str(arguments.threads), "rounds": str(arguments.rounds)}
    if arguments.out:
        arguments.out.write_text(json.dumps({"about": about, **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
