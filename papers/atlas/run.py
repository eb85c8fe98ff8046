"""The atlas: all cheap measures on networks that differ in optimizer, learning rate, batch size, width, noise and more.

    python papers/atlas/run.py parts                      list the parts with their numbers and what is done
    python papers/atlas/run.py train --part 11 --jobs 3   train and measure a part, three processes on one device
    python papers/atlas/run.py train --part 11 --minutes 8 the same, stopped after 8 minutes; run it again to go on
    python papers/atlas/run.py train --scale smoke        everything, tiny, on a CPU
    python papers/atlas/run.py analyze                    answer the questions from the rows; takes minutes
    python papers/atlas/run.py table                      the answers
    python papers/atlas/run.py figures                    draw them
    python papers/atlas/run.py page                       put the answers into README.md

MNIST and CIFAR-10 have to be in data/ (or the folder that SALTFLAT_DATA names) as torchvision lays them out. If
interrupted, a part resumes where it stopped. Weights stay in demo/atlas/; rows are packed into results/.
"""

import argparse
import math
import os
import shutil
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from analysis import PASSES, analyze_part, format_seconds, read_pass, write_pass
from figures import draw_figures
from parts import MEASURES, Part, list_parts, make_small_part
from tables import write_tables
from torch import Tensor, nn

import saltflat
from saltflat.results.files import write_json
from saltflat.studies import Examples, Results, pack_rows
from saltflat.studies.executors import make_executor
from saltflat.studies.measurement import measure_network
from saltflat.studies.rebuild import load_trained_network
from saltflat.studies.tasks import RebuiltNetwork

HERE = Path(__file__).parent
CHUNK = 8  # networks that are measured again before their values are written
TIMED = 3  # times that the seconds of a measure are the median of
FEW_EXAMPLES = 20  # of the smallest scale, where one timing is enough


class OutOfTimeError(Exception):
    """The minutes that were given are over."""


@contextmanager
def limit_time(minutes: float | None) -> Iterator[None]:
    """Stop as Ctrl-C does after so many minutes; what is finished is kept."""
    if minutes is None:
        yield
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    try:
        yield
    except KeyboardInterrupt:
        raise OutOfTimeError from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def train_part(part: Part, work: Path, jobs: int, device: str, data: Path) -> Results:
    """Train and measure the networks of a part that are not finished yet."""
    executor = make_executor("processes", workers=jobs) if jobs > 1 else "serial"
    results = part.build_study().run(work / part.name, executor, device, data_folder=data, every=60.0)
    counts = ", ".join(f"{count} {status}" for status, count in results.counts.items() if count)
    print(f"{part.name}: {counts}", flush=True)
    return results


def restore(folder: Path, source: Path) -> None:
    """Begin with the rows that were published, if a part is trained where it was not before; weights stay missing."""
    if folder.exists() or not (source / "rows.tar.xz").exists():
        return
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "analysis.json":
            shutil.copyfile(path, folder / path.name)


def choose_passes(part: Part) -> dict[str, list[int] | None]:
    """Return how the networks of a part are measured again, each with the seeds whose networks are; None for all."""
    found: dict[str, list[int] | None] = {"folded": None} if part.folded else {}
    return found | ({"rescaled": [0], "examples": [0], "logits": [0]} if part.arm == "equal-loss" else {})


def measure_again(part: Part, results: Results, jobs: int, device: str, data: Path) -> None:
    """Measure networks once more: with BatchNorm folded, rescaled, on other examples, or with normalized logits."""
    done = {name: read_pass(results.folder / f"{name}.json") for name in choose_passes(part)}
    tasks = []
    for name, seeds in choose_passes(part).items():
        wanted = [key for key in results.rows if not seeds or results.places[key]["seed"] in seeds]
        left = [key for key in wanted if key not in done[name] and has_weights(results, key)]
        chunks = [left[start : start + CHUNK] for start in range(0, len(left), CHUNK)]
        tasks += [(part, results, chunk, name, device, data) for chunk in chunks]
    for name, found in run_tasks(tasks, jobs):
        done[name] |= found
        write_pass(results.folder / f"{name}.json", done[name])
    for name in dict.fromkeys(task[3] for task in tasks):
        print(f"{part.name}, {PASSES[name]}: {len(done[name])} networks", flush=True)


