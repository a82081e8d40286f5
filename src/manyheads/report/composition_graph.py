"""Which heads read what which heads wrote: the strongest compositions, as a picture and a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from manyheads.errors import ManyheadsError
from manyheads.lens.head_kinds.kinds import Kinds
from manyheads.lens.results.addresses import Address
from manyheads.lens.weights.composition import Through, composition_scores
from manyheads.models import build
from manyheads.models.stack import Stack

# As many edges as one can follow.
MAX_EDGES = 20
# Multiplications for all pairs of heads; 1e11, for 12 x 12 heads of size 64, took a core a minute.
MAX_MULTIPLICATIONS = 3e11
WAYS: tuple[Through, ...] = ("query", "key", "value")
READS = {"query": "to form its queries", "key": "to form its keys", "value": "to pass it on"}
# Pixels: a head, and the room around it.
HEAD_WIDTH, HEAD_HEIGHT, COLUMN, ROW, EDGE = 74, 34, 158, 52, 26


@dataclass(frozen=True, slots=True)
class HeadComposition:
    """A later head reads what an earlier one wrote; `usual` is the median score of all pairs.

    `without` is the score of an induction head with and without its partner, where it was measured.
    """

    writer: Address
    reader: Address
    through: Through
    score: float
    usual: float
    without: tuple[float, float] | None = None


def strongest_compositions(
    model: build.Model, kinds: Kinds | None
) -> tuple[tuple[HeadComposition, ...], str]:
    """The strongest compositions within each stack, or the reason why there are none.

    The pairs of an induction head and its partner come first; then those whose score is furthest
    above the median of all pairs, which random heads have too.
    """
    stacks = model.stacks()
    if sum(map(_cost, stacks.values())) > MAX_MULTIPLICATIONS:
        return (), "the model has too many pairs of heads; lens.composition_scores compares them"
    partners = {} if kinds is None else kinds.metadata.get("partners", {})
    edges: list[HeadComposition] = []
    reasons = []
    for stack in stacks:
        try:
            for way in WAYS:
                edges += _strongest(model, stack, way, partners)
        except ManyheadsError as error:
            reasons.append(str(error))
    edges.sort(key=lambda edge: (edge.without is None, edge.usual - edge.score))
    if not edges and not reasons:
        reasons.append("no head has a head in a layer before it")
    return tuple(edges[:MAX_EDGES]), "" if edges else reasons[0]


def _cost(stack: Stack) -> float:
    """Multiplications for all pairs of heads of a stack, through queries, keys and values."""
    attentions = [layer.attention.inner for layer in stack.config.layers if layer.attention]
    heads = sum(attention.heads for attention in attentions)
    size = max((attention.size for attention in attentions), default=0)
    return 1.5 * heads**2 * size**2 * stack.config.width


def _strongest(
    model: build.Model, stack: str, through: Through, partners: Mapping[str, Mapping[str, object]]
) -> list[HeadComposition]:
    result = composition_scores(model, through, stack=stack)
    heads, values = result.addresses, result.values
    measured = values[~np.isnan(values)]
    if not len(measured):
        return []
    usual = float(np.median(measured))
    confirmed = {
        (str(partner["head"]), reader): (float(partner["score"]), float(partner["without"]))  # type: ignore[arg-type]
        for reader, partner in partners.items()
        if through == "key" and "without" in partner
    }
    order = np.argsort(-np.nan_to_num(values, nan=-np.inf), axis=None, kind="stable")
    chosen = [divmod(int(flat), len(heads)) for flat in order[:MAX_EDGES]]
    names = {str(head): index for index, head in enumerate(heads)}
    chosen += [
        (names[writer], names[reader])
        for writer, reader in confirmed
        if writer in names and reader in names
    ]
    return [
        HeadComposition(
            heads[row],
            heads[column],
            through,
            float(values[row, column]),
            usual,
            confirmed.get((str(heads[row]), str(heads[column]))),
        )
        for row, column in dict.fromkeys(chosen)
        if values[row, column] > usual
    ]


def draw_compositions(
    edges: Sequence[HeadComposition], kinds: Mapping[Address, str], indices: Mapping[Address, int]
) -> str:
    """An SVG: layers from left to right, each with the heads that have an edge."""
    columns: dict[tuple[str, int], list[Address]] = {}
    nodes = {head for edge in edges for head in (edge.writer, edge.reader)}
    for head in sorted(nodes, key=lambda head: indices[head]):
        columns.setdefault((head.stack, head.head.layer), []).append(head)
    tallest = max(map(len, columns.values()))
    width = EDGE + (len(columns) - 1) * COLUMN + HEAD_WIDTH + EDGE
    height = 2 * EDGE + tallest * ROW
    places = {}
    for column, heads in enumerate(columns.values()):
        top = EDGE + 14 + (tallest - len(heads)) * ROW / 2
        for row, head in enumerate(heads):
            places[head] = float(EDGE + column * COLUMN), top + row * ROW
    most = max(edge.score for edge in edges)
    lines = [_edge(edge, places, most) for edge in sorted(edges, key=lambda edge: edge.score)]
    names = [
        f'<text class="layer" x="{EDGE + column * COLUMN + HEAD_WIDTH / 2:g}" y="18">'
        f"{'' if stack == 'main' else escape(stack) + ' '}layer {layer}</text>"
        for column, (stack, layer) in enumerate(columns)
    ]
    boxes = [_box(head, place, kinds[head], indices[head]) for head, place in places.items()]
    return (
        f'<svg class="graph" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="Heads from the first layer at the left to the '
        'last, and lines from heads that write to heads that read; the table below has the same">'
        f"{''.join(names)}{''.join(lines)}{''.join(boxes)}</svg>"
    )


def _edge(edge: HeadComposition, places: Mapping[Address, tuple[float, float]], most: float) -> str:
    (left, top), (right, bottom) = places[edge.writer], places[edge.reader]
    start, end = left + HEAD_WIDTH, right
    above, below = top + HEAD_HEIGHT / 2, bottom + HEAD_HEIGHT / 2
    bend = (end - start) * 0.45
    mark = ""
    if edge.without is not None:
        middle = f'cx="{(start + end) / 2:g}" cy="{(above + below) / 2:g}"'
        mark = f'<circle class="confirmed" {middle} r="5"/>'
    return (
        f'<path class="{edge.through}" d="M{start:g} {above:g} C{start + bend:g} {above:g} '
        f'{end - bend:g} {below:g} {end:g} {below:g}" '
        f'stroke-width="{1 + 4 * edge.score / most:.1f}">'
        f"<title>{edge.reader} reads {edge.writer} {READS[edge.through]}: {edge.score:.2f}</title>"
        f"</path>{mark}"
    )


def _box(head: Address, place: tuple[float, float], kind: str, index: int) -> str:
    x, y = place
    middle = x + HEAD_WIDTH / 2
    short = kind if len(kind) <= 14 else kind[:13] + "…"
    return (
        f'<a href="#head" data-head="{index}"><title>{escape(f"{head}: {kind}")}</title>'
        f'<rect x="{x:g}" y="{y:g}" width="{HEAD_WIDTH}" height="{HEAD_HEIGHT}" rx="8"/>'
        f'<text x="{middle:g}" y="{y + 14:g}">{head.head}</text>'
        f'<text class="kind-name" x="{middle:g}" y="{y + 27:g}">{escape(short)}</text></a>'
    )
