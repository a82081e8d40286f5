"""Mixture of heads: which heads a token uses, and the loss of the router."""

import pytest
import torch

from manyheads.errors import ConfigError
from manyheads.mixers.mixture_of_heads import MixtureOfHeads, MixtureOfHeadsLayer
from manyheads.ragged import Ragged
from tests.mixers.mixer_configs import small_model

CONFIG = MixtureOfHeads(width=12, heads=4, top_k=2, shared=1)


@torch.no_grad()
def explicit(layer: MixtureOfHeadsLayer, x: torch.Tensor) -> torch.Tensor:
    """Token by token and head by head, as the paper has it."""
    config = layer.config
    query, key, value = (
        part.unflatten(-1, (config.heads, -1)) for part in layer.project(x).chunk(3, dim=-1)
    )
    written = torch.zeros_like(x)
    columns = layer.output.weight.unflatten(1, (config.heads, -1))
    for token in range(len(x)):
        scores = layer.router(x[token])
        routed = scores[: config.heads - config.shared].softmax(0)
        best = routed.topk(config.top_k).indices.tolist()
        for head in range(config.heads):
            weight = routed[head - config.shared] if head - config.shared in best else 0.0
            if config.shared:
                both = scores[config.heads :].softmax(0)
                own = scores[config.heads - config.shared : config.heads].softmax(0)
                weight = both[0] * own[head] if head < config.shared else both[1] * weight
            seen = slice(0, token + 1) if config.causal else slice(None)
            products = key[seen, head] @ query[token, head] * config.size**-0.5
            output = products.softmax(0) @ value[seen, head]
            written[token] += weight * (columns[:, head] @ output)
    return written


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        MixtureOfHeads(width=12, heads=3, top_k=1),
        MixtureOfHeads(width=12, heads=3, top_k=2, causal=False),
    ],
)
@torch.no_grad()
def test_it_is_its_definition(config: MixtureOfHeads) -> None:
    layer = MixtureOfHeadsLayer(config)
    texts = [torch.randn(length, 12) for length in (9, 4)]
    result = layer(Ragged.from_list(texts)).to_list()
    for text, each in zip(texts, result, strict=True):
        torch.testing.assert_close(each, explicit(layer, text), atol=1e-5, rtol=1e-5)
    used = (layer.head_weights(texts[0]) > 0).sum(1)
    assert (used == config.shared + config.top_k).all()


def test_training_receives_the_losses_of_the_router() -> None:
    model = small_model(MixtureOfHeads(width=16, heads=4, top_k=2))
    batch = Ragged.from_list([torch.arange(9)])
    [losses] = model(batch).router
    # It is 1 where tokens are spread evenly, and never more than the number of heads.
    assert 0.9 < losses.balance.item() <= 4
    losses.balance.backward()
    with torch.no_grad():
        assert not model(batch).router


def test_impossible_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"top_k must be in 1 to heads - shared = 3, got 4"):
        MixtureOfHeads(width=12, heads=4, top_k=4, shared=1)
