"""Tiny random models of many architectures: which parameters are quick, and whether the numbers are right.

    python benchmarks/architecture_table.py                   # all of them, as a table
    python benchmarks/architecture_table.py Swin T5           # some
    python benchmarks/architecture_table.py --write --times   # into docs/transformers.md and results/architectures.json
    python benchmarks/architecture_table.py Swin --write      # the row of one, beside those of the others

The reference is the definition: Jacobians of one example at a time by plain autograd, in float64, and the Hessian of
the loss at the outputs. It shares no code with saltflat.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import ARCHITECTURES, TIMED, Inputs, build
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import saltflat
from saltflat.engine.data import Batch
from saltflat.engine.per_example import NotBatchableError
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session
from saltflat.engine.strategy import Probe, run_probe
from saltflat.errors import SaltflatError
from saltflat.gradients.base import FactoredGradient
from saltflat.symmetry.find import find_symmetries
from saltflat.symmetry.rescale import rescale

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "transformers.md", ROOT / "benchmarks" / "results" / "architectures.json"
START, END = "<!-- architectures: start -->", "<!-- architectures: end -->"
MEMORY = 1 << 28  # bytes
COLUMNS = 4  # of the timed passes


class InFloat64(TorchFunctionMode):
    """Replaces float32 by float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            return args[0].double()
        return func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})


@contextmanager
def run_in_float64(model: nn.Module) -> Iterator[None]:
    """Run what a model computes in float32 whatever its precision (norms, softmax) in float64.

    Otherwise the definition itself would be known to seven digits only.
    """
    norms = {type(each) for each in model.modules() if type(each).__name__.endswith("Norm")}
    kinds = [each for each in {type(model), *norms} if not each.__module__.startswith("torch.")]
    kept = [(kind, kind.forward) for kind in kinds]

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with InFloat64():
                return forward(*args, **kwargs)

        return run

    try:
        for kind, forward in kept:
            kind.forward = wrap(forward)
        yield
    finally:
        for kind, forward in kept:
            kind.forward = forward


@dataclass(frozen=True)
class Row:
    """What was found for an architecture.

    Attributes:
        name: of the architecture.
        strategy: of the sweep.
        share: of the numbers in parameters, those on the quick way.
        reasons: why other parameters are not quick.
        difference: largest difference of the diagonal of the curvature and of the second moment of gradients from the
            definition, relative to the largest entry of the parameter.
        loss_difference: between the measured loss and the model's own, relative.
        scales: the number of independent rescalings found.
        rescaling: whether random rescalings leave the outputs unchanged, or why there are none.
        speedup: the time of passes of single examples over that of the quick pass; None if it was not measured.
    """

    name: str
    strategy: str
    share: float
    reasons: tuple[str, ...]
    difference: float
    loss_difference: float
    scales: int = 0
    rescaling: str = ""
    speedup: float | None = None


def examine(name: str) -> Row:
    """Return what is found for an architecture."""
    model, inputs = build(name)
    with run_in_float64(model):
        row = examine_model(name, model, inputs)
    scales, rescaling = check_rescaling(model, drop_labels(model, inputs))
    return replace(row, scales=scales, rescaling=rescaling)


def examine_model(name: str, model: nn.Module, inputs: Inputs) -> Row:
    """Return what is found for a model, but for its rescalings."""
    probe = find_probe(model, inputs)
    sizes = {key: each.numel() for key, each in model.named_parameters()}
    quick = sum(sizes[each.name] for each in probe.routes if each.is_quick)
    statistics = ["curvature_diagonal", "gradient_second_moment"]
    found = saltflat.compute_statistics(model, [inputs], "model", statistics, progress=False)
    report = saltflat.measure(model, [inputs], "model", "hessian_trace", progress=False, certificate=False)
    with torch.no_grad():
        own = float(model(**inputs)["loss"])
    difference = max(
        compare(found[statistic][key], value)
        for statistic, values in zip(statistics, compute_definition(model, inputs), strict=True)
        for key, value in values.items()
    )
    return Row(
        name,
        probe.strategy,
        quick / sum(sizes[each.name] for each in probe.routes),
        tuple(dict.fromkeys(each.reason for each in probe.routes if each.reason)),
        difference,
        abs(report.loss - own) / abs(own),
    )


def find_probe(model: nn.Module, inputs: Inputs) -> Probe:
    """Return how the model is swept."""
    with open_session(model, "eval", [inputs]):
        problem = Problem.build(model, [inputs], "model")
        return run_probe(problem, next(iter(problem.read_batches())), MEMORY)


