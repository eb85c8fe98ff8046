"""The results of a measurement: readings, reports, and comparisons of reports."""

from saltflat.results.comparison import Comparison, Contrast, compare
from saltflat.results.report import Reading, Report

__all__ = ["Comparison", "Contrast", "Reading", "Report", "compare"]
