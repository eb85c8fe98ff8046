"""Every numbered example runs from start to end, as a user would run it."""

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import saltflat
from saltflat.audit import Audit
from saltflat.bounds import Bound
from saltflat.landscape import Landscape
from saltflat.measures.registry import MEASURES
from saltflat.spectrum import Spectrum
from saltflat.studies import Results

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "examples").glob("[0-9]*.py"))
DATA = Path(os.environ.get("SALTFLAT_DATA", "data")).absolute()
NEEDS_MNIST = {"02_mnist_lenet.py"}
WRITES_NOTHING = {"04_sam_plain.py", "05_mixed_precision.py", "06_two_processes.py"}
NEEDS_PROCESSES = {"06_two_processes.py"}


def the_digits_are_compared(printed: str, out: Path) -> None:
    assert {path.name for path in out.iterdir()} == {
        *("report_mlp.json", "report_cnn.json", "report_resnet.json", "report_mlp_rescaled.json"),
        *("report_mlp.html", "report_cnn.html", "report_resnet.html"),
        *("compare.html", "compare_sam.html", "compare_rescaled.html", "compare.png", "compare_sam.png"),
        *(f"audit_{name}.{kind}" for name in ("mlp", "cnn", "resnet") for kind in ("json", "png")),
    }
    for name in ("mlp", "cnn", "resnet"):
        report = saltflat.Report.load(out / f"report_{name}.json")
        assert report.certificate is not None
        assert report.certificate["holds"], "these are ReLU networks: their Gauss-Newton blocks are the Hessian's"
        assert report["hessian_trace"].value > 0
        attained = report["minimum_sharpness"].details["attained"]
        assert attained == (name == "mlp"), "BatchNorm is not folded into the others' layers"
    assert "hessian_trace" in (out / "compare.html").read_text(encoding="utf-8")
    for network in ("MLP", "CNN", "ResNet"):
        found = re.search(rf"{network}: .* and (\S+)% on the test set", printed)
        assert found
        assert float(found[1]) > 15, "no better than guessing"

    change = re.search(r"\(outputs differ by (\S+)\)", printed)
    assert change
    assert float(change[1]) < 1e-12
    fooled, steady = (
        set(found[1].split(", ")) if (found := re.search(rf"^{label}: (.*)\.$", printed, re.MULTILINE)) else set()
        for label in ("Fooled by rescaling", "Not fooled")
    )
    for name in ("mlp", "cnn", "resnet"):
        audit = Audit.load(out / f"audit_{name}.json")
        assert audit.holds
        assert not audit.obstacles
        assert audit.scales["unit"] > audit.scales["layer"] > 0
        assert audit["hessian_trace"].verdicts == {"layer": "moves, as expected", "unit": "moves, as expected"}
        assert audit["minimum_unit_sharpness"].verdicts["unit"] == "stays, as claimed"
    kept = re.findall(r"^(\w+): kept the claims of all 8 measures that have one", printed, re.MULTILINE)
    assert kept == ["MLP", "CNN", "ResNet"]

    claims = {name for name, each in MEASURES.items() if "layer_scale" in each.invariant_to}
    assert steady == claims
    assert fooled == MEASURES.keys() - claims - {"distance_from_init", "fisher_determinant"}


def the_lenet_is_saved_and_measured(printed: str, out: Path) -> None:
    assert {path.name for path in out.iterdir()} == {"lenet.safetensors", "report_lenet.json"}
    report = saltflat.Report.load(out / "report_lenet.json")
    assert report.examples == 100
    assert "minimum_sharpness" in report
    command = printed.strip().splitlines()[-1].split()
    again = out / "again.json"
    command[command.index("--out") + 1] = str(again)
    assert command[0] == "saltflat"
    root = Path(__file__).parent.parent.parent
    run([sys.executable, "-m", *command, "--measures", "kappa_trace,hessian_trace", "--quiet"], root)
    same = saltflat.Report.load(again)
    for name in same:
        assert same[name].value == pytest.approx(report[name].value, rel=1e-5)