def has_weights(results: Results, key: str) -> bool:
    """Return whether a network ended as it should, and its weights are still there."""
    there = (results.folder / "weights" / f"{key}.safetensors").exists()
    return there and results.rows[key].status in ("done", "missed")


def run_tasks(tasks: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Measure chunks of networks, several at a time in processes of their own; yield each pass's name with values."""
    if jobs <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield measure_chunk(*task)
        return
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=get_context("spawn")) as pool:
        try:
            for done in as_completed([pool.submit(measure_chunk, *task) for task in tasks]):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def measure_chunk(
    part: Part, results: Results, keys: list[str], name: str, device: str, data: Path
) -> tuple[str, dict[str, dict[str, float]]]:
    """Return the name of a pass, and the values of all measures of some networks in it."""
    examples = read_examples(part.dataset, data)
    return name, {key: measure_one_again(part, results, key, name, device, examples) for key in keys}


@cache
def read_examples(dataset: str, data: Path) -> Examples:
    """Return the examples of all parts on a data set, read once in every process."""
    found: Examples = make_small_part("mlp", dataset, "equal-loss").build_study().data.examples(data)
    return found


def measure_one_again(
    part: Part, results: Results, key: str, name: str, device: str, examples: Examples
) -> dict[str, float]:
    """Return the values of all measures of one network, measured once more."""
    made = load_trained_network(results, key, examples)
    model, inputs, labels = prepare_network(part, made, device, skip=part.examples if name == "examples" else 0)
    if name == "rescaled":
        model = saltflat.rescale(model, inputs[:2], seed=int(key, 16) % 2**31)
    options = {**results.study.measure_options, "logits": "std" if name == "logits" else "none"}
    initial = None if part.folded else made.initial
    found = measure_network(model, inputs, labels, initial, MEASURES, options).readings
    return {measure: reading.value for measure, reading in found.items()}


