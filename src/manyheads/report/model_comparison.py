"""Two reports on the same text: which heads match, and where the models differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError
from manyheads.formatting import number, percent, pluralise, without_nan
from manyheads.lens.diff.head_matching import match_heads
from manyheads.lens.inspection import Inspection
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.measure_names import describe_measure, format_value
from manyheads.report import page, sections
from manyheads.report.card import kinds_by_layer
from manyheads.report.data import ReportData, kind_words, list_measures, report_json
from manyheads.surgery.pruning import origins_in

# Pairs of heads with their maps, rows of the table, measures and places of the text in a row.
MAX_MAPS, MAX_ROWS, MAX_MEASURES, MAX_PLACES = 6, 400, 3, 8
# Tokens before a place where the predictions differ.
CONTEXT = 14
SCRIPTS = ("compare.js",)


@dataclass(frozen=True, slots=True)
class HeadPair:
    """A head of each model, and how far apart they are over all measures.

    `distance` is the root mean square of the differences, each in standard deviations of its
    measure over all heads of both models.
    """

    first: Address
    second: Address | None
    distance: float


@dataclass(frozen=True, eq=False)
class ModelComparison:
    """Two reports; `reason` says why their heads cannot be matched by place, where they cannot."""

    first: ReportData
    second: ReportData
    matches: dict[Address, Address | None]
    reason: str = ""

    @property
    def reports(self) -> tuple[ReportData, ReportData]:
        return self.first, self.second

    @cached_property
    def pairs(self) -> tuple[HeadPair, ...]:
        """Every head of the first model with its match, those that differ most first."""
        rows = [
            HeadPair(head, match, self._distance(head, match))
            for head, match in self.matches.items()
        ]
        return tuple(sorted(rows, key=lambda pair: -np.nan_to_num(pair.distance, nan=-1.0)))

    @cached_property
    def unmatched(self) -> tuple[Address, ...]:
        """Heads of the second model that no head of the first is matched with."""
        matched = set(self.matches.values())
        return tuple(head for head in self.second.inspection.addresses if head not in matched)

    @cached_property
    def standardized(self) -> tuple[dict[Address, Float[np.ndarray, " m"]], ...]:
        """The measures of each model's heads that both models have, in standard deviations."""
        tables = [_measure_table(report.inspection) for report in self.reports]
        names = [name for name in tables[0] if name in tables[1]]
        columns = []
        for name in names:
            both = np.concatenate([table[name] for table in tables])
            spread = np.nanstd(both)
            if spread > 1e-12:
                columns.append((both - np.nanmean(both)) / spread)
        rows = np.stack(columns, axis=1) if columns else np.zeros((self._heads, 0))
        count = self.first.heads
        return tuple(
            dict(zip(report.inspection.addresses, part, strict=True))
            for report, part in zip(self.reports, (rows[:count], rows[count:]), strict=True)
        )

    @cached_property
    def nearest(self) -> dict[Address, Address]:
        """For every head of the first model the head of the second with the nearest measures."""
        ours, peers = self.standardized
        return {
            head: min(peers, key=lambda peer: np.nan_to_num(_gap(row, peers[peer]), nan=np.inf))
            for head, row in ours.items()
        }

    @property
    def _heads(self) -> int:
        return self.first.heads + self.second.heads

    def _distance(self, head: Address, match: Address | None) -> float:
        if match is None:
            return float("nan")
        return _gap(self.standardized[0][head], self.standardized[1][match])


def _gap(first: Float[np.ndarray, " m"], second: Float[np.ndarray, " m"]) -> float:
    squares = np.square(first - second)
    squares = squares[~np.isnan(squares)]
    return float(np.sqrt(squares.mean())) if len(squares) else float("nan")


def _measure_table(inspection: Inspection) -> dict[str, Float[np.ndarray, " h"]]:
    return {measure.name: measure.values for measure in list_measures(inspection)}


def compare_reports(first: ReportData, second: ReportData) -> ModelComparison:
    """Match the heads of two models by place, or where shapes differ by their measures."""
    sides = [
        ("images" if side.model.reads_images else "pairs" if side.model.reads_pairs else "texts")
        for side in (first, second)
    ]
    if sides[0] != sides[1]:
        raise InputError(
            f"{first.name} reads {sides[0]} and {second.name} {sides[1]}",
            "compare two models that read the same",
        )
    try:
        origins = origins_in(first.model, second.model)
        return ModelComparison(first, second, match_heads(first.model, second.model, origins).after)
    except InputError as error:
        reason = str(error).split(": compare ")[0].rstrip(".")
    nearest = ModelComparison(first, second, {}, reason).nearest
    return ModelComparison(first, second, dict(nearest), reason)


