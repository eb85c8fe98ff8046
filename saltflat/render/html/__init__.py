"""Reports, comparisons, audits, bounds and studies as self-contained HTML pages."""

from saltflat.render.html.pages import (
    render_audit_page,
    render_comparison_page,
    render_report_page,
    render_result_page,
    render_study_page,
    write_page,
    write_study_page,
)

__all__ = [
    "render_audit_page",
    "render_comparison_page",
    "render_report_page",
    "render_result_page",
    "render_study_page",
    "write_page",
    "write_study_page",
]
