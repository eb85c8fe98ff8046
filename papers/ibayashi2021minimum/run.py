"""Ibayashi et al.'s experiments: does minimum sharpness correlate with the gap, and what does its exact trace save?

    python papers/ibayashi2021minimum/run.py                  train and measure both networks, draw
    python papers/ibayashi2021minimum/run.py --scale smoke    half a minute on a CPU, to see that it runs
    python papers/ibayashi2021minimum/run.py estimators       Figures 1 and 3: time and errors, an hour on one CPU core
    python papers/ibayashi2021minimum/run.py table            what was found, beside the paper's archived values
    python papers/ibayashi2021minimum/run.py figures          draw again from the rows
    python papers/ibayashi2021minimum/run.py page             put the tables into README.md

MNIST has to be in data/ (or the folder that SALTFLAT_DATA names) as torchvision lays it out. If interrupted, a run
resumes where it stopped.
"""

import argparse
import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import estimators
import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import kendalltau, pearsonr

import saltflat
from saltflat.results.files import write_json
from saltflat.studies import Results, Study
from saltflat.studies.rebuild import load_trained_network
from saltflat.studies.scores.correlation import resample_pearson
from saltflat.studies.scores.layout import compute_interval, draw_resamples

HERE = Path(__file__).parent
CLAIMS = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))["claim"]
# The paper's baseline is normalized sharpness in the form of its first version, twice ours.
MEASURES = ("minimum_sharpness", "normalized_sharpness", "normalized_sharpness_arxiv", "hessian_trace", "squared_norm")
COLLAPSED = 0.2  # training accuracy below this: the network gives (nearly) the same answer to everything
FITTED = 0.01  # training error up to which the labels count as fitted
CLOSE = 0.25  # relative difference from an archived mean that counts as reproduced
RESAMPLES = 2000
LR = {"ibayashi_mlp": 0.1, "ibayashi_lenet": 0.03}
EPOCHS = {"ibayashi_mlp": 800, "ibayashi_lenet": 160}
# Sharpness is taken on all 60,000 training images. In float64 that takes 9 s of an H200 for one LeNet, in float32 2.
MEASURE = {
    "ibayashi_mlp": {"examples": 60_000, "dtype": "float64"},
    "ibayashi_lenet": {"examples": 60_000, "dtype": "float32", "memory": "16GiB"},
}


def study(network: str, scale: str) -> Study:
    """Return the authors' recipe: SGD, batches of 1024, lr / (1 + 1e-4 step), permuted labels."""
    small = scale == "smoke"
    ratios = (0.0, 0.5, 1.0) if small else CLAIMS[0]["ratios"]
    return Study(
        name=f"ibayashi2021-{network}-{scale}",
        data={"name": "mnist", "normalize": "half", **({"train_limit": 300, "test_limit": 500} if small else {})},
        network=network,
        axes={"label_noise": list(ratios)},
        seeds=2 if small else 5,
        settings={
            "optimizer": "sgd",
            "lr": LR[network],
            "momentum": 0.9,
            "weight_decay": 1e-5,
            "batch_size": 100 if small else 1024,
            "schedule": "inverse",
            "decay": 1e-4,
            "label_noise_kind": "permuted",
            "dtype": "tf32",
        },
        stop={"epochs": 5 if small else EPOCHS[network]},
        measures=MEASURES,
        measure={"examples": 20, "dtype": "float64"} if small else MEASURE[network],
    )


class Found:
    """The trained networks of one architecture, as arrays, with those that collapsed marked."""

    def __init__(self, folder: Path) -> None:
        self.results = Results.load(folder)
        done = [(row, row.outcome) for row in self.results.rows.values() if row.outcome is not None and row.readings]
        self.rows = [row for row, _ in done]
        self.epochs = sorted({outcome.epochs for _, outcome in done})
        self.ratio = np.array([row.config["label_noise"] for row in self.rows])
        self.gap = np.array([row.gap["error"] for row in self.rows])
        self.error = np.array([outcome.train_error for _, outcome in done])
        self.collapsed = 1 - self.error < COLLAPSED
        self.fitted = self.error <= FITTED

    def values(self, measure: str) -> np.ndarray[Any, Any]:
        return np.array([row.readings[measure].value for row in self.rows])

    def mean(self, values: np.ndarray[Any, Any], ratio: float) -> float:
        chosen = values[(self.ratio == ratio) & ~self.collapsed]
        return float(chosen.mean()) if len(chosen) else float("nan")


