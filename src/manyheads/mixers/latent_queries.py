"""Latent queries (arXiv 1810.00825, 2103.03206): tokens meet in a few learned vectors."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.mixers.mixer import HeadMixer, Heads, HeadSettings, Mixed, by_head, split_heads
from manyheads.mixers.sparse.key_lists import attend_masked
from manyheads.ragged import Lengths, Ragged


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LatentQueries(HeadSettings):
    """`latents` learned queries read a text, and its tokens read what these have read.

    Both are softmax attention; it takes time linear in the number of tokens, and reads both ways.
    The inducing points of the Set Transformer and the latent array of the Perceiver, without
    layers of their own.
    """

    causal = False

    latents: PositiveInt
    bias: bool = False


class LatentQueriesLayer(HeadMixer):
    """Attention of latents to the tokens of a text, then of the tokens to the latents."""

    has_pattern = False

    def __init__(self, config: LatentQueries) -> None:
        super().__init__(config)
        width = config.width
        self.latents = nn.Parameter(torch.randn(config.latents, width))
        self.project = nn.Linear(width, 3 * width, bias=config.bias)
        self.ask = nn.Linear(width, width, bias=config.bias)
        self.gather = nn.Linear(width, width, bias=config.bias)
        self.tell = nn.Linear(width, 2 * width, bias=config.bias)
        self.output = nn.Linear(width, width, bias=config.bias)

    def mix(self, qkv: Heads, x: Ragged, cache: StateSlot | None) -> Mixed:  # noqa: ARG002
        query, key, value = qkv
        config, count = self.config, x.lengths.count
        latents = Lengths.of([config.latents] * count, x.values.device)
        asking = by_head(self.ask(self.latents), config.heads).repeat(count, 1, 1)
        answers = attend_masked(asking, key, value, (latents, x.lengths))
        # As in the Set Transformer, each latent adds what it read to itself.
        states = self.latents.repeat(count, 1) + self.gather(answers.flatten(1))
        states = F.layer_norm(states, (config.width,))
        keys, values = split_heads(self.tell(states), config.heads, 2)
        return attend_masked(query, keys, values, (x.lengths, latents)), None
