"""One HTML file about what every head of a model does on a text or an image."""

from manyheads.report.data import ReportData, collect_report, report_json
from manyheads.report.page import check_report_path, render_report, write_report

__all__ = [
    "ReportData",
    "check_report_path",
    "collect_report",
    "render_report",
    "report_json",
    "write_report",
]
