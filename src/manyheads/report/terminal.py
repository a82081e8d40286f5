"""The report on a terminal: the most important heads, and what to try next."""

import numpy as np
from rich.table import Table
from rich.text import Text

from manyheads.console import TerminalPage, heat
from manyheads.formatting import pluralise
from manyheads.lens.results.measure_names import describe_measure, format_value
from manyheads.report.data import ReportData, short_kind, suggest_commands
from manyheads.report.model_comparison import ModelComparison

MAX_ROWS = 32
MAX_PAIRS = 12
COLUMNS = ("normalized_entropy", "previous_token", "first_token")


def print_report(report: ReportData, *, model_path: str, text_file: str) -> None:
    """Print the most important heads, or all if they are few, and what to try next."""
    page = TerminalPage()
    blocks = report.statistics.blocks
    heads, layers = report.heads, len({(block.stack, block.layer) for block in blocks})
    page.title(f"{report.name}: {pluralise(heads, 'head')} in {pluralise(layers, 'layer')}")
    page.blank_line()
    page.show(_table(report))
    if heads > MAX_ROWS:
        page.paragraph(f"and {heads - MAX_ROWS} more, in the report", style="dim")
    page.blank_line()
    page.title("What to try next")
    for suggestion in suggest_commands(report, model_path=model_path, text_file=text_file):
        page.paragraph(f"{suggestion.title}: {suggestion.command}")
    page.blank_line()


def print_comparison(comparison: ModelComparison) -> None:
    """Print the heads of two models that differ most."""
    page = TerminalPage()
    first, second = comparison.reports
    page.title(f"{first.name} and {second.name}")
    if comparison.reason:
        page.paragraph(f"Heads are matched by their measures, since {comparison.reason}.")
    page.blank_line()
    table = Table(first.name, "Kind", second.name, "Kind", box=None, pad_edge=False)
    table.add_column("Apart", justify="right")
    for pair in comparison.pairs[:MAX_PAIRS]:
        cells = [str(pair.first), short_kind(first.inspection, pair.first), "removed", ""]
        if pair.second is not None:
            cells[2:] = str(pair.second), short_kind(second.inspection, pair.second)
        table.add_row(*cells, format_value(pair.distance))
    page.show(table)
    page.paragraph("Apart: over all measures, in standard deviations of heads.", style="dim")
    page.blank_line()


def _table(report: ReportData) -> Table:
    table = Table("Head", "Kind", box=None, pad_edge=False)
    importance = report.importance
    if importance is not None:
        table.add_column(describe_measure(importance.measure).title, justify="right")
    columns = {name: describe_measure(name) for name in COLUMNS if name in report.statistics}
    for about in columns.values():
        table.add_column(about.title, justify="right")
    table.add_column("")
    flags = report.inspection.flags()
    order = list(range(report.heads))
    if report.heads > MAX_ROWS and importance is not None:
        order = np.argsort(-np.nan_to_num(importance.change, nan=-np.inf)).tolist()
    for index in order[:MAX_ROWS]:
        address = report.inspection.addresses[index]
        cells: list[Text | str] = [str(address), short_kind(report.inspection, address)]
        if importance is not None:
            cells.append(format_value(float(importance.change[index])))
        for name, about in columns.items():
            value = float(report.statistics.means[name][index])
            style = "" if np.isnan(value) else heat(value)
            cells.append(Text(f" {format_value(value, about.unit):>5} ", style=style))
        table.add_row(*cells, Text(", ".join(flags[address]), style="red"))
    return table
