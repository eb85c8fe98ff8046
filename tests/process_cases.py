"""A program that measures in 1, 2 and 4 processes, makes every mistake there is, and at last kills one process.

    python process_cases.py FOLDER

Torch is imported once; the processes are forks of this one. Each writes what it saw to ``FOLDER/rank<n>.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from process_support import Pair, Recorder, compare, find_differences, make_gpt, make_mlp, make_resnet
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import saltflat
from saltflat import cli
from saltflat.engine.statistic import COMPUTED, STATISTICS
from saltflat.statistics.compute import Statistics

TIMEOUT = 120  # seconds that processes wait for each other
MEASURES = ["quick", "input_robustness", "input_margin", "sharpness(steps=2)", "adaptive_sharpness(draws=4)"]
SEARCHES = ["hessian_top_eigenvalue", "kappa_max", "fisher_spectral_radius(pool=10)", "pac_bayes_flatness(draws=2)"]
FEW = ["hessian_trace", "rho", "fisher_trace", "relative_flatness"]


def compare_counts(recorder: Recorder, groups: dict[int, ProcessGroup | None]) -> None:
    """Compare reports and statistics of one, two and four processes."""

    def run_all(name: str, call: Callable[[ProcessGroup | None], Any]) -> None:
        # By itself in an initialized group: the others take no part.
        alone = [call(None) if recorder.rank == 0 else None]
        distributed.broadcast_object_list(alone)
        if isinstance(alone[0], saltflat.Report):
            recorder.keep(f"measures of {name}", len(alone[0].readings))
        for count, group in groups.items():
            if recorder.rank < count:
                recorder.keep(f"{name}, {count}", compare(alone[0], call(group)))

    quiet: dict[str, Any] = {"progress": False}
    mlp, data = make_mlp()
    run_all("mlp", lambda group: saltflat.measure(mlp, data, measures=MEASURES, process_group=group, **quiet))
    run_all(
        "searches",
        lambda group: saltflat.measure(mlp, data, measures=SEARCHES, sampling=False, process_group=group, **quiet),
    )
    resnet, images = make_resnet()
    run_all("resnet", lambda group: saltflat.measure(resnet, images, columns="sampled:3", process_group=group, **quiet))
    gpt, tokens = make_gpt()
    run_all("gpt", lambda group: saltflat.measure(gpt, tokens, columns="top:2", process_group=group, **quiet))

    def measure_all(net: nn.Module, of: Any, group: ProcessGroup | None, columns: str) -> saltflat.Report:
        options: dict[str, Any] = {"columns": columns, "initial": net, "sampling": False, "certificate": False, **quiet}
        return saltflat.measure(net, of, measures="all", process_group=group, **options)

    run_all("all of mlp", lambda group: measure_all(mlp, data, group, "exact"))
    run_all("all of resnet", lambda group: measure_all(resnet, images, group, "exact"))
    run_all("all of gpt", lambda group: measure_all(gpt, tokens, group, "sampled:2"))

    def compute_all(net: nn.Module, of: Any, group: ProcessGroup | None, columns: str) -> Statistics:
        names = list(STATISTICS)
        return saltflat.compute_statistics(net, of, names=names, columns=columns, process_group=group, **quiet)

    run_all("statistics of mlp", lambda group: compute_all(mlp, data, group, "exact"))
    run_all("statistics of resnet", lambda group: compute_all(resnet, images, group, "top:1"))
    run_all("statistics of gpt", lambda group: compute_all(gpt, tokens, group, "sampled:2"))


def measure_odd_data(recorder: Recorder) -> None:
    """Measure fewer examples than processes, and data that do not say how many they are."""
    net, (inputs, labels) = make_mlp(15)
    world = distributed.group.WORLD

    def run(name: str, data: Any, **options: Any) -> None:
        found = [
            saltflat.measure(net, data, measures=FEW, progress=False, process_group=group, **options)
            for group in (None, world)
        ]
        recorder.keep(name, compare(*found))

    class Batches:
        """Batches without a length."""

        def __iter__(self) -> Iterator[Pair]:
            return iter([(inputs[:1], labels[:1]), (inputs[1:8], labels[1:8]), (inputs[8:], labels[8:])])

    run("fewer examples", (inputs[:3], labels[:3]))
    run("one example", (inputs[:1], labels[:1]), columns="sampled:3")
    run("unknown length", Batches())
    run("shuffled", DataLoader(TensorDataset(inputs, labels), batch_size=4, shuffle=True))
    run("limit", DataLoader(TensorDataset(inputs, labels), batch_size=4, drop_last=True), limit=9)


def make_mistakes(recorder: Recorder) -> None:
    """Differ between processes, in every way that would make a wrong number."""
    rank, world = recorder.rank, distributed.group.WORLD
    net, data = make_mlp()

    def measure(**changes: Any) -> saltflat.Report:
        given = {"model": net, "data": data, "measures": ["hessian_trace"], "progress": False, "seed": 0}
        return saltflat.measure(**{**given, "process_group": world, **changes})

    dataset = TensorDataset(*data)
    sampler: DistributedSampler[Pair] = DistributedSampler(dataset, shuffle=False)
    recorder.catch("sampler", lambda: measure(data=DataLoader(dataset, batch_size=4, sampler=sampler)))
    late = data[0].clone()
    late[-1, -1] += rank == 2
    batched = DataLoader(TensorDataset(late, data[1]), batch_size=4)
    recorder.catch("last example", lambda: measure(data=batched))
    recorder.catch("batches", lambda: measure(data=DataLoader(dataset, batch_size=4 + rank // 3)))
    other = make_mlp()[0]
    with torch.no_grad():
        list(other.parameters())[3][1] += 1e-9 * (rank == 3)
    recorder.catch("weights", lambda: measure(model=other))
    wider = nn.Sequential(net, nn.Softplus(beta=1.0 + (rank == 1)))
    recorder.catch("modules", lambda: measure(model=wider))
    scaled = make_mlp()[0]
    scaled[1].register_forward_hook(lambda module, inputs, output: output * (1 + (rank == 2)))
    recorder.catch("function", lambda: measure(model=scaled))
    halved = 1 + (rank == 1)
    recorder.catch("loss", lambda: measure(loss=lambda *of: torch.nn.functional.cross_entropy(*of) / halved))
    recorder.catch("logits", lambda: measure(logits="l2" if rank else "std"))
    recorder.catch("seed", lambda: measure(seed=int(rank == 1)))
    recorder.catch("measures", lambda: measure(measures=["rho" if rank else "kappa_trace"]))
    recorder.catch("unknown", lambda: measure(measures=["rho" if rank else "rhp"]))
    options: dict[str, Any] = {"memory": "1GiB" if rank else 0, "process_group": world}
    recorder.catch("statistics", lambda: saltflat.compute_statistics(net, data, **options))
    recorder.catch("group", lambda: measure(process_group="world"))

    def audit(**changes: Any) -> saltflat.Audit:
        given = {"measures": ["rho"], "draws": 1, "progress": False, "process_group": world, **changes}
        return saltflat.audit_invariance(net, data, **given)

    recorder.catch("no draws", lambda: audit(draws=1 - rank // 3))
    recorder.catch("spread", lambda: audit(spread=1.0 + rank))

    def fail(done: int) -> None:
        raise KeyError("no such row")

    def stop_search(step: str, done: int, total: int | None) -> None:
        if rank == 0 and step != "Sweeping examples":
            raise RuntimeError("stopped by the user")

    # A process that raises, outside and within of a statistic that may be left out.
    recorder.catch("stopped", lambda: measure(progress=stop_search, measures="all"))
    recorder.catch("callback", lambda: measure(progress=lambda step, done, total: fail(done) if rank == 0 else None))

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            if bool((x > 99).any()):
                raise ValueError("too large for this model")
            found: Tensor = self.net(x)
            return found

    large = data[0].clone()
    large[14, 0] = 100  # of 23 examples, one that the third process takes
    few = DataLoader(TensorDataset(large, data[1]), batch_size=8)
    recorder.catch("raises", lambda: measure(model=Fragile(), data=few, certificate=False))

    def break_statistic(context: Any, **options: Any) -> Any:
        if rank == 2:
            raise RecursionError("out of memory here")
        return usual.function(context, **options)

    usual = COMPUTED["input_jacobian"]
    COMPUTED["input_jacobian"] = dataclasses.replace(usual, function=break_statistic)
    torch.manual_seed(0)
    tiny, small = nn.Linear(5, 2).double(), (data[0][:5], data[1][:5] % 2)
    left_out = measure(model=tiny, data=small, measures="invariant", sampling=False, certificate=False).left_out
    recorder.keep("left out", dict(left_out))
    recorder.catch("statistic", lambda: measure(measures=["input_robustness"]))
    COMPUTED["input_jacobian"] = usual
    # After all of these, the processes still measure together.
    alone = saltflat.measure(net, data, measures=FEW, progress=False)
    recorder.keep("afterwards", compare(alone, measure(measures=FEW)))


def repeat_and_audit(recorder: Recorder) -> None:
    """Measure a model while it trains, and audit it."""
    world = distributed.group.WORLD
    net, data = make_mlp()
    meters = [saltflat.Meter(net, measures=FEW, progress=False, process_group=group) for group in (None, world)]
    for _ in range(2):
        recorder.keep("meter", compare(*(meter.measure(data) for meter in meters)))
        with torch.no_grad():
            next(net.parameters()).mul_(1.5)
    options: dict[str, Any] = {"measures": ["hessian_trace", "normalized_sharpness"], "draws": 1, "progress": False}
    audits = [saltflat.audit_invariance(net, data, process_group=group, **options) for group in (None, world)]
    timed = [dataclasses.replace(each, seconds=0.0, created="", report=None) for each in audits]  # type: ignore[arg-type]
    recorder.keep("audit", max(difference for _, difference in find_differences(timed[0], timed[1])))


def measure_sharded(recorder: Recorder) -> None:
    """Measure a model whose weights fully_shard has sharded, with rows that do not divide evenly."""
    world = distributed.group.WORLD
    whole, data = make_mlp()
    net = make_mlp()[0]
    for module in (net[0], net[2], net):
        fully_shard(module)
    places = [id(each) for each in net.parameters()]
    alone = saltflat.measure(whole, data, progress=False)
    recorder.keep("sharded", compare(alone, saltflat.measure(net, data, progress=False, process_group=world)))
    names = ["curvature_diagonal", "curvature_trace"]
    found = [
        saltflat.compute_statistics(each, data, names=names, progress=False, process_group=group)
        for each, group in ((whole, None), (net, world))
    ]
    recorder.keep("statistics of sharded", compare(*found))
    recorder.catch("sharded by itself", lambda: saltflat.measure(net, data, progress=False))
    # The model is as it was, and trains.
    same = places == [id(each) for each in net.parameters()] and isinstance(net, FSDPModule)
    before = torch.nn.functional.cross_entropy(net(data[0]), data[1])
    before.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    after = torch.nn.functional.cross_entropy(net(data[0]), data[1])
    recorder.keep("restored", bool(same and after < before) and abs(float(before) - alone.loss) < 1e-12)


def kill_one(recorder: Recorder) -> None:
    """End the last process in the middle of a sweep."""
    net, data = make_mlp(200)

    def end(module: nn.Module, inputs: object) -> None:
        end.calls += 1  # type: ignore[attr-defined]
        if recorder.rank == 3 and end.calls > 8:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

    end.calls = 0  # type: ignore[attr-defined]
    net[0].register_forward_pre_hook(end)
    loader = DataLoader(TensorDataset(*data), batch_size=5)
    group = distributed.group.WORLD
    recorder.catch("killed", lambda: saltflat.measure(net, loader, progress=False, process_group=group))


def run(folder: Path, rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", store, timedelta(seconds=TIMEOUT), world_size=4, rank=rank)
    recorder = Recorder(folder, rank)
    pair = distributed.new_group([0, 1])
    compare_counts(recorder, {2: pair, 4: distributed.group.WORLD})
    measure_odd_data(recorder)
    make_mistakes(recorder)
    repeat_and_audit(recorder)
    measure_sharded(recorder)
    kill_one(recorder)


def run_program(folder: Path, rank: int) -> None:
    """Measure on the command line, as torchrun would start it; then with a process that ends before it measures."""
    given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    os.environ |= {**given, "MASTER_ADDR": "127.0.0.1"}
    weights = str(folder / "weights.pt")
    net = ["--model", "process_cases:make_classifier", "--data", "process_cases:make_data"]
    options = ["--weights", weights, "--measures", "hessian_trace,rho", "--dtype", "float64"]
    for step, more in enumerate((["--out", str(folder / "report.json")], ["--skip", "1" if rank else "0"])):
        os.environ["MASTER_PORT"] = (folder / "ports").read_text().split()[step]
        sys.argv = ["saltflat", "measure", *net, *options, *more]
        with (folder / f"program{rank}.{step}").open("w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                cli.main()
            except SystemExit as leaving:
                print("exit", leaving.code, flush=True)


def make_classifier() -> nn.Module:
    return make_mlp()[0]


def make_data() -> Pair:
    return make_mlp()[1]


def find_free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def fork(call: Callable[[Path, int], None], folder: Path, count: int) -> list[int]:
    """Return the exit codes of processes that make a call with their ranks."""
    processes = []
    for rank in range(count):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                call(folder, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        processes.append(process)
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


def main() -> int:
    folder = Path(sys.argv[1])
    net, data = make_mlp(3)
    saltflat.measure(net, data, measures=["quick"], progress=False)  # imports what a measurement needs, once
    torch.save(make_classifier().state_dict(), folder / "weights.pt")
    (folder / "ports").write_text(" ".join(map(str, find_free_ports(2))))
    print(json.dumps([*fork(run, folder, 4), *fork(run_program, folder, 2)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
