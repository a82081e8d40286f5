"""Generation with a wrapped model: each text has the cache of `transformers` for itself."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.bridge.wrapped_model import WrappedModel
from manyheads.ragged import Ragged
from manyheads.taps import Watcher


@dataclass(slots=True, eq=False)
class WrappedCache:
    """What `transformers` keeps of one text: keys and values, and the encoder's output."""

    keys: Any = None
    seen: int = 0
    memory: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "WrappedCache":
        return WrappedCache(deepcopy(self.keys, memo), self.seen, self.memory)


class WrappedSteps:
    """Steps of several texts, one after another: no padding, which moves positions.

    `watch` sees every step and may replace activations, for example the outputs of some heads.
    """

    def __init__(
        self, model: WrappedModel, start_id: int | None = None, watch: Watcher | None = None
    ) -> None:
        self.model, self.start_id, self.watch = model, start_id, watch
        self._caches: list[WrappedCache] = []

    @torch.inference_mode()
    def start(self, prompts: Ragged) -> Float[Tensor, "b v"]:
        self._caches = [WrappedCache() for _ in range(len(prompts))]
        pairs = zip(self._caches, prompts.to_list(), strict=True)
        return torch.cat([self._first(cache, ids) for cache, ids in pairs])

    @torch.inference_mode()
    def next(self, ids: Int[Tensor, " b"]) -> Float[Tensor, "b v"]:
        pairs = zip(self._caches, ids, strict=True)
        steps = [step(self.model, cache, token[None], watch=self.watch) for cache, token in pairs]
        return torch.cat(steps)

    def select(self, sequences: list[int]) -> None:
        chosen: list[WrappedCache] = []
        for index in sequences:
            cache = self._caches[index]
            # A beam that goes on twice needs a cache for each.
            again = any(cache is before for before in chosen)
            chosen.append(deepcopy(cache) if again else cache)
        self._caches = chosen

    def _first(self, cache: WrappedCache, prompt: Int[Tensor, " n"]) -> Float[Tensor, "1 v"]:
        if self.start_id is None:
            return step(self.model, cache, prompt, watch=self.watch)
        start = torch.full((1,), self.start_id, device=prompt.device)
        return step(self.model, cache, start, prompt, self.watch)


def step(
    model: WrappedModel,
    cache: WrappedCache,
    ids: Int[Tensor, " n"],
    source: Int[Tensor, " m"] | None = None,
    watch: Watcher | None = None,
) -> Float[Tensor, "1 v"]:
    """Append tokens to a text, and return the logits of the next one."""
    cache.seen += len(ids)
    arguments: dict[str, Any] = {"past_key_values": cache.keys}
    if source is None and cache.memory is None:
        arguments["input_ids"] = ids[None]
        arguments["attention_mask"] = torch.ones(1, cache.seen, dtype=ids.dtype, device=ids.device)
    else:
        arguments["decoder_input_ids"] = ids[None]
        if source is not None:
            arguments["input_ids"] = source[None]
        else:
            arguments["encoder_outputs"] = (cache.memory,)
    output = model.call(arguments, watch)
    cache.keys = output.past_key_values
    if source is not None:
        cache.memory = output.encoder_last_hidden_state
    return output.logits[:, -1].float()
