"""Reasons to doubt a comparison of reports, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saltflat.results.jackknife import TOO_SMALL
from saltflat.results.json_codec import JsonValue
from saltflat.results.report import Reading, Report
from saltflat.results.text import join_words, strip_markup
from saltflat.results.verdict import DIFFERENT

if TYPE_CHECKING:
    from saltflat.results.comparison import Contrast


TRAIN_MODE = "The model was in train mode; it was measured in eval mode and restored to train mode."

GUESSING = "no better than guessing"

# The memory limit and the strategy change no number. Another seed is another independent draw, which the errors account
# for. The device is compared separately.
HARMLESS = {
    "memory",
    "results_bytes",
    "example_bytes",
    "strategy",
    "way",
    "seed",
    "progress",
    "device",
    "precision_errors",
}

# Switching modes and back changes no number.
HARMLESS_NOTES = {
    TRAIN_MODE,
    "The model was in train mode; it was measured in eval mode and given back in train mode.",  # before 0.2.0
}

WHY = {
    "columns": "exact values have no error, others do",
    "loss": "curvature of different functions",
    "dtype": "rounding differs",
    "precision": "TF32 keeps three digits",
    "layers": "totals are over different parts",
}


# Losses that differ by more than this factor are not equal.
LOSS_RATIO = 1.1
# At a minimum the gradients of single examples cancel, up to about 1 / examples. Training leaves a little more; beyond
# this fraction it is no minimum.
AGREEMENT = 0.005


def find_doubts(reports: Mapping[str, Report], contrasts: Mapping[str, Contrast]) -> list[str]:
    """Return every reason for caution, the most important first."""
    names = list(contrasts)
    found = [
        *_find_disagreement(reports, "models", lambda r: r.model, "sums over layers grow with the network"),
        *_find_data_doubts(reports),
        *_find_group_doubts(reports),
        *_find_loss_doubts(reports),
        *_find_minimum_doubts(reports),
        *_find_note_doubts(reports),
        *_find_setting_doubts(reports),
        *_find_certificate_doubts(reports),
        *_find_formula_doubts(reports, names),
        *_find_reading_doubts(reports, names),
        *_find_rounding_doubts(reports, contrasts.values()),
        *_find_disagreement(reports, "devices", lambda r: r.device, "rounding differs"),
    ]
    for name in dict.fromkeys(name for report in reports.values() for name in report.versions):
        found += _find_disagreement(reports, f"versions of {name}", _make_entry_getter("versions", name), "")
    return found


def find_reservations(reports: Mapping[str, Report]) -> list[str]:
    """Return what weakens a verdict, in a few words each."""
    found = {
        "the models differ": _find_disagreement(reports, "models", lambda r: r.model, ""),
        "the loss functions differ": _find_disagreement(reports, "losses", _make_entry_getter("settings", "loss"), ""),
        "the examples differ": _find_data_doubts(reports),
        "the losses are unequal": _find_loss_doubts(reports),
        "not all are at a minimum": _find_minimum_doubts(reports),
        "not all do better than guessing": [note for note in _find_note_doubts(reports) if GUESSING in note],
    }
    return [words for words, sentences in found.items() if sentences]


def _find_disagreement(reports: Mapping[str, Report], what: str, of: Callable[[Report], Any], why: str) -> list[str]:
    """Return one sentence if the reports differ in this, with the value of each."""
    sides: dict[str, list[str]] = {}
    for label, report in reports.items():
        sides.setdefault(_format_brief(of(report)), []).append(label)
    if len(sides) == 1:
        return []
    said = "; ".join(f"{value} in {join_words(labels)}" for value, labels in sides.items())
    return [f"Different {what}{f' ({why})' if why else ''}: {said}."]


def _find_data_doubts(reports: Mapping[str, Report]) -> list[str]:
    numbers = _find_disagreement(reports, "numbers of examples", lambda r: r.examples, "not the same data")
    prints = {report.sample.get("fingerprint") for report in reports.values()}
    if numbers or len(prints) == 1:
        return numbers
    unknown = [label for label, report in reports.items() if not report.sample]
    if unknown:
        return [
            f"Whether these are the same examples is not known of {join_words(unknown)}: measure again to find out."
        ]
    return ["Different examples, or in another order: errors are those of independent samples, not of pairs."]


def _find_group_doubts(reports: Mapping[str, Report]) -> list[str]:
    """Return a sentence if the examples are the same, but not their groups."""
    samples = [report.sample for report in reports.values()]
    if len({each.get("fingerprint") for each in samples}) > 1 or all(each == samples[0] for each in samples):
        return []
    return [
        "The same examples in other groups (data of unknown length, or sampling=False): differences are not paired."
    ]


def _find_loss_doubts(reports: Mapping[str, Report]) -> list[str]:
    """Return a sentence if the losses differ: curvature changes with the loss, whatever the minimum."""
    losses = {label: report.loss for label, report in reports.items()}
    least, most = min(losses.values()), max(losses.values())
    # For positive losses, that their ratio is at most LOSS_RATIO. Other losses may be zero or negative.
    if most - least <= (1 - 1 / LOSS_RATIO) * max(abs(least), abs(most)):
        return []
    said = "; ".join(f"{loss:.3g} in {label}" for label, loss in losses.items())
    why = "curvature changes with the loss, and late in training falls with it; compare at equal training loss"
    return [f"Unequal loss ({why}): {said}."]


def _find_minimum_doubts(reports: Mapping[str, Report]) -> list[str]:
    moving = {
        label: report
        for label, report in reports.items()
        if (report.gradient_agreement or 0.0) > max(AGREEMENT, 5 / max(report.examples, 1))
    }
    return [
        f"{label} is not at a minimum: {report.gradient_agreement:.1%} of the squared length of single examples' "
        f"gradients is left in their mean (gradient norm {report.gradient_norm:.3g}), and at a minimum about "
        f"{1 / max(report.examples, 1):.2%} would be."
        for label, report in moving.items()
    ]


def _find_note_doubts(reports: Mapping[str, Report]) -> list[str]:
    """Return the notes of the reports that concern their numbers."""
    return [
        f"{label}: {note}" for label, report in reports.items() for note in report.notes if note not in HARMLESS_NOTES
    ]


def _make_entry_getter(table: str, key: str) -> Callable[[Report], Any]:
    return lambda report: getattr(report, table).get(key, "not said")


def _find_setting_doubts(reports: Mapping[str, Report]) -> list[str]:
    keys = dict.fromkeys(key for report in reports.values() for key in report.settings if key not in HARMLESS)
    return [
        sentence
        for key in sorted(keys, key=lambda key: key not in WHY)
        for sentence in _find_disagreement(
            reports, f"settings of {key}", _make_entry_getter("settings", key), WHY.get(key, "")
        )
    ]


def _find_certificate_doubts(reports: Mapping[str, Report]) -> list[str]:
    def format_state(report: Report) -> str:
        if report.certificate is None:
            return "not requested"
        if report.certificate.get("failed"):
            return "could not be computed"
        return "holds" if report.certificate.get("holds") else "does not hold"

    return _find_disagreement(reports, "certificates", format_state, "curvature is the Hessian's only where it holds")


def _find_formula_doubts(reports: Mapping[str, Report], names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        formulas = {
            strip_markup(str(r.legend[name].get("formula"))) for r in reports.values() if name in r and name in r.legend
        }
        if len(formulas) > 1:
            found.append(f"Different formulas of {name}: {'; '.join(sorted(formulas))}.")
    return found


def _find_reading_doubts(reports: Mapping[str, Report], names: Sequence[str]) -> list[str]:
    # One sentence for all reports that it is true of.
    said: dict[tuple[str, str], list[str]] = {}
    for label, report in reports.items():
        taken = [report[name] for name in names if name in report]
        loose = [reading.name for reading in taken if not reading.converged]
        unknown = [each for each in taken if each.stderr is None and each.sampling_stderr is None]
        blind = [each.name for each in unknown if each.converged and not each.exact]
        if loose:
            said.setdefault(("Not converged", f"{join_words(loose)}."), []).append(label)
        if blind:
            said.setdefault(("Estimates, bounds or searches of unknown error", f"{join_words(blind)}."), []).append(
                label
            )
        endless = [each.name for each in taken if _is_attained(each) is False]
        heavy = [each.name for each in taken if any(note.endswith(TOO_SMALL) for note in each.notes)]
        floored = [each.name for each in taken if each.details.get("floored_eigenvalues")]
        blank = [each.name for each in unknown if each.converged and each.exact]
        if endless:
            said.setdefault(
                ("Minima that rescaling approaches but never reaches", f"{join_words(endless)}."), []
            ).append(label)
        if heavy:
            what = f"A few examples carry most of {join_words(heavy)}"
            said.setdefault((what, "standard errors are underestimates, and verdicts too bold."), []).append(label)
        if floored:
            said.setdefault(
                ("Eigenvalues at the floor of rounding (upper bounds)", f"{join_words(floored)}."), []
            ).append(label)
        if blank:
            why = "no standard error over examples, so differences are not judged."
            said.setdefault((f"{join_words(blank)}", why), []).append(label)
        missing: dict[str, list[str]] = {}
        for name in names:
            if name not in report:
                missing.setdefault(report.left_out.get(name, "not requested."), []).append(name)
        for reason, absent in missing.items():
            said.setdefault((f"No {join_words(absent)}", reason), []).append(label)
    return [f"{what} in {join_words(labels)}: {which}" for (what, which), labels in said.items()]


def _is_attained(reading: Reading) -> bool | None:
    """Return whether a minimum is attained in every layer; None for a measure that is no minimum."""
    details = [reading.details, *(each for each in reading.details.values() if isinstance(each, dict))]
    known = [bool(each["attained"]) for each in details if "attained" in each]
    return all(known) if known else None


def _find_rounding_doubts(reports: Mapping[str, Report], contrasts: Iterable[Contrast]) -> list[str]:
    """Return a sentence on differences that may be rounding in single precision."""
    coarse = [label for label, report in reports.items() if report.settings.get("dtype") == "float32"]
    tiny = [
        each.name
        for each in contrasts
        if any(verdict == DIFFERENT and abs(each.ratios[label] - 1) < 1e-5 for label, verdict in each.verdicts.items())
    ]
    if not (coarse and tiny):
        return []
    return [f"Measured in float32 in {join_words(coarse)}: the differences of {join_words(tiny)} may be rounding."]


def _format_brief(value: JsonValue) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"[{', '.join(map(str, value[:3]))}, ... {value[-1]}] ({len(value)})"
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."