def comparison_json(comparison: ModelComparison) -> dict[str, Any]:
    """Both reports as JSON, and the pairs of heads with their distances."""
    rows = [
        {
            "first": str(pair.first),
            "second": None if pair.second is None else str(pair.second),
            "distance": pair.distance,
        }
        for pair in comparison.pairs
    ]
    tables = {
        "kind": "comparison of reports",
        "matched_by": "measures" if comparison.reason else "place",
        "reason": comparison.reason,
        "first": report_json(comparison.first),
        "second": report_json(comparison.second),
        "pairs": rows,
    }
    return dict(without_nan(tables))


def render_comparison(comparison: ModelComparison, *, origin: str = "") -> str:
    """Render the page that compares two models; it is as safe as `render_report`'s."""
    script = page.join_scripts(page.SHARED_SCRIPTS, SCRIPTS)
    style = page.page_style()
    first, second = comparison.reports
    values = {
        "policy": page.content_policy(script, style),
        "format": str(page.FORMAT),
        "style": style,
        "script": script,
        "made": escape(origin),
        "first": escape(first.name),
        "second": escape(second.name),
        "summary": _summary(comparison),
        "shapes": _shapes(comparison),
        "differences": _differences(comparison),
        "kinds": _kinds(comparison),
        "predictions": _predictions(comparison),
        "worth": _worth(comparison),
        "pairs": _pair_table(comparison),
        "data": page.to_json(_data(comparison)),
    }
    return page.fill_page(page.read_part("compare.html"), values)


