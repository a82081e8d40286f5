"""From a run of the model to the JSON that the page draws."""

from base64 import b64encode
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.encoding.encode import pool
from manyheads.models.provenance import SentenceConfig
from manyheads.studio import models, requests
from manyheads.studio.run_cache import MAX_WEIGHTS, IsCancelled, TracedRun
from manyheads.taps import Head

# Smaller weights are left out: the page could not show them.
MIN_WEIGHT = 5e-4


def tokens(loaded: models.LoadedModel, text: models.StudioInput, run: TracedRun) -> dict[str, Any]:
    """The tokens, with the loss at each for a generative model."""
    view: dict[str, Any] = {
        "tokens": list(text.tokens),
        "letters": None if text.letters is None else list(text.letters),
        "start": text.start,
        "truncated": text.truncated,
        "note": text.note,
        "max_tokens": loaded.max_tokens,
        "loss": None,
        "losses": None,
    }
    if loaded.output == "next token" and len(text) > 1:
        losses = run.losses()
        view["loss"] = rounded(float(losses.mean()))
        view["losses"] = [None, *(round(loss, 3) for loss in losses.tolist())]
    return view


def attention_at(
    run: TracedRun,
    heads: tuple[Head, ...],
    position: int,
    top_k: int,
    cancelled: IsCancelled,
    *,
    incoming: bool,
) -> dict[str, Any]:
    """For each head the tokens that one token attends to, or those that attend to it.

    The latter needs the sums of all rows.
    """
    token, tokens = range(position, position + 1), range(run.length)
    window = (tokens, token) if incoming else (token, tokens)
    by_head = {
        str(head): _top_weights(run.weights(head, *window, cancelled).flatten(), top_k)
        for head in heads
    }
    return {"position": position, "heads": by_head}


def attention_rows(
    run: TracedRun, heads: tuple[Head, ...], rows: range, top_k: int, cancelled: IsCancelled
) -> dict[str, Any]:
    """For each head and each query of a range the keys with the largest weights."""
    by_head = {}
    for head in heads:
        views = []
        for block in run.blocks(rows):
            if cancelled():
                raise requests.DisconnectedError
            for row in run.weights(head, block, range(run.length), cancelled):
                views.append(_top_weights(row, top_k))
        by_head[str(head)] = views
    return {"start": rows.start, "stop": rows.stop, "heads": by_head}


def attention_map(
    run: TracedRun, head: Head, rows: range, keys: range, cells: int, cancelled: IsCancelled
) -> dict[str, Any]:
    """A window of a pattern, row by row, as little-endian float32.

    A window of more than `cells` per side is reduced; each cell is the largest weight in it.
    """
    height, width = min(len(rows), cells), min(len(keys), cells)
    edges = torch.linspace(0, len(rows), height + 1).round().long().tolist()
    lines = [range(rows.start + first, rows.start + last) for first, last in pairwise(edges)]
    reduced = []
    for group in _group_lines(lines, len(keys)):
        if cancelled():
            raise requests.DisconnectedError
        first = group[0].start
        weights = run.weights(head, range(first, group[-1].stop), keys, cancelled)
        if len(keys) > width:
            weights = F.adaptive_max_pool1d(weights[None], width)[0]
        reduced += [weights[line.start - first : line.stop - first].amax(0) for line in group]
    cells_in_rows = torch.stack(reduced).cpu().numpy().astype("<f4")
    return {
        "head": str(head),
        "rows": [rows.start, rows.stop],
        "keys": [keys.start, keys.stop],
        "height": height,
        "width": width,
        "data": b64encode(cells_in_rows.tobytes()).decode("ascii"),
    }


def overlaps(runs: Sequence[TracedRun], cancelled: IsCancelled) -> dict[str, float]:
    """The weight that the patterns of two runs share, by the heads that both have."""
    tokens, shared = range(runs[0].length), {}
    for layer in runs[0].layers.keys() & runs[1].layers.keys():
        if cancelled():
            raise requests.DisconnectedError
        heads = min(run.layers[layer].query.shape[1] for run in runs)
        for head in (Head(layer, number) for number in range(heads)):
            first, second = (run.weights(head, tokens, tokens, cancelled) for run in runs)
            shared[str(head)] = float(torch.minimum(first, second).sum() / len(tokens))
    return shared


