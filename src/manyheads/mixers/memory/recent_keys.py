"""The keys and values of the last tokens of every text, which a cache keeps from call to call."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.cache import StateSlot
from manyheads.errors import InputError
from manyheads.mixers.head_weights import Vectors
from manyheads.ragged import Lengths


@dataclass(frozen=True, slots=True, eq=False)
class RecentKeys:
    """Keys and values of the tokens of a batch, behind the last `limit` of each text before them.

    Positions count from the first new token of a text, so that those of earlier calls are negative.
    """

    k: Float[Tensor, "m h d"]
    v: Float[Tensor, "m h d"]
    lengths: Lengths
    limit: int
    # How many tokens of each text came before the new ones.
    before: Int[Tensor, " b"]

    @classmethod
    def join(
        cls, key: Vectors, value: Vectors, lengths: Lengths, cache: StateSlot | None, limit: int
    ) -> "RecentKeys":
        """The new tokens with those of the cache, up to `limit` tokens of each text."""
        none = torch.zeros(lengths.count, dtype=torch.long, device=key.device)
        if cache is None:
            return cls(key, value, lengths, 0, none)
        if cache.state is None:
            empty = key.new_zeros(lengths.count, limit, *key.shape[1:])
            recent: tuple[Tensor, ...] = (empty, empty, none)
        else:
            recent = cache.state
            if recent[0].shape[1:] != (limit, *key.shape[1:]):
                raise InputError(
                    f"the cache keeps keys of shape {tuple(recent[0].shape[1:])}, and this layer "
                    f"needs {(limit, *key.shape[1:])}",
                    "use a cache of this model: model.new_cache()",
                )
        *old, before = recent
        pairs = zip(old, (key, value), strict=True)
        keys, values = (torch.cat([stored.flatten(0, 1), new]) for stored, new in pairs)
        return cls(keys, values, lengths, limit, before)

    def rows(
        self, text: Int[Tensor, " c"], position: Int[Tensor, "c s"]
    ) -> tuple[Int[Tensor, "c s"], Bool[Tensor, "c s"]]:
        """The rows of positions of some texts, and which exist; others give a row of the text."""
        text = text.unsqueeze(1)
        length = self.lengths.offsets.diff().long()[text]
        exists = (position < length) & (position >= -self.before[text].clamp(max=self.limit))
        new = self.lengths.count * self.limit + self.lengths.offsets[:-1].long()[text] + position
        old = (text + 1) * self.limit + position
        filler = self.lengths.count * self.limit + self.lengths.offsets[:-1].long()[text]
        return torch.where(exists, torch.where(position < 0, old, new), filler), exists

    def keep(self, cache: StateSlot | None) -> None:
        """Leave the last tokens of every text in the cache."""
        if cache is None:
            return
        count, device = self.lengths.count, self.k.device
        length = self.lengths.offsets.diff().long()
        position = length.unsqueeze(1) + torch.arange(-self.limit, 0, device=device)
        if not self.k.shape[0]:
            return
        rows, exists = self.rows(torch.arange(count, device=device), position)
        rows = rows.clamp(max=self.k.shape[0] - 1)
        key, value = (x[rows].masked_fill(~exists[..., None, None], 0) for x in (self.k, self.v))
        cache.keep(key, value, self.before + length)
