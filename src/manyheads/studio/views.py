"""From a reading to what a page draws: plain lists, few digits, windows of weights."""

from base64 import b64encode
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.models.readout import ClassHead, pooled
from manyheads.studio.kept_run import Reading, Stopped
from manyheads.studio.models import Book, Text
from manyheads.studio.requests import LeftError
from manyheads.taps import Head

# Weights below this are not told: they would not be seen.
LEAST = 5e-4


def opened(book: Book, text: Text, reading: Reading) -> dict[str, Any]:
    """The tokens, and how surprising each was to a model that writes."""
    found: dict[str, Any] = {
        "tokens": list(text.pieces),
        "cut": text.cut,
        "longest": book.longest,
        "loss": None,
        "losses": None,
    }
    if book.answers == "next" and len(text) > 1:
        losses = reading.losses()
        found["loss"] = rounded(float(losses.mean()))
        found["losses"] = [None, *(round(each, 3) for each in losses.tolist())]
    return found


def looks(reading: Reading, heads: tuple[Head, ...], at: int, count: int, stopped: Stopped) -> Any:
    """For each head where one token looks."""
    here, everything = range(at, at + 1), range(reading.length)
    found = {}
    for head in reading.check(heads):
        found[str(head)] = _largest(reading.weights(head, here, everything, stopped)[0], count)
    return {"at": at, "heads": found}


def lookers(
    reading: Reading, heads: tuple[Head, ...], at: int, count: int, stopped: Stopped
) -> Any:
    """For each head which tokens look at one; of a long text this sums up every row once."""
    here, everything = range(at, at + 1), range(reading.length)
    found = {}
    for head in reading.check(heads):
        found[str(head)] = _largest(reading.weights(head, everything, here, stopped)[:, 0], count)
    return {"at": at, "heads": found}


def rows(
    reading: Reading, heads: tuple[Head, ...], span: range, count: int, stopped: Stopped
) -> Any:
    """For each head and each query of a span the keys it looks at most."""
    found = {}
    for head in reading.check(heads):
        each = []
        for strip in reading.strips(span):
            if stopped():
                raise LeftError
            for row in reading.weights(head, strip, range(reading.length), stopped):
                each.append(_largest(row, count))
        found[str(head)] = each
    return {"start": span.start, "stop": span.stop, "heads": found}


def head_map(
    reading: Reading, head: Head, span: range, keys: range, cells: int, stopped: Stopped
) -> Any:
    """A window of a pattern, row after row, four bytes a weight (a little-endian float32).

    A window of more than `cells` a side is drawn smaller; a cell is then the largest weight in it.
    """
    reading.check((head,))
    height, width = min(len(span), cells), min(len(keys), cells)
    edges = torch.linspace(0, len(span), height + 1).round().long().tolist()
    lines = []
    for first, last in pairwise(edges):
        lines.append(range(span.start + first, span.start + last))
    drawn = [
        part
        for group in _grouped(lines, len(keys))
        for part in _pooled(reading, head, group, keys, width, stopped)
    ]
    weights = torch.stack(drawn).cpu().numpy().astype("<f4")
    return {
        "head": str(head),
        "rows": [span.start, span.stop],
        "keys": [keys.start, keys.stop],
        "height": height,
        "width": width,
        "data": b64encode(weights.tobytes()).decode("ascii"),
    }


def answers(
    book: Book, reading: Reading, at: int, count: int, before: Reading | None
) -> dict[str, Any]:
    """What the model says at a place: the likeliest, beside what it said with all heads."""
    now = _chances(book, reading, at)
    then = None if before is None else _chances(book, before, at)
    if now is None:
        return {"answers": "nothing", "at": at, "top": []}
    order = now.topk(min(count, len(now))).indices.tolist()
    if then is not None:
        order += [one for one in then.topk(min(3, len(then))).indices.tolist() if one not in order]
    found: dict[str, Any] = {
        "answers": book.answers,
        "at": at,
        "top": [
            {
                "id": one,
                "word": book.word(one),
                "chance": rounded(float(now[one])),
                "before": None if then is None else rounded(float(then[one])),
            }
            for one in order
        ],
        "loss": None,
        "loss_before": None,
        "divergence": None if then is None else rounded(_divergence(then, now)),
    }
    if book.answers == "next" and reading.length > 1:
        found["loss"] = rounded(float(reading.losses().mean()))
        if before is not None:
            found["loss_before"] = rounded(float(before.losses().mean()))
    return found


def rounded(value: float) -> float | None:
    """Five digits that count; nothing for what is no number.

    >>> rounded(0.123456789), rounded(float("nan"))
    (0.12346, None)
    """
    return float(f"{value:.5g}") if abs(value) < float("inf") else None


def _largest(weights: Float[Tensor, " s"], count: int) -> dict[str, Any]:
    found = weights.topk(min(count, len(weights)))
    kept = [
        (place, rounded(weight))
        for place, weight in zip(found.indices.tolist(), found.values.tolist(), strict=True)
        if weight >= LEAST
    ]
    return {
        "places": [place for place, _ in kept],
        "weights": [weight for _, weight in kept],
        "sum": rounded(float(weights.sum())),
    }


def _grouped(lines: list[range], width: int) -> list[list[range]]:
    """Rows of the picture whose queries are formed together, a few million weights at once."""
    most = max(1, 2**22 // max(1, width))
    groups: list[list[range]] = [[]]
    for line in lines:
        if groups[-1] and line.stop - groups[-1][0].start > most:
            groups.append([])
        groups[-1].append(line)
    return groups


def _pooled(
    reading: Reading, head: Head, group: list[range], keys: range, width: int, stopped: Stopped
) -> list[Float[Tensor, " w"]]:
    if stopped():
        raise LeftError
    together = range(group[0].start, group[-1].stop)
    weights = reading.weights(head, together, keys, stopped)
    if len(keys) > width:
        weights = F.adaptive_max_pool1d(weights[None], width)[0]
    return [
        weights[line.start - together.start : line.stop - together.start].amax(0) for line in group
    ]


def _chances(book: Book, reading: Reading, at: int) -> Float[Tensor, " v"] | None:
    if book.answers == "nothing":
        return None
    if book.answers != "classes":
        logits = reading.logits(torch.tensor([at], device=reading.hidden.device))
        assert logits is not None
        return logits[0].softmax(-1)
    readout = reading.model.readout
    assert readout is not None
    assert isinstance(readout.config, ClassHead)
    x = pooled(reading.hidden.values, reading.hidden.lengths, readout.config.pool)
    table = getattr(reading.model, "table", None)
    logits = F.linear(readout.features(x), readout.vectors(table), readout.bias).float()
    return logits[0].softmax(-1)


def _divergence(then: Float[Tensor, " v"], now: Float[Tensor, " v"]) -> float:
    """Kullback and Leibler's divergence of what is said now from what was, in nats."""
    terms = then * (then.clamp(min=1e-30).log() - now.clamp(min=1e-30).log())
    return max(0.0, float(terms.sum()))
