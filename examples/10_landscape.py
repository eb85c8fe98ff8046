"""Plot the loss around a network's weights, and see which of these slices rescaling changes.

A small MLP is trained on the 8 x 8 digits that ship with scikit-learn. Its loss is plotted over the plane of two random
directions, and along the sharpest direction, where the slice has the Hessian's largest eigenvalue as its curvature.
Then whole layers, and single units, are rescaled without changing the function: plain random slices change, slices with
normalized filters change with the units only, and slices with normalized entries do not change.
"""

import os
from typing import Any

import numpy as np
import torch
from common import parse_arguments, train
from torch import nn

import saltflat
from saltflat.datasets import read_data
from saltflat.landscape import plot_together

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
EPOCHS = 6 if QUICK else 20
EXAMPLES = 200 if QUICK else 1000
POINTS = 11 if QUICK else 41

SLICES: dict[str, dict[str, Any]] = {
    "length 1": {"directions": "random", "normalize": "length"},
    "by filter": {"directions": "filter"},
    "by entry": {"directions": "random", "normalize": "entry"},
}


def main() -> None:
    out, seed = parse_arguments(
        __doc__, quick="there are fewer epochs, examples and points", seed="weights, batches and directions"
    )
    inputs, labels = read_data("digits")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))
    train(model, inputs, labels, EPOCHS, seed)
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
