"""The answers as Markdown: a sentence for each question and part, and the tables behind them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from analysis import LOSS, NEGATED, NORM, SCORES, Estimate, analyze_part, format_seconds
from parts import ARMS, CONTROLS, MEASURES, Part
from summary import is_above, is_below, write_summary

MISSING = "not tested (no rows yet)"
FEW = "not tested (too few networks were measured again)"
HEADINGS = {
    "kendall_b": "Kendall's tau-b",
    "granulated": "granulated",
    "cmi": "CMI",
    "pgdl": "PGDL",
    "sign_error_mean": "sign error",
}
QUESTIONS = (
    "Does any measure beat the squared norm and the training loss when networks stop at equal loss?",
    "What do random rescalings of the trained networks do to the ranking?",
    "How fragile is a measure?",
    "What does a correct pair cost?",
    "Does normalizing the logits change the answer?",
    "Does converged normalized sharpness differ from the printed and the unconverged one?",
)
Analyses = Mapping[str, dict[str, Any]]


def show(found: Estimate | None, digits: int = 2) -> str:
    """Format an estimate with its interval.

    >>> show([0.5, 0.25, None]), show([0.5, 0.25, 0.75]), show([None, None, None])
    ('0.50', '0.50 [0.25, 0.75]', '-')
    """
    if found is None or found[0] is None:
        return "-"
    value, low, high = found
    text = f"{value:.{digits}f}"
    return text if low is None or high is None else f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def label(name: str) -> str:
    """Return the name of a measure as tables have it."""
    return {NEGATED: f"{NEGATED} (negated)", LOSS: "training loss"}.get(name, name)


def find_best(values: Mapping[str, Estimate]) -> str | None:
    """Return the name of the largest estimate, None if there is none."""
    known = {name: each[0] for name, each in values.items() if each[0] is not None}
    return max(known, key=lambda name: known[name]) if known else None


def count(number: int, what: str) -> str:
    """Format a number of things."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def join(names: list[str]) -> str:
    """List names as code."""
    return ", ".join(f"`{name}`" for name in names) or "none"


def answer_lead(found: dict[str, Any]) -> str:
    """Answer whether any measure beats the norm and the training loss."""
    scores, leads = found["scores"], found["leads"]
    ahead = [name for name in leads if is_above(leads[name])]
    own = {name: each for name, each in leads.items() if name not in CONTROLS}
    flat = [name for name in ahead if name in own]
    best = find_best(own)
    told = f"{'yes' if flat else 'no'}: {len(flat)} of {len(own)} measures of flatness"
    told += f" are clearly ahead of both ({join(flat)})" if flat else " are clearly ahead of both"
    if best is not None:
        tau = scores[best]["kendall_b"]
        told += f"; the first is `{best}`, tau-b {show(tau)}, ahead by {show(leads[best])}"
    controls = [name for name in ahead if name in CONTROLS]
    if controls:
        told += f"; so {'is' if len(controls) == 1 else 'are'} the control{'s'[: len(controls) > 1]} {join(controls)}"
    norm, loss = (scores[name]["kendall_b"] for name in (NORM, LOSS))
    return f"{told}. Squared norm {show(norm)}, training loss {show(loss)}."


def answer_rescaled(found: dict[str, Any]) -> str:
    """Answer what rescaling does to rankings."""
    changed = {name: each for name, each in found["rescaled"].items() if each is not None}
    if not changed:
        return FEW
    moved = {name: each["difference"] for name, each in changed.items()}
    lost = [name for name, each in moved.items() if is_below(each) or is_above(each)]
    still = [name for name, each in moved.items() if abs(each[0] or 0.0) < 5e-4]
    worst = max(moved, key=lambda name: abs(moved[name][0] or 0.0))
    one = changed[worst]
    return (
        f"tau-b with the gap stays as it is for {len(still)} of {len(moved)} numbers and clearly changes for "
        f"{join(lost)}; most for `{worst}`, from {show(one['before'])} to {show(one['after'])}, by "
        f"{show(one['difference'])}."
    )


def answer_fragility(found: dict[str, Any]) -> str:
    """Answer how much of the order of measures survives, for the change that matters most and for another seed."""
    shifts = {name: summarize_shift(shift) for name, shift in found["fragility"].items()}
    shifts = {name: each for name, each in shifts.items() if each}
    if not shifts:
        return FEW
    told = []
    if "seed" in shifts:
        seed = shifts["seed"]
        told.append(
            f"of their order with one seed, measures of flatness keep from {seed['least']} to {seed['most']} with "
            f"another, where the gap keeps {seed['gap']}"
        )
    middle = min(shifts, key=lambda name: float(shifts[name]["median"]))
    told.append(
        f"the change that costs most is {middle}: half of the measures keep less than {shifts[middle]['median']}"
    )
    return "; ".join(told) + "."