def precision(folder: Path, data: Path, device: str) -> dict[str, dict[str, float]]:
    """Return the relative differences from float64, for one network each with 0, 50 and 100 % random labels."""
    results, differences = Results.load(folder), {}
    examples = results.study.data.examples(str(data))
    for row in results.rows.values():
        if row.config["seed"] != 0 or row.config["label_noise"] not in (0.0, 0.5, 1.0) or not row.readings:
            continue
        made = load_trained_network(results, row.key, examples)
        inputs, labels = made.inputs.to(device, torch.float64), made.labels.to(device)
        report = saltflat.measure(
            made.model.to(device, torch.float64),
            (inputs, labels),
            measures=list(MEASURES),
            memory="16GiB",
            certificate=False,
            progress=False,
        )
        differences[row.key] = {name: row.readings[name].value / report[name].value - 1 for name in MEASURES}
    return differences


def table(claim: dict[str, Any], found: Found, rounding: Path) -> Iterator[str]:
    """Yield the README's lines for one network."""
    yield f"### {claim['where']}: {claim['network']}"
    yield ""
    yield (
        f"{len(found.rows)} networks, {int(found.collapsed.sum())} collapsed (those are left out of the means), "
        f"{int((~found.fitted).sum())} with more than {FITTED:.0%} training error; "
        f"{' or '.join(map(str, found.epochs))} epochs (the paper: {claim['epochs']})."
    )
    if rounding.exists():
        differences = json.loads(rounding.read_text(encoding="utf-8"))
        most = max(abs(each) for one in differences.values() for each in one.values())
        yield (
            f"Measured in float32. Of the {len(differences)} networks that were measured in float64, too, no number "
            f"differs by more than {most:.2g} of itself."
        )
    yield ""
    yield (
        "| random labels | networks | minimum sharpness, here | archived | normalized sharpness (arXiv form), here "
        "| archived, not converged | gap, here | archived | largest training error |"
    )
    yield "| --- " * 9 + "|"
    sharpness, normalized = found.values("minimum_sharpness"), found.values("normalized_sharpness_arxiv")
    for ratio in sorted(set(found.ratio)):
        here = [found.mean(values, ratio) for values in (sharpness, normalized, found.gap)]
        place = claim["ratios"].index(ratio)
        archived = [claim[key][place] for key in ("ms", "ns", "gap")]
        chosen = found.ratio == ratio
        cells = [f"{ratio:g}", str(int((chosen & ~found.collapsed).sum()))]
        for mine, theirs in zip(here, archived, strict=True):
            cells += [f"{mine:.3g}" if mine < 1000 else f"{mine:.0f}", f"{theirs:g}"]
        yield "| " + " | ".join([*cells, f"{found.error[chosen].max():.2%}"]) + " |"
    yield ""
    yield "| correlation with the gap | Pearson, here | archived | Kendall, here | archived | verdict |"
    yield "| --- " * 6 + "|"
    for name, short in {"minimum_sharpness": "ms", "normalized_sharpness_arxiv": "ns"}.items():
        yield correlations(name, found.values(name), found, claim, short)
    for name in ("hessian_trace", "squared_norm"):
        yield correlations(name, found.values(name), found, claim)
    yield correlations("share of random labels (control)", found.ratio, found, claim)
    yield ""


def correlations(title: str, x: np.ndarray[Any, Any], found: Found, claim: dict[str, Any], short: str = "") -> str:
    """Yield a measure's row, and one for the networks that fitted their labels if some did not."""
    lines = []
    for name, chosen in {"": np.ones(len(x), dtype=bool), ", fitted networks alone": found.fitted}.items():
        if (name and found.fitted.all()) or chosen.sum() < 4:
            continue
        one, other = pearsonr(x[chosen], found.gap[chosen]), kendalltau(x[chosen], found.gap[chosen])
        pearson, chance, kendall = float(one.statistic), float(one.pvalue), float(other.statistic)
        archived = [f"{claim[f'{short}_{kind}']:.3f}" if short else "" for kind in ("pearson", "kendall")]
        judged = verdict(pearson, chance, chosen, found, claim, short) if short else ""
        lines.append(f"| {title}{name} | {pearson:.3f} | {archived[0]} | {kendall:.3f} | {archived[1]} | {judged} |")
    return "\n".join(lines)


