"""The parts of a report that are words and tables, as HTML with every outside word escaped."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from manyheads.lens.addresses import attention_at, stacks_of
from manyheads.lens.labels import Label
from manyheads.lens.measures import SINK_ABOVE
from manyheads.models.decoder import Decoder
from manyheads.report.advice import Advice
from manyheads.report.examine import Findings, Worth
from manyheads.report.measures import Measure
from manyheads.report.reading import word_of
from manyheads.taps import Sublayer
from manyheads.wording import counted

__all__ = [
    "about_model",
    "activations",
    "advices",
    "flags_of",
    "how_made",
    "important",
    "number",
    "overview",
    "rows",
    "trouble",
]

MOST_BARS = 8
MOST_PAIRS = 12


def number(value: float, *, share: bool = False) -> str:
    """Few digits, and a dash for what is not known.

    >>> number(0.1234, share=True), number(-0.00213), number(float("nan"))
    ('12%', '−0.0021', '–')
    """
    if np.isnan(value):
        return "–"
    if share:
        return f"{value:.0%}"
    told = f"{value:#.2g}".rstrip(".") if abs(value) < 10 else f"{value:,.0f}"
    return told.replace("-", "−")


def flags_of(found: Findings) -> dict[str, list[str]]:
    """What is wrong with each head, if anything: dead, harmful, doubled."""
    names = [str(address) for address in found.seen.addresses]
    flags: dict[str, list[str]] = {name: [] for name in names}
    for address in found.dead.heads:
        flags[str(address)].append("dead")
    for place in [] if found.worth is None else found.worth.harmful:
        flags[names[place]].append("harmful")
    doubled = {str(each) for pair in found.alike.doubles for each in (pair.one, pair.other)}
    for name in sorted(doubled):
        flags[name].append("doubled")
    return flags


def about_model(found: Findings) -> str:
    """The model in one paragraph."""
    blocks, model = found.seen.blocks, found.model
    weights = sum(each.numel() for each in model.parameters())
    counts = sorted({block.heads for block in blocks})
    each = counted(counts[-1], "attention head")
    if len(counts) > 1:
        each = f"{counts[0]} to {each}"
    picture = found.reading.picture
    kind = "a decoder" if isinstance(model, Decoder) else "an encoder"
    inner = attention_at(stacks_of(model)["main"], blocks[0].layer, Sublayer.ATTENTION).config
    sees = (
        "every token sees itself and those before it"
        if isinstance(model, Decoder)
        else "every token sees those before and after it"
    )
    shared = (
        f" Its heads share {counted(inner.key_heads, 'set')} of keys and values in a layer."
        if inner.key_heads != inner.heads
        else ""
    )
    if picture is not None:
        kind, sees = "an encoder of images", "every patch and the class token see all the others"
    return (
        f"<strong>{escape(found.name)}</strong> is {kind} of {_amount(weights)} parameters: "
        f"{counted(len(blocks), 'layer')} of {each}, {found.heads} in all, on a residual "
        f"stream of {inner.width} channels; {sees}.{shared} {_measured_on(found)}"
    )


def _measured_on(found: Findings) -> str:
    picture, facts = found.reading.picture, found.seen.facts
    if picture is not None:
        return (
            f"Every number below was measured on the given image, cut into {picture.rows} x "
            f"{picture.columns} patches behind the class token, which stands first."
        )
    return (
        f"Every number below was measured on {counted(facts['tokens'], 'token')} of the given "
        f"text, in {counted(facts['texts'], 'piece')}; the patterns are those of its first "
        f"{counted(len(found.reading), 'token')}."
    )


def overview(found: Findings) -> str:
    """A few numbers at a glance."""
    kinds = Counter(found.kinds.best(each).split()[0] for each in found.seen.addresses)
    named = found.heads - kinds.get("mixed", 0)
    several = [(kind, count) for kind, count in kinds.most_common() if kind != "mixed"]
    common = ", ".join(f"{count} {kind}" for kind, count in several[:4])
    cards = [(str(found.heads), "heads", f"in {counted(len(found.seen.blocks), 'layer')}")]
    cards.append((str(named), "have a kind", common))
    if found.worth is not None:
        best = int(np.nanargmax(found.worth.loses))
        change = number(float(found.worth.loses[best]))
        told = (
            f"without it the loss rises by {change} nats"
            if found.worth.metric == "loss"
            else f"{change} of likeness is lost without it"
        )
        name = str(found.seen.addresses[best])
        cards.append((name, "matters most", told))
    harmful = 0 if found.worth is None else len(found.worth.harmful)
    idle = f"{counted(len(found.alike.doubles), 'doubled pair')}, {harmful} harmful"
    cards.append((str(len(found.dead.heads)), "are dead", idle))
    if "first_token" in found.seen:
        share = float(np.nanmean(found.seen.means["first_token"]))
        cards.append((number(share, share=True), "of all weight", "goes to the first token"))
    return "".join(
        f'<div class="card"><b>{escape(large)}</b><span>{escape(what)}</span>'
        f"<small>{escape(more)}</small></div>"
        for large, what, more in cards
    )


def important(found: Findings) -> str:
    """Bars of the heads that matter most and least, with two standard errors."""
    worth = found.worth
    if worth is None:
        return f"<p>Not measured: {escape(found.worth_missing)}.</p>"
    order = np.argsort(-np.nan_to_num(worth.loses, nan=-np.inf)).tolist()
    count = min(MOST_BARS, max(1, found.heads // 2))
    scale = float(np.nanmax(np.abs(worth.loses))) or 1.0
    return (
        f"<p>{_how_worth(worth)}</p>"
        '<div class="pair">'
        f"<div><h3>Most important</h3>{_bars(found, worth, order[:count], scale)}</div>"
        f"<div><h3>Least important</h3>{_bars(found, worth, order[::-1][:count], scale)}</div>"
        "</div>"
    )


def trouble(found: Findings) -> str:
    """Dead, doubled and harmful heads, each with its reasons."""
    said = [line.strip() for line in str(found.dead).splitlines()[1:]]
    dead = [(line.partition(": ")[0], line.partition(": ")[2]) for line in said]
    doubled = [
        (
            f"{each.one} and {each.other}",
            f"patterns {each.patterns:.2f}, outputs {each.outputs:.2f} alike (cosine)",
        )
        for each in found.alike.doubles[:MOST_PAIRS]
    ]
    harmful, names = [], found.seen.addresses
    for place in [] if found.worth is None else found.worth.harmful:
        assert found.worth is not None
        gain, error = -found.worth.loses[place], found.worth.errors[place]
        told = f"the model does better by {number(float(gain))} ±{number(float(error))} without it"
        harmful.append((str(names[place]), told))
    parts = (
        ("Dead", "They do nothing that could be seen.", dead),
        ("Doubled", "Pairs that look at the same and write the same (above 0.9).", doubled),
        ("Harmful", "The model does better without them, beyond two standard errors.", harmful),
    )
    return '<div class="triple">' + "".join(_listed(*part) for part in parts) + "</div>"


def activations(found: Findings) -> str:
    """Layer by layer: weight on the first token, and the largest value of the residual stream."""
    columns = ["layer", "on the first token", "heads with a sink", "largest activation"]
    columns += ["beside the median", "where it stands", "channel"]
    body = []
    first = found.seen["first_token"].layers() if "first_token" in found.seen else {}
    for each in found.seen.activations:
        mine = first.get(each.layer)
        sinks = "–" if mine is None else f"{int((mine > SINK_ABOVE).sum())} of {len(mine)}"
        share = "–" if mine is None else number(float(np.nanmean(mine)), share=True)
        token = "" if each.token is None else word_of(found.model.tokenizer, each.token).strip()
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
        "(Sun et al., arXiv 2402.17762); the residual stream is looked at after each layer.</p>"
    )


def rows(found: Findings, measures: Sequence[Measure]) -> tuple[str, str]:
    """The head and the body of the table of heads."""
    shown = [measure for measure in measures if measure.in_table]
    flags = flags_of(found)
    titles = [("head", ""), ("kind", ""), *((each.title, each.how) for each in shown)]
    titles += [("evidence", "")]
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button" title="{escape(how)}">'
        f"{escape(title)}</button></th>"
        for title, how in titles
    )
    body = []
    for place, address in enumerate(found.seen.addresses):
        name, labels = str(address), found.kinds.of(address)
        marks = "".join(f' <em class="flag">{flag}</em>' for flag in flags[name])
        cells = [
            f'<th scope="row" data-value="{place}"><a href="#look" data-head="{place}">{name}</a>'
            f"{marks}</th>",
            f'<td data-value="{escape(found.kinds.best(address))}">{_kinds(labels)}</td>',
        ]
        for each in shown:
            value, error = float(each.values[place]), float(each.errors[place])
            said = number(value, share=each.share)
            more = "" if np.isnan(error) else f' title="standard error {error:.2g}"'
            sort = "" if np.isnan(value) else f"{value:.6g}"
            cells.append(f'<td class="number" data-value="{sort}"{more}>{said}</td>')
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


def how_made(found: Findings, measures: Sequence[Measure]) -> str:
    """Each measure with its definition, and each kind with its threshold and where that is from."""
    defined = "".join(
        f"<dt>{escape(each.title)}</dt><dd>{escape(each.how)}</dd>" for each in measures
    )
    thresholds = found.kinds.facts.get("thresholds", {})
    kinds = "".join(
        f"<dt>{escape(kind)}</dt><dd>at least {about['above']:g}: "
        f"{escape(str(about['source']))}</dd>"
        for kind, about in thresholds.items()
    )
    missing = "".join(
        f"<dt>{escape(kind)}</dt><dd>not measured: {escape(why)}</dd>"
        for kind, why in found.kinds.missing.items()
    )
    over = "pieces of the text" if found.seen.facts["errors_over"] == "texts" else "queries"
    return (
        "<h3>Measures</h3><p>Weights of a query, A, sum to 1 over the keys it may see. Standard "
        f"errors are over {over}.</p><dl>{defined}</dl><h3>Kinds</h3><p>A head has every kind "
        "whose score reaches the least one below; the best comes first, and one without any is "
        f"mixed.</p><dl>{kinds}{missing}</dl><h3>Patterns</h3><p>Of each query the file keeps the "
        f"largest weights until 98% of its weight is shown, {found.keys} keys at the most, in "
        "eight bits each; what is left out is told beside each token.</p>"
    )


def _how_worth(worth: Worth) -> str:
    asked = "the loss in nats a token" if worth.metric == "loss" else "the likeness (cosine) lost"
    if worth.by == "ablation":
        base = f"; the whole model has {worth.baseline:.3f}" if worth.metric == "loss" else ""
        way = (
            "Each head alone was replaced by zeros (Michel et al., arXiv 1905.10650), and "
            f"{asked} compared with the whole model's{base}."
        )
    else:
        way = (
            "Estimated for all heads from one backward pass, −output · gradient: what the loss "
            "would change by without the head, were the model linear (Michel et al., arXiv "
            "1905.10650). <code>--by ablation</code> measures it exactly."
        )
    sure = (
        "; whiskers are two standard errors" if worth.texts > 1 else ", so that no error is known"
    )
    return f"{way} Means over {counted(worth.texts, 'piece')}{sure}."


def _bars(found: Findings, worth: Worth, places: Sequence[int], scale: float) -> str:
    lines = []
    for place in places:
        value, error = float(worth.loses[place]), float(worth.errors[place])
        width = 100 * min(1.0, abs(value) / scale)
        spread = 0.0 if np.isnan(error) else 200 * error / scale
        whisker = (
            f'<i style="left:{max(0.0, width - spread):.2f}%;'
            f'width:{min(100.0, width + spread) - max(0.0, width - spread):.2f}%"></i>'
        )
        name = str(found.seen.addresses[place])
        lines.append(
            f'<li><a href="#look" data-head="{place}">{name}</a>'
            f"<small>{escape(found.kinds.best(found.seen.addresses[place]))}</small>"
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
