"""Compute the spectrum of a network's Hessian: a few sharp directions, a bulk around zero, and negative curvature.

A small MLP is trained on the 8 x 8 digits that ship with scikit-learn. The largest and smallest eigenvalues of its
Hessian and the spectral density are computed before and after training, and the largest eigenvalues of every layer.
"""

import os

import torch
from common import parse_arguments, train
from torch import nn

import saltflat
from saltflat.datasets import read_data

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
EPOCHS = 4 if QUICK else 15
EXAMPLES = 100 if QUICK else 1000
DRAWS, STEPS = (3, 15) if QUICK else (8, 50)


def main() -> None:
    out, seed = parse_arguments(
        __doc__, quick="there are fewer epochs, examples and probes", seed="weights, batches and probes"
    )
    inputs, labels = read_data("digits")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    data = inputs[:EXAMPLES].double(), labels[:EXAMPLES]

    model.double()
    before = saltflat.compute_spectrum(model, data, draws=DRAWS, steps=STEPS, seed=seed)
    model.float()
    train(model, inputs, labels, EPOCHS, seed)
    model.double()
    after = saltflat.compute_spectrum(model, data, draws=DRAWS, steps=STEPS, seed=seed)
    after.save(out / "spectrum.json")
    after.plot().savefig(out / "spectrum.png", dpi=150)
    print(f"{after}\n")
    for name, found in (("at the start", before), ("trained", after)):
        high, low = found.eigenvalues[0], found.eigenvalues[-1]
        print(f"{name:12}  loss {found.loss:.3g}, eigenvalues from {low:.3g} to {high:.3g}, trace {found.trace:.3g}")

    layers = saltflat.compute_spectrum(model, data, k=3, matrix="gauss_newton", per="layer", draws=DRAWS, steps=STEPS)
    print(f"\n{layers}\n\nPictures are in {out}: spectrum.png of the network, spectrum_layers.png of its layers.")
    layers.plot().savefig(out / "spectrum_layers.png", dpi=150)


if __name__ == "__main__":
    main()
