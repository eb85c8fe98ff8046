"""Train three small networks on handwritten digits, measure how flat their minima are, and try to fool the measures.

The data are the 8 x 8 digits that ship with scikit-learn, so nothing is downloaded. One of the networks is trained on
partly random labels, which it can only memorize. Another is trained again with SAM: did that find a flatter minimum, by
more than chance? Then its layers are rescaled by a factor of 1000. It computes the same function, so a measure that
changes can be fooled. Finally all three are audited: their own rescalings are found, and some measures are computed
again after random ones. Prints the answers, and writes all measures, comparisons and audits as web pages, pictures and
files.
"""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from common import parse_arguments
from torch import Tensor, nn

import saltflat
from saltflat.datasets import read_data
from saltflat.results import Comparison
from saltflat.training import SAM

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
CLASSES = 10
BATCH = 64
LEARNING_RATE = 3e-3
MEASURED = 100 if QUICK else 600  # training examples
FACTOR = 1000.0
RHO = 0.05  # SAM's radius
SHOWN = (
    "squared_norm",
    "hessian_trace",
    "fisher_trace",
    "kappa_trace",
    "normalized_sharpness",
    "rho",
    "fisher_rao_norm",
)
JUDGED = (
    *("normalized_sharpness", "rho", "rho_max", "minimum_unit_sharpness", "fisher_rao_diagonal", "fisher_rao_norm"),
    *("hessian_trace", "squared_norm"),
)
AUDITED = (
    *("adaptive_sharpness", "fisher_rao_norm", "minimum_unit_sharpness", "normalized_sharpness", "rho"),
    *("relative_flatness", "minimum_sharpness", "kappa_trace"),
    *("hessian_trace", "fisher_trace", "fisher_frobenius", "squared_norm"),
)
DRAWS = 2 if QUICK else 5  # of rescalings of each kind
AUDITED_ON = 100  # training examples
UNCHANGED = 1e-6  # relative: what counts as the same number after rescaling


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(inputs)))
        return F.relu(inputs + self.second_norm(self.second(hidden)))


def make_mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


def make_cnn() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
    )


def make_residual_net() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Residual(16), Residual(16)),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 2 * 2, CLASSES)),
    )


@dataclass(frozen=True)
class Plan:
    name: str
    make: Callable[[], nn.Sequential]
    epochs: int
    random_labels: float = 0.0  # the share of training labels replaced by a random class


PLANS = (
    Plan("MLP", make_mlp, epochs=40),
    # Memorizing labels that follow no rule takes longer than learning digits.
    Plan("CNN", make_cnn, epochs=60, random_labels=0.3),
    Plan("ResNet", make_residual_net, epochs=30),
)


def randomize_labels(labels: Tensor, share: float, seed: int) -> Tensor:
    # A random class is the true one in a tenth of the cases, so 30 % random labels are about 27 % wrong ones.
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    changed = labels.clone()
    changed[chosen] = torch.randint(CLASSES, (len(chosen),), generator=generator)
    return changed


def train(model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int, seed: int, rho: float = 0.0) -> None:
    """Train with Adam, wrapped in SAM if ``rho`` is not 0."""
    generator = torch.Generator().manual_seed(seed)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps = epochs * -(-len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps)
    if rho:
        optimizer = SAM(model, optimizer, rho=rho)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs[batch]), labels[batch])
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
            schedule.step()
    model.eval()


def compare_with_sam(
    plain: saltflat.Report, data: tuple[Tensor, Tensor], inputs: Tensor, labels: Tensor, epochs: int, seed: int
) -> Comparison:
    """Train the MLP again with SAM, and compare it with the plain one on the same examples."""
    torch.manual_seed(seed)
    model = make_mlp()
    train(model, inputs, labels, epochs, seed, rho=RHO)
    report = saltflat.measure(model.double(), data)
    return saltflat.compare({"Adam": plain, "SAM": report}, names=list(report))


@torch.no_grad()
def compute_accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    return float((model(inputs).argmax(dim=1) == labels).double().mean())


@torch.no_grad()
def multiply_layers(model: nn.Sequential) -> nn.Sequential:
    """Return the MLP with its first layer multiplied by 1000 and its second divided by 1000: the same function."""
    twin = deepcopy(model)
    twin.get_parameter("1.weight").mul_(FACTOR)
    twin.get_parameter("1.bias").mul_(FACTOR)
    twin.get_parameter("3.weight").div_(FACTOR)
    return twin


