"""What comes out of a measurement: readings, reports of them, and reports side by side."""

from saltflat.report.compare import Comparison, Contrast, compare
from saltflat.report.reading import Reading
from saltflat.report.report import Report

__all__ = ["Comparison", "Contrast", "Reading", "Report", "compare"]
