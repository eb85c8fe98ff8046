"""Certificates of networks on MNIST and CIFAR-10, beside the bounds of the papers on the same networks.

    python papers/bounds/run.py certify                      everything; about two and a half hours on a core
    python papers/bounds/run.py certify --network mlp        one network
    python papers/bounds/run.py certify --scale smoke        everything, tiny
    python papers/bounds/run.py table                        what was found, beside published numbers
    python papers/bounds/run.py figures                      draw from the rows
    python papers/bounds/run.py page                         put the table into README.md

MNIST and CIFAR-10 have to be in data/ (or the folder that SALTFLAT_DATA names) as torchvision lays them out. If
interrupted, a run resumes with the first bound that is missing.
"""

import argparse
import os
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import saltflat
from saltflat.bounds import Bound
from saltflat.datasets import read_data

HERE = Path(__file__).parent
BATCH = 128
DELTA = 0.05
DRAWS = 5  # for each example, where the bound uses all of them
# How the certificates differ: prior, what the descent moves, and for how many epochs.
WAYS = {
    "zero": "prior at zero, closed form",
    "initial": "prior at the initial weights, closed form",
    "descent": "prior at the initial weights, descent on the bound",
    "trained": "prior trained on other examples, closed form",
    "tuned": "prior trained on other examples, descent on the bound",
}
PAPERS = {
    "multiplicative": "Tsuzuku et al., Prop. 4.1",
    "parameterwise": "Tsuzuku et al., Prop. 4.2",
    "row_column": "Tsuzuku et al., Prop. 6.1",
    "row_column_estimated": "Tsuzuku et al., Thm. 6.1",
    "isotropic": "one variance, trace of the Hessian (eqs. 5, 6)",
    "information": "Jia and Su, Thm. 1 (heuristic)",
}
PAPER_EXAMPLES = 10_000  # on which the papers' bounds are evaluated


@dataclass(frozen=True)
class Task:
    """A network, its data and its training.

    Attributes:
        title: in the tables.
        data: name of the data set.
        build: makes the network.
        epochs: of the training on all examples, of the descent from the initial weights, of the training of the prior,
            and of the descent from it.
        prior_share: share of the examples that the prior is trained on.
        published: what others report for data-dependent and data-free priors, in per cent.
        limit: number of training examples; all if None.
        draws: for each example that a prior has not seen.
    """

    title: str
    data: str
    build: Callable[[], nn.Sequential]
    epochs: tuple[int, int, int, int]
    prior_share: float
    published: tuple[str, str]
    limit: int | None = None
    draws: int = 50


def build_mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(784, 600), nn.ReLU(), nn.Dropout(0.2), nn.Linear(600, 10)
    )