def prepare_network(part: Part, made: RebuiltNetwork, device: str, skip: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network as it is measured, on the device, with the examples it is measured on."""
    dtype = next(made.model.parameters()).dtype
    chosen = slice(skip, skip + part.examples)
    inputs, labels = made.inputs[chosen].to(device, dtype), made.labels[chosen].to(device)
    model = made.model.to(device)
    return (saltflat.fold(model, inputs[:2]) if part.folded else model), inputs, labels


def time_measures(part: Part, results: Results, device: str, data: Path) -> None:
    """Write how long each measure takes by itself on one network, the largest of the first seed."""
    path = results.folder / "costs.json"
    rows = [row for key, row in results.rows.items() if row.outcome is not None and has_weights(results, key)]
    if path.exists() or not rows:
        return
    key = max(rows, key=lambda row: row.outcome.parameters if row.outcome else 0).key
    made = load_trained_network(results, key, read_examples(part.dataset, data))
    model, inputs, labels = prepare_network(part, made, device)
    options = results.study.measure_options
    initial = None if part.folded else made.initial
    seconds = {}
    for name in MEASURES:
        times = []
        for _ in range(TIMED if part.examples > FEW_EXAMPLES else 1):
            begin = time.perf_counter()
            measure_network(model, inputs, labels, initial, [name], options)
            times.append(time.perf_counter() - begin)
        seconds[name] = statistics.median(times)
    where = (
        torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, torch threads: {torch.get_num_threads()}"
    )
    write_json({"network": key, "examples": len(inputs), "device": where, "seconds": seconds}, path)
    total = format_seconds(sum(seconds.values()))
    print(f"{part.name}: all measures, each by itself, took {total}", flush=True)


def publish(folder: Path, target: Path) -> None:
    """Copy the rows and further measurements of a part, without weights, and pack the rows."""
    target.mkdir(parents=True, exist_ok=True)
    for path in [folder / "study.json", *(folder / f"{name}.json" for name in (*PASSES, "costs"))]:
        if path.exists():
            shutil.copyfile(path, target / path.name)
    rows = list((folder / "rows").glob("*.json"))
    if not rows:
        return
    (target / "rows").mkdir(exist_ok=True)
    for path in rows:
        shutil.copyfile(path, target / "rows" / path.name)
    pack_rows(target)
    (target / "rows").rmdir()


def list_progress(parts: dict[str, Part], out: Path) -> Iterator[str]:
    """Yield a line per part: its number, networks and what is done."""
    for number, part in enumerate(parts.values(), 1):
        study = part.build_study()
        done = len(Results.load(out / part.name).rows) if (out / part.name / "study.json").exists() else 0
        yield f"{number:3} {part.name:28} {done:4} of {len(study.runs()):4} networks"


def write_page(path: Path, table: str) -> None:
    """Replace what stands between the two marks of a page by the table."""
    begin, end = "<!-- table -->\n", "<!-- end of table -->\n"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    path.write_text(f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def select_parts(parts: dict[str, Part], wanted: list[str] | None) -> list[Part]:
    """Return the parts of these numbers or names; all if None."""
    names = list(parts)
    if wanted is None:
        return list(parts.values())
    for each in wanted:
        if each not in names and not (each.isdigit() and 1 <= int(each) <= len(names)):
            raise SystemExit(f"Expected a part from 1 to {len(names)} or its name, but got {each!r}. Try parts.")
    return [parts[each if each in names else names[int(each) - 1]] for each in wanted]


def main(words: list[str] | None = None) -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("parts", "train", "analyze", "table", "figures", "page"))
    parser.add_argument("--part", nargs="+", help="numbers or names of parts; all if left out")
    parser.add_argument("--scale", choices=("full", "smoke"), default="full")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SALTFLAT_DATA", "data")))
    parser.add_argument("--work", type=Path, help="where networks are trained; demo/atlas/ if left out")
    parser.add_argument("--out", type=Path, help="where packed rows go; results/ beside this script, or inside --work")
    given = parser.parse_args(words)
    if given.what == "page" and (given.scale == "smoke" or given.out is not None):
        parser.error("Expected the rows in results/ for the page, but got --scale smoke or --out. Try table instead.")
    if given.minutes is not None and not 0 < given.minutes < math.inf:
        parser.error(f"Expected minutes above 0, but got --minutes {given.minutes:g}. Try 8, or leaving it out.")
    work = given.work or Path("demo") / ("atlas" if given.scale == "full" else "atlas-smoke")
    out = given.out or (HERE / "results" if given.scale == "full" else work / "results")
    parts = list_parts(given.scale)
    chosen = select_parts(parts, given.part)
    if given.what == "parts":
        print("\n".join(list_progress(parts, out)))
    if given.what == "train":
        try:
            with limit_time(given.minutes):
                for part in chosen:
                    restore(work / part.name, out / part.name)
                    results = train_part(part, work, given.jobs, given.device, given.data)
                    measure_again(part, results, given.jobs, given.device, given.data)
                    time_measures(part, results, given.device, given.data)
        except OutOfTimeError:
            print("Stopped because the time is over. Run the same command again to go on.", flush=True)
        for part in chosen:
            if (work / part.name / "study.json").exists():
                publish(work / part.name, out / part.name)
    if given.what in ("train", "analyze"):
        for part in chosen:
            if (out / part.name / "rows.tar.xz").exists():
                analyze_part(part, out)
    if given.what == "figures":
        for path in draw_figures(parts, out):
            print(f"drew {path.name}")
    if given.what in ("table", "page"):
        table = "\n".join(write_tables(parts, out))
        if given.what == "page":
            write_page(HERE / "README.md", table)
        else:
            print(table)


if __name__ == "__main__":
    main()
