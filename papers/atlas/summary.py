"""The answers over all kinds of network: on how many of them a finding holds."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

from analysis import NORM, PASSES, Estimate
from parts import ARMS, CONTROLS, MEASURES, Part

Analyses = Mapping[str, dict[str, Any]]
FLAT = tuple(name for name in MEASURES if name not in CONTROLS)
# Changes whose survival is summed up, and the words for them.
CHANGES = {
    "seed": "with another seed",
    PASSES["examples"]: "on other examples",
    "label_noise": "with label noise",
    "optimizer": "with another optimizer",
    "trained past the target": "trained past the target",
}


def is_above(found: Estimate | None) -> bool:
    """Return whether an interval lies above zero."""
    return found is not None and found[1] is not None and found[1] > 0


def is_below(found: Estimate | None) -> bool:
    """Return whether an interval lies below zero."""
    return found is not None and found[2] is not None and found[2] < 0


def list_counts(counts: Mapping[str, int], kinds: int) -> str:
    """List names with the number of kinds of network, the most frequent first.

    >>> list_counts({"rho": 1, "kappa": 3}, 3)
    '`kappa` (3 of 3), `rho` (1)'
    """
    ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    texts = [
        f"`{name}` ({number}{f' of {kinds}' if not place else ''})" for place, (name, number) in enumerate(ordered)
    ]
    return ", ".join(texts) or "none"


def format_range(values: list[float], style: str = ".2f") -> str:
    """Format the smallest and the largest value.

    >>> format_range([0.5, 0.25]), format_range([0.5])
    ('0.25 to 0.50', '0.50')
    """
    ends = [format(each, style) for each in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def count_leads(kinds: list[dict[str, Any]], names: tuple[str, ...]) -> Counter[str]:
    """Count the kinds of network on which a measure is clearly ahead of the squared norm and the training loss."""
    return Counter(name for each in kinds for name in names if is_above(each["leads"].get(name)))


def sum_up_leads(kinds: list[dict[str, Any]]) -> str:
    """Say which measures are ahead of the norm and the training loss, and on how many kinds."""
    flat, controls = count_leads(kinds, FLAT), count_leads(kinds, CONTROLS)
    none = sum(not any(is_above(each["leads"].get(name)) for name in FLAT) for each in kinds)
    told = "on every kind, at least one measure of flatness is clearly ahead"
    told = told if not none else f"on {none} of {len(kinds)} kinds, no measure of flatness is clearly ahead"
    told += " of the squared norm and the training loss"
    return (
        f"{told}. Kinds on which a measure is: {list_counts(flat, len(kinds))}. "
        f"Controls: {list_counts(controls, len(kinds))}."
    )


def sum_up_rescaling(kinds: list[dict[str, Any]]) -> str:
    """Say whose correlation with the gap rescaling changes."""
    changed = [each["rescaled"] for each in kinds if each["rescaled"]]
    counts: Counter[str] = Counter()
    for each in changed:
        differences = {name: one["difference"] for name, one in each.items() if one is not None}
        counts.update(name for name, one in differences.items() if is_above(one) or is_below(one))
    kept = [name for name in FLAT if all((each.get(name) or {}).get("difference", [1])[0] == 0 for each in changed)]
    told = f"tau-b clearly changes for {list_counts(counts, len(changed))}"
    return f"{told}, and stays exactly as it is on all kinds for {len(kept)} of {len(FLAT)} measures of flatness."


def sum_up_survival(kinds: list[dict[str, Any]]) -> str:
    """Say how much of its order the median measure keeps under each change."""
    told = []
    for change, words in CHANGES.items():
        medians, gaps = [], []
        for each in kinds:
            survivals = each["fragility"].get(change, {}).get("survivals", {})
            taus = [survivals[name]["tau"][0] for name in FLAT if name in survivals]
            taus = [tau for tau in taus if tau is not None]
            if taus:
                medians.append(median(taus))
                gaps.append(survivals["gap_error"]["tau"][0])
        known = [each for each in gaps if each is not None]
        if medians:
            gap = f", the gap {format_range(known)}" if known and change != PASSES["examples"] else ""
            told.append(f"{format_range(medians)} {words}{gap}")
    return f"the median measure of flatness keeps, as tau-b, {'; '.join(told)}."


def sum_up_costs(kinds: list[dict[str, Any]]) -> str:
    """Say how many pairs the best measure orders rightly, what it costs, and what the norm does."""
    shares: dict[str, list[float]] = {"best": [], "norm": []}
    ratios = []
    for each in kinds:
        taus = {name: each["scores"][name]["kendall_b"][0] for name in (*FLAT, NORM) if name in each["scores"]}
        known = {name: tau for name, tau in taus.items() if tau is not None}
        if each["costs"] is None or not known.keys() - {NORM} or NORM not in known:
            continue
        best = max(known.keys() - {NORM}, key=lambda name: known[name])
        shares["best"].append((1 + known[best]) / 2)
        shares["norm"].append((1 + known[NORM]) / 2)
        ratios.append(each["costs"]["seconds"][best] / each["costs"]["seconds"][NORM])
    if not ratios:
        return "not measured."
    return (
        f"the measure of flatness that is best on a kind orders {format_range(shares['best'], '.0%')} of pairs "
        f"rightly, for {format_range(ratios, '.1f')} times what the squared norm takes, which orders "
        f"{format_range(shares['norm'], '.0%')}. Chosen afterwards, so the best one looks better than it is."
    )


def sum_up_logits(kinds: list[dict[str, Any]]) -> str:
    """Say whose correlation normalized logits change."""
    changed = [each["logits"] for each in kinds if each["logits"]]
    differences = [(name, one["difference"]) for each in changed for name, one in each.items() if one is not None]
    rises, falls = (
        list_counts(Counter(name for name, each in differences if is_it(each)), len(changed))
        for is_it in (is_above, is_below)
    )
    return f"tau-b clearly rises for {rises} and clearly falls for {falls}."


def sum_up_forms(kinds: list[dict[str, Any]]) -> str:
    """Say on how many kinds the forms of normalized sharpness differ from the converged one."""
    told = []
    for name in kinds[0]["forms"]:
        if name in ("normalized_sharpness", "normalized_sharpness_arxiv"):
            continue
        found = [each["forms"][name]["difference"] for each in kinds]
        better, worse = sum(map(is_above, found)), sum(map(is_below, found))
        told.append(
            f"`{name}` correlates clearly better than the converged form on {better} of {len(kinds)} kinds and clearly "
            f"worse on {worse}"
        )
    return f"{'; '.join(told)}."


SUMMARIES: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "Beyond the norm and the loss": sum_up_leads,
    "Rescaled at random": sum_up_rescaling,
    "Fragility": sum_up_survival,
    "Cost of a correct pair": sum_up_costs,
    "Normalized logits": sum_up_logits,
    "Forms of normalized sharpness": sum_up_forms,
}


def write_summary(parts: Mapping[str, Part], analyses: Analyses) -> Iterator[str]:
    """Yield a sentence for each question over all kinds of network, if there are several."""
    arms: dict[str, dict[str, dict[str, Any]]] = {arm: {} for arm in ARMS}
    for name, found in analyses.items():
        if "scores" in found:
            arms[parts[name].arm][parts[name].title] = found
    kinds = list(arms["equal-loss"].values())
    if len(kinds) < 2:
        return
    titles = list(arms["equal-loss"])
    yield f"In short, over {len(kinds)} kinds of network ({'; '.join(titles)}), stopped at one training loss:"
    yield ""
    for number, (question, sum_up) in enumerate(SUMMARIES.items(), 1):
        yield f"{number}. **{question}**: {sum_up(kinds)}"
    if len(arms["equal-epochs"]) > 1:
        yield ""
        yield f"After equal epochs, question 1: {sum_up_leads(list(arms['equal-epochs'].values()))}"
    yield ""