def build_lenet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.3), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def build_cnn() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5)),
        *(nn.Linear(2048, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def build_smoke() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


TASKS = {
    "mlp": Task("MLP, 600 units, MNIST", "mnist", build_mlp, (1, 150, 100, 5), 0.75, ("2.3", "21.7")),
    "lenet": Task("LeNet, MNIST", "mnist", build_lenet, (1, 20, 30, 5), 0.75, ("about 1.5", "21.7")),
    "cnn": Task("CNN, CIFAR-10", "cifar10", build_cnn, (2, 0, 10, 0), 0.7, ("17 to 25", ""), draws=5),
}
SMOKE = {"mlp": Task("tiny MLP, MNIST", "mnist", build_smoke, (2, 2, 3, 1), 0.5, ("2.3", "21.7"), limit=600)}


def train(model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int, shift: int, flip: bool) -> None:
    """Train with Adam and a cosine schedule, on images that are shifted, a batch at a time, and maybe flipped."""
    height, width = inputs.shape[2:]
    steps = epochs * -(-len(labels) // BATCH)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(BATCH):
            images = inputs[batch]
            if flip:
                flipped = torch.rand(len(batch)) < 0.5
                images = torch.where(flipped[:, None, None, None], images.flip(3), images)
            down, right = (int(each) for each in torch.randint(2 * shift + 1, (2,)))
            images = F.pad(images, (shift,) * 4)[:, :, down : down + height, right : right + width]
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def compute_error(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the error of a network."""
    return float((torch.cat([model(part) for part in inputs.split(1000)]).argmax(1) != labels).double().mean())


class Networks:
    """The networks of a task: initial, trained on all examples, and trained on the prior's part.

    Args:
        name: of the task.
        task: what to train.
        folder: of the data sets.
        kept: where trained weights are kept, so that a run can resume.
        seed: of initial weights and training.
    """

    def __init__(self, name: str, task: Task, folder: Path, kept: Path, seed: int) -> None:
        self.name, self.task, self.kept, self.seed = name, task, kept, seed
        scale = "standard" if task.data == "cifar10" else "none"
        self.inputs, self.labels = read_data(task.data, folder, limit=task.limit, normalize=scale)
        self.test = read_data(task.data, folder, split="test", limit=task.limit, normalize=scale)
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        self.prior_positions = order[: int(task.prior_share * len(order))]

    def make(self, kind: str) -> nn.Sequential:
        """Return the ``initial``, ``trained`` or ``prior`` network, from the file where there is one."""
        torch.manual_seed(self.seed)
        model = self.task.build().eval()
        if kind == "initial":
            return model
        path = self.kept / f"{self.name}-{kind}-{self.seed}.pt"
        if path.exists():
            model.load_state_dict(torch.load(path, weights_only=True))
            return model
        which = self.prior_positions if kind == "prior" else torch.arange(len(self.labels))
        epochs = self.task.epochs[2 if kind == "prior" else 0]
        colored = self.task.data == "cifar10"
        train(model, self.inputs[which], self.labels[which], epochs, shift=4 if colored else 2, flip=colored)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
        return model


def certify(networks: Networks, way: str) -> Bound:
    """Compute one certificate."""
    data, task = (networks.inputs, networks.labels), networks.task
    options: dict[str, Any] = {"delta": DELTA, "seed": networks.seed, "draws": DRAWS}
    if way == "zero":
        return saltflat.certify_error(networks.make("trained"), data, **options)
    if way in ("initial", "descent"):
        options |= {"prior": networks.make("initial"), "prior_data": "none"}
        if way == "descent":
            options |= {"epochs": task.epochs[1], "move": True, "lr": 2e-3}
        return saltflat.certify_error(networks.make("trained"), data, **options)
    prior = networks.make("prior")
    options["draws"] = task.draws
    if way == "tuned":
        options |= {"epochs": task.epochs[3], "move": True, "lr": 1e-4}
    return saltflat.certify_error(deepcopy(prior), data, prior=prior, prior_data=networks.prior_positions, **options)


def compute_paper_bounds(networks: Networks, out: Path) -> None:
    """Compute the bounds of the papers on the network that was trained on all examples."""
    paths = {bound: out / f"{networks.name}-{bound}.json" for bound in PAPERS}
    model = networks.make("trained")
    test = compute_error(model, *networks.test)
    for bound, path in paths.items():
        if path.exists():
            continue
        started = time.perf_counter()
        found = saltflat.compute_bounds(
            model,
            (networks.inputs, networks.labels),
            bounds=bound,
            delta=DELTA,
            seed=networks.seed,
            limit=PAPER_EXAMPLES,
        )[bound]
        replace(found, details={**found.details, "test_error": test, "seed": networks.seed}).save(path)
        print(
            f"{networks.task.title}, {bound}: {found.value:.3g}, in {time.perf_counter() - started:.0f} s", flush=True
        )


def run_task(name: str, task: Task, ways: list[str], out: Path, folder: Path, kept: Path, seed: int) -> None:
    """Compute the bounds of a task that are not in the folder yet."""
    out.mkdir(parents=True, exist_ok=True)
    networks = Networks(name, task, folder, kept, seed)
    left_out = {"descent": task.epochs[1] == 0, "tuned": task.epochs[3] == 0}
    for way in ways:
        path = out / f"{name}-{way}.json"
        if way == "papers":
            compute_paper_bounds(networks, out)
        elif not path.exists() and not left_out.get(way, False):
            started = time.perf_counter()
            found = certify(networks, way)
            test = compute_error(networks.make("prior" if way in ("trained", "tuned") else "trained"), *networks.test)
            found = replace(found, details={**found.details, "test_error": test, "seed": seed})
            found.save(path)
            took = time.perf_counter() - started
            print(f"{task.title}, {WAYS[way]}: at most {found.value:.2%}, in {took:.0f} s", flush=True)


def load_bounds(out: Path, tasks: dict[str, Task]) -> dict[tuple[str, str], Bound]:
    """Return the bounds in the folder by task and way, or task and name of the paper's bound."""
    paths = {(task, kind): out / f"{task}-{kind}.json" for task in tasks for kind in (*WAYS, *PAPERS)}
    return {key: Bound.load(path) for key, path in paths.items() if path.exists()}


def write_tables(out: Path, tasks: dict[str, Task]) -> list[str]:
    """Return the tables of all bounds, in Markdown."""
    found = load_bounds(out, tasks)
    return [
        *write_verdicts(found, tasks),
        "",
        "## Certificates",
        "",
        "| network | prior and posterior | examples | error of the network | of random networks | Monte Carlo margin | "
        "KL divergence per example | **bound** | test error of the network | plain test of the prior (binary KL) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(format_certificate_row(tasks[task], way, bound) for (task, way), bound in found.items() if way in WAYS),
        "",
        "## The papers' bounds on the same networks",
        "",
        "| network | bound | value | risk of guessing | holds? | the largest term |",
        "| --- | --- | --- | --- | --- | --- |",
        *(format_paper_row(tasks[task], kind, bound) for (task, kind), bound in found.items() if kind in PAPERS),
    ]


def write_verdicts(found: dict[tuple[str, str], Bound], tasks: dict[str, Task]) -> list[str]:
    """Return a table of the smallest bounds beside published ones."""
    lines = [
        "| network | prior that has seen other examples | published | prior that has seen nothing | published |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, task in tasks.items():
        cells = []
        for ways, published in (
            (("trained", "tuned"), task.published[0]),
            (("zero", "initial", "descent"), task.published[1]),
        ):
            values = [found[name, way].value for way in ways if (name, way) in found]
            cells += [f"**{min(values):.2%}**" if values else "not run", f"{published} %" if published else ""]
        lines.append(f"| {task.title} | {' | '.join(cells)} |")
    return lines


def format_certificate_row(task: Task, way: str, bound: Bound) -> str:
    """Return the row of a certificate."""
    terms = bound.terms
    risks = [terms["risk of the network itself"], terms["risk of random networks"], terms["Monte Carlo margin"]]
    cells = [task.title, WAYS[way], f"{bound.examples:,}", *(f"{each:.2%}" for each in risks)]
    kl = terms["KL divergence (nats)"] / bound.examples
    cells += [f"{kl:.2g}" if kl > 1e-12 else "0", f"**{bound.value:.2%}**"]
    holdout = bound.details.get("holdout")
    cells += [f"{bound.details['test_error']:.2%}", "" if holdout is None else f"{holdout:.2%}"]
    return f"| {' | '.join(cells)} |"


def format_paper_row(task: Task, kind: str, bound: Bound) -> str:
    """Return the row of a paper's bound."""
    holds = "yes" if bound.is_valid else "no: a heuristic" if bound.kind == "heuristic" else "no"
    says = f"{bound.value:.3g}" + (" (vacuous)" if bound.is_vacuous else "")
    largest = str(bound.details.get("largest_term", ""))
    size = f": {bound.terms[largest]:.3g}" if largest in bound.terms else ""
    if largest == "strength":  # as large as what lambda pays for
        costs = {name: bound.terms[name] for name in ("weights", "scales", "confidence")}
        size += f", driven by {max(costs, key=costs.__getitem__)}"
    return f"| {task.title} | {PAPERS[kind]} | {says} | {bound.chance:.3g} | {holds} | {largest}{size} |"


def draw_figure(out: Path, tasks: dict[str, Task]) -> Path:
    """Draw all bounds beside each other, a panel for each network."""
    found = load_bounds(out, tasks)
    shown = [name for name in tasks if any(task == name for task, _ in found)]
    figure = Figure(figsize=(9.0, 0.8 + 2.9 * len(shown)), layout="constrained")
    for axis, name in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        bars = {**WAYS, **PAPERS}
        bounds = {bars[kind]: bound for (task, kind), bound in found.items() if task == name}
        for place, bound in enumerate(bounds.values()):
            color = "#0072b2" if not bound.is_vacuous else "#9bbcd4"
            axis.barh(place, bound.value, color=color, hatch="" if bound.is_valid else "//")
            told = f"{bound.value:.2%}" if bound.value < 1 else f"{bound.value:.3g}"
            told = f"{bound.value:.3g}, a cross-entropy" if bound.loss == "cross_entropy" else told
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            axis.annotate(
                told, (bound.value, place), (5, 0), textcoords="offset points", va="center", fontsize=8, bbox=box
            )
            ends = [place - 0.4, place + 0.4]
            label = "its network's test error" if place == 0 else None
            axis.plot([bound.details["test_error"]] * 2, ends, color="#d55e00", linewidth=2.5, label=label)
        axis.axvline(next(iter(bounds.values())).chance, color="black", linestyle="--", linewidth=1, label="guessing")
        axis.set_xscale("log")
        axis.set_xlim(0.004, 60)
        axis.set_yticks(range(len(bounds)), list(bounds), fontsize=8)
        axis.invert_yaxis()
        axis.set_title(tasks[name].title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        if axis is figure.axes[0]:
            axis.legend(frameon=False, fontsize=8, loc="upper right")
    figure.supxlabel("bound on the error on new data (hatched: no guarantee)", fontsize=9)
    path = out / "bounds.png"
    figure.savefig(path, dpi=150)
    return path


def write_page(table: str) -> None:
    """Replace what stands between the two marks of the page by the table."""
    path, begin, end = HERE / "README.md", "<!-- table -->\n", "<!-- end of table -->\n"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    path.write_text(f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def main(words: list[str] | None = None) -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("certify", "table", "figures", "page"))
    parser.add_argument("--network", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--way", nargs="+", choices=(*WAYS, "papers"), default=[*WAYS, "papers"])
    parser.add_argument("--scale", choices=("full", "smoke"), default="full")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SALTFLAT_DATA", "data")))
    parser.add_argument("--out", type=Path, help="where bounds go; results/ beside this script, or demo/ for smoke")
    parser.add_argument("--kept", type=Path, default=Path("demo") / "bounds", help="where trained weights are kept")
    given = parser.parse_args(words)
    if given.what == "page" and (given.scale == "smoke" or given.out is not None):
        parser.error("Expected the bounds in results/ for the page, but got --scale smoke or --out. Try table instead.")
    out = given.out or (HERE / "results" if given.scale == "full" else Path("demo") / HERE.name)
    tasks = TASKS if given.scale == "full" else SMOKE
    if given.what == "certify":
        for name in [name for name in tasks if name in given.network]:
            run_task(name, tasks[name], given.way, out, given.data, given.kept / given.scale, seed=0)
    if given.what == "figures":
        print(f"drew {draw_figure(out, tasks).name}")
    if given.what == "table":
        print("\n".join(write_tables(out, tasks)))
    if given.what == "page":
        write_page("\n".join(write_tables(out, tasks)))


if __name__ == "__main__":
    main()
