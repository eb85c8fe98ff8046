"""Every numbered example runs from start to end, as a user would run it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import saltflat
from saltflat.measures import MEASURES
from saltflat.report import Audit

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("[0-9]*.py"))
DATA = Path(os.environ.get("SALTFLAT_DATA", "data")).absolute()
NEEDS_MNIST = {"02_mnist_lenet.py"}


def the_digits_are_compared(printed: str, out: Path) -> None:
    assert {path.name for path in out.iterdir()} == {
        *("report_mlp.json", "report_cnn.json", "report_resnet.json", "report_mlp_rescaled.json"),
        *("compare.html", "compare_rescaled.html", "compare.png"),
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
        assert f"audit_{name}.json" in printed

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
    root = Path(__file__).parent.parent
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


# What each example must have printed and written.
CHECKS: dict[str, Callable[[str, Path], None]] = {
    "01_digits.py": the_digits_are_compared,
    "02_mnist_lenet.py": the_lenet_is_saved_and_measured,
    "03_rescalings.py": the_rescalings_are_found_and_used,
}


def test_every_example_has_a_check_and_every_check_an_example() -> None:
    assert {path.name for path in EXAMPLES} == set(CHECKS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_leaves_what_it_promises(path: Path, tmp_path: Path) -> None:
    if path.name in NEEDS_MNIST and not (DATA / "MNIST").is_dir():
        pytest.skip("MNIST is not in the folder SALTFLAT_DATA")
    printed = run([sys.executable, "-W", "error", str(path), "--out", str(tmp_path)], tmp_path)
    CHECKS[path.name](printed, tmp_path)


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
    assert "Do:" in finished.stderr
    assert "SALTFLAT_DATA" in finished.stderr


def run(command: list[str], folder: Path) -> str:
    """What it printed; it must have succeeded."""
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
