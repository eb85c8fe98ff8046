"""Jia and Su's Table 1, CIFAR-10, plain CNN: does the Fisher penalty lower the test error, and does SAM?

What it can do (`python papers/jia2020information/run.py WHAT --help` lists the options):

    train                   train and measure every method and seed that has no row yet; resume interrupted runs
    tune                    the same on 45,000 images, judged on the other 5,000, as the paper chose
    table                   what was found, beside the paper
    figures                 draw the curves of all runs
    page                    put the tables into README.md
    train --scale smoke     a minute on a CPU, to see that it runs

CIFAR-10 has to be in data/ (or the folder that SALTFLAT_DATA names) as torchvision lays it out. Every finished run is
one JSON file.
"""

import argparse
import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from scipy.stats import ttest_ind
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.datasets import read_data
from saltflat.training import SAM, FisherPenalty

HERE = Path(__file__).parent
MEASURES = ("fisher_logdet", "fisher_trace", "normalized_sharpness", "minimum_sharpness")
# Rows of old do not say which precision the gradients of fisher_logdet had: it was float32, where most eigenvalues may
# be rounding. Their values stay in the rows, and are withdrawn.
LOGDET, WITHDRAWN = "fisher_logdet", "withdrawn"
GAP = "gap"  # test error minus training error
CLAIMS = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))["claim"]
METHODS = ("sgd", "fisher", "sam")


@dataclass(frozen=True)
class Run:
    """Everything a run depends on: the paper's recipe for this network, with fewer epochs."""

    method: str
    seed: int
    epochs: int = 40
    batch: int = 128
    lr: float = 0.01  # divided by 10 after half and after three quarters of the epochs
    weight_decay: float = 1e-4
    beta: float = 10.0
    parts: int = 8
    alpha: float = 1e-4
    clip: float = 5.0
    rho: float = 0.05
    held_out: int = 0  # of the training images, to choose by in place of the test set
    images: int = 50_000
    width: int = 64
    probe: int = 2000  # training images that the measures look at

    @property
    def name(self) -> str:
        chosen = {"fisher": f"_beta{self.beta:g}_clip{self.clip:g}", "sam": f"_rho{self.rho:g}"}.get(self.method, "")
        return f"{self.method}{chosen}_epochs{self.epochs}_seed{self.seed}"


