"""Record every number that must survive a change of the code's layout, and compare two records bit for bit.

    python tests/record_numbers.py record before.json      # about five minutes, on one thread
    python tests/record_numbers.py compare before.json again.json after.json

A record holds the readings of the demo (networks trained, measured and audited, and the study with its scores), all
measures on all networks of the law suite, and the scores of the committed papers, each with full digits. Records are
comparable when they come from one machine with one set of installed packages: another CPU may add in another order.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
# Not results: how long it took, when, where and with what.
TOLERANCE = 1e-7  # relative, for numbers that no two runs of the same code agree on to the last digit
RENAMED = {"batch": "batch_size", "l2": "weight_decay"}  # settings, in records of earlier versions
IGNORED = {"seconds", "seconds_by_step", "created", "versions", "measure_seconds", "memory", "results_bytes", "digest"}


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every number below a value of JSON by its path, written as hexadecimal digits."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            if key not in IGNORED:
                yield from flatten(below, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for place, below in enumerate(value):
            yield from flatten(below, f"{path}/{place}")
    elif isinstance(value, float):
        yield path, value.hex()
    elif isinstance(value, int) and not isinstance(value, bool):
        yield path, str(value)


def record_demo() -> Iterator[tuple[str, str]]:
    """Yield the numbers of `make demo`: reports and audits, the study's rows and scores."""
    from saltflat.studies import Results

    with tempfile.TemporaryDirectory() as folder:
        for script in ("01_digits.py", "11_study.py"):
            done = [sys.executable, str(ROOT / "examples" / script), "--out", folder]
            subprocess.run(done, check=True, stdout=subprocess.DEVNULL)
        for path in sorted(Path(folder).glob("*.json")):
            yield from flatten(json.loads(path.read_text(encoding="utf-8")), f"demo/{path.stem}")
        results = Results.load(Path(folder) / "study")
        yield from flatten(_rows(results), "demo/study")
        yield from flatten(results.scores().to_dict(), "demo/study/scores")


def record_laws() -> Iterator[tuple[str, str]]:
    """Yield all measures of all networks and chains of the law suite, with their standard errors and layers."""
    from architectures import NETWORKS
    from chains import CHAINS
    from laws import OPTIONS, start_of

    import saltflat
    from saltflat.measures.registry import MEASURES

    for name, build in {**CHAINS, **NETWORKS}.items():
        case = build()
        asked = [measure + OPTIONS.get(measure, "") for measure in MEASURES]
        report = saltflat.measure(
            case.model, case.batches, case.loss, asked, initial=start_of(case), certificate=True, progress=False
        )
        yield from flatten(report.to_dict(), f"laws/{name}")


def record_papers() -> Iterator[tuple[str, str]]:
    """Yield the scores of the committed studies, and the words of every paper's table that are numbers."""
    from saltflat.studies import Results

    for path in sorted((ROOT / "papers").glob("*/results/**/study.json")):
        results = Results.load(path.parent)
        name = path.parent.relative_to(ROOT).as_posix()
        yield from flatten(_rows(results), name)
        for gap in ("error", "loss"):
            yield from flatten(results.scores(gap=gap).to_dict(), f"{name}/scores/{gap}")
    for script in sorted((ROOT / "papers").glob("*/run.py")):
        done = subprocess.run([sys.executable, str(script), "table"], check=True, capture_output=True, text=True)
        for place, word in enumerate(each for each in done.stdout.split() if any(map(str.isdigit, each))):
            yield f"{script.parent.name}/table/{place}", word


def _rows(results: Any) -> dict[str, Any]:
    """Return the finished runs in order, without their keys, which name the settings as the version spells them."""
    found: dict[str, Any] = {}
    for place, row in enumerate(results.rows.values()):
        readings = {name: reading.to_dict() for name, reading in row.readings.items()}
        outcome = {k: v for k, v in vars(row.outcome).items() if isinstance(v, float | int)} if row.outcome else {}
        found[str(place)] = {"readings": readings, "outcome": outcome, "gap": dict(row.gap)}
    return found


def compare(old: list[dict[str, str]], new: dict[str, str]) -> int:
    """Print what differs from older records; return how many numbers do.

    Numbers that are the same in all older records must be the same again. Those that differ between two records of the
    same code (determinants and eigenvalues, where LAPACK's last digits depend on where in memory an array lies) must
    agree to ``TOLERANCE``.
    """
    old = [{_rename_settings(key): value for key, value in each.items()} for each in old]
    first = old[0]
    unstable = {key for key in first if any(each.get(key) != first[key] for each in old)}
    missing, extra = first.keys() - new.keys(), new.keys() - first.keys()
    changed = {key for key in first.keys() - missing - unstable if first[key] != new[key]}
    far = {key for key in unstable - missing if not _is_close(first[key], new[key])}
    for key in sorted(changed | far)[:40]:
        print(f"changed  {key}: {_readable(first[key])} -> {_readable(new[key])}")
    for word, keys in {"missing": missing, "extra": extra}.items():
        for key in sorted(keys)[:20]:
            print(f"{word:8} {key}")
    print(
        f"{len(first) - len(missing) - len(unstable) - len(changed)} numbers are identical, {len(changed)} changed, "
        f"{len(missing)} are missing, {len(extra)} are new."
    )
    if unstable:
        print(
            f"{len(unstable)} more differ between the {len(old)} older records themselves; {len(unstable) - len(far)} "
            f"agree to {TOLERANCE:g}."
        )
    return len(changed) + len(far) + len(missing)


def _rename_settings(key: str) -> str:
    """Return the key of a score with the settings in it by their present names.

    Example:
        >>> _rename_settings("demo/study/scores/scores/rho/cmi_by_set/lr + batch")
        'demo/study/scores/scores/rho/cmi_by_set/lr + batch_size'
    """
    path, mark, rest = key.partition("/scores/")
    return path + mark + re.sub(r"\b(batch|l2)\b", lambda found: RENAMED[found[0]], rest)


def _is_close(one: str, other: str) -> bool:
    return math.isclose(float.fromhex(one), float.fromhex(other), rel_tol=TOLERANCE)


def _readable(digits: str) -> str:
    try:
        value = float.fromhex(digits)
    except ValueError:
        return digits
    return repr(value) if not math.isnan(value) else "nan"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write all numbers to a file")
    recording.add_argument("file", type=Path)
    comparing = commands.add_parser("compare", help="compare two files; fails when a number changed")
    comparing.add_argument("old", type=Path, nargs="+", help="records of the old code; more than one show its noise")
    comparing.add_argument("new", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        *old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (*arguments.old, arguments.new))
        sys.exit(compare(old, new) > 0)
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for part in (record_papers, record_laws, record_demo):
        found.update(part())
        print(f"{part.__name__}: {len(found)} numbers so far", flush=True)
    arguments.file.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