def the_rescalings_are_found_and_used(printed: str, out: Path) -> None:
    assert {path.name for path in out.iterdir()} == {"graph.png", "graph_folded.png"}
    # With BatchNorm: before each of 19, the streams, and inside of 9 blocks. Folded: the streams and the blocks.
    streams, inside = 32, 3 * (8 + 16 + 32)
    assert f"{8 + 2 * inside + streams + inside} independent scales" in printed
    assert f"{streams + inside} independent scales" in printed
    moves = re.findall(r"weights move by up to (\S+), outputs by (\S+) of", printed)
    assert len(moves) == 3
    assert all(float(weights) > 1 and float(outputs) < 1e-9 for weights, outputs in moves)
    rows = {
        name: [float(each) for each in found[1].split()]
        for name in ("as trained", "folded", "folded, rescaled at random", "folded, rebalanced")
        if (found := re.search(rf"^{name} +([-+\de. ]+)$", printed, re.MULTILINE))
    }
    trace, by_layer, by_unit, _ = rows["folded"]
    assert by_unit < by_layer < trace
    assert rows["as trained"][2] < by_unit, "a limit, since BatchNorm absorbs what is before it"
    assert rows["folded, rescaled at random"][0] > 10 * trace
    assert rows["folded, rescaled at random"][2] == by_unit
    assert rows["folded, rebalanced"][:3] == pytest.approx([by_unit] * 3, rel=1e-3)  # four digits are printed
    assert all(row[3] < 1e-9 for row in rows.values())
    assert "Measure saltflat.fold(model) instead" in printed
    apart = re.search(r"are (\S+) apart, in canonical form (\S+)", printed)
    assert apart
    assert float(apart[1]) > 1
    assert float(apart[2]) < 1e-9
    assert "The same up to rescaling: True\n" in printed
    assert "0.1 % larger: False\n" in printed


def sam_is_compared_with_sgd(printed: str, out: Path) -> None:
    for name in ("SGD", "SAM"):
        found = re.search(rf"^{name}: .* and (\S+)% on the test set$", printed, re.MULTILINE)
        assert found
        assert float(found[1]) > 60, "something was learned"
    assert "57 steps were taken with a gradient from elsewhere, 0.1 away" in printed  # 3 epochs of 19 batches
    for measure in ("hessian_trace", "normalized_sharpness"):
        assert re.search(rf"^{measure} +\S+ +\S+", printed, re.MULTILINE)


def both_precisions_are_trained_in(printed: str, out: Path) -> None:
    lines = printed.splitlines()
    for way in ("closure", "explicit calls"):
        (line,) = (each for each in lines if each.startswith(f"cpu, torch.bfloat16, {way}: "))
        assert "after 20 steps, 20 of them taken with a gradient from 0.05 away" in line
        found = re.search(r"accuracy (\S+)% on", line)
        assert found
        assert float(found[1]) > 60
    with_gpu = [each for each in lines if each.startswith("cuda, torch.float16")]
    assert len(with_gpu) == 2 or "No GPU here" in printed


def processes_agree_globally(printed: str, out: Path) -> None:
    found = re.findall(
        r"sync='(\w+)': after 36 steps the weights of 2 processes are (\S+) from each other and (\S+) from", printed
    )
    assert [sync for sync, _, _ in found] == ["global", "local"], "once, by the first process"
    assert all(float(apart) == 0 for _, apart, _ in found)
    assert float(found[0][2]) < 1e-12
    assert float(found[1][2]) > 1e-4


