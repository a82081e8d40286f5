"""Generation token by token, with the attention of selected heads from each new token."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyheads.bridge.wrapped_model import WrappedModel
from manyheads.bridge.wrapped_steps import WrappedCache, step
from manyheads.decoding import generation_config, request, stopping
from manyheads.decoding.sampling import Sample, draw
from manyheads.lens.inputs.cached_run import EditFunction
from manyheads.models.decoder import Decoder
from manyheads.ragged import Ragged
from manyheads.studio import models, requests, run_cache, views
from manyheads.taps import Head, Patterns, Site, Tap

TOP_KEYS = 32


class WatchedGeneration:
    """One text being generated; `step` adds a token, and returns None at the end.

    The prompt is read without computing any attention pattern and with edits of its own; then only
    the row of each new token is computed, in the layers of the selected heads.
    """

    def __init__(
        self,
        loaded: models.LoadedModel,
        text: models.StudioInput,
        config: generation_config.GenerationConfig,
        *,
        heads: tuple[Head, ...],
        prompt_edits: dict[Site, EditFunction],
        edits: dict[Site, EditFunction],
    ) -> None:
        assert isinstance(loaded.model, Decoder), "only a decoder generates text here"
        assert text.inputs.ids is not None
        self.loaded, self.model = loaded, loaded.model
        self._prompt = text.inputs.ids
        self._request = request.GenerationRequest(loaded.model, self._prompt, config)
        self._random = self._request.random(0)
        self._step = 0
        self._ended = False
        self._prompt_edits, self._edits = prompt_edits, edits
        self._heads: dict[int, list[int]] = {}
        for head in heads:
            self._heads.setdefault(head.layer, []).append(head.head)
        self._cache = self.model.new_cache(config.cache)
        self._wrapped_cache = WrappedCache()
        self._decoder = stopping.StreamDecoder(self._request.tokenizer, self._request.context(0))
        self._logits: Tensor | None = None
        self.length = len(text)

    @torch.inference_mode()
    def step(self, cancelled: run_cache.IsCancelled) -> dict[str, Any] | None:
        if self._ended or self._step == self._request.config.max_new_tokens:
            return None
        if self._logits is None:
            self._feed(self._prompt, _RowRecorder({}, self._prompt_edits, cancelled))
        assert self._logits is not None
        token, probability = self._choose(self._logits)
        if token in self._request.eos_token_ids:
            self._ended = True
            return None
        self._step += 1
        watch = _RowRecorder(self._heads, self._edits, cancelled)
        new = torch.tensor([token], device=self._prompt.device)
        self._feed(Ragged.from_list([new]), watch)
        self.length += 1
        return {
            "id": token,
            "token": self.loaded.output_text(token),
            # A token may end inside a character, which comes complete with a later token.
            "text": self._decoder.push(token),
            "probability": views.rounded(probability),
            "position": self.length - 1,
            "heads": watch.rows(self.length),
        }

    def finish(self) -> dict[str, Any]:
        """The characters held back, once there are no more tokens."""
        return {"text": self._decoder.finish()}

    def _feed(self, ids: Ragged, watch: "_RowRecorder") -> None:
        if isinstance(self.model, WrappedModel):
            self._logits = step(self.model, self._wrapped_cache, ids.values, watch=watch)
            return
        plan = self._cache.plan(ids.lengths)
        x = self.model.embedding(ids, plan.positions, None)
        hidden, _ = self.model.stack(
            x, positions=plan.positions, cache=self._cache, plan=plan, watch=watch
        )
        self._cache.finish(plan)
        assert self.model.readout is not None
        self._logits = self.model.readout.logits(hidden.values[-1:], self.model.table).float()

    def _choose(self, logits: Tensor) -> tuple[int, float]:
        sampling = self._request.config.sampling
        allowed = self._request.constraints.apply(logits, self._step)
        if isinstance(sampling, Sample):
            uniform = torch.tensor([self._random.random()], device=logits.device)
            token = int(draw(sampling.filter_logits(allowed), uniform))
        else:
            token = int(allowed.argmax(-1))
        return token, float(logits[0].softmax(-1)[token])


@dataclass(slots=True, eq=False)
class _RowRecorder:
    """Records the pattern row of the new token in some layers, and edits heads."""

    layers: dict[int, list[int]]
    edits: dict[Site, EditFunction]
    cancelled: run_cache.IsCancelled
    recorded: dict[Head, Tensor] = field(default_factory=dict)

    def wants(self, site: Site) -> bool:
        if self.cancelled():
            raise requests.DisconnectedError
        return site in self.edits or (site.tap is Tap.PATTERN and site.layer in self.layers)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
        if isinstance(value, Ragged):
            return value.map(self.edits[site])
        pattern = value.of(0)
        for head in self.layers[site.layer]:
            self.recorded[Head(site.layer, head)] = pattern[head, -1]
        return None

    def rows(self, length: int) -> dict[str, Any]:
        """The keys each head attends to most; a ring buffer has only the last of them."""
        by_head = {}
        for head, row in self.recorded.items():
            largest = row.float().topk(min(TOP_KEYS, len(row)))
            first = length - len(row)
            by_head[str(head)] = {
                "positions": [first + index for index in largest.indices.tolist()],
                "weights": [views.rounded(weight) for weight in largest.values.tolist()],
            }
        return by_head
