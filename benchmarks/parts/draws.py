"""The cost of a hundred random subsets beyond one, in the determinant of the Fisher matrix (Jia and Su, 2020)."""

import networks
import torch
from rich.table import Table

import saltflat
from parts import Options, Outcome, Target
from parts.clock import in_turns
from parts.images import images


def run(options: Options) -> Outcome:
    pool, subset = (12, 4) if options.quick else (1000, 100)
    source = images("cifar10", pool, "standard")
    torch.manual_seed(0)
    model = networks.lenet().eval()
    data = source.inputs, source.labels
    kinds = {
        "100 subsets": f"fisher_logdet(draws=100, subset={subset}, pool={pool})",
        "1 subset of the same pool": f"fisher_logdet(draws=1, subset={subset}, pool={pool})",
        "1 subset, the pool no larger than it": f"fisher_logdet(draws=1, subset={subset}, pool={subset})",
    }
    values = {}

    def call(kind: str) -> None:
        report = saltflat.measure(model, data, measures=kinds[kind], certificate=False, progress=False)
        (values[kind],) = (reading.value for reading in report.values())

    options.tell("draws: taking times in turns")
    calls = {kind: lambda kind=kind: call(kind) for kind in kinds}
    in_turns(calls, 1)  # warms up
    seconds = in_turns(calls, options.repeats)
    best = {kind: min(each) for kind, each in seconds.items()}
    many, same, small = best.values()
    table = Table(title=f"fisher_logdet of LeNet-5, {source.source}, subsets of {subset}, best of {options.repeats}")
    for heading in ("subsets", "value", "seconds", "100 subsets take"):
        table.add_column(heading, justify="left" if heading == "subsets" else "right")
    for kind in kinds:
        table.add_row(kind, f"{values[kind]:.3f}", f"{best[kind]:.4f}", f"{many / best[kind]:.2f}x")
    targets = (
        Target("100 subsets in 2 times the time of one of the same pool", f"{many / same:.2f} times", many <= 2 * same),
        Target(
            f"100 subsets of {pool} examples in 2 times the time of one of {subset}",
            f"{many / small:.2f} times",
            many <= 2 * small,
        ),
    )
    record = {"images": source.source, "pool": pool, "subset": subset, "seconds": seconds, "values": values}
    return Outcome(table, targets, record)
