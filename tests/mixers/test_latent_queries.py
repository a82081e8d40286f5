"""Latent queries: both attentions by their definition."""

import pytest
import torch
import torch.nn.functional as F

from manyheads.errors import ConfigError
from manyheads.mixers.latent_queries import LatentQueries, LatentQueriesLayer
from manyheads.ragged import Ragged


@torch.no_grad()
def test_it_is_its_definition() -> None:
    layer = LatentQueriesLayer(LatentQueries(width=12, heads=3, latents=5, bias=True))
    texts = [torch.randn(length, 12) for length in (7, 0, 1)]
    result = layer(Ragged.from_list(texts)).to_list()

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (3, 4)).transpose(0, 1)

    for text, each in zip(texts, result, strict=True):
        query, key, value = (by_head(part) for part in layer.project(text).chunk(3, dim=-1))
        request = by_head(layer.ask(layer.latents))
        read = (request @ key.mT / 2).softmax(-1) @ value
        states = F.layer_norm(layer.latents + layer.gather(read.transpose(0, 1).flatten(1)), (12,))
        keys, values = (by_head(part) for part in layer.tell(states).chunk(2, dim=-1))
        mixed = (query @ keys.mT / 2).softmax(-1) @ values
        expected = layer.output(mixed.transpose(0, 1).flatten(1))
        torch.testing.assert_close(each, expected, atol=1e-5, rtol=1e-5)


def test_impossible_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match="latents must be at least 1, got 0"):
        LatentQueries(width=12, heads=3, latents=0)
