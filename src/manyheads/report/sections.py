"""The text and the tables of a report as HTML; everything from outside is escaped."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from manyheads.formatting import UNKNOWN, number, percent, pluralise
from manyheads.lens.causal.head_importance import HeadImportance
from manyheads.lens.circuit_discovery.circuit import Circuit
from manyheads.lens.measure.measures import SINK_ABOVE
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.measure_names import describe_measure, format_value
from manyheads.models.decoder import Decoder
from manyheads.pictures.circuit_layout import STOPS, circuit_view
from manyheads.report import composition_graph
from manyheads.report.data import ReportData, ReportMeasure, Suggestion, kind_words, short_kind
from manyheads.tokenizers import token_text

MAX_BARS = 8
MAX_PAIRS = 12


def about_model(report: ReportData) -> str:
    """The model in one paragraph."""
    blocks, model = report.statistics.blocks, report.model
    weights = sum(weight.numel() for weight in model.parameters())
    counts = sorted({block.heads for block in blocks})
    stacks = [stack.config for stack in model.stacks().values()]
    layers = [layer for stack in stacks for layer in stack.layers]
    mixers = Counter(type(layer.mixer.inner).__name__ for layer in layers if layer.mixer)
    heads = pluralise(counts[-1], "head" if mixers else "attention head")
    if len(counts) > 1:
        heads = f"{counts[0]} to {heads}"
    attention = next((layer.attention.inner for layer in layers if layer.attention), None)
    depth = pluralise(len({(block.stack, block.layer) for block in blocks}), "layer")
    if report.input.image is not None:
        kind, sees = "an encoder of images", "every patch and the class token see all the others"
    elif model.reads_pairs:
        kind, sees = (
            "an encoder-decoder",
            (
                "the encoder sees the whole source, the decoder itself and those before it, and by "
                "cross-attention the source"
            ),
        )
    elif isinstance(model, Decoder):
        kind, sees = "a decoder", "every token sees itself and those before it"
    else:
        kind, sees = "an encoder", "every token sees those before and after it"
    shared = mixed = ""
    if attention is not None and attention.key_heads != attention.heads:
        sets = pluralise(attention.key_heads, "set")
        shared = f"Its heads share {sets} of keys and values in a layer."
    if mixers:
        names = ", ".join(
            f"{pluralise(count, 'layer')} by {name}" for name, count in mixers.items()
        )
        mixed = (
            f"Tokens are mixed in {names}; the weights of such heads may be negative, and shares "
            "of absolute weights are shown."
        )
    shape = (
        f"is {kind} of {_round_count(weights)} parameters: {depth} of {heads}, {report.heads} in "
        f"all, on a residual stream of {stacks[0].width} channels; {sees}."
    )
    about = sentences(shape, shared, mixed, _measured_on(report))
    return f"<strong>{escape(report.name)}</strong> {about}"


def sentences(*texts: str) -> str:
    """Sentences one after another, each in an element of its own, which the page translates."""
    return " ".join(f"<span>{text}</span>" for text in texts if text)


def _measured_on(report: ReportData) -> str:
    image, metadata = report.input.image, report.statistics.metadata
    if image is not None:
        return (
            f"Every number below was measured on the image, split into {image.rows} x "
            f"{image.columns} patches behind the class token, which comes first."
        )
    noun, tokens = "text", f"the first {pluralise(len(report.input), 'token')}"
    if report.input.source_ids:
        noun, tokens = "pair", "the first pair"
    return (
        f"Every number below was measured on {pluralise(metadata['texts'], noun)}, "
        f"{pluralise(metadata['tokens'], 'token')}; the patterns are those of {tokens}."
    )


def overview(report: ReportData) -> str:
    """A few numbers at a glance."""
    addresses = report.statistics.addresses
    kinds = Counter(labels[0].kind for labels in map(report.kinds.of, addresses) if labels)
    named = kinds.total()
    common = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4))
    blocks = report.statistics.blocks
    layers = pluralise(len({(block.stack, block.layer) for block in blocks}), "layer")
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
    order = _by_importance(importance)
    count = min(MAX_BARS, max(1, report.heads // 2))
    most, least = (_bars(report, importance, indices[:count]) for indices in (order, order[::-1]))
    return (
        f"<p>{_describe_importance(importance)}</p>"
        '<div class="pair">'
        f"<div><h3>Most important</h3>{most}</div><div><h3>Least important</h3>{least}</div>"
        "</div>"
    )


PREDICTED = {
    "next token": "Each token is shaded by how probable it was after those before it",
    "masked token": "Each shaded token was masked once, and is shaded by how probable it was there",
    "token classes": "The model gives every token a class",
    "classes": "What the model takes it for",
}


def predictions(report: ReportData) -> str:
    """The most probable outputs: at each token by script, at the last one without."""
    result = report.predictions
    if result.unknown or not result.rows:
        why = result.unknown or "no token of the text could be predicted"
        return f"<p>No prediction: {escape(why)}.</p>"
    loss = ""
    if not np.isnan(result.loss):
        loss = (
            f"The mean loss of the right token is {result.loss:.2f} nats, and it is the most "
            f"probable one in {percent(result.hits)} of places."
        )
    about = sentences(f"{PREDICTED[result.output]}.", loss)
    top = last_prediction(report, place=' id="predicted-top"')
    if result.output == "classes":
        return f'<p class="lead">{about}</p><div class="panel narrow">{top}</div>'
    hint = "Point at a token, tap it or use the arrow keys."
    return (
        f'<p class="lead">{about}</p><div class="columns"><div class="panel">'
        '<div id="predicted-text" class="text" tabindex="0" role="group" '
        'aria-label="The text; arrow keys choose a token"></div>'
        f'<p class="quiet">{hint}</p></div><div class="panel" aria-live="polite">'
        f'<h3 id="predicted-after">At the end of the text</h3>{top}</div></div>'
    )


def last_prediction(report: ReportData, place: str = "") -> str:
    """The most probable outputs at the last position, as bars."""
    result = report.predictions
    if not result.rows:
        return f"<p>No prediction: {escape(result.unknown)}.</p>"
    bars = "".join(
        f'<li><bdi class="word">{escape(result.names[name])}</bdi>{_bar(100 * part)}'
        f'<span class="number">{percent(part)}</span></li>'
        for name, part in result.rows[-1].top
    )
    return f'<ol{place} class="bars words">{bars}</ol>'


def compositions(report: ReportData) -> str:
    """The heads that read what others wrote, as a picture and as a table."""
    edges = report.compositions
    if not edges:
        return f"<p>Not measured: {escape(report.unknown_compositions)}.</p>"
    addresses = report.statistics.addresses
    indices = {head: index for index, head in enumerate(addresses)}
    kinds = {head: short_kind(report.inspection, head) for head in addresses}
    picture = composition_graph.draw_compositions(edges, kinds, indices)
    confirmed = sum(edge.without is not None for edge in edges)
    bold = (
        f"A dot marks what ablation confirmed ({pluralise(confirmed, 'pair')}): without the "
        "first head the second loses its pattern."
        if confirmed
        else ""
    )
    rows = []
    for edge in edges:
        ends = "".join(
            f'<td data-value="{indices[head]}">{_head_link(indices[head], head)} '
            f'<span class="quiet">{escape(kinds[head])}</span></td>'
            for head in (edge.writer, edge.reader)
        )
        by = "weights alone"
        if edge.without is not None:
            by = f"ablation: score {edge.without[0]:.2f}, without it {edge.without[1]:.2f}"
        rows.append(
            f"<tr>{ends}<td>{composition_graph.READS[edge.through]}</td>"
            f'<td class="number" data-value="{edge.score:.6g}">{edge.score:.2f}</td>'
            f'<td class="number" data-value="{edge.usual:.6g}">{edge.usual:.2f}</td>'
            f"<td>{by}</td></tr>"
        )
    titles = ("This head writes", "This one reads it", "What for", "Score", "Median", "Known by")
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{title}</button></th>'
        for title in titles
    )
    legend = "".join(
        f'<span class="way {way}"><svg aria-hidden="true" width="34" height="8">'
        f'<path d="M0 4 H34"/></svg> {about}</span>'
        for way, about in composition_graph.READS.items()
    )
    lead = sentences(
        "A line goes from a head that writes into the residual stream to a later head that reads "
        "it.",
        "Scores come from the weights (Elhage et al. 2021, composition); the "
        f"{len(edges)} pairs furthest above the median of all pairs are drawn.",
        bold,
    )
    return (
        f'<p class="lead">{lead}</p>'
        f'<div class="scroll">{picture}</div><p class="ways quiet">It reads: {legend}</p>'
        "<details><summary>The same as a table</summary>"
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def describe_circuit(circuit: Circuit) -> str:
    """What was measured: the task, the metric of both runs, the method and its faithfulness."""
    metadata, curve = circuit.metadata, circuit.metadata.get("curve", {})
    task = f" (task {metadata['task']})" if "task" in metadata else ""
    words = (
        f"On {pluralise(metadata['texts'], 'pair')}{task} the {circuit.metric} is "
        f"{number(circuit.clean)} in the clean runs and {number(circuit.corrupted)} in the "
        f"corrupted ones. Every {'edge' if circuit.level == 'edge' else 'head and MLP'} was scored "
        f"by {circuit.method}."
    )
    if curve:
        words += (
            " Circuits of the strongest, evaluated exactly with all others corrupted, have CPR "
            f"{number(curve['cpr'])} (the area under their faithfulness, the larger the better) "
            f"and CMD {number(curve['cmd'])} (the area between it and 1, the smaller the better)."
        )
    return words + (f" Beware: {circuit.warning}." if circuit.warning else "")


def circuit_data(circuit: Circuit) -> dict[str, Any]:
    """What the script draws a circuit and its faithfulness from."""
    ranked = circuit.ranked(STOPS[-1])
    edges = [(edge.writer, edge.reader, score) for edge, score, _ in ranked]
    errors = [error for _, _, error in ranked]
    curve = circuit.metadata.get("curve", {})
    columns = [curve.get(name, ()) for name in ("counts", "faithfulness", "errors")]
    view = circuit_view(edges, errors, int((~np.isnan(circuit.scores)).sum()))
    return {"view": view, "curve": [*zip(*columns, strict=True)]}


def examples(report: ReportData) -> str:
    """A place for the examples of each important head, which the script fills."""
    if not report.examples:
        return "<p>There are no texts to choose from.</p>"
    indices = {head: index for index, head in enumerate(report.statistics.addresses)}
    importance = report.importance
    places: list[str] = []
    for head in report.examples:
        worth = ""
        if importance is not None:
            about = describe_measure(importance.measure)
            change = number(float(importance.change[indices[head]]))
            worth = f", <span>{escape(about.label)}</span> {change}"
        words = f"{sentences(escape(kind_words(report.inspection, head)))}{worth}"
        places.append(
            f"<details{' open' if not places else ''}><summary>{head} "
            f'<span class="quiet">{words}</span></summary>'
            f'<div data-examples="{indices[head]}"></div></details>'
        )
    chosen = "The heads that matter most" if importance is not None else "The clearest heads"
    lead = sentences(
        f"{chosen}, each on the texts of this report where it gives a single token the largest "
        "weight, the first token left out.",
        "Point at a token, tap it, or use the arrow keys: the tokens that it looks at are shaded.",
    )
    return f'<p class="lead">{lead}</p><div class="examples">{"".join(places)}</div>'


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
        f'<th scope="col" aria-sort="none"{_class_of(title)}>'
        f'<button type="button" title="{escape(about)}">'
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
            f'<td data-value="{escape(short_kind(report.inspection, address))}">'
            f"{_kinds(report, address)}</td>",
        ]
        for column in columns:
            value, error = float(column.values[index]), float(column.errors[index])
            text = format_value(value, column.about.unit)
            more = "" if np.isnan(error) else f' title="standard error {error:.2g}"'
            sort = "" if np.isnan(value) else f"{value:.6g}"
            cells.append(f'<td class="number" data-value="{sort}"{more}>{text}</td>')
        evidence = labels[0].evidence if labels else report.kinds.why_mixed(address)
        cells.append(f'<td class="evidence" lang="en">{escape(evidence)}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    return head, "\n".join(body)


def _class_of(title: str) -> str:
    """The evidence is in English alone."""
    return ' class="evidence"' if title == "Evidence" else ""


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
    kinds = "".join(
        f"<dt>{escape(kind)}</dt><dd><span>at least {about['above']:g}</span>: "
        f'<span lang="en">{escape(about["source"])}</span></dd>'
        for kind, about in thresholds.items()
    )
    missing = _terms((kind, f"not measured: {why}") for kind, why in report.kinds.missing.items())
    by_text = report.statistics.metadata["errors_over"] == "texts"
    over = "texts" if by_text else "queries"
    weights = sentences(
        "The weights A of a query sum to 1 over its visible keys.",
        f"Standard errors are over {over}.",
    )
    return (
        f"<h3>Measures</h3><p>{weights}</p><dl>{defined}</dl><h3>Kinds</h3><p>A head has every "
        "kind whose score exceeds its threshold, on synthetic texts in most of the draws; in "
        "brackets the 95% interval. The most specific kind comes first. A head without any has the "
        f"one that it comes closest to, and what it lacks.</p><dl>{kinds}{missing}</dl>"
        "<h3>Patterns</h3><p>For each query the file keeps the largest weights, up to 98% of the "
        "total and at most "
        f"{report.keys} keys, with eight bits each; the rest is given beside each token.</p>"
    )


def _terms(definitions: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(about)}</dd>" for term, about in definitions
    )


def _describe_importance(importance: HeadImportance) -> str:
    if importance.by == "gradient":
        method = sentences(
            "Estimated for all heads from one backward pass, −output · gradient: the change of "
            "the loss without the head if the model were linear (Michel et al., arXiv "
            "1905.10650).",
            "<code>--by ablation</code> measures it exactly.",
        )
    else:
        ablated = "Each head alone was replaced by zeros (Michel et al., arXiv 1905.10650)"
        method = sentences(
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
    over = sentences(f"Means over {pluralise(importance.texts, 'text')}{errors}.")
    return f"{method} {over}"


def most_important(report: ReportData) -> str:
    """The bars of the heads that matter most."""
    importance = report.importance
    if importance is None:
        return f"<p>Not measured: {escape(report.unknown_importance)}.</p>"
    return _bars(report, importance, _by_importance(importance)[:MAX_BARS], linked=False)


def _by_importance(importance: HeadImportance) -> list[int]:
    return np.argsort(-np.nan_to_num(importance.change, nan=-np.inf)).tolist()


def _bars(
    report: ReportData, importance: HeadImportance, indices: Sequence[int], *, linked: bool = True
) -> str:
    lines = []
    # The longest whisker fits too.
    reach = np.abs(importance.change) + 2 * np.nan_to_num(importance.errors)
    scale = float(np.nanmax(reach)) or 1.0
    for index in indices:
        value, error = float(importance.change[index]), float(importance.errors[index])
        width = 100 * min(1.0, abs(value) / scale)
        spread = 0.0 if np.isnan(error) else 200 * error / scale
        address = report.statistics.addresses[index]
        words = kind_words(report.inspection, address)
        lines.append(
            f"<li>{_head_link(index, address) if linked else f'<b>{address}</b>'}"
            f'<small title="{escape(words)}">{_short_score(report, address)}</small>'
            f"{_bar(width, spread, below=value < 0)}"
            f'<span class="number">{number(value)}</span></li>'
        )
    return f'<ol class="bars">{"".join(lines)}</ol>'


def _head_link(index: int, head: Address) -> str:
    """A link that opens a head in the view at the top."""
    return f'<a href="#head" data-head="{index}">{head}</a>'


def _short_score(report: ReportData, head: Address) -> str:
    """The kind of a head, or "near induction 0.31 of 0.40"."""
    near = report.kinds.nearest.get(head)
    score = "" if near is None or report.kinds.of(head) else f" {near.score:.2f}"
    above = f" of {near.threshold:.2f}" if score and near and near.score <= near.threshold else ""
    return f"{sentences(escape(short_kind(report.inspection, head)))}{score}{above}"


def _bar(width: float, spread: float = 0.0, *, below: bool = False) -> str:
    """A bar in percent of its place, with a whisker on both sides of its end."""
    start, end = max(0.0, width - spread), min(100.0, width + spread)
    ends = "".join(f'<rect x="{x:.2f}%" y="4" width="2" height="8"/>' for x in (start, end))
    whisker = (
        f'<g class="whisker"><rect x="{start:.2f}%" y="7" width="{end - start:.2f}%" height="2"/>'
        f"{ends}</g>"
    )
    return (
        f'<svg class="bar{" below" if below else ""}" aria-hidden="true"><rect class="value" '
        f'width="{width:.2f}%" height="16" rx="4"/>{whisker if spread else ""}</svg>'
    )


def _kinds(report: ReportData, address: Address) -> str:
    """Each kind with its score, interval and sample, or the nearest kind."""
    labels = report.kinds.of(address)
    if not labels:
        return f'<span class="quiet">{escape(kind_words(report.inspection, address))}</span>'
    lines = []
    for label in labels[:3]:
        low, high = label.interval
        bounds = "" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]"
        score = f'{label.score:.2f}{bounds},</span> <span class="quiet">{escape(label.sample)}'
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
