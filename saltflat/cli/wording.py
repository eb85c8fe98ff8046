"""Messages of the library as the command line says them: arguments are options here."""

from __future__ import annotations

from dataclasses import replace

from saltflat.report import Audit, Report


def as_options(text: str) -> str:
    """A message with options in place of arguments.

    Example:
        >>> as_options("needs the parameters before training: pass initial=")
        'needs the parameters before training: pass --initial'
    """
    return text.replace("pass initial=", "pass --initial")


def report_worded(report: Report) -> Report:
    """The same report, whose reasons name options."""
    readings = {name: replace(each, notes=tuple(map(as_options, each.notes))) for name, each in report.readings.items()}
    left_out = {name: as_options(why) for name, why in report.left_out.items()}
    return replace(report, readings=readings, left_out=left_out)


def audit_worded(audit: Audit) -> Audit:
    """The same for an audit."""
    report = report_worded(audit.report)
    lines = {name: replace(line, reading=report[name]) for name, line in audit.items()}
    return replace(audit, report=report, lines=lines)
