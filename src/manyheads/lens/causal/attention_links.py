"""Cutting attention links: a model in which some queries do not read some keys in some heads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError, short_repr
from manyheads.kernels import reference
from manyheads.kernels.contract import Request
from manyheads.lens.causal.evaluate import BatchValues, Evaluation
from manyheads.lens.inputs import metrics
from manyheads.lens.inputs.texts import Inputs, Targets
from manyheads.lens.results import addresses, files
from manyheads.lens.results.tables import format_change
from manyheads.models import build
from manyheads.models.readout import ClassHead
from manyheads.models.stack import Stack
from manyheads.parts.masks import visible
from manyheads.parts.positions.relative import ShawBias
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

Position = int | Literal["last"]
LINK_FORM = 'write ("L5H1", query, key) or ("L5H1", query, key, text)'
# What the watcher needs before the output of an attention.
INPUTS = (Tap.QUERY, Tap.KEY, Tap.VALUE)


@dataclass(frozen=True, slots=True)
class Link:
    """What a head reads at one key for one query, of one text or of all (None)."""

    head: addresses.Address
    query: Position
    key: Position
    text: int | None = None

    def __str__(self) -> str:
        where = "" if self.text is None else f" in text {self.text}"
        return f"{self.head} {self.query} → {self.key}{where}"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LinkCut(files.Result):
    """The metric without some attention links, its change, and the standard error of the change.

    `changes` has the change of each text. `before` and `after` are the logits at the last token of
    each text (or of its class), with and without the links, where they were requested.
    """

    links: tuple[Link, ...]
    value: float
    change: float
    error: float
    baseline: float
    metric: str
    renormalize: bool
    changes: Float[Tensor, " b"]
    before: Float[Tensor, "b v"] | None = None
    after: Float[Tensor, "b v"] | None = None
    complete: bool = True

    def __str__(self) -> str:
        names = ", ".join(map(str, self.links)) or "no link"
        changed = format_change(self.change, self.error)
        return f"{self.metric} without {names}: {self.value:.4f}, a change of {changed}"

    __repr__ = __str__


@wrapping_models
def cut(
    model: build.Model,
    texts: Inputs,
    links: Sequence[Any],
    *,
    renormalize: bool = True,
    metric: metrics.Metric = "loss",
    targets: Targets | None = None,
    logits: bool = False,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> LinkCut:
    """Cut attention links (arXiv 2304.14767): the metric when queries do not read some keys.

    A link is (head, query, key): a head in any form ("L5" for all of a layer), and the positions of
    two tokens, or "last". It is cut in all texts, with a fourth item only in the text of that
    number. All links are cut together. In cross-attention the key is a token of the source.

    If `renormalize`, the other weights of the query grow to the same sum, as if the mask hid the
    key; otherwise they stay as they are. A query without any other key reads nothing. The model
    runs on its own kernels, and only the rows of the queries that lose a key are computed again.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> result = cut(model, [[1, 2, 3, 4]], [("L1H0", "last", 0)])
    >>> [str(link) for link in result.links], result.change == result.value - result.baseline
    (['L1H0 last → 0'], True)
    """
    evaluation = Evaluation.of(
        model, texts, metric, targets, batch_tokens=batch_tokens, progress=progress
    )
    resolved = read_links(model, links, len(evaluation.inputs))
    if logits and model.readout is None:
        raise InputError(f"this {type(model).__name__} has no logits", "leave out logits")
    seen: list[list[Tensor]] = [[], []]

    def run() -> Iterator[BatchValues]:
        for batch in evaluation.batches:
            bound, inputs = evaluation.bind(batch), evaluation.inputs.select(batch)
            for version, own in enumerate(((), resolved)):
                cutter = LinkCutter(model, own, batch, renormalize=renormalize)
                model.run_hidden(inputs, cutter)
                if logits:
                    seen[version].append(_last_logits(model, cutter.hidden))
                yield BatchValues.of(bound, cutter.hidden, [0] if version else [])

    with build.eval_mode(model):
        effects = evaluation.collect("cutting links", 1, run())
    value, change, error = effects.of(0)
    before, after = (torch.cat(rows) if rows else None for rows in seen)
    return LinkCut(
        links=resolved,
        value=value,
        change=change,
        error=error,
        baseline=effects.baseline_mean[0],
        metric=metrics.metric_name(metric),
        renormalize=renormalize,
        changes=effects.values[:, 0] - effects.baseline,
        before=before,
        after=after,
        complete=effects.complete,
    )


def read_links(model: build.Model, links: Sequence[Any], texts: int) -> tuple[Link, ...]:
    """The links that are named, one per head."""
    resolved: list[Link] = []
    for link in links:
        if isinstance(link, Link):
            link = (link.head, link.query, link.key, link.text)
        if not isinstance(link, tuple | list) or not 3 <= len(link) <= 4:
            raise InputError(f"{short_repr(link)} is not a link", LINK_FORM)
        name, query, key, *text = link
        for position in (query, key):
            is_index = isinstance(position, int) and not isinstance(position, bool)
            if position != "last" and not (is_index and position >= 0):
                raise InputError(
                    f"{short_repr(position)} is not the position of a token",
                    'count tokens from 0, or write "last"',
                )
        number = text[0] if text else None
        if number is not None and not (isinstance(number, int) and 0 <= number < texts):
            raise InputError(f"there is no text {number!r}", f"use 0 to {texts - 1}")
        for head in addresses.find_heads(model, name):
            check_has_scores(model, head)
            resolved.append(Link(head, query, key, number))
    if not resolved:
        raise InputError("there are no links", LINK_FORM)
    return tuple(dict.fromkeys(resolved))


def check_has_scores(model: build.Model, head: addresses.Address) -> None:
    """Refuse heads whose weights are not computed from scores that can be seen and changed."""
    attention = addresses.attention_at(model.stacks()[head.stack], head.head.layer, head.sublayer)
    if not getattr(attention, "has_scores", True):
        raise InputError(
            f"the links of {head} have no scores: the model does not dispatch its attention, and "
            "only its weights are read",
            "ablate the head instead",
        )


def _last_logits(model: build.Model, hidden: Ragged) -> Float[Tensor, "b v"]:
    readout = model.readout
    assert readout is not None, "checked by the caller"
    if isinstance(readout.config, ClassHead):
        x = readout.config.pooled(hidden.values, hidden.lengths)
    else:
        x = hidden.values[hidden.lengths.offsets[1:].long() - 1]
    return readout.logits(x, model.table).float().cpu()


class LinkCutter:
    """A watcher that recomputes the output of each query that loses keys, in the heads concerned.

    `hidden` is the input of the readout.
    """

    def __init__(
        self, model: build.Model, links: Sequence[Link], batch: range, *, renormalize: bool
    ) -> None:
        self._stacks, self._renormalize = model.stacks(), renormalize
        self._batch, self._final = batch, Site(-1, Tap.FINAL, stack=model.readout_stack)
        self._links: dict[tuple[str, Sublayer, int], list[Link]] = {}
        for link in links:
            if link.text is None or link.text in batch:
                place = (link.head.stack, link.head.sublayer, link.head.head.layer)
                self._links.setdefault(place, []).append(link)
        self._inputs: dict[Tap, Ragged] = {}
        self._request: Request | None = None
        self._hidden: Ragged | None = None

    @property
    def hidden(self) -> Ragged:
        assert self._hidden is not None, "the model has run"
        return self._hidden

    def wants(self, site: Site) -> bool:
        if site == self._final:
            return True
        return site.tap in (*INPUTS, Tap.MIXED) and self._place(site) in self._links

    def _place(self, site: Site) -> tuple[str, Sublayer, int]:
        return site.stack, site.sublayer, site.layer

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
        assert isinstance(value, Ragged), "no pattern is requested"
        if site == self._final:
            self._hidden = value
        elif site.tap is Tap.MIXED:
            return self._without(site, value)
        else:
            self._inputs[site.tap] = value
            if len(self._inputs) == len(INPUTS):
                # Wrapped models have the request only now.
                query, key = (self._inputs[tap] for tap in (Tap.QUERY, Tap.KEY))
                self._request = full_request(self._stacks[site.stack], site, query, key)
        return None

    def _without(self, site: Site, mixed: Ragged) -> Ragged:
        request, inputs = self._request, self._inputs
        assert request is not None, "queries, keys and values come first"
        self._request, self._inputs = None, {}
        output, tensors = mixed.values.clone(), [inputs[tap].values for tap in INPUTS]
        for (sequence, row), links in self.removals(site, request).items():
            keys, heads = request.keys.each[sequence], sorted({head for head, _ in links})
            removed = torch.zeros(output.shape[1], keys, dtype=torch.bool, device=output.device)
            for head, key in links:
                removed[head, key] = True
            q, k, v = tensors
            own = reference.attend_without(
                q, k, v, request, (sequence, row), removed, renormalize=self._renormalize
            )
            output[request.queries.starts[sequence] + row, heads] = own[heads].to(output.dtype)
        return mixed.with_values(output)

    def removals(
        self, site: Site, request: Request
    ) -> Mapping[tuple[int, int], list[tuple[int, int]]]:
        """For each query of a sequence that loses keys, the heads and these keys."""
        rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for link in self._links.get(self._place(site), ()):
            texts = self._batch if link.text is None else [link.text]
            for text in texts:
                sequence = text - self._batch.start
                counts = request.queries.each[sequence], request.keys.each[sequence]
                row, key = (
                    token_position(place, count, text)
                    for place, count in zip((link.query, link.key), counts, strict=True)
                )
                mask, device = request.mask.of_sequence(sequence), request.queries.offsets.device
                seen = visible(mask, range(row, row + 1), *counts, device).expand(1, counts[1])
                if not bool(seen[0, key]):
                    raise InputError(
                        f"in text {text}, query {row} of {link.head} does not see key {key}",
                        "cut links that the mask of the head allows",
                    )
                rows.setdefault((sequence, row), []).append((link.head.head.head, key))
        return rows


def full_request(stack: Stack, site: Site, query: Ragged, key: Ragged) -> Request:
    """The request to the kernel at a site, with all that affects the output."""
    request = stack.request(site.layer, site.sublayer, query, key)
    attention = addresses.attention_at(stack, site.layer, site.sublayer)
    if isinstance(request.bias, ShawBias):
        request = replace(request, bias=attention.bias(query, key, None))
    return replace(request, groups=attention.config.groups)


def token_position(place: Position, count: int, text: int) -> int:
    """The position of a token in a text of this many."""
    index = count - 1 if place == "last" else place
    if not 0 <= index < count:
        raise InputError(
            f"text {text} has no token {place}: it has {count}",
            'use "last", or add the number of the text to the link',
        )
    return index
