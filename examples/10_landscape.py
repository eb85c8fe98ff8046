"""Walk away from a network's weights and see how the loss rises, and which of these slices rescaling changes.

A small MLP is trained on the 8 x 8 digits that come with scikit-learn. Its loss is drawn over the plane of two random
directions, and along the sharpest direction, where the slice bends by the Hessian's largest eigenvalue. Then whole
layers, and single units, are rescaled, so that the function stays the same: plain random slices change, those with
normalised filters change with the units only, and those with normalised entries do not change.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat
from saltflat.datasets import read_data
from saltflat.landscape import plot_together

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
EPOCHS = 6 if QUICK else 20
EXAMPLES = 200 if QUICK else 1000
POINTS = 11 if QUICK else 41
BATCH = 64
LEARNING_RATE = 3e-3

SLICES: dict[str, dict[str, Any]] = {
    "length 1": {"directions": "random", "normalize": "length"},
    "by filter": {"directions": "filter"},
    "by entry": {"directions": "random", "normalize": "entry"},
}


def train(model: nn.Module, inputs: Tensor, labels: Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="With SALTFLAT_QUICK=1 in the environment there are fewer epochs, examples and points.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the pictures (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and directions (default: %(default)s)")
    arguments = parser.parse_args()
    out, seed = arguments.out, arguments.seed
    out.mkdir(parents=True, exist_ok=True)

    inputs, labels = read_data("digits")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))
    train(model, inputs, labels, seed)
    model.double()
    data = inputs[:EXAMPLES].double(), labels[:EXAMPLES]

    plane = saltflat.compute_landscape(model, data, dimensions=2, points=POINTS, seed=seed)
    print(f"{plane}\n")
    plane.plot().savefig(out / "landscape.png")
    plane.save(out / "landscape.json")

    sharp = saltflat.compute_landscape(model, data, directions="eigenvectors", points=POINTS, radius=0.05)
    value = sharp.directions[0]["eigenvalue"]
    print(f"Along the sharpest direction the slice bends by {sharp.curvature[0]:.4g}, the eigenvalue is {value:.4g}\n")

    networks = {
        "as trained": model,
        "layers rescaled": saltflat.rescale(model, data[0][:2], kind="layer", seed=seed, spread=1.5),
        "units rescaled": saltflat.rescale(model, data[0][:2], kind="unit", seed=seed, spread=1.5),
    }
    print(
        f"{'largest change of the loss in a slice':40}"
        + "".join(f"{name:>18}" for name in networks if name != "as trained")
    )
    for label, options in SLICES.items():
        slices = {
            name: saltflat.compute_landscape(each, data, points=POINTS, seed=seed, **options)
            for name, each in networks.items()
        }
        first = slices["as trained"].losses
        changes = [np.abs(each.losses - first).max() for name, each in slices.items() if name != "as trained"]
        print(f"{label:40}" + "".join(f"{change:18.1e}" for change in changes))
        plot_together(slices).savefig(out / f"slices_{label.replace(' ', '_')}.png")
    print(f"\nPictures are in {out}: landscape.png over two directions, slices_*.png before and after rescaling.")


if __name__ == "__main__":
    main()