def the_training_is_watched(printed: str, out: Path) -> None:
    assert {path.name for path in out.iterdir()} == {"flatness.jsonl", "flatness.png"}
    lines = [json.loads(line) for line in (out / "flatness.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [*range(20, lines[-1]["step"], 20), lines[-1]["step"]]
    assert f"in {lines[-1]['step']} steps" in printed
    assert lines[-1]["flatness/loss"] < lines[0]["flatness/loss"]
    for line in lines:
        assert {"epoch", "time", "flatness/hessian_trace", "flatness/lambda_max"} <= line.keys()
        assert line["flatness/lr_lambda_max"] == pytest.approx(0.05 * line["flatness/lambda_max"])
        assert line["flatness/lr_lambda_max_threshold"] == pytest.approx(3.8)
        assert f"step {line['step']}, epoch {line['epoch']}  loss " in printed
    last = re.search(r"^lr \* lambda_max, last \(step \d+\): (\S+), (below|above) 3.8", printed, re.MULTILINE)
    assert last
    assert float(last[1]) == pytest.approx(lines[-1]["flatness/lr_lambda_max"], abs=1e-3)
    assert (last[2] == "below") == (float(last[1]) < 3.8)


def lightning_trains_and_logs(printed: str, out: Path) -> None:
    assert {path.name for path in out.iterdir()} == {"sgd", "sam"}
    for name in ("sgd", "sam"):
        found = re.search(
            rf"^{name.upper()}: (\S+)% of the test set right after (\d+) steps; .*trace (\S+),", printed, re.M
        )
        assert found
        assert float(found[1]) > 60
        with (out / name / "log" / "metrics.csv").open(encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        measured = [line for line in lines if line["flatness/hessian_trace"]]
        # Where Lightning logs the loss of these epochs.
        assert [int(line["step"]) for line in measured] == [int(found[2]) * n // 3 - 1 for n in (1, 2, 3)]
        assert [line["step"] for line in measured] == [line["step"] for line in lines if line["loss"]]
        # The flattest state is one that fits its data: the first epoch's is flatter, and does not.
        fits = [n for n in range(3) if float(measured[n]["flatness/loss"]) <= 0.5]
        best = min(fits, key=lambda n: float(measured[n]["flatness/hessian_trace"]))
        kept = torch.load(out / name / "flattest.ckpt", weights_only=False)
        assert (kept["epoch"], 0 in fits) == (best, False)
        assert float(found[3]) == pytest.approx(float(measured[-1]["flatness/hessian_trace"]), rel=1e-3)
        losses = [float(line["loss"]) for line in lines if line["loss"]]
        assert losses == sorted(losses, reverse=True)


def the_trainer_looks_for_flat_minima(printed: str, out: Path) -> None:
    names = ("plain", "SAM", "Fisher penalty")
    assert {path.name for path in out.iterdir()} == {name.lower().replace(" ", "_") for name in names}
    traces = set()
    for name in names:
        found = re.search(rf"^{name}: test loss (\S+) after 12 steps; .*trace (\S+)$", printed, re.M)
        assert found
        assert float(found[1]) < 0.8
        log = json.loads((out / name.lower().replace(" ", "_") / "log.json").read_text(encoding="utf-8"))
        assert [entry["step"] for entry in log if "loss" in entry] == [4, 8, 12]
        measured = [entry for entry in log if "flatness/hessian_trace" in entry]
        assert [entry["step"] for entry in measured] == [4, 8, 12]
        assert float(found[2]) == pytest.approx(measured[-1]["flatness/hessian_trace"], rel=1e-3)
        traces.add(found[2])
    assert len(traces) == 3, "three ways to train"


# What each example must have printed and written.
def the_loss_is_walked_around(printed: str, out: Path) -> None:
    assert {path.name for path in out.iterdir()} == {
        *("landscape.json", "landscape.png"),
        *(f"slices_{kind}.png" for kind in ("length_1", "by_filter", "by_entry")),
    }
    plane = Landscape.load(out / "landscape.json")
    assert plane.losses.shape == (11, 11)
    assert plane.loss < 0.5
    assert plane.losses.max() > 2 * plane.loss
    bend = re.search(r"the slice bends by (\S+), the eigenvalue is (\S+)", printed)
    assert bend
    assert float(bend[1]) == pytest.approx(float(bend[2]), rel=0.05)
    rows = {
        label: [float(each) for each in found[1].split()]
        for label in ("length 1", "by filter", "by entry")
        if (found := re.search(rf"^{label} +([-+\de. ]+)$", printed, re.MULTILINE))
    }
    assert min(rows["length 1"]) > 1e-3, "of one length, directions move small layers more"
    assert rows["by filter"][0] < 1e-8 < 1e-3 < rows["by filter"][1], "filters know layers, not units"
    assert max(rows["by entry"]) < 1e-8


def a_study_is_run_and_written_as_a_page(printed: str, out: Path) -> None:
    assert {path.name for path in out.iterdir()} == {"study", "study.html"}
    results = Results.load(out / "study")
    assert len(results.rows) == 54
    assert len({tuple(row.config[axis] for axis in results.study.axis_names) for row in results.rows.values()}) == 27
    assert not results.counts["failed"]
    assert not results.counts["missing"]
    assert all(row.readings.keys() == set(results.study.measures) for row in results.rows.values())
    assert re.search(r"^normalized_sharpness +\S* *-?\d\.\d\d ", printed, re.MULTILINE), "a score for every measure"
    page = (out / "study.html").read_text(encoding="utf-8")
    assert all(key[:12] in page for key in results.rows), "every run can be pointed at"
    assert "largest gap" in page, "landscapes"


def the_spectrum_is_found_before_and_after_training(printed: str, out: Path) -> None:
    assert {path.name for path in out.iterdir()} == {"spectrum.json", "spectrum.png", "spectrum_layers.png"}
    found = Spectrum.load(out / "spectrum.json")
    assert len(found.largest) == 10
    assert found.eigenvalues[-1] < 0 < found.eigenvalues[0], "tanh networks have negative curvature"
    ranges = re.findall(r"eigenvalues from (\S+) to (\S+), trace (\S+)", printed)
    assert len(ranges) == 2
    assert float(ranges[1][1]) == pytest.approx(found.eigenvalues[0], rel=0.01)
    assert "3.weight" in printed


def settings_are_compared(printed: str, out: Path) -> None:
    axes = ("sam", "batch_size", "weight_decay")
    assert {path.name for path in out.iterdir()} == {"flatter", *(f"flatter_{axis}.png" for axis in axes)}
    results = Results.load(out / "flatter")
    assert len(results.rows) == 36
    assert not results.counts["failed"]
    for axis in axes:
        assert f"{axis}, compared with" in printed
    # The mean of each value of SAM, as printed, is that of the rows.
    found = results.effects()["sam"]
    for value in (0, 0.05, 0.2):
        mean = found[value].means["test_error"].estimate.value
        rows = [row.outcome for row in results.rows.values() if row.config["sam"] == value]
        assert mean == pytest.approx(sum(each.test_error for each in rows if each is not None) / len(rows))


def a_network_is_certified(printed: str, out: Path) -> None:
    bound = Bound.load(out / "certificate.json")
    assert bound.examples == 400, "the examples that the prior has not seen"
    assert bound.is_valid
    assert f"errs on at most {100 * bound.value:.1f} % of new digits" in printed
    others = [float(each) for each in re.findall(r"at most ([\d.]+) %, ", printed)]
    assert len(others) == 3
    assert bound.value < min(others[1:]) / 100, "a trained prior is better than one that has seen nothing"
    assert "is refused: Expected weights from before training" in printed
    assert "What it is computed from" in (out / "certificate.html").read_text(encoding="utf-8")


def a_language_model_is_fine_tuned(printed: str, out: Path) -> None:
    rows = re.findall(r"^(\w[\w ]*?)(, after)? +([\d,]+) +(\S+) +(\S+) +(\S+) +\S+ +\S+$", printed, re.MULTILINE)
    assert {name for name, *_ in rows} >= {"all parameters", "last block"}
    for name, _, count, own, ours, _ in rows:
        assert own == ours, "the measured loss is the model's own"
        assert (int(count.replace(",", "")) > 20_000) == (name == "all parameters")
    losses = {(name, bool(after)): float(own) for name, after, _, own, *_ in rows}
    assert all(losses[name, True] < losses[name, False] for name, _ in losses), "fine-tuning lowers it"
    assert {"all.json", "last.json"} <= {path.name for path in out.iterdir()}


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "01_digits.py": the_digits_are_compared,
    "02_mnist_lenet.py": the_lenet_is_saved_and_measured,
    "03_rescalings.py": the_rescalings_are_found_and_used,
    "04_sam_plain.py": sam_is_compared_with_sgd,
    "05_mixed_precision.py": both_precisions_are_trained_in,
    "06_two_processes.py": processes_agree_globally,
    "07_monitor.py": the_training_is_watched,
    "08_lightning.py": lightning_trains_and_logs,
    "09_hugging_face.py": the_trainer_looks_for_flat_minima,
    "10_landscape.py": the_loss_is_walked_around,
    "11_study.py": a_study_is_run_and_written_as_a_page,
    "12_spectrum.py": the_spectrum_is_found_before_and_after_training,
    "13_flatter.py": settings_are_compared,
    "14_certificate.py": a_network_is_certified,
    "15_language_model.py": a_language_model_is_fine_tuned,
}


# Lines that the examples of `make demo` may print, 100 in all.
DEMO = {"01_digits.py": 45, "11_study.py": 30, "14_certificate.py": 25}


def test_every_example_has_a_check_and_every_check_an_example() -> None:
    assert {path.name for path in EXAMPLES} == set(CHECKS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_leaves_what_it_promises(path: Path, tmp_path: Path) -> None:
    if path.name in NEEDS_MNIST and not (DATA / "MNIST").is_dir():
        pytest.skip("MNIST is not in the folder SALTFLAT_DATA")
    start = [sys.executable, "-W", "error"]
    if path.name in NEEDS_PROCESSES:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    where = [] if path.name in WRITES_NOTHING else ["--out", str(tmp_path)]
    printed = run([*start, str(path), *where], tmp_path)
    CHECKS[path.name](printed, tmp_path)
    assert len(printed.splitlines()) <= DEMO.get(path.name, 1000)


def test_without_mnist_the_lenet_says_what_to_do(tmp_path: Path) -> None:
    path = next(path for path in EXAMPLES if path.name in NEEDS_MNIST)
    finished = subprocess.run(
        [sys.executable, str(path), "--out", str(tmp_path)],
        env={**os.environ, "SALTFLAT_DATA": str(tmp_path / "nowhere")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr
    assert ". Try " in finished.stderr
    assert "SALTFLAT_DATA" in finished.stderr


def test_one_process_alone_says_what_to_do() -> None:
    path = next(path for path in EXAMPLES if path.name in NEEDS_PROCESSES)
    finished = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr
    assert "Try torchrun --nproc-per-node 2" in finished.stderr


def run(command: list[str], folder: Path) -> str:
    """Return what a command printed; it must succeed."""
    finished = subprocess.run(
        command,
        env={**os.environ, "SALTFLAT_QUICK": "1", "SALTFLAT_DATA": str(DATA)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout
