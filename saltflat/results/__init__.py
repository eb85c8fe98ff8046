"""What comes out of a measurement: readings, reports of them, and reports side by side."""

from saltflat.results.comparison import Comparison, Contrast, compare
from saltflat.results.report import Reading, Report

__all__ = ["Comparison", "Contrast", "Reading", "Report", "compare"]
