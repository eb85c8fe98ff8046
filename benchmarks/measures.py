"""Time the measures beside earlier methods of computing them, and compare the values."""

import argparse
import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from parts import Options, Outcome
from rich.console import Console
from rich.table import Table

PARTS = ("timing", "balance", "minimum", "spectrum", "density", "gram", "draws")


def run(part: str, options: Options) -> Outcome:
    outcome: Outcome = import_module(f"parts.{part}").run(options)
    return outcome


def recorded(outcome: Outcome) -> dict[str, Any]:
    return {"targets": [asdict(target) for target in outcome.targets], "notes": outcome.notes, "found": outcome.record}


def verdicts(found: dict[str, Outcome], quick: bool) -> Table:
    title = "Targets; QUICK, so times say nothing" if quick else "Targets"
    table = Table("part", "target", "found", "verdict", title=title)
    for part, outcome in found.items():
        for target in outcome.targets:
            table.add_row(part, target.wanted, target.found, "reached" if target.reached else "NOT REACHED")
    return table


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repetitions")
    parser.add_argument(
        "--loop-limit", type=float, metavar="SECONDS", help="cut loops over parameters short and extrapolate"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to see that it runs")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    given = parser.parse_args(words)
    console = Console(width=None if sys.stdout.isatty() else 150)
    with console.status("Starting") as status:
        if given.quick:
            options = Options(True, repeats=1, loop_limit=0.2, tell=status.update)
        else:
            options = Options(False, given.repeats, given.loop_limit, status.update)
        found: dict[str, Outcome] = {}
        for part in given.parts:
            found[part] = run(part, options)
            console.print(found[part].table)
            for note in found[part].notes:
                console.print(note, markup=False)
    console.print(verdicts(found, given.quick))
    if given.out:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "options": words or sys.argv[1:]}
        given.out.write_text(json.dumps(about | {"parts": {k: recorded(v) for k, v in found.items()}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
