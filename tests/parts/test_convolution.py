"""A convolution beside a layer is that of PyTorch, over each sequence on its own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from manyheads.errors import ConfigError
from manyheads.models.decoder import DecoderConfig, check_decodes
from manyheads.models.embedding import Embedding
from manyheads.models.layer import LayerConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.convolution import Convolution, ConvolutionLayer
from manyheads.ragged import Ragged
from tests.messages import refuses
from tests.models import zoo


@pytest.mark.parametrize(("size", "groups"), [(1, 1), (3, 2), (7, 4)])
def test_texts_are_convolved_as_if_alone(size: int, groups: int) -> None:
    layer = ConvolutionLayer(Convolution(width=8, size=size, groups=groups, activation="relu"))
    texts = [torch.randn(length, 8) for length in (5, 0, 1, 9, 2)]
    x, y = Ragged.from_list(texts), torch.randn(17, 8)
    result = x.with_values(layer(x, y)).to_list()
    for text, added, values in zip(texts, x.with_values(y).to_list(), result, strict=True):
        if len(text):
            weights = layer.convolve.weight, layer.convolve.bias
            mixed = F.conv1d(text.T, *weights, padding=size // 2, groups=groups).T
            torch.testing.assert_close(values, F.layer_norm(added + mixed.relu(), (8,)))


def test_a_batch_of_nothing_gives_nothing() -> None:
    layer = ConvolutionLayer(Convolution(width=8))
    assert layer(Ragged.from_list([torch.zeros(0, 8)]), torch.zeros(0, 8)).shape == (0, 8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"size": 4}, "size must be odd, got 4"), ({"groups": 3}, "groups must divide width=8")],
)
def test_impossible_convolutions_are_refused(changes: dict[str, Any], reason: str) -> None:
    with refuses(ConfigError, reason):
        Convolution(width=8, **changes)


def test_a_cache_cannot_know_later_tokens() -> None:
    layer = zoo.layer(zoo.own(mask=zoo.Causal()))
    convolved = LayerConfig(
        attention=layer.attention,
        feedforward=layer.feedforward,
        convolution=Convolution(width=zoo.WIDTH),
    )
    config = DecoderConfig(
        embedding=Embedding(vocabulary=9, width=zoo.WIDTH),
        stack=StackConfig(width=zoo.WIDTH, layers=(convolved,)),
        readout=zoo.WORDS,
    )
    with refuses(ConfigError, "the convolution of layer 0 sees later tokens"):
        check_decodes(config.stack)


def test_a_convolution_closes_a_feedforward() -> None:
    with refuses(ConfigError, "added after a feed-forward"):
        LayerConfig(
            attention=zoo.layer().attention, feedforward=None, convolution=Convolution(width=32)
        )
