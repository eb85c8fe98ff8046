"""Messages of the library as the command line says them: arguments are options here."""

from __future__ import annotations

from dataclasses import replace

from saltflat.report import Audit, Report


def reword_message(text: str) -> str:
    """A message with options in place of arguments.

    Example:
        >>> reword_message("needs the parameters before training: pass initial=")
        'needs the parameters before training: pass --initial'
    """
    return text.replace("pass initial=", "pass --initial")


def reword_report(report: Report) -> Report:
    """The same report, whose reasons name options."""
    readings = {
        name: replace(each, notes=tuple(map(reword_message, each.notes))) for name, each in report.readings.items()
    }
    left_out = {name: reword_message(why) for name, why in report.left_out.items()}
    return replace(report, readings=readings, left_out=left_out)


def reword_audit(audit: Audit) -> Audit:
    """The same for an audit."""
    report = reword_report(audit.report)
    lines = {name: replace(line, reading=report[name]) for name, line in audit.items()}
    return replace(audit, report=report, lines=lines)
