"""A text written token by token, with what the watched heads look at from every new token."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from manyheads.cache import Growing
from manyheads.decoding.choosing import Sample, draw
from manyheads.decoding.habits import Habits
from manyheads.decoding.reading import Reader, context_of
from manyheads.decoding.room import check_room
from manyheads.lens.trunk import Change
from manyheads.models.decoder import Decoder
from manyheads.ragged import Ragged
from manyheads.studio.reading import Stopped
from manyheads.studio.refusals import LeftError
from manyheads.studio.shelf import Book, Text
from manyheads.studio.views import rounded
from manyheads.taps import Head, Patterns, Site, Tap

__all__ = ["Writer"]

KEYS_TOLD = 32


class Writer:
    """One text on its way; `step` adds a token, and says None once the text has ended.

    The prompt is read without forming a pattern; afterwards only the one row of each new token is
    formed, in the layers of the watched heads.
    """

    def __init__(
        self,
        book: Book,
        text: Text,
        *,
        new_tokens: int,
        temperature: float,
        seed: int | None,
        heads: tuple[Head, ...],
        changes: dict[Site, Change],
    ) -> None:
        assert isinstance(book.model, Decoder), "only a decoder writes here"
        assert text.given.ids is not None
        self.book, self.model = book, book.model
        self._prompt = text.given.ids
        check_room(self.model, [self._prompt.values.tolist()], new_tokens, Growing())
        self._left = new_tokens
        self._sample = Sample(temperature=temperature) if temperature > 0 else None
        self._chances = Random(seed)
        self._stop_ids = frozenset(Habits.of(book.model).stop_ids)
        self._heads, self._changes = heads, changes
        self._cache = self.model.new_cache(Growing())
        context = context_of(book.model.tokenizer, self._prompt.values.tolist())
        self._reader = Reader(book.model.tokenizer, context)
        self._logits: Tensor | None = None
        self.length = len(text)

    @torch.inference_mode()
    def step(self, stopped: Stopped) -> dict[str, Any] | None:
        if not self._left:
            return None
        if self._logits is None:
            self._feed(self._prompt, _Watch({}, self._changes, stopped))
        assert self._logits is not None
        token, chance = self._choose(self._logits)
        if token in self._stop_ids:
            self._left = 0
            return None
        self._left -= 1
        watch = _Watch(self._layers(), self._changes, stopped)
        new = torch.tensor([token], device=self._prompt.device)
        self._feed(Ragged.from_list([new]), watch)
        self.length += 1
        return {
            "id": token,
            "word": self.book.word(token),
            # A token may end within a letter, which comes whole with a later one.
            "letters": self._reader.push(token),
            "chance": rounded(chance),
            "at": self.length - 1,
            "heads": watch.told(self.length),
        }

    def finish(self) -> str:
        """Letters that are left once nothing more comes."""
        return self._reader.finish()

    def _feed(self, ids: Ragged, watch: "_Watch") -> None:
        plan = self._cache.plan(ids.lengths)
        x = self.model.embedding(ids, plan.positions, None)
        hidden, _ = self.model.stack(
            x, positions=plan.positions, cache=self._cache, plan=plan, watch=watch
        )
        self._cache.finish(plan)
        readout = self.model.readout
        assert readout is not None
        last = hidden.values[-1:]
        vectors = readout.vectors(self.model.table)
        self._logits = torch.nn.functional.linear(
            readout.features(last), vectors, readout.bias
        ).float()

    def _choose(self, logits: Tensor) -> tuple[int, float]:
        if self._sample is None:
            token = int(logits.argmax(-1))
        else:
            chance = torch.tensor([self._chances.random()], device=logits.device)
            token = int(draw(self._sample.narrow(logits), chance))
        return token, float(logits[0].softmax(-1)[token])

    def _layers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for head in self._heads:
            found.setdefault(head.layer, []).append(head.head)
        return found


class _Watch:
    """Looks at the new token's row in some layers, and changes heads as asked."""

    def __init__(
        self, layers: dict[int, list[int]], changes: dict[Site, Change], stopped: Stopped
    ) -> None:
        self._layers, self._changes, self._stopped = layers, changes, stopped
        self._rows: dict[Head, Tensor] = {}

    def wants(self, site: Site) -> bool:
        if self._stopped():
            raise LeftError
        return site in self._changes or (site.tap is Tap.PATTERN and site.layer in self._layers)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
        if isinstance(value, Ragged):
            return value.map(self._changes[site])
        pattern = value.of(0)
        for head in self._layers[site.layer]:
            self._rows[Head(site.layer, head)] = pattern[head, -1]
        return None

    def told(self, length: int) -> dict[str, Any]:
        """The keys each head looks at most; a ring has only the last of them."""
        found = {}
        for head, row in self._rows.items():
            largest = row.float().topk(min(KEYS_TOLD, len(row)))
            first = length - len(row)
            found[str(head)] = {
                "places": [first + place for place in largest.indices.tolist()],
                "weights": [rounded(weight) for weight in largest.values.tolist()],
            }
        return found
