"""The weights that the heads of a mixer give to tokens: patterns, computed row by row.

The output of such a head is a sum over tokens, as that of attention, but its weights may be
negative and need not sum to one. They follow from the queries, keys and decays of the mixer.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.mixers.recurrent.delta_recurrence import CHUNK, Decay, Rate, Values, delta_in_chunks
from manyheads.ragged import Lengths
from manyheads.taps import Patterns, Tap, WatchContext

# A vector per token and head, and the weights of t queries of a text on its tokens.
Vectors = Float[Tensor, "n h d"]
Weights = Float[Tensor, "h t s"]


class HeadWeights(Patterns):
    """Patterns that are computed on demand, in full or a few rows at a time, in float32."""

    def __init__(self, lengths: Lengths, heads: int, *, causal: bool = True) -> None:
        self.lengths, self.heads, self.causal = lengths, heads, causal

    def rows(self, sequence: int, rows: range, heads: range | None = None) -> Weights:
        """The weights of some queries of a sequence on its tokens up to the last of them, or on
        all its tokens where a query sees later ones."""
        heads = range(self.heads) if heads is None else heads
        return self.weigh(sequence, rows, slice(heads.start, heads.stop))

    @abstractmethod
    def weigh(self, sequence: int, rows: range, heads: slice) -> Weights:
        """The same for the heads of a slice."""

    @property
    def each(self) -> tuple[Float[Tensor, "h _ _"], ...]:
        return tuple(self.of(sequence) for sequence in range(len(self)))

    def __len__(self) -> int:
        return len(self.lengths)

    def of(self, sequence: int) -> Weights:
        return self.rows(sequence, range(self.lengths.each[sequence]))

    def shares(self, sequence: int) -> Weights:
        sizes = self.of(sequence).abs()
        return sizes / sizes.sum(-1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)

    @property
    def nbytes(self) -> int:
        """The size of what the weights are computed from."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def _tokens(self, sequence: int, rows: range | None = None) -> slice:
        """The tokens of a sequence, or of some of its rows, in the batch."""
        start = self.lengths.starts[sequence]
        rows = range(self.lengths.each[sequence]) if rows is None else rows
        return slice(start + rows.start, start + rows.stop)


class DecayWeights(HeadWeights):
    """Products of queries and keys that decay with every token between: q_t k_s exp(sum of decays).

    That of linear attention, retention and Mamba-2. `normalized` divides by the sum of each row.
    """

    def __init__(
        self,
        query: Vectors,
        key: Vectors,
        log_decay: Float[Tensor, "n h"] | None,
        lengths: Lengths,
        *,
        causal: bool = True,
        normalized: bool = False,
    ) -> None:
        super().__init__(lengths, query.shape[1], causal=causal)
        self.query, self.key, self.log_decay = query, key, log_decay
        self.normalized = normalized

    def weigh(self, sequence: int, rows: range, heads: slice) -> Weights:
        keys = range(rows.stop if self.causal else self.lengths.each[sequence])
        query = self.query[self._tokens(sequence, rows), heads].float().transpose(0, 1)
        key = self.key[self._tokens(sequence, keys), heads].float().transpose(0, 1)
        weights = query @ key.transpose(1, 2)
        if self.log_decay is not None:
            decay = self.log_decay[self._tokens(sequence, keys), heads].T
            # Counted from the first of the rows, which keeps what is near exact in float32.
            g_cumsum = decay.double().cumsum(-1)
            g_cumsum = (g_cumsum - g_cumsum[:, rows.start : rows.start + 1]).float()
            between = g_cumsum[:, rows.start : rows.stop, None] - g_cumsum[:, None]
            weights = weights * between.clamp_(max=0.0).exp_()
        weights = weights.tril(rows.start) if self.causal else weights
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
        return weights