def network(width: int) -> nn.Module:
    """3x3 convolutions of 64, 64, 128, 128, 192 and 192 channels, He's initialisation, no normalisation."""
    layers: list[nn.Module] = []
    channels = 3
    for number, factor in enumerate((1, 1, 2, 2, 3, 3)):
        if number in (2, 4):
            layers.append(nn.MaxPool2d(2))
        convolution = nn.Conv2d(channels, factor * width, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        layers += [convolution, nn.ReLU()]
        channels = factor * width
    last = nn.Linear(channels, 10)
    nn.init.kaiming_normal_(last.weight, nonlinearity="linear")
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


def augmented(images: Tensor) -> Tensor:
    """Return the images, shifted by up to 4 pixels with zero padding, and half of them flipped."""
    count, _, side, _ = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    where = torch.arange(side, device=images.device)
    down, right = (torch.randint(9, (count, 1), device=images.device) + where for _ in range(2))
    right = torch.where(torch.rand(count, 1, device=images.device) < 0.5, right, right.flip(1))
    each = torch.arange(count, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, down[:, :, None], right[:, None, :]].permute(0, 3, 1, 2).contiguous()


def stepper(run: Run, model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[Tensor, Tensor], Tensor]]:
    """Return the optimizer, and a function that takes one step on a batch and returns its loss."""
    options: dict[str, Any] = {"lr": run.lr, "momentum": 0.9, "nesterov": True, "weight_decay": run.weight_decay}
    if run.method == "sam":
        sam = SAM(model, torch.optim.SGD, rho=run.rho, **options)

        def sharpness_aware(images: Tensor, labels: Tensor) -> Tensor:
            def closure() -> Tensor:
                sam.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                return loss

            taken: Tensor = sam.step(closure)
            return taken

        return sam, sharpness_aware
    optimizer = torch.optim.SGD(model.parameters(), **options)
    if run.method == "fisher":
        penalty = FisherPenalty(model, parts=run.parts, alpha=run.alpha, beta=run.beta, clip=run.clip)
        return optimizer, lambda images, labels: penalty.step(optimizer, (images, labels))

    def plain(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return optimizer, plain


def loaded(run: Run, folder: Path, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels for training and for testing."""
    images, labels = (each.to(device) for each in read_data("cifar10", folder, "train", normalize="standard"))
    images, labels = images[: run.images], labels[: run.images]
    if run.held_out:
        kept = len(images) - run.held_out
        return images[:kept], labels[:kept], images[kept:], labels[kept:]
    tests = (each.to(device) for each in read_data("cifar10", folder, "test", normalize="standard"))
    test_images, test_labels = (each[: run.images] for each in tests)
    return images, labels, test_images, test_labels


def train(
    run: Run, data: tuple[Tensor, Tensor, Tensor, Tensor], out: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    images, labels, test_images, test_labels = data
    torch.manual_seed(run.seed)
    model = network(run.width).to(images.device)
    optimizer, step = stepper(run, model)
    milestones = [run.epochs // 2, run.epochs * 3 // 4]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    saved = out / f"{run.name}.checkpoint"
    first, seconds, curve = 0, 0.0, []
    if saved.exists():
        state = torch.load(saved, map_location=images.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first, seconds, curve = state["epoch"], state["seconds"], state["curve"]
    for epoch in range(first, run.epochs):
        torch.manual_seed(1000 * run.seed + epoch)  # so that an interrupted run resumes as if it had not been
        started = time.perf_counter()
        order = torch.randperm(len(images), device=images.device)
        total = torch.zeros((), device=images.device)
        # The last batch is left out where it is not full: shapes that stay the same are quicker on a GPU.
        batches = order[: len(order) // run.batch * run.batch].split(run.batch)
        for which in batches:
            total += step(augmented(images[which]), labels[which]).detach()
        schedule.step()
        training_loss = float(total) / len(batches)
        seconds += time.perf_counter() - started
        curve.append([training_loss, error(model, test_images, test_labels)])
        tell(f"{run.name}: epoch {epoch + 1}/{run.epochs}, loss {training_loss:.4f}, error {curve[-1][1]:.2f} %")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(state | {"epoch": epoch + 1, "seconds": seconds, "curve": curve}, f"{saved}.part")
        os.replace(f"{saved}.part", saved)
        if training_loss != training_loss:
            break
    row: dict[str, Any] = {"run": asdict(run), "epochs_done": len(curve), "seconds": round(seconds, 1), "curve": curve}
    # On the images held out, where some are.
    row["test_error"] = error(model, test_images, test_labels)
    row["train_error"] = error(model, images, labels)
    if not run.held_out:
        report = saltflat.measure(model, (images[: run.probe], labels[: run.probe]), measures=MEASURES, progress=False)
        row["measures"] = {name: reading.value for name, reading in report.items()}
        row["stderr"] = {name: reading.stderr for name, reading in report.items()}
        row["train_loss_on_probe"] = report.loss
        # How it was measured: the rounding of the gradients; None where the network does not run in float64.
        row["fisher_logdet_eps"] = report[LOGDET].details.get("eps")
    device = torch.cuda.get_device_name() if images.is_cuda else "cpu"
    row["made_with"] = {"saltflat": saltflat.__version__, "torch": torch.__version__, "device": device}
    return row


@torch.no_grad()
def error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the error in percent."""
    wrong = sum(
        int((model(x).argmax(1) != y).sum()) for x, y in zip(images.split(2000), labels.split(2000), strict=True)
    )
    return 100 * wrong / len(images)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def write(row: dict[str, Any], path: Path) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(row, indent=1) + "\n")
    os.replace(part, path)  # whole or not at all


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.4g}"
    return f"{mean(values):.4g} ± {stdev(values):.2g}"


