"""Routing attention: clusters by definition, centroids that follow their tokens."""

import pytest
import torch
import torch.nn.functional as F

from manyheads.cache import StateCache, StateSlot
from manyheads.errors import ConfigError, InputError
from manyheads.mixers.sparse.routing_attention import RoutingAttention, RoutingAttentionLayer
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Sublayer, Tap
from tests.mixers.mixer_configs import small_model

CONFIG = RoutingAttention(width=12, heads=3, clusters=4, window=3)


def explicit(layer: RoutingAttentionLayer, x: torch.Tensor) -> torch.Tensor:
    """Token by token: the last three of the nearest centroid's tokens, in every head."""
    query, value = (part.unflatten(-1, (3, 4)) for part in layer.project(x).chunk(2, dim=-1))
    query = F.layer_norm(query, (4,))
    mixed = torch.zeros_like(value)
    for head in range(3):
        cluster = (query[:, head] @ layer.centroids[head].T).argmax(1)
        for token in range(len(x)):
            own = [t for t in range(token + 1) if cluster[t] == cluster[token]][-3:]
            weights = (query[own, head] @ query[token, head] * 0.5).softmax(0)
            mixed[token, head] = weights @ value[own, head]
    return layer.output(mixed.flatten(1))


@torch.no_grad()
def test_it_is_its_definition() -> None:
    layer = RoutingAttentionLayer(CONFIG).eval()
    texts = [torch.randn(length, 12) for length in (40, 0, 1, 7)]
    result = layer(Ragged.from_list(texts)).to_list()
    for text, each in zip(texts, result, strict=True):
        torch.testing.assert_close(each, explicit(layer, text), atol=1e-5, rtol=1e-5)


def test_centroids_follow_their_tokens_in_training_alone() -> None:
    layer = RoutingAttentionLayer(
        RoutingAttention(width=4, heads=1, clusters=2, window=4, decay=0.9)
    )
    text = torch.randn(30, 4)
    before = layer.centroids.clone()
    layer.eval()(Ragged.from_list([text]))
    assert torch.equal(layer.centroids, before)
    query = F.layer_norm(layer.project(text)[:, :4], (4,))
    cluster = (query @ before[0].T).argmax(1)
    means = [F.normalize(query[cluster == each], dim=-1).mean(0) for each in (0, 1)]
    expected = F.normalize(0.9 * before[0] + 0.1 * torch.stack(means), dim=-1)
    layer.train()(Ragged.from_list([text]))
    torch.testing.assert_close(layer.centroids[0], expected)


@torch.no_grad()
def test_the_pattern_gives_the_outputs() -> None:
    model = small_model(RoutingAttention(width=16, heads=2, clusters=3, window=4))
    sites = [Site(0, tap, Sublayer.ATTENTION) for tap in (Tap.PATTERN, Tap.VALUE, Tap.HEAD_OUTPUT)]
    record = Record(sites)
    model(Ragged.from_list([torch.arange(20), torch.arange(5)]), watch=record)
    pattern, value, output = (record[site] for site in sites)
    for text in (0, 1):
        result = torch.einsum("hts,she->the", pattern.of(text), value.of(text))
        torch.testing.assert_close(result, output.of(text), atol=1e-5, rtol=1e-5)


def test_impossible_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match="clusters must be at least 1, got 0"):
        RoutingAttention(width=12, heads=3, clusters=0, window=3)
    with pytest.raises(ConfigError, match=r"decay must be in \[0, 1\], got 1.5"):
        RoutingAttention(width=12, heads=3, clusters=2, window=3, decay=1.5)
    slot = StateSlot(StateCache())
    slot.keep(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3).long())
    with pytest.raises(InputError, match="new_cache"):
        RoutingAttentionLayer(CONFIG)(Ragged.from_list([torch.randn(2, 12)]), cache=slot)