def summarize_shift(shift: dict[str, Any]) -> dict[str, str]:
    """Return what the measures of flatness keep of their order under one change, as text."""
    each = {key: one for key, one in shift["survivals"].items() if key in MEASURES and key not in CONTROLS}
    known = {key: one["tau"][0] for key, one in each.items() if one["tau"][0] is not None}
    if not known:
        return {}
    best, worst = max(known, key=lambda key: known[key]), min(known, key=lambda key: known[key])
    less = [key for key in known if each[key]["verdict"] == "less than the gap"]
    return {
        "configurations": str(shift["configurations"]),
        "gap": show(shift["survivals"]["gap_error"]["tau"]),
        "most": f"{show(each[best]['tau'])} (`{best}`)",
        "median": f"{median(known.values()):.2f}",
        "least": f"{show(each[worst]['tau'])} (`{worst}`)",
        "less": f"{len(less)} of {len(known)}",
    }


def write_fragility(parts: Mapping[str, Part], analyses: Analyses) -> Iterator[str]:
    """Yield what survives every change, a table per part."""
    for name, found in analyses.items():
        if parts[name].arm != "equal-loss" or not found.get("fragility"):
            continue
        yield ""
        yield f"{parts[name].title}, tau-b between the orders before and after a change, over the measures of flatness:"
        yield ""
        yield "| change | configurations | the gap keeps | most | median | least | clearly less than the gap |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        for shift, each in found["fragility"].items():
            cells = summarize_shift(each)
            if cells:
                order = ("configurations", "gap", "most", "median", "least", "less")
                yield f"| {shift} | {' | '.join(cells[key] for key in order)} |"


def answer_cost(found: dict[str, Any]) -> str:
    """Answer what a correct pair costs: a share (1 + tau) / 2 of pairs is ordered as their gaps are."""
    costs = found["costs"]
    if costs is None:
        return FEW
    seconds = costs["seconds"]
    taus = {name: found["scores"][name]["kendall_b"] for name in seconds if name in found["scores"]}
    best = find_best(taus)
    if best is None:
        return FEW

    def price(name: str) -> str:
        ends = [f"{(1 + each) / 2:.0%}" for each in taus[name] if each is not None]
        between = f" [{ends[1]}, {ends[2]}]" if len(ends) == 3 else ""
        return f"`{name}` orders {ends[0]}{between} of pairs rightly, for {format_seconds(2 * seconds[name])} a pair"

    names = list(dict.fromkeys((best, "normalized_sharpness", "path_norm", NORM)))
    slowest = max(seconds, key=lambda name: seconds[name])
    told = "; ".join(price(name) for name in names if taus[name][0] is not None)
    where = f"{costs['device']}, {costs['examples']} images"
    return f"{told}. A coin orders 50%. The slowest measure: {price(slowest)} ({where})."


def answer_logits(found: dict[str, Any]) -> str:
    """Answer whether normalized logits change the answer."""
    changed = {name: each for name, each in found["logits"].items() if each is not None}
    if not changed:
        return FEW
    up = [name for name, each in changed.items() if is_above(each["difference"])]
    down = [name for name, each in changed.items() if is_below(each["difference"])]
    first, second = (
        find_best({name: each[when] for name, each in changed.items() if name not in CONTROLS})
        for when in ("before", "after")
    )
    told = f"tau-b clearly rises for {join(up)} and falls for {join(down)}, of {len(changed)} numbers"
    if first and second:
        one, two = changed[first]["before"], changed[second]["after"]
        told += f"; the best measure of flatness is `{first}` before, {show(one)}, and `{second}` after, {show(two)}"
    undefined = [name for name, each in found["logits"].items() if each is None]
    if undefined:
        told += (
            ". Not defined for more than a tenth of the networks, where this loss is not convex or shows no classes: "
        )
        told += join(undefined)
    return f"{told}."


def answer_forms(found: dict[str, Any]) -> str:
    """Answer whether the forms of normalized sharpness differ."""
    told = [f"converged {show(found['forms']['normalized_sharpness']['tau'])}"]
    for name, each in found["forms"].items():
        if name in ("normalized_sharpness", "normalized_sharpness_arxiv") or each["tau"][0] is None:
            continue
        clear = is_above(each["difference"]) or is_below(each["difference"])
        kind = "printed" if name == "normalized_sharpness_printed" else f"unconverged (`{name}`)"
        told.append(
            f"{kind} {show(each['tau'])}, {'' if clear else 'not '}clearly different: {show(each['difference'])}"
        )
    return "; ".join(told) + "."


ANSWERS = (answer_lead, answer_rescaled, answer_fragility, answer_cost, answer_logits, answer_forms)


