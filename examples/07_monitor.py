"""Monitor flatness during training, and how close the learning rate is to the stability threshold.

A small network learns the 8 x 8 digits that ship with scikit-learn, in a plain PyTorch loop. A Monitor measures on
100 fixed examples every few steps, within a share of the training time, prints a table, and appends a line to a file
every time. Gradient descent on a parabola diverges if its learning rate times the largest eigenvalue of the Hessian is
above 2, and above 2 (1 + momentum) with momentum; the example prints how close this training comes to that. Writes the
lines and a picture.
"""

import json
import os

import torch
import torch.nn.functional as F
from common import parse_arguments
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
    out, seed = parse_arguments(__doc__, quick="training stops after 8 epochs", seed="weights and batches")
    inputs, labels = read_data("digits")
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    lines = out / "flatness.jsonl"
    lines.unlink(missing_ok=True)
    with Monitor(
        model,
        (inputs[:PROBE], labels[:PROBE]),
        measures=["hessian_trace", "kappa_trace", "fisher_trace"],
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
