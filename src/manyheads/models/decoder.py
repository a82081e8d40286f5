"""Decoders: models that generate text token by token, with a cache."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from manyheads.cache import Cache, CachePlan, DynamicCache, StaticCache
from manyheads.errors import ConfigError
from manyheads.models import encoder, padding
from manyheads.models.stack import StackConfig
from manyheads.parts.halting import AddedLoss
from manyheads.ragged import Ragged
from manyheads.taps import Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(encoder.TextConfig):
    """The config of a decoder such as GPT-2 or Llama."""


def check_decodes(stack: StackConfig) -> None:
    """Refuse masks under which later tokens would change cached ones."""
    for index in range(len(stack.layers)):
        mixer, attention = stack.layers[index].mixer, stack.attention(index)
        if mixer is not None and not mixer.inner.causal:
            raise ConfigError(
                f"layer {index}, {type(mixer.inner).__name__}, sees later tokens",
                "use a causal mixer, or run without a cache",
            )
        if stack.layers[index].convolution is not None:
            raise ConfigError(
                f"the convolution of layer {index} sees later tokens", "run without a cache"
            )
        if attention is None:
            continue
        if not attention.mask.independent_of_length:
            raise ConfigError(
                f"the mask of layer {index}, {attention.mask}, depends on the length of the text",
                "use a mask that does not count from the end, or run without a cache",
            )
        if attention.mask.reach.after > 0:
            raise ConfigError(
                f"the mask of layer {index}, {attention.mask}, sees later tokens",
                "use Causal() or a window without `after`, or run without a cache",
            )


class Decoder(encoder.TextModel):
    """A model that generates text; with a cache it takes only the new tokens.

    >>> import torch
    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, seed=0)
    >>> cache = model.new_cache()
    >>> with torch.no_grad():
    ...     first = model(torch.tensor([[5, 6, 7]]), cache=cache)
    ...     second = model(torch.tensor([[8]]), cache=cache)
    >>> cache.seen, second.logits.shape
    ((4,), torch.Size([1, 1, 50257]))
    """

    generates = True

    def forward(
        self,
        ids: Ragged | Tensor,
        mask: Tensor | None = None,
        *,
        types: Ragged | Tensor | None = None,
        cache: Cache | None = None,
        watch: Watcher | None = None,
    ) -> padding.Output:
        if cache is None:
            return super().forward(ids, mask, types=types, watch=watch)
        batch, layout = padding.to_ragged(ids, mask)
        type_ids = None if types is None else padding.to_ragged(types, mask, "types")[0]
        plan = cache.plan(batch.lengths)
        x = self.embedding(batch, plan.positions, type_ids)
        hidden, router = self._continue(x, cache, plan, watch)
        return layout.output(hidden, self._read(hidden), router)

    def next_logits(self, ids: Ragged, cache: Cache) -> Float[Tensor, "b v"]:
        """The logits of the token after each sequence; no other position is scored.

        The ids are not checked, which would wait for the device at every step.
        """
        plan = cache.plan(ids.lengths)
        hidden, _ = self._continue(self.embedding.embed(ids, plan.positions), cache, plan)
        read = self._read(encoder.last_tokens(hidden))
        assert isinstance(read, Ragged), "callers check that there is a language head"
        return read.values

    def new_cache(self, config: DynamicCache | StaticCache = DynamicCache()) -> Cache:
        """An empty cache for this model; layers with sliding windows have ring buffers."""
        check_decodes(self.config.stack)
        return self.stack.new_cache(config)

    def _continue(
        self, x: Ragged, cache: Cache, plan: CachePlan, watch: Watcher | None = None
    ) -> tuple[Ragged, tuple[AddedLoss, ...]]:
        """The hidden states of new tokens after those in the cache."""
        at = plan.positions
        hidden, router = self.stack(x, positions=at, cache=cache, plan=plan, watch=watch)
        cache.finish(plan)
        return hidden, router
