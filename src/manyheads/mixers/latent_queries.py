"""Latent queries (arXiv 1810.00825, 2103.03206): tokens meet in a few learned vectors."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import ConfigError, check_int
from manyheads.kernels.choose import attend
from manyheads.kernels.contract import Request
from manyheads.mixers.mixer import Mixer, by_head, refuse_cache
from manyheads.mixers.sparse.key_lists import FULL, OUTPUT_ALONE
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Tap, WatchContext, observe


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LatentQueries:
    """`latents` learned queries read a text, and its tokens read what these have found.

    Both are softmax attention; it takes time linear in the number of tokens, and reads both ways.
    The inducing points of the Set Transformer and the latent array of the Perceiver, without
    layers of their own.
    """

    width: int
    heads: int
    latents: int
    bias: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "heads", "latents"):
            check_int(name, getattr(self, name), minimum=1)
        if self.width % self.heads:
            raise ConfigError(f"heads must divide width={self.width}, got {self.heads}")

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return False

    @property
    def size(self) -> int:
        """Channels of a head."""
        return self.width // self.heads


class LatentQueriesLayer(Mixer):
    """Attention of latents to the tokens of a text, then of the tokens to the latents."""

    def __init__(self, config: LatentQueries) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.latents = nn.Parameter(torch.randn(config.latents, width))
        self.project = nn.Linear(width, 3 * width, bias=config.bias)
        self.ask = nn.Linear(width, width, bias=config.bias)
        self.gather = nn.Linear(width, width, bias=config.bias)
        self.tell = nn.Linear(width, 2 * width, bias=config.bias)
        self.output = nn.Linear(width, width, bias=config.bias)

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        refuse_cache(cache)
        config, count = self.config, x.lengths.count
        query, key, value = (
            by_head(part, config.heads) for part in self.project(x.values).chunk(3, dim=-1)
        )
        query = observe(context, Tap.QUERY, query, x)
        key = observe(context, Tap.KEY, key, x)
        value = observe(context, Tap.VALUE, value, x)
        latents = Lengths.of([config.latents] * count, x.values.device)
        asked = by_head(self.ask(self.latents), config.heads).repeat(count, 1, 1)
        found = attend(asked, key, value, _request(latents, x.lengths, config)).output
        # As in the Set Transformer, each latent adds what it found to itself.
        states = self.latents.repeat(count, 1) + self.gather(found.flatten(1))
        states = F.layer_norm(states, (config.width,))
        keys, values = (by_head(part, config.heads) for part in self.tell(states).chunk(2, dim=-1))
        mixed = attend(query, keys, values, _request(x.lengths, latents, config)).output
        mixed = observe(context, Tap.HEAD_OUTPUT, mixed, x)
        return x.with_values(self.output(mixed.flatten(1)))


def _request(queries: Lengths, keys: Lengths, config: LatentQueries) -> Request:
    scale = config.size**-0.5
    return Request(queries=queries, keys=keys, mask=FULL, scale=scale, want=OUTPUT_ALONE)
