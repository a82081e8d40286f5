"""Why a head looks where it looks: the score of one attention link as a sum over pairs of writers.

A score is scale * q . k, and with norms frozen at their divisors q and k are linear in the
residual stream at the query and at the key. The stream is a sum of what was written to it, so that
the score is the sum over a writer u to the query's stream and a writer v to the key's stream of
scale * q(u) . k(v).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.kernels import reference
from manyheads.kernels.contract import Request
from manyheads.lens.attribution import frozen_reads, stream_parts
from manyheads.lens.causal import attention_links
from manyheads.lens.inputs import cached_run
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.results import addresses
from manyheads.lens.results.tables import Tabular, titled_table
from manyheads.models.build import Model, eval_mode
from manyheads.parts.gates import GATE_TAPS
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap
from manyheads.tokenizers import token_text

POSITION = "position bias"
ENCODER_OUTPUT = "encoder output"
MAX_ROWS = 20
# How many parts of keys are computed at a time for the mean over all keys.
PARTS_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class LinkReasons(Tabular):
    """The score of one attention link, divided among pairs of writers.

    `pairs[i, j]` is what the query of the head gets from `query_writers[i]`, times what its key
    gets from `key_writers[j]`, scaled. All pairs and `position`, the bias that the score has for
    the distance of both tokens, sum to `score`: the scaled score before the softmax, and before a
    cap where the model has one; `capped` is the score after the cap, which the softmax receives.
    With `against` all numbers are differences: those of this key minus those of another, or minus
    their mean over all keys that the query sees.

    `query_side` sums the pairs over the writers to the key: what a writer adds through the query,
    with the key as it is. `key_side` sums them over the writers to the query. Each of the two sums
    to the score without `position`; they count the same pairs in two ways, and are not to be added.
    """

    head: addresses.Address
    query: int
    key: int
    against: int | Literal["mean"] | None
    query_writers: tuple[str, ...]
    key_writers: tuple[str, ...]
    pairs: Float[Tensor, "u v"]
    position: float
    score: float
    capped: float | None = None
    tokens: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return float(self.pairs.sum()) + self.position

    @property
    def completeness(self) -> float:
        """How far the sum of the parts is from the score."""
        return abs(self.total - self.score)

    @property
    def query_side(self) -> dict[str, float]:
        """What each writer to the query adds with all of the key, largest first."""
        return _ranked(self.query_writers, self.pairs.sum(1))

    @property
    def key_side(self) -> dict[str, float]:
        """What each writer to the key adds with all of the query, largest first."""
        return _ranked(self.key_writers, self.pairs.sum(0))

    def of(self, query_writer: str, key_writer: str) -> float:
        """What one pair adds, such as `of("embeddings", "L0H3")`."""
        for name, names in ((query_writer, self.query_writers), (key_writer, self.key_writers)):
            if name not in names:
                raise InputError(f"there is no writer {name!r}", f"use {', '.join(names)}")
        row, column = self.query_writers.index(query_writer), self.key_writers.index(key_writer)
        return float(self.pairs[row, column])

    def ranked(self, top_k: int | None = None) -> list[tuple[str, str, float]]:
        """Pairs by absolute value, largest first: writer to the query, writer to the key, value."""
        flat, columns = self.pairs.flatten(), len(self.key_writers)
        order = flat.abs().argsort(descending=True, stable=True)[:top_k].tolist()
        return [
            (
                self.query_writers[index // columns],
                self.key_writers[index % columns],
                float(flat[index]),
            )
            for index in order
        ]

    def rows(self) -> list[dict[str, Any]]:
        """One record per pair, largest first, and one of the position bias if there is any."""
        rows = [
            {"query_writer": query, "key_writer": key, "value": value}
            for query, key, value in self.ranked()
        ]
        position = {"query_writer": POSITION, "key_writer": POSITION, "value": self.position}
        return [*rows, position] if self.position else rows

    def table(self, max_rows: int | None = MAX_ROWS) -> Any:
        """A rich table of the largest pairs."""
        table = titled_table(self.summary, ["to the query", "to the key"], ["adds"])
        for query, key, value in self.ranked(max_rows):
            table.add_row(query, key, f"{value:+.4f}")
        return table

    @property
    def summary(self) -> str:
        """The link and its score in one line."""
        words = [f" {token!r}" for token in self.tokens] or ["", ""]
        link = f"{self.head}, query {self.query}{words[0]} to key {self.key}{words[1]}"
        if self.against is not None:
            versus = "the mean of all keys" if self.against == "mean" else f"key {self.against}"
            link += f" against {versus}{words[2] if self.against != 'mean' and words[0] else ''}"
        cap = "" if self.capped is None else f", {self.capped:.4f} after the cap"
        bias = "" if not self.position else f", of it position {self.position:+.4f}"
        return f"{link}: score {self.score:.4f}{cap}{bias}"

    def __str__(self) -> str:
        lines = [self.summary, f"  off by {self.completeness:.1e}; the largest pairs:"]
        lines += [f"  {query} x {key}  {value:+.4f}" for query, key, value in self.ranked(5)]
        for name, side in (("query", self.query_side), ("key", self.key_side)):
            parts = ", ".join(f"{writer} {value:+.4f}" for writer, value in list(side.items())[:3])
            lines.append(f"  through the {name}: {parts}")
        return "\n".join(lines)

    __repr__ = __str__


@wrapping_models
def why(
    model: Model,
    text: Inputs,
    head: addresses.HeadName,
    query: attention_links.Position,
    key: attention_links.Position | Literal["strongest"],
    *,
    against: attention_links.Position | Literal["mean"] | None = None,
    edits: Mapping[Site, cached_run.EditFunction] | None = None,
    links: Sequence[Any] = (),
) -> LinkReasons:
    """Divide the score of one attention link among pairs of writers to the residual stream.

    The link is that of one head from the token at `query` to the token at `key` of one text;
    "strongest" is the key with the largest score.
    Writers are heads ("L0H3"), MLPs ("L0 mlp"), embeddings and biases. Norms keep the divisors
    that they had and gates their values, so that everything is linear and the parts sum to the
    score, up to rounding (`completeness`). In cross-attention the key is a token of the source, and
    what is written to it is "encoder output".

    A softmax sees only differences of scores: with `against`, another key or "mean" of all that
    the query sees, the result is the difference of the two scores. `edits` change activations of
    the run, and `links` are cut in it as `lens.cut` does it.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> result = why(model, [[1, 2, 3, 4]], "L1H0", "last", 1)
    >>> result.completeness < 1e-4, result.of("L0H1", "token embedding") in result.pairs
    (True, True)
    """
    scope = cached_run.head_scope(model, heads=(head,), mixers=False)
    address = addresses.Address(scope.head(head), scope.stack_name, scope.sublayer)
    attention_links.check_has_scores(model, address)
    inputs = read_inputs(model, text)
    if len(inputs) != 1:
        raise InputError(f"a link is one of one text, got {len(inputs)} texts", "pass one text")
    reader_type = stream_parts.WrappedStreamReader
    reader = (stream_parts.StreamReader if model.native else reader_type)(
        scope, inputs, address.head.layer
    )
    reader.check()
    cuts = attention_links.read_links(model, links, 1) if links else ()
    with eval_mode(model), torch.no_grad():
        recorder = _LinkRecorder(scope, address, reader, edits or {}, cuts)
        with reader.listening():
            cached_run.run_until(
                lambda watch: model.run_hidden(inputs, watch), recorder, recorder.key_site
            )
        reading = _LinkReading(reader, recorder, address)
        return reading.reasons(query, key, against)


class _LinkRecorder(cached_run.ActivationEditor):
    """Records what was written below an attention, and its queries, keys and request."""

    def __init__(
        self,
        scope: cached_run.HeadScope,
        address: addresses.Address,
        reader: stream_parts.StreamReader,
        edits: Mapping[Site, cached_run.EditFunction],
        cuts: Sequence[attention_links.Link],
    ) -> None:
        self.scope, layer = scope, address.head.layer
        self.query_site, self.key_site = (scope.site(layer, tap) for tap in (Tap.QUERY, Tap.KEY))
        gates = [scope.site(layer, GATE_TAPS[side]) for side in frozen_reads.SIDES]
        memory = Site(-1, Tap.FINAL, stack="encoder")
        super().__init__(edits, [*reader.sites(), *gates, memory, self.query_site, self.key_site])
        self.cutter = attention_links.LinkCutter(scope.model, cuts, range(1), renormalize=True)
        self.request: Request | None = None

    def wants(self, site: Site) -> bool:
        return super().wants(site) or self.cutter.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns:
        if self.cutter.wants(site):
            value = self.cutter.see(site, value) or value
        value = super().see(site, value)
        if site == self.key_site:
            # Wrapped models have the request only now.
            query, key = self[self.query_site], self[self.key_site]
            self.request = attention_links.full_request(self.scope.stack, site, query, key)
        return value


class _LinkReading:
    """Divides the scores of one head among the writers to the stream that it reads."""

    def __init__(
        self,
        reader: stream_parts.StreamReader,
        recorder: _LinkRecorder,
        address: addresses.Address,
    ) -> None:
        assert recorder.request is not None, "the model has run"
        self.reader, self.recorder, self.address = reader, recorder, address
        self.request: Request = recorder.request
        self.query, self.keys = recorder[recorder.query_site], recorder[recorder.key_site]
        self._reads: frozen_reads.NativeReads | frozen_reads.WrappedReads | None = None

    def reasons(
        self,
        query: attention_links.Position,
        key: attention_links.Position | Literal["strongest"],
        against: attention_links.Position | Literal["mean"] | None,
    ) -> LinkReasons:
        row = attention_links.token_position(query, self.request.queries.each[0], 0)
        count = self.request.keys.each[0]
        versus: int | Literal["mean"] | None = None
        if against == "mean":
            versus = "mean"
        elif against is not None:
            versus = attention_links.token_position(against, count, 0)
        scores, capped = (self._row(row, request) for request in self._requests())
        products = self._row(row, replace(self.request, bias=None, softcap=None))
        visible = scores.isfinite().nonzero().squeeze(1)
        if key == "strongest":
            column = int(scores.argmax())
        else:
            column = attention_links.token_position(key, count, 0)
        for place in (column, versus):
            if isinstance(place, int) and place not in visible:
                raise InputError(
                    f"query {row} of {self.address} does not see key {place}",
                    f"use a key that its mask allows, such as {int(visible[-1])}",
                )
        compared = visible if versus == "mean" else [] if versus is None else [versus]
        change = partial(_change, column=column, compared=compared)
        query_parts = self._query_parts(row)
        key_parts = self._mean_key_parts([column])
        if len(compared):
            mean = self._mean_key_parts(compared)
            key_parts = replace(key_parts, values=key_parts.values - mean.values)
        pairs = self.request.scale * query_parts.values[0] @ key_parts.values[0].T
        # The first writer are the biases, where there are any.
        first = [0 if bool(side.any()) else 1 for side in (pairs[0], pairs[:, 0])]
        return LinkReasons(
            head=self.address,
            query=row,
            key=column,
            against=versus,
            query_writers=query_parts.names[first[0] :],
            key_writers=key_parts.names[first[1] :],
            pairs=pairs[first[0] :, first[1] :].cpu(),
            position=change(scores) - change(products),
            score=change(scores),
            capped=None if self.request.softcap is None else change(capped),
            tokens=self._tokens(row, column, versus),
        )

    def _requests(self) -> tuple[Request, Request]:
        """Without the cap and with it."""
        return replace(self.request, softcap=None), self.request

    def _row(self, row: int, request: Request) -> Float[Tensor, " s"]:
        """The scores of the head for one query; -inf where the mask hides a key."""
        scores = reference.row_scores(self.query.values, self.keys.values, request, (0, row))
        return scores[self.address.head.head]

    def _query_parts(self, row: int) -> stream_parts.StreamParts:
        rows = torch.tensor([row], device=self.query.device)
        stream = self.reader.parts(self.recorder, rows)
        scope, head = self.reader.scope, self.address.head
        if scope.model.native:
            lengths = self.query.lengths
            self._reads = frozen_reads.NativeReads(scope, head, self.recorder, lengths)
        else:
            entering = self.recorder[Site(head.layer, Tap.BEFORE, stack=scope.stack_name)]
            self._reads = frozen_reads.WrappedReads(
                scope, head, self.reader.inputs, entering, stream.total[0], row
            )
        return self._reads.read("query", stream, rows)

    def _mean_key_parts(
        self, places: Sequence[int] | Int[Tensor, " m"]
    ) -> stream_parts.StreamParts:
        """The mean of the parts of some keys."""
        rows = torch.as_tensor(places, device=self.keys.device)
        stack = self.reader.scope.stack
        writers = sum(
            addresses.heads_in(layer, Sublayer.ATTENTION) + 3 for layer in stack.config.layers
        )
        step = max(1, PARTS_AT_ONCE // (writers * stack.config.width))
        chunks = [self._key_parts(chunk) for chunk in rows.split(step)]
        summed = sum((chunk.values.sum(0, keepdim=True) for chunk in chunks), torch.zeros(()))
        assert isinstance(summed, Tensor)
        return replace(chunks[0], values=summed / len(rows))

    def _key_parts(self, rows: Int[Tensor, " m"]) -> stream_parts.StreamParts:
        scope, reads = self.reader.scope, self._reads
        assert reads is not None, "queries come before keys"
        if scope.sublayer is not Sublayer.CROSS:
            return reads.read("key", self.reader.parts(self.recorder, rows), rows)
        if isinstance(reads, frozen_reads.WrappedReads):
            # The bias of the key is part of it: its projection is not known.
            owner = scope.attention(self.address.head.layer).config.owners[self.address.head.head]
            return stream_parts.StreamParts.of(
                (ENCODER_OUTPUT,), self.keys.values[rows, owner][:, None]
            )
        memory = self.recorder[Site(-1, Tap.FINAL, stack="encoder")].values[rows]
        return reads.read(
            "key", stream_parts.StreamParts.of((ENCODER_OUTPUT,), memory[:, None]), rows
        )

    def _tokens(self, query: int, key: int, versus: int | str | None) -> tuple[str, ...]:
        """The tokens of the link, where the model has words for them."""
        model, inputs = self.reader.scope.model, self.reader.inputs
        tokenizer, queries = getattr(model, "tokenizer", None), inputs.ids
        if self.reader.scope.stack_name == "encoder":
            queries = inputs.source
        keys = inputs.source if self.reader.scope.sublayer is Sublayer.CROSS else queries
        if tokenizer is None or queries is None or keys is None or inputs.examples:
            return ()
        ids = [queries.values[query], keys.values[key]]
        ids += [keys.values[versus]] if isinstance(versus, int) else []
        return tuple(token_text(tokenizer, int(token)) for token in ids)


def _change(
    scores: Float[Tensor, " s"], *, column: int, compared: Sequence[int] | Int[Tensor, " m"]
) -> float:
    """The score of a key, minus the mean of those that it is compared with."""
    wide = scores.double()
    mean = wide[torch.as_tensor(compared, device=wide.device)].mean() if len(compared) else 0.0
    return float(wide[column] - mean)


def _ranked(names: Sequence[str], values: Float[Tensor, " w"]) -> dict[str, float]:
    order = values.abs().argsort(descending=True, stable=True).tolist()
    return {names[index]: float(values[index]) for index in order}
