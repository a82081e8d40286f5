"""Row sums of texts whose tokens are shared by several processes, merged exactly from parts.

Keys travel as in `kernels/ring.py`. Each part of the keys has its own softmax, with log-sum-exp L1
or L2 and joint L; a = exp(L1 - L) and b = exp(L2 - L) are the shares of the weight that they have
together. So means, masses and weights are a x1 + b x2, and

    entropy   a (H1 - ln a) + b (H2 - ln b)
    squares   a^2 s1 + b^2 s2
    variance  a (v1 + (m1 - m)^2) + b (v2 + (m2 - m)^2)   with the mean positions m = a m1 + b m2
"""

from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from manyheads.kernels import ring
from manyheads.kernels.contract import Request
from manyheads.lens.measure.row_sums import RowSums, RowSumSpec, row_sums
from manyheads.lens.measure.score_tiles import TiledPart, TiledScores
from manyheads.parts.masks import Shifted

# What is a mean or a sum over the weights of a row.
LINEAR = ("distance", "first", "duplicate", "induction", "offsets", "marks")


def shared_row_sums(tiled: TiledScores, spec: RowSumSpec) -> RowSums:
    """The sums of the queries of this process; `spec` has the marks and ids of the whole texts."""
    shard, mask = tiled.request.queries.shard, tiled.request.mask
    assert shard is not None, "the caller has checked that texts are shared"
    rows = _MergedRows(RowSums.empty(tiled, spec))
    starts = [0]
    for length in shard.lengths:
        starts.append(starts[-1] + length)
    for turn, keys in ring.Travel(shard, ring.turns_of(shard, mask), tiled.key.flatten(1)):
        received = keys.unflatten(1, tiled.key.shape[1:])
        for pair in turn.pairs:
            part = _part(tiled, received, pair, starts[pair.text])
            near = pair.key.start + len(pair.key) // 2
            key = torch.arange(pair.key.start, pair.key.stop, device=keys.device)
            start = starts[pair.text] + pair.key.start
            marks = spec.marks[start : start + len(pair.key)]
            # The mean position of a part, relative to its middle, as one more mark.
            columns = torch.cat((marks, (key - near).to(marks.dtype)[:, None]), dim=1)
            sums = row_sums(part, replace(spec, marks=columns))
            rows.add(pair, sums, near)
    return rows.finish(tiled.request.sink)


def _part(
    tiled: TiledScores, keys: Float[Tensor, "m g d"], pair: ring.Pair, text_row: int
) -> TiledPart:
    request = tiled.request
    assert request.queries.shard is not None, "the caller has checked that texts are shared"
    mask, first = request.mask.of_sequence(pair.text), pair.key.start
    if not mask.fills_reach:
        mask = Shifted(mask, first, first, request.queries.shard.lengths[pair.text])
    device = keys.device
    return TiledPart(
        tiled.query[pair.queries],
        keys[pair.keys],
        Request(
            queries=ring.one_text(len(pair.query), device),
            keys=ring.one_text(len(pair.key), device),
            mask=mask,
            scale=request.scale,
            bias=request.bias,
            softcap=request.softcap,
        ),
        pair.query.start,
        first,
        text_row,
    )


class _MergedRows:
    """The sums over the keys so far, with their log-sum-exp and mean position."""

    def __init__(self, sums: RowSums) -> None:
        self.sums = sums
        shape = sums.mass.shape
        self.lse = sums.mass.new_full(shape, -torch.inf)
        self.position = sums.mass.new_zeros(shape, dtype=torch.float64)
        sums.score.fill_(-torch.inf)

    def add(self, pair: ring.Pair, part: RowSums, near: int) -> None:
        """Add what some queries give to other keys; `near` is where positions are counted from."""
        sums, rows = self.sums, pair.queries
        lse = part.score - part.largest.log()
        lse = lse.masked_fill(part.largest == 0, -torch.inf)
        joined = torch.logaddexp(self.lse[rows], lse)
        level = joined.masked_fill(joined == -torch.inf, 0.0)
        old, new = (self.lse[rows] - level).exp(), (lse - level).exp()
        sums.visible[rows] += part.visible
        squares = old.square() * sums.squares[rows] + new.square() * part.squares
        sums.squares[rows] = squares
        spread = torch.special.entr(old) + torch.special.entr(new)
        sums.entropy[rows] = old * sums.entropy[rows] + new * part.entropy + spread
        sums.largest[rows] = torch.maximum(old * sums.largest[rows], new * part.largest)
        score = part.score.masked_fill(part.largest == 0, -torch.inf)
        sums.score[rows] = torch.maximum(sums.score[rows], score)
        self._move(rows, part, (old, new), near + part.marks[..., -1].double())
        part = replace(part, marks=part.marks[..., :-1])
        if pair.key.start:
            # Its first key is not that of the text.
            part = replace(part, first=torch.zeros_like(part.first))
        for name in LINEAR:
            value, added = getattr(sums, name), getattr(part, name)
            few, more = (
                x if added.dim() == 2 else rearrange(x, "n h -> n h 1") for x in (old, new)
            )
            value[rows] = few * value[rows] + more * added
        self.lse[rows] = joined

    def _move(
        self, rows: slice, part: RowSums, shares: tuple[Tensor, Tensor], position: Tensor
    ) -> None:
        """The variance around the new mean position."""
        (old, new), before = shares, self.position[rows]
        mean = old * before + new * position
        variance = old * (self.sums.variance[rows] + (before - mean).square())
        variance = variance + new * (part.variance + (position - mean).square())
        self.sums.variance[rows] = variance.float()
        self.position[rows] = mean

    def finish(self, sink: Float[Tensor, " h"] | None) -> RowSums:
        """The sums of all keys; a sink takes its share of every weight."""
        sums, sees = self.sums, self.lse > -torch.inf
        mass = sees.float()
        if sink is not None:
            mass = torch.where(sees, torch.sigmoid(self.lse - sink.float()), 0.0)
        scaled = {
            name: getattr(sums, name) * (mass[..., None] if name in ("offsets", "marks") else mass)
            for name in (*LINEAR, "largest")
        }
        return replace(
            sums,
            mass=mass,
            entropy=mass * sums.entropy + torch.special.entr(mass),
            squares=mass.square() * sums.squares,
            score=sums.score.masked_fill(scaled["largest"] == 0, 0.0),
            **scaled,
        )
