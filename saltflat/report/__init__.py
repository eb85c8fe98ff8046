"""What comes out of a measurement: readings, reports of them, reports side by side, and audits."""

from saltflat.report.audit import Audit, AuditLine
from saltflat.report.change import Change
from saltflat.report.compare import Comparison, Contrast, compare
from saltflat.report.reading import Reading
from saltflat.report.report import Report

__all__ = ["Audit", "AuditLine", "Change", "Comparison", "Contrast", "Reading", "Report", "compare"]
