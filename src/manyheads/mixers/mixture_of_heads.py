"""Mixture of heads (arXiv 2410.11842): a router picks the heads that each token listens to."""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import NonNegativeInt, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import ConfigError
from manyheads.mixers.growing_cache import continue_texts, padded_texts
from manyheads.mixers.head_weights import Weights
from manyheads.mixers.mixer import HeadMixer, Heads, HeadSettings, Mixed
from manyheads.mixers.sparse import key_lists
from manyheads.parts import experts, masks
from manyheads.ragged import Ragged

# Named, because torch.compile cannot trace a dataclass that is made inside the graph.
CAUSAL = masks.Causal()


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfHeads(HeadSettings):
    """Softmax attention of which a token uses the first `shared` heads and the `top_k` best others.

    Its heads are weighted by their router's probabilities. With shared heads two more numbers of
    the router, which sum to one, weigh both kinds against each other. Every head is computed for
    every token; those that a token does not use count for nothing.
    """

    top_k: PositiveInt
    shared: NonNegativeInt = 0
    causal: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        HeadSettings.__post_init__(self)
        if not 1 <= self.top_k <= self.routed:
            raise ConfigError(
                f"top_k must be in 1 to heads - shared = {self.routed}, got {self.top_k}"
            )

    @property
    def routed(self) -> int:
        """Heads that a router picks from."""
        return self.heads - self.shared


class MixtureOfHeadsLayer(HeadMixer):
    """Attention with a router over its heads. A cache keeps the keys and values of all tokens."""

    def __init__(self, config: MixtureOfHeads) -> None:
        super().__init__(config)
        self.project = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        # Of the routed heads, the shared ones, and of both kinds.
        scores = config.heads + (2 if config.shared else 0)
        self.router = nn.Linear(config.width, scores, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=config.bias)

    def mix(self, qkv: Heads, x: Ragged, cache: StateSlot | None) -> Mixed:
        query, key, value = qkv
        config, keys, values, lengths = self.config, key, value, x.lengths
        if cache is not None:
            (keys, values), lengths = continue_texts((key, value), x.lengths, cache.state or ())
            cache.keep(*padded_texts((keys, values), lengths))

        def rows(text: int, queries: range, heads: slice) -> Weights:
            scores = key_lists.products(query, key, x.lengths, text, queries, heads)
            visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
            visible = visible.tril(queries.start) if config.causal else visible
            return key_lists.softmax_where(scores, visible)

        weights = partial(
            key_lists.ListedWeights, x.lengths, config.heads, rows, causal=config.causal
        )
        mask = CAUSAL if config.causal else key_lists.FULL
        return key_lists.attend_masked(query, keys, values, (x.lengths, lengths), mask), weights

    def finish(self, mixed: Float[Tensor, "n h d"], x: Ragged) -> Float[Tensor, "n h d"]:
        return mixed * self.head_weights(x.values).to(mixed.dtype).unsqueeze(-1)

    def head_weights(self, x: Float[Tensor, "n c"]) -> Float[Tensor, "n h"]:
        """The weight of every head for every token; 0 for those that it does not use."""
        config = self.config
        routed, shared, kinds = self._scores(x)
        chances = routed.softmax(-1)
        best, heads = chances.topk(config.top_k, dim=-1)
        picked = torch.zeros_like(chances).scatter(1, heads, best)
        if not config.shared:
            return picked
        both = kinds.softmax(-1)
        return torch.cat([both[:, :1] * shared.softmax(-1), both[:, 1:] * picked], dim=-1)

    def added_losses(self, x: Ragged) -> experts.RouterLosses:
        """So that tokens are spread over the routed heads."""
        routed = self._scores(x.values)[0]
        heads = routed.topk(self.config.top_k, dim=-1).indices
        visits = torch.zeros_like(routed, dtype=torch.int).scatter(1, heads, 1).sum(0)
        return experts.router_losses(routed, visits, self.config.top_k)

    def _scores(self, x: Float[Tensor, "n c"]) -> tuple[Tensor, ...]:
        config, scores = self.config, self.router(x).float()
        return scores.tensor_split([config.routed, config.heads], dim=-1)
