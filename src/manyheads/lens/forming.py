"""Patterns, attention after attention: some rows are formed, looked at once and let go."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.lens.addresses import Block, attention_at
from manyheads.lens.meeting import FAR, Meeting, meet
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

__all__ = ["Forming", "form", "softmax"]

# An attention, the number of a text in the batch, rows of queries, their weights "h t s" and what
# each may see.
Take = Callable[[Block, int, range, Tensor, Tensor], None]


class Forming:
    """A watcher that forms what every self-attention does with every text of a batch.

    The model runs on its fast kernels. Of all patterns only one text's of one attention is alive,
    and of that no more than `weights_at_once`, or one row, where they are given.
    """

    def __init__(
        self, stacks: dict[str, Stack], take: Take, weights_at_once: int | None = None
    ) -> None:
        self._stacks, self._take = stacks, take
        self._room = weights_at_once
        self._query: Ragged | None = None

    def wants(self, site: Site) -> bool:
        return site.tap in (Tap.QUERY, Tap.KEY) and site.sublayer is Sublayer.ATTENTION

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is asked for"
        if site.tap is Tap.QUERY:
            self._query = value
            return
        assert self._query is not None
        stack = self._stacks[site.stack]
        meeting = meet(stack, site, self._query, value)
        heads = attention_at(stack, site.layer, site.sublayer).config.heads
        block = Block(site.layer, heads, site.stack, site.sublayer)
        for text, length in enumerate(meeting.request.queries.each):
            keys = meeting.request.keys.each[text]
            step = length if self._room is None else max(1, self._room // max(1, heads * keys))
            for start in range(0, length, max(1, step)):
                rows = range(start, min(start + step, length))
                self._take(block, text, rows, *form(meeting, text, rows))
        self._query = None


def form(
    meeting: Meeting, text: int, rows: range
) -> tuple[Float[Tensor, "h t s"], Bool[Tensor, "t s"]]:
    """The weights of all heads on some rows of a text, and which keys each query may see."""
    strip = meeting.strip(text, rows)
    keys = meeting.keys_of(text)
    scored, _ = meeting.scores(strip, keys, range(len(keys)))
    sink = meeting.request.sink
    some, hidden = softmax(scored, None if sink is None else sink.float()[:, None, None])
    count = meeting.request.keys.each[text]
    weights = some.new_zeros(len(some), len(rows), count)
    weights[..., strip.keys.start : strip.keys.stop] = some
    visible = torch.zeros_like(weights[0], dtype=torch.bool)
    visible[:, strip.keys.start : strip.keys.stop] = ~hidden[0]
    return weights, visible


def softmax(
    scored: Float[Tensor, "*h t s"], sink: Tensor | None
) -> tuple[Float[Tensor, "*h t s"], Bool[Tensor, "*h t s"]]:
    """The weights of scored keys beside a learned sink, and which of the keys the mask hides.

    A query that sees no key gets zeros.
    """
    hidden = scored <= FAR / 10
    scored = scored.masked_fill(hidden, -torch.inf)
    total = scored.logsumexp(-1, keepdim=True)
    if sink is not None:
        total = torch.logaddexp(total, sink)
    return torch.where(total > -torch.inf, (scored - total).exp(), 0.0), hidden