def predictions(
    loaded: models.LoadedModel, run: TracedRun, position: int, top_k: int, clean: TracedRun | None
) -> dict[str, Any]:
    """The most probable outputs at a position, with their probabilities before the edits."""
    after = _probabilities(loaded, run, position)
    before = None if clean is None else _probabilities(loaded, clean, position)
    if after is None:
        similarity = None if clean is None else _similarity(loaded, run, clean, position)
        return {
            "output": loaded.output,
            "position": position,
            "top": [],
            "similarity": similarity,
        }
    order, divergence = after.topk(min(top_k, len(after))).indices.tolist(), None
    if before is not None:
        best = before.topk(min(3, len(before))).indices.tolist()
        order += [index for index in best if index not in order]
        # The KL divergence of the new distribution from the old one, in nats.
        terms = before * (before.clamp(min=1e-30).log() - after.clamp(min=1e-30).log())
        divergence = rounded(max(0.0, float(terms.sum())))
    losses: list[float | None] = [None, None]
    if loaded.output == "next token" and run.length > 1:
        losses = [
            None if traced is None else rounded(float(traced.losses().mean()))
            for traced in (run, clean)
        ]
    return {
        "output": loaded.output,
        "position": position,
        "top": [
            {
                "id": index,
                "text": loaded.output_text(index),
                "probability": rounded(float(after[index])),
                "before": None if before is None else rounded(float(before[index])),
            }
            for index in order
        ],
        "loss": losses[0],
        "loss_before": losses[1],
        "divergence": divergence,
    }


def _similarity(
    loaded: models.LoadedModel, run: TracedRun, clean: TracedRun, position: int
) -> dict[str, float | None]:
    """The cosine of the vectors with and without the edits: of the whole input, and of a token."""
    sentence = getattr(loaded.model, "sentence", None) or SentenceConfig()
    after, before = (
        pool(traced.hidden, sentence.pooling, normalize=True, project=sentence.project)[0]
        for traced in (run, clean)
    )
    token, unedited = (traced.hidden.values[position].float() for traced in (run, clean))
    return {
        "input": rounded(float(after @ before)),
        "token": rounded(float(F.cosine_similarity(token, unedited, dim=0))),
    }


def rounded(value: float) -> float | None:
    """Five significant digits; None for NaN and infinity.

    >>> rounded(0.123456789), rounded(float("nan"))
    (0.12346, None)
    """
    return float(f"{value:.5g}") if abs(value) < float("inf") else None


def _top_weights(weights: Float[Tensor, " s"], top_k: int) -> dict[str, Any]:
    largest = weights.topk(min(top_k, len(weights)))
    # The weights descend.
    count = int((largest.values >= MIN_WEIGHT).sum())
    return {
        "positions": largest.indices[:count].tolist(),
        "weights": [rounded(weight) for weight in largest.values[:count].tolist()],
        "sum": rounded(float(weights.sum())),
    }


def _group_lines(lines: list[range], width: int) -> list[list[range]]:
    """Lines of the map whose weights are computed together."""
    max_rows = max(1, MAX_WEIGHTS // max(1, width))
    groups: list[list[range]] = [[]]
    for line in lines:
        if groups[-1] and line.stop - groups[-1][0].start > max_rows:
            groups.append([])
        groups[-1].append(line)
    return groups


def _probabilities(
    loaded: models.LoadedModel, run: TracedRun, position: int
) -> Float[Tensor, " v"] | None:
    if loaded.output == "none":
        return None
    if loaded.output == "classes":
        assert run.model.readout is not None
        return run.model.readout(run.hidden, run.model.table)[0].float().softmax(-1)
    logits = run.logits(torch.tensor([position], device=run.hidden.device))
    assert logits is not None
    return logits[0].softmax(-1)