def _summary(comparison: ModelComparison) -> str:
    """What can be compared, in plain sentences."""
    first, second = (escape(report.name) for report in comparison.reports)
    if comparison.reason:
        return (
            f"The heads of the two models have no common places ({escape(comparison.reason)}). So "
            f"each head of {first} stands beside the head of {second} whose measures are nearest "
            "to its own; two heads may have the same one. Kinds, predictions and worth are "
            "compared as they are."
        )
    removed = sum(pair.second is None for pair in comparison.pairs)
    missing = f" {pluralise(removed, 'head')} of {first} are not in {second}." if removed else ""
    return (
        f"Both models have the same shape, so each head of {first} stands beside the head at its "
        f"place in {second}, measured on the same text.{missing} If they were trained apart, "
        "places mean little: the table of all heads also names the most similar one."
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, sortable: bool = False) -> str:
    """A table of cells that are HTML; a cell may begin with its own tag."""
    mark = ' class="sortable"' if sortable else ""
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{title}</button></th>'
        if sortable
        else f'<th scope="col">{title}</th>'
        for title in titles
    )
    body = "".join("<tr>" + "".join(_cell(cell) for cell in cells) + "</tr>" for cells in rows)
    return (
        f'<div class="scroll"><table{mark}><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _cell(cell: str) -> str:
    return cell if cell.startswith(("<td", "<th")) else f"<td>{cell}</td>"


def _shapes(comparison: ModelComparison) -> str:
    models = [report.inspection.model for report in comparison.reports]
    layers = [
        "; ".join(
            ("" if name == "main" else f"{name} ") + str(len(heads))
            for name, heads in model.stacks.items()
        )
        for model in models
    ]
    facts = {
        "Type": [model.type for model in models],
        "Layers": layers,
        "Heads": [f"{report.heads:,}" for report in comparison.reports],
        "Width": [f"{model.width:,}" for model in models],
        "Vocabulary": [
            "–" if model.vocabulary is None else f"{model.vocabulary:,}" for model in models
        ],
        "Parameters": [f"{model.parameters:,}" for model in models],
        "Tokens of the text": [
            f"{report.statistics.metadata['tokens']:,}" for report in comparison.reports
        ],
        "Loss per token": [_loss(report) for report in comparison.reports],
        "Bits per character": [_bits(report) for report in comparison.reports],
        "Heads with a kind": [
            str(sum(bool(report.kinds.of(head)) for head in report.inspection.addresses))
            for report in comparison.reports
        ],
        "Dead heads": [str(len(report.inspection.dead.heads)) for report in comparison.reports],
        "Weight on the first token": [_sink(report) for report in comparison.reports],
    }
    titles = ["", *(escape(report.name) for report in comparison.reports)]
    rows = [
        [f'<th scope="row">{name}</th>', *map(escape, values)]
        for name, values in facts.items()
        if set(values) != {"–"}
    ]
    return _table(titles, rows)


def _loss(report: ReportData) -> str:
    loss = report.predictions.loss
    return "–" if np.isnan(loss) else f"{loss:.3f} nats"


def _bits(report: ReportData) -> str:
    """The loss on the shown text per letter of it, which does not depend on the tokenizer."""
    rows, tokens = report.predictions.rows, report.input.tokens
    if report.predictions.output != "next token":
        return "–"
    bits = sum(-np.log2(max(row.probability, 1e-30)) for row in rows if row.probability is not None)
    letters = sum(map(len, tokens[1:]))
    return f"{bits / letters:.3f}" if letters else "–"


def _sink(report: ReportData) -> str:
    weights = report.statistics.means.get("first_token")
    if weights is None or np.isnan(weights).all():
        return "–"
    return percent(float(np.nanmean(weights)))


def _described(report: ReportData, head: Address | None) -> str:
    if head is None:
        return '<span class="quiet">removed</span>'
    words = escape(kind_words(report.inspection, head))
    return f'<b>{head}</b> <span class="quiet">{words}</span>'


def _largest_changes(comparison: ModelComparison, pair: HeadPair) -> str:
    """The measures that differ most, with both values."""
    if pair.second is None:
        return ""
    rows = [dict(report.statistics.of(head)) for report, head in _ends(comparison, pair)]
    values = [{name: row[name] for name in row if not np.isnan(row[name])} for row in rows]
    measures = (measure.name for measure in list_measures(comparison.first.inspection))
    names = [name for name in measures if name in values[0] and name in values[1]]
    spreads = {}
    for name in names:
        both = [report.statistics[name].means for report in comparison.reports]
        spread = float(np.nanstd(np.concatenate(both)))
        spreads[name] = abs(values[0][name] - values[1][name]) / spread if spread > 1e-12 else 0.0
    best = sorted((name for name in names if spreads[name] > 0), key=lambda name: -spreads[name])
    changes = []
    for name in best[:MAX_MEASURES]:
        about = describe_measure(name)
        ends = (format_value(side[name], about.unit) for side in values)
        changes.append(f"{escape(about.label)} {' → '.join(ends)}")
    return "; ".join(changes) or "no difference"


def _ends(comparison: ModelComparison, pair: HeadPair) -> list[tuple[ReportData, Address]]:
    assert pair.second is not None, "the head has a match"
    return [(comparison.first, pair.first), (comparison.second, pair.second)]


def _differences(comparison: ModelComparison) -> str:
    """The heads that differ most, with a place for both maps."""
    chosen = _mapped(comparison)
    if not chosen or not chosen[0].distance > 0:
        return "<p>No head differs on this text.</p>"
    items = []
    for index, pair in enumerate(chosen):
        sides = "".join(
            f'<figure><canvas data-map="{2 * index + side}" role="img" '
            f'aria-label="{escape(f"The pattern of {head} of {report.name}")}"></canvas>'
            f"<figcaption>{_described(report, head)}</figcaption></figure>"
            for side, (report, head) in enumerate(_ends(comparison, pair))
        )
        items.append(
            f'<li class="panel"><div class="maps">{sides}</div>'
            f'<p class="quiet">{pair.distance:.2f} apart: {_largest_changes(comparison, pair)}</p>'
            "</li>"
        )
    return (
        '<p class="lead">Patterns on the text: queries down, keys across. How far apart two heads '
        "are is the root mean square over all measures, each in standard deviations over the heads "
        f'of both models.</p><ol class="pairs">{"".join(items)}</ol>'
    )


def _mapped(comparison: ModelComparison) -> list[HeadPair]:
    return [pair for pair in comparison.pairs if pair.second is not None][:MAX_MAPS]


def _kinds(comparison: ModelComparison) -> str:
    """The kinds by layer as words; the script draws the heads as squares above them."""
    tables = [kinds_by_layer(report.inspection) for report in comparison.reports]
    layers = list(dict.fromkeys([*tables[0], *tables[1]]))

    def words(counts: dict[str, int] | None) -> str:
        if counts is None:
            return '<span class="quiet">no such layer</span>'
        named = [f"{count} {kind}" for kind, count in counts.items() if kind != "mixed"]
        rest = counts.get("mixed", 0)
        return escape(", ".join([*named, *([f"{rest} without a kind"] if rest else [])]))

    names = [escape(report.name) for report in comparison.reports]
    squares = "".join(
        f'<div class="panel"><h3>{name}</h3><div data-squares="{index}"></div></div>'
        for index, name in enumerate(names)
    )
    rows = [
        [f'<th scope="row">{layer}</th>', *(words(table.get(layer)) for table in tables)]
        for layer in layers
    ]
    return (
        f'<div class="pair">{squares}</div><div id="legend"></div>'
        f"<details><summary>Kinds by layer as a table</summary>{_table(['', *names], rows)}"
        "</details>"
    )


def _predictions(comparison: ModelComparison) -> str:
    """The most probable outputs of both, and where they differ most if they read the same."""
    first, second = (report.predictions for report in comparison.reports)
    lists = "".join(
        f'<div class="panel"><h3>{escape(report.name)}</h3>{sections.last_prediction(report)}</div>'
        for report in comparison.reports
    )
    both = f'<div class="pair">{lists}</div>'
    inputs = [report.input for report in comparison.reports]
    same = inputs[0].ids == inputs[1].ids and inputs[0].tokens == inputs[1].tokens
    answered = [
        {row.position: row for row in side.rows if row.probability is not None}
        for side in (first, second)
    ]
    places = [place for place in answered[0] if place in answered[1]] if same else []
    if not places:
        why = (
            '<p class="lead">The models split the text into different tokens, so only what they '
            "predict at its end can be compared, and the bits per character below.</p>"
        )
        return both if same else why + both

    def gap(place: int) -> float:
        return abs((answered[0][place].probability or 0) - (answered[1][place].probability or 0))

    tokens = inputs[0].tokens
    before = 1 if first.output == "next token" else 0
    rows = []
    for place in sorted(places, key=gap, reverse=True)[:MAX_PLACES]:
        context = "".join(tokens[max(0, place + before - CONTEXT) : place + before])
        right = tokens[place + before]
        cells = [f"<bdi>…{escape(context)}</bdi><mark>{escape(right)}</mark>"]
        for side, result in zip(answered, (first, second), strict=True):
            row = side[place]
            name, part = row.top[0]
            cells.append(
                f'{percent(row.probability or 0.0)} <span class="quiet">first '
                f'<bdi class="word">{escape(result.names[name])}</bdi> {percent(part)}</span>'
            )
        rows.append(cells)
    titles = [
        "The text up to the marked token",
        *(escape(side.name) for side in comparison.reports),
    ]
    return (
        '<p class="lead">Where the two differ most about the marked token: its probability, and '
        f"the most probable one.</p>{_table(titles, rows)}"
        f'<h3 class="after">At the end of the text</h3>{both}'
    )


def _worth(comparison: ModelComparison) -> str:
    parts = "".join(
        f"<div><h3>{escape(report.name)}</h3>{sections.most_important(report)}</div>"
        for report in comparison.reports
    )
    return f'<div class="pair">{parts}</div>'


def _pair_table(comparison: ModelComparison) -> str:
    places = [
        {head: index for index, head in enumerate(report.inspection.addresses)}
        for report in comparison.reports
    ]
    rows = []
    ours, peers = comparison.standardized
    for pair in comparison.pairs[:MAX_ROWS]:
        cells = []
        for report, head, place in zip(
            comparison.reports, (pair.first, pair.second), places, strict=True
        ):
            order = "" if head is None else str(place[head])
            cells.append(
                f'<td class="described" data-value="{order}">{_described(report, head)}</td>'
            )
            worth = report.importance
            change = float("nan")
            if head is not None and worth is not None:
                change = float(worth.change[place[head]])
            sort = "" if np.isnan(change) else f"{change:.6g}"
            cells.append(f'<td class="number" data-value="{sort}">{number(change)}</td>')
        apart = "" if np.isnan(pair.distance) else f"{pair.distance:.6g}"
        cells.append(f'<td class="number" data-value="{apart}">{number(pair.distance)}</td>')
        if not comparison.reason:
            twin = comparison.nearest[pair.first]
            near = f"{twin} {_gap(ours[pair.first], peers[twin]):.2f}"
            cells.append(f'<td data-value="{places[1][twin]}">{near}</td>')
        cells.append(f'<td class="evidence">{_largest_changes(comparison, pair)}</td>')
        rows.append(cells)
    names = [escape(report.name) for report in comparison.reports]
    titles = [names[0], "Its worth", names[1], "Its worth", "Apart"]
    titles += ["What differs most"] if comparison.reason else ["Most similar", "What differs most"]
    rest = len(comparison.pairs) - len(rows)
    more = f'<p class="quiet">And {pluralise(rest, "more pair")}, in --json.</p>' if rest else ""
    if comparison.unmatched:
        listed = ", ".join(map(str, comparison.unmatched[:40]))
        more += (
            f'<p class="quiet">Heads of {names[1]} without a partner: {listed}'
            f"{' and more' if len(comparison.unmatched) > 40 else ''}.</p>"
        )
    return _table(titles, rows, sortable=True) + more


def _data(comparison: ModelComparison) -> dict[str, Any]:
    """What the script draws: the squares of both models, and the maps of some pairs."""
    maps = [
        page.pack_pattern(report, head)
        for pair in _mapped(comparison)
        for report, head in _ends(comparison, pair)
    ]
    return {
        "models": [
            [
                {
                    **head.record(),
                    "name": str(head),
                    "group": labels[0].kind if (labels := report.kinds.of(head)) else "mixed",
                    "words": kind_words(report.inspection, head),
                }
                for head in report.inspection.addresses
            ]
            for report in comparison.reports
        ],
        "maps": maps,
    }
