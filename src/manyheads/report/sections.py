"""The text and the tables of a report as HTML; everything from outside is escaped."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from manyheads.formatting import UNKNOWN, number, percent, pluralise
from manyheads.lens.causal.head_importance import HeadImportance
from manyheads.lens.measure.measures import SINK_ABOVE
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.measure_names import format_value
from manyheads.models.decoder import Decoder
from manyheads.report.data import ReportData, ReportMeasure, Suggestion
from manyheads.tokenizers import token_text

MAX_BARS = 8
MAX_PAIRS = 12


def about_model(report: ReportData) -> str:
    """The model in one paragraph."""
    blocks, model = report.statistics.blocks, report.model
    weights = sum(weight.numel() for weight in model.parameters())
    counts = sorted({block.heads for block in blocks})
    stack = model.stacks()["main"].config
    layers, width = stack.layers, stack.width
    mixers = Counter(type(layer.mixer.inner).__name__ for layer in layers if layer.mixer)
    heads = pluralise(counts[-1], "head" if mixers else "attention head")
    if len(counts) > 1:
        heads = f"{counts[0]} to {heads}"
    attention = next((layer.attention.inner for layer in layers if layer.attention), None)
    if report.input.image is not None:
        kind, sees = "an encoder of images", "every patch and the class token see all the others"
    elif isinstance(model, Decoder):
        kind, sees = "a decoder", "every token sees itself and those before it"
    else:
        kind, sees = "an encoder", "every token sees those before and after it"
    shared = ""
    if attention is not None and attention.key_heads != attention.heads:
        sets = pluralise(attention.key_heads, "set")
        shared = f" Its heads share {sets} of keys and values in a layer."
    if mixers:
        names = ", ".join(
            f"{pluralise(count, 'layer')} by {name}" for name, count in mixers.items()
        )
        shared += (
            f" Tokens are mixed in {names}; the weights of such heads may be negative, and shares "
            "of absolute weights are shown."
        )
    return (
        f"<strong>{escape(report.name)}</strong> is {kind} of {_round_count(weights)} parameters: "
        f"{pluralise(len(blocks), 'layer')} of {heads}, {report.heads} in all, on a residual "
        f"stream of {width} channels; {sees}.{shared} {_measured_on(report)}"
    )


def _measured_on(report: ReportData) -> str:
    image, metadata = report.input.image, report.statistics.metadata
    if image is not None:
        return (
            f"Every number below was measured on the image, split into {image.rows} x "
            f"{image.columns} patches behind the class token, which comes first."
        )
    return (
        f"Every number below was measured on {pluralise(metadata['texts'], 'text')}, "
        f"{pluralise(metadata['tokens'], 'token')}; the patterns are those of the first "
        f"{pluralise(len(report.input), 'token')}."
    )


def overview(report: ReportData) -> str:
    """A few numbers at a glance."""
    addresses = report.statistics.addresses
    kinds = Counter(report.kinds.best(address).split()[0] for address in addresses)
    named = report.heads - kinds.pop("mixed", 0)
    common = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4))
    layers = pluralise(len(report.statistics.blocks), "layer")
    cards = [(str(report.heads), "heads", f"in {layers}"), (str(named), "have a kind", common)]
    if report.importance is not None:
        best = int(np.nanargmax(report.importance.change))
        change = number(float(report.importance.change[best]))
        effect = (
            f"without it the loss rises by {change} nats"
            if report.importance.metric == "loss"
            else f"the similarity falls by {change} without it"
        )
        cards.append((str(addresses[best]), "matters most", effect))
    harmful = 0 if report.importance is None else len(report.importance.harmful)
    pairs = pluralise(len(report.inspection.duplicate_pairs), "duplicate pair")
    dead = str(len(report.inspection.dead.heads))
    cards.append((dead, "are dead", f"{pairs}, {harmful} harmful"))
    weights = report.statistics.means.get("first_token")
    if weights is not None and not np.isnan(weights).all():
        share = float(np.nanmean(weights))
        cards.append((percent(share), "of all weight", "goes to the first token"))
    return "".join(
        f'<div class="card"><b>{escape(large)}</b><span>{escape(what)}</span>'
        f"<small>{escape(more)}</small></div>"
        for large, what, more in cards
    )


def importance(report: ReportData) -> str:
    """Bars of the heads that matter most and least, with two standard errors."""
    importance = report.importance
    if importance is None:
        return f"<p>Not measured: {escape(report.unknown_importance)}.</p>"
    order = np.argsort(-np.nan_to_num(importance.change, nan=-np.inf)).tolist()
    count = min(MAX_BARS, max(1, report.heads // 2))
    scale = float(np.nanmax(np.abs(importance.change))) or 1.0
    most, least = (
        _bars(report, importance, indices[:count], scale) for indices in (order, order[::-1])
    )
    return (
        f"<p>{_describe_importance(importance)}</p>"
        '<div class="pair">'
        f"<div><h3>Most important</h3>{most}</div><div><h3>Least important</h3>{least}</div>"
        "</div>"
    )


def problem_heads(report: ReportData) -> str:
    """Dead, duplicate and harmful heads, each with its reasons."""
    reasons = str(report.inspection.dead).splitlines()[1:]
    dead = [tuple(line.strip().split(": ", 1)) for line in reasons]
    duplicates = [
        (
            f"{pair.one} and {pair.other}",
            f"cosine similarity of patterns {pair.patterns:.2f}, of outputs {pair.outputs:.2f}",
        )
        for pair in report.inspection.duplicate_pairs[:MAX_PAIRS]
    ]
    harmful, importance = [], report.importance
    for index in () if importance is None else importance.harmful:
        assert importance is not None
        gain, error = -float(importance.change[index]), float(importance.errors[index])
        effect = f"the model does better by {number(gain)} ±{number(error)} without it"
        harmful.append((str(report.statistics.addresses[index]), effect))
    parts = (
        ("Dead", "Heads without a measurable effect.", dead),
        ("Duplicate", "Pairs with the same pattern and the same output (above 0.9).", duplicates),
        ("Harmful", "The model does better without them, beyond two standard errors.", harmful),
    )
    sections = []
    for title, about, lines in parts:
        inside, count = '<p class="none">None found.</p>', ""
        if lines:
            items = "".join(f"<li><b>{escape(head)}</b> {escape(why)}</li>" for head, why in lines)
            inside, count = f"<ul>{items}</ul>", f' <span class="count">{len(lines)}</span>'
        heading = f'<h3>{title}{count}</h3><p class="quiet">{about}</p>'
        sections.append(f"<div>{heading}{inside}</div>")
    return f'<div class="triple">{"".join(sections)}</div>'


def activations(report: ReportData) -> str:
    """Layer by layer: weight on the first token, and the largest value of the residual stream."""
    columns = ["Layer", "First token", "Heads with a sink", "Largest activation"]
    columns += ["Times the median", "Position", "Channel"]
    body = []
    first = report.statistics["first_token"].layers() if "first_token" in report.statistics else {}
    for layer in report.statistics.activations:
        share = sinks = UNKNOWN
        weights = first.get(layer.layer)
        if weights is not None and not np.isnan(weights).all():
            sinks = f"{int((weights > SINK_ABOVE).sum())} of {len(weights)}"
            share = percent(float(np.nanmean(weights)))
        tokenizer = report.model.tokenizer
        token = "" if layer.token is None else token_text(tokenizer, layer.token).strip()
        position = f"token {layer.position} of text {layer.text}, <code>{escape(token)}</code>"
        massive = ' <em class="flag">massive</em>' if layer.massive else ""
        ratio = layer.largest / layer.median if layer.median else float("nan")
        cells = [str(layer.layer), share, sinks, f"{number(layer.largest)}{massive}"]
        cells += [f"{number(ratio)} ×", position, str(layer.channel)]
        body.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{column}</th>" for column in columns)
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        '<p class="quiet">An activation is massive above 100 and about 1,000 times the median '
        "(Sun et al., arXiv 2402.17762); the residual stream is measured after each layer.</p>"
    )


def head_table(report: ReportData, measures: Sequence[ReportMeasure]) -> tuple[str, str]:
    """The head and the body of the table of heads."""
    columns = [measure for measure in measures if measure.in_table]
    flags = report.inspection.flags()
    about = [(column.about.title, column.about.about) for column in columns]
    titles = [("Head", ""), ("Kind", ""), *about, ("Evidence", "")]
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button" title="{escape(about)}">'
        f"{escape(title)}</button></th>"
        for title, about in titles
    )
    body = []
    for index, address in enumerate(report.statistics.addresses):
        name, labels = str(address), report.kinds.of(address)
        marks = "".join(f' <em class="flag">{flag}</em>' for flag in flags[address])
        cells = [
            f'<th scope="row" data-value="{index}"><a href="#head" data-head="{index}">{name}</a>'
            f"{marks}</th>",
            f'<td data-value="{escape(report.kinds.best(address))}">{_kinds(report, address)}</td>',
        ]
        for column in columns:
            value, error = float(column.values[index]), float(column.errors[index])
            text = format_value(value, column.about.unit)
            more = "" if np.isnan(error) else f' title="standard error {error:.2g}"'
            sort = "" if np.isnan(value) else f"{value:.6g}"
            cells.append(f'<td class="number" data-value="{sort}"{more}>{text}</td>')
        evidence = labels[0].evidence if labels else report.kinds.why_mixed(address)
        cells.append(f'<td class="evidence">{escape(evidence)}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    return head, "\n".join(body)


def next_steps(suggestions: Iterable[Suggestion]) -> str:
    return "".join(
        f"<li><h3>{escape(suggestion.title)}</h3><p>{escape(suggestion.why)}</p>"
        f"<pre><code>{escape(suggestion.command)}</code></pre></li>"
        for suggestion in suggestions
    )


def definitions(report: ReportData, measures: Sequence[ReportMeasure]) -> str:
    """Every measure with its definition, every kind with its threshold and the source of it."""
    defined = _terms((measure.about.title, measure.about.about) for measure in measures)
    thresholds = report.kinds.metadata.get("thresholds", {})
    kinds = _terms(
        (kind, f"at least {about['above']:g}: {about['source']}")
        for kind, about in thresholds.items()
    )
    missing = _terms((kind, f"not measured: {why}") for kind, why in report.kinds.missing.items())
    by_text = report.statistics.metadata["errors_over"] == "texts"
    over = "texts" if by_text else "queries"
    return (
        "<h3>Measures</h3><p>The weights A of a query sum to 1 over its visible keys. Standard "
        f"errors are over {over}.</p><dl>{defined}</dl><h3>Kinds</h3><p>A head has every kind "
        "whose score exceeds its threshold, on synthetic texts in most of the draws; in brackets "
        "the 95% interval. The most specific kind comes first. A head without any is mixed, "
        f"with the nearest one.</p><dl>{kinds}{missing}</dl><h3>Patterns</h3><p>For each query the "
        "file keeps the largest weights, up to 98% of the total and at most "
        f"{report.keys} keys, with eight bits each; the rest is given beside each token.</p>"
    )


def _terms(definitions: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(about)}</dd>" for term, about in definitions
    )


def _describe_importance(importance: HeadImportance) -> str:
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
    return f"{method} Means over {pluralise(importance.texts, 'text')}{errors}."


def _bars(
    report: ReportData, importance: HeadImportance, indices: Sequence[int], scale: float
) -> str:
    lines = []
    for index in indices:
        value, error = float(importance.change[index]), float(importance.errors[index])
        width = 100 * min(1.0, abs(value) / scale)
        spread = 0.0 if np.isnan(error) else 200 * error / scale
        whisker = (
            f'<i style="left:{max(0.0, width - spread):.2f}%;'
            f'width:{min(100.0, width + spread) - max(0.0, width - spread):.2f}%"></i>'
        )
        address = report.statistics.addresses[index]
        lines.append(
            f'<li><a href="#head" data-head="{index}">{address}</a>'
            f"<small>{escape(report.kinds.best(address))}</small>"
            f'<span class="bar{" below" if value < 0 else ""}"><b style="width:{width:.2f}%"></b>'
            f'{whisker if spread else ""}</span><span class="number">{number(value)}</span></li>'
        )
    return f'<ol class="bars">{"".join(lines)}</ol>'


def _kinds(report: ReportData, address: Address) -> str:
    """Each kind with its score, interval and sample, or the nearest kind."""
    labels = report.kinds.of(address)
    if not labels:
        return f'<span class="quiet">{escape(report.kinds.describe(address))}</span>'
    lines = []
    for label in labels[:3]:
        low, high = label.interval
        bounds = "" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]"
        score = f"{label.score:.2f}{bounds}, {escape(label.sample)}"
        lines.append(f'{escape(label.name)} <span class="quiet">{score}</span>')
    return "<br>".join(lines)


def _round_count(count: int) -> str:
    """
    >>> _round_count(4_212_992), _round_count(1_500_000_000), _round_count(900)
    ('4.2 million', '1.5 billion', '900')
    """
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            digits = 3 if count >= 100 * size else 2
            return f"{count / size:.{digits}g} {word}"
    return f"{count:,}"
