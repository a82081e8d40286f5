"""A text generated token by token, with what the watched heads attend to from each new token."""

from typing import Any

import torch
from torch import Tensor

from manyheads.decoding.generation_config import GenerationConfig
from manyheads.decoding.request import GenerationRequest
from manyheads.decoding.sampling import Sample, draw
from manyheads.decoding.stopping import StreamDecoder
from manyheads.lens.inputs.cached_run import Change
from manyheads.models.decoder import Decoder
from manyheads.ragged import Ragged
from manyheads.studio.kept_run import Stopped
from manyheads.studio.models import Book, Text
from manyheads.studio.requests import LeftError
from manyheads.studio.views import rounded
from manyheads.taps import Head, Patterns, Site, Tap

KEYS_SHOWN = 32


class WatchedGeneration:
    """One text being generated; `step` adds a token, and returns None once the text has ended.

    The prompt is read without forming an attention pattern. Afterwards only the row of each new
    token is formed, in the layers of the watched heads.
    """

    def __init__(
        self,
        book: Book,
        text: Text,
        config: GenerationConfig,
        *,
        heads: tuple[Head, ...],
        changes: dict[Site, Change],
    ) -> None:
        assert isinstance(book.model, Decoder), "only a decoder generates text here"
        assert text.given.ids is not None
        self.book, self.model = book, book.model
        self._prompt = text.given.ids
        self._request = GenerationRequest(book.model, self._prompt, config)
        self._random = self._request.random(0)
        self._step = 0
        self._ended = False
        self._heads, self._changes = heads, changes
        self._cache = self.model.new_cache(config.cache)
        self._decoder = StreamDecoder(self._request.tokenizer, self._request.context(0))
        self._logits: Tensor | None = None
        self.length = len(text)

    @torch.inference_mode()
    def step(self, stopped: Stopped) -> dict[str, Any] | None:
        if self._ended or self._step == self._request.config.max_new_tokens:
            return None
        if self._logits is None:
            self._feed(self._prompt, _Watch({}, self._changes, stopped))
        assert self._logits is not None
        token, chance = self._choose(self._logits)
        if token in self._request.eos_token_ids:
            self._ended = True
            return None
        self._step += 1
        watch = _Watch(self._layers(), self._changes, stopped)
        new = torch.tensor([token], device=self._prompt.device)
        self._feed(Ragged.from_list([new]), watch)
        self.length += 1
        return {
            "id": token,
            "word": self.book.word(token),
            # A token may end inside a character, which comes complete with a later token.
            "letters": self._decoder.push(token),
            "chance": rounded(chance),
            "at": self.length - 1,
            "heads": watch.rows(self.length),
        }

    def finish(self) -> str:
        """The characters held back, once there are no more tokens."""
        return self._decoder.finish()

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
        sampling = self._request.config.sampling
        allowed = self._request.constraints.apply(logits, self._step)
        if isinstance(sampling, Sample):
            uniform = torch.tensor([self._random.random()], device=logits.device)
            token = int(draw(sampling.filter_logits(allowed), uniform))
        else:
            token = int(allowed.argmax(-1))
        return token, float(logits[0].softmax(-1)[token])

    def _layers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for head in self._heads:
            found.setdefault(head.layer, []).append(head.head)
        return found


class _Watch:
    """Records the new token's row of the pattern in some layers, and changes heads."""

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

    def rows(self, length: int) -> dict[str, Any]:
        """The keys each head attends to most; a ring buffer has only the last of them."""
        found = {}
        for head, row in self._rows.items():
            largest = row.float().topk(min(KEYS_SHOWN, len(row)))
            first = length - len(row)
            found[str(head)] = {
                "places": [first + place for place in largest.indices.tolist()],
                "weights": [rounded(weight) for weight in largest.values.tolist()],
            }
        return found