def write_tables(parts: Mapping[str, Part], out: Path) -> Iterator[str]:
    """Yield the answers of all parts, and the tables behind them."""
    analyses = {name: analyze_part(part, out) for name, part in parts.items() if (out / name / "rows.tar.xz").exists()}
    yield from write_summary(parts, analyses)
    yield from write_state(parts, analyses)
    for number, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=True), 1):
        yield ""
        yield f"## {number}. {question}"
        yield ""
        answered = {name: analyses[name] for name, part in parts.items() if is_answered(part, "equal-loss", analyses)}
        for name, found in answered.items():
            yield f"* **{parts[name].title}**: {answer(found)}"
        if not answered:
            yield f"**{MISSING}**"
        if number == 1:
            yield from write_other_arm(parts, analyses)
        if number == 3:
            yield from write_fragility(parts, analyses)
    yield ""
    yield "## All scores"
    for name, found in analyses.items():
        if "scores" in found:
            yield from write_scores(parts[name], found)
    if not any("scores" in found for found in analyses.values()):
        yield from ("", MISSING)
    yield from write_figures(parts, out)


def is_answered(part: Part, arm: str, analyses: Analyses) -> bool:
    """Return whether a part belongs to an arm and has scores."""
    return part.arm == arm and "scores" in analyses.get(part.name, {})


def write_state(parts: Mapping[str, Part], analyses: Analyses) -> Iterator[str]:
    """Yield a table of what was trained."""
    trained = sum(sum(found["statuses"].values()) - found["statuses"]["missing"] for found in analyses.values())
    planned = sum(len(part.build_study().runs()) for part in parts.values())
    yield f"{trained:,} of {planned:,} networks are trained and measured."
    yield ""
    yield "| networks | number | scored | missed the loss | gap of the error | training loss | measured on | seconds |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    missing = []
    for name, part in parts.items():
        title = f"{part.title}, {ARMS[part.arm]}"
        found = analyses.get(name)
        if found is None or "gap" not in found:
            missing.append(title)
            continue
        ended = sum(found["statuses"].values()) - found["statuses"]["missing"]
        ranges = [f"{low:.3g} to {high:.3g}" for low, high in (found["gap"], found["loss"])]
        seconds = f"{found['seconds']['training']:.0f} training, {found['seconds']['measuring']:.0f} measuring"
        cells = [
            str(ended),
            str(found["scored"]),
            str(found["statuses"]["missed"]),
            *ranges,
            "; ".join(found["made_with"]),
        ]
        yield f"| {title} | {' | '.join(cells)} | {seconds} |"
    if missing:
        yield ""
        yield f"**{MISSING[0].upper()}{MISSING[1:]}**: {'; '.join(missing)}."


def write_other_arm(parts: Mapping[str, Part], analyses: Analyses) -> Iterator[str]:
    """Yield the same answers for the networks that were trained for equal epochs."""
    yield ""
    yield "After equal epochs, where the training loss differs:"
    yield ""
    answered = {name: analyses[name] for name, part in parts.items() if is_answered(part, "equal-epochs", analyses)}
    for name, found in answered.items():
        yield f"* **{parts[name].title}**: {answer_lead(found)}"
    if not answered:
        yield f"**{MISSING}**"


def write_scores(part: Part, found: dict[str, Any]) -> Iterator[str]:
    """Yield a table with all scores of a part."""
    yield ""
    yield f"### {part.title}, {ARMS[part.arm]}"
    yield ""
    yield f"| measure | {' | '.join(HEADINGS[name] for name in SCORES)} |"
    yield f"| --- |{' --- |' * len(SCORES)}"
    ordered = sorted(found["scores"].items(), key=lambda each: -(each[1]["kendall_b"][0] or -2.0))
    for name, scores in ordered:
        cells = [show(scores[key], 1 if key == "pgdl" else 2) for key in SCORES]
        yield f"| {label(name)} | {' | '.join(cells)} |"


FIGURES = {
    "ranking": "Kendall's tau-b with the gap; filled: stopped at one training loss, hollow: after equal epochs",
    "rescaled": "Kendall's tau-b with the gap, as trained and after a random rescaling",
    "cost": "Seconds to measure a network by itself, and Kendall's tau-b with the gap",
}


def write_figures(parts: Mapping[str, Part], out: Path) -> Iterator[str]:
    """Yield the figures that are drawn."""
    drawn = {name: title for name, title in FIGURES.items() if (out / f"{name}.png").exists()}
    for part in parts.values():
        if part.arm == "equal-loss" and (out / f"fragility-{part.pair}.png").exists():
            told = "how much of each order survives: tau-b between the orders before and after; the band is the gap's"
            drawn[f"fragility-{part.pair}"] = f"{part.title}, {told}"
    if drawn:
        yield from ("", "## Figures")
    for name, title in drawn.items():
        yield from ("", f"{title}:", "", f"![{title}](results/{name}.png)")
