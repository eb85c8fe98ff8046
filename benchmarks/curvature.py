"""Time the exact Gauss-Newton diagonal and trace of softmax cross-entropy: saltflat beside its peers, in one run."""

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import networks
import torch
from networks import CLASSES, NETWORKS, Call, Problem, Setting, Values, problem
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

STATISTICS = ("curvature_diagonal", "curvature_trace")
YARDSTICK = "forward-backward"
PATIENCE = 60.0  # seconds of repetitions, after which a slow competitor sits out the rounds from the fourth on
COLUMNS = (
    ("median", "seconds (median)", ".4f"),
    ("min", "min", ".4f"),
    ("times_saltflat", "/ saltflat", ".2f"),
    ("times_forward_backward", "/ fwd-bwd", ".2f"),
    ("extra_mib", "extra peak MiB", ".0f"),
    ("difference", "difference", ".1e"),
)


def saltflat(task: Problem, statistic: str, setting: Setting) -> Call:
    package: Any = import_module("saltflat")
    model = deepcopy(task.model)

    def call() -> Values:
        data = (task.inputs, task.targets)
        found = package.compute_statistics(model, data, names=statistic, memory=setting.way, progress=False)
        values: Values = found[statistic]
        return values

    return call


def backpack(task: Problem, statistic: str, setting: Setting) -> Call:
    package: Any = import_module("backpack")
    extension: Any = import_module("backpack.extensions").DiagGGNExact
    branches = any(True for layer in task.model.children() for _ in layer.children())
    model = package.extend(deepcopy(task.model), use_converter=branches).eval()
    loss = package.extend(nn.CrossEntropyLoss())
    n = len(task.inputs)

    def call() -> Values:
        total: dict[str, Tensor] = {}
        for x, y in task.chunks(setting.chunk):
            model.zero_grad()
            with package.backpack(extension()):
                loss(model(x), y).backward()
            for k, v in model.named_parameters():
                # BackPACK averages over the chunk; its share of the whole is len(x) / n.
                share = v.diag_ggn_exact * (len(x) / n)
                total[k] = total[k].add_(share) if k in total else share
        return networks.traced(total, statistic)

    return call


def nngeometry(task: Problem, statistic: str, setting: Setting) -> Call:
    fisher: Any = import_module("nngeometry.metrics").FIM
    representation: Any = getattr(import_module("nngeometry.object"), setting.way)
    model = deepcopy(task.model)
    n = len(task.inputs)
    # Indexing whole chunks spares it the default loader's stacking of single examples.
    loader: Any = torch.utils.data.DataLoader(
        range(n),  # type: ignore[arg-type]
        batch_size=setting.chunk or n,
        collate_fn=lambda rows: (task.inputs[rows], task.targets[rows]),
    )

    def call() -> Values:
        matrix = fisher(
            model=model, loader=loader, representation=representation, variant="classif_logits",
            device=task.inputs.device, function=lambda *batch: model(batch[0]),
        )  # fmt: skip
        if statistic == "curvature_trace":
            return {"": matrix.trace()}
        parts = matrix.get_diag().split([v.numel() for v in model.parameters()])
        return {k: part.view_as(v) for (k, v), part in zip(model.named_parameters(), parts, strict=True)}

    return call


class EstimatesOnlyError(Exception):
    """Raised by a competitor that cannot compute exact values."""


def curvlinops(task: Problem, statistic: str, setting: Setting) -> Call:
    """Raise: it estimates diagonals and traces, or multiplies; exact values need a product for every parameter."""
    operator: Any = import_module("curvlinops").GGNLinearOperator
    model = deepcopy(task.model)
    parameters = list(model.parameters())
    data = [(task.inputs, task.targets)]
    ggn = operator(model, nn.CrossEntropyLoss(), parameters, data, check_deterministic=False)
    size = sum(v.numel() for v in parameters)
    vector = torch.ones(size, device=task.inputs.device)
    seconds = size * min(seconds_of(lambda: ggn @ vector, task.inputs.device) for _ in range(2))
    raise EstimatesOnlyError(f"exact values: {size:,} products, about {seconds:,.0f} s (one was timed)")


COMPETITORS: dict[str, Callable[[Problem, str, Setting], Call]] = {
    "saltflat": saltflat,
    "backpack": backpack,
    "nngeometry": nngeometry,
    "vmap": networks.plain_vmap,
    "curvlinops": curvlinops,
    YARDSTICK: networks.forward_backward,
}


def settings_of(name: str, statistic: str, task: Problem, memory: str) -> list[Setting]:
    """Return the settings a competitor may be run with; it is timed with the fastest."""
    n = len(task.inputs)
    chunks = [c for c in (4, 16, 64, 256) if c < n] + [0]
    if name == "saltflat":
        return [Setting(way=memory)]
    if name == "backpack":
        return [Setting(c) for c in chunks if c == 0 or c >= 64]
    if name == "nngeometry":
        ways = ["PMatDiag", "PMatImplicit"] if statistic == "curvature_trace" else ["PMatDiag"]
        return [Setting(c, way) for way in ways for c in chunks if c == 0 or c >= 16]
    if name == "vmap":
        # Every example of a chunk holds its gradients for all columns at once: stay below 4 GiB.
        bytes_each = 4 * CLASSES * sum(v.numel() for v in task.model.parameters())
        return [Setting(c) for c in chunks if (c or n) * bytes_each <= 2**32] or [Setting(1)]
    return [Setting()]


