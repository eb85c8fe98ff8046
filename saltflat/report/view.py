"""What a report says in words: the same on paper, in a terminal and in a notebook."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from saltflat.report.text import format_number, join_words, make_printable

if TYPE_CHECKING:
    from saltflat.report.reading import Reading
    from saltflat.report.report import Report

SIGNS = {
    "~": "an estimate, a bound or the result of a search",
    "!": "the solver stopped before it was done",
}


def format_report_facts(report: Report) -> list[str]:
    """What was measured, and how, in a line."""
    settings = report.settings
    kind = f" ({settings['loss']})" if "loss" in settings else ""
    said = [f"{report.examples} example{'s' * (report.examples != 1)}", f"loss {format_number(report.loss)}{kind}"]
    if report.accuracy is not None:
        said.append(f"accuracy {report.accuracy:.2%}")
    if report.gradient_norm is not None:
        said.append(f"gradient norm {format_number(report.gradient_norm, 3)}")
    if "columns" in settings:
        said.append(f"columns {settings['columns']}")
    if "dtype" in settings:
        said.append(str(settings["dtype"]))
    said += [report.device, f"{format_number(report.seconds, 3)} s"]
    return [make_printable(each) for each in said]


def format_head_notes(report: Report) -> list[str]:
    """What a reader should know before the numbers."""
    return [make_printable(f"Note: {note}") for note in report.notes]


def collect_layers(readings: Iterable[Reading]) -> list[str]:
    """Every layer that has a value, in the order of the network as far as the readings tell it."""
    return list(dict.fromkeys(layer for reading in readings for layer in reading.layers))


def collect_notes(report: Report) -> list[str]:
    """The notes of all readings, each once: note 1 is the first."""
    return list(dict.fromkeys(note for reading in report.values() for note in reading.notes))


def format_signs(reading: Reading) -> str:
    """Signs for what is not exact or not converged; what has no value is neither."""
    return "" if math.isnan(reading.value) else "~" * (not reading.exact) + "!" * (not reading.converged)


def format_report_marks(reading: Reading, notes: list[str]) -> str:
    """Signs for what is not exact or not converged, and the numbers of its notes."""
    return format_signs(reading) + "".join(f"[{1 + notes.index(note)}]" for note in dict.fromkeys(reading.notes))


def format_report_footer(report: Report) -> list[str]:
    """What stands below the numbers: signs, notes, what was left out and the certificate."""
    used = "".join(map(format_signs, report.values()))
    lines = [f"{sign} {meaning}" for sign, meaning in SIGNS.items() if sign in used]
    lines += [f"[{count}] {note}" for count, note in enumerate(collect_notes(report), 1)]
    if any(reading.sampling_stderr is not None for reading in report.values()):
        lines.append("+- (examples): standard error over the choice of the examples; elsewhere +- is over random draws")
    by_reason: dict[str, list[str]] = {}
    for name, reason in report.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    lines += [f"Left out: {join_words(names)}: {reason}" for reason, names in by_reason.items()]
    return [make_printable(line) for line in [*lines, format_certificate(report.certificate)]]


def format_certificate(certificate: Mapping[str, object] | None) -> str:
    """Whether curvature by Gauss-Newton is the Hessian's here, in a sentence."""
    if certificate is None:
        return "Certificate: not asked for."
    seen = certificate.get("examples", "?")
    gap = certificate.get("gap", math.nan)
    verdict = "are" if certificate.get("holds") else "are NOT"
    shown = f"{gap:.1e}" if isinstance(gap, float) else str(gap)
    return (
        f"Certificate: the layers' Gauss-Newton blocks {verdict} the Hessian's (largest gap {shown}, {seen} examples)."
    )