def split_by_change(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Return the measures that rescaling changed, and those it did not."""
    changed: list[str] = []
    same: list[str] = []
    for name, contrast in comparison.items():
        before, after = (reading.value for reading in contrast.readings.values())
        (same if abs(after - before) <= UNCHANGED * abs(before) else changed).append(name)
    return changed, same


def audit_networks(models: dict[str, nn.Sequential], data: dict[str, tuple[Tensor, Tensor]], out: Path) -> None:
    """Measure every network again after random rescalings, which do not change its function."""
    print(f"\nAll three under {DRAWS} random rescalings of each kind ({out}/audit_*.png)\n")
    for name, model in models.items():
        # Without BatchNorm, whose running statistics absorb the scale of the layers before it.
        folded = saltflat.fold(model)
        images, labels = data[name]
        audit = saltflat.audit_invariance(
            folded, (images[:AUDITED_ON], labels[:AUDITED_ON]), measures=AUDITED, draws=DRAWS
        )
        audit.save(out / f"audit_{name.lower()}.json")
        audit.plot().savefig(out / f"audit_{name.lower()}.png")
        decades = max(map(abs, audit["hessian_trace"].compute_draw_decades("unit")))
        claims = sum(bool(line.claims) for line in audit.values())
        kept = f"kept the claims of all {claims} measures that have one" if audit.holds else "BROKE A CLAIM"
        print(f"{name}: {kept}; the Hessian trace moved by factors of up to {10**decades:,.0f}")


def main() -> None:
    out, seed = parse_arguments(
        __doc__,
        quick="training stops after 3 epochs, 100 examples are measured, and 2 rescalings of each kind are tried",
        seed="labels, weights and batches",
    )
    inputs, labels = read_data("digits")
    test_inputs, test_labels = read_data("digits", split="test")
    models: dict[str, nn.Sequential] = {}
    reports, data = {}, {}
    for plan in PLANS:
        own = randomize_labels(labels, plan.random_labels, seed)
        torch.manual_seed(seed)
        model = plan.make()
        train(model, inputs, own, min(plan.epochs, 3) if QUICK else plan.epochs, seed)
        print(
            f"{plan.name}: {plan.random_labels:.0%} random labels, accuracy "
            f"{compute_accuracy(model, inputs, own):.1%} on the training set and "
            f"{compute_accuracy(model, test_inputs, test_labels):.1%} on the test set"
        )
        # Networks that fit their data have curvatures so small that float32 loses them.
        data[plan.name] = inputs[:MEASURED].double(), own[:MEASURED]
        reports[plan.name] = saltflat.measure(model.double(), data[plan.name], measures="all", seed=seed)
        reports[plan.name].save(out / f"report_{plan.name.lower()}.json")
        reports[plan.name].to_html(out / f"report_{plan.name.lower()}.html")
        models[plan.name] = model

    epochs = 3 if QUICK else PLANS[0].epochs
    sam = compare_with_sam(reports["MLP"], data["MLP"], inputs, labels, epochs, seed)
    print(f"\nDid SAM find a flatter minimum? ({out}/compare_sam.html)\n")
    print(saltflat.compare(sam.reports, names=JUDGED))

    model, twin, images = models["MLP"], multiply_layers(models["MLP"]), inputs[:MEASURED].double()
    with torch.no_grad():
        before, after = model(images), twin(images)
    off = float((after - before).abs().max() / before.abs().max())
    report = saltflat.measure(twin, (images, labels[:MEASURED]), measures="all", seed=seed)
    report.save(out / "report_mlp_rescaled.json")
    two = saltflat.compare({"MLP": reports["MLP"], "rescaled": report})
    changed, same = split_by_change(two)
    print(
        "\nCan that be trusted? It can by measures that give the same number to the same function. Here are the MLP and"
    )
    print(f"its twin with layers rescaled by {FACTOR:g} (outputs differ by {off:.0e}). ({out}/compare_rescaled.html)\n")
    print(f"Fooled by rescaling: {', '.join(changed)}.\n\nNot fooled: {', '.join(same)}.")

    three = saltflat.compare(reports)
    for name, comparison in {"compare": three, "compare_sam": sam, "compare_rescaled": two}.items():
        comparison.to_html(out / f"{name}.html")
    sam.plot().savefig(out / "compare_sam.png", dpi=150)
    three.plot(SHOWN, by="layer").savefig(out / "compare.png")
    audit_networks(models, data, out)
    print(f"\nOne network with all measures: {out}/report_mlp.html. All three beside each other: {out}/compare.html.")


if __name__ == "__main__":
    main()