@dataclass
class Row:
    competitor: str
    statistic: str
    setting: Setting = field(default_factory=Setting)
    seconds: list[float] = field(default_factory=list)
    difference: float | None = None
    extra_mib: float | None = None
    reason: str = ""


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now()
    call()
    return now() - start


def quickest(task: Problem, row: Row, memory: str) -> Call | None:
    """Return the call with the best setting by one short trial each; if all fail, the row says why."""
    make, trials = COMPETITORS[row.competitor], []
    for setting in settings_of(row.competitor, row.statistic, task, memory):
        few = task.first(max(setting.chunk, 64)) if setting.chunk else task
        try:
            trial = make(few, row.statistic, setting)
            make(task.first(2), row.statistic, setting)()  # so that first-use costs fall on no setting
            trials.append((seconds_of(trial, task.inputs.device) / len(few.inputs), setting))
        except Exception as error:
            row.reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if not trials:
        return None
    row.setting, row.reason = min(trials)[1], ""
    return make(task, row.statistic, row.setting)


def extra_memory(task: Problem, row: Row) -> float | None:
    """Return the peak memory (MiB) of one call above the level before it; None if the system does not report it."""
    COMPETITORS[row.competitor](task.first(2), row.statistic, row.setting)()
    call = COMPETITORS[row.competitor](task, row.statistic, row.setting)
    gc.collect()
    if task.inputs.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - allocated) / 2**20
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # or the call would reuse freed pages unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present level
        before = resident("VmRSS")
    except (OSError, AttributeError):
        return None
    call()
    return resident("VmHWM") - before


def resident(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def fresh_memory(network: str, task: Problem, row: Row) -> float | None:
    """Measure each competitor in its own process on the CPU: memory freed by one would hide what the next takes."""
    if task.inputs.device.type == "cuda":
        return extra_memory(task, row)
    probe = [network, len(task.inputs), row.competitor, row.statistic, row.setting]
    command = [sys.executable, __file__, "--probe", json.dumps(probe)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer: float | None = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    return answer


def agreement(task: Problem, competitors: Sequence[str], memory: str) -> list[tuple[Row, Call | None]]:
    """Return a row for each competitor and statistic with its difference from saltflat, and its warm call, if any."""
    rows = [Row(YARDSTICK, "")] + [Row(name, statistic) for statistic in STATISTICS for name in competitors]
    calls = [quickest(task, row, memory) for row in rows]
    values = {(row.competitor, row.statistic): call() for row, call in zip(rows, calls, strict=True) if call}
    for row in rows:
        mine, reference = values.get((row.competitor, row.statistic)), values.get(("saltflat", row.statistic))
        row.difference = networks.difference(mine, reference) if mine and reference else None
    return list(zip(rows, calls, strict=True))


def ratio(row: Row, rows: Sequence[Row], competitor: str, statistic: str) -> float | None:
    other = [r for r in rows if (r.competitor, r.statistic) == (competitor, statistic) and r.seconds]
    return statistics.median(row.seconds) / statistics.median(other[0].seconds) if other and row.seconds else None


def summary(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    return asdict(row) | {
        "setting": str(row.setting),
        "median": statistics.median(row.seconds) if row.seconds else None,
        "min": min(row.seconds, default=None),
        "times_saltflat": ratio(row, rows, "saltflat", row.statistic),
        "times_forward_backward": ratio(row, rows, YARDSTICK, ""),
    }


def table(title: str, summaries: Sequence[dict[str, Any]]) -> Table:
    out = Table("statistic", "competitor", "setting", title=title)
    for _, header, _ in COLUMNS:
        out.add_column(header, justify="right")
    for s in summaries:
        cells = ["n/a" if s[key] is None else format(s[key], style) for key, _, style in COLUMNS]
        name = s["statistic"].removeprefix("curvature_")
        out.add_row(name, s["competitor"], s["setting"], *cells)
    return out


def measure(network: str, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    task = problem(network, options.examples, options.device)
    with console.status(f"{network}: trying settings") as status:
        entries = agreement(task, options.competitors, options.memory)
        ready = [(row, call) for row, call in entries if call]
        for repeat in range(options.repeats):
            status.update(f"{network}: repetition {repeat + 1} of {options.repeats}")
            for row, call in ready:
                if repeat < 3 or sum(row.seconds) < PATIENCE:
                    row.seconds.append(seconds_of(call, task.inputs.device))
        for row, _ in ready:
            status.update(f"{network}: memory of {row.competitor}")
            row.extra_mib = fresh_memory(network, task, row)
    return [summary(row, [other for other, _ in entries]) for row, _ in entries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    names = [name for name in COMPETITORS if name != YARDSTICK]
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--competitors", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repetitions")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--examples", type=int, help="instead of each network's own number")
    parser.add_argument("--memory", default="1GiB", help="saltflat's memory=")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # convolutions on a GPU would otherwise keep 10 bits only
    if options.probe:
        network, examples, competitor, statistic, setting = json.loads(options.probe)
        print(json.dumps(extra_memory(problem(network, examples), Row(competitor, statistic, Setting(*setting)))))
        return
    console = Console(width=None if sys.stdout.isatty() else 150)
    results = {}
    for network in options.networks:
        results[network] = measure(network, options, console)
        n = options.examples or NETWORKS[network].examples
        console.print(table(f"{network}, {n} examples, {options.device}", results[network]))
        for row in results[network]:
            if row["reason"]:
                console.print(f"{row['statistic']}, {row['competitor']}: {row['reason']}", markup=False)
    if options.out:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "options": sys.argv[1:]}
        options.out.write_text(json.dumps(about | {"networks": results}, indent=1))


if __name__ == "__main__":
    main()
