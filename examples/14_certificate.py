"""Certify the error of a network: "with probability 95 %, it errs on at most ... % of new data".

A network is trained on two thirds of the handwritten digits and certified on the rest, which it has not seen. It is its
own prior, so a plain test on the rest says more about it. A network that has learned from all digits cannot be tested
on them, but certified, with three kinds of prior. A prior that has seen the examples is refused. The same on the
command line, for a network in a file:

    saltflat certify --model my_model:build --weights trained.safetensors --data mnist \\
        --prior prior.safetensors --prior-data first:40000
"""

import os
from copy import deepcopy

import torch
from common import parse_arguments, train
from torch import nn

import saltflat
from saltflat.datasets import read_data

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
EPOCHS = 3 if QUICK else 40
DRAWS = 2 if QUICK else 50


def main() -> None:
    out, seed = parse_arguments(__doc__, quick="training stops after 3 epochs", seed="weights and draws")
    inputs, labels = read_data("digits")
    # They come sorted by writer: shuffled, the certified ones are drawn from where new ones come from.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    inputs, labels = inputs[order], labels[order]
    seen = range(len(labels) * 2 // 3)
    torch.manual_seed(seed)
    initial = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = deepcopy(initial)
    train(model, inputs[: len(seen)], labels[: len(seen)], EPOCHS, seed)

    # The examples at these positions are left out of the bound.
    certificate = saltflat.certify_error(model, (inputs, labels), prior=model, prior_data=seen, draws=DRAWS, seed=seed)
    print(
        "With probability 95 %, a network whose weights are drawn anew for every prediction, around the trained ones, "
        f"errs on at most {100 * certificate.value:.1f} % of new digits."
    )
    for term, value in certificate.terms.items():
        print(f"  {term:<38}{value:>10.4f}")
    certificate.save(out / "certificate.json")
    certificate.to_html(out / "certificate.html")

    tuned = deepcopy(model)
    train(tuned, inputs, labels, max(1, EPOCHS // 4), seed)
    others = {
        "prior trained on two thirds": saltflat.certify_error(
            tuned, (inputs, labels), prior=model, prior_data=seen, draws=DRAWS, seed=seed
        ),
        "prior at the initial weights": saltflat.certify_error(
            tuned, (inputs, labels), prior=initial, prior_data="none", draws=DRAWS, seed=seed
        ),
        "prior at zero": saltflat.certify_error(tuned, (inputs, labels), draws=DRAWS, seed=seed),
    }
    print("\nThe network after training on all digits:")
    for name, bound in others.items():
        kl = bound.terms["KL divergence (nats)"] / bound.examples
        said = ", vacuous" * bound.is_vacuous
        print(f"  {name}: at most {100 * bound.value:.1f} %, {kl:.2g} nats per example{said}")
    try:
        saltflat.certify_error(tuned, (inputs, labels), prior=tuned, prior_data="none")
    except saltflat.SaltflatError as error:
        print(f"\nA prior that has seen the examples is refused: {error}")
    certificate.plot(others).savefig(out / "certificate.png", dpi=150)
    print(f"\nThe certificate with every assumption: {out}/certificate.html. All of them: {out}/certificate.png.")


if __name__ == "__main__":
    main()