def summary(found: list[dict[str, Any]], tuned: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the README's tables."""
    by_method = {m: [row for row in found if row["run"]["method"] == m] for m in METHODS}
    by_method = {m: each for m, each in by_method.items() if each}
    yield from verdicts(by_method)
    yield "## The CNN on CIFAR-10"
    yield ""
    yield "| method | seeds | epochs | test error % | training error % | seconds | " + " | ".join(MEASURES) + " |"
    yield "| --- " * (6 + len(MEASURES)) + "|"
    for each in by_method.values():
        cells = [label_of(each[0]["run"]), str(len(each)), str(each[0]["epochs_done"])]
        cells += [spread([row[key] for row in each]) for key in ("test_error", "train_error", "seconds")]
        cells += [
            spread([row["measures"][name] for row in each]) if is_valid(each, name) else WITHDRAWN for name in MEASURES
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    base = by_method.get("sgd", [])
    for method in ("fisher", "sam"):
        for key in ("test_error", "train_error", GAP, *MEASURES):
            other = by_method.get(method, [])
            if not base or not other:
                continue
            if is_valid([*base, *other], key):
                yield f"* {method}, {key}: {verdict(values(base, key), values(other, key))}"
            else:
                yield f"* {method}, {key}: withdrawn until measured again, with gradients in float64"
    if tuned:
        yield "\nChosen on 5,000 images held out of the training set:\n"
        yield "| run | epochs | error on held-out images % |\n| --- | --- | --- |"
        for row in tuned:
            yield f"| {label_of(row['run'])} | {row['epochs_done']} | {row['test_error']:.2f} |"


def verdicts(by_method: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield a row for every claim."""
    yield "## Verdicts"
    yield ""
    yield "| claim | paper | here | verdict |"
    yield "| --- | --- | --- | --- |"
    for claim in CLAIMS:
        printed, here, judged = "yes", "", claim.get("reason", "")
        if "base" in claim:
            printed, here = (
                f"{one} to {other}, {epochs} epochs"
                for one, other, epochs in (
                    (claim["base"], claim["penalised"], claim["epochs"]),
                    (
                        *(
                            f"{mean(values(by_method[m], 'test_error')):.2f}" if m in by_method else "-"
                            for m in METHODS[:2]
                        ),
                        " or ".join(sorted({str(row["epochs_done"]) for each in by_method.values() for row in each})),
                    ),
                )
            )
            judged = judge_test_error(by_method)
        yield f"| {claim['where']}: {claim['name']} | {printed} | {here} | **{judged}** |"
    yield ""


def judge_test_error(by_method: dict[str, list[dict[str, Any]]]) -> str:
    """Return whether the penalty lowers the test error: Welch's test, at 5 %."""
    base, other = (values(by_method.get(method, []), "test_error") for method in METHODS[:2])
    if min(len(base), len(other)) < 2:
        return "not tested"
    chance = float(ttest_ind(base, other, equal_var=False).pvalue)
    reproduced = mean(other) < mean(base) and chance < 0.05
    epochs = " or ".join(sorted({str(row["epochs_done"]) for method in METHODS[:2] for row in by_method[method]}))
    return f"{'reproduced' if reproduced else 'not reproduced'} after {epochs} epochs (p = {chance:.2g})"


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the curves of all runs, and the errors at their ends."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for place, method in enumerate(METHODS):
        rows_of = [row for row in found if row["run"]["method"] == method]
        for number, row in enumerate(rows_of):
            label = label_of(row["run"]) if number == 0 else None
            for axis, column in ((left, 0), (middle, 1)):
                axis.plot([each[column] for each in row["curve"]], color=f"C{place}", lw=0.9, label=label)
        if rows_of:
            for offset, key in enumerate(("train_error", "test_error", GAP)):
                shown = values(rows_of, key)
                right.scatter([offset + 0.2 * (place - 1)] * len(shown), shown, s=14, color=f"C{place}")
    left.set_yscale("log")
    left.set_title("training loss, augmented", fontsize=9)
    middle.set_title("test error, %", fontsize=9)
    for axis in (left, middle):
        axis.set_xlabel("epoch", fontsize=9)
    right.set_xticks(range(3), ["training error, %", "test error, %", "gap, points"], fontsize=9)
    right.set_title("at the end", fontsize=9)
    left.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=90)


def write_page(table: str) -> None:
    """Replace what stands between the two marks of the page by the table."""
    path, begin, end = HERE / "README.md", "<!-- table -->\n", "<!-- end of table -->\n"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    path.write_text(f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def is_valid(found: list[dict[str, Any]], key: str) -> bool:
    """Return whether a quantity was measured in a way that holds: fisher_logdet with gradients in float64."""
    return key != LOGDET or all(row.get("fisher_logdet_eps") == torch.finfo(torch.float64).eps for row in found)


def label_of(run: dict[str, Any]) -> str:
    """Return the name of a method with its parameters."""
    chosen = {"fisher": " (beta {beta:g}, M {parts}, tau {clip:g})", "sam": " (rho {rho:g})"}.get(run["method"], "")
    return f"{run['method']}{chosen.format(**run)}"


def values(found: list[dict[str, Any]], key: str) -> list[float]:
    if key == GAP:
        return [row["test_error"] - row["train_error"] for row in found]
    return [row[key] if key in row else row["measures"][key] for row in found]


def verdict(base: list[float], other: list[float]) -> str:
    """Return whether a difference of means is significant: Welch's test, at 5 %."""
    change = mean(other) - mean(base)
    if min(len(base), len(other)) < 2:
        return f"{change:+.3g} from sgd; one seed says nothing about chance"
    chance = float(ttest_ind(base, other, equal_var=False).pvalue)
    word = "no clear difference from" if chance > 0.05 else "lower than" if change < 0 else "HIGHER than"
    return f"{word} sgd: {change:+.3g} (p = {chance:.2g})"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "tune", "table", "figures", "page"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=Run.epochs)
    parser.add_argument("--beta", nargs="+", type=float, default=[Run.beta], help="several with tune")
    parser.add_argument("--rho", nargs="+", type=float, default=[Run.rho], help="several with tune")
    parser.add_argument("--clip", type=float, default=Run.clip)
    parser.add_argument("--scale", choices=("full", "smoke"), default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SALTFLAT_DATA", "data")))
    parser.add_argument("--out", type=Path, help="where rows go; results/ beside this script, or demo/ for smoke")
    given = parser.parse_args(words)
    console = Console()
    out = given.out or (HERE / "results" if given.scale == "full" else Path("demo") / HERE.name)
    folder = out / "tuning" if given.what == "tune" else out
    folder.mkdir(parents=True, exist_ok=True)
    if given.what == "figures":
        draw(rows(out), out / "curves.png")
        print("drew curves.png")
        return
    if given.what in ("table", "page"):
        table = "\n".join(summary(rows(out), rows(out / "tuning")))
        write_page(table) if given.what == "page" else print(table)
        return
    plain = Run("sgd", 0, given.epochs, clip=given.clip, held_out=5000 if given.what == "tune" else 0)
    if given.scale == "smoke":
        plain = replace(plain, epochs=2, images=512, width=8, probe=64, held_out=min(plain.held_out, 128))
    choices = {
        "sgd": [plain],
        "fisher": [replace(plain, method="fisher", beta=beta) for beta in given.beta],
        "sam": [replace(plain, method="sam", rho=rho) for rho in given.rho],
    }
    wanted = [replace(each, seed=seed) for m in given.methods for each in choices[m] for seed in given.seeds]
    left = [run for run in wanted if not (folder / f"{run.name}.json").exists()]
    data = loaded(plain, given.data, given.device) if left else None
    for run in left:
        assert data is not None
        write(train(run, data, folder, console.print), folder / f"{run.name}.json")
        (folder / f"{run.name}.checkpoint").unlink()
    console.print(f"{len(wanted)} runs are done, {len(wanted) - len(left)} of them were before.")


if __name__ == "__main__":
    main()