def verdict(
    pearson: float, chance: float, chosen: np.ndarray[Any, Any], found: Found, claim: dict[str, Any], short: str
) -> str:
    """Return the verdict: reproduced within 0.1 of the archived number, if the networks are comparable."""
    same_sign = "same sign" if pearson > 0 and chance < 0.05 else "not reproduced"
    shares, unfitted = len(set(found.ratio[chosen])), int((chosen & ~found.fitted).sum())
    reasons = []
    if short == "ns":
        reasons.append("the archived number had not converged")
    if unfitted:
        reasons.append(f"{unfitted} of {len(found.rows)} networks have not fitted their labels")
    if shares < len(claim["ratios"]):
        reasons.append(f"{shares} of {len(claim['ratios'])} shares")
    if reasons:
        return f"{same_sign}; not comparable in size: {', '.join(reasons)}"
    return "reproduced" if abs(pearson - claim[f"{short}_pearson"]) <= 0.1 else same_sign


def compute_lead(found: Found, chosen: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Return by how much normalized sharpness correlates better than minimum sharpness, with a 95 % interval."""
    values = [found.values(name)[chosen] for name in ("normalized_sharpness_arxiv", "minimum_sharpness")]
    times = draw_resamples(np.arange(chosen.sum()), RESAMPLES, seed=0)
    normalized, minimum = resample_pearson(np.stack(values), found.gap[chosen], times)
    lead = normalized - minimum
    return float(lead[0]), *compute_interval(lead[1:])


def verdicts(networks: dict[str, Found], out: Path) -> Iterator[str]:
    """Yield a row for every claim."""
    yield "## Verdicts"
    yield ""
    yield "| claim | archived | here | verdict |"
    yield "| --- | --- | --- | --- |"
    for claim in CLAIMS:
        found = networks.get(claim["network"])
        if found is None or found.fitted.sum() < 4:
            continue
        sharpness, shown, judged = found.values("minimum_sharpness"), [], []
        for title, chosen in {"fitted": found.fitted, "all": np.ones(len(found.gap), dtype=bool)}.items():
            one = pearsonr(sharpness[chosen], found.gap[chosen])
            which = f"all {chosen.sum()}" if title == "all" else f"{chosen.sum()} that fitted their labels"
            shown.append(f"{one.statistic:.2f} ({which})")
            verdict_of = verdict(float(one.statistic), float(one.pvalue), chosen, found, claim, "ms").partition(";")[0]
            judged.append(f"{verdict_of} over {'those that fitted their labels' if title == 'fitted' else 'all'}")
        if found.fitted.all():
            shown, judged = shown[1:], [judged[1].partition(" over")[0]]
        yield (
            f"| {claim['where']}: minimum sharpness correlates with the gap | {claim['ms_pearson']:.2f} | "
            f"{', '.join(shown)} | **{', '.join(judged)}** |"
        )
        lead, low, high = compute_lead(found, found.fitted)
        better = "normalized" if lead > 0 else "minimum"
        same = "reproduced" if low <= 0 <= high else f"not reproduced: {better} sharpness correlates better"
        archived = f"{claim['ns_pearson']:.2f} (not converged) against {claim['ms_pearson']:.2f}"
        yield (
            f"| {claim['where']}: at the same level as normalized sharpness | {archived} | "
            f"converged, ahead by {lead:.2f} [{low:.2f}, {high:.2f}] | **{same}** |"
        )
        ratios = {
            ratio: found.mean(sharpness, ratio) / claim["ms"][claim["ratios"].index(ratio)]
            for ratio in sorted(set(found.ratio))
        }
        off = [ratio for ratio, value in ratios.items() if abs(value - 1) > CLOSE]
        judged_values = "reproduced" if not off else f"not reproduced at {len(off)} of {len(ratios)} shares"
        yield (
            f"| {claim['where']}: the means of minimum sharpness | | {min(ratios.values()):.2f} to "
            f"{max(ratios.values()):.2f} times the archived ones | **{judged_values}** |"
        )
    if estimators.load_all(out):
        yield from estimators.write_verdicts(out)
    yield ""


def draw_shares(networks: dict[str, Found], path: Path) -> None:
    """Draw gap and sharpness against the share of random labels, on linear axes: a row for each network."""
    claims = [claim for claim in CLAIMS if claim["network"] in networks]
    figure = Figure(figsize=(11, 3.3 * len(claims)), layout="constrained")
    for axes, claim in zip(figure.subplots(len(claims), 3, squeeze=False), claims, strict=True):
        found = networks[claim["network"]]
        panels = {
            "gap, test error - training error": (found.gap, "gap"),
            "minimum sharpness": (found.values("minimum_sharpness"), "ms"),
            "normalized sharpness (arXiv form)": (found.values("normalized_sharpness_arxiv"), "ns"),
        }
        for axis, (title, (values, key)) in zip(axes, panels.items(), strict=True):
            good = found.fitted
            axis.plot(found.ratio[good], values[good], "o", ms=3, color="#0072b2", label="here")
            if not good.all():
                axis.plot(found.ratio[~good], values[~good], "x", color="#d55e00", label="here, labels not fitted")
            label = "archived means" + (", not converged" if key == "ns" else "")
            axis.plot(claim["ratios"], claim[key], "k-", lw=1, label=label)
            axis.set_title(f"{claim['where']}: {title}", fontsize=9)
            axis.set_ylim(0, 1.15 * max(*values[good], *claim[key]))  # one that did not fit can be far above
            axis.legend(fontsize=7, frameon=False)
            axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("share of random labels", fontsize=9)
    figure.savefig(path, dpi=90)


def draw(claim: dict[str, Any], found: Found, path: Path) -> None:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    shown = {"minimum_sharpness": "ms", "normalized_sharpness_arxiv": "ns"}
    kinds = {
        "here": (found.fitted, "o"),
        "here, labels not fitted": (~found.fitted & ~found.collapsed, "^"),
        "here, collapsed": (found.collapsed, "x"),
    }
    for axes, (name, key) in zip(figure.subplots(1, 2), shown.items(), strict=True):
        values = found.values(name)
        for label, (chosen, marker) in kinds.items():
            if chosen.any():
                x, y, shade = values[chosen], found.gap[chosen], found.ratio[chosen]
                points = axes.scatter(x, y, c=shade, vmin=0, vmax=1, s=20, marker=marker, label=label)
        axes.plot(claim[key], claim["gap"], "k+", label="archived means" + (" (not converged)" if key == "ns" else ""))
        axes.set_xscale("log")
        axes.set_xlabel(name)
        axes.set_ylabel("test error - training error")
        axes.legend(fontsize=8)
    figure.colorbar(points, ax=figure.axes, label="share of random labels")
    figure.suptitle(claim["where"])
    figure.savefig(path, dpi=80)


def load(out: Path) -> dict[str, Found]:
    """Return the networks of both figures, where there are rows."""
    folders = {claim["network"]: out / claim["network"] for claim in CLAIMS}
    return {network: Found(folder) for network, folder in folders.items() if folder.exists()}


def write_tables(out: Path) -> Iterator[str]:
    """Yield the page's tables."""
    networks = load(out)
    if networks:
        yield from verdicts(networks, out)
        yield "## The tables"
        yield ""
    for claim in CLAIMS:
        if claim["network"] in networks:
            yield from table(claim, networks[claim["network"]], out / f"{claim['network']}_rounding.json")
    if estimators.load_all(out):
        yield from estimators.write_table(out)


def draw_all(out: Path) -> None:
    """Draw all figures."""
    networks = load(out)
    for claim in CLAIMS:
        if claim["network"] in networks:
            draw(claim, networks[claim["network"]], out / f"{claim['network']}.png")
    if networks:
        draw_shares(networks, out / "shares.png")
    if estimators.load_all(out):
        estimators.draw_figure(out)


def write_page(table: str) -> None:
    """Replace what stands between the two marks of the page by the table."""
    path, begin, end = HERE / "README.md", "<!-- table -->\n", "<!-- end of table -->\n"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    path.write_text(f"{before}{begin}\n{table.strip()}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "estimators", "table", "figures", "page"), default="all")
    parser.add_argument("--networks", nargs="+", choices=tuple(LR), default=list(LR))
    parser.add_argument("--scale", choices=("full", "smoke"), default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SALTFLAT_DATA", "data")))
    parser.add_argument("--out", type=Path, help="where rows go; results/ beside this script, or demo/ for smoke")
    given = parser.parse_args(words)
    if given.what == "page" and (given.scale == "smoke" or given.out is not None):
        parser.error("Expected the rows in results/ for the page, but got --scale smoke or --out. Try table instead.")
    out = given.out or (HERE / "results" if given.scale == "full" else Path("demo") / HERE.name)
    for network in given.networks if given.what == "all" else ():
        folder, rounding = out / network, out / f"{network}_rounding.json"
        asked = study(network, given.scale)
        asked.run(folder, device=given.device, data_folder=given.data)
        if asked.measure_options["dtype"] == "float32" and not rounding.exists():
            write_json(precision(folder, given.data, given.device), rounding)
    if given.what == "estimators":
        estimators.measure_all(out, given.data, given.scale)
    if given.what in ("all", "estimators", "figures"):
        draw_all(out)
    if given.what == "page":
        write_page("\n".join(write_tables(out)))
    else:
        print("\n".join(write_tables(out)))


if __name__ == "__main__":
    main()