@dataclass(frozen=True, slots=True, eq=False)
class _DeltaChunks:
    """How chunks of tokens weigh in later outputs, which read the state S after them as g S.

    `own` are the weights inside a chunk, `reads` what its queries read of the state before it. Of a
    later g, g `written` are the weights of the chunk, and g `carried` reads the state before it.
    """

    own: Float[Tensor, "n h c"]
    reads: Float[Tensor, "n h d"]
    written: Float[Tensor, "m h d c"]
    carried: Float[Tensor, "m h d d"]


class DeltaWeights(HeadWeights):
    """The matrix that maps values to outputs under the delta rule: (I - b k k^T) unrolled."""

    def __init__(
        self, query: Vectors, key: Vectors, beta: Rate, log_decay: Decay, lengths: Lengths
    ) -> None:
        super().__init__(lengths, query.shape[1])
        self.query, self.key, self.beta, self.log_decay = query, key, beta, log_decay
        self._chunks: tuple[int, _DeltaChunks] | None = None

    def weigh(self, sequence: int, rows: range, heads: slice) -> Weights:
        # The chunks of the last sequence are remembered.
        if self._chunks is None or self._chunks[0] != sequence:
            self._chunks = sequence, self._cut(self._tokens(sequence))
        count, chunks = heads.stop - heads.start, self._chunks[1]
        weights = self.query.new_zeros(count, len(rows), rows.stop, dtype=torch.float32)
        state = weights.new_zeros(count, 0, self.query.shape[2])
        # From the last tokens to the first: the rows of a chunk join those of the chunks after it.
        for number in reversed(range(-(-rows.stop // CHUNK))):
            start, stop = number * CHUNK, min((number + 1) * CHUNK, rows.stop)
            after = max(stop - rows.start, 0)
            later = state @ chunks.written[number, heads]
            weights[:, after:, start:stop] = later[..., : stop - start]
            state = state @ chunks.carried[number, heads]
            if after:
                first = max(start, rows.start)
                inside = chunks.own[first:stop, heads, : stop - start].transpose(0, 1)
                weights[:, first - rows.start : after, start:stop] = inside
                reads = chunks.reads[first:stop, heads].transpose(0, 1)
                state = torch.cat([reads, state], dim=1)
        return weights

    def _cut(self, tokens: slice) -> _DeltaChunks:
        """Run the recurrence in every chunk on its own, with one channel of the values for each of
        its tokens and one for each channel of the state before it."""
        query, device = self.query[tokens], self.query.device
        total, heads, size = query.shape
        sizes = [min(CHUNK, total - start) for start in range(0, total, CHUNK)]
        token = torch.eye(CHUNK + size, device=device)[torch.arange(total, device=device) % CHUNK]
        state = torch.eye(CHUNK + size, device=device)[CHUNK:].expand(len(sizes), heads, -1, -1)
        key, beta, decay = self.key[tokens], self.beta[tokens], self.log_decay[tokens]
        value, lengths = token.unsqueeze(1).expand(-1, heads, -1), Lengths.of(sizes, device)
        outputs, after = delta_in_chunks(query, key, value, beta, decay, lengths, state)
        own, reads = outputs.split([CHUNK, size], dim=-1)
        return _DeltaChunks(own, reads, *after.split([CHUNK, size], dim=-1))


def watch_pattern(
    context: WatchContext | None, weights: Callable[[], HeadWeights], value: Values, mixed: Values
) -> Values:
    """The outputs of the heads after a watcher has seen the pattern, and perhaps replaced it."""
    if context is None or not context.wants(Tap.PATTERN):
        return mixed
    own = weights()
    pattern: Patterns = context.at(Tap.PATTERN, own)
    if pattern is own:
        return mixed
    parts = zip(pattern.each, own.lengths.slices(), strict=True)
    outputs = [torch.einsum("hts,she->the", rows.float(), value[at].float()) for rows, at in parts]
    return torch.cat(outputs).to(value.dtype) if outputs else mixed
