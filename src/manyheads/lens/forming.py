"""The patterns of short texts, attention after attention: each is looked at once and let go."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.lens.addresses import Block, attention_at
from manyheads.lens.meeting import FAR, Meeting, meet
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

__all__ = ["Forming", "form"]

# An attention, the number of a text in the batch, weights "h t s" and what each query may see.
Take = Callable[[Block, int, Tensor, Tensor], None]


class Forming:
    """A watcher that forms what every self-attention does with every text of a batch.

    The model runs on its fast kernels; of all patterns only one text's of one attention is alive.
    """

    def __init__(self, stacks: dict[str, Stack], take: Take) -> None:
        self._stacks, self._take = stacks, take
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
            if length:
                self._take(block, text, *form(meeting, text))
        self._query = None


def form(meeting: Meeting, text: int) -> tuple[Float[Tensor, "h t s"], Bool[Tensor, "t s"]]:
    """The weights of all heads on one text, and which keys each query may see."""
    rows = range(meeting.request.queries.each[text])
    strip = meeting.strip(text, rows)
    keys = meeting.keys_of(text)
    scored, _ = meeting.scores(strip, keys, range(len(keys)))
    hidden = scored <= FAR / 10
    scored = scored.masked_fill(hidden, -torch.inf)
    total = scored.logsumexp(-1, keepdim=True)
    if meeting.request.sink is not None:
        total = torch.logaddexp(total, meeting.request.sink.float()[:, None, None])
    some = torch.where(total > -torch.inf, (scored - total).exp(), 0.0)
    count = meeting.request.keys.each[text]
    weights = some.new_zeros(len(some), len(rows), count)
    weights[..., strip.keys.start : strip.keys.stop] = some
    visible = torch.zeros_like(weights[0], dtype=torch.bool)
    visible[:, strip.keys.start : strip.keys.stop] = ~hidden[0]
    return weights, visible
