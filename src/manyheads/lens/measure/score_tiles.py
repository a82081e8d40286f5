"""One attention of one forward: which queries meet which keys, and the scores of some of them."""

from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.kernels.contract import Request
from manyheads.lens.results.addresses import attention_at
from manyheads.models.layer import Layer
from manyheads.models.stack import Stack
from manyheads.parts.masks import exact_band
from manyheads.parts.positions.relative import Bias, ShawTable
from manyheads.parts.positions.rotary import Turn
from manyheads.ragged import Ragged
from manyheads.taps import Site, Sublayer

# Below every score, and finite: nothing times minus infinity would not be nothing.
FAR = -1e30


@dataclass(frozen=True, slots=True)
class Strip:
    """Some queries of a sequence and the keys they can see."""

    sequence: int
    rows: range
    keys: range


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """Queries and keys as the kernel got them, and what it was asked."""

    query: Float[Tensor, "n h d"]
    key: Float[Tensor, "m g d"]
    request: Request

    @property
    def share(self) -> int:
        """How many heads of queries share one of keys."""
        return self.query.shape[1] // self.key.shape[1]

    def shift(self, sequence: int) -> int:
        """Where the first query stands among the keys: the last stands at the last."""
        return self.request.keys.each[sequence] - self.request.queries.each[sequence]

    def strip(self, sequence: int, rows: range) -> Strip:
        """The keys that rows of queries can reach."""
        reach, count = self.request.mask.reach, self.request.keys.each[sequence]
        first, last = (row + self.shift(sequence) for row in (rows.start, rows.stop - 1))
        start = int(max(0, min(first - reach.before, count)))
        stop = int(max(start, min(last + reach.after + 1, count)))
        return Strip(sequence, rows, range(start, stop))

    def keys_of(self, sequence: int) -> Float[Tensor, "g s d"]:
        """The keys of a sequence in float32, head after head."""
        start, count = self.request.keys.starts[sequence], self.request.keys.each[sequence]
        key = rearrange(self.key[start : start + count], "s g d -> g s d")
        return key.float().contiguous()

    def scores(
        self, strip: Strip, keys: Float[Tensor, "g s d"], heads: range
    ) -> tuple[Float[Tensor, "h t w"], Float[Tensor, " t"]]:
        """Scaled products and bias of some heads of keys, and how many keys each query sees.

        A key that a query may not see scores `FAR`.
        """
        first = self.request.queries.starts[strip.sequence]
        served = slice(heads.start * self.share, heads.stop * self.share)
        query = self.query[first + strip.rows.start : first + strip.rows.stop, served].float()
        query = rearrange(query * self.request.scale, "t (g r) d -> g (r t) d", r=self.share)
        met = keys[heads.start : heads.stop, strip.keys.start : strip.keys.stop]
        product = query @ met.transpose(1, 2)
        scored = rearrange(product, "g (r t) s -> (g r) t s", r=self.share)
        if self.request.bias is not None:
            scored = scored + self._bias(self.request.bias, strip, served)
        return scored, self._hide(scored, strip)

    def _bias(self, bias: Bias, strip: Strip, served: slice) -> Float[Tensor, "h t w"]:
        device = self.query.device
        row = torch.arange(strip.rows.start, strip.rows.stop, device=device)[:, None]
        return bias.score(
            torch.arange(served.start, served.stop, device=device)[:, None, None],
            row + self.request.queries.starts[strip.sequence],
            row + self.shift(strip.sequence),
            torch.arange(strip.keys.start, strip.keys.stop, device=device),
        )

    def _hide(self, scored: Float[Tensor, "h t w"], strip: Strip) -> Float[Tensor, " t"]:
        """Write `FAR` over what the mask hides; of a band only the two edges need a look."""
        clear = self._clear(strip)
        count = scored.new_full((scored.shape[1],), float(len(clear)))
        for edge in (range(clear.start), range(clear.stop, len(strip.keys))):
            if len(edge):
                seen = self._seen(strip, edge)
                count += seen.sum(-1)
                scored[:, :, edge.start : edge.stop].masked_fill_(~seen, FAR)
        return count

    def _clear(self, strip: Strip) -> range:
        """The places of a strip that all its queries see for certain."""
        band = exact_band(self.request.mask)
        if band is None:
            return range(0)
        shift = self.shift(strip.sequence)
        first, last = (row + shift for row in (strip.rows.start, strip.rows.stop - 1))
        start = int(max(strip.keys.start, min(last - band.before, strip.keys.stop)))
        stop = int(max(start, min(first + band.after + 1, strip.keys.stop)))
        return range(start - strip.keys.start, stop - strip.keys.start)

    def _seen(self, strip: Strip, edge: range) -> Bool[Tensor, "t edge"]:
        device, count = self.query.device, self.request.keys.each[strip.sequence]
        row = torch.arange(strip.rows.start, strip.rows.stop, device=device)[:, None]
        key = torch.arange(edge.start, edge.stop, device=device)[None] + strip.keys.start
        length = torch.full((1, 1), count, device=device)
        return self.request.mask.allows(row + self.shift(strip.sequence), key, length)


def meet(stack: Stack, site: Site, query: Ragged, key: Ragged) -> Meeting:
    """The meeting at a site, from what the taps there showed."""
    attention = attention_at(stack, site.layer, site.sublayer)
    config = attention.config
    bias: Bias | None = None
    if isinstance(attention.table, ShawTable):
        # Shaw's value vectors change what is read, never the weights.
        bias = replace(attention.table.bias(query.values, config.score_scale), values=None)
    elif site.sublayer is Sublayer.ATTENTION:
        owner = stack.layers[stack.place_owner[site.layer]]
        assert isinstance(owner, Layer)
        assert owner.attention is not None
        place = owner.attention.place(query.lengths.positions)
        bias = None if isinstance(place, Turn) else place
    request = Request(
        queries=query.lengths,
        keys=key.lengths,
        mask=config.mask,
        scale=config.score_scale,
        bias=bias,
        sink=attention.sink,
    )
    shared = key.values if config.groups is None else key.values[:, list(config.owners)]
    return Meeting(query.values, shared, request)
