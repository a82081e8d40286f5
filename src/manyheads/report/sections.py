"""The text and the tables of a report as HTML; everything from outside is escaped."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from manyheads.formatting import pluralise, number, percent
from manyheads.lens.head_kinds.labels import Label
from manyheads.lens.inspection import HeadImportance
from manyheads.lens.measure.measure_table import format_value
from manyheads.lens.measure.measures import SINK_ABOVE
from manyheads.lens.results.addresses import attention_at, stacks_of
from manyheads.models.decoder import Decoder
from manyheads.report.advice import Advice
from manyheads.report.data import ReportData, ShownMeasure
from manyheads.report.inputs import word_of
from manyheads.taps import Sublayer

MOST_BARS = 8
MOST_PAIRS = 12


def about_model(report: ReportData) -> str:
    """The model in one paragraph."""
    blocks, model = report.statistics.blocks, report.model
    weights = sum(each.numel() for each in model.parameters())
    counts = sorted({block.heads for block in blocks})
    each = pluralise(counts[-1], "attention head")
    if len(counts) > 1:
        each = f"{counts[0]} to {each}"
    picture = report.input.picture
    kind = "a decoder" if isinstance(model, Decoder) else "an encoder"
    inner = attention_at(stacks_of(model)["main"], blocks[0].layer, Sublayer.ATTENTION).config
    sees = (
        "every token sees itself and those before it"
        if isinstance(model, Decoder)
        else "every token sees those before and after it"
    )
    shared = (
        f" Its heads share {pluralise(inner.key_heads, 'set')} of keys and values in a layer."
        if inner.key_heads != inner.heads
        else ""
    )
    if picture is not None:
        kind, sees = "an encoder of images", "every patch and the class token see all the others"
    return (
        f"<strong>{escape(report.name)}</strong> is {kind} of {_amount(weights)} parameters: "
        f"{pluralise(len(blocks), 'layer')} of {each}, {report.heads} in all, on a residual "
        f"stream of {inner.width} channels; {sees}.{shared} {_measured_on(report)}"
    )


def _measured_on(report: ReportData) -> str:
    picture, facts = report.input.picture, report.statistics.facts
    if picture is not None:
        return (
            f"Every number below was measured on the given image, cut into {picture.rows} x "
            f"{picture.columns} patches behind the class token, which stands first."
        )
    return (
        f"Every number below was measured on {pluralise(facts['tokens'], 'token')} of the given "
        f"text, in {pluralise(facts['texts'], 'piece')}; the patterns are those of its first "
        f"{pluralise(len(report.input), 'token')}."
    )


def overview(report: ReportData) -> str:
    """A few numbers at a glance."""
    kinds = Counter(report.kinds.best(each).split()[0] for each in report.statistics.addresses)
    named = report.heads - kinds.get("mixed", 0)
    several = [(kind, count) for kind, count in kinds.most_common() if kind != "mixed"]
    common = ", ".join(f"{count} {kind}" for kind, count in several[:4])
    cards = [(str(report.heads), "heads", f"in {pluralise(len(report.statistics.blocks), 'layer')}")]
    cards.append((str(named), "have a kind", common))
    if report.importance is not None:
        best = int(np.nanargmax(report.importance.change))
        change = number(float(report.importance.change[best]))
        told = (
            f"without it the loss rises by {change} nats"
            if report.importance.metric == "loss"
            else f"the similarity falls by {change} without it"
        )
        name = str(report.statistics.addresses[best])
        cards.append((name, "matters most", told))
    harmful = 0 if report.importance is None else len(report.importance.harmful)
    idle = f"{pluralise(len(report.inspection.doubles), 'duplicate pair')}, {harmful} harmful"
    cards.append((str(len(report.inspection.dead.heads)), "are dead", idle))
    if "first_token" in report.statistics:
        share = float(np.nanmean(report.statistics.means["first_token"]))
        cards.append((percent(share), "of all weight", "goes to the first token"))
    return "".join(
        f'<div class="card"><b>{escape(large)}</b><span>{escape(what)}</span>'
        f"<small>{escape(more)}</small></div>"
        for large, what, more in cards
    )


def important(report: ReportData) -> str:
    """Bars of the heads that matter most and least, with two standard errors."""
    importance = report.importance
    if importance is None:
        return f"<p>Not measured: {escape(report.unknown_importance)}.</p>"
    order = np.argsort(-np.nan_to_num(importance.change, nan=-np.inf)).tolist()
    count = min(MOST_BARS, max(1, report.heads // 2))
    scale = float(np.nanmax(np.abs(importance.change))) or 1.0
    most, least = (_bars(report, importance, some[:count], scale) for some in (order, order[::-1]))
    return (
        f"<p>{_how_importance(importance)}</p>"
        '<div class="pair">'
        f"<div><h3>Most important</h3>{most}</div><div><h3>Least important</h3>{least}</div>"
        "</div>"
    )


def trouble(report: ReportData) -> str:
    """Dead, duplicate and harmful heads, each with its reasons."""
    said = [line.strip() for line in str(report.inspection.dead).splitlines()[1:]]
    dead = [(line.partition(": ")[0], line.partition(": ")[2]) for line in said]
    duplicates = [
        (
            f"{each.one} and {each.other}",
            f"cosine similarity of patterns {each.patterns:.2f}, of outputs {each.outputs:.2f}",
        )
        for each in report.inspection.doubles[:MOST_PAIRS]
    ]
    harmful, names = [], report.statistics.addresses
    for place in [] if report.importance is None else report.importance.harmful:
        assert report.importance is not None
        gain, error = -report.importance.change[place], report.importance.errors[place]
        told = f"the model does better by {number(float(gain))} ±{number(float(error))} without it"
        harmful.append((str(names[place]), told))
    parts = (
        ("Dead", "Heads without a measurable effect.", dead),
        ("Duplicate", "Pairs with the same pattern and the same output (above 0.9).", duplicates),
        ("Harmful", "The model does better without them, beyond two standard errors.", harmful),
    )
    return '<div class="triple">' + "".join(_listed(*part) for part in parts) + "</div>"


def activations(report: ReportData) -> str:
    """Layer by layer: weight on the first token, and the largest value of the residual stream."""
    columns = ["Layer", "First token", "Heads with a sink", "Largest activation"]
    columns += ["Times the median", "Position", "Channel"]
    body = []
    first = report.statistics["first_token"].layers() if "first_token" in report.statistics else {}
    for each in report.statistics.activations:
        mine = first.get(each.layer)
        sinks = "–" if mine is None else f"{int((mine > SINK_ABOVE).sum())} of {len(mine)}"
        share = "–" if mine is None else percent(float(np.nanmean(mine)))
        token = "" if each.token is None else word_of(report.model.tokenizer, each.token).strip()
        place = f"token {each.position} of piece {each.text}, <code>{escape(token)}</code>"
        massive = ' <em class="flag">massive</em>' if each.massive else ""
        ratio = each.largest / each.median if each.median else float("nan")
        cells = [str(each.layer), share, sinks, f"{number(each.largest)}{massive}"]
        cells += [f"{number(ratio)} ×", place, str(each.channel)]
        body.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{column}</th>" for column in columns)
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        '<p class="quiet">An activation is massive above 100 and about 1,000 times the median '
        "(Sun et al., arXiv 2402.17762); the residual stream is measured after each layer.</p>"
    )


def rows(report: ReportData, measures: Sequence[ShownMeasure]) -> tuple[str, str]:
    """The head and the body of the table of heads."""
    shown = [measure for measure in measures if measure.in_table]
    flags = report.inspection.flags()
    titles = [("Head", ""), ("Kind", "")]
    titles += [(each.about.title, each.about.about) for each in shown] + [("Evidence", "")]
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button" title="{escape(about)}">'
        f"{escape(title)}</button></th>"
        for title, about in titles
    )
    body = []
    for place, address in enumerate(report.statistics.addresses):
        name, labels = str(address), report.kinds.of(address)
        marks = "".join(f' <em class="flag">{flag}</em>' for flag in flags[address])
        cells = [
            f'<th scope="row" data-value="{place}"><a href="#look" data-head="{place}">{name}</a>'
            f"{marks}</th>",
            f'<td data-value="{escape(report.kinds.best(address))}">{_kinds(labels)}</td>',
        ]
        for each in shown:
            value, error = float(each.values[place]), float(each.errors[place])
            text = format_value(value, each.about.unit)
            more = "" if np.isnan(error) else f' title="standard error {error:.2g}"'
            sort = "" if np.isnan(value) else f"{value:.6g}"
            cells.append(f'<td class="number" data-value="{sort}"{more}>{text}</td>')
        evidence = labels[0].evidence if labels else "reaches no threshold"
        cells.append(f'<td class="evidence">{escape(evidence)}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    return head, "\n".join(body)


def advices(given: Iterable[Advice]) -> str:
    return "".join(
        f"<li><h3>{escape(each.title)}</h3><p>{escape(each.why)}</p>"
        f"<pre><code>{escape(each.command)}</code></pre></li>"
        for each in given
    )


def how_made(report: ReportData, measures: Sequence[ShownMeasure]) -> str:
    """Every measure with its definition, every kind with its threshold and the source of it."""
    defined = "".join(
        f"<dt>{escape(each.about.title)}</dt><dd>{escape(each.about.about)}</dd>"
        for each in measures
    )
    thresholds = report.kinds.facts.get("thresholds", {})
    kinds = "".join(
        f"<dt>{escape(kind)}</dt><dd>at least {about['above']:g}: "
        f"{escape(str(about['source']))}</dd>"
        for kind, about in thresholds.items()
    )
    missing = "".join(
        f"<dt>{escape(kind)}</dt><dd>not measured: {escape(why)}</dd>"
        for kind, why in report.kinds.missing.items()
    )
    over = "pieces of the text" if report.statistics.facts["errors_over"] == "texts" else "queries"
    return (
        "<h3>Measures</h3><p>The weights A of a query sum to 1 over its visible keys. Standard "
        f"errors are over {over}.</p><dl>{defined}</dl><h3>Kinds</h3><p>A head has every kind "
        "whose score reaches its threshold; the best comes first, and a head without any is "
        f"mixed.</p><dl>{kinds}{missing}</dl><h3>Patterns</h3><p>For each query the file keeps "
        f"the largest weights, up to 98% of the total and at most {report.keys} keys, with eight "
        "bits each; the rest is given beside each token.</p>"
    )


def _how_importance(importance: HeadImportance) -> str:
    if importance.by == "gradient":
        method = (
            "Estimated for all heads from one backward pass, −output · gradient: the change of "
            "the loss without the head if the model were linear (Michel et al., arXiv "
            "1905.10650). <code>--by ablation</code> measures it exactly."
        )
    else:
        ablated = "Each head alone was replaced by zeros (Michel et al., arXiv 1905.10650)"
        method = (
            f"{ablated}: the rise of the loss in nats per token; the full model has "
            f"{importance.baseline:.3f}."
            if importance.metric == "loss"
            else f"{ablated}: the drop of the cosine similarity to the full model's text vectors."
        )
    errors = (
        "; whiskers are two standard errors"
        if importance.texts > 1
        else ", so the standard error is unknown"
    )
    return f"{method} Means over {pluralise(importance.texts, 'piece')}{errors}."


def _bars(
    report: ReportData, importance: HeadImportance, places: Sequence[int], scale: float
) -> str:
    lines = []
    for place in places:
        value, error = float(importance.change[place]), float(importance.errors[place])
        width = 100 * min(1.0, abs(value) / scale)
        spread = 0.0 if np.isnan(error) else 200 * error / scale
        whisker = (
            f'<i style="left:{max(0.0, width - spread):.2f}%;'
            f'width:{min(100.0, width + spread) - max(0.0, width - spread):.2f}%"></i>'
        )
        name = str(report.statistics.addresses[place])
        lines.append(
            f'<li><a href="#look" data-head="{place}">{name}</a>'
            f"<small>{escape(report.kinds.best(report.statistics.addresses[place]))}</small>"
            f'<span class="bar{" below" if value < 0 else ""}"><b style="width:{width:.2f}%"></b>'
            f'{whisker if spread else ""}</span><span class="number">{number(value)}</span></li>'
        )
    return f'<ol class="bars">{"".join(lines)}</ol>'


def _kinds(labels: Sequence[Label]) -> str:
    if not labels:
        return '<span class="quiet">mixed</span>'
    return ", ".join(
        f'{escape(label.name)} <span class="quiet">{label.score:.2f}</span>' for label in labels[:3]
    )


def _listed(title: str, about: str, lines: Sequence[tuple[str, str]]) -> str:
    if not lines:
        inside = '<p class="none">None found.</p>'
    else:
        each = "".join(f"<li><b>{escape(one)}</b> {escape(more)}</li>" for one, more in lines)
        inside = f"<ul>{each}</ul>"
    count = f' <span class="count">{len(lines)}</span>' if lines else ""
    return f'<div><h3>{title}{count}</h3><p class="quiet">{about}</p>{inside}</div>'


def _amount(count: int) -> str:
    """
    >>> _amount(4_212_992), _amount(124_439_808), _amount(1_500_000_000), _amount(900)
    ('4.2 million', '124 million', '1.5 billion', '900')
    """
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return (
                f"{count / size:.3g} {word}"
                if count >= 100 * size
                else f"{count / size:.2g} {word}"
            )
    return f"{count:,}"
