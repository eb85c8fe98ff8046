"""Small studies, and functions of a user that train, for the tests of studies."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from saltflat.studies import Examples, Study
from saltflat.studies.store.rows import compute_checksum


def study(**changes: Any) -> Study:
    """Four runs of tiny networks on the digits, two groups."""
    usual: dict[str, Any] = {
        "name": "small",
        "data": {"name": "digits", "train_limit": 200, "test_limit": 100},
        "axes": {"lr": [0.1, 0.2], "width": [3, 4]},
        "seeds": 1,
        "settings": {"depth": 1, "batch_size": 50},
        "stop": {"epochs": 2},
        "measures": ["squared_norm", "distance_from_init", "hessian_trace"],
        "measure": {"examples": 30},
    }
    return Study(**{**usual, **changes})


def own(**changes: Any) -> Study:
    """Two runs of the user's own training."""
    usual: dict[str, Any] = {
        "axes": {"width": [2, 3]},
        "settings": {},
        "stop": {"epochs": 1},
        "train": "study_cases:train",
        "network": "study_cases:network",
    }
    return study(**{**usual, **changes})


def network(shape: tuple[int, ...], classes: int, width: int = 2) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            flat=nn.Flatten(), inner=nn.Linear(64, width),
            act=nn.ReLU(), outer=nn.Linear(width, classes),
        )
    )  # fmt: skip


def trained(model: nn.Module, data: Examples, epochs: int, lr: float = 0.1) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(epochs):
        loss = nn.functional.cross_entropy(model(data.train_inputs), data.train_labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def train(*, seed: int, data: Examples, width: int, epochs: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Full-batch gradient descent from the seed that the study sets."""
    log = os.environ.get("STUDY_LOG")
    if log:
        with Path(log).open("a") as file:
            file.write(f"{width} {seed}\n")
    model = network((64,), 10, width)
    initial = {name: each.clone() for name, each in model.state_dict().items()}
    return trained(model, data, epochs), initial


def bare(*, seed: int, data: Examples, width: int = 2, epochs: int = 1) -> nn.Module:
    """The same without the weights before training."""
    return train(seed=seed, data=data, width=width, epochs=epochs)[0]


def failing(*, seed: int, data: Examples, width: int, epochs: int) -> nn.Module:
    if width == 3 and not os.environ.get("STUDY_HEALED"):
        raise ZeroDivisionError("a width of 3\nis bad luck")
    return bare(seed=seed, data=data, width=width, epochs=epochs)


def leaving(*, seed: int, data: Examples, width: int, epochs: int) -> nn.Module:
    raise SystemExit(5)


def no_model(*, seed: int, data: Examples, width: int, epochs: int) -> str:
    return "not a model"


def exploding(*, seed: int, data: Examples, width: int, epochs: int) -> nn.Module:
    model = network((64,), 10, width)
    if width == 3:
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
    return model


def needing(*, seed: int, data: Examples, width: int, patience: int) -> nn.Module:
    raise AssertionError("never called")


def old_names(*, seed: int, data: Examples, batch: int, l2: float, epochs: int = 1) -> nn.Module:
    return network((64,), 10, batch)


def anything(shape: tuple[int, ...], classes: int, **arguments: Any) -> nn.Module:
    return network(shape, classes)


class Rounding(nn.Module):
    """Has no second derivative: its own backward cannot be differentiated again."""

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            ctx.save_for_backward(inputs)
            return inputs.clamp_min(0)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (inputs,) = ctx.saved_tensors
            through: Tensor = gradient * (inputs > 0)
            return through

    def forward(self, inputs: Tensor) -> Tensor:
        cut: Tensor = Rounding.Cut.apply(inputs)  # type: ignore[no-untyped-call]
        return cut


def broken_network(shape: tuple[int, ...], classes: int, width: int = 2) -> nn.Module:
    raise ZeroDivisionError("no network today")


def two_outputs(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))


def pairs() -> Any:
    """Data of the user's own: blobs around three centres."""
    draws = torch.Generator().manual_seed(int(os.environ.get("STUDY_BLOBS", "0")))
    labels = torch.arange(60) % 3
    inputs = torch.eye(3)[labels].repeat(1, 2) + 0.3 * torch.randn(60, 6, generator=draws)
    return (inputs[:40], labels[:40]), (inputs[40:], labels[40:])


def no_pairs() -> str:
    return "nothing"


def once(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), Rounding(), nn.Linear(3, classes))


def closed(width: int, /, *, seed: int, data: Examples, epochs: int) -> nn.Module:
    raise AssertionError("never called")


def normalized(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))


def unequal_pairs() -> Any:
    (inputs, labels), (others, answers) = pairs()
    return (inputs, labels), (others[:, :5], answers)


def short_pairs() -> Any:
    (inputs, labels), (others, answers) = pairs()
    return (inputs.bfloat16(), labels), (others.bfloat16(), answers)


def generous(shape: tuple[int, ...], classes: int) -> nn.Module:
    """For inputs of any shape."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 4), nn.ReLU(), nn.Linear(4, classes))


class Told:
    """Keeps what a study says while it runs."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.counts: dict[str, Any] = {"begun": None, "epochs": [], "trained": 0, "finished": []}

    def begin(self, to_train: int, to_measure: int) -> None:
        self.counts["begun"] = (to_train, to_measure)

    def update_epochs(self, done: int, most: int) -> None:
        self.counts["epochs"].append((done, most))

    def add_trained(self, runs: int) -> None:
        self.counts["trained"] += runs

    def add_finished(self, status: str) -> None:
        self.counts["finished"].append(status)

    def tell(self, text: str) -> None:
        self.texts.append(text)


def put(path: Path, what: str) -> None:
    """Put a folder with something in it, a pipe, a link to nothing or a foreign file at a place, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if what == "folder":
        path.mkdir()
        (path / "inside").touch()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to("nothing")
    elif what == "file":
        path.write_bytes(b"\x00")


def facts_of(path: Path) -> dict[str, str]:
    """What is written beside the tensors of a file."""
    content = path.read_bytes()
    found: dict[str, str] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    return found


def as_written_before(folder: Path) -> None:
    """Make the files those of an earlier version: without digests, or with one over the tensors alone."""
    for path in [folder / "study.json", *folder.glob("rows/*.json")]:
        content = json.loads(path.read_text())
        del content["digest"]
        path.write_text(json.dumps(content))
    for path in [*folder.glob("weights/*.safetensors"), *folder.glob("partial/*.safetensors")]:
        tensors, facts = load(path.read_bytes()), facts_of(path)
        later = ("digest", "initial", *(["key"] if ".initial." in path.name or path.parent.name == "partial" else []))
        kept = {name: value for name, value in facts.items() if name not in later}
        path.write_bytes(save(tensors, {**kept, "checksum": compute_checksum(tensors)}))


def clashing(shape: tuple[int, ...], classes: int, *, warmup: int = 5) -> nn.Module:
    """Takes an argument with the name of a setting."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), warmup), nn.ReLU(), nn.Linear(warmup, classes))
