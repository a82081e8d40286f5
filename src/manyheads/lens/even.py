"""What a head would score that looks at all it may see alike: the least there is to beat."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from manyheads.kernels.contract import Request
from manyheads.lens.addresses import Block, attention_at, stacks_of
from manyheads.lens.given import Given
from manyheads.lens.measures import NEIGHBOURS, Scope, repeated, tally_heads
from manyheads.lens.meeting import Meeting
from manyheads.lens.rows import Wanted, sum_rows
from manyheads.lens.tally import Tally
from manyheads.models.build import Model
from manyheads.models.seq2seq import Seq2Seq
from manyheads.parts.masks.rules import Mask
from manyheads.ragged import Ragged
from manyheads.taps import Sublayer

__all__ = ["even_scores"]


def even_scores(
    model: Model, given: Given, blocks: Sequence[Block], offsets: Sequence[int] = ()
) -> dict[str, Float[np.ndarray, " h"]]:
    """Measures of `statistics` by name, for a head in each one's place that prefers no key.

    It sees what the mask shows; position and bias are not asked. Heads that see alike are measured
    once.
    """
    assert given.ids is not None, "images have no tokens to repeat"
    reads = {"main": given.ids, "decoder": given.ids, "encoder": given.source}
    stacks = stacks_of(model)
    known: dict[tuple[str, Sublayer, Mask], dict[str, float]] = {}
    found = []
    for block in blocks:
        config = attention_at(stacks[block.stack], block.layer, block.sublayer).config
        key = block.stack, block.sublayer, config.mask
        if key not in known:
            crosses = isinstance(model, Seq2Seq) and block.sublayer is Sublayer.CROSS
            queries, keys = reads[block.stack], given.source if crosses else reads[block.stack]
            assert queries is not None
            assert keys is not None
            known[key] = _measured(queries, keys, config.mask, offsets, same=not crosses)
        found.append(known[key])
    names = dict.fromkeys(name for each in found for name in each)
    return {
        name: np.concatenate(
            [
                np.full(block.heads, each.get(name, np.nan))
                for block, each in zip(blocks, found, strict=True)
            ]
        )
        for name in names
    }


def _measured(
    queries: Ragged, keys: Ragged, mask: Mask, offsets: Sequence[int], *, same: bool
) -> dict[str, float]:
    device = queries.device
    nothing = torch.zeros(queries.lengths.total, 1, 1, device=device)
    request = Request(queries=queries.lengths, keys=keys.lengths, mask=mask, scale=1.0)
    meeting = Meeting(nothing, torch.zeros(keys.lengths.total, 1, 1, device=device), request)
    every = tuple(dict.fromkeys((*NEIGHBOURS, *offsets)))
    wanted = Wanted(
        offsets=every if same else (),
        marks=torch.zeros(keys.lengths.total, 0, device=device),
        ids=queries.values if same else None,
    )
    repeats = repeated(queries.values, queries.lengths) if same else None
    scope = Scope(classes=(), repeats=repeats, same=same)
    tally, block = Tally(), Block(0, 1)
    tally_heads(tally, block, meeting, wanted, sum_rows(meeting, wanted), scope)
    return {name: float(tally.means((block,), name)[0]) for name in tally.names}
