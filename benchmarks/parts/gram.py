"""Inner products between the gradients of single examples: saltflat beside its peers, each at its best chunk size."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from importlib import import_module
from statistics import median
from time import process_time
from typing import Any

import networks
import torch
from networks import Problem
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import saltflat
from parts import Options, Outcome, Target
from parts.clock import in_turns, seconds_of
from saltflat.engine import problem
from saltflat.engine.context import Context
from saltflat.engine.gram import compute_gram_matrix
from saltflat.engine.output_curvature import parse_column_plan

Call = Callable[[], Tensor]
OURS, PREPARED, PUBLIC = "saltflat", "saltflat, prepared", "saltflat, fisher_logdet of a float32 model"


def products(chunks: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the inner products from the gradients of each chunk, parameter by parameter."""
    total = torch.zeros(())
    for pieces in zip(*chunks, strict=True):
        rows = [piece.flatten(1) for piece in pieces]
        matrix = torch.cat(rows) if len(rows) > 1 else rows[0]
        total = total + matrix @ matrix.mT
    return total


def make_context(task: Problem) -> Context:
    looked_at = problem.Problem.build(task.model, (task.inputs, task.targets))
    return Context(looked_at, parse_column_plan("exact"), seed=0, limit=2**30)


def ours(task: Problem, chunk: int) -> Call:
    # Everything anew each time, as a user's call would have it.
    return lambda: compute_gram_matrix(make_context(task), torch.arange(len(task.inputs)))


def prepared(task: Problem, chunk: int) -> Call:
    """Return our call without the probe, as after the shared sweep of a measurement, which probes the model."""
    context = make_context(task)
    compute_gram_matrix(context, torch.arange(len(task.inputs)))
    return lambda: compute_gram_matrix(context, torch.arange(len(task.inputs)))


def public(task: Problem, chunk: int) -> Call:
    """Return a user's call for a model in float32, whose gradients are taken in float64, with all of its report."""
    model, n, data = deepcopy(task.model).float(), len(task.inputs), (task.inputs.float(), task.targets)
    name = f"fisher_logdet(subset={n}, pool={n})"

    def call() -> Tensor:
        report = saltflat.measure(model, data, measures=name, certificate=False, progress=False)
        return torch.tensor([each.value for each in report.values()])

    return call


def plain_vmap(task: Problem, chunk: int) -> Call:
    model = deepcopy(task.model)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(weights: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(model, (weights, buffers), (example[None],))
        return F.cross_entropy(outputs, label[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    return lambda: products([list(gradients(parameters, x, y).values()) for x, y in task.chunks(chunk)])


def backpack(task: Problem, chunk: int) -> Call:
    package: Any = import_module("backpack")
    extension: Any = import_module("backpack.extensions").BatchGrad
    branches = any(True for layer in task.model.children() for _ in layer.children())
    model = package.extend(deepcopy(task.model), use_converter=branches).eval()
    loss = package.extend(nn.CrossEntropyLoss(reduction="sum"))

    def gradients(x: Tensor, y: Tensor) -> list[Tensor]:
        model.zero_grad()
        with package.backpack(extension()):
            loss(model(x), y).backward()
        return [value.grad_batch for value in model.parameters()]

    return lambda: products([gradients(x, y) for x, y in task.chunks(chunk)])


def nngeometry(task: Problem, chunk: int) -> Call:
    matrix: Any = import_module("nngeometry.gram").GramMatrix
    model = deepcopy(task.model)
    loader: Any = torch.utils.data.DataLoader(
        range(len(task.inputs)),  # type: ignore[arg-type]
        batch_size=chunk,
        collate_fn=lambda rows: (task.inputs[rows], task.targets[rows]),
    )

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")[:, None]

    def call() -> Tensor:
        found: Tensor = matrix(model, loader, function=losses).data[0, :, 0, :]
        return found

    return call


COMPETITORS: dict[str, Callable[[Problem, int], Call]] = {
    OURS: ours,
    PREPARED: prepared,
    PUBLIC: public,
    "vmap": plain_vmap,
    "BackPACK": backpack,
    "nngeometry": nngeometry,
}


def quickest(make: Callable[[Problem, int], Call], task: Problem, sizes: Sequence[int]) -> tuple[int, Call]:
    """Return the best chunk size by one trial each, after a warm-up call."""
    make(task.first(2), 2)()
    trials = [(seconds_of(make(task, size), process_time), size) for size in sizes]
    best = min(trials)[1]
    return best, make(task, best)


def compare(task: Problem, options: Options, table: Table) -> dict[str, Any]:
    """Time all competitors in the precision of the task; add a row each, and return what was found."""
    n, dtype = len(task.inputs), str(task.inputs.dtype).removeprefix("torch.")
    sizes = [size for size in (5, 10, 20, 50) if size < n] + [n]
    double = Problem(deepcopy(task.model).double(), task.inputs.double(), task.targets)
    reference = plain_vmap(double, min(n, 10))()
    calls, chosen, reasons, off = {}, {}, {}, {}
    for name, make in COMPETITORS.items():
        if make is public and dtype != "float64":
            continue
        options.tell(f"gram in {dtype}: trying {name}")
        own = make in (ours, prepared, public)  # saltflat chooses for itself
        try:
            chosen[name], calls[name] = quickest(make, task, [n] if own else sizes)
            if make is not public:
                off[name] = float((calls[name]().double() - reference).norm() / reference.norm())
        except Exception as error:
            if own:
                raise
            calls.pop(name, None)
            reasons[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    options.tell(f"gram in {dtype}: taking times in turns")
    seconds = in_turns(calls, options.repeats, process_time)
    middle = {name: median(each) for name, each in seconds.items()}
    for name in calls:
        table.add_row(
            *(dtype, name, "own" if name in (OURS, PREPARED, PUBLIC) else str(chosen[name])),
            *(f"{min(seconds[name]):.3f}", f"{middle[name]:.3f}", f"{middle[name] / middle[PREPARED]:.2f}x"),
            f"{off[name]:.1e}" if name in off else "-",
        )
    return {"chunks": chosen, "seconds": seconds, "difference": off, "reasons": reasons}


def run(options: Options) -> Outcome:
    network, n = ("lenet", 6) if options.quick else ("resnet20", 100)
    task = networks.problem(network, n)
    double = Problem(deepcopy(task.model).double(), task.inputs.double(), task.targets)
    title = f"Inner products between {n} gradients, {network}, CPU seconds of {options.repeats} rounds"
    table = Table(title=title)
    for heading in ("precision", "competitor", "chunk", "least", "median", "/ prepared", "differs from float64 by"):
        table.add_column(heading, justify="left" if heading in ("precision", "competitor") else "right")
    found = {"float32": compare(task, options, table), "float64": compare(double, options, table)}
    targets = []
    for dtype, each in found.items():
        middle = {name: median(times) for name, times in each["seconds"].items()}
        fastest = min(middle.keys() - {OURS, PREPARED, PUBLIC}, key=lambda name: middle[name])
        ratio = middle[fastest] / middle[PREPARED]
        wanted = f"Gram matrix in {dtype} as fast as the fastest peer, once prepared"
        targets.append(Target(wanted, f"{ratio:.2f} times ({fastest})", ratio >= 1))
    notes = tuple(f"{name}: {reason}" for name, reason in found["float64"]["reasons"].items())
    return Outcome(table, tuple(targets), {"network": network, "examples": n, "precisions": found}, notes)
