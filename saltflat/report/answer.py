"""Which network is flatter: what a comparison says in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from saltflat.report.text import join_words
from saltflat.report.verdict import SAME, UNDEFINED, UNJUDGED, WITHIN

if TYPE_CHECKING:
    from saltflat.report.compare import Contrast

HONEST = "that rescaling cannot fool"
# Other forms of a measure would count it twice.
VARIANTS = (
    "normalized_sharpness_arxiv",
    "normalized_sharpness_printed",
    "parameterwise_normalized_sharpness",
    "regularized_normalized_sharpness",
)


def format_answer(contrasts: Iterable[Contrast]) -> str:
    """What the measures that no rescaling of units can change say together; one vote for each, without variants."""
    shared = [each for each in contrasts if len(each.readings) > 1]
    honest = [each for each in shared if "unit_scale" in each.invariant_to and each.name not in VARIANTS]
    judged = [each for each in honest if not set(each.verdicts.values()) & {UNJUDGED, UNDEFINED} and each.sure]
    if not shared:
        return "No measure is in more than one report: nothing to compare."
    if not honest:
        return "None of these measures is invariant to rescaling: no verdict. Measure with measures='invariant'."
    if not judged:
        return f"No verdict: the error of {_format_measure_count(honest, 'each of the')} is not known."
    if all(set(each.verdicts.values()) <= {SAME, WITHIN} for each in judged):
        return f"No difference beyond chance, by {_format_measure_count(judged, 'any of the')}."
    votes = Counter(each.flattest for each in judged if each.flattest is not None)
    silent = len(judged) - sum(votes.values())
    if not votes:
        return f"They differ beyond chance, but none is the flattest, by {_format_measure_count(judged, 'any of the')}."
    (best, count), *others = votes.most_common()
    if others:
        said = join_words([f"{label} by {number}" for label, number in votes.most_common()])
        rest = f"; {silent} {'do' if silent > 1 else 'does'} not tell" if silent else ""
        return f"The {len(judged)} measures {HONEST} disagree on which is flatter: {said}{rest}."
    if not silent:
        return f"{best} is flatter beyond chance, by {_format_measure_count(judged, 'all')}."
    rest = "the other does not tell" if silent == 1 else f"the other {silent} do not tell"
    some = f"{count} of the {len(judged)} measures {HONEST}"
    if 2 * count < len(judged):
        finds = "finds" if count == 1 else "find"
        return f"Little difference: {some} {finds} {best} flatter beyond chance; {rest}."
    return f"{best} is flatter beyond chance, by {some}; {rest}."


def _format_measure_count(contrasts: list[Contrast], quantifier: str) -> str:
    count = len(contrasts)
    return f"the only measure here {HONEST}" if count == 1 else f"{quantifier} {count} measures {HONEST}"
