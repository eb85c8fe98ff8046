"""Watch a training: how flat the minimum is while the network gets there, and how close the step is to too large.

A small network learns the 8 x 8 digits that come with scikit-learn, in a loop of plain PyTorch. A Monitor measures on
100 fixed examples every few steps and within a share of the training time, shows a table, and adds a line to a file
every time. Gradient descent on a parabola diverges if its learning rate times the largest eigenvalue of the Hessian is
above 2, and above 2 (1 + momentum) with momentum: how close this training comes to that is printed. Writes the lines
and a picture.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from saltflat.datasets import read_data
from saltflat.integrations import JsonLines, Monitor

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
EPOCHS = 8 if QUICK else 120
BATCH = 64
LEARNING_RATE, MOMENTUM = 0.05, 0.9
# Measuring time over training time: this training takes seconds, and the quick one less than a measurement. For longer
# ones a few percent do.
CAP = None if QUICK else 0.5
PROBE = 100  # examples
EVERY = "20 steps" if QUICK else "150 steps"


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 10)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="With SALTFLAT_QUICK=1 in the environment training stops after 8 epochs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    try:  # now, not after all the work
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        parser.error(f"cannot write to --out {out} ({error.strerror}); name a folder you can write to")

    inputs, labels = read_data("digits")
    torch.manual_seed(arguments.seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    lines = out / "flatness.jsonl"
    lines.unlink(missing_ok=True)
    with Monitor(
        model,
        (inputs[:PROBE], labels[:PROBE]),
        ["hessian_trace", "kappa_trace", "fisher_trace"],
        every=EVERY,
        cap=CAP,
        optimizer=optimizer,
        loggers=[JsonLines(lines)],
        table=True,
    ) as monitor:
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(labels)).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
                monitor.after_step()
            monitor.after_epoch()
        monitor.measure()  # the end of the training, whatever the schedule says

    steps = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    largest = max(steps, key=lambda line: float(line["flatness/lr_lambda_max"]))
    print(
        f"\nMeasured {len(steps)} times in {monitor.step} steps, for {monitor.share:.1%} of the training time; "
        f"{monitor.num_skipped} times it was due and would have cost too much then."
    )
    for name, line in {"largest": largest, "last": steps[-1]}.items():
        value, edge = line["flatness/lr_lambda_max"], line["flatness/lr_lambda_max_threshold"]
        side = f"below {edge:.3g}: stable" if value < edge else f"above {edge:.3g}: too large for a parabola"
        print(f"lr * lambda_max, {name} (step {line['step']}): {value:.3f}, {side}")
    monitor.plot(out / "flatness.png")
    print(f"The lines are in {lines}, a picture in {out / 'flatness.png'}.")


if __name__ == "__main__":
    main()
