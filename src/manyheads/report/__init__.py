"""Pages about every head of a model: on a text or an image, and over a corpus."""

from manyheads.report.atlas_folder import AtlasFiles, atlas_files, read_atlas, write_atlas
from manyheads.report.card import (
    Card,
    card_json,
    card_markdown,
    collect_card,
    draw_card,
    write_card,
)
from manyheads.report.circuit_page import render_circuit
from manyheads.report.data import ReportData, collect_report, report_json
from manyheads.report.headvis import read_headvis, write_headvis
from manyheads.report.model_comparison import (
    HeadPair,
    ModelComparison,
    compare_reports,
    comparison_json,
    render_comparison,
)
from manyheads.report.page import check_report_path, render_report, write_report

__all__ = [
    "AtlasFiles",
    "Card",
    "HeadPair",
    "ModelComparison",
    "ReportData",
    "atlas_files",
    "card_json",
    "card_markdown",
    "check_report_path",
    "collect_card",
    "collect_report",
    "compare_reports",
    "comparison_json",
    "draw_card",
    "read_atlas",
    "read_headvis",
    "render_circuit",
    "render_comparison",
    "render_report",
    "report_json",
    "write_atlas",
    "write_card",
    "write_headvis",
    "write_report",
]