def compute_definition(model: nn.Module, inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the diagonal of the curvature and the second moment of gradients, by their definitions."""
    measured: dict[str, Tensor] = {key: each for key, each in model.named_parameters() if each.requires_grad}
    count = len(inputs["labels"])
    labels = inputs["labels"]
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) or "peft" in type(model).__module__:
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    total = int((labels != -100).sum())
    zeros = [{key: torch.zeros_like(each) for key, each in measured.items()} for _ in range(2)]
    for n in range(count):
        alone = drop_labels(model, {key: value[n : n + 1] for key, value in inputs.items()})
        outputs = functional_call(model, measured, (), alone)["logits"]

        def compute_share(values: Tensor, n: int = n, shape: torch.Size = outputs.shape) -> Tensor:
            values = values.reshape(shape)[0].reshape(-1, shape[-1])
            return F.cross_entropy(values, labels[n].reshape(-1), reduction="sum", ignore_index=-100) / total

        flat = outputs.flatten()
        point = flat.detach().requires_grad_()
        (slope,) = torch.autograd.grad(compute_share(point), point)
        curvature = torch.autograd.functional.hessian(compute_share, flat.detach())
        assert isinstance(curvature, Tensor)
        rows = [
            torch.autograd.grad(each, list(measured.values()), retain_graph=True, allow_unused=True) for each in flat
        ]
        for index, (key, each) in enumerate(measured.items()):
            jacobian = torch.stack([torch.zeros_like(each) if row[index] is None else row[index] for row in rows])
            zeros[0][key] += torch.einsum("k...,kl,l...->...", jacobian, curvature, jacobian).detach()
            zeros[1][key] += torch.einsum("k...,k->...", jacobian, slope).square().detach() * count
    return zeros[0], zeros[1]


def drop_labels(model: nn.Module, inputs: Inputs) -> Inputs:
    """Return what the model computes outputs from; decoders read the labels, one position later."""
    kept = {key: value for key, value in inputs.items() if key != "labels"}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        kept["decoder_input_ids"] = F.pad(inputs["labels"][:, :-1], (1, 0), value=1)
    return kept


def compare(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest entry; of rounding alone, the difference itself."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def check_rescaling(model: nn.Module, inputs: Inputs) -> tuple[int, str]:
    """Return the number of independent rescalings, and whether they leave the outputs unchanged."""
    try:
        scales = find_symmetries(model, inputs).scales
        rescale(model, inputs, strict=True)
    except SaltflatError as error:
        return 0, str(error).split(". Try")[0]
    return scales, "passes"


def time_strategies(name: str) -> float:
    """Return the CPU time of passes of single examples over that of the quick one, on one thread in float32.

    Single examples are vectorized where that is possible, and otherwise run one at a time.
    """
    count, options = TIMED[name]
    model, inputs = build(name, count, **options)
    model = model.float()
    inputs = {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
    with open_session(model, "eval", [inputs]):
        problem = Problem.build(model, [inputs], "model")
        batch = next(iter(problem.read_batches()))
        probe = run_probe(problem, batch, 1 << 30)

        def run(strategy: str, part: Batch = batch) -> float:
            start = time.process_time()
            outputs, backward = probe.forward(problem, part, strategy)
            backward(torch.randn(COLUMNS, *outputs.shape), consume, True)
            return time.process_time() - start

        def run_alone() -> float:
            try:
                return run("mapped")
            except NotBatchableError:
                return sum(run("single", batch.cut(n, n + 1)) for n in range(batch.examples))

        return min(run_alone() for _ in range(3)) / min(run(probe.strategy) for _ in range(5))


def consume(name: str, form: FactoredGradient) -> None:
    """Sum the squares of gradients, as most statistics do."""
    form.sum_squares()


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| architecture | strategy | quick parameters | difference from the definition | from the model's loss | "
        "rescalings | speed-up |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        scales = str(row.scales) if row.rescaling == "passes" else row.rescaling.split(" (")[0]
        times = "" if row.speedup is None else f"{row.speedup:.1f}"
        lines.append(
            f"| {row.name} | {row.strategy} | {row.share:.0%} | {row.difference:.0e} | {row.loss_difference:.0e} | "
            f"{scales} | {times} |"
        )
    return "\n".join(lines)


def write(rows: Sequence[Row], settings: Mapping[str, Any]) -> None:
    """Write the table into the page, and the rows as JSON."""
    text = PAGE.read_text()
    before, rest = text.split(START)
    PAGE.write_text(f"{before}{START}\n{format_table(rows)}\n{END}{rest.split(END)[1]}")
    RESULTS.write_text(json.dumps({**settings, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def read() -> list[Row]:
    """Return the rows that were written last."""
    rows = json.loads(RESULTS.read_text())["rows"]
    return [Row(**{**row, "reasons": tuple(row["reasons"])}) for row in rows]


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Examine architectures, and print or write what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; all that are installed if none is named")
    parser.add_argument("--times", action="store_true", help="also time the quick and the mapped way")
    parser.add_argument("--write", action="store_true", help="write docs/transformers.md and the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    for name in options.names or ARCHITECTURES:
        try:
            row = examine(name)
        except ModuleNotFoundError as error:
            print(f"{name} is left out: {error}")
            continue
        if options.times and name in TIMED:
            row = replace(row, speedup=time_strategies(name))
        rows.append(row)
        print(format_table([row]).splitlines()[-1], *row.reasons, flush=True)
    if options.write:
        found = {row.name: row for row in (*read(), *rows)}
        write(
            [found[name] for name in ARCHITECTURES if name in found],
            {"torch": torch.__version__, "transformers": transformers.__version__, "threads": 1},
        )
    return rows


if __name__ == "__main__":
    main()
